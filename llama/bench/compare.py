"""Compares the cells of a report: their machines, their tokens, and the rates that they reached."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from llama.bench.cell import Cell
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.schema import Report, Row, cell_row, is_measured, merge, rows_of
from llama.bench.statistics import best_ceilings, rates, reached, roofline_shares

ENDED = -1  # the token of a row that has ended


def add_note(report: Report, cell: int, note: str) -> None:
    """Add a note to a cell, unless it has it."""
    row = cell_row(report, cell)
    row["notes"] = list(dict.fromkeys([*row["notes"], note]))


def check_machine(report: Report, environment: dict[str, Any]) -> None:
    """Raise ValueError if a job ran on another machine, or on other code, than the jobs before it."""
    before = report["environment"]
    changed = [name for name in before if before[name] != environment.get(name)]
    if changed:
        words = ", ".join(f"{name} was {before[name]!r} and is {environment.get(name)!r}" for name in changed)
        raise ValueError(f"repetitions of two machines cannot be compared: {words}; start again without --resume")
    report["environment"] = environment


def add_result(report: Report, found: dict[str, Any], cell: int) -> None:
    """Put what a job returned into the report: rows of a cell, and the machine. Raises as `check_machine` does."""
    if "environment" in found:
        check_machine(report, found["environment"])
    if "ceilings" in found:
        report["ceilings"] = best_ceilings(report["ceilings"], found["ceilings"])
    report["model"] = found.get("model", report["model"])
    merge(report, found["rows"], cell)


def with_rates(report: Report) -> None:
    """Give every cell with times its tokens per second, and every measured cell its shares of the ceilings.

    A cell that is faster than a ceiling raises it. One with quantized weights does not: it computes in other numbers.
    """
    rows = [(Cell(**report["cells"][row["cell"]]), row) for row in rows_of(report, "cell") if row.get("seconds")]
    # The ceilings are those of one process.
    limited = [(cell, row) for cell, row in rows if "flops" in row and is_measured(row) and cell.ranks == 1]
    for cell, row in limited:
        if report["ceilings"] is not None and cell.quantize is None:
            report["ceilings"] = best_ceilings(report["ceilings"], reached(cell, row))
    for cell, row in rows:
        row.update(rates(cell, row))
    for cell, row in limited:
        if report["ceilings"] is not None:
            row.update(roofline_shares(cell, row, report["ceilings"]))


def compare_modes(report: Report, on: int, off: int) -> Row:
    """Compare the tokens of a cell with the cache and the same cell without; ours are run once more if they differ."""
    cached, uncached = (cell_row(report, cell)["ids"] for cell in (on, off))
    found = first_divergence(cached, uncached)
    row: Row = {"figures": "comparison", "cell": on, "other_cell": off, "tokens": sum(map(len, uncached))}
    row["equal"] = found is None
    if found is None:
        return row
    at, token = found["divergence_row"], found["divergence_token"]
    row.update(found)
    row["margin"] = None
    cell = Cell(**report["cells"][off])
    if cell.engine == "llama":
        try:
            row["margin"] = run_job("margin", cell, row=at, ids=uncached[at][:token])["margin"]
        except (ValueError, JobDied) as error:
            report["failures"].append(f"the margin at batch {cell.batch_size}: {error}")
    return row


def first_divergence(cached: Sequence[Sequence[int]], uncached: Sequence[Sequence[int]]) -> Row | None:
    """Return the earliest token at which two lists of rows differ, over all rows; None if they are equal."""
    found: Row | None = None
    for row, pair in enumerate(zip(cached, uncached, strict=True)):
        ids = list(zip_longest(*pair, fillvalue=ENDED))
        token = next((i for i, (on, off) in enumerate(ids) if on != off), None)
        if token is not None and (found is None or token < (found["divergence_token"] or 0)):
            on, off = ids[token]
            found = {"divergence_row": row, "divergence_token": token, "cached_id": on, "uncached_id": off}
    return found


def compare_engines(report: Report) -> None:
    """Note for each cell of a peer whether it made the tokens that our plain path made of the same prompts.

    Quantized weights are other weights, so they are not compared.
    """

    def key(cell: dict[str, Any]) -> tuple[Any, ...]:
        return cell["batch_size"], cell["kv_caching"]

    whole = [
        (report["cells"][row["cell"]], row)
        for row in rows_of(report, "cell")
        if row.get("ids") and report["cells"][row["cell"]]["quantize"] is None
    ]
    own = [(cell, row) for cell, row in whole if cell["engine"] == "llama"]
    ours = {key(cell): row["ids"] for cell, row in sorted(own, key=lambda pair: pair[1]["path"] == "plain")}
    for cell, row in whole:
        if cell["engine"] != "llama" and key(cell) in ours:
            found = first_divergence(ours[key(cell)], row["ids"])
            note = "made the same tokens as llama-kv"
            if found is not None:
                at, token = found["divergence_row"], found["divergence_token"]
                note = f"made other tokens than llama-kv, from token {token} of row {at} on"
            add_note(report, row["cell"], note)


def compare_turns(report: Report) -> None:
    """Note for each way through a conversation in which turns its first token differs from the first way's.

    Ways with differently rounded weights are not compared.
    """
    firsts: dict[tuple[Any, ...], Row] = {}
    apart: dict[tuple[int, str], list[str]] = {}
    for row in rows_of(report, "turn") + rows_of(report, "prompts"):
        cell = report["cells"][row["cell"]]
        first = firsts.setdefault((row["figures"], row.get("turn"), cell["quantize"], cell["activations"]), row)
        if row["ids"] != first["ids"]:
            apart.setdefault((row["cell"], row["way"]), []).append(str(row.get("turn", 0) + 1))
    for (cell_index, way), turns in apart.items():
        add_note(report, cell_index, f"{way}: other first tokens than the first way's in turn {', '.join(turns)}")
