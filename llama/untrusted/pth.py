"""Read the header of a .pth file without torch.load: the position of each tensor of a dict.

Combines the records of `zip_reader` with the tensors of `pickle_reader`. Reads no weight.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from llama.untrusted.errors import refusing
from llama.untrusted.mapped import MappedFile
from llama.untrusted.pickle_reader import REMEDY, PickledTensor, quoted, read_pickle
from llama.untrusted.zip_reader import Record, read_records

_MAX_PICKLE = 4 << 20
_MAY_BE_ONE = {"tok_embeddings.weight", "output.weight"}
_BESIDE = {"version", "byteorder"}  # what torch.save writes beside data.pkl and data/KEY


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position of a contiguous tensor: its dtype, its shape, and its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def read_pth_header(mapped: MappedFile) -> dict[str, TensorPlace]:
    """Return the checked positions of all tensors: each lies in a record and overlaps no other.

    Only a tied head may have the bytes of the embedding. Raises CheckpointError for anything that is not a dict of
    float32, float16 and bfloat16 tensors as torch.save writes it.
    """
    with refusing(mapped.path, "is not a .pth file that can be used"):
        return _read(mapped.data)


def _read(data: mmap.mmap) -> dict[str, TensorPlace]:
    records = read_records(data)
    pickle = records.pop("data.pkl", None)
    if pickle is None:
        raise ValueError(f"the archive has no data.pkl; {REMEDY}")
    if pickle.size > _MAX_PICKLE:
        raise ValueError(f"data.pkl has {pickle.size} bytes; the limit is {_MAX_PICKLE}")
    order = records.get("byteorder")
    if order is not None and data[order.start : min(order.end, order.start + 7)] != b"little":
        raise ValueError("the byte order is not little-endian; save it on a machine that is")
    storages = {name.removeprefix("data/"): record for name, record in records.items() if name.startswith("data/")}
    for name in records:
        # Names with a dot have torch's data about the archive itself.
        if not name.startswith(("data/", ".")) and name not in _BESIDE:
            raise ValueError(f"the archive contains {quoted(name)}, which torch.save does not write; {REMEDY}")
    return _placed(read_pickle(data[pickle.start : pickle.end]), storages)


def _placed(tensors: Mapping[str, PickledTensor], records: Mapping[str, Record]) -> dict[str, TensorPlace]:
    """Return the positions of the tensors, after checking that each record is exactly one of their storages."""
    places = {}
    for name, tensor in tensors.items():
        storage = tensor.storage
        record, itemsize = records.get(storage.key), storage.dtype.itemsize
        if record is None or record.size != storage.numel * itemsize:
            found = "none" if record is None else f"one of {record.size}"
            raise ValueError(f"{name} needs a record of {storage.numel * itemsize} bytes, and there is {found}")
        places[name] = TensorPlace(storage.dtype, tensor.shape, record.start + tensor.offset * itemsize)
    unused = records.keys() - {tensor.storage.key for tensor in tensors.values()}
    if unused:
        raise ValueError(f"the archive's record {quoted(f'data/{min(unused)}')} belongs to no tensor")
    _check_apart(places)
    return places


def _check_apart(places: Mapping[str, TensorPlace]) -> None:
    """Raise ValueError if tensors overlap: a small file could then describe a large model.

    In Meta's files several tensors share a storage without overlap. Only a tied head may have the embedding's bytes.
    """
    spans = sorted((place.start, place.end, name) for name, place in places.items())
    for (start, end, name), (next_start, next_end, next_name) in pairwise(spans):
        tied = (start, end) == (next_start, next_end) and {name, next_name} == _MAY_BE_ONE
        if next_start < end and not tied:
            raise ValueError(f"{name} and {next_name} overlap")
