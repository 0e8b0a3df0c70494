"""The first day with a GPU, in one call: are its fast paths right, how fast are its kernels, and how fast is the whole.

    python scripts/gpu_report.py [--model llama-3.2-1b] [--budget 15] [--skip kernels]
    python scripts/gpu_report.py --device cpu      # a rehearsal without a GPU; its figures say nothing of one

Checks and kernel times go into a folder of their own, written anew after every part; then the ordinary benchmark
measures its table, of the plain path, the fast one and transformers, into another folder beside it. Each part runs in
a process of its own, so that one that fails loses no other.
"""

import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, whether or not it is installed
    from llama import console

    console.quiet_imports()

import torch

from llama import cli
from llama.bench import presets
from llama.bench.cell import Cell
from llama.bench.report.tables import NOT_MEASURED, Table, environment_table, in_words
from llama.bench.report.text import markdown
from llama.bench.run.directory import make_folder
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.models import make_cell
from llama.bench.schema import Report, new_report
from llama.costs import MB
from llama.files import replace_file

logger = logging.getLogger("llama.gpu_report")

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmark_inference.py"
PARTS = ("checks", "kernels", "profile", "cells")
OUTCOMES = {True: "passed", False: "**FAILED**", None: "not run"}


class Job(NamedTuple):
    """A job of `llama.bench.run.worker`: the part that it belongs to, its name in the report, and its cell."""

    part: str
    name: str
    cell: Cell


def main(
    *,
    model: str | None = None,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    device: str = "cuda",
    input_len: int = 256,
    output_len: int = 32,
    budget: float = 15.0,
    out: str = "results",
    skip: list[str] = [],  # noqa: B006  (read only)
) -> int:
    """Check and time what a GPU makes of this library; exit code 1 where a check or a part failed, 2 without a GPU.

    Args:
        model: As in benchmark_inference.py: llama-3.2-1b by default, with random weights; the demo on a CPU.
        ckpt_dir: A checkpoint, instead of a model by name.
        tokenizer_path: The tokenizer, where it does not stand beside the weights.
        device: Where it runs: cuda, or cpu for a rehearsal.
        input_len: Tokens of each prompt.
        output_len: Tokens made for each row.
        budget: Minutes for the benchmark's table; checks and kernels take some more.
        out: The folder in which both folders of results are made.
        skip: A part that is left out: checks, kernels, profile or cells; may be repeated.
    """
    if unknown := [name for name in skip if name not in PARTS]:
        raise ValueError(f"--skip={unknown[0]} is no part; there are {', '.join(PARTS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; --device cpu rehearses the report without one")
    asked = {"model": model, "ckpt_dir": ckpt_dir, "tokenizer_path": tokenizer_path, "device": device}
    sizes = {"input_len": input_len, "output_len": output_len}
    cell = make_cell(**asked, **sizes)  # type: ignore[arg-type]
    folder = make_folder(Path(out), "gpu-report")
    facts = new_report("gpu", [cell], command=shlex.join(["python", *sys.argv]))
    machine = run_job("machine", cell)
    facts["environment"], facts["ceilings"] = machine["environment"], machine["ceilings"]
    found: dict[str, Any] = {"checks": [], "steps": [], "profile": None, "cells": None}
    found["failures"] = dict.fromkeys(skip, "skipped by --skip")
    for job in jobs_for(cell):
        if job.part not in skip:
            logger.info("%s", job.name)
            run_part(found, job)
            write(facts, found, folder)
    if "cells" not in skip:
        given = {**asked, **sizes, "budget": budget, "out": out}
        found["cells"] = measure_cells([f"--{name}={value}" for name, value in given.items() if value is not None])
    write(facts, found, folder)
    print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"checks and kernel times are in {folder}, the report of the cells in a folder beside it")
    return exit_code(found, skip)


def jobs_for(cell: Cell) -> Iterator[Job]:
    for dtype in dict.fromkeys(("fp32", "bf16" if cell.dtype == "fp32" else cell.dtype)):
        yield Job("checks", f"checks in {dtype}", cell.but(dtype=dtype))
    for batch in presets.BATCHES:
        yield Job("kernels", f"steps at batch {batch}", cell.but(batch_size=batch))
    yield Job("profile", "profile of a step", cell)


def run_part(found: dict[str, Any], job: Job) -> None:
    """Add what comes of a job to what was found, or why nothing did."""
    try:
        done = run_job(job.part, job.cell)
    except (ValueError, JobDied) as why:
        found["failures"][job.name] = str(why)
        return
    for name, part in done.items():
        found[name] = found[name] + part if isinstance(part, list) else part


def measure_cells(words: Sequence[str]) -> dict[str, Any]:
    """Let the ordinary benchmark measure its table; return its command line and its exit code."""
    ways = ["llama:fast", *(["transformers"] if find_spec("transformers") else [])]
    command = [sys.executable, str(BENCHMARK), "--preset=table", *words, *(f"--engine={way}" for way in ways)]
    return {"command": shlex.join(command), "exit_code": run_benchmark(command)}


def run_benchmark(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


def exit_code(found: dict[str, Any], skip: Sequence[str]) -> int:
    """Return 1 where a check failed, a part has no figures, or the benchmark ended with an error of its own."""
    failed = any(check["passed"] is False for check in found["checks"])
    missing = found["failures"].keys() - set(skip)
    return int(failed or bool(missing) or (found["cells"] or {"exit_code": 0})["exit_code"] != 0)


# ---- the report of checks and kernel times ---------------------------------------------------------------------------


def write(facts: Report, found: dict[str, Any], folder: Path) -> None:
    known = {key: facts[key] for key in ("command", "started", "environment", "ceilings")}  # type: ignore[literal-required]
    content = {**known, "cell": facts["cells"][0]["cell"], **found}
    replace_file(folder / "report.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    on_gpu = content["cell"]["device"].startswith("cuda")
    title = "GPU report" if on_gpu else "GPU report, rehearsed on a CPU: no figure here says anything of a GPU"
    parts = [f"# {title}\n", *map(markdown, tables(facts, found))]
    replace_file(folder / "report.md", "\n".join(parts).encode())


def tables(facts: Report, found: dict[str, Any]) -> Iterator[Table]:
    """Return the tables of the report. Floors are bytes that must be read, over the best read bandwidth seen."""
    assert facts["ceilings"] is not None
    rate = facts["ceilings"]["read_bytes_per_second"]
    checks = [[check["name"], OUTCOMES[check["passed"]], check["detail"]] for check in found["checks"]]
    yield Table("Checks against the plain path", ["check", "outcome", "detail"], checks or [[NOT_MEASURED, "", ""]])
    cell = Cell(**facts["cells"][0]["cell"])
    rows = []
    for row in found["steps"]:
        floor = row["bytes"] / rate
        figures = [in_words(row["seconds"], scale=1e3, digits=3), str(row["seconds"]["n"]), f"{1e3 * floor:.3f}"]
        share = [f"{floor / row['seconds']['median']:.0%}", f"{row['record_seconds']:.1f}"]
        rows.append([row["kernels"], str(row["batch_size"]), *figures, *share])
    heads = ["kernels", "batch size", "time, ms", "n", "floor, ms", "floor / time", "to compile and record, s"]
    lengths = f"contexts of {cell.input_len} to {cell.total_len - 1} tokens, the floor at {cell.input_len}"
    yield Table("The cached step alone, replayed", heads, rows or [[NOT_MEASURED, *[""] * 6]], [lengths])
    yield profile_table(found["profile"], rate)
    left_out = [list(pair) for pair in found["failures"].items()]
    yield Table("Not run, or not to the end", ["part", "why"], left_out or [["none", ""]])
    cells = found["cells"]
    yield Table(
        "Time, memory and other engines: the benchmark's own report",
        ["command", "exit code"],
        [[NOT_MEASURED, ""] if cells is None else [cells["command"], str(cells["exit_code"])]],
    )
    yield environment_table(facts)


def profile_table(profile: dict[str, Any] | None, rate: float) -> Table:
    heads = ["kernel", "calls", "us", "must read, MB", "of the read bandwidth"]
    title = "One step at batch 1, profiled"
    if profile is None:
        return Table(title, heads, [[NOT_MEASURED, *[""] * 4]])
    rows = []
    for row in profile["kernels"]:
        known = row["bytes"] is not None and row["microseconds"] > 0
        sizes = (
            [f"{row['bytes'] / MB:.2f}", f"{row['bytes'] / row['microseconds'] * 1e6 / rate:.0%}"]
            if known
            else ["", ""]
        )
        rows.append([row["name"][:80], str(row["count"]), f"{row['microseconds']:.1f}", *sizes])
    gaps = f"gaps between kernels: {profile['gap_sum']:.1f} us in all, each {in_words(profile['gaps'])} us"
    waiting = "a kernel that begins before the last one has ended counts the time that it waits"
    return Table(title, heads, rows, [gaps, waiting])


if __name__ == "__main__":
    cli.main(main)
