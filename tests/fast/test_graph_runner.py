"""A generation that the device runs by itself gives what the loop gives, step by step, or is left to the loop.

Without a GPU the same steps run unrecorded: what they read and write, where, and how often they are recorded is tested
here, in float64, so that no rounding decides a token. That a CUDA graph repeats them faithfully is not; the last test
is for that.
"""

import copy
import gc
import logging
import pickle
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain, count
from threading import Thread
from typing import Any

import pytest
import torch
from changes import CHANGES, outcome
from generations import GREEDY, WAYS, any_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama.commands import inference
from oracles import tiny_args, tiny_model
from torch import Tensor

from llama import cli, fast, load, sampling
from llama.args import ModelArgs
from llama.batch import NonFiniteLogits
from llama.fast import choose, graph_ops, graph_runner
from llama.fast.choose import find_fused
from llama.fast.fingerprint import Described
from llama.fast.graph_ops import Compiled
from llama.fast.graph_runner import (
    LENGTH_STEP,
    SYNC_INTERVAL,
    DecodeBuffers,
    GraphRunner,
    Recorder,
    Replay,
    run_layer,
)
from llama.fast.graph_trial import quickest, try_prompts, try_steps
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.quant.layers import quantize_layers
from llama.request import Options

VOCAB = 61
ARGS = tiny_args(dim=24, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=VOCAB, max_seq_len=200)
PROMPTS = [[5, 9, 2, 44], [7], [3, 3, 8, 1, 60, 12, 30]]


def twins(args: ModelArgs = ARGS, dtype: torch.dtype = torch.float64) -> tuple[Transformer, Transformer]:
    """Return a model whose loop is the host's, and its copy that runs ahead."""
    plain, fast = (tiny_model(args, dtype=dtype).requires_grad_(False) for _ in range(2))
    fast.runner = GraphRunner()
    return plain, fast


def ran(model: Transformer) -> int:
    assert isinstance(model.runner, GraphRunner)
    return model.runner.forwards


def buffers_of(model: Transformer) -> DecodeBuffers:
    assert isinstance(model.runner, GraphRunner)
    assert model.runner._buffers is not None
    return model.runner._buffers


def are_free(model: Transformer) -> bool:
    """Tell whether another text may have the buffers."""
    assert isinstance(model.runner, GraphRunner)
    return not model.runner.in_use.locked()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by one with each step that is recorded."""
    made: list[object] = []

    class Counting(Recorder):
        def __call__(self, step: Replay) -> Replay:
            made.append(step)
            return super().__call__(step)

    monkeypatch.setattr(graph_runner, "Recorder", Counting)
    return made


Continued = tuple[list[list[int]], list[list[float | None]] | None]


def assert_same(ours: Continued, theirs: Continued) -> None:
    """The same ids, and log-probabilities that differ by a few float64 roundings."""
    assert ours[0] == theirs[0]
    assert (ours[1] is None) == (theirs[1] is None)
    for one, other in zip(ours[1] or [], theirs[1] or [], strict=True):
        assert one == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_generation_run_ahead_is_the_loops(way: str, kv_caching: bool) -> None:
    plain, fast = twins()
    for room in (1, 2, SYNC_INTERVAL, SYNC_INTERVAL + 1, 3 * SYNC_INTERVAL + 5):
        before = ran(fast)
        ours = fast.generate_tokens(PROMPTS, room, kv_caching=kv_caching, **WAYS[way])
        assert_same(ours, plain.generate_tokens(PROMPTS, room, kv_caching=kv_caching, **WAYS[way]))
        assert ran(fast) - before == room - 1  # the first token follows from the prompt


@settings(max_examples=40)
@given(data=st.data())
def test_any_batch_with_any_room_and_any_stops_is_the_loops(data: st.DataObject) -> None:
    prompts, room, stops, options = data.draw(any_batch(VOCAB, most_stops=4))
    plain, fast = _TWINS
    kv_caching = data.draw(st.booleans())
    theirs = plain.generate_tokens(prompts, room, stop_ids=stops, kv_caching=kv_caching, **options)
    assert_same(fast.generate_tokens(prompts, room, stop_ids=stops, kv_caching=kv_caching, **options), theirs)


_TWINS = twins()


def test_steps_are_recorded_once_and_serve_texts_of_nearly_one_length(recordings: list[object]) -> None:
    _, fast = twins()
    for prompt, room in (([1, 2, 3], 20), ([4], 9), ([5] * 20, 3)):
        fast.generate_tokens([prompt], room, **GREEDY)
    assert ran(fast) == 19 + 8 + 2
    assert len(recordings) == 1
    fast.generate_tokens([[1]], 20, temperature=0.5)  # another way to choose
    assert len(recordings) == 2
    fast.generate_tokens([[1], [2]], 20, **GREEDY)  # another number of rows
    assert len(recordings) == 3
    fast.generate_tokens([[1], [2]], LENGTH_STEP + 5, **GREEDY)  # more room
    assert len(recordings) == 4


def test_without_a_cache_the_prefix_is_rounded_up_so_that_few_graphs_serve(recordings: list[object]) -> None:
    _, fast = twins()
    fast.generate_tokens([[1, 2, 3]], 2 * LENGTH_STEP, kv_caching=False, **GREEDY)
    assert ran(fast) == 2 * LENGTH_STEP - 1
    assert len(recordings) == 3  # of 1, 2 and 3 times LENGTH_STEP tokens


def test_all_graphs_of_a_set_of_buffers_share_a_stream_and_a_pool() -> None:
    """Which a recorder has one of; what graphs need in between is taken from one place, for they run one at a time."""
    recorders: list[Recorder] = []

    class Noting(Recorder):
        def __call__(self, step: Replay) -> Replay:
            recorders.append(self)
            return super().__call__(step)

    _, fast = twins()
    fast.runner = GraphRunner(recorder=Noting)
    fast.generate_tokens([[1, 2, 3]], 2 * LENGTH_STEP, kv_caching=False, **GREEDY)
    assert len(recorders) == 3
    assert len(set(map(id, recorders))) == 1
    fast.generate_tokens([[1], [2]], 3, kv_caching=False, **GREEDY)  # other buffers
    assert recorders[3] is not recorders[0]


def test_another_setting_records_nothing_anew(recordings: list[object]) -> None:
    plain, fast = twins()
    for n in range(5):
        options: Options = {
            "temperature": 0.7 + n / 10,
            "top_p": 0.5 + n / 10,
            "top_k": 20 + n,
            "min_p": n / 100 + 0.01,
        }
        options |= {"repetition_penalty": 1.1 + n / 10, "seed": 3}
        assert fast.generate_tokens(PROMPTS, 9, **options) == plain.generate_tokens(PROMPTS, 9, **options)
    assert len(recordings) == 1
    fast.generate_tokens(PROMPTS, 9, temperature=0.8, top_p=0.9)  # but another way to choose does
    assert len(recordings) == 2


def test_buffers_keep_few_graphs(recordings: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner, "MAX_GRAPHS", 2)
    _, fast = twins()
    for way in [*WAYS] * 2:
        fast.generate_tokens(PROMPTS, 9, **WAYS[way])
        assert len(buffers_of(fast).graphs) <= 2
    assert len(recordings) == 2 * len(WAYS)


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("way", ["sampled", "sampled in every way"])
def test_steps_that_candidates_do_not_decide_are_taken_anew(
    way: str, kv_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 61 tokens two or six are looked at first: that does for all steps, for some, or for none."""
    plain, fast = twins()
    options: Options = {**WAYS[way], "top_k": None, "logprobs": False, "echo": False}
    sorted_wholly: list[bool] = []
    for candidates in (2, 6, 30):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "_CANDIDATES", candidates)
            for temperature in (0.05, 0.4, 1.3):
                options["temperature"] = temperature
                ours = fast.generate_tokens(PROMPTS, 3 * SYNC_INTERVAL, kv_caching=kv_caching, **options)
                assert ours == plain.generate_tokens(PROMPTS, 3 * SYNC_INTERVAL, kv_caching=kv_caching, **options)
                sorted_wholly.append(any(key.whole for key in buffers_of(fast).graphs))
                assert isinstance(fast.runner, GraphRunner)
                fast.runner.drop()
    assert set(sorted_wholly) == {True, False}


def test_what_a_cache_held_before_does_not_show() -> None:
    plain, fast = twins()
    fast.generate_tokens(PROMPTS, 20, **GREEDY)
    assert len(buffers_of(fast).keys_values) == ARGS.n_layers
    for keys, values in buffers_of(fast).keys_values:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    assert fast.generate_tokens(PROMPTS, 20, **GREEDY) == plain.generate_tokens(PROMPTS, 20, **GREEDY)


Backend = Callable[..., Callable[..., Any]]


@pytest.fixture
def backend() -> tuple[Backend, list[torch.fx.GraphModule]]:
    """Return a compiler that changes nothing, and a list that grows by one with each graph that it compiles."""
    made: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()

    def compile_nothing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    return compile_nothing, made


@pytest.mark.slow
def test_what_is_compiled_is_compiled_when_it_is_tried_and_never_in_a_text(
    backend: tuple[Backend, list[torch.fx.GraphModule]],
) -> None:
    plain, fast = twins()
    ops, layer = graph_ops.compiled(backend[0]), Compiled(run_layer, backend[0])
    assert try_steps(fast, GraphRunner(ops)) > 0
    assert try_prompts(fast, layer) > 0
    fast.runner = GraphRunner(ops, layer)
    compiled = len(backend[1])
    assert compiled > 0
    for prompts, room in ((PROMPTS, 9), (PROMPTS[:1], 2 * LENGTH_STEP), (PROMPTS * 3, LENGTH_STEP)):
        for kv_caching in (True, False):
            ours = fast.generate_tokens(prompts, room, kv_caching=kv_caching, **GREEDY)
            assert ours == plain.generate_tokens(prompts, room, kv_caching=kv_caching, **GREEDY)
    assert len(backend[1]) == compiled
    assert ran(fast) == 2 * (9 + 3 * LENGTH_STEP)  # prompts, too


@pytest.mark.slow
def test_models_of_other_sizes_do_not_share_what_is_compiled(
    backend: tuple[Backend, list[torch.fx.GraphModule]],
) -> None:
    """Numbers of heads that vary would be taken for numbers that only the device knows."""
    for args in (ARGS, replace(ARGS, n_heads=3, n_kv_heads=3, head_dim=8)):
        model = tiny_model(args, dtype=torch.float64).requires_grad_(False)
        assert try_steps(model, GraphRunner(graph_ops.compiled(backend[0]))) > 0


def test_what_cannot_be_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU that is too old for Triton."""

    def too_old(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("this GPU is too old for Triton")

    plain, fast = twins(dtype=torch.float32)
    monkeypatch.setattr(choose, "COMPILER", too_old)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "llama"):
        choose._use_graphs(fast, fused=False)
    assert fast.execution.runner == "CUDA graphs of plain kernels"
    assert [words.split(" are not used: ")[0] for words in caplog.messages] == [
        "fast: compiled kernels", "fast: prompts by compiled layers"
    ]  # fmt: skip
    assert all("too old for Triton" in words for words in caplog.messages)
    assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)


def test_a_python_that_cannot_compile_has_pytorchs_own_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(*_: object, **__: object) -> Any:
        raise RuntimeError("torch.compile is not supported on Python 3.15+")

    _, fast = twins(dtype=torch.float32)
    monkeypatch.setattr(torch, "compile", refusing)
    with caplog.at_level(logging.WARNING, "llama"):
        choose._use_graphs(fast, fused=False)
    assert fast.execution.runner == "CUDA graphs of plain kernels"
    assert all("not supported on Python 3.15+" in words for words in caplog.messages)
    assert len(caplog.messages) == 2


def test_the_quickest_of_the_ways_that_are_right_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    def trial(seconds: float) -> float:
        if seconds < 2:
            raise Unsupported(f"{seconds} is too little")
        return seconds

    with caplog.at_level(logging.WARNING, "llama"):
        assert quickest([("first", 3.0), ("second", 1.0), ("third", 2.0)], trial) == 2.0
    assert caplog.messages == ["fast: second are not used: 1.0 is too little"]
    assert quickest([("first", 1.0), ("second", 0.5)], trial) is None


def test_a_generation_without_a_cache_leaves_none() -> None:
    _, fast = twins()
    fast.generate_tokens(PROMPTS, 20, **GREEDY)
    held = weakref.ref(buffers_of(fast).keys_values[0][0])
    fast.generate_tokens(PROMPTS, 20, kv_caching=False, **GREEDY)
    assert held() is None
    assert buffers_of(fast).keys_values == []


@pytest.mark.parametrize("kv_caching", [True, False])
def test_a_model_whose_switch_stands_otherwise_has_the_same_graphs(kv_caching: bool, recordings: list[object]) -> None:
    """One call without the cache, or with it, is computed by a twin of the model, which has the same weights."""
    plain, fast = twins()
    fast.kv_caching = not kv_caching
    for _ in range(2):
        ours = fast.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **GREEDY)
        assert ours == plain.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **GREEDY)
    fast.kv_caching = kv_caching
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 3 * 8
    assert len(recordings) == 1


def test_a_lane_is_no_longer_than_about_what_a_generation_needs() -> None:
    _, fast = twins()
    fast.generate_tokens(PROMPTS, 150, **GREEDY)
    long = buffers_of(fast).slots
    fast.generate_tokens(PROMPTS, 4, **GREEDY)
    assert buffers_of(fast).slots == LENGTH_STEP < long


def test_what_a_graph_reads_outlives_the_function_that_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds no tensor, only its address: the table of rotations, say, which gives way to a longer one."""

    class Freezing(Recorder):
        def __call__(self, step: Replay) -> Replay:
            super().__call__(step)
            return lambda: None

    monkeypatch.setattr(graph_runner, "Recorder", Freezing)
    _, fast = twins()
    fast.generate_tokens(PROMPTS, 9, kv_caching=True, **GREEDY)
    fast.generate_tokens(PROMPTS, 9, kv_caching=False, **GREEDY)
    tables = [weakref.ref(table) for table in fast.rope.up_to(9, fast.device)]
    fast(torch.zeros((1, 150), dtype=torch.int64))
    assert fast.rope.up_to(9, fast.device)[0] is not tables[0]()
    assert all(table() is not None for table in tables)


def test_replaced_weights_are_recorded_anew(recordings: list[object]) -> None:
    plain, fast = twins()
    fast.generate_tokens(PROMPTS, 12, **GREEDY)
    for model in (plain, fast):
        torch.manual_seed(8)
        norm = model.blocks[1].ffn_norm
        norm.weight = torch.nn.Parameter(torch.randn_like(norm.weight), requires_grad=False)
    assert fast.generate_tokens(PROMPTS, 12, **GREEDY) == plain.generate_tokens(PROMPTS, 12, **GREEDY)
    assert len(recordings) == 2


def test_weights_changed_in_place_need_no_recording(recordings: list[object]) -> None:
    plain, fast = twins()
    fast.generate_tokens(PROMPTS, 12, **GREEDY)
    for model in (plain, fast):
        model.blocks[0].feed_forward.w2.weight.mul_(-3)
    assert fast.generate_tokens(PROMPTS, 12, **GREEDY) == plain.generate_tokens(PROMPTS, 12, **GREEDY)
    assert len(recordings) == 1


@pytest.mark.parametrize("kv_caching", [True, False])
def test_logits_that_are_not_finite_are_reported_at_their_step_and_row(kv_caching: bool) -> None:
    """Token 13 makes nan; the second row meets it at its fourth step, as its most likely one."""
    plain, fast = twins()
    ids, _ = plain.generate_tokens(PROMPTS, 6, **GREEDY)
    poison = next(id for id in ids[1][1:] if id not in {*ids[0], *ids[2], *chain(*PROMPTS)})
    step = ids[1].index(poison)
    for model in (plain, fast):
        model.tok_embeddings.weight[poison] = torch.nan  # the head of this model is another matrix
        with pytest.raises(NonFiniteLogits) as caught:
            model.generate_tokens(PROMPTS, 12, kv_caching=kv_caching, **GREEDY)
        assert (caught.value.step, caught.value.row) == (step + 1, 1)
    assert are_free(fast)  # though the error, which is still known, has the frames of the text


def test_streams_give_the_same_tokens_and_may_be_left_early() -> None:
    from fakes import Bytes

    plain, fast = (tiny_model(replace(ARGS, vocab_size=258), dtype=torch.float64) for _ in range(2))
    fast.runner = GraphRunner()
    for model in (plain, fast):
        model.requires_grad_(False)
    assert [*fast.stream(Bytes(), ["ab", "c"], 30, **GREEDY)] == [*plain.stream(Bytes(), ["ab", "c"], 30, **GREEDY)]
    with fast.stream(Bytes(), "ab", 100, **GREEDY) as stream:
        next(stream)
    assert are_free(fast)
    assert ran(fast) <= 29 + 2 * SYNC_INTERVAL  # what was on its way when the stream was left
    assert fast.generate(Bytes(), "ab", 30, **GREEDY) == plain.generate(Bytes(), "ab", 30, **GREEDY)


# ---- left to the loop ------------------------------------------------------------------------------------------------


class Silent(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def change_a_module(model: Transformer) -> None:
    model.blocks[1].feed_forward = Silent()  # type: ignore[assignment]


def change_an_operation(model: Transformer) -> None:
    model.use(model.ops._replace(name="mine", silu=torch.tanh))


def watch_a_layer(model: Transformer) -> None:
    model.blocks[0].register_forward_hook(lambda _, given, out: out * 0.5)


def change_the_cache(model: Transformer) -> None:
    model.kv_cache = "concat"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_a_module, "Silent is not one of the modules"),
        (change_an_operation, "the model's operations are mine"),
        (watch_a_layer, "a hook watches TransformerBlock"),
        (change_the_cache, "kv_cache='concat' has no fast step; these kinds have one: static; the plain"),
    ],
)
def test_what_steps_would_pass_by_is_left_to_the_loop_and_said_once(
    change: Callable[[Transformer], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    for model in (plain, fast):
        change(model)
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 0
    assert len(caplog.messages) == 1
    assert words in caplog.messages[0]


ROUNDED = ("halve", "to_bfloat16")  # graphs round 16-bit numbers at other places
# Of caches: a text has its own, which no one else reaches.
OF_CACHES = ("replace_a_method_of_a_cache", "put_a_cache_of_ones", "keep_keys_unrotated", "halve_what_is_kept")
WRITTEN = ("edit_in_place", "load_by_copy")  # numbers of weights: of the steps under way, they come too late


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in ROUNDED + OF_CACHES])
def test_a_change_in_the_middle_of_a_text_counts_from_the_next_token_on(change: str) -> None:
    from fakes import Ids

    sampled: Options = {"temperature": 0.7, "seed": 5}
    texts: list[object] = []
    for model in twins():
        with model.stream(Ids(), PROMPTS, 20, **sampled) as stream:
            made: list[object] = [next(stream) for _ in range(15)]
            with suppress(RuntimeError, ValueError):  # some are refused
                CHANGES[change](model)
            rest = outcome(lambda stream=stream: [*stream])  # type: ignore[misc]
        again = outcome(lambda model=model: model.generate_tokens(PROMPTS, 9, **sampled))  # type: ignore[misc]
        texts.append((made, None if change in WRITTEN else rest, again))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_have_ended_stay_out_of_what_calls_go_on_with(way: str, kv_caching: bool) -> None:
    """In the middle of a text, when some rows have left: the others keep their keys, their draws and their tokens."""
    from fakes import Ids

    for after in range(1, 36, 5):
        texts = []
        for model in twins():
            options: Options = {**WAYS[way], "kv_caching": kv_caching}
            with model.stream(Ids(), PROMPTS, [3, 25, 9], **options) as stream:
                made = [next(stream) for _ in range(after)]
                watch_a_layer(model)
                texts.append((made, [*stream]))
        assert texts[0] == texts[1]


def test_one_text_at_a_time_has_the_graphs_and_others_are_left_to_the_loop() -> None:
    from fakes import Ids

    plain, fast = twins()
    wanted = [*plain.stream(Ids(), PROMPTS, 20, **GREEDY)]
    stream = fast.stream(Ids(), PROMPTS, 20, **GREEDY)
    made = [next(stream) for _ in range(9)]
    before = ran(fast)
    for kv_caching in (True, False):
        ours = fast.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **GREEDY)
        assert ours == plain.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **GREEDY)
    assert ran(fast) == before
    assert [*made, *stream] == wanted
    assert ran(fast) == 19
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 19 + 8


def test_a_stream_that_nobody_reads_any_more_gives_the_graphs_back() -> None:
    from fakes import Ids

    _, fast = twins()
    for pieces in (1, 9):
        stream = fast.stream(Ids(), PROMPTS, 20, **GREEDY)
        for _ in range(pieces):
            next(stream)
        assert not are_free(fast)
        del stream
        assert are_free(fast)


def test_a_text_that_ends_before_its_first_step_gives_the_graphs_back() -> None:
    _, fast = twins()
    fast.generate_tokens(PROMPTS, [0, 0, 0], echo=True, **GREEDY)
    assert are_free(fast)
    handle = fast.blocks[0].register_forward_pre_hook(lambda *_: 1 // 0)
    fast.runner = GraphRunner()
    fast.runner._described = Described(lambda _: None)  # type: ignore[assignment]  # as if the hook came a moment later
    with pytest.raises(ZeroDivisionError) as caught:
        fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert are_free(fast), f"{caught} has the frames of the text"
    handle.remove()


def test_a_row_that_may_not_grow_stays_out_of_the_steps() -> None:
    """Though its logits are no numbers, of which no token follows that could be fed."""
    plain, fast = twins()
    for model in (plain, fast):
        model.tok_embeddings.weight[13] = torch.nan
    ours = fast.generate_tokens([[13], *PROMPTS], [0, 9, 9, 9], **GREEDY)
    assert ours == plain.generate_tokens([[13], *PROMPTS], [0, 9, 9, 9], **GREEDY)
    assert ran(fast) == 8


def test_texts_in_several_threads_are_each_as_alone() -> None:
    plain, fast = twins()
    wanted = {row: plain.generate_tokens([prompt], 40, **GREEDY) for row, prompt in enumerate(PROMPTS)}
    made: dict[int, list[Any]] = {row: [] for row in wanted}

    def generate(row: int) -> None:
        made[row] += [fast.generate_tokens([PROMPTS[row]], 40, kv_caching=row != 1, **GREEDY) for _ in range(4)]

    threads = [Thread(target=generate, args=(row,)) for row in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {row: [text] * 4 for row, text in wanted.items()}
    assert ran(fast) > 0
    assert are_free(fast)


def test_a_text_that_lasts_is_left_to_the_loop() -> None:
    from fakes import Ids

    plain, fast = twins()
    texts = []
    for model in (plain, fast):
        session = model.session(Ids())
        session.feed(PROMPTS[2])
        grown = session.generate(9, **GREEDY)
        texts.append((grown, model.generate_tokens(PROMPTS, 9, prefix=session, **GREEDY)))
    assert texts[0] == texts[1]
    assert ran(fast) == 0


def test_who_asks_for_every_step_sees_every_step() -> None:
    plain, fast = twins()
    seen: list[Any] = [[], []]
    for model, steps in zip((plain, fast), seen, strict=True):
        model.generate_tokens(PROMPTS, 9, on_step=lambda step, to=steps: to.append(replace(step, cache=None)), **GREEDY)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9
    assert ran(fast) == 0
    calls: list[object] = []
    handle = fast.register_forward_hook(lambda *_: calls.append(1))
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert len(calls) == 9
    handle.remove()


def test_direct_calls_are_the_plain_models() -> None:
    plain, fast = twins()
    tokens = torch.tensor([PROMPTS[2]])
    for model in (plain, fast):
        model(tokens, 0)
    assert torch.equal(plain(tokens[:, :1], 7), fast(tokens[:, :1], 7))


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_prompts_of_texts_go_through_the_runners_layers_and_nothing_else_does(
    fails: bool, kv_caching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lengths: list[int] = []

    def noting(block: Any, h: Tensor, freqs_cis: Any) -> Any:
        lengths.append(h.shape[1])
        if fails and len(lengths) == 2:
            raise RuntimeError("no kernel")
        return run_layer(block, h, freqs_cis)

    plain, fast = twins()
    fast.runner = GraphRunner(layer=noting)
    fast.runner.takes_prompts = True
    for prompts in (PROMPTS, [[4] * 40, [4] * 30]):
        options: Options = {**GREEDY, "kv_caching": kv_caching, "share_prefix": kv_caching}
        assert fast.generate_tokens(prompts, 1, **options) == plain.generate_tokens(prompts, 1, **options)
    tokens = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        assert torch.equal(plain(tokens, logits="last"), fast(tokens, logits="last"))
    whole = [
        LENGTH_STEP,
        LENGTH_STEP if kv_caching else 2 * LENGTH_STEP,
    ]  # with a cache, only what is shared of the last
    assert lengths == ([LENGTH_STEP] * 2 if fails else [length for length in whole for _ in plain.layers])
    assert ran(fast) == (0 if fails else 2)
    assert len([said for said in caplog.records if said.levelname == "WARNING"]) == fails


def test_a_watcher_is_told_of_every_step() -> None:
    _, fast = twins()
    assert isinstance(fast.runner, GraphRunner)
    told: list[tuple[int, int]] = []
    fast.runner.watch = lambda rows, width: told.append((rows, width))
    fast.generate_tokens(PROMPTS, 4, **GREEDY)
    fast.generate_tokens(PROMPTS, 2, kv_caching=False, **GREEDY)
    assert told == [(3, 1)] * 3 + [(3, 8)]  # the longest prompt has seven tokens


# ---- memory, copies, choice of kernels -------------------------------------------------------------------------------


class Failing(Recorder):
    """Records nothing, or nothing but the first graphs, or what fails when it is replayed."""

    error: Exception = RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
    records = 0
    when_replayed = False

    def __call__(self, step: Replay) -> Replay:
        if self.records > 0:
            type(self).records -= 1
            return super().__call__(step)
        if self.when_replayed:
            return self.fail
        raise self.error

    def fail(self) -> None:
        raise self.error


def test_a_sampler_of_ones_own_chooses_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Contrary(sampling.Sampler):
        def __call__(self, logits: Tensor) -> Tensor:
            return logits.argmin(-1)

    plain, fast = twins()
    before = fast.generate_tokens(PROMPTS, 12, **GREEDY)
    monkeypatch.setattr("llama.batch.Sampler", Contrary)
    ours = fast.generate_tokens(PROMPTS, 12, **GREEDY)
    assert ours == plain.generate_tokens(PROMPTS, 12, **GREEDY) != before


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("when_replayed", [True, False])
@pytest.mark.parametrize("way", ["greedy", "sampled in every way"])
def test_a_step_that_fails_leaves_the_text_to_the_plain_path_and_that_is_said_once(
    way: str, when_replayed: bool, kv_caching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    recorder = type("Now", (Failing,), {"when_replayed": when_replayed})
    fast.runner = GraphRunner(recorder=recorder)
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            ours = fast.generate_tokens(PROMPTS, 20, kv_caching=kv_caching, **WAYS[way])
            assert_same(ours, plain.generate_tokens(PROMPTS, 20, kv_caching=kv_caching, **WAYS[way]))
    assert ran(fast) == 0
    assert str(fast.execution) == "plain"
    assert caplog.messages == [
        "fast: a step failed (RuntimeError: operation not permitted when stream is capturing "
        "Compile with TORCH_USE_CUDA_DSA); the plain path runs instead"
    ]


def test_a_later_recording_that_fails_keeps_what_was_made_and_the_draws(caplog: pytest.LogCaptureFixture) -> None:
    """Without a cache, a longer prefix is another graph."""
    plain, fast = twins()
    fast.runner = GraphRunner(recorder=type("Later", (Failing,), {"records": 2}))
    for _ in range(2):
        ours = fast.generate_tokens(PROMPTS, 4 * LENGTH_STEP, kv_caching=False, **WAYS["sampled"])
        assert ours == plain.generate_tokens(PROMPTS, 4 * LENGTH_STEP, kv_caching=False, **WAYS["sampled"])
    assert 0 < ran(fast) <= 2 * LENGTH_STEP
    assert len(caplog.messages) == 1
    assert are_free(fast)


@pytest.mark.parametrize("ends_a_capture", [False, True])
def test_a_graph_that_does_not_fit_is_said_in_words_and_the_next_ones_are_tried(
    ends_a_capture: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    if ends_a_capture:
        error, error.__context__ = RuntimeError("the capture was invalidated"), error
    full = type("Full", (Failing,), {"error": error})
    fast.runner = GraphRunner(recorder=full)
    for _ in range(2):
        assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert caplog.messages == [
        "fast: graphs for 3 rows of 32 positions do not fit into the GPU's memory; the plain path runs instead"
    ]
    assert ran(fast) == 0
    full.records = 1
    assert fast.generate_tokens([[1]], 9, **GREEDY) == plain.generate_tokens([[1]], 9, **GREEDY)
    assert ran(fast) == 8


def test_a_cache_that_does_not_fit_twice_is_the_plain_paths_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    empty, calls = torch.empty, []

    def full(*shape: Any, **kind: Any) -> Tensor:
        calls.append(shape)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*shape, **kind)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert len(caplog.messages) == 1
    assert "do not fit into the GPU's memory" in caplog.messages[0]
    assert are_free(fast)
    assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)


class Roomless(Recorder):
    def __init__(self, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("kv_caching", [True, False])
def test_buffers_that_do_not_fit_leave_the_text_to_the_plain_path(
    kv_caching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    fast.runner = GraphRunner(recorder=Roomless)
    for _ in range(2):
        ours = fast.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **GREEDY)
        assert ours == plain.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **GREEDY)
    assert len(caplog.messages) == 1
    assert "do not fit into the GPU's memory; the plain path runs instead" in caplog.messages[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_records_graphs_of_its_own(copied: Callable[[Transformer], Transformer]) -> None:
    plain, fast = twins()
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    other = copied(fast)
    assert other.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(other) == ran(fast) == 8


@pytest.mark.parametrize("change", [None, watch_a_layer, change_an_operation])
def test_a_runner_keeps_no_model_alive(change: Callable[[Transformer], None] | None) -> None:
    """Whose memory is wanted back when its last name is gone, and not when a collection happens to come."""
    _, fast = twins()
    fast.runner = GraphRunner(recorder=Forgetful)  # as a graph, which has nothing of its step
    if change is not None:
        change(fast)
    gc.disable()
    try:
        fast.generate_tokens(PROMPTS, 9, **GREEDY)
        gone = weakref.ref(fast)
        del fast
        assert gone() is None
    finally:
        gc.enable()


def test_more_rows_than_the_kernels_take_run_by_pytorchs_own_and_the_name_says_so() -> None:
    def never(*_: object) -> Any:
        raise AssertionError("these kernels take two rows")

    plain, fast = twins()
    fast.runner = GraphRunner(graph_ops.PYTORCH._replace(name="narrow", gate=never, most_rows=2))
    assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 8
    assert fast.execution.runner == "CUDA graphs of plain kernels"


def test_the_name_says_what_ran() -> None:
    _, fast = twins()
    fast.runner = GraphRunner(graph_ops.PYTORCH._replace(name="own"))
    assert fast.execution.runner == "CUDA graphs of own kernels"
    fast.generate_tokens(PROMPTS, 2, kv_caching=False, **GREEDY)
    assert fast.execution.runner == "CUDA graphs of plain layers"
    fast.generate_tokens(PROMPTS, 2, **GREEDY)
    assert fast.execution.runner == "CUDA graphs of own kernels"


def test_exact_mode_and_graphs_exclude_each_other() -> None:
    _, fast = twins()
    with pytest.raises(ValueError, match=r"the fast step \(CUDA graphs of .*\) exclude each other: choose one"):
        fast.exact = True
    assert not fast.exact
    fast.exact = False


def wrong_project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return graph_ops.project(x, weight, h) * (1 if len(h) == 1 else 1.5)  # as a kernel for several rows may go wrong


def test_kernels_whose_logits_are_not_the_modules_are_refused() -> None:
    plain, _ = twins(dtype=torch.float32)
    assert try_steps(plain, GraphRunner(graph_ops.PYTORCH._replace(name="right"))) > 0
    wrong = GraphRunner(graph_ops.PYTORCH._replace(name="wrong", project=wrong_project))
    with pytest.raises(Unsupported, match="the wrong kernels' logits are off by"):
        try_steps(plain, wrong)
    assert wrong._buffers is plain.cache is None


class Forgetful(Recorder):
    """Repeats a step whose positions are those at which it was recorded."""

    def __call__(self, step: Replay) -> Replay:
        super().__call__(step)
        return lambda: None


@pytest.mark.parametrize(
    ("recorder", "words"), [(Failing, "operation not permitted"), (Forgetful, "does not repeat what was recorded")]
)
def test_a_step_that_cannot_be_recorded_or_repeated_is_found_out_when_it_is_tried(
    recorder: type[Recorder], words: str
) -> None:
    plain, _ = twins()
    runner = GraphRunner(recorder=recorder)
    with pytest.raises((Unsupported, RuntimeError), match=words):
        try_steps(plain, runner)
    assert runner._buffers is plain.cache is None


def test_prompts_that_leave_another_cache_are_found_out() -> None:
    def misplaced(*given: Any) -> Any:
        h, keys, values = run_layer(*given)
        return h, keys, values.roll(1, dims=1)

    plain, _ = twins()
    assert try_prompts(plain, run_layer) > 0
    with pytest.raises(Unsupported, match="logits behind a prompt are off by"):
        try_prompts(plain, misplaced)


def test_without_triton_pytorchs_own_kernels_run_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "llama.fast.triton_kernels", raising=False)
    monkeypatch.delattr(fast, "triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "llama"):
        assert find_fused(twins()[0]) is None
    assert caplog.messages == ["fast: triton is not installed, so PyTorch's own kernels run: pip install triton"]


@pytest.mark.parametrize(("dtype", "words"), [(torch.float64, "not torch.float64"), (torch.float32, "not on cpu")])
def test_what_the_kernels_do_not_cover_runs_by_pytorchs_own_and_that_is_said(
    dtype: torch.dtype, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    with caplog.at_level(logging.WARNING, "llama"):
        assert find_fused(twins(dtype=dtype)[0]) is None
    assert len(caplog.messages) == 1
    assert words in caplog.messages[0]


@pytest.mark.parametrize("limits", [{"max_batch_size": 1}, {"max_seq_len": 2}])
def test_kernels_are_compared_within_the_models_limits(limits: dict[str, int]) -> None:
    calls: list[int] = []

    def project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
        calls.append(len(h))
        return graph_ops.project(x, weight, h)

    model = tiny_model(replace(ARGS, **limits), dtype=torch.float32).requires_grad_(False)
    try_steps(model, GraphRunner(graph_ops.PYTORCH._replace(name="own", project=project)))
    assert set(calls) == ({1} if "max_batch_size" in limits else {1, 2})
    calls.clear()
    try_steps(model, GraphRunner(graph_ops.PYTORCH._replace(name="own", project=project, most_rows=1)))
    assert set(calls) == {1}


@pytest.mark.slow
def test_fused_kernels_that_fail_give_way_to_what_runs_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no C compiler")

    plain, _ = twins(dtype=torch.float32)
    monkeypatch.setattr(choose, "COMPILER", "eager")
    for project, words in ((broken, "no C compiler"), (wrong_project, "the own kernels' logits are off by")):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "llama"):
            patch.setattr(choose, "find_fused", lambda _, p=project: graph_ops.PYTORCH._replace(name="own", project=p))
            choose._use_graphs(plain, fused=True)
        assert plain.execution.runner in ("CUDA graphs of plain kernels", "CUDA graphs of compiled kernels")
        assert len(caplog.messages) == 1
        assert words in caplog.messages[0]
        plain.runner = None


@pytest.mark.slow
def test_fused_kernels_run_where_they_were_asked_for_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = twins(dtype=torch.float32)
    monkeypatch.setattr(choose, "COMPILER", "eager")
    monkeypatch.setattr(choose, "find_fused", lambda _: graph_ops.PYTORCH._replace(name="fused"))
    choose._use_graphs(plain, fused=True)
    assert plain.execution.runner == "CUDA graphs of fused kernels"
    choose._use_graphs(plain, fused=False)
    assert plain.execution.runner in ("CUDA graphs of plain kernels", "CUDA graphs of compiled kernels")


def test_fused_kernels_are_refused_where_there_is_no_gpu_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ValueError, match="the fused kernels are for a CUDA GPU, not for cpu; ask for fast without them"
    ):
        load("demo", device="cpu", fast="fused")
    with pytest.raises(ValueError, match=r"fast='quick' is not known; choose True, False or fused"):
        load("demo", device="cpu", fast="quick")  # type: ignore[arg-type]
    for words in (["--fast_kernels=fused"], ["--fast", "--fast_kernels=quick"]):
        assert cli.run(inference.main, words) == 2
        assert "there is fused, which goes with --fast" in capsys.readouterr().err


def test_fused_kernels_that_nobody_measured_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(Transformer, "device", property(lambda self: torch.device("cuda:1")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    model, _ = twins(dtype=torch.float32)
    for measured in (frozenset(), frozenset({(9, 0)})):
        caplog.clear()
        monkeypatch.setattr(choose, "MEASURED", measured)
        with caplog.at_level(logging.WARNING, "llama"):
            assert find_fused(model) is not None
        said = "fast: the fused kernels are not measured on this GPU (NVIDIA H200); docs/log.md will tell"
        assert caplog.messages == ([] if measured else [said])


def test_int8_is_left_to_the_loop() -> None:
    plain, _ = twins(tiny_args(vocab_size=64), dtype=torch.float32)
    quantize_layers(plain, torch.float32)
    with pytest.raises(Unsupported, match="int8 weights are for a CPU so far"):
        choose._use_graphs(plain, fused=False)


# ---- captures, by stand-ins for what CUDA has ------------------------------------------------------------------------


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)


class FakeCuda:
    """Streams, and an allocator that gives nothing back while it believes that a capture is under way."""

    def __init__(self) -> None:
        self.current = self.outer = FakeStream()
        self.under_way: set[object] = set()
        self.end_fails = False

    def stream(self, stream: FakeStream) -> Any:
        cuda = self

        class Context:
            def __enter__(self) -> None:
                self.before, cuda.current = cuda.current, stream

            def __exit__(self, *_: object) -> None:
                cuda.current = self.before

        return Context()

    def empty_cache(self) -> None:
        assert not self.under_way, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def graph(self) -> Any:
        cuda = self

        class Graph:
            def capture_begin(self, pool: object, **_: object) -> None:
                cuda.under_way.add(pool)
                self.pool = pool

            def capture_end(self) -> None:
                if cuda.end_fails:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.under_way.remove(self.pool)

            def replay(self) -> None: ...
            def reset(self) -> None: ...

        return Graph()

    def end_allocate_to_pool(self, device: int, pool: object) -> None:
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let PyTorch's own `torch.cuda.graph` capture on these."""
    fake = FakeCuda()
    pools = count()
    for name, value in {
        **{"Stream": FakeStream, "current_stream": lambda: fake.current, "stream": fake.stream},
        **{"device": lambda _: nullcontext(), "current_device": lambda: 0, "synchronize": lambda: None},
        **{"graph_pool_handle": lambda: (0, next(pools)), "empty_cache": fake.empty_cache, "CUDAGraph": fake.graph},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate_to_pool, raising=False)
    return fake


def test_a_step_is_run_and_captured_on_the_recorders_stream_which_both_sides_wait_for(cuda: FakeCuda) -> None:
    record, seen = Recorder(torch.device("cuda:0")), []
    record(lambda: seen.append(cuda.current))
    assert seen == [record.stream] * 3
    assert cuda.current is cuda.outer
    assert record.stream.waited_for == [cuda.outer]
    assert cuda.outer.waited_for == [record.stream]


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_capture_that_fails_leaves_the_stream_and_the_allocator_as_they_were(end_fails: bool, cuda: FakeCuda) -> None:
    """PyTorch stays on the stream of a capture whose end fails, and up to 2.12 its allocator waits for that end."""
    record, runs = Recorder(torch.device("cuda:0")), []

    def forbidden() -> None:
        runs.append(1)
        if len(runs) == 3:
            raise ValueError("operation not permitted when stream is capturing")

    cuda.end_fails = end_fails
    with pytest.raises(RuntimeError if end_fails else ValueError):
        record(forbidden)
    assert cuda.current is cuda.outer
    cuda.end_fails = False
    Recorder(torch.device("cuda:0"))(lambda: None)
    assert not cuda.under_way


def test_what_a_step_began_before_it_failed_is_waited_for(cuda: FakeCuda) -> None:
    """Or the memory that it writes would be given to others meanwhile."""
    record = Recorder(torch.device("cuda:0"))
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 // 0)
    assert cuda.outer.waited_for == [record.stream]


def test_models_in_several_threads_record_one_at_a_time(cuda: FakeCuda) -> None:
    """A process may capture one graph at a time."""
    under_way: list[int] = []
    most: list[int] = []

    def step() -> None:
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.005)
        under_way.pop()

    threads = [Thread(target=Recorder(torch.device("cuda:0")), args=(step,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 4 * 3
    assert max(most) == 1


@pytest.fixture
def on_cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device("cuda")


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_a_graph_repeats_the_loop(on_cuda: torch.device, way: str, kv_caching: bool) -> None:
    plain, fast = (model.to(on_cuda) for model in twins())
    several = WAYS[way]
    alone: Options = {**several, "seed": 4} if "seed" in several else several
    for prompts, options in ((PROMPTS, several), (PROMPTS[:1], alone), (PROMPTS, several)):  # buffers come and go
        for room in (SYNC_INTERVAL + 1, 3 * SYNC_INTERVAL + 5):
            fast(torch.zeros((1, 150), dtype=torch.int64, device=on_cuda))  # which makes a longer table of rotations
            ours = fast.generate_tokens(prompts, room, kv_caching=kv_caching, **options)
            assert_same(ours, plain.generate_tokens(prompts, room, kv_caching=kv_caching, **options))
