"""Holds every fast path beside the plain one, before anything is timed."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.bench.gpu.rows import Check
from llama.bench.gpu.run import (
    SMALL,
    WORDS,
    Run,
    cache_words,
    fast_step,
    in_one_line,
    prompts_of,
    random_model,
    settle,
    stepping,
)
from llama.bench.gpu.times import filled_buffers, one_step
from llama.exact import slowdown
from llama.fast.graph_ops import PYTORCH, GraphOps
from llama.fast.graph_runner import GraphRunner
from llama.model import Transformer

logger = logging.getLogger(__name__)

# What ids are compared on: no size is a multiple of a kernel's tile, and three queries share a key.
ODD = ModelArgs(dim=132, n_heads=6, n_kv_heads=2, head_dim=24, ffn_dim=200, vocab_size=1003, **SMALL)
KERNELS = ("qkv", "attend_project", "gate", "project", "head", "advance")
ROWS = (1, 3, 17)  # one row, several, and more than the kernels take
# How far a kernel may be from float64, in norm. float32 sums of 10,000 terms are off by some 1e-6; a bf16 result is
# rounded by 2e-3, and what it is made of once or twice before.
KERNEL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# How far log-probabilities may be apart: of logits of about 4, which 16 layers in bf16 move by some hundredths.
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def checks(run: Run) -> None:
    """Hold every fast path beside the plain one."""
    odd = random_model(ODD, torch.float32, run.device)
    for rows in ROWS:
        without = greedy(odd, None, rows, kv_caching=False)
        for way, kv_caching in (("plain", True), ("fast", True), ("fast", False)):
            step = fast_step(run.ops, run.device) if way == "fast" else None
            name = f"greedy ids in fp32, batch {rows}, ragged: {way}, {cache_words(kv_caching)}"
            tried(run, name, partial(same_ids, odd, step, rows, kv_caching, without))
    of_model(run, run.model)
    for dtype in WORDS:
        if dtype != run.dtype:
            of_model(run, random_model(run.args, dtype, run.device))
            settle(run.device)


def of_model(run: Run, model: Transformer) -> None:
    """Check what is timed, in the model's dtype."""
    where = f"{run.options.model} in {WORDS[model.norm.weight.dtype]}"
    if run.ops == PYTORCH:
        why = "no fused kernels here: PyTorch's own run instead"
        run.report.checks += [Check(f"{what}, {where}", None, why) for what in ("each kernel", "fused logits")]
    else:
        tried(run, f"each kernel, {where}", partial(each_kernel, model, run.ops, run.options.input_len))
        tried(run, f"fused logits, {where}", partial(fused_logits, model, run.ops))
    tried(run, f"log-probabilities by graphs, {where}", partial(logprobs_agree, model, run))
    tried(run, f"exact mode, {where}", partial(exact_mode, model))


def tried(run: Run, name: str, claim: Callable[[], tuple[bool, str]]) -> None:
    """Note what comes of a check: one that raises has failed, and those after it are still run."""
    try:
        found = claim() if run.left > 0 else (None, "out of time")
    except Exception as error:  # whatever a kernel, its compiler or a driver may raise
        logger.warning("%s", name, exc_info=True)
        found = False, in_one_line(error)
    run.report.checks.append(Check(name, *found))


@torch.inference_mode()
def each_kernel(model: Transformer, ops: GraphOps, length: int) -> tuple[bool, str]:
    """Compare the kernels of whole steps with their twins in float64, at ragged positions, nan past them."""
    worst: dict[str, float] = {}
    for rows in (1, min(8, ops.most_rows or 8)):
        buffers = filled_buffers(model, rows, length)
        buffers.positions.copy_((torch.arange(rows) + 1) * length // rows - 1)
        past = torch.arange(buffers.slots, device=model.device) > buffers.positions[:, None]  # (rows, slots)
        for kept in buffers.cache:
            for buffer in kept:
                buffer[:rows].masked_fill_(past[..., None, None], torch.nan)
        one_step(model, buffers, beside_twins(ops, worst))
    right = all(off <= KERNEL_TOLERANCE[model.norm.weight.dtype] for off in worst.values())
    return right, "off from float64 by " + ", ".join(f"{name} {off:.1e}" for name, off in worst.items())


def beside_twins(ops: GraphOps, worst: dict[str, float]) -> GraphOps:
    """Return the kernels, each of which notes in `worst` how far what it makes, and writes, is from its twin's."""

    def noting(name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            before, copies = [widened(each) for each in given], [widened(each) for each in given]
            made, wanted = getattr(ops, name)(*given), getattr(PYTORCH, name)(*copies)
            written = [each for each in zip(given, copies, before, strict=True) if isinstance(each[0], Tensor)]
            off = [distance(ours, theirs, was) for ours, theirs, was in written]
            if made is not None:  # the head's tiles are its own: what is made of them shows in the ids
                first, first_wanted = (each[0] if isinstance(each, tuple) else each for each in (made, wanted))
                off.append(distance(first, first_wanted, torch.zeros_like(first_wanted)))
            worst[name] = max(worst.get(name, 0.0), *off)
            return made

        return call

    return ops._replace(**{name: noting(name) for name in KERNELS})  # type: ignore[arg-type]


def widened(given: Any) -> Any:
    """Return a copy in 64 bits of a tensor; anything else as it is."""
    if not isinstance(given, Tensor):
        return given
    return given.to(torch.float64 if given.is_floating_point() else torch.int64, copy=True)


def distance(ours: Tensor, theirs: Tensor, before: Tensor) -> float:
    """Return how far what became of `before` is, in norm, from what should have; infinity where nan came or went."""
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    ours, theirs, before = (each.double().nan_to_num() for each in (ours, theirs, before))
    return float((ours - theirs).norm() / (theirs - before).norm().clamp(min=1e-30))


def fused_logits(model: Transformer, ops: GraphOps) -> tuple[bool, str]:
    GraphRunner(ops).check(model)  # raises Unsupported
    return True, "as near to the modules' as the fast step asks for"


def logprobs_agree(model: Transformer, run: Run) -> tuple[bool, str]:
    """Compare log-probabilities of greedy generations up to where their ids part; in float32 they may not part."""
    words, right = [], True
    for kv_caching in (True, False):
        made = []
        for step in (None, fast_step(run.ops, run.device)):
            with stepping(model, step):
                prompts = prompts_of(run.args, [run.options.input_len])
                ids, logprobs = model.generate_tokens(
                    prompts, run.options.output_len, temperature=0.0, logprobs=True, kv_caching=kv_caching
                )
            assert logprobs is not None
            made.append((ids[0], torch.tensor(logprobs[0])))
        (wanted, theirs), (chosen, ours) = made
        apart_at = (at for at, (one, other) in enumerate(zip(chosen, wanted, strict=True)) if one != other)
        same = next(apart_at, len(wanted))
        apart = (ours - theirs)[: same + 1].abs().max().item()
        dtype = model.norm.weight.dtype
        right &= apart <= LOGPROB_TOLERANCE[dtype] and (same == len(wanted) or dtype != torch.float32)
        words.append(f"{cache_words(kv_caching)} {apart:.1e} apart, {same} of {len(wanted)} ids the same")
    return right, "; ".join(words)


def exact_mode(model: Transformer) -> tuple[bool, str]:
    try:
        model.exact = True  # compares the model with itself; ValueError says where a bit differs
    except ValueError as difference:
        return False, str(difference)
    model.exact = False
    prompt, step = slowdown(model)
    return True, f"same bits however they are computed; a prompt takes {prompt:.1f} times as long, a step {step:.1f}"


def greedy(model: Transformer, step: GraphRunner | None, rows: int, *, kv_caching: bool) -> list[list[int]]:
    prompts = prompts_of(model.args, [5 + 7 * row % 40 for row in range(rows)])
    with stepping(model, step):
        return model.generate_tokens(prompts, 20, temperature=0.0, kv_caching=kv_caching)[0]


def same_ids(
    model: Transformer, step: GraphRunner | None, rows: int, kv_caching: bool, wanted: list[list[int]]
) -> tuple[bool, str]:
    made = greedy(model, step, rows, kv_caching=kv_caching)
    pairs = [pair for ours, theirs in zip(made, wanted, strict=True) for pair in zip(ours, theirs, strict=True)]
    same = sum(ours == theirs for ours, theirs in pairs)
    return made == wanted, f"{same} of {len(pairs)} ids are those of the plain path without the cache"
