"""Convert between the half-split order of rows in wq and wk (Hugging Face, llama.cpp's NEOX) and Meta's order.

RoPE rotates pairs of numbers in a head. In Meta's files the two rows of a pair are neighbours; a half-split file has
all first rows of a head and then all second rows. Both compute the same.
"""

from dataclasses import replace

import torch
from torch import Tensor

from llama.checkpoint.assemble import Rows, Weight

# Our names of the tensors with that order: they produce queries and keys, or are multiplied with a head's numbers.
_HALF_SPLIT = tuple(f".attention.{name}" for name in ("wq.weight", "wk.weight", "wq.bias", "wk.bias")) + tuple(
    f".attention.{name}.weight" for name in ("q_norm", "k_norm")
)


def in_our_order(name: str, weight: Weight, head_dim: int) -> Weight:
    """Return a tensor of a half-split file, with our name `name`, with its rows in our order."""
    return _reordered(name, weight, lambda start, stop: _transposed(start, stop, head_dim, 2))


def in_half_split_order(name: str, weight: Weight, head_dim: int) -> Weight:
    """Return a tensor in our order, with our name `name`, with its rows in half-split order."""
    return _reordered(name, weight, lambda start, stop: _transposed(start, stop, head_dim, head_dim // 2))


def _transposed(start: int, stop: int, head_dim: int, width: int) -> Tensor:
    """Return the indices of the rows start..stop-1 after each head's rows, written as lines of `width`, are transposed.

    A head of half-split rows is two lines of head_dim / 2 rows; in our order it is head_dim / 2 lines of two.
    """
    row = torch.arange(start, stop, device="cpu")  # also under a meta device context
    place = row % head_dim
    return row - place + place % width * (head_dim // width) + place // width


def _reordered(name: str, weight: Weight, order: Rows) -> Weight:
    """Return the weight with row `order(i, i + 1)` as row i, if it is one of those with two orders."""
    if not name.endswith(_HALF_SPLIT):
        return weight

    def ordered(rows: Rows) -> Rows:
        def read(start: int, stop: int) -> Tensor:
            places = order(start, stop)
            first = int(places.min())
            return rows(first, int(places.max()) + 1)[places - first]

        return read

    stored = weight.stored
    if stored is not None:
        stored = replace(stored, rows=ordered(stored.rows))
    return replace(weight, rows=ordered(weight.rows), stored=stored)
