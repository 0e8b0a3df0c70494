"""One repetition of a cell, in this process: warm up, reset the statistics, run, look at what was seen.

Everything that a repetition tells stands in a CellRecord with one sample; `llama.bench.run.worker` gives each a
process of its own.
"""

import gc
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.engines import Engine, LlamaEngine, Run
from llama.bench.run.memory import Peak, PeakBytes, tensor_peak
from llama.bench.run.memory_ledger import (
    cache_bytes,
    cache_of,
    check_length,
    check_memory,
    layout_of,
    make_ledger,
    position_bytes,
    predict,
    workspace,
)
from llama.bench.run.models import settled
from llama.bench.run.validity import judge, notes
from llama.bench.schema import CellRecord, Ledger, Sample, Work, new_record
from llama.costs import forward_flops, forwards, parameters, step_bytes
from llama.host.cores import OtherLoad


def measure(
    cell: Cell,
    engine: Engine,
    *,
    device: torch.device,
    weights: str = "checkpoint",
    resident_before_model: int | None = None,
    device_bytes_before: int | None = None,
    trace: bool = True,
    stored: Mapping[str, int] | None = None,
) -> CellRecord:
    """Measure a cell once. Raises ValueError where it does not fit the model's limits or the memory.

    `stored`: the bytes that each matrix should take, where the weights are as a file has them. `trace` also measures
    the peak of tensors on a CPU, in a second, untimed run of the largest forwards.
    """
    cell = settled(cell, engine.encode)
    check_length(cell, engine.max_seq_len)
    if engine.args is not None:
        check_memory(cell, engine.args, device, held=engine.weights_bytes or 0, stored=stored)
    prompts = make_prompts(cell, engine)
    warm_up = engine.run(prompts, cell.output_len, kv_caching=cell.kv_caching, steps=min(2, cell.output_len))
    gc.collect()
    peak, load = Peak(device, device_bytes_before=device_bytes_before), OtherLoad()
    peak.start()
    load.start()
    run = engine.run(prompts, cell.output_len, kv_caching=cell.kv_caching)
    sample = make_sample(run, load.stop(), peak.stop())
    if trace and device.type == "cpu" and run.logits_bytes is not None:  # else what runs is not PyTorch's
        traced = tensor_peak(lambda: _largest_forwards(cell, engine, prompts, run))
        sample["peak_allocated_bytes"] = (engine.weights_bytes or 0) + traced
    record: CellRecord = {
        **new_record(cell),
        "path": run.path or engine.path,
        "samples": [sample],
        "weights_bytes": engine.weights_bytes,
        "cache_bytes": run.cache_bytes,
        "ids": run.ids,
        "text": engine.decode(run.ids[0]),
        "points": judge(cell, run, warm_up, max_seq_len=engine.max_seq_len, reset_seen=peak.reset_seen),
        "notes": notes(cell, weights=weights),
        "work": None
        if engine.args is None
        else make_work(cell, engine.args, weights=engine.weights_bytes, stored=stored),
    }
    if trace and isinstance(engine, LlamaEngine):
        record["ledger"] = _ledger(cell, engine, run, sample, device, resident_before_model, stored)
    return record


def make_prompts(cell: Cell, engine: Engine) -> list[list[int]]:
    """Return every row's prompt: random ids, or the cell's text."""
    if cell.text is not None:
        return [engine.encode(cell.text)] * cell.batch_size
    stream, size = torch.Generator().manual_seed(cell.seed), (cell.batch_size, cell.input_len)
    ids: list[list[int]] = torch.randint(engine.vocab_size, size, generator=stream).tolist()
    return ids


def make_sample(run: Run, other_load: float | None, memory: PeakBytes) -> Sample:
    """Return what the clock and the memory statistics said of a run."""
    times = [run.started, *run.token_times]
    return {
        "seconds": times[-1] - times[0],
        "first_token_seconds": times[1] - times[0],
        "step_seconds": [after - before for before, after in pairwise(times[1:])],
        "other_load_cores": other_load,
        **memory,
    }


def make_work(
    cell: Cell, args: ModelArgs, *, weights: int | None = None, stored: Mapping[str, int] | None = None
) -> Work:
    """Return what a cell asks of any machine: tokens, FLOPs and bytes that must be read, over all rows and forwards.

    `weights` are the bytes that a peer's weights take, which only it knows where it has quantized them; `stored` as in
    `measure`.
    """
    layout = layout_of(cell, stored)
    fed = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
    bound, per_position = cache_of(args, cell).bound, position_bytes(args, cell)

    def flops(start_pos: int, seqlen: int) -> int:
        scored = seqlen if cell.logits == "all" else 1
        return cell.batch_size * forward_flops(args, seqlen=seqlen, start_pos=start_pos, scored=scored)

    def read(start_pos: int, seqlen: int) -> int:
        whole = step_bytes(args, rows=cell.batch_size, context=0, itemsize=cell.itemsize, quantize=layout)
        if weights is not None and cell.quantize is not None and cell.layout is None:
            whole = whole * weights // (parameters(args) * cell.itemsize)
        kept = start_pos if bound is None else min(start_pos, bound)
        return whole + cell.batch_size * kept * per_position

    middle = fed[1:][len(fed[1:]) // 2] if len(fed) > 1 else fed[0]
    return {
        "token_forwards": cell.batch_size * sum(seqlen for _, seqlen in fed),
        "flops": sum(flops(*forward) for forward in fed),
        "bytes": sum(read(*forward) for forward in fed),
        "prefill_flops": flops(*fed[0]),
        "step_flops": flops(*middle),
        "step_bytes": read(*middle),
    }


def _ledger(
    cell: Cell,
    engine: LlamaEngine,
    run: Run,
    sample: Sample,
    device: torch.device,
    resident_before_model: int | None,
    stored: Mapping[str, int] | None,
) -> Ledger:
    """Return the ledger of a cell, and beside it, on a CPU, the resident memory of the process."""
    peak, resident = sample["peak_allocated_bytes"], None
    if device.type == "cpu" and resident_before_model is not None and sample["peak_resident_bytes"] is not None:
        resident = resident_before_model, sample["peak_resident_bytes"]
    measured_by = "max_memory_allocated" if device.type == "cuda" else "a trace of PyTorch's CPU allocator"
    head, embedding = engine.model.output.weight, engine.model.tok_embeddings.weight
    predicted = predict(engine.model.args, cell, workspace=workspace(device), stored=stored)
    at_end = cache_bytes(engine.model.args.share(cell.ranks), cell, cell.total_len - 1) if cell.kv_caching else 0
    return make_ledger(
        engine.model.args,
        cell,
        predicted,
        weights=engine.weights_bytes,
        head=0 if head is embedding else head.nbytes,
        cache=run.cache_bytes if predicted.cache == at_end else None,  # it was looked at in the last forward alone
        logits=run.logits_bytes,
        peak=peak,
        measured_by=measured_by if peak is not None else "not measured",
        resident=resident,
        stored=stored,
    )


def _largest_forwards(cell: Cell, engine: Engine, prompts: Sequence[list[int]], run: Run) -> None:
    """Run the forwards that make the peak: without the cache the last two, with a static one the first two."""
    if not cell.kv_caching and cell.output_len >= 2:
        nearly = [prompt + ids[: cell.output_len - 2] for prompt, ids in zip(prompts, run.ids, strict=True)]
        engine.run(nearly, 2, kv_caching=False)
    else:
        preallocated = cell.engine == "llama" and cell.kv_cache == "static"  # else the last forward may be the largest
        engine.run(prompts, cell.output_len, kv_caching=cell.kv_caching, steps=2 if preallocated else None)
