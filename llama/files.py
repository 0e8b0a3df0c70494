"""Where files go: results, replaced as a whole and known beforehand to be writable; and the user's cache directory.

Knows nothing of what stands in them.
"""

import errno
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError now, not after minutes of measuring, where the file could not be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    new = _beside(path)
    new.touch()
    new.unlink()


def replace_file(path: Path, content: bytes) -> Path:
    """Write the file, or replace it, as a whole, and return its path.

    A reader, or an interruption, never meets half of one. Raises OSError where it cannot be written.
    """
    with replacing(path) as new:
        new.write_bytes(content)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a new file beside this one, which takes its place once the block has ended well, or is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path)
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def replace_private(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts as a file that only its owner may read, or replace it, as a whole.

    The folder must be there. Raises OSError where the file cannot be written; the old one then stays as it is.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".new")  # of mode 0600
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # or a machine that goes down now might keep the name and lose the content
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Return the folder of what is fetched or compiled: $LLAMA_CACHE_DIR, else llama-kv in the user's cache."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("LLAMA_CACHE_DIR") or f"{base}/llama-kv").expanduser()
    except RuntimeError as error:  # a user without a home, as containers have them
        raise RuntimeError(f"{error} Set LLAMA_CACHE_DIR to a folder that can be written") from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")
