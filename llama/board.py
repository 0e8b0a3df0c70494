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
    """Memory for `size` ranks, in a file that `make` has made; once all have opened it, the file may go."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        handle = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(handle, _total(size))
        finally:
            os.close(handle)
        numbers = memoryview(memory)[: 24 * size].cast("q")
        self._written = numbers[:size]  # how many exchanges each rank has written
        self._nbytes = numbers[size : 2 * size], numbers[2 * size :]  # and how many bytes, in each set of slots
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_numbers(size)).view(2, size, SLOT_BYTES)
        self._count = 0

    @staticmethod
    def serves() -> bool:
        """Tell whether this machine lets others see a rank's writes in the order in which they were made."""
        return hasattr(os, "sched_yield") and platform.machine() in ("x86_64", "AMD64")

    @staticmethod
    def make(size: int) -> Path | None:
        """Make the file, its memory taken; return None where there is no room for it, as in a small container."""
        folder = Path("/dev/shm")  # memory, where there is such a folder; else the file may reach a disk
        handle, name = tempfile.mkstemp(prefix="llama-ranks-", dir=folder if folder.is_dir() else None)
        try:
            os.posix_fallocate(handle, 0, _total(size))
        except OSError:
            os.unlink(name)
            return None
        finally:
            os.close(handle)
        return Path(name)

    def exchange(self, every: list[Tensor], own: Tensor) -> None:
        """Write `own`, contiguous and of at most SLOT_BYTES, and fill the others' places in `every` with theirs.

        The arguments stand as in torch.distributed.all_gather, so that either can be called in the other's place.
        Raises RuntimeError where another rank has written something of another size: the ranks are not in step.
        """
        self._count += 1
        # Two sets of slots: nobody overwrites one before all have written the next, and so have read it.
        slots, sizes, nbytes = self._slots[self._count % 2], self._nbytes[self._count % 2], own.nbytes
        slots[self._rank, :nbytes].copy_(own.view(-1).view(torch.uint8))
        sizes[self._rank] = nbytes
        self._written[self._rank] = self._count
        for rank, theirs in enumerate(every):
            if rank == self._rank:
                continue
            while self._written[rank] < self._count:
                os.sched_yield()
            if sizes[rank] != nbytes:
                raise RuntimeError(f"rank {rank} is not in step: it has {sizes[rank]} bytes, this one {nbytes}")
            theirs.view(-1).view(torch.uint8).copy_(slots[rank, :nbytes])


def _numbers(size: int) -> int:
    return -(-24 * size // 64) * 64


def _total(size: int) -> int:
    return _numbers(size) + 2 * size * SLOT_BYTES
