"""One repetition of a cell in this process: warm up, reset the statistics, run, and return what was observed as rows.

`llama.bench.run.worker` runs each repetition in a process of its own.
"""

import gc
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.engines import Engine, LlamaEngine, Run, Source
from llama.bench.run.memory import peaks, reset_peaks, tensor_peak
from llama.bench.run.memory_ledger import (
    cache_of,
    layout_of,
    make_ledger,
    predict,
    reserved_cache_bytes,
    workspace,
)
from llama.bench.run.models import Opened
from llama.bench.run.validity import judge, notes
from llama.bench.schema import Row
from llama.costs import forward_flops, forwards, parameters, step_bytes
from llama.host.cores import OtherLoad


def measure(cell: Cell, opened: Opened, *, trace: bool = True) -> list[Row]:
    """Measure a cell once and return its row, its checks, and, with `trace`, its memory ledger.

    `trace` also measures the peak of tensors on a CPU, in a second, untimed run of the largest forwards.
    """
    engine, device = opened.engine, torch.device(cell.device)
    prompts = make_prompts(cell, engine)
    # On a GPU, a later step may be the first of its shape, which is recorded as a graph.
    steps = cell.output_len if device.type == "cuda" and cell.fast else min(2, cell.output_len)
    warm_up = engine.run(prompts, cell.output_len, kv_caching=cell.kv_caching, steps=steps)
    gc.collect()
    reset_seen, load = reset_peaks(device), OtherLoad()
    load.start()
    run = engine.run(prompts, cell.output_len, kv_caching=cell.kv_caching)
    row: Row = {"figures": "cell", "error": None, "path": run.path or engine.path, "other_load_cores": [load.stop()]}
    row |= {name: [nbytes] for name, nbytes in peaks(device).items()}
    times = [run.started, *run.token_times]
    row |= {"seconds": [times[-1] - times[0]], "first_token_seconds": [times[1] - times[0]]}
    row["step_seconds"] = [_later_seconds(cell, run)]
    if trace and device.type == "cpu" and run.logits_bytes is not None:  # otherwise the engine is not PyTorch's
        traced = tensor_peak(lambda: _largest_forwards(cell, engine, prompts, run.ids))
        row["tensor_peak_bytes"] = [engine.weights_bytes + traced]
    row["notes"] = notes(cell, weights=opened.facts["weights"])
    row |= {"weights_bytes": engine.weights_bytes, "cache_bytes": run.cache_bytes}
    row |= {"ids": run.ids, "text": engine.decode(run.ids[0])}
    work = make_work(cell, engine.args, weights=engine.weights_bytes, stored=opened.stored)
    row |= _guesses(cell, run, work["token_forwards"]) if cell.speculate else work
    rows = [row, *judge(cell, run, warm_up, max_seq_len=engine.args.max_seq_len, reset_seen=reset_seen)]
    if trace and isinstance(engine, LlamaEngine) and not cell.speculate:
        rows += _ledger(cell, opened, engine, run, row)
    return rows


def _later_seconds(cell: Cell, run: Run) -> list[float]:
    """Return the seconds of every later token; with guesses a call makes several, so each has the mean."""
    calls = [after - before for before, after in pairwise(run.token_times)]
    return [sum(calls) / (cell.output_len - 1)] * (cell.output_len - 1) if cell.speculate and calls else calls


def _guesses(cell: Cell, run: Run, token_forwards: int) -> Row:
    """Return the guesses of a cell, and its tokens fed; without guesses they would be `token_forwards`.

    Other work is left out: it depends on the widths that the clock has chosen.
    """
    accepted = run.accepted(cell.output_len)
    fed = token_forwards + run.proposed - accepted
    return {"token_forwards": fed, "proposed": [run.proposed], "accepted": [accepted]}


def predicted_memory(cell: Cell, source: Source) -> list[Row]:
    """Return the memory ledger of a cell of ours that was not measured."""
    predicted = predict(source.args, cell, workspace=workspace(source.device), stored=source.stored)
    return make_ledger(source.args, cell, predicted)


def peak_row(cell: Cell, source: Source | Opened) -> Row:
    """Return the row of a cell's peak: predicted, and with an opened engine also measured by its largest forwards."""
    device, peak = torch.device(cell.device), None
    if isinstance(source, Opened):
        engine, args = source.engine, source.engine.args
        prompts, new = make_prompts(cell, engine), [[0] * cell.output_len] * cell.batch_size  # of any ids
        reset_peaks(device)
        traced = tensor_peak(lambda: _largest_forwards(cell, engine, prompts, new))
        peak = engine.weights_bytes + traced if device.type == "cpu" else peaks(device).get("tensor_peak_bytes")
    else:
        args = source.args
    predicted = predict(args, cell, workspace=workspace(device), stored=source.stored).total
    row: Row = {"figures": "peak", "batch_size": cell.batch_size, "kv_caching": cell.kv_caching}
    return {**row, "predicted_bytes": predicted, "measured_bytes": peak}


def make_prompts(cell: Cell, engine: Engine) -> list[list[int]]:
    """Return every row's prompt: random ids, or the cell's text."""
    if cell.text is not None:
        return [engine.encode(cell.text)] * cell.batch_size
    stream, size = torch.Generator().manual_seed(cell.seed), (cell.batch_size, cell.input_len)
    ids: list[list[int]] = torch.randint(engine.args.vocab_size, size, generator=stream).tolist()
    return ids


def make_work(
    cell: Cell, args: ModelArgs, *, weights: int | None = None, stored: Mapping[str, int] | None = None
) -> Row:
    """Return the work of a cell on any machine: tokens, FLOPs and bytes that must be read, over all rows and forwards.

    `weights`: the bytes of a peer's weights, which only the peer knows if it has quantized them. `stored` as in
    `layout_of`.
    """
    layout = layout_of(cell, stored)
    fed = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
    cache = cache_of(args)
    bound, per_position = cache.bound, cache.position_bytes(cell.cache_itemsize)

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
        "read_bytes": sum(read(*forward) for forward in fed),
        "prefill_flops": flops(*fed[0]),
        "step_flops": flops(*middle),
        "step_read_bytes": read(*middle),
    }


def _ledger(cell: Cell, opened: Opened, engine: LlamaEngine, run: Run, row: Row) -> list[Row]:
    """Return the ledger of a cell, with the resident memory of the process on a CPU."""
    device = torch.device(cell.device)
    weight, embedding = engine.model.output.weight, engine.model.tok_embeddings.weight
    head = 0 if weight is embedding else weight.nbytes
    predicted = predict(engine.args, cell, workspace=workspace(device), stored=opened.stored)
    measured = {"weights": engine.weights_bytes - head, "tied head": head, "head": head, "logits": run.logits_bytes}
    if predicted.cache == _cache_at_end(engine.args, cell):  # the cache is measured at the last forward alone
        measured["KV cache"] = run.cache_bytes
    measured_by = "not measured"
    if peaks := row.get("tensor_peak_bytes"):
        measured["peak"] = peaks[0]
        measured_by = "max_memory_allocated" if device.type == "cuda" else "a trace of PyTorch's CPU allocator"
    rows = make_ledger(engine.args, cell, predicted, measured, measured_by=measured_by)
    before, residents = opened.resident_before, row.get("resident_peak_bytes")
    if device.type == "cpu" and before is not None and residents:
        rows.append({"figures": "memory", "name": "resident", "measured_bytes": residents[0], "before_bytes": before})
    return rows


def _cache_at_end(args: ModelArgs, cell: Cell) -> int:
    return reserved_cache_bytes(args.share(cell.ranks), cell, cell.total_len - 1) if cell.kv_caching else 0


def _largest_forwards(cell: Cell, engine: Engine, prompts: Sequence[list[int]], new: Sequence[Sequence[int]]) -> None:
    """Run the forwards of the peak: the last two without the cache, the first two with a static one."""
    if not cell.kv_caching and cell.output_len >= 2:
        nearly = [[*prompt, *ids[: cell.output_len - 2]] for prompt, ids in zip(prompts, new, strict=True)]
        engine.run(nearly, 2, kv_caching=False)
    else:
        # Otherwise the last forward may be the largest, or one that verifies guesses.
        second = cell.engine == "llama" and cell.kv_cache == "static" and not cell.speculate
        engine.run(prompts, cell.output_len, kv_caching=cell.kv_caching, steps=2 if second else None)
