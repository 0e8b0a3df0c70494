"""A CPU's cores: how many this process may use, with how many threads it computes, and who else is busy on them.

Knows the kernel's files and what OpenMP reads. Does not import torch, so that a command can ask before that takes time.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llama.host.cgroups import ROOT, folders_of, own_groups, text_of

_COUNTS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # read by torch when it is imported; of both, the first
_MOST_PER_CORE = 8  # threads that anybody may want, to see what they do

# Of all cores. Who loses an eighth of them takes 14 % longer, about as far as repetitions lie apart on a quiet machine;
# there others keep at most 2 % busy (docs/results).
BUSY_SHARE = 1 / 8
LEAST_SECONDS = 0.5  # the kernel counts in hundredths of a second a core: shorter work cannot be told from busy

_ALL_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal in proc(5); guests are counted in user already


def usable_cores() -> int:
    """Return on how many cores this process can compute: those that it is bound to, within its groups' quota."""
    bound = bound_cores()
    return min(bound, quota(own_groups(), ROOT) or bound)


def bound_cores() -> int:
    """Return on how many cores this process may be put, all of the machine's unless somebody bound it to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(groups: str, root: Path) -> int | None:
    """Return how many cores' time the tightest of the control groups gives, rounded up, or None where none limits it.

    groups, root: see `llama.host.cgroups.folders_of`.
    """
    found: list[int] = []
    for generation, folder in folders_of("cpu", groups, root):
        if generation == 2:
            words = (text_of(folder / "cpu.max") or "max").split()
        else:
            words = [text_of(folder / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period")]
        if words[0] != "max" and int(words[0]) > 0:
            found.append(-(-int(words[0]) // int(words[1])))
    return min(found, default=None)


def threads() -> int:
    """Return with how many threads this process computes, or will once torch is imported."""
    count: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return count() if count is not None else next(filter(None, map(_number, _COUNTS)), usable_cores())


def use_threads(asked: int | None) -> None:
    """Compute with so many threads from now on, in this process and in those that it starts.

    None follows MKL_NUM_THREADS or OMP_NUM_THREADS, and else torch, which takes a thread for each core that it is
    bound to at most, but does not know of a quota. Raises ValueError for a count that no such machine could use.
    """
    most = _MOST_PER_CORE * (os.cpu_count() or 1)
    if asked is not None and not 1 <= asked <= most:
        raise ValueError(
            f"--threads={asked} must be from 1 to {most}, which is {_MOST_PER_CORE} for each of this machine's cores"
        )
    if asked is None:
        if any(name in os.environ for name in _COUNTS) or usable_cores() == bound_cores():
            return
        asked = min(threads(), usable_cores())
    os.environ.update(dict.fromkeys(_COUNTS, str(asked)))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(asked)


def say_if_crowded(say: Callable[[str], None]) -> None:
    """Say that there are more threads than cores that this process may use: a late thread delays all others.

    The ranks of a torchrun on this host count together, and the first of them says so.
    """
    ranks, cores, count = _number("LOCAL_WORLD_SIZE") or 1, usable_cores(), threads()
    if count > 1 and ranks * count > cores and not _number("LOCAL_RANK"):
        say(
            f"{ranks * count} threads on the {cores} core{'s' * (cores > 1)} that this process may use wait for each "
            f"other, which can take many times as long; give --threads {max(1, cores // ranks)}"
        )


class FreeCores:
    """A look at the machine that begins now; `choose_threads` ends it and leaves occupied cores to the other work."""

    def __init__(self) -> None:
        self._load, self._began = OtherLoad(), time.perf_counter()
        self._load.start()

    def choose_threads(self, say: Callable[[str], None], *, known: int | None = None) -> None:
        """Compute with no more threads than there are free cores, and say so; call it before the first computation.

        `known`: the count that an earlier part of the same run computed with, which is used instead of a look.

        Threads meet at barriers several times a layer, where all wait for the one whose core is occupied: a forward can
        take many times as long as with one thread. A count that the user or a quota sets stays, and so do the ranks of
        a torchrun, which are busy side by side. Waits until the look has lasted half a second.
        """
        count = threads()
        if count == 1 or (_number("LOCAL_WORLD_SIZE") or 1) > 1 or any(name in os.environ for name in _COUNTS):
            return
        if known is not None:
            use_threads(known)
            return
        time.sleep(max(0.0, self._began + LEAST_SECONDS - time.perf_counter()))
        others, cores = self._load.stop(), os.cpu_count() or 1
        free = cores if others is None else min(usable_cores(), cores - others)
        chosen = max(1, int(free + 0.5))
        if others is not None and chosen < count:
            use_threads(chosen)
            say(
                f"other work occupies {others:.1f} of {cores} cores: computing with {chosen} "
                f"thread{'s' * (chosen > 1)} instead of {count}; --threads {count} uses them all the same"
            )


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def disturbs(others: float, cores: int) -> bool:
    """Tell whether others that keep so many of the cores busy spoil times that are taken beside them."""
    return others > BUSY_SHARE * cores


class OtherLoad:
    """How many cores were busy with the work of others: `start()` before a stretch of work, `stop()` after it.

    The kernel counts in hundredths of a second, so a stretch of much less than a second tells little. In a container
    the others may be all of the host's. Our own children are others until we have waited for their end, and so is what
    a hypervisor ran instead of us.
    """

    def __init__(self) -> None:
        self._started: tuple[float, float, float | None] | None = None

    def start(self) -> None:
        self._started = self._clocks()

    def stop(self) -> float | None:
        """Return the mean count of busy cores since `start()`, or None where the kernel does not tell."""
        assert self._started is not None, "stop() without start()"
        began, own_before, all_before = self._started
        now, own, everyone = self._clocks()
        if everyone is None or all_before is None:
            return None
        return max(0.0, (everyone - all_before - (own - own_before)) / (now - began))

    def _clocks(self) -> tuple[float, float, float | None]:
        """Return the seconds on the wall, those of our threads and ended children, and those of all cores."""
        return time.perf_counter(), sum(os.times()[:4]), _busy_seconds()


def _busy_seconds() -> float | None:
    text = text_of(Path("/proc/stat"))
    if not text:  # some containers mask the file
        return None
    ticks = [int(field) for field in text.partition("\n")[0].split()[1:]]
    return sum(ticks[i] for i in _ALL_BUSY) / os.sysconf("SC_CLK_TCK")
