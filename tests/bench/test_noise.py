"""A cell says whether it was measured beside other work: each sign at its boundary; and it waits for idle."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from llama.bench import noise
from llama.bench.cell import Cell
from llama.bench.noise import judge_noise, wait_until_idle
from llama.bench.schema import Report, Row, cell_row, merge, new_report, rows_of
from llama.cli import benchmark_inference as script

CORES = 2


def report_of(
    *cells: tuple[Sequence[float], Sequence[float | None]], cores: int | None = CORES, **asked: Any
) -> Report:
    """Return a pair of cells whose repetitions took these seconds while others kept so many cores busy."""
    report = new_report("table", [Cell(kv_caching=on, **asked) for on in (True, False)[: len(cells)]])
    report["environment"] = {"cores": cores}
    for place, (seconds, loads) in enumerate(cells):
        row: Row = {"figures": "cell", "seconds": [*seconds], "other_load_cores": [*loads], "path": "plain", "flops": 1}
        row |= {"token_forwards": 100}
        if not seconds:
            del row["seconds"]
        merge(report, [row], place)
    return report


def judged(
    times: Sequence[float], loads: Sequence[float | None] | None = None, cores: int | None = CORES, **asked: Any
) -> tuple[str, str]:
    report = report_of((times, [0.0] * len(times) if loads is None else loads), cores=cores, **asked)
    judge_noise(report)
    (check,) = rows_of(report, "check")
    assert check["name"] == "other work"
    return check["status"], check["detail"]


def test_an_idle_cell_is_ok_and_states_load_count_and_spread() -> None:
    words = "occupied 0.05 of 2 cores; n = 3; p90 is 1.08x p10"
    assert judged([1.0, 1.05, 1.1], [0.01, 0.05, None]) == ("ok", words)


def test_more_than_an_eighth_of_the_cores_in_any_repetition_is_noisy() -> None:
    for load, expected in ((0.0, "ok"), (0.25, "ok"), (0.26, "noisy"), (2.0, "noisy")):
        assert judged([1.0, 1.0, 1.0], [0.0, load, 0.0])[0] == expected
        assert judged([1.0], [load])[0] == expected


def test_a_repetition_too_short_for_the_kernels_clock_is_not_judged_by_its_load() -> None:
    assert judged([0.49] * 3, [2.0] * 3) == ("ok", "not known how many cores it occupied; n = 3; p90 is 1.00x p10")
    assert judged([0.5] * 3, [2.0] * 3)[0] == "noisy"


def test_cells_of_which_the_load_alone_is_known_are_judged_by_it() -> None:
    unknown = ("not observed", "not known how many cores it occupied")
    assert judged([], [0.25]) == ("ok", "occupied 0.25 of 2 cores")
    assert judged([], [0.26]) == ("noisy", "occupied 0.26 of 2 cores")
    assert judged([], [None]) == judged([], [2.0], None) == unknown


def test_the_load_of_a_job_with_several_ranks_is_not_judged() -> None:
    assert judged([1.0] * 3, [2.0] * 3, ranks=2)[0] == "ok"


def test_a_spread_of_more_than_a_quarter_is_noisy() -> None:
    times = ([1.0, 1.25], [1.0, 1.4], [1.0, 1.0, 1.3], [1.0, 1.2, 1.4])
    assert [judged(one)[0] for one in times] == ["ok", "noisy", "ok", "noisy"]


def test_few_repetitions_are_said_and_not_noisy() -> None:
    few = "too few to judge by"
    assert judged([1.0], [None]) == ("not observed", f"not known how many cores it occupied; n = 1, {few}")
    assert judged([1.0], [0.1]) == ("ok", f"occupied 0.10 of 2 cores; n = 1, {few}")
    assert judged([1.0, 1.0], [None, None])[0] == "not observed"
    assert judged([1.0] * 3, [None] * 3)[0] == "ok"
    assert judged([1.0] * 3, [2.0] * 3, None)[0] == "ok", "without a count of cores a load says nothing"
    assert [few in judged([1.0] * n)[1] for n in (1, 2, 3, 5)] == [True, True, False, False]


def contradicted(on: float, off: float, *, fewer: float, steps: Sequence[Row] = ()) -> list[Row]:
    report = report_of(([on] * 3, [0.0] * 3), ([off] * 3, [0.0] * 3))
    cell_row(report, 1)["token_forwards"] = round(100 * fewer)
    merge(report, steps, 0)
    for _ in range(2):  # judged again by what is known now
        judge_noise(report)
    return rows_of(report, "check")


def test_a_cache_that_is_slower_for_many_times_less_work_makes_both_cells_noisy() -> None:
    for on, fewer, expected in (
        (2.0, 30, "noisy"),
        (1.01, 8, "noisy"),
        (1.01, 7.99, "ok"),  # so short a text may lie below its crossover
        (1.0, 30, "ok"),
        (0.5, 30, "ok"),
    ):
        found = contradicted(on, 1.0, fewer=fewer)
        assert [check["status"] for check in found] == [expected] * 2
        words = f"the cache takes {on:.2f}x the time for {fewer:.1f}x fewer tokens fed"
        assert [check["detail"].endswith(words) for check in found] == [expected == "noisy"] * 2


def steps(rows: int, cached: float, uncached: float) -> list[Row]:
    """Return single steps, of which those at the longest context take so long; at the shorter one the cache loses."""
    of: dict[bool, float] = {True: cached, False: uncached}
    return [
        {"figures": "step", "batch_size": rows, "context": context, "kv_caching": on, "step_seconds": [seconds]}
        for on in of
        for context, seconds in ((4, 9.0 if on else 1.0), (256, of[on]))
    ]


def test_single_steps_that_do_not_pay_either_explain_a_slower_cache() -> None:
    for known, expected in (
        (steps(1, 2.0, 1.0), "ok"),  # single steps do not pay there either
        (steps(1, 1.0, 1.0), "ok"),
        (steps(1, 1.0, 2.0), "noisy"),
        (steps(8, 2.0, 1.0), "noisy"),  # of another batch
    ):
        assert contradicted(2.0, 1.0, fewer=30, steps=known)[0]["status"] == expected


def test_a_noisy_table_fails_only_with_strict() -> None:
    cases: list[tuple[Any, str | None, tuple[int, int]]] = [
        ("ok", None, (0, 0)),
        ("not observed", None, (0, 0)),
        ("noisy", None, (0, 4)),
        ("noisy", "died: gone", (1, 1)),
        ("violated", None, (3, 3)),
        ("violated", "died: gone", (3, 3)),
    ]
    for status, error, codes in cases:
        report = report_of(([1.0], [0.0]), ([1.0], [0.0]))
        merge(report, [{"figures": "check", "name": "other work", "status": status, "detail": ""}], 1)
        cell_row(report, 0)["error"] = error
        assert (script.report_exit_code(report), script.report_exit_code(report, strict=True)) == codes


def test_idle_is_five_calm_looks_in_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    least = 1 / 16 * CORES
    seen = iter([0.0] * 4 + [least] + [least - 0.01] * 5 + [9.0])
    assert wait_until_idle(1, lambda: next(seen))
    assert next(seen) == 9.0  # it looked no further
    said = capsys.readouterr().err
    assert "waiting until other work occupies less than 0.12 of 2 cores for 5 s, at most 1 min" in said
    assert "the machine is idle" in said
    assert "never" not in said


def test_a_look_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    noise._look()
    assert slept == [1.0]


def test_a_machine_that_never_gets_idle_is_measured_all_the_same_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def look() -> float:
        time.sleep(0.02)
        return 1.5

    began = time.monotonic()
    assert not wait_until_idle(0.1 / 60, look)
    assert 0.1 <= time.monotonic() - began < 5
    said = capsys.readouterr().err
    assert "never got idle: other work occupies 1.50 cores; measuring now, and the table is marked" in said
    assert "machine is idle" not in said


def test_without_a_reported_load_there_is_no_wait(capsys: pytest.CaptureFixture[str]) -> None:
    assert not wait_until_idle(60, lambda: None)
    assert "there is no wait" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the kernel does not tell")
def test_a_busy_child_is_seen_in_a_look() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        seen = noise._look()
    finally:
        child.kill()
        child.wait()
    assert seen is not None
    assert seen > 0.3
