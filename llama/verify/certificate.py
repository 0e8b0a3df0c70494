"""One run of the certificate: a model with its KV cache on and off, and both against the same model in float64.

What counts as rounding, `tolerance` decides without looking at the cached run. What the cache computes beyond it, and a
choice that it cannot excuse, is a violation. Knows tensors and the sizes of the model, which `passes` and `sessions`
feed. Reads no files, prints nothing, and does not know where a model or its prompts come from.

The texts are what the cached greedy run wrote, and a place is a position of one of them, counted through all. U is the
uncached model over all texts in one pass, C the cached model fed as generation feeds it, R the float64 model, uncached.
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
)
from llama.verify.sessions import HELD, SESSIONS, session_passes

PASSES = (STEPS, FREE_CACHED, FREE_UNCACHED, PIECES, ALONE, *SESSIONS)  # each is compared with U, bit by bit
WIDE = (WIDE_STEPS, WIDE_PIECES)  # these, in float64, may differ from R by tolerance.FLOAT64_TOLERANCE alone
STAGES = 1 + len(PASSES) + len(WIDE)  # that `measure` tells of: U, and each of these

BINS_PER_OCTAVE = 16

_CHUNK = 2**21  # logits that are looked at together: 16 MiB in float64
_LEAST, _MOST = -1075 * BINS_PER_OCTAVE, 1025 * BINS_PER_OCTAVE  # the bins of every float64 above zero


@dataclass(frozen=True)
class Divergence:
    """Where the free runs of a row part: the tokens of the cached and of the uncached one, and top1 - top2 of U, C, R.

    Explained: that of R is within twice the bound. A margin that is not finite is None.
    """

    row: int
    step: int
    position: int
    tokens: list[int]
    margins: list[float | None]
    explained: bool


@dataclass(frozen=True)
class Figures:
    """What one run measured. Runs add up: counts by sum, sizes by maximum.

    tokens: those of the cached greedy run. alike: those that the uncached one made too, each row up to its divergence.
    places: how many there are. undecided: those where top1 - top2 of R is at most 2 x the bound. bound: the largest.
    strain: the largest error in units of its bound; above 1 is a violation. errors: the largest distance to R, by way.
    compared, equal: at how many places a way's logits were compared with U's, and were all bit-equal.
    deltas: a histogram of |C - U| over all logits, see `quantile`. kl: KL(U || C) at a place, in nats.
    top1: at how many places two of them choose alike. violations: a sentence each; none where all is well.
    """

    tokens: int = 0
    alike: int = 0
    places: int = 0
    undecided: int = 0
    bound: float = 0.0
    strain: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    max_delta: float = 0.0
    deltas: dict[str, int] = field(default_factory=dict)
    kl_sum: float = 0.0
    kl_max: float = 0.0
    top1: dict[str, int] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def bytes_needed(model: Transformer, *, rows: int, length: int, tokens: int) -> int:
    """Return what `reference_of` and `measure` take at most beside the model, activations apart."""
    args, itemsize = model.args, max(4, model.norm.weight.itemsize)
    logits = rows * args.vocab_size * (length * (itemsize + 8) + 2 * tokens * itemsize)  # U, R, and both free runs
    logits += 8 * rows * args.vocab_size * length  # a large piece, in float64
    cache = 2 * args.n_layers * length * args.n_kv_heads * args.head_dim * max(8 * rows, HELD * itemsize)
    return 8 * sum(weight.numel() for weight in model.parameters()) + logits + cache + 64 * _CHUNK


@torch.inference_mode()
def measure(
    model: Transformer,
    reference: Transformer,
    prompts: Texts,
    tokens: int,
    *,
    seed: int,
    on_stage: Callable[[str], None] = lambda part: None,
) -> Figures:
    """Continue every prompt by `tokens` ids, cached and uncached, and judge the two by `reference_of(model)`.

    `seed` draws where PIECES and SESSIONS cut the texts, and `on_stage` hears what comes next. Where `model.exact` is
    set, every bitwise difference is a violation. Raises ValueError on what generation or a session refuses, and for
    fewer than 2 tokens.
    """
    if tokens < 2:
        raise ValueError(f"tokens={tokens} must be at least 2: the cache is first read for the second token")
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
    on_stage(FREE_UNCACHED)
    uncached = run_free(model, prompts, tokens, kv_caching=False)
    for run, steps in ((cached, [tokens] * len(texts)), (uncached, _comparable(cached, uncached))):
        comparisons[run.name] = baselines.compare(at_steps(prompts, run, steps))
    return _judge(model, prompts, cached, uncached, baselines, comparisons, difference)


def quantile(deltas: dict[str, int], share: float) -> float:
    """Return a number that `share` of the differences do not pass: at most 4.5 % above the smallest such number.

    Bin b counts those from 2^(b/16) up to 2^((b+1)/16), "zero" the zeros; what is returned is where a bin ends.
    """
    ends = {bin: 0.0 if bin == "zero" else 2.0 ** ((int(bin) + 1) / BINS_PER_OCTAVE) for bin in deltas}
    left = share * sum(deltas.values())
    for bin in sorted(deltas, key=ends.__getitem__):
        left -= deltas[bin]
        if left <= 0:
            return ends[bin]
    return 0.0


# ---- what is seen of the logits --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A way's logits beside U and R, at places in ascending order; each tensor is (n,), on the CPU.

    error: the largest distance to R, inf or nan where anything is not finite. margin: top1 - top2.
    """

    place: Tensor
    equal: Tensor
    error: Tensor
    choice: Tensor
    margin: Tensor


class Baselines:
    """U and R of every text, each (positions, vocab)."""

    def __init__(self, u: list[Tensor], r: list[Tensor]) -> None:
        self.u, self.r = u, r
        self.starts = [0, *accumulate(map(len, r))]  # the place of each text's first position

    def compare(self, parts: Iterable[Chunk], difference: "Difference | None" = None) -> Comparison:
        """Compare logits with U and R, few at a time; add them to `difference`."""
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
        return Comparison(*(column[order] for column in columns))

    def where(self, place: int) -> tuple[int, int]:
        """Return the row and the position in it."""
        row = bisect_right(self.starts, place) - 1
        return row, place - self.starts[row]


def _compare(made: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (equal, error, choice, margin) of logits, (n, vocab)."""
    bits = {4: torch.int32, 8: torch.int64}[made.itemsize]
    equal = (made.view(bits) == u.to(made.dtype).view(bits)).all(-1)
    error = (made.double() - r).abs().amax(-1)
    top = made.topk(min(2, made.shape[-1])).values.double()
    return equal.cpu(), error.cpu(), made.argmax(-1).cpu(), (top[:, 0] - top[:, -1]).cpu()


class Difference:
    """What |C - U| and KL(U || C) come to."""

    def __init__(self) -> None:
        self.largest = self.kl_sum = self.kl_max = 0.0
        self.zeros, self.bins = 0, torch.zeros(_MOST - _LEAST, dtype=torch.int64)

    def add(self, c: Tensor, u: Tensor) -> None:
        """Add logits (n, vocab), but for positions that are not finite, which are violations by themselves."""
        finite = (c - u).sum(-1).isfinite()
        if not finite.any():
            return
        c, u = c[finite].double(), u[finite].double()
        delta = (c - u).abs()
        self.largest = max(self.largest, float(delta.max()))
        some = delta[delta > 0]
        self.zeros += delta.numel() - some.numel()
        bins = (some.log2() * BINS_PER_OCTAVE).floor().long() - _LEAST
        self.bins += bins.bincount(minlength=len(self.bins)).cpu()
        log_c, log_u = c.log_softmax(-1), u.log_softmax(-1)
        kl = (log_u.exp() * (log_u - log_c)).sum(-1).clamp(min=0)  # below zero by rounding alone
        self.kl_sum += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))

    def histogram(self) -> dict[str, int]:
        counts = {str(bin + _LEAST): int(self.bins[bin]) for bin in self.bins.nonzero()[:, 0].tolist()}
        return {"zero": self.zeros, **counts}


# ---- the judgement ---------------------------------------------------------------------------------------------------


def _judge(
    model: Transformer,
    prompts: Texts,
    cached: FreeRun,
    uncached: FreeRun,
    baselines: Baselines,
    comparisons: dict[str, Comparison],
    difference: Difference,
) -> Figures:
    r = baselines.compare((row, 0, logits) for row, logits in enumerate(baselines.r))
    u, c = comparisons[UNCACHED], comparisons[STEPS]
    bound = tolerance.bound_of(u.error, model.norm.weight.itemsize)
    divergences = list(_divergences(prompts, (cached, uncached), baselines.starts, (u, c, r), bound))
    violations = list(_uncached_errors(model, u, baselines))
    violations += [
        text
        for name, way in comparisons.items()
        for text in _errors_of(name, way, r, bound[way.place], baselines, bits=model.exact and name in PASSES)
    ]
    violations += [
        text for run in (cached, uncached) for text in _loop_errors(run, prompts, baselines, comparisons[run.name])
    ]
    violations += [
        f"free runs: row {d.row}, position {d.position}: cached takes token {d.tokens[0]}, uncached {d.tokens[1]}, "
        f"and float64 prefers its own by {d.margins[-1]}, which rounding cannot make up"
        for d in divergences
        if not d.explained
    ]
    return Figures(
        tokens=sum(map(len, cached.ids)),
        alike=sum(_comparable(cached, uncached)) - len(divergences),
        places=len(r.place),
        undecided=int((r.margin <= 2 * bound).sum()),
        bound=float(bound.max()),
        strain=max(_largest(way.error / bound[way.place]) for name, way in comparisons.items() if name not in WIDE),
        errors={name: _largest(way.error) for name, way in comparisons.items()},
        compared={name: len(comparisons[name].place) for name in PASSES},
        equal={name: int(comparisons[name].equal.sum()) for name in PASSES},
        max_delta=difference.largest,
        deltas=difference.histogram(),
        kl_sum=difference.kl_sum,
        kl_max=difference.kl_max,
        top1={
            name: int((one.choice == other.choice).sum())
            for name, one, other in (("C and U", c, u), ("C and R", c, r), ("U and R", u, r))
        },
        divergences=divergences,
        violations=violations,
    )


def _comparable(cached: FreeRun, uncached: FreeRun) -> list[int]:
    """Return how many steps of each row had the same text before them: up to its divergence, and that one too."""
    pairs = [list(zip(*ids, strict=False)) for ids in zip(cached.ids, uncached.ids, strict=True)]
    return [next((step + 1 for step, (c, u) in enumerate(row) if c != u), len(row)) for row in pairs]


def _uncached_errors(model: Transformer, u: Comparison, baselines: Baselines) -> Iterator[str]:
    """Say where the uncached path is farther from float64 than rounding takes it: its error excuses all others."""
    ceiling = tolerance.ceiling_of(model, max(float(r.abs().max()) for r in baselines.r))
    where = (u.error > ceiling).nonzero()[:, 0].tolist()
    if where:
        row, position = baselines.where(int(u.place[where[0]]))
        yield (
            f"{UNCACHED}: row {row}, position {position}: the logits are {u.error[where[0]]:.3g} off those of float64, "
            f"more than rounding in {str(model.norm.weight.dtype).removeprefix('torch.')} ever was, {ceiling:.3g}; "
            f"so at {len(where)} of {len(u.error)} positions"
        )
    usual, spread = u.error.median(), torch.cat([r.std(-1, correction=0) for r in baselines.r]).median()
    if usual > tolerance.SPREAD * spread.cpu():
        yield f"{UNCACHED}: the median error is {usual:.3g}, more than half the spread of the logits, {spread:.3g}"


def _largest(errors: Tensor) -> float:
    return max(errors[errors.isfinite()].tolist(), default=0.0)


def _errors_of(
    name: str, way: Comparison, r: Comparison, bound: Tensor, baselines: Baselines, *, bits: bool
) -> Iterator[str]:
    """Say where a way, with its places' bounds, went wrong first, by each rule, and how often."""
    prefers, margin, finite = r.choice[way.place], r.margin[way.place], way.error.isfinite()
    allowed = torch.full_like(bound, tolerance.FLOAT64_TOLERANCE) if name in WIDE else bound
    rules: list[tuple[Tensor, Callable[[int], str]]] = [
        (~finite, lambda i: "the logits are not finite"),
        (
            finite & (way.error > allowed),
            lambda i: f"the logits are {way.error[i]:.3g} off those of float64, and rounding explains {allowed[i]:.3g}",
        ),
        (
            finite & (margin > 2 * allowed) & (way.choice != prefers),
            lambda i: f"token {way.choice[i]} is preferred, and {prefers[i]} in float64, by {margin[i]:.3g}",
        ),
        (~way.equal & bits, lambda i: "the bits are not those of the uncached pass, in exact mode"),
    ]
    for wrong, say in rules:
        where = wrong.nonzero()[:, 0].tolist()
        if where:
            row, position = baselines.where(int(way.place[where[0]]))
            count = f"so at {len(where)} of {len(wrong)} positions"
            yield f"{name}: row {row}, position {position}: {say(where[0])}; {count}"


def _loop_errors(run: FreeRun, prompts: Texts, baselines: Baselines, way: Comparison) -> Iterator[str]:
    """Say where the loop did not feed what its mode feeds, or did not take what its own logits prefer."""
    if run.failure:
        yield run.failure
        return
    longest, tokens = max(map(len, prompts)), len(run.ids[0])
    widths = [1 if step and run.name == FREE_CACHED else longest + step for step in range(tokens)]
    if run.widths != widths:
        yield f"{run.name}: the steps fed {run.widths} tokens a row, not {widths}"
    for place, choice in zip(way.place.tolist(), way.choice.tolist(), strict=True):
        row, position = baselines.where(place)
        id = run.ids[row][position + 1 - len(prompts[row])]
        if id != choice:
            yield f"{run.name}: row {row}, position {position}: token {id} was taken, and its logits prefer {choice}"
            return


def _divergences(
    prompts: Texts,
    runs: tuple[FreeRun, FreeRun],
    starts: Sequence[int],
    ways: tuple[Comparison, Comparison, Comparison],
    bound: Tensor,
) -> Iterator[Divergence]:
    for row, steps in enumerate(_comparable(*runs)):
        step, position = steps - 1, len(prompts[row]) + steps - 2
        if not steps or runs[0].ids[row][step] == runs[1].ids[row][step]:
            continue
        place = starts[row] + position
        margins = [float(way.margin[place]) for way in ways]
        yield Divergence(
            row,
            step,
            position,
            tokens=[run.ids[row][step] for run in runs],
            margins=[margin if math.isfinite(margin) else None for margin in margins],
            explained=margins[-1] <= 2 * float(bound[place]),
        )
