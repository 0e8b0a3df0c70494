"""Measure generation with and without the KV cache: arguments -> llama.bench -> tables."""

import logging
import math
import os
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llama.bench.cell import Cell, Modes, read_engine
from llama.bench.single import measure_cell
from llama.cli.inference import PROMPTS
from llama.host import console
from llama.host.cores import FreeCores
from llama.host.files import check_writable

if TYPE_CHECKING:
    from llama.bench.presets import Group
    from llama.bench.schema import Report

# A check is violated; a cell died or was refused; with --strict, a cell was measured under load. The exit codes of all
# commands are in docs/files.md.
VIOLATED, DIED, NOISY = 3, 1, 4
# What each preset takes, and a single cell; other flags belong to all of them.
PRESETS = ("table", "caches", "chat", "report")
TAKEN_BY = {
    **dict.fromkeys(("batch_size", "kv_caching", "repeats", "compare"), ("cell",)),
    **dict.fromkeys(("input_len", "output_len"), ("cell", "table", "report")),
    **dict.fromkeys(("logits", "speculate"), ("cell", "table")),
    **dict.fromkeys(("contexts", "prompt_len", "task", "samples"), ("caches",)),
    "text": ("cell", "table", "caches"),
    "engine": ("cell", "table", "chat"),
    "page_watch": ("table", "caches", "chat"),
    "resume": PRESETS,
}


def main(
    *,
    batch_size: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    kv_caching: bool = True,
    preset: str | None = None,
    model: str | None = None,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    text: str | None = None,
    prompt_len: int | None = None,
    repeats: int = 1,
    compare: bool = False,
    engine: list[str] = [],  # noqa: B006  (read only)
    kv_cache: list[str] = [],  # noqa: B006  (read only)
    speculate: str | None = None,
    contexts: list[str] = [],  # noqa: B006  (read only)
    task: list[str] = [],  # noqa: B006  (read only)
    samples: int | None = None,
    logits: str = "last",
    exact: bool = False,
    fast: bool = False,
    quantize: str | None = None,
    activations: int = 16,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 1,
    json: str | None = None,
    out: str = "results",
    budget: float | None = None,
    resume: bool = False,
    wait_until_quiet: float = 0.0,
    strict: bool = False,
    page_watch: bool | None = None,
    timeout: float = 60.0,
) -> int:
    """Measure time and memory of generation, with and without the KV cache.

    The exit code is 3 if a check is violated, 1 if a cell died or was refused, and otherwise 0.

    Args:
        batch_size: Rows that are generated together, by default 1.
        input_len: Tokens of each prompt, random ids of exactly this length; by default 256.
        output_len: Tokens made for each row, by default 32; no end-of-text ends a row early.
        kv_caching: Cache keys and values of past tokens; --kv_caching=False computes them again at each step.
        preset: Cells that belong together: table (batch 1, 8, 16 x cache on, off), caches (bytes, time, quality of
            kinds), chat (a cache that is kept between calls) or report (the table with texts in both modes and the
            published peaks).
        model: The demo, or a released shape with random weights: llama-3.2-1b, llama-3.1-8b, ...; by default demo on a
            CPU, and llama-3.2-1b on a GPU.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, or a .gguf file, instead of a model by name.
        tokenizer_path: The tokenizer, if it is not beside the weights.
        text: A real prompt, the same in all rows, instead of random ids; with --preset caches, a UTF-8 file on whose
            text kinds are judged, instead of a novel's.
        prompt_len: Tokens of that text that --preset caches feeds in one pass before the scored ones; by default all
            of 2048 except the scored ones.
        repeats: Repetitions of a single cell, each in a process of its own.
        compare: Run a single cell in the other mode, too, or without guesses, and compare the tokens.
        engine: Another engine on the same weights and prompts: transformers, llama.cpp:int8, llama:fast, FILE.py:CLASS.
            The presets table and chat take several.
        kv_cache: The kind of cache, NAME, NAME:PARAMS or FILE.py:NAME; by default static; llama-kv kinds lists them.
            --preset caches takes several, by default all.
        speculate: How tokens are guessed: lookup takes those that followed the same tokens before, lookup:N at most N.
            --preset table measures each of our cells with and without guesses.
        contexts: Lengths at which --preset caches times a step, counts bytes and makes samples of tasks, such as
            1024,4096; by default 1024 and 8192, up to the model's limit.
        task: Tasks by which --preset caches judges kinds: ruler, ruler:NAME,NAME or a file FILE.jsonl.
        samples: Samples of each task at each length; by default 10, and all of a file.
        logits: Which are computed: last, or all, those of every position at each step, as published code computes them.
        exact: Measure exact mode, in which no bit of the logits depends on the cache or the batch.
        fast: Measure the fast step: native code on a CPU, CUDA graphs on a GPU.
        quantize: Weights in int8 or int4, or stored: those of a .gguf file as they are.
        activations: 8 rounds what is multiplied by such weights to 8 bits, as llama.cpp does; by default 16.
        device: Where it computes: auto, cpu, cuda or mps.
        dtype: Numbers of the model: auto, fp32, bf16, fp16 or fp64; auto is fp32 on a CPU.
        threads: CPU threads of every engine; by default PyTorch's choice, or fewer if other work occupies cores.
        seed: Which random ids.
        json: Write the report into this file.
        out: The folder in which a preset makes its own folder.
        budget: Minutes of a preset: every pair or kind once, then repetitions, up to 5, then curves. What does not fit
            is left out; one pair always runs. 0 measures everything once. By default 15, and for a report 5, all of
            which repetitions use.
        resume: Continue the newest run of this preset: measure what is missing, or repeat its cells.
        wait_until_quiet: Minutes to wait until other work on this machine is low; 0 does not wait.
        strict: End with exit code 4 if a cell was measured under load of other work.
        page_watch: Add a short generation, step by step, to a preset's page; by default one of the demo model.
        timeout: Seconds that the ranks of a torchrun wait for one that does not answer.
    """
    return dispatch(SimpleNamespace(**locals()))


def hand_in(
    *,
    minutes: float = 5.0,
    ckpt_dir: str | None = None,
    device: str = "auto",
    out: str = "results",
    resume: bool = False,
) -> int:
    """Write a report on the KV cache, with this machine's figures: report.html, and report.md to edit.

    It is bench --preset report, which has more flags.

    Args:
        minutes: How long it may take; 0: any time. Pairs that do not fit are left out, and the others are repeated.
        ckpt_dir: A checkpoint's directory or .gguf file; by default the demo on a CPU, and llama-3.2-1b on a GPU.
        device: Where it computes: auto, cpu, cuda or mps.
        out: The folder in which it makes its own folder.
        resume: Continue the newest report of this model: measure what is missing, or repeat its cells.
    """
    check_minutes("minutes", minutes)
    return main(preset="report", budget=minutes, ckpt_dir=ckpt_dir, device=device, out=out, resume=resume)


def dispatch(flags: SimpleNamespace) -> int:
    """Measure what the flags of `main` say, and return the exit code."""
    began, cores = time.monotonic(), FreeCores()  # looks while torch is loaded
    logging.getLogger("llama").setLevel(logging.WARNING)  # what a checkpoint consists of is in the ledger
    check_flags(flags)
    json_path = None if flags.json is None else Path(flags.json)
    if json_path is not None:
        check_writable(json_path)

    from llama.bench.noise import wait_until_idle
    from llama.bench.presets import plan_report
    from llama.bench.run.jobs import followers
    from llama.ranks.torchrun import check_timeout, world_rank

    os.environ["LLAMA_TIMEOUT"] = str(check_timeout(flags.timeout))  # for the processes that measure
    cell = base_cell(flags) if world_rank() == 0 else None
    if cell is None:
        return followers().follow()
    planned: tuple[Report, list[Group]] | None = None
    try:
        if flags.preset is not None:
            asked: dict[str, Any] = {"engines": flags.engine}
            if flags.preset == "caches":
                asked = {"kinds": flags.kv_cache, "contexts": [int(context) for context in flags.contexts]}
                asked |= {"text": flags.text, "prompt_len": flags.prompt_len}
                asked |= {"tasks": flags.task, "samples": flags.samples}
            elif flags.preset == "report":
                asked = {"prompts": PROMPTS}
            by_default = cell.model == "demo" and cell.ranks == 1 and flags.preset != "report"
            asked["watched"] = by_default if flags.page_watch is None else flags.page_watch
            planned = plan_report(flags.preset, cell, command=as_started(), budget=flags.budget, **asked)
        if flags.wait_until_quiet:
            wait_until_idle(flags.wait_until_quiet)
            began, cores = time.monotonic(), FreeCores()
        if planned is None:
            if cell.device == "cpu":
                cores.choose_threads(console.note)
            return print_cell(cell, flags, json_path)
        return run_preset(*planned, flags, json_path, cores, began)
    finally:
        followers().send({})  # which ends them


def base_cell(flags: SimpleNamespace) -> Cell:
    """Return the single cell, or the cell that those of a preset are made from. Raises ValueError."""
    from llama.bench.run.models import engine_class, make_cell

    own: Modes = {"engine": "llama", "fast": flags.fast, "quantize": flags.quantize, "activations": flags.activations}
    for words in flags.engine:
        engine_class(read_engine(words)["engine"]).package()
    has_text = flags.preset in ("caches", "chat")  # of its own, of which this is the least
    return make_cell(
        model=flags.model,
        ckpt_dir=flags.ckpt_dir,
        device=flags.device,
        dtype=flags.dtype,
        batch_size=flags.batch_size or 1,
        input_len=64 if has_text else 256 if flags.input_len is None else flags.input_len,
        output_len=1 if has_text else 32 if flags.output_len is None else flags.output_len,
        kv_caching=flags.kv_caching,
        **(one_engine(flags.engine, own) if flags.preset is None else own),
        tokenizer_path=flags.tokenizer_path,
        text=None if flags.preset == "caches" else flags.text,
        kv_cache=flags.kv_cache[0] if flags.kv_cache and flags.preset != "caches" else "static",
        speculate=flags.speculate,
        logits=flags.logits,
        exact=flags.exact,
        threads=flags.threads,
        seed=flags.seed,
    )


def as_started() -> str:
    """Return the command line of this process, so that it can be given again."""
    one_command = Path(sys.argv[0]).stem in ("llama-kv", "__main__")
    return shlex.join([*(["llama-kv"] if one_command else ["python", "benchmark_inference.py"]), *sys.argv[1:]])


def one_engine(engine: list[str], flags: Modes) -> Modes:
    """Return the engine of a single cell with its modes, which follow its name or have flags of their own."""
    if not engine:
        return flags
    asked = read_engine(engine[0])
    if asked == read_engine(asked["engine"]):
        return {**flags, "engine": asked["engine"]}
    if flags != read_engine("llama"):
        raise ValueError(f"--engine {engine[0]} names its modes; leave out --fast, --quantize and --activations")
    return asked


def check_flags(flags: SimpleNamespace) -> None:
    """Raise ValueError for flags that would be ignored."""
    preset, defaults = flags.preset, main.__kwdefaults__ or {}
    if preset not in (None, *PRESETS):
        raise ValueError(f"--preset={preset} is not known; choose {', '.join(PRESETS[:-1])} or {PRESETS[-1]}")
    for name, taken_by in TAKEN_BY.items():
        if getattr(flags, name) != defaults[name] and (preset or "cell") not in taken_by:
            known = " or ".join(f"--preset {one}".replace("--preset cell", "a single cell") for one in taken_by)
            what = "a single cell" if preset is None else f"--preset {preset}"
            raise ValueError(f"--{name} cannot be combined with {what}; leave it out, or use it with {known}")
    if flags.budget is None:
        flags.budget = 5.0 if preset == "report" else 15.0
    if flags.text is not None and flags.input_len is not None:
        raise ValueError("--text has a length of its own; leave out --input_len")
    if flags.batch_size is not None and flags.batch_size < 1:
        raise ValueError(f"--batch_size={flags.batch_size} must be at least 1")
    for name in ("budget", "wait_until_quiet"):
        check_minutes(name, getattr(flags, name))
    flags.contexts = [context for words in flags.contexts for context in words.split(",")]
    if not all(context.isdecimal() for context in flags.contexts):
        raise ValueError(f"--contexts {' '.join(flags.contexts)} must be numbers of tokens, such as --contexts 8192")
    if flags.samples is not None and not flags.task:
        raise ValueError("--samples counts the samples of a task; name a task, such as --task ruler")
    if preset != "caches" and len(flags.kv_cache) > 1:
        raise ValueError("--kv_cache: a cell has one kind of cache; several need --preset caches")
    if preset is None and len(flags.engine) > 1:
        raise ValueError("--engine: a single cell has one engine; several need --preset table")


def check_minutes(name: str, minutes: float) -> None:
    """Raise ValueError unless the value of a flag is a time."""
    if not (math.isfinite(minutes) and minutes >= 0):
        raise ValueError(f"--{name}={minutes} must be minutes, at least 0")


def print_cell(cell: Cell, flags: SimpleNamespace, json_path: Path | None) -> int:
    """Measure one cell and print it."""
    from llama.bench.report.files import write_json
    from llama.bench.report.text import cell_text
    from llama.host.progress import seconds_bar

    asked = {"repeats": flags.repeats, "compare": flags.compare, "command": as_started()}
    with seconds_bar(cell.name) as bar:
        report = measure_cell(cell, **asked, waiting=bar.refresh)
    try:
        if json_path is not None:
            write_json(report, json_path)  # first, because the reader of standard output may be gone
    finally:
        console.put(cell_text(report, 0), alarm="VIOLATED")
    return report_exit_code(report, strict=flags.strict)


def run_preset(
    report: "Report",
    groups: "list[Group]",
    flags: SimpleNamespace,
    json_path: Path | None,
    cores: FreeCores,
    began: float,
) -> int:
    """Measure a preset, print its table, and write its report, which has what is finished however the run ends.

    All cells compute with as many threads as `cores` finds free now, or as many as the resumed run computed with. The
    budget begins at `began`.
    """
    from llama.bench.plan import REPETITIONS, Run
    from llama.bench.report.files import RESULTS, keep_steps, write_json, write_report
    from llama.bench.run.directory import new_run, resumed_run
    from llama.host.progress import progress_bar

    folder, report = (resumed_run if flags.resume else new_run)(Path(flags.out), report)
    console.note(f"everything goes into {folder}")
    if report["cells"][0]["device"] == "cpu":
        cores.choose_threads(console.note, known=report["environment"].get("threads"))
    most = f" of {flags.budget:g} minutes" if flags.budget else ""
    bar = progress_bar(total=60 * flags.budget or None, bar_format=f"{{desc}} |{{bar}}| {{elapsed}}{most}")

    def waiting(name: str) -> None:
        bar.set_description_str(name, refresh=False)
        bar.update(min(time.monotonic() - began, bar.total or 0) - bar.n)
        bar.refresh()

    def save(page: str | None) -> None:
        if page is not None:
            keep_steps(folder, page)
        write_json(report, folder / RESULTS)

    console.note(f"{sum(len(group.jobs) for group in groups)} jobs, each in a process of its own")
    repetitions = REPETITIONS if flags.budget else 1
    try:
        Run(report, groups, repetitions=repetitions, waiting=waiting, save=save, began=began).run()
    except KeyboardInterrupt as stop:
        console.say(f"{console.in_words(stop)}; what is finished is kept, and --resume continues")
        return console.exit_code(stop)
    finally:
        bar.close()
        files = write_report(report, folder)
    if json_path is not None:
        write_json(report, json_path)
    show_report(report, files)
    return report_exit_code(report, strict=flags.strict)


def show_report(report: "Report", files: list[Path]) -> None:
    """Print the tables of a report, what follows from them, and where its files are."""
    from llama.bench.report.text import table_markdown, warnings_text

    lines = [table_markdown(report), *report["reading"], *warnings_text(report), "", *map(str, files)]
    console.put("\n".join(lines), alarm="VIOLATED")


def report_exit_code(report: "Report", *, strict: bool = False) -> int:
    """Return 3 if a check is violated, 1 if a cell died or was refused, with `strict` 4 if a cell is noisy, else 0."""
    seen = {row["status"] for row in report["rows"] if row["figures"] == "check"}
    if "violated" in seen:
        return VIOLATED
    if any(row.get("error") for row in report["rows"]):
        return DIED
    return NOISY if strict and "noisy" in seen else 0
