"""Exact mode: the bits of logits depend only on the tokens before them; set `model.exact = True`."""

from llama.exact.batch_invariance import first_difference
from llama.exact.switch import slices_of

__all__ = ["first_difference", "slices_of"]
