"""`llama-kv merge`: which results may be compared, what stays of them, and the page of all of them."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_reports import caches_report, check, table_report
from refusals import unrefused
from sweep_task import SETUP, report_of

from llama.bench.cell import Cell
from llama.bench.merged import merged
from llama.bench.report.files import RESULTS
from llama.bench.report.text import report_csv, report_markdown
from llama.bench.schema import Report, cell_row, rows_of
from llama.bench.sweep import Point
from llama.cli.compare import main
from llama.cli.sweep import merge
from llama.host.machine import environment

STATIC, INT8, OFF = (Point("demo", "generate", 64, 1, kind) for kind in ("static", "int8", "off"))
# Every field of a cell except the kind, with a value that makes another workload of it.
FIELDS: dict[str, Any] = {
    **{"batch_size": 8, "input_len": 65, "output_len": 5, "engine": "transformers", "model": "other", "logits": "all"},
    **{"exact": True, "fast": True, "quantize": "int8", "dtype": "bf16", "device": "cuda", "threads": 7, "seed": 2},
    **{"activations": 8, "speculate": "lookup"},
    **{"text": "words", "ranks": 2, "tokenizer_path": "x"},
}


def quality_of(kind: str, digest: str | None, setup: dict[str, Any] = SETUP, *, nll: float = 3.5) -> Report:
    """Return a report with the quality and one task of a kind of cache."""
    report = caches_report([kind])
    quality, task, *_ = judged = [*rows_of(report, "quality"), *rows_of(report, "task")]
    report["environment"], report["rows"] = dict(setup), [*rows_of(report, "cell"), quality, task]
    quality["nll"] = nll
    for row in judged if digest is not None else []:
        row["digest"] = digest
    return report


def ratios(report: Report, figures: str, kind: str) -> list[float | None]:
    """Return the ratios of time and bytes of the row of a kind."""
    (row,) = (one for one in rows_of(report, figures) if report["cells"][one["cell"]]["kv_cache"] == kind)
    return [row.get(name) for name in ("time_of_full", "of_full")]


def saved(path: Path, report: Report) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report), "utf-8")
    return str(path)


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_times_of_equal_environments_have_ratios_to_the_full_cache() -> None:
    report = merged([report_of(STATIC), report_of(INT8), report_of(OFF)])
    assert ratios(report, "cell", "int8")[0] == pytest.approx(1, rel=0.05)
    off = next(row for row in rows_of(report, "cell") if not report["cells"][row["cell"]]["kv_caching"])
    assert off["time_of_full"] > 1.5
    assert report["reading"] == []
    assert report["environment"] == SETUP


def test_no_ratio_is_formed_of_30_wrong_pairs() -> None:
    """Each is a full cache and another kind that differ in one thing. The reason names a difference of setups."""
    formed, facts = [], environment(torch.device("cpu"))
    for name in facts:
        report = merged([report_of(STATIC, {**SETUP, name: "other"}), report_of(INT8)])
        words = f"because these differ: {name}"
        if ratios(report, "cell", "int8") != [None, None] or words not in str(report["reading"]):
            formed.append(name)
    assert FIELDS.keys() | {"kv_cache", "kv_caching", "code"} == Cell().as_json().keys()
    for name, value in FIELDS.items():
        static, int8 = report_of(STATIC), report_of(INT8)
        static["cells"][0][name] = value
        if ratios(merged([static, int8]), "cell", "int8") != [None, None]:
            formed.append(name)
    unnamed = {name: value for name, value in SETUP.items() if name != "machine"}  # of an earlier version
    if ratios(merged([report_of(STATIC, unnamed), report_of(INT8, unnamed)]), "cell", "int8") != [None, None]:
        formed.append("no machine")
    other = {**SETUP, "machine": "b"}
    for digests in (("x", "y"), ("x", None), (None, "y"), (None, None)):
        report = merged([quality_of("static", digests[0]), quality_of("int8", digests[1], other)])
        if ratios(report, "quality", "int8") != [None, None] or ratios(report, "task", "int8") != [None, None]:
            formed.append(f"digests {digests}")
    assert formed == []
    assert len(facts) + len(FIELDS) + 5 >= 30


def test_two_contents_of_the_file_of_a_kind_are_two_rows_that_the_table_tells_apart() -> None:
    mine = [report_of(INT8._replace(kind="mine.py:int8")) for _ in range(2)]
    for one, code in zip(mine, ("aa", "bb"), strict=True):
        one["cells"][0]["code"] = code
    report = merged([report_of(STATIC), *mine])
    assert [row.get("time_of_full") is not None for row in rows_of(report, "cell")] == [True] * 3
    assert [f"| {code} |" in report_markdown(report) for code in ("none", "aa", "bb")] == [True] * 3
    assert "| aa |" not in report_markdown(merged([report_of(STATIC), mine[0]])), "one content needs no column"


def test_what_the_cache_saves_is_said_of_pairs_of_one_setup_alone() -> None:
    for machine, pairs in (("a", 1), ("b", 0)):
        report = merged([report_of(STATIC), report_of(OFF, {**SETUP, "machine": machine})])
        assert report_markdown(report).count("**What the cache saves**") == pairs


def test_quality_is_compared_and_merged_across_machines_if_the_digests_agree() -> None:
    other = {**SETUP, "machine": "b", "cpu": "Xeon"}
    report = merged([quality_of("static", "x"), quality_of("int8", "x", other), quality_of("int8", "x", nll=3.501)])
    time, size = ratios(report, "quality", "int8")
    assert (time, size) == (None, pytest.approx(0.297, rel=0.01))
    (row,) = (row for row in rows_of(report, "quality") if row["nll"] == 3.5 and row.get("also"))
    assert (row["setup"], row["also"]) == (1, [0])
    assert [row.get("also") for row in rows_of(report, "task")] == [None, [0]]
    assert ratios(report, "task", "int8")[1] == pytest.approx(0.297, rel=0.01)
    lines = report_markdown(report).splitlines()
    assert sum("| 2, 1 |" in line for line in lines) == 2
    (line,) = (line for line in lines if line.startswith("| 2, 1 | needle | 1,024 | int8 |"))
    assert line.endswith("| 20 |"), "n counts samples"
    changed = merged([quality_of("int8", "x"), quality_of("int8", "x", other, nll=3.6)])  # by the code of the kind
    assert [row["nll"] for row in rows_of(changed, "quality")] == [3.5, 3.6]
    assert "Not merged, because the figures differ by more than rounding: quality (1 of them)." in changed["reading"]
    for setup in (other, SETUP):
        conflict = merged([quality_of("int8", "x"), quality_of("int8", "y", setup)])
        assert [row["digest"] for row in rows_of(conflict, "quality")] == ["x", "y"]
        words = "Not merged, because the digest of the weights or the inputs differs: quality (1 of them)."
        assert words in conflict["reading"]


def test_a_kind_that_one_run_left_out_and_another_measured_has_one_row() -> None:
    """On any setup: bytes that were not measured are never beside those that were."""
    other = {**SETUP, "machine": "b"}
    for figures in ("quality", "step"):
        whole = quality_of("int8", "x", other)
        whole["rows"] += [row for row in rows_of(caches_report(["int8"]), "step") if row["context"] == 2048]
        lacking = quality_of("int8", None)
        (row,) = rows_of(whole, figures)
        lacking["rows"] = [one for one in lacking["rows"] if one["figures"] == "cell"]
        names = ("figures", "cell", "context", "predicted_cache_bytes", "batch_size", "kv_caching")
        lacking["rows"].append({name: row[name] for name in names if name in row})
        for reports in ([lacking, whole], [whole, lacking]):
            assert [one["cache_bytes"] for one in rows_of(merged(reports), figures)] == [row["cache_bytes"]]
        assert len(rows_of(merged([lacking]), figures)) == 1


def test_log_likelihoods_are_compared_block_by_block_with_the_full_cache_of_the_same_inputs() -> None:
    other = {**SETUP, "machine": "b"}
    reports = [quality_of("static", "x"), quality_of("int8", "x", other), quality_of("int4", "y")]
    for row in rows_of(reports[1], "quality"):
        row["nlls"] = [nll + 0.25 for nll in row["nlls"]]
    fewer = quality_of("knorm:0.5", "x", {**SETUP, "machine": "c"})  # other tokens of the same inputs
    for row in rows_of(fewer, "quality"):
        row |= {"tokens": 32, "nlls": row["nlls"][:2]}
    found = [row.get("nlls_minus_full") for row in rows_of(merged([*reports, fewer]), "quality")]
    assert found == [None, pytest.approx([0.25] * 64), None, None]


def test_scores_are_compared_sample_by_sample_with_the_full_cache_of_the_same_inputs() -> None:
    other = {**SETUP, "machine": "b"}
    reports = [quality_of("static", "x"), quality_of("int8", "x", other), quality_of("window:512+4", "y")]
    for report, scores in zip(reports, ([1.0] * 20, [0.0] * 10 + [1.0] * 10, [0.0] * 20), strict=True):
        rows_of(report, "task")[0]["scores"] = scores
    merged_rows = rows_of(found := merged(reports), "task")
    assert [row.get("minus_full") for row in merged_rows] == [None, [-1.0] * 10 + [0.0] * 10, None]
    lines = [line.split(" | ") for line in report_markdown(found).splitlines() if "| needle |" in line]
    shown = {line[3]: line for line in lines}
    assert "-50.0 (-70.0 to -30.0)" in shown["int8"]
    assert "10: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" in shown["int8"]
    assert not any("-100" in text for text in shown["window:512+4"]), "other inputs"


def test_an_error_stays() -> None:
    measured, died = report_of(STATIC), report_of(STATIC)
    rows_of(died, "cell")[0].update(error="died: of memory")
    for order in ([measured, died], [died, measured]):
        (row,) = rows_of(merged(order), "cell")
        assert (len(row["seconds"]), row["error"]) == (6, "died: of memory")


def test_a_second_measurement_on_the_same_setup_adds_repetitions_and_on_another_a_row() -> None:
    again = report_of(STATIC)
    again["started"] = "later"
    assert [len(row["seconds"]) for row in rows_of(merged([report_of(STATIC), again]), "cell")] == [6]
    again["environment"]["threads"] = 2
    assert [len(row["seconds"]) for row in rows_of(merged([report_of(STATIC), again]), "cell")] == [3, 3]


# ---- the report ------------------------------------------------------------------------------------------------------


def test_results_of_every_kind_make_one_report_with_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, caches = table_report(), caches_report(["static", "int8"])
    table["rows"].append(check(0, "cache", "it was off", "violated"))
    files = [saved(tmp_path / "a" / RESULTS, table), saved(tmp_path / "b.json", caches)]
    for point in (STATIC, INT8):
        saved(tmp_path / "sweep" / f"{point.id}.json", report_of(point))
    out = tmp_path / "all"
    asked = [str(tmp_path / "a"), files[1], str(tmp_path / "sweep")]
    assert merge(*asked, *asked, out=str(out)) == 3  # each content counts once; a check is violated
    printed = capsys.readouterr().out
    assert "VIOLATED batch 1, cache on, input len 256: cache: it was off" in printed
    report = json.loads((out / RESULTS).read_text("utf-8"))
    assert len(report["cells"]) == 6 + 2 + 2
    assert {len(row["seconds"]) for row in rows_of(report, "cell") if row.get("seconds")} == {3}
    assert {"ids", "text"}.isdisjoint(name for row in report["rows"] for name in row)
    page = (out / "report.html").read_text("utf-8")
    for words in ("Every cell", "Time of a step", "time and quality", "Setups", "int8", "AMD EPYC 7R13"):
        assert words in page
    assert len(report_csv(report).splitlines()) > 20


def test_a_cell_that_was_refused_is_named_and_has_no_setup() -> None:
    report = report_of(STATIC)
    report["environment"], report["rows"] = {}, report["rows"][:1]
    report["rows"][0] = {"figures": "cell", "cell": 0, "error": "refused: too long", "notes": []}
    found = merged([report])
    assert "batch 1, cache on refused: too long" in report_markdown(found)
    assert cell_row(found, 0)["setup"] is None


def test_mistakes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "a.json").write_text('{"schema": ')
    wrong = quality_of("static", "x")
    rows_of(wrong, "task")[0]["answer_lens"] = ["a"]  # which no figure but a table needs
    measured = saved(tmp_path / "run" / RESULTS, table_report())
    older = saved(tmp_path / "old" / RESULTS, {**table_report(), "schema": "x"})
    of_two = saved(tmp_path / "two.json", merged([report_of(STATIC), report_of(INT8, {**SETUP, "machine": "b"})]))
    calls: list[tuple[Callable[[], object], str]] = [
        *((partial(command, of_two, of_two), "merged from 2 setups; give the results") for command in (merge, main)),
        (lambda: merge(), "no cell; give results"),
        (
            lambda: merge(measured, out=str(Path(measured).parent)),
            "run has measured results, which a merge would replace",
        ),
        (lambda: merge(measured, out=str(Path(older).parent)), "old has measured results"),
        (lambda: merge(str(tmp_path / "empty")), "has no .json file"),
        (lambda: merge(str(tmp_path / "torn")), "a.json: "),
        (lambda: merge(saved(tmp_path / "old.json", {**report_of(STATIC), "schema": "x"})), "its schema is 'x'"),
        (lambda: merge(saved(tmp_path / "lens.json", wrong), out=str(tmp_path / "lens")), "a result is malformed"),
        (lambda: merge(saved(tmp_path / "bad.json", {**report_of(STATIC), "rows": [1]})), "a result is malformed"),
    ]
    assert unrefused(calls) == []


def test_a_torn_report_is_replaced(tmp_path: Path) -> None:
    result, out = saved(tmp_path / "a.json", report_of(STATIC)), tmp_path / "out"
    for torn in ('{"schema": ', "[]"):
        saved(out / RESULTS, {})
        (out / RESULTS).write_text(torn)
        assert merge(result, out=str(out)) == 0
        assert json.loads((out / RESULTS).read_text("utf-8"))["preset"] == "merged"


def test_one_report_at_a_time_is_in_memory() -> None:
    """Reports of a megabyte each; of each stay its figures alone."""

    def reports(n: int) -> Iterator[Report]:
        for context in range(1, n + 1):
            report = report_of(STATIC._replace(context=context), n=1)
            report["rows"][0]["ids"] = [list(range(25_000))]
            yield report

    tracemalloc.start()
    found = merged(reports(40))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found["cells"]) == 40
    assert peak < 4_000_000
