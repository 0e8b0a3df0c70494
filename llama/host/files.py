"""Replace files as a whole, check beforehand that they can be written, and find the user's cache directory."""

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llama.untrusted.files import check_regular


def check_writable(path: Path) -> None:
    """Raise OSError now, and not after minutes of measuring, if the file cannot be written."""
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(target)
    new.touch()
    new.unlink()


def _target(path: Path) -> Path:
    """Return the path behind links. Raises OSError if something else than a regular file is there."""
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        check_regular(mode)
    except ValueError as error:
        raise FileExistsError(errno.EEXIST, f"{error}; give another name", str(path)) from None
    return target


def replace_file(path: Path, content: bytes) -> Path:
    """Write or replace the file as a whole, and return its path: no reader sees an incomplete file.

    Raises OSError if it cannot be written.
    """
    with replacing(path) as new:
        new.write_bytes(content)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces this one at the end of the block, or is deleted after an exception.

    If the path is a link, the file that it leads to is replaced.
    """
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(target)
    try:
        with naming(path):
            yield new
            os.replace(new, target)
    finally:
        with suppress(OSError):  # its folder may be gone
            new.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a write, such as on a full disk, which names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def replacing_private(path: Path) -> Iterator[Path]:
    """Do as `replacing`, with an empty file that only its owner may read, which is written to disk at the end.

    Raises OSError if the path is a device, a pipe or a directory; it then stays unchanged.
    """
    with replacing(path) as new:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield new
        with open(new, "r+b") as file:  # again: the block may have put another file in its place
            os.fsync(file.fileno())  # else a crash of the machine may leave the name without the content


def lock_file(file: BinaryIO, *, wait: bool = False) -> None:
    """Lock an open file until it is closed or its process is killed; Windows has no lock.

    If another process has it, wait, or raise BlockingIOError. Raises OSError on a file system without locks.
    """
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "another process writes it; wait for its end", file.name) from None


def cache_dir() -> Path:
    """Return the folder of downloads and compiled code: $LLAMA_CACHE_DIR, else llama-kv in the user's cache."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("LLAMA_CACHE_DIR") or f"{base}/llama-kv").expanduser()
    except RuntimeError as error:  # a user without a home, as in containers
        raise RuntimeError(f"{error} Set LLAMA_CACHE_DIR to a folder that can be written") from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.new")
