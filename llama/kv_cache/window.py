"""A window over the text: the last positions, and the first ones as attention sinks, in constant memory.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.contract import doubled
from llama.kv_cache.counting import CountingCache
from llama.rows import Rows

DEFAULT_SINKS = 4  # the paper finds that more do not help


class WindowCache(CountingCache, kind="window"):
    """`window:W+S`: each query sees the last W positions, including its own, and the first S, the sinks.

    Keys are stored before RoPE and rotated by their place in the query's window: the sinks have the places 0 to S - 1,
    the window has the next ones, so no angle grows with the text. For the first S + W positions, place and position are
    equal. A query within a chunk sees its own window, so results do not depend on how a text is cut.

    keys and values are (rows, up to S + W, n_kv_heads, head_dim). Position p has the slot p until all slots are in use;
    then the S first keep theirs, and the others go round, see `_slots`.
    """

    lossless = False
    form, default = "W+S", "all+4"
    unrotated = True
    preallocates = True
    _seen: Tensor | None = None
    _positions: Tensor | None = None

    def configure(self, params: str) -> None:
        self.window, self.sinks = window_and_sinks(self.args, params)
        self.bound = self.window + self.sinks
        self.last = self.bound - 1  # the place of a query with a full window

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        most = self.window + self.sinks
        rows, length = max(len(prompts), reserved[0]), min(max(*prompts, reserved[1]), most)
        return rows * doubled(length, min(max(ends), most), most) * self.position_bytes(itemsize)

    def free(self) -> None:
        super().free()
        self._seen = self._positions = None

    def written(self, name: str, length: int) -> int:
        return min(length, self.window + self.sinks)

    def rope_starts(self, rows: Rows) -> tuple[int, ...]:
        return tuple(min(start, self.last) for start in rows.starts)

    def key_positions(self) -> Tensor | None:
        return self._positions

    def visible(self, rows: Rows, xq: Tensor) -> Tensor | None:
        seen, self._seen = self._seen, None  # as large as a prompt's scores: free it before the next layer
        return seen

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        self.prepare(rows, xk)
        starts = rows.starts
        whole = None if rows.width == 1 else self._chunk(starts, xk, xv)  # reads what _keep overwrites
        self._keep(starts, rows.lengths, xk, xv)
        self.record(rows)
        return self._step(starts) if whole is None else whole

    def _refusal(self, row: int, start: int, end: int) -> str | None:
        if start == 0 or max(start - self.window + 1, self.sinks) >= end - self.window:
            return None
        return (
            f"start_pos={start}: the window of {self.window} has dropped positions before {end - self.window}, "
            "which this position needs; feed the text from 0 on, or take a larger window"
        )

    def prepare(self, rows: Rows, like: Tensor) -> None:
        self._refuse_what_is_gone(rows.starts)
        self.args.check_room(len(rows.starts), 0)
        most = self.window + self.sinks
        self._grow(len(rows.starts), min(rows.end, most), like, most=most, reserved=min(self.reserved[1], most))

    def _slots(self, positions: Tensor) -> Tensor:
        """Return the slots of positions."""
        return torch.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.window)

    def _keep(self, starts: Sequence[int], real: Sequence[int], xk: Tensor, xv: Tensor) -> None:
        """Write those tokens of each row that stay: sinks and the last W, without padding."""
        assert self.keys is not None
        assert self.values is not None
        for row, (start, count) in enumerate(zip(starts, real, strict=True)):
            end = start + count
            positions = torch.arange(start, end, device=xk.device)
            kept = positions[(positions < self.sinks) | (positions >= end - self.window)]
            slots = self._slots(kept)
            self.keys[row, slots], self.values[row, slots] = xk[row, kept - start], xv[row, kept - start]

    def _step(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the keys and values for the newest token of each row, in the order of the slots."""
        assert self.keys is not None
        assert self.values is not None
        bsz, furthest = len(starts), min(max(starts), self.last)
        slots = torch.arange(furthest + 1, device=self.keys.device)
        together = len(set(starts)) == 1
        newest = torch.tensor(starts[:1] if together else starts, device=slots.device)[:, None]
        # The newest position of each slot; if a row has not reached the slot yet, a position before the window.
        positions = torch.where(slots < self.sinks, slots, newest - (newest - slots) % self.window)
        places = torch.where(slots < self.sinks, slots, positions - (newest - self.last).clamp(min=0))
        keys, values = self.keys[:bsz, : furthest + 1], self.values[:bsz, : furthest + 1]
        self._seen, self._positions = None, positions[0] if together else positions
        if not together:
            seen = torch.where(slots < self.sinks, slots <= newest, positions >= self.sinks)  # (bsz, slots)
            unseen = ~seen[..., None, None]  # undefined: a NaN would pass a mask
            keys, values, self._seen = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0), seen[:, None]
        return self.rotated(keys, places[0] if together else places.clamp(min=0), furthest), values

    def _chunk(self, starts: Sequence[int], xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values for several tokens of each row: sinks, the window before them, and their own.

        A query past the last place sees a copy of the sinks, rotated so that their distance is that of the last place.
        """
        assert self.keys is not None
        assert self.values is not None
        bsz, seqlen = xk.shape[:2]
        furthest = max(min(start, self.last) for start in starts) + seqlen - 1  # the last query's place
        first = torch.tensor(starts, device="cpu").to(xk.device, non_blocking=True)[:, None]  # (bsz, 1)
        old_len = min(self.window - 1, max(starts))
        positions = first + torch.arange(-old_len, seqlen, device=xk.device)  # (bsz, old_len + seqlen)
        queries = positions[:, old_len:]
        base = (first - self.last).clamp(min=0)  # the position with the place 0
        late = (queries - base - self.last).clamp(min=0)  # (bsz, seqlen): each query's distance past the last place
        copies = torch.arange(max(furthest - self.last, 0) + 1, device=xk.device)
        sinks = torch.arange(min(self.sinks, self.keys.shape[1]), device=xk.device)
        places = torch.cat(
            ((copies[:, None] + sinks).flatten().expand(bsz, -1), (positions - base).clamp(min=0)), dim=1
        )
        to_sinks = (late[..., None] == copies)[..., None] & (sinks <= queries[..., None])[:, :, None]
        inside = (positions[:, None] <= queries[..., None]) & (positions[:, None] > queries[..., None] - self.window)
        inside &= positions[:, None] >= self.sinks
        self._seen = torch.cat((to_sinks.flatten(2), inside), dim=-1)  # (bsz, seqlen, kv_len)
        self._positions = torch.cat((sinks.repeat(len(copies)).expand(bsz, -1), positions), dim=1)
        rows, slots = torch.arange(bsz, device=xk.device)[:, None], self._slots(positions[:, :old_len].clamp(min=0))
        unseen = ~self._seen.any(1)[..., None, None]
        parts = []
        for held, new in ((self.keys, xk), (self.values, xv)):
            # The first tokens of a new text are among the new ones, not in their slots yet.
            own = torch.where((sinks >= first)[..., None, None], self._begun(sinks, first, new), held[:bsz, sinks])
            whole = torch.cat((own.repeat(1, len(copies), 1, 1), held[rows, slots], new), dim=1)
            parts.append(whole.masked_fill(unseen, 0))
        return self.rotated(parts[0], places, max(furthest, len(copies) + self.sinks)), parts[1]

    @staticmethod
    def _begun(sinks: Tensor, first: Tensor, new: Tensor) -> Tensor:
        """Return the new tokens that are sinks, in order; undefined where there are none."""
        columns = (sinks - first).clamp(0, new.shape[1] - 1)  # (bsz, sinks)
        return new[torch.arange(len(new), device=new.device)[:, None], columns]


def window_and_sinks(args: ModelArgs, params: str) -> tuple[int, int]:
    """Return W and S of "W+S" or "W"; for "" a window that fills max_seq_len. Raises ValueError."""
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
