"""A cell says whether it was disturbed: each sign at its boundary, on every page and plot; and quiet is waited for."""

import csv
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from bench_reports import cell_record, crossover, sweep_report, table_report
from llama.cli import benchmark_inference as script

from llama.bench import quiet
from llama.bench.quiet import beside_others, judge_quiet, other_work, wait_until_quiet
from llama.bench.report.page import page
from llama.bench.report.plots import as_png, figures
from llama.bench.report.tables import NOISY, alarms, title, validity_table
from llama.bench.report.text import alarms_text, cell_text, report_csv, report_markdown, table_markdown
from llama.bench.schema import CellRecord, Crossover, Point, Report
from llama.bench.statistics import percentiles

CORES = 2


def cell(times: Sequence[float], loads: Sequence[float | None] | None = None, **asked: Any) -> CellRecord:
    """Return a cell of repetitions that took these seconds, while others kept so many cores busy."""
    record = cell_record(n=len(times), **asked)
    for sample, seconds, load in zip(record["samples"], times, loads or [0.0] * len(times), strict=True):
        sample |= {"seconds": seconds, "other_load_cores": load}
    assert record["summary"] is not None
    record["summary"]["seconds"] = percentiles(times)
    return record


def judged(times: Sequence[float], loads: Sequence[float | None] | None = None, **asked: Any) -> tuple[str, str]:
    point = other_work(cell(times, loads, **asked), CORES)
    assert point["name"] == "other work"
    return point["status"], point["detail"]


def test_a_quiet_cell_is_fine_and_tells_load_count_and_spread() -> None:
    words = "occupied 0.05 of 2 cores; n = 3; p90 is 1.08x p10"
    assert judged([1.0, 1.05, 1.1], [0.01, 0.05, None]) == ("ok", words)


@pytest.mark.parametrize(("load", "expected"), [(0.0, "ok"), (0.25, "ok"), (0.26, "disturbed"), (2.0, "disturbed")])
def test_more_than_an_eighth_of_the_cores_in_any_repetition_disturbs(load: float, expected: str) -> None:
    assert judged([1.0, 1.0, 1.0], [0.0, load, 0.0])[0] == expected
    assert judged([1.0], [load])[0] == expected


def test_a_repetition_too_short_for_the_kernels_clock_is_not_judged_by_its_load() -> None:
    assert judged([0.49] * 3, [2.0] * 3) == ("ok", "not known how many cores it occupied; n = 3; p90 is 1.00x p10")
    assert judged([0.5] * 3, [2.0] * 3)[0] == "disturbed"


@pytest.mark.parametrize(
    ("load", "cores", "status", "words"),
    [
        (0.25, CORES, "ok", "occupied 0.25 of 2 cores"),
        (0.26, CORES, "disturbed", "occupied 0.26 of 2 cores"),
        (None, CORES, "not observed", "not known how many cores it occupied"),
        (2.0, None, "not observed", "not known how many cores it occupied"),
    ],
)
def test_times_of_which_the_load_alone_is_known_are_judged_by_it(
    load: float | None, cores: int | None, status: str, words: str
) -> None:
    assert beside_others(load, cores) == {"name": "other work", "status": status, "detail": words}


def test_ranks_of_the_same_job_are_no_others() -> None:
    assert judged([1.0] * 3, [2.0] * 3, ranks=2)[0] == "ok"


def test_without_a_count_of_cores_a_load_says_nothing() -> None:
    for times, expected in (([1.0], "not observed"), ([1.0] * 3, "ok")):
        point = other_work(cell(times, [2.0] * len(times)), None)
        assert (point["status"], point["detail"][:36]) == (expected, "not known how many cores it occupied")


@pytest.mark.parametrize(
    ("times", "expected"),
    [([1.0, 1.25], "ok"), ([1.0, 1.4], "disturbed"), ([1.0, 1.0, 1.3], "ok"), ([1.0, 1.2, 1.4], "disturbed")],
    ids=str,
)
def test_a_spread_of_more_than_a_quarter_disturbs(times: list[float], expected: str) -> None:
    assert judged(times)[0] == expected


def test_the_spread_is_judged_at_its_boundary() -> None:
    record = cell([1.0] * 3)
    assert record["summary"] is not None
    for high, expected in ((1.25, "ok"), (1.26, "disturbed")):
        record["summary"]["seconds"] = {"n": 3, "median": 1.0, "p10": 1.0, "p90": high}
        assert other_work(record, CORES)["status"] == expected


def test_few_repetitions_are_said_and_no_disturbance() -> None:
    few = "too few to judge by"
    assert judged([1.0], [None]) == ("not observed", f"not known how many cores it occupied; n = 1, {few}")
    assert judged([1.0], [0.1]) == ("ok", f"occupied 0.10 of 2 cores; n = 1, {few}")
    assert judged([1.0, 1.0], [None, None])[0] == "not observed"
    assert judged([1.0] * 3, [None] * 3)[0] == "ok"
    assert [few in judged([1.0] * n)[1] for n in (1, 2, 3, 5)] == [True, True, False, False]


def contradicted(on: float, off: float, *, fewer: float, crossovers: Sequence[Crossover] = ()) -> list[Point]:
    pair = [cell([seconds] * 3, kv_caching=kv_caching) for seconds, kv_caching in ((on, True), (off, False))]
    assert pair[0]["work"] is not None
    assert pair[1]["work"] is not None
    pair[0]["work"]["token_forwards"], pair[1]["work"]["token_forwards"] = 100, round(100 * fewer)
    report = table_report(pair, crossovers=list(crossovers))
    judge_quiet(report)
    return [record["points"][-1] for record in report["cells"]]


@pytest.mark.parametrize(
    ("on", "off", "fewer", "expected"),
    [
        (2.0, 1.0, 30, "disturbed"),
        (1.01, 1.0, 8, "disturbed"),
        (1.01, 1.0, 7.99, "ok"),  # so short a text may lie below its crossover
        (1.0, 1.0, 30, "ok"),
        (0.5, 1.0, 30, "ok"),
    ],
)
def test_a_cache_that_is_slower_for_many_times_less_work_disturbs_both_cells(
    on: float, off: float, fewer: float, expected: str
) -> None:
    found = contradicted(on, off, fewer=fewer)
    assert [point["status"] for point in found] == [expected] * 2
    words = f"the cache takes {on / off:.2f}x the time for {fewer:.1f}x fewer tokens fed"
    assert [point["detail"].endswith(words) for point in found] == [expected == "disturbed"] * 2


def steps(rows: int, cached: float, uncached: float) -> Crossover:
    """Return single steps, of which those at the longest context take so long; at the shorter one the cache loses."""
    found: Any = {"batch_size": rows, "context": None, "steps": []}
    for on, seconds in ((True, cached), (False, uncached)):
        for context, took in ((4, 9.0 if on else 1.0), (256, seconds)):
            step = {"batch_size": rows, "context": context, "kv_caching": on, "seconds": percentiles([took])}
            found["steps"].append(step)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (steps(1, 2.0, 1.0), "ok"),  # single steps do not pay there either
        (steps(1, 1.0, 1.0), "ok"),
        (steps(1, 1.0, 2.0), "disturbed"),
        (steps(8, 2.0, 1.0), "disturbed"),  # of another batch
    ],
)
def test_single_steps_that_do_not_pay_either_explain_a_slower_cache(known: Crossover, expected: str) -> None:
    assert contradicted(2.0, 1.0, fewer=30, crossovers=[known])[0]["status"] == expected


def test_an_engine_that_tells_no_work_is_not_contradicted() -> None:
    pair = [cell([2.0] * 3), cell([1.0] * 3, kv_caching=False)]
    for place in (0, 1):
        report = table_report([{**one, "work": None} if one is pair[place] else one for one in pair])  # type: ignore[misc]
        judge_quiet(report)
        assert [one["points"][-1]["status"] for one in report["cells"]] == ["ok", "ok"]


def test_a_cell_is_judged_anew_by_what_is_known_now_and_one_without_figures_not_at_all() -> None:
    report = table_report([cell([1.0]), {**cell_record(batch_size=8), "summary": None, "points": []}])
    for _ in range(2):
        judge_quiet(report)
        assert [one["name"] for one in report["cells"][0]["points"]].count("other work") == 1
        assert report["cells"][1]["points"] == []


def disturbed_report(report: Report | None = None) -> Report:
    report = table_report(crossovers=[crossover(1)]) if report is None else report
    report["cells"][0]["samples"][0]["other_load_cores"] = 1.6
    judge_quiet(report)
    return report


def test_a_disturbed_report_says_so_first_wherever_it_is_read() -> None:
    report, calm = disturbed_report(), table_report()
    judge_quiet(calm)
    assert alarms(calm) == []
    ((mark, line),) = alarms(report)
    assert (mark, line[:48]) == ("NOISY", "batch 1, cache on: other work: occupied 1.60 of ")
    assert title(report).endswith(NOISY)
    for text in (report_markdown, table_markdown):
        assert NOISY in text(report).splitlines()[0]
        assert "NOISY" not in text(calm)
    assert f"**NOISY** {line}" in report_markdown(report)
    assert f"NOISY {line}" in alarms_text(report)
    shown = page(report)
    assert re.search(rf"<title>[^<]*{NOISY}", shown)
    assert re.search(rf"<h1>[^<]*{NOISY}</h1>", shown)
    assert "<b>NOISY</b> batch 1, cache on" in shown
    assert "NOISY" not in page(calm)
    assert cell_text(report["cells"][0]).startswith(f"{NOISY}\nBatch size: 1\n")
    assert cell_text(report["cells"][1]).startswith("Batch size: 1\n")
    assert validity_table(report).rows[-1] == ["other work", "NOISY", "ok", "ok", "ok", "ok", "ok"]


def test_every_row_of_a_disturbed_csv_says_so_and_of_the_cells_those_that_were() -> None:
    rows = [*csv.DictReader(io.StringIO(report_csv(disturbed_report())))]
    assert [*rows[0]][:2] == ["figures", "disturbed"]
    assert [row["disturbed"] for row in rows if row["figures"] == "cell"] == ["yes", *[""] * 5]
    assert {row["disturbed"] for row in rows if row["figures"] == "crossover"} == {"yes"}
    assert {row["disturbed"] for row in csv.DictReader(io.StringIO(report_csv(table_report())))} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("report", [table_report(), sweep_report()], ids=["table", "sweep"])
def test_every_plot_of_times_of_a_disturbed_report_says_so_across(report: Report) -> None:
    plain = {name: as_png(figure) for name, figure in figures(report).items()}
    drawn = figures(disturbed_report(report))
    assert drawn.keys() == plain.keys()
    for name, figure in drawn.items():
        said = [text.get_text() for text in figure.texts if "NOISY" in text.get_text()]
        of_times = name not in ("memory", "cache")  # bytes are the same under any load
        assert said == ["NOISY\ndo not rely on these times"] * of_times
        assert (as_png(figure) != plain[name]) == of_times


@pytest.mark.parametrize(
    ("status", "error", "code", "strict_code"),
    [
        ("ok", None, 0, 0),
        ("not observed", None, 0, 0),
        ("disturbed", None, 0, 4),
        ("disturbed", "died: gone", 1, 1),
        ("violated", None, 3, 3),
        ("violated", "died: gone", 3, 3),
    ],
)
def test_a_disturbed_table_is_no_failure_unless_asked_for(
    status: Any, error: str | None, code: int, strict_code: int
) -> None:
    report = table_report([cell_record(), cell_record(kv_caching=False)])
    report["cells"][1]["points"].append({"name": "other work", "status": status, "detail": ""})
    report["cells"][0]["error"] = error
    assert (script.exit_code(report), script.exit_code(report, strict=True)) == (code, strict_code)


def test_quiet_is_five_calm_looks_in_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    least = 1 / 16 * CORES
    seen = iter([0.0] * 4 + [least] + [least - 0.01] * 5 + [9.0])
    assert wait_until_quiet(1, lambda: next(seen))
    assert next(seen) == 9.0  # it looked no further
    said = capsys.readouterr().err
    assert "waiting until others keep less than 0.12 of 2 cores busy for 5 s, at most 1 min" in said
    assert "the machine is quiet" in said
    assert "never" not in said


def test_a_machine_that_is_quiet_already_is_looked_at_five_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)  # then it has one core at least
    seen = iter([0.06] * 5 + [9.0])
    assert wait_until_quiet(1, lambda: next(seen))
    assert next(seen) == 9.0
    assert "less than 0.06 of 1 cores busy for 5 s" in capsys.readouterr().err


def test_a_look_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    quiet._look()
    assert slept == [1.0]


def test_a_machine_that_never_gets_quiet_is_measured_all_the_same_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def look() -> float:
        time.sleep(0.02)
        return 1.5

    began = time.monotonic()
    assert not wait_until_quiet(0.1 / 60, look)
    assert 0.1 <= time.monotonic() - began < 5
    said = capsys.readouterr().err
    assert "it never got quiet: others keep 1.50 cores busy; measuring all the same, and the table is marked" in said
    assert "machine is quiet" not in said


def test_a_system_that_tells_nothing_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert not wait_until_quiet(60, lambda: None)
    assert "there is no waiting" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the kernel does not tell")
def test_a_busy_child_is_seen_in_a_look() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        seen = quiet._look()
    finally:
        child.kill()
        child.wait()
    assert seen is not None
    assert seen > 0.3
