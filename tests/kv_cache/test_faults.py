"""A kind of cache that breaks a promise is found, by the claim that names the promise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llama import testing
from llama.args import ModelArgs
from llama.kv_cache import Attended, ConcatCache, Int8Cache, KVCache, QuestCache, SnapKVCache, StaticCache
from llama.kv_cache.published import KnormCache
from llama.kv_cache.window import WindowCache
from llama.rows import Rows
from llama.testing import SIZES, Broken, check_cache_kind

Claim = Callable[[ModelArgs], bool]
BREAKS: dict[str, tuple[type[KVCache], Claim]] = {}


def breaks(claim: Claim) -> Callable[[type[KVCache]], type[KVCache]]:
    """Note a class as a kind of cache that breaks a claim."""

    def note(cls: type[KVCache]) -> type[KVCache]:
        BREAKS[cls.__name__] = cls, claim
        return cls

    return note


def broken(name: str, claim: Claim, of: type[KVCache], **changes: Any) -> None:
    """Note a subclass with these attributes as a kind of cache that breaks a claim."""
    breaks(claim)(type(name, (of,), changes))


def stores(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """Return an `update` of a static cache that stores other keys and values than those given."""
    return lambda self, rows, xk, xv: StaticCache.update(self, rows, *change(xk, xv))


def returns(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return an `update` of a static cache that returns other values; `change` gets the stored and the new ones."""

    def update(self: KVCache, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = StaticCache.update(self, rows, xk, xv)  # type: ignore[arg-type]
        return keys, change(values, xv)

    return update


def observes(**rows: Any) -> Any:
    """Return an `observe` of a scored cache that reads these attributes of the rows."""
    return lambda self, attended: KnormCache.observe(self, replace(attended, rows=replace(attended.rows, **rows)))


# ---- kinds that differ in one method from a correct one --------------------------------------------------------------

STATIC, LOSSY = {"of": StaticCache}, {"of": StaticCache, "lossless": False}
broken("Rounds", testing.lossless_in_any_chunks, **STATIC, update=stores(lambda k, v: (k, (v * 16).round() / 16)))
broken("IsLate", testing.lossless_in_any_chunks, **STATIC, update=returns(lambda values, new: values.roll(1, dims=1)))
broken(
    "RoundsTheLastBit",
    testing.lossless_to_the_bit_in_exact_mode,
    **STATIC,
    update=stores(lambda k, v: (k, v * (1 + torch.finfo(v.dtype).eps))),
)
broken(
    "AddsOtherRows",
    testing.a_row_is_its_text_alone,
    **LOSSY,
    update=returns(lambda values, new: values + new.mean()),
)
broken("SwapsHeads", testing.a_token_reads_what_was_given, **LOSSY, update=returns(lambda values, new: values.flip(2)))
broken(
    "StoresTheRowBefore",
    testing.a_row_is_its_text_alone,
    **LOSSY,
    update=stores(lambda k, v: (k + k.roll(1, dims=0) * (len(k) > 1), v)),
)
broken(  # grows more than it predicts, but not for a prompt
    "Doubles",
    testing.bytes_are_as_predicted,
    **STATIC,
    _grow=lambda self, rows, size, like, **of: StaticCache._grow(
        self, rows, size if self.keys is None else self.args.max_seq_len, like, **of
    ),
)
broken("MovesNoRows", testing.a_row_is_its_text_alone, **STATIC, select_rows=lambda self, *rows: None)
broken(
    "JoinsAllButTheNewest",
    testing.a_row_is_its_text_alone,
    **STATIC,
    join=lambda self, other, rows, length: StaticCache.join(self, other, rows, length - 1),
)
broken("CopiesNothing", testing.a_row_is_its_text_alone, **STATIC, copy=lambda self: self)
broken("RepeatsNoRow", testing.a_row_is_its_text_alone, **STATIC, repeat_first_row=lambda self, rows: None)
broken("ChecksNothing", testing.bad_writes_are_refused, **STATIC, check=lambda self, rows, xk, xv: None)

broken(
    "DropsOneMore",
    testing.bytes_are_as_predicted,
    KnormCache,
    choose=lambda self, scores, budget: KnormCache.choose(self, scores, budget - 1),
)
broken("NeverCompresses", testing.bytes_are_as_predicted, KnormCache, observe=observes(prompt_ends=False))
broken(
    "CompressesEveryCall",
    testing.a_prompt_in_chunks_stores_the_same,
    KnormCache,
    whole_prompt=False,
    observe=lambda self, attended: observes(prompt_ends=attended.rows.width > 1)(self, attended),
)
broken(
    "PredictsShortRows",
    testing.bytes_are_as_predicted,
    KnormCache,
    kept_of=lambda self, prompt, end: KnormCache.kept_of(self, min(prompt, 31), end),
)
broken(  # 96 positions at a time behind the prompt
    "GrowsInLargerSteps",
    testing.bytes_are_as_predicted,
    KnormCache,
    _take=lambda self, rows, length, like: KnormCache._take(
        self, rows, -(-length // 96) * 96 if any(self._bases) else length, like
    ),
)
broken(
    "DrawsFromGlobalNumbers",
    testing.a_row_is_its_text_alone,
    KnormCache,
    score=lambda self, attended: torch.rand(attended.keys.shape[2], attended.keys.shape[1]),
)
for keeps in ("60", "20"):  # the queries of the last 50 or 10 tokens decide, which may be more than those of a call
    broken(
        f"ReadsTheLast{keeps}",
        testing.a_prompt_in_chunks_stores_the_same,
        SnapKVCache,
        whole_prompt=False,
        configure=lambda self, params, keeps=keeps: SnapKVCache.configure(self, keeps),
        text_bytes=lambda self, **of: 1 << 40,
    )
broken("StoresAllUntilThePromptEnds", testing.a_prompt_in_chunks_stores_the_same, KnormCache, whole_prompt=False)
broken(
    "ChoosesByWhatScoreStored",
    testing.what_is_kept_follows_from_scores_and_budget,
    KnormCache,
    score=lambda self, attended: setattr(self, "_seen", KnormCache.score(self, attended)) or self._seen,
    choose=lambda self, scores, budget: KnormCache.choose(self, self._seen, budget),
)


broken(
    "ReversesThePositions",
    testing.a_token_reads_what_was_given,
    KnormCache,
    _compressed=lambda self, *of: (
        (made := KnormCache._compressed(self, *of)) | {"kept_positions": made["kept_positions"].flip(0)}
    ),
)


# ---- kinds that store what they are given ----------------------------------------------------------------------------


@breaks(testing.memory_may_have_any_contents)
class ReadsAhead(StaticCache):
    """Multiplies memory that no token has written by zero."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        assert self.values is not None
        return keys, values + 0 * self.values[: len(xv), -1:]


@breaks(testing.a_row_is_its_text_alone)
class Remembers(StaticCache):
    """The next text sees a text."""

    lossless = False
    extra: Tensor | None = None

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        values = values if self.extra is None else values + self.extra
        self.extra = xv.mean() if self.extra is None else self.extra + xv.mean()
        return keys, values


@breaks(testing.bytes_are_as_predicted)
class Hides(StaticCache):
    """Stores tensors in a list, where they are not counted."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.hidden = [xk.clone()]
        return super().update(rows, xk, xv)

    def free(self) -> None:
        super().free()
        self.hidden = []


@breaks(testing.a_row_is_its_text_alone)
class Truncates(ConcatCache):
    """Claims that it can be truncated, but depends on what was fed behind."""

    lossless = False

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        self.most = max(getattr(self, "most", 0), keys.shape[1])
        return keys, values * (2 if keys.shape[1] < self.most else 1)

    def free(self) -> None:
        super().free()
        self.most = 0


@breaks(testing.a_row_is_its_text_alone)
class Counts(StaticCache):
    """Its results depend on a number that is missing from its state."""

    lossless = False

    calls = 0

    def free(self) -> None:
        super().free()
        self.calls = 0

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        self.calls += 1
        return keys, values * (2 if self.calls == 1 else 1)


@breaks(testing.a_token_reads_what_was_given)
class HidesTheNewest(StaticCache):
    """A token does not see itself, except at position 0."""

    lossless = False

    def visible(self, rows: Rows, xq: Tensor) -> Tensor:
        positions = torch.arange(rows.end)
        queries = torch.tensor(rows.starts)[:, None, None] + torch.arange(rows.width)[:, None]
        return (positions < queries) | (positions + queries == 0)


@breaks(testing.a_token_reads_what_was_given)
class TakesTheOtherHead(Int8Cache):
    """Dequantises the values of the other head."""

    def _whole(self, side: str, starts: Sequence[int], new: Tensor) -> Tensor:
        whole = super()._whole(side, starts, new)
        if side == "value" and max(starts) > 32:
            whole[:, :32] = whole[:, :32].flip(2)
        return whole


@breaks(testing.a_prompt_in_chunks_stores_the_same)
class SinksOfEachCall(WindowCache):
    """Takes the first tokens of each call for sinks."""

    def configure(self, params: str) -> None:
        super().configure("20+3")

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        assert self.values is not None
        if rows.width > 3:
            self.values[: len(xv), :3] = xv[:, :3]
        return keys, values


# ---- kinds that keep what scores highest -----------------------------------------------------------------------------


@breaks(testing.a_row_is_its_text_alone)
class CountsPadding(KnormCache):
    """Takes a share of the prompt with its padding."""

    def observe(self, attended: Attended) -> None:
        self.width = attended.rows.width
        super().observe(attended)

    def budget(self, positions: int) -> int:
        return super().budget(getattr(self, "width", positions))


@breaks(testing.a_row_is_its_text_alone)
class StoresPadding(KnormCache):
    """Scores rows with their padding, and keeps it."""

    def observe(self, attended: Attended) -> None:
        rows = attended.rows
        padded = replace(rows, lengths=(rows.width,) * len(rows.lengths))
        self.record(padded)
        super().observe(replace(attended, rows=padded))


@breaks(testing.a_token_reads_what_was_given)
class ReadsWhatPads(KnormCache):
    """Lets a head with few keys read what pads them."""

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        return torch.stack((super().choose(scores, budget + 5)[0], super().choose(scores, budget - 5)[1]))

    def visible(self, rows: Rows, xq: Tensor) -> Tensor | None:
        seen = super().visible(rows, xq)
        return None if seen is None else seen.any(1, keepdim=True).expand_as(seen)


@breaks(testing.a_row_is_its_text_alone)
class LosesBases(KnormCache):
    """Restores rows as if their prompt began where it ends."""

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        super().restore(state, rows, length)
        self._bases = [max(base - 1, 0) for base in self._bases]


@breaks(testing.bytes_are_as_predicted)
class FreesHalf(KnormCache):
    """Stores the whole prompt until the text is freed."""

    def observe(self, attended: Attended) -> None:
        super().observe(attended)
        if attended.rows.prompt_ends:
            self.prompt: Tensor | None = attended.keys.clone()


# ---- kinds that read a part ------------------------------------------------------------------------------------------


@breaks(testing.a_row_is_its_text_alone)
class BoundsOfOneRow(QuestCache):
    """Takes the bounds of row 0 for all rows."""

    def configure(self, params: str) -> None:
        super().configure("32")

    def _bound(self, rows: slice, start: int, end: int) -> None:
        super()._bound(rows, start, end)
        for bounds in (self.lows, self.highs):
            assert bounds is not None
            bounds[:] = bounds[:1].clone()


@breaks(testing.a_row_is_its_text_alone)
class RepeatsTheNewest(KnormCache):
    """Repeats only what is behind the prompt."""

    def repeat_first_row(self, rows: int) -> None:
        before = self._split()
        super().repeat_first_row(rows)
        self._join([before[row % len(before)] for row in range(rows)])


@breaks(testing.a_row_is_its_text_alone)
class CopiesShare(KnormCache):
    """A copy shares the memory behind the prompt."""

    def copy(self) -> "CopiesShare":
        made = super().copy()
        self._take(len(self._ends), 1, like=made.keys)  # type: ignore[arg-type]
        made.keys, made.values = self.keys, self.values
        return made


@breaks(testing.a_prompt_in_chunks_stores_the_same)
class BoundsWholePages(QuestCache):
    """Leaves out the page in which a call begins."""

    whole_prompt = False  # a cut changes what layers after the first one store, not the bounds

    def configure(self, params: str) -> None:
        super().configure("32")

    def _bound(self, rows: slice, start: int, end: int) -> None:
        super()._bound(rows, min(-(-start // 16) * 16, end - 1), end)


@pytest.mark.parametrize("kind", BREAKS)
def test_a_kind_that_breaks_a_promise_is_found_by_its_claim(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, claim = BREAKS[kind]
    monkeypatch.setitem(KVCache.kinds, kind, of)
    with torch.inference_mode(), pytest.raises((Broken, RuntimeError, ValueError, AttributeError)):
        claim(replace(SIZES, kv_cache=kind))


def test_a_broken_kind_fails_the_whole_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KVCache.kinds, "Remembers", BREAKS["Remembers"][0])
    with pytest.raises(Broken):
        check_cache_kind("Remembers")
