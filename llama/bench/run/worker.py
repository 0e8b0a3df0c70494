"""A process that does one job and ends: python -m llama.bench.run.worker JOB RESULT, both files of JSON.

No memory, cache or warmth of one measurement can reach the next. A ValueError of a job is returned as its message; any
other error ends the process, and `llama.bench.run.jobs` reports it.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

from llama.bench.cell import Cell
from llama.bench.run.cache_kind import cache_costs, cache_quality
from llama.bench.run.conversation import measure_conversation, measure_prompts
from llama.bench.run.engines import LlamaEngine
from llama.bench.run.measure import make_prompts, measure, peak_row
from llama.bench.run.memory_ledger import check_memory
from llama.bench.run.models import facts_of, find_model, open_engine
from llama.bench.run.step_times import step_times
from llama.bench.run.tasks import cache_task
from llama.bench.schema import Row
from llama.bench.texts import CORPUS, read_corpus
from llama.host.cores import use_threads
from llama.host.machine import DTYPES, ceilings, environment
from llama.watch.record import record
from llama.watch.watch_page import page


def run_cell(cell: Cell, *, trace: bool) -> dict[str, Any]:
    """Measure a cell once; `trace` as in `measure`."""
    device = torch.device(cell.device)
    warnings = BufferingHandler(capacity=1000)  # such as why the fast step cannot run
    warnings.setLevel(logging.WARNING)
    logging.getLogger("llama").addHandler(warnings)
    opened = open_engine(cell)
    row, *others = measure(cell, opened, trace=trace)
    row["notes"] += [one.getMessage() for one in warnings.buffer]
    done = {"rows": [row, *others], "model": opened.facts, "environment": environment(device)}
    # The ceilings are measured next to every repetition; those of one process say nothing of several.
    return done if cell.ranks > 1 else {**done, "ceilings": ceilings(device, DTYPES[cell.dtype], seconds=1.0)}


def describe_machine(cell: Cell) -> dict[str, Any]:
    """Return the environment and the ceilings of this machine, and the facts of a model, with none in memory."""
    device, facts = torch.device(cell.device), facts_of(cell, find_model(cell))
    return {"environment": environment(device), "ceilings": ceilings(device, DTYPES[cell.dtype]), "model": facts}


def time_steps(cell: Cell, *, contexts: list[int]) -> dict[str, Any]:
    """Time a step of the cell's batch at each context, with the cache and without."""
    source = find_model(cell)
    longest = cell.but(input_len=max(contexts), output_len=1)
    for kv_caching in (True, False):
        modes = longest.but(kv_caching=kv_caching)
        check_memory(modes, source.args, source.device, stored=source.stored)
    model, rows = source.build(), list[Row]()
    for kv_caching in (True, False):
        rows += step_times(model, cell.batch_size, contexts, kv_caching=kv_caching, logits=cell.logits)
    return {"rows": rows}


def agreement(cell: Cell) -> dict[str, Any]:
    """Return how often a cell with rounded weights finds the same most likely token as our float32 on the plain path.

    Both read the first `cell.input_len` tokens of the text, whatever they find (teacher forcing).
    """
    found = []
    for one in (cell.workload.but(exact=False, dtype="fp32", kv_cache="static"), cell):
        engine = open_engine(one).engine
        ids, path = engine.most_likely(engine.encode(read_corpus())[: cell.input_len])
        found.append(ids)
        del engine  # the memory of one model at a time
    same = sum(one == other for one, other in zip(*found, strict=True))
    row: Row = {"figures": "agreement", "path": path, "text": CORPUS.name, "tokens": len(ids)}
    return {"rows": [{**row, "top1_agreement": same / len(ids)}]}


def margin(cell: Cell, *, row: int, ids: list[int]) -> dict[str, Any]:
    """Return the gap between the two largest logits after a row's prompt and these new ids, without a cache."""
    source = find_model(cell)
    engine = LlamaEngine(source.build(), source.tokenizer)
    prompts = make_prompts(cell, engine)
    with torch.inference_mode():
        engine.model.kv_caching = False
        tokens = torch.tensor([prompts[row] + ids], device=engine.model.device)
        first, second = engine.model(tokens, 0, logits="last")[0, -1].topk(2).values.tolist()
    return {"margin": first - second}


def continued_texts(cell: Cell, *, prompts: list[str], length: int) -> dict[str, Any]:
    """Return each prompt continued greedily with the cache and without."""
    engine = open_engine(cell).engine
    assert isinstance(engine, LlamaEngine)
    on, off = (
        engine.model.generate(engine.tokenizer, prompts, max_gen_len=length, temperature=0.0, kv_caching=kv_caching)
        for kv_caching in (True, False)
    )
    rows = list[Row]()
    for prompt, cached, uncached in zip(prompts, on, off, strict=True):
        texts = {"cached_text": cached["generation"], "uncached_text": uncached["generation"]}
        equal = {"tokens": len(uncached["ids"]), "equal": cached["ids"] == uncached["ids"]}
        rows.append({"figures": "text", "prompt": prompt, **texts, **equal})
    return {"rows": rows}


def recorded_page(cell: Cell, *, prompt: str, steps: int, peaks: bool = False) -> dict[str, Any]:
    """Return the page of a greedy generation that is recorded in both modes, and with `peaks` the peaks of the cell."""
    opened = open_engine(cell)
    engine = opened.engine
    assert isinstance(engine, LlamaEngine)
    rows = [peak_row(cell.but(kv_caching=on), opened) for on in (True, False)] if peaks else []
    recording = record(engine.model, engine.tokenizer, prompt, steps, temperature=0.0)
    return {"rows": rows, "page": page(recording, model=Path(cell.model).absolute().name)}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "machine": describe_machine,
    "cell": run_cell,
    "steps": time_steps,
    "cache_costs": cache_costs,
    "cache_quality": cache_quality,
    "cache_task": cache_task,
    "conversation": measure_conversation,
    "prompts": measure_prompts,
    "margin": margin,
    "texts": continued_texts,
    "page": recorded_page,
    "agreement": agreement,
}


def main(job_path: str, result_path: str) -> None:
    """Read a job from one file, do it, and write its result into another."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads(Path(job_path).read_text("utf-8"))
    cell = Cell(**job.pop("cell"))
    use_threads(cell.threads or torch.get_num_threads())  # every engine reads it; the run has chosen it for all jobs
    try:
        result: dict[str, Any] = {"done": JOBS[job.pop("kind")](cell, **job)}
    except ValueError as error:
        result = {"refused": str(error)}
    Path(result_path).write_text(json.dumps(result), "utf-8")


def _end_with_parent() -> None:
    """End the process once the pipe from the parent is closed."""
    os.read(0, 1)  # not sys.stdin, whose lock must be free when Python ends
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
