"""Compare every fast path of a GPU with the plain path, time steps and prompts, and say what to do next.

    python scripts/gpu_report.py [--model llama-3.2-1b]
    python scripts/gpu_report.py --device cpu      # a rehearsal without a GPU; its figures say nothing about one

It takes 8 minutes at most. Each part runs in a process of its own with a time limit, so that one that crashes or hangs
does not stop the others. After each part the report in a new folder is written again.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, whether or not it is installed
    from llama.host import console

    console.quiet_imports()

import torch

from llama import cli
from llama.bench.cell import Cell
from llama.bench.gpu.checks import Check
from llama.bench.report.columns import Table
from llama.bench.report.tables import environment_table
from llama.bench.report.text import markdown
from llama.bench.run.directory import make_folder
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.models import make_cell
from llama.bench.schema import Report, new_report
from llama.host.files import replace_file

MACHINE_S = 40.0  # for a GPU to start, and to measure how fast it reads and multiplies
PART_S = 140.0  # for each part; compiling for the first time takes most of it


def main(
    *,
    model: str | None = None,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    device: str = "cuda",
    input_len: int = 256,
    output_len: int = 32,
    out: str = "results",
) -> int:
    """Check and time a GPU's fast paths. Exit code 1: a check failed or did not end; 2: no GPU.

    Args:
        model: As in benchmark_inference.py: llama-3.2-1b by default, with random weights; the demo on a CPU.
        ckpt_dir: A checkpoint, instead of a model by name.
        tokenizer_path: The tokenizer, if it is not beside the weights.
        device: Where it runs: cuda, or cpu for a rehearsal.
        input_len: Tokens of each prompt.
        output_len: Tokens to generate for each row.
        out: The folder in which the folder of results is made.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; --device cpu rehearses the report without one")
    asked = {"model": model, "ckpt_dir": ckpt_dir, "tokenizer_path": tokenizer_path, "device": device}
    cell = make_cell(**asked, input_len=input_len, output_len=output_len)  # type: ignore[arg-type]
    folder = make_folder(Path(out), "gpu-report")
    facts = new_report("gpu", [cell], command=shlex.join(["python", *sys.argv]))
    machine = run_job("machine", cell, waiting=until(MACHINE_S))
    facts["environment"], facts["ceilings"] = machine["environment"], machine["ceilings"]
    found: list[Check] = []
    for part in ("ids", "fp32", "bf16" if cell.dtype == "fp32" else cell.dtype):
        checks = checks_of(cell, part)
        found += checks
        write(facts, found, folder)
        print(f"{part}: {sum(check['passed'] for check in checks)} of {len(checks)} checks passed", flush=True)
    print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"the report is in {folder}")
    return int(not all(check["passed"] for check in found))


def checks_of(cell: Cell, part: str) -> list[Check]:
    """Return the checks of a part, or one that says why the part ended without a result."""
    try:
        return cast(list[Check], run_job("gpu", cell, part=part, waiting=until(PART_S))["checks"])
    except (ValueError, JobDied, TimeoutError) as why:
        return [{"name": part, "passed": False, "detail": str(why)}]


def until(limit: float) -> Callable[[], None]:
    """Return a function that raises TimeoutError if it is called after so many seconds."""
    end = time.monotonic() + limit

    def waiting() -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"ended after its limit of {limit:g} s")

    return waiting


def write(facts: Report, found: Sequence[Check], folder: Path) -> None:
    """Write report.json and report.md with everything that is known so far."""
    known = {key: facts[key] for key in ("command", "started", "environment", "ceilings")}
    content = {**known, "cell": facts["cells"][0], "checks": found}
    replace_file(folder / "report.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    on_gpu = facts["cells"][0]["device"].startswith("cuda")
    title = "GPU report" if on_gpu else "GPU report, rehearsed on a CPU: no figure here says anything about a GPU"
    steps = [f"**Next: fix {check['name']}:** {check['detail']}" for check in found if not check["passed"]]
    steps = steps or [
        "**Next: whole generations, memory and peers:** `python benchmark_inference.py --preset table "
        "--engine llama:fast --engine transformers`; then write all figures into docs/log.md"
    ]
    rows = [[check["name"], "passed" if check["passed"] else "**FAILED**", check["detail"]] for check in found]
    tables = [Table("Checks", ["check", "outcome", "detail"], rows), environment_table(facts)]
    parts = [f"# {title}\n", *(f"{step}\n" for step in steps), *map(markdown, tables)]
    replace_file(folder / "report.md", "\n".join(parts).encode())


if __name__ == "__main__":
    cli.main(main)
