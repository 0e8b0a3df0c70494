"""Watch a parser for forbidden actions: opening a file elsewhere, a socket, a process.

Python cannot remove an audit hook, so there is one, which does nothing outside `watching`.
"""

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LIBRARIES = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
# What is imported late is read there; what a parser is given lies in the folder of temporary files.
_READABLE = tuple({os.path.realpath(place) for place in (*_LIBRARIES, ROOT, tempfile.gettempdir())})
_WRITABLE = (os.path.realpath(tempfile.gettempdir()),)
_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.")
_FORBIDDEN += ("ctypes.dlopen",)

_active = False
_seen: list[str] = []
_installed = False


@contextmanager
def watching() -> Iterator[None]:
    """Fail at the end of the block for what a parser must not do in it, whatever became of the attempt."""
    global _active, _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    _seen.clear()
    _active = True
    try:
        yield
    finally:
        _active = False
    assert _seen == [], f"a parser reached out: {_seen[:5]}"


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active and (event.startswith(_FORBIDDEN) or (event == "open" and not _allowed(*arguments))):
        _seen.append(f"{event}{arguments!r:.300}")


def _allowed(path: object, mode: str | None, flags: int) -> bool:
    if not isinstance(path, str | bytes):
        return True  # a file that is open already, by its number
    real = os.path.realpath(os.fsdecode(path))
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    # Imports keep what they compile beside the source.
    return real.startswith(_WRITABLE if writes and "__pycache__" not in real else _READABLE)
