"""What torch's reader of .pth files does not check: the cost of a pickle, and the places and sizes of the records.

`torch.load` with `weights_only` runs no code of a file. But a tuple in tuples a million times ends the process when it
is hashed as a key, one that contains another twice, and so on, takes exponential time, and `bytearray` any memory. With
`mmap` it compares no sizes: it reads the bytes behind a record that is too short, and compressed bytes as numbers.
"""

import pickletools
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

_REMEDY: Final = "save a dict of tensors with torch.save, or convert the model to safetensors"
_GLOBALS: Final = (
    "collections OrderedDict",
    *(f"torch._utils {name}" for name in ("_rebuild_tensor_v2", "_rebuild_parameter")),
    *(f"torch {name}Storage" for name in ("Double", "Float", "Half", "BFloat16")),
)
# A tensor takes some 35. The largest supported models need fewer, and at the limit they take half a second.
_MOST_OPERATIONS = 1 << 18
_LARGEST_TUPLE = 64  # values in a tuple and the tuples inside it; those of a tensor have 20


def load_pth(path: Path) -> object:
    """Return what torch.save wrote into a file, with tensors mapped from it. Raises ValueError, or torch's errors."""
    with ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != ZIP_STORED:
                raise ValueError(f"its record {info.filename!r:.80} is compressed; {_REMEDY}")
            if info.filename.endswith("/byteorder") and info.file_size != len("little"):
                raise ValueError(f"its numbers are not little-endian; {_REMEDY} on another machine")
            archive.open(info).close()  # compares the header of the record, by which torch finds it, with the directory
    check_pickle(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content


def check_pickle(data: bytes) -> None:
    """Raise ValueError for what torch.save does not write for a dict of tensors, if it would cost more than its bytes.

    Counts the values in every tuple, by the stack of Python's `pickletools`; no other value that a key may be contains
    others.
    """
    stack, marks, memo = list[int](), list[int](), dict[object, int]()
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        name, before = operation.name, operation.stack_before
        if count == _MOST_OPERATIONS:
            raise ValueError(f"it has more than {_MOST_OPERATIONS} operations, the limit for a pickle; {_REMEDY}")
        if name == "GLOBAL" and argument not in _GLOBALS:
            raise ValueError(f"it names {argument!r:.80}, which no dict of tensors needs; {_REMEDY}")
        if name == "MARK":
            marks.append(len(stack))
        elif name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        else:
            marked = pickletools.markobject in before
            begin = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
            size = 1 + sum(stack[begin:]) if "TUPLE" in name else 1
            if size > _LARGEST_TUPLE:
                raise ValueError(f"it has a tuple of {size} values, and the limit is {_LARGEST_TUPLE}; {_REMEDY}")
            stack[begin:] = [size] * len(operation.stack_after)


def check_records(path: Path, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless the storages of the tensors, in the order of the file, have the sizes of its records."""
    with ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=lambda info: info.header_offset)
    records = [info.file_size for info in entries if "/data/" in info.filename]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    if records != [nbytes for _, nbytes in sorted(storages.items())]:
        raise ValueError("its records have other sizes than its tensors: it is damaged, or has more than tensors")
