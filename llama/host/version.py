"""The version of the package, and digests of its code and of users' files, which change between two releases, too."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

__version__ = "0.3.0"

_PACKAGE = Path(__file__).parents[1]
WHOLE, BLOCKS, BLOCK = 2**24, 256, 4096  # bytes of a file that is read as a whole; of others, blocks and their bytes


def code_digest() -> str:
    """Return a digest of the names and bytes of all Python files of the package: any of them may decide a text.

    Without the files, for example beside .pyc files alone, it is a constant. Native code has its own digest.
    """
    files = sorted(filter(Path.is_file, _PACKAGE.rglob("*.py")))  # Emacs's links .#NAME.py lead nowhere
    return _digest((path.relative_to(_PACKAGE).as_posix(), path) for path in files)


def content_digest(*paths: str | Path) -> str:
    """Return a digest of the content of files, and of the files in folders with their names. Raises OSError.

    Of a file over WHOLE bytes, blocks at equal distances are read: in weights that were trained again, all differ.
    """
    files = list[tuple[str, Path]]()
    for path in map(Path, paths):
        inside = sorted(path.iterdir()) if path.is_dir() else []
        files += [(one.name, one) for one in inside if one.is_file()] or [("", path)]
    return _digest(files)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files:
        size = path.stat().st_size if path.is_file() else 0  # opening a pipe would block
        digest.update(f"{name!r} {size}\n".encode())
        with open(path if size else os.devnull, "rb") as file:
            for i in range(BLOCKS if size > WHOLE else 1):
                file.seek(i * (size - BLOCK) // (BLOCKS - 1) if size > WHOLE else 0)
                digest.update(file.read(BLOCK if size > WHOLE else size))
    return digest.hexdigest()
