"""Meta's format: params.json, tokenizer.model, and weights in consolidated.00.pth, .01.pth and so on.

Merges the shards of a model. Names and layout are those of our model. Knows what the published params.json of each
family leave out.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.args import SETTINGS, ModelArgs, RopeScaling
from llama.checkpoint.assemble import (
    NO_SETTINGS,
    Checkpoint,
    Weight,
    assemble,
    listing,
    make_args,
    need_file,
    needed_shapes,
    read_config,
    read_tokenizer,
    require_values,
    same_bits,
    weights_of_file,
)
from llama.tokenizer import Tokenizer
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.files import check_regular
from llama.untrusted.pth import check_records, load_pth
from llama.untrusted.words import some_of

logger = logging.getLogger(__name__)

_SPLIT_BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
_REPLICATED = ("norm.weight",)
_IGNORED = {"rope.freqs"}  # a table in old files; ours is computed from rope_theta

_STATED = ("dim", "n_layers", "n_heads")  # their defaults differ in Meta's code; the others are those of ModelArgs

# Only the files of Llama 1 and 2 state no RoPE base. Their code has this one built in: precompute_freqs_cis in
# https://github.com/meta-llama/llama, llama/model.py.
_BASE = 10000.0

# No file states for how many positions the model was made. With that base, by (dim, n_layers, n_kv_heads, norm_eps):
# Llama 1 (https://arxiv.org/abs/2302.13971) and Llama 2 (https://arxiv.org/abs/2307.09288). The first files of Llama 2
# 7B chat state the norm_eps of Llama 1 by mistake, and so get its length
# (https://github.com/meta-llama/llama/issues/771).
_LENGTHS = {
    (4096, 32, 32, 1e-6): ("Llama 1 7B", 2048),
    (5120, 40, 40, 1e-6): ("Llama 1 13B", 2048),
    (6656, 60, 52, 1e-6): ("Llama 1 33B", 2048),
    (8192, 80, 64, 1e-5): ("Llama 1 65B", 2048),
    (4096, 32, 32, 1e-5): ("Llama 2 7B", 4096),
    (5120, 40, 40, 1e-5): ("Llama 2 13B", 4096),
    (8192, 80, 8, 1e-5): ("Llama 2 70B", 4096),  # Code Llama 70B Instruct and Python, too
}
# With another base, by whether the tokenizer is SentencePiece's, and that base.
_LENGTHS_BY_BASE = {
    (True, 1e6): ("Code Llama", 16384),  # https://arxiv.org/abs/2308.12950
    (False, 5e5): ("Llama 3", 8192),  # https://arxiv.org/abs/2407.21783
}
_SCALED = ("Llama 3.1 and later", 131072)  # with use_scaled_rope; the same paper


def open_meta(directory: Path, *, tokenizer_path: Path | None = None, max_seq_len: int | None = None) -> Checkpoint:
    """Return the checkpoint in a directory of Meta's.

    `tokenizer_path` replaces its tokenizer.model. `max_seq_len`: see `meta_args`.
    """
    params_path = need_file(directory, "params.json", "the sizes of the model")
    params = read_config(params_path)
    tokenizer = read_tokenizer(directory, "tokenizer.model", tokenizer_path)
    args, assumed = meta_args(params_path, params, tokenizer, max_seq_len=max_seq_len)
    shards = {path.name: read_pth(path) for path in _shard_paths(directory)}
    _check_shards(directory, args, shards)
    names = {name: name for name in needed_shapes(args)}
    first = next(iter(shards.values()))
    tensors, said = {}, list[str]()
    for name in first.keys() - _IGNORED:
        parts = [Weight.mapped(shard[name]) for shard in shards.values()]
        tensors[name] = _merge(directory, name, parts, args, said)
    return assemble(
        directory,
        args=args,
        tokenizer=tokenizer,
        tensors=tensors,
        names=names,
        says_tied=params.get("tied_head"),
        assumed=assumed,
    )


def read_pth(path: Path) -> dict[str, Tensor]:
    """Return the tensors, by name, that torch.save wrote into a file, mapped from it."""
    with refusing(path, "is not a .pth file that can be used"):
        check_regular(os.stat(path).st_mode)
        content = load_pth(path)
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__} and must contain a dict of tensors by name")
        tensors = weights_of_file(path, content)
        check_records(path, tensors.values())
        return tensors


def meta_args(
    path: Path, params: Mapping[str, Any], tokenizer: Tokenizer, *, max_seq_len: int | None = None
) -> tuple[ModelArgs, list[str]]:
    """Return the sizes in a params.json, and the values that it does not state, each with its source.

    `max_seq_len`: the length, if neither the file nor its other sizes decide it. Raises CheckpointError for a base and
    a length that nothing decides.
    """
    _check_keys(path, params)
    unstated: dict[str, tuple[Any, str]] = {}
    if "rope_theta" not in params:
        if not tokenizer.sentencepiece or params.get("use_scaled_rope"):
            raise CheckpointError(
                path,
                "lacks rope_theta. Only Llama 1 and 2 have a known base, and the tokenizer or use_scaled_rope is of a "
                'later model; add "rope_theta" to the file',
            )
        unstated["rope_theta"] = (_BASE, "Llama 1 and 2")
    if params.get("vocab_size", -1) == -1 and not tokenizer.n_words:
        raise CheckpointError(path, "lacks vocab_size, and there is no tokenizer.model that has it; add one of them")
    if params.get("vocab_size", -1) == -1:
        unstated["vocab_size"] = (tokenizer.n_words, "the tokenizer")
    args = make_args(path, **{**params, **{name: value for name, (value, _) in unstated.items()}})
    if "max_seq_len" not in params:
        model, length = _length(path, args, tokenizer, max_seq_len)
        unstated["max_seq_len"] = (length, model)
        args = replace(args, max_seq_len=length)
    if args.use_scaled_rope and isinstance(args.rope_scaling, RopeScaling):
        logger.info("%s: use_scaled_rope has no factor; using %g, as Meta does", path, args.rope_scaling.factor)
    return args, [f"{name}={value} ({source})" for name, (value, source) in unstated.items()]


def _length(path: Path, args: ModelArgs, tokenizer: Tokenizer, given: int | None) -> tuple[str, int]:
    """Return the released model of these sizes and the length that it was made for; without one the `given` length."""
    if args.use_scaled_rope:
        return _SCALED
    if tokenizer.sentencepiece and args.rope_theta == _BASE:
        found = _LENGTHS.get((args.dim, args.n_layers, args.n_kv_heads, args.norm_eps))
    else:
        found = _LENGTHS_BY_BASE.get((tokenizer.sentencepiece, args.rope_theta or 0.0))
    if found is not None:
        return found
    if given is None:
        raise CheckpointError(
            path,
            "does not state for how many positions the model was made, and no released model has these sizes; "
            'load it with max_seq_len=N (--max_seq_len N), or add "max_seq_len": N to the file',
        )
    return "as requested", given


def _check_keys(path: Path, params: Mapping[str, Any]) -> None:
    require_values(path, params, NO_SETTINGS)
    unknown = params.keys() - ({field.name for field in fields(ModelArgs)} - SETTINGS)
    if unknown:
        raise CheckpointError(path, f"has unknown keys: {some_of(unknown)}")
    if missing := [name for name in _STATED if name not in params]:
        raise CheckpointError(path, f"lacks {', '.join(missing)}")


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


def _check_shards(directory: Path, args: ModelArgs, shards: dict[str, dict[str, Tensor]]) -> None:
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
    for name, part in first.items():
        if any((shard[name].dtype, shard[name].shape) != (part.dtype, part.shape) for _, shard in others):
            raise CheckpointError(directory, f"{name} has different dtypes or shapes in the shards")


def _merge(path: Path, name: str, parts: list[Weight], args: ModelArgs, said: list[str]) -> Weight:
    """Return a whole tensor from the parts in all shards. `said`: see `_first_norm`."""
    part, shards = parts[0], len(parts)
    if shards == 1:
        return part

    def drop() -> None:
        for part in parts:
            part.drop()

    if name.endswith(_REPLICATED):
        return Weight(part.shape, lambda start, stop: _first_norm(path, name, parts, start, stop, said), drop=drop)
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


def _first_norm(path: Path, name: str, copies: Sequence[Weight], start: int, stop: int, said: list[str]) -> Tensor:
    """Return the first shard's numbers of a norm, which those of the other shards may miss by a rounding step.

    The norms of Llama 3 70B are not equal in its shards (https://github.com/AI-Hypercomputer/jetstream-pytorch/pull/101).
    The first such norm is logged and added to `said`. Raises CheckpointError for a larger difference.
    """
    first, *others = (copy.rows(start, stop) for copy in copies)
    step = torch.finfo(first.dtype).eps  # of a number from 1 to 2; relative to others it is less
    if all(torch.allclose(other.double(), first.double(), rtol=step, atol=0) for other in others):
        if not said and not all(same_bits(first, other) for other in others):
            said.append(name)
            logger.warning("%s: %s differs by a rounding step in the shards; using the first shard's norms", path, name)
        return first
    return _agreed(path, name, copies, start, stop)


def _agreed(path: Path, name: str, copies: Sequence[Weight], start: int, stop: int) -> Tensor:
    first, *others = (copy.rows(start, stop) for copy in copies)
    if not all(same_bits(first, other) for other in others):
        raise CheckpointError(path, f"{name} must be equal in several shards, and differs")
    return first
