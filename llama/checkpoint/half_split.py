"""The order of rows in wq and wk that Hugging Face's files have, and how a tensor in it is read in ours.

RoPE turns pairs of numbers in a head. We keep the two rows of a pair side by side, as Meta's files do; others keep all
first ones of a head and then all second ones. What is computed is the same. Knows tensors in their files.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from llama.checkpoint.base import Weight

# Of our names, what is in that order: whatever makes queries and keys, and what is multiplied with a head's numbers.
HALF_SPLIT = tuple(f".attention.{name}" for name in ("wq.weight", "wk.weight", "wq.bias", "wk.bias")) + tuple(
    f".attention.{name}.weight" for name in ("q_norm", "k_norm")
)


def in_our_order(name: str, weight: Weight, head_dim: int) -> Weight:
    """Return a tensor of a file with half-split rows, called `name` by us, with its rows in our order."""
    if not name.endswith(HALF_SPLIT):
        return weight
    return _reordered(weight, lambda start, stop: half_split_rows(start, stop, head_dim))


def in_half_split_order(name: str, weight: Weight, head_dim: int) -> Weight:
    """Return a tensor of ours with its rows as a file with half-split rows has them."""
    if not name.endswith(HALF_SPLIT):
        return weight
    return _reordered(weight, lambda start, stop: our_rows(start, stop, head_dim))


def half_split_rows(start: int, stop: int, head_dim: int) -> Tensor:
    """Return where the rows start..stop-1 of ours are in a half-split file."""
    row = torch.arange(start, stop, device="cpu")  # also where a model is built on the meta device
    place = row % head_dim
    return row - place + place % 2 * (head_dim // 2) + place // 2


def our_rows(start: int, stop: int, head_dim: int) -> Tensor:
    """Return where the rows start..stop-1 of a half-split file are in ours."""
    row = torch.arange(start, stop, device="cpu")  # also where a model is built on the meta device
    place = row % head_dim
    return row - place + place % (head_dim // 2) * 2 + place // (head_dim // 2)


def _reordered(weight: Weight, order: Callable[[int, int], Tensor]) -> Weight:
    def rows(start: int, stop: int) -> Tensor:
        places = order(start, stop)
        first = int(places.min())
        return weight.rows(first, int(places.max()) + 1)[places - first]

    stored = weight.stored
    if stored is not None:
        stored = replace(stored, order=order)
    return replace(weight, rows=rows, stored=stored)
