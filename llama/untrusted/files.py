"""Open and read regular files and texts, without waiting for a pipe and without reading more than a limit."""

import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

TEXT_LIMIT = 2**30  # bytes of a text to score
WRITER_S = 5.0  # seconds to wait for a named pipe without a writer

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
    """Return the UTF-8 text of a file or of a pipe, with newlines as line ends.

    Raises ValueError for more than `limit` bytes, without reading them, for text that is not UTF-8, and for a pipe
    without a writer; OSError if the file cannot be opened.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # else it waits for the writer of a pipe

    with open(path, "rb", buffering=0, opener=open_at_once) as file:
        parts = [_first_of_pipe(file.fileno(), path)] if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) else []
        if os.name == "posix":
            os.set_blocking(file.fileno(), True)
        size = sum(map(len, parts))
        while size <= limit and (part := file.read(min(1 << 20, limit + 1 - size))):
            parts.append(part)
            size += len(part)
    if size > limit:
        raise ValueError(f"{path} is longer than {limit / 1e6:,.0f} MB, the limit for a text; cut it")
    return text_of(b"".join(parts), str(path))


def text_of(content: bytes, name: str) -> str:
    """Return bytes as text, with newlines as line ends. Raises ValueError with the name if they are not UTF-8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _first_of_pipe(file: int, path: Path) -> bytes:
    """Return the first byte of a pipe, however long its writer takes. Raises ValueError if it has no writer."""
    while not select.select([file], [], [], WRITER_S)[0]:
        try:
            if part := os.read(file, 1):
                return part
        except BlockingIOError:
            continue  # there is a writer
        raise ValueError(f"{path} is a named pipe without a writer")
    return b""
