"""Linux's control groups, which share out a machine: the folders in which they say what this process may have.

Knows where groups stand, of both generations; what stands in their files, callers know.
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/index.html
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def own_groups() -> str:
    """Return what the kernel says of the groups of this process; nothing where it has none."""
    return text_of(Path("/proc/self/cgroup")) or ""


def folders_of(controller: str, groups: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (generation, folder) of the groups that share out `controller`, a group before its ancestors.

    groups: as `own_groups` returns it. root: where groups are mounted. Every ancestor's limit holds as well.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        generation, top = (1, root / controller) if controllers else (2, root)
        inmost = top / path.lstrip("/")
        yield from ((generation, folder) for folder in (inmost, *inmost.parents) if folder.is_relative_to(top))


def text_of(file: Path) -> str | None:
    """Return what stands in a file of the kernel's, or None where it has no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
