"""One cell on its own: the form in which the field has always reported, with everything that it left out.

Knows what to ask for; every measurement happens in a process of its own.
"""

from collections.abc import Callable
from typing import Any

from llama.bench.cell import Cell
from llama.bench.quiet import judge_quiet
from llama.bench.report.tables import comparison_words
from llama.bench.run.aggregate import aggregated, check_machine, compare_modes, raise_ceilings, with_figures
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.validity import worse
from llama.bench.schema import CellRecord, Report, new_report
from llama.bench.statistics import best_ceilings


def benchmark_inference(
    batch_size: int = 1,
    input_len: int = 256,
    output_len: int = 32,
    kv_caching: bool = True,
    *,
    model: str | None = None,
    ckpt_dir: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    repeats: int = 1,
    compare: bool = False,
    **rest: Any,
) -> CellRecord:
    """Measure one cell, each repetition in a process of its own, and return its record (llama/bench/schema.py).

    `model` and `ckpt_dir` as in `llama-kv bench`. `compare` also runs the other mode once and compares the
    tokens. `rest` are other fields of `llama.bench.cell.Cell`: threads, kv_cache, logits, text, seed, engine, fast,
    quantize. Raises ValueError for what cannot be measured; a process that died stands in the record's `error`.
    """
    from llama.bench.run.models import make_cell

    sizes = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "kv_caching": kv_caching}
    cell = make_cell(model=model, ckpt_dir=ckpt_dir, device=device, dtype=dtype, **sizes, **rest)
    return measure_cell(cell, repeats=repeats, compare=compare)["cells"][0]


def measure_cell(
    cell: Cell,
    *,
    repeats: int = 1,
    compare: bool = False,
    command: str = "",
    waiting: Callable[[], None] = lambda: None,
) -> Report:
    """Measure a cell and return it in a report of its own, beside what machine and model it was measured on."""
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    report = new_report("cell", [cell], command=command)
    record = report["cells"][0]
    try:
        machine = run_job("machine", cell, waiting=waiting)
        report["environment"], report["ceilings"] = machine["environment"], machine["ceilings"]
        for repetition in range(repeats):
            done = run_job("cell", cell, waiting=waiting, trace=repetition == 0)
            check_machine(report, done["environment"])
            report["model"] = done["model"]
            if "ceilings" in done:
                report["ceilings"] = best_ceilings(report["ceilings"], done["ceilings"])
            record = aggregated(record, done["record"])
        record["notes"].append(_compare(report, record, waiting) if compare else "cache on and off: not compared")
    except JobDied as death:
        record["error"] = f"died: {death}"
    report["cells"] = [with_figures(record, report["ceilings"])]
    raise_ceilings(report)
    judge_quiet(report)
    return report


def _compare(report: Report, record: CellRecord, waiting: Callable[[], None]) -> str:
    """Run the cell's other mode once; a point that is violated there is violated here."""
    cell = Cell(**record["cell"])
    other = run_job("cell", cell.but(kv_caching=not cell.kv_caching), waiting=waiting, trace=False)["record"]
    record["points"] = worse(record["points"], other["points"])
    comparison = compare_modes(record, other) if cell.kv_caching else compare_modes(other, record)
    report["comparisons"] = [comparison]
    return comparison_words(comparison)
