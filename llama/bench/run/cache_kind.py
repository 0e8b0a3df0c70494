"""The costs and the quality of a kind of cache: bytes and time by context, and how it changes what the model expects.

Each function is a job of `llama.bench.run.worker`: it loads the model with the cell's kind and returns rows. The model
without a cache, in one pass over the same text, is the reference.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.bench.cell import Cell
from llama.bench.run.engines import Source, forwards_by_runner, path_of
from llama.bench.run.kind_validity import judge_kind
from llama.bench.run.memory_ledger import check_memory
from llama.bench.run.models import find_model
from llama.bench.run.step_times import FED_AT_ONCE, bytes_of, filled_cache, inputs_digest, saves, size_of
from llama.bench.run.tasks import samples_of, task_row
from llama.bench.schema import Row
from llama.bench.texts import CORPUS, read_corpus
from llama.host.cores import OtherLoad
from llama.kv_cache import Cache, KVCache
from llama.model import Transformer
from llama.quality.intervals import means_of_blocks
from llama.quality.perplexity import compared, next_logits
from llama.streaming import encode_prompt
from llama.untrusted.files import TEXT_LIMIT, read_text

STEPS = 8  # timed at each context, behind one that warms up
OWN_TEXT = f"llama/bench/texts/{CORPUS.name}"  # the text of a plan that names no other file


def text_ids(source: Source, name: str) -> list[int]:
    """Return the tokens of the text that kinds are judged on: OWN_TEXT, or a file of UTF-8. Raises as `read_text`."""
    words = read_corpus() if name == OWN_TEXT else read_text(Path(name), limit=TEXT_LIMIT)
    return encode_prompt(source.tokenizer, words)


def cache_costs(cell: Cell, *, contexts: list[int]) -> dict[str, Any]:
    """Fill a cache up to each context, time the steps that reach it, and count its bytes."""
    source = find_model(cell)
    filled = cell.but(input_len=min(FED_AT_ONCE, max(contexts) - 1), output_len=1)
    check_memory(filled, source.args, source.device, stored=source.stored)
    model, ids = source.build(), encode_prompt(source.tokenizer, read_corpus())
    others, fast, rows = OtherLoad(), 0, list[Row]()
    others.start()
    for context in contexts:
        cache = filled_cache(model, context - STEPS - 1, ids, reserved=context)
        before = forwards_by_runner(model)
        rows.append(_last_steps(model, cache, context))
        fast += forwards_by_runner(model) - before
    path = path_of(model, fast=fast, all=len(contexts) * (STEPS + 1))
    return {"rows": [_facts(model, cache, path, others), *({**row, "path": path} for row in rows)]}


def predicted_kind(cell: Cell, plan: dict[str, Any]) -> list[Row]:
    """Return the rows of a kind that was not measured: the bytes that it predicts, of the text and of each context."""
    source = find_model(cell)
    cache = Cache.of(source.args, source.args.kv_cache)

    def row(figures: str, context: int, prompt: int, end: int) -> Row:
        sizes: dict[str, Any] = {"prompts": [prompt], "ends": [end], "reserved": (1, end), "itemsize": cell.itemsize}
        return {"figures": figures, "context": context, "predicted_cache_bytes": cache.predicted_bytes(**sizes)}

    length = plan["length"]
    text = row("quality", length, length - plan["tokens"], length - 1)
    steps = (row("step", context, context - STEPS - 1, context) for context in plan["contexts"])
    return [text, *({**step, "batch_size": 1, "kv_caching": True} for step in steps)]


def _facts(model: Transformer, cache: Cache, path: str, others: OtherLoad) -> Row:
    """Return the row of the cell: what a kind is, what computed it, and the load of other work meanwhile."""
    own: Row = {"figures": "cell", "error": None, "notes": [], "path": path, "other_load_cores": [others.stop()]}
    own |= {"lossless": all(layer.lossless for layer in cache.layers), "saves": saves(model, cache)}
    return {**own, "quantized": is_quantized(cache, model.dtype.itemsize)}


@torch.inference_mode()
def _last_steps(model: Transformer, cache: Cache, context: int) -> Row:
    """Return the row of the last STEPS steps of a text of `context` tokens, whose other positions are filled."""
    begin = context - STEPS - 1
    seconds = []
    for position in range(begin, context):
        fed = torch.tensor([[position % model.args.vocab_size]], device=model.device)
        started = time.perf_counter()
        int(model(fed, position, cache=cache, logits="last")[0, -1].argmax())  # on the host, as in the loop
        seconds.append(time.perf_counter() - started)
    row: Row = {"figures": "step", "batch_size": 1, "context": context, "kv_caching": True, "step_seconds": seconds[1:]}
    return {**row, **bytes_of(model, cache, begin, context)}


def is_quantized(cache: Cache, itemsize: int) -> bool:
    """Return whether a filled cache stores keys and values in fewer bits than the model's numbers."""
    return any(
        layer.position_bytes(itemsize) < KVCache.position_bytes(layer, itemsize)
        and any(stored.dtype.itemsize < itemsize for stored in layer.held().values())
        for layer in cache.layers
    )


@torch.inference_mode()
def cache_quality(cell: Cell, *, plan: dict[str, Any]) -> dict[str, Any]:
    """Compare what the model expects and writes at the end of a text of plan["length"] tokens, and find needles.

    A prompt in one pass precedes the scored tokens, so kinds that compress at the end of a prompt have done so. All
    figures of a row belong to one length; the kind is judged there only if it has dropped or compressed something.
    """
    source = find_model(cell)
    length, scored, greedy = plan["length"], plan["tokens"], plan["greedy_tokens"]
    uncached = cell.but(input_len=length - 1, output_len=1, kv_caching=False, logits="all")
    check_memory(uncached, source.args, source.device, stored=source.stored)
    model, text = source.build(), text_ids(source, plan["text"])
    others, ids = OtherLoad(), text[:length]
    others.start()
    prompt_len, reference = length - scored, _reference(model, ids[:-1], scored)
    cache, seconds, before = model.new_cache(rows=1, length=length - 1), list[float](), forwards_by_runner(model)
    with closing(next_logits(model, ids, prompt_len=prompt_len, cache=cache)) as steps:
        found = compared(reference.cpu(), _timed(steps, seconds), ids, prompt_len=prompt_len)
    path = path_of(model, fast=forwards_by_runner(model) - before, all=scored)
    row: Row = {"figures": "quality", "context": length, "path": path, "step_seconds": seconds[1:][-STEPS:]}
    row |= {"tokens": found.tokens, "mean_kl": found.mean_kl, "top1_agreement": found.top1_agreement}
    row |= {"nll": found.other_nll, "digest": inputs_digest(model, ids)}
    row |= {"kls": means_of_blocks(found.kls), "nlls": means_of_blocks(found.other_nlls)}
    if not math.isfinite(row["mean_kl"] + row["nll"]):
        raise ValueError(f"kv_cache={cell.kv_cache}: the model gives tokens of the text a probability of 0, or NaN")
    size = size_of(model, cache, prompt_len, length - 1)
    row |= {**size, **(greedy_divergence(model, ids[: length - greedy], greedy) if greedy else {})}
    own, bytes_due = _facts(model, cache, path, others), size["predicted_cache_bytes"]
    checks = judge_kind(model, cache, ids[:-1], prompt=prompt_len, predicted=bytes_due, quantized=own["quantized"])
    return {"rows": [own, row, *checks, *_needle_rows(model, source, plan, cell.seed)]}


def _reference(model: Transformer, ids: Sequence[int], scored: int) -> Tensor:
    """Return the logits of the last `scored` positions, (scored, vocab), without a cache, in one pass."""
    logits: Tensor = model.with_kv_caching(False)(torch.tensor([ids], device=model.device))[0, -scored:]
    return logits.clone()  # not a view, so that those of the other positions are freed


def _timed(steps: Iterator[Tensor], seconds: list[float]) -> Iterator[Tensor]:
    """Yield what `steps` yields on the host, and append how long each took."""
    started = time.perf_counter()
    for one in steps:
        host = one.cpu()
        seconds.append(time.perf_counter() - started)
        yield host
        started = time.perf_counter()


def greedy_divergence(model: Transformer, prompt: Sequence[int], count: int) -> Row:
    """Write greedily through the model's kind of cache, and return the first token that the model without one changes.

    Up to there both texts are the same, so one pass without a cache over the text finds it.
    """
    ids, _ = model.with_kv_caching(True).generate_tokens([list(prompt)], count, temperature=0.0)
    written = ids[0]
    row: Row = {"greedy_tokens": len(written), "divergence_token": None}
    top = _reference(model, [*prompt, *written[:-1]], count).topk(2)
    for token, (best, _) in enumerate(top.indices.tolist()):
        if best != written[token]:
            values = top.values[token].tolist()
            row |= {"divergence_token": token, "uncached_id": best, "cached_id": written[token]}
            row["margin"] = values[0] - values[1]
            break
    return row


def _needle_rows(model: Transformer, source: Source, plan: dict[str, Any], seed: int) -> list[Row]:
    """Return a row for the needles of each length."""
    plans = [
        {"task": "needle", "context": length, "samples": plan["needles"], "seed": seed}
        for length in plan["needle_lengths"]
    ]
    return [task_row(model, source, one, samples_of(source, one)) for one in plans]
