"""The command that prints the bytes of a KV cache: of a checkpoint, or of Meta's released models.

Reads only the headers of a checkpoint. The arithmetic is that of llama/costs/__init__.py.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llama.cli import console
from llama.costs import (
    MB,
    RELEASED,
    cache_bytes,
    kv_bytes,
    largest_batch,
    largest_length,
    parameters,
    size,
    table,
    weights_bytes,
)

if TYPE_CHECKING:
    from llama.args import ModelArgs
    from llama.checkpoint import Checkpoint

_MOST = 1e9  # the limit of the flags
_BATCHES = (1, 8, 16, 64)
_FORMULA = "2 x layers x kv_heads x head_dim x positions x rows x bytes"


def main(
    *,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    memory_gb: float | None = None,
    itemsize: int | None = None,
) -> int:
    """Print the bytes of the KV cache of a checkpoint, or of Meta's released models, and which sizes fit into memory.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo"; no weights are read.
        tokenizer_path: The tokenizer, if it is not beside the weights.
        memory_gb: The memory to fill, in units of 2^30 bytes; by default the free memory, and 24 for released models.
        itemsize: The bytes of a number, 2 for fp16 and bf16, 4 for fp32; by default those of the dtype that load picks
            on this machine, and 2 for released models.
    """
    if memory_gb is not None and not 0 < memory_gb <= _MOST:
        raise ValueError(f"memory_gb={memory_gb} must be above 0, and at most {_MOST:g}")
    if itemsize is not None and not 0 < itemsize <= _MOST:
        raise ValueError(f"itemsize={itemsize} must be above 0, and at most {_MOST:g}")
    if ckpt_dir is None:
        if tokenizer_path is not None:
            raise ValueError("--tokenizer_path goes with --ckpt_dir; give both, or none")
        console.put(released_table(itemsize or 2))
        console.put(fitting_table(_bytes(memory_gb or 24.0), itemsize or 2))
        return 0
    from llama.api import pick_device, pick_dtype  # here, so that the tables of released models need no torch
    from llama.checkpoint import open_checkpoint
    from llama.checkpoint.demo import demo_model_path
    from llama.host.machine import available_memory

    device = pick_device("auto")
    path = demo_model_path() if ckpt_dir == "demo" else ckpt_dir
    checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_path)
    memory = available_memory(device) if memory_gb is None else _bytes(memory_gb)
    itemsize = itemsize or pick_dtype("auto", device).itemsize
    console.put(formula(ckpt_dir, checkpoint.args, itemsize))
    console.put(cache_table(checkpoint.whole_texts(), itemsize))
    if memory is not None:
        owner = "this machine" if device.type == "cpu" else device
        left = f" that {owner} has left" if memory_gb is None else ""
        title = f"Sizes that fit into the {size(memory)}{left}, without activations"
        console.put(ways_table(checkpoint, memory, title))
    return 0


def _bytes(gigabytes: float) -> int:
    return int(gigabytes * 1024 * MB)


def formula(name: str, args: "ModelArgs", itemsize: int) -> str:
    """Return the formula of the cache's bytes, with names and with a model's numbers."""
    sizes = (args.n_layers, args.n_kv_heads, args.head_dim)
    rows = f"2 x {' x '.join(map(str, sizes))} x positions x rows x {itemsize}"
    whole = f"{kv_bytes(*sizes, positions=1, itemsize=itemsize):,} bytes x positions x rows"
    return f"The KV cache of {name} takes\n\n    {_FORMULA}\n  = {rows}\n  = {whole}\n"


def cache_table(args: "ModelArgs", itemsize: int) -> str:
    """Return the bytes of a model's cache by context and batch."""
    contexts = [*(n for n in (256, 1024, 4096, 16384, 65536) if n < args.max_seq_len), args.max_seq_len]
    rows = [
        [f"{n:,}", *(size(cache_bytes(args, rows=batch, length=n, itemsize=itemsize)) for batch in _BATCHES)]
        for n in contexts
    ]
    heads = ["positions", *(f"{batch} row{'s' * (batch > 1)}" for batch in _BATCHES)]
    return table(f"KV cache in {8 * itemsize}-bit numbers", heads, rows)


def ways_table(checkpoint: "Checkpoint", memory: int, title: str) -> str:
    """Return for each dtype and quantisation of a checkpoint the rows and lengths that fit into `memory` bytes."""
    from llama.checkpoint.doctor import ways_to_load
    from llama.host.machine import dtype_name

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


def released_table(itemsize: int) -> str:
    """Return the bytes of the cache of one row of each released model."""
    lengths = (1024, 2048, 4096, 8192, 16384, 32768)
    rows = [
        [
            f"{name} ({args.n_layers}, {args.n_kv_heads}, {args.head_dim})",
            f"{cache_bytes(args, rows=1, length=1, itemsize=itemsize):,}",
            *(size(cache_bytes(args, rows=1, length=length, itemsize=itemsize)) for length in lengths),
        ]
        for name, args in RELEASED.items()
    ]
    heads = ["model (layers, KV heads, head size)", "bytes a token", *(f"{length} tokens" for length in lengths)]
    return table(f"KV cache of one row in {8 * itemsize}-bit numbers", heads, rows)


def fitting_table(memory: int, itemsize: int) -> str:
    """Return the rows of 288 and of 8192 positions that fit into `memory` bytes, and the length of 1, 8, 16 rows."""
    batches, lengths = (1, 8, 16), (288, 8192)
    rows = [
        [
            name,
            size(parameters(args) * itemsize),
            *(f"{largest_batch(args, memory=memory, length=length, itemsize=itemsize):,}" for length in lengths),
            *(f"{largest_length(args, memory=memory, rows=batch, itemsize=itemsize):,}" for batch in batches),
        ]
        for name, args in RELEASED.items()
    ]
    heads = ["model", "weights", *(f"rows of {n}" for n in lengths), *(f"length of {n} rows" for n in batches)]
    return table(f"Sizes that fit into {size(memory)} in {8 * itemsize}-bit numbers, without activations", heads, rows)
