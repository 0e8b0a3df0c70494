"""Meta's own format: params.json, tokenizer.model, and weights in consolidated.00.pth, .01.pth and so on.

Knows how Meta cuts a model into shards, and how little of a pickle is to be trusted. The names and the layout are
those of our model, so nothing is translated.
"""

import logging
import stat
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs, RopeScaling
from llama.checkpoint.base import (
    Checkpoint,
    CheckpointError,
    Weight,
    assemble,
    listing,
    make_args,
    need_file,
    needed_shapes,
    read_json,
    read_tokenizer,
    refusing,
    same_bits,
)
from llama.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SPLIT_BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
_REPLICATED = ("norm.weight",)
_DROPPED = {"rope.freqs"}  # a table that old files carry; ours is made from rope_theta
_MAY_BE_ONE = {"tok_embeddings.weight", "output.weight"}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# The check that torch.load makes of a pickle is not safe to run in two threads (pytorch/pytorch#194750).
_ONE_AT_A_TIME = threading.Lock()


def open_meta(directory: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Open a directory as Meta distributes it. `tokenizer_path`: where its tokenizer.model is, if not beside."""
    params_path = need_file(directory, "params.json", "the sizes of the model")
    params = read_json(params_path)
    tokenizer = read_tokenizer(tokenizer_path or need_file(directory, "tokenizer.model", "the vocabulary"))
    args = _args(params_path, params, tokenizer)
    shards = {path.name: _read_shard(path) for path in _shard_paths(directory)}
    _check_shards(directory, args, shards)
    names = {name: name for name in needed_shapes(args)}
    first = next(iter(shards.values()))
    tensors = {
        name: _merge(directory, name, [shard[name] for shard in shards.values()], args)
        for name in first
        if name not in _DROPPED
    }
    return assemble(
        directory,
        args=args,
        tokenizer=tokenizer,
        tensors=tensors,
        names=names,
        says_tied=params.get("tied_head"),
    )


def _args(path: Path, params: dict[str, Any], tokenizer: Tokenizer) -> ModelArgs:
    unknown = sorted(params.keys() - {field.name for field in fields(ModelArgs)})
    if unknown:
        raise CheckpointError(path, f"holds keys that this library does not know: {', '.join(unknown)}")
    for name in ("use_scaled_rope", "tied_head"):
        if not isinstance(params.get(name, False), bool):
            raise CheckpointError(path, f"{name}={params[name]!r} must be true or false")
    if params.get("vocab_size", -1) == -1:
        params = params | {"vocab_size": tokenizer.n_words}
    scaled = params.get("use_scaled_rope", False)
    # Meta's files do not say how long a text may be: 8192 for Llama 3, 131072 from 3.1 on.
    args = make_args(path, **({"max_seq_len": 131072 if scaled else 8192} | params))
    if scaled and isinstance(args.rope_scaling, RopeScaling):
        logger.info("%s: use_scaled_rope does not say by how much; factor %g taken", path, args.rope_scaling.factor)
    return args


def _shard_paths(directory: Path) -> list[Path]:
    found = sorted(directory.glob("consolidated*.pth"))
    wanted = [f"consolidated.{i:02d}.pth" for i in range(len(found))]
    if not found or [path.name for path in found] != wanted:
        raise CheckpointError(
            directory,
            f"needs weights named {', '.join(wanted) or 'consolidated.00.pth'} without a gap; "
            f"found {', '.join(path.name for path in found) or listing(directory)}",
        )
    return found


def _read_shard(path: Path) -> dict[str, Tensor]:
    with refusing(path, "is not a .pth file that can be used"):
        records = _check_zip(path)
        with _ONE_AT_A_TIME:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_content(content, records)
    return dict(content)


def _check_zip(path: Path) -> list[int]:
    """Return the sizes of the tensors' records, of an archive that holds no more than its file has bytes."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    if not zipfile.is_zipfile(path):
        raise ValueError("not a zip archive (truncated, or saved by a torch older than 1.6)")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(names) > 100_000 or len(set(names)) != len(names):
        raise ValueError("the archive repeats a name or holds more than 100000")
    for entry in entries:
        if ".." in entry.filename.split("/") or entry.filename.startswith("/"):
            raise ValueError(f"the archive holds {entry.filename!r}, a path that leads out of it")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename!r} is compressed or encrypted")
        if entry.filename.endswith("/data.pkl") and entry.file_size > 64 << 20:
            raise ValueError("data.pkl is longer than 64 MiB")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("the archive claims more bytes than the file has")
    return sorted(entry.file_size for entry in entries if entry.filename.split("/")[-2:-1] == ["data"])


def _check_content(content: object, records: Sequence[int]) -> None:
    """Refuse all but a dict of plain tensors, each of which has bytes in the file that no other one has."""
    if type(content) is not dict or not all(type(name) is str for name in content):
        raise ValueError("it must hold a dict of tensors by name")
    for name, tensor in content.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise ValueError(f"{name} is not a plain tensor")
        if tensor.dtype not in _DTYPES or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; float32, float16 and bfloat16 are read")
        if not tensor.ndim or not tensor.numel() or not tensor.is_contiguous():
            raise ValueError(f"{name} is empty, a single number or not contiguous")
    _check_apart(content)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in content.values()}
    if sorted(storages.values()) != list(records):
        raise ValueError("its tensors do not have the sizes of the records that hold them")


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that overlap: they would let a small file ask for a large model.

    Meta's own files keep several tensors in one storage, but side by side. Only a tied head may be the same bytes.
    """
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    for (start, end, name), (next_start, next_end, next_name) in pairwise(spans):
        tied = (start, end) == (next_start, next_end) and {name, next_name} == _MAY_BE_ONE
        if next_start < end and not tied:
            raise ValueError(f"{name} and {next_name} overlap")


def _check_shards(directory: Path, args: ModelArgs, shards: dict[str, dict[str, Tensor]]) -> None:
    """Refuse shards that do not belong together, or are fewer or more than their shapes say."""
    (first_name, first), *others = shards.items()
    for name, shard in others:
        odd = sorted(shard.keys() ^ first.keys())
        if odd:
            raise CheckpointError(directory, f"{first_name} and {name} do not both hold {', '.join(odd)}")
    wq = first.get("layers.0.attention.wq.weight")
    rows = args.n_heads * args.head_dim
    if wq is not None and rows % len(wq) == 0 and rows // len(wq) != len(shards):
        raise CheckpointError(
            directory,
            f"the shapes need {rows // len(wq)} shards, consolidated.00.pth and so on; found {', '.join(shards)}",
        )


def _merge(path: Path, name: str, parts: list[Tensor], args: ModelArgs) -> Weight:
    """Return the whole of a tensor of which every shard holds a part."""
    if len({(part.dtype, part.shape) for part in parts}) != 1:
        raise CheckpointError(path, f"the shards hold {name} in different dtypes or shapes")
    part, shards = parts[0], len(parts)
    if shards == 1:
        return Weight.of(part)
    if name.endswith(_REPLICATED):
        return Weight(tuple(part.shape), lambda start, stop: _agreed(path, name, parts, start, stop))
    # Llama 3 cuts the embedding by words, Llama 2 by columns.
    by_columns = name.endswith(_SPLIT_BY_COLUMNS) or (name == "tok_embeddings.weight" and part.shape[-1] != args.dim)
    if by_columns:
        return Weight(
            (part.shape[0], part.shape[-1] * shards),
            lambda start, stop: torch.cat([part[start:stop] for part in parts], dim=1),
        )
    copies = 1
    if name.endswith(("wk.weight", "wv.weight")) and shards > args.n_kv_heads and len(part) == args.head_dim:
        copies = shards // args.n_kv_heads  # more shards than heads: neighbours hold the same head
    groups = [parts[i : i + copies] for i in range(0, shards, copies)]
    length = len(part)

    def rows(start: int, stop: int) -> Tensor:
        pieces = [
            _agreed(path, name, groups[i], max(start - i * length, 0), min(stop - i * length, length))
            for i in range(start // length, (stop - 1) // length + 1)
        ]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    return Weight((length * len(groups), *part.shape[1:]), rows)


def _agreed(path: Path, name: str, copies: Sequence[Tensor], start: int, stop: int) -> Tensor:
    first, *others = (copy[start:stop] for copy in copies)
    if not all(same_bits(first, other) for other in others):
        raise CheckpointError(path, f"{name} must be the same in several shards, and is not")
    return first
