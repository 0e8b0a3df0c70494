"""How well a model predicts a text, by itself and with a kind of KV cache. The command is `llama.cli.perplexity`.

A kind of cache that keeps less than all keys and values, or keeps them rounded, changes what comes out. Here is how
much: perplexity, the divergence of what is expected at each position, and how often the same token is the most likely.
Knows models and ids. Log-likelihoods are in nats, ids are a list.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.cli.progress import progress_bar
from llama.kv_cache import Cache
from llama.model import Transformer

CONTEXT, PROMPT_LEN = 1024, 64  # of a window; of what is fed in one pass before the steps
_CHUNK = 64  # positions whose log-probabilities are computed at a time: 32 MB for a vocabulary of 128,256


@dataclass(frozen=True)
class Score:
    """How well a text was predicted: the tokens that were scored, and the mean of their negative log-likelihoods."""

    tokens: int
    mean_nll: float
    context: int
    stride: int

    @property
    def perplexity(self) -> float:
        """Return exp(mean_nll): among how many equally likely tokens the model chose, so to speak."""
        return _exp(self.mean_nll)


@dataclass(frozen=True)
class Comparison:
    """How far expectations are from those of a reference, over the same positions of the same text.

    mean_kl: the mean of KL(reference || other). top1_agreement: the share of positions at which both find the same
    token the most likely.
    """

    tokens: int
    prompt_len: int
    mean_kl: float
    top1_agreement: float
    reference_nll: float
    other_nll: float

    @property
    def reference_perplexity(self) -> float:
        return _exp(self.reference_nll)

    @property
    def other_perplexity(self) -> float:
        return _exp(self.other_nll)


def windows(length: int, *, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end) for each window of a text: tokens begin .. end - 1 are fed, those from `first` scored.

    Windows are of `context` tokens, the last may be shorter, and each begins `stride` behind the one before. So every
    token is scored once, behind at least context - stride others but in the first window; the first token of a text,
    and where stride equals context of each window, has nothing before it and is not scored.
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
    """Score a text without a cache, in windows of `context` tokens that begin `stride` (half of it) behind each other.

    One pass a window. The documented code of Hugging Face (see `windows`) weights a window by one token less than it
    scores; here every token weighs the same. Raises ValueError for a text of less than two tokens, and for windows that
    the model cannot read.
    """
    stride = max(context // 2, 1) if stride is None else stride
    _check_windows(model, len(ids), context=context, stride=stride)
    tokens = torch.tensor(ids, device=model.device)
    nll, scored = 0.0, 0
    uncached = model.with_kv_caching(False)
    with progress_bar("scoring", total=len(ids) - 1, unit="token") as bar:
        for begin, first, end in windows(len(ids), context=context, stride=stride):
            logits = uncached(tokens[None, begin:end])[0]  # (end - begin, vocab)
            nll += _nll(logits[first - 1 - begin : -1], tokens[first:end])
            scored += end - first
            bar.update(end - first)
    return Score(scored, nll / scored, context, stride)


def cached_perplexity(
    model: Transformer, ids: Sequence[int], *, context: int = CONTEXT, prompt_len: int = PROMPT_LEN
) -> Score:
    """Score a text with the model's own kind of cache, which is read for every scored token but a window's first.

    As `perplexity` with stride = context - prompt_len, but of each window `prompt_len` tokens are fed in one pass and
    the others one by one. The first `prompt_len` tokens of the text are not scored. Raises ValueError as `perplexity`.
    """
    _check_prompt(len(ids), prompt_len=prompt_len, context=context)
    stride = context - prompt_len
    _check_windows(model, len(ids), context=context, stride=stride)
    nll, scored = 0.0, 0
    with progress_bar("scoring", total=len(ids) - prompt_len, unit="token") as bar:
        for begin in range(0, len(ids) - prompt_len, stride):
            window = ids[begin : begin + context]
            with closing(expected(model, window, prompt_len=prompt_len)) as steps:
                for logprobs, id in zip(steps, window[prompt_len:], strict=True):
                    nll -= float(logprobs[id])
                    scored += 1
                    bar.update()
    return Score(scored, nll / scored, context, stride)


def expected(
    model: Transformer, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN, cache: Cache | None = None
) -> Generator[Tensor, None, None]:
    """Yield what the model expects at each position from `prompt_len` on: log-probabilities, (vocab,).

    They are of ids[prompt_len], ids[prompt_len + 1], ... to the last, whatever these are (teacher forcing). The first
    `prompt_len` ids are fed in one pass, the others one by one, through `cache`, an empty one; by default a new one of
    the model's kind. They are float64 where the device has it: two caches that differ by little more than rounding
    would differ by the rounding of float32 here.
    """
    with closing(next_logits(model, ids, prompt_len=prompt_len, cache=cache)) as steps:
        for logits in steps:
            yield log_probabilities(logits)


def next_logits(
    model: Transformer, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN, cache: Cache | None = None
) -> Generator[Tensor, None, None]:
    """Yield the logits, (vocab,), of which `expected` gives the log-probabilities."""
    _check_prompt(len(ids), prompt_len=prompt_len)
    cache = model.new_cache(rows=1, length=len(ids) - 1) if cache is None else cache
    model.args.check_room(1, 0 if cache.bound else len(ids) - 1)  # now, not after all the steps before the limit
    tokens = torch.tensor(ids, device=model.device)[None]  # (1, length)
    starts = [0, *range(prompt_len, len(ids) - 1)]
    cached = model.with_kv_caching(True)
    for start, end in zip(starts, [*starts[1:], len(ids) - 1], strict=True):
        with torch.inference_mode():
            logits: Tensor = cached(tokens[:, start:end], start, cache=cache, logits="last")[0, -1]
        yield logits


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits, (vocab,), in float64 where the device has it."""
    return logits.log_softmax(-1, dtype=logits.dtype if logits.device.type == "mps" else torch.float64)


def compare(model: Transformer, kind: str, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN) -> Comparison:
    """Compare what a model expects of a text through a cache of this kind with its own kind's; see `expected`.

    Both go in lockstep, so that no more than two positions' log-probabilities are held. Raises ValueError for a kind
    that is not known, and as `expected`.
    """
    cache = model.new_cache(kind, rows=1, length=len(ids) - 1)
    with (
        closing(expected(model, ids, prompt_len=prompt_len)) as ours,
        closing(expected(model, ids, prompt_len=prompt_len, cache=cache)) as theirs,
    ):
        return compared(ours, theirs, ids, prompt_len=prompt_len)


def compared(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], ids: Sequence[int], *, prompt_len: int = PROMPT_LEN
) -> Comparison:
    """Return how far `theirs` are from `ours`, both what `expected` yields for the same ids."""
    kl = same = nll = other_nll = 0.0
    wanted = ids[prompt_len:]
    with progress_bar("scoring", total=len(wanted), unit="token") as bar:
        for full, changed, token in zip(ours, theirs, wanted, strict=True):
            kl += float(F.kl_div(changed, full, reduction="sum", log_target=True))  # KL(full || changed)
            same += int(full.argmax()) == int(changed.argmax())
            nll -= float(full[token])
            other_nll -= float(changed[token])
            bar.update()
    n = len(wanted)
    return Comparison(n, prompt_len, kl / n, same / n, nll / n, other_nll / n)


def _nll(logits: Tensor, ids: Tensor) -> float:
    """Return the sum of the negative log-likelihoods of ids, (n,), under logits, (n, vocab), in float32 or wider."""
    parts = (slice(begin, begin + _CHUNK) for begin in range(0, len(ids), _CHUNK))
    return math.fsum(float(F.cross_entropy(logits[part], ids[part], reduction="sum")) for part in parts)


def _exp(nll: float) -> float:
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _check_windows(model: Transformer, length: int, *, context: int, stride: int) -> None:
    if not 2 <= context <= model.args.max_seq_len:
        raise ValueError(
            f"context={context} must be from 2 to the model's max_seq_len={model.args.max_seq_len}; "
            "give another context, or load the model with a larger max_seq_len"
        )
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} must be from 1 to context={context}, or tokens would be passed over")
    if length < 2:
        raise ValueError(f"the text has {length} tokens, and the first has nothing before it; give a longer text")


def _check_prompt(length: int, *, prompt_len: int, context: int | None = None) -> None:
    if prompt_len < 1:
        raise ValueError(f"prompt_len={prompt_len} must be at least 1: the first token has nothing before it")
    if context is not None and context <= prompt_len:
        raise ValueError(f"context={context} must be above prompt_len={prompt_len}, or no token would be scored")
    if length <= prompt_len:
        raise ValueError(
            f"the text has {length} tokens, and those past prompt_len={prompt_len} are scored; "
            "give a longer text, or a smaller prompt_len"
        )
