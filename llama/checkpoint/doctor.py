"""Describe a checkpoint without loading it: format, sizes, tokenizer and memory. Prints nothing."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from llama.args import ModelArgs
from llama.checkpoint import stored_bytes
from llama.checkpoint.assemble import Checkpoint, Weight
from llama.costs import MB, Layout, cache_bytes, parameters, weights_bytes
from llama.quant.packed import GROUP
from llama.tokenizer import MissingTokenizer, Tokenizer
from llama.tokenizer.chat import ChatFormat

_WEIGHTS = ("*.gguf", "*.safetensors", "consolidated*.pth")


def facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the checkpoint is, by the name of each fact."""
    args, path = checkpoint.args, checkpoint.path
    files = [path] if path.is_file() else sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    megabytes = sum(file.stat().st_size for file in files) / MB
    own = {name: weight for name, weight in checkpoint.tensors.items() if name != "output.weight" or not args.tied_head}
    types = Counter(map(_type, own.values()))
    return {
        "format": _format(path),
        "weights": f"{len(files)} file{'s' * (len(files) > 1)}, {megabytes:,.1f} MB",
        "family": checkpoint.family,
        "parameters": f"{parameters(args):,}",
        "layers": f"{args.n_layers} of width {args.dim}, MLP {args.ffn_dim}",
        "heads": f"{args.n_heads} of {args.head_dim} numbers, {args.n_kv_heads} for keys and values",
        "attention": _attention(args),
        "norms": f"RMSNorm with epsilon {args.norm_eps:g}",
        "head": "is the embedding (tied)" if args.tied_head else "its own matrix",
        "RoPE": _rope(args),
        "longest text": f"{args.max_seq_len:,} positions",
        "not in the files": ", ".join(checkpoint.assumed) or "nothing that is needed",
        "tensors": ", ".join(f"{count} {kind}" for kind, count in sorted(types.items())),
        **_tokenizer_facts(checkpoint.tokenizer, args),
    }


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


def _type(weight: Weight) -> str:
    return str(weight.rows(0, 1).dtype).removeprefix("torch.") if weight.stored is None else weight.stored.kind


def _tokenizer_facts(tokenizer: Tokenizer, args: ModelArgs) -> dict[str, str]:
    if isinstance(tokenizer, MissingTokenizer):
        return {"tokenizer": "none, so the model works on ids alone"}
    unused = args.vocab_size - tokenizer.n_words
    padding = f", and {unused} rows of the embedding beyond it" if unused else ""
    texts = {id: text for text, id in tokenizer.special_tokens.items()}

    def named(id: int | None) -> str:
        return "none" if id is None else f"{texts.get(id, '?')} ({id})"

    try:
        chat = ChatFormat(tokenizer).name
    except ValueError as error:
        chat = f"none: {error}"
    return {
        "tokenizer": f"{tokenizer.n_words:,} tokens, {len(tokenizer.special_tokens)} of them special{padding}",
        "beginning of a text": named(tokenizer.bos_id) + (", added to each text" if tokenizer.adds_bos else ""),
        "ends of a text": ", ".join(map(named, tokenizer.stop_tokens)) or "none",
        "chat format": chat,
    }


def memory(checkpoint: Checkpoint, *, positions: int) -> Iterator[tuple[torch.dtype, str, int, int]]:
    """Yield the memory of each mode of loading, for one process.

    Each is (dtype, quantize, bytes of the weights, bytes of the cache of one text of `positions` tokens).
    """
    args = checkpoint.args
    for dtype, quantize, layout in ways_to_load(checkpoint):
        weights = weights_bytes(args, itemsize=dtype.itemsize, quantize=layout)
        cache = cache_bytes(args, rows=1, length=positions, itemsize=dtype.itemsize)
        yield dtype, quantize, weights, cache


def ways_to_load(checkpoint: Checkpoint) -> list[tuple[torch.dtype, str, Layout]]:
    """Return the dtype, the value of `quantize` and the layout of the weights of each mode of loading."""
    args = checkpoint.args
    ways: list[tuple[torch.dtype, str, Layout]] = [(dtype, "", None) for dtype in (torch.float32, torch.bfloat16)]
    if not (args.dim % GROUP or args.ffn_dim % GROUP or args.n_heads * args.head_dim % GROUP):
        ways += [(torch.float32, quantize, quantize) for quantize in ("int8", "int4")]
    if checkpoint.quantised:
        ways.append((torch.float32, "stored", stored_bytes(checkpoint, torch.float32)))
    return ways
