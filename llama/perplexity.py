"""The perplexity of a model on a text, with and without a kind of KV cache: python -m llama.perplexity --text FILE.

A kind of cache that drops or rounds keys and values changes the model's predictions. Perplexity, the KL divergence at
each position and the share of equal most likely tokens measure how much. Knows models and ids; only `main` knows texts
and checkpoints. Log-likelihoods are in nats, ids are a list.
"""

import json as json_format
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama import console

if __name__ == "__main__":
    console.quiet_imports()

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.cores import FreeCores
from llama.files import TEXT_LIMIT, read_text
from llama.kv_cache import Cache, cache_kind
from llama.machine import dtype_name
from llama.model import Transformer
from llama.parallel import world_size
from llama.progress import progress_bar
from llama.streaming import encode_prompt

CONTEXT, PROMPT_LEN = 1024, 64  # tokens of a window, and those of them that are fed in one pass before the steps
_CHUNK = 64  # positions whose losses are computed at a time: 32 MB for a vocabulary of 128,256


@dataclass(frozen=True)
class Score:
    """The number of scored tokens of a text, and the mean of their negative log-likelihoods."""

    tokens: int
    mean_nll: float
    context: int
    stride: int

    @property
    def perplexity(self) -> float:
        """Return exp(mean_nll)."""
        return _exp(self.mean_nll)


@dataclass(frozen=True)
class Comparison:
    """How far predictions are from those of a reference, over the same positions of the same text.

    mean_kl: the mean of KL(reference || other). top1_agreement: the share of positions at which both have the same
    most likely token.
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
    """Score a text through the model's kind of cache, token by token after the first `prompt_len` of each window.

    The windows are those of stride = context - prompt_len. The first `prompt_len` tokens of the text are not scored.
    Raises ValueError as `perplexity` does.
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
    """Yield the predicted log-probabilities, (vocab,), of each position from `prompt_len` on, with teacher forcing.

    The first `prompt_len` ids are fed in one pass, the others one by one, through `cache`, which must be empty; by
    default a new one of the model's kind. float64 if the device has it: float32 would round away small differences
    between two kinds of cache.
    """
    with closing(next_logits(model, ids, prompt_len=prompt_len, cache=cache)) as steps:
        for logits in steps:
            yield log_probabilities(logits)


def next_logits(
    model: Transformer, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN, cache: Cache | None = None
) -> Generator[Tensor, None, None]:
    """Yield the logits, (vocab,), of the positions of `expected`."""
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


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits, (vocab,), in float64 if the device has it."""
    return logits.log_softmax(-1, dtype=logits.dtype if logits.device.type == "mps" else torch.float64)


def compare(model: Transformer, kind: str, ids: Sequence[int], *, prompt_len: int = PROMPT_LEN) -> Comparison:
    """Compare a model's predictions of a text through a cache of this kind with those through the model's own kind.

    Both run in lockstep, so the log-probabilities of only one position are in memory. Raises ValueError for an unknown
    kind, and as `expected` does.
    """
    cache = model.new_cache(kind, rows=1, length=len(ids) - 1)
    with (
        closing(expected(model, ids, prompt_len=prompt_len)) as ours,
        closing(expected(model, ids, prompt_len=prompt_len, cache=cache)) as theirs,
    ):
        return compared(ours, theirs, ids, prompt_len=prompt_len)


def compared(
    reference: Iterable[Tensor], other: Iterable[Tensor], ids: Sequence[int], *, prompt_len: int = PROMPT_LEN
) -> Comparison:
    """Compare two iterables of log-probabilities, as `expected` yields them for the same ids."""
    kl = same = nll = other_nll = 0.0
    targets = ids[prompt_len:]
    with progress_bar("scoring", total=len(targets), unit="token") as bar:
        for full, changed, token in zip(reference, other, targets, strict=True):
            kl += float(F.kl_div(changed, full, reduction="sum", log_target=True))  # KL(full || changed)
            same += int(full.argmax()) == int(changed.argmax())
            nll -= float(full[token])
            other_nll -= float(changed[token])
            bar.update()
    n = len(targets)
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


# ---- the command -----------------------------------------------------------------------------------------------------


def main(
    *,
    text: str | None = None,
    ckpt_dir: str = "demo",
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    kv_cache: str | None = None,
    prompt_len: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    fast: bool = False,
    quantize: str | None = None,
    activations: int = 16,
    repack: bool = True,
    json: bool = False,
) -> int:
    """Print a model's perplexity on a text, without a cache in one pass a window, or with a kind of cache.

    Args:
        text: The file to score, UTF-8.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        context: The tokens of a window; by default 1024, or the model's max_seq_len if that is less.
        stride: The distance between the starts of windows; by default half a context. Each token is scored once.
        tokens: How many tokens of the text to score; by default all.
        kv_cache: A kind of cache, such as static, concat or file.py:kind, through which the text is fed token by token.
        prompt_len: With kv_cache, the tokens of a window that are fed in one pass before the others; by default 64.
        dtype: The dtype to compute in: auto, fp32, bf16, fp16 or fp64.
        device: The device to compute on: auto, cpu, cuda or mps.
        fast: Use the fastest implementation of the forward that this machine supports.
        quantize: The format of the weights in memory: int8, int4, stored (as in the .gguf file), or none.
        activations: With quantize, 8 rounds the inputs of quantised products to 8 bits; the default is 16.
        repack: With stored weights, --repack=False leaves them in their file, mapped.
        json: Print JSON.
    """
    path = _check_flags(text, stride=stride, tokens=tokens, kv_cache=kv_cache, prompt_len=prompt_len)
    from llama.api import load, pick_device

    words = read_text(path, limit=TEXT_LIMIT)
    kind = "static" if kv_cache is None else cache_kind(kv_cache)
    packing: dict[str, Any] = {"quantize": quantize, "activations": activations, "repack": repack}
    if pick_device(device).type == "cpu":
        FreeCores().choose_threads(console.say)
    model, tokenizer = load(ckpt_dir, dtype=dtype, device=device, kv_cache=kind, fast=fast, **packing)
    ids = encode_prompt(tokenizer, words)[:tokens]
    context = min(CONTEXT, model.args.max_seq_len) if context is None else context
    if kv_cache is None:
        score = perplexity(model, ids, context=context, stride=stride)
    else:
        prompt_len = PROMPT_LEN if prompt_len is None else prompt_len
        score = cached_perplexity(model, ids, context=context, prompt_len=prompt_len)
    facts: dict[str, object] = {"text": text, "text_tokens": len(ids), "bos": tokenizer.adds_bos, "model": ckpt_dir}
    facts |= {"dtype": dtype_name(model.norm.weight.dtype), "device": str(model.device)}
    facts |= {"execution": str(model.execution), "kv_cache": kv_cache, "prompt_len": prompt_len}
    scored = {"perplexity": score.perplexity, **asdict(score)}
    console.put(json_format.dumps({**scored, **facts}, indent=2) if json else report(score, facts))
    return 0


def report(score: Score, facts: Mapping[str, object]) -> str:
    """Return a score, its text and its settings, as lines of text."""
    how = "off, one pass a window"
    if facts["kv_cache"] is not None:
        how = f"{facts['kv_cache']}, {facts['prompt_len']} tokens of a window in one pass, the others one by one"
    scored = f"{score.tokens:,} scored of {facts['text_tokens']:,}, {'BOS first' if facts['bos'] else 'no BOS'}"
    return "\n".join(
        [
            f"perplexity {score.perplexity:.4f}, mean negative log-likelihood {score.mean_nll:.5f} nats a token",
            f"tokens     {scored}",
            f"windows    context {score.context:,}, stride {score.stride:,}",
            f"KV cache   {how}",
            f"text       {facts['text']}",
            f"model      {facts['model']}, {facts['dtype']} on {facts['device']}, {facts['execution']}",
        ]
    )


def _check_flags(
    text: str | None, *, stride: int | None, tokens: int | None, kv_cache: str | None, prompt_len: int | None
) -> Path:
    """Return the file to read; raise ValueError for flags that are wrong with any model."""
    if world_size() > 1:
        raise ValueError("this command scores in one process; start it without torchrun")
    if text is None:
        raise ValueError("there is no text to score; name a file by --text FILE")
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens={tokens} must be at least 2: the first has nothing before it")
    if kv_cache is None and prompt_len is not None:
        raise ValueError(f"prompt_len={prompt_len} needs --kv_cache; give both, or none")
    if kv_cache is not None and stride is not None:
        raise ValueError(f"stride={stride} cannot be set with kv_cache: it is context - prompt_len; leave stride out")
    return Path(text)


if __name__ == "__main__":
    from llama import cli

    cli.main(main)
