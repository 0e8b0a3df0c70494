"""A kind of cache that does not act as its name says is found in what its cache stores and returns."""

from collections.abc import Sequence

import pytest
import torch
from tiny import some_tokens, tiny_model
from torch import Tensor

from llama.bench.run.kind_validity import CHECKS, judge_kind
from llama.kv_cache import Int8Cache, KVCache, ScoredCache, StaticCache
from llama.kv_cache.published import KnormCache
from llama.rows import Rows

LENGTH = 100


class StoresAll(KnormCache, kind="stores all"):
    """Drops nothing in its last layer."""

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool) if self.layer else super().choose(scores, budget)


class InPlainKeys(Int8Cache, kind="in plain keys"):
    """Claims 8 bits, and returns the keys as they came."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        _, values = super().update(rows, xk, xv)
        old = getattr(self, "_plain", xk[:, :0])
        self._plain = torch.cat((old, xk), dim=1)
        return self._plain, values


class Wrong(Int8Cache, kind="wrong"):
    """Returns half of each value, with the other sign."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        return keys, values / -2


class Zeros(StaticCache, kind="zeros"):
    """Returns zeros for what is older than 50 tokens."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        return keys, torch.cat((values[:, :-50] * 0, values[:, -50:]), dim=1)


class Blind(StaticCache, kind="blind"):
    """A token does not see itself."""

    lossless = False

    def visible(self, rows: Rows, xq: Tensor) -> Tensor:
        return (torch.arange(rows.end) < torch.arange(rows.width)[:, None] + rows.starts[0]) | (rows.starts[0] == 0)


class Larger(StaticCache, kind="larger"):
    """Stores more than it predicts."""

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        return super().predicted_bytes(prompts=prompts, ends=ends, reserved=reserved, itemsize=itemsize) - 1


def judged(kind: str, *, dtype: torch.dtype = torch.float32, column: str = "status") -> dict[str, str]:
    model, ids = tiny_model(max_seq_len=256, head_dim=32, dtype=dtype), some_tokens(1, LENGTH)
    cache, prompt = model.new_cache(kind, rows=1, length=LENGTH), LENGTH - 6
    with torch.inference_mode():
        model(ids[:, :prompt], Rows.at([0], [prompt], prompt_ends=True), cache=cache)
        for at in range(prompt, LENGTH):
            model(ids[:, at : at + 1], at, cache=cache)
    itemsize = model.dtype.itemsize
    predicted = cache.predicted_bytes(prompts=[prompt], ends=[LENGTH], reserved=(1, LENGTH), itemsize=itemsize)
    quantized = any(issubclass(type(layer), Int8Cache) or kind in ("int4", "fp8") for layer in cache.layers)
    rows = judge_kind(model, cache, ids[0].tolist(), prompt=prompt, predicted=predicted, quantized=quantized)
    return {str(row["name"]): str(row[column]) for row in rows}


OURS = ["static", "paged", "int8", "int4", "window:20+3", "adakv:0.3", "h2o:20", "tova:0.3", "quest:16", "fp8"]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in OURS), *((kind, torch.bfloat16) for kind in OURS[::4])]
)
def test_every_kind_of_ours_acts(kind: str, dtype: torch.dtype) -> None:
    found = judged(kind, dtype=dtype)
    assert set(found) == set(CHECKS)
    assert set(found.values()) <= {"ok", "not observed"}
    shown = KVCache.named(kind).lossless or issubclass(KVCache.named(kind), ScoredCache)
    assert found["dropped"] == ("ok" if shown else "not observed")


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("stores all", {"bytes", "dropped"}),
        ("in plain keys", {"rounded"}),
        ("wrong", {"rounded"}),
        ("zeros", {"rounded"}),
        ("blind", {"sees a key"}),
        ("larger", {"bytes"}),
    ],
)
def test_a_kind_that_does_not_act_is_found_by_its_own_check(kind: str, broken: set[str]) -> None:
    assert {name for name, status in judged(kind).items() if status == "violated"} == broken


def test_the_words_say_what_was_found_and_in_which_layers() -> None:
    found = judged("stores all", column="detail")
    assert found["dropped"] == "53 to 53 of 100 keys are read in layer 0; layers 1 do not store what their budget says"
    assert found["sees a key"] == "in 2 of 2 heads of layer 0 a token reads itself"
