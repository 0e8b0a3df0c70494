"""Exact mode: logits whose bits depend on nothing but the tokens before them; `model.exact = True` asks for it."""

from llama.exact.operations import (
    BLOCKS,
    KEYS,
    OUTPUTS,
    QUERIES,
    ROWS,
    Block,
    ExactModel,
    block_for,
    exact_attend,
    exact_linear,
    exact_ops,
    exact_product,
    exact_silu,
    exact_sum_linear,
    slowdown,
    slowdown_words,
)
from llama.self_comparison import first_difference

__all__ = [
    "BLOCKS",
    "KEYS",
    "OUTPUTS",
    "QUERIES",
    "ROWS",
    "Block",
    "ExactModel",
    "block_for",
    "exact_attend",
    "exact_linear",
    "exact_ops",
    "exact_product",
    "exact_silu",
    "exact_sum_linear",
    "first_difference",
    "slowdown",
    "slowdown_words",
]
