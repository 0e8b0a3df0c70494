"""What memory a stretch of work took at its peak: resident pages, what CUDA's allocator handed out, tensors on a CPU.

Knows nothing of models or of what the memory is for. None stands where the machine does not tell.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"


class PeakBytes(TypedDict):
    """The fields of a record's sample that tell of memory; the last three are None on a CPU."""

    peak_resident_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_bytes: int | None


class Peak:
    """The most memory that a stretch of work takes: `start()` before it, `stop()` after it.

    Attributes:
        reset_seen: (peak, current) right after `start()` reset the statistics: CUDA's allocated bytes on a GPU, else
            resident bytes. Where they lie far apart the reset did not work, and the peak is that of earlier work.
            Resident bytes that are equal may differ by some pages. None where the machine does not tell.
    """

    def __init__(self, device: torch.device, *, device_bytes_before: int | None = None) -> None:
        """Take what `device_bytes_used` gave before the model was loaded, for `device_bytes` to be counted from."""
        self.device = device
        self.device_bytes_before = device_bytes_before
        self.reset_seen: tuple[int, int] | None = None

    def start(self) -> None:
        was_reset = reset_peak_resident()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.reset_seen = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
            return
        peak, now = peak_resident_bytes(), resident_bytes()
        self.reset_seen = None if peak is None or now is None or not was_reset else (peak, now)

    def stop(self) -> PeakBytes:
        """Return the peaks since `start()`.

        Reserved bytes hold what earlier work left in CUDA's caching allocator, too. `device_bytes` is what the device
        has given away by now, beyond `device_bytes_before`, to whomever: the allocator's segments, which it keeps,
        graphs, kernels, and other processes' memory.
        """
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        used, before = device_bytes_used(self.device), self.device_bytes_before
        return {
            "peak_resident_bytes": peak_resident_bytes(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "device_bytes": None if used is None or before is None else used - before,
        }


def device_bytes_used(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory that are given away, to this process or another; None on a CPU.

    The first call makes this process's CUDA context, so the difference to a later call does not hold the context.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory now; only Linux tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Return the most bytes of this process that were in memory at a time, since the last reset or its start.

    Pages of a file that is mapped count once they are touched.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _peak_of_usage()


def _peak_of_usage() -> int | None:
    try:
        import resource  # Windows has none
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes on macOS, KiB on Linux and BSD


def reset_peak_resident() -> bool:
    """Let the peak of resident bytes begin anew from what is resident now; False where that cannot be."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5), since Linux 4.0
    except OSError:
        return False
    return True


def tensor_peak(work: Callable[[], object]) -> int:
    """Return the most bytes of CPU tensors that PyTorch held at one time while `work` ran, beyond those at its start.

    Exact to the byte, and with what operators take for themselves; memory of libraries that allocate on their own
    (MKL, NumPy) is not there. On several ranks it may be too much: what gloo's threads give back is not seen. The
    profiler slows `work` down: take no times from such a run.

    Tensors that were made before, outside any call of this function, do not count as given back when `work` drops
    them: PyTorch knows sizes only of what it handed out under its profiler. Let go of them before, or make them in
    `work`.
    """
    with _quiet_kineto(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    events: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes())
        for event in prof.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    sizes = (size for _, size in sorted(events, key=lambda event: event[0]))  # negative where memory is given back
    return max(0, *accumulate(sizes, initial=0))


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's library from printing "USDT:" lines on stderr each time it starts and stops.

    It reads the variable once, when the first profile in the process begins, and stays as quiet as it was told then.
    """
    if _KINETO_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_KINETO_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_KINETO_LOG_LEVEL]
