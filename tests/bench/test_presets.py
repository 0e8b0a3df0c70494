"""A preset measures every cell, in turn, as often as its budget allows, and loses nothing that is finished."""

import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from jobs_here import CEILINGS, Here, session_of
from llama.cli import benchmark_inference as script

from llama import cli
from llama.bench import presets, single, watch
from llama.bench.cell import Cell
from llama.bench.presets import Session, plan, run_session, sweep_cells, table_cells
from llama.bench.report.text import report_markdown
from llama.bench.run import aggregate, jobs, worker
from llama.bench.run.directory import RunDirectory, new_run_directory, resumed_run_directory
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.schema import new_record, new_report
from llama.bench.single import benchmark_inference
from llama.cli.progress import seconds_bar

REPETITIONS = 2  # as many as the claims need


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256)
    return Cell(input_len=6, output_len=4, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    jobs_done_here = Here(lambda kind, cell: cell.name if kind == "cell" else kind)
    for module in (presets, aggregate, single):
        monkeypatch.setattr(module, "run_job", jobs_done_here)
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: CEILINGS)
    monkeypatch.setattr(presets, "BATCHES", (1, 2))
    monkeypatch.setattr(presets, "REPETITIONS", REPETITIONS)
    monkeypatch.setattr(presets, "SWEEP_BATCHES", [1, 2])
    monkeypatch.setattr(presets, "CONTEXTS", [4, 8, 16, 32])
    monkeypatch.setattr(presets, "GENERATED", (2, 5))
    return jobs_done_here


def table(base: Cell, out: Path, *, minutes: float, resume: bool = False) -> RunDirectory:
    report = new_report("table", table_cells(base, []), budget_minutes=minutes)
    session = session_of(report, out, minutes=minutes, resume=resume)
    run_session(session)
    return session.directory


def test_a_table_repeats_every_cell_in_turn_where_that_fits(base: Cell, here: Here, tmp_path: Path) -> None:
    report = table(base, tmp_path, minutes=60).report
    four = ["batch 1, cache on", "batch 1, cache off", "batch 2, cache on", "batch 2, cache off"]
    assert [job for job in here.done if job.startswith("batch")] == four * REPETITIONS
    assert here.done[:2] == ["machine", "calibrate"]
    assert all(record["summary"] and record["summary"]["seconds"]["n"] == REPETITIONS for record in report["cells"])
    assert [one["batch_size"] for one in report["crossovers"]] == [1, 2]
    assert [one["equal"] for one in report["comparisons"]] == [True, True]
    for record in report["cells"]:
        assert any(f"the same {4 * record['cell']['batch_size']} tokens" in note for note in record["notes"])
    assert len(report["reading"]) >= 3


def test_a_table_that_is_whole_is_not_measured_again(base: Cell, here: Here, tmp_path: Path) -> None:
    table(base, tmp_path, minutes=60)
    done = len(here.done)
    report = table(base, tmp_path, minutes=60, resume=True).report
    assert here.done[done:] == ["machine", "calibrate"]
    assert [len(record["samples"]) for record in report["cells"]] == [REPETITIONS] * 4


def test_without_a_budget_every_cell_is_measured_once(base: Cell, here: Here, tmp_path: Path) -> None:
    report = table(base, tmp_path, minutes=0).report
    assert [len(record["samples"]) for record in report["cells"]] == [1, 1, 1, 1]
    assert report["crossovers"] == []


def test_a_budget_of_a_moment_measures_the_first_pair_and_names_all_that_is_left_out(
    base: Cell, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = table(base, tmp_path, minutes=0.001).report
    cells = ["batch 1, cache on", "batch 1, cache off", "batch 2, cache on", "batch 2, cache off"]
    assert here.done == ["machine", "calibrate", *cells[:2]]
    assert [len(record["samples"]) for record in report["cells"]] == [1, 1, 0, 0]
    assert [one["batch_size"] for one in report["comparisons"]] == [1]
    curves = [f"steps at batch {batch}: no room in the budget" for batch in (1, 2)]
    assert report["failures"] == [*(f"{name}: no room in the budget" for name in cells[2:]), *curves]
    assert all(record["error"] is None for record in report["cells"])
    assert script.exit_code(report) == 0
    said = capsys.readouterr().err
    assert f"too small for any pair of cells. The run still measures {' and '.join(cells[:2])}; left out are" in said
    assert f"left out are: {'; '.join(cells[2:])}." in said
    shown = report_markdown(report)
    assert f"not measured: {cells[-1]}: no room in the budget" in shown
    assert f"not measured: {cells[0]}" not in shown


@pytest.mark.parametrize("measured", range(1, 6))
def test_a_budget_that_ends_early_leaves_no_pair_torn(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: int
) -> None:
    """With room for one cell more than whole pairs have, that cell runs neither once nor again."""
    spent: list[str] = []
    monkeypatch.setattr(Session, "room", property(lambda self: 10.0 * (measured - len(spent))))
    monkeypatch.setattr(presets, "expected_seconds", lambda cell, calibration: 10.0)
    here.fail = lambda kind, cell: spent.append(kind) if kind == "cell" else None  # type: ignore[method-assign]
    report = new_report("table", table_cells(base, []), budget_minutes=1)
    made = session_of(report, tmp_path, minutes=1)
    whole = made.do

    def do(what: str, *words: Any, **named: Any) -> dict[str, Any]:
        done = whole(what, *words, **named)
        made.expected[what] = 10.0
        return done

    monkeypatch.setattr(made, "do", do)
    run_session(made)
    counts = [len(record["samples"]) for record in report["cells"]]
    assert counts == {1: [1, 1, 0, 0], 2: [1, 1, 0, 0], 3: [1, 1, 0, 0], 4: [1] * 4, 5: [1] * 4}[measured]


def test_an_engine_with_one_mode_is_left_out_with_its_batch(tmp_path: Path) -> None:
    cells = table_cells(SIX, ["llama.cpp"])
    directory = RunDirectory(tmp_path, new_report("table", cells, budget_minutes=1))
    made = Session(directory, time.monotonic() + 100, Bar(), calibration=CALIBRATION)
    made.expected = {cell.name: 20.0 if cell.engine == "llama" else 1.0 for cell in cells}
    assert [[cells[place].name for place in pair] for pair in presets.due(made, 0)][:2] == [
        ["batch 1, cache on", "batch 1, cache off"],
        ["llama.cpp, batch 1, cache on"],
    ]
    kept = [cells[place].batch_size for place in presets.first_round(made)]
    assert kept == [1, 1, 1, 8, 8, 8]  # 82 s; llama.cpp at batch 16 would fit


def test_a_table_of_one_cell_measures_it_whatever_the_budget(base: Cell, here: Here, tmp_path: Path) -> None:
    session = session_of(new_report("table", [base], budget_minutes=0.001), tmp_path, minutes=0.001)
    run_session(session)
    assert [len(record["samples"]) for record in session.report["cells"]] == [1]


def test_a_sweep_with_a_budget_of_a_moment_measures_its_pair(base: Cell, here: Here, tmp_path: Path) -> None:
    directory = new_run_directory(tmp_path, new_report("sweep", sweep_cells(base), budget_minutes=0.001))
    run_session(Session(directory, time.monotonic() + 0.06, seconds_bar()))
    assert [len(record["samples"]) for record in directory.report["cells"]] == [1, 1]
    assert len(here.done) == 4


def test_a_run_that_goes_on_has_its_least_already(base: Cell, here: Here, tmp_path: Path) -> None:
    table(base, tmp_path, minutes=0.001)
    done = len(here.done)
    report = table(base, tmp_path, minutes=0.001, resume=True).report
    assert here.done[done:] == ["machine", "calibrate"]
    assert [len(record["samples"]) for record in report["cells"]] == [1, 1, 0, 0]


CALIBRATION = {"input_len": 10, "load_seconds": 2.0, "prefill_seconds": 5.0, "step_seconds": 0.25, "max_seq_len": 256}
SIX = Cell(input_len=6, output_len=3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 3.0 + 0.5 + 0.5 + 3.0 + 0.5),  # a prompt of six at half a second, two steps; the first two warm up
        ({"kv_caching": False}, 3.0 + 3.5 + 4.0 + 3.0 + 3.5),
        ({"batch_size": 4}, 12.0 + 2.0 + 2.0 + 12.0 + 2.0),
        ({"output_len": 1}, 3.0 + 3.0),
        ({"engine": "transformers"}, 2 * 7.5),
    ],
    ids=str,
)
def test_a_repetition_is_expected_to_take_its_forwards_and_its_warm_up(changes: Any, expected: float) -> None:
    start = 4.0 + 2.0
    assert presets.expected_seconds(SIX.but(**changes), CALIBRATION) == start + expected


def test_a_step_is_never_expected_to_take_less_than_one_that_was_timed() -> None:
    slow = {**CALIBRATION, "step_seconds": 0.75}
    assert presets.expected_seconds(SIX, slow) == 6.0 + 3.0 + 0.75 + 0.75 + 3.0 + 0.75


def test_the_time_of_tokens_and_of_a_start_is_worked_out() -> None:
    assert presets.expected_of_tokens(0, CALIBRATION) == 6.0
    assert presets.expected_of_tokens(100, CALIBRATION) == 56.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89.4, "89 s"), (89.999, "90 s"), (90, "1.5 min"), (600, "10.0 min")]
)
def test_a_duration_is_told_in_seconds_up_to_a_minute_and_a_half(seconds: float, words: str) -> None:
    assert presets.duration(seconds) == words


class Bar:
    """Counts as a progress bar does."""

    n, total = 7.0, 0.0


def session(
    tmp_path: Path, *, room: float, budget: float | None, preset: str = "table", base: Cell = SIX
) -> presets.Session:
    """Return a session of four cells, which take 10, 40, 20 and 80 s, and of a curve of 31 s."""
    cells = [base.but(batch_size=rows, kv_caching=on) for rows in (1, 2) for on in (True, False)]
    directory = RunDirectory(tmp_path, new_report(preset, cells, budget_minutes=budget))
    expected = {cell.name: seconds for cell, seconds in zip(cells, (10.0, 40.0, 20.0, 80.0), strict=True)}
    made = Session(directory, time.monotonic() + room, Bar(), calibration=CALIBRATION)
    made.expected, made.curves = {**expected, "a curve": 31.0}, ["a curve"]
    return made


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock stand still, so that all the room is there at each look."""
    monkeypatch.setattr(time, "monotonic", lambda: 1024.0)


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("room", "budget", "first", "seconds"),
    [
        (1000, 15, [0, 1, 2, 3], 5 * 150 + 31),
        (1000, None, [0, 1, 2, 3], 5 * 150 + 31),
        (181, 3, [0, 1, 2, 3], 181),
        (180, 3, [0, 1, 2, 3], 150),  # no room for the curve, nor for a pair again
        (150, 3, [0, 1, 2, 3], 150),
        (149, 3, [0, 1], 131),  # the curve, and the first pair again
        (0, 3, [0, 1], 50),  # the first pair always runs
        (0, 0, [0, 1, 2, 3], 150),
        (0, None, [0, 1, 2, 3], 150),
        (50, 3, [0, 1], 50),
        (80, 3, [0, 1], 50),
        (81, 3, [0, 1], 81),
    ],
)
def test_a_plan_measures_all_once_then_curves_then_again_as_far_as_the_budget_goes(
    tmp_path: Path, room: float, budget: float | None, first: list[int], seconds: float
) -> None:
    planned = session(tmp_path, room=room, budget=budget)
    assert presets.first_round(planned) == first
    assert plan(planned) == seconds
    assert planned.progress.total == 7.0 + seconds


@pytest.mark.usefixtures("still")
def test_a_plan_leaves_out_what_is_measured_and_what_died_and_runs_a_sweeps_curves_without_a_budget(
    tmp_path: Path,
) -> None:
    planned = session(tmp_path, room=0, budget=0)
    planned.report["cells"][0]["samples"] = [{}]  # type: ignore[typeddict-item]
    planned.report["cells"][3]["error"] = "died: gone"
    assert presets.due(planned, 0) == [[1], [2]]
    assert session(tmp_path, room=-5, budget=3).room == 0.0
    assert plan(planned) == 60
    assert plan(session(tmp_path, room=0, budget=0, preset="sweep")) == 181
    assert plan(session(tmp_path, room=0, budget=3, preset="sweep")) == 50
    again = session(tmp_path, room=50, budget=3)
    for record, count in zip(again.report["cells"], (4, 1, 2, 5), strict=True):
        record["samples"] = [{}] * count  # type: ignore[typeddict-item]
    again.curves = []
    assert plan(again) == 40  # the second cell's second repetition; the first pair's fifth has no room

    dead = session(tmp_path, room=1000, budget=3)
    dead.curves = []
    dead.report["cells"][1] |= {"samples": [{}], "error": "died: gone"}  # type: ignore[typeddict-item]
    assert plan(dead) == 5 * 110


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("what", "room", "budget", "must", "expected"),
    [
        ("a curve", 31, 3, False, True),
        ("a curve", 30.9, 3, False, False),
        ("a curve", 30.9, 3, True, False),
        ("a curve", 0, 0, True, True),
        ("a curve", 0, None, True, True),
        ("a curve", 0, 0, False, False),
    ],
)
def test_a_job_has_room_or_must_run_and_what_is_left_out_is_kept(
    tmp_path: Path, what: str, room: float, budget: float | None, must: bool, expected: bool
) -> None:
    planned = session(tmp_path, room=room, budget=budget)
    assert planned.has_room(what, must=must) == expected
    assert planned.report["failures"] == ([] if expected else ["a curve: no room in the budget"])
    assert must or planned.has_room(what) == expected  # unless it is said, a job need not run


@pytest.mark.usefixtures("still")
def test_a_run_that_passed_its_budget_says_by_how_much(tmp_path: Path) -> None:
    for room, budget, expected in ((-39.0, 3, True), (-0.9, 3, False), (10.0, 3, False), (-39.0, 0, False)):
        words = "The run passed its budget of 3 minutes by 39 s: jobs took longer than predicted."
        assert presets.overrun(session(tmp_path, room=room, budget=budget)) == [words] * expected


@pytest.mark.usefixtures("still")
def test_a_budget_that_is_too_small_says_what_would_fit(tmp_path: Path) -> None:
    assert presets.too_little(session(tmp_path, room=180, budget=3), 180) == []
    assert presets.too_little(session(tmp_path, room=0, budget=0), 180) == []
    (words,) = presets.too_little(session(tmp_path, room=66, budget=2), 180)
    assert words == (
        "The budget is too small, and left out are: batch 2, cache on; batch 2, cache off. Everything fits once with "
        "--budget 4 or with --input_len 3; --budget 0 measures every cell once, whatever it takes."
    )  # 54 s are spent, and 180 s are to come
    for once, enough in ((186, 4), (186.5, 5)):  # 240 s are four minutes
        (words,) = presets.too_little(session(tmp_path, room=66, budget=2), once)
        assert f"with --budget {enough} or" in words
    (words,) = presets.too_little(session(tmp_path, room=49, budget=2), 180)
    assert words.startswith(
        "The budget is too small for any pair of cells. The run still measures batch 1, cache on and batch 1, cache "
        "off; left out are: batch 2, cache on; batch 2, cache off. Everything fits once with --budget 5; "
    )
    (words,) = presets.too_little(session(tmp_path, room=50, budget=2), 180)
    assert words.startswith("The budget is too small, and left out are: batch 2, cache on; ")
    (words,) = presets.too_little(session(tmp_path, room=170, budget=3), 180)
    assert "left out are: some curves. Everything fits once with --budget 4 or" in words


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("changes", "preset", "room", "flags"),
    [
        ({}, "table", 66, ["--input_len 3"]),
        ({}, "table", 65.9, []),
        ({"text": "a b"}, "table", 66, []),
        ({"output_len": 16}, "table", 410, ["--output_len 8", "--input_len 3"]),  # where curves alone do not fit
        ({"output_len": 64}, "table", 409.5, ["--output_len 16"]),
        ({"output_len": 64}, "table", 409.4, ["--output_len 8"]),
        ({"output_len": 64}, "table", 3452, ["--output_len 32", "--input_len 3"]),
        ({"output_len": 64}, "sweep", 3452, ["--input_len 3"]),
        ({"output_len": 4}, "table", 84, ["--output_len 2", "--input_len 3"]),
    ],
    ids=str,
)
def test_shorter_lengths_with_which_all_would_fit_are_halves(
    tmp_path: Path, changes: dict[str, Any], preset: str, room: float, flags: list[str]
) -> None:
    """By the prediction, all four cells of 6 in and 16 out take 409.5 s, 6 in and 8 out 187.5, 3 in and 3 out 66."""
    made = session(tmp_path, room=room, budget=15, preset=preset, base=SIX.but(**changes))
    assert presets.shorter(made) == flags


def test_a_cells_first_repetition_is_traced_and_its_process_may_raise_the_ceilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, traced, tells = session(tmp_path, room=100, budget=3), list[bool](), [{}, {"ceilings": CEILINGS}, {}]
    made.progress = seconds_bar()
    record, cell = made.report["cells"][0], made.cells[0]
    low = {**CEILINGS, "read_bytes_per_second": 1.0}
    made.report["ceilings"] = low  # type: ignore[typeddict-item]

    def told(kind: str, cell: Cell, *, waiting: Any, trace: bool) -> dict[str, Any]:
        traced.append(trace)
        return {"environment": {}, "record": new_record(cell), **tells[len(traced) - 1]}

    monkeypatch.setattr(presets, "run_job", told)
    monkeypatch.setattr(presets, "with_figures", lambda record, _: record)
    for samples, ceilings in (([], low), ([], CEILINGS), ([{}], CEILINGS)):
        presets.repeat(made, cell, {**record, "samples": samples})  # type: ignore[typeddict-item]
        assert made.report["ceilings"] == ceilings
    assert traced == [True, True, False]


def test_an_interrupted_table_keeps_its_cells_and_resumes(base: Cell, here: Here, tmp_path: Path) -> None:
    def interrupt(kind: str, cell: Cell) -> None:
        if len(here.done) == 4:  # two jobs to begin with, and two cells
            raise KeyboardInterrupt

    here.fail = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        table(base, tmp_path, minutes=0)
    (kept,) = tmp_path.glob("*/results.json")
    before = json.loads(kept.read_text())
    assert [len(record["samples"]) for record in before["cells"]] == [1, 1, 0, 0]

    here.fail = lambda kind, cell: None  # type: ignore[method-assign]
    directory = table(base, tmp_path, minutes=0, resume=True)
    assert directory.folder == kept.parent
    assert [len(record["samples"]) for record in directory.report["cells"]] == [1, 1, 1, 1]
    assert [record["samples"] for record in directory.report["cells"][:2]] == [
        r["samples"] for r in before["cells"][:2]
    ]


def test_only_a_run_of_the_same_cells_is_resumed(base: Cell, tmp_path: Path) -> None:
    new_run_directory(tmp_path, new_report("table", table_cells(base, [])))
    other = new_report("table", table_cells(base.but(output_len=5), []))
    with pytest.raises(ValueError, match="nothing to resume"):
        resumed_run_directory(tmp_path, other)
    assert resumed_run_directory(tmp_path, new_report("table", table_cells(base, []))).report["preset"] == "table"


def test_a_run_that_is_half_written_or_of_another_schema_is_passed_over(base: Cell, tmp_path: Path) -> None:
    plan = new_report("table", table_cells(base, []))
    directory, *others = (new_run_directory(tmp_path, plan) for _ in range(5))
    kept = json.dumps(plan)
    contents = [kept[: len(kept) // 2], "[]", "null", json.dumps({**plan, "schema": "of next year"})]
    for other, content in zip(others, contents, strict=True):
        (other.folder / "results.json").write_text(content)
    assert resumed_run_directory(tmp_path, plan).folder == directory.folder


def test_a_file_in_the_place_of_the_folder_of_results_is_an_error_and_not_a_name_that_is_taken(
    base: Cell, tmp_path: Path
) -> None:
    (tmp_path / "out").touch()
    with pytest.raises((FileExistsError, NotADirectoryError)):
        new_run_directory(tmp_path / "out", new_report("table", [base]))


def test_runs_of_one_day_do_not_overwrite_each_other(base: Cell, tmp_path: Path) -> None:
    first, second = (new_run_directory(tmp_path, new_report("table", [base])) for _ in range(2))
    assert first.folder != second.folder
    assert first.folder.name.endswith("-tiny-table")
    assert second.folder.name == f"{first.folder.name}-2"


def test_a_cell_whose_process_dies_says_so_and_the_others_stand(base: Cell, here: Here, tmp_path: Path) -> None:
    def die(kind: str, cell: Cell) -> None:
        if kind == "cell" and cell.batch_size == 2 and not cell.kv_caching:
            raise JobDied("its process was ended by SIGKILL")

    here.fail = die  # type: ignore[method-assign]
    report = table(base, tmp_path, minutes=60).report
    errors = [record["error"] for record in report["cells"]]
    assert errors == [None, None, None, "died: its process was ended by SIGKILL"]
    assert [len(record["samples"]) for record in report["cells"]] == [2, 2, 2, 0]
    assert script.exit_code(report) == script.DIED


def test_what_died_is_tried_again_when_the_run_is_resumed(base: Cell, here: Here, tmp_path: Path) -> None:
    def die(kind: str, cell: Cell) -> None:
        if kind == "cell" and cell.batch_size == 2:
            raise JobDied("gone")

    here.fail = die  # type: ignore[method-assign]
    assert [record["error"] for record in table(base, tmp_path, minutes=0).report["cells"]][2:] == ["died: gone"] * 2
    here.fail = lambda kind, cell: None  # type: ignore[method-assign]
    report = table(base, tmp_path, minutes=0, resume=True).report
    assert [(record["error"], len(record["samples"])) for record in report["cells"]] == [(None, 1)] * 4


def test_repetitions_of_another_machine_or_commit_are_not_put_into_one_table(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(base, tmp_path, minutes=0)
    whole = worker.environment
    monkeypatch.setattr(worker, "environment", lambda *args: {**whole(*args), "commit": "another"})
    with pytest.raises(ValueError, match=r"commit was .* and is 'another'"):
        table(base, tmp_path, minutes=0, resume=True)


def test_a_curve_that_fails_is_said_and_the_cells_stand(base: Cell, here: Here, tmp_path: Path) -> None:
    def die(kind: str, cell: Cell) -> None:
        if kind == "steps" and cell.batch_size == 2:
            raise JobDied("gone")

    here.fail = die  # type: ignore[method-assign]
    report = table(base, tmp_path, minutes=60).report
    assert report["failures"] == ["steps at batch 2: gone"]
    assert [entry["batch_size"] for entry in report["crossovers"]] == [1]
    assert all(len(record["samples"]) == REPETITIONS for record in report["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["table", "sweep"])
def test_a_cache_of_ones_own_is_measured_by_its_name(
    base: Cell, here: Here, tmp_path: Path, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from llama.kv_cache import StaticCache\n\n\nclass Mine(StaticCache, kind='mine'):\n    made = 0\n")
    words = ["--preset", preset, "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--device", "cpu"]
    for kind in ("concat", f"{file}:mine"):
        assert run(*words, "--out", str(tmp_path / kind[-4:]), "--budget", "0", "--kv_cache", kind) == 0
        (path,) = (tmp_path / kind[-4:]).glob("*/results.json")
        report = json.loads(path.read_text())
        assert all(point["status"] == "ok" for record in report["cells"] for point in record["points"][:-1])
        assert {record["points"][-1]["name"] for record in report["cells"]} == {"other work"}  # this machine may be
        assert report["cells"][0]["cell"]["kv_cache"] == kind
        assert not report["sweep"] or all(e["measured"] == e["predicted"] for e in report["sweep"]["cache"])
    assert "VIOLATED" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_has_a_generation_to_step_through_where_it_is_asked_for(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WATCHED_STEPS", 3)
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    for asked in ("--page_watch", "--resume", "--page_watch=False"):
        flags = ["--resume", "--page_watch"] if asked == "--resume" else [asked]
        out = tmp_path / ("off" if asked.endswith("False") else "on")
        assert run(*words, "--out", str(out), "--budget", "0", "--kv_cache", "int8", *flags) == 0
        (folder,) = out.iterdir()
        page = (folder / "page.html").read_text("utf-8")
        frames = re.findall(r'<iframe [^>]*sandbox="allow-scripts" srcdoc="([^"]*)"', page)
        if out.name == "on":
            assert [html.unescape(frame) for frame in frames] == [(folder / "watch.html").read_text("utf-8")]
            assert "Cache: int8. 3 steps after" in html.unescape(frames[0])
        else:
            assert frames == []
    assert here.done.count("watch") == 1, "what is there is not recorded again"


def test_that_generation_goes_by_the_plain_path_whatever_is_measured(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WATCHED_STEPS", 3)
    asked: list[Cell] = []
    here.fail = lambda kind, cell: asked.append(cell)  # type: ignore[method-assign]
    made = session(tmp_path, room=101, budget=3)
    made.progress = seconds_bar()
    made.watched, made.expected[presets.RECORDING] = base.but(fast=True, exact=True, batch_size=8), 100.0
    watch.watch(made)
    assert made.report["failures"] == []
    assert [(cell.engine, cell.fast, cell.exact) for cell in asked] == [("llama", False, False)]


@pytest.mark.usefixtures("still")
def test_that_generation_is_part_of_the_budget(base: Cell, here: Here, tmp_path: Path) -> None:
    """It takes 12 s: a start of 6 s, and three runs of 2 s, the first two steps of each twice."""
    quick = {**CALIBRATION, "prefill_seconds": 0.0, "step_seconds": 1 / 17}
    for room, reserved in ((120.1, 18.0), (119.0, 0.0)):
        made = session(tmp_path, room=room, budget=4)
        made.calibration = quick
        presets.reserve_recording(made, base)
        assert made.expected[presets.RECORDING] == pytest.approx(12.0)
        assert made.room == pytest.approx(room - reserved)
    made.deadline = time.monotonic() + 11.9
    made.watched = base
    watch.watch(made)
    assert (here.done, made.report["failures"]) == ([], ["the page to step through: no room in the budget"])


@pytest.mark.usefixtures("still")
def test_an_engine_that_is_slower_than_predicted_corrects_what_its_other_cells_are_expected_to_take(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session(tmp_path, room=1000, budget=20, base=base)
    monkeypatch.setattr(presets, "check_machine", lambda *_: None)
    monkeypatch.setattr(presets, "aggregated", lambda record, done: {**record, "samples": [{}]})
    monkeypatch.setattr(presets, "with_figures", lambda record, ceilings: record)

    def do(what: str, *_: Any, **__: Any) -> dict[str, Any]:
        made.expected[what] = 30.0
        return {"environment": {}, "record": {}}

    monkeypatch.setattr(made, "do", do)
    records = made.report["cells"]
    records[0] = presets.repeat(made, made.cells[0], records[0])
    assert presets.expected_of(made, range(4)) == [30.0, 120.0, 60.0, 240.0]
    records[1] = presets.repeat(made, made.cells[1], records[1])  # in less time than was predicted
    assert presets.expected_of(made, range(4)) == [30.0, 30.0, 20.0, 80.0]


def test_a_generation_that_cannot_be_recorded_is_noted_and_nothing_is_lost(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    def refuse(kind: str, cell: Cell) -> None:
        if kind == "watch":
            raise ValueError("not today")

    here.fail = refuse  # type: ignore[method-assign]
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    assert run(*words, "--out", str(tmp_path), "--budget", "0", "--page_watch") == 0
    (results,) = tmp_path.glob("*/results.json")
    assert json.loads(results.read_text())["failures"][-1] == "the page to step through: not today"
    assert "<iframe" not in (results.parent / "page.html").read_text("utf-8")


def test_an_interruption_ends_with_exit_code_130_and_a_report(base: Cell, here: Here, tmp_path: Path) -> None:
    def interrupt(kind: str, cell: Cell) -> None:
        if not cell.kv_caching:
            raise KeyboardInterrupt

    here.fail = interrupt  # type: ignore[method-assign]
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    assert run(*words, "--out", str(tmp_path), "--budget", "0") == 130
    assert len(list(tmp_path.glob("*/page.html"))) == 1


def test_a_violation_in_the_mode_that_is_compared_with_counts(base: Cell, here: Here) -> None:
    whole = here.__call__

    def broken(kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
        done = whole(kind, cell, **job)
        if kind == "cell" and not cell.kv_caching:
            done["record"]["points"][0] = {"name": "cache", "status": "violated", "detail": "it was on"}
        return done

    single.run_job = broken  # type: ignore[assignment]  # the fixture takes it back
    report = single.measure_cell(base, compare=True)
    assert report["cells"][0]["points"][0]["detail"] == "it was on"
    assert script.exit_code(report) == script.VIOLATED


def test_a_repetition_that_dies_leaves_the_others_and_a_note(base: Cell, here: Here, tmp_path: Path) -> None:
    def die_the_second_time(kind: str, cell: Cell) -> None:
        if kind == "cell" and cell.name == "batch 1, cache on" and cell.name in here.done:
            raise JobDied("gone")

    here.fail = die_the_second_time  # type: ignore[method-assign]
    report = table(base, tmp_path, minutes=60).report
    assert any("a repetition failed: gone" in note for record in report["cells"] for note in record["notes"])
    assert all(record["error"] is None for record in report["cells"])


def test_a_sweep_measures_every_curve(base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "CONTEXTS", [*presets.CONTEXTS, 256, 257])
    report = new_report("sweep", sweep_cells(base))
    run_session(Session(new_run_directory(tmp_path, report), time.monotonic(), seconds_bar()))
    sweep = report["sweep"]
    assert sweep is not None
    assert [entry["generated"] for entry in sweep["growth"]] == [2, 5]
    assert [entry["length"] for entry in sweep["cache"]] == [128, 256]  # the model's limit
    assert all(entry["measured"] == entry["predicted"] for entry in sweep["cache"])
    assert {(step["context"], step["kv_caching"]) for step in sweep["contexts"]} == {
        (n, mode) for n in (4, 8, 16, 32, 256) for mode in (True, False)
    }
    assert {step["batch_size"] for step in sweep["batches"]} == {1, 2}
    assert len(sweep["fits"]) == 4


def test_a_sweep_fits_its_steps_beside_what_the_bytes_predict(base: Cell, here: Here, tmp_path: Path) -> None:
    report = new_report("sweep", sweep_cells(base))
    run_session(Session(new_run_directory(tmp_path, report), time.monotonic(), seconds_bar()))
    assert report["sweep"] is not None
    cached = report["sweep"]["fits"][0]
    position = report["sweep"]["cache"][0]["predicted"] / 128  # bytes of one
    assert cached["predicted_slope"] == position / 1e15
    assert [fit["predicted_slope"] for fit in report["sweep"]["fits"][1:]] == [None] * 3
    assert any(sentence.startswith("A token with the cache takes") for sentence in report["reading"])


def test_a_sweep_of_too_few_contexts_says_that_nothing_was_fitted(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "CONTEXTS", [4, 8])
    report = new_report("sweep", sweep_cells(base))
    run_session(Session(new_run_directory(tmp_path, report), time.monotonic(), seconds_bar()))
    assert report["sweep"] is not None
    assert report["sweep"]["fits"] == []
    assert "How the time grows was not fitted: a line takes 3 contexts, and there are 2." in report["reading"]


ENGINES = ["transformers", "llama.cpp", "llama.cpp:int8", "llama.cpp:int4", "llama:fast", "llama:fast:int8"]


@pytest.mark.slow
def test_one_table_holds_every_engine_in_every_mode_that_it_has(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llama_cpp")
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        pytest.skip("needs a C++ compiler")
    folder = write_checkpoint(tmp_path / "tiny", max_seq_len=256, **NATIVE_SIZES)
    words = ["--preset", "table", "--ckpt_dir", str(folder), "--input_len", "6", "--output_len", "4", "--threads", "1"]
    words += [word for engine in ENGINES for word in ("--engine", engine)]
    assert run(*words, "--device", "cpu", "--out", str(tmp_path / "out"), "--budget", "0") == 0
    (path,) = (tmp_path / "out").glob("*/results.json")
    report = json.loads(path.read_text())
    first = [record for record in report["cells"] if record["cell"]["batch_size"] == 1]
    ran = {(record["cell"]["kv_caching"], record["path"].replace("eager, ", "")) for record in first}
    assert {path for on, path in ran if on and not path.startswith(("transformers", "llama.cpp"))} == {
        *("plain", "native", "native, int8 weights")
    }
    assert sum(path.startswith("llama.cpp") for on, path in ran) == 3  # with the cache alone
    assert len(first) == 4 * 2 + 3
    assert {(one["engine"], one["path"]) for one in report["comparisons"] if one["engine"] == "llama"} == {
        *(("llama", path) for path in ("plain", "native", "native, int8 weights"))
    }
    notes = {record["path"]: record["notes"] for record in first if record["cell"]["engine"] == "llama.cpp"}
    assert [any("tokens" in n and "we did" in n for n in note) for note in notes.values()] == [True, False, False]
    shown = capsys.readouterr().out
    assert "How many times faster ours is, by path" in shown
    assert "VIOLATED" not in shown


def test_the_table_puts_peers_beside_every_cell_that_they_can_run() -> None:
    names = [cell.name for cell in table_cells(Cell(), ["transformers", "llama.cpp"])]
    assert len(names) == 15  # three batches of ours and transformers' in two modes, llama.cpp's in one
    assert "llama.cpp, batch 8, cache on" in names
    assert "llama.cpp, batch 8, cache off" not in names
    assert "transformers, batch 8, cache off" in names


def measured_and_compared(base: Cell, *, kv_caching: bool) -> None:
    record = benchmark_inference(2, 6, 4, kv_caching, compare=True, ckpt_dir=base.model, threads=1, device="cpu")
    assert record["summary"] is not None
    assert record["summary"]["seconds"]["n"] == 1
    assert all(point["status"] == "ok" for point in record["points"][:-1]), record["points"]
    assert record["points"][-1]["name"] == "other work"
    assert "n = 1, too few to judge by" in record["points"][-1]["detail"]
    assert record["notes"][-1] == "cache on and off made the same 8 tokens"
    assert record["limits"] is not None


def test_a_peer_on_our_weights_is_told_whether_it_made_our_plain_tokens() -> None:
    whole = Cell(engine="transformers")
    made = [
        (Cell(fast=True), [[1, 9]], []),
        (Cell(), [[1, 2]], []),
        (whole, [[1, 2]], ["made the same tokens as we did"]),
        (Cell(engine="llama.cpp"), [[1, 5]], ["from token 1 of row 0 on made other tokens than we did"]),
        (Cell(engine="llama.cpp", quantize="int8"), [[1, 5]], []),  # other weights
        (whole.but(batch_size=8), [[1, 2]] * 8, []),  # of which ours was not measured
        (whole.but(kv_caching=False), [], []),
    ]
    report = new_report("table", [cell for cell, _, _ in made])
    for record, (_, ids, _) in zip(report["cells"], made, strict=True):
        record["ids"] = ids
    for _ in range(2):  # as a run that goes on does
        presets.compare_peers(report)
        assert [record["notes"] for record in report["cells"]] == [notes for _, _, notes in made]


def test_presets_measure_at_the_sizes_that_the_documentation_names() -> None:
    assert (presets.REPETITIONS, presets.BATCHES, presets.GENERATED) == (5, (1, 8, 16), (10, 20, 50, 100, 200))
    assert [2**n for n in range(5)] == presets.SWEEP_BATCHES
    assert [2**n for n in range(4, 12)] == presets.CONTEXTS
    assert [2**n for n in range(7, 14)] == presets.CACHE_LENGTHS
    assert presets.AGREED_ON == 1024


def test_a_curve_is_expected_to_feed_each_step_four_times(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to warm up, and three times that count: behind 2, 3, 4 and 6 tokens in a table of prompts of six."""
    of_table = session_of(new_report("table", table_cells(base, []), budget_minutes=1), tmp_path / "table", minutes=1)
    assert presets.table_curves(of_table) == {"steps at batch 1": (4 * 15, 4), "steps at batch 2": (4 * 2 * 15, 4)}
    of_sweep = session_of(new_report("sweep", sweep_cells(base), budget_minutes=1), tmp_path / "sweep", minutes=1)
    assert presets.sweep_curves(of_sweep) == {
        **{"cache sizes": (0, 0), "steps by context": (4 * (4 + 8 + 16 + 32), 4)},
        **{"steps at batch 1": (4 * 6, 1), "steps at batch 2": (4 * 2 * 6, 1)},
    }
    of_sweep.calibration = CALIBRATION
    monkeypatch.setattr(presets, "measure_machine", lambda *_: None)
    presets.begin(of_sweep, {"a": (10, 0), "b": (10, 4)})
    assert of_sweep.expected["b"] == of_sweep.expected["a"] + 2 * 4 * 0.3


def test_what_stands_beside_the_cells_is_measured_with_the_cache_on_and_whole_weights(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    asked: dict[str, set[tuple[bool, str | None]]] = {}

    def note(kind: str, cell: Cell) -> None:
        asked.setdefault(kind, set()).add((cell.kv_caching, cell.quantize))

    here.fail = note  # type: ignore[method-assign]
    cells = table_cells(base, ["llama:int8"])
    run_session(session_of(new_report("table", cells, budget_minutes=0.001), tmp_path / "table", minutes=0.001))
    known = session_of(new_report("table", cells), tmp_path / "curves", minutes=1)
    assert set(presets.crossover_cells(known).values()) == {cells[0], cells[0].but(batch_size=2)}
    run_session(session_of(new_report("sweep", sweep_cells(base)), tmp_path / "sweep", minutes=60))
    del asked["cell"]
    assert asked == {kind: {(True, None)} for kind in ("machine", "calibrate", "caches", "steps")}


def test_a_slope_is_predicted_of_one_process_with_a_static_cache_under_known_ceilings() -> None:
    ceilings: Any = {"read_bytes_per_second": 50.0}
    assert presets.predicted_slope(Cell(), 100, ceilings) == 2.0
    assert presets.predicted_slope(Cell(), 100, None) is None
    assert presets.predicted_slope(Cell(kv_cache="int8"), 100, ceilings) is None
    assert presets.predicted_slope(Cell(ranks=2), 100, ceilings) is None


@pytest.mark.slow
def test_the_function_measures_in_a_process_of_its_own_and_compares(base: Cell) -> None:
    measured_and_compared(base, kv_caching=True)


def test_the_function_compares_with_the_cached_run_where_it_measures_the_other(base: Cell, here: Here) -> None:
    measured_and_compared(base, kv_caching=False)
    assert here.done == ["machine", "batch 2, cache off", "batch 2, cache on"]


def test_unless_more_is_asked_for_one_mode_is_measured_once(base: Cell, here: Here) -> None:
    record = benchmark_inference(2, 6, 4, ckpt_dir=base.model, threads=1, device="cpu")
    assert here.done == ["machine", "batch 2, cache on"]
    assert len(record["samples"]) == 1
    assert record["notes"][-1] == "cache on and off: not compared"
    assert single.measure_cell(base)["comparisons"] == []
    again = benchmark_inference(2, 6, 4, ckpt_dir=base.model, threads=1, device="cpu", repeats=3)
    assert [sample["peak_allocated_bytes"] is not None for sample in again["samples"]] == [True, False, False]
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        benchmark_inference(2, 6, 4, ckpt_dir=base.model, device="cpu", repeats=0)


@pytest.mark.slow
def test_a_job_that_refuses_says_why_and_one_that_dies_how(base: Cell) -> None:
    with pytest.raises(ValueError, match="passes the model's max_seq_len=256"):
        run_job("cell", base.but(input_len=300), trace=False)
    with pytest.raises(JobDied, match="exit code 1: KeyError: 'nothing'"):
        run_job("nothing", base)
    assert "SIGKILL, as a machine does that runs out of memory" in jobs._how_it_died(-9, "")


def test_what_is_compiled_outlasts_a_job_whose_other_files_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "kept"))
    environment = jobs._environment(tmp_path / "job", "0")
    assert environment["TMPDIR"] == str(tmp_path / "job")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert jobs._environment(tmp_path, "0")["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_a_process_ends_with_the_one_that_waits_for_it(base: Cell, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"kind": "cell", "cell": base.as_json(), "trace": False}))
    words = [sys.executable, "-m", "llama.bench.run.worker", str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=jobs._environment(tmp_path, "0"))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert not (tmp_path / "result.json").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_names_the_job_counts_expected_seconds_and_leaves_nothing_behind(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report = new_report("table", table_cells(base, []))
    session = Session(new_run_directory(tmp_path, report), time.monotonic() + 3600, seconds_bar())
    session.expected["a job"] = 30.0
    session.do("a job", "machine", base)
    assert session.progress.n == 30.0
    assert session.expected["a job"] < 30.0  # from now on what it really took
    session.expected |= {cell.name: 10.0 for cell in session.cells}
    assert plan(session) == 10.0 * len(session.cells) * REPETITIONS
    assert session.progress.total == 30.0 + plan(session)
    session.progress.refresh()
    assert re.search(r"a job.* left", terminal.getvalue())
    session.progress.close()
    last = terminal.getvalue().removesuffix("\r").rpartition("\r")[2]
    assert (len(last) > 30, last.strip()) == (True, "")  # blanks over the bar: nothing of it stays on the screen


def test_the_margin_is_that_of_the_two_largest_logits(base: Cell) -> None:
    found = worker.margin(base.but(kv_caching=False), row=0, ids=[1, 2])
    assert found["margin"] >= 0


def run(*words: str) -> int:
    return cli.run(script.main, list(words))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--preset", "tables"], "--preset=tables is not known; choose table, sweep, caches or chat"),
        (["--model", "llama-9"], "known are demo, llama-3-8b"),
        (["--model", "demo", "--ckpt_dir", "x"], "give one of them"),
        (["--batch_size", "0"], "--batch_size=0 must be at least 1"),
        (["--input_len", "-1"], "input_len=-1"),
        (["--output_len", "0"], "output_len=0"),
        (["--input_len", "8190"], "passes the model's max_seq_len=8192"),
        (["--batch_size", "1000000"], "does not fit: weights"),
        (["--text", "a", "--input_len", "3"], "leave out --input_len"),
        (["--engine", "vllm"], "engine='vllm' is not known"),
        (["--model", "gpt2"], "--engine transformers"),
        (["--kv_cache", "lru"], "is not a known kind of cache"),
        (["--logits", "some"], "must be last or all"),
        (["--seed", str(2**64)], f"seed={2**64} must be a whole number from -2**63 to 2**64 - 1"),
        (["--timeout", "nan"], "--timeout=nan must be a number of seconds above 0"),
        (["--repeats", "0"], "repeats=0"),
        (["--budget", "-1", "--preset", "table"], "--budget=-1.0"),
        (["--budget", "inf", "--preset", "table"], "--budget=inf"),
        (["--preset", "table", "--batch_size", "4", "--compare"], "--batch_size, --compare: a preset decides this"),
        (["--preset", "sweep", "--engine", "transformers"], "the sweep measures this library alone"),
        (["--preset", "sweep", "--input_len", "8100"], "passes the model's max_seq_len=8192"),
        (["--preset", "table", "--model", "llama-3.1-405b"], "does not fit: weights"),
        (["--resume"], "name it with --preset"),
        (["--page_watch"], "name one with --preset"),
        (["--quantize", "int3"], "quantize='int3': the engine llama has weights in int8, int4, stored, mapped"),
        (["--quantize", "stored", "--model", "llama-3.2-1b"], "takes the weights as a .gguf file has them"),
        (["--quantize", "int8", "--exact"], "computes with int8 weights by native code alone; ask for fast, too"),
        (["--quantize", "int8", "--dtype", "fp16"], "not in torch.float16"),
        (["--engine", "transformers", "--quantize", "int8"], "transformers is measured with the weights as they are"),
        (["--engine", "transformers:int8"], "transformers is measured with the weights as they are"),
        (["--engine", "transformers", "--fast"], "the fast step is ours alone"),
        (["--engine", "llama.cpp:int2"], "'int2' is no mode; known are fast, int8, int4, stored, mapped and a8"),
        (["--repack=False"], "--repack=False leaves weights as a .gguf file has them; give --quantize stored, too"),
        (
            ["--quantize", "stored", "--repack=False", "--model", "llama-3.2-1b"],
            "quantize=mapped takes the weights as a .gguf file has them",
        ),
        (["--engine", "llama:int8", "--quantize", "int4"], "says its modes itself"),
        (["--engine", "vllm:int8"], "engine='vllm' is not known"),
        (["--preset", "table", "--engine", "llama:fast", "--engine", "llama:fast"], "would stand in the table twice"),
        (["--preset", "table", "--engine", "llama"], "would stand in the table twice"),
        (["--preset", "sweep", "--engine", "llama:fast"], "the sweep measures this library alone"),
        (["--model", "gpt2", "--engine", "transformers", "--fast"], "as that comes"),
        (["--logits", "all", "--engine", "transformers"], "logits=all is ours alone"),
        (["--exact", "--engine", "transformers"], "exact mode is ours alone"),
        (["--json", "/proc/nothing/x.json"], "/proc/nothing"),
        (["--out", "/proc/nothing", "--preset", "table"], "/proc/nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("meta")  # fetches the tokenizer of llama-3.1-405b, of which a line would tell
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, "--device", "cpu") == 2
    printed = capsys.readouterr()
    assert error in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_violated_point_ends_with_exit_code_3_and_stands_in_the_json(
    monkeypatch: pytest.MonkeyPatch, base: Cell, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_its_first_point(*args: Any, **named: Any) -> Any:
        report = single.measure_cell(*args, **named)
        report["cells"][0]["points"][0]["status"] = "violated"
        return report

    file = tmp_path / "cell.json"
    words = ["--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1", "--json", str(file)]
    assert run(*words) == 0
    assert "VIOLATED" not in capsys.readouterr().out
    monkeypatch.setattr(script, "measure_cell", without_its_first_point)
    assert run(*words) == script.VIOLATED
    assert "VIOLATED" in capsys.readouterr().out
    assert json.loads(file.read_text())["cells"][0]["points"][0]["status"] == "violated"


def test_the_script_prints_the_familiar_lines_first(base: Cell, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("--ckpt_dir", base.model, "--batch_size", "2", "--input_len", "6", "--output_len", "4", "--kv_caching") == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["Batch size: 2", "Input length: 6 tokens", "Output length: 4 tokens"]
    assert [line.split(":")[0] for line in lines[3:7]] == [
        "Inference time",
        "Tokens per second",
        "Model weights memory usage",
        "Peak memory usage",
    ]
    assert "=== Sample Output ===" in lines


def test_the_script_writes_a_preset_into_a_folder(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    monkeypatch.setattr("llama.bench.presets.overrun", lambda session: ["late"])
    assert run(*words, "--out", str(tmp_path), "--budget", "0") == 0
    printed = capsys.readouterr()
    assert "\nlate\n" in printed.out
    assert "4 cells and 2 curves, each repetition in a process of its own: about" in printed.err
    (folder,) = tmp_path.iterdir()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"results.json", "report.md", "table.csv", "page.html", "plots/time.png", "plots/memory.png"} <= names
    assert str(folder / "page.html") in printed.out
    assert run(*words, "--out", str(tmp_path), "--budget", "0", "--resume") == 0
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_all_cells_of_a_run_compute_with_the_threads_that_were_free_when_it_began(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr("llama.host.cores.usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    before = torch.get_num_threads()
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--budget", "0"]
    try:
        for others, flags in ((1.5, []), (0.0, ["--resume"])):
            torch.set_num_threads(2)
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                monkeypatch.delenv(name, raising=False)
            monkeypatch.setattr("llama.host.cores.OtherLoad.stop", lambda _, others=others: others)
            assert run(*words, "--device", "cpu", "--out", str(tmp_path), *flags) == 0
            (results,) = tmp_path.glob("*/results.json")
            assert json.loads(results.read_text())["environment"]["threads"] == 1
            said = "other work occupies 1.5 of 2 cores: computing with 1 thread instead of 2"
            assert (said in capsys.readouterr().err) == (not flags)
    finally:
        torch.set_num_threads(before)


def test_blank_forms_are_ready_for_json(base: Cell) -> None:
    assert json.loads(json.dumps(new_report("cell", [base])))["cells"] == [new_record(base)]
