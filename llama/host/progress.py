"""Progress of long work: a bar on a terminal, and in a file or pipe a plain line every ten seconds."""

import os
import sys
import time
from typing import Any

from tqdm import tqdm

from llama.host import console

EVERY_S = 10.0


class _Bar(tqdm):  # type: ignore[misc]
    """A bar on standard error that makes control characters visible, also in lines written above it."""

    def __str__(self) -> str:
        return console.visible(super().__str__())

    @property
    def format_dict(self) -> dict[str, Any]:
        """Add `left`, the units until the end as a time: of a bar of expected seconds, whatever their rate was."""
        known: dict[str, Any] = super().format_dict
        left = tqdm.format_interval(known["total"] - known["n"]) if known["n"] and known["total"] else "?"
        return {**known, "left": left}

    @classmethod
    def write(cls, text: str) -> None:
        """Print a line above the bar."""
        super().write(console.visible(text), file=sys.stderr)


class _Lines(_Bar):
    """Counts as a bar does, and prints a line every ten seconds; nothing for shorter work."""

    disable: bool
    monitor_interval = 0  # no thread of its own: the process may fork

    def __init__(self, **look: Any) -> None:
        self._due = time.monotonic() + EVERY_S
        super().__init__(**look)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            console.say(str(self).strip(": "))

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: printed lines stay."""

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            self._decr_instances(self)


def progress_bar(what: str = "", *, total: float | None = None, unit: str = "it", **look: Any) -> "tqdm[None]":
    """Return a bar of `total` units; "B" is bytes, `look` are tqdm's options.

    Only rank 0 of a torchrun shows it, and no command with --quiet.
    """
    silent = sys.stderr is None or os.environ.get("RANK", "0") != "0" or console.is_quiet()
    kind = _Lines if silent or not sys.stderr.isatty() else _Bar
    look = {"unit_scale": unit == "B", "leave": False, "disable": silent, **look}
    return kind(desc=what, total=total, unit=unit, **look)


def seconds_bar(what: str = "") -> "tqdm[None]":
    """Return a bar that counts expected seconds and shows the time left; set its `total` to the expected seconds."""
    return progress_bar(what, total=1.0, bar_format="{desc} |{bar}| {elapsed}, about {left} left")
