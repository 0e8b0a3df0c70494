"""A run measures every group once, again while the budget lasts, tears no pair, and loses nothing that is finished."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_here import CEILINGS, Here, jobs_here, run_of

from llama.bench import plan, presets
from llama.bench.cell import Cell
from llama.bench.compare import add_result
from llama.bench.plan import Run, duration
from llama.bench.presets import Group, Job, plan_report
from llama.bench.run.directory import new_run, resumed_run
from llama.bench.run.jobs import JobDied
from llama.bench.schema import Report, cell_row, is_measured, merge, new_report, rows_of
from llama.bench.statistics import LEAST_REPETITIONS
from llama.cli import benchmark_inference as script
from llama.host.progress import seconds_bar

REPETITIONS = 2  # as many as the claims need
FOUR = ["batch 1, cache on", "batch 1, cache off", "batch 2, cache on", "batch 2, cache off"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256)
    return Cell(input_len=6, output_len=4, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return jobs_here(monkeypatch, lambda kind, cell: cell.name if kind == "cell" else kind, repetitions=REPETITIONS)


def table(base: Cell, out: Path, *, minutes: float = 60, resume: bool = False, **asked: Any) -> Report:
    report = plan_report("table", base, engines=asked.get("engines", []), kinds=[], budget=minutes)
    run = run_of(report, out, resume=resume)
    run.watched = asked.get("watched")
    run.run()
    return run.report


def counts(report: Report) -> list[int]:
    """Return how often each cell was measured."""
    return [len(row["seconds"]) if is_measured(row) else 0 for row in rows_of(report, "cell")]


def test_a_table_measures_every_cell_in_turn_and_again_and_compares_both_modes(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = table(base, tmp_path)
    assert here.done[:2] == ["machine", "calibrate"]
    assert [job for job in here.done if job.startswith("batch")] == FOUR * REPETITIONS
    assert counts(report) == [REPETITIONS] * 4
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
    assert here.done[done:] == ["machine", "calibrate"], "a table that is whole is not measured again"
    assert counts(again) == [REPETITIONS] * 4


def test_a_budget_of_a_moment_measures_the_first_pair_and_predicts_the_others(
    base: Cell, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = table(base, tmp_path, minutes=0.0001)
    assert here.done == ["machine", "calibrate", *FOUR[:2]]
    assert counts(report) == [1, 1, 0, 0]
    left_out = [*FOUR[2:], "steps at batch 1", "steps at batch 2"]
    assert report["failures"] == [f"{name}: no room in the budget" for name in left_out]
    assert script.report_exit_code(report) == 0
    assert "The budget is too small" in capsys.readouterr().err

    whole = table(base, tmp_path, minutes=0, resume=True)
    assert here.done[6:8] == FOUR[2:], "the run that goes on measures what it lacks"
    assert counts(whole) == [1, 1, 1, 1]
    assert whole["failures"] == []
    for cell in (2, 3):
        guess, truth = cell_row(report, cell), cell_row(whole, cell)
        assert (guess["predicted"], truth.get("predicted", False)) == (True, False)
        assert guess["path"] == truth["path"] == "plain"
        for column in ("weights_bytes", "cache_bytes", "token_forwards", "flops", "step_read_bytes"):
            assert guess[column] == truth[column], column
        assert guess["seconds"] == [pytest.approx(sum(guess["first_token_seconds"]) + sum(guess["step_seconds"][0]))]
        assert len(guess["step_seconds"][0]) == 3
        lines = {row["name"]: row for row in rows_of(report, "memory", cell)}
        for row in rows_of(whole, "memory", cell):
            if "predicted_bytes" in row:
                assert lines[row["name"]]["predicted_bytes"] == row["predicted_bytes"]
                assert lines[row["name"]]["measured_bytes"] is None
        assert guess["tensor_peak_bytes"] == [lines["peak"]["predicted_bytes"]]
        assert "ids" not in guess
        assert "bound_by" not in guess
        assert rows_of(report, "check", cell) == []


class World:
    """Replaces the clock and all jobs of `plan`: every job takes `load` times its prediction.

    A process takes `start` seconds to start and to end; the prediction for an idle machine is STARTING.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, load: Callable[[Job], float], *, start: float = presets.STARTING
    ) -> None:
        self.now, self.load, self.done, self.start, self.commit = 1024.0, load, list[str](), start, "one"
        self.fail: Callable[[str, Cell], BaseException | None] = lambda kind, cell: None  # before a job
        monkeypatch.setattr(plan, "time", self)
        monkeypatch.setattr(plan, "run_job", self)
        monkeypatch.setattr(plan, "findings", lambda report: [])

    def monotonic(self) -> float:
        return self.now

    def __call__(self, kind: str, cell: Cell, *, waiting: Callable[[], None], **options: Any) -> dict[str, Any]:
        if error := self.fail(kind, cell):
            raise error
        timed = {"max_seq_len": 8192, "input_len": 10, "load_seconds": 2.0, "prefill_seconds": 5.0}
        timed |= {"step_seconds": 0.25, "many_rows": 1, "many_seconds": 0.25}
        if kind in ("machine", "calibrate"):
            self.now += self.start if kind == "calibrate" and self.start > presets.STARTING else 0.0
            facts = {"environment": {"commit": self.commit}, "ceilings": CEILINGS, "model": None}
            return {**facts, "timed": timed, "seconds": 0.0}
        job = Job("", kind, cell, 0, presets.Calibration(**timed).of_tokens(0))
        seconds = presets.cell_job(0, cell, presets.Calibration(**timed)).seconds if kind == "cell" else 20.0
        left = seconds * self.load(job) + self.start - presets.STARTING
        while left > 0:
            tick = max(0.5, left / 150)
            self.now += min(tick, left)
            left -= tick
            waiting()
        self.done.append(cell.name if kind == "cell" else kind)
        if kind in ("watch", "hand_in"):
            return {"rows": [], "page": "3 steps after"}
        if kind != "cell":
            return {"rows": [{"figures": "step", "batch_size": cell.batch_size, "context": 1, "kv_caching": True}]}
        row = {"figures": "cell", "error": None, "notes": [], "path": "plain", "ids": [[1]], "seconds": [seconds]}
        row |= {"first_token_seconds": [1.0], "step_seconds": [[1.0]], "other_load_cores": [None], "token_forwards": 1}
        return {"rows": [row]}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world of two batch sizes and few repetitions."""
    monkeypatch.setattr(presets, "BATCHES", (1, 2))
    monkeypatch.setattr(plan, "REPETITIONS", REPETITIONS)
    return World(monkeypatch, lambda job: 1.0)


def run_in(
    world: World, base: Cell, out: Path, *, minutes: float, engines: list[str], watched: bool = False, preset: str = ""
) -> Report:
    report = plan_report(preset or "table", base, engines=engines, kinds=[], budget=minutes)
    run = Run(out, report, seconds_bar(), watched=base if watched else None)
    run.run()
    return report


@settings(max_examples=8, deadline=None)
@given(st.floats(0.1, 60), st.sampled_from([0.5, 1.0, 1.5, 3.0, 10.0]), st.booleans(), st.booleans())
def test_no_budget_and_no_load_tears_a_pair_or_takes_much_longer_than_the_budget(
    base: Cell, tmp_path_factory: pytest.TempPathFactory, minutes: float, load: float, sudden: bool, watched: bool
) -> None:
    """The load may begin suddenly after five jobs, so that predictions made before are wrong."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch, lambda job: load if not sudden or len(world.done) > 5 else 1.0)
        out = tmp_path_factory.mktemp("run")
        report = run_in(world, base, out, minutes=minutes, engines=["llama.cpp", "transformers"], watched=watched)
    cells = [Cell(**cell) for cell in report["cells"]]
    found = dict(zip(cells, counts(report), strict=True))
    for cell, count in found.items():
        if cell.engine != "llama.cpp":
            assert found[cell.but(kv_caching=not cell.kv_caching)] == count, "a pair is measured as a whole"
    measured = [cell for cell in cells if found[cell]]
    left_out = [cell for cell in cells if not found[cell]]
    assert measured, "the first pair always runs"
    if left_out:
        assert max(cell.batch_size for cell in measured) <= min(cell.batch_size for cell in left_out)
    assert {f"{cell.name}: no room in the budget" for cell in left_out} <= set(report["failures"])
    assert world.now - 1024 <= 1.3 * 60 * minutes or sum(found.values()) <= 2


@settings(max_examples=6, deadline=None)
@given(st.floats(0.5, 60), st.sampled_from([0.5, 1.0, 3.0, 10.0]), st.booleans())
def test_a_report_ends_within_its_minutes_with_every_row_and_tears_no_pair(
    base: Cell, tmp_path_factory: pytest.TempPathFactory, minutes: float, load: float, sudden: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch, lambda job: load if not sudden or world.done else 1.0)
        report = run_in(world, base, tmp_path_factory.mktemp("run"), minutes=minutes, engines=[], preset="report")
    assert world.now - 1024 <= 60 * minutes
    found = counts(report)
    assert found[0::2] == found[1::2], "a pair is measured as a whole"
    assert found == sorted(found, reverse=True), "the smallest batch first"
    assert all(row["seconds"] for row in rows_of(report, "cell"))
    assert [row["within"] >= 1.25 for row in rows_of(report, "cell") if row.get("predicted")] == [True] * found.count(0)


def test_every_pair_is_measured_before_a_repetition_and_repetitions_that_can_be_judged_before_a_curve(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, lambda job: 1.0)
    run_in(world, base, tmp_path, minutes=600, engines=[])
    once = [f"batch {batch}, cache {mode}" for batch in (1, 8, 16) for mode in ("on", "off")]
    assert world.done == [*once * LEAST_REPETITIONS, *["steps"] * 3, *once * (plan.REPETITIONS - LEAST_REPETITIONS)]
    whole = sum(map(cell_seconds, once))
    short = World(monkeypatch, lambda job: 1.0)
    run_in(short, base, tmp_path / "short", minutes=(1.5 * whole) / 60, engines=[])
    assert short.done[:6] == once
    assert "steps" not in short.done[: short.done.index(once[1], 6)], "the rest goes into repetitions first"


def cell_seconds(name: str) -> float:
    timed = {"max_seq_len": 8192, "input_len": 10, "load_seconds": 2.0, "prefill_seconds": 5.0}
    known = presets.Calibration(**timed, step_seconds=0.25, many_rows=1, many_seconds=0.25)
    batch, mode = int(name.split()[1].strip(",")), name.endswith("on")
    return presets.cell_job(0, Cell(batch_size=batch, input_len=6, output_len=4, kv_caching=mode), known).seconds


def test_processes_that_start_slowly_do_not_make_larger_batches_seem_as_many_times_slower(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine starts a process in 40 s instead of 4; all pairs fit, and nothing more."""
    names = [f"batch {batch}, cache {mode}" for batch in (1, 8, 16) for mode in ("on", "off")]
    whole = sum(cell_seconds(name) + 36 for name in names) + 40
    world = World(monkeypatch, lambda job: 1.0, start=40.0)
    report = run_in(world, base, tmp_path, minutes=(whole + 5) / 60, engines=[])
    assert counts(report) == [1] * 6


def test_the_bar_moves_during_a_job_and_never_promises_more_than_the_budget(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    world = World(monkeypatch, lambda job: 3.0)
    report = plan_report("table", base, engines=[], kinds=[], budget=8)
    run = Run(tmp_path, report, seconds_bar())
    seen: list[tuple[float, float]] = []
    whole = run._advance

    def advance(done: float) -> None:
        whole(done)
        seen.append((run.progress.n, run.progress.total - run.progress.n))
        assert run.progress.total - run.progress.n <= run.seconds_left()

    monkeypatch.setattr(run, "_advance", advance)
    run.run()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen), "it does not go back"
    assert len({done for done, _ in seen}) > 3 * len(world.done), "it does not stand still during a job"
    assert [left for _, left in seen[3:]] == sorted((left for _, left in seen[3:]), reverse=True)
    shown = [int(m) * 60 + int(s) for m, s in re.findall(r"about (\d+):(\d+) left", terminal.getvalue())]
    assert 0 < max(shown) <= 8 * 60


def test_an_engine_with_one_mode_is_left_out_with_its_batch(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cells of batch 1 and the first of batch 8 fit, llama.cpp at batch 16 would, too."""
    quick = {"llama.cpp": 0.01}
    world = World(monkeypatch, lambda job: quick.get(job.cell.engine, 1.0))
    report = run_in(world, base, tmp_path, minutes=5, engines=["llama.cpp"])
    names = [cell["batch_size"] for cell, count in zip(report["cells"], counts(report), strict=True) if count]
    assert set(names) < {1, 8, 16}
    assert max(names) < 16


def test_an_engine_that_is_slower_than_predicted_corrects_the_expectation_of_its_other_cells(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, lambda job: 3.0 if not job.cell.kv_caching else 0.5)
    report = plan_report("table", base, engines=[], kinds=[], budget=60)
    run = Run(tmp_path, report, seconds_bar())
    run._begin()
    on, off = run._planned()[0].jobs
    later = run._planned()[1]
    before = run.expected(Group((later.jobs[0],))), run.expected(Group((later.jobs[1],)))
    run._measure(Group((on, off)))
    after = run.expected(Group((later.jobs[0],))), run.expected(Group((later.jobs[1],)))
    assert after[0] == before[0], "a faster job may have been lucky"
    assert after[1] == pytest.approx(3 * before[1], rel=0.1)
    assert run.expected(Group((off,))) == pytest.approx(3 * off.seconds, rel=0.1), "as long as it took"
    assert world.done == [on.name, off.name]


@pytest.mark.parametrize("kind", ["static", "int8"])
def test_predicted_times_follow_the_pace_of_the_largest_measured_batch(
    kind: str, base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of both modes with the full cache, which is the same work; later ones and kinds of each mode."""
    World(monkeypatch, lambda job: 1.0)
    base = base.but(kv_cache=kind)
    report = plan_report("table", base, engines=["transformers"][: kind == "static"], kinds=[], budget=60)
    run = Run(tmp_path, report, seconds_bar())
    run._begin()
    cells = [Cell(**cell) for cell in report["cells"]]
    for place, first, later in ((0, 1.5, 2.0), (1, 2.5, 5.0)):
        one, *others = run.calibration.of_forwards(cells[place])
        row = {"figures": "cell", "path": "plain", "other_load_cores": [None], "first_token_seconds": [first * one]}
        merge(report, [{**row, "seconds": [first * one + later * sum(others)]}], place)
    run._predict()
    for place, cell in enumerate(cells[2:], 2):
        row, (one, *others) = cell_row(report, place), run.calibration.of_forwards(cell)
        first, later = (1.5, 2.0) if cell.kv_caching else (2.5, 5.0)
        if cell.engine == "llama":
            assert row["first_token_seconds"] == [pytest.approx(one * (2.0 if kind == "static" else first))]
            assert row["step_seconds"] == [pytest.approx([later * other for other in others])]
        else:
            assert "seconds" not in row, "nothing is known of an engine that has not run"


def test_the_recording_for_the_page_is_part_of_the_budget(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, lambda job: 1.0)
    report = run_in(world, base, tmp_path, minutes=60, engines=[], watched=True)
    assert world.done[2] == "watch", "behind the first pair"
    assert report["failures"] == []
    assert world.now - 1024 <= 60 * 60
    short = World(monkeypatch, lambda job: 1.0)
    report = run_in(short, base, tmp_path / "none", minutes=0.1, engines=[], watched=True)
    assert "watch" not in short.done
    assert "the page to step through: no room in the budget" in report["failures"]


def test_that_generation_goes_by_the_plain_path_whatever_is_measured(base: Cell, world: World, tmp_path: Path) -> None:
    asked: list[Cell] = []
    world.fail = lambda kind, cell: asked.append(cell) if kind == "watch" else None
    table(base, tmp_path, minutes=0, watched=base.but(fast=True, exact=True, batch_size=8, text="a"))
    assert [(cell.engine, cell.fast, cell.exact, cell.text) for cell in asked] == [("llama", False, False, None)]
    (kept,) = tmp_path.glob("*/watch.html")
    assert "3 steps after" in kept.read_text()
    table(base, tmp_path, minutes=0, watched=base, resume=True)
    assert len(asked) == 1, "what is there is not recorded again"


def test_a_generation_that_cannot_be_recorded_is_noted_and_nothing_is_lost(
    base: Cell, world: World, tmp_path: Path
) -> None:
    world.fail = lambda kind, cell: ValueError("not today") if kind == "watch" else None
    report = table(base, tmp_path, minutes=0, watched=base)
    assert report["failures"] == ["the page to step through: refused: not today"]
    assert counts(report) == [1] * 4


@pytest.mark.usefixtures("here")
def test_a_run_that_passed_its_budget_says_by_how_much(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for over, expected in ((39.0, True), (0.9, False)):
        report = plan_report("table", base, engines=[], kinds=[], budget=3)
        run = run_of(report, tmp_path)
        run.began -= 3 * 60 + over
        run._finish()
        words = f"The run passed its budget of 3 minutes by {over:.0f} s: jobs took longer than predicted."
        assert (words in report["reading"]) == expected


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
    asked = plan_report("table", base, engines=[], kinds=[], budget=1)
    with pytest.raises(ValueError, match="nothing to resume"):
        resumed_run(tmp_path, asked)
    (folder, _), *others = (new_run(tmp_path, asked) for _ in range(5))
    other = plan_report("table", base.but(output_len=5), engines=[], kinds=[], budget=1)
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
    once = {"machine": killed, "calibrate": killed}
    world.fail = lambda kind, cell: killed if cell.name == FOUR[3] else once.pop(kind, None)
    report = table(base, tmp_path)
    assert report["failures"] == ["the machine's ceilings: died: its process was ended by SIGKILL"]
    errors = [row["error"] for row in rows_of(report, "cell")]
    assert errors == [None, None, None, "died: its process was ended by SIGKILL"]
    assert counts(report) == [2, 2, 2, 0]
    assert "seconds" not in cell_row(report, 3), "what died is not predicted"
    assert script.report_exit_code(report) == script.DIED
    world.fail = lambda kind, cell: None
    report = table(base, tmp_path, resume=True)
    assert [row["error"] for row in rows_of(report, "cell")] == [None] * 4
    assert counts(report) == [2, 2, 2, 2]


def test_a_repetition_that_the_budget_ends_is_not_listed_as_left_out(base: Cell, world: World, tmp_path: Path) -> None:
    world.load = lambda job: 1.0 if len(world.done) < len(FOUR) else 100.0
    report = table(base, tmp_path, minutes=20)
    assert counts(report) == [1] * 4
    assert report["failures"] == [f"steps at batch {batch}: no room in the budget" for batch in (1, 2)]


def test_a_repetition_that_dies_leaves_the_others_and_a_note(base: Cell, world: World, tmp_path: Path) -> None:
    world.fail = lambda kind, cell: JobDied("gone") if kind == "cell" and cell.name in world.done[:1] else None
    report = table(base, tmp_path)
    assert "a repetition failed: died: gone" in cell_row(report, 0)["notes"]
    assert [row["error"] for row in rows_of(report, "cell")] == [None] * 4


def test_a_curve_that_fails_is_said_and_the_cells_stand(base: Cell, world: World, tmp_path: Path) -> None:
    world.fail = lambda kind, cell: JobDied("gone") if kind == "steps" and cell.batch_size == 2 else None
    report = table(base, tmp_path)
    assert report["failures"] == ["steps at batch 2: died: gone"]
    assert {row["batch_size"] for row in rows_of(report, "step")} == {1}
    assert counts(report) == [REPETITIONS] * 4


def test_repetitions_of_another_machine_or_commit_are_not_put_into_one_table(
    base: Cell, world: World, tmp_path: Path
) -> None:
    table(base, tmp_path, minutes=0)
    world.commit = "another"
    with pytest.raises(ValueError, match=r"commit was 'one' and is 'another'"):
        table(base, tmp_path, minutes=0, resume=True)


def test_without_a_budget_the_bar_counts_everything_once_behind_what_is_done(
    base: Cell, world: World, tmp_path: Path
) -> None:
    run = run_of(plan_report("table", base, engines=[], kinds=[], budget=None), tmp_path)
    run._advance(30.0)
    run._begin()
    assert run.progress.total == pytest.approx(30.0 + sum(map(run.expected, run._planned())))
    run.progress.close()


def test_a_duration_is_told_in_seconds_up_to_a_minute_and_a_half() -> None:
    shown = {0.4: "0 s", 89.4: "89 s", 89.999: "90 s", 90: "1.5 min", 600: "10.0 min"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_names_the_job_counts_expected_seconds_and_leaves_nothing_behind(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run = run_of(plan_report("table", base, engines=[], kinds=[], budget=60), tmp_path)
    run._do(Job("a job", "machine", base, 0, 30.0), limited=False)
    assert run.progress.n == 30.0
    assert run.expected(Group((Job("a job", "machine", base, 0, 30.0),))) < 30.0  # from now on what it really took
    run._begin()
    once = sum(map(run.expected, run._planned()))
    assert run.progress.total == pytest.approx(30.0 + once + sum(run.expected(one) for one in run._planned()[:2]))
    run.progress.refresh()
    assert re.search(r"how long it will take.* left", terminal.getvalue())
    run.progress.close()
    last = terminal.getvalue().removesuffix("\r").rpartition("\r")[2]
    assert (len(last) > 30, last.strip()) == (True, "")  # blanks over the bar: nothing of it stays on the screen
