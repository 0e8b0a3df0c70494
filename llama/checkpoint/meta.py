"""Meta's format: params.json, tokenizer.model, and weights in consolidated.00.pth, .01.pth and so on.

Merges the shards of a model; `pth` reads one. Names and layout are those of our model.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs, RopeScaling
from llama.checkpoint.base import (
    Checkpoint,
    Weight,
    assemble,
    listing,
    make_args,
    need_file,
    needed_shapes,
    read_config,
    read_tokenizer,
    same_bits,
)
from llama.tokenizer import Tokenizer
from llama.untrusted.errors import CheckpointError
from llama.untrusted.mapped import MappedFile
from llama.untrusted.pth import TensorPlace, read_pth_header
from llama.untrusted.words import some_of

logger = logging.getLogger(__name__)

_SPLIT_BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
_REPLICATED = ("norm.weight",)
_IGNORED = {"rope.freqs"}  # a table in old files; ours is computed from rope_theta


def open_meta(directory: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Return the checkpoint in a directory of Meta's. `tokenizer_path` replaces its tokenizer.model."""
    params_path = need_file(directory, "params.json", "the sizes of the model")
    params = read_config(params_path)
    tokenizer = read_tokenizer(tokenizer_path or need_file(directory, "tokenizer.model", "the vocabulary"))
    args = _args(params_path, params, tokenizer)
    mapped = {path.name: MappedFile(path) for path in _shard_paths(directory)}
    shards = {name: read_pth_header(file) for name, file in mapped.items()}
    _check_shards(directory, args, shards)
    names = {name: name for name in needed_shapes(args)}
    first = next(iter(shards.values()))
    tensors = {}
    for name in first.keys() - _IGNORED:
        places = [(mapped[file], shard[name]) for file, shard in shards.items()]
        parts = [Weight.mapped(file, place.start, place.shape, place.dtype) for file, place in places]
        tensors[name] = _merge(directory, name, parts, args)
    return assemble(
        directory,
        args=args,
        tokenizer=tokenizer,
        tensors=tensors,
        names=names,
        says_tied=params.get("tied_head"),
    )


def _args(path: Path, params: dict[str, Any], tokenizer: Tokenizer) -> ModelArgs:
    unknown = params.keys() - {field.name for field in fields(ModelArgs)}
    if unknown:
        raise CheckpointError(path, f"has unknown keys: {some_of(unknown)}")
    for name in ("use_scaled_rope", "tied_head"):
        if not isinstance(params.get(name, False), bool):
            raise CheckpointError(path, f"{name}={params[name]!r} must be true or false")
    if params.get("vocab_size", -1) == -1:
        params = params | {"vocab_size": tokenizer.n_words}
    scaled = params.get("use_scaled_rope", False)
    # Meta's files have no key for the longest text: 8192 tokens for Llama 3, 131072 from 3.1 on.
    args = make_args(path, **({"max_seq_len": 131072 if scaled else 8192} | params))
    if scaled and isinstance(args.rope_scaling, RopeScaling):
        logger.info("%s: use_scaled_rope has no factor; using %g, as Meta does", path, args.rope_scaling.factor)
    return args


def _shard_paths(directory: Path) -> list[Path]:
    found = sorted(directory.glob("consolidated*.pth"))
    wanted = [f"consolidated.{i:02d}.pth" for i in range(len(found))]
    if not found or [path.name for path in found] != wanted:
        raise CheckpointError(
            directory,
            f"needs weights named {some_of(wanted) or 'consolidated.00.pth'} without a gap; "
            f"found {some_of([path.name for path in found]) or listing(directory)}",
        )
    return found


def _check_shards(directory: Path, args: ModelArgs, shards: dict[str, dict[str, TensorPlace]]) -> None:
    """Reject shards with different names, dtypes or shapes, and a number of shards that does not fit the shapes."""
    (first_name, first), *others = shards.items()
    for name, shard in others:
        odd = shard.keys() ^ first.keys()
        if odd:
            raise CheckpointError(directory, f"only one of {first_name} and {name} has {some_of(odd)}")
    wq = first.get("layers.0.attention.wq.weight")
    rows = args.n_heads * args.head_dim
    if wq is not None and rows % wq.shape[0] == 0 and rows // wq.shape[0] != len(shards):
        raise CheckpointError(
            directory,
            f"the shapes need {rows // wq.shape[0]} shards, consolidated.00.pth and so on; found {some_of(shards)}",
        )
    for name, place in first.items():
        if any((shard[name].dtype, shard[name].shape) != (place.dtype, place.shape) for _, shard in others):
            raise CheckpointError(directory, f"{name} has different dtypes or shapes in the shards")


def _merge(path: Path, name: str, parts: list[Weight], args: ModelArgs) -> Weight:
    """Return a whole tensor from the parts in all shards."""
    part, shards = parts[0], len(parts)
    if shards == 1:
        return part

    def drop() -> None:
        for part in parts:
            part.drop()

    if name.endswith(_REPLICATED):
        return Weight(part.shape, lambda start, stop: _agreed(path, name, parts, start, stop), drop=drop)
    # Llama 3 splits the embedding by rows, Llama 2 by columns.
    by_columns = name.endswith(_SPLIT_BY_COLUMNS) or (name == "tok_embeddings.weight" and part.shape[-1] != args.dim)
    if by_columns and len(part.shape) == 2:  # check_shapes rejects other shapes
        return Weight(
            (part.shape[0], part.shape[-1] * shards),
            lambda start, stop: torch.cat([part.rows(start, stop) for part in parts], dim=1),
            drop=drop,
        )
    copies = 1
    length = part.shape[0]
    if name.endswith(("wk.weight", "wv.weight")) and shards > args.n_kv_heads and length == args.head_dim:
        copies = shards // args.n_kv_heads  # more shards than heads: neighbours have the same head
    groups = [parts[i : i + copies] for i in range(0, shards, copies)]

    def rows(start: int, stop: int) -> Tensor:
        pieces = [
            _agreed(path, name, groups[i], max(start - i * length, 0), min(stop - i * length, length))
            for i in range(start // length, (stop - 1) // length + 1)
        ]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    return Weight((length * len(groups), *part.shape[1:]), rows, drop=drop)


def _agreed(path: Path, name: str, copies: Sequence[Weight], start: int, stop: int) -> Tensor:
    first, *others = (copy.rows(start, stop) for copy in copies)
    if not all(same_bits(first, other) for other in others):
        raise CheckpointError(path, f"{name} must be equal in several shards, and differs")
    return first
