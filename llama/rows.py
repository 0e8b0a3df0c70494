"""The rows of one call: their positions and lengths, checked once and passed to every layer.

Knows positions and counts; does not know caches, or what is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a call.

    starts: the position of each row's first token. width: the number of tokens per row, with padding. lengths: the
    number of tokens per row without padding, which is on the right. prompt_ends: True if the last token of each row
    ends a prompt; some kinds of cache compress a prompt then.

    Derived: start, the position at which all rows start, None if they differ; end, the position behind the last token
    of the furthest row, with padding.
    """

    starts: tuple[int, ...]
    width: int
    lengths: tuple[int, ...]
    prompt_ends: bool = False
    start: int | None = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", self.starts[0] if len(set(self.starts)) == 1 else None)
        object.__setattr__(self, "end", max(self.starts) + self.width)

    @staticmethod
    def at(
        starts: Sequence[int], lengths: Sequence[int], *, width: int | None = None, prompt_ends: bool = False
    ) -> "Rows":
        """Return rows of these starts and lengths. `width` is by default the largest length.

        Raises ValueError unless there is one of each for at least one row, and for impossible numbers.
        """
        width = max(lengths, default=0) if width is None else width
        rows = len(starts)
        if not rows or set(map(type, starts)) != {int} or min(starts) < 0:
            raise ValueError(f"start_pos={list(starts)} must be an int or one per row, whole numbers from 0 on")
        if len(lengths) != rows or min(lengths) < 1 or max(lengths) > width:
            raise ValueError(f"lengths={list(lengths)} must be one per row (of {rows}), each from 1 to {width}")
        return Rows(tuple(starts), width, tuple(lengths), prompt_ends)

    @staticmethod
    def of(
        tokens: Tensor, start_pos: "int | Sequence[int] | Tensor | Rows", lengths: Sequence[int] | None = None
    ) -> "Rows":
        """Return the rows of a call with `tokens`, (bsz, seqlen), at `start_pos`; see `Transformer.forward`.

        `prompt_ends` is True for several tokens per row; pass Rows for `start_pos` to set it. Raises ValueError for
        tokens of another shape, and for starts and lengths that are not one per row.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be (bsz, seqlen), both at least 1, not {tuple(tokens.shape)}")
        bsz, seqlen = tokens.shape
        if isinstance(start_pos, Rows):
            if lengths is not None:
                raise ValueError("lengths are part of the Rows that are given as start_pos; leave out lengths")
            return start_pos
        if isinstance(start_pos, Tensor):
            start_pos = start_pos.tolist()
        starts = start_pos if isinstance(start_pos, Sequence) else [start_pos] * bsz
        if len(starts) != bsz:
            raise ValueError(f"start_pos={start_pos} must be an int or one per row (of {bsz}), whole numbers from 0 on")
        lengths = [seqlen] * bsz if lengths is None else lengths
        return Rows.at(starts, lengths, width=seqlen, prompt_ends=seqlen > 1)

    def row(self, row: int) -> "Rows":
        """Return one of the rows."""
        return Rows((self.starts[row],), self.width, (self.lengths[row],), self.prompt_ends)
