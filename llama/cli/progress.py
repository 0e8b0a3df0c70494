"""How far a long piece of work is: a bar on a terminal, and elsewhere a plain line every ten seconds.

A log of a cluster shows no moving bar, and in silence one cannot tell work from a hang. Knows nothing of the work.
"""

import os
import sys
import time
from typing import Any

from tqdm import tqdm

from llama.cli import console

EVERY_S = 10.0


class _Bar(tqdm):  # type: ignore[misc]
    """A bar on standard error whose words, and the lines written above it, act on no terminal."""

    def __str__(self) -> str:
        return console.visible(super().__str__())

    @classmethod
    def write(cls, text: str) -> None:
        """Print a line above the bar."""
        super().write(console.visible(text), file=sys.stderr)


class _Lines(_Bar):
    """Counts as a bar does, and says in lines how far it is; nothing of what is over within ten seconds."""

    disable: bool
    monitor_interval = 0  # no thread of its own: whoever made the bar may fork

    def __init__(self, **look: Any) -> None:
        self._due = time.monotonic() + EVERY_S
        super().__init__(**look)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            console.say(str(self).strip(": "))

    def clear(self, nolock: bool = False) -> None:
        """Leave the lines: they are no bar that would be drawn anew."""

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            self._decr_instances(self)


def progress_bar(what: str = "", *, total: float | None = None, unit: str = "it", **look: Any) -> "tqdm[None]":
    """Return a bar of so many units, bytes where the unit is "B"; `look` is tqdm's. Of several ranks, the first's."""
    silent = sys.stderr is None or os.environ.get("RANK", "0") != "0"
    kind = _Lines if silent or not sys.stderr.isatty() else _Bar
    look = {"unit_scale": unit == "B", "leave": False, "disable": silent, **look}
    return kind(desc=what, total=total, unit=unit, **look)


def seconds_bar(what: str = "") -> "tqdm[None]":
    """Return a bar in seconds that were expected: what is left it tells by how those that passed went.

    Its `total` is the seconds that all is expected to take.
    """
    return progress_bar(what, total=1.0, bar_format="{desc} |{bar}| {elapsed}, about {remaining} left")
