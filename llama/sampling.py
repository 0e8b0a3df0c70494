"""Choose token ids from logits: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Does not know models or text. Every row has its own random stream, so its draws for a given seed do not depend on the
other rows.
"""

import copy
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llama.ops import widest
from llama.schemas import Matcher

# Sorting a whole vocabulary can take longer than a step of a small model, so this many tokens are sorted first.
_CANDIDATES = 1024

Number = float | Tensor


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling, in the order in which they apply; each applies to the result of the one before.

    repetition_penalty: divide positive logits of tokens that the row contains by it, and multiply negative ones
        (https://arxiv.org/abs/1909.05858, as in transformers); 1 does nothing. It also applies to greedy sampling.
    temperature: divide logits by it; 0 is greedy: the most likely token, whatever is set below.
    top_k: keep the k most likely tokens; None keeps all.
    top_p: keep the fewest most likely tokens whose probabilities sum to p (https://arxiv.org/abs/1904.09751);
        1 keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely one (https://arxiv.org/abs/2407.01082).

    Tokens are ordered by their logits, equal logits by id.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_between("temperature", self.temperature, 0, math.inf)
        _check_between("top_p", self.top_p, 0, 1)
        _check_between("min_p", self.min_p, 0, 1)
        _check_between("repetition_penalty", self.repetition_penalty, 0, math.inf)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty=0 must be above 0; 1 turns it off")
        top_k = whole_number(self.top_k)
        if self.top_k is not None and (top_k is None or not 1 <= top_k < 2**63):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number, at least 1, below 2**63, or None for all")
        object.__setattr__(self, "top_k", top_k)  # native code takes no number of NumPy

    @property
    def settings(self) -> "Settings":
        penalty = self.repetition_penalty if self.repetition_penalty != 1 else None
        if self.temperature == 0:
            return Settings(None, None, None, None, penalty)
        return Settings(
            temperature=self.temperature,
            top_p=self.top_p if self.top_p < 1 else None,
            top_k=self.top_k,
            min_p=self.min_p if self.min_p > 0 else None,
            penalty=penalty,
        )


class Settings(NamedTuple):
    """The numbers of a Sampling, or None for a step that does nothing. On a GPU they are tensors of one number."""

    temperature: Number | None  # None: greedy
    top_p: Number | None
    top_k: Number | None
    min_p: Number | None
    penalty: Number | None


class Sampler:
    """The state of sampling of one row: its settings, its random stream, and the tokens that it contains.

    seen: which tokens the row contains, (vocab,) bool on the CPU; None without a penalty.
    matcher: its new tokens against a JSON Schema, which masks all others before temperature; None without one.
    """

    def __init__(
        self,
        sampling: Sampling,
        stream: torch.Generator,
        prompt: Sequence[int],
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        self.sampling, self._stream, self.matcher = sampling, stream, matcher
        self._spared: list[float] = []  # drawn, but not used yet
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
            self.seen[list(prompt)] = True
            self._marks = self.seen.numpy()  # the same memory: to mark a token takes 0.1 us instead of 5

    def draw(self) -> float:
        """Return a number in [0, 1) from the row's stream; 0 for greedy sampling, which draws none."""
        if self.sampling.temperature == 0:
            return 0.0
        if self._spared:
            return self._spared.pop(0)
        return torch.rand((), generator=self._stream, dtype=torch.float64, device="cpu").item()

    def put_back(self, draws: Sequence[float]) -> None:
        """Return draws that were not used; `draw` will return them again, in order."""
        if self.sampling.temperature != 0:
            self._spared[:0] = draws

    @property
    def plain(self) -> bool:
        """Whether a token's logit and the settings alone decide whether it may be chosen."""
        return self.seen is None and self.matcher is None

    def saw(self, id: int) -> None:
        """Note that the row contains a token."""
        if self.seen is not None:
            self._marks[id] = True
        if self.matcher is not None:
            self.matcher.accept(id)

    def ahead(self, guess: Sequence[int]) -> "list[Sampler]":
        """Return the samplers of the next token and of those behind each token of a guess, on one stream."""
        samplers = [self]
        for id in guess:
            samplers.append(samplers[-1] if self.matcher is None else copy.copy(samplers[-1]))
            if (before := samplers[-2].matcher) is not None:
                samplers[-1].matcher = later = before.copy()
                later.accept(id)
        return samplers


def choose_rows(logits: Tensor, samplers: Sequence[Sampler], draws: Tensor | None) -> Tensor:
    """Choose the next token of every row by the row's own settings: (bsz, vocab) logits -> (bsz,) int64.

    draws: a random number of each row, (bsz,) float64 on the CPU; None if all are greedy. The id is -1 if a row's
    schema has no next token, because it has become too complex for llguidance.
    """
    allowed = _allowed(samplers, logits)
    if allowed is None:
        return _choose_rows(logits, samplers, draws, None)
    return _choose_rows(logits, samplers, draws, allowed).where(allowed.any(-1), -1)


def _allowed(samplers: Sequence[Sampler], logits: Tensor) -> Tensor | None:
    """Return which tokens each row may get, (bsz, vocab) bool; None if no row has a schema."""
    if all(sampler.matcher is None for sampler in samplers):
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool, device="cpu")
    for row, sampler in enumerate(samplers):
        if sampler.matcher is not None:
            allowed[row] = sampler.matcher.mask()
    return allowed.to(logits.device)


def _choose_rows(logits: Tensor, samplers: Sequence[Sampler], draws: Tensor | None, allowed: Tensor | None) -> Tensor:
    settings = list(dict.fromkeys(sampler.sampling for sampler in samplers))
    if len(settings) == 1:
        return _choose_alike(logits, samplers, draws, allowed)
    chosen = torch.empty(len(samplers), dtype=torch.int64, device=logits.device)
    for sampling in settings:
        rows = [row for row, sampler in enumerate(samplers) if sampler.sampling == sampling]
        own = None if draws is None else draws[rows]
        masks = None if allowed is None else allowed[rows]
        chosen[rows] = _choose_alike(logits[rows], [samplers[row] for row in rows], own, masks)
    return chosen


def _choose_alike(logits: Tensor, samplers: Sequence[Sampler], draws: Tensor | None, allowed: Tensor | None) -> Tensor:
    """Choose the next token of rows of the same settings."""
    seen = None
    if samplers[0].seen is not None:
        seen = torch.stack([sampler.seen for sampler in samplers if sampler.seen is not None]).to(logits.device)
    return choose(logits, samplers[0].sampling.settings, seen, draws, allowed=allowed)[0]


def choose(
    logits: Tensor,
    settings: Settings,
    seen: Tensor | None,
    draws: Tensor | None,
    *,
    whole: bool | None = None,
    allowed: Tensor | None = None,
    nucleus: Callable[[Tensor, Number, Number, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Choose the next token of every row from (bsz, vocab) logits, and mark it in `seen`.

    seen: (bsz, vocab) bool, read with a penalty only. draws: a random number of each row. whole: see `most_likely`.
    allowed: (bsz, vocab) bool, the tokens that may be chosen; None for all.
    nucleus: chooses as this function does from logits, temperature, top_p and draws, and returns what this function
        returns. It is used if neither top_k nor min_p is set, and `whole` is not True.
    Returns the ids, (bsz,) int64, and the rows whose ids are certain, (bsz,) bool, or None for all rows.
    """
    if settings.penalty is not None:
        assert seen is not None
        logits = penalize(logits, seen, settings.penalty)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    sure = None
    if settings.temperature is None or draws is None:
        chosen = logits.argmax(-1)  # the first of equals
    elif nucleus and not whole and settings.top_p is not None and settings.top_k is None and settings.min_p is None:
        chosen, sure = nucleus(logits, settings.temperature, settings.top_p, draws)
    else:
        probs, ids = _probabilities(logits, settings.temperature), None
        if settings.top_k is not None or settings.top_p is not None:
            probs, ids, sure = most_likely(logits, probs, settings.top_k, settings.top_p, whole=whole)
        chosen = _drawn(probs, ids, settings.min_p, draws)
    if settings.penalty is not None and seen is not None:
        seen.scatter_(1, chosen[:, None], True)
    return chosen, sure


def check_seed(seed: object) -> int:
    """Return `seed` as an int, also one of NumPy; raise ValueError unless a PyTorch generator accepts it."""
    whole = whole_number(seed)
    if whole is None or not -(2**63) <= whole < 2**64:
        raise ValueError(f"seed={seed!r} must be a whole number from -2**63 to 2**64 - 1")
    return whole


def whole_number(value: object) -> int | None:
    """Return a whole number as an int, also one of NumPy or PyTorch; None for any other value, such as True."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def row_streams(seed: int | Sequence[int] | None, rows: int) -> list[torch.Generator]:
    """Return a CPU generator per row, seeded with seed + row, with the row's item of a list, or randomly for None."""
    if seed is None:
        seeds = [torch.Generator().seed() for _ in range(rows)]
    elif (first := whole_number(seed)) is not None:
        seeds = [first + row for row in range(rows)]
    else:
        seeds = list(seed) if isinstance(seed, Iterable) else [check_seed(seed)]
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds were given for {rows} rows; give one int, or one seed per row")
    return [torch.Generator().manual_seed(check_seed(seed)) for seed in seeds]


def penalize(logits: Tensor, seen: Tensor, penalty: Number) -> Tensor:
    """Make the tokens marked in `seen`, (bsz, vocab) bool, less likely."""
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized.nan_to_num(), logits)  # a penalty outside float32's range gives 0 * inf


def _probabilities(logits: Tensor, temperature: Number) -> Tensor:
    logits = widest(logits)
    logits = logits - logits.amax(-1, keepdim=True)  # first, so that a tiny temperature cannot overflow
    return (logits / temperature).softmax(-1)


def _drawn(probs: Tensor, ids: Tensor | None, min_p: Number | None, draws: Tensor) -> Tensor:
    """Apply min_p and draw. `ids` are those of sorted probabilities, None for unsorted ones."""
    if min_p is not None:
        probs = torch.where(probs < min_p * probs.amax(-1, keepdim=True), 0, probs)
    chosen = _draw(probs, draws.to(probs, non_blocking=True))
    return chosen if ids is None else ids.gather(-1, chosen[:, None])[:, 0]


def most_likely(
    logits: Tensor, probs: Tensor, top_k: Number | None, top_p: Number | None, *, whole: bool | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the most likely tokens' probabilities, 0 for those that top_k and top_p drop, and their ids.

    Both are (bsz, n), in order of falling logits, equal ones by id. Probabilities cannot be sorted instead: at a high
    temperature those of different logits are equal. `whole`: sort the whole vocabulary, or only _CANDIDATES tokens;
    None sorts all of it only if they are not enough, and waits for the device to find out. The third result are the
    rows for which they were enough, (bsz,) bool, None for all rows.
    """
    if not (must_sort(probs.shape[-1], top_k) if whole is None else whole):
        kept, ids, sure = _candidates(logits, probs, top_k, top_p)
        if whole is False:
            return kept, ids, sure
        if bool(sure.all()):  # on a GPU this waits, right before the wait for the ids
            return kept, ids, None
    _, ids = logits.sort(dim=-1, descending=True, stable=True)
    return _keep(probs.gather(-1, ids), top_k, top_p, probs), ids, None


def must_sort(vocab: int, top_k: Number | None) -> bool:
    """Return True if _CANDIDATES tokens cannot be enough, or are most of the vocabulary."""
    return vocab <= 2 * _CANDIDATES or (top_k is not None and bool(top_k >= _CANDIDATES))


def _candidates(
    logits: Tensor, probs: Tensor, top_k: Number | None, top_p: Number | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `most_likely` does for _CANDIDATES tokens, and the rows for which they are enough, (bsz,) bool."""
    top, ids = logits.topk(_CANDIDATES, sorted=False)
    ids, by_id = ids.sort(-1)
    _, by_logit = top.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_logit)
    top = probs.gather(-1, ids)
    kept = _keep(top, top_k, top_p, probs)
    least = kept.where(kept > 0, 2).amin(-1)
    sure = least > top[:, -1]  # the cut is above the last candidate and its possible ties
    return kept, ids, sure


def _keep(top: Tensor, top_k: Number | None, top_p: Number | None, probs: Tensor) -> Tensor:
    """Set to 0 what top_k and then top_p drop. `top` are `probs` in falling order."""
    total = probs.sum(-1, keepdim=True)
    if top_k is not None:
        top = torch.where(torch.arange(top.shape[-1], device=top.device) < top_k, top, 0)
        total = top.sum(-1, keepdim=True)
    if top_p is not None:
        before = top.cumsum(-1) - top
        keep = before < top_p * total
        keep[:, 0] = True  # top_p=0 is greedy
        top = torch.where(keep, top, 0)
    return top


def _draw(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the index at which the running sum of `probs` exceeds `draws` times its total.

    Its probability is never 0; torch.multinomial has returned such (https://github.com/pytorch/pytorch/issues/48841).
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)  # past the end only for a row of NaN, which the loop reports


def _check_between(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low <= value <= high) or value > sys.float_info.max:  # also a long whole number
        limit = f"between {low} and {high}" if high != math.inf else f"a finite number of at least {low}"
        raise ValueError(f"{name}={value!r} must be {limit}")
