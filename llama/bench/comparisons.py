"""Compares the cells of a report: their machines, their tokens, and the rates that they reached."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from llama.bench.report.tables import comparison_words
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.schema import Report, Row, Status, cell_of, cell_row, differing, merge, rows_of
from llama.bench.statistics import best_ceilings, rates, reached, roofline_shares

ENDED = -1  # the token of a row that has ended
SAME_TEXT = "same text with guesses"  # a check


class OtherSetup(ValueError):
    """A job ran on other hardware, or on other code, than the jobs before it."""


def add_note(report: Report, cell: int, note: str) -> None:
    """Add a note to a cell, unless it has it."""
    row = cell_row(report, cell)
    row["notes"] = list(dict.fromkeys([*row["notes"], note]))


def add_result(report: Report, found: dict[str, Any], cell: int) -> None:
    """Put what a job returned into the report: rows of a cell, and the machine.

    Raises OtherSetup if it ran on other hardware, or on other code, than the jobs before it. If only the name of the
    machine differs, `machine` becomes None.
    """
    before = report["environment"]
    now = found.get("environment", before)
    changed = differing(before, now) if before else []
    if "machine" in changed:  # a restarted container has another name; merged reports form no ratio of its times
        changed.remove("machine")
        now = {**now, "machine": None}
    if changed:
        words = ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
        raise OtherSetup(f"repetitions of two machines cannot be compared: {words}; start again without --resume")
    report["environment"] = now
    if "ceilings" in found:
        report["ceilings"] = best_ceilings(report["ceilings"], found["ceilings"])
    report["model"] = found.get("model", report["model"])
    merge(report, found.get("rows", []), cell)


def with_rates(report: Report) -> None:
    """Give every cell with times its tokens per second, and every measured cell its shares of the ceilings.

    A cell that is faster than a ceiling raises it. One with quantized weights does not: it computes in other numbers.
    """
    rows = [(cell_of(report, row), row) for row in rows_of(report, "cell") if row.get("seconds")]
    # The ceilings are those of one process.
    limited = [(cell, row) for cell, row in rows if "flops" in row and cell.ranks == 1]
    for cell, row in limited:
        if cell.quantize is None:
            report["ceilings"] = best_ceilings(report["ceilings"], reached(cell, row))
    for cell, row in rows:
        row.update(rates(cell, row))
    for cell, row in limited:
        row.update(roofline_shares(cell, row, report["ceilings"]))


def compare_pair(report: Report, on: Row, off: Row, *, with_margin: bool = True) -> None:
    """Compare the tokens of a cell with those of its `other` cell: a row, a note in both, and of guesses a check."""
    comparison, cell = compare_modes(report, on, off, with_margin=with_margin), cell_of(report, on)
    words = comparison_words(comparison)
    merge(report, [comparison])
    for row in (on, off):
        add_note(report, row["cell"], f"{cell.compared}: {words}")
    if cell.speculate:
        rounds = "plain" in on["path"].partition(",")[0]  # by the size of a call, so that near ties may differ
        status: Status = "ok" if comparison["equal"] else "not observed" if rounds else "violated"
        found: Row = {"figures": "check", "name": SAME_TEXT, "status": status, "detail": words}
        merge(report, [found], on["cell"])


def compare_modes(report: Report, on: Row, off: Row, *, with_margin: bool = True) -> Row:
    """Compare the tokens of a cell and of its `other` cell; ours are run once more, for the margin, if they differ."""
    found, tokens = first_divergence(on["ids"], off["ids"]), sum(map(len, off["ids"]))
    row: Row = {"figures": "comparison", "cell": on["cell"], "other_cell": off["cell"], "tokens": tokens}
    row["equal"] = found is None
    if found is None:
        return row
    row |= {**found, "margin": None}
    at, cell = found["divergence_row"], cell_of(report, off)
    if cell.engine == "llama" and with_margin:
        try:
            ids = off["ids"][at][: found["divergence_token"]]
            row["margin"] = run_job("margin", cell, row=at, ids=ids)["margin"]
        except (ValueError, JobDied) as error:
            report["failures"].append(f"the margin at batch {cell.batch_size}: {error}")
    return row


def first_divergence(cached: Sequence[Sequence[int]], uncached: Sequence[Sequence[int]]) -> Row | None:
    """Return the earliest token at which two lists of rows differ, over all rows; None if they are equal."""
    found: Row | None = None
    for row, pair in enumerate(zip(cached, uncached, strict=True)):
        ids = list(zip_longest(*pair, fillvalue=ENDED))
        token = next((i for i, (on, off) in enumerate(ids) if on != off), None)
        if token is not None and (found is None or token < found["divergence_token"]):
            on, off = ids[token]
            found = {"divergence_row": row, "divergence_token": token, "cached_id": on, "uncached_id": off}
    return found


def compare_engines(report: Report) -> None:
    """Note for each cell of a peer whether it made the tokens that our plain path made of the same prompts.

    Rounded weights are other weights, so they are not compared.
    """
    from llama.bench.run.models import has_rounded_weights  # deferred: a single cell is not compared with engines

    made = [(cell_of(report, row), row) for row in rows_of(report, "cell") if row.get("ids")]
    whole = [(cell, row) for cell, row in made if not has_rounded_weights(cell)]
    own = [(cell, row) for cell, row in whole if cell.engine == "llama"]
    ours = {cell.workload: row["ids"] for cell, row in sorted(own, key=lambda pair: pair[1]["path"] == "plain")}
    for cell, row in whole:
        if cell.engine != "llama" and cell.workload in ours:
            found = first_divergence(ours[cell.workload], row["ids"])
            note = "made the same tokens as llama-kv"
            if found is not None:
                at, token = found["divergence_row"], found["divergence_token"]
                note = f"made other tokens than llama-kv, from token {token} of row {at} on"
            add_note(report, row["cell"], note)


def compare_turns(report: Report) -> None:
    """Note for each way of feeding a conversation the turns in which its first token differs from the first way's.

    Ways with differently rounded weights are not compared.
    """
    firsts: dict[tuple[Any, ...], Row] = {}
    different: dict[tuple[int, str, str], list[str]] = {}
    for row in rows_of(report, "turn") + rows_of(report, "prompts"):
        cell = cell_of(report, row)
        first = firsts.setdefault((row["figures"], row.get("turn"), cell.quantize, cell.activations), row)
        if row["ids"] != first["ids"]:
            engine = cell_of(report, first).engine
            other = first["way"] if engine == cell.engine else f"{first['way']} of {engine}"
            pair = row["cell"], row["way"], other
            different.setdefault(pair, []).append(str(row.get("turn", 0) + 1))
    for (cell_index, way, other), turns in different.items():
        words = f"{way}: its first token differs from that of `{other}` in turn {', '.join(turns)}"
        add_note(report, cell_index, words)
