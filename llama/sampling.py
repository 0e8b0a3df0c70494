"""Turns logits into token ids: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Knows nothing of models or text. Every row has a random stream of its own, so what a row draws at a given seed does
not depend on the rows beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Sorting a vocabulary takes a CPU longer than a small model takes for a token, so it looks among these many first.
_CANDIDATES = 1024


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The steps come in this order, each working on what the one before has left.

    repetition_penalty: logits of tokens that the row already has are divided by it where positive and multiplied
        where negative (https://arxiv.org/abs/1909.05858, as in transformers); 1 does nothing. It also holds for greedy.
    temperature: logits are divided by it; 0 takes the most likely token, whatever is set below.
    top_k: only the k most likely tokens; None keeps all.
    top_p: only the fewest most likely tokens whose probabilities reach p together (https://arxiv.org/abs/1904.09751);
        1 keeps all.
    min_p: only tokens at least min_p times as likely as the most likely one (https://arxiv.org/abs/2407.01082).

    Among equally likely tokens, the lowest id comes first.
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
        whole = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        if self.top_k is not None and not (whole and self.top_k >= 1):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of at least 1, or None to keep all")


class Sampler:
    """The choices of one generation: its settings, one random stream per row, and the tokens each row has."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int | Sequence[int] | None,
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sampling = sampling
        self.streams = row_streams(seed, len(prompts))
        self._spared: list[Tensor] = []  # drawn, and then not used
        self.seen: Tensor | None = None  # (bsz, vocab) bool
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                seen[row, list(prompt)] = True
            self.seen = seen.to(device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the next token of every row: (bsz, vocab) logits -> (bsz,) int64."""
        return choose(logits, self.sampling, self.seen, self.draw())

    def draw(self) -> Tensor | None:
        """Return one number in [0, 1) per row, (bsz,) float64 on the CPU; None where nothing is left to chance."""
        if self.sampling.temperature == 0:
            return None
        if self._spared:
            return self._spared.pop(0)
        return torch.stack([torch.rand((), generator=stream, dtype=torch.float64) for stream in self.streams])

    def put_back(self, draws: Sequence[Tensor]) -> None:
        """Let numbers that were drawn for steps that were not taken be drawn again, the first of them first."""
        self._spared[:0] = draws

    def note(self, chosen: Tensor) -> None:
        """Mark tokens, (bsz,), that were chosen elsewhere."""
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)


def choose(logits: Tensor, sampling: Sampling, seen: Tensor | None, draws: Tensor | None) -> Tensor:
    """Choose the next token of every row: (bsz, vocab) logits -> (bsz,) int64; and mark it in `seen`, (bsz, vocab).

    `draws` are what `Sampler.draw` returns. On a GPU nothing here waits for the host.
    """
    if seen is not None:
        logits = penalize(logits, seen, sampling.repetition_penalty)
    chosen = logits.argmax(-1) if draws is None else sample(logits, draws, sampling)  # argmax: the first of equals
    if seen is not None:
        seen.scatter_(1, chosen[:, None], True)
    return chosen


def row_streams(seed: int | Sequence[int] | None, rows: int) -> list[torch.Generator]:
    """Return one CPU generator per row: seeded with seed + row, with the row's own of a list, or afresh for None."""
    if seed is None:
        seeds = [torch.Generator().seed() for _ in range(rows)]
    elif isinstance(seed, int):
        seeds = [seed + row for row in range(rows)]
    else:
        seeds = list(seed)
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds were given for {rows} rows; give one int, or one seed per row")
    for seed in seeds:
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed={seed!r} must be a whole number from -2**63 to 2**64 - 1")
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens marked in `seen`, (bsz, vocab) bool, less likely."""
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized.nan_to_num(), logits)  # a penalty past the range of float32 makes 0 * inf


def sample(logits: Tensor, draws: Tensor, sampling: Sampling) -> Tensor:
    """Choose by one uniform draw in [0, 1) per row: (bsz, vocab) logits and (bsz,) draws -> (bsz,) int64."""
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # MPS has no float64
    logits = logits.to(wide)
    logits = logits - logits.amax(-1, keepdim=True)  # first, so that a tiny temperature cannot overflow
    probs = (logits / sampling.temperature).softmax(-1)
    ids = None
    if sampling.top_k is not None or sampling.top_p < 1:
        probs, ids = most_likely(probs, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:
        probs = torch.where(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0, probs)
    chosen = _draw(probs, draws.to(probs, non_blocking=True))
    return chosen if ids is None else ids.gather(-1, chosen[:, None])[:, 0]


def most_likely(probs: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens' probabilities, 0 for those that top_k and top_p drop, and their ids.

    Both are (bsz, n), from the most likely token on, equal ones by id.
    """
    vocab = probs.shape[-1]
    few = vocab > 2 * _CANDIDATES and (top_k is None or top_k < _CANDIDATES)
    if few and probs.device.type == "cpu":  # elsewhere the look at the outcome would be a host sync
        top, ids = probs.topk(_CANDIDATES, sorted=False)
        ids, by_id = ids.sort(-1)
        top, by_probability = top.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
        kept = _keep(top, top_k, top_p, probs)
        least = kept.where(kept > 0, 2).amin(-1)
        if bool((least > top[:, -1]).all()):  # the cut falls above the last candidate and what may tie with it
            return kept, ids.gather(-1, by_probability)
    top, ids = probs.sort(dim=-1, descending=True, stable=True)
    return _keep(top, top_k, top_p, probs), ids


def _keep(top: Tensor, top_k: int | None, top_p: float, probs: Tensor) -> Tensor:
    """Zero what top_k and then top_p drop of `top`, sorted from the most likely token on."""
    total = probs.sum(-1, keepdim=True)
    if top_k is not None and top_k < top.shape[-1]:
        top = top.clone()
        top[:, top_k:] = 0
        total = top.sum(-1, keepdim=True)
    if top_p < 1:
        before = top.cumsum(-1) - top
        keep = before < top_p * total
        keep[:, 0] = True  # top_p=0 is greedy
        top = torch.where(keep, top, 0)
    return top


def _draw(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the index at which the running sum of `probs` passes `draws` of its total; never one of probability 0.

    Written out because torch.multinomial has returned such (https://github.com/pytorch/pytorch/issues/48841).
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)  # past the end only for a row of nan, which the loop reports


def _check_between(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low <= value <= high) or value == math.inf:
        limit = f"between {low} and {high}" if high != math.inf else f"a finite number of at least {low}"
        raise ValueError(f"{name}={value!r} must be {limit}")
