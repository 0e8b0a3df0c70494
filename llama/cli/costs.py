"""The command that prints the bytes of a checkpoint's KV cache.

Reads only the headers of a checkpoint. The arithmetic is that of llama/costs/__init__.py.
"""

from collections.abc import Iterator

from llama.api import pick_device, pick_dtype
from llama.args import ModelArgs
from llama.checkpoint import Checkpoint, open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.checkpoint.doctor import ways_to_load
from llama.costs import MB, cache_bytes, kv_bytes, largest_batch, largest_length, size, table, weights_bytes
from llama.host import console
from llama.host.machine import available_memory, dtype_name

_MOST = 1e9  # the limit of the flags
_BATCHES = (1, 8, 16, 64)
_FORMULA = "2 x layers x kv_heads x head_dim x positions x rows x bytes"


def main(
    *,
    ckpt_dir: str = "demo",
    tokenizer_path: str | None = None,
    memory_gb: float | None = None,
    itemsize: int | None = None,
) -> int:
    """Print the bytes of the KV cache of a checkpoint, and which sizes fit into memory.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo"; no weights are read.
        tokenizer_path: The tokenizer, if it is not beside the weights.
        memory_gb: The memory to fill, in units of 2^30 bytes; by default the free memory.
        itemsize: The bytes of a number, 2 for fp16 and bf16, 4 for fp32; by default those of the dtype that load picks
            on this machine.
    """
    if memory_gb is not None and not 0 < memory_gb <= _MOST:
        raise ValueError(f"memory_gb={memory_gb} must be above 0, and at most {_MOST:g}")
    if itemsize is not None and not 0 < itemsize <= _MOST:
        raise ValueError(f"itemsize={itemsize} must be above 0, and at most {_MOST:g}")
    device = pick_device("auto")
    path = demo_model_path() if ckpt_dir == "demo" else ckpt_dir
    checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_path)
    memory = available_memory(device) if memory_gb is None else int(memory_gb * 1024 * MB)
    itemsize = itemsize or pick_dtype("auto", device).itemsize
    console.put(formula(ckpt_dir, checkpoint.args, itemsize))
    console.put(cache_table(checkpoint.whole_texts(), itemsize))
    if memory is not None:
        owner = "this machine" if device.type == "cpu" else device
        left = f" that {owner} has left" if memory_gb is None else ""
        title = f"Sizes that fit into the {size(memory)}{left}, without activations"
        console.put(ways_table(checkpoint, memory, title))
    return 0


def formula(name: str, args: ModelArgs, itemsize: int) -> str:
    """Return the formula of the cache's bytes, with names and with a model's numbers."""
    sizes = (args.n_layers, args.n_kv_heads, args.head_dim)
    rows = f"2 x {' x '.join(map(str, sizes))} x positions x rows x {itemsize}"
    whole = f"{kv_bytes(*sizes, positions=1, itemsize=itemsize):,} bytes x positions x rows"
    return f"The KV cache of {name} takes\n\n    {_FORMULA}\n  = {rows}\n  = {whole}\n"


def cache_table(args: ModelArgs, itemsize: int) -> str:
    """Return the bytes of a model's cache by context and batch."""
    contexts = [*(n for n in (256, 1024, 4096, 16384, 65536) if n < args.max_seq_len), args.max_seq_len]
    rows = [
        [f"{n:,}", *(size(cache_bytes(args, rows=batch, length=n, itemsize=itemsize)) for batch in _BATCHES)]
        for n in contexts
    ]
    heads = ["positions", *(f"{batch} row{'s' * (batch > 1)}" for batch in _BATCHES)]
    return table(f"KV cache in {8 * itemsize}-bit numbers", heads, rows)


def ways_table(checkpoint: Checkpoint, memory: int, title: str) -> str:
    """Return for each dtype and quantisation of a checkpoint the rows and lengths that fit into `memory` bytes."""
    args = checkpoint.whole_texts()
    length, batches = min(2048, args.max_seq_len), (1, 8)

    def lines() -> Iterator[list[str]]:
        for dtype, quantize, layout in ways_to_load(checkpoint):
            fits = {"memory": memory, "itemsize": dtype.itemsize}
            yield [
                dtype_name(dtype),
                quantize or "-",
                size(weights_bytes(args, itemsize=dtype.itemsize, quantize=layout)),
                f"{largest_batch(args, **fits, length=length, quantize=layout):,}",
                *(f"{largest_length(args, **fits, rows=rows, quantize=layout):,}" for rows in batches),
            ]

    longest = [f"longest text of {rows} row{'s' * (rows > 1)}" for rows in batches]
    return table(title, ["dtype", "quantize", "weights", f"rows of {length:,}", *longest], list(lines()))
