"""Compares every kernel and every fast path of a GPU with its plain twin, which defines the results."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypedDict

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.gpu.kernels import layer_for, model_for, uneven_model, ways_of
from llama.fast.graph_ops import GraphOps
from llama.fast.graph_runner import GraphRunner
from llama.fast.graph_trial import try_prompts, try_steps
from llama.model import Transformer

logger = logging.getLogger(__name__)

# For the comparison of ids: no size is a multiple of a kernel's tile, and three queries share a key.
ODD = ModelArgs(
    dim=132, n_heads=6, n_kv_heads=2, head_dim=24, ffn_dim=200, vocab_size=1003, n_layers=2, max_seq_len=2048,
    tied_head=True,
)  # fmt: skip
ROWS = (1, 3, 17)  # one row, several, and many
# Distance of log-probabilities: of logits of up to 4, which 16 layers in bf16 move by some hundredths.
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}

Outcome = tuple[bool, str]  # whether it passed, and in which words
Claim = Callable[[], Outcome]


class Check(TypedDict):
    """A kernel or a path compared with its plain twin. `passed` is None if it was not run."""

    name: str
    passed: bool | None
    detail: str


def run_checks(cell: Cell, *, seconds: float = math.inf) -> list[Check]:
    """Check whole paths on small models in fp32, and the paths of the cell's own model in fp32 and in its dtype.

    A check that raises has failed, and the next ones still run, unless so many seconds are over.
    """
    end = time.monotonic() + seconds
    return [
        tried(name, claim) if time.monotonic() < end else Check(name=name, passed=None, detail="no time was left")
        for name, claim in claims_of(cell)
    ]


def claims_of(cell: Cell) -> Iterator[tuple[str, Claim]]:
    yield from claims_of_ids(torch.device(cell.device))
    for dtype in dict.fromkeys(("fp32", "bf16" if cell.dtype == "fp32" else cell.dtype)):
        yield from claims_of_model(cell.but(dtype=dtype), model_for(cell.but(dtype=dtype)))


def claims_of_ids(device: torch.device) -> Iterator[tuple[str, Claim]]:
    """Yield the claims that every way to generate gives the ids of the plain path without the cache."""
    odd = uneven_model(ODD, torch.float32, device)
    steps = {name: GraphRunner(ops, layer_for(device)) for name, ops in ways_of(odd).items()}
    ways = [("plain path", None, True), *((f"{name} kernels", step, True) for name, step in steps.items())]
    ways.append(("compiled layers", steps["compiled"], False))
    for rows in ROWS:
        without = greedy(odd, None, rows, kv_caching=False)
        for way, step, kv_caching in ways:
            name = f"greedy ids in fp32, batch {rows}, ragged: {way}, {cache_words(kv_caching)}"
            yield name, partial(same_ids, odd, step, rows, kv_caching, without)


def claims_of_model(cell: Cell, model: Transformer) -> Iterator[tuple[str, Claim]]:
    """Yield the claims about the kernels, the fast step and exact mode, at the sizes of a model."""
    ways, layer = ways_of(model), layer_for(model.device)
    claims: dict[str, Claim] = {}
    for name, ops in ways.items():
        claims[f"steps of {name} kernels, recorded and repeated"] = partial(repeats, model, ops)
    claims["prompts by compiled layers"] = partial(prompts_agree, model)
    claims["log-probabilities by graphs"] = partial(logprobs_agree, model, GraphRunner(ways["compiled"], layer), cell)
    claims["exact mode"] = partial(exact_mode, model)
    yield from ((f"{what}, {cell.model} in {cell.dtype}", claim) for what, claim in claims.items())


def tried(name: str, claim: Claim) -> Check:
    try:
        passed, detail = claim()
    except Exception as error:  # a kernel, its compiler or a driver may raise anything
        logger.warning("%s", name, exc_info=True)
        passed, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Check(name=name, passed=passed, detail=detail)


@contextmanager
def stepping(model: Transformer, step: GraphRunner | None) -> Iterator[None]:
    model.runner = step
    try:
        yield
    finally:
        model.runner = None


def prompts_of(args: ModelArgs, lengths: Sequence[int]) -> list[list[int]]:
    stream = torch.Generator().manual_seed(0)
    return [torch.randint(args.vocab_size, (length,), generator=stream).tolist() for length in lengths]


def cache_words(kv_caching: bool) -> str:
    return "with the cache" if kv_caching else "without the cache"


def repeats(model: Transformer, ops: GraphOps) -> Outcome:
    seconds = try_steps(model, GraphRunner(ops))  # raises Unsupported
    return True, f"as near to the modules as the fast step requires; {1e3 * seconds:.3f} ms at batch 1"


def prompts_agree(model: Transformer) -> Outcome:
    seconds = try_prompts(model, layer_for(model.device))
    return True, f"as near to the modules as the fast step requires; {1e3 * seconds:.3f} ms at batch 1"


def logprobs_agree(model: Transformer, fast: GraphRunner, cell: Cell) -> Outcome:
    """Compare log-probabilities of greedy generations up to their first divergence; in float32 there may be none."""
    words, right = [], True
    for kv_caching in (True, False):
        made = []
        for step in (None, fast):
            with stepping(model, step):
                prompts = prompts_of(model.args, [cell.input_len])
                ids, logprobs = model.generate_tokens(
                    prompts, cell.output_len, temperature=0.0, logprobs=True, kv_caching=kv_caching
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


def exact_mode(model: Transformer) -> Outcome:
    try:
        model.exact = True  # compares the model with itself; ValueError says where a bit differs
    except ValueError as difference:
        return False, str(difference)
    model.exact = False
    return True, "same bits however they are computed"


def greedy(model: Transformer, step: GraphRunner | None, rows: int, *, kv_caching: bool) -> list[list[int]]:
    prompts = prompts_of(model.args, [5 + 7 * row % 40 for row in range(rows)])
    with stepping(model, step):
        return model.generate_tokens(prompts, 20, temperature=0.0, kv_caching=kv_caching)[0]


def same_ids(
    model: Transformer, step: GraphRunner | None, rows: int, kv_caching: bool, wanted: list[list[int]]
) -> Outcome:
    made = greedy(model, step, rows, kv_caching=kv_caching)
    pairs = [pair for ours, theirs in zip(made, wanted, strict=True) for pair in zip(ours, theirs, strict=True)]
    same = sum(ours == theirs for ours, theirs in pairs)
    return made == wanted, f"{same} of {len(pairs)} ids are those of the plain path without the cache"
