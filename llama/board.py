"""A piece of memory that all ranks of one host see: each writes what it has, and reads what the others wrote.

A model that is cut across processes adds up twice a layer, a few kilobytes each time. Sent through sockets, each time
wakes threads that sleep, which takes a millisecond where every core is busy; to look at memory until it changes takes
microseconds (docs/log.md). Knows bytes; does not know what is added up, nor what becomes of a rank that never writes.
"""

import mmap
import os
import platform
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SLOT_BYTES = 2**20  # of one rank, for one exchange


class Board:
    """Memory for `size` ranks. One of them makes the file, with path None; the others open it, and then it may go."""

    def __init__(self, rank: int, size: int, path: Path | None = None) -> None:
        self._rank, self._size = rank, size
        flags = -(-8 * size // 64) * 64
        total = flags + 2 * size * SLOT_BYTES
        folder = Path("/dev/shm")  # memory, where there is such a folder; else the file may reach a disk
        if path is None:
            handle, name = tempfile.mkstemp(prefix="llama-ranks-", dir=folder if folder.is_dir() else None)
            os.truncate(handle, total)
        else:
            name = str(path)
            handle = os.open(name, os.O_RDWR)
        self.path = Path(name)
        memory = mmap.mmap(handle, total)
        os.close(handle)
        self._flags = memoryview(memory)[: 8 * size].cast("q")  # how many exchanges each rank has written
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=flags).view(2, size, SLOT_BYTES)
        self._count = 0

    @staticmethod
    def serves() -> bool:
        """Tell whether this machine lets others see a rank's writes in the order in which they were made."""
        return hasattr(os, "sched_yield") and platform.machine() in ("x86_64", "AMD64")

    def exchange(self, own: Tensor, every: list[Tensor]) -> None:
        """Write `own`, contiguous and of at most SLOT_BYTES, and fill the others' places in `every` with theirs."""
        self._count += 1
        # Two sets of slots: nobody overwrites one before all have written the next, and so have read it.
        slots, nbytes = self._slots[self._count % 2], own.nbytes
        slots[self._rank, :nbytes].copy_(own.view(-1).view(torch.uint8))
        self._flags[self._rank] = self._count
        for rank, theirs in enumerate(every):
            if rank != self._rank:
                while self._flags[rank] < self._count:
                    os.sched_yield()
                theirs.view(-1).view(torch.uint8).copy_(slots[rank, :nbytes])
