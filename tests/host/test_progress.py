"""In a file or pipe, long work prints its progress in plain lines, and short work prints nothing."""

import sys
import threading

import pytest
from commands import Terminal
from tqdm import tqdm

from llama.host import progress
from llama.host.progress import EVERY_S as REAL_S  # before the tests' own value is set
from llama.host.progress import progress_bar, seconds_bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "EVERY_S", REAL_S)
    return now


def test_a_log_has_a_line_every_ten_seconds_and_no_carriage_return(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("scoring", total=400, unit="token") as bar:
        for _ in range(400):  # 40 seconds
            clock[0] += 0.1
            bar.update()
            bar.refresh()
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert len(lines) in (3, 4)
    assert all(line.startswith("scoring") and line.endswith("\n") and "\r" not in line for line in lines)
    assert "/400 [" in lines[0]


def test_work_of_less_than_ten_seconds_leaves_a_log_empty(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with seconds_bar("a cell") as bar:
        clock[0] += 9.0
        bar.update(9.0)
        bar.refresh()
        bar.set_description("another")
    assert capsys.readouterr() == ("", "")


def test_control_characters_of_a_bar_and_above_it_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("\x9b2J\a", total=2) as bar:
        bar.write("\033]0;title\a")
        bar.set_description_str("\033[31m")
    shown = terminal.getvalue()
    assert "\\x9b2J␇" in shown
    assert "␛]0;title␇\n" in shown
    assert "␛[31m" in shown
    assert not set(shown) & set("\a\x9b")


def test_lines_count_and_notes_are_printed_between_them(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with seconds_bar("a cell") as bar:
        bar.total = bar.n + 60.0
        bar.update(30.0)
        assert (bar.n, bar.total) == (30.0, 60.0)
        bar.write("a note")
        clock[0] += 11.0
        bar.refresh()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "a note"
    assert second.startswith("a cell |")
    assert second.endswith(" left")


def test_lines_start_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with progress_bar("loading", total=1):
        assert threading.active_count() == before


def test_only_the_first_rank_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert progress_bar("loading").disable
    monkeypatch.setenv("RANK", "0")
    with progress_bar("loading") as bar:
        assert not bar.disable


def test_on_a_terminal_it_is_a_bar_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("loading", total=100, unit="B") as bar:
        assert isinstance(bar, tqdm)
        assert not isinstance(bar, progress._Lines)
        bar.update(50)
        bar.refresh()
    assert "50.0/100" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_without_standard_error_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar("loading", total=1) as bar:
        bar.update()
