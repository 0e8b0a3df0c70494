"""What a KV cache takes, printed: python -m llama.costs [--ckpt_dir X]; without it, of well-known models.

Of a checkpoint the headers are read, no weights. The arithmetic is that of llama/costs/__init__.py.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llama.cli import console
from llama.costs import (
    CLASSICS,
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

_MOST = 1e9  # of what a person may ask for
_BATCHES = (1, 8, 16, 64)
_FORMULA = "2 x layers x kv_heads x head_dim x positions x rows x bytes"


def main(
    *,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    memory_gb: float | None = None,
    itemsize: int | None = None,
) -> int:
    """Print what the KV cache of a checkpoint takes, or of well-known models, and what fits into a memory.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo"; no weights are read.
        tokenizer_path: The tokenizer, where it does not stand beside the weights.
        memory_gb: The memory to fill, in units of 2^30 bytes; by default what this machine has left, and for well-known
            models 24.
        itemsize: The bytes of a number, 2 for fp16 and bf16, 4 for fp32; of a checkpoint by default those that it would
            be loaded in here, and of well-known models 2.
    """
    if memory_gb is not None and not 0 < memory_gb <= _MOST:
        raise ValueError(f"memory_gb={memory_gb} must be above 0, and at most {_MOST:g}")
    if itemsize is not None and not 0 < itemsize <= _MOST:
        raise ValueError(f"itemsize={itemsize} must be above 0, and at most {_MOST:g}")
    if ckpt_dir is None:
        if tokenizer_path is not None:
            raise ValueError("--tokenizer_path goes with --ckpt_dir; give both, or none")
        console.put(classic_tables(itemsize or 2))
        console.put(fitting_table(_bytes(memory_gb or 24.0), itemsize or 2))
        return 0
    from llama.api import pick_device, pick_dtype  # here, so that the tables of well-known models need no torch
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
        left = f", which {owner} has left" if memory_gb is None else ""
        console.put(ways_table(checkpoint, memory, f"What fits into {size(memory)}{left}, activations apart"))
    return 0


def _bytes(gigabytes: float) -> int:
    return int(gigabytes * 1024 * MB)


def formula(name: str, args: "ModelArgs", itemsize: int) -> str:
    """Return the formula of the cache's bytes, and what it is with a model's numbers."""
    sizes = (args.n_layers, args.n_kv_heads, args.head_dim)
    rows = f"2 x {' x '.join(map(str, sizes))} x positions x rows x {itemsize}"
    whole = f"{kv_bytes(*sizes, positions=1, itemsize=itemsize):,} bytes x positions x rows"
    return f"The KV cache of {name} takes\n\n    {_FORMULA}\n  = {rows}\n  = {whole}\n"


def cache_table(args: "ModelArgs", itemsize: int) -> str:
    """Return what a model's cache takes, over context and batch."""
    contexts = [*(n for n in (256, 1024, 4096, 16384, 65536) if n < args.max_seq_len), args.max_seq_len]
    rows = [
        [f"{n:,}", *(size(cache_bytes(args, rows=batch, length=n, itemsize=itemsize)) for batch in _BATCHES)]
        for n in contexts
    ]
    heads = ["positions", *(f"{batch} row{'s' * (batch > 1)}" for batch in _BATCHES)]
    return table(f"KV cache in {8 * itemsize}-bit numbers", heads, rows)


def ways_table(checkpoint: "Checkpoint", memory: int, title: str) -> str:
    """Return of each way to load a checkpoint what fits into `memory` bytes: rows, and how long they become."""
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


def classic_tables(itemsize: int) -> str:
    """Return what the cache of one row takes in well-known models, in numbers of `itemsize` bytes."""
    short, long = (512, 2048, 8192), (1024, 2048, 4096, 8192, 16384, 32768)
    small = [name for name in CLASSICS if name != "GPT-3"]
    llamas = {name: (args.n_layers, args.n_kv_heads, args.head_dim) for name, args in RELEASED.items()}

    def rows(shapes: dict[str, tuple[int, int, int]], lengths: Sequence[int]) -> list[list[str]]:
        return [
            [
                f"{name} ({', '.join(map(str, shape))})",
                f"{kv_bytes(*shape, positions=1, itemsize=itemsize):,}",
                *(size(kv_bytes(*shape, positions=length, itemsize=itemsize)) for length in lengths),
            ]
            for name, shape in shapes.items()
        ]

    def columns(lengths: Sequence[int]) -> list[str]:
        return ["model (layers, KV heads, head size)", "bytes a token", *(f"{length} tokens" for length in lengths)]

    what = f"one row, {8 * itemsize}-bit numbers"
    return "\n".join(
        [
            table(f"KV cache, {what}", columns(short), rows({name: CLASSICS[name] for name in small}, short)),
            table(f"KV cache of GPT-3, {what}", columns(long), rows({"GPT-3": CLASSICS["GPT-3"]}, long)),
            table(f"KV cache of every Llama 3.x, {what}", columns(long), rows(llamas, long)),
        ]
    )


def fitting_table(memory: int, itemsize: int) -> str:
    """Return what fits into `memory` bytes: the rows of 288 and of 8192 positions, and the length of 1, 8, 16 rows."""
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
    return table(f"What fits into {size(memory)} in {8 * itemsize}-bit numbers, activations apart", heads, rows)
