"""Recorded steps make the tokens of the plain path, step by step, or leave the text to it.

Without a GPU, a recording repeats the operations that were executed, on the same tensors (support/taped.py). Their
float64 is so exact that no rounding decides a token. With a GPU, the recordings are CUDA graphs.
"""

import copy
import gc
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, count
from threading import Event
from typing import Any

import pytest
import torch
from changes import CHANGES
from fakes import Ids
from generations import GREEDY, WAYS
from paths import WITH_PROMPTS
from taped import Taped
from threads import in_threads
from tiny import tiny_args, tiny_model
from torch import Tensor

from llama import sampling
from llama.args import ModelArgs
from llama.batch import NonFiniteLogits
from llama.fast import choose, graph_buffers, graph_ops, graph_runner, graph_trial
from llama.fast.fingerprint import Descriptions
from llama.fast.graph_buffers import DecodeBuffers, GraphKey, Recorder, Replay, padded_width
from llama.fast.graph_ops import FLASH, MASKED, PYTORCH, GraphOps
from llama.fast.graph_runner import LENGTH_STEP, SYNC_INTERVAL, GraphRunner
from llama.fast.graph_trial import try_steps, usable
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
    fast.runner = GraphRunner(recorder=Taped)
    return plain, fast


def runner_of(model: Transformer) -> GraphRunner:
    assert isinstance(model.runner, GraphRunner)
    return model.runner


def buffers_of(model: Transformer) -> DecodeBuffers:
    return runner_of(model)._sets[0]


def are_free(model: Transformer) -> bool:
    """Return True if another text may use the buffers."""
    return not runner_of(model).in_use.locked()


def recordings_of(model: Transformer, ops: GraphOps = PYTORCH) -> list[object]:
    """Give the model a runner, and return a list that grows by one with each step that it records."""
    made: list[object] = []

    class Counting(Taped):
        def __call__(self, step: Replay) -> Replay:
            made.append(step)
            return super().__call__(step)

    model.runner = GraphRunner(ops, Counting)
    return made


def steps_of_same_tokens(
    models: Sequence[Transformer], prompts: list[list[int]], max_new: int | list[int], **options: Any
) -> int:
    """Assert that both models make the same tokens, and return the number of forwards by the second one's runner.

    Log-probabilities may differ by a few float64 roundings.
    """
    before = runner_of(models[1]).forwards
    theirs, ours = (model.generate_tokens(prompts, max_new, **options) for model in models)
    assert ours[0] == theirs[0]
    assert (ours[1] is None) == (theirs[1] is None)
    for one, other in zip(ours[1] or [], theirs[1] or [], strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    return runner_of(models[1]).forwards - before


def test_biases_and_norms_of_heads_are_computed() -> None:
    """As in Qwen 2 and Qwen 3; and a head that is the embedding."""
    both = twins(replace(ARGS, attention_bias=True, qk_norm=True, tied_head=True))
    for model in both:
        torch.manual_seed(3)
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "_norm.weight")):
                weight.uniform_(0.5, 1.5)
    assert steps_of_same_tokens(both, PROMPTS, 9, **GREEDY) == 8


@pytest.mark.parametrize("vocab", [1, VOCAB, 512, 128_256])
def test_logits_that_are_not_finite_are_seen(vocab: int) -> None:
    some, ids = torch.randn(6, vocab, device=DEVICE), torch.arange(6, device=DEVICE)
    for bad in (torch.nan, torch.inf, -torch.inf):
        some[3, vocab // 2] = bad
        assert graph_ops.if_finite(some, ids).tolist() == [0, 1, 2, -1, 4, 5]


# ---- recordings and buffers ------------------------------------------------------------------------------------------


def test_steps_are_recorded_once_for_rows_settings_and_texts_of_nearly_one_length() -> None:
    both = twins()
    recordings = recordings_of(both[1])
    for prompt, max_new in (([1, 2, 3], 20), ([4], 9), ([5] * 20, 3)):
        assert steps_of_same_tokens(both, [prompt], max_new, **GREEDY) == max_new - 1
    assert len(recordings) == 1
    for n in range(3):  # other numbers of the same settings
        options: Options = {
            **{"temperature": 0.7 + n / 10, "top_p": 0.5 + n / 10, "top_k": 20 + n, "min_p": n / 100 + 0.01},
            **{"repetition_penalty": 1.1 + n / 10, "seed": 3},
        }
        steps_of_same_tokens(both, [[1]], 9, **options)
        assert len(recordings) == 2
    steps_of_same_tokens(both, [[1]], 9, temperature=0.8, top_p=0.9, seed=3)  # other settings
    assert len(recordings) == 3
    steps_of_same_tokens(both, [[1], [2]], 9, **GREEDY)  # another number of rows
    assert len(recordings) == 4
    steps_of_same_tokens(both, [[1], [2]], LENGTH_STEP + 5, **GREEDY)  # longer buffers
    assert len(recordings) == 5


def test_texts_of_few_and_of_many_rows_in_turn_are_recorded_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    both = twins()
    recordings = recordings_of(both[1])
    for rows, recorded in ((1, 1), (16, 2), (1, 2), (16, 2), (3, 3), (1, 3), (2, 4), (1, 4), (16, 5)):  # three are kept
        steps_of_same_tokens(both, [[7]] * rows, 3, **GREEDY)
        assert len(recordings) == recorded
    monkeypatch.setattr(graph_runner, "_within_memory", lambda *_: [])
    steps_of_same_tokens(both, [[7]] * 5, 3, **GREEDY)
    assert [buffers.rows for buffers in runner_of(both[1])._sets] == [5]


def test_buffers_are_at_most_twice_as_long_as_a_generation_needs() -> None:
    _, fast = twins()
    for max_new, slots in ((100, 4 * LENGTH_STEP), (4, LENGTH_STEP)):
        fast.generate_tokens(PROMPTS, max_new, **GREEDY)
        assert buffers_of(fast).slots == slots


def test_buffers_whose_length_costs_no_time_serve_texts_of_many_lengths() -> None:
    both = twins(replace(ARGS, max_seq_len=600))
    recordings = recordings_of(both[1], PYTORCH._replace(attention=MASKED._replace(by_text=True)))
    for length in (9, 255, 256, 9, 500):
        steps_of_same_tokens(both, [[7] * (length - 3)], 3, **GREEDY)
    assert len(recordings) == 2  # the last slot belongs to no text, so 256 positions need more than 256 slots
    assert buffers_of(both[1]).slots == 512


def test_steps_that_candidates_do_not_decide_are_repeated_over_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 61 tokens two or six are candidates: they decide all steps, some, or none."""
    both = twins()
    for way in ("sampled", "sampled in every way"):
        options: Options = {**WAYS[way], "top_k": None, "logprobs": False, "echo": False}
        sorted_wholly: list[bool] = []
        for candidates, temperature in ((2, 1.3), (6, 0.4), (6, 0.05)):
            monkeypatch.setattr(sampling, "_CANDIDATES", candidates)
            options["temperature"] = temperature
            steps_of_same_tokens(both, PROMPTS, 2 * SYNC_INTERVAL, **options)
            sorted_wholly.append(any(key.whole for key in buffers_of(both[1]).graphs))
            runner_of(both[1]).drop()
        assert set(sorted_wholly) == {True, False}


def test_earlier_contents_of_a_cache_have_no_effect() -> None:
    both = twins()
    steps_of_same_tokens(both, PROMPTS, 9, **GREEDY)
    assert len(buffers_of(both[1]).keys_values) == ARGS.n_layers
    for tensor in chain.from_iterable(buffers_of(both[1]).keys_values):
        tensor.fill_(torch.nan)
    assert steps_of_same_tokens(both, PROMPTS, 9, **GREEDY) == 8


def test_a_twin_of_a_model_with_the_other_switch_uses_the_same_graphs() -> None:
    both = twins()
    recordings = recordings_of(both[1])
    both[1].kv_caching = False
    for _ in range(2):
        assert steps_of_same_tokens(both, PROMPTS, 9, kv_caching=True, **GREEDY) == 8
    both[1].kv_caching = True
    assert steps_of_same_tokens(both, PROMPTS, 9, **GREEDY) == 8
    assert len(recordings) == 1


def test_a_recording_repeats_operations_on_tensors_and_refuses_to_wait_for_a_number() -> None:
    made, seen = torch.zeros(2), list[int]()

    def step() -> None:
        seen.append(1)
        made.copy_(made + len(seen))

    replay = Taped(torch.device("cpu"))(step)
    made.zero_()
    replay()
    replay()
    assert made.tolist() == [4, 4]  # what the second of two runs added
    assert len(seen) == 2
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Taped(torch.device("cpu"))(lambda: made.sum().item())


class Forgetful(Recorder):
    """Record a graph that does nothing when it is replayed."""

    def __call__(self, step: Replay) -> Replay:
        super().__call__(step)
        return lambda: None


def test_a_graph_s_tensors_outlive_the_function_that_was_recorded() -> None:
    """A graph stores addresses only: for example of the table of rotations, which a longer one replaces."""
    _, fast = twins()
    fast.runner = GraphRunner(recorder=Forgetful)
    fast.generate_tokens(PROMPTS, 9, **GREEDY)
    tables = [weakref.ref(table) for table in fast.rope.up_to(9, fast.device)]
    fast(torch.zeros((1, 150), dtype=torch.int64, device=DEVICE))
    assert fast.rope.up_to(9, fast.device)[0] is not tables[0]()
    assert all(table() is not None for table in tables)


def test_replaced_weights_are_recorded_again_and_weights_changed_in_place_are_not() -> None:
    both = twins()
    recordings = recordings_of(both[1])
    for recorded, change in ((1, "edit_in_place"), (1, "assign_a_parameter"), (2, None)):
        steps_of_same_tokens(both, PROMPTS, 12, **GREEDY)
        assert len(recordings) == recorded
        for model in both if change is not None else ():
            CHANGES[change](model)


# ---- prompts, and whole prefixes without a cache ---------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_prompts_and_whole_prefixes_are_those_of_the_plain_path(way: str) -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    for kv_caching in (True, False):
        assert steps_of_same_tokens(both, PROMPTS, 9, kv_caching=kv_caching, **WAYS[way]) == 9


def keys_of(model: Transformer) -> list[GraphKey]:
    """Return what the model's graphs do, in the order in which they were recorded."""
    return [key for buffers in reversed(runner_of(model)._sets) for key in buffers.graphs]


@pytest.mark.parametrize("kv_caching", [True, False])
def test_a_prompt_is_one_recorded_call_and_so_is_a_step_without_the_cache(kv_caching: bool) -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    assert steps_of_same_tokens(both, [[5] * 60], 9, kv_caching=kv_caching, **GREEDY) == 9
    prompts = [key.width for key in keys_of(both[1]) if key.chooses is None]
    steps = [key.width for key in keys_of(both[1]) if key.chooses is not None]
    assert (prompts, steps) == ([64], [1] if kv_caching else [64, 128])


def test_widths_of_recorded_calls_are_few_and_at_most_a_quarter_of_a_long_one_is_padding() -> None:
    widths = [padded_width(1, width, 4096) for width in range(1, 2049)]
    assert list(dict.fromkeys(widths)) == [*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256)]
    assert all(made is not None and width <= made for width, made in enumerate(widths, 1))
    assert all(made is not None and made < 1.25 * width for width, made in enumerate(widths, 1) if width > 256)
    assert [padded_width(rows, 250, 512) for rows in (8, 9)] == [256, None]  # more tokens wait for the device
    assert padded_width(1, 250, 253) == 253


def test_prompts_of_many_lengths_share_recordings_and_stale_tokens_behind_them_have_no_effect() -> None:
    both = twins()
    recordings = recordings_of(both[1], WITH_PROMPTS)
    for length in (130, 2, 64, 40, 63):
        steps_of_same_tokens(both, [[*range(1, 60), *range(1, 60), *range(1, 20)][:length], [7]], 3, **GREEDY)
    assert len(recordings) == 3  # of 64 and 192 tokens, and a step


@pytest.mark.parametrize("kv_caching", [True, False])
def test_a_text_that_failed_leaves_nothing_that_a_later_one_reads(kv_caching: bool) -> None:
    """NaN in padding would reach a text: attention's weight of 0 times NaN is NaN."""
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    for model in both:
        model.tok_embeddings.weight[9] = torch.inf
        with pytest.raises(NonFiniteLogits):
            model.generate_tokens([[1, 2, 3, 4, 9, 9, 9]], 5, kv_caching=kv_caching, **GREEDY)
    assert steps_of_same_tokens(both, [[1, 2, 3]], 5, kv_caching=kv_caching, **GREEDY) == 5


@pytest.mark.parametrize("start", [True, False])
def test_the_switch_in_the_middle_of_a_text_retires_no_graphs(start: bool, caplog: pytest.LogCaptureFixture) -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    made = []
    for model in both:
        model.kv_caching = start
        stream = model.stream(Ids(), [[5, 9]], 12, **GREEDY)
        texts: list[Any] = [next(stream) for _ in range(4)]
        model.kv_caching = not start
        try:
            texts += stream
        except ValueError as error:
            texts.append(str(error))
        model.kv_caching = True
        made.append(texts)
    assert made[0] == made[1]
    assert all("a kernel failed" not in words for words in caplog.messages)
    assert steps_of_same_tokens(both, PROMPTS, 5, **GREEDY) == 5


@pytest.mark.parametrize("kv_caching", [True, False])
def test_calls_that_are_too_large_are_not_recorded_and_a_text_may_grow_into_them(
    kv_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    monkeypatch.setattr(graph_buffers, "RECORDED_TOKENS", 3 * 64)
    assert steps_of_same_tokens(both, [[5] * 58, [7], [9]], 15, kv_caching=kv_caching, **GREEDY) == 15
    assert [(key.width, key.chooses is None) for key in keys_of(both[1])] == [
        (64, True),
        (1 if kv_caching else 64, False),
    ]
    runner_of(both[1]).drop()
    assert steps_of_same_tokens(both, [[5] * 70, [7], [9]], 9, kv_caching=kv_caching, **GREEDY) == 9
    assert [key.width for key in keys_of(both[1])] == ([1] if kv_caching else [])


def test_every_turn_of_a_session_is_a_recorded_prompt_behind_what_is_cached() -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    made: list[list[Any]] = []
    for model in both:
        session, texts = model.session(Ids()), list[Any]()
        for turn in ([5, 9, 2], [44, 3], [8] * 30):
            session.append(turn)
            texts.append(list(session.stream(9, temperature=0.8, seed=3)))
        session.rewind(20)
        session.append([1, 2, 3])
        texts.append(session.generate(5, **GREEDY))
        other = session.fork()
        other.append([7, 7])
        texts.append([session.generate(5, **GREEDY), other.generate(5, **GREEDY)])
        texts.append(model.generate_tokens([[1, 2], [3], [4, 5, 6]], 6, prefix=other, **GREEDY))
        made.append(texts)
    assert made[0] == made[1]
    assert {key.width for key in keys_of(both[1])} == {1, 64}
    assert are_free(both[1])


def test_a_common_prefix_is_fed_once_and_the_rest_by_a_recorded_call() -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    prompts = [[5, 6, 7, 8, 9, row, 3] for row in range(3)]
    assert steps_of_same_tokens(both, prompts, 9, share_prefix=True, **GREEDY) == 10
    assert {key.width for key in keys_of(both[1])} == {1, 64}


@pytest.mark.parametrize("kv_caching", [True, False])
def test_a_call_in_the_middle_of_a_text_leaves_the_buffers_to_the_text(kv_caching: bool) -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    texts: list[list[Any]] = []
    for model in both:
        other, got = model.with_kv_caching(False), list[Any]()
        for piece in model.stream(Ids(), [[5, 9]], 40, kv_caching=kv_caching, **GREEDY):
            got += piece, int(other(torch.tensor([[1, 2, 3]], device=DEVICE), logits="last").argmax())
        texts.append(got)
    assert texts[0] == texts[1]
    assert runner_of(both[1]).forwards == 80
    assert len(runner_of(both[1])._sets) == 1


def test_calls_of_the_model_are_recorded_if_they_are_prompts_and_no_large_cache_is_copied() -> None:
    both = twins(replace(ARGS, max_seq_len=600))
    recordings = recordings_of(both[1], WITH_PROMPTS)
    ids = torch.arange(1, 301, device=DEVICE).view(1, -1) % VOCAB
    calls = [  # rows, start, end, whether the call is the runner's, and the number of recordings after it
        *((1, 0, 200, True, 1), (1, 200, 201, False, 1), (1, 201, 230, True, 2), (1, 230, 300, True, 3)),
        *((2, 0, 9, True, 3), (2, 9, 20, False, 3), (1, 0, 5, True, 3)),
    ]
    caches: list[Any] = [None, None]
    kept = []
    with torch.inference_mode():
        for rows, start, end, ours, recorded in calls:
            caches = caches if start else [model.new_cache() for model in both]
            before = runner_of(both[1]).forwards
            fed = ids[:, start:end].repeat(rows, 1)
            kept.append([model(fed, start, cache=one, logits="last") for model, one in zip(both, caches, strict=True)])
            assert runner_of(both[1]).forwards == before + ours
            assert len(recordings) == recorded, (rows, start, end)
        before = runner_of(both[1]).forwards
        both[1](ids[:, 250:260], 250, cache=caches[1], logits="last")  # behind a gap, which is the caller's
        assert (runner_of(both[1]).forwards, runner_of(both[1])._retired) == (before, False)
    for theirs, made in kept:  # a later call does not change the logits of an earlier one
        torch.testing.assert_close(made, theirs, rtol=0, atol=1e-9)


def test_a_text_waits_for_another_thread_s_recorded_prompt_and_has_the_graphs_then() -> None:
    plain, fast = twins()
    feeding, beginning = Event(), Event()

    class Slow(Taped):
        def __call__(self, step: Replay) -> Replay:
            feeding.set()
            beginning.wait(9)
            time.sleep(0.01)
            return super().__call__(step)

    fast.runner = GraphRunner(WITH_PROMPTS, Slow)

    def generate() -> Any:
        feeding.wait(9)
        beginning.set()
        return fast.generate_tokens(PROMPTS, 9, **GREEDY)

    fed, made = in_threads(lambda: fast.session(Ids()).feed(PROMPTS[0]), generate)
    assert (fed, made) == (len(PROMPTS[0]), plain.generate_tokens(PROMPTS, 9, **GREEDY))
    assert runner_of(fast).forwards == 1 + 9


def test_a_prompt_at_the_end_of_the_buffers_is_plain() -> None:
    both = twins(replace(ARGS, max_seq_len=600))
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    texts = []
    for model in both:
        session = model.session(Ids())
        session.feed([3, 7, 9] * 75)
        if model is both[1]:
            runner_of(model).drop()  # the next buffers have 256 positions
        texts.append(model.generate_tokens([[1, 2, 4]], 9, prefix=session, **GREEDY))
    assert texts[0] == texts[1]
    assert runner_of(both[1]).forwards == 1 + 8


def test_a_session_without_the_cache_counts_the_tokens_that_recorded_steps_feed() -> None:
    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    fed = []
    for model in both:
        session = model.with_kv_caching(False).session(Ids())
        session.feed([5, 9, 2])
        fed.append((session.generate(6, **GREEDY), session.fed))
    assert fed[0] == fed[1]
    assert runner_of(both[1]).forwards > 5


def test_prompts_of_other_kinds_of_cache_are_plain() -> None:
    both = twins(replace(ARGS, n_heads=2, n_kv_heads=2, head_dim=32))
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    for kind in ("concat", "paged", "int8", "window:8"):
        assert steps_of_same_tokens(both, PROMPTS, 5, kv_cache=kind, **GREEDY) == 0


def test_prompts_record_gradients_on_the_plain_path() -> None:
    _, fast = twins()
    fast.requires_grad_(True)
    fast.runner, fast.kv_caching = GraphRunner(WITH_PROMPTS, Taped), False
    ids = torch.tensor([[1, 2, 3]], device=DEVICE)
    fast(ids).sum().backward()
    assert fast.blocks[0].feed_forward.w1.weight.grad is not None
    assert runner_of(fast).forwards == 0
    with torch.inference_mode():
        fast(ids)
    assert runner_of(fast).forwards == 1


def test_prompts_whose_kernels_fail_later_are_plain_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As a kernel that is compiled for sizes that the trial did not have, in the middle of a prompt."""
    calls = count()

    def fail_later(x: Tensor, up: Tensor) -> Tensor:
        if next(calls) == ARGS.n_layers + 1:
            raise RuntimeError("out of resource")
        return graph_ops.gate(x, up)

    both = twins()
    both[1].runner = GraphRunner(WITH_PROMPTS._replace(gate=fail_later))
    for _ in range(3):
        steps_of_same_tokens(both, PROMPTS, 5, **GREEDY)
    assert caplog.messages == ["fast: a kernel failed (RuntimeError: out of resource); the plain path runs instead"]


def late(*given: Any) -> Tensor:
    return graph_ops.attend_masked(*given).roll(1, dims=0)


def halve_keys(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    return rotate(x, cos_sin) if x.shape[1] == ARGS.n_heads else rotate(x, cos_sin) * 0.5


def see_no_past(positions: Tensor, slots: int) -> tuple[Tensor, ...]:
    first = positions[:, :1, None] if positions.shape[1] > 1 else 0
    return (graph_ops.prepare_mask(positions, slots)[0] & (torch.arange(slots, device=positions.device) >= first),)


def see_all_of_a_padded_call(positions: Tensor, slots: int) -> tuple[Tensor, ...]:
    (seen,) = graph_ops.prepare_mask(positions, slots)
    return (seen | (seen.shape[1:] == (64, 64)),)


LAYER, LOGITS = "the output of layer 0 by plain kernels", "the plain kernels' logits are off by"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attention": MASKED._replace(attend=late)}, LAYER),
        ({"rotate": halve_keys}, LAYER),
        ({"gate": torch.add}, LAYER),
        ({"attention": MASKED._replace(prepare=see_no_past)}, LOGITS),
        ({"attention": MASKED._replace(prepare=see_all_of_a_padded_call)}, LOGITS),
    ],
)
def test_prompts_are_plain_if_their_trial_fails(
    wrong: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = twins(dtype=torch.float32)
    assert usable(plain, WITH_PROMPTS) is WITH_PROMPTS
    with caplog.at_level(logging.WARNING, "llama"):
        ops = usable(plain, WITH_PROMPTS._replace(**wrong))
    plain.runner = GraphRunner(ops)
    assert str(plain.execution) == "CUDA graphs of plain kernels, plain prompts"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"fast: prompts run on the plain path: {words}")


# ---- left to the plain path ------------------------------------------------------------------------------------------


def change_the_cache(model: Transformer) -> None:
    model.kv_cache = "concat"


def switch_the_cache_off(model: Transformer) -> None:
    model.kv_caching = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (CHANGES["change_an_operation"], "the model's operations are mine"),
        (CHANGES["hook_that_changes"], "a hook watches RowParallelLinear"),
        (change_the_cache, "kv_cache='concat' has no fast step; these kinds have one: static; the plain"),
        (switch_the_cache_off, "these kernels' steps need the KV cache; the plain path runs instead"),
    ],
)
def test_a_model_that_the_steps_do_not_compute_runs_on_the_plain_path_with_one_warning(
    change: Callable[[Transformer], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = twins()
    for model in both:
        change(model)
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            assert steps_of_same_tokens(both, PROMPTS, 5, **GREEDY) == 0
    assert len(caplog.messages) == 1
    assert words in caplog.messages[0]


# One of each outcome: the same graphs, other graphs, the plain path, an error. tests/fast/test_changed_models.py has
# every change.
def test_one_text_at_a_time_has_the_graphs_and_others_run_on_the_plain_path() -> None:
    both = plain, fast = twins()
    wanted = [*plain.stream(Ids(), PROMPTS, 20, **GREEDY)]
    stream = fast.stream(Ids(), PROMPTS, 20, **GREEDY)
    made = [next(stream) for _ in range(9)]
    assert steps_of_same_tokens(both, PROMPTS, 9, **GREEDY) == 0
    assert [*made, *stream] == wanted
    assert runner_of(fast).forwards == 19
    assert steps_of_same_tokens(both, PROMPTS, 9, **GREEDY) == 8


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
    fast.runner = GraphRunner(recorder=Taped)
    fast.runner._descriptions = Descriptions(lambda _: None)  # type: ignore[assignment]  # as if the hook came a moment later
    with pytest.raises(ZeroDivisionError) as caught:
        fast.generate_tokens(PROMPTS, 9, **GREEDY)
    assert are_free(fast), f"{caught} has the frames of the text"
    handle.remove()


# ---- texts that are continued ----------------------------------------------------------------------------------------


def test_after_an_interrupted_prompt_the_buffers_serve_texts_that_continue_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a step fails, so that calls of the model continue with the cache of the buffers."""

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    def fail() -> None:
        raise RuntimeError("a driver's error")

    texts = []
    for model in (both := twins()):
        session = model.session(Ids())
        session.feed(PROMPTS[0])
        model.generate_tokens([[1, 2], [3]], 30, **GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr("llama.kv_cache.static.StaticCache._write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate_tokens([[1, 2], [3]], 30, **GREEDY)
        if model is both[1]:
            buffers_of(model).graphs = dict.fromkeys(buffers_of(model).graphs, fail)
        texts.append(model.generate_tokens([[1, 2], [3]], 28, prefix=session, **GREEDY))
    assert texts[0] == texts[1]


def test_a_session_with_another_kind_of_cache_is_plain_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = twins()
    for kind in ("concat", "paged"):
        session = fast.session(Ids(), kv_cache=kind)
        session.feed(PROMPTS[0])
        for _ in range(2):
            session.generate(3, **GREEDY)
    assert runner_of(fast).forwards == 0
    assert caplog.messages == [
        f"fast: kv_cache={kind!r} has no fast step; these kinds have one: static; the plain path runs instead"
        for kind in ("concat", "paged")
    ]


# ---- failures, memory, copies ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("way", "when_replayed"), [("greedy", False), ("sampled in every way", True)])
def test_after_a_step_that_fails_the_plain_path_continues_with_one_warning(
    way: str, when_replayed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    both = twins()
    both[1].runner = GraphRunner(recorder=type("Now", (Failing,), {"when_replayed": when_replayed}))
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            assert steps_of_same_tokens(both, PROMPTS, 12, **WAYS[way]) == 0
    assert str(both[1].execution) == "plain"
    assert caplog.messages == [
        "fast: a kernel failed (RuntimeError: operation not permitted when stream is capturing "
        "Compile with TORCH_USE_CUDA_DSA); the plain path runs instead"
    ]


def test_a_later_recording_that_fails_keeps_the_tokens_and_the_draws(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that the candidates do not decide is another graph, which sorts the whole vocabulary."""
    monkeypatch.setattr(sampling, "_CANDIDATES", 6)
    both = twins()
    both[1].runner = GraphRunner(recorder=type("Later", (Failing,), {"records": 1}))
    options: Options = {**WAYS["sampled"], "top_k": None, "temperature": 0.4}
    for _ in range(2):
        steps_of_same_tokens(both, PROMPTS, 3 * SYNC_INTERVAL, **options)
    assert 0 < runner_of(both[1]).forwards < 3 * SYNC_INTERVAL
    assert len(caplog.messages) == 1
    assert are_free(both[1])


@pytest.mark.parametrize("when", ["buffers are allocated", "a step is recorded", "a capture ends"])
def test_a_graph_that_does_not_fit_is_reported_and_later_texts_try_again(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = twins()
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    if when == "a capture ends":
        error, error.__context__ = RuntimeError("the capture was invalidated"), error

    class Full(Failing):
        def __init__(self, device: torch.device) -> None:
            if when == "buffers are allocated" and not self.records:
                raise error
            super().__init__(device)

    Full.error = error
    both[1].runner = GraphRunner(recorder=Full)
    for _ in range(2):
        assert steps_of_same_tokens(both, PROMPTS, 9, **GREEDY) == 0
    assert caplog.messages == [
        "fast: graphs for 3 rows of 16 positions do not fit into the GPU's memory; the plain path runs instead"
    ]
    assert are_free(both[1])
    Full.records = 1
    assert steps_of_same_tokens(both, [[1]], 9, **GREEDY) == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_records_graphs_of_its_own(copied: Callable[[Transformer], Transformer]) -> None:
    plain, fast = twins()
    assert steps_of_same_tokens((plain, fast), PROMPTS, 9, **GREEDY) == 8
    assert steps_of_same_tokens((plain, copied(fast)), PROMPTS, 9, **GREEDY) == 8


@pytest.mark.parametrize("change", [None, "hook_that_changes", "change_an_operation"])
def test_a_runner_keeps_no_model_alive(change: str | None) -> None:
    """A model's memory is freed with its last reference, without a garbage collection."""
    _, fast = twins()
    fast.runner = GraphRunner(recorder=Forgetful)  # a real graph stores no reference to its step either
    if change is not None:
        CHANGES[change](fast)
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


# ---- the trial, and the choice of kernels ----------------------------------------------------------------------------


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try steps of short texts: only a GPU's attention divides long ones."""
    monkeypatch.setattr(graph_trial, "SHAPES", ((1, 6), (2, 33), (16, 9)))


def own_layer(change: Callable[[Tensor, int], Tensor]) -> GraphOps:
    """Return functions whose attention's output, (rows, n_heads, head_dim), is changed; by the number of the call."""
    calls = count()

    def attend(*given: Any) -> Tensor:
        return change(graph_ops.attend_masked(*given), next(calls))

    return PYTORCH._replace(name="own", attention=MASKED._replace(attend=attend))


def halve_several_rows(output: Tensor, call: int) -> Tensor:
    return output if len(output) == 1 else output * 0.5


def lose_a_head_of_the_second_layer(output: Tensor, call: int) -> Tensor:
    output[:, 3] *= call % ARGS.n_layers != 1
    return output


def differ_in_one_replay(output: Tensor, call: int) -> Tensor:
    return output * (2 if call == 101 else 1)


def read_a_slot_behind_the_position(q: Tensor, keys: Tensor, values: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    (seen,) = prepared
    return graph_ops.attend_masked(q, keys, values, (seen | seen.roll(1, dims=-1),))


def without_the_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, torch.ones_like(weight), eps)


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize(
    ("wrong", "words", "dtype"),
    [
        (lambda: own_layer(halve_several_rows), "the output of layer 0 by own kernels is off by", torch.bfloat16),
        (lambda: own_layer(lose_a_head_of_the_second_layer), "the output of layer 1 by own kernels is", torch.bfloat16),
        (lambda: own_layer(differ_in_one_replay), r"replay \d+ of own kernels makes other logits than", torch.float32),
        (
            lambda: PYTORCH._replace(attention=MASKED._replace(attend=read_a_slot_behind_the_position)),
            "the output of layer 0 by plain kernels is off by nan",
            torch.float32,
        ),
        (lambda: PYTORCH._replace(norm=without_the_weight), "the output of layer 0 by plain kernels", torch.float32),
        (
            lambda: PYTORCH._replace(head=lambda h, *given: graph_ops.head(h, *given).roll(1)),
            "the plain kernels' logits are off by",
            torch.float32,
        ),
    ],
)
def test_kernels_that_are_wrong_anywhere_are_not_used(
    wrong: Callable[[], GraphOps], words: str, dtype: torch.dtype
) -> None:
    plain, _ = twins(dtype=dtype, device="cpu")  # on a GPU a replay does not call these functions
    runner = GraphRunner(wrong())
    with pytest.raises(Unsupported, match=words):
        try_steps(plain, runner)
    assert not runner._sets
    assert plain.cache is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_kernels_that_are_right_pass(dtype: torch.dtype) -> None:
    plain, _ = twins(dtype=dtype)
    try_steps(plain, GraphRunner())


def sorted_nucleus(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    temperature, top_p, draws = given
    ids, _ = sampling.choose(logits, sampling.Settings(temperature, top_p, None, None, None), None, draws, whole=True)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def off_by_one_row(*given: Any) -> tuple[Tensor, Tensor]:
    ids, sure = sorted_nucleus(*given)
    return torch.cat([ids[:-1], ids[-1:] + 1]), sure


def unsure(*given: Any) -> tuple[Tensor, Tensor]:
    ids, sure = sorted_nucleus(*given)
    return ids, sure & (ids > ids.min())


@pytest.mark.parametrize("wrong", [off_by_one_row, unsure])
def test_the_vocabulary_is_sorted_if_the_trial_of_the_nucleus_fails(
    wrong: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = twins(dtype=torch.float32)
    right = PYTORCH._replace(nucleus=sorted_nucleus)
    assert usable(plain, right) is right
    assert usable(plain, PYTORCH._replace(nucleus=wrong)).nucleus is None
    assert caplog.messages == ["fast: the vocabulary is sorted: the choices of plain kernels are not those of a sort"]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_step_chooses_by_the_nucleus_until_it_is_not_sure(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of the steps behind are used again by those that sort."""
    monkeypatch.setattr(sampling, "_CANDIDATES", 6)  # of 61 tokens
    calls = count()

    def unsure_at_last(*given: Any) -> tuple[Tensor, Tensor]:
        ids, sure = sorted_nucleus(*given)
        return (ids, sure) if next(calls) < 12 else (ids + 1, ~sure)

    both = twins()
    both[1].runner = GraphRunner(PYTORCH._replace(nucleus=unsure_at_last))
    options: Options = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "repetition_penalty": penalty}
    assert steps_of_same_tokens(both, PROMPTS, 30, **options) > 29
    assert next(calls) > 12
    assert [key.whole for key in buffers_of(both[1]).graphs] == [False, True]


@pytest.mark.usefixtures("short_texts")
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


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize("limits", [{"max_batch_size": 1}, {"max_seq_len": 2}])
def test_kernels_are_compared_within_the_models_limits(limits: dict[str, int]) -> None:
    calls: list[int] = []

    def gate(x: Tensor, up: Tensor) -> Tensor:
        calls.append(len(x))
        return graph_ops.gate(x, up)

    model = tiny_model(replace(ARGS, **limits), dtype=torch.float32).requires_grad_(False)
    try_steps(model, GraphRunner(PYTORCH._replace(name="own", gate=gate)))
    assert set(calls) == ({1} if "max_batch_size" in limits else {1, 2, 16})


@pytest.mark.usefixtures("short_texts")
def test_masked_attention_runs_if_flash_attention_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a CPU, which does not have its operator."""
    _, fast = twins(device="cpu")
    assert graph_ops.plain_ops(torch.device("cpu"), torch.bfloat16, 64) == [PYTORCH]
    flash = PYTORCH._replace(name="plain flash", attention=FLASH)
    monkeypatch.setattr(choose, "plain_ops", lambda *_: [flash, PYTORCH])
    with caplog.at_level(logging.WARNING, "llama"):
        choose._use_graphs(fast.double())
    assert str(fast.execution) == "CUDA graphs of plain kernels, plain prompts"
    assert str(fast.execution_with("paged")) == "plain"
    (words,) = caplog.messages
    assert words.startswith("fast: plain flash kernels are not used: ")


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


def test_the_memory_of_recordings_counts_when_buffers_are_kept(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    records = [Recorder(device) for _ in range(3)]
    pools = [*(record.pool for record in records[:2]), records[0].pool, (0, 99)]
    segments = [{"segment_pool_id": [*pool], "total_size": 10**n} for n, pool in enumerate(pools)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 16 * 115))
    assert [record.nbytes for record in records] == [101, 10, 0]
    model, fast = twins(device="cpu")
    weights = runner_of(fast).describe(model)
    sets = [DecodeBuffers(model, weights, 1, 8, None, record) for record in records]
    assert graph_runner._within_memory(sets, device) == sets
    cached = DecodeBuffers(model, weights, 1, 8, model.new_cache(), records[1])
    assert cached.nbytes == 10 + sum(tensor.nbytes for pair in cached.keys_values for tensor in pair) > 115
    assert graph_runner._within_memory([sets[0], cached, sets[2]], device) == sets[:1]


def test_models_in_several_threads_record_one_at_a_time(cuda: FakeCuda) -> None:
    """A process may capture one graph at a time."""
    under_way: list[int] = []
    most: list[int] = []

    def step() -> None:
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.005)
        under_way.pop()

    recorders = [partial(Recorder(torch.device("cuda:0")), step) for _ in range(4)]
    assert not any(isinstance(made, Exception) for made in in_threads(*recorders))
    assert len(most) == 4 * 3
    assert max(most) == 1
