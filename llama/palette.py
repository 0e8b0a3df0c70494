"""Colours by what they mean, the same on every plot and page; each is paired with a word or a shape wherever it is used.

The hues are Okabe and Ito's, told apart by colour-blind eyes too (https://jfly.uni-koeln.de/color/). Knows no plot and
no page.
"""

from typing import NamedTuple


class Shades(NamedTuple):
    """A colour on white paper and on a dark page."""

    light: str
    dark: str


CACHE = Shades("#0072B2", "#56B4E9")  # what the KV cache holds; a run with the cache on
ANEW = Shades("#D55E00", "#F0883E")  # what is computed once more; a run with the cache off
WRITTEN = Shades("#009E73", "#2FC79A")  # what a step computes for the first time, and writes
WEIGHTS = Shades("#AEB6C2", "#5B6875")
ACTIVATIONS = Shades("#CC79A7", "#D98BB6")
LOGITS = Shades("#E69F00", "#E6A81E")
ATTENTION = Shades("#7A5195", "#B08BCB")  # how much a query looks at a position
