"""A single cell of the table, measured in processes of its own, and what is aggregated from several repetitions."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from llama.bench.cell import Cell
from llama.bench.run.jobs import run_job
from llama.bench.run.validity import worse
from llama.bench.schema import CellRecord, Comparison, Divergence, Report
from llama.bench.statistics import best_ceilings, reached, roofline_shares, summarise
from llama.host.machine import Ceilings

NONE = -1  # stands for the token of a row that has ended


def aggregated(old: CellRecord, new: CellRecord) -> CellRecord:
    """Return a cell's record with one more repetition."""
    notes = list(dict.fromkeys([*old["notes"], *new["notes"]]))
    if old["ids"] and old["ids"] != new["ids"]:
        notes.append("repetitions made different tokens")
    return {
        **new,
        "samples": old["samples"] + new["samples"],
        "points": worse(old["points"][: len(new["points"])], new["points"]),  # what judges the whole cell stands last
        "notes": notes,
        "ledger": old["ledger"] or new["ledger"],
    }


def with_figures(record: CellRecord, ceilings: Ceilings | None) -> CellRecord:
    """Return a record with its summary and, where the machine's ceilings are known, its limits."""
    if not record["samples"]:
        return record
    cell, work = Cell(**record["cell"]), record["work"]
    summary, limits = summarise(cell, record["samples"]), None
    if work is not None and ceilings is not None and cell.ranks == 1:  # the ceilings are those of one process
        limits = roofline_shares(cell, work, summary, ceilings)
    return {**record, "summary": summary, "limits": limits}


def raise_ceilings(report: Report) -> None:
    """Let a cell that beats the measured ceilings raise them, and give every cell its figures under them.

    Quantized weights are multiplied in other numbers: what they reach is a ceiling for their own cell alone.
    """
    for record in report["cells"]:
        cell, work, summary = Cell(**record["cell"]), record["work"], record["summary"]
        comparable = report["ceilings"] is not None and cell.ranks == 1 and cell.quantize is None
        if comparable and work is not None and summary is not None:
            report["ceilings"] = best_ceilings(report["ceilings"], reached(cell, work, summary))
    report["cells"] = [with_figures(record, report["ceilings"]) for record in report["cells"]]


def check_machine(report: Report, environment: dict[str, Any]) -> None:
    """Raise ValueError where a job ran on another machine, or on other code, than those before it."""
    before = report["environment"]
    changed = [name for name in before if before[name] != environment.get(name)]
    if changed:
        words = ", ".join(f"{name} was {before[name]!r} and is {environment.get(name)!r}" for name in changed)
        raise ValueError(f"these repetitions cannot stand in one table: {words}; start anew, without --resume")
    report["environment"] = environment


def compare_modes(cached: CellRecord, uncached: CellRecord) -> Comparison:
    """Compare the ids of a cell with the cache on and one with it off, and look at the logits where they part."""
    cell = Cell(**uncached["cell"])
    divergence = first_divergence(cached["ids"], uncached["ids"])
    if divergence is not None and cell.engine == "llama":
        ids = uncached["ids"][divergence["row"]][: divergence["token"]]
        divergence["margin"] = run_job("margin", cell, row=divergence["row"], ids=ids)["margin"]
    return {
        "engine": cell.engine,
        "path": cached["path"],
        "batch_size": cell.batch_size,
        "tokens": sum(map(len, uncached["ids"])),
        "equal": divergence is None,
        "divergence": divergence,
    }


def first_divergence(cached: Sequence[Sequence[int]], uncached: Sequence[Sequence[int]]) -> Divergence | None:
    """Return the earliest token in which two lists of rows differ, over all rows; None where there is none."""
    found: Divergence | None = None
    for row, pair in enumerate(zip(cached, uncached, strict=True)):
        ids = list(zip_longest(*pair, fillvalue=NONE))
        token = next((i for i, (on, off) in enumerate(ids) if on != off), None)
        if token is not None and (found is None or token < found["token"]):
            on, off = ids[token]
            found = {"row": row, "token": token, "cached_id": on, "uncached_id": off, "margin": None}
    return found
