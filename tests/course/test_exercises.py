"""The four exercises that are tried by course/trials/: right solutions are accused of nothing, mistakes are named."""

import importlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from planted import plants, variants

from course import grade
from course.diagnose import Finding, explain
from course.exercises import CACHE, EXERCISES, Exercise
from course.make import ROOT, make
from course.probe import plain, tried
from course.sandbox import Limits, Outcome
from llama import cli
from llama.kv_cache import KVCache

Facts = dict[str, Any]
TRIED = [exercise for exercise in EXERCISES.values() if exercise is not CACHE]
MISSED = {"truncate": 1, "int8": 0, "eviction": 0, "lookup": 0}  # mistakes that are reported as unknown
PAGE = (ROOT / "docs" / "course.md").read_text("utf-8")


def cases_of(*default: str) -> pytest.MarkDecorator:
    """Give a test each exercise; those that are not named are slow."""
    marks = {one.name: [] if one.name in default else [pytest.mark.slow] for one in TRIED}
    return pytest.mark.parametrize("exercise", [pytest.param(one, id=one.name, marks=marks[one.name]) for one in TRIED])


class Workbench:
    """The module that an exercise is about, in this process, with the text of a submission."""

    def __init__(self, exercise: Exercise) -> None:
        self.file = exercise.holes[0].file
        self.text = (ROOT / self.file).read_text("utf-8")
        self.home = importlib.import_module(self.file.removesuffix(".py").replace("/", "."))
        self.trials = importlib.import_module(f"course.trials.{exercise.name}")

    def facts(self, text: str, *, versions: bool = False) -> Facts:
        exec(compile(text, self.file, "exec"), vars(self.home))
        return json.loads(json.dumps(tried(self.trials, str(ROOT), versions=versions)))


@pytest.fixture
def workbench() -> Iterator[Callable[[Exercise], Workbench]]:
    kinds, homes = dict(KVCache.kinds), list[tuple[ModuleType, Facts]]()

    def workbench_of(exercise: Exercise) -> Workbench:
        bench = Workbench(exercise)
        homes.append((bench.home, dict(vars(bench.home))))
        return bench

    yield workbench_of
    for home, before in homes:
        vars(home).clear()
        vars(home).update(before)
    KVCache.kinds.clear()
    KVCache.kinds.update(kinds)


@pytest.mark.parametrize(
    ("name", "every"), [("lookup", 5), *(pytest.param(one.name, 1, marks=pytest.mark.slow) for one in TRIED)]
)
def test_right_variants_are_accused_of_nothing_and_mistakes_are_named(
    name: str, every: int, workbench: Callable[[Exercise], Workbench]
) -> None:
    """All mistakes are named but MISSED, which are reported as they were seen; none is taken for another one."""
    exercise, tried_ones = EXERCISES[name], variants(name)[::every]
    bench = workbench(exercise)
    right = bench.facts(bench.text, versions=True)
    missed = []
    for variant in tried_ones:
        found = explain(bench.facts(variant.source(exercise, bench.text)), right)
        names = [finding.name for finding in found]
        if names != [variant.found] * bool(variant.found):
            assert variant.found, f"{variant.name} is right, and is accused: {found}"
            assert names == ["unknown"], f"{variant.name} is {variant.found}, and is taken for another: {found}"
            missed.append(variant)
    assert len(missed) == MISSED[name], missed


@cases_of("lookup", "int8")
def test_the_model_of_the_answer_is_the_answer(exercise: Exercise, workbench: Callable[[Exercise], Workbench]) -> None:
    """Without a mistake, what the grader compares mistakes with does what the package does.

    Codes made from the zero before it is stored may be up to half a step further off.
    """
    bench = workbench(exercise)
    right = bench.facts(bench.text)
    for form in getattr(bench.trials, "FORMS", ((),)):
        bench.trials.install(*form)
        near = 0.5 if "zero-before-it-is-stored" in form else right["near"]
        assert explain(json.loads(json.dumps(tried(bench.trials, ""))), right | {"versions": [], "near": near}) == []


def test_a_right_form_is_accused_of_nothing_and_an_error_in_it_is_an_error() -> None:
    versions = [[name, {"one": one, "other": 2.0}] for name, one in (("", 1.0), ("far", 1.2), ("it", 1.4))]
    right = {"trials": {"one": 0.5, "other": 2.0}, "near": 0.25, "versions": versions}
    error = {"type": "IndexError", "words": "too many", "where": "one.py:3"}
    for trials, found in (
        ({"one": 1.1, "other": 2.0}, []),
        ({"one": 1.5, "other": 2.0}, ["it"]),
        ({"one": 1.0, "error": error}, ["raises"]),
        ({"one": 1.0, "other": 4.0}, ["unknown"]),
    ):
        assert [finding.name for finding in explain({"trials": trials}, right)] == found


def test_every_mistake_of_every_exercise_is_printed_with_its_hint() -> None:
    for one in EXERCISES.values():
        for mistake in one.mistakes.values():
            graded = grade.Grade("theirs", 60, (Finding(mistake.name, "in a trial"),), exercise=one)
            hint = grade.as_text(graded).partition("\n       hint: ")[2]
            assert len(hint) > 20, mistake.name
            assert hint[-1] in ".?"


def test_the_page_counts_right_variants_and_wrong_ones() -> None:
    every = [variant.found for one in TRIED for variant in variants(one.name)]
    rights, firsts = every.count("") + len(plants("right.txt")), len(plants("mistakes.txt"))
    wrongs, missed = len(every) - every.count(""), sum(MISSED.values())
    counts = r"tries (\d+) right solutions and (\d+) wrong ones .*? All (\d+)\s.*? (\d+) of the other (\d+)"
    said = re.search(counts, PAGE, flags=re.DOTALL)
    assert said is not None
    assert [*map(int, said.groups())] == [rights, firsts + wrongs, firsts, wrongs - missed, wrongs]


def test_every_mistake_of_an_exercise_is_planted_and_stands_in_the_docs() -> None:
    for one in TRIED:
        known = {*one.mistakes} - {"todo-left"}
        assert {variant.found for variant in variants(one.name)} == known | {""}
        line = re.search(rf"^\| `{one.name}` \| .*$", PAGE, flags=re.MULTILINE)
        assert line is not None
        assert re.findall(r"`([a-z0-9-]+)`", line[0])[1:] == list(one.mistakes)[3:]


@cases_of("lookup")
def test_only_the_answer_is_removed_and_the_task_names_what_is_there(exercise: Exercise, tmp_path: Path) -> None:
    make(tmp_path / "made", exercise)
    made = {path.relative_to(tmp_path / "made").as_posix(): path for path in (tmp_path / "made").rglob("*.py")}
    ours = {file for file, path in made.items() if path.read_text() != (ROOT / file).read_text()}
    assert {file for file in ours if not file.startswith(exercise.kit)} == {hole.file for hole in exercise.holes}
    assert set(exercise.more) <= set(made)
    task = (tmp_path / "made" / "TASK.md").read_text()
    assert task.startswith(f"{exercise.title}\n")
    for hole in exercise.holes:
        if hole.number is not None:
            assert f"TODO {hole.number}, `{hole.file}`, `{hole.function.removesuffix('(')}" in task
            assert hole.message in made[hole.file].read_text()
    for file in re.findall(r"`(llama/[\w/]+\.py)`", task):
        assert file in made, file


@cases_of()
def test_an_exercise_is_graded_by_its_command(
    exercise: Exercise, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder as it is set has a TODO; filled in by a right variant and a wrong one, it is graded as these are."""
    folder, written, file = tmp_path / "exercise", tmp_path / "grades.json", exercise.holes[0].file
    make(folder, exercise)
    folders = [folder, *(tmp_path / name for name in ("right", "wrong"))]
    right, wrong = (next(one for one in variants(exercise.name) if bool(one.found) == is_wrong) for is_wrong in (0, 1))
    for filled, variant in zip(folders[1:], (right, wrong), strict=True):
        shutil.copytree(folder, filled)
        (filled / file).write_text(variant.source(exercise, (ROOT / file).read_text("utf-8")), encoding="utf-8")
    words = [*map(str, folders), "--exercise", exercise.name, "--json", str(written)]
    assert cli.run(grade.main, words) == 0
    mistake = exercise.mistakes[wrong.found]
    assert mistake.title in capsys.readouterr().out
    found = [(one["points"], [each["name"] for each in one["mistakes"]]) for one in json.loads(written.read_text())]
    assert found == [(0, ["todo-left"]), (100, []), (100 - mistake.points, [mistake.name])]


@cases_of()
def test_the_commands_of_a_task_work_in_its_folder_with_the_answer(
    exercise: Exercise, checkpoint: Path, tmp_path: Path
) -> None:
    """With a tiny model, where the page has the demo model."""
    folder, file = tmp_path / "made", exercise.holes[0].file
    make(folder, exercise)
    (folder / file).write_text(variants(exercise.name)[0].source(exercise, (ROOT / file).read_text("utf-8")))
    commands = re.findall(r"^ {4}\.venv/bin/python (.*)", (folder / "TASK.md").read_text("utf-8"), flags=re.MULTILINE)
    assert commands
    for line in commands:
        words = shlex.split(line, comments=True)
        words += ["--ckpt_dir", str(checkpoint), "--device=cpu"] if words[0] == "inference.py" else []
        words += ["--max_gen_len", "8"] if "--chat" in words else []
        command, said = [sys.executable, "-B", *words], "the\nhello\n"
        done = subprocess.run(command, cwd=folder, input=said, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_a_submission_with_the_task_of_another_exercise_or_none_is_not_graded(tmp_path: Path) -> None:
    """All that this exercise removes would be there, and right. The last name is too long for a file system."""
    (tmp_path / "TASK.md").write_text(CACHE.task.read_text("utf-8"))
    outcome = grade.tried(tmp_path, Limits(), EXERCISES["lookup"])
    assert outcome == Outcome(reason="it is of another exercise: grade it with --exercise cache")
    (tmp_path / "TASK.md").write_text(f"My notes\n{EXERCISES['lookup'].title}\n")
    for folder in (tmp_path, tmp_path / "missing", tmp_path / ("x" * 300)):
        reason = grade.tried(folder, Limits(), EXERCISES["lookup"]).reason
        assert reason.startswith("its TASK.md does not begin with the line '# Guess tokens by looking them up': put")


def test_an_error_in_the_trials_of_the_answer_ends_the_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All submissions with the same error would be right."""
    facts = {"trials": {"error": {"type": "KeyError", "words": "'h2o'"}}}
    monkeypatch.setattr(grade, "make", lambda *_, **__: None)
    monkeypatch.setattr(grade, "run", lambda *_: Outcome(facts=facts))
    with pytest.raises(RuntimeError, match="do not end here: KeyError: 'h2o'"):
        grade.real_facts(Limits(), EXERCISES["eviction"])


def test_numbers_of_a_submission_may_be_of_any_type_and_size() -> None:
    assert [plain(numpy.int64(3)), plain(torch.tensor(3)), plain(torch.tensor([3, 4]))] == [3, 3, "tensor([3, 4])"]
    right = {"trials": {"the number": 0.5}, "near": 0.0, "versions": []}
    for number in (10**400, math.nan, math.inf):
        assert [found.name for found in explain({"trials": {"the number": number}}, right)] == ["unknown"]
    right = {"trials": {"the numbers": [0.5, 0.5]}, "near": 0.25, "versions": []}
    assert [found.name for found in explain({"trials": {"the numbers": [0.5, math.nan]}}, right)] == ["unknown"]


def test_an_exercise_that_is_not_known_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(grade.main, [str(tmp_path), "--exercise", "none"]) == 2
    assert "known are cache, truncate, int8, eviction, lookup" in capsys.readouterr().err
    assert cli.run(grade.main, [str(tmp_path), "--exercise", "lookup", "--report"]) == 2
