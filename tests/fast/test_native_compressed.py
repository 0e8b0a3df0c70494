"""Native steps over caches that drop keys as a prompt ends give the results of plain steps, from the same bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from generations import GREEDY
from native import ARGS, VOCAB, needs_a_compiler, served, tolerance, twins
from tables import cases
from tiny import bits, some_tokens
from torch import Tensor

from llama.fast.native_caches import served_as
from llama.kv_cache import Attended, Cache, KVCache, ScoredCache, SnapKVCache
from llama.model import Transformer
from llama.rows import Rows

pytestmark = needs_a_compiler
TOKENS = some_tokens(3, 200, vocab_size=VOCAB)
LENGTHS = [100, 70, 95]
KINDS = ("snapkv:0.25", "adakv:0.25", "duo-attention:0.5", "knorm:7")
each_kind = pytest.mark.parametrize("kind", cases(KINDS, "adakv:0.25"))


def prompted(model: Transformer, kind: str, rows: slice = slice(3)) -> Cache:
    """Return a cache of the kind after prompts of different lengths, which the plain path runs."""
    runner, model.runner = model.runner, None
    cache = model.new_cache(kind)
    model(TOKENS[rows, :100], cache=cache, logits="last", lengths=LENGTHS[rows])
    model.runner = runner
    return cache


def step(model: Transformer, cache: Cache, number: int, rows: slice = slice(3)) -> Tensor:
    """Return the logits of the step of this number behind the prompts."""
    return model(TOKENS[rows, 100 + number : 101 + number], [length + number for length in LENGTHS[rows]], cache=cache)


def check_steps(
    plain: Transformer, fast: Transformer, theirs: Cache, ours: Cache, steps: range, kind: str = "fp32"
) -> None:
    """Feed the same tokens to both, and compare the logits and what is stored."""
    before = served(fast)
    for number in steps:
        expected = step(plain, theirs, number)
        torch.testing.assert_close(step(fast, ours, number), expected, rtol=0, atol=tolerance(kind, expected))
    assert served(fast) == before + len(steps)
    for one, other in zip(theirs.layers, ours.layers, strict=True):
        assert other.nbytes == one.nbytes
        torch.testing.assert_close(other.key_positions(), one.key_positions())
        for name, held in one.state().items() if kind == "fp32" else ():
            torch.testing.assert_close(other.state()[name], held, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "weights"),
    cases([*((kind, "fp32") for kind in KINDS), ("adakv:0.25", "int8 in bf16")], ("adakv:0.25", "fp32")),
)
def test_steps_are_the_plain_ones_past_every_growth(kind: str, weights: str) -> None:
    plain, fast = twins(weights, ARGS)
    check_steps(plain, fast, prompted(plain, kind), prompted(fast, kind), range(70), weights)


@each_kind
def test_a_row_has_the_bits_that_it_has_alone_with_any_number_of_threads(kind: str) -> None:
    """Threads divide the keys of few rows, and the heads of many."""
    _, fast = twins("fp32", ARGS)
    whole = prompted(fast, kind)
    for row, threads in ((0, 1), (1, 2), (2, 3)):
        alone, together, one = whole.copy(), whole.copy(), slice(row, row + 1)
        alone.select_rows([row])
        for number in range(12):
            expected = step(fast, together, number)[one]
            with threads_set(threads if number in (0, 11) else 1):  # threads that wait for a core burn its time
                assert torch.equal(bits(step(fast, alone, number, one)), bits(expected))
    twice, expected = whole.copy(), step(fast, whole, 0)
    for layer in twice.layers:
        layer.select_rows([0, 1, 2] * 2)
    with threads_set(2):
        found = fast(TOKENS[:, 100:101].repeat(2, 1), LENGTHS * 2, cache=twice)
    assert torch.equal(bits(found), bits(expected.repeat(2, 1, 1)))


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@each_kind
def test_rows_that_move_and_copies_continue_separately(kind: str) -> None:
    plain, fast = twins("fp32", ARGS)
    theirs, ours = prompted(plain, kind), prompted(fast, kind)
    check_steps(plain, fast, theirs, ours, range(3))
    fork, expected = ours.copy(), step(plain, theirs.copy(), 3)
    for cache in (theirs, ours):
        cache.select_rows([2, 0, 1])
        cache.select_rows([1, 2, 0])  # in order again, in other buffers
    check_steps(plain, fast, theirs, ours, range(3, 8))
    torch.testing.assert_close(step(fast, fork, 3), expected, rtol=0, atol=tolerance("fp32", expected))
    for cache in (theirs, ours):
        cache.select_rows([1])
    one, expected = slice(1, 2), step(plain, theirs, 8, slice(1, 2))
    torch.testing.assert_close(step(fast, ours, 8, one), expected, rtol=0, atol=tolerance("fp32", expected))


def test_slots_behind_the_newest_token_are_never_read() -> None:
    _, fast = twins("fp32", ARGS)
    cache = prompted(fast, "adakv:0.25")
    for number in range(5):
        step(fast, cache, number)
    spoiled = cache.copy()
    for layer in spoiled.layers:
        for name in ("keys", "values"):
            layer.held()[name][:, 5:] = torch.nan
    assert torch.equal(bits(step(fast, spoiled, 5)), bits(step(fast, cache, 5)))


# ---- what runs on the plain path -------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["chunks", "a prompt of one token", "rows that begin again"])
def test_calls_that_are_no_steps_run_on_the_plain_path_and_later_steps_do_not(
    calls: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins("fp32", ARGS)
    caches, before, made = [prompted(model, "adakv:0.25") for model in (plain, fast)], served(fast), []
    for model, cache in zip((plain, fast), caches, strict=True):
        if calls == "chunks":
            made.append(model(TOKENS[:, 100:107], LENGTHS, cache=cache))
        elif calls == "a prompt of one token":
            ends = Rows.at(LENGTHS, [1] * 3, prompt_ends=True)
            made.append(model(TOKENS[:, 100:101], ends, cache=cache))
        else:
            made.append(model(TOKENS[:, 100:101], Rows.at([0, *LENGTHS[1:]], [1] * 3), cache=cache))
    assert torch.equal(*made)
    assert served(fast) == before
    assert "kv_cache='adakv:0.25' observes the attention of a prompt; the plain path runs prompts, and" in caplog.text
    starts = {"chunks": [107, 77, 102], "a prompt of one token": [101, 71, 96], "rows that begin again": [1, 71, 96]}
    theirs, ours = (
        model(TOKENS[:, 110:111], starts[calls], cache=cache)
        for model, cache in zip((plain, fast), caches, strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance("fp32", theirs))
    assert served(fast) == before + 1


def test_a_prompt_is_plain_and_its_steps_are_native_in_a_model_of_the_kind(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = twins("fp32", replace(ARGS, kv_cache="snapkv:0.25"))
    assert fast.execution.runner == "native"
    fast.generate_tokens([[1] * 40], 9, **GREEDY)
    assert served(fast) == 8
    assert caplog.text.count("the plain path runs prompts, and native code the steps after them") == 1
    assert "the plain path runs instead" not in caplog.text


def test_a_bad_start_raises_the_error_of_the_plain_path() -> None:
    plain, fast = twins("fp32", ARGS)
    caches, said = [prompted(model, "snapkv:0.25") for model in (plain, fast)], []
    for model, cache in zip((plain, fast), caches, strict=True):
        for starts in ([101, *LENGTHS[1:]], [99, *LENGTHS[1:]]):
            with pytest.raises(ValueError, match=r"gap|was compressed at position 100") as refused:
                model(TOKENS[:, :1], starts, cache=cache)
            said.append(str(refused.value))
    assert said[:2] == said[2:]
    check_steps(plain, fast, *caches, range(2))  # nothing was written


class Newest(ScoredCache, kind="newest in native tests"):
    default = "0.3"
    slope = 2.0

    def configure(self, params: str) -> None:
        super().configure(params)
        self.slope = 3.0

    def score(self, attended: Attended) -> Tensor:
        places = torch.arange(attended.keys.shape[1]).float()
        return self.slope * places.expand(attended.keys.shape[2], -1)

    def budget(self, positions: int) -> int:
        return super().budget(positions) + 1

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        kept = super().choose(scores, budget)
        kept[1, 0] = True
        return kept


def test_a_kind_of_a_users_own_has_native_steps() -> None:
    plain, fast = twins("fp32", ARGS)
    kind = "newest in native tests"
    check_steps(plain, fast, prompted(plain, kind), prompted(fast, kind), range(3))


@pytest.mark.parametrize(
    "name", ["update", "visible", "key_positions", "observe", "rope_starts", "_take", "__init__", "keys", "every_step"]
)
def test_a_kind_that_overrides_what_native_code_does_runs_on_the_plain_path(name: str) -> None:
    made = type("Made", (SnapKVCache,), {name: getattr(SnapKVCache, name, True)})
    assert served_as(type("Same", (SnapKVCache,), {"window": 8, "__doc__": "As it was."})) is ScoredCache
    assert served_as(made if name != "every_step" else KVCache.kinds["h2o"]) is None
    assert served_as(type("Later", (made,), {})) is None or name == "every_step"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda layer: setattr(layer, "_padded", None), "_padded was assigned on an instance"),
        (lambda layer: layer._bases.__setitem__(0, layer._bases[0] - 1), "differ in their bases"),
        (lambda layer: layer._counts[0].__setitem__(0, 1), "counts of a layer's kept keys are not those of its keys"),
        (lambda layer: layer._counts.pop(), "counts of a layer's kept keys are not those of its keys"),
        (lambda layer: setattr(layer, "kept_keys", None), "observes the attention of a prompt"),
        (lambda layer: setattr(layer, "kept_values", layer.kept_values[1:]), "a tensor is ("),
        (lambda layer: setattr(layer, "kept_keys", layer.kept_keys.double()), "a tensor is torch.float64"),
    ],
    ids=["method", "bases", "counts", "rows", "nothing kept", "values", "dtype"],
)
def test_a_cache_that_was_edited_is_checked(change: object, says: str, caplog: pytest.LogCaptureFixture) -> None:
    _, fast = twins("fp32", ARGS)
    cache = prompted(fast, "adakv:0.25")
    step(fast, cache, 0)
    before = served(fast)
    change(cache.layers[1])  # type: ignore[operator]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "_plain", lambda self, tokens, rows, cache, logits: torch.zeros(3, 1, VOCAB))
        step(fast, cache, 1)
    assert served(fast) == before
    assert says in caplog.text
