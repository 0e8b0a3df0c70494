"""What a kind of cache costs: bytes and time by context, and how far off the full one what the model expects is.

Each function is a job of `llama.bench.run.worker`: it loads the model with the cell's kind, and returns what goes into
JSON. The full cache's logits for all positions of the text are written to a file once, which every other kind is held
against: 400 MB for 2,048 tokens and a vocabulary of 49,152.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.bench.cell import Cell
from llama.bench.run.engines import forwards_by_runner, path_of
from llama.bench.run.filling import CHUNK, cache_size, filled_cache
from llama.bench.run.memory_ledger import check_memory
from llama.bench.run.models import find_model
from llama.bench.run.needle import needles
from llama.bench.run.step_times import cache_sizes
from llama.bench.schema import CacheQuality, CacheSize, CachesPlan, NeedleRecall, Parting, StepTimes
from llama.bench.statistics import percentiles
from llama.bench.texts import read_text
from llama.costs import kv_bytes
from llama.host.cores import OtherLoad
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.quality.perplexity import compared, expected, log_probabilities, next_logits
from llama.streaming import TextCodec, encode_prompt

STEPS = 8  # timed at each context, behind one that warms up
LONG = 2**20  # positions of a text at which every kind that saves bytes does so


def cache_costs(cell: Cell, *, contexts: list[int]) -> dict[str, Any]:
    """Fill the caches up to each context, time the steps that reach it, and count the bytes that are held there."""
    source = find_model(cell)
    longest = max(contexts)
    filled = cell.but(input_len=min(CHUNK, longest - 1), output_len=1)
    check_memory(filled, source.args, source.device, held=0, stored=source.stored)
    started = time.perf_counter()
    model = source.build()
    loaded = time.perf_counter() - started
    before, others = forwards_by_runner(model), OtherLoad()
    sizes: list[CacheSize] = []
    steps: list[StepTimes] = []
    others.start()
    for context in contexts:
        seconds, size = _steps_up_to(model, context)
        steps.append({"batch_size": 1, "context": context, "kv_caching": True, "seconds": percentiles(seconds)})
        sizes.append(size)
    empty, itemsize = model.new_cache(), model.dtype.itemsize
    layers, own = empty.layers, model.share
    whole = len(layers) * kv_bytes(1, own.n_kv_heads, own.head_dim, positions=1, itemsize=itemsize)
    long = empty.predicted_bytes(prompts=[LONG], ends=[LONG], reserved=(0, 0), itemsize=itemsize)
    return {
        "lossless": all(layer.lossless for layer in layers),
        "saves": long < LONG * whole,
        "widens": empty.position_bytes(itemsize) < whole,
        "path": path_of(model, fast=forwards_by_runner(model) - before, all=len(contexts) * (STEPS + 1)),
        "bytes": sizes,
        "steps": steps,
        "load_seconds": loaded,
        "other_load_cores": others.stop(),
    }


@torch.inference_mode()
def _steps_up_to(model: Transformer, context: int) -> tuple[list[float], CacheSize]:
    """Return the seconds of the last STEPS steps of a text of `context` tokens, and the bytes that are held then.

    Its other positions are filled in.
    """
    begin = context - STEPS - 1
    cache = filled_cache(model, begin, reserved=context)
    seconds = []
    for position in range(begin, context):
        fed = torch.tensor([[position % model.args.vocab_size]], device=model.device)
        started = time.perf_counter()
        int(model(fed, position, cache=cache, logits="last")[0, -1].argmax())  # on the host, as the loop has it
        seconds.append(time.perf_counter() - started)
    return seconds[1:], cache_size(model, cache, context)


def cache_reference(cell: Cell, *, plan: CachesPlan, logits: str) -> dict[str, Any]:
    """Measure the full cache's quality, write its logits into the file `logits`, and return its greedy text, too."""
    model, tokenizer, ids = _opened(cell, plan)
    kept = _logits_file(Path(logits), len(ids) - plan["prompt_len"], model, new=True)
    nll, before = 0.0, forwards_by_runner(model)
    cache, sizes = model.new_cache(rows=1, length=len(ids) - 1), list[CacheSize]()
    with closing(next_logits(model, ids, prompt_len=plan["prompt_len"], cache=cache)) as steps:
        scored = _noting_size(model, cache, steps, len(ids) - 1, sizes)
        for place, (scores, token) in enumerate(zip(scored, ids[plan["prompt_len"] :], strict=True)):
            kept[place] = scores
            nll -= float(log_probabilities(scores)[token])
    nll /= len(kept)
    path = path_of(model, fast=forwards_by_runner(model) - before, all=len(kept))
    texts, margins, size = greedy(model, ids[: plan["prompt_len"]], plan["greedy_tokens"])
    quality: CacheQuality = {
        "path": path,
        "bytes": [size, *sizes, *cache_sizes(model, plan["needle_lengths"])],
        "tokens": len(kept),
        "mean_kl": 0.0,
        "top1_agreement": 1.0,
        "reference_nll": nll,
        "nll": nll,
        "greedy_tokens": len(texts),
        "parting": None,
        "needles": _recalled(model, tokenizer, plan),
    }
    return {"quality": quality, "greedy": {"ids": texts, "margins": margins}}


def cache_quality(cell: Cell, *, plan: CachesPlan, logits: str, greedy_text: dict[str, Any]) -> dict[str, Any]:
    """Compare the cell's kind with the full cache, whose logits stand in a file, on the same text."""
    model, tokenizer, ids = _opened(cell, plan)
    kept = _logits_file(Path(logits), len(ids) - plan["prompt_len"], model, new=False)
    ours, before = (log_probabilities(scores) for scores in kept), forwards_by_runner(model)
    cache, sizes = model.new_cache(rows=1, length=len(ids) - 1), list[CacheSize]()
    with closing(expected(model, ids, prompt_len=plan["prompt_len"], cache=cache)) as steps:
        theirs = (logprobs.cpu() for logprobs in _noting_size(model, cache, steps, len(ids) - 1, sizes))
        found = compared(ours, theirs, ids, prompt_len=plan["prompt_len"])
    path = path_of(model, fast=forwards_by_runner(model) - before, all=found.tokens)
    text, _, size = greedy(model, ids[: plan["prompt_len"]], plan["greedy_tokens"])
    quality: CacheQuality = {
        "path": path,
        "bytes": [size, *sizes, *cache_sizes(model, plan["needle_lengths"])],
        "tokens": found.tokens,
        "mean_kl": found.mean_kl,
        "top1_agreement": found.top1_agreement,
        "reference_nll": found.reference_nll,
        "nll": found.other_nll,
        "greedy_tokens": len(text),
        "parting": parting(greedy_text["ids"], text, greedy_text["margins"]),
        "needles": _recalled(model, tokenizer, plan),
    }
    if not math.isfinite(quality["mean_kl"] + quality["nll"]):
        raise ValueError(f"kv_cache={cell.kv_cache}: the model gives what the text says a probability of 0, or none")
    return {"quality": quality}


def _opened(cell: Cell, plan: CachesPlan) -> tuple[Transformer, TextCodec, list[int]]:
    """Return the model with the cell's kind, its tokenizer, and the ids of the text."""
    source = find_model(cell)
    last = plan["prompt_len"] + plan["tokens"]
    scored = cell.but(input_len=plan["prompt_len"], output_len=plan["tokens"])
    check_memory(scored, source.args, source.device, held=0, stored=source.stored)
    model = source.build()
    return model, source.tokenizer, encode_prompt(source.tokenizer, read_text())[:last]


def _logits_file(path: Path, tokens: int, model: Transformer, *, new: bool) -> Tensor:
    """Return the tensor in a file, (tokens, vocab), in the dtype of the model's logits; what is written stays there."""
    dtype = torch.promote_types(model.norm.weight.dtype, torch.float32)
    size = tokens * model.args.vocab_size
    held = torch.from_file(str(path), shared=new, size=size, dtype=dtype, device="cpu")
    return held.view(tokens, model.args.vocab_size)


@torch.inference_mode()
def greedy(model: Transformer, prompt: Sequence[int], count: int) -> tuple[list[int], list[float], CacheSize]:
    """Return the `count` most likely ids behind a prompt, the gap of each to the runner-up, and the bytes then."""
    ids, gaps = [], []
    fed, start = torch.tensor([list(prompt)], device=model.device), 0
    cache = model.new_cache(rows=1, length=len(prompt) + count - 1)
    for _ in range(count):
        top = model(fed, start, cache=cache, logits="last")[0, -1].topk(2)
        ids.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        fed, start = top.indices[None, :1], start + fed.shape[1]
    return ids, gaps, cache_size(model, cache, start)


def parting(full: Sequence[int], kind: Sequence[int], margins: Sequence[float]) -> Parting | None:
    """Return the first token at which two texts differ, None where none does; `margins` are those of `full`."""
    for token, (full_id, kind_id, margin) in enumerate(zip(full, kind, margins, strict=True)):
        if full_id != kind_id:
            return {"token": token, "full_id": full_id, "kind_id": kind_id, "margin": margin}
    return None


def _noting_size(
    model: Transformer, cache: Cache, steps: Iterable[Tensor], length: int, sizes: list[CacheSize]
) -> Iterator[Tensor]:
    """Yield what `steps` yields; then add to `sizes` what the cache holds, which was fed `length` tokens."""
    yield from steps
    sizes.append(cache_size(model, cache, length))


def _recalled(model: Transformer, tokenizer: TextCodec, plan: CachesPlan) -> list[NeedleRecall]:
    lengths, seeds = plan["needle_lengths"], range(plan["needle_seeds"])
    found: dict[int, list[bool]] = {length: [] for length in lengths}
    for one in needles(model, tokenizer, read_text(), lengths=lengths, seeds=seeds):
        found[one.length].append(one.found)
    return [{"length": length, "tries": len(those), "found": sum(those)} for length, those in found.items() if those]
