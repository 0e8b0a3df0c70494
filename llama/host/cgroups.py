"""Linux's control groups, which limit the resources of processes: the folders of the groups of this process,
and their quota of cores.

Knows the layout of both generations. The callers know the files in the folders.
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/index.html
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def own_groups() -> str:
    """Return the kernel's list of the groups of this process; "" if there is none."""
    return kernel_text(Path("/proc/self/cgroup")) or ""


def folders_of(controller: str, groups: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (generation, folder) of the groups that `controller` limits, a group before its ancestors.

    groups: as `own_groups` returns it. root: where groups are mounted. The limit of every ancestor holds too.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        generation, top = (1, root / controller) if controllers else (2, root)
        inmost = top / path.lstrip("/")
        yield from ((generation, folder) for folder in (inmost, *inmost.parents) if folder.is_relative_to(top))


def quota(groups: str, root: Path) -> int | None:
    """Return the smallest quota of the control groups in cores, rounded up; None if no group has one.

    groups, root: see `folders_of`.
    """
    found: list[int] = []
    for generation, folder in folders_of("cpu", groups, root):
        if generation == 2:
            words = (kernel_text(folder / "cpu.max") or "max").split()
        else:
            words = [kernel_text(folder / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period")]
        if words[0] != "max" and int(words[0]) > 0:
            found.append(-(-int(words[0]) // int(words[1])))
    return min(found, default=None)


def kernel_text(file: Path) -> str | None:
    """Return the text of one of the kernel's files, or None if there is no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
