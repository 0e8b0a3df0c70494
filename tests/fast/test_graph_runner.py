"""Recorded steps make the tokens of the plain path, step by step, or leave the text to it.

Without a GPU the same steps run unrecorded, in float64, so that no rounding decides a token: these tests check what the
steps read and write, and how often they are recorded. With a GPU, they run there as CUDA graphs.
"""

import copy
import gc
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from threading import Thread
from typing import Any

import pytest
import torch
from changes import CHANGES, outcome
from fakes import Bytes, Ids
from generations import GREEDY, WAYS, any_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_args, tiny_model
from torch import Tensor

from llama import sampling
from llama.args import ModelArgs
from llama.batch import NonFiniteLogits
from llama.fast import choose, graph_ops, graph_runner
from llama.fast.fingerprint import Descriptions
from llama.fast.graph_ops import FLASH, MASKED
from llama.fast.graph_runner import (
    LENGTH_STEP,
    SYNC_INTERVAL,
    DecodeBuffers,
    GraphRunner,
    Recorder,
    Replay,
)
from llama.fast.graph_trial import FEW, MANY, fastest, try_steps, with_prompts
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.ops import rms_norm
from llama.quant.layers import quantize_layers
from llama.request import Options
from llama.rope import rotate

VOCAB = 61
ARGS = tiny_args(dim=24, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=VOCAB, max_seq_len=200)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[5, 9, 2, 44], [7], [3, 3, 8, 1, 60, 12, 30]]


def twins(
    args: ModelArgs = ARGS, dtype: torch.dtype = torch.float64, device: str = DEVICE
) -> tuple[Transformer, Transformer]:
    """Return a model of the plain path, and its copy with recorded steps."""
    plain, fast = (tiny_model(args, dtype=dtype).to(device).requires_grad_(False) for _ in range(2))
    fast.runner = GraphRunner()
    return plain, fast


def ran(model: Transformer) -> int:
    assert isinstance(model.runner, GraphRunner)
    return model.runner.forwards


def buffers_of(model: Transformer) -> DecodeBuffers:
    assert isinstance(model.runner, GraphRunner)
    return model.runner._sets[0]


def are_free(model: Transformer) -> bool:
    """Return True if another text may use the buffers."""
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


@pytest.mark.parametrize("way", WAYS)
def test_recorded_steps_make_the_tokens_of_the_plain_path(way: str) -> None:
    plain, fast = twins()
    for room in (1, SYNC_INTERVAL + 1, 3 * SYNC_INTERVAL + 5):
        before = ran(fast)
        ours = fast.generate_tokens(PROMPTS, room, **WAYS[way])
        assert_same(ours, plain.generate_tokens(PROMPTS, room, **WAYS[way]))
        assert ran(fast) - before == room - 1  # the first token follows from the prompt


@pytest.mark.parametrize("more", [{"attention_bias": True}, {"qk_norm": True}, {"tied_head": True}])
def test_biases_and_norms_of_heads_are_computed(more: dict[str, bool]) -> None:
    """As in Qwen 2 and Qwen 3."""
    plain, fast = twins(replace(ARGS, **more))
    for model in (plain, fast):
        torch.manual_seed(3)
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "_norm.weight")):
                weight.uniform_(0.5, 1.5)
    assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 8


@settings(max_examples=25)
@given(data=st.data())
def test_any_batch_with_any_lengths_and_any_stops_is_the_plain_paths(data: st.DataObject) -> None:
    prompts, room, stops, options = data.draw(any_batch(VOCAB, most_stops=4))
    plain, fast = _TWINS
    theirs = plain.generate_tokens(prompts, room, stop_ids=stops, **options)
    assert_same(fast.generate_tokens(prompts, room, stop_ids=stops, **options), theirs)


_TWINS = twins()


def test_steps_are_recorded_once_and_serve_texts_of_nearly_one_length(recordings: list[object]) -> None:
    _, fast = twins()
    for prompt, room in (([1, 2, 3], 20), ([4], 9), ([5] * 20, 3)):
        fast.generate_tokens([prompt], room, **GREEDY)
    assert ran(fast) == 19 + 8 + 2
    assert len(recordings) == 1
    fast.generate_tokens([[1]], 20, temperature=0.5)  # other settings
    assert len(recordings) == 2
    fast.generate_tokens([[1], [2]], 20, **GREEDY)  # another number of rows
    assert len(recordings) == 3
    fast.generate_tokens([[1], [2]], LENGTH_STEP + 5, **GREEDY)  # more room
    assert len(recordings) == 4


def test_texts_of_few_and_of_many_rows_in_turn_are_recorded_once_each(
    recordings: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fast = twins()
    for rows in (1, 16, 1, 16, 3, 1):
        prompts = [[7]] * rows
        assert fast.generate_tokens(prompts, 9, **GREEDY) == plain.generate_tokens(prompts, 9, **GREEDY)
    assert len(recordings) == 3
    fast.generate_tokens([[7]] * 2, 9, **GREEDY)  # the sets of 3 and 1 rows were used after that of 16
    fast.generate_tokens([[7]], 9, **GREEDY)
    assert len(recordings) == 4
    fast.generate_tokens([[7]] * 16, 9, **GREEDY)
    assert len(recordings) == 5
    monkeypatch.setattr(graph_runner, "_within_memory", lambda *_: [])
    fast.generate_tokens([[7]] * 5, 9, **GREEDY)
    assert isinstance(fast.runner, GraphRunner)
    assert [buffers.rows for buffers in fast.runner._sets] == [5]


def test_buffers_whose_length_costs_no_time_serve_texts_of_many_lengths(recordings: list[object]) -> None:
    plain, fast = twins(replace(ARGS, max_seq_len=600))
    by_text = graph_ops.PYTORCH._replace(attention=MASKED._replace(by_text=True))
    fast.runner = GraphRunner(by_text)
    for length in (9, 100, 255, 256, 9, 500):
        prompts = [[7] * (length - 8)]
        assert fast.generate_tokens(prompts, 8, **GREEDY) == plain.generate_tokens(prompts, 8, **GREEDY)
    assert len(recordings) == 2  # the last slot belongs to no text, so 256 positions need more than 256 slots
    assert buffers_of(fast).slots == 512


def test_other_numbers_to_sample_by_need_no_recording(recordings: list[object]) -> None:
    plain, fast = twins()
    for n in range(3):
        options: Options = {
            **{"temperature": 0.7 + n / 10, "top_p": 0.5 + n / 10, "top_k": 20 + n, "min_p": n / 100 + 0.01},
            **{"repetition_penalty": 1.1 + n / 10, "seed": 3},
        }
        assert fast.generate_tokens(PROMPTS, 9, **options) == plain.generate_tokens(PROMPTS, 9, **options)
    assert len(recordings) == 1
    fast.generate_tokens(PROMPTS, 9, temperature=0.8, top_p=0.9)  # other settings are used
    assert len(recordings) == 2


@pytest.mark.parametrize("way", ["sampled", "sampled in every way"])
def test_steps_that_candidates_do_not_decide_are_repeated_over_the_whole_vocabulary(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 61 tokens two or six are candidates: they decide all steps, some, or none."""
    plain, fast = twins()
    options: Options = {**WAYS[way], "top_k": None, "logprobs": False, "echo": False}
    sorted_wholly: list[bool] = []
    for candidates in (2, 6):
        monkeypatch.setattr(sampling, "_CANDIDATES", candidates)
        for temperature in (0.05, 0.4, 1.3):
            options["temperature"] = temperature
            ours = fast.generate_tokens(PROMPTS, 2 * SYNC_INTERVAL, **options)
            assert ours == plain.generate_tokens(PROMPTS, 2 * SYNC_INTERVAL, **options)
            sorted_wholly.append(any(key.whole for key in buffers_of(fast).graphs))
            assert isinstance(fast.runner, GraphRunner)
            fast.runner.drop()
    assert set(sorted_wholly) == {True, False}


def test_earlier_contents_of_a_cache_have_no_effect() -> None:
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
def test_functions_are_compiled_when_they_are_tried_and_never_in_a_text(
    backend: tuple[Backend, list[torch.fx.GraphModule]],
) -> None:
    plain, fast = twins()
    ops = graph_ops.compiled(backend[0])
    assert try_steps(fast, GraphRunner(ops)).keys() == {FEW, MANY}
    fast.runner = GraphRunner(ops)
    compiled = len(backend[1])
    assert compiled == 2 * len([ops.begin, ops.layer, ops.head, ops.advance])  # for one row, and for several
    for prompts, room in ((PROMPTS, 9), (PROMPTS[:1], 2 * LENGTH_STEP), (PROMPTS * 3, LENGTH_STEP)):
        assert fast.generate_tokens(prompts, room, **GREEDY) == plain.generate_tokens(prompts, room, **GREEDY)
    assert len(backend[1]) == compiled
    assert ran(fast) == 9 + 3 * LENGTH_STEP - 3


@pytest.mark.slow
def test_models_of_other_sizes_do_not_share_what_is_compiled(
    backend: tuple[Backend, list[torch.fx.GraphModule]],
) -> None:
    """Numbers of heads that vary would be taken for numbers that only the device knows."""
    for args in (ARGS, replace(ARGS, n_heads=3, n_kv_heads=3, head_dim=8)):
        model = tiny_model(args, dtype=torch.float64).requires_grad_(False)
        try_steps(model, GraphRunner(graph_ops.compiled(backend[0])))


@pytest.mark.parametrize("refuses", ["the backend", "PyTorch"])
def test_functions_that_cannot_be_compiled_are_not_used(
    refuses: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU that is too old for Triton, and on a Python that torch.compile does not support."""

    def refusing(*_: object, **__: object) -> Any:
        raise RuntimeError(f"{refuses} refuses")

    plain, fast = twins(dtype=torch.float32, device="cpu")
    if refuses == "PyTorch":
        monkeypatch.setattr(torch, "compile", refusing)
    monkeypatch.setattr(choose, "COMPILER", refusing)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "llama"):
        choose._use_graphs(fast)
    assert fast.execution.runner == "CUDA graphs of plain kernels"
    (words,) = caplog.messages
    assert words.startswith("fast: compiled kernels are not used: ")
    assert f"{refuses} refuses" in words
    assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)


WITH_FLASH = graph_ops.PYTORCH._replace(name="plain flash", attention=FLASH)


def test_masked_attention_runs_if_flash_attention_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a CPU, which does not have its operator."""
    _, fast = twins(device="cpu")
    assert graph_ops.plain_ops(torch.device("cpu"), torch.bfloat16, 64) == [graph_ops.PYTORCH]
    monkeypatch.setattr(choose, "plain_ops", lambda *_: [WITH_FLASH, graph_ops.PYTORCH])
    monkeypatch.setattr(choose, "compiled", lambda _, ops: ops)
    with caplog.at_level(logging.WARNING, "llama"):
        choose._use_graphs(fast.double())
    assert str(fast.execution) == "CUDA graphs of plain kernels, plain prompts"
    assert len(caplog.messages) == 2
    assert all(words.startswith("fast: plain flash kernels are not used: ") for words in caplog.messages)


def test_the_fastest_candidate_that_is_right_is_selected_for_few_rows_and_for_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = {"first": {FEW: 3.0, MANY: 4.0}, "wrong": None, "second": {FEW: 2.0, MANY: 5.0}, "same": {FEW: 1.99}}
    first, wrong, second, same = (graph_ops.PYTORCH._replace(name=name) for name in seconds)

    def trial(ops: graph_ops.GraphOps) -> dict[int, float]:
        if (taken := seconds[ops.name]) is None:
            raise Unsupported("its logits are wrong")
        return taken

    with caplog.at_level(logging.WARNING, "llama"):
        assert fastest([first, wrong, second, same], trial) == {FEW: second, MANY: first}
    assert caplog.messages == ["fast: wrong kernels are not used: its logits are wrong"]
    assert fastest([wrong], trial) == {}
    runner = GraphRunner(second, first)
    assert [runner.ops_for(rows) for rows in (1, 8, 9)] == [second, second, first]
    assert runner.name == "CUDA graphs of second and first kernels"


def test_the_cached_twin_of_a_model_without_a_cache_uses_the_same_graphs(recordings: list[object]) -> None:
    """A call with the other setting is computed by a twin of the model, which has the same weights."""
    plain, fast = twins()
    fast.kv_caching = False
    for _ in range(2):
        ours = fast.generate_tokens(PROMPTS, 9, kv_caching=True, **GREEDY)
        assert ours == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    fast.kv_caching = True
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 3 * 8
    assert len(recordings) == 1


def test_buffers_are_at_most_twice_as_long_as_a_generation_needs() -> None:
    _, fast = twins()
    fast.generate_tokens(PROMPTS, 150, **GREEDY)
    long = buffers_of(fast).slots
    fast.generate_tokens(PROMPTS, 4, **GREEDY)
    assert buffers_of(fast).slots == LENGTH_STEP < long


def test_a_graph_s_tensors_outlive_the_function_that_was_recorded() -> None:
    """A graph stores addresses only: for example of the table of rotations, which a longer one replaces."""
    _, fast = twins()
    fast.runner = GraphRunner(recorder=Forgetful)
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    tables = [weakref.ref(table) for table in fast.rope.up_to(9, fast.device)]
    fast(torch.zeros((1, 150), dtype=torch.int64, device=DEVICE))
    assert fast.rope.up_to(9, fast.device)[0] is not tables[0]()
    assert all(table() is not None for table in tables)


def test_replaced_weights_are_recorded_again_and_weights_changed_in_place_are_not(recordings: list[object]) -> None:
    plain, fast = twins()
    for recorded in (1, 1, 2):
        assert fast.generate_tokens(PROMPTS, 12, **GREEDY) == plain.generate_tokens(PROMPTS, 12, **GREEDY)
        assert len(recordings) == recorded
        for model in (plain, fast):
            torch.manual_seed(8)
            norm = model.blocks[1].ffn_norm
            if not model.blocks[0].feed_forward.w2.weight.min() < -9:  # the first time
                model.blocks[0].feed_forward.w2.weight.mul_(-300)
            else:
                norm.weight = torch.nn.Parameter(torch.randn_like(norm.weight), requires_grad=False)


def test_logits_that_are_not_finite_are_reported_at_their_step_and_row() -> None:
    """The second row meets a token of nan in the middle of the text, as its most likely one."""
    plain, fast = twins()
    ids, _ = plain.generate_tokens(PROMPTS, 6, **GREEDY)
    poison = next(id for id in ids[1][1:] if id not in {*ids[0], *ids[2], *chain(*PROMPTS)})
    step = ids[1].index(poison)
    for model in (plain, fast):
        model.tok_embeddings.weight[poison] = torch.nan  # the head of this model is another matrix
        with pytest.raises(NonFiniteLogits) as caught:
            model.generate_tokens(PROMPTS, 12, **GREEDY)
        assert (caught.value.step, caught.value.row) == (step + 1, 1)
    assert are_free(fast)  # although the error still refers to the text's frames


def test_streams_give_the_same_tokens_and_may_be_left_early() -> None:
    plain, fast = twins(replace(ARGS, vocab_size=258))
    assert [*fast.stream(Bytes(), ["ab", "c"], 30, **GREEDY)] == [*plain.stream(Bytes(), ["ab", "c"], 30, **GREEDY)]
    with fast.stream(Bytes(), "ab", 100, **GREEDY) as stream:
        next(stream)
    assert are_free(fast)
    assert ran(fast) <= 29 + 2 * SYNC_INTERVAL  # steps that were launched when the stream was left
    assert fast.generate(Bytes(), "ab", 30, **GREEDY) == plain.generate(Bytes(), "ab", 30, **GREEDY)


# ---- prompts, and whole prefixes without a cache ---------------------------------------------------------------------


def attend_prompts(q: Tensor, keys: Tensor, values: Tensor, ends: Tensor, width: int) -> Tensor:
    """Do what flash attention does on a GPU."""
    assert ends.tolist() == [width * row for row in range(len(q) // width + 1)]
    q, keys, values = (each.unflatten(0, (-1, width)).transpose(1, 2) for each in (q, keys, values))
    output = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)


def gate(x: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * up


WITH_PROMPTS = graph_ops.PYTORCH._replace(prompts=graph_ops.Prompts(rms_norm, rotate, attend_prompts, gate))


@pytest.mark.parametrize("way", WAYS)
def test_prompts_and_whole_prefixes_are_those_of_the_plain_path(way: str) -> None:
    plain, fast = twins()
    fast.runner = GraphRunner(WITH_PROMPTS)
    for kv_caching in (True, False):
        before = ran(fast)
        ours = fast.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **WAYS[way])
        assert_same(ours, plain.generate_tokens(PROMPTS, 9, kv_caching=kv_caching, **WAYS[way]))
        assert ran(fast) - before == 9


@pytest.mark.parametrize("kind", ["concat", "paged", "int8", "window:8"])
def test_prompts_of_other_kinds_of_cache_are_plain(kind: str) -> None:
    plain, fast = twins(replace(ARGS, n_heads=2, n_kv_heads=2, head_dim=32))
    fast.runner = GraphRunner(WITH_PROMPTS)
    ours = fast.generate_tokens(PROMPTS, 9, kv_cache=kind, **GREEDY)
    assert ours == plain.generate_tokens(PROMPTS, 9, kv_cache=kind, **GREEDY)
    assert ran(fast) == 0


def test_prompts_record_gradients_on_the_plain_path() -> None:
    _, fast = twins()
    fast.requires_grad_(True)
    fast.runner, fast.kv_caching = GraphRunner(WITH_PROMPTS), False
    ids = torch.tensor([[1, 2, 3]], device=DEVICE)
    fast(ids).sum().backward()
    assert fast.blocks[0].feed_forward.w1.weight.grad is not None
    assert ran(fast) == 0
    with torch.inference_mode():
        fast(ids)
    assert ran(fast) == 1


def late(*given: Any) -> Tensor:
    return attend_prompts(*given).roll(1, dims=0)


def halve_keys(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    return rotate(x, cos_sin) if x.shape[1] == ARGS.n_heads else rotate(x, cos_sin) * 0.5


def test_prompts_whose_kernels_fail_later_are_plain_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As a kernel that is compiled for sizes that the trial did not have, in the middle of a prompt."""
    calls = count()

    def fail_later(x: Tensor, up: Tensor) -> Tensor:
        if next(calls) == 3 * ARGS.n_layers + 1:
            raise RuntimeError("out of resource")
        return gate(x, up)

    plain, fast = twins()
    assert WITH_PROMPTS.prompts is not None
    fast.runner = GraphRunner(WITH_PROMPTS._replace(prompts=WITH_PROMPTS.prompts._replace(gate=fail_later)))
    for _ in range(5):
        assert fast.generate_tokens(PROMPTS, 5, **GREEDY) == plain.generate_tokens(PROMPTS, 5, **GREEDY)
    assert caplog.messages == ["fast: a kernel failed (RuntimeError: out of resource); the plain path runs instead"]


@pytest.mark.parametrize("wrong", [{"attend": late}, {"rotate": halve_keys}, {"gate": torch.add}])
def test_prompts_are_plain_if_their_trial_fails(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    plain, _ = twins(dtype=torch.float32)
    assert WITH_PROMPTS.prompts is not None
    assert with_prompts(plain, WITH_PROMPTS) is WITH_PROMPTS
    with caplog.at_level(logging.WARNING, "llama"):
        ops = with_prompts(plain, WITH_PROMPTS._replace(prompts=WITH_PROMPTS.prompts._replace(**wrong)))
    plain.runner = GraphRunner(ops)
    assert str(plain.execution) == "CUDA graphs of plain kernels, plain prompts"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("fast: prompts run on the plain path: the output of layer 0 by plain kernels")


# ---- left to the plain path ------------------------------------------------------------------------------------------


def change_an_operation(model: Transformer) -> None:
    model.use(model.ops._replace(name="mine", silu=torch.tanh))


def watch_a_layer(model: Transformer) -> None:
    model.blocks[0].register_forward_hook(lambda _, given, out: out * 0.5)


def change_the_cache(model: Transformer) -> None:
    model.kv_cache = "concat"


def switch_the_cache_off(model: Transformer) -> None:
    model.kv_caching = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_an_operation, "the model's operations are mine"),
        (watch_a_layer, "a hook watches TransformerBlock"),
        (change_the_cache, "kv_cache='concat' has no fast step; these kinds have one: static; the plain"),
        (switch_the_cache_off, "a GPU's fast step needs the KV cache; the plain path runs instead"),
    ],
)
def test_a_model_that_the_steps_do_not_compute_runs_on_the_plain_path_with_one_warning(
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
# Changes of caches: a text has its own, which no other code reaches.
OF_CACHES = ("replace_a_method_of_a_cache", "put_a_cache_of_ones", "keep_keys_unrotated", "halve_what_is_kept")
WRITTEN = ("edit_in_place", "load_by_copy")  # numbers of weights: too late for launched steps


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in ROUNDED + OF_CACHES])
def test_a_change_in_the_middle_of_a_text_takes_effect_at_the_next_token(change: str) -> None:
    if change == "enlarge_the_head" and DEVICE == "cuda":
        pytest.skip("an id that is not in the embedding ends the use of a GPU for the whole process")
    sampled: Options = {"temperature": 0.7, "seed": 5}
    texts: list[object] = []
    for model in twins():
        with model.stream(Ids(), PROMPTS, 12, **sampled) as stream:
            made: list[object] = [next(stream) for _ in range(9)]
            with suppress(RuntimeError, ValueError):  # some changes raise
                CHANGES[change](model)
            rest = outcome(lambda stream=stream: [*stream])  # type: ignore[misc]
        again = outcome(lambda model=model: model.generate_tokens(PROMPTS, 4, **sampled))  # type: ignore[misc]
        texts.append((made, None if change in WRITTEN else rest, again))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_have_ended_are_dropped_when_calls_of_the_model_continue(way: str) -> None:
    """The other rows keep their keys, their draws and their tokens."""
    for after in (1, 6, 16, 31):
        texts = []
        for model in twins():
            with model.stream(Ids(), PROMPTS, [3, 25, 9], **WAYS[way]) as stream:
                made = [next(stream) for _ in range(after)]
                watch_a_layer(model)
                texts.append((made, [*stream]))
        assert texts[0] == texts[1]


def test_one_text_at_a_time_has_the_graphs_and_others_run_on_the_plain_path() -> None:
    plain, fast = twins()
    wanted = [*plain.stream(Ids(), PROMPTS, 20, **GREEDY)]
    stream = fast.stream(Ids(), PROMPTS, 20, **GREEDY)
    made = [next(stream) for _ in range(9)]
    before = ran(fast)
    assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == before
    assert [*made, *stream] == wanted
    assert ran(fast) == 19
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(fast) == 19 + 8


@pytest.mark.parametrize("pieces", [1, 9])
def test_a_stream_that_is_deleted_releases_the_graphs(pieces: int) -> None:
    _, fast = twins()
    stream = fast.stream(Ids(), PROMPTS, 20, **GREEDY)
    for _ in range(pieces):
        next(stream)
    assert not are_free(fast)
    del stream
    assert are_free(fast)


def test_a_text_that_ends_before_its_first_step_releases_the_graphs() -> None:
    _, fast = twins()
    fast.generate_tokens(PROMPTS, [0, 0, 0], echo=True, **GREEDY)
    assert are_free(fast)
    handle = fast.blocks[0].register_forward_pre_hook(lambda *_: 1 // 0)
    fast.runner = GraphRunner()
    fast.runner._descriptions = Descriptions(lambda _: None)  # type: ignore[assignment]  # as if the hook came a moment later
    with pytest.raises(ZeroDivisionError) as caught:
        fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert are_free(fast), f"{caught} has the frames of the text"
    handle.remove()


def test_a_row_that_may_not_grow_stays_out_of_the_steps() -> None:
    """Its logits are nan, so no token follows that could be fed."""
    plain, fast = twins()
    for model in (plain, fast):
        model.tok_embeddings.weight[13] = torch.nan
    ours = fast.generate_tokens([[13], *PROMPTS], [0, 9, 9, 9], **GREEDY)
    assert ours == plain.generate_tokens([[13], *PROMPTS], [0, 9, 9, 9], **GREEDY)
    assert ran(fast) == 8


# ---- texts that are continued ----------------------------------------------------------------------------------------


def conversation(model: Transformer) -> Iterator[object]:
    """Yield what sessions give that are fed, continued, forked, rewound, saved between two steps, and left early."""
    first, second = model.session(Ids()), model.session(Ids())
    for _ in range(2):  # in turn
        for session in (first, second):
            session.append(PROMPTS[2] if session is first else PROMPTS[0])
            yield session.generate(11, **GREEDY)
            yield session.generate(3, temperature=0.9, top_p=0.8, seed=4)
    with first.stream(30, **GREEDY) as stream:
        yield [next(stream) for _ in range(13)]
        fork = first.fork()  # of a text that grows
        yield [*stream]
    yield fork.generate(20, **GREEDY)
    with second.stream(30, **GREEDY) as stream:
        yield [next(stream) for _ in range(5)]
    yield second.generate(40, **GREEDY)  # more than the buffers have
    second.rewind(9)
    yield second.generate(9, **GREEDY)
    yield model.generate_tokens([[1, 2], [3]], 9, prefix=first, **GREEDY)
    yield model.generate_tokens([[1, 2]], 9, prefix=first, logprobs=True, **GREEDY)[0]
    yield first.generate(5, **GREEDY)
    yield [session.tokens for session in (first, second, fork)]
    yield [session.position for session in (first, second, fork)]


def test_sessions_have_the_texts_of_the_plain_path(recordings: list[object]) -> None:
    plain, fast = twins()
    for ours, theirs in zip(conversation(fast), conversation(plain), strict=True):
        assert ours == theirs
    assert ran(fast) > 150
    assert len(recordings) <= 9  # one for each size and each set of options, not for each session


def test_the_cache_of_a_session_has_the_positions_of_its_text_between_two_steps() -> None:
    caches = []
    for model in twins():
        session = model.session(Ids())
        session.feed(PROMPTS[0])
        with session.stream(20, **GREEDY) as stream:
            for _ in range(10):
                next(stream)
            caches.append(session.fork().cache.state(1, session.position - 1))
    for ours, theirs in zip(*caches, strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-12)


def test_after_an_interrupted_prompt_the_buffers_serve_texts_that_continue_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a step fails, so that calls of the model continue with the cache of the buffers."""

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    plain, fast = twins()
    texts = []
    for model in (plain, fast):
        session = model.session(Ids())
        session.feed(PROMPTS[0])
        model.generate_tokens([[1, 2], [3]], 30, **GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr("llama.kv_cache.static.StaticCache._write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate_tokens([[1, 2], [3]], 30, **GREEDY)
        if model is fast:
            fast.runner._sets[0].graphs = dict.fromkeys(fast.runner._sets[0].graphs, interrupted_replay)  # type: ignore[union-attr]
        texts.append(model.generate_tokens([[1, 2], [3]], 28, prefix=session, **GREEDY))
    assert texts[0] == texts[1]


def interrupted_replay() -> None:
    raise RuntimeError("a driver's error")


def test_a_session_with_another_kind_of_cache_is_plain_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = twins()
    for kind in ("concat", "paged"):
        session = fast.session(Ids(), kv_cache=kind)
        session.feed(PROMPTS[0])
        for _ in range(2):
            session.generate(3, **GREEDY)
    assert ran(fast) == 0
    assert caplog.messages == [
        f"fast: kv_cache={kind!r} has no fast step; these kinds have one: static; the plain path runs instead"
        for kind in ("concat", "paged")
    ]


def test_on_step_and_hooks_of_the_model_see_every_step() -> None:
    plain, fast = twins()
    seen: list[Any] = [[], []]
    for model, steps in zip((plain, fast), seen, strict=True):
        model.generate_tokens(PROMPTS, 9, on_step=lambda step, to=steps: to.append(replace(step, cache=None)), **GREEDY)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9
    calls: list[object] = []
    fast.register_forward_hook(lambda *_: calls.append(1))
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert len(calls) == 9
    assert ran(fast) == 0


def test_watch_is_called_before_every_step() -> None:
    _, fast = twins()
    assert isinstance(fast.runner, GraphRunner)
    told: list[tuple[int, int]] = []
    fast.runner.watch = lambda rows, width: told.append((rows, width))
    fast.generate_tokens(PROMPTS, 4, **GREEDY)
    assert told == [(3, 1)] * 3


# ---- memory, copies, choice of kernels -------------------------------------------------------------------------------


class Failing(Recorder):
    """Fail to record, after the first `records` graphs, or record a graph that fails when it is replayed."""

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


class Forgetful(Recorder):
    """Record a graph that does nothing when it is replayed."""

    def __call__(self, step: Replay) -> Replay:
        super().__call__(step)
        return lambda: None


def test_another_class_of_sampler_chooses_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Contrary(sampling.Sampler):
        def __call__(self, logits: Tensor) -> Tensor:
            return logits.argmin(-1)

    plain, fast = twins()
    before = fast.generate_tokens(PROMPTS, 12, **GREEDY)
    monkeypatch.setattr("llama.batch.Sampler", Contrary)
    ours = fast.generate_tokens(PROMPTS, 12, **GREEDY)
    assert ours == plain.generate_tokens(PROMPTS, 12, **GREEDY) != before


@pytest.mark.parametrize(("way", "when_replayed"), [("greedy", False), ("sampled in every way", True)])
def test_after_a_step_that_fails_the_plain_path_continues_with_one_warning(
    way: str, when_replayed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    recorder = type("Now", (Failing,), {"when_replayed": when_replayed})
    fast.runner = GraphRunner(recorder=recorder)
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            ours = fast.generate_tokens(PROMPTS, 20, **WAYS[way])
            assert_same(ours, plain.generate_tokens(PROMPTS, 20, **WAYS[way]))
    assert ran(fast) == 0
    assert str(fast.execution) == "plain"
    assert caplog.messages == [
        "fast: a kernel failed (RuntimeError: operation not permitted when stream is capturing "
        "Compile with TORCH_USE_CUDA_DSA); the plain path runs instead"
    ]


def test_a_later_recording_that_fails_keeps_the_tokens_and_the_draws(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that the candidates do not decide is another graph, which sorts the whole vocabulary."""
    monkeypatch.setattr(sampling, "_CANDIDATES", 6)
    plain, fast = twins()
    fast.runner = GraphRunner(recorder=type("Later", (Failing,), {"records": 1}))
    options: Options = {**WAYS["sampled"], "top_k": None, "temperature": 0.4}
    for _ in range(2):
        ours = fast.generate_tokens(PROMPTS, 3 * SYNC_INTERVAL, **options)
        assert ours == plain.generate_tokens(PROMPTS, 3 * SYNC_INTERVAL, **options)
    assert 0 < ran(fast) < 3 * SYNC_INTERVAL
    assert len(caplog.messages) == 1
    assert are_free(fast)


@pytest.mark.parametrize("when", ["buffers are allocated", "a step is recorded", "a capture ends"])
def test_a_graph_that_does_not_fit_is_reported_and_later_texts_try_again(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins()
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    if when == "a capture ends":
        error, error.__context__ = RuntimeError("the capture was invalidated"), error

    class Full(Failing):
        def __init__(self, device: torch.device) -> None:
            if when == "buffers are allocated" and not self.records:
                raise error
            super().__init__(device)

    Full.error = error
    fast.runner = GraphRunner(recorder=Full)
    for _ in range(2):
        assert fast.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert caplog.messages == [
        "fast: graphs for 3 rows of 16 positions do not fit into the GPU's memory; the plain path runs instead"
    ]
    assert ran(fast) == 0
    assert are_free(fast)
    Full.records = 1
    assert fast.generate_tokens([[1]], 9, **GREEDY) == plain.generate_tokens([[1]], 9, **GREEDY)
    assert ran(fast) == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_records_graphs_of_its_own(copied: Callable[[Transformer], Transformer]) -> None:
    plain, fast = twins()
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    other = copied(fast)
    assert other.generate_tokens(PROMPTS, 9, **GREEDY) == plain.generate_tokens(PROMPTS, 9, **GREEDY)
    assert ran(other) == ran(fast) == 8


@pytest.mark.parametrize("change", [None, watch_a_layer, change_an_operation])
def test_a_runner_keeps_no_model_alive(change: Callable[[Transformer], None] | None) -> None:
    """A model's memory is freed with its last reference, without a garbage collection."""
    _, fast = twins()
    fast.runner = GraphRunner(recorder=Forgetful)  # a real graph stores no reference to its step either
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


def test_exact_mode_and_graphs_exclude_each_other() -> None:
    _, fast = twins()
    with pytest.raises(ValueError, match=r"the fast step \(CUDA graphs of .*\) exclude each other: choose one"):
        fast.exact = True
    assert not fast.exact
    fast.exact = False


def own_layer(change: Callable[[Tensor, int], Tensor]) -> graph_ops.GraphOps:
    """Return functions whose attention's output, (rows, n_heads, head_dim), is changed; by the number of the call."""
    calls = count()

    def attend(*given: Any) -> Tensor:
        return change(graph_ops.attend_masked(*given), next(calls))

    return graph_ops.PYTORCH._replace(name="own", attention=MASKED._replace(attend=attend))


def halve_several_rows(output: Tensor, call: int) -> Tensor:
    return output if len(output) == 1 else output * 0.5


def lose_a_head_of_the_second_layer(output: Tensor, call: int) -> Tensor:
    output[:, 3] *= call % ARGS.n_layers != 1
    return output


def differ_in_one_replay(output: Tensor, call: int) -> Tensor:
    return output * (2 if call == 101 else 1)


def read_a_slot_behind_the_position(q: Tensor, keys: Tensor, values: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    (seen,) = prepared
    return graph_ops.attend_masked(q, keys, values, (seen | seen.roll(1, dims=1),))


def read_nan() -> graph_ops.GraphOps:
    return graph_ops.PYTORCH._replace(attention=MASKED._replace(attend=read_a_slot_behind_the_position))


def rotate_logits() -> graph_ops.GraphOps:
    return graph_ops.PYTORCH._replace(head=lambda h, *given: graph_ops.head(h, *given).roll(1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (partial(own_layer, halve_several_rows), "the output of layer 0 by own kernels is off by"),
        (partial(own_layer, lose_a_head_of_the_second_layer), "the output of layer 1 by own kernels is off by"),
        (partial(own_layer, differ_in_one_replay), r"replay \d+ of own kernels makes other logits than the first"),
        (read_nan, "the output of layer 0 by plain kernels is off by nan"),
        (rotate_logits, "the plain kernels' logits are off by"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_are_wrong_anywhere_are_not_used(
    wrong: Callable[[], graph_ops.GraphOps], words: str, dtype: torch.dtype
) -> None:
    plain, _ = twins(dtype=dtype, device="cpu")  # on a GPU a replay does not call these functions
    runner = GraphRunner(wrong())
    with pytest.raises(Unsupported, match=words):
        try_steps(plain, runner)
    assert not runner._sets
    assert plain.cache is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_are_right_are_timed(dtype: torch.dtype) -> None:
    plain, _ = twins(dtype=dtype)
    assert try_steps(plain, GraphRunner()).keys() == {FEW, MANY}


@pytest.mark.parametrize(
    ("recorder", "words"), [(Failing, "operation not permitted"), (Forgetful, "does not repeat what was recorded")]
)
def test_a_step_that_cannot_be_recorded_or_repeated_fails_its_trial(recorder: type[Recorder], words: str) -> None:
    plain, _ = twins()
    runner = GraphRunner(recorder=recorder)
    with pytest.raises((Unsupported, RuntimeError), match=words):
        try_steps(plain, runner)
    assert not runner._sets
    assert plain.cache is None


@pytest.mark.parametrize("limits", [{"max_batch_size": 1}, {"max_seq_len": 2}])
def test_kernels_are_compared_within_the_models_limits(limits: dict[str, int]) -> None:
    calls: list[int] = []

    def layer(attend: Any, product: Any, h: Tensor, *given: Any) -> Tensor:
        calls.append(len(h))
        return graph_ops.decode_layer(attend, product, h, *given)

    model = tiny_model(replace(ARGS, **limits), dtype=torch.float32).requires_grad_(False)
    try_steps(model, GraphRunner(graph_ops.PYTORCH._replace(name="own", layer=layer)))
    assert set(calls) == ({1} if "max_batch_size" in limits else {1, 2, MANY})


def test_quantised_weights_are_not_supported() -> None:
    plain, _ = twins(tiny_args(vocab_size=64), dtype=torch.float32)
    quantize_layers(plain, torch.float32)
    with pytest.raises(Unsupported, match="quantised weights run on a CPU only"):
        choose._use_graphs(plain)


# ---- captures, with fakes for parts of CUDA --------------------------------------------------------------------------


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)


class FakeCuda:
    """Streams, and an allocator that frees nothing while it believes that a capture is under way."""

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
    """Replace the parts of CUDA that PyTorch's own `torch.cuda.graph` uses."""
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


def test_a_step_runs_and_is_captured_on_the_recorders_stream_which_both_sides_wait_for(cuda: FakeCuda) -> None:
    record, seen = Recorder(torch.device("cuda:0")), []
    record(lambda: seen.append(cuda.current))
    assert seen == [record.stream] * 3
    assert cuda.current is cuda.outer
    assert record.stream.waited_for == [cuda.outer]
    assert cuda.outer.waited_for == [record.stream]
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 // 0)  # a failed step may still write memory that others would get
    assert cuda.outer.waited_for == [record.stream] * 2


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


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("heads", [2, 6])
def test_flash_attention_on_a_gpu_reads_each_rows_written_keys_alone(heads: int) -> None:
    q, keys, values = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in
                       ((3, heads, 40), (3, 96, 2, 40), (3, 96, 2, 40)))  # fmt: skip
    positions = torch.tensor([0, 95, 41], device=DEVICE)
    for row, position in enumerate(positions):
        keys[row, position + 1 :], values[row, position + 1 :] = torch.nan, torch.nan
    flash, masked = (each.attend(q, keys, values, each.prepare(positions, 96)) for each in (FLASH, MASKED))
    torch.testing.assert_close(flash, masked, rtol=2e-2, atol=2e-2)
