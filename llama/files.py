"""Files of results: replaced as a whole, and known beforehand to be writable. Knows nothing of what stands in them."""

import errno
import os
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
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path)
    try:
        new.write_bytes(content)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")
