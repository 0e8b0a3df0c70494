"""Exact mode: logits whose bits depend on nothing but the tokens before them; `model.exact = True` asks for it."""

from llama.exact.batch_invariance import first_difference
from llama.exact.operations import exact_attend, exact_linear, exact_ops, exact_silu, exact_sum_linear
from llama.exact.probe import BLOCKS, Block, block_for, exact_product
from llama.exact.switch import slices_of, slowdown, slowdown_words

__all__ = [
    "BLOCKS",
    "Block",
    "block_for",
    "exact_attend",
    "exact_linear",
    "exact_ops",
    "exact_product",
    "exact_silu",
    "exact_sum_linear",
    "first_difference",
    "slices_of",
    "slowdown",
    "slowdown_words",
]
