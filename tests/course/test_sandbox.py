"""A submission that loops, forks, floods or deletes gets 0 points and the reason, and grading goes on."""

import inspect
import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tables import cases

from course import grade
from course.exercises import CACHE
from course.make import KIT, make
from course.sandbox import Limits, Outcome, run
from llama import cli

TIGHT = Limits(seconds=20.0, memory_bytes=2**30, file_bytes=2**20, printed_bytes=2**16, processes=8)
HOSTILE = {
    "loops": ("while True: pass", "not done after 1 s|more CPU time"),
    "forks": ("import os\nwhile True: os.fork()", "more than 8 processes"),
    "forks into other sessions": (
        "import os, time\nfor _ in range(20):\n  if os.fork() == 0: os.setsid(), time.sleep(100)\ntime.sleep(100)",
        "more than 8 processes",
    ),
    "prints": ("while True: print('x' * 1000)", "printed more than"),
    "closes its output": ("import os, time\nos.close(1), os.close(2)\ntime.sleep(100)", "not done after 1 s"),
    "takes memory": ("x = bytearray(2**31)", "MemoryError"),
    "writes a large file": ("open('large', 'wb').write(b'x' * 2**22)", "File too large|SIGXFSZ"),
    "deletes its files": (
        "import os, shutil\nshutil.rmtree(os.getcwd())\nraise SystemExit",
        "deleted or changed .* of its own files",
    ),
    "changes itself": (
        "open(__file__, 'a').write('# more')",
        "deleted or changed 1 of its own files, llama/__init__.py",
    ),
    "leaves at once": ("import os; os._exit(0)", "exit code 0 before it was tried"),
    "does not parse": ("def (:", "SyntaxError"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
    "has no package": (None, "no folder llama"),
    "has an empty package": ("", "ModuleNotFoundError"),
    "puts a pipe in place of itself": (
        "import os; os.unlink(__file__); os.mkfifo(__file__); raise SystemExit",
        "deleted or changed 1 of its own files",
    ),
    "writes results of its own": (
        'import sys; open(sys.argv[2], \'w\').write(\'{"signature": "mine", "steps": {}}\'); raise SystemExit',
        "not those of the grader",
    ),
}


def submission(folder: Path, code: str | None) -> Path:
    folder.mkdir()
    (folder / "TASK.md").write_text(CACHE.title)
    if code is not None:
        (folder / "llama").mkdir()
        (folder / "llama" / "__init__.py").write_text(code)
    return folder


SOME = ("loops", "forks", "takes memory", "deletes its files", "writes results of its own")


@pytest.mark.parametrize("name", cases(HOSTILE, *SOME))
def test_a_submission_that_cannot_run_gets_the_reason(name: str, tmp_path: Path) -> None:
    code, reason = HOSTILE[name]
    limits = replace(TIGHT, seconds=1.0) if "not done" in reason else TIGHT
    outcome = run(submission(tmp_path / "it", code), limits)
    graded = grade.grade(tmp_path / "it", outcome, {})
    assert graded.points == 0
    assert re.search(reason, graded.reason), graded.reason


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="who has left the session is found in /proc alone")
def test_a_child_that_left_the_session_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(note)!r}, "w").write(str(os.getpid()))
        time.sleep(100)
    os._exit(0)
while not os.path.exists({str(note)!r}): time.sleep(0.01)
raise SystemExit
"""
    run(submission(tmp_path / "it", code), TIGHT)
    pid = int(note.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_folders_deep_in_folders_end_no_grading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = submission(tmp_path / "it", "import os\nfor _ in range(400): os.mkdir('d'), os.chdir('d')\nraise SystemExit")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)  # a folder that pytest can remove is too deep then
    try:
        assert re.search("recursion depth|exit code 0 before", run(it, TIGHT).reason)
    finally:
        sys.setrecursionlimit(limit)


def test_a_submission_sees_only_folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of the teacher")
    code = "import os; print(sorted(os.environ), os.environ['HOME'], os.getcwd()); raise SystemExit(1)"
    outcome = run(submission(tmp_path / "it", code), TIGHT)
    assert "A_SECRET" not in outcome.printed
    assert str(Path.home()) not in outcome.printed.split()
    assert str(tmp_path) not in outcome.printed


def test_links_are_not_followed_and_large_folders_refused(tmp_path: Path) -> None:
    it = submission(tmp_path / "it", "import os; print(os.listdir('.')); raise SystemExit(1)")
    (it / "link").symlink_to("/etc/passwd")
    os.mkfifo(it / "pipe")
    outcome = run(it, TIGHT)
    assert "link" not in outcome.printed
    assert "pipe" not in outcome.printed
    assert "more than 0 files" in run(it, Limits(tree_files=0)).reason


def test_originals_that_a_submission_changes_are_noticed(tmp_path: Path) -> None:
    it = tmp_path / "it"
    submission(it, f"open({str(it / 'llama' / '__init__.py')!r}, 'a').write('#'); raise SystemExit")
    assert "the originals of its files" in run(it, TIGHT).reason


def test_grading_continues_and_ends_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grade, "real_facts", lambda *_: {})  # no submission here gets as far as being compared
    paths = [submission(tmp_path / name, HOSTILE[name][0]) for name in ("leaves at once", "prints", "has no package")]
    written = tmp_path / "grades.json", tmp_path / "grades.csv"
    code = cli.run(
        grade.main, [*map(str, paths), "--seconds", "20", "--json", str(written[0]), "--csv", str(written[1])]
    )
    assert code == 0
    assert [one["points"] for one in json.loads(written[0].read_text())] == [0, 0, 0]
    assert len(written[1].read_text().splitlines()) == 4
    table = capsys.readouterr().out.rstrip().splitlines()[-3:]
    assert all("  0  " in line for line in table)


def test_bad_flags_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for words in (["--json", "."], ["--csv", "."], ["--seconds", "nan"], ["--seconds", "-1"]):
        assert cli.run(grade.main, [str(tmp_path), *words]) == 2, words


@pytest.mark.slow
def test_the_exercise_as_it_is_set_is_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "exercise")
    assert cli.run(grade.main, [str(tmp_path / "exercise")]) == 0
    printed = capsys.readouterr().out
    assert "0 of 100 points" in printed
    assert "TODO 1 in llama/model.py, Attention.forward" in printed


def test_escapes_of_a_submission_are_not_printed(tmp_path: Path) -> None:
    outcome = run(submission(tmp_path / "it", "print('\\x1b[2J'); raise SystemExit(1)"), TIGHT)
    assert "\x1b" in outcome.printed
    text = grade.as_text(grade.grade(tmp_path / "it", outcome, {}))
    assert "\x1b" not in text
    assert "[2J" in text


def test_a_report_is_required_only_where_that_is_said_and_its_empty_rows_are_named(tmp_path: Path) -> None:
    facts = Outcome(facts={"steps": {"error": {"type": "NotImplementedError", "words": ""}}})
    report, figures = tmp_path / "report.md", " 2.65 | 663.9 | 204.1 | 51.8 |"
    empty = (KIT / "report.md").read_text()
    filled = empty.replace("| | | | |", f"|{figures}")
    for text, lacking in (
        (empty, ["batch 1, cache on", "batch 8, cache off", "batch 16, cache off"]),
        (6 * f"| 8 | on |{figures}\n", ["batch 1, cache on", "batch 8, cache off"]),  # the same row six times
        (filled.replace(f"| 16 | off |{figures}", "| 16 | off | 2.65 | | | |"), ["batch 16, cache off"]),
        (filled, []),
    ):
        report.write_text(text)
        found = [one.where for one in grade.grade(tmp_path, facts, {}, report=True).findings if one.name != "todo-left"]
        assert len(found) == bool(lacking)
        assert [row for row in lacking if row not in found[0]] == []
    report.unlink()
    names = [[one.name for one in grade.grade(tmp_path, facts, {}, report=wanted).findings] for wanted in (True, False)]
    assert names == [["todo-left", "report-missing"], ["todo-left"]]


def test_changed_files_of_the_grader_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([["as it was"], ["changed"]])
    monkeypatch.setattr(grade, "real_facts", lambda *_: {})
    monkeypatch.setattr(grade, "_own_digests", lambda: next(states))
    assert cli.run(grade.main, [str(submission(tmp_path / "it", None))]) == 2
