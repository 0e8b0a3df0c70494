"""Open, map and read regular files and texts, without reading more than a limit."""

import ctypes
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

TEXT_LIMIT = 2**30  # bytes of a text to score

# Without O_NONBLOCK opening a named pipe waits for its other end; without O_BINARY Windows changes line ends.
_READ_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_KINDS_OF_FILE = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading bytes.

    Raises ValueError at once for anything else: it does not wait for a pipe or touch a device. Raises OSError if there
    is no file or it may not be read.
    """
    check_regular(os.stat(path).st_mode)
    handle = os.open(path, _READ_AT_ONCE)
    try:
        check_regular(os.fstat(handle).st_mode)  # again: the name may lead elsewhere by now
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(mode: int) -> None:
    """Raise ValueError unless the mode, as `os.stat` gives it, is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise ValueError(f"it is {_KINDS_OF_FILE.get(stat.S_IFMT(mode), 'something else')}, not a regular file")


def read_regular(path: Path, *, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises as `open_regular`, and ValueError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise ValueError(f"longer than {limit:,} bytes")
    return data


def read_text(path: Path, *, limit: int) -> str:
    """Return the UTF-8 text of a file, without a byte order mark, and with newlines as line ends.

    Raises ValueError for more than `limit` bytes, without reading them, and for text that is not UTF-8; OSError if the
    file cannot be opened.
    """
    parts, size = [], 0
    with open(path, "rb") as file:
        while size <= limit and (part := file.read(min(1 << 20, limit + 1 - size))):
            parts.append(part)
            size += len(part)
    if size > limit:
        raise ValueError(f"{path} is longer than {limit / 1e6:,.0f} MB, the limit for a text; cut it")
    try:
        text = b"".join(parts).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def mapped(path: Path) -> mmap.mmap:
    """Return the bytes of a regular file, mapped copy-on-write: unchanged pages are shared between processes."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("it is empty")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def release(address: int, nbytes: int) -> None:
    """Release the pages of bytes that are mapped from a file; they are read again if they are used again.

    Memory that is not mapped from a file would lose its content.
    """
    if sys.platform == "linux":
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        length = address + nbytes - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
