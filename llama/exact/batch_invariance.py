"""Compare a model with itself: do the bits of a position's logits depend on nothing but the tokens up to it?

Nothing that computes a step faster, or exactly, is trusted before the model that uses it has passed here. Knows what
can be asked of a model; does not know how it computes, nor what a difference is called by whoever asks.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Protocol, Self

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache import Cache

FEW = 21  # positions of rows that stand beside one another: more than a block of 16 queries in exact mode


class CachedModel(Protocol):
    """What is needed of a model to compare it with itself."""

    @property
    def args(self) -> ModelArgs: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, tokens: Tensor, start_pos: int | Sequence[int] = 0, *, cache: Cache | None = None) -> Tensor: ...
    def new_cache(self) -> Cache: ...
    def with_kv_caching(self, value: bool) -> Self: ...


@torch.inference_mode()
def first_difference(model: CachedModel, *, rows: int = 2, length: int = 85) -> str | None:
    """Say where logits differ to the bit: alone, cut off, through the cache, ragged; None where they do not.

    One row is fed to `length`, in one pass and through the cache; with others beside it, all to FEW, which is cheaper.
    """
    rows, length = _sizes(model, rows, length)
    stream = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(model.args.vocab_size, (rows, length), generator=stream, device="cpu")
    tokens = tokens.to(model.device)
    last, few = tokens[-1:], tokens[:, :FEW]  # the last row stands elsewhere when it is alone
    plain, cached = model.with_kv_caching(False), model.with_kv_caching(True)
    whole, beside = plain(last), plain(few)
    if not torch.equal(beside[-1], whole[0, : few.shape[1]]):
        return f"the first {few.shape[1]} tokens, in row {rows - 1}, are not what they are alone among {length}"
    if not torch.equal(plain(few[:, :1]), beside[:, :1]):
        return f"the first token alone is not what it is among {few.shape[1]}"
    cache = model.new_cache()
    for start, end in cuts(length):
        if not torch.equal(cached(last[:, start:end], start, cache=cache), whole[:, start:end]):
            return f"tokens {start} to {end - 1}, fed through the cache, are not what they are without it"
    cache = model.new_cache()
    for start, end in cuts(few.shape[1]):
        if not torch.equal(cached(few[:, start:end], start, cache=cache), beside[:, start:end]):
            return f"tokens {start} to {end - 1} of {rows} rows, through the cache, are not what they are without it"
    starts = [row * (few.shape[1] - 1) // rows for row in range(rows)]  # all of it has been fed, and may be again
    ragged = cached(few.gather(1, torch.tensor(starts, device=model.device)[:, None]), starts, cache=cache)
    if any(not torch.equal(ragged[row, 0], beside[row, start]) for row, start in enumerate(starts)):
        return f"rows at positions {starts} are not what they are at one"
    return None


def tokens_fed(model: CachedModel, *, rows: int = 2, length: int = 85) -> int:
    """Return how many tokens `first_difference` feeds where it finds none."""
    rows, length = _sizes(model, rows, length)
    return 2 * (length + rows * min(FEW, length) + rows)


def _sizes(model: CachedModel, rows: int, length: int) -> tuple[int, int]:
    """Return the rows and the length that the model's limits allow."""
    return min(rows, model.args.max_batch_size or rows), min(length, model.args.max_seq_len)


def cuts(length: int) -> Iterator[tuple[int, int]]:
    """Cut a text into pieces of many lengths, as (start, end); single tokens among them, one of them past 64 others."""
    start = 0
    for size in cycle((5, 1, 1, 1, 17, 1, 2, 33, 1, 1, 3, 1, 60)):
        end = min(start + size, length)
        yield start, end
        if end == length:
            return
        start = end
