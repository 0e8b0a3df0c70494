"""Every kind of cache keeps the contract, and one that does not is caught; names, and what is asked of a kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import FP64_TOLERANCE, some_tokens, tiny_model
from torch import Tensor
from writes import rows_of

from llama import testing
from llama.args import ModelArgs
from llama.kv_cache import ConcatCache, KVCache, StaticCache, cache_kind
from llama.ops import PLAIN, ScoreMod, Scoring, attend, attention_mass, softmax_attention
from llama.rows import Rows
from llama.testing import CLAIMS, SIZES, Broken, check_cache_kind

OURS = ["static", "concat", "paged", "int8", "int4", "window", "window:20+3", "window:100+0", "paged:60"]


@pytest.mark.parametrize("kind", OURS)
def test_every_kind_of_ours_keeps_the_contract(kind: str) -> None:
    passed = check_cache_kind(kind)
    lossless = KVCache.named(kind).lossless
    assert len(passed) == (len(CLAIMS) if lossless else len(CLAIMS) - 2)


def test_every_kind_that_the_library_registers_is_tried() -> None:
    ours = {name for name, kind in KVCache.kinds.items() if kind.__module__.startswith("llama.")}
    assert ours == {name.partition(":")[0] for name in OURS}


# ---- kinds that break one promise each -------------------------------------------------------------------------------


class Rounds(StaticCache, kind="rounds"):
    """Says that it is lossless, and is not."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        return super().update(rows, xk, (xv * 16).round() / 16)


class Remembers(StaticCache, kind="remembers"):
    """Lets a text be seen by the next one."""

    lossless = False
    extra: Tensor | None = None

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        values = values if self.extra is None else values + self.extra
        self.extra = xv.mean() if self.extra is None else self.extra + xv.mean()
        return keys, values


class Crosstalk(StaticCache, kind="crosstalk"):
    """Lets rows touch each other."""

    lossless = False

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        return keys, values + xv.mean()


class Grows(StaticCache, kind="grows"):
    """Holds more than it predicts."""

    def reserve(self, rows: int, length: int) -> None:
        super().reserve(rows, length + 1)


class Keeps(StaticCache, kind="keeps"):
    """Does not give its memory back."""

    def free(self) -> None: ...


class Shares(StaticCache, kind="shares"):
    """Its copy is itself."""

    def copy(self) -> KVCache:
        return self


class Forgets(StaticCache, kind="forgets to spread"):
    """Leaves the other rows of a shared prefix as they are."""

    def spread(self, rows: int) -> None: ...


class Rewinds(KVCache.kinds["concat"], kind="rewinds"):  # type: ignore[misc]
    """Says that it can be rewound, and goes on where it was."""

    lossless = False

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        self.most = max(getattr(self, "most", 0), keys.shape[1])
        return keys, values * (2 if keys.shape[1] < self.most else 1)

    def free(self) -> None:
        super().free()
        self.most = 0


class Counts(StaticCache, kind="counts beside its buffers"):
    """What it gives back depends on a number that its state does not have."""

    lossless = False

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.calls = 0

    def free(self) -> None:
        super().free()
        self.calls = 0

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        self.calls += 1
        return keys, values * (2 if self.calls == 1 else 1)


class Believes(StaticCache, kind="believes every state"):
    """Takes a state that no cache of its kind gave."""

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        self.free()
        self.keys, self.values = state["keys"], state["values"]


class Takes(StaticCache, kind="takes anything"):
    """Refuses nothing."""

    def check(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        pass


BREAKS = {
    "rounds": testing.lossless_in_any_chunks,
    "remembers": testing.texts_leave_nothing_behind,
    "crosstalk": testing.rows_do_not_touch_each_other,
    "grows": testing.bytes_are_as_predicted,
    "keeps": testing.bytes_are_as_predicted,
    "shares": testing.a_copy_goes_on_by_itself,
    "forgets to spread": testing.a_prefix_may_be_shared,
    "rewinds": testing.a_text_may_be_rewound,
    "counts beside its buffers": testing.a_state_is_all_that_a_cache_needs,
    "believes every state": testing.a_state_is_all_that_a_cache_needs,
    "takes anything": testing.bad_writes_are_refused,
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_kind_that_breaks_a_promise_is_caught(kind: str) -> None:
    claim = BREAKS[kind]
    with torch.inference_mode(), pytest.raises((Broken, RuntimeError)):
        claim(ModelArgs(**{**vars(SIZES), "kv_cache": kind}))


@pytest.mark.parametrize("kind", ["remembers", "shares"])
def test_a_broken_kind_fails_the_whole_check(kind: str) -> None:
    with pytest.raises(Broken):
        check_cache_kind(kind)


# ---- names -----------------------------------------------------------------------------------------------------------

MINE = """
from llama.kv_cache import StaticCache

class Mine(StaticCache, kind="from a file"):
    def configure(self, params):
        self.params = params
"""


def test_a_kind_may_stand_in_a_file_with_parameters(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert cache_kind(f"{file}:from a file:3+4") == "from a file:3+4"
    model = tiny_model()
    model.kv_cache = f"{file}:from a file:7"
    assert {cache.params for cache in model.caches} == {"7"}  # type: ignore[union-attr]
    assert model.generate_tokens([[1, 2]], 3, kv_cache=f"{file}:from a file:9")[0]
    assert {cache.params for cache in model.caches} == {"7"}  # type: ignore[union-attr]
    assert check_cache_kind(f"{file}:from a file")


BAD: dict[str, tuple[str, str]] = {
    "unknown": ("lru", "known are: .*concat.*int4.*int8.*paged.*static.*window"),
    "no parameters": ("static:7", "takes no parameters"),
    "window of nothing": ("window:0", "empty"),
    "window smaller than its sinks": ("window:3+4", "smaller than its 4 sinks"),
    "window that is no number": ("window:big", "W\\+S"),
    "window past the limit": ("window:24+4", "max_seq_len=24"),
    "pool that is no number": ("paged:-1", "how many blocks"),
    "file that is not there": ("nowhere.py:mine", "nowhere.py cannot be run: FileNotFoundError"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_name_is_refused_in_a_line_and_the_model_stays_as_it_was(what: str) -> None:
    name, words = BAD[what]
    model = tiny_model()
    before = model.caches
    wanted = model.generate_tokens([[1, 2, 3]], 4, temperature=0.0)
    for ask in (lambda: setattr(model, "kv_cache", name), lambda: model.generate_tokens([[1]], 2, kv_cache=name)):
        with pytest.raises(ValueError, match=words) as refusal:
            ask()
        assert "\n" not in str(refusal.value)
    assert all(a is b for a, b in zip(model.caches, before, strict=True))
    assert model.generate_tokens([[1, 2, 3]], 4, temperature=0.0) == wanted


@pytest.mark.parametrize("code", ["import nothing_of_the_sort", "1 / 0", "def"])
def test_a_file_that_cannot_be_run_is_refused_in_a_line_and_may_be_mended(tmp_path: Path, code: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ValueError, match=r"mine\.py cannot be run"):
        cache_kind(f"{file}:mine")
    file.write_text(MINE)
    assert cache_kind(f"{file}:from a file") == "from a file"


def test_a_file_that_registers_nothing_is_told_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(ValueError, match="not a known kind of cache; known are"):
        tiny_model().kv_cache = f"{tmp_path / 'empty.py'}:of no file"


# ---- what is asked of a kind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4", "window:8+2"])
def test_exact_mode_and_a_lossy_kind_exclude_each_other(kind: str) -> None:
    model = tiny_model(kv_cache=kind, head_dim=8)
    with pytest.raises(ValueError, match="does not keep all it is given; choose static, concat or paged"):
        model.exact = True
    model.kv_cache = "static"
    model.exact = True
    for ask in (lambda: setattr(model, "kv_cache", kind), lambda: model.generate_tokens([[1]], 2, kv_cache=kind)):
        with pytest.raises(ValueError, match="exact mode promises"):
            ask()
    assert model.exact


@pytest.mark.parametrize("kind", OURS[:6])
def test_a_kind_for_one_call_gives_what_a_model_of_that_kind_gives_and_is_undone(kind: str) -> None:
    prompts, options = [[1, 2, 3, 4], [5, 6]], {"temperature": 0.7, "seed": 3}
    model, other = tiny_model(max_seq_len=80), tiny_model(max_seq_len=80, kv_cache=kind)
    wanted = other.generate_tokens(prompts, 60, **options)  # type: ignore[arg-type]
    plain = model.generate_tokens(prompts, 60, **options)  # type: ignore[arg-type]
    caches = model.caches
    assert model.generate_tokens(prompts, 60, kv_cache=kind, **options) == wanted  # type: ignore[arg-type]
    assert model.kv_cache == "static"
    assert all(a is b for a, b in zip(model.caches, caches, strict=True))

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate_tokens(prompts, 60, kv_cache=kind, on_step=stop)
    assert model.kv_cache == "static"
    assert model.generate_tokens(prompts, 60, **options) == plain  # type: ignore[arg-type]


class Weighing(StaticCache, kind="weighing"):
    """Notes the attention that it is told of."""

    weighs = True

    def weigh(self, mass: Tensor) -> None:
        self.told = [*getattr(self, "told", []), mass]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_kind_that_asks_is_told_how_much_attention_every_key_drew(ragged: bool) -> None:
    model = tiny_model(kv_cache="weighing")
    with torch.inference_mode():
        model(some_tokens(2, 6), 0)
        model(some_tokens(2, 3), [4, 2] if ragged else 4)
    for cache in model.caches:
        first, second = cache.told  # type: ignore[union-attr]
        assert first.shape == (2, 2, 6)
        assert second.shape == (2, 2, 7)
        torch.testing.assert_close(first.sum(-1), torch.full((2, 2), 12.0, dtype=torch.float64))  # queries x heads
        torch.testing.assert_close(second.sum(-1), torch.full((2, 2), 6.0, dtype=torch.float64))
        if ragged:
            assert torch.equal(second[1, :, 5:], torch.zeros(2, 2, dtype=torch.float64))


@torch.inference_mode()
@pytest.mark.parametrize("starts", [[0, 0, 0], [6, 6, 6], [6, 2, 4]], ids=str)
def test_keys_of_a_ragged_batch_draw_what_they_draw_in_each_row_alone(starts: list[int]) -> None:
    """Neither a token that pads a row nor a row that has ended asks for anything."""
    model, begun, tokens = tiny_model(kv_cache="weighing"), some_tokens(3, 6), some_tokens(3, 5, seed=1)
    lengths = [2, 5, 1]

    def told(
        rows: list[int], starts: list[int], width: int, lengths: list[int] | None, live: set[int] | None = None
    ) -> list[Tensor]:
        model.free_cache()
        if any(starts):
            model(begun[rows], 0)
        model(tokens[rows, :width], rows_of(starts, tokens[rows, :width], lengths=lengths, live=live))
        return [cache.told[-1] for cache in model.caches]  # type: ignore[union-attr]

    together = told([0, 1, 2], starts, 5, lengths)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for ours, alone in zip(together, told([row], [start], length, None), strict=True):
            torch.testing.assert_close(ours[row, :, : start + length], alone[0, :, : start + length])
            assert not ours[row, :, start + length :].any()
    for ours, ended in zip(together, told([0, 1, 2], starts, 5, lengths, live={1}), strict=True):
        assert torch.equal(ours[1], ended[1])
        assert not ended[[0, 2]].any()


def sharper(xq: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    """Attend with scores that are twice as large, so not as `attention_mass` says."""
    return attend(2 * xq, keys, *rest)


@torch.inference_mode()
def test_a_kind_that_weighs_refuses_attention_whose_weights_are_not_known_and_takes_what_is_marked() -> None:
    model, tokens = tiny_model(kv_cache="weighing"), some_tokens(1, 6)
    model(tokens, 0)
    told = [cache.told[-1] for cache in model.caches]  # type: ignore[union-attr]
    model.free_cache()
    model.use(PLAIN._replace(name="mine", attend=sharper))
    words = "attend=sharper of the operations 'mine' .* kv_cache='weighing' .* choose another kind of cache, or mark"
    with pytest.raises(ValueError, match=words):
        model(tokens, 0)
    assert not any(cache.nbytes for cache in model.caches), "nothing is written"
    model.use(PLAIN._replace(name="mine", attend=softmax_attention(lambda *given: attend(*given))))
    model(tokens, 0)
    for cache, before in zip(model.caches, told, strict=True):
        assert torch.equal(cache.told[-1], before)  # type: ignore[union-attr]
    model.use(PLAIN)
    model.exact = True
    model(tokens, 0)
    for cache, before in zip(model.caches, told, strict=True):
        torch.testing.assert_close(cache.told[-1], before)  # type: ignore[union-attr]
    model.use(PLAIN._replace(name="mine", attend=sharper))
    model.kv_cache = "static"
    model(tokens, 0)


def capped_and_sloped(scores: Tensor, query_positions: Tensor, key_positions: Tensor, layer: int) -> Tensor:
    """Soft-cap and ALiBi, whose slope differs by layer."""
    slopes = 0.5 ** torch.arange(1, scores.shape[1] + 1)[:, None, None]
    return 2 * (scores / 2).tanh() - (1 + layer) * slopes * (query_positions - key_positions)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [*OURS, "weighing"])
def test_every_kind_gives_under_a_score_mod_what_no_cache_gives(kind: str) -> None:
    """Of a text that it holds whole; in chunks, steps and ragged rows."""
    model, tokens = tiny_model(kv_cache=kind, max_seq_len=100), some_tokens(2, 20)
    with model.switched(kv_caching=False):
        plain = model(tokens)
        model.use(PLAIN._replace(score_mod=capped_and_sloped))
        wanted = model(tokens)
    assert not torch.allclose(wanted, plain)
    made = [model(tokens[:, :9], 0), model(tokens[:, 9:10], 9), model(tokens[:, 10:14], 10)]
    torch.testing.assert_close(torch.cat(made, dim=1), wanted[:, :14], rtol=0, atol=FP64_TOLERANCE)
    for starts, width in (([14, 11], 1), ([15, 12], 5)):
        columns = torch.tensor(starts)[:, None] + torch.arange(width)
        rows = torch.arange(2)[:, None]
        torch.testing.assert_close(
            model(tokens[rows, columns], starts), wanted[rows, columns], rtol=0, atol=FP64_TOLERANCE
        )


@pytest.mark.parametrize("prompts", [(30,), (30, 3)], ids=str)
def test_a_window_tells_a_score_mod_where_its_keys_stand_in_the_text(prompts: tuple[int, ...]) -> None:
    """Each query sees 6 keys, which the window holds long past its bound; without RoPE, it moves no angle."""
    model = tiny_model(kv_cache="window:12+2", max_seq_len=80, rope_theta=None)

    def nearest(scores: Tensor, query_positions: Tensor, key_positions: Tensor, layer: int) -> Tensor:
        return scores.masked_fill(query_positions - key_positions >= 6, -torch.inf)

    model.use(PLAIN._replace(score_mod=nearest))
    ids = [some_tokens(1, length, seed=length)[0].tolist() for length in prompts]
    made, wanted = (
        model.generate_tokens(ids, 30, temperature=0, logprobs=True, kv_caching=kv_caching)
        for kv_caching in (True, False)
    )
    assert made[0] == wanted[0]
    assert made[1] is not None
    assert wanted[1] is not None
    for ours, theirs in zip(made[1], wanted[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("score_mod", [None, capped_and_sloped])
def test_attention_mass_is_that_of_the_softmax(score_mod: ScoreMod | None) -> None:
    """A value that is 1 at one key alone makes attention return that key's share."""
    scoring = Scoring(1, None, score_mod)
    xq, keys = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.randn(2, 7, 2, 8, dtype=torch.float64)
    visible = torch.rand(2, 3, 7) > 0.3
    visible[..., 0] = True
    for start, seen in ((4, None), ([4, 1], None), (4, visible), ([4, 1], visible), (4, visible[0])):
        both = [rows_of(start, xq, lengths=real) for real in ([3, 3], [3, 1])]
        mass, padded = (attention_mass(xq, keys, rows, seen, scoring) for rows in both)
        for key in range(7):
            values = torch.zeros_like(keys)
            values[:, key] = 1
            shares = attend(xq, keys, values, both[0], seen, scoring)[..., 0]  # (bsz, seqlen, n_heads)
            shares = shares.unflatten(2, (2, 2)).sum(3)  # (bsz, seqlen, 2)
            torch.testing.assert_close(mass[..., key], shares.sum(1))
            torch.testing.assert_close(padded[..., key], torch.stack((shares[0].sum(0), shares[1, 0])))


def test_a_query_that_pads_a_row_may_see_nothing_or_what_is_no_number() -> None:
    xq, keys, padded = torch.randn(1, 2, 4, 8), torch.randn(1, 4, 2, 8), Rows.at([2], [1], width=2)
    alone = attention_mass(xq[:, :1], keys, Rows.at([2], [1]), None)
    nothing = torch.tensor([[True] * 3 + [False], [False] * 4])
    torch.testing.assert_close(attention_mass(xq, keys, padded, nothing), alone)
    keys[:, 3] = torch.nan
    torch.testing.assert_close(attention_mass(xq, keys, padded, None), alone)


def test_a_model_in_another_dtype_takes_its_cache_along() -> None:
    for kind in OURS[:6]:
        model = tiny_model(kv_cache=kind, dtype=torch.float32, max_seq_len=60, head_dim=8)
        with torch.inference_mode():
            model(some_tokens(1, 40), 0)
            model.to(torch.bfloat16)
            assert model(some_tokens(1, 2), 40).isfinite().all()


def test_limits_of_a_kind_count_what_it_holds() -> None:
    args: dict[str, Any] = {"kv_cache": "window:10+2", "max_seq_len": 16}
    model = tiny_model(**args)
    ids, _ = model.generate_tokens([[1, 2, 3]], 60, temperature=0.0)
    assert len(ids[0]) == 60
    with pytest.raises(ValueError, match="max_seq_len=16"):
        model.generate_tokens([[1, 2, 3]], 60, kv_caching=False)
    model.kv_caching = False
    with pytest.raises(ValueError, match="max_seq_len=16"):
        model(some_tokens(1, 17))
    model.kv_caching = True
    with pytest.raises(ValueError, match="log-probabilities depend on positions that this cache drops: it holds 12"):
        model.generate_tokens([list(range(13))], 2, echo=True, logprobs=True)
    assert model.generate_tokens([list(range(12))], 2, echo=True, logprobs=True)


@pytest.mark.parametrize("gives", ["nothing", "another dtype", "an error"])
def test_whatever_a_kind_makes_somebody_raise_is_told_with_the_claim(gives: str) -> None:
    name = f"odd_{gives.replace(' ', '_')}"

    class Odd(ConcatCache, kind=name):
        def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> Any:
            if gives == "an error":
                raise KeyError("mine")
            keys, values = super().update(rows, xk, xv)
            return None if gives == "nothing" else (keys.bfloat16(), values)

    with pytest.raises(Broken, match="Error where this was tried: A"):
        check_cache_kind(name)
