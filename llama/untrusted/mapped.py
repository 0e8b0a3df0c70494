"""A file's bytes as tensors: pages are read when they are used, and can be released again."""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from llama.untrusted.errors import refusing
from llama.untrusted.files import open_regular


class MappedFile:
    """A private, copy-on-write mapping of a whole file; unchanged pages are shared between processes.

    data: all bytes. The header is read from it, too, so that the checked bytes are those that are used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(path, "cannot be mapped"), open_regular(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("it is empty")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def bytes(self, start: int, nbytes: int) -> Tensor:
        """Return `nbytes` bytes from `start` on as a uint8 tensor, which keeps the mapping alive."""
        return torch.frombuffer(self.data, dtype=torch.uint8, count=nbytes, offset=start)

    def drop(self, start: int, nbytes: int) -> None:
        """Release the pages of these bytes; they are read again if they are used again."""
        if hasattr(self.data, "madvise"):  # Windows has none
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)
