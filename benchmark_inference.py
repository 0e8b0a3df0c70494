"""Measure generation with and without the KV cache: arguments -> llama.bench -> tables.

python benchmark_inference.py --batch_size 8 --kv_caching        one cell
python benchmark_inference.py --preset table                     batch 1, 8, 16 x cache on, off, as a page to send on
"""

import logging
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama import cli
from llama.bench.single import benchmark_inference, measure_cell
from llama.bench.validity import violated

if TYPE_CHECKING:
    from llama.bench.cell import Cell
    from llama.bench.record import Report

__all__ = ["benchmark_inference"]

VIOLATED, DIED = 3, 1  # exit codes: the measurement is not what it claims to be; a cell's process died


def main(
    *,
    batch_size: int = 1,
    input_len: int | None = None,
    output_len: int = 32,
    kv_caching: bool = True,
    preset: str | None = None,
    model: str | None = None,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    text: str | None = None,
    repeats: int = 1,
    compare: bool = False,
    engine: list[str] = [],  # noqa: B006  (read only)
    kv_cache: str = "static",
    logits: str = "last",
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 1,
    json: str | None = None,
    out: str = "results",
    budget: float = 15.0,
    resume: bool = False,
) -> int:
    """Measure time and memory of generation, with and without the KV cache; exit code 3 where a check is violated.

    Args:
        batch_size: Rows that are generated together; a preset has its own.
        input_len: Tokens of each prompt, random ids of exactly this length; 256 by default.
        output_len: Tokens made for each row; no end-of-text ends a row early.
        kv_caching: Keep the keys and values of past tokens; --kv_caching=False computes them anew at each step.
        preset: table (batch 1, 8, 16 x cache on, off) or sweep (how the difference grows with length and batch).
        model: demo, or the shape of a released model with random weights and Meta's tokenizer: llama-3.2-1b,
            llama-3.2-3b, llama-3.1-8b, ...; gpt2 with --engine transformers. By default demo on a CPU, and on a GPU
            llama-3.2-1b.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, or a .gguf file, instead of a model by name.
        tokenizer_path: The tokenizer, where it does not stand beside the weights.
        text: A real prompt, the same in all rows, instead of random ids.
        repeats: Repetitions of a single cell, each in a process of its own.
        compare: Run a single cell in the other mode, too, and compare the tokens.
        engine: transformers or llama.cpp, on the same weights, prompts, threads and dtype; a table takes several and
            puts them beside ours.
        kv_cache: The kind of cache: static or concat.
        logits: last, or all: compute those of every position at each step, as published code does.
        device: auto, cpu, cuda or mps.
        dtype: auto, fp32, bf16, fp16 or fp64; auto is fp32 on a CPU.
        threads: Threads of the CPU, for every engine; by default PyTorch's choice.
        seed: Which random ids.
        json: Write everything that is known of the run into this file.
        out: The folder that a preset makes its own folder in.
        budget: Minutes that a preset may take; decides how often each cell is repeated: 5 times where that fits.
        resume: Go on with the newest run of this preset that was interrupted.
    """
    logging.getLogger("llama").setLevel(logging.WARNING)  # what a checkpoint consists of stands in the ledger
    if text is not None and input_len is not None:
        raise ValueError("--text has a length of its own; leave out --input_len")
    if model is not None and ckpt_dir is not None:
        raise ValueError("--model and --ckpt_dir both name a model; give one of them")
    if preset not in (None, "table", "sweep"):
        raise ValueError(f"--preset={preset} is not known; choose table or sweep")
    if budget < 0:
        raise ValueError(f"--budget={budget} must be minutes, at least 0")
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "input_len": 256 if input_len is None else input_len,
        "output_len": output_len,
        "kv_caching": kv_caching,
        "tokenizer_path": tokenizer_path,
        "text": text,
        "kv_cache": kv_cache,
        "logits": logits,
        "threads": threads,
        "seed": seed,
    }
    base = make_cell(model, ckpt_dir, device, dtype, engine, given)
    command = shlex.join(["python", "benchmark_inference.py", *sys.argv[1:]])
    if preset is None:
        return run_cell(base, engine, repeats=repeats, compare=compare, command=command, json_path=json)
    return run_preset(
        preset, base, engine, out=Path(out), budget=budget, resume=resume, command=command, json_path=json
    )


def make_cell(
    model: str | None, ckpt_dir: str | None, device: str, dtype: str, engines: list[str], given: dict[str, Any]
) -> "Cell":
    """Return what all cells share, with everything settled that was left open; refuse what cannot be, at once."""
    from llama.api import pick_device, pick_dtype
    from llama.args import ModelArgs
    from llama.bench.cell import Cell
    from llama.bench.measure import check_length, settled
    from llama.bench.models import dtype_name, find_model
    from llama.bench.peers import GPT2, check_engine
    from llama.costs import RELEASED
    from llama.kv_cache import KVCache
    from llama.text import encode_prompt

    on = pick_device(device)
    name = ckpt_dir or model or ("llama-3.2-1b" if on.type == "cuda" else "demo")
    if model is not None and model not in ("demo", *RELEASED, *GPT2):
        known = ", ".join(["demo", *RELEASED, *GPT2])
        raise ValueError(f"--model={model} is not known; known are {known}; --ckpt_dir takes a path")
    for engine in engines:
        check_engine(engine)
    if name in GPT2 and engines != ["transformers"]:
        raise ValueError(f"{name} is no Llama; it can be measured with --engine transformers alone")
    KVCache.of(ModelArgs(kv_cache=given["kv_cache"]))
    cell = Cell(model=name, device=str(on), dtype=dtype_name(pick_dtype(dtype, on)), **given)
    if name in GPT2:
        return cell
    source = find_model(cell)
    cell = settled(cell, lambda text: encode_prompt(source.tokenizer, text))
    check_length(cell, source.args.max_seq_len)
    return cell


def run_cell(
    cell: "Cell", engines: list[str], *, repeats: int, compare: bool, command: str, json_path: str | None
) -> int:
    """Measure one cell and print it."""
    from llama.bench.progress import Progress
    from llama.bench.report import check_writable, write_json
    from llama.bench.tables import cell_text

    if len(engines) > 1:
        raise ValueError("--engine: a single cell has one engine; --preset table takes several")
    if json_path is not None:
        check_writable(Path(json_path))
    cell = cell.but(engine=engines[0]) if engines else cell
    progress = Progress()
    try:
        progress.begin(cell.name, 0.0)
        report = measure_cell(cell, repeats=repeats, compare=compare, command=command, waiting=progress.tick)
    finally:
        progress.close()
    print(cell_text(report["cells"][0], color=sys.stdout.isatty()))
    if json_path is not None:
        write_json(report, Path(json_path))
    return exit_code(report)


def run_preset(
    preset: str,
    base: "Cell",
    engines: list[str],
    *,
    out: Path,
    budget: float,
    resume: bool,
    command: str,
    json_path: str | None,
) -> int:
    """Measure a preset, print its table, and write its report; what is finished stands there whatever ends the run."""
    from llama.bench.book import new_book, resumed_book
    from llama.bench.presets import Session, run_sweep, run_table, sweep_cells, table_cells
    from llama.bench.progress import Progress
    from llama.bench.record import new_report
    from llama.bench.report import check_writable, write_json, write_report
    from llama.bench.tables import table_markdown

    if json_path is not None:
        check_writable(Path(json_path))
    cells = table_cells(base, engines) if preset == "table" else sweep_cells(base)
    report = new_report(preset, cells, command=command, budget_minutes=budget)
    book = resumed_book(out, report) if resume else new_book(out, report)
    print(f"everything goes into {book.folder}", file=sys.stderr)
    session = Session(book, time.monotonic() + 60 * budget, Progress())
    try:
        (run_table if preset == "table" else run_sweep)(session)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept, and --resume goes on", file=sys.stderr)
        return 130
    finally:
        session.progress.close()
        files = write_report(book.report, book.folder)
    if json_path is not None:
        write_json(book.report, Path(json_path))
    print("\n".join([table_markdown(book.report), *book.report["reading"], "", *map(str, files)]))
    return exit_code(book.report)


def exit_code(report: "Report") -> int:
    """Return 3 where a validity point is violated, 1 where a cell died, else 0."""
    if any(violated(record["points"]) for record in report["cells"]):
        return VIOLATED
    return DIED if any(record["error"] is not None for record in report["cells"]) else 0


if __name__ == "__main__":
    cli.main(main)
