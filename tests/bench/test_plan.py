"""A run measures every group once, again while the budget lasts, tears no pair, and loses nothing that is finished."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_here import CEILINGS, Here, jobs_here, run_of

from llama.bench import plan, presets
from llama.bench.cell import Cell
from llama.bench.comparisons import add_result
from llama.bench.plan import OVERRUN, REPETITIONS, WRITING, Run, schedule
from llama.bench.presets import Group, Job, plan_report, work_of
from llama.bench.report.tables import figure_tables
from llama.bench.run.directory import new_run, resumed_run
from llama.bench.run.jobs import JobDied
from llama.bench.schema import Report, cell_row, is_measured, new_report, rows_of
from llama.bench.statistics import LEAST_REPETITIONS
from llama.cli import benchmark_inference as script

FOUR = ["batch 1, cache on", "batch 1, cache off", "batch 2, cache on", "batch 2, cache off"]
CURVES = ["steps at batch 1", "steps at batch 2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256)
    return Cell(input_len=6, output_len=4, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return jobs_here(monkeypatch, lambda kind, cell: cell.name if kind == "cell" else kind)


def table(base: Cell, out: Path, *, minutes: float = 60, resume: bool = False, n: int = 2, **asked: Any) -> Report:
    planned = plan_report(asked.pop("preset", "table"), base, budget=minutes, **asked)
    run = run_of(planned, out, resume=resume, repetitions=n if minutes else 1)
    run.run()
    return run.report


def every_cell(report: Report) -> list[Sequence[str]]:
    return list(figure_tables(report)[0].rows)


def counts(report: Report) -> list[int]:
    """Return how often each cell was measured."""
    return [len(row["seconds"]) if is_measured(row) else 0 for row in rows_of(report, "cell")]


def test_a_table_measures_every_cell_in_turn_and_again_and_compares_both_modes(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = table(base, tmp_path)
    assert here.done == ["machine", *FOUR * 2, "steps", "steps"]
    assert counts(report) == [2] * 4
    assert {row["batch_size"] for row in rows_of(report, "step")} == {1, 2}
    assert [(row["cell"], row["other_cell"], row["equal"]) for row in rows_of(report, "comparison")] == [
        (0, 1, True),
        (2, 3, True),
    ]
    for row, cell in zip(rows_of(report, "cell"), report["cells"], strict=True):
        assert any(f"the same {4 * cell['batch_size']} tokens" in note for note in row["notes"])
        assert row["tokens_per_second"] > 0
        assert row["bound_by"] == "neither ceiling"
    assert len(report["reading"]) >= 3

    done = len(here.done)
    again = table(base, tmp_path, resume=True)
    assert here.done[done:] == ["machine"], "a table that is whole is not measured again"
    assert counts(again) == [2] * 4


def test_a_budget_of_a_moment_measures_the_first_pair_and_lists_the_others(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = table(base, tmp_path, minutes=0.0001)
    assert here.done == ["machine", *FOUR[:2]]
    assert counts(report) == [1, 1, 0, 0]
    assert report["failures"] == [f"{name}: no room in the budget" for name in [*FOUR[2:], *CURVES]]
    assert script.report_exit_code(report) == 0
    assert [rows[2] for rows in every_cell(report)[2:]] == ["not measured"] * 2, "a pair keeps its rows"
    peaks = [row for row in rows_of(report, "memory", 2) if row["name"] == "peak"]
    assert [row["measured_bytes"] for row in peaks] == [None]
    assert f"~{peaks[0]['predicted_bytes'] / 2**20:.2f}" in every_cell(report)[2], "memory is arithmetic"
    whole = table(base, tmp_path, minutes=0, resume=True)
    (peak,) = (row for row in rows_of(whole, "memory", 2) if row["name"] == "peak")
    assert peak["predicted_bytes"] == peaks[0]["predicted_bytes"]
    assert peak["measured_bytes"] > 0
    assert not any("not measured" in row[2] for row in every_cell(whole))
    assert here.done[4:6] == FOUR[2:], "the run that goes on measures what it lacks"
    assert (counts(whole), whole["failures"]) == ([1] * 4, [])


def test_every_pair_is_measured_before_a_repetition_and_repetitions_that_can_be_judged_before_a_curve() -> None:
    one, two, late = Group((), repeats=True), Group((), repeats=True), Group((), late=True)
    rounds = [(group, number) for number in range(REPETITIONS) for group in (one, two)]
    rounds.insert(2 * LEAST_REPETITIONS, (late, 0))
    assert schedule([one, late, two], REPETITIONS) == rounds
    assert schedule([one, late, two], 1) == [(one, 0), (two, 0), (late, 0)]


# ---- the budget ------------------------------------------------------------------------------------------------------


class World:
    """Replaces the clock and all jobs of `plan`: a job takes a second for 4 tokens that it feeds, times `load`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: Callable[[Cell], float] = lambda cell: 1.0) -> None:
        self.now, self.load, self.done, self.commit = 1024.0, load, list[str](), "one"
        self.fail: Callable[[str, Cell], BaseException | None] = lambda kind, cell: None  # before a job
        monkeypatch.setattr(plan, "time", self)
        monkeypatch.setattr(plan, "run_job", self)
        monkeypatch.setattr(plan, "findings", lambda report: [])
        monkeypatch.setattr(presets, "BATCHES", (1, 2))

    def monotonic(self) -> float:
        return self.now

    def __call__(self, kind: str, cell: Cell, *, waiting: Callable[[], None], **options: Any) -> dict[str, Any]:
        if error := self.fail(kind, cell):
            raise error
        if kind == "machine":
            return {"environment": {"commit": self.commit}, "ceilings": CEILINGS, "model": None}
        seconds = left = work_of(cell) / 4 * self.load(cell) if kind == "cell" else 20.0
        while left > 0:
            tick = max(0.5, left / 150)
            self.now += min(tick, left)
            left -= tick
            waiting()
        self.done.append(cell.name if kind == "cell" else kind)
        if kind == "page":
            return {"rows": [], "page": "3 steps after"}
        if kind != "cell":
            return {"rows": [{"figures": "step", "batch_size": cell.batch_size, "context": 1, "kv_caching": True}]}
        row = {"figures": "cell", "error": None, "notes": [], "path": "plain", "ids": [[1]], "seconds": [seconds]}
        row |= {"first_token_seconds": [1.0], "step_seconds": [[1.0]], "other_load_cores": [None], "token_forwards": 1}
        return {"rows": [row]}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@settings(max_examples=8, deadline=None)
@given(st.floats(0.1, 60), st.sampled_from([0.5, 1.0, 3.0, 10.0]), st.booleans(), st.sampled_from(["table", "report"]))
def test_no_budget_and_no_load_tears_a_pair_or_takes_much_longer_than_the_budget(
    base: Cell, tmp_path_factory: pytest.TempPathFactory, minutes: float, load: float, sudden: bool, preset: str
) -> None:
    """The load may begin suddenly after five jobs, so that what was expected before is wrong."""
    more = {"preset": preset, "prompts": ["a"]} if preset == "report" else {"watched": True}
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch, lambda cell: load if not sudden or len(world.done) > 5 else 1.0)
        report = table(base, tmp_path_factory.mktemp("run"), minutes=minutes, n=REPETITIONS, **more)
    found = counts(report)
    assert found[0::2] == found[1::2], "a pair is measured as a whole"
    assert found[0] or preset == "report", "the first pair always runs, but the minutes of a report are a promise"
    assert found == sorted(found, reverse=True), "the smallest batch first"
    left_out = {f"{name}: no room in the budget" for name, count in zip(FOUR, found, strict=True) if not count}
    assert left_out <= set(report["failures"])
    took, tick = world.now - 1024, 2
    if preset == "report":
        assert took <= max(0, 60 * minutes - WRITING) + tick, "the rest is for its files"
    else:
        assert took <= (1 + OVERRUN + 0.01) * 60 * minutes or sum(found) <= 2


def test_a_report_repeats_what_fits_until_its_minutes_are_over(base: Cell, world: World, tmp_path: Path) -> None:
    report = table(base, tmp_path, minutes=5, preset="report", prompts=["a"])
    pair = sum(work_of(base.but(kv_caching=on)) / 4 for on in (True, False))
    used = world.now - 1024
    assert 300 - WRITING - pair - 1 <= used <= 300 - WRITING
    assert counts(report)[0] > REPETITIONS
    assert counts(table(base, tmp_path / "once", minutes=0, preset="report", prompts=["a"])) == [1] * 4


def test_a_group_is_begun_if_it_fits_by_the_time_that_the_last_jobs_alike_took(
    base: Cell, world: World, tmp_path: Path
) -> None:
    cells = [base.but(batch_size=batch, kv_caching=on) for batch in (1, 2) for on in (True, False)]
    pair = [Job(cell.name, "cell", cell, 0, work_of(cell)) for cell in cells]
    seconds = sum(job.work for job in pair) / 4
    for budget, done in ((seconds + 1, 4), (seconds - 1, 2)):
        report = new_report("table", [base], budget_minutes=budget / 60)
        world.done.clear()
        Run(report, [Group(tuple(pair[:2])), Group(tuple(pair[2:]))]).measure()
        assert len(world.done) == done
        assert len(report["failures"]) == 4 - done


def test_the_recording_for_the_page_comes_behind_the_first_pair(base: Cell, world: World, tmp_path: Path) -> None:
    report = table(base, tmp_path, watched=True)
    assert world.done[2] == "page"
    assert report["failures"] == []


def test_that_generation_goes_by_the_plain_path_whatever_is_measured(base: Cell, world: World, tmp_path: Path) -> None:
    asked: list[Cell] = []
    world.fail = lambda kind, cell: asked.append(cell) if kind == "page" else None
    table(cell := base.but(fast=True, exact=True, text="a"), tmp_path, minutes=0, watched=True)
    assert [(cell.engine, cell.fast, cell.exact, cell.text) for cell in asked] == [("llama", False, False, None)]
    (kept,) = tmp_path.glob("*/watch.html")
    assert "3 steps after" in kept.read_text()
    table(cell, tmp_path, minutes=0, watched=True, resume=True)
    assert len(asked) == 1, "what is there is not recorded again"


def test_cells_are_measured_although_all_jobs_before_them_died(base: Cell, world: World, tmp_path: Path) -> None:
    world.fail = lambda kind, cell: JobDied("gone") if kind == "machine" or cell.batch_size == 1 else None
    report = table(base, tmp_path, minutes=0)
    assert counts(report) == [0, 0, 1, 1]
    assert "the machine's ceilings: died: gone" in report["failures"]
    assert [row["error"] for row in rows_of(report, "cell")] == ["died: gone"] * 2 + [None] * 2


def test_a_repetition_that_the_budget_ends_is_not_listed_as_left_out(base: Cell, world: World, tmp_path: Path) -> None:
    world.load = lambda cell: 1.0 if len(world.done) < len(FOUR) else 100.0
    report = table(base, tmp_path, minutes=1)
    assert counts(report) == [1] * 4
    assert report["failures"] == [f"{name}: no room in the budget" for name in CURVES]


# ---- what fails, and what goes on ------------------------------------------------------------------------------------


def test_an_interrupted_table_keeps_its_cells_and_resumes(base: Cell, world: World, tmp_path: Path) -> None:
    world.fail = lambda kind, cell: KeyboardInterrupt() if len(world.done) == 2 else None
    with pytest.raises(KeyboardInterrupt):
        table(base, tmp_path, minutes=0)
    (kept,) = tmp_path.glob("*/results.json")
    before = json.loads(kept.read_text())
    assert counts(before) == [1, 1, 0, 0]

    world.fail = lambda kind, cell: None
    report = table(base, tmp_path, minutes=0, resume=True)
    assert list(tmp_path.glob("*/results.json")) == [kept]
    assert counts(report) == [1, 1, 1, 1]
    assert [row["seconds"] for row in rows_of(report, "cell")[:2]] == [
        row["seconds"] for row in rows_of(before, "cell")[:2]
    ]


def test_a_run_is_resumed_under_another_name_of_the_machine_which_is_then_none_but_not_on_another_cpu() -> None:
    report = new_report("table", [])
    for name in ("a", "b", "b"):
        add_result(report, {"environment": {"machine": name, "cpu": "EPYC", "threads": 2}}, 0)
    assert report["environment"] == {"machine": None, "cpu": "EPYC", "threads": 2}
    with pytest.raises(ValueError, match="two machines cannot be compared: cpu was 'EPYC' and is 'Xeon'; start again"):
        add_result(report, {"environment": {"machine": "b", "cpu": "Xeon", "threads": 2}}, 0)


def test_only_a_run_of_the_same_cells_and_this_schema_is_resumed(base: Cell, tmp_path: Path) -> None:
    asked, _ = plan_report("table", base, budget=1)
    with pytest.raises(ValueError, match="nothing to resume"):
        resumed_run(tmp_path, asked)
    (folder, _), *others = (new_run(tmp_path, asked) for _ in range(5))
    other, _ = plan_report("table", base.but(output_len=5), budget=1)
    with pytest.raises(ValueError, match="nothing to resume"):
        resumed_run(tmp_path, other)
    kept = json.dumps(asked)
    contents = [kept[: len(kept) // 2], "[]", "null", json.dumps({**asked, "schema": "of next year"})]
    for (broken, _), content in zip(others, contents, strict=True):
        (broken / "results.json").write_text(content)
    assert resumed_run(tmp_path, asked)[0] == folder


def test_runs_of_one_day_do_not_overwrite_each_other_nor_a_file(base: Cell, tmp_path: Path) -> None:
    (first, _), (second, _) = (new_run(tmp_path, new_report("table", [base])) for _ in range(2))
    assert first.name.endswith("-tiny-table")
    assert second.name == f"{first.name}-2"
    (tmp_path / "out").touch()
    with pytest.raises((FileExistsError, NotADirectoryError)):
        new_run(tmp_path / "out", new_report("table", [base]))


def test_what_dies_says_so_the_others_stand_and_it_is_tried_again_when_resumed(
    base: Cell, world: World, tmp_path: Path
) -> None:
    killed = JobDied("its process was ended by SIGKILL")
    world.fail = lambda kind, cell: killed if cell.name == FOUR[3] or (kind, cell.batch_size) == ("steps", 2) else None
    report = table(base, tmp_path)
    assert report["failures"] == ["steps at batch 2: died: its process was ended by SIGKILL"]
    errors = [row["error"] for row in rows_of(report, "cell")]
    assert errors == [None, None, None, "died: its process was ended by SIGKILL"]
    assert counts(report) == [2, 2, 2, 0]
    assert script.report_exit_code(report) == script.DIED
    world.fail = lambda kind, cell: None
    report = table(base, tmp_path, resume=True)
    assert [row["error"] for row in rows_of(report, "cell")] == [None] * 4
    assert counts(report) == [2, 2, 2, 2]


def test_a_repetition_that_dies_leaves_the_others_and_a_note(base: Cell, world: World, tmp_path: Path) -> None:
    world.fail = lambda kind, cell: JobDied("gone") if kind == "cell" and cell.name in world.done[:1] else None
    report = table(base, tmp_path)
    assert "a repetition failed: died: gone" in cell_row(report, 0)["notes"]
    assert [row["error"] for row in rows_of(report, "cell")] == [None] * 4


def test_repetitions_of_another_machine_or_commit_are_not_put_into_one_table(
    base: Cell, world: World, tmp_path: Path
) -> None:
    table(base, tmp_path, minutes=0)
    world.commit = "another"
    with pytest.raises(ValueError, match=r"commit was 'one' and is 'another'"):
        table(base, tmp_path, minutes=0, resume=True)


def test_the_name_of_each_job_is_told_while_it_runs(base: Cell, world: World) -> None:
    told = list[str]()
    Run(*plan_report("table", base, budget=0), waiting=told.append).measure()
    assert list(dict.fromkeys(told)) == [*FOUR, *CURVES]
