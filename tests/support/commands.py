"""Commands in this process, with their exit codes and all that they print."""

import io
from collections.abc import Callable

import pytest

from llama import cli

Main = Callable[..., int]


class Command:
    """Runs the function of a command with the words of a command line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, main: Main, *words: object) -> tuple[int, str, str]:
        """Return the exit code, the text on standard output and that on standard error."""
        return cli.run(main, list(map(str, words))), *self.capsys.readouterr()

    def printed(self, main: Main, *words: object) -> str:
        """Return the output of a command that succeeds and writes nothing to standard error."""
        code, out, err = self(main, *words)
        assert (code, err) == (0, "")
        return out

    def refused(self, main: Main, *words: object) -> str:
        """Return the line of a command that ends with an error, and prints nothing else."""
        code, out, err = self(main, *words)
        assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: ")
        return err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
