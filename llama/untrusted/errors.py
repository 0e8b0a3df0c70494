"""The error for a file that cannot be used, and a context manager that raises it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama.untrusted.words import printable


class CheckpointError(ValueError):
    """A checkpoint cannot be used: `path` and `reason`.

    The reason may quote an untrusted file. The message is one line of less than 1,000 printable characters.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, printable(reason))
        self.path, self.reason = path, printable(reason)

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


@contextmanager
def refusing(path: Path, reason: str) -> Iterator[None]:
    """Turn every exception of a parser into a CheckpointError.

    Parsers raise anything on damaged bytes: KeyError, struct.error, RecursionError, MemoryError, and a panic of a
    Rust library, which is not an Exception.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        detail = str(error).strip().partition("\n")[0].removeprefix(str(path)).lstrip(" ,:") or type(error).__name__
        raise CheckpointError(path, f"{reason}: {detail}") from error
