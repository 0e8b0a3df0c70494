"""Where the rows of one call stand: a value that is made and checked once a call, and handed to all that compute it.

Knows positions and counts; does not know caches, or what is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a call.

    starts: the position of each row's first token. width: how many tokens of each row are fed, padding included.
    lengths: how many of these are real; the others pad the row on the right. active: whether a row still grows; the
    tokens of an inactive row are fed along, and nothing of them is stored.

    Derived: start, the position at which all rows start, None if they differ; kept, how many tokens of each row are to
    be stored; end, the position behind the last token of the furthest row, padding included.
    """

    starts: tuple[int, ...]
    width: int
    lengths: tuple[int, ...]
    active: tuple[bool, ...]
    start: int | None = field(init=False)
    kept: tuple[int, ...] = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        kept = tuple(length if active else 0 for length, active in zip(self.lengths, self.active, strict=True))
        object.__setattr__(self, "start", self.starts[0] if len(set(self.starts)) == 1 else None)
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "end", max(self.starts) + self.width)

    @staticmethod
    def at(
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        width: int | None = None,
        active: Sequence[bool] | None = None,
    ) -> "Rows":
        """Return rows of these starts and lengths; by default as wide as the longest, and all active.

        Raises ValueError unless there are as many of each, at least one, and every number is possible.
        """
        width = max(lengths, default=0) if width is None else width
        rows = len(starts)
        if not rows or not all(isinstance(start, int) and start >= 0 for start in starts):
            raise ValueError(f"start_pos={list(starts)} must be an int or one per row, whole numbers from 0 on")
        if len(lengths) != rows or not all(1 <= length <= width for length in lengths):
            raise ValueError(f"lengths={list(lengths)} must be one per row (of {rows}), each from 1 to {width}")
        active = (True,) * rows if active is None else tuple(active)
        if len(active) != rows:
            raise ValueError(f"active={list(active)} must be one per row (of {rows})")
        return Rows(tuple(starts), width, tuple(lengths), active)

    @staticmethod
    def of(
        tokens: Tensor, start_pos: "int | Sequence[int] | Tensor | Rows", lengths: Sequence[int] | None = None
    ) -> "Rows":
        """Return the rows of a call that feeds `tokens`, (bsz, seqlen), from `start_pos` on; see `Transformer.forward`.

        Raises ValueError for tokens of another shape, and for starts and lengths that are not one per row.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be (bsz, seqlen), both at least 1, not {tuple(tokens.shape)}")
        bsz, seqlen = tokens.shape
        if isinstance(start_pos, Rows):
            if lengths is not None or (len(start_pos.starts), start_pos.width) != (bsz, seqlen):
                raise ValueError(
                    f"tokens are {bsz} rows of {seqlen}, and start_pos says {len(start_pos.starts)} of "
                    f"{start_pos.width}; make the Rows for these tokens, with their lengths in it"
                )
            return start_pos
        if isinstance(start_pos, Tensor):
            start_pos = start_pos.tolist()
        starts = start_pos if isinstance(start_pos, Sequence) else [start_pos] * bsz
        if len(starts) != bsz:
            raise ValueError(f"start_pos={start_pos} must be an int or one per row (of {bsz}), whole numbers from 0 on")
        return Rows.at(starts, [seqlen] * bsz if lengths is None else lengths, width=seqlen)

    def row(self, row: int) -> "Rows":
        """Return one of the rows alone."""
        return Rows((self.starts[row],), self.width, (self.lengths[row],), (self.active[row],))
