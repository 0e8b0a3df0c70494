"""What a checkpoint is, said without loading it: format, sizes, tokenizer, memory, and all that does not fit.

Knows what the readers of this folder know, and chat formats. Prints nothing.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from llama.args import ModelArgs
from llama.checkpoint import open_checkpoint, stored_bytes
from llama.checkpoint.base import Checkpoint, read_tokenizer
from llama.checkpoint.families import FAMILIES
from llama.costs import MB, Layout, cache_bytes, parameters, weights_bytes
from llama.quant.packed import GROUP
from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat
from llama.untrusted.errors import CheckpointError

_WEIGHTS = ("*.gguf", "*.safetensors", "consolidated*.pth")
_POSITIONS = 2048  # of the cache in the table of memory, or fewer where the model takes fewer


@dataclass(frozen=True)
class Findings:
    """What was found: facts by name, the memory of each way to load it, remarks, and why it would not load.

    memory: (dtype, quantize, bytes of the weights, bytes of a cache of one text of `positions`).
    """

    facts: dict[str, str] = field(default_factory=dict)
    memory: list[tuple[str, str, int, int]] = field(default_factory=list)
    positions: int = 0
    remarks: list[str] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)


def examine(path: Path, *, tokenizer_path: Path | None = None) -> Findings:
    """Return what a checkpoint is; what is wrong with it is among the findings and raises nothing."""
    try:
        checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_path)
    except CheckpointError as error:
        others = [other for other in _wrong_tokenizers(path) if other != str(error)]
        return Findings(obstacles=[str(error), *others])
    return Findings(
        facts=dict(_facts(checkpoint)),
        memory=list(_memory(checkpoint)),
        positions=_positions(checkpoint),
        remarks=list(_remarks(checkpoint)),
    )


def _wrong_tokenizers(path: Path) -> Iterator[str]:
    """Yield what is wrong with the tokenizers of a folder, which an earlier error may have hidden."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            try:
                read_tokenizer(path / name)
            except CheckpointError as error:
                yield str(error)


def _facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    args, path = checkpoint.args, checkpoint.path
    files = [path] if path.is_file() else sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    yield "format", _format(path)
    yield (
        "weights",
        f"{len(files)} file{'s' * (len(files) > 1)}, {sum(file.stat().st_size for file in files) / MB:,.1f} MB",
    )
    yield "family", checkpoint.family
    yield "parameters", f"{parameters(args):,}"
    yield "layers", f"{args.n_layers} of width {args.dim}, MLP {args.ffn_dim}"
    yield "heads", f"{args.n_heads} of {args.head_dim} numbers, {args.n_kv_heads} for keys and values"
    yield "attention", _attention(args)
    yield "head", "is the embedding (tied)" if args.tied_head else "its own matrix"
    yield "RoPE", _rope(args)
    yield (
        "rows of q and k",
        "half-split, brought into our order" if _half_split(checkpoint) else "pair by pair, as ours",
    )
    yield "longest text", f"{args.max_seq_len:,} positions"
    kinds = Counter(
        _kind(checkpoint, name) for name in checkpoint.tensors if name != "output.weight" or not args.tied_head
    )
    yield "tensors", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    yield from _tokenizer_facts(checkpoint.tokenizer, args)


def _format(path: Path) -> str:
    if path.is_file():
        return "GGUF"
    return "Meta's .pth" if (path / "params.json").is_file() else "Hugging Face's safetensors"


def _attention(args: ModelArgs) -> str:
    kind = "grouped-query" if args.n_kv_heads < args.n_heads else "one key head to each query head"
    added = [("biases of q, k and v", args.attention_bias), ("norms of q and k", args.qk_norm)]
    return ", ".join([kind, *(name for name, there in added if there)])


def _rope(args: ModelArgs) -> str:
    if args.rope_scaling is None:
        return f"base {args.rope_theta:g}, not scaled"
    if isinstance(args.rope_scaling, tuple):
        return f"base {args.rope_theta:g}, a divisor for each of {len(args.rope_scaling)} frequencies"
    values = ", ".join(f"{name} {value:g}" for name, value in asdict(args.rope_scaling).items())
    return f"base {args.rope_theta:g}, {type(args.rope_scaling).__name__}: {values}"


def _half_split(checkpoint: Checkpoint) -> bool:
    if checkpoint.path.is_file():
        return FAMILIES[checkpoint.family].half_split
    return not (checkpoint.path / "params.json").is_file()


def _kind(checkpoint: Checkpoint, name: str) -> str:
    weight = checkpoint.tensors[name]
    return str(weight.rows(0, 1).dtype).removeprefix("torch.") if weight.stored is None else weight.stored.kind


def _tokenizer_facts(tokenizer: Tokenizer, args: ModelArgs) -> Iterator[tuple[str, str]]:
    unused = args.vocab_size - tokenizer.n_words
    filled = f", and {unused} rows of the embedding beyond it" if unused else ""
    yield "tokenizer", f"{tokenizer.n_words:,} tokens, {len(tokenizer.special_tokens)} of them special{filled}"
    texts = {id: text for text, id in tokenizer.special_tokens.items()}

    def named(id: int | None) -> str:
        return "none" if id is None else f"{texts.get(id, '?')} ({id})"

    yield "beginning of a text", named(tokenizer.bos_id) + (", put before each" if tokenizer.adds_bos else "")
    yield "ends of a text", ", ".join(map(named, tokenizer.stop_tokens)) or "none"
    try:
        yield "chat format", ChatFormat(tokenizer).name
    except ValueError as error:
        yield "chat format", f"none: {error}"


def _memory(checkpoint: Checkpoint) -> Iterator[tuple[str, str, int, int]]:
    """Yield what each way to load it takes; of several ranks each takes its share."""
    args, positions = checkpoint.args, _positions(checkpoint)
    for dtype, quantize, layout in ways_to_load(checkpoint):
        weights = weights_bytes(args, itemsize=dtype.itemsize, quantize=layout)
        cache = cache_bytes(args, rows=1, length=positions, itemsize=dtype.itemsize)
        yield {4: "fp32", 2: "bf16"}[dtype.itemsize], quantize, weights, cache


def ways_to_load(checkpoint: Checkpoint) -> list[tuple[torch.dtype, str, Layout]]:
    """Return the dtype, the word for `quantize` and the layout of the weights of each way to load it."""
    args = checkpoint.args
    ways: list[tuple[torch.dtype, str, Layout]] = [(dtype, "", None) for dtype in (torch.float32, torch.bfloat16)]
    if not (args.dim % GROUP or args.ffn_dim % GROUP or args.n_heads * args.head_dim % GROUP):
        ways += [(torch.float32, quantize, quantize) for quantize in ("int8", "int4")]
    if any(weight.stored for weight in checkpoint.tensors.values()):
        ways.append((torch.float32, "stored", stored_bytes(checkpoint, torch.float32)))
    return ways


def _positions(checkpoint: Checkpoint) -> int:
    return min(_POSITIONS, checkpoint.whole_texts().max_seq_len)


def _remarks(checkpoint: Checkpoint) -> Iterator[str]:
    longest = checkpoint.whole_texts().max_seq_len
    if longest < checkpoint.args.max_seq_len:
        yield (
            f"in longer texts its attention sees the last {longest:,} positions alone (sliding_window), which is not "
            f"supported: it loads with --max_seq_len {longest}"
        )
