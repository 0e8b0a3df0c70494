"""A recording is true: its positions, bytes, costs and attention are those of the generation itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Ids
from hypothesis import given
from hypothesis import strategies as st
from test_page import figure_of
from tiny import tiny_model, watched, weights_by_loops
from torch import Tensor

from llama.costs import forward_flops, forwards, step_bytes
from llama.kv_cache import Int8Cache, StaticCache
from llama.model import Transformer
from llama.ops import PLAIN, ScoreMod, Scoring, softmax_attention
from llama.quant.layers import quantize_layers
from llama.watch.record import LEVELS, MOST_STEPS, Recording, look, record
from llama.watch.watch_page import formulas

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
EVERY_SECOND = f"{EXAMPLES}/every_second.py:every_second"
KINDS = ("static", "window:6+2", "int8", "h2o:6")
MORE_KINDS = ("concat", "paged", f"{EVERY_SECOND}:4")
PROMPT, NEW = [3, 1, 4, 1, 5], 9
ENDS = range(len(PROMPT), len(PROMPT) + NEW)  # of the text, step by step


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine count as idle: a busy one has a note of its own."""
    monkeypatch.setattr("llama.host.cores.OtherLoad.stop", lambda _: 0.0)


@pytest.fixture
def model() -> Transformer:
    return tiny_model(max_seq_len=64)


def recorded(model: Transformer, kv_cache: str = "static", **options: Any) -> Recording:
    return record(model, Ids(), PROMPT, NEW, **{"temperature": 0.0, "kv_cache": kv_cache, **options})


@pytest.mark.parametrize("kv_cache", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)])
def test_the_text_and_the_bytes_are_those_of_the_same_generation_unrecorded(model: Transformer, kv_cache: str) -> None:
    recording = recorded(model, kv_cache, temperature=0.7, seed=5)
    for kv_caching, texts in ((True, recording.texts), (False, recording.texts_off)):
        with watched(model) as watch:
            ids, _ = model.generate_tokens(
                [PROMPT], NEW, temperature=0.7, seed=5, kv_caching=kv_caching, kv_cache=kv_cache
            )
        assert " ".join(map(str, PROMPT + ids[0])) == "".join(texts).strip()
        works = [moment.on if kv_caching else moment.off for moment in recording.moments]
        assert [work.bytes_held for work in works] == watch.nbytes
        assert [work.fed for work in works] == watch.widths
        assert [[work.start] for work in works] == watch.starts
    alike = recording.texts == recording.texts_off
    assert [note.startswith("From token") for note in recording.notes] == ([] if alike else [True])


@pytest.mark.parametrize("kv_cache", ["static", "concat"])
def test_a_step_with_a_guess_shows_what_was_right_and_what_its_last_right_token_sees(
    model: Transformer, kv_cache: str
) -> None:
    prompt = [*PROMPT, *PROMPT[:4]]
    how: Any = {"temperature": 0.0, "kv_cache": kv_cache}
    plain, guessed = (record(model, Ids(), prompt, 30, **how, speculate=one) for one in (None, "lookup:4"))
    assert (guessed.texts, guessed.texts_off) == (plain.texts, plain.texts)
    by_end = {moment.cached: moment for moment in plain.moments}
    moments = [by_end[moment.cached] for moment in guessed.moments]
    assert [one.seen for one in guessed.moments] == [one.seen for one in moments]
    assert [one.attention for one in guessed.moments] == [one.attention for one in moments]
    assert [one.likely[0].text for one in guessed.moments] == [one.likely[0].text for one in moments]
    assert all(one.likely[0].chosen for one in guessed.moments)
    asked, end = [one for one in guessed.moments if one.guess], len(prompt)
    assert sum(one.right for one in asked) > 0 < sum(one.wrong for one in asked)
    for moment in guessed.moments[1:]:
        assert (moment.on.start, moment.on.fed) == (end, 1 + len(moment.guess))
        right = tuple(text.strip() for text in guessed.texts[end + 1 :])[: moment.right]
        assert tuple(text.strip() for text in moment.guess[: moment.right]) == right
        flops = forward_flops(model.args, seqlen=moment.on.fed, start_pos=end, scored=moment.on.fed)
        assert moment.on.flops == flops
        told = formulas(guessed, moment.on, moment.cached, len(moment.guess), moment.wrong)
        figures = [moment.on.fed, moment.on.flops, moment.on.bytes_read, moment.on.bytes_held]
        assert list(map(figure_of, told[:4])) == figures
        end += 1 + moment.right
    for name in ("fed", "flops", "bytes_read", "steps"):
        sums = [sum(getattr(one.off, name) for one in recording.moments) for recording in (plain, guessed)]
        assert sums[0] == sums[1]
    assert guessed.notes[0].startswith("Every guess is fed here.")


def test_counters_equal_the_costs_of_the_model(model: Transformer) -> None:
    moments, args, itemsize = recorded(model).moments, model.args, 8
    for kv_caching, works in ((True, [one.on for one in moments]), (False, [one.off for one in moments])):
        sizes: Any = {"input_len": len(PROMPT), "output_len": NEW, "kv_caching": kv_caching}
        assert [(work.start, work.fed) for work in works] == forwards(**sizes)
        assert [work.flops for work in works] == [
            forward_flops(args, seqlen=seqlen, start_pos=start) for start, seqlen in forwards(**sizes)
        ]
        assert [work.bytes_read for work in works] == [
            step_bytes(args, rows=1, context=work.start, itemsize=itemsize)
            + (work.fed - 1) * args.dim * itemsize  # the embedding vectors of the other tokens: the head is not tied
            for work in works
        ]
        assert all(work.ms > 0 for work in works)


def test_quantised_weights_are_read_in_their_own_bytes() -> None:
    model = tiny_model(dtype=torch.float32, tied_head=True)
    with torch.inference_mode():
        quantize_layers(model, torch.float32, "int8")
        for matrix in model.parameters():
            matrix.zero_()
    work = record(model, Ids(), PROMPT, 2, temperature=0.0).moments[-1].off
    assert work.bytes_read == step_bytes(model.args, rows=1, context=0, itemsize=4, quantize="int8")


def test_a_quantised_cache_reads_full_groups_in_their_own_bytes_and_newer_positions_in_full(
    model: Transformer,
) -> None:
    moments = record(model, Ids(), list(range(30)), 5, temperature=0.0, kv_cache="int8").moments
    args, full = model.args, StaticCache(model.args).position_bytes(itemsize=8)
    narrow = Int8Cache(args).position_bytes(itemsize=8)
    assert narrow < full
    read = [moment.on.bytes_read - moment.off.bytes_read for moment in moments]
    untied = [(moment.off.fed - moment.on.fed) * args.dim * 8 for moment in moments]  # vectors of the embedding
    held = [0, 30 * full, 31 * full, 32 * narrow, 32 * narrow + full]
    assert [one + more for one, more in zip(read, untied, strict=True)] == [args.n_layers * one for one in held]


def test_each_kind_of_cache_shows_the_positions_that_it_stores(model: Transformer) -> None:
    def seen(kv_cache: str) -> list[tuple[tuple[int, ...], ...]]:
        return [moment.seen for moment in recorded(model, kv_cache).moments]

    for kind in ("static", "concat", "paged", "int8"):
        assert seen(kind) == [(tuple(range(end)),) * 2 for end in ENDS]
    window = [tuple(p for p in range(end) if p < 2 or p >= end - 6) for end in ENDS]
    assert seen("window:6+2") == [(one,) * 2 for one in window]
    second = [tuple(p for p in range(end) if p % 2 == 0 or p >= end - 4) for end in ENDS]
    assert seen(f"{EVERY_SECOND}:4") == [(one,) * 2 for one in second]
    for end, layers in zip(ENDS, seen("h2o:6"), strict=True):
        for positions in layers:  # the newest three, and others, which differ by head; one is evicted after the step
            assert min(end, 7) <= len(positions) <= min(end, 3 + 1 + 2 * 3)
            assert set(positions) >= {end - 1, end - 2, end - 3}


def test_a_prompt_longer_than_a_window_shows_the_window(model: Transformer) -> None:
    recording = record(model, Ids(), list(range(20)), 2, temperature=0.0, kv_cache="window:6+2")
    assert recording.moments[0].seen == ((0, 1, 14, 15, 16, 17, 18, 19),) * 2
    assert recording.prompt_seen == tuple(tuple(p for p in range(q + 1) if p < 2 or p > q - 6) for q in range(20))


def near_ones(scores: Tensor, query_positions: Tensor, key_positions: Tensor, layer: int) -> Tensor:
    return scores - (1 + layer) * (query_positions - key_positions) / 4


@pytest.mark.parametrize(("kv_cache", "score_mod"), [("static", None), ("paged", near_ones)])
def test_attention_equals_a_float64_softmax_over_the_uncached_model(
    model: Transformer, kv_cache: str, score_mod: ScoreMod | None
) -> None:
    ops = PLAIN._replace(score_mod=score_mod)
    model.use(ops)
    recording = recorded(model, kv_cache)
    text = [int(word) for word in recording.texts]
    asked: list[tuple[Tensor, Tensor]] = []

    def spy(xq: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        asked.append((xq[0], keys[0]))
        return PLAIN.attend(xq, keys, *rest)

    model.use(ops._replace(attend=spy))
    with torch.inference_mode():
        model.with_kv_caching(False)(torch.tensor([text]))
    for end, moment in zip(ENDS, recording.moments, strict=True):
        for layer, ((queries, keys), weights) in enumerate(zip(asked, moment.attention, strict=True)):
            slope = 0 if score_mod is None else (1 + layer) / 4
            assert close(weights, softmax_in_loops(queries[end - 1], keys[:end], slope))


def test_attention_with_unknown_weights_is_refused(model: Transformer) -> None:
    def mine(xq: Tensor, *rest: Any) -> Tensor:
        return PLAIN.attend(xq, *rest)

    model.use(PLAIN._replace(name="mine", attend=mine))
    with pytest.raises(ValueError, match=r"attend=mine .* a recording shows .* model\.use"):
        recorded(model)
    model.use(PLAIN._replace(name="mine", attend=softmax_attention(mine)))
    shown = [recorded(model, kv_cache).moments[0].attention for kv_cache in ("static", "h2o:6")]
    model.use(PLAIN)
    assert shown == [recorded(model).moments[0].attention] * 2


def test_a_position_that_a_head_has_dropped_has_no_level_in_it(model: Transformer) -> None:
    moment = recorded(model, "h2o:6").moments[-1]
    for positions, weights in zip(moment.seen, moment.attention or (), strict=True):
        heads = [weights[head * len(positions) : (head + 1) * len(positions)] for head in range(model.args.n_heads)]
        assert [sum(level > 0 for level in head) for head in heads] == [7] * len(heads)
    assert all(level > 0 for weights in recorded(model).moments[-1].attention or () for level in weights)


def softmax_in_loops(query: Tensor, keys: Tensor, slope: float = 0) -> list[list[float]]:
    """Return each head's weights for query (n_heads, head_dim) and keys (kv_len, n_kv_heads, head_dim).

    `slope` is subtracted from a key's score for every key after it.
    """
    last = [len(keys) - 1]
    weights = weights_by_loops(query[None, None], keys[None], last, change=lambda score, _, far: score - slope * far)
    return weights[0, :, 0].tolist()  # type: ignore[no-any-return]


def close(weights: bytes, wanted: list[list[float]]) -> bool:
    """Return whether 8-bit weights equal the wanted ones, and each head's sum is one, down to rounding."""
    size = len(wanted[0])
    levels = [max(level - 1, 0) for level in weights]
    rows = [levels[head * size : (head + 1) * size] for head in range(len(wanted))]
    pairs = [pair for row, one in zip(rows, wanted, strict=True) for pair in zip(row, one, strict=True)]
    near = all(abs(level / LEVELS - weight) <= 0.501 / LEVELS for level, weight in pairs)
    return near and len(weights) == size * len(wanted) and all(abs(sum(row) - LEVELS) <= size / 2 for row in rows)


@given(data=st.data())
def test_look_returns_the_visible_positions_in_order_with_their_weights(data: st.DataObject) -> None:
    kv_len = data.draw(st.integers(1, 7))
    stand = data.draw(st.permutations(range(3, 3 + kv_len)))
    shown = data.draw(st.lists(st.booleans(), min_size=kv_len, max_size=kv_len).filter(any))
    generator = torch.Generator().manual_seed(kv_len)
    query = torch.randn(1, 1, 4, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, kv_len, 2, 8, generator=generator, dtype=torch.float64)
    keys[0, ~torch.tensor(shown)] = torch.nan  # hidden keys are not read
    positions, weights = look(query, keys, 99, torch.tensor([shown]), Scoring(key_positions=torch.tensor(stand)))
    places = sorted((i for i in range(kv_len) if shown[i]), key=lambda i: stand[i])
    assert positions == tuple(stand[i] for i in places)
    assert close(weights, softmax_in_loops(query[0, 0], keys[0, places]))


def test_heads_that_see_different_keys_have_their_own_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 4, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 5, 2, 8, generator=generator, dtype=torch.float64)
    sees = torch.tensor([[True, False, True, False, False], [False, True, True, False, False]])  # of two KV heads
    positions, weights = look(query, keys, 5, sees[None, :, None], Scoring())
    assert positions == (0, 1, 2)
    wanted = [[0.0] * 3 for _ in range(4)]
    for head in range(4):
        seen = sees[head // 2].nonzero()[:, 0]
        of_head = softmax_in_loops(query[0, 0, head : head + 1], keys[0, seen, head // 2 : head // 2 + 1])[0]
        for place, weight in zip(seen.tolist(), of_head, strict=True):
            wanted[head][place] = weight
    assert close(weights, wanted)


def test_the_model_is_as_before_at_every_step_and_its_runner_is_not_used(model: Transformer) -> None:
    """So an interrupted recording leaves nothing behind, and other threads may use the model meanwhile."""

    def runner(*_: Any, **__: Any) -> None:
        raise AssertionError("only the plain modules are recorded")

    def state() -> Any:
        parts = [module.ops for module in model.modules() if hasattr(module, "ops")]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        return parts, hooks, model.runner, model.kv_caching, model.kv_cache, model.cache

    runner.exact = False  # type: ignore[attr-defined]
    states: list[Any] = []
    model.runner = runner  # type: ignore[assignment]
    before = state()
    recorded(model, "window:6+2", progress=lambda: states.append(state()))
    assert [*states, state()] == [before] * (3 * NEW + 1)


def test_the_likely_tokens_are_the_models_own_and_one_is_chosen(model: Transformer) -> None:
    recording = recorded(model)
    for end, moment in zip(ENDS, recording.moments, strict=True):
        with torch.inference_mode():
            text = torch.tensor([[int(word) for word in recording.texts[:end]]])
            logits = model.with_kv_caching(False)(text, logits="last")[0, 0]
        top = logits.softmax(-1).topk(5)
        assert [one.text for one in moment.likely] == [f"{id} " for id in top.indices.tolist()]
        assert [one.probability for one in moment.likely] == pytest.approx(top.values.tolist())
        assert [one.chosen for one in moment.likely] == [True, False, False, False, False]  # greedy


def test_runs_draw_the_same_tokens_without_a_seed_too(model: Transformer) -> None:
    recording = recorded(model, temperature=1.0, seed=None)
    assert (recording.texts, recording.notes) == (recorded(model, temperature=1.0).texts, ())


def test_options_that_are_not_of_one_text_in_both_modes_are_refused(model: Transformer) -> None:
    for option in ("echo", "logprobs", "share_prefix", "kv_caching"):
        with pytest.raises(ValueError, match=f"leave out {option}"):
            recorded(model, **{option: True})


def test_times_under_load_get_a_note(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    words = "Other work kept 1.4 cores busy during the timed runs; on an idle machine they may be much faster."
    for others, seconds, notes in ((1.4, 0.0, (words,)), (0.2, 0.0, ()), (1.4, 1e9, ())):
        monkeypatch.setattr("llama.watch.record.LEAST_SECONDS", seconds)
        monkeypatch.setattr("llama.host.cores.OtherLoad.stop", lambda _, others=others: others)
        assert recorded(model).notes == notes


def test_a_recording_of_too_many_steps_is_cut_and_says_so(model: Transformer) -> None:
    recording = record(model, Ids(), PROMPT, 500, temperature=0.0, kv_cache="window:6+2")
    assert len(recording.moments) == min(MOST_STEPS, 64 - len(PROMPT))
    assert recording.notes[-1] == (
        "Of up to 500 steps the first 59 are shown: without the cache a text ends at max_seq_len=64."
    )
    with pytest.raises(ValueError, match="the prompt has 64 tokens, and without the cache a text ends at"):
        record(model, Ids(), [1] * 64, 1, kv_cache="window:6+2")
