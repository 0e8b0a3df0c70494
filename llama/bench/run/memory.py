"""The peak memory of a stretch of work: resident pages, CUDA's allocations, or tensors on a CPU.

None means that the system does not show it.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch.autograd.profiler import profile


def reset_peaks(device: torch.device) -> tuple[int, int] | None:
    """Reset the statistics of the peaks, and return (peak, current): allocated bytes on a GPU, else resident ones.

    If the two lie far apart, the reset did not work, and the next peak is that of earlier work.
    """
    was_reset = reset_peak_resident()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    peak, now = peak_resident_bytes(), resident_bytes()
    return None if peak is None or now is None or not was_reset else (peak, now)


def peaks(device: torch.device) -> dict[str, int]:
    """Return the peaks since the reset by the names of their columns, as far as they are known."""
    found = {"resident_peak_bytes": peak_resident_bytes()}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found["tensor_peak_bytes"] = torch.cuda.max_memory_allocated(device) + _of_graphs(device)
    return {name: nbytes for name, nbytes in found.items() if nbytes is not None}


def _of_graphs(device: torch.device) -> int:
    """Return the bytes that replays of CUDA graphs use in pools of their own, which PyTorch counts as free."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = (each for each in segments if each["device"] == index and tuple(each["segment_pool_id"]) != (0, 0))
    return sum(each["total_size"] - each["allocated_size"] for each in pools)


def resident_bytes() -> int | None:
    """Return the resident bytes of this process; None except on Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Return the peak of the resident bytes since the last reset, or since this process began.

    Pages of a mapped file count once they are read.
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
    """Reset the peak of resident bytes to the current value; return False if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5), since Linux 4.0
    except OSError:
        return False
    return True


def tensor_peak(work: Callable[[], object]) -> int:
    """Return the peak bytes of CPU tensors while `work` ran, beyond those at its start.

    The result is exact to the byte and includes temporary tensors of operators, but not memory of libraries that
    allocate on their own (MKL, NumPy). On several ranks it may be too large: frees on gloo's threads are not counted.
    The profiler slows `work` down, so times of such a run mean nothing.

    Freeing a tensor that was allocated before this call is not counted, because PyTorch knows only the sizes of what it
    allocated under its profiler. Free such tensors before, or allocate them in `work`.
    """
    # Not torch.profiler, which imports PyTorch's compiler, in 3 s of CPU time.
    with profile(use_kineto=True, profile_memory=True) as prof:
        work()
    assert prof.kineto_results is not None
    events: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes())
        for event in prof.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    sizes = (size for _, size in sorted(events, key=lambda event: event[0]))  # negative if memory is freed
    return max(0, *accumulate(sizes, initial=0))
