"""Quest: all keys are stored, and a step reads the pages of them that may matter to its query.

Source: Tang et al., Quest, https://arxiv.org/abs/2406.10774.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.contract import NativeLayout, query_positions
from llama.kv_cache.static import StaticCache
from llama.rope import RopeTable
from llama.rows import Rows

PAGE = 16  # positions, as in the paper


class QuestCache(StaticCache, kind="quest"):
    """`quest:N` reads N positions in each step, in pages of 16; a prompt reads all of its own.

    A step is a row of a call with one token, however many the other rows have. Each page has the smallest and the
    largest number of each channel of its keys, (rows, pages, n_kv_heads, head_dim). They bound the scores of the page:
    a step reads the pages with the largest bounds, chosen for each KV head by the largest of its queries' bounds, and
    the newest page. `quest` alone reads 1024 positions.
    """

    lossless = False
    whole_prompt = True  # a call with a prompt's last token alone is a step
    form, default = "N", "1024"
    native = 5
    lows: Tensor | None
    highs: Tensor | None

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        self.lows = self.highs = None

    def configure(self, params: str) -> None:
        self.positions = int(params or self.default) if params.isdecimal() or not params else 0
        if self.positions < PAGE:
            raise ValueError(
                f"kv_cache={self.args.kv_cache!r}: N is the number of positions that a step reads, from {PAGE} on, "
                "such as quest:256"
            )

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        if rows.start is not None and set(rows.lengths) == {rows.width}:
            self._bound(slice(len(rows.starts)), rows.start, rows.end)
        else:
            for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
                self._bound(slice(row, row + 1), start, start + length)
        return keys, values

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        layout = super().native_layout(like)
        return layout and layout._replace(pages=min(self.positions // PAGE, -(-layout.slots // PAGE)))

    def _bound(self, rows: slice, start: int, end: int) -> None:
        """Compute the pages of the positions from `start` to `end`."""
        assert self.keys is not None
        assert self.lows is not None
        assert self.highs is not None
        page = start // PAGE
        held, pages = self.keys[rows, page * PAGE : end], slice(page, -(-end // PAGE))
        for bounds, fill, extreme in ((self.lows, torch.inf, torch.amin), (self.highs, -torch.inf, torch.amax)):
            whole = torch.unflatten(F.pad(held, (0, 0, 0, 0, 0, -end % PAGE), value=fill), 1, (-1, PAGE))
            bounds[rows, pages] = extreme(whole, 2)

    def visible(self, rows: Rows, xq: Tensor) -> Tensor | None:
        several, count = [length > 1 for length in rows.lengths], self.positions // PAGE
        steps = [start for start, more in zip(rows.starts, several, strict=True) if not more]
        if max(steps, default=0) // PAGE < count:
            return None
        seen = self._read(rows, xq[:, 0], count)[:, :, None]  # (bsz, n_kv_heads, 1, kv_len)
        if rows.width == 1:
            return seen
        all_before = torch.arange(rows.end, device=xq.device) <= query_positions(rows, xq.device)
        return torch.where(
            torch.tensor(several, device=xq.device)[:, None, None, None], all_before[..., None, :, :], seen
        )

    def _read(self, rows: Rows, queries: Tensor, count: int) -> Tensor:
        """Return the keys that each row's first query reads, in `count` pages, (bsz, n_kv_heads, kv_len).

        queries: (bsz, n_heads, head_dim). Between equal bounds the earlier page is read.
        """
        assert self.lows is not None
        assert self.highs is not None
        bsz, heads, pages = len(rows.starts), self.lows.shape[2], -(-rows.end // PAGE)
        wide = torch.promote_types(queries.dtype, torch.float32)  # in 16 bits, many bounds would be equal
        low, high = (held[:bsz, :pages].permute(0, 2, 3, 1).to(wide) for held in (self.lows, self.highs))
        queries = torch.unflatten(queries, 1, (heads, -1)).to(wide)  # (bsz, n_kv_heads, shared, head_dim)
        bounds = (queries.clamp(min=0) @ high + queries.clamp(max=0) @ low).amax(2)  # (bsz, n_kv_heads, pages)
        newest = torch.tensor(rows.starts, device=queries.device)[:, None, None]
        first = torch.arange(pages, device=queries.device) * PAGE
        bounds = bounds.masked_fill(first > newest, -torch.inf).masked_fill(first == newest // PAGE * PAGE, torch.inf)
        best = bounds.sort(dim=2, descending=True, stable=True).indices[..., :count]
        read = torch.zeros_like(bounds, dtype=torch.bool).scatter(2, best, True)
        seen = read.repeat_interleave(PAGE, dim=2)[..., : rows.end]
        return seen & (torch.arange(rows.end, device=queries.device) <= newest)

    def sizes(self, rows: int, length: int, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        pages = (rows, -(-length // PAGE), *like.shape[2:])
        return super().sizes(rows, length, like) | dict.fromkeys(("lows", "highs"), (pages, like.dtype))

    def written(self, name: str, length: int) -> int:
        return length if name in ("keys", "values") else -(-length // PAGE)

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        numbers = super().predicted_bytes(prompts=prompts, ends=ends, reserved=reserved, itemsize=itemsize)
        rows = max(len(prompts), reserved[0])
        positions = numbers // self.position_bytes(itemsize) // rows
        return numbers + rows * -(-positions // PAGE) * self.position_bytes(itemsize)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return super()._allocate(shape, dtype, device).zero_()  # masked keys must be finite
