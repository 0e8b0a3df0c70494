"""One run of the certificate: a model with its KV cache on and off, both compared with the same model in float64.

`tolerance` decides, without the cached run, how large rounding errors may be. A larger error, or a choice that rounding
does not explain, is a violation. Knows tensors and the model, which `passes` and `sessions` feed. Reads no files,
prints nothing, and does not know where a model or its prompts come from.

The texts are those that the cached greedy run wrote. U is the uncached model over all texts in one pass, C the cached
model fed as generation feeds it, R the float64 model, uncached. An index counts the positions of all texts, one text
after the other.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from llama.model import Transformer
from llama.verify import tolerance
from llama.verify.passes import (
    ALONE,
    FREE_CACHED,
    FREE_GUESSED,
    FREE_UNCACHED,
    PIECES,
    STEPS,
    UNCACHED,
    WIDE_PIECES,
    WIDE_STEPS,
    Chunk,
    FreeRun,
    Texts,
    all_passes,
    at_steps,
    in_one_pass,
    run_free,
    run_guessed,
)
from llama.verify.sessions import SESSIONS, session_passes

PASSES = (STEPS, FREE_CACHED, FREE_UNCACHED, PIECES, ALONE, *SESSIONS)  # each is compared with U, bit by bit
FLOAT64_PASSES = (WIDE_STEPS, WIDE_PIECES)  # in float64; these may differ from R by tolerance.FLOAT64_TOLERANCE
STAGES = 2 + len(PASSES) + len(FLOAT64_PASSES)  # that `measure_run` reports: U, each of these, and the run with guesses

_CHUNK = 2**21  # logits that are compared at a time: 16 MiB in float64


@dataclass(frozen=True)
class FirstDivergence:
    """The first difference between the free runs of a row.

    tokens: those of the cached and of the uncached run.
    margins: top1 - top2 of U, C and R there; None if not finite.
    explained: the margin of R is at most twice the bound.
    """

    row: int
    step: int
    position: int
    tokens: list[int]
    margins: list[float | None]
    explained: bool


@dataclass(frozen=True)
class Figures:
    """The measurements of one run. To add up runs, sum the integers, take the maximum of the floats, join the lists.

    tokens: how many the cached greedy run made.
    equal_tokens: how many of them the uncached run made too, in each row up to its divergence.
    guessed_tokens: how many of them the run with guesses made too.
    positions: how many all texts have.
    near_ties: at how many positions top1 - top2 of R is at most twice the bound.
    same_top: at how many positions C and U have the same most likely token.
    bound: the largest bound.
    error_ratio: the largest error divided by its bound; above 1 is a violation.
    max_delta: the largest |C - U| of a logit.
    kl_max: the largest KL(U || C) of a position, in nats.
    errors: the largest distance of each pass to R.
    compared: how many positions of each pass were compared with U.
    bit_equal: at how many of them the bits were equal.
    divergences: the first difference of each row whose free runs differ.
    violations: a sentence each; a sound model has none.
    """

    tokens: int = 0
    equal_tokens: int = 0
    guessed_tokens: int = 0
    positions: int = 0
    near_ties: int = 0
    same_top: int = 0
    bound: float = 0.0
    error_ratio: float = 0.0
    max_delta: float = 0.0
    kl_max: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    bit_equal: dict[str, int] = field(default_factory=dict)
    divergences: list[FirstDivergence] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


@torch.inference_mode()
def measure_run(
    model: Transformer,
    reference: Transformer,
    prompts: Texts,
    tokens: int,
    *,
    seed: int,
    on_stage: Callable[[str], None] = lambda name: None,
) -> Figures:
    """Continue every prompt by `tokens` ids (at least 2), cached and uncached, and judge both by `reference_of(model)`.

    `seed` draws the cuts of PIECES and SESSIONS. `on_stage` is called with the name of each pass before it runs. If
    `model.exact` is set, every bitwise difference is a violation. Raises ValueError as `generate_tokens` does.
    """
    on_stage(FREE_CACHED)
    cached = run_free(model, prompts, tokens, kv_caching=True)
    if cached.failure:
        return Figures(violations=[cached.failure])
    texts = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, cached.ids, strict=True)]
    on_stage(UNCACHED)
    u = [logits.to(reference.device) for _, _, logits in in_one_pass(model, texts)]
    baselines = Baselines(u, [logits for _, _, logits in in_one_pass(reference, texts)])

    difference = Difference()
    comparisons = {UNCACHED: baselines.compare((row, 0, logits) for row, logits in enumerate(u))}
    for name, parts in (all_passes(model, reference, texts, tokens, seed) | session_passes(model, texts, seed)).items():
        on_stage(name)
        comparisons[name] = baselines.compare(parts, difference if name == STEPS else None)
    on_stage(FREE_GUESSED)
    whole = [[*prompt, *ids] for prompt, ids in zip(prompts, cached.ids, strict=True)]
    guessed = run_guessed(model, prompts, whole, tokens, seed=seed)
    on_stage(FREE_UNCACHED)
    uncached = run_free(model, prompts, tokens, kv_caching=False)
    for run, steps in ((cached, [tokens] * len(texts)), (uncached, _comparable(cached, uncached))):
        comparisons[run.name] = baselines.compare(at_steps(prompts, run, steps))
    return _judge(model, prompts, (cached, uncached, guessed), baselines, comparisons, difference)


# ---- comparing logits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassComparison:
    """The logits of a pass compared with U and R; each tensor is (n,), on the CPU.

    index: the positions, ascending.
    equal: whether all bits are those of U.
    error: the largest distance to R; inf or nan if a logit is not finite.
    choice: the most likely token.
    margin: top1 - top2.
    """

    index: Tensor
    equal: Tensor
    error: Tensor
    choice: Tensor
    margin: Tensor


class Baselines:
    """U and R of every text, each (positions, vocab)."""

    def __init__(self, u: list[Tensor], r: list[Tensor]) -> None:
        self.u, self.r = u, r
        self.starts = [0, *accumulate(map(len, r))]  # the index of each text's first position

    def compare(self, parts: Iterable[Chunk], difference: "Difference | None" = None) -> PassComparison:
        """Compare logits with U and R, _CHUNK at a time; add them to `difference`."""
        found = []
        for row, first, logits in parts:
            step = max(1, _CHUNK // logits.shape[-1])
            for start in range(first, first + len(logits), step):
                made = logits[start - first : start - first + step].to(self.r[row].device)
                u, r = (side[row][start : start + len(made)] for side in (self.u, self.r))
                found.append((self.starts[row] + start + torch.arange(len(made)), *_compare(made, u, r)))
                if difference is not None:
                    difference.add(made, u)
        columns = [torch.cat(column) for column in zip(*found, strict=True)] or [torch.zeros(0, dtype=torch.int64)] * 5
        order = columns[0].argsort()
        return PassComparison(*(column[order] for column in columns))

    def where(self, index: int) -> tuple[int, int]:
        """Return the row of an index, and the position in that row."""
        row = bisect_right(self.starts, index) - 1
        return row, index - self.starts[row]


def _compare(made: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (equal, error, choice, margin) of logits, (n, vocab)."""
    bits = {4: torch.int32, 8: torch.int64}[made.itemsize]
    equal = (made.view(bits) == u.to(made.dtype).view(bits)).all(-1)
    error = (made.double() - r).abs().amax(-1)
    top = made.topk(min(2, made.shape[-1])).values.double()
    return equal.cpu(), error.cpu(), made.argmax(-1).cpu(), (top[:, 0] - top[:, -1]).cpu()


class Difference:
    """The largest |C - U| of a logit, and the largest KL(U || C) of a position."""

    def __init__(self) -> None:
        self.max_delta = self.kl_max = 0.0

    def add(self, c: Tensor, u: Tensor) -> None:
        """Add logits (n, vocab), except for positions that are not finite: those are violations anyway."""
        finite = (c - u).sum(-1).isfinite()
        if not finite.any():
            return
        c, u = c[finite].double(), u[finite].double()
        self.max_delta = max(self.max_delta, float((c - u).abs().max()))
        log_c, log_u = c.log_softmax(-1), u.log_softmax(-1)
        kl = (log_u.exp() * (log_u - log_c)).sum(-1).clamp(min=0)  # negative only by rounding
        self.kl_max = max(self.kl_max, float(kl.max()))


# ---- the judgement ---------------------------------------------------------------------------------------------------


def _judge(
    model: Transformer,
    prompts: Texts,
    runs: tuple[FreeRun, FreeRun, FreeRun],
    baselines: Baselines,
    comparisons: dict[str, PassComparison],
    difference: Difference,
) -> Figures:
    r = baselines.compare((row, 0, logits) for row, logits in enumerate(baselines.r))
    u, c, (cached, uncached, guessed) = comparisons[UNCACHED], comparisons[STEPS], runs
    bound = tolerance.bound_of(u.error, model.norm.weight.itemsize)
    divergences = list(_divergences(prompts, (cached, uncached), baselines.starts, (u, c, r), bound))
    violations = list(_uncached_errors(model, u, baselines))
    for name, one in comparisons.items():
        bits = model.exact and name in PASSES
        violations += _errors_of(name, one, r, bound[one.index], baselines, bits=bits)
    for run in (cached, uncached):
        violations += _loop_errors(run, prompts, baselines, comparisons[run.name])
    if guessed.failure or (model.exact and guessed.ids != cached.ids):
        violations.append(guessed.failure or f"{FREE_GUESSED}: {guessed.ids} are made, and {cached.ids} without")
    else:
        violations += [
            f"{FREE_GUESSED}: row {d.row}, position {d.position}: takes token {d.tokens[1]}, and {d.tokens[0]} without "
            f"guesses; float64 prefers its own by {d.margins[-1]}, more than rounding explains"
            for d in _divergences(prompts, (cached, guessed), baselines.starts, (u, c, r), bound)
            if not d.explained
        ]
    violations += [
        f"free runs: row {d.row}, position {d.position}: cached takes token {d.tokens[0]}, uncached {d.tokens[1]}, "
        f"and float64 prefers its own by {d.margins[-1]}, more than rounding explains"
        for d in divergences
        if not d.explained
    ]
    ratios = (_largest(one.error / bound[one.index]) for name, one in comparisons.items() if name not in FLOAT64_PASSES)
    return Figures(
        tokens=sum(map(len, cached.ids)),
        equal_tokens=sum(_comparable(cached, uncached)) - len(divergences),
        guessed_tokens=sum(
            a == b for rows in zip(cached.ids, guessed.ids, strict=True) for a, b in zip(*rows, strict=False)
        ),
        positions=len(r.index),
        near_ties=int((r.margin <= tolerance.DECIDED * bound).sum()),
        same_top=int((c.choice == u.choice).sum()),
        bound=float(bound.max()),
        error_ratio=max(ratios),
        max_delta=difference.max_delta,
        kl_max=difference.kl_max,
        errors={name: _largest(one.error) for name, one in comparisons.items()},
        compared={name: len(comparisons[name].index) for name in PASSES if name in comparisons},
        bit_equal={name: int(comparisons[name].equal.sum()) for name in PASSES if name in comparisons},
        divergences=divergences,
        violations=violations,
    )


def _comparable(cached: FreeRun, uncached: FreeRun) -> list[int]:
    """Return for each row the number of steps from equal texts, up to its divergence and including it."""
    pairs = [list(zip(*ids, strict=False)) for ids in zip(cached.ids, uncached.ids, strict=True)]
    return [next((step + 1 for step, (c, u) in enumerate(row) if c != u), len(row)) for row in pairs]


def _uncached_errors(model: Transformer, u: PassComparison, baselines: Baselines) -> Iterator[str]:
    """Yield the violations of the uncached path, whose error sets the bounds of all others."""
    ceiling = tolerance.ceiling_of(model, max(float(r.abs().max()) for r in baselines.r))
    where = (u.error > ceiling).nonzero()[:, 0].tolist()
    if where:
        row, position = baselines.where(int(u.index[where[0]]))
        yield (
            f"{UNCACHED}: row {row}, position {position}: the logits differ from those of float64 by "
            f"{u.error[where[0]]:.3g}, and rounding in {str(model.norm.weight.dtype).removeprefix('torch.')} explains "
            f"at most {ceiling:.3g}; so at {len(where)} of {len(u.error)} positions"
        )
    usual, spread = u.error.median(), torch.cat([r.std(-1, correction=0) for r in baselines.r]).median()
    if usual > tolerance.SPREAD * spread.cpu():
        yield f"{UNCACHED}: the median error is {usual:.3g}, more than half the spread of the logits, {spread:.3g}"


def _largest(errors: Tensor) -> float:
    return max(errors[errors.isfinite()].tolist(), default=0.0)


def _errors_of(
    name: str, one: PassComparison, r: PassComparison, bound: Tensor, baselines: Baselines, *, bits: bool
) -> Iterator[str]:
    """Yield for each rule that a pass breaks the first position and the number of positions; `bound` is by position."""
    prefers, margin, finite = r.choice[one.index], r.margin[one.index], one.error.isfinite()
    allowed = torch.full_like(bound, tolerance.FLOAT64_TOLERANCE) if name in FLOAT64_PASSES else bound
    rules: list[tuple[Tensor, Callable[[int], str]]] = [
        (~finite, lambda i: "the logits are not finite"),
        (
            finite & (one.error > allowed),
            lambda i: (
                f"the logits differ from those of float64 by {one.error[i]:.3g}, and rounding explains {allowed[i]:.3g}"
            ),
        ),
        (
            finite & (margin > tolerance.DECIDED * allowed) & (one.choice != prefers),
            lambda i: f"token {one.choice[i]} is preferred, and {prefers[i]} in float64, by {margin[i]:.3g}",
        ),
        (~one.equal & bits, lambda i: "the bits are not those of the uncached pass, in exact mode"),
    ]
    for wrong, say in rules:
        where = wrong.nonzero()[:, 0].tolist()
        if where:
            row, position = baselines.where(int(one.index[where[0]]))
            count = f"so at {len(where)} of {len(wrong)} positions"
            yield f"{name}: row {row}, position {position}: {say(where[0])}; {count}"


def _loop_errors(run: FreeRun, prompts: Texts, baselines: Baselines, one: PassComparison) -> Iterator[str]:
    """Yield a violation if the loop fed other widths than its mode does, or took a token that its logits reject."""
    if run.failure:
        yield run.failure
        return
    longest, tokens = max(map(len, prompts)), len(run.ids[0])
    widths = [1 if step and run.name == FREE_CACHED else longest + step for step in range(tokens)]
    if run.widths != widths:
        yield f"{run.name}: the steps fed {run.widths} tokens a row, not {widths}"
    for index, choice in zip(one.index.tolist(), one.choice.tolist(), strict=True):
        row, position = baselines.where(index)
        id = run.ids[row][position + 1 - len(prompts[row])]
        if id != choice:
            yield f"{run.name}: row {row}, position {position}: token {id} was taken, and its logits prefer {choice}"
            return


def _divergences(
    prompts: Texts,
    runs: tuple[FreeRun, FreeRun],
    starts: Sequence[int],
    ucr: tuple[PassComparison, PassComparison, PassComparison],
    bound: Tensor,
) -> Iterator[FirstDivergence]:
    for row, steps in enumerate(_comparable(*runs)):
        step, position = steps - 1, len(prompts[row]) + steps - 2
        if not steps or runs[0].ids[row][step] == runs[1].ids[row][step]:
            continue
        index = starts[row] + position
        margins = [float(one.margin[index]) for one in ucr]
        yield FirstDivergence(
            row,
            step,
            position,
            tokens=[run.ids[row][step] for run in runs],
            margins=[margin if math.isfinite(margin) else None for margin in margins],
            explained=margins[-1] <= tolerance.DECIDED * float(bound[index]),
        )
