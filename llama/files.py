"""Where files go: results, replaced as a whole and known beforehand to be writable; and the user's cache directory.

And texts that come in, of which no more is read than anyone could use; and how a stranger's file is opened, without
waiting for it. Knows nothing of what stands in them.
"""

import errno
import os
import select
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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


def check_writable(path: Path) -> None:
    """Raise OSError now, not after minutes of measuring, where the file could not be written."""
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(target)
    new.touch()
    new.unlink()


def _target(path: Path) -> Path:
    """Return the file that is meant, behind links, which stay; raise OSError for what is there and no regular file."""
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
    """Write the file, or replace it, as a whole, and return its path.

    A reader, or an interruption, never meets half of one. Raises OSError where it cannot be written.
    """
    with replacing(path) as new:
        new.write_bytes(content)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a new file beside this one, which takes its place once the block has ended well, or is gone.

    Of a link, the file that it leads to is replaced.
    """
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(target)
    try:
        yield new
        os.replace(new, target)
    finally:
        with suppress(OSError):  # its folder may be gone
            new.unlink(missing_ok=True)


def keep_file(path: Path, content: bytes) -> Path:
    """Write the file like `replace_file`; where that fails, put the content where it is not lost.

    That is a file in the folder for temporary ones, or else standard output. Raises OSError that says where.
    """
    try:
        return replace_file(path, content)
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror or error}"
    try:
        handle, name = tempfile.mkstemp(prefix=f"{path.stem[:100]}-", suffix=path.suffix[:20])
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    except OSError as error:
        print(content.decode(), flush=True)
        raise OSError(f"{why}; nor any other file: {error.strerror}; what was made is on standard output") from None
    raise OSError(f"{why}; what was made is kept in {name}")


def replace_private(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts as a file that only its owner may read, or replace it, as a whole.

    The folder must exist. If the path is a link, the file that it leads to is replaced. Raises OSError if the file
    cannot be written, or is a device, a pipe or a directory; what is there then stays as it is.
    """
    target = _target(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".new")  # of mode 0600
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # or a machine that goes down now might keep the name and lose the content
        os.replace(new, target)
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
