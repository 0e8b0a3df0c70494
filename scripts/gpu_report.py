"""The first day with a GPU, in one call: are its fast paths right, and how fast are they? Six experiments, 8 minutes.

    python scripts/gpu_report.py [--model llama-3.2-1b] [--skip tiles]
    python scripts/gpu_report.py --device cpu      # a rehearsal without a GPU; its figures say nothing of one

The cheapest come first, each in a process of its own with a limit of time, so that one that crashes or hangs leaves the
others. After each, the report in a new folder says what is known so far; at its top, what passed, what failed, and what
to do next. The rule that decides about the fused kernels stands in docs/log.md.
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
from llama.bench.gpu.experiments import OUTCOMES, RULE, Found
from llama.bench.report.tables import Table, environment_table
from llama.bench.report.text import markdown
from llama.bench.run.directory import make_folder
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.models import make_cell
from llama.bench.schema import Report, new_report
from llama.host.files import replace_file

MACHINE_S = 40.0  # in which a GPU has to come up, and show how fast it reads and multiplies


class Experiment(NamedTuple):
    """One of `llama.bench.gpu.experiments`: its name here, what it asks, and after how many seconds it is ended."""

    name: str
    asks: str
    limit: float


EXPERIMENTS = (
    Experiment("checks", "Do all paths and kernels give what the plain path gives?", 130),
    Experiment("early launch", "Do 2,000 steps have the same bits with early launch and without?", 50),
    Experiment("kernels", "How long does each kernel of a step take?", 50),
    Experiment("tiles", "Do other tiles, or more splits, serve better?", 50),
    Experiment("ways", "How long is a step of plain, of compiled, and of fused kernels?", 120),
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
    """Try what a GPU makes of this library; exit code 1 where an experiment failed or did not end, 2 without a GPU.

    Args:
        model: As in benchmark_inference.py: llama-3.2-1b by default, with random weights; the demo on a CPU.
        ckpt_dir: A checkpoint, instead of a model by name.
        tokenizer_path: The tokenizer, where it does not stand beside the weights.
        device: Where it runs: cuda, or cpu for a rehearsal.
        input_len: Tokens of each prompt.
        output_len: Tokens made for each row.
        out: The folder in which the folder of results is made.
        skip: An experiment that is left out: checks, early launch, kernels, tiles, ways or lengths; may be repeated.
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
    """Return what an experiment found, or how it ended without."""
    try:
        return cast(Found, run_job(f"gpu {experiment.name}", cell, waiting=until(experiment.limit)))
    except (ValueError, JobDied, TimeoutError) as why:
        return {"passed": False, "words": str(why), "heads": [], "rows": [], "figures": {}}


def until(limit: float) -> Callable[[], None]:
    """Return what raises TimeoutError where it is called after so many seconds."""
    end = time.monotonic() + limit

    def waiting() -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"ended after its limit of {limit:g} s")

    return waiting


# ---- the report ------------------------------------------------------------------------------------------------------


def write(facts: Report, found: dict[str, Found], folder: Path) -> None:
    known = {key: facts[key] for key in ("command", "started", "environment", "ceilings")}  # type: ignore[literal-required]
    content = {**known, "cell": facts["cells"][0]["cell"], "experiments": found}
    replace_file(folder / "report.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    on_gpu = content["cell"]["device"].startswith("cuda")
    title = "GPU report" if on_gpu else "GPU report, rehearsed on a CPU: no figure here says anything of a GPU"
    parts = [f"# {title}\n", *(f"{line}\n" for line in next_steps(found)), *map(markdown, tables(facts, found))]
    replace_file(folder / "report.md", "\n".join(parts).encode())


def next_steps(found: dict[str, Found]) -> Iterator[str]:
    """Say what is to be done now, by what is known so far."""
    for name, one in found.items():
        if one["passed"] is False:
            yield f"**Next: mend what {name} found:** {one['words']}"
    yield f"**Fused kernels:** {verdict(found)}"
    if len(found) == len(EXPERIMENTS) and all(one["passed"] is not False for one in found.values()):
        yield (
            "**Next: whole generations, memory and peers:** `python benchmark_inference.py --preset table "
            "--engine llama --engine llama:fast --engine transformers`; then write all figures into docs/log.md"
        )


def verdict(found: dict[str, Found]) -> str:
    """Apply the rule of docs/log.md."""
    early, ways = found.get("early launch"), found.get("ways")
    figures = {} if ways is None else ways["figures"]
    fused, compiled = figures.get("fused at batch 1"), figures.get("compiled at batch 1")
    if early is None or early["passed"] is None or fused is None or compiled is None:
        return "not decided: the rule of docs/log.md asks for early launch and ways, on an H100 or H200"
    ratio = f"{compiled / fused:.2f} times as fast as the compiled step at batch 1, of {RULE} that the rule asks for"
    if early["passed"] and compiled >= RULE * fused:
        return f"keep them, for one row only: {ratio}, and the same bits with early launch and without"
    return f"delete them: {ratio}; early launch: {early['words']}"


def tables(facts: Report, found: dict[str, Found]) -> Iterator[Table]:
    """Return the tables of the report, that of all experiments first."""
    rows = []
    for experiment in EXPERIMENTS:
        one = found.get(experiment.name)
        outcome = ["not run", ""] if one is None else [OUTCOMES[one["passed"]], one["words"]]
        rows.append([experiment.name, experiment.asks, *outcome])
    yield Table("What was asked, and what came of it", ["experiment", "question", "outcome", "seen"], rows)
    for name, one in found.items():
        if one["rows"]:
            yield Table(f"Experiment: {name}", one["heads"], one["rows"])
    yield environment_table(facts)


if __name__ == "__main__":
    cli.main(main)
