"""The cores of a CPU: how many this process may use, how many threads compute, and how busy other work keeps them.

Knows the kernel's files and the variables of OpenMP. Does not import torch, which takes a second.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from llama.host.cgroups import ROOT, kernel_text, own_groups, quota

_COUNTS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # torch reads them when it is imported; the first one wins
_MOST_PER_CORE = 8  # the limit of --threads

# The share of all cores. A process that loses an eighth of them takes 14 % longer, about as much as repetitions differ
# on an idle machine, where other work keeps at most 2 % busy (docs/results).
BUSY_SHARE = 1 / 8
LEAST_SECONDS = 0.5  # the kernel counts in hundredths of a second a core: a shorter look cannot tell load from noise

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal in proc(5); user includes guests


def usable_cores() -> int:
    """Return the number of cores that this process can use: those that it is bound to, within its groups' quota."""
    bound = bound_cores()
    return min(bound, quota(own_groups(), ROOT) or bound)


def bound_cores() -> int:
    """Return the number of cores that this process may run on: all of the machine's, unless it was bound to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> int:
    """Return the number of threads that compute in this process, or will once torch is imported."""
    count: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return count() if count is not None else next(filter(None, map(_number, _COUNTS)), usable_cores())


def use_threads(asked: int | None) -> None:
    """Compute with `asked` threads from now on, in this process and in those that it starts.

    None follows MKL_NUM_THREADS or OMP_NUM_THREADS, else torch's default, limited to the quota that torch does not
    know. Raises ValueError for a count below 1 or above 8 a core.
    """
    if asked is not None:
        check_threads(asked, "--threads")
        FreeCores.chosen = True
    elif (asked := _within_quota()) is None:
        return
    os.environ.update(dict.fromkeys(_COUNTS, str(asked)))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(asked)


def _within_quota() -> int | None:
    """Return torch's count limited to the quota that torch does not know; None without one, or with a user's count."""
    if any(name in os.environ for name in _COUNTS) or usable_cores() == bound_cores():
        return None
    return min(threads(), usable_cores())


def check_threads(asked: int, name: str) -> None:
    """Raise ValueError for a count of threads below 1 or above 8 a core; `name` is that of the flag or argument."""
    most = _MOST_PER_CORE * (os.cpu_count() or 1)
    if not 1 <= asked <= most:
        raise ValueError(
            f"{name}={asked} must be from 1 to {most}, which is {_MOST_PER_CORE} for each of this machine's cores"
        )


def choose_once(say: Callable[[str], None], asked: int | None = None) -> None:
    """Choose the threads of a program that imports this library, for this process alone and before it computes.

    `asked` is the user's count. Without one, the first call chooses as `FreeCores` does, unless a command has chosen,
    and later calls do nothing: `torch.set_num_threads` then changes the count. Raises ValueError as `use_threads`.
    """
    if asked is not None:
        check_threads(asked, "threads")
        FreeCores.chosen = True
        sys.modules["torch"].set_num_threads(asked)
    elif not FreeCores.chosen:
        use = sys.modules["torch"].set_num_threads
        if (within := _within_quota()) is not None:
            use(within)
        FreeCores().choose_threads(say, use=use, remedy="pass threads={} to load")


class FreeCores:
    """A look at the load of the machine that begins now and ends in `choose_threads`."""

    chosen: ClassVar[bool] = False  # whether the threads of this process were chosen: it is done once

    def __init__(self) -> None:
        self._load, self._began = OtherLoad(), time.perf_counter()
        self._load.start()

    def choose_threads(
        self,
        say: Callable[[str], None],
        *,
        known: int | None = None,
        use: Callable[[int], None] = use_threads,
        remedy: str = "pass --threads {}",
    ) -> None:
        """Compute with at most one thread for each free core, and say so if that is fewer than before.

        Call it before the first computation. It waits until the look has lasted half a second. `known`: the count that
        an earlier part of the same run used; it replaces the look. `use` sets the count; `remedy` says how a user does.

        Threads meet at barriers several times a layer, where all wait for a thread whose core is busy: a forward can
        then take many times as long as with one thread. A count that the user or a quota sets does not change, nor do
        the ranks of a torchrun, which are each other's load.
        """
        count, FreeCores.chosen = threads(), True
        if count == 1 or (_number("LOCAL_WORLD_SIZE") or 1) > 1 or any(name in os.environ for name in _COUNTS):
            return
        if known is not None:
            use(known)
            return
        time.sleep(max(0.0, self._began + LEAST_SECONDS - time.perf_counter()))
        others, cores = self._load.stop(), os.cpu_count() or 1
        if others is None:
            return
        chosen = max(1, int(min(usable_cores(), cores - others) + 0.5))
        if chosen < count:
            use(chosen)
            say(
                f"other work occupies {others:.1f} of {cores} cores: computing with {chosen} "
                f"thread{'s' * (chosen > 1)} instead of {count}; {remedy.format(count)} to override"
            )


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def is_busy(others: float, cores: int) -> bool:
    """Return whether other work that keeps so many of the cores busy makes measured times useless."""
    return others > BUSY_SHARE * cores


class OtherLoad:
    """The number of cores that other work keeps busy, from `start()` to `stop()`.

    The kernel counts in hundredths of a second, so intervals below LEAST_SECONDS are inaccurate. In a container the
    other work may be that of the whole host. Children of this process count as other work until they are waited for,
    and so does the time that a hypervisor takes.
    """

    def __init__(self) -> None:
        self._started: tuple[float, float, float | None] | None = None

    def start(self) -> None:
        self._started = self._clocks()

    def stop(self) -> float | None:
        """Return the mean number of busy cores since `start()`, or None if the kernel does not report it."""
        assert self._started is not None, "stop() without start()"
        began, own_before, all_before = self._started
        now, own, everyone = self._clocks()
        if everyone is None or all_before is None:
            return None
        return max(0.0, (everyone - all_before - (own - own_before)) / (now - began))

    def _clocks(self) -> tuple[float, float, float | None]:
        """Return seconds: of the wall clock, of our threads and ended children, and of all busy cores."""
        return time.perf_counter(), sum(os.times()[:4]), _busy_seconds()


def _busy_seconds() -> float | None:
    text = kernel_text(Path("/proc/stat"))
    if not text:  # some containers mask the file
        return None
    ticks = [int(field) for field in text.partition("\n")[0].split()[1:]]
    return sum(ticks[i] for i in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
