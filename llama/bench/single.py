"""One cell on its own: the form in which the field has always reported, with everything that it left out.

Knows what to ask for; every measurement happens in a process of its own.
"""

from collections.abc import Callable
from typing import Any

from llama.bench.cell import Cell
from llama.bench.cells import compare_modes, comparison_words, gathered, note_machine, with_figures
from llama.bench.jobs import run_job
from llama.bench.record import CellRecord, Report, new_report


def benchmark_inference(
    batch_size: int = 1,
    input_len: int = 256,
    output_len: int = 32,
    kv_caching: bool = True,
    *,
    repeats: int = 1,
    compare: bool = False,
    **settings: Any,
) -> CellRecord:
    """Measure one cell, each repetition in a process of its own, and return its record (llama/bench/record.py).

    `settings` are the other fields of `llama.bench.cell.Cell`: model, device, dtype, threads, kv_cache, logits, text,
    seed, engine, tokenizer_path. `compare` also runs the other mode once and compares the tokens. Raises ValueError
    for what cannot be measured, and `llama.bench.jobs.JobDied`.
    """
    cell = Cell(batch_size, input_len, output_len, kv_caching, **settings)
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
    for repetition in range(repeats):
        done = run_job("cell", cell, waiting=waiting, ledger=repetition == 0)
        record = gathered(record, done["record"])
        note_machine(report, done)
    words = "cache on and off: tokens not compared (compare does it)"
    if compare:
        other = run_job("cell", cell.but(kv_caching=not cell.kv_caching), waiting=waiting, ledger=False)["record"]
        on, off = (record, other) if cell.kv_caching else (other, record)
        report["comparisons"] = [compare_modes(on, off)]
        words = comparison_words(report["comparisons"][0])
    record["notes"].append(words)
    report["cells"] = [with_figures(record, report["ceilings"])]
    return report
