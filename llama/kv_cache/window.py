"""A window over the text: the last positions, and the first ones as attention sinks, in memory that does not grow.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.contract import KVCache
from llama.kv_cache.names import read_kind
from llama.limits import check_room, row_starts

DEFAULT_SINKS = 4  # of which the paper finds that more help no further


class WindowCache(KVCache, kind="window"):
    """`window:W+S` lets each query see the last W positions, its own among them, and the first S, the sinks.

    Keys are held as they are before RoPE, and rotated by their place in the query's window: the sinks have the places
    0 to S - 1 and the window the S to S + W - 1 behind them, so no angle grows with the text. Until S + W positions are
    there, places are positions. A query of a chunk sees its own window, whichever way a text is cut.

    The window is a ring, in which position p has the slot p % W: keys and values are (rows, up to W, ...), and
    sink_keys and sink_values (rows, S, ...).
    """

    lossless = False
    unrotated = True
    sink_keys: Tensor | None
    sink_values: Tensor | None

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.register_buffer("sink_keys", None, persistent=False)
        self.register_buffer("sink_values", None, persistent=False)
        self.reserved = (0, 0)
        self._ends: list[int] = []  # how far each row was written: what a ring holds depends on it
        self._seen: Tensor | None = None

    def configure(self, params: str) -> None:
        self.window, self.sinks = window_and_sinks(self.args, params)
        self.bound = self.window + self.sinks
        self.last = self.bound - 1  # the place of a query whose window is whole

    @classmethod
    def predicted_bytes(cls, args: ModelArgs, *, rows: int, length: int, itemsize: int) -> int:
        window, sinks = window_and_sinks(args, read_kind(args.kv_cache).params)
        return rows * (min(window, length) + sinks) * cls.position_bytes(args, itemsize)

    def reserve(self, rows: int, length: int) -> None:
        super().reserve(rows, length)
        self.reserved = (rows, min(length, self.window))

    def free(self) -> None:
        super().free()
        self.reserved, self._ends, self._seen = (0, 0), [], None

    def key_positions(self) -> Tensor | None:
        return None  # a sink may be there several times, each for another query: see `visible`

    @property
    def slots(self) -> None:
        return None

    def rope_positions(self, start_pos: int | Sequence[int]) -> int | Sequence[int]:
        return min(start_pos, self.last) if isinstance(start_pos, int) else [min(pos, self.last) for pos in start_pos]

    def visible(self, start_pos: int | Sequence[int], seqlen: int) -> Tensor | None:
        return self._seen

    def rewind(self, position: int) -> bool:
        return all(end <= max(position + 1, self.window) for end in self._ends)

    def spread(self, rows: int) -> None:
        super().spread(rows)
        self._ends = self._ends[:1] * rows

    def update(self, start_pos: int | Sequence[int], xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        ends = self.check(start_pos, xk, xv)
        bsz, seqlen = xk.shape[:2]
        starts = row_starts(start_pos, bsz)
        real = self.batch_rows.real(bsz, seqlen)
        self._refuse_what_is_gone([start if count else 0 for start, count in zip(starts, real, strict=True)])
        check_room(bsz, 0, self.args)
        self._take(bsz, min(max(ends), self.window), like=xk)
        first = torch.tensor(starts, device="cpu").to(xk.device, non_blocking=True)[:, None]  # (bsz, 1)
        old_len = min(self.window - 1, max(starts))
        old = first - old_len + torch.arange(old_len, device=xk.device)  # positions of the window before the call
        queries = first + torch.arange(seqlen, device=xk.device)  # (bsz, seqlen)
        keys, values = self._gathered(old, xk, xv)
        self._keep(starts, real, xk, xv)
        self._ends = [start + kept for start, kept in zip(starts, real, strict=True)] + self._ends[bsz:]
        furthest = max(min(start, self.last) for start in starts) + seqlen - 1
        return self._arranged(first, queries, torch.cat((old, queries), dim=1), keys, values, furthest)

    def _refuse_what_is_gone(self, starts: Sequence[int]) -> None:
        """Refuse a start that leaves a gap, or whose window has been written over."""
        for row, start in enumerate(starts):
            end = self._ends[row] if row < len(self._ends) else 0
            if start > end:
                raise ValueError(
                    f"the window cache holds {end} positions of row {row}, so position {start} would leave a gap; "
                    "feed the positions before it first"
                )
            oldest = max(start - self.window + 1, self.sinks)  # that a query at `start` looks at
            if start > 0 and oldest < end - self.window:
                raise ValueError(
                    f"start_pos={start}: the window of {self.window} has dropped positions before {end - self.window}, "
                    f"which that one looks at; feed the text from 0 on, or take a larger window"
                )

    def _take(self, rows: int, length: int, like: Tensor) -> None:
        """Have room for `rows` rings of `length`; a longer ring by doubling, up to the window."""
        held = (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[1])
        if held[0] >= rows and held[1] >= length:
            return
        grown = max(length, min(2 * held[1], self.window)) if held[1] and length > held[1] else max(length, held[1])
        wanted = max(rows, held[0], self.reserved[0]), max(grown, self.reserved[1])
        for name, length_of in (("keys", wanted[1]), ("values", wanted[1]), ("sink_keys", 0), ("sink_values", 0)):
            size = (wanted[0], length_of or self.sinks, *like.shape[2:])
            with torch.inference_mode(False):  # or the buffer could not be written outside inference mode
                new = torch.empty(size, dtype=like.dtype, device=like.device)
            old = self._buffers[name]
            if old is not None:  # a ring that has not come round yet: its slots are its positions
                new[: old.shape[0], : old.shape[1]] = old
            self._buffers[name] = new

    def _gathered(self, old: Tensor, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values at the positions `old`, (bsz, old_len), out of the ring, and the new ones behind."""
        assert self.keys is not None
        assert self.values is not None
        rows = torch.arange(old.shape[0], device=old.device)[:, None]
        slots = old.clamp(min=0) % self.keys.shape[1]
        return torch.cat((self.keys[rows, slots], xk), dim=1), torch.cat((self.values[rows, slots], xv), dim=1)

    def _keep(self, starts: Sequence[int], real: Sequence[int], xk: Tensor, xv: Tensor) -> None:
        """Write each row's real tokens: the first of a text among the sinks, the last ones into the ring."""
        assert self.keys is not None
        assert self.values is not None
        assert self.sink_keys is not None
        assert self.sink_values is not None
        for row, (start, count) in enumerate(zip(starts, real, strict=True)):
            begin = min(max(self.sinks - start, 0), count)
            self.sink_keys[row, start : start + begin] = xk[row, :begin]
            self.sink_values[row, start : start + begin] = xv[row, :begin]
            kept = min(count, self.window)
            slots = torch.arange(start + count - kept, start + count, device=xk.device) % self.keys.shape[1]
            self.keys[row, slots] = xk[row, count - kept : count]
            self.values[row, slots] = xv[row, count - kept : count]

    def _arranged(
        self, first: Tensor, queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, furthest: int
    ) -> tuple[Tensor, Tensor]:
        """Return sinks and window, rotated by their places, and note who may see what.

        A query of a chunk whose place lies past the last one gets the sinks once more, as far before it as they stand
        before that. `furthest` is the last query's place.
        """
        assert self.sink_keys is not None
        assert self.sink_values is not None
        bsz = queries.shape[0]
        base = (first - self.last).clamp(min=0)  # (bsz, 1): which position has the place 0
        late = (queries - base - self.last).clamp(min=0)  # (bsz, seqlen): how far a query stands past the last place
        copies = torch.arange(max(furthest - self.last, 0) + 1, device=queries.device)
        sinks = torch.arange(self.sinks, device=queries.device)
        sink_places = (copies[:, None] + sinks).flatten().expand(bsz, -1)  # (bsz, copies x sinks)
        places = torch.cat((sink_places, (positions - base).clamp(min=0)), dim=1)
        to_sinks = (late[..., None] == copies)[..., None] & (sinks <= queries[..., None])[:, :, None]
        inside = (positions[:, None] <= queries[..., None]) & (positions[:, None] > queries[..., None] - self.window)
        inside &= positions[:, None] >= self.sinks
        self._seen = torch.cat((to_sinks.flatten(2), inside), dim=-1)  # (bsz, seqlen, kv_len)
        again = (1, len(copies), 1, 1)
        keys = torch.cat((self.sink_keys[:bsz].repeat(again), keys), dim=1)
        values = torch.cat((self.sink_values[:bsz].repeat(again), values), dim=1)
        unseen = ~self._seen.any(1)[..., None, None]  # and may hold anything, which no mask would take out
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        return self.rotated(keys, places, max(furthest, len(copies) + self.sinks)), values


def window_and_sinks(args: ModelArgs, params: str) -> tuple[int, int]:
    """Return W and S of "W+S" or "W"; by default a window that fills max_seq_len. Raises ValueError."""
    if not params:
        sinks = min(DEFAULT_SINKS, args.max_seq_len - 1)
        return args.max_seq_len - sinks, sinks
    found = re.fullmatch(r"(\d{1,9})(?:\+(\d{1,9}))?", params)
    if found is None:
        raise ValueError(f"kv_cache={args.kv_cache!r}: a window is W+S, positions and sinks, such as window:1024+4")
    window, sinks = int(found[1]), DEFAULT_SINKS if found[2] is None else int(found[2])
    if window < max(1, sinks):
        raise ValueError(
            f"kv_cache={args.kv_cache!r}: a window of {window} is smaller than its {sinks} sinks, or empty"
        )
    if window + sinks > args.max_seq_len:
        raise ValueError(
            f"kv_cache={args.kv_cache!r}: {window} + {sinks} positions are more than max_seq_len={args.max_seq_len}; "
            "take a smaller window"
        )
    return window, sinks
