"""Check and time the fast paths of a GPU in one call: three experiments, within 6 minutes.

    python scripts/gpu_report.py [--model llama-3.2-1b] [--skip ways]
    python scripts/gpu_report.py --device cpu      # a rehearsal without a GPU; its figures say nothing about one

Each experiment runs in a process of its own with a time limit, so that one that crashes or hangs does not stop the
others. After each, a report is written to a new folder: what passed, what failed, and what to do next.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, whether or not it is installed
    from llama.cli import console

    console.quiet_imports()

import torch

from llama import cli
from llama.bench.cell import Cell
from llama.bench.gpu.experiments import OUTCOMES, Found
from llama.bench.report.columns import Table
from llama.bench.report.tables import environment_table
from llama.bench.report.text import markdown
from llama.bench.run.directory import make_folder
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.models import make_cell
from llama.bench.schema import Report, new_report
from llama.host.files import replace_file

MACHINE_S = 40.0  # for a GPU to start, and to measure how fast it reads and multiplies


class Experiment(NamedTuple):
    """One of `llama.bench.gpu.experiments`: its name here, its question, and its limit in seconds."""

    name: str
    question: str
    limit: float


EXPERIMENTS = (
    Experiment("checks", "Do all paths and kernels give what the plain path gives?", 130),
    Experiment("ways", "How long does a step of plain and of compiled kernels take?", 120),
    Experiment("lengths", "Does the plain path stall at lengths that it has not met?", 40),
)


def main(
    *,
    model: str | None = None,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    device: str = "cuda",
    input_len: int = 256,
    output_len: int = 32,
    out: str = "results",
    skip: list[str] = [],  # noqa: B006  (read only)
) -> int:
    """Check and time a GPU's fast paths. Exit code 1: an experiment failed or did not end; 2: no GPU.

    Args:
        model: As in benchmark_inference.py: llama-3.2-1b by default, with random weights; the demo on a CPU.
        ckpt_dir: A checkpoint, instead of a model by name.
        tokenizer_path: The tokenizer, if it is not beside the weights.
        device: Where it runs: cuda, or cpu for a rehearsal.
        input_len: Tokens of each prompt.
        output_len: Tokens to generate for each row.
        out: The folder in which the folder of results is made.
        skip: An experiment to leave out: checks, ways or lengths; may be repeated.
    """
    known = [experiment.name for experiment in EXPERIMENTS]
    if unknown := [name for name in skip if name not in known]:
        raise ValueError(f"--skip={unknown[0]} is no experiment; there are {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; --device cpu rehearses the report without one")
    asked = {"model": model, "ckpt_dir": ckpt_dir, "tokenizer_path": tokenizer_path, "device": device}
    cell = make_cell(**asked, input_len=input_len, output_len=output_len)  # type: ignore[arg-type]
    folder = make_folder(Path(out), "gpu-report")
    facts = new_report("gpu", [cell], command=shlex.join(["python", *sys.argv]))
    machine = run_job("machine", cell, waiting=until(MACHINE_S))
    facts["environment"], facts["ceilings"] = machine["environment"], machine["ceilings"]
    found: dict[str, Found] = {}
    for experiment in EXPERIMENTS:
        if experiment.name not in skip:
            one = found[experiment.name] = tried(experiment, cell)
            write(facts, found, folder)
            print(f"{experiment.name}: {OUTCOMES[one['passed']]}, {one['words']}", flush=True)
    write(facts, found, folder)
    print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"the report is in {folder}")
    return int(any(one["passed"] is False for one in found.values()))


def tried(experiment: Experiment, cell: Cell) -> Found:
    """Return what an experiment found, or why it ended without a result."""
    try:
        return cast(Found, run_job(f"gpu {experiment.name}", cell, waiting=until(experiment.limit)))
    except (ValueError, JobDied, TimeoutError) as why:
        return {"passed": False, "words": str(why), "heads": [], "rows": [], "figures": {}}


def until(limit: float) -> Callable[[], None]:
    """Return a function that raises TimeoutError if it is called after so many seconds."""
    end = time.monotonic() + limit

    def waiting() -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"ended after its limit of {limit:g} s")

    return waiting


def write(facts: Report, found: dict[str, Found], folder: Path) -> None:
    """Write report.json and report.md with everything that is known so far."""
    known = {key: facts[key] for key in ("command", "started", "environment", "ceilings")}
    content = {**known, "cell": facts["cells"][0], "experiments": found}
    replace_file(folder / "report.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    on_gpu = facts["cells"][0]["device"].startswith("cuda")
    title = "GPU report" if on_gpu else "GPU report, rehearsed on a CPU: no figure here says anything about a GPU"
    parts = [f"# {title}\n", *(f"{line}\n" for line in next_steps(found)), *map(markdown, tables(facts, found))]
    replace_file(folder / "report.md", "\n".join(parts).encode())


def next_steps(found: dict[str, Found]) -> Iterator[str]:
    """Yield what to do now, by what is known so far."""
    for name, one in found.items():
        if one["passed"] is False:
            yield f"**Next: fix what {name} found:** {one['words']}"
    if len(found) == len(EXPERIMENTS) and all(one["passed"] is not False for one in found.values()):
        yield (
            "**Next: whole generations, memory and peers:** `python benchmark_inference.py --preset table "
            "--engine llama --engine llama:fast --engine transformers`; then write all figures into docs/log.md"
        )


def tables(facts: Report, found: dict[str, Found]) -> Iterator[Table]:
    """Yield the tables of the report, the one of all experiments first."""
    rows = []
    for experiment in EXPERIMENTS:
        one = found.get(experiment.name)
        outcome = ["not run", ""] if one is None else [OUTCOMES[one["passed"]], one["words"]]
        rows.append([experiment.name, experiment.question, *outcome])
    yield Table("Experiments", ["experiment", "question", "outcome", "seen"], rows)
    for name, one in found.items():
        if one["rows"]:
            yield Table(f"Experiment: {name}", one["heads"], one["rows"])
    yield environment_table(facts)


if __name__ == "__main__":
    cli.main(main)
