"""The version of the package, and a digest of its code, which also changes between two releases."""

import hashlib
from pathlib import Path

__version__ = "0.3.0"

_PACKAGE = Path(__file__).parents[1]


def code_digest() -> str:
    """Return a digest of the names and bytes of all Python files of the package: any of them may decide a text.

    Without the files, for example beside .pyc files alone, it is a constant. Native code has its own digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(filter(Path.is_file, _PACKAGE.rglob("*.py"))):  # Emacs's links .#NAME.py lead nowhere
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()!r} {len(content)}\n".encode() + content)
    return digest.hexdigest()
