"""Convert between the half-split order of rows in wq and wk (Hugging Face, llama.cpp's NEOX) and Meta's order.

RoPE rotates pairs of numbers in a head. In Meta's files the two rows of a pair are neighbours; a half-split file has
all first rows of a head and then all second rows. Both compute the same.
"""

from dataclasses import replace

import torch
from torch import Tensor

from llama.checkpoint.base import Rows, Weight

# Our names of the tensors with that order: they produce queries and keys, or are multiplied with a head's numbers.
HALF_SPLIT = tuple(f".attention.{name}" for name in ("wq.weight", "wk.weight", "wq.bias", "wk.bias")) + tuple(
    f".attention.{name}.weight" for name in ("q_norm", "k_norm")
)


def in_our_order(name: str, weight: Weight, head_dim: int) -> Weight:
    """Return a tensor of a half-split file, with our name `name`, with its rows in our order."""
    return _reordered(name, weight, lambda start, stop: half_split_rows(start, stop, head_dim))


def in_half_split_order(name: str, weight: Weight, head_dim: int) -> Weight:
    """Return a tensor in our order, with our name `name`, with its rows in half-split order."""
    return _reordered(name, weight, lambda start, stop: our_rows(start, stop, head_dim))


def half_split_rows(start: int, stop: int, head_dim: int) -> Tensor:
    """Return the indices in a half-split file of our rows start..stop-1."""
    row = torch.arange(start, stop, device="cpu")  # also under a meta device context
    place = row % head_dim
    return row - place + place % 2 * (head_dim // 2) + place // 2


def our_rows(start: int, stop: int, head_dim: int) -> Tensor:
    """Return our indices of the rows start..stop-1 of a half-split file."""
    row = torch.arange(start, stop, device="cpu")
    place = row % head_dim
    return row - place + place % (head_dim // 2) * 2 + place // (head_dim // 2)


def _reordered(name: str, weight: Weight, order: Rows) -> Weight:
    """Return the weight with row `order(i, i + 1)` as row i, if it is one of those with two orders."""
    if not name.endswith(HALF_SPLIT):
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
