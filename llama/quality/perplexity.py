"""The perplexity of a model on a text, with and without a kind of KV cache.

A kind of cache that drops or rounds keys and values changes the model's predictions. Perplexity, the KL divergence at
each position and the share of equal most likely tokens measure how much. Knows models and ids. Log-likelihoods are in
nats, ids are a list.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.host.progress import progress_bar
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.ops import widest
from llama.quality.intervals import mean_interval, means_of_blocks

CONTEXT, PROMPT_LEN = 1024, 64  # tokens of a window, and those of them that are fed in one pass before the steps
_CHUNK = 64  # positions whose losses are computed at a time: 32 MB for a vocabulary of 128,256


@dataclass(frozen=True)
class Score:
    """The number of scored tokens of a text, and the mean of their negative log-likelihoods with its 95 % interval.

    nll_interval: of the mean, from blocks of neighbouring tokens; None if they are too few.
    """

    tokens: int
    mean_nll: float
    context: int
    stride: int
    nll_interval: tuple[float, float] | None = None

    @classmethod
    def of(cls, nlls: Sequence[float], context: int, stride: int) -> "Score":
        """Return the score of tokens, in the order of the text."""
        return cls(len(nlls), math.fsum(nlls) / len(nlls), context, stride, mean_interval(tuple(means_of_blocks(nlls))))

    @property
    def perplexity(self) -> float:
        """Return exp(mean_nll), inf if that overflows."""
        return _exp(self.mean_nll)

    @property
    def perplexity_interval(self) -> tuple[float, float] | None:
        return self.nll_interval and (_exp(self.nll_interval[0]), _exp(self.nll_interval[1]))


def _exp(nats: float) -> float:
    return math.inf if nats >= 709 else math.exp(nats)


@dataclass(frozen=True)
class Comparison:
    """How far predictions are from those of a reference, over the same positions of the same text.

    mean_kl: the mean of KL(reference || other).
    top1_agreement: the share of positions at which both have the same most likely token.
    reference_nll, other_nll: the means of the negative log-likelihoods. Perplexity is exp of one.
    kls, other_nlls: the divergence and the other's negative log-likelihood at each position.
    """

    tokens: int
    mean_kl: float
    top1_agreement: float
    reference_nll: float
    other_nll: float
    kls: list[float]
    other_nlls: list[float]


def windows(length: int, *, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end) of each window: tokens begin .. end - 1 are fed, and those from `first` on are scored.

    A window has `context` tokens (the last one may have fewer) and begins `stride` tokens after the one before. So
    every token is scored once, after at least context - stride tokens except in the first window. A token with nothing
    before it is not scored: the first of the text, and the first of every window if stride equals context.
    Source: "Perplexity of fixed-length models", https://huggingface.co/docs/transformers/perplexity
    """
    scored = 1
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        if max(scored, begin + 1) < end:
            yield begin, max(scored, begin + 1), end
        if end == length:
            return
        scored = end


@torch.inference_mode()
def perplexity(model: Transformer, ids: Sequence[int], *, context: int = CONTEXT, stride: int | None = None) -> Score:
    """Score a text without a cache, one pass a window; `stride` is half of `context` by default, see `windows`.

    The documented code of Hugging Face weights a window by one token less than it scores; here all tokens have the same
    weight. Raises ValueError for fewer than two tokens, and for windows longer than the model's limit.
    """
    stride = max(context // 2, 1) if stride is None else stride
    _check_windows(model, len(ids), context=context, stride=stride)
    tokens = torch.tensor(ids, device=model.device)
    nlls = list[float]()
    uncached = model.with_kv_caching(False)
    with progress_bar("scoring", total=len(ids) - 1, unit="token") as bar:
        for begin, first, end in windows(len(ids), context=context, stride=stride):
            logits = uncached(tokens[None, begin:end])[0]  # (end - begin, vocab)
            nlls += _nlls(logits[first - 1 - begin : -1], tokens[first:end])
            bar.update(end - first)
    return Score.of(nlls, context, stride)


def cached_perplexity(
    model: Transformer, ids: Sequence[int], *, context: int = CONTEXT, prompt_len: int = PROMPT_LEN
) -> Score:
    """Score a text through the model's kind of cache, token by token after the first `prompt_len` of each window.

    The windows are those of stride = context - prompt_len. The first `prompt_len` tokens of the text are not scored.
    Raises ValueError as `perplexity` does.
    """
    _check_prompt(len(ids), prompt_len=prompt_len, context=context)
    stride = context - prompt_len
    _check_windows(model, len(ids), context=context, stride=stride)
    nlls = list[float]()
    with progress_bar("scoring", total=len(ids) - prompt_len, unit="token") as bar:
        for begin in range(0, len(ids) - prompt_len, stride):
            window = ids[begin : begin + context]
            with closing(next_logits(model, window, prompt_len=prompt_len)) as steps:
                for logits, id in zip(steps, window[prompt_len:], strict=True):
                    nlls.append(-float(_log_probabilities(logits)[id]))
                    bar.update()
    return Score.of(nlls, context, stride)


def next_logits(
    model: Transformer, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN, cache: Cache | None = None
) -> Generator[Tensor, None, None]:
    """Yield the logits, (vocab,), that predict each id from `prompt_len` on, with teacher forcing.

    The first `prompt_len` ids are fed in one pass, the others one by one, through `cache`, which must be empty; by
    default a new one of the model's kind.
    """
    _check_prompt(len(ids), prompt_len=prompt_len)
    cache = model.new_cache(rows=1, length=len(ids) - 1) if cache is None else cache
    model.args.check_room(1, 0 if cache.bound else len(ids) - 1)  # before the first step, not at the limit
    tokens = torch.tensor(ids, device=model.device)[None]  # (1, length)
    starts = [0, *range(prompt_len, len(ids) - 1)]
    cached = model.with_kv_caching(True)
    for start, end in zip(starts, [*starts[1:], len(ids) - 1], strict=True):
        with torch.inference_mode():
            logits: Tensor = cached(tokens[:, start:end], start, cache=cache, logits="last")[0, -1]
        yield logits


def _log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits, (vocab,), in float64 if the device has it.

    float32 would round away small differences between two kinds of cache.
    """
    return widest(logits).log_softmax(-1)


def compare(model: Transformer, kind: str, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN) -> Comparison:
    """Compare a model's predictions of a text through a cache of this kind with those through the model's own kind.

    Both run in lockstep, so the logits of only one position are in memory. Raises ValueError for an unknown kind, and
    as `next_logits` does.
    """
    cache = model.new_cache(kind, rows=1, length=len(ids) - 1)
    with (
        closing(next_logits(model, ids, prompt_len=prompt_len)) as ours,
        closing(next_logits(model, ids, prompt_len=prompt_len, cache=cache)) as theirs,
    ):
        return compared(ours, theirs, ids, prompt_len=prompt_len)


def compared(
    reference: Iterable[Tensor], other: Iterable[Tensor], ids: Sequence[int], *, prompt_len: int = PROMPT_LEN
) -> Comparison:
    """Compare two iterables of logits, as `next_logits` yields them for the same ids."""
    same = nll = 0.0
    kls, nlls = list[float](), list[float]()
    targets = ids[prompt_len:]
    with progress_bar("scoring", total=len(targets), unit="token") as bar:
        for ours, theirs, token in zip(reference, other, targets, strict=True):
            full, changed = _log_probabilities(ours), _log_probabilities(theirs)
            kls.append(float(F.kl_div(changed, full, reduction="sum", log_target=True)))  # KL(full || changed)
            same += int(full.argmax()) == int(changed.argmax())
            nll -= float(full[token])
            nlls.append(-float(changed[token]))
            bar.update()
    n = len(targets)
    return Comparison(n, sum(kls) / n, same / n, nll / n, sum(nlls) / n, kls, nlls)


def _nlls(logits: Tensor, ids: Tensor) -> list[float]:
    """Return the negative log-likelihoods of ids, (n,), under logits, (n, vocab)."""
    parts = (slice(begin, begin + _CHUNK) for begin in range(0, len(ids), _CHUNK))
    return [one for part in parts for one in F.cross_entropy(logits[part], ids[part], reduction="none").tolist()]


def _check_windows(model: Transformer, length: int, *, context: int, stride: int) -> None:
    if not 2 <= context <= model.args.max_seq_len:
        raise ValueError(
            f"context={context} must be from 2 to the model's max_seq_len={model.args.max_seq_len}; "
            "give another context, or load the model with a larger max_seq_len"
        )
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} must be from 1 to context={context}, or tokens would be skipped")
    if length < 2:
        raise ValueError(f"the text has {length} tokens, and the first has nothing before it; give a longer text")


def _check_prompt(length: int, *, prompt_len: int, context: int | None = None) -> None:
    if prompt_len < 1:
        raise ValueError(f"prompt_len={prompt_len} must be at least 1: the first token has nothing before it")
    if context is not None and context <= prompt_len:
        raise ValueError(f"context={context} must be above prompt_len={prompt_len}, or no token would be scored")
    if length <= prompt_len:
        raise ValueError(
            f"the text has {length} tokens, and only those after prompt_len={prompt_len} are scored; "
            "give a longer text, or a smaller prompt_len"
        )
