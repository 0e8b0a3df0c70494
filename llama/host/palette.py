"""The colours of all plots and pages, named by their meaning; each is paired with a word or a shape.

The hues are those of Okabe and Ito, for colour-blind readers too (https://jfly.uni-koeln.de/color/). A page names a
colour by its CSS variable, `var(--cache)`.
"""

from typing import NamedTuple


class Shades(NamedTuple):
    """A colour on white paper and on a dark page."""

    light: str
    dark: str


CACHE = Shades("#0072B2", "#56B4E9")  # cached keys and values; a run with the cache on
RECOMPUTED = Shades("#D55E00", "#F0883E")  # computed again; a run with the cache off
WRITTEN = Shades("#009E73", "#2FC79A")  # computed for the first time, and written
WEIGHTS = Shades("#AEB6C2", "#5B6875")
ACTIVATIONS = Shades("#CC79A7", "#D98BB6")
LOGITS = Shades("#E69F00", "#E6A81E")
ATTENTION = Shades("#7A5195", "#B08BCB")  # attention weights
WORKSPACE = Shades("#F0E442", "#CFC53A")  # memory of libraries
UNNAMED = Shades("#D9DEE4", "#3A434D")  # bytes without a line in the ledger
FACTOR = Shades("#3E4C59", "#9FB0C0")  # a ratio

INK = Shades("#1F2933", "#E6EAEE")
MUTED = Shades("#5B6875", "#A3AFBB")
GRID = Shades("#E3E7EC", "#36404B")
FIELD = Shades("#F5F7F9", "#20272F")  # a field with a slightly different background
PAPER = Shades("#FFFFFF", "#161B21")
ALARM = Shades("#B00020", "#FF7B86")


def variables() -> dict[str, Shades]:
    """Return every colour by the name of its CSS variable, without the dashes."""
    return {name.lower(): one for name, one in globals().items() if isinstance(one, Shades)}


def css() -> str:
    """Return the CSS rules that define all colours as variables, light or dark as the reader's system asks for."""
    light, dark = (" ".join(f"--{name}: {one[mode].lower()};" for name, one in variables().items()) for mode in (0, 1))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
