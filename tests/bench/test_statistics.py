"""Figures that follow from repetitions: spreads, rates, shares of ceilings; and rows of two repetitions become one."""

import json
from typing import Any

import pytest

from llama.bench import comparisons
from llama.bench.cell import Cell
from llama.bench.comparisons import compare_engines, compare_modes, compare_pair, first_divergence, with_rates
from llama.bench.report.sentences import findings
from llama.bench.report.tables import figure_tables
from llama.bench.schema import Report, Row, cell_row, merge, new_report, pairs, rows_of
from llama.bench.statistics import best_ceilings, bound_by, percentiles, rates, roofline_shares, spread
from llama.host.machine import Ceilings

CELL = Cell(batch_size=3, input_len=7, output_len=5)


def test_a_spread_interpolates_counts_and_pools_the_steps_of_all_repetitions() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"n": 5, "median": 3.0, "p10": 1.4, "p90": 4.6, "p99": 4.96}
    assert percentiles([2.0]) == {"n": 1, "median": 2.0, "p10": 2.0, "p90": 2.0, "p99": 2.0}
    pooled = spread({"step_seconds": [[1.0, 2.0], [3.0]]}, "step_seconds")
    assert pooled is not None
    assert (pooled["n"], pooled["median"]) == (3, 2.0)
    assert spread({"other_load_cores": [None]}, "other_load_cores") is spread({}, "seconds") is None


def times(first: float, steps: list[float]) -> Row:
    return {"seconds": [first + sum(steps)], "first_token_seconds": [first], "step_seconds": [steps]}


def test_rates_count_each_phase_by_its_own_tokens_and_time() -> None:
    assert rates(Cell(batch_size=8, input_len=100, output_len=3), times(2.0, [0.5, 0.5])) == {
        "tokens_per_second": 8 * 3 / 3.0,
        "prefill_tokens_per_second": 8 * 100 / 2.0,
        "decode_tokens_per_second": 8 * 2 / 1.0,
    }
    assert rates(Cell(output_len=1), times(2.0, []))["decode_tokens_per_second"] is None


def test_a_ceiling_binds_from_half_of_it_on_and_the_nearer_one_if_both_do() -> None:
    assert bound_by(flops_share=0.5, bytes_share=0.49) == "arithmetic"
    assert bound_by(flops_share=0.49, bytes_share=0.5) == "memory bandwidth"
    assert bound_by(flops_share=0.49, bytes_share=0.49) == "neither ceiling"
    assert bound_by(flops_share=0.5, bytes_share=0.5) == "memory bandwidth"
    assert bound_by(flops_share=0.51, bytes_share=0.5) == "arithmetic"


def ceilings(read: float, flops: float, by: str = "measured") -> Ceilings:
    return {"read_bytes_per_second": read, "read_by": by, "flops_per_second": flops, "flops_by": by, "dtype": "fp32"}


def worked(prefill: float, steps: list[float]) -> Row:
    """Return a cell of 1000 FLOPs in the prefill, 60 in a step that reads 800 bytes, after so many seconds of each."""
    work: Row = {"token_forwards": 258, "flops": 1120, "read_bytes": 2400, "prefill_flops": 1000}
    work |= {"step_flops": 60, "step_read_bytes": 800}
    return {**work, **times(prefill, steps)}


def report_of(*cells: tuple[Cell, Row]) -> Report:
    report = new_report("table", [cell for cell, _ in cells])
    for place, (_, row) in enumerate(cells):
        merge(report, [{"figures": "cell", **row}], place)
    return report


def test_shares_are_of_the_measured_ceilings_and_a_single_token_is_its_own_step() -> None:
    assert roofline_shares(CELL, worked(2.0, [0.5, 0.5]), ceilings(3200, 1000)) == {
        "prefill_flops_share": 0.5,
        "step_flops_share": 0.12,
        "step_bandwidth_share": 0.5,
        "bound_by": "memory bandwidth",
    }
    shares = roofline_shares(CELL.but(output_len=1), worked(2.0, []), ceilings(3200, 1000))
    assert (shares["step_flops_share"], shares["step_bandwidth_share"]) == (0.03, 0.125)


def test_the_best_of_two_ceilings_is_kept_of_each_kind_with_what_reached_it() -> None:
    assert best_ceilings(None, ceilings(1, 2, "b")) == ceilings(1, 2, "b")
    assert best_ceilings(ceilings(1, 2, "a"), ceilings(1, 2, "b")) == ceilings(1, 2, "a")
    assert best_ceilings(ceilings(1, 2, "a"), ceilings(3, 1, "b")) == {**ceilings(3, 2, "a"), "read_by": "b"}
    assert best_ceilings(ceilings(1, 2, "a"), ceilings(0, 3, "b")) == {**ceilings(1, 3, "a"), "flops_by": "b"}


def test_a_cell_that_beats_the_ceilings_raises_them_and_no_share_passes_1() -> None:
    cell = Cell(output_len=3)
    off, large = cell.but(kv_caching=False), cell.but(batch_size=8)
    report = report_of((cell, worked(2.0, [0.5] * 2)), (off, worked(4.0, [0.5] * 2)), (large, worked(4.0, [4.0] * 2)))
    report["ceilings"] = ceilings(1000, 100)
    with_rates(report)
    assert report["ceilings"] == {
        **ceilings(1600, 500),
        "read_by": "the step of batch 1, cache on",
        "flops_by": "the prefill of batch 1, cache on",
    }
    rows = rows_of(report, "cell")
    assert [row["prefill_flops_share"] for row in rows] == [1.0, 0.5, 0.5]
    assert [row["step_bandwidth_share"] for row in rows] == [1.0, 1.0, 0.125]
    quick = report_of((cell, worked(40.0, [0.5] * 2)))
    quick["ceilings"] = ceilings(1000, 100)
    with_rates(quick)
    assert quick["ceilings"]["flops_by"] == "the step of batch 1, cache on"
    assert quick["ceilings"]["flops_per_second"] == 120


@pytest.mark.parametrize("asked", [{"quantize": "int8"}, {"ranks": 2}], ids=str)
def test_quantized_weights_and_several_ranks_raise_no_ceiling(asked: dict[str, Any]) -> None:
    report = report_of((Cell(output_len=3, **asked), worked(2.0, [0.5] * 2)))
    report["ceilings"] = ceilings(1000, 100)
    with_rates(report)
    assert report["ceilings"] == ceilings(1000, 100)
    row = cell_row(report, 0)
    assert row["tokens_per_second"] == 1.0
    assert row.get("prefill_flops_share") == (1.0 if "quantize" in asked else None)


# ---- rows of two repetitions -----------------------------------------------------------------------------------------


def test_repetitions_are_appended() -> None:
    report = new_report("table", [CELL])
    assert json.loads(json.dumps(report)) == report
    for seconds, ids in ((1.0, [[1]]), (2.0, [[1]])):
        seen: Row = {"figures": "cell", "notes": ["a note"], "seconds": [seconds], "ids": ids, "path": "native"}
        merge(report, [seen], 0)
    row = cell_row(report, 0)
    assert row == {**seen, "cell": 0, "error": None, "seconds": [1.0, 2.0]}
    merge(report, [{**seen, "ids": [[2]]}], 0)
    assert cell_row(report, 0)["notes"] == ["a note", "repetitions made different tokens"]
    assert len(report["rows"]) == 1


def test_of_two_checks_the_violated_one_stays_and_of_two_lines_the_measured_one() -> None:
    good: Row = {"figures": "check", "name": "cache", "status": "ok", "detail": "later"}
    bad: Row = {**good, "status": "violated", "detail": "it was on"}
    line: Row = {"figures": "memory", "name": "weights", "predicted_bytes": 5, "measured_bytes": None}
    for checks, lines in (
        ((good, bad), (line, {**line, "measured_bytes": 4})),
        ((bad, good), ({**line, "measured_bytes": 4}, line)),
    ):
        report = new_report("table", [CELL])
        for check, one in zip(checks, lines, strict=True):
            merge(report, [check, one], 0)
        assert [row["detail"] for row in rows_of(report, "check")] == ["it was on"]
        assert [row["measured_bytes"] for row in rows_of(report, "memory")] == [4]


def test_a_row_of_another_context_way_or_cell_is_another_row() -> None:
    report = new_report("caches", [CELL, CELL.but(kv_cache="int8")])
    step: Row = {"figures": "step", "batch_size": 1, "context": 8, "kv_caching": True, "step_seconds": [1.0]}
    for changes in ({}, {"context": 9}, {"kv_caching": False}, {"batch_size": 2}):
        merge(report, [{**step, **changes}], 0)
    merge(report, [step], 1)
    assert len(rows_of(report, "step")) == 5
    sizes: Row = {"figures": "step", "batch_size": 1, "context": 8, "kv_caching": True, "cache_bytes": 7}
    merge(report, [sizes, step], 0)
    assert rows_of(report, "step", 0)[0] == {**step, "cell": 0, "cache_bytes": 7, "step_seconds": [1.0, 1.0]}


def test_a_pair_differs_in_the_cache_alone_and_ran_on_one_path() -> None:
    cells = [CELL, CELL.but(kv_caching=False), CELL.but(batch_size=8), CELL.but(batch_size=8, kv_caching=False)]
    report = new_report("table", [*cells, CELL.but(engine="transformers", kv_caching=False)])
    for place in range(5):
        cell_row(report, place).update(path="plain", seconds=[1.0])

    def found() -> list[tuple[int, int]]:
        return [(on["cell"], off["cell"]) for on, off in pairs(report)]

    assert found() == [(0, 1), (2, 3)]
    cell_row(report, 1)["path"] = "native"
    assert found() == [(2, 3)]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_the_first_divergence_is_the_earliest_token_of_any_row() -> None:
    def found(cached: list[list[int]], uncached: list[list[int]]) -> tuple[Any, ...] | None:
        row = first_divergence(cached, uncached)
        return None if row is None else tuple(row.values())

    assert found([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) is None
    assert found([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 8, 6]]) == (1, 1, 5, 8)
    assert found([[1, 2], [4, 5]], [[1, 3], [4, 6]]) == (0, 1, 2, 3), "of several rows at the same token the first"
    assert found([[9, 2], [4, 5]], [[1, 3], [7, 6]]) == (0, 0, 9, 1)
    assert found([[1, 0]], [[1]]) == (0, 1, 0, -1), "a row that ends earlier has no token"
    assert found([[1]], [[1, 0]]) == (0, 1, -1, 0)


def test_if_our_modes_differ_the_margin_at_the_divergence_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def margin(kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
        asked.append((kind, cell.kv_caching, job))
        return {"margin": 0.5}

    monkeypatch.setattr(comparisons, "run_job", margin)
    for engine, margin_of in (("transformers", None), ("llama", 0.5)):
        on = Cell(engine=engine, batch_size=2, output_len=3)
        report = report_of(
            (on, {"ids": [[1, 2, 7], [3, 4, 7]]}), (on.but(kv_caching=False), {"ids": [[1, 2, 7], [3, 5, 8]]})
        )
        found = compare_modes(report, *rows_of(report, "cell"))
        assert (found["cell"], found["other_cell"], found["tokens"], found["equal"]) == (0, 1, 6, False)
        assert (found["divergence_row"], found["divergence_token"], found["margin"]) == (1, 1, margin_of)
        assert (found["cached_id"], found["uncached_id"]) == (4, 5)
        assert compare_modes(report, *[cell_row(report, 0)] * 2)["equal"]
    assert asked == [("margin", False, {"row": 1, "ids": [3]})], "of our own engine alone"


@pytest.mark.parametrize(
    ("path", "made", "expected"),
    [
        ("native", [[1, 2]], "ok"),
        ("native", [[1, 3]], "violated"),
        ("native, plain prompts", [[1, 3]], "violated"),
        ("exact", [[1, 3]], "violated"),
        ("plain", [[1, 2]], "ok"),
        ("plain, int8 weights", [[1, 3]], "not observed"),  # the plain path rounds by the size of a call
        ("native and plain", [[1, 3]], "not observed"),
    ],
)
def test_guesses_that_change_a_text_are_a_violation_where_none_may(
    path: str, made: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparisons, "run_job", lambda *_, **__: {"margin": 0.5})
    plain = Cell(output_len=2)
    rows = {plain.but(speculate="lookup"): made, plain: [[1, 2]], plain.but(kv_caching=False): [[1, 2]]}
    figures: Row = {"path": path, "seconds": [1.0], "proposed": [9], "accepted": [7], "tokens_per_second": 2.0}
    report = report_of(*((cell, {**figures, "ids": ids}) for cell, ids in rows.items()))
    found = list(pairs(report))
    assert [(on["cell"], off["cell"]) for on, off in found] == [(0, 1), (1, 2)]
    for on, off in found:
        compare_pair(report, on, off)
    (check,) = rows_of(report, "check")
    assert (check["cell"], check["name"], check["status"]) == (0, "same text with guesses", expected)
    notes = [[note.partition(":")[0] for note in row["notes"]] for row in rows_of(report, "cell")]
    guesses, modes = "with and without guesses", "cache on and off"
    assert notes == [[guesses], [guesses, modes], [modes]]
    cell_row(report, 0)["seconds"] = [0.5]
    words = "the same 2 tokens" if made == [[1, 2]] else "other tokens from token 1 of row 0 on"
    first = f"Batch 1 with guesses by lookup ({path}): 2 times faster, 7 of 9 guessed tokens right, {words}"
    assert any(line.startswith(first) for line in findings(report))
    assert {"guessed tokens fed", "of them right"} < {*figure_tables(report)[0].heads}


def test_a_peer_on_our_weights_has_a_note_whether_it_made_our_plain_tokens() -> None:
    peer = Cell(engine="transformers")
    made: list[tuple[Cell, str, Any, list[str]]] = [
        (Cell(fast=True), "native", [[1, 9]], []),
        (Cell(), "plain", [[1, 2]], []),
        (peer, "transformers 5", [[1, 2]], ["made the same tokens as llama-kv"]),
        (Cell(engine="llama.cpp"), "", [[1, 5]], ["made other tokens than llama-kv, from token 1 of row 0 on"]),
        (Cell(engine="llama.cpp", quantize="int8"), "", [[1, 5]], []),  # other weights
        (peer.but(batch_size=8), "transformers 5", [[1, 2]] * 8, []),  # of which ours was not measured
        (peer.but(kv_caching=False), "transformers 5", [], []),
    ]
    report = report_of(*((cell, {"path": path, "ids": ids}) for cell, path, ids, _ in made))
    for _ in range(2):  # as a run that goes on does
        compare_engines(report)
        assert [row["notes"] for row in rows_of(report, "cell")] == [notes for *_, notes in made]
