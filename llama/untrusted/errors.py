"""The error of a file that cannot be used, and how whatever a reader raises becomes one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama.untrusted.words import printable


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: which path, and why.

    Names in it come from files of strangers: its text is one line, short, and acts on no terminal.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, printable(reason))
        self.path, self.reason = path, printable(reason)

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


@contextmanager
def refusing(path: Path, reason: str) -> Iterator[None]:
    """Turn whatever reading the file raises into a CheckpointError.

    Everything is caught, because parsers raise everything on damaged bytes: KeyError, struct.error, RecursionError,
    MemoryError, and the panic of a library in Rust, which is no Exception.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        detail = str(error).strip().partition("\n")[0].removeprefix(str(path)).lstrip(" ,:") or type(error).__name__
        raise CheckpointError(path, f"{reason}: {detail}") from error
