"""Compare a model with itself: do the bits of a position's logits depend only on the tokens up to it?

Exact mode and native code are used only for a model that passes this comparison. Knows how a model is called; does not
know how it computes.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from llama.generation import LanguageModel
from llama.kv_cache import Cache
from llama.rows import Rows

FEW = 21  # positions of several rows in one batch: more than a block of 16 queries in exact mode


@torch.inference_mode()
def first_difference(model: LanguageModel, *, rows: int = 2, length: int = 85) -> str | None:
    """Return where the bits of logits differ (alone, truncated, with the cache, ragged), or None if they do not.

    One row is fed to `length`, in one pass and with the cache; several rows are fed to FEW, which is cheaper.
    """
    rows, length = _sizes(model, rows, length)
    stream = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(model.args.vocab_size, (rows, length), generator=stream, device="cpu")
    tokens = tokens.to(model.device)
    last, few = tokens[-1:], tokens[:, :FEW]  # alone, the last row is at another place
    plain, cached = model.with_kv_caching(False), model.with_kv_caching(True)
    whole, beside = _logits(plain, last), _logits(plain, few)
    if not torch.equal(beside[-1], whole[0, : few.shape[1]]):
        return f"the first {few.shape[1]} tokens, in row {rows - 1}, are not what they are alone among {length}"
    if not torch.equal(_logits(plain, few[:, :1]), beside[:, :1]):
        return f"the first token alone is not what it is among {few.shape[1]}"
    cache = model.new_cache()
    for start, end in cuts(length):
        if not torch.equal(_logits(cached, last[:, start:end], start, cache), whole[:, start:end]):
            return f"tokens {start} to {end - 1}, fed through the cache, are not what they are without it"
    cache = model.new_cache()
    for start, end in cuts(few.shape[1]):
        if not torch.equal(_logits(cached, few[:, start:end], start, cache), beside[:, start:end]):
            return f"tokens {start} to {end - 1} of {rows} rows, through the cache, are not what they are without it"
    starts = [row * (few.shape[1] - 1) // rows for row in range(rows)]  # all of it was fed, and may be fed again
    ragged = _logits(cached, few.gather(1, torch.tensor(starts, device=model.device)[:, None]), starts, cache)
    if any(not torch.equal(ragged[row, 0], beside[row, start]) for row, start in enumerate(starts)):
        return f"rows at positions {starts} are not what they are at one"
    return None


def _logits(
    model: LanguageModel, tokens: Tensor, start_pos: int | Sequence[int] = 0, cache: Cache | None = None
) -> Tensor:
    return model(tokens, Rows.of(tokens, start_pos), cache=cache, logits="all")


def tokens_fed(model: LanguageModel, *, rows: int = 2, length: int = 85) -> int:
    """Return the number of tokens that `first_difference` feeds if it finds none."""
    rows, length = _sizes(model, rows, length)
    return 2 * (length + rows * min(FEW, length) + rows)


def _sizes(model: LanguageModel, rows: int, length: int) -> tuple[int, int]:
    """Return the rows and the length that the model's limits allow."""
    return min(rows, model.args.max_batch_size or rows), min(length, model.args.max_seq_len)


def cuts(length: int) -> Iterator[tuple[int, int]]:
    """Yield chunks of a text, (start, end), of many lengths; some of one token, one of these after 64 others."""
    start = 0
    for size in cycle((5, 1, 1, 1, 17, 1, 2, 33, 1, 1, 3, 1, 60)):
        end = min(start + size, length)
        yield start, end
        if end == length:
            return
        start = end
