"""The base of kinds that keep the keys with the highest scores. Each row and KV head keeps its own number of keys.

A published method is one function, `score`. Rows, padding, positions, visibility, memory and files are handled here.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import sub
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.attended import Attended
from llama.kv_cache.contract import NativeLayout
from llama.kv_cache.counting import CountingCache
from llama.rope import RopeTable
from llama.rows import Rows

GROWTH = 64  # positions: memory for the tokens behind a prompt grows by so many
SINKS = 4  # the first tokens of a text, which receive much attention whatever they are
_FLAT = ("kept_keys", "kept_values", "kept_positions", "kept_scores")


class ScoredCache(CountingCache):
    """`NAME:SHARE` keeps this share of a prompt, up to 1, in each KV head; `NAME:COUNT` keeps so many positions.

    A share is rounded down, to at least 4 positions. With fewer, a short prompt could lose its first token, which
    receives most of the attention, or its newest one. A prompt is compressed once, when it ends (`rows.prompt_ends`):
    its queries still see all of it, later tokens see the positions that are kept, and these tokens are all stored. A
    subclass defines `score`; it may override `budget`, `choose` and these attributes:

        default: the parameters of NAME alone.
        every_step: compress after every call. A share is then that of the prompt, also while the text grows.
        adds_up: the scores of all calls are added up.

    The kept positions are stored one after the other, by row, KV head and position:

        kept_keys, kept_values      (kept, head_dim)
        kept_positions              (kept,) int32
        kept_scores                 (kept,) float32, only if the scores add up
        keys, values                (rows, up to a multiple of 64, n_kv_heads, head_dim): the tokens behind them
    """

    lossless = False
    whole_prompt = True  # fed in pieces, all of it would be stored in every layer until it ends
    native = 4  # also of subclasses that change no storage, see `served_as` in llama/fast/native_caches.py
    form = "SHARE or COUNT"
    default = "0.5"
    every_step: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    kept_keys: Tensor | None
    kept_values: Tensor | None
    kept_positions: Tensor | None
    kept_scores: Tensor | None

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        self.kept_keys = self.kept_values = self.kept_positions = self.kept_scores = None
        self._counts: list[list[int]] = []  # the number of kept positions of each row and KV head
        self._bases: list[int] = []  # the position of each row's first token in `keys`
        self._fed, self._padding = 0, 0  # the rows of the last call, and the places of padding that it returned

    def configure(self, params: str) -> None:
        text = params or self.default
        if re.fullmatch(r"\d{1,9}|\d?\.\d{1,9}", text) is None or not (number := Fraction(text)) > 0:
            raise ValueError(self._bad(f"{text!r} is neither a share of the prompt nor a count of positions"))
        if number > self.args.max_seq_len or (number > 1 and "." in text):
            raise ValueError(self._bad(f"{text} is above 1, or above max_seq_len={self.args.max_seq_len}"))
        self.share = number if number <= 1 else None
        self.count = int(number)

    def _bad(self, what: str) -> str:
        return (
            f"kv_cache={self.args.kv_cache!r}: {what}; give a share up to 1 or a count of positions for each KV head, "
            "such as 0.25 or 256"
        )

    # ---- what a method defines ---------------------------------------------------------------------------------------

    def score(self, attended: Attended) -> Tensor:
        """Return the score of each key of one row, (n_kv_heads, kv_len); the highest ones are kept.

        `attended` is the call's attention for this row alone, without padding. kv_len counts the keys that `update`
        returned: what was kept, then the tokens behind it. Scores of keys that no query may see are ignored.
        """
        raise NotImplementedError

    def budget(self, positions: int) -> int:
        """Return how many of a text's `positions` each KV head keeps, on average."""
        return self.part_of(positions, least=SINKS)

    def part_of(self, whole: int, least: int) -> int:
        """Return the count of the parameters, or their share of `whole`, from `least` on; at most `whole`."""
        return min(whole, self.count if self.share is None else max(least, int(self.share * whole)))

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        """Return the keys to keep, bool as `scores`, (n_kv_heads, kv_len): the `budget` highest ones of each head.

        Of keys whose scores are equal up to rounding the newer ones are kept: what is computed beside a text must not
        decide. The result must depend on the arguments and on the kind's settings alone.
        """
        scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = F.pad(scores.sort(descending=True).values, (1, 0), value=torch.inf)[:, : budget + 1]
        lowest, eps = best[:, -1:], torch.finfo(torch.promote_types(scores.dtype, torch.float32)).eps
        apart = (4 * eps * lowest.abs()).nan_to_num(posinf=0)
        higher, equal = scores > lowest + apart, scores >= lowest - apart
        newer = (equal & ~higher).flip(1).cumsum(1).flip(1) <= budget - higher.sum(1, keepdim=True)
        return higher | (equal & newer)

    def kept_of(self, prompt: int, end: int) -> int:
        """Return the number of keys that this layer keeps of a row with this prompt and this end."""
        grown = end if self.share is None else min(end, max(prompt, SINKS))
        return self.args.n_kv_heads * self.budget(grown if self.every_step else prompt)

    def keeps_its_budget(self, prompts: Sequence[int]) -> bool:
        """Return True if each row, with a prompt of so many tokens, keeps what its budget says, in order."""
        if self.kept_positions is None:
            return False
        heads = torch.split(self.kept_positions, [count for row in self._counts for count in row])
        ordered = all(bool((own[1:] > own[:-1]).all()) for own in heads)
        rows = zip(prompts, self._counts, self._ends, strict=True)
        return ordered and all(sum(counts) == self.kept_of(prompt, end) for prompt, counts, end in rows)

    # ---- the contract ------------------------------------------------------------------------------------------------

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        most = max(end - prompt for prompt, end in zip(prompts, ends, strict=True))
        last = [(prompt, end) for prompt, end in zip(prompts, ends, strict=True) if end - prompt == most]
        kept = sum(self.kept_of(prompt, end) for prompt, end in last)
        behind = 0 if self.every_step else -(-most // GROWTH) * GROWTH
        return kept * self._key_bytes(itemsize) + len(last) * behind * self.position_bytes(itemsize)

    def _key_bytes(self, itemsize: int) -> int:
        """Return the bytes of one kept key with its value, its position and its score."""
        return 2 * self.args.head_dim * itemsize + 4 + 4 * self.adds_up

    def free(self) -> None:
        super().free()
        self._counts, self._bases = [], []

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        self.prepare(rows, xk)
        self._write(self._behind(rows), xk, xv)
        self.record(rows)
        return self._all("keys"), self._all("values")

    def prepare(self, rows: Rows, like: Tensor) -> None:
        super().prepare(rows, like)
        self._begin(rows)
        self._take(len(rows.starts), self._behind(rows).end, like)

    def record(self, rows: Rows) -> None:
        super().record(rows)
        self._fed, self._padding = len(rows.starts), 0
        self._padding = self._behind(rows).end - self._places()

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        if self.keys is None or self.kept_keys is None:  # native code does not compress
            return None
        rows, length = self.keys.shape[:2]
        kept = dict.fromkeys(("kept_keys", "kept_values"), ((len(self.kept_keys), self.args.head_dim), like.dtype))
        runs = [*accumulate((count for row in self._counts for count in row), initial=0)]
        return NativeLayout(self.sizes(rows, length, like) | kept, length, bases=[*self._bases], runs=runs)

    def steps_left(self, starts: Sequence[int]) -> int:
        return 0 if self.keys is None else self.keys.shape[1] - max(map(sub, starts, self._bases)) - 1

    def key_positions(self) -> Tensor | None:
        if self.kept_positions is None:
            return None
        device = self.kept_positions.device
        bases = torch.tensor(self._bases[: self._fed], device=device)[:, None, None]  # (bsz, 1, 1)
        behind = (bases + torch.arange(self._places(), device=device)).expand(-1, self.args.n_kv_heads, -1)
        return torch.cat((self._padded(self.kept_positions, self._fed), behind), dim=-1)

    def visible(self, rows: Rows, xq: Tensor) -> Tensor | None:
        if self.kept_keys is None:
            return None
        bsz, device = len(rows.starts), xq.device
        counts = torch.tensor(self._counts[:bsz], device=device)  # (bsz, n_kv_heads)
        kept = torch.arange(int(counts.max()), device=device) < counts[..., None]
        first = torch.tensor(self._behind(rows).starts, device=device)[:, None, None]
        queries = first + torch.arange(rows.width, device=device)[:, None]  # (bsz, seqlen, 1), places in `keys`
        behind = torch.arange(self._places(), device=device) <= queries
        heads = self.args.n_kv_heads
        return torch.cat(
            (kept[:, :, None].expand(-1, -1, rows.width, -1), behind[:, None].expand(-1, heads, -1, -1)), dim=-1
        )

    def observe(self, attended: Attended) -> None:
        rows = attended.rows
        due = [row for row in range(len(rows.starts)) if self.every_step or (rows.prompt_ends and not self._bases[row])]
        if not due:
            return
        old = None if self.kept_scores is None else self._padded(self.kept_scores, len(rows.starts))
        parts, counts = self._split(), list(self._counts)
        for row in due:
            kept = self._compressed(attended.row(row), row, None if old is None else old[row])
            parts[row], counts[row] = kept, kept.pop("counts").tolist()
            self._bases[row] = self._ends[row]
        self._counts = counts
        self._join(parts)
        if self._bases == self._ends:
            self.keys = self.values = None
            self._enlarge(self.sizes(len(self._ends), 0, attended.keys), attended.keys.device)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._rearrange(list(rows))

    def prepare_join(self, other: Self, rows: int, length: int) -> None:
        """Allocate nothing: `join` makes the parts of all rows again."""

    @torch.inference_mode()  # as in `KVCache.join`
    def join(self, other: Self, rows: int, length: int) -> None:
        parts = [*self._split()[:rows], *other._split()[:1]]
        for numbers in ("_counts", "_bases", "_ends"):
            getattr(self, numbers)[rows:] = getattr(other, numbers)[:1]
        self._join(parts)
        behind = other._ends[0] - other._bases[0]
        assert other.keys is not None
        self._take(rows + 1, behind, other.keys)
        for name in ("keys", "values"):
            getattr(self, name)[rows, :behind] = getattr(other, name)[0, :behind]

    def repeat_first_row(self, rows: int) -> None:
        self._rearrange([0] * rows)

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        """Return the stored tensors, and as int64 each row's end and base, and the counts of its heads."""
        ends, bases, counts = self._ends[:rows], self._bases[:rows], self._counts[:rows]
        kept, behind = sum(map(sum, counts)), _most(bases, ends)
        state = {name: held[:kept] for name, held in self.held().items() if name in _FLAT}
        state |= {name: held[: len(ends), :behind] for name, held in self.held().items() if name not in _FLAT}
        numbers = {"ends": ends, "bases": bases, "counts": counts}
        return state | {name: torch.tensor(of, dtype=torch.int64, device="cpu") for name, of in numbers.items()}

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        self.free()
        numbers = {name: state[name].tolist() for name in ("ends", "bases", "counts") if name in state}
        ends, bases, counts = (numbers.get(name, []) for name in ("ends", "bases", "counts"))
        heads, width = self.args.n_kv_heads, self.args.head_dim
        whole = [len(ends), len(bases), len(counts)] == [rows] * 3 and all(
            0 <= base <= end and length <= end for base, end in zip(bases, ends, strict=True)
        )
        if not whole or not all(len(row) == heads and min(row) >= 0 for row in counts):
            raise ValueError(f"ends={ends}, bases={bases} and counts={counts} must be those of {rows} rows")
        kept, behind, dtype = sum(map(sum, counts)), _most(bases, ends), getattr(state.get("keys"), "dtype", None)
        wanted: dict[str, tuple[tuple[int, ...], object]] = {}
        wanted |= dict.fromkeys(("keys", "values"), ((rows, behind, heads, width), dtype))
        if kept:
            wanted |= dict.fromkeys(("kept_keys", "kept_values"), ((kept, width), dtype))
            wanted |= {"kept_positions": ((kept,), torch.int32)}
            wanted |= {"kept_scores": ((kept,), torch.float32)} if self.adds_up else {}
        found = {name: (tuple(held.shape), held.dtype) for name, held in state.items() if name not in numbers}
        if found != wanted:
            raise ValueError(f"the state of {self.user_name()} has {found}, and should have {wanted}")
        for name in wanted:
            setattr(self, name, state[name])
        self._ends, self._bases, self._counts = ends, bases, counts

    def _refusal(self, row: int, start: int, end: int) -> str | None:
        base = self._bases[row]
        if start == 0 or (start == end if self.every_step else start >= base):
            return None
        return (
            f"start_pos={start}: this cache was compressed at position {base} and has dropped what was before it; feed "
            "the text from 0 on"
        )

    # ---- the parts of it ---------------------------------------------------------------------------------------------

    def _begin(self, rows: Rows) -> None:
        """Drop what is stored of the rows that start at 0, and note the rows that are new."""
        if not any(rows.starts):
            self.free()
        again = [row for row, start in enumerate(rows.starts) if start == 0 and row < len(self._bases)]
        if again:
            parts = self._split()
            for row in again:
                parts[row] = {name: held[:0] for name, held in parts[row].items()}
                self._bases[row], self._counts[row] = 0, [0] * self.args.n_kv_heads
            self._join(parts)
        missing = len(rows.starts) - len(self._bases)
        self._bases += [0] * missing
        self._counts += [[0] * self.args.n_kv_heads for _ in range(missing)]

    def _behind(self, rows: Rows) -> Rows:
        """Return the rows with their places in `keys` and `values` instead of their positions."""
        starts = [start - base for start, base in zip(rows.starts, self._bases, strict=False)]
        return Rows(tuple(starts), rows.width, rows.lengths, rows.prompt_ends)

    def _places(self) -> int:
        """Return how many places of `keys` and `values` the last call returned."""
        return _most(self._bases[: self._fed], self._ends[: self._fed]) + self._padding

    def _take(self, rows: int, length: int, like: Tensor) -> None:
        """Allocate `keys` and `values` for at least so many rows and positions."""
        stored_rows, stored = (0, 0) if self.keys is None else self.keys.shape[:2]
        if stored_rows >= rows and stored >= length:
            return
        if stored or any(self._bases):
            length = -(-length // GROWTH) * GROWTH
        self._enlarge(self.sizes(max(rows, stored_rows), max(length, stored), like), like.device)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return super()._allocate(shape, dtype, device).zero_()  # masked keys must be finite

    def _all(self, name: str) -> Tensor:
        """Return the kept keys or values and those behind them, (bsz, kv_len, n_kv_heads, head_dim)."""
        kept, behind = getattr(self, f"kept_{name}"), getattr(self, name)[: self._fed, : self._places()]
        return behind if kept is None else torch.cat((self._padded(kept, self._fed).transpose(1, 2), behind), dim=1)

    def _padded(self, kept: Tensor, bsz: int) -> Tensor:
        """Return what is kept of the first rows, (bsz, n_kv_heads, most, ...); a shorter head ends in any numbers."""
        counts = torch.tensor(self._counts[:bsz], device=kept.device).flatten()
        most = int(counts.max())
        if int(counts.min()) == most:
            return torch.unflatten(kept[: bsz * self.args.n_kv_heads * most], 0, (bsz, -1, most))
        places = (counts.cumsum(0) - counts)[:, None] + torch.arange(most, device=kept.device)
        return torch.unflatten(kept[places.clamp(max=len(kept) - 1)], 0, (bsz, -1))

    def _compressed(self, attended: Attended, row: int, old: Tensor | None) -> dict[str, Tensor]:
        """Compress one row: return its kept tensors by name, and `counts`, the kept keys per KV head.

        old: the scores of the keys kept before.
        """
        heads, scoring = self.args.n_kv_heads, attended.scoring
        if attended.visible is None:
            positions = torch.arange(attended.keys.shape[1], device=attended.keys.device).expand(heads, -1)
            present = torch.ones_like(positions, dtype=torch.bool)
        else:  # leave out the keys that pad the row, which no query of it sees
            assert scoring.key_positions is not None
            present, positions = attended.visible[0, :, -1], scoring.key_positions[0]
            columns = present.any(0)
            present, positions, attended = present[:, columns], positions[:, columns], attended.at_keys(columns)
        scores = self.score(attended)
        if scores.shape != present.shape:
            raise ValueError(
                f"score of {self.user_name()} returned {tuple(scores.shape)}; it must return a number for each KV "
                f"head and key, {tuple(present.shape)}"
            )
        if old is not None:
            scores = scores + F.pad(old, (0, len(columns) - old.shape[1]))[:, columns]
        before = sum(self._counts[row])
        steady = self.every_step and self.share is not None and before > 0 and attended.rows.width == 1
        budget = max(before // heads, SINKS) if steady else self.budget(self._ends[row])
        kept = self.choose(scores.masked_fill(~present, -torch.inf), budget) & present
        keys, values = (held[0].transpose(0, 1)[kept] for held in (attended.keys, attended.values))
        made = {"kept_keys": keys, "kept_values": values, "kept_positions": positions[kept].int()}
        return made | ({"kept_scores": scores[kept].float()} if self.adds_up else {}) | {"counts": kept.sum(1)}

    def _split(self) -> list[dict[str, Tensor]]:
        """Return each row's kept tensors by name; an empty dict before the first compression."""
        parts: list[dict[str, Tensor]] = [{} for _ in self._counts]
        for name in _FLAT:
            held = getattr(self, name)
            for part, own in zip(parts, () if held is None else held.split([*map(sum, self._counts)]), strict=False):
                part[name] = own
        return parts

    def _join(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        for name in _FLAT:
            held = [part[name] for part in parts if name in part]
            setattr(self, name, torch.cat(held) if any(map(len, held)) else None)

    def _rearrange(self, rows: Sequence[int]) -> None:
        """Make row `rows[i]` row i; a row may be named twice."""
        if not self._ends:
            return
        parts = self._split()
        self._counts = [list(self._counts[row]) for row in rows]
        self._bases, self._ends = [self._bases[row] for row in rows], [self._ends[row] for row in rows]
        self._join([parts[row] for row in rows])
        for name in ("keys", "values"):
            held = getattr(self, name)
            new = self._allocate((len(rows), *held.shape[1:]), held.dtype, held.device)
            new[:] = held[list(rows)]
            setattr(self, name, new)


def _most(bases: Sequence[int], ends: Sequence[int]) -> int:
    return max((end - base for base, end in zip(bases, ends, strict=True)), default=0)
