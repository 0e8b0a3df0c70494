"""What all checkpoint formats share: the error, a weight that is still in its file, and the checks of names and shapes.

Knows Meta's names and shapes. Of file formats it reads only JSON.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.args import SETTINGS, ModelArgs
from llama.model import Transformer
from llama.quant.packed import Format, Parts
from llama.tokenizer import MissingTokenizer, Tokenizer
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.files import read_regular, release
from llama.untrusted.json_object import parse_object
from llama.untrusted.words import printable, some_of

logger = logging.getLogger(__name__)

BLOCK_NUMBERS = 1 << 18  # numbers per read: a temporary copy in another dtype or order is small beside any model

# Far above every released model. A config above a limit is rejected before anything is allocated.
_LIMITS = {
    "dim": 1 << 16,
    "n_layers": 512,
    "n_heads": 1 << 12,
    "head_dim": 1 << 14,
    "ffn_dim": 1 << 20,
    "vocab_size": 1 << 20,
    "max_seq_len": 1 << 31,
    "rope_theta": 1e18,
    "norm_eps": 0.1,
}

# `require_values` rejects settings in every format: kv_cache may name a Python file, which only the user may run.
NO_SETTINGS: dict[str, tuple[object, ...]] = dict.fromkeys(SETTINGS, (None,))

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Rows = Callable[[int, int], Tensor]  # returns the rows from the first number to before the second


@dataclass(frozen=True)
class Weight:
    """A tensor that is still in its file, read by rows of its first dimension.

    `rows(start, stop)` returns rows in the file's dtype, or in float32 if the file is quantised. They may be a view of
    the mapped file: copy them. `stored`: the quantised blocks of a matrix, or None for floats. `drop()` releases the
    pages of the mapped file that were read.
    """

    shape: tuple[int, ...]
    rows: Rows
    stored: "Stored | None" = None
    drop: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, tensor: Tensor) -> "Weight":
        return cls(tuple(tensor.shape), lambda start, stop: tensor[start:stop])

    @classmethod
    def mapped(cls, tensor: Tensor) -> "Weight":
        """Return the weight of a tensor that is mapped from a file; its rows are copies if they are not aligned."""
        aligned = tensor.data_ptr() % tensor.itemsize == 0
        return cls(
            tuple(tensor.shape),
            lambda start, stop: tensor[start:stop] if aligned else tensor[start:stop].clone(),
            drop=lambda: release(tensor.data_ptr(), tensor.nbytes),
        )

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Return an iterator over (start, stop) of blocks of rows, BLOCK_NUMBERS numbers each."""
        length = self.shape[0]
        step = max(1, BLOCK_NUMBERS * length // torch.Size(self.shape).numel())
        return ((start, min(start + step, length)) for start in range(0, length, step))

    def copy_to(self, target: Tensor) -> None:
        """Fill `target`, a tensor of this shape, in its own dtype and on its own device: one rounding per number."""
        for start, stop in self.blocks():
            target[start:stop].copy_(self.rows(start, stop))

    def part(self, shape: tuple[int, ...], rank: int, size: int) -> "Weight":
        """Return the slice of this shape that belongs to `rank` of `size`: all of the weight, some rows, or columns.

        With more ranks than slices, neighbouring ranks get the same slice.
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
    """The quantised blocks of a matrix in a file. `llama.quant.packed` stores their codes and scales unchanged.

    kind: the file's name of the type. `rows(start, stop)` returns the blocks of rows, (rows, blocks, bytes), a view of
    the mapped file or, if the order of rows was changed, a copy. `split` returns the codes and scales of blocks.
    """

    kind: str
    format: Format
    rows: Rows
    split: Callable[[Tensor], Parts]

    def parts(self, start: int, stop: int) -> Parts:
        return self.split(self.rows(start, stop))


def weights_of_file(path: Path, tensors: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors that a library has mapped from a file. Rejects all but whole arrays of floats, by name."""
    found = {}
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or type(name) is not str:
            raise CheckpointError(
                path, f"{name!r:.80} has the type {type(tensor).__name__}; supported: tensors with names"
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in FLOATS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise CheckpointError(path, f"{printable(name, 80)} is {what}; supported: strided, on cpu, {known}")
        if not tensor.numel() or not tensor.ndim or not tensor.is_contiguous() or tensor.is_neg():
            raise CheckpointError(path, f"{printable(name, 80)} is empty, a single number or not contiguous")
        found[name] = tensor.detach()
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether dtypes and bytes are equal: NaN equals itself, and -0.0 is not 0.0."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before its weights are read.

    tensors: every tensor of the model's state dict, in Meta's names and layout, with checked shapes.
    window: the number of positions that a query of the original model sees (sliding-window attention); None: all. In
        this library every query sees all positions, so both models agree only up to that length.
    family: the file's architecture.
    assumed: the values that the files do not state, each with its source, such as "rope_theta=10000.0 (Llama 1 and 2)".
    """

    path: Path
    args: ModelArgs
    tokenizer: Tokenizer
    tensors: Mapping[str, Weight]
    window: int | None = None
    family: str = "llama"
    assumed: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether a matrix of the file is quantised, in a type that `quantize="stored"` reads."""
        return any(weight.stored for weight in self.tensors.values() if len(weight.shape) == 2)

    def whole_texts(self) -> ModelArgs:
        """Return the sizes with max_seq_len cut to the sliding window: up to there it changes nothing."""
        longest = min(self.args.max_seq_len, self.window or self.args.max_seq_len)
        return replace(self.args, max_seq_len=longest)

    def check_length(self, max_seq_len: int) -> None:
        """Reject a length at which the sliding window of the original model would hide positions."""
        if self.window is not None and max_seq_len > self.window:
            raise CheckpointError(
                self.path,
                f"its attention sees only the last {self.window} positions (sliding_window); longer texts are not "
                f"supported; use --max_seq_len {self.window}",
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
    assumed: Sequence[str] = (),
) -> Checkpoint:
    """Return the checkpoint in Meta's names, after comparing the tensors of a file with what its config needs.

    `tensors` has the file's names; `names` maps ours to the file's. `says_tied`: whether the config says that the head
    is the embedding; None: it does not say.
    """
    if tokenizer.n_words > args.vocab_size:
        raise CheckpointError(
            path,
            f"the tokenizer has {tokenizer.n_words} tokens and the model only {args.vocab_size}; use the model's own",
        )
    tokenizer.widen(args.vocab_size)
    head, embedding = names["output.weight"], names["tok_embeddings.weight"]
    shared = head not in tensors and embedding in tensors and says_tied is not False
    if shared:
        tensors = {**tensors, head: tensors[embedding]}
    needed = {names[name]: shape for name, shape in needed_shapes(args).items()}
    check_shapes(path, needed=needed, found={name: weight.shape for name, weight in tensors.items()})
    if says_tied and not tensors[head].same_bits(tensors[embedding]):
        raise CheckpointError(path, f"the config says that the head is tied, but {head} is not equal to {embedding}")
    args = replace(args, tied_head=shared or bool(says_tied))
    named = {ours: tensors[theirs] for ours, theirs in names.items()}
    return Checkpoint(path, args, tokenizer, named, window, family, tuple(assumed))


def needed_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a model of these sizes needs, including a tied head."""
    with torch.device("meta"):  # no memory, and milliseconds whatever the sizes: all layers are alike
        model = Transformer(replace(args, n_layers=1, kv_cache="static"))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layers = {name.removeprefix("layers.0."): shape for name, shape in shapes.items() if name.startswith("layers.0.")}
    whole = {name: shape for name, shape in shapes.items() if not name.startswith("layers.0.")}
    return whole | {f"layers.{i}.{name}": shape for i in range(args.n_layers) for name, shape in layers.items()}


def check_shapes(path: Path, *, needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError with the first missing, unexpected and misshapen tensors, if there are any."""
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


def require_values(path: Path, content: Mapping[str, Any], allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Reject, by name, every key whose value would change what the model computes: only `allowed` values pass."""
    complaints = []
    for key, values in allowed.items():
        value = content.get(key)
        # In Python true equals 1; in a file they differ. 1 and 1.0 are equal.
        if not any(value == each and (type(value) is bool) == (type(each) is bool) for each in values):
            supported = ", ".join("no such key" if each is None else json.dumps(each) for each in values)
            complaints.append(f"{key}={value!r:.80} is not supported; supported: {supported}")
    if complaints:
        raise CheckpointError(path, "; ".join(complaints))


def need_file(directory: Path, name: str, what: str) -> Path:
    """Return the path of a file in the directory; raise CheckpointError if it is missing, or a broken link."""
    path = directory / name
    if not path.exists():
        raise CheckpointError(directory, f"lacks {name} ({what}); found {listing(directory)}")
    return path


def listing(directory: Path) -> str:
    """Return the first names in a directory, for a message."""
    return some_of([entry.name for entry in directory.iterdir()]) or "nothing"


def read_config(path: Path, *, limit: int = 1 << 20) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes; ambiguous JSON is rejected."""
    with refusing(path, "is not readable as JSON"):
        return parse_object(read_regular(path, limit=limit))


def read_tokenizer(directory: Path, name: str, given: Path | None) -> Tokenizer:
    """Return the tokenizer of Hugging Face's tokenizer.json or, under any other name, of Meta's tokenizer.model.

    It is that of the file `given`, else of `name` in the directory; a MissingTokenizer if there is no such file.
    """
    path = given or directory / name
    if given is None and not os.path.lexists(path):
        return MissingTokenizer(f"{directory} lacks {name} (the vocabulary)")
    with refusing(path, "is not a tokenizer that can be used"):
        return Tokenizer.from_huggingface(path) if path.suffix == ".json" else Tokenizer(path)


def make_args(path: Path, **sizes: Any) -> ModelArgs:
    """Return ModelArgs(**sizes) if no size is above its limit, so that an untrusted file cannot cost time or memory."""
    with refusing(path, "describes a model that cannot be built"):
        args = ModelArgs(**sizes)
    if args.rope_theta is None:
        raise CheckpointError(path, "rope_theta=None must be a finite number above 0: no format has models without it")
    for name, limit in _LIMITS.items():
        if getattr(args, name) > limit:
            raise CheckpointError(path, f"{name}={getattr(args, name)} is above the limit of {limit}")
    if args.vocab_size < 1:
        raise CheckpointError(path, f"vocab_size={args.vocab_size} must be a whole number of at least 1")
    return args
