"""What a model may be fed: positions, rows and lengths, checked once a call and with one wording.

Knows sizes and limits; does not know caches, or what is computed.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from llama.args import ModelArgs

# Where the rows of a call begin: all at one position, or each at its own.
Positions = int | Sequence[int]


class Held(Protocol):
    """What is looked at of a cache: the bytes that it holds, and its bound, if it has one, in positions."""

    @property
    def nbytes(self) -> int: ...
    @property
    def bound(self) -> int | None: ...


def check_fed(
    tokens: Tensor,
    start_pos: int | Sequence[int],
    logits: str,
    lengths: Sequence[int] | None,
    args: ModelArgs,
    *,
    kv_caching: bool,
    cache: Held,
) -> int | list[int]:
    """Return start_pos as an int where all rows agree, else as a list; raise ValueError for what cannot be fed.

    `kv_caching`: whether the KV cache is on; `cache` is that of the first layer.
    """
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must be (bsz, seqlen), both at least 1, not {tuple(tokens.shape)}")
    bsz, seqlen = tokens.shape
    starts = row_starts(start_pos, bsz)
    check_room(bsz, 0 if kv_caching and cache.bound else max(starts) + seqlen, args)
    if max(starts) > 0 and not kv_caching:
        raise ValueError(
            f"start_pos={start_pos} needs the KV cache, which is off: feed the whole prefix at start_pos=0"
        )
    if max(starts) > 0 and cache.nbytes == 0:
        raise ValueError(
            f"start_pos={start_pos} with an empty KV cache: feed the positions before it first "
            "(generate, free_cache, switching off and asking for exact mode empty the cache)"
        )
    if logits not in ("all", "last"):
        raise ValueError(f"logits={logits!r} must be 'all' or 'last'")
    if lengths is not None and (len(lengths) != bsz or not all(1 <= length <= seqlen for length in lengths)):
        raise ValueError(f"lengths={lengths} must be one per row (of {bsz}), each from 1 to {seqlen}")
    return starts[0] if len(set(starts)) == 1 else starts


def row_starts(start_pos: int | Sequence[int], bsz: int) -> list[int]:
    """Return every row's start; raise ValueError for what is no position."""
    starts = list(start_pos) if isinstance(start_pos, Sequence) else [start_pos] * bsz
    if len(starts) != bsz or not all(isinstance(start, int) and start >= 0 for start in starts):
        raise ValueError(f"start_pos={start_pos} must be an int or one per row (of {bsz}), and not negative")
    return starts


def check_room(bsz: int, length: int, args: ModelArgs) -> None:
    """Raise ValueError where rows, or texts of `length` positions, pass the limits.

    A bounded kind of cache limits what it holds, not how long a text gets: the length is then 0 here.
    """
    if args.max_batch_size is not None and bsz > args.max_batch_size:
        raise ValueError(f"{bsz} rows are more than max_batch_size={args.max_batch_size}")
    if length > args.max_seq_len:
        raise ValueError(
            f"a text of {length} positions goes past max_seq_len={args.max_seq_len}; "
            "build or load the model with a larger max_seq_len"
        )
