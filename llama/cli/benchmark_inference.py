"""Measure generation with and without the KV cache: arguments -> llama.bench -> tables.

Knows how flags go together; what is measured, and how, is llama.bench's affair.
"""

import logging
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama.bench.cell import Cell, Modes, read_engine
from llama.bench.run.validity import violated
from llama.bench.single import measure_cell
from llama.cli import console
from llama.host.cores import FreeCores
from llama.host.files import check_writable

if TYPE_CHECKING:
    from llama.bench.schema import Report

# Exit codes: a measurement is not what it claims to be; a cell died or was refused; with --strict, a cell was noisy.
VIOLATED, DIED, DISTURBED = 3, 1, 4


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
    repeats: int = 1,
    compare: bool = False,
    engine: list[str] = [],  # noqa: B006  (read only)
    kv_cache: list[str] = [],  # noqa: B006  (read only)
    logits: str = "last",
    exact: bool = False,
    fast: bool = False,
    quantize: str | None = None,
    activations: int = 16,
    repack: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 1,
    json: str | None = None,
    out: str = "results",
    budget: float = 15.0,
    resume: bool = False,
    wait_until_quiet: float = 0.0,
    strict: bool = False,
    page_watch: bool | None = None,
    timeout: float = 60.0,
) -> int:
    """Measure time and memory of generation, with and without the KV cache.

    The exit code is 3 where a check is violated, 1 where a cell died or was refused, and else 0.

    Args:
        batch_size: Rows that are generated together, 1 by default; a preset has its own.
        input_len: Tokens of each prompt, random ids of exactly this length; 256 by default.
        output_len: Tokens made for each row, 32 by default; no end-of-text ends a row early.
        kv_caching: Keep the keys and values of past tokens; --kv_caching=False computes them anew at each step.
        preset: Cells that belong together: table (batch 1, 8, 16 x cache on, off), sweep (how the difference grows with
            length and batch), caches (kinds of cache beside the full one: bytes, time per token, and what they cost in
            quality) or chat (a conversation with the cache kept, made anew and off; prompts that begin alike; a cache
            on disk).
        model: By name: demo, or the shape of a released model with random weights and Meta's tokenizer: llama-3.2-1b,
            llama-3.2-3b, llama-3.1-8b, ...; gpt2 with --engine transformers. By default demo on a CPU, and on a GPU
            llama-3.2-1b.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, or a .gguf file, instead of a model by name.
        tokenizer_path: The tokenizer, where it does not stand beside the weights.
        text: A real prompt, the same in all rows, instead of random ids.
        repeats: Repetitions of a single cell, each in a process of its own.
        compare: Run a single cell in the other mode, too, and compare the tokens.
        engine: What computes: transformers or llama.cpp, on the same weights, prompts, threads and dtype; the presets
            table and chat take several and put them beside ours. Modes may stand behind the name, so that one table
            holds them all: llama.cpp:int8, llama.cpp:int4, llama.cpp:stored, and of ours llama:fast, llama:int8,
            llama:fast:stored.
        kv_cache: The kind of cache, NAME or NAME:PARAMS: static, by default, concat, window:1024+4, int8, int4, paged;
            or FILE.py:NAME[:PARAMS] for one of your own. --preset caches takes several; without any, all there are.
        logits: Those that are computed: last, or all, which are those of every position at each step, as published code
            computes them.
        exact: Measure exact mode, in which the bits of the logits do not depend on the cache or the batch; with fast,
            that of native code.
        fast: Measure the fast step: native code on a CPU, CUDA graphs on a GPU; in a table, of our own cells.
        quantize: How matrices are held: of our own cells int8 or int4, in 8 or 4 bits; with --engine llama.cpp int8 is
            its Q8_0, and int4 its Q4_0. stored takes those of a .gguf file as they are, in either engine.
        activations: 8 rounds what is multiplied by such matrices to 8 bits, as llama.cpp does; 16 by default.
        repack: --repack=False leaves stored weights in their file, mapped; as an engine of a table it is llama:mapped.
        device: Where it computes: auto, cpu, cuda or mps.
        dtype: Numbers that it computes in: auto, fp32, bf16, fp16 or fp64; auto is fp32 on a CPU.
        threads: Threads of the CPU, for every engine; by default PyTorch's choice, and fewer if other work occupies
            cores when the measurement begins.
        seed: Which random ids.
        json: Write everything that is known of the run into this file.
        out: The folder that a preset makes its own folder in.
        budget: Minutes that a preset may take. Each cell is repeated up to 5 times as far as they go. What does not fit
            at all is left out and named: pairs with the cache on and off, the largest batch first; one pair always
            runs. 0 measures every cell once, however long it takes. Of caches it decides on how much text the quality
            is measured: 2,048 tokens where that fits.
        resume: Go on with the newest run of this very preset: finish its cells, or repeat them more often.
        wait_until_quiet: Minutes to wait, before measuring, until other work on this machine is low; 0 does not wait.
        strict: End with exit code 4 if a table was measured under load of other work; it says so in any case.
        page_watch: Let the page of a preset have a short generation of its model, to step through; by default it has
            one of the demo model.
        timeout: Seconds that the ranks of a torchrun wait for one that does not answer, before they end.
    """
    cores = FreeCores()  # looks while torch is loaded
    logging.getLogger("llama").setLevel(logging.WARNING)  # what a checkpoint consists of stands in the ledger
    if text is not None and input_len is not None:
        raise ValueError("--text has a length of its own; leave out --input_len")
    check_flags(preset, batch_size, kv_caching, repeats, compare, engine, resume)
    check_own_flags(preset, kv_cache, input_len, output_len, text, logits, engine)
    if page_watch and preset is None:
        raise ValueError("--page_watch is of a preset's page, and a single cell has none; name one with --preset")
    check_minutes(budget=budget, wait_until_quiet=wait_until_quiet)
    json_path = None if json is None else Path(json)
    if json_path is not None:
        check_writable(json_path)

    from llama.bench import quiet
    from llama.bench.run.jobs import followers
    from llama.bench.run.models import make_cell
    from llama.bench.run.peers import GPT2, check_engine
    from llama.ranks.torchrun import check_timeout, world_rank

    os.environ["LLAMA_TIMEOUT"] = str(check_timeout(timeout))  # for the processes that measure
    if not repack:
        quantize = mapped(quantize)
    own: Modes = {"engine": "llama", "fast": fast, "quantize": quantize, "activations": activations}
    for name in {read_engine(words)["engine"] for words in engine} - {"llama"}:
        check_engine(name)
    if model in GPT2 and (engine != ["transformers"] or fast or quantize is not None):
        raise ValueError(f"{model} is no Llama; it can be measured with --engine transformers alone, as that comes")
    if world_rank() > 0:
        return followers().follow()
    cell = make_cell(
        model=model,
        ckpt_dir=ckpt_dir,
        device=device,
        dtype=dtype,
        batch_size=batch_size or 1,
        **job_lengths(preset, input_len, output_len),
        kv_caching=kv_caching,
        **(one_engine(engine, own) if preset is None else own),
        tokenizer_path=tokenizer_path,
        text=text,
        kv_cache=kv_cache[0] if kv_cache and preset != "caches" else "static",
        logits=logits,
        exact=exact,
        threads=threads,
        seed=seed,
    )
    command = as_started()
    report: Report | None = None
    try:
        if preset == "caches":
            report = plan_caches(cell, kv_cache, command=command, budget=budget)
        elif preset == "chat":
            report = plan_chat(cell, engine, command=command, budget=budget)
        elif preset is not None:
            report = plan(preset, cell, engine, command=command, budget=budget)
        if wait_until_quiet:
            quiet.wait_until_quiet(wait_until_quiet)
            cores = FreeCores()
        if report is None:
            if cell.device == "cpu":
                cores.choose_threads(console.say)
            single: dict[str, Any] = {"repeats": repeats, "compare": compare, "command": command}
            return run_cell(cell, **single, json_path=json_path, strict=strict)
        by_default = cell.model == "demo" and cell.ranks == 1
        watched = cell if (by_default if page_watch is None else page_watch) else None
        kept: dict[str, Any] = {"out": Path(out), "resume": resume, "json_path": json_path}
        return run_preset(report, budget=budget, watched=watched, strict=strict, cores=cores, **kept)
    finally:
        followers().dismiss()


def as_started() -> str:
    """Return the command line of this process, as it can be given again."""
    one_command = Path(sys.argv[0]).stem in ("llama-kv", "__main__")
    return shlex.join([*(["llama-kv"] if one_command else ["python", "benchmark_inference.py"]), *sys.argv[1:]])


def mapped(quantize: str | None) -> str:
    """Return what a cell calls stored weights that stay in their file."""
    if quantize != "stored":
        raise ValueError("--repack=False leaves weights as a .gguf file has them; give --quantize stored, too")
    return "mapped"


def one_engine(engine: list[str], flags: Modes) -> Modes:
    """Return the engine of a single cell with its modes, which stand behind its name or in flags of their own."""
    if not engine:
        return flags
    asked = read_engine(engine[0])
    if ":" not in engine[0]:
        return {**flags, "engine": asked["engine"]}
    if flags["fast"] or flags["quantize"] is not None or flags["activations"] != 16:
        raise ValueError(f"--engine {engine[0]} says its modes itself; leave out --fast, --quantize and --activations")
    return asked


def check_flags(
    preset: str | None,
    batch_size: int | None,
    kv_caching: bool,
    repeats: int,
    compare: bool,
    engines: list[str],
    resume: bool,
) -> None:
    """Refuse flags that would be ignored, by name."""
    if preset not in (None, "table", "sweep", "caches", "chat"):
        raise ValueError(f"--preset={preset} is not known; choose table, sweep, caches or chat")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"--batch_size={batch_size} must be at least 1")
    if preset is None:
        if resume:
            raise ValueError("--resume goes on with a preset; name it with --preset")
        if len(engines) > 1:
            raise ValueError("--engine: a single cell has one engine; --preset table takes several")
        return
    own = {"batch_size": batch_size is not None, "kv_caching": not kv_caching, "repeats": repeats != 1}
    given = [f"--{name}" for name, changed in {**own, "compare": compare}.items() if changed]
    if given:
        raise ValueError(f"{', '.join(given)}: a preset decides this itself; leave it out")
    if preset == "sweep" and engines:
        raise ValueError("--engine: the sweep measures this library alone; --preset table takes engines")


def check_minutes(**flags: float) -> None:
    """Refuse what is no time to wait or to measure."""
    for name, minutes in flags.items():
        if not (math.isfinite(minutes) and minutes >= 0):
            raise ValueError(f"--{name}={minutes} must be minutes, at least 0")


def check_own_flags(
    preset: str | None,
    kinds: list[str],
    input_len: int | None,
    output_len: int | None,
    text: str | None,
    logits: str,
    engines: list[str],
) -> None:
    """Refuse several kinds of cache where one is measured, and what the presets of kinds and chat decide themselves."""
    if preset != "caches" and len(kinds) > 1:
        raise ValueError("--kv_cache: a cell has one kind of cache; --preset caches takes several")
    if preset not in ("caches", "chat"):
        return
    own = {"input_len": input_len is not None, "output_len": output_len is not None, "text": text is not None}
    own |= {"logits": logits != "last", "engine": bool(engines) and preset == "caches"}
    given = [f"--{name}" for name, changed in own.items() if changed]
    if given:
        raise ValueError(f"{', '.join(given)}: --preset {preset} decides this itself; leave it out")


def job_lengths(preset: str | None, input_len: int | None, output_len: int | None) -> dict[str, int]:
    """Return the lengths of a cell's job; a preset with texts of its own has here the least that it begins with."""
    if preset in ("caches", "chat"):
        return {"input_len": 64, "output_len": 1}
    return {
        "input_len": 256 if input_len is None else input_len,
        "output_len": 32 if output_len is None else output_len,
    }


def plan_caches(cell: Cell, kinds: list[str], *, command: str, budget: float) -> "Report":
    """Return the report of the preset of kinds of cache, none of them measured; refuse what cannot be, at once."""
    from llama.bench.caches import caches_report
    from llama.bench.run.models import find_model
    from llama.bench.run.peers import GPT2

    if cell.model in GPT2:
        raise ValueError(f"{cell.model} is no Llama, and has a cache of its own; --preset caches measures a Llama's")
    return caches_report(cell, kinds, find_model(cell).args, command=command, budget=budget)


def plan_chat(cell: Cell, engines: list[str], *, command: str, budget: float) -> "Report":
    """Return the report of the preset of conversations, none of them measured; refuse what cannot be, at once."""
    from llama.bench.chat import chat_report
    from llama.bench.run.memory_ledger import check_memory
    from llama.bench.run.models import check_cell, find_model
    from llama.bench.run.peers import GPT2

    if cell.model in GPT2:
        raise ValueError(f"{cell.model} is no Llama, and has no session; --preset chat measures a Llama's")
    source = find_model(cell)
    report = chat_report(cell, engines, source.tokenizer, source.args.max_seq_len, command=command, budget=budget)
    for record in report["cells"]:
        each = Cell(**record["cell"])
        check_cell(each)
        own = find_model(each) if each.from_file else source
        check_memory(each, own.args, own.device, held=0, stored=own.stored)
    return report


def plan(preset: str, cell: Cell, engines: list[str], *, command: str, budget: float) -> "Report":
    """Return the report of a preset with all its cells, none of them measured; refuse what cannot be, at once."""
    from llama.bench.presets import sweep_cells, table_cells
    from llama.bench.run.memory_ledger import check_length
    from llama.bench.run.models import check_cell, find_model
    from llama.bench.run.peers import GPT2
    from llama.bench.schema import new_report

    cells = table_cells(cell, engines) if preset == "table" else sweep_cells(cell)
    for each in cells:
        check_cell(each)
        if each.from_file:
            find_model(each)
    if cell.model not in GPT2:
        limit = find_model(cell).args.max_seq_len
        for each in cells:
            check_length(each, limit)
    return new_report(preset, cells, command=command, budget_minutes=budget)


def run_cell(cell: Cell, *, repeats: int, compare: bool, command: str, json_path: Path | None, strict: bool) -> int:
    """Measure one cell and print it."""
    from llama.bench.report.files import keep_json
    from llama.bench.report.text import cell_text
    from llama.cli.progress import seconds_bar

    with seconds_bar(cell.name) as bar:
        report = measure_cell(cell, repeats=repeats, compare=compare, command=command, waiting=bar.refresh)
    try:
        if json_path is not None:
            keep_json(report, json_path)  # first: whoever reads the page may have left
    finally:
        console.put(cell_text(report["cells"][0], report["environment"].get("threads")), alarm="VIOLATED")
    return exit_code(report, strict=strict)


def run_preset(
    report: "Report",
    *,
    out: Path,
    budget: float,
    resume: bool,
    json_path: Path | None,
    watched: Cell | None,
    strict: bool,
    cores: FreeCores,
) -> int:
    """Measure a preset, print its table, and write its report; what is finished stands there whatever ends the run.

    Its page has a generation of the model of `watched` in it, unless that is None. All cells compute with as many
    threads as `cores` leaves free now, or as the run that goes on has computed with.
    """
    from llama.bench.caches import run_caches
    from llama.bench.chat import run_chat
    from llama.bench.presets import Session, overrun, run_session
    from llama.bench.report.files import keep_json, write_report
    from llama.bench.report.text import alarms_text, table_markdown
    from llama.bench.run.directory import new_run_directory, resumed_run_directory
    from llama.bench.watch import watch
    from llama.cli.progress import seconds_bar

    directory = resumed_run_directory(out, report) if resume else new_run_directory(out, report)
    console.say(f"everything goes into {directory.folder}")
    if directory.cells[0].device == "cpu":
        cores.choose_threads(console.say, known=directory.report["environment"].get("threads"))
    session = Session(directory, time.monotonic() + 60 * budget, seconds_bar(), watched=watched)
    try:
        {"caches": run_caches, "chat": run_chat}.get(report["preset"], run_session)(session)
        watch(session)
        directory.report["reading"] += overrun(session)
    except KeyboardInterrupt as stop:
        console.say(f"{console.in_words(stop)}; what is finished is kept, and --resume goes on")
        return console.exit_code(stop)
    finally:
        session.progress.close()
        files = write_report(directory.report, directory.folder)
    if json_path is not None:
        keep_json(directory.report, json_path)
    said = [table_markdown(directory.report), *directory.report["reading"], *alarms_text(directory.report)]
    console.put("\n".join([*said, "", *map(str, files)]), alarm="VIOLATED")
    return exit_code(directory.report, strict=strict)


def exit_code(report: "Report", *, strict: bool = False) -> int:
    """Return 3 where a validity point is violated, 1 where a cell died or was refused, else 0.

    With `strict` 4 if a cell was measured under load.
    """
    if any(violated(record["points"]) for record in report["cells"]):
        return VIOLATED
    caches = report.get("caches")
    records = report["cells"] if caches is None else caches["kinds"]
    if any(record["error"] is not None for record in records):
        return DIED
    disturbed = any(point["status"] == "disturbed" for record in report["cells"] for point in record["points"])
    return DISTURBED if strict and disturbed else 0
