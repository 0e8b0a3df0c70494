"""What all checkpoint formats share: the error, a tensor still in its file, and what a model needs of a file.

Knows Meta's names and shapes, and no file format but JSON.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.model import Transformer
from llama.quant.packed import Format, MappedWeight, Parts
from llama.tokenizer import Tokenizer
from llama.untrusted import json_object
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.files import check_regular
from llama.untrusted.mapped import MappedFile
from llama.untrusted.words import some_of

logger = logging.getLogger(__name__)

# Of one read, in numbers: small beside any model, so that a transient copy in another dtype or order costs nothing.
BLOCK = 1 << 18

# Far above every released model. A file that claims more is refused before anything is made of the claim.
_LIMITS = {
    "dim": 1 << 16,
    "n_layers": 512,
    "n_heads": 1 << 12,
    "head_dim": 1 << 14,
    "ffn_dim": 1 << 20,
    "vocab_size": 1 << 20,
    "max_seq_len": 1 << 31,
    "norm_eps": 0.1,
}


@dataclass(frozen=True)
class Weight:
    """A tensor that is still in its file, read by rows of its first dimension.

    `rows(start, stop)` returns them in the file's dtype, or in float32 where the file is quantised. They may be a
    view of the mapped file: copy, do not keep. `stored`: how the file itself holds a matrix, None where it has floats.
    `drop()`: nothing more will be read for now, and what was read need stay in memory no longer.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    stored: "Stored | None" = None
    drop: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, tensor: Tensor) -> "Weight":
        return cls(tuple(tensor.shape), lambda start, stop: tensor[start:stop])

    @classmethod
    def mapped(cls, file: MappedFile, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> "Weight":
        """Return the weight whose numbers lie in the file from byte `start` on, row by row; copies, where not aligned.

        A single number, without dimensions, is read as one row.
        """
        length, *inner = shape or (1,)
        row = torch.Size(inner).numel() * dtype.itemsize
        raw = file.bytes(start, length * row).view(length, row)

        def rows(first: int, stop: int) -> Tensor:
            part = raw[first:stop]
            return (part.clone() if start % dtype.itemsize else part).view(dtype).view(-1, *inner)

        return cls(shape, rows, drop=lambda: file.drop(start, length * row))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) from the first row to the last, BLOCK numbers at a time."""
        length = self.shape[0]
        step = max(1, BLOCK * length // torch.Size(self.shape).numel())
        return ((start, min(start + step, length)) for start in range(0, length, step))

    def copy_to(self, target: Tensor) -> None:
        """Fill `target`, which has this shape, in its own dtype and on its own device: one rounding per number."""
        for start, stop in self.blocks():
            target[start:stop].copy_(self.rows(start, stop))

    def part(self, shape: tuple[int, ...], rank: int, size: int) -> "Weight":
        """Return the slice of this shape that `rank` of `size` holds: all of it, its rows, or its columns.

        Slices follow the ranks; where there are more ranks than slices, neighbours have the same one.
        """
        if shape == self.shape:
            return self
        begins = [rank * whole // size // own * own for whole, own in zip(self.shape, shape, strict=True)]
        inner = tuple(slice(begin, begin + own) for begin, own in zip(begins[1:], shape[1:], strict=True))
        return Weight(shape, lambda start, stop: self.rows(begins[0] + start, begins[0] + stop)[:, *inner])

    def same_bits(self, other: "Weight") -> bool:
        return self.shape == other.shape and all(
            same_bits(self.rows(*block), other.rows(*block)) for block in self.blocks()
        )


@dataclass(frozen=True)
class Stored:
    """The codes and scales of a matrix as a file has them, which `llama.quant.packed` keeps to the bit.

    kind: the file's name for them. blocks: (rows, blocks, bytes), a view of the mapped file. `split` returns the parts
    of some rows' blocks. order: where the rows start..stop-1 of ours are in the file, None where they are in our order.
    """

    kind: str
    format: Format
    blocks: Tensor
    split: Callable[[Tensor], Parts]
    order: Callable[[int, int], Tensor] | None = None

    def parts(self, start: int, stop: int) -> Parts:
        return self.split(self.blocks[start:stop] if self.order is None else self.blocks[self.order(start, stop)])

    def mapped(self, columns: int) -> MappedWeight:
        """Return the matrix as it lies in the file, or, in another order, a copy; so many weights make a row."""
        blocks = self.blocks if self.order is None else self.blocks[self.order(0, len(self.blocks))]
        return MappedWeight(columns, self.format, blocks, self.kind, self.split)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bytes: a NaN is equal to itself, and -0.0 is not 0.0."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before its weights are read: sizes, tokenizer, and where each tensor is.

    `tensors` holds every name of the model's state dict, in Meta's names and layout, with its checked shape. window: so
    many positions a query sees in the original (sliding-window attention), None: all. Here every query sees all, so a
    model is the original's up to that length alone. family: the name of its architecture in the file.
    """

    path: Path
    args: ModelArgs
    tokenizer: Tokenizer
    tensors: Mapping[str, Weight]
    window: int | None = None
    family: str = "llama"

    def whole_texts(self) -> ModelArgs:
        """Return the sizes with max_seq_len at most so long that every query sees all positions in the original."""
        longest = min(self.args.max_seq_len, self.window or self.args.max_seq_len)
        return replace(self.args, max_seq_len=longest)

    def check_length(self, max_seq_len: int) -> None:
        """Refuse texts in which the original would not see all positions."""
        if self.window is not None and max_seq_len > self.window:
            raise CheckpointError(
                self.path,
                f"its attention sees the last {self.window} positions alone (sliding_window), which is not supported "
                f"beyond that length; use --max_seq_len {self.window}",
            )


def assemble(
    path: Path,
    *,
    args: ModelArgs,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Weight],
    names: Mapping[str, str],
    says_tied: bool | None,
    window: int | None = None,
    family: str = "llama",
) -> Checkpoint:
    """Check what a file holds against what its config needs, settle the head, and go over to Meta's names.

    `tensors` has the file's names, and `names` leads from ours to those. `says_tied` is what the config says of the
    head: that it is the embedding, that it is not, or (None) nothing.
    """
    if tokenizer.n_words > args.vocab_size:
        raise CheckpointError(
            path,
            f"the tokenizer has {tokenizer.n_words} tokens but the model only {args.vocab_size}: "
            "they do not belong together",
        )
    tokenizer.widen(args.vocab_size)
    head, embedding = names["output.weight"], names["tok_embeddings.weight"]
    shared = head not in tensors and embedding in tensors and says_tied is not False
    if shared:
        logger.info("%s: no %s, so the output layer is the embedding (tied)", path, head)
        tensors = {**tensors, head: tensors[embedding]}
    needed = {names[name]: shape for name, shape in needed_shapes(args).items()}
    check_shapes(path, needed=needed, found={name: weight.shape for name, weight in tensors.items()})
    if says_tied and not tensors[head].same_bits(tensors[embedding]):
        raise CheckpointError(path, f"the config says that the head is tied, but {head} is not {embedding}")
    args = replace(args, tied_head=shared or bool(says_tied))
    return Checkpoint(path, args, tokenizer, {ours: tensors[theirs] for ours, theirs in names.items()}, window, family)


def needed_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a model of these sizes needs, a tied head included."""
    with torch.device("meta"):  # shapes alone: this costs milliseconds and no memory, whatever the sizes
        shapes = shapes_of(Transformer(replace(args, n_layers=1, kv_cache="static")))  # all layers are alike
    layers = {name.removeprefix("layers.0."): shape for name, shape in shapes.items() if name.startswith("layers.0.")}
    whole = {name: shape for name, shape in shapes.items() if not name.startswith("layers.0.")}
    return whole | {f"layers.{i}.{name}": shape for i in range(args.n_layers) for name, shape in layers.items()}


def shapes_of(model: Transformer) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_shapes(path: Path, *, needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse any difference between the tensors that are needed and those found, naming the first ones of each kind."""
    missing = needed.keys() - found.keys()
    unexpected = found.keys() - needed.keys()
    misshapen = [
        f"{name} is {found[name]} and must be {shape}"
        for name, shape in needed.items()
        if name in found and found[name] != shape
    ]
    groups = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    some = 10 // max(1, sum(map(bool, groups.values())))
    complaints = [f"{title}: {some_of(group, some)}" for title, group in groups.items() if group]
    if complaints:
        raise CheckpointError(path, "the tensors do not fit the config; " + "; ".join(complaints))


def refuse_strangers(path: Path, *, known: Collection[str], found: Collection[str]) -> None:
    """Refuse a file of which more tensors are unknown than the model has, before anything is made of any.

    Fewer are named by `check_shapes`, beside what is missing and misshapen.
    """
    strangers = set(found).difference(known)
    if len(strangers) > len(known):
        raise CheckpointError(path, f"the tensors do not fit the config; unexpected: {some_of(strangers)}")


def refuse_others(path: Path, content: Mapping[str, Any], must_be: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse, by name, every key whose value is not among those under which the model is the one that we build."""
    complaints = []
    for key, allowed in must_be.items():
        value = content.get(key)
        # Types are exact: Python takes true for 1, but a file that says so means something else. 1 and 1.0 are one.
        if not any(value == each and (type(value) is bool) == (type(each) is bool) for each in allowed):
            would_do = ", ".join("none at all" if each is None else json.dumps(each) for each in allowed)
            complaints.append(f"{key}={value!r:.80} is not supported; what is: {would_do}")
    if complaints:
        raise CheckpointError(path, "; ".join(complaints))


def need_file(directory: Path, name: str, what: str) -> Path:
    """Return the path of a regular file, or say what is there instead."""
    path = directory / name
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing, or a link that leads nowhere
        raise CheckpointError(directory, f"lacks {name} ({what}); found {listing(directory)}") from None
    with refusing(path, "cannot be used"):
        check_regular(mode)
    return path


def listing(directory: Path) -> str:
    """Return the first names in a directory, as words for a message."""
    return some_of([entry.name for entry in directory.iterdir()]) or "nothing"


def read_json(path: Path, *, limit: int = 1 << 20) -> dict[str, Any]:
    """Return the object in a file of at most `limit` bytes. What could be understood in two ways is refused."""
    with refusing(path, "is not readable as JSON"):
        return json_object.read_json(path, limit=limit)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read Hugging Face's tokenizer.json or, under any other name, Meta's tokenizer.model."""
    with refusing(path, "is not a tokenizer that can be used"):
        return Tokenizer.from_huggingface(path) if path.suffix == ".json" else Tokenizer(path)


def make_args(path: Path, **sizes: Any) -> ModelArgs:
    """Return ModelArgs(**sizes), held to limits that keep a hostile file from costing time or memory."""
    with refusing(path, "describes a model that cannot be built"):
        args = ModelArgs(**sizes)
    if args.rope_theta is None:
        raise CheckpointError(path, "rope_theta=None must be a finite number above 0: no format describes NoPE")
    for name, limit in _LIMITS.items():
        if getattr(args, name) > limit:
            raise CheckpointError(path, f"{name}={getattr(args, name)} is above the limit of {limit}")
    if args.vocab_size < 1:
        raise CheckpointError(path, f"vocab_size={args.vocab_size} must be a whole number of at least 1")
    return args
