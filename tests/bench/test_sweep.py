"""A sweep: its plan, its parts, and that each cell is measured once, however often the processes end."""

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sweep_task
from bench_reports import bare_cell, check
from fakes import NATIVE_SIZES, write_checkpoint
from jobs_here import jobs_here
from refusals import unrefused

from llama.bench import sweep
from llama.bench.cell import Cell
from llama.bench.comparisons import OtherSetup
from llama.bench.merged import merged
from llama.bench.presets import Job
from llama.bench.report.files import write_report
from llama.bench.run.directory import read_report
from llama.bench.run.jobs import JobDied
from llama.bench.schema import Report, Row, Status, cell_row, rows_of
from llama.bench.sweep import Point, file_of, is_done, measure_points, part_of, read_plan
from llama.cli import sweep as command
from llama.host.files import lock_file

PLAN = """
models = ["demo", "llama-3.2-1b"]
kinds = ["off", "static", "int8"]
contexts = [64, 128]
batch = [1, 8]
tasks = ["generate", "quality"]
repeats = 3
"""
POINTS = [Point("demo", "generate", 64, 1, kind) for kind in ("off", "static", "int8")]


class Counted:
    """Replaces `sweep.measure` with synthetic reports, and lists the kinds that were measured."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.error: str | None = None
        self.checks: list[Row] = []

    def __call__(self, point: Point, **_: Any) -> Report:
        self.done.append(point.kind)
        report = sweep_task.report_of(point)
        cell_row(report, 0)["error"] = self.error
        report["rows"] += self.checks
        return report


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(sweep, "measure", made)
    return made


def measure_all(folder: Path, points: list[Point] = POINTS) -> list[Point]:
    return list(measure_points(points, folder, command="x"))


def report_at(path: Path) -> Report:
    report = read_report(path)
    assert report is not None
    return report


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_the_product_of_its_lists_without_what_a_task_cannot_measure() -> None:
    points = read_plan(PLAN)
    assert len(points) == 2 * (2 * 2 * 3 + 2 * 2)  # `quality` has one row, and no kind `off`
    assert {point.batch for point in points if point.task == "quality"} == {1}
    assert {point.settings for point in points} == {(("repeats", 3),)}
    assert [point._replace(inputs="") for point in read_plan("")] == [
        Point("demo", "generate", 256, 1, kind) for kind in ("off", "static")
    ]


def test_ratios_make_a_cell_of_each_kind_that_takes_one() -> None:
    kinds = ["off", "static", "snapkv", "h2o:0.3", "static@0;snapkv", "int8"]
    points = read_plan(f'kinds = {kinds}\nratios = [0.1, 0.5]\ntasks = ["costs"]')
    assert [point.kind for point in points] == ["static", "snapkv:0.1", "snapkv:0.5", *kinds[3:]]


def test_an_id_depends_on_all_of_a_point_and_on_nothing_else() -> None:
    """The digest is spelled out, because another one would measure all cells of every sweep again."""
    point = Point("demo", "generate", 256, 1, "int8", (("repeats", 3),), "a1")
    assert point.id == "32236e19696785a7-a1"
    others = {"model": "x", "task": "costs", "context": 1, "batch": 2, "kind": "int4", "settings": (), "inputs": "b"}
    assert len({point.id, *(point._replace(**{name: value}).id for name, value in others.items())}) == 8


OWN_KIND = "from llama.kv_cache.concat import ConcatCache\nclass Mine(ConcatCache, kind='of_a_sweep'): ratio = "
OWN_SAMPLE = '{"context": "a b c", "question": "?", "answers": ["c"], "metric": "contains_all"}\n'


def test_a_cell_whose_files_were_edited_is_measured_again_and_its_old_result_is_in_no_report(
    tmp_path: Path, counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = write_checkpoint(tmp_path / "tiny", max_seq_len=64, **NATIVE_SIZES), tmp_path / "out"
    (kind := tmp_path / "mine.py").write_text(f"{OWN_KIND}1")
    (samples := tmp_path / "own.jsonl").write_text(OWN_SAMPLE)
    plan = f'models = ["{model}"]\ntasks = ["generate", "{samples}"]\nkinds = ["static", "{kind}:of_a_sweep"]\n'
    (file := tmp_path / "plan.toml").write_text(f"{plan}contexts = [8]")
    mine = f"{kind}:of_a_sweep"
    edits: list[tuple[Path, str, list[str]]] = [
        (kind, f"{OWN_KIND}2", [mine, mine]),
        (samples, OWN_SAMPLE.replace("a b", "b"), ["static", mine]),
        (Path(model, "config.json"), Path(model, "config.json").read_text() + " ", ["static", mine] * 2),
    ]
    command.main(str(file), out=str(out))
    for path, content, again in edits:
        counted.done.clear()
        path.write_text(content)
        for _ in range(2):
            command.main(str(file), out=str(out))
        assert counted.done == again
        assert f"measuring {len(again)} of 4 cells again: the code or files" in capsys.readouterr().err
        assert len(rows_of(report_at(out / "report" / "results.json"), "cell")) == 4
    assert len([*(out / sweep.OLD).iterdir()]) == 8


def test_a_cell_during_which_its_file_is_edited_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=64, **NATIVE_SIZES)
    (kind := tmp_path / "mine.py").write_text(f"{OWN_KIND}1")
    points = read_plan(f'models = ["{model}"]\nkinds = ["{kind}:of_a_sweep"]\ncontexts = [8]')

    def edit(*_: Any, **__: Any) -> Report:
        kind.write_text(f"{OWN_KIND}3")
        return sweep_task.report_of(points[0])

    monkeypatch.setattr(sweep, "measure_cell", edit)
    measure_all(tmp_path / "out", points)
    assert sweep.error_of(tmp_path / "out", points[0]) == (
        "died: the code, or a file that the cell reads, was edited during the run"
    )


@pytest.mark.parametrize("n", [1, 3, 50])
def test_the_parts_are_the_plan_and_cut_no_group(n: int) -> None:
    points, parts = read_plan(PLAN), [part_of(read_plan(PLAN), i, n) for i in range(1, n + 1)]
    assert sorted(point for part in parts for point in part) == sorted(points)
    groups = [{point.group for point in part} for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups))


REFUSED = {
    "kinds = [": "the plan is not TOML",
    'kind = ["static"]': "the plan has 'kind'; known are models, tasks",
    'kinds = "static"': "kinds='static', which must be a list of different values of the type str",
    "kinds = []": "must be a list",
    "contexts = [64.0]": "contexts=[64.0], which must be a list of",
    "batch = [true]": "batch=[True], which must be a list of different values of the type int",
    'ratios = [0.5]\nkinds = ["static", "int8"]': "ratios, and none of its kinds takes one: static, int8",
    'ratios = [0.5, 2.0]\nkinds = ["snapkv"]': "ratios=[2.0], which must be above 0 and at most 1",
    'ratios = [1]\nkinds = ["snapkv"]': "ratios=[1], which must be a list of different values of the type float",
    "batch = [2, 2]": "must be a list of different values",
    "contexts = [0]": "input_len=0",
    'kinds = ["lru"]': "is not a known kind of cache",
    'tasks = ["taste"]': "the task 'taste'; known are generate, costs, quality, ruler, ruler:NAME,NAME and files",
    'tasks = ["ruler:vt,taste"]': "the task 'ruler:vt,taste'; known are generate, costs, quality",
    'tasks = ["absent.jsonl"]': "the task 'absent.jsonl'",
    "compare = 1": "must be of the type bool",
    'models = ["llama-9"]': "the model 'llama-9'; known are demo",
    'kinds = ["off"]\ntasks = ["costs"]': "no task of costs measures the kind off",
    "repeats = 0": "repeats=0, which must be at least 1",
    "samples = 0": "samples=0, which must be at least 1",
    "greedy_tokens = -1": "greedy_tokens=-1, which must be at least 0",
    "greedy_tokens = 257": "greedy_tokens=257, which must be at most 256",
    'compare = true\ntasks = ["costs"]': "the plan has compare, which only the task generate can have",
    'text = "absent.txt"\ntasks = ["quality"]': "text='absent.txt', which must be a file, for the task quality",
    f"text = {__file__!r}": "which must be a file, for the task quality",
    'speculate = "lookup"': "the plan has speculate, and guesses need a cache: give kinds without off",
    "repeats = 2.5": "must be of the type int",
    "exact = 1": "must be of the type bool",
    "output_len = 0": "output_len=0",
    'dtype = "fp8"': "dtype='fp8'",
}


def test_a_plan_that_cannot_be_measured_is_refused() -> None:
    assert unrefused([(partial(read_plan, text), re.escape(error)) for text, error in REFUSED.items()]) == []


# ---- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # compares and measures a tiny model
def test_each_task_is_measured_by_the_jobs_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = jobs_here(monkeypatch, lambda kind, cell: f"{kind} {cell.kv_cache} {cell.kv_caching}")
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=256, **NATIVE_SIZES)
    file = tmp_path / "own.jsonl"
    file.write_text('{"context": "a b c", "question": "?", "answers": ["c"], "metric": "contains_all"}\n' * 3)
    plan = f'models = ["{model}"]\ntasks = ["generate", "costs", "quality", "ruler:needle", "{file}"]\n'
    plan += 'kinds = ["off", "window:40+4"]\ncontexts = [250]\noutput_len = 4\nrepeats = 2\nsamples = 2\nthreads = 1'
    plan += "\ngreedy_tokens = 3"
    measure_all(tmp_path, points := read_plan(plan))
    mine = "window:40+4 True"
    assert here.done == [
        *("machine static False", "cell static False", "cell static False"),
        *(f"machine {mine}", f"cell {mine}", f"cell {mine}", f"machine {mine}", f"cache_costs {mine}"),
        *(f"machine {mine}", f"cache_quality {mine}", *[f"machine {mine}", f"cache_task {mine}"] * 2),
    ]
    off, generated, costs, quality, ruler, own = reports = [report_at(file_of(tmp_path, point)) for point in points]
    assert [len(cell_row(one, 0)["seconds"]) for one in (off, generated)] == [2, 2]
    assert [row["context"] for row in rows_of(costs, "step")] == [250]
    (row,) = rows_of(quality, "quality")
    assert (row["context"], row["tokens"], row["judged"], len(row["digest"])) == (250, 125, True, 32)
    assert row["greedy_tokens"] == 3
    tasks_of = [[(row["task"], len(row["scores"])) for row in rows_of(one, "task")] for one in (ruler, own)]
    assert tasks_of == [[("needle", 2)], [(str(file), 2)]]
    assert [len(one["plan"]["tasks"]) for one in (ruler, own)] == [1, 1]
    assert {row["figures"] for row in merged(reports)["rows"]} - {"check"} == {"cell", "step", "quality", "task"}


@pytest.mark.slow  # measures a tiny model
def test_a_plan_can_compare_texts_with_guesses_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs_here(monkeypatch, lambda kind, cell: kind)
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=256, **NATIVE_SIZES)
    plan = f'models = ["{model}"]\nkinds = ["static"]\ncontexts = [16]\noutput_len = 40\nthreads = 1\ncompare = true\n'
    measure_all(tmp_path, points := read_plan(plan) + read_plan(f'{plan}speculate = "lookup"'))
    off, plain = reports = [report_at(file_of(tmp_path, point)) for point in points]
    assert [(one["cells"][1]["kv_caching"], one["cells"][0]["speculate"]) for one in reports] == [
        (False, None),
        (True, "lookup"),
    ]
    assert [row["equal"] for one in (off, plain) for row in rows_of(one, "comparison")] == [True, True]
    assert ["proposed" in cell_row(one, 0) for one in (off, plain)] == [False, True]


def test_a_cell_of_quality_has_needles_at_its_own_context_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=1024, **NATIVE_SIZES)
    point = Point(str(model), "quality", 512, 1, "int8")
    assert sweep._kind_plan(point, point.cell())["needle_lengths"] == [512]


def test_a_cell_of_quality_is_judged_on_a_text_of_ones_own_whose_content_is_in_its_id(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=256, **NATIVE_SIZES)
    (file := tmp_path / "own.txt").write_text("a pear. " * 300)
    plan = f"models = ['{model}']\ntasks = ['generate', 'quality']\nkinds = ['int8']\ncontexts = [128]\ntext = '{file}'"
    generated, point = read_plan(plan)
    assert sweep._kind_plan(point, point.cell())["text"] == str(file)
    file.write_text("a pair. " * 300)
    assert [one.id for one in read_plan(plan)] != [generated.id, point.id]
    assert read_plan(plan)[0].id == generated.id, "which does not read it"


def test_what_cannot_be_measured_is_a_refused_cell_and_done(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=64, **NATIVE_SIZES)
    points = [Point(str(model), task, context, 1, "static") for task, context in (("generate", 64), ("quality", 40))]
    measure_all(tmp_path, points)
    errors = [cell_row(report_at(file_of(tmp_path, point)), 0)["error"] for point in points]
    assert "goes past max_seq_len=64" in errors[0]
    assert "is too short" in errors[1]
    assert all(is_done(tmp_path, point) for point in points)


def test_a_task_that_dies_leaves_the_others_of_its_cell_and_a_model_that_cannot_be_opened_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def do(kind: str, cell: Cell, **_: Any) -> Any:
        if kind == wrong[0]:
            raise wrong[1]
        return {"rows": [bare_cell(0), {"figures": "task", "task": kind, "context": 64}]}

    jobs = [Job(task, task, Cell(), 0) for task in ("fwe", "vt", "cwe")]
    monkeypatch.setattr("llama.bench.plan.run_job", do)
    monkeypatch.setattr(sweep, "_kind_plan", lambda *_: {})
    monkeypatch.setattr(sweep, "kind_jobs", lambda *_: jobs)
    monkeypatch.setattr(Point, "cell", lambda _: Cell())
    wrong: tuple[str, Exception] = ("vt", JobDied("gone"))
    report = sweep.measure(Point("demo", "ruler", 64, 1, "static"))
    assert cell_row(report, 0)["error"] == "died: gone", "so that the cell is measured again"
    assert [row["task"] for row in rows_of(report, "task")] == ["machine", "fwe", "cwe"]
    wrong = ("fwe", ValueError("it is malformed"))
    report = sweep.measure(Point("demo", "ruler", 64, 1, "static"))
    assert cell_row(report, 0)["error"] == "refused: it is malformed"


def test_a_cell_during_which_the_code_changes_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: Any, **__: Any) -> None:
        raise OtherSetup("commit was 'a' and is 'b'")

    monkeypatch.setattr("llama.bench.plan.run_job", lambda *_, **__: {})
    monkeypatch.setattr("llama.bench.plan.add_result", changed)
    measure_all(tmp_path)
    assert cell_row(report_at(file_of(tmp_path, POINTS[0])), 0)["error"] == "died: commit was 'a' and is 'b'"
    assert not any(is_done(tmp_path, point) for point in POINTS)


def test_a_cell_is_measured_once_and_again_if_its_file_is_torn_or_it_died(tmp_path: Path, counted: Counted) -> None:
    assert measure_all(tmp_path) == measure_all(tmp_path) == POINTS
    assert counted.done == ["off", "static", "int8"]
    file_of(tmp_path, POINTS[0]).write_bytes(file_of(tmp_path, POINTS[0]).read_bytes()[:999])
    file_of(tmp_path, POINTS[1]).write_bytes(b"")
    counted.error = "died: its process was ended by SIGKILL"
    measure_all(tmp_path)
    malformed = {**report_at(file_of(tmp_path, POINTS[2])), "rows": []}
    file_of(tmp_path, POINTS[2]).write_text(json.dumps(malformed))
    counted.error = "refused: it is too long"
    measure_all(tmp_path)
    measure_all(tmp_path)
    assert counted.done[3:] == ["off", "static", "off", "static", "int8"]


@pytest.mark.parametrize(
    ("error", "status", "code"), [(None, "ok", 0), ("refused: long", "ok", 1), (None, "violated", 3)]
)
def test_a_part_and_the_whole_have_the_exit_code_of_their_cells(
    tmp_path: Path,
    counted: Counted,
    error: str | None,
    status: Status,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted.error, counted.checks = error, [check(0, "cache", "it was off", status)]
    (plan := tmp_path / "plan.toml").write_text("contexts = [64, 65]")
    for part, context in (("1/2", 64), ("2/2", 65), ("1/1", 64)):
        assert command.main(str(plan), out=str(tmp_path / "out"), part=part) == code
        said = capsys.readouterr().err
        assert error is None or part == "1/1" or f"{context} tokens, batch 1 and 1 more: {error}" in said
    assert len(counted.done) == 4, "each cell once"


@pytest.mark.usefixtures("counted")
def test_a_full_disk_is_an_error_with_the_file_s_name_and_leaves_nothing_torn(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # bytes of a file: less than a report has
    try:
        with pytest.raises(OSError, match=r"File too large: .*\.json"):
            measure_all(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
    assert measure_all(tmp_path) == POINTS


def test_a_process_waits_for_another_that_has_its_group(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.0)
    (tmp_path / "locks").mkdir()
    other = open(tmp_path / "locks" / POINTS[0].group.id, "ab")  # noqa: SIM115
    lock_file(other)
    looks: list[int] = []

    def waiting() -> None:
        assert counted.done == []
        looks.append(1)
        if len(looks) == 3:
            other.close()

    list(measure_points(POINTS, tmp_path, command="x", waiting=waiting))
    assert len(looks) == 3
    assert counted.done == ["off", "static", "int8"]


def test_the_bar_names_the_cell_that_is_measured_and_the_time_left_once_it_is_known(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llama.host.progress.EVERY_S", -1.0)  # a line for each look
    measure_all(tmp_path, POINTS[:1])
    command.measure_cells(POINTS, tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if "now" in line]
    assert re.fullmatch(r"cells: 1 of 3 \|.*\| 00:00, now demo, generate, static, 64 tokens, batch 1", lines[0])
    assert re.search(
        r"cells: 2 of 3 .*, now demo, generate, int8, 64 tokens, batch 1, about 00:00 left", "\n".join(lines)
    )
    assert not any("?" in line for line in lines)


# ---- many ------------------------------------------------------------------------------------------------------------


@contextmanager
def tasks(n: int, work: Callable[[int], None]) -> Iterator[list[int]]:
    """Start n processes, each of which does `work(i)` for its i from 1, and end and reap them all at the end."""
    pids = []
    for i in range(1, n + 1):
        if (pid := os.fork()) == 0:
            try:
                work(i)
            finally:
                os._exit(0)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.slow
def test_1000_cells_of_50_tasks_that_are_killed_twice_are_each_there_once_and_merged_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("SWEEP_LOG", str(log))
    monkeypatch.setenv("SWEEP_GATE", str(tmp_path))
    monkeypatch.setattr(sweep, "measure", sweep_task.measured)
    monkeypatch.setattr(sweep, "write_json", partial(sweep_task.write_json, real=sweep.write_json))
    kinds = [f"window:{size}" for size in range(100, 118)]
    points = read_plan(f"contexts = {[*range(1, 51)]}\nkinds = {['off', 'static', *kinds]}")
    assert len(points) == 1000
    folder = tmp_path / "out"
    folder.mkdir()
    for least in (300, 600, 1000):
        with tasks(50, lambda i: list(measure_points(part_of(points, i, 50), folder, command="x")) and None):
            while len(list(folder.glob("*.json"))) < least:
                time.sleep(0.02)
    lines = [line.split()[:2] for line in log.read_text().splitlines()]
    done = [id for word, id in lines if word == "done"]
    assert {path.stem for path in folder.glob("*.json")} == {point.id for point in points}
    assert len(done) >= len(set(done)) >= 900  # a task may be killed between the file and the line
    assert len(done) == len(set(done))
    assert 1000 < len([id for word, id in lines if word == "began"]) <= 1100  # at most one of each task, twice
    began = time.monotonic()
    report = merged(report_at(path) for path in sorted(folder.glob("*.json")))
    write_report(report, tmp_path / "report")
    assert time.monotonic() - began < 60
    assert len(rows_of(report, "cell")) == 1000
    assert all("time_of_full" in row for row in rows_of(report, "cell"))
