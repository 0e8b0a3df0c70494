"""Check every fast path of a GPU against the plain path; `scripts/gpu_report.py` runs it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypedDict

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.memory_ledger import check_memory
from llama.bench.run.models import find_model, random_model
from llama.fast.choose import candidates
from llama.fast.graph_ops import PYTORCH, GraphOps
from llama.fast.graph_runner import GraphRunner
from llama.fast.graph_trial import try_steps
from llama.model import Transformer

logger = logging.getLogger(__name__)

# For the comparison of ids: no size is a multiple of a kernel's tile, and three queries share a key.
_ODD = ModelArgs(
    dim=132, n_heads=6, n_kv_heads=2, head_dim=24, ffn_dim=200, vocab_size=1003, n_layers=2, max_seq_len=2048,
    tied_head=True,
)  # fmt: skip
_ROWS = (1, 3, 17)  # one row, several, and many

Outcome = tuple[bool, str]  # whether a check passed, and what was seen
Claim = Callable[[], Outcome]


class Check(TypedDict):
    """A path compared with the plain one."""

    name: str
    passed: bool
    detail: str


def check_gpu(cell: Cell, *, part: str) -> dict[str, Any]:
    """Return the checks of greedy ids on a small model, or of the cell's own model in a dtype.

    A check that raises has failed, and the next ones still run.
    """
    if part == "ids":
        claims = claims_of_ids(torch.device(cell.device))
    else:
        own = cell.but(dtype=part)
        source = find_model(own)
        check_memory(own, source.args, source.device, stored=source.stored)
        claims = claims_of_model(own, uneven_model(source.args, source.dtype, source.device))
    return {"checks": [_checked(name, claim) for name, claim in claims]}


def claims_of_ids(device: torch.device) -> Iterator[tuple[str, Claim]]:
    """Yield the claims that each path gives the ids of the plain path without the cache."""
    odd = uneven_model(_ODD, torch.float32, device)
    steps = {f"{name} kernels": GraphRunner(ops) for name, ops in kernels_of(odd).items()}
    for rows in _ROWS:
        without = greedy(odd, None, rows, kv_caching=False)
        for path, step in {"plain path": None, **steps}.items():
            claim = partial(same_ids, odd, step, rows, without)
            yield f"greedy ids in fp32, batch {rows}, ragged: {path}, with the cache", claim


def claims_of_model(cell: Cell, model: Transformer) -> Iterator[tuple[str, Claim]]:
    """Yield the claims about steps and exact mode at the sizes of a model."""
    what = f"{cell.model} in {cell.dtype}"
    for name, ops in kernels_of(model).items():
        yield f"steps of {name} kernels, recorded and repeated, {what}", partial(steps_agree, model, ops)
    yield f"exact mode, {what}", partial(exact_mode, model)


def uneven_model(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a random model whose norms are not all ones, so that a kernel without its norm is detected."""
    model = random_model(args, dtype=dtype, device=device)
    stream = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5, generator=stream)
    return model


def kernels_of(model: Transformer) -> dict[str, GraphOps]:
    """Return the sets of kernels that a step is made of; a rehearsal on a CPU compiles nothing."""
    sets = candidates(model) if model.device.type == "cuda" else [[PYTORCH]]
    return {ops.name: ops for ops in chain.from_iterable(sets)}


def _checked(name: str, claim: Claim) -> Check:
    try:
        passed, detail = claim()
    except Exception as error:  # a kernel, its compiler or a driver may raise anything
        logger.warning("%s", name, exc_info=True)
        passed, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Check(name=name, passed=passed, detail=detail)


def steps_agree(model: Transformer, ops: GraphOps) -> Outcome:
    """Compare steps with those of the modules; Unsupported is raised if they differ."""
    taken = [f"{1e3 * seconds:.3f} ms with {rows} rows" for rows, seconds in try_steps(model, GraphRunner(ops)).items()]
    return True, f"as near to the modules as the fast step requires; {', '.join(taken)}"


def exact_mode(model: Transformer) -> Outcome:
    """Switch exact mode on, which compares the model with itself."""
    try:
        model.exact = True
    except ValueError as difference:
        return False, str(difference)
    model.exact = False
    return True, "same bits however they are computed"


def greedy(model: Transformer, step: GraphRunner | None, rows: int, *, kv_caching: bool) -> list[list[int]]:
    """Return 20 greedy tokens behind ragged random prompts."""
    stream = torch.Generator().manual_seed(0)
    lengths = [5 + 7 * row % 40 for row in range(rows)]
    prompts = [torch.randint(model.args.vocab_size, (length,), generator=stream).tolist() for length in lengths]
    model.runner = step
    try:
        return model.generate_tokens(prompts, 20, temperature=0.0, kv_caching=kv_caching)[0]
    finally:
        model.runner = None


def same_ids(model: Transformer, step: GraphRunner | None, rows: int, expected: Sequence[Sequence[int]]) -> Outcome:
    """Compare the ids of a path with those expected."""
    made = greedy(model, step, rows, kv_caching=True)
    pairs = [pair for ours, theirs in zip(made, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
    same = sum(ours == theirs for ours, theirs in pairs)
    return made == expected, f"{same} of {len(pairs)} ids are those of the plain path without the cache"
