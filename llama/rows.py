"""What the rows of a call are, beyond their tensors: told once a call, and read by the caches of all layers.

Knows neither tensors nor caches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama.rope import RopeTable


@dataclass
class Rows:
    """The rows of the call that is under way.

    lengths: how many of the tokens of each row are real, the others pad it on the right; None: all are. live: the rows
    that a generation still continues; the others are fed along, and what they hold is read no more. None: all are.
    rope: the model's angles, for kinds of cache that rotate keys by themselves; None: there is no model.
    """

    lengths: Sequence[int] | None = None
    live: Collection[int] | None = None
    rope: "RopeTable | None" = None

    def __reduce__(self) -> tuple[type["Rows"], tuple[()]]:
        return Rows, ()  # a copy is told of nothing yet

    def real(self, rows: int, seqlen: int) -> list[int]:
        """Return how many tokens of each row are to be kept: none of a row that has ended."""
        lengths = [seqlen] * rows if self.lengths is None else list(self.lengths)
        return [length if self.live is None or row in self.live else 0 for row, length in enumerate(lengths)]
