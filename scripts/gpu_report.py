"""What a GPU makes of this library, in one call: are its fast paths right, how fast, with what memory, which kernels.

    python scripts/gpu_report.py [--model llama-3.2-1b] [--batch_sizes 1,8,16] [--minutes 8] [--skip static,start]
    python scripts/gpu_report.py --device cpu --model tiny      # a rehearsal without a GPU; its figures mean nothing

Checks come first. The report, as JSON, Markdown and a plot, is written anew after every section, so that what was
measured stays; what was not says so, and why. It needs torch, triton and numpy alone; transformers, gpt-fast and
matplotlib are used where they are there. Exit status: 1 where a check or a section failed, 2 where there is no GPU.
Weights are random and always the same, in bf16 on a GPU and float32 on a CPU.
"""

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, whether or not it is installed

from llama.bench.gpu.checks import checks
from llama.bench.gpu.others import eager, gpt_fast, starts, static
from llama.bench.gpu.page import as_markdown, plot
from llama.bench.gpu.rows import NotHere, Report
from llama.bench.gpu.run import MODELS, WORDS, Options, Run, dtype_of, in_one_line, settle
from llama.bench.gpu.times import bandwidth, jobs, profiled, steps
from llama.files import check_writable, replace_file
from llama.machine import environment

logger = logging.getLogger("llama.gpu_report")


class Section(NamedTuple):
    """What a section does, and the seconds without which it is not begun."""

    work: Callable[[Run], None]
    needs: float = 1.0


SECTIONS = {
    "checks": Section(checks),
    "bandwidth": Section(bandwidth),
    "steps": Section(steps),
    "jobs": Section(jobs),
    "profile": Section(profiled),
    "start": Section(starts, needs=20.0),
    "transformers": Section(eager, needs=20.0),
    "static": Section(static, needs=60.0),
    "gpt_fast": Section(gpt_fast, needs=60.0),
}


def main(words: Sequence[str]) -> int:
    """Make the report; return the exit status."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("llama").setLevel(logging.INFO)
    options = read_options(words)
    longest = MODELS[options.model].max_seq_len
    if options.input_len + options.output_len > longest:
        print(f"error: input_len + output_len may be {longest} at most with {options.model}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: there is no CUDA GPU here (PyTorch finds none), so nothing can be measured; "
            "--device cpu --model tiny rehearses the report without one",
            file=sys.stderr,
        )
        return 2
    folder = Path(options.out) / f"{date.today().isoformat()}-gpu-report"
    check_writable(folder / "report.json")
    report = Report(" ".join(["python scripts/gpu_report.py", *words]), {**asdict(options), **facts(options)})
    measure_all(Run(options, report), folder)
    print((folder / "report.md").read_text(encoding="utf-8"))
    print(f"written to {folder}")
    return report.status


def measure_all(run: Run, folder: Path) -> None:
    """Run the sections that are not skipped, for as long as there is time, and write the report after each."""
    for name, section in SECTIONS.items():
        if name in run.options.skip:
            run.report.missing[name] = "skipped by --skip"
        elif run.left < section.needs:
            run.report.missing[name] = "out of time"
        else:
            logger.info("%s; %.0f s are left", name, run.left)
            measure(run, name, section)
        if run.device.type == "cuda":
            run.report.facts[f"GPU after {name}"] = gpu_state()
        if name == "steps":
            draw(run.report, folder)
        write(run.report, folder)


def measure(run: Run, name: str, section: Section) -> None:
    try:
        section.work(run)
    except NotHere as why:
        run.report.missing[name] = str(why)
    except Exception as error:  # whatever a kernel, a compiler or a peer may raise: the other sections are still run
        logger.warning("%s", name, exc_info=True)
        run.report.missing[name] = in_one_line(error)
        run.report.broken.append(name)
    settle(run.device)


def draw(report: Report, folder: Path) -> None:
    try:
        replace_file(folder / "plot.png", plot(report.steps))
    except NotHere as why:
        report.missing["plot"] = str(why)


def write(report: Report, folder: Path) -> None:
    content = {**asdict(report), "status": report.status}
    replace_file(folder / "report.json", (json.dumps(content, indent=1) + "\n").encode())
    replace_file(folder / "report.md", as_markdown(report).encode())


def facts(options: Options) -> dict[str, Any]:
    """Return what a figure needs beside it."""
    device = torch.device(options.device)
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    on_gpu = device.type == "cuda"
    kind = "measured on a GPU" if on_gpu else "cpu rehearsal: no figure here says anything of a GPU"
    found = environment(device, torch.get_num_threads())
    return {"kind": kind, "date": date.today().isoformat(), "dtype": WORDS[dtype_of(device)], **found, "triton": triton}


def gpu_state() -> str | None:
    """Return clocks, temperature and power, as the driver tells them."""
    query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_options(words: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Options()
    parser.add_argument("--out", default=default.out, help="the folder in which <day>-gpu-report/ is made")
    parser.add_argument("--model", default=default.model, choices=list(MODELS))
    parser.add_argument("--device", default=default.device, choices=("cuda", "cpu"))
    parser.add_argument("--batch_sizes", default=default.batch_sizes, type=whole_numbers)
    parser.add_argument("--input_len", default=default.input_len, type=at_least_one)
    parser.add_argument("--output_len", default=default.output_len, type=at_least_one)
    parser.add_argument("--minutes", default=default.minutes, type=float, help="what does not fit into them is not run")
    parser.add_argument("--skip", default=default.skip, type=section_names, help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--gpt_fast", default=default.gpt_fast, help="the folder of a checkout of gpt-fast")
    return Options(**vars(parser.parse_args(list(words))))


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least_one(part) for part in text.split(","))


def section_names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no section; there are {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
