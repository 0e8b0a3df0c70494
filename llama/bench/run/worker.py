"""A process that measures one thing and ends: python -m llama.bench.run.worker JOB RESULT, both files of JSON.

Nothing of one measurement can reach the next: no memory, no cache, no warmth. What a job cannot do for a reason that a
user can mend comes back as words; anything else ends the process, and `llama.bench.run.jobs` tells of it.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llama.bench.cell import Cell
from llama.bench.gpu.experiments import EXPERIMENTS
from llama.bench.run.agreement import most_likely
from llama.bench.run.cache_kind import cache_costs, cache_quality, cache_reference
from llama.bench.run.conversation import measure_conversation, measure_prompts
from llama.bench.run.engines import LlamaEngine
from llama.bench.run.measure import make_prompts, measure
from llama.bench.run.memory import device_bytes_used
from llama.bench.run.memory_ledger import check_memory, position_bytes
from llama.bench.run.models import find_model
from llama.bench.run.opening import open_engine
from llama.bench.run.step_times import cache_sizes, step_times
from llama.bench.schema import StepTimes
from llama.exact import slowdown_words
from llama.host.machine import DTYPES, ceilings, environment
from llama.watch.page import page
from llama.watch.record import record


def run_cell(cell: Cell, *, trace: bool) -> dict[str, Any]:
    """Measure a cell once."""
    device = torch.device(cell.device)
    device_before = device_bytes_used(device)
    with _heard() as warnings:
        engine, facts, before, stored = open_engine(cell)
        record = measure(
            cell,
            engine,
            device=device,
            weights=facts["weights"],
            resident_before_model=before,
            device_bytes_before=device_before,
            trace=trace,
            stored=stored,
        )
    record["notes"] += warnings
    if cell.exact and trace and isinstance(engine, LlamaEngine):
        record["notes"].append(slowdown_words(engine.model))
    done = {"record": record, "model": facts, "environment": environment(device)}
    # The machine's ceilings are seen next to every repetition; those of one process say nothing of several.
    return done if cell.ranks > 1 else {**done, "ceilings": ceilings(device, DTYPES[cell.dtype], seconds=1.0)}


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Keep what the library warns of meanwhile, such as why the fast step does not serve."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("llama")
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)


def describe(cell: Cell) -> dict[str, Any]:
    """Return what machine this is and can do, with no model in memory."""
    device = torch.device(cell.device)
    return {"environment": environment(device), "ceilings": ceilings(device, DTYPES[cell.dtype])}


def calibrate(cell: Cell) -> dict[str, Any]:
    """Time the pieces that a prediction of all cells is made of."""
    started = time.perf_counter()
    engine, facts, *_ = open_engine(cell)
    loaded = time.perf_counter() - started
    prompts = make_prompts(cell.but(batch_size=1), engine)
    engine.run(prompts, 2, kv_caching=True)
    runs = [engine.run(prompts, 2, kv_caching=True) for _ in range(3)]  # one alone may have met other work
    return {
        "model": facts,
        "input_len": len(prompts[0]),
        "max_seq_len": engine.max_seq_len,
        "load_seconds": loaded,
        "prefill_seconds": min(run.token_times[0] - run.started for run in runs),
        "step_seconds": min(run.token_times[1] - run.token_times[0] for run in runs),
    }


def time_steps(cell: Cell, *, contexts: list[int]) -> dict[str, Any]:
    """Time a step of the cell's batch at each context, with the cache and without.

    Beside it stands what a cached step reads for each position: the bytes of its keys and values.
    """
    source = find_model(cell)
    longest = cell.but(input_len=max(contexts), output_len=1)
    for kv_caching in (True, False):
        modes = longest.but(kv_caching=kv_caching)
        check_memory(modes, source.args, source.device, held=0, stored=source.stored)
    model = source.build()
    steps: list[StepTimes] = []
    for kv_caching in (True, False):
        steps += step_times(model, cell.batch_size, contexts, kv_caching=kv_caching, logits=cell.logits)
    return {"steps": steps, "position_bytes": cell.batch_size * position_bytes(source.args, cell)}


def size_caches(cell: Cell, *, lengths: list[int]) -> dict[str, Any]:
    """Take caches of these lengths."""
    return {"sizes": cache_sizes(find_model(cell).build(), lengths)}


def margin(cell: Cell, *, row: int, ids: list[int]) -> dict[str, Any]:
    """Return the gap between the two largest logits that follow a row's prompt and these new ids, without a cache."""
    source = find_model(cell)
    engine = LlamaEngine(source.build(), source.tokenizer)
    prompts = make_prompts(cell, engine)
    with torch.inference_mode():
        engine.model.kv_caching = False
        tokens = torch.tensor([prompts[row] + ids], device=engine.model.device)
        first, second = engine.model(tokens, 0, logits="last")[0, -1].topk(2).values.tolist()
    return {"margin": first - second}


def watch(cell: Cell, *, prompt: str, steps: int) -> dict[str, Any]:
    """Record a greedy generation in both modes, and return the page that shows it."""
    source = find_model(cell)
    recording = record(source.build(), source.tokenizer, prompt, steps, temperature=0.0)
    return {"page": page(recording, model=Path(cell.model).absolute().name)}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "machine": describe,
    "cell": run_cell,
    "calibrate": calibrate,
    "steps": time_steps,
    "caches": size_caches,
    "cache_costs": cache_costs,
    "cache_reference": cache_reference,
    "cache_quality": cache_quality,
    "conversation": measure_conversation,
    "prompts": measure_prompts,
    "margin": margin,
    "most_likely": most_likely,
    "watch": watch,
    **EXPERIMENTS,  # type: ignore[dict-item]
}


def main(job_path: str, result_path: str) -> None:
    """Do the job that stands in one file and write what came of it into another."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads(Path(job_path).read_text("utf-8"))
    cell = Cell(**job.pop("cell"))
    torch.set_num_threads(cell.threads or torch.get_num_threads())  # which every engine asks
    try:
        result: dict[str, Any] = {"done": JOBS[job.pop("kind")](cell, **job)}
    except ValueError as error:
        result = {"refused": str(error)}
    Path(result_path).write_text(json.dumps(result), "utf-8")


def _end_with_parent() -> None:
    """End the process once the pipe from the parent is closed: no one waits for the result then."""
    os.read(0, 1)  # not sys.stdin, whose lock must be free when Python ends
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
