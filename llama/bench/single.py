"""One cell on its own: the form in which published benchmarks report, with everything that they leave out."""

from collections.abc import Callable
from typing import Any

from llama.bench.cell import Cell
from llama.bench.comparisons import add_note, compare_pair, with_rates
from llama.bench.noise import judge_noise
from llama.bench.schema import Report, merge, new_report, rows_of


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
) -> Report:
    """Measure one cell, each repetition in a process of its own, and return its report (docs/benchmark_json.md).

    `model` and `ckpt_dir` as in `llama-kv bench`. `compare` also runs the `other` cell once and compares the tokens.
    `rest` are other fields of `llama.bench.cell.Cell`: threads, kv_cache, logits, text, seed, engine, fast, speculate.
    Raises ValueError if the cell cannot be measured; if a process died, the cell's row has an `error`.
    """
    from llama.bench.run.models import make_cell

    sizes = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "kv_caching": kv_caching}
    cell = make_cell(model=model, ckpt_dir=ckpt_dir, device=device, dtype=dtype, **sizes, **rest)
    return measure_cell(cell, repeats=repeats, compare=compare)


def measure_cell(
    cell: Cell,
    *,
    repeats: int = 1,
    compare: bool = False,
    command: str = "",
    waiting: Callable[[], None] = lambda: None,
) -> Report:
    """Measure a cell and return its report; with `compare`, its `other` cell is the second one. Raises ValueError."""
    from llama.bench.plan import Run
    from llama.bench.presets import Group, cell_jobs, cells_of

    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    report = new_report("cell", [cell, cell.other] if compare else [cell], command=command)
    groups = [Group((job,), repeats=job.place == 0) for job in cell_jobs(cells_of(report))]
    Run(report, groups, repetitions=repeats, waiting=lambda _: waiting()).measure()
    own, *others = rows_of(report, "cell")
    for row in rows_of(report, "cell"):
        how, _, why = (row["error"] or "").partition(": ")
        if how == "refused":
            raise ValueError(why)
        own["error"] = own["error"] or (f"{how}: {cell.other.name}: {why}" if how else None)
    if not others:
        add_note(report, 0, f"{cell.compared}: not compared")
    elif not own["error"]:
        compare_pair(report, *(own, *others)[:: 1 if cell.kv_caching else -1])
        # A check that the other mode violates is violated here too.
        merge(report, [check for check in rows_of(report, "check", 1) if check["status"] == "violated"], 0)
    with_rates(report)
    judge_noise(report)
    return report
