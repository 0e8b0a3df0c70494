"""A file's bytes as tensors: nothing is read before it is used, and what was read can be given back.

Knows no format.
"""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from llama.untrusted.errors import refusing
from llama.untrusted.files import open_regular


class MappedFile:
    """A private mapping of a whole file, of which what is only read stays shared with every process that maps it.

    data: all its bytes, for who reads its header: what was checked there is what is used, whatever the path leads to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(path, "cannot be mapped"), open_regular(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("it is empty")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def bytes(self, start: int, nbytes: int) -> Tensor:
        """Return so many bytes from `start` on as a uint8 tensor, which keeps the mapping."""
        return torch.frombuffer(self.data, dtype=torch.uint8, count=nbytes, offset=start)

    def drop(self, start: int, nbytes: int) -> None:
        """Let go of these bytes' pages; they are read again if they are used again."""
        if hasattr(self.data, "madvise"):  # Windows has none, and drops pages when it wants memory
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)
