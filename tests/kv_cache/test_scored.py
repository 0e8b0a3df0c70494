"""Kinds that keep the keys with the highest scores: what is dropped is gone, and what stays is what the method says."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import cases
from tiny import FP64_TOLERANCE, some_tokens, tiny_args, tiny_model
from torch import Tensor

from llama.api import load
from llama.kv_cache import Attended, Cache, KVCache, ScoredCache
from llama.kv_cache.published import CompactorCache, ExpectedAttentionCache, KnormCache, SnapKVCache, TovaCache
from llama.model import Transformer
from llama.quant.layers import quantize_layers, quantized_weights
from llama.rope import RopeTable, rotate
from llama.rows import Rows
from llama.streaming import encode_prompt

LATER = ("chunkkv", "criticalkv", "finch", "cur", "compactor")
ALIKE = ("random", "keydiff", "lagkv", "pyramidkv", "expected-attention", "tova", "h2o", *LATER)
KEPT = ("knorm", "snapkv", "adakv", *ALIKE)


class Newest(ScoredCache, kind="newest"):
    """Keeps the newest keys; head 0 of a layer keeps twice as many as head 1."""

    def score(self, attended: Attended) -> Tensor:
        return torch.arange(attended.keys.shape[1]).expand(2, -1).to(attended.keys.dtype)

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        first, second = super().choose(scores, budget * 4 // 3), super().choose(scores, budget * 2 // 3)
        return torch.stack((first[0], second[1]))


class Shapeless(ScoredCache, kind="shapeless"):
    def score(self, attended: Attended) -> Tensor:
        return torch.zeros(2, 3)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def prompted(
    kind: str, *lengths: int, start: int = 0, sizes: dict[str, Any] | None = None
) -> tuple[Transformer, Tensor, Cache]:
    """Return a tiny model, tokens of rows of these lengths and more, and a cache that was fed the rows as prompts.

    With a `start`, the one prompt is fed in two calls.
    """
    model = tiny_model(**{"max_seq_len": 512, **(sizes or {})})
    tokens, cache = some_tokens(len(lengths), max(lengths) + 80), model.new_cache(kind)
    if start:
        model(tokens[:, :start], Rows.at([0], [start], prompt_ends=False), cache=cache)
    fed = Rows.at([start] * len(lengths), [length - start for length in lengths], prompt_ends=True)
    model(tokens[:, start : max(lengths)], fed, cache=cache)
    return model, tokens, cache


def kept(layer: KVCache) -> list[list[list[int]]]:
    """Return the kept positions of each row and head."""
    state = layer.state()
    counts = state["counts"]
    parts = iter(state["kept_positions"].split(counts.flatten().tolist()))
    return [[next(parts).tolist() for _ in row] for row in counts]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_share_is_rounded_down_to_at_least_four_keys_and_a_count_is_for_each_head() -> None:
    shares = [("", 100, 50), ("0.29", 100, 29), ("0.5", 75, 37), ("0.01", 40, 4), ("0.01", 3, 3), ("1", 40, 40)]
    for params, positions, wanted in [*shares, ("12", 100, 12), ("12", 8, 8), ("2", 100, 2)]:
        cache = KVCache.of(tiny_args(kv_cache=f"knorm:{params}" if params else "knorm", max_seq_len=128))
        assert isinstance(cache, ScoredCache)
        assert cache.budget(positions) == wanted, params


def test_pyramidkv_gives_the_first_layers_more_and_the_mean_stays() -> None:
    for share, positions, wanted in (
        ("0.25", 8000, [3900, 2633, 1367, 100]),
        ("0.75", 8000, [7936, 6645, 5355, 4064]),  # a layer cannot keep more than all but the window
        ("0.25", 5120, [2496, 1685, 875, 64]),
        ("0.25", 5119, [1279] * 4),  # a twentieth would be less than the window
        ("0.9", 600, [540] * 4),
    ):
        args = tiny_args(kv_cache=f"pyramidkv:{share}", max_seq_len=8192, n_layers=4)
        layers = [KVCache.of(args, layer) for layer in range(4)]
        assert [layer.budget(positions) for layer in layers if isinstance(layer, ScoredCache)] == wanted


def test_invalid_parameters_are_refused_with_an_example() -> None:
    for params in ("0", "0.0", "-1", "1.5", "many", "0.5+4", "25", ".", "1e-1"):
        with pytest.raises(ValueError, match=rf"^kv_cache='snapkv:{re.escape(params)}': .*such as 0.25 or 256$"):
            KVCache.of(tiny_args(kv_cache=f"snapkv:{params}"))
    for params in ("0", "15", "-16", "many", "1.5"):
        with pytest.raises(ValueError, match=r"from 16 on, such as quest:256$"):
            KVCache.of(tiny_args(kv_cache=f"quest:{params}"))


# ---- what is dropped is gone -----------------------------------------------------------------------------------------


PROMPTS = (1, 2, 5, 20, 135)


def favourite(scores: Tensor, queries: Tensor, keys: Tensor, layer: int) -> Tensor:
    """Let every query attend to the first token, as trained models do."""
    return scores + 20 * (keys == 0)


@pytest.mark.parametrize(
    "kind", ["snapkv", "adakv", "lagkv", "h2o", *cases(["pyramidkv", "tova", "chunkkv", "criticalkv", "finch"])]
)
def test_any_budget_keeps_the_newest_token_and_then_the_first_one_in_every_head(kind: str) -> None:
    model, tokens = tiny_model(max_seq_len=512), some_tokens(len(PROMPTS), max(PROMPTS))
    model.use(model.ops._replace(score_mod=favourite))
    for params in ("0.5", "0.01", "2", "65"):
        cache = model.new_cache(f"{kind}:{params}")
        model(tokens, Rows.at([0] * len(PROMPTS), PROMPTS, prompt_ends=True), cache=cache)
        for layer in cache.layers:
            assert isinstance(layer, ScoredCache)
            assert layer.keeps_its_budget(PROMPTS), params
            for length, heads in zip(PROMPTS, kept(layer), strict=True):
                assert all(head[-1] == length - 1 for head in heads), (params, length)
                if layer.budget(length) == ScoredCache.budget(layer, length):  # not a layer of a pyramid
                    assert all(head[0] == 0 for head in heads), (params, length)


def test_lagkv_keeps_the_newest_token_then_the_first_ones_then_the_last_ones() -> None:
    for length, budget in ((100, 2), (600, 2), (300, 4), (600, 5), (100, 75), (300, 75), (259, 150)):
        _, _, cache = prompted(f"lagkv:{budget}", length, sizes={"max_seq_len": 1024})
        wanted = [*range(min(budget - 1, 4)), *range(length - max(budget - 4, 1), length)]
        assert all(head == wanted for layer in cache.layers for head in kept(layer)[0])
    for head in kept(prompted("lagkv:150", 260)[2].layers[0])[0]:  # two groups of 128: the scores order the first
        assert (head[:4], head[-128:]) == ([0, 1, 2, 3], [*range(132, 260)])
        assert head[4:-128] != [*range(114, 132)]


@pytest.mark.parametrize("kind", ["snapkv", "adakv", "pyramidkv"])
def test_the_window_of_snapkv_leaves_half_of_a_small_budget_or_ten_keys_to_the_scores(kind: str) -> None:
    model, tokens = tiny_model(max_seq_len=512), some_tokens(1, 300)
    model.use(model.ops._replace(score_mod=lambda scores, queries, keys, layer: scores - 20 * (keys >= 60)))
    windows = {2: 1, 3: 1, 9: 4, 20: 10, 21: 11, 64: 54, 73: 63, 74: 64, 140: 64}  # by budget
    for budget, window in windows.items() if kind == "snapkv" else [(9, 4), (74, 64)]:
        cache = model.new_cache(f"{kind}:{budget}")
        model(tokens, 0, cache=cache)
        for head in kept(cache.layers[0])[0]:
            assert [position for position in head if position >= 60][-window:] == [*range(300 - window, 300)]
            late = sum(position >= 60 for position in head)
            assert kind == "adakv" or late == window + max(budget - window - 60, 0)


def test_expected_attention_leaves_half_of_a_small_budget_to_the_scores() -> None:
    for budget, sinks, start in ((2, 1, 0), (3, 1, 57), (7, 3, 60), (8, 4, 0), (8, 4, 57), (20, 4, 60)):
        for layer in prompted(f"expected-attention:{budget}", 61, start=start)[2].layers:
            assert all(head[:sinks] == [*range(sinks)] and len(head) == budget for head in kept(layer)[0])


def test_finch_keeps_the_question_and_chunkkv_two_chunks_beside_a_small_window() -> None:
    for head in kept(prompted("finch:150", 300, start=200)[2].layers[0])[0]:
        assert head[-100:] == [*range(200, 300)]
    for head in kept(prompted("chunkkv:30", 300)[2].layers[0])[0]:
        assert (len({at // 5 for at in head[:10]}), head[10:]) == (2, [*range(280, 300)])


def test_of_equal_scores_the_newest_are_kept() -> None:
    for kind in ("knorm", "adakv"):
        cache = KVCache.of(tiny_args(kv_cache=kind))
        assert isinstance(cache, ScoredCache)
        assert cache.choose(torch.zeros(2, 5000), 2000).nonzero()[:, 1].tolist() == [*range(3000, 5000)] * 2


@functools.cache
def demo_and_text() -> tuple[Transformer, Tensor]:
    """Return the demo model, and three texts, (3, 304)."""
    model, tokenizer = load("demo", device="cpu", dtype="fp32")
    text = (Path(__file__).parents[2] / "llama/bench/texts/persuasion.txt").read_text(encoding="utf-8")
    return model, torch.tensor([encode_prompt(tokenizer, text[begin:])[:304] for begin in (0, 15_000, 45_000)])


@functools.cache
@torch.inference_mode()
def logprobs_after(kind: str, length: int) -> torch.Tensor:
    """Return the log-probabilities, (3, 4, vocab), of 4 tokens behind prompts of this length."""
    model, tokens = demo_and_text()
    stored = model.new_cache(kind)
    model(tokens[:, :length], Rows.at([0] * 3, [length] * 3, prompt_ends=True), cache=stored, logits="last")
    steps = [model(tokens[:, at : at + 1], at, cache=stored) for at in range(length, length + 4)]
    return torch.cat(steps, dim=1).log_softmax(-1)


def divergence(kind: str, length: int) -> float:
    """Return the mean KL divergence from `static`, in nats, of 4 tokens behind prompts of this length."""
    found, static = logprobs_after(kind, length), logprobs_after("static", length)
    return float((static.exp() * (static - found)).sum(-1).mean())


@pytest.mark.slow
def test_every_method_keeps_better_keys_of_a_prompt_of_any_length_than_random_ones(
    request: pytest.FixtureRequest,
) -> None:
    """On 20 tokens, and with --long on 6 to 300."""
    cases = [("0.5", 20)]
    if request.config.getoption("--long"):
        cases = [*(("0.5", length) for length in (6, 20, 66, 100, 130, 150)), ("0.25", 300)]
    for share, length in cases:
        random = divergence(f"random:{share}", length)
        found = {kind: divergence(f"{kind}:{share}", length) for kind in KEPT if kind not in ("random", "knorm")}
        assert {kind: value for kind, value in found.items() if value >= random} == {}, (share, length)


def test_heads_keep_different_numbers_of_keys() -> None:
    _, _, cache = prompted("newest:0.25", 120, 90)
    for row, (base, first, second) in enumerate(((120, 40, 20), (90, 29, 14))):
        wanted = [list(range(base - first, base)), list(range(base - second, base))]
        assert all(kept(layer)[row] == wanted for layer in cache.layers)


def test_the_positions_of_each_head_reach_a_score_mod() -> None:
    model, tokens, cache = prompted("newest:0.25", 120)
    given: list[Tensor] = []

    def score_mod(scores: Tensor, queries: Tensor, keys: Tensor, layer: int) -> Tensor:
        given.append(keys)
        return scores - (queries - keys)

    model.use(model.ops._replace(score_mod=score_mod))
    model(tokens[:, 120:121], 120, cache=cache)
    assert given[0].shape == (1, 4, 1, 41)
    assert given[0][0, 0, 0].tolist() == [*range(80, 120), 120]
    assert given[0][0, 3, 0, :20].tolist() == [*range(100, 120)]


# ---- texts that go on ------------------------------------------------------------------------------------------------


def test_only_the_first_prompt_of_a_text_is_compressed_and_forks_leave_it_as_it_is() -> None:
    model, tokens, cache = prompted("snapkv:20", 100)
    before = kept(cache.layers[0])
    for length in (30, 12):
        fork = cache.copy()
        model(tokens[:, 100 : 100 + length], 100, cache=fork)
        assert kept(fork.layers[0]) == before
        assert fork.layers[0].state()["keys"].shape[1] == length
    assert kept(cache.layers[0]) == before
    assert cache.layers[0].state()["keys"].shape[1] == 0


def test_a_text_goes_on_behind_its_prompt_and_not_within_it() -> None:
    model, tokens, cache = prompted("knorm:0.5", 100)
    for at in range(100, 110):
        model(tokens[:, at : at + 1], at, cache=cache)
    assert cache.truncate(104)
    assert not cache.truncate(99)
    with pytest.raises(ValueError, match=r"^start_pos=99: this cache was compressed at position 100 .* from 0 on$"):
        model(tokens[:, 99:100], 99, cache=cache)
    again = model(tokens[:, :100], 0, cache=cache)
    assert torch.equal(again, model(tokens[:, :100], 0, cache=model.new_cache("static")))


def test_a_prompt_that_has_not_ended_goes_on_from_its_state() -> None:
    model, tokens, whole = prompted("knorm:20", 100)
    cut, restored = model.new_cache("knorm:20"), model.new_cache("knorm:20")
    model(tokens[:, :60], Rows.at([0], [60], prompt_ends=False), cache=cut)
    restored.restore(cut.state(1, 60), 1, 60, model.source)
    model(tokens[:, 60:100], Rows.at([60], [40], prompt_ends=True), cache=restored)
    assert [kept(layer) for layer in restored.layers] == [kept(layer) for layer in whole.layers]


def test_a_head_may_keep_no_key() -> None:
    class OneHead(KnormCache):
        def choose(self, scores: Tensor, budget: int) -> Tensor:
            return super().choose(scores, budget) & torch.tensor([[True], [False]])

    model, tokens, cache = prompted("knorm:20", 100)
    cache.layers = [OneHead(layer.args, layer.layer, layer.rope) for layer in cache.layers]
    model(tokens[:, :100], 0, cache=cache)
    restored = OneHead(cache.layers[0].args)
    restored.restore(cache.layers[0].state(1, 100), 1, 100)
    assert [len(head) for head in kept(restored)[0]] == [20, 0]


def test_a_row_that_begins_again_leaves_the_other_as_it_is() -> None:
    model, tokens, cache = prompted("knorm:20", 100, 60)
    before = kept(cache.layers[0])[1]
    model(torch.stack((tokens[0, :30], tokens[1, 60:90])), Rows.at([0, 60], [30, 30], prompt_ends=True), cache=cache)
    assert kept(cache.layers[0])[1] == before
    assert len(kept(cache.layers[0])[0][0]) == 20
    alone = model.new_cache("knorm:20")
    model(tokens[:1, :30], 0, cache=alone)
    assert kept(alone.layers[0])[0] == kept(cache.layers[0])[0]


def test_a_state_of_other_rows_or_sizes_is_refused() -> None:
    _, _, cache = prompted("h2o:20", 60)
    state = cache.layers[0].state(1, 60)
    empty = KVCache.of(cache.layers[0].args)
    broken = [
        ("ends", torch.tensor([59])),
        ("bases", torch.tensor([61])),
        ("bases", torch.tensor([-1])),
        ("counts", torch.tensor([[20, 19]])),
        ("counts", torch.tensor([[41, -1]])),
        ("kept_scores", state["kept_scores"].double()),
        ("kept_positions", state["kept_positions"][:-1]),
    ]
    for name, value in broken:
        with pytest.raises(ValueError, match=r"must be those of 1 rows|and should have"):
            empty.restore({**state, name: value}, 1, 60)
    more = dict.fromkeys(("keys", "values"), torch.zeros(1, 61, 2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="must be those of 1 rows"):
        empty.restore({**state, **more, "bases": torch.tensor([-1])}, 1, 60)
    empty.restore(state, 1, 60)
    assert kept(empty) == kept(cache.layers[0])


# ---- chunks, outputs, questions, neighbours, outliers ----------------------------------------------------------------


def test_chunkkv_orders_keys_of_a_long_prompt_whose_attention_is_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) * 1e-8
    scores[:, -64:] = torch.inf
    monkeypatch.setattr(SnapKVCache, "score", lambda *_: scores)
    whole, cut = (kept(prompted(f"chunkkv:{budget}", 300)[2].layers[0])[0] for budget in (140, 147))
    for head, (all_of, base) in enumerate(zip(cut, whole, strict=True)):
        more = sorted(set(all_of) - set(base))
        chunk = range(more[0] // 20 * 20, more[0] // 20 * 20 + 20)
        assert more == sorted(sorted(chunk, key=lambda at: -float(scores[head, at]))[:7])


@pytest.mark.parametrize("packed", [False, True])
def test_output_norms_are_those_of_what_each_value_adds_to_the_output(packed: bool) -> None:
    model, tokens = tiny_model(head_dim=32, dtype=torch.float32), some_tokens(1, 9)
    if packed:
        plain = dict(model.named_parameters())
        quantize_layers(model, torch.float32, "int8")
        for name, weight in quantized_weights(model).items():
            weight.fill(0, plain[name])

    def both(attended: Attended) -> Tensor:
        each = torch.eye(4)[:, :, None, None] * attended.values[0].transpose(0, 1).repeat_interleave(2, 0)
        made = attended.module.wo(each.permute(0, 2, 1, 3).flatten(2)).abs().sum(-1)  # (n_heads, kv_len)
        torch.testing.assert_close(attended.output_norms(), made, rtol=1e-5, atol=1e-5)
        return made

    assert _observed(model, tokens, 9, both).min() > 0


@pytest.mark.parametrize(("budget", "first", "last"), [(2, 1, 1), (7, 3, 2), (24, 8, 4)])
def test_compactor_keeps_the_ends_of_a_text_or_half_of_a_small_budget(budget: int, first: int, last: int) -> None:
    for head in kept(prompted(f"compactor:{budget}", 300)[2].layers[0])[0]:
        assert (head[:first], head[-last:]) == ([*range(first)], [*range(300 - last, 300)])


def test_compactor_judges_keys_of_earlier_calls_by_their_leverage_alone() -> None:
    _, _, static = prompted("static", 300)
    for start in (297, 200):
        layer = prompted("compactor:60", 300, start=start)[2].layers[0]
        assert isinstance(layer, CompactorCache)
        leverage = layer.leverage(static.layers[0].keys[0, 8:296], 8)  # type: ignore[index]
        for head, own in zip(kept(layer)[0], leverage, strict=True):
            early = [at - 8 for at in head if 8 <= at < min(start, 296)]
            assert early == own[: min(start, 296) - 8].topk(len(early)).indices.sort().values.tolist()


# ---- methods that go on after the prompt -----------------------------------------------------------------------------


def test_a_share_is_that_of_the_prompt_from_four_keys_on_while_the_text_grows() -> None:
    for prompt, most in ((1, 4), (3, 4), (9, 4), (13, 6)):
        model, tokens, cache = prompted("tova:0.5", prompt)
        for at in range(prompt, prompt + 8):
            for layer in cache.layers:
                assert isinstance(layer, ScoredCache)
                assert [len(head) for head in kept(layer)[0]] == [min(at, most)] * 2
                assert layer.keeps_its_budget([prompt])
                sizes = {"prompts": [prompt], "ends": [at], "reserved": (0, 0), "itemsize": 8}
                assert layer.nbytes == layer.predicted_bytes(**sizes)
            model(tokens[:, at : at + 1], at, cache=cache)


def test_heads_with_budgets_of_their_own_keep_them_at_every_step() -> None:
    class Uneven(TovaCache):
        def choose(self, scores: Tensor, budget: int) -> Tensor:
            return torch.stack((super().choose(scores, budget)[0], super().choose(scores, budget // 2)[1]))

    model, tokens, cache = prompted("tova:6", 1)
    cache.layers = [Uneven(layer.args, layer.layer, layer.rope) for layer in cache.layers]
    for start, end in ((0, 20), *((at, at + 1) for at in range(20, 30))):
        model(tokens[:, start:end], start, cache=cache)
        assert all(list(map(len, kept(layer)[0])) == [6, 3] for layer in cache.layers)


def test_h2o_adds_up_what_a_key_has_received_since_it_came_and_keeps_the_newest_half() -> None:
    """Layer 0 is computed again by loops: its queries and keys depend on tokens and positions alone."""
    model, tokens, cache = prompted("h2o:6", 12)
    attention, x = model.layers[0].attention, model.layers[0].attention_norm(model.tok_embeddings(tokens[:, :30]))
    cos, sin = RopeTable.of(model.args).up_to(30, x.device)
    xq, xk = (rotate(w(x).unflatten(-1, (-1, 8)), (cos[:30], sin[:30])) for w in (attention.wq, attention.wk))
    totals = [dict.fromkeys(range(12), 0.0) for _ in range(2)]  # what each kept key of a KV head has received
    for end in range(12, 31):
        for head, total in enumerate(totals):
            total.setdefault(end - 1, 0.0)
            for query, of in itertools.product(range(12) if end == 12 else [end - 1], (2 * head, 2 * head + 1)):
                seen = [key for key in total if key <= query]
                scores = [math.exp(float(xq[0, query, of] @ xk[0, key, head]) / math.sqrt(8)) for key in seen]
                for key, score in zip(seen, scores, strict=True):
                    total[key] += score / sum(scores) / 2  # the mean of the two query heads
            best = sorted(list(total)[:-3], key=lambda key: -total[key])[:3]
            totals[head] = {key: total[key] for key in total if key in best or key >= end - 3}
        assert kept(cache.layers[0])[0] == [list(total) for total in totals]
        wanted = [received for total in totals for received in total.values()]
        assert cache.layers[0].state()["kept_scores"].tolist() == pytest.approx(wanted, abs=1e-5)
        model(tokens[:, end : end + 1], end, cache=cache)


def _received(model: Transformer, tokens: Tensor, length: int) -> Tensor:
    """Return what each key of layer 0 receives from the queries of a prompt, the mean of a KV head's queries."""
    return _observed(model, tokens, length, lambda attended: attended.attention(length).sum(1))


def _observed(model: Transformer, tokens: Tensor, length: int, read: Callable[[Attended], Tensor]) -> Tensor:
    """Return what `read` gives for layer 0 of a prompt, the mean of a KV head's queries."""
    seen: list[Tensor] = []

    class Sees(KVCache.kinds["static"]):  # type: ignore[misc]
        def observe(self, attended: Attended) -> None:
            seen.append(read(attended.row(0)).unflatten(0, (2, -1)).mean(1))

    cache = model.new_cache("static")
    cache.layers = [Sees(layer.args, layer.layer, layer.rope) for layer in cache.layers]
    model(tokens[:, :length], 0, cache=cache)
    return seen[0]


@pytest.mark.parametrize("length", [5, 256, 257])
def test_what_a_key_receives_is_the_same_in_blocks(length: int) -> None:
    model, tokens, _ = prompted("static", length)
    received = _observed(model, tokens, length, Attended.received)
    assert torch.allclose(received, _received(model, tokens, length), atol=FP64_TOLERANCE)


def test_duo_attention_keeps_all_of_some_heads_and_the_ends_of_the_others() -> None:
    _, _, cache = prompted("duo-attention:0.5", 300)
    for layer in cache.layers:
        counts = sorted(map(len, kept(layer)[0]))
        assert counts == [260, 300]
        short = min(kept(layer)[0], key=len)
        assert short == [*range(4), *range(44, 300)]


def test_duo_attention_takes_its_heads_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text("[[1], []]")
    _, _, cache = prompted(f"duo-attention:{file}", 300)
    assert [[len(head) for head in kept(layer)[0]] for layer in cache.layers] == [[260, 300], [260, 260]]
    assert cache.nbytes == cache.predicted_bytes(prompts=[300], ends=[300], reserved=(0, 0), itemsize=8)


def test_what_is_no_file_of_heads_is_refused(tmp_path: Path) -> None:
    """The readers of untrusted files, which also bound it, have tests of their own."""
    file, long = tmp_path / "heads.json", "[[1]," + " " * (1 << 16) + "[]]"
    with pytest.raises(ValueError, match=r"heads\.json must have a list .*No such file"):
        Cache.of(tiny_args(), f"duo-attention:{file}")
    for text in ("[[1]]", "[[1], [2]]", "[[1], 0]", '{"0": [1]}', '{"0": [1], "0": []}', "[[1", "", long):
        file.write_text(text)
        said = "longer than 65,536 bytes" if text == long else ""
        with pytest.raises(ValueError, match=rf"heads\.json must have a list of KV heads for each of 2 .*{said}"):
            Cache.of(tiny_args(), f"duo-attention:{file}")


def test_scores_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^score of shapeless returned \(2, 3\); it must return .* \(2, 40\)$"):
        prompted("shapeless", 40)


def test_expected_attention_looks_512_positions_ahead_of_a_table_that_is_shorter() -> None:
    args = tiny_args(kv_cache="expected-attention", max_seq_len=4096)
    cache, basis = KVCache.of(args), torch.eye(args.head_dim, dtype=torch.float64)[:, None]  # (head_dim, 1, head_dim)
    assert isinstance(cache, ExpectedAttentionCache)
    turn = cache._mean_rotation(600, basis)
    cos, sin = RopeTable.of(args).up_to(1112, basis.device)
    each = [rotate(basis, (cos[position], sin[position]))[:, 0] for position in range(600, 1112)]
    torch.testing.assert_close(turn.T, torch.stack(each).mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("default", [torch.bfloat16, "meta"])
@pytest.mark.parametrize("kind", cases([*KEPT, "quest:16", "duo-attention"], "adakv", "quest:16"))
def test_the_default_dtype_and_device_of_a_program_change_nothing(kind: str, default: torch.dtype | str) -> None:
    model, tokens, expected = prompted(kind, 300, sizes={"dtype": torch.float32, "n_layers": 1})
    cache, dtype = model.new_cache(kind), torch.get_default_dtype()
    torch.set_default_device(default) if isinstance(default, str) else torch.set_default_dtype(default)
    try:
        model(tokens[:, :300], 0, cache=cache)
        made = model(tokens[:, 300:301], 300, cache=cache)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
    assert torch.equal(made, model(tokens[:, 300:301], 300, cache=expected))
    for one, other in zip(expected.state(), cache.state(), strict=True):
        assert all(torch.equal(held, other[name]) for name, held in one.items())


# ---- Quest -----------------------------------------------------------------------------------------------------------


def test_quest_reads_everything_while_the_text_is_short_and_then_the_pages_that_may_matter() -> None:
    model, tokens, cache = prompted("quest:64", 100)
    static = model.new_cache("static")
    model(tokens[:, :100], 0, cache=static)
    for at in range(100, 130):
        model(tokens[:, at : at + 1], at, cache=cache)
        model(tokens[:, at : at + 1], at, cache=static)
    layer, stream = cache.layers[0], torch.Generator().manual_seed(0)
    keys = layer.keys[0, :130].transpose(0, 1)  # type: ignore[index]
    for _ in range(10):
        queries = torch.randn(1, 1, 4, 8, dtype=torch.float64, generator=stream)
        seen = layer.visible(Rows.at([129], [1]), queries)
        assert seen is not None
        assert seen.shape == (1, 2, 1, 130)
        for head in range(2):
            pages = seen[0, head, 0].split(16)
            read = [page for page, own in enumerate(pages) if bool(own.any())]
            assert all(bool(pages[page].all()) for page in read)
            assert len(read) == 4
            assert read[-1] == 8, "the newest page is read"
            low, high = (torch.stack([f(own, 0) for own in keys[head].split(16)]) for f in (torch.amin, torch.amax))
            two = queries[0, 0, 2 * head : 2 * head + 2, None]
            bounds = torch.maximum(two * low, two * high).sum(-1).amax(0)  # (pages,)
            assert {*bounds[:8].topk(3).indices.tolist(), 8} == set(read)


def test_a_call_of_several_tokens_reads_all_that_was_fed() -> None:
    model, tokens, cache = prompted("quest:16", 100)
    static, _, full = prompted("static", 100)
    ours = model(tokens[:, 100:102], 100, cache=cache)
    assert torch.equal(ours, static(tokens[:, 100:102], 100, cache=full))


def test_of_equal_pages_the_earlier_ones_are_read() -> None:
    _, _, cache = prompted("quest:64", 300)
    layer: Any = cache.layers[0]
    layer.lows[:], layer.highs[:] = -1, 1
    seen = layer.visible(Rows.at([299], [1]), torch.ones(1, 1, 4, 8, dtype=torch.float64))
    assert seen[0, :, 0].nonzero()[:, 1].tolist() == [*range(48), *range(288, 300)] * 2


def test_a_short_row_reads_as_many_pages_as_it_may_when_another_is_longer() -> None:
    _, _, cache = prompted("quest:64", 100, 300)
    layer = cache.layers[0]
    seen = layer.visible(Rows.at([100, 300], [1, 1]), torch.randn(2, 1, 4, 8, dtype=torch.float64))
    assert seen is not None
    newest = torch.tensor([100, 300])[:, None, None]
    assert seen.any(-1).all()
    assert (seen.sum(-1) == 48 + newest % 16 + 1).all(), "three full pages and the newest one"
    assert not (seen & (torch.arange(301) > newest[..., None])).any()


def test_streaming_llm_is_another_name_of_window() -> None:
    for kind in ("streaming-llm:16+2", "streaming-llm:16+2@0;static", "static@0;streaming-llm:16+2"):
        cache = tiny_model(max_seq_len=64).new_cache(kind)
        assert {"window:16+2", "static"} >= {layer.args.kv_cache for layer in cache.layers} != {"static"}


# ---- ties ------------------------------------------------------------------------------------------------------------


def test_of_scores_that_are_equal_up_to_rounding_the_newer_keys_are_kept() -> None:
    cache = KVCache.of(tiny_args(kv_cache="knorm"))
    assert isinstance(cache, ScoredCache)
    inf, noise = torch.inf, 1 + 2**-52
    for scores, budget, expected in (
        ([1.0, 1.0, 1.0], 2, [1, 2]),
        ([noise, 1.0, 1.0], 2, [1, 2]),
        ([3.0, noise, 1.0, 0.5], 2, [0, 2]),
        ([1.0001, 1.0, 1.0], 1, [0]),
        ([-noise, -1.0, inf, inf], 3, [1, 2, 3]),
        ([inf, inf, inf, 1.0], 2, [1, 2]),
        ([-inf, 2.0, -inf], 2, [1, 2]),
        ([torch.nan, 2.0, 1.0], 2, [0, 1]),
        ([2.0, 1.0], 0, []),
        ([2.0, 1.0], 5, [0, 1]),
    ):
        for dtype in (torch.float64, torch.float32):
            kept = cache.choose(torch.tensor([scores], dtype=dtype), budget)
            assert kept[0].nonzero().flatten().tolist() == expected, (scores, budget, dtype)
