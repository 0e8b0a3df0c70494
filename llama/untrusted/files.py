"""Open and read regular files and texts, without waiting for a pipe and without reading more than a limit.

Knows nothing of what a file says.
"""

import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

TEXT_LIMIT = 2**30  # bytes of a text to score
WRITER_S = 5.0  # how long a named pipe is waited for that nobody has opened to write

# Opening a named pipe would wait for its other end; on Windows a text file would lose bytes.
_READ_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_KINDS_OF_FILE = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or the one that a link leads to, for reading bytes.

    Raises ValueError for whatever else stands there, at once: a pipe is not waited for, a device not touched. OSError
    where there is nothing, or nothing that may be read.
    """
    check_regular(os.stat(path).st_mode)
    handle = os.open(path, _READ_AT_ONCE)
    try:
        check_regular(os.fstat(handle).st_mode)  # of what was opened, should the name lead elsewhere by now
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(mode: int) -> None:
    """Raise ValueError unless the mode, as `os.stat` gives it, is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise ValueError(f"it is {_KINDS_OF_FILE.get(stat.S_IFMT(mode), 'something else')}, not a regular file")


def read_regular(path: Path, *, limit: int) -> bytes:
    """Return what a regular file holds, once its size is known to be at most `limit` bytes; else as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise ValueError(f"longer than {limit:,} bytes")
    return data


def read_text(path: Path, *, limit: int) -> str:
    """Return the text of a file, UTF-8, with its line ends as newlines.

    A pipe is read to its end. Raises ValueError for more than `limit` bytes, which are not read either, for what is no
    UTF-8, and for a pipe that nobody writes to; OSError where the file cannot be opened.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would be waited for here

    with open(path, "rb", buffering=0, opener=open_at_once) as file:
        parts = [_first_of_pipe(file.fileno(), path)] if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) else []
        if os.name == "posix":
            os.set_blocking(file.fileno(), True)
        size = sum(map(len, parts))
        while size <= limit and (part := file.read(min(1 << 20, limit + 1 - size))):
            parts.append(part)
            size += len(part)
    if size > limit:
        raise ValueError(f"{path} holds more than the {limit / 1e6:,.0f} MB that are read of a text; cut it")
    return text_of(b"".join(parts), str(path))


def text_of(content: bytes, name: str) -> str:
    """Return bytes as text, with newlines as line ends; raise ValueError, with the name, where they are no UTF-8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _first_of_pipe(file: int, path: Path) -> bytes:
    """Return what comes first out of a pipe, however long its writer takes, if it has one."""
    while not select.select([file], [], [], WRITER_S)[0]:
        try:
            if part := os.read(file, 1):
                return part
        except BlockingIOError:
            continue  # there is a writer
        raise ValueError(f"{path} is a named pipe that nobody writes to")
    return b""
