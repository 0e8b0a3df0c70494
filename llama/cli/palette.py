"""Colours by what they mean, the same on every plot and page; each is paired with a word or a shape.

The hues are Okabe and Ito's, told apart by colour-blind eyes too (https://jfly.uni-koeln.de/color/). Knows no plot and
no page; a page names a colour by its variable, `var(--cache)`.
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
WORKSPACE = Shades("#F0E442", "#CFC53A")  # what libraries take to compute in
UNNAMED = Shades("#D9DEE4", "#3A434D")  # bytes that no line of a ledger explains
REFILLED = Shades("#7F5200", "#C9A36A")  # a run whose cache is made anew at every turn
FACTOR = Shades("#3E4C59", "#9FB0C0")  # how many times one figure is another

INK = Shades("#1F2933", "#E6EAEE")
FAINT = Shades("#5B6875", "#A3AFBB")
GRID = Shades("#E3E7EC", "#36404B")
SOFT = Shades("#F5F7F9", "#20272F")  # a field that stands out a little from the paper
PAPER = Shades("#FFFFFF", "#161B21")
ALARM = Shades("#B00020", "#FF7B86")


def variables() -> dict[str, Shades]:
    """Return every colour by the name of its CSS variable, without the two dashes."""
    return {name.lower(): one for name, one in globals().items() if isinstance(one, Shades)}


def css() -> str:
    """Return the rules that give a page all colours as variables, light or dark as its reader's system is."""
    light, dark = (" ".join(f"--{name}: {one[mode].lower()};" for name, one in variables().items()) for mode in (0, 1))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
