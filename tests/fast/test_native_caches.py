"""Native code gives the results of the plain path over every kind of cache that it reads in place.

A difference in a key's last bit may change a code of a quantised cache. So single steps from equal states are compared,
and the resulting states group by group.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import (
    ARGS,
    VOCAB,
    cases,
    needs_a_compiler,
    served,
    tolerance,
    twins,
)
from tiny import bits, some_tokens, tiny_args
from torch import Tensor
from writes import rows_of

from llama.args import ModelArgs
from llama.kv_cache import Cache, KVCache, PagedCache, QuestCache
from llama.kv_cache.quantized import QuantizedCache, hadamard, quantize, unpacked
from llama.model import Transformer

pytestmark = needs_a_compiler
GROUPED = ("int8", "int4", "rotated:4+1", "rotated:k3v5+20", "rotated:k6v7+40", "rotated:k5v2+20", "kivi:2+7")
CACHES = (*GROUPED, "paged", "quest:64")
# Codes of an odd number of bits, keys before RoPE and sinks; scales by channel; a table of blocks; bounds of pages.
SOME = ("rotated:k3v5+20", "kivi:2+7", "paged", "quest:64")
each_cache = pytest.mark.parametrize("kv_cache", cases(CACHES, *SOME))
each_cache_and_dtype = pytest.mark.parametrize(
    ("kv_cache", "kind"),
    cases(
        [*((kv_cache, "fp32") for kv_cache in CACHES), *((kv_cache, "int8 in bf16") for kv_cache in SOME)],
        *((kv_cache, "fp32") for kv_cache in SOME),
    ),
)
TOKENS = some_tokens(3, 200, vocab_size=VOCAB)


def pair(kv_cache: str, kind: str = "fp32", args: ModelArgs = ARGS) -> tuple[Transformer, Transformer]:
    return twins(kind, replace(args, kv_cache=kv_cache))


def layers_of(model: Transformer) -> list[KVCache]:
    """Return the layers of the model's own cache."""
    return model.own_cache().layers


def continue_from(model: Transformer, held: Cache) -> None:
    """Set the model's own cache to a copy of `held`."""
    other = copy.deepcopy(held)
    for layer in other.layers:
        layer.rope = model.rope
    other.source = held.source and model.source
    model._own.cache = other


def same_state(plain: Transformer, fast: Transformer) -> None:
    """Set both caches to copies of the plain model's."""
    held = plain.own_cache()
    continue_from(plain, held)
    continue_from(fast, held)


def check_step(
    plain: Transformer,
    fast: Transformer,
    tokens: Tensor,
    start: int | list[int],
    kind: str = "fp32",
    *,
    lengths: list[int] | None = None,
    **how: object,
) -> None:
    """Feed both from equal states, and compare the logits, except those of padding, which mean nothing."""
    same_state(plain, fast)
    before, rows = served(fast), rows_of(start, tokens, lengths=lengths)
    theirs, ours = plain(tokens, rows, **how), fast(tokens, rows, **how)
    assert served(fast) == before + 1
    assert ours.shape == theirs.shape
    for row, length in enumerate(rows.lengths):
        one, other = ours[row, :length], theirs[row, :length]
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance(kind, theirs))


def written(cache: KVCache, name: str, row: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the index of what a row of this length has written in a stored tensor."""
    places: Iterable[int]
    if isinstance(cache, PagedCache):
        positions = torch.arange(end)
        return torch.tensor(cache.tables[row])[positions // 16], positions % 16
    if not isinstance(cache, QuantizedCache):
        places = range(cache.written(name, end) or 0)
    elif name not in ("keys", "values"):
        places = range(cache.quantized_len(end) // cache.group)
    else:
        window = range(cache.quantized_len(max(end - 1, 0)), end)
        places = [*range(min(cache.sinks, end)), *(cache.sinks + position % cache.turn for position in window)]
    return torch.tensor(row), torch.tensor([*places], dtype=torch.int64)


def check_held(plain: Transformer, fast: Transformer, ends: list[int]) -> None:
    """Assert that both caches are equal up to rounding: few codes of full groups differ, and by one."""
    for theirs, ours in zip(layers_of(plain), layers_of(fast), strict=True):
        for row, end in enumerate(ends):
            for name in theirs.held():
                one, other = (cache.held()[name][written(cache, name, row, end)] for cache in (theirs, ours))
                if name.endswith("_codes") and len(one):
                    assert isinstance(theirs, QuantizedCache)
                    size = getattr(theirs, name.replace("codes", "bits")), theirs.group
                    off = (unpacked(one, *size).int() - unpacked(other, *size)).abs()
                    assert off.max() <= 1
                    assert float(off.float().mean()) < 0.02
                else:
                    torch.testing.assert_close(other, one, rtol=1e-2 if "_" in name else 0, atol=1e-3)
            if isinstance(ours, QuestCache):  # the bounds of its own keys
                pages, held = ours.held()["keys"][row, :end].split(16), ours.held()
                assert torch.equal(held["lows"][row, : len(pages)], torch.stack([page.amin(0) for page in pages]))
                assert torch.equal(held["highs"][row, : len(pages)], torch.stack([page.amax(0) for page in pages]))
        if isinstance(theirs, PagedCache) and isinstance(ours, PagedCache):
            assert (ours.tables, ours.shared) == (theirs.tables, theirs.shared)
        elif isinstance(theirs, QuantizedCache) and isinstance(ours, QuantizedCache):
            assert (ours._ends, ours.nbytes) == (theirs._ends, theirs.nbytes)


@each_cache_and_dtype
def test_steps_and_chunks_of_ragged_rows_are_the_plain_ones(kv_cache: str, kind: str) -> None:
    plain, fast = pair(kv_cache, kind)
    lengths = [33, 70, 64]
    check_step(plain, fast, TOKENS[:, :70], 0, kind, logits="last", lengths=lengths)
    for width in (1, 31, 1, 28, 1):  # into, at and over the edges of groups and chunks of keys
        check_step(plain, fast, TOKENS[:, 80 : 80 + width], lengths, kind)
        lengths = [length + width for length in lengths]
    check_step(plain, fast, TOKENS[:, 80:130], lengths, kind, logits="last", lengths=[50, 1, 29])
    lengths = [145, 133, 155]
    if kv_cache != "paged":  # all logits, also those of padding
        check_step(plain, fast, TOKENS[:, :7], lengths, kind, lengths=[7, 2, 5])
        lengths = [152, 135, 160]
    if kind == "fp32":
        check_held(plain, fast, lengths)


@pytest.mark.parametrize("kv_cache", cases(["static", *CACHES], "static", "rotated:k3v5+20", "paged"))
def test_a_row_has_the_bits_that_it_has_alone_after_others_have_left(kv_cache: str) -> None:
    _, fast = pair(kv_cache)
    lengths, stays = [28, 17, 33], 2
    together, alone = fast.new_cache(), fast.new_cache()
    fast(TOKENS[:, :33], cache=together, logits="last", lengths=lengths)
    fast(TOKENS[stays : stays + 1, :33], cache=alone)
    for step, width in enumerate((*[1] * 9, 28, 1, 37)):
        if step == 4:
            together.select_rows([stays])
        rows = [stays] if step >= 4 else [0, 1, 2]
        ours = fast(TOKENS[rows, 50:][:, :width], [lengths[row] for row in rows], cache=together)[-1]
        assert torch.equal(bits(ours), bits(fast(TOKENS[[stays], 50:][:, :width], lengths[stays], cache=alone)[0]))
        lengths = [length + width for length in lengths]
    assert served(fast) == 26


@pytest.mark.parametrize("kv_cache", cases(["static", "int4", "paged", "quest:32", "quest:64"], "int4", "quest:32"))
def test_a_row_has_the_bits_that_it_has_alone_whatever_its_neighbours_are_fed(kv_cache: str) -> None:
    """With two threads, and with one."""
    _, fast = pair(kv_cache)
    starts, calls = [70, 100], ([1, 2], [1, 45], [30, 1], [2, 1], [1, 1])  # of 3 tokens, 2 threads divide the keys
    cache, alone = fast.new_cache(), [fast.new_cache() for _ in starts]
    fast(TOKENS[:2, :100], cache=cache, logits="last", lengths=starts)
    for row, start in enumerate(starts):
        fast(TOKENS[row : row + 1, :start], cache=alone[row], logits="last")
    try:
        for lengths, threads in zip(calls, (2, 1, 2, 2, 1), strict=True):
            torch.set_num_threads(threads)
            fed = TOKENS[:2].take_along_dim(torch.tensor(starts)[:, None] + torch.arange(max(lengths)), 1)
            made = fast(fed, starts, cache=cache, logits="last", lengths=lengths)
            torch.set_num_threads(1)
            for row, length in enumerate(lengths):
                own = fast(fed[row : row + 1, :length], starts[row], cache=alone[row], logits="last")
                assert torch.equal(bits(made[row]), bits(own[0])), (lengths, row)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    finally:
        torch.set_num_threads(1)
    assert served(fast) == 3 * (1 + len(calls))


@each_cache
def test_rows_that_share_their_beginning_and_copies_continue_separately(kv_cache: str) -> None:
    plain, fast = pair(kv_cache)
    check_step(plain, fast, TOKENS[:1, :45], 0)
    for model in (plain, fast):
        model.own_cache().repeat_first_row(3)
    for position in range(45, 66, 7):
        check_step(plain, fast, TOKENS[:, position : position + 7], position)
    check_held(plain, fast, [66] * 3)
    copied = fast.own_cache().copy()
    expected = fast(TOKENS[:, 70:71], 66)
    fast(TOKENS.flip(0))
    assert torch.equal(bits(fast(TOKENS[:, 70:71], 66, cache=copied)), bits(expected))


@each_cache
def test_a_text_may_change_between_native_and_plain_steps(kv_cache: str) -> None:
    plain, fast = pair(kv_cache)
    runner = fast.runner
    for model in (plain, fast):
        model(TOKENS[:, :50])
    for start in range(50, 90, 5):
        fast.runner = None if start // 5 % 2 else runner
        theirs, ours = plain(TOKENS[:, start : start + 5], start), fast(TOKENS[:, start : start + 5], start)
        same_state(plain, fast)  # so that rounding does not accumulate
        torch.testing.assert_close(ours, theirs, rtol=0, atol=20 * tolerance("fp32", theirs))
    fast.runner = runner
    assert served(fast) == 5


def poison(cache: KVCache, ends: list[int]) -> None:
    """Overwrite the memory of a layer that is not part of rows with these ends."""
    for name, buffer in cache.held().items():
        free = torch.ones(buffer.shape[:2], dtype=torch.bool)
        for row, end in enumerate(ends):
            free[written(cache, name, row, end)] = False
        buffer[free] = torch.nan if buffer.is_floating_point() else 255 if buffer.dtype == torch.uint8 else -1


@pytest.mark.parametrize(
    ("kv_cache", "kind"),
    cases(
        [*((kv_cache, "fp32") for kv_cache in ("static", *CACHES)), ("static", "bf16")],
        ("static", "fp32"),
        *((kv_cache, "fp32") for kv_cache in SOME),
    ),
)
def test_memory_that_was_never_written_is_never_read(kv_cache: str, kind: str) -> None:
    _, fast = pair(kv_cache, kind)
    ends = [80, 20, 33]
    fast(TOKENS[:, :80], logits="last", lengths=ends)
    before = fast.own_cache().copy()
    expected = fast(TOKENS[:, :1], ends)
    for cache in before.layers:
        poison(cache, ends)
    assert torch.equal(bits(fast(TOKENS[:, :1], ends, cache=before)), bits(expected))


@pytest.mark.parametrize("size", cases([0.0, 1e-30, 1e-6, 1.0, 3e4, 1e30], 1e-30, 1.0, 1e30))
@pytest.mark.parametrize(
    ("kv_cache", "kind"),
    cases(
        [*((kv_cache, "fp32") for kv_cache in GROUPED), ("rotated:k3v5+20", "bf16")],
        ("rotated:k5v2+20", "fp32"),
        ("kivi:2+7", "fp32"),
    ),
)
def test_groups_have_the_bits_of_the_plain_rule(kv_cache: str, kind: str, size: float) -> None:
    """Compare the rule itself, on numbers in the window, which is stored unquantised."""
    _, fast = pair(kv_cache, kind)
    layers = [layer for layer in fast.new_cache().layers if isinstance(layer, QuantizedCache)]
    group, sinks = layers[0].group, layers[0].sinks
    for number in (0, 1):
        end = (number + 1) * group + layers[0].window  # the feed of the last token quantises this group
        fast(TOKENS[:, : end - 1])
        slots = [sinks + position % layers[0].turn for position in range(number * group, (number + 1) * group)]
        drawn, expected = torch.Generator().manual_seed(1), []
        for cache in layers_of(fast):
            for side in ("keys", "values"):
                buffer = cache.held()[side]
                newest = size * torch.randn(buffer[:, slots].shape, generator=drawn)
                newest[0] = newest[0, 0]  # one number alone has no range
                newest[1] = newest[1].sign() * size  # the two ends of a range
                newest[2, 3] = (-2.0 if size > 1 else 0.5) * (size or 1)  # past float16, or a large one
                buffer[:, slots] = newest.to(buffer.dtype)
                expected.append(buffer[:, slots[:-1]].clone())
        fast(TOKENS[:, end - 1 : end], end - 1)
        for cache in layers_of(fast):
            assert isinstance(cache, QuantizedCache)
            for side in ("key", "value"):
                whole = cache.held()[f"{side}s"][:, slots]
                assert torch.equal(whole[:, :-1], expected.pop(0))
                groups = whole.transpose(1, 2).clone()  # (rows, n_kv_heads, group, head_dim)
                groups[:, :, : sinks if number == 0 else 0] = groups[:, :, sinks, None]
                if side == "key":
                    wanted = quantize(groups.mT, bits=cache.key_bits, parts=1, group=group)
                else:
                    groups = hadamard(groups.float()) if cache.rotates_values else groups
                    bits, parts = cache.value_bits, cache.value_parts
                    wanted = quantize(groups, bits=bits, parts=parts, group=group, share=cache.value_share)
                for part, numbers in zip(("scale", "zero", "codes"), (wanted[1], wanted[2], wanted[0]), strict=True):
                    assert torch.equal(cache.held()[f"{side}_{part}"][:, number], numbers), (number, side, part)


@settings(max_examples=6)
@given(data=st.data())
def test_models_of_many_shapes_and_ragged_rows(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    args = tiny_args(
        dim=32 * data.draw(st.integers(1, 4)),
        n_layers=data.draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if heads % n == 0])),
        head_dim=data.draw(st.sampled_from([32, 64, 96, 128])),
        multiple_of=32,
        vocab_size=data.draw(st.sampled_from([3, 16, VOCAB])),
        tied_head=data.draw(st.booleans()),
        max_seq_len=200,
    )
    kv_cache, kind = data.draw(st.sampled_from(["static", *CACHES])), data.draw(st.sampled_from(["fp32", "int8"]))
    plain, fast = pair(kv_cache, kind, args)
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    tokens = some_tokens(len(lengths), max(lengths), vocab_size=args.vocab_size)
    check_step(plain, fast, tokens, 0, "int8", logits="last", lengths=lengths)
    for width in data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)):
        check_step(plain, fast, tokens[:, :1].expand(-1, width), lengths, "int8")
        lengths = [length + width for length in lengths]


def test_a_row_in_a_paged_cache_has_the_bits_that_it_has_in_a_static_one() -> None:
    _, fast = pair("paged")
    _, static = pair("static")
    done = 0
    for width in (1, 31, 1, 40, 1, 22, 1, 64):
        fed = TOKENS[:, done : done + width]
        assert torch.equal(bits(fast(fed, done)), bits(static(fed, done)))
        done += width


def test_a_shared_block_is_copied_before_a_row_writes_to_it() -> None:
    """Also when the rows begin to share it in the middle of a text, of which native code has the tables."""
    plain, fast = pair("paged")
    for model in (plain, fast):
        model.generate_tokens([[1, 2, 3]], 20, temperature=0.0)
        model(TOKENS[:1, :20])
        model(TOKENS[:1, 20:21], 20)
        model.own_cache().repeat_first_row(3)
        for position in range(21, 40):
            logits = model(TOKENS[:, position : position + 1], position)
        assert served(fast) == (0 if model is plain else 41)
    theirs = plain(TOKENS[:, 40:41], 40)
    torch.testing.assert_close(fast(TOKENS[:, 40:41], 40), theirs, rtol=0, atol=tolerance("fp32", logits))
    check_held(plain, fast, [41] * 3)


def test_a_full_pool_raises_the_error_of_the_plain_path() -> None:
    plain, fast = pair("paged:9")
    said = []
    for model in (plain, fast):
        model(TOKENS[:, :40])
        with pytest.raises(ValueError, match="the pool may have 9") as refused:
            model(TOKENS[:, 40:60], 40)
        said.append(str(refused.value))
        assert layers_of(model)[0].tables[0] == layers_of(model)[1].tables[0]  # type: ignore[attr-defined]
    assert said[0] == said[1]
    check_step(plain, fast, TOKENS[:, 40:48], 40)


@pytest.mark.parametrize("what", ["tables", "shared"])
def test_edited_tables_and_shares_take_effect(what: str) -> None:
    plain, fast = pair("paged")
    for model in (plain, fast):
        model(TOKENS[:, :40])
        model(TOKENS[:, 40:41], 40)
        for cache in layers_of(model):
            assert isinstance(cache, PagedCache)
            if what == "tables":  # row 0 continues row 1's text
                cache.tables[0], cache.tables[1] = cache.tables[1], cache.tables[0]
            else:
                cache.shared[0] = len(cache.tables[0])
    theirs = plain(TOKENS[:, 41:42], 41)
    torch.testing.assert_close(fast(TOKENS[:, 41:42], 41), theirs, rtol=0, atol=tolerance("fp32", theirs))
    assert served(fast) == 3
    check_held(plain, fast, [42] * 3)


def test_a_table_with_a_block_outside_of_the_pool_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = pair("paged")
    fast(TOKENS[:, :40])
    for cache in layers_of(fast):
        assert isinstance(cache, PagedCache)
        cache.tables[0][0] = 1000
    with caplog.at_level(logging.WARNING, "llama"), suppress(IndexError, RuntimeError):
        fast(TOKENS[:, 40:41], 40)
    assert "not in the pool" in caplog.text


# ---- errors, and what runs on the plain path -------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", cases(GROUPED, "rotated:k3v5+20"))
def test_a_bad_start_raises_the_error_of_the_plain_path(kv_cache: str) -> None:
    plain, fast = pair(kv_cache)
    said = []
    for model in (plain, fast):
        model(TOKENS[:, :130])
        for start in (140, 33):
            with pytest.raises(ValueError, match=r"gap|quantised") as refused:
                model(TOKENS[:, :1], start)
            said.append(str(refused.value))
    assert said[:2] == said[2:]
    check_step(plain, fast, TOKENS[:, 130:134], 130)  # nothing was written
    if plain.own_cache().truncate(128):
        check_step(plain, fast, TOKENS[:, 130:132], 128)  # the newest group may be fed again


@pytest.mark.parametrize("kv_cache", cases(CACHES, "rotated:k3v5+20", "paged"))
@pytest.mark.parametrize(
    ("change", "native"),
    [
        (torch.clone, True),
        (lambda buffer: torch.stack([buffer, buffer], -1)[..., 0], False),  # not contiguous
        (lambda buffer: buffer.copy_(buffer / 2), True),
    ],
    ids=["moved", "strided", "edited"],
)
def test_buffers_that_are_moved_or_edited_in_the_middle(
    kv_cache: str, change: Callable[[Tensor], Tensor], native: bool
) -> None:
    plain, fast = pair(kv_cache)
    check_step(plain, fast, TOKENS[:, :40], 0)
    check_step(plain, fast, TOKENS[:, 40:41], 40)
    same_state(plain, fast)
    before = served(fast)
    for model in (plain, fast):
        for cache in layers_of(model):
            for name, buffer in cache.held().items():
                setattr(cache, name, change(buffer))
    theirs, ours = plain(TOKENS[:, 41:42], 41), fast(TOKENS[:, 41:42], 41)
    assert (served(fast) > before) == native
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance("fp32", theirs))
    check_step(plain, fast, TOKENS[:, 42:43], 42) if native else None


@pytest.mark.parametrize(
    ("kv_cache", "name", "value"),
    [
        *(("int8", "key_bits", 4), ("int8", "unrotated", True), ("int8", "_keep", lambda *given: None)),
        *(("int8", "update", lambda *given: None), ("paged", "_free_blocks", lambda *given: None)),
    ],
)
def test_a_cache_with_an_assigned_method_or_setting_runs_on_the_plain_path(
    kv_cache: str, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    _, fast = pair(kv_cache)
    fast(TOKENS[:, :40])
    before = served(fast)
    setattr(layers_of(fast)[1], name, value)
    caplog.set_level(logging.WARNING, "llama")
    with suppress(RuntimeError, TypeError, AttributeError):  # the plain path may fail with it
        fast(TOKENS[:, 40:41], 40)
    assert served(fast) == before
    assert f"{name} was assigned on an instance" in caplog.text


def test_bits_that_are_assigned_run_on_the_plain_path(caplog: pytest.LogCaptureFixture) -> None:
    """They are settings of an instance, and the buffers have the bits of before."""
    _, fast = pair("rotated:4+1")
    caplog.set_level(logging.WARNING, "llama")
    for layers, says in (([0], "differ in their groups"), ([0, 1], "a tensor is ")):
        fast.free_cache()
        fast(TOKENS[:, :100])
        before = served(fast)
        for layer in layers:
            layers_of(fast)[layer].key_bits = 8  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # the plain path may fail with it
            fast(TOKENS[:, 100:101], 100)
        assert served(fast) == before
        assert says in caplog.text


def test_layers_of_different_kinds_or_ends_run_on_the_plain_path(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = pair("int8")
    caplog.set_level(logging.WARNING, "llama")
    fast(TOKENS[:, :40])
    layers_of(fast)[1]._ends[0] = 39  # type: ignore[attr-defined]
    before = served(fast)
    with pytest.raises(ValueError, match="gap"):  # from the plain path
        fast(TOKENS[:, 40:41], 40)
    assert "different positions" in caplog.text
    for kind in ("static", "int4"):
        mixed = fast.new_cache()
        mixed.layers[0] = KVCache.of(replace(ARGS, kv_cache=kind), 0, fast.rope)
        fast(TOKENS[:, :40], cache=mixed)
    assert served(fast) == before
    assert "different kinds" in caplog.text


def test_a_cache_that_rotates_by_other_angles_runs_on_the_plain_path() -> None:
    _, fast = pair("static")
    for kind, native in (("static", True), ("int8", True), ("int4", False)):
        before = served(fast)
        fast(TOKENS[:, :40], cache=Cache.of(ARGS, kind))
        assert (served(fast) > before) == native


@pytest.mark.parametrize("kv_cache", cases(GROUPED, "rotated:k3v5+20"))
def test_small_values_and_the_output_matrix_that_widens_them_give_the_same_logits(kv_cache: str) -> None:
    """The powers of two are exact. Below 2^-14 of 1, numbers of float16 have fewer bits."""
    for model in pair(kv_cache):
        found = []
        for power in (0, -20, -40, 60):
            for layer in model.layers:
                with torch.no_grad():
                    layer.attention.wv.weight *= 2.0**power
                    layer.attention.wo.weight *= 2.0**-power
            cache = model.new_cache()
            with torch.inference_mode():
                model(TOKENS[:, :130], cache=cache)
                found.append(model(TOKENS[:, 130:132], 130, cache=cache))
        assert all(torch.equal(bits(one), bits(found[0])) for one in found)
