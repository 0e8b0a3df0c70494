"""Some hundred malicious inputs for every parser: each gets one of the parser's errors, or a valid result."""

import socket
from pathlib import Path

import pytest
from fuzz.driver import parsers, run_plainly
from fuzz.watch import watching


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", parsers())
def test_parsers_raise_only_their_errors_on_mutated_inputs(name: str, times: int) -> None:
    executions = times * (15 if name in ("tokenizer.json", "tokenizer.model") else 100)  # libraries take milliseconds
    assert run_plainly(name, executions=executions, seed=times) == executions


def test_the_watch_sees_files_elsewhere_and_sockets_even_where_the_error_is_caught(tmp_path: Path) -> None:
    with watching():
        (tmp_path / "mine").write_text("x")
    with pytest.raises(AssertionError, match="a parser reached out"), watching():
        Path("/etc/passwd").open("rb").close()
    with pytest.raises(AssertionError, match="a parser reached out"), watching():
        socket.socket().close()
