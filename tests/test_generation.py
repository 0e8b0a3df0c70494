"""The generation loop feeds, stops, records and cleans up as documented.

A scripted model shows the input of each step and where rows stop; a tiny real one shows that the numbers are right.
The tiny model computes in float64, so that equal logits are equal to rounding and greedy choices have no near ties.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy
import pytest
import torch
from fakes import NAN, Bytes, Call, Ids, Scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import unrefused
from tiny import tiny_model

from llama.batch import NonFiniteLogits
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.request import Step
from llama.texts.many import Writer
from llama.texts.scheduler import Texts
from llama.texts.session import Session

few = settings(max_examples=15, derandomize=True, deadline=None)
VOCAB, MAX_SEQ_LEN = 97, 64
# Log-probabilities of one model in float64 by two orders of summation: some hundred roundings of 1e-16 of numbers
# near 5.
CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def model() -> Transformer:
    return tiny_model(vocab_size=VOCAB, max_seq_len=MAX_SEQ_LEN)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


RAGGED = random_prompts(1, 9, 4, 30)
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def scripted(*scripts: Sequence[int], **changes: Any) -> Scripted:
    return Scripted(scripts, **changes)


def at_rest(model: Scripted | Transformer) -> bool:
    """Return True if a model is in the state before its first generation, with the cache on."""
    return model.kv_caching and (isinstance(model, Scripted) or model.cache is None)


# ---- what each step is fed -------------------------------------------------------------------------------------------


def test_with_the_cache_each_step_is_fed_one_token_a_row_at_its_own_position() -> None:
    model = scripted([10, 11, 12], [20, 21, 22])
    model.generate_tokens([[1, 2, 3], [4]], 3, **GREEDY)
    assert model.calls == [
        Call([[1, 2, 3], [4]], [0, 0], "last"),
        Call([[10], [20]], [3, 1], "last"),
        Call([[11], [21]], [4, 2], "last"),
    ]


def test_without_the_cache_each_step_is_fed_the_growing_prefix_from_0() -> None:
    model = scripted([10, 11, 12], [20, 21, 22])
    model.generate_tokens([[1, 2, 3], [4]], 3, kv_caching=False, **GREEDY)
    assert model.calls == [
        Call([[1, 2, 3], [4]], [0, 0], "last"),
        Call([[1, 2, 3, 10], [4, 20]], [0, 0], "last"),
        Call([[1, 2, 3, 10, 11], [4, 20, 21]], [0, 0], "last"),
    ]


@pytest.mark.parametrize("kv_caching", [True, False])
def test_on_step_is_called_before_each_step_with_its_rows_inputs_and_cache(kv_caching: bool) -> None:
    model, prompts = scripted([10, 99], [20, 21, 22], [30, 31]), [[1, 2, 3], [4], [5, 6]]
    steps: list[Step] = []

    def look(step: Step) -> None:
        assert len(model.calls) == len(steps)  # before the model is
        steps.append(step)

    options = {**GREEDY, "kv_caching": kv_caching, "stop_ids": [99]}
    model.generate_tokens(prompts, [3, 3, 2], on_step=look, **options)
    assert [(step.prev_pos, step.ids) for step in steps] == [(call.start_pos, call.fed) for call in model.calls]
    assert [step.cur_pos for step in steps] == [[3, 1, 2], [4, 2, 3], [3]]
    assert [step.rows for step in steps] == [[0, 1, 2], [0, 1, 2], [1]]
    assert [[ids[-1] for ids in step.ids] for step in steps] == [[3, 4, 6], [10, 20, 30], [21]]
    assert len({id(step.cache) for step in steps}) == 1
    assert (steps[0].cache is None) == (not kv_caching)


def test_logits_of_all_prompt_positions_are_made_only_to_echo_their_probabilities() -> None:
    for options in ({}, {"echo": True}, {"logprobs": True}):
        model = scripted([10, 11])
        model.generate_tokens([[1, 2]], 2, **options)
        assert {call.logits for call in model.calls} == {"last"}
    model = scripted([10, 11])
    model.generate_tokens([[1, 2]], 2, echo=True, logprobs=True)
    assert [call.logits for call in model.calls] == ["all", "last"]


@pytest.mark.parametrize("kv_caching", [True, False])
def test_a_finished_row_leaves_the_batch_and_changes_nobody(kv_caching: bool) -> None:
    model = scripted([10, 11], [20, 21, 22, 23, 24, 25], [30, 99, 31, 32])
    prompts, room = [[1, 2, 3], [4, 5], [6, 7]], [2, 6, 3]
    ids, _ = model.generate_tokens(prompts, room, stop_ids=[99], kv_caching=kv_caching, **GREEDY)
    assert ids == [[10, 11], [20, 21, 22, 23, 24, 25], [30]]
    assert [len(call.fed) for call in model.calls] == [3, 3, 1, 1, 1, 1]


def test_the_place_of_a_row_that_has_ended_is_taken_by_the_last_row() -> None:
    model = Scripted([[7], [7], [7], [7], [7]])
    steps: list[list[int]] = []
    model.generate_tokens([[1]] * 5, [2, 1, 4, 2, 3], on_step=lambda step: steps.append(step.rows), temperature=0)
    assert steps == [[0, 1, 2, 3, 4], [0, 4, 2, 3], [2, 4], [2]]


def test_rows_in_step_stay_in_step_when_one_of_them_has_grown_enough() -> None:
    model = scripted([10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33])
    ids, _ = model.generate_tokens([[1, 2], [3, 4], [5, 6]], [4, 2, 4], **GREEDY)
    assert ids == [[10, 11, 12, 13], [20, 21], [30, 31, 32, 33]]
    assert [call.start_pos for call in model.calls] == [[0, 0, 0], [2, 2, 2], [3, 3], [4, 4]]


def test_the_cache_is_reserved_for_the_longest_row() -> None:
    model = scripted([10], [20])
    sizes: list[Any] = []
    model.generate_tokens([[1] * 9, [2]], [1, 5], on_step=lambda step: sizes.append(step.cache), **GREEDY)
    assert {size.reserved for size in sizes} == {(2, 10)}


# ---- where rows stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop_ids", "expected"),
    [
        ((), [[10, 11, 12, 13], [20, 10, 22, 12], [30, 30, 30, 30]]),
        ((12,), [[10, 11], [20, 10, 22], [30, 30, 30, 30]]),
        ((10,), [[], [20], [30, 30, 30, 30]]),
        ((13, 12, 22), [[10, 11], [20, 10], [30, 30, 30, 30]]),
        ([20, 30, 13], [[10, 11, 12], [], []]),
        ({10, 20, 30}, [[], [], []]),
        ((99, 500, 10**6), [[10, 11, 12, 13], [20, 10, 22, 12], [30, 30, 30, 30]]),
        ((12, 12), [[10, 11], [20, 10, 22], [30, 30, 30, 30]]),
    ],
)
@pytest.mark.parametrize("kv_caching", [True, False])
def test_each_row_ends_before_the_first_of_the_stop_ids(
    stop_ids: Sequence[int], expected: list[list[int]], kv_caching: bool
) -> None:
    model = scripted([10, 11, 12, 13], [20, 10, 22, 12], [30])
    ids, _ = model.generate_tokens([[1], [2, 2], [3, 3, 3]], 4, stop_ids=stop_ids, kv_caching=kv_caching, **GREEDY)
    assert ids == expected


@pytest.mark.parametrize("echo", [True, False])
def test_a_stop_id_inside_the_prompt_does_not_cut_it(echo: bool) -> None:
    model = scripted([10, 11, 99])
    ids, _ = model.generate_tokens([[1, 99, 2, 99]], 5, stop_ids=[99], echo=echo, **GREEDY)
    assert ids == [[1, 99, 2, 99] * echo + [10, 11]]


@pytest.mark.parametrize("pad", [0, 5, 511])
@pytest.mark.parametrize("kv_caching", [True, False])
def test_an_id_used_elsewhere_for_padding_is_an_ordinary_token(pad: int, kv_caching: bool) -> None:
    model = scripted([pad, 11, pad], [pad, pad, 22])
    prompts = [[pad, 1, pad], [pad, 2]]
    ids, _ = model.generate_tokens(prompts, 3, kv_caching=kv_caching, echo=True, **GREEDY)
    assert ids == [[pad, 1, pad, pad, 11, pad], [pad, 2, pad, pad, 22]]
    assert model.calls[0].fed == prompts
    assert [call.fed[0][-1] for call in model.calls] == [pad, pad, 11]


@few
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_every_row_grows_by_exactly_its_own_max_gen_len(
    rows: list[tuple[int, int]], kv_caching: bool, echo: bool
) -> None:
    model = scripted(*([100 + row] for row in range(len(rows))))
    prompts = [[row] * length for row, (length, _) in enumerate(rows)]
    room = [tokens for _, tokens in rows]
    ids, _ = model.generate_tokens(prompts, room, kv_caching=kv_caching, echo=echo, **GREEDY)
    assert ids == [prompt * echo + [100 + n] * room[n] for n, prompt in enumerate(prompts)]
    assert len(model.calls) == max(1, *room)
    assert at_rest(model)


# ---- logits that are not numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, {"temperature": 1, "top_p": 1}, {"repetition_penalty": 1.2}])
def test_logits_that_are_not_numbers_are_reported_with_step_and_row(options: Any) -> None:
    model = scripted([10, 11, 12], [20, 21, NAN])
    with pytest.raises(NonFiniteLogits, match="row 1 at step 2") as report:
        model.generate_tokens([[1, 1], [2]], 5, **options)
    assert (report.value.step, report.value.row) == (2, 1)
    for infinity in (torch.inf, -torch.inf):
        with pytest.raises(NonFiniteLogits):
            scripted([10], peak=infinity).generate_tokens([[1]], 2, **options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, {"repetition_penalty": 1.2, "seed": 0}])
def test_non_finite_logits_of_a_finished_row_are_ignored(options: Any) -> None:
    model = scripted([99, NAN], [20, 21, 22, 23], [30, NAN], peak=1e4)
    ids, _ = model.generate_tokens([[1], [2], [3]], [9, 4, 1], stop_ids=[99], **options)
    assert ids == [[], [20, 21, 22, 23], [30]]


def test_nothing_of_the_step_that_failed_is_yielded_for_the_row_or_the_rows_after_it() -> None:
    model = scripted([10, 11], [20, NAN], [30, 31])
    stream = model.stream(Bytes(), [[1], [2], [3]], 5, **GREEDY)
    with pytest.raises(NonFiniteLogits):
        list(stream)
    assert [result["ids"] for result in stream.results] == [[10, 11], [20], [30]]


# ---- the model is given back -----------------------------------------------------------------------------------------


class Bang(Exception):
    pass


def interrupt_at(step: int, error: BaseException) -> Callable[[Step], None]:
    """Return an on_step that raises at its call number `step`."""
    calls = iter(range(1000))

    def look(_: Step) -> None:
        if next(calls) == step:
            raise error

    return look


@pytest.mark.parametrize(
    ("step", "error", "kv_caching"), [(0, Bang(), True), (3, KeyboardInterrupt(), True), (3, Bang(), False)]
)
def test_a_model_is_as_before_after_an_error_and_generates_the_same(
    step: int, error: BaseException, kv_caching: bool, model: Transformer
) -> None:
    expected = model.generate_tokens(RAGGED, 5, kv_caching=kv_caching, logprobs=True, **SAMPLED)
    with pytest.raises(type(error)):
        model.generate_tokens(RAGGED, 5, kv_caching=kv_caching, on_step=interrupt_at(step, error), **SAMPLED)
    assert at_rest(model)
    assert model.generate_tokens(RAGGED, 5, kv_caching=kv_caching, logprobs=True, **SAMPLED) == expected
    assert at_rest(model)


@pytest.mark.parametrize(("closes", "pieces"), [(True, 1), (False, 1), (True, 0), (False, 5)])
def test_a_stream_that_is_closed_or_abandoned_gives_the_memory_of_its_cache_back(
    model: Transformer, closes: bool, pieces: int
) -> None:
    caches: list[weakref.ref[Cache]] = []

    def look(step: Step) -> None:
        caches.append(weakref.ref(step.cache))

    expected = model.generate_tokens(RAGGED, 2, **GREEDY)
    stream = model.stream(Bytes(), RAGGED, 9, on_step=look, **SAMPLED)
    for _ in range(pieces):
        next(stream)
    if closes:
        stream.close()
    del stream
    gc.collect()
    assert all(cache() is None for cache in caches)
    assert at_rest(model)
    assert model.generate_tokens(RAGGED, 2, **GREEDY) == expected


def test_a_stream_that_was_not_begun_has_not_touched_the_model(model: Transformer) -> None:
    waiting = model.stream(Bytes(), RAGGED, 3, kv_caching=False)
    assert at_rest(model)
    model.generate_tokens([[1]], 2)
    assert len(list(waiting)) > 0


def test_the_switch_holds_for_the_call_and_none_follows_the_model() -> None:
    for setting in (True, False):
        model = scripted([10, 11, 12], kv_caching=setting)
        for argument, cached in ((None, setting), (True, True), (False, False)):
            model.calls.clear()
            model.generate_tokens([[1, 2]], 3, kv_caching=argument)
            assert [len(call.fed[0]) for call in model.calls] == ([2, 1, 1] if cached else [2, 3, 4])
            assert model.kv_caching is setting


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("argument", [True, False])
def test_the_switch_is_undone_on_every_layer_after_a_call_and_after_an_error(
    model: Transformer, setting: bool, argument: bool
) -> None:
    model.kv_caching = setting
    model.generate_tokens([[1, 2]], 2, kv_caching=argument)
    with pytest.raises(Bang):
        model.generate_tokens([[1, 2]], 3, kv_caching=argument, on_step=interrupt_at(1, Bang()))
    assert {layer.attention.kv_caching for layer in model.layers} == {setting}


def test_no_memory_is_allocated_between_calls_or_without_the_cache(model: Transformer) -> None:
    held: list[int | None] = []

    def look(step: Step) -> None:
        held.append(None if step.cache is None else step.cache.nbytes)

    model.generate_tokens(RAGGED, 3, on_step=look, kv_caching=False)
    assert held == [None, None, None]
    held.clear()
    model.generate_tokens(RAGGED, 3, on_step=look)
    # 2 layers, keys and values, 4 rows of 33 positions, 2 heads of 8 numbers of 8 bytes
    assert held == [0, *[2 * 2 * 4 * 33 * 2 * 8 * 8] * 2]
    assert at_rest(model)


def test_generation_needs_no_gradients_and_leaves_their_mode_alone(model: Transformer) -> None:
    stream = model.stream(Bytes(), [[65]], 4)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    stream.close()


# ---- a real model ----------------------------------------------------------------------------------------------------


def numbers(logprobs: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([0.0 if x is None else x for x in logprobs], dtype=torch.float64)


def test_a_shorter_generation_is_the_beginning_of_a_longer_one(model: Transformer) -> None:
    choice: Any = {"seed": 3, "repetition_penalty": 1.3}
    longest, _ = model.generate_tokens(RAGGED, 15, **choice)
    ragged, _ = model.generate_tokens(RAGGED, [3, 0, 15, 8], **choice)
    assert ragged == [row[:n] for row, n in zip(longest, [3, 0, 15, 8], strict=True)]


def test_a_list_of_seeds_has_one_for_each_row_and_none_draws_new_ones(model: Transformer) -> None:
    prompts = [[1, 2]] * 3
    one, two, three = model.generate_tokens(prompts, 9, temperature=1, seed=[5, 5, 6])[0]
    assert one == two != three
    assert [three, one] == model.generate_tokens(prompts[:2], 9, temperature=1, seed=[6, 5])[0]
    assert model.generate_tokens(prompts, 9, temperature=1, seed=4)[0][1:] == [one, three]
    fresh = [row for _ in range(2) for row in model.generate_tokens(prompts, 9, temperature=1)[0]]
    assert len({tuple(row) for row in fresh}) == 6


@pytest.mark.parametrize(
    ("room", "echo", "kv_caching"),
    [
        *((1, False, True), (6, True, True), (6, False, False)),
        ([4, 0, 7, 1], True, False),
        pytest.param([MAX_SEQ_LEN - len(row) for row in RAGGED], False, True, marks=pytest.mark.slow),
    ],
)
def test_logprobs_are_those_of_teacher_forcing(
    room: int | list[int], echo: bool, kv_caching: bool, model: Transformer
) -> None:
    ids, logprobs = model.generate_tokens(RAGGED, room, echo=echo, logprobs=True, kv_caching=kv_caching, **SAMPLED)
    for prompt, new, scores in zip(RAGGED, ids, logprobs, strict=True):
        whole = new if echo else prompt + new
        assert len(scores) == len(new)
        if echo:
            assert scores[0] is None
            assert None not in scores[1:]
        expected = teacher_forced(model, whole)[0 if echo else len(prompt) - 1 :]
        torch.testing.assert_close(numbers(scores[1:] if echo else scores), expected, **CLOSE)


def teacher_forced(model: Transformer, ids: list[int]) -> torch.Tensor:
    """Return the log-probability of each id but the first under one full forward, (len(ids) - 1,)."""
    model.kv_caching = False
    with torch.no_grad():
        scores = model(torch.tensor([ids]))[0].log_softmax(-1)
    model.kv_caching = True
    return scores[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_logprobs_are_the_model_s_own_before_temperature_penalty_and_cuts(model: Transformer) -> None:
    ids, logprobs = model.generate_tokens(
        RAGGED[1:2], 8, logprobs=True, seed=0, temperature=3.0, top_k=3, repetition_penalty=2.0
    )
    expected = teacher_forced(model, RAGGED[1] + ids[0])[len(RAGGED[1]) - 1 :]
    torch.testing.assert_close(numbers(logprobs[0]), expected, **CLOSE)


def test_a_stop_id_has_neither_place_nor_logprob() -> None:
    model = scripted([10, 11, 99, 12], [99])
    ids, logprobs = model.generate_tokens([[1], [2]], 9, stop_ids=[99], logprobs=True, **GREEDY)
    assert ids == [[10, 11], []]
    sure = torch.zeros(512).index_fill(0, torch.tensor([10]), 10.0).log_softmax(-1)[10].item()
    assert logprobs == [[sure, sure], []]


def test_every_form_of_generation_makes_at_most_64_tokens_by_default() -> None:
    forms = (Transformer.generate_tokens, Transformer.generate, Transformer.stream, Transformer.generate_many)
    for form in (*forms, Session.generate, Session.stream, Texts.add, Writer.add):
        assert signature(form).parameters["max_gen_len"].default == 64, form


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(model: Scripted | Transformer, prompts: Any, max_gen_len: Any = 4, **options: Any) -> str:
    """Return the message with which a generation is refused, before the model runs."""
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  (its words are what the caller looks at)
        model.generate_tokens(prompts, max_gen_len, **options)
    assert at_rest(model)
    assert not isinstance(model, Scripted) or not model.calls
    return str(refusal.value)


ONE, TWO = [[1]], [[1], [2]]
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    ([], 4, {}, "no prompts were given"),
    ([[1], []], 4, {}, "prompt 1 has no tokens"),
    ([[1], [2, -1, 3]], 4, {}, "token id -1, but ids are whole numbers from 0 to 511"),
    ([[1], [2, 512]], 4, {}, "token id 512, but ids are whole numbers from 0 to 511"),
    ([1, 2], 4, {}, "lists of token ids"),
    ("ab", 4, {}, "lists of token ids"),
    ([[1], [2, 1.5]], 4, {}, "1.5"),
    *[(ONE, bad, {}, f"max_gen_len={bad!r} must be a whole number of at least 1") for bad in (0, -1, True, 1.5, None)],
    *[(TWO, bad, {}, "whole number of at least 0") for bad in ([1, -1], [1, True], [1, 1.5], [2, None])],
    (TWO, [3], {}, "1 lengths were given for 2 prompts"),
    (ONE, 4, {"seed": [1, 2]}, "2 seeds were given for 1 rows"),
    *[(ONE, 4, {"seed": bad}, f"seed={bad!r} must be a whole number") for bad in (True, 1.5, "x")],
    (ONE, 4, {"seed": [True]}, "seed=True must be a whole number"),
    (ONE, 4, {"top_p": 2}, "top_p=2"),
    (ONE, 4, {"temperature": -1}, "temperature=-1"),
    (ONE, 4, {"stop_ids": 5}, "stop_ids must be lists of token ids"),
    (ONE, 4, {"logprobs": "no"}, "logprobs='no' must be True or False"),
    (ONE, 4, {"device": "gpu"}, "device='gpu' is not known"),
    *[(ONE, 4, {"kv_caching": switch}, f"kv_caching={switch!r} must be True or False") for switch in ("False", 2)],
]


def test_what_cannot_be_generated_is_refused_before_the_model_runs() -> None:
    said = [(refused(scripted([1], [2]), prompts, n, **options), words) for prompts, n, options, words in REFUSED]
    assert [(found, words) for found, words in said if words not in found] == []
    why = "a prompt is a str or a list of token ids, not"
    generate: Any = tiny_model().requires_grad_(False).generate
    assert unrefused((partial(generate, Ids(), prompts, 2), why) for prompts in ([1, 2], None, [None], 3)) == []


def test_numbers_of_numpy_are_whole_numbers() -> None:
    three: Any = numpy.int64(3)
    options = {"temperature": 0.5, "top_k": 3, "seed": 3}
    for max_gen_len in (three, [three]):
        made = scripted([1, 2, 3]).generate_tokens([[1]], max_gen_len, **{**options, "top_k": three, "seed": three})
        assert made == scripted([1, 2, 3]).generate_tokens([[1]], 3, **options)  # type: ignore[arg-type]


def test_the_last_id_of_the_vocabulary_is_taken() -> None:
    assert scripted([511]).generate_tokens([[0, 511]], 1, **GREEDY)[0] == [[511]]


def test_prompt_and_max_gen_len_may_fill_max_seq_len_and_not_pass_it(model: Transformer) -> None:
    for length, room in ((MAX_SEQ_LEN - 1, 1), (60, 4), (1, MAX_SEQ_LEN - 1)):
        prompts = random_prompts(3, length)
        ids, _ = model.generate_tokens(prompts, [1, room], **GREEDY)
        assert len(ids[1]) == room
        words = refused(model, prompts, [1, room + 1])
        for part in (f"prompt 1 has {length} tokens", f"max_gen_len={room + 1}", f"max_seq_len={MAX_SEQ_LEN}"):
            assert part in words
    ids, _ = model.generate_tokens(random_prompts(MAX_SEQ_LEN), [0], echo=True)
    assert ids == random_prompts(MAX_SEQ_LEN)
    assert f"max_seq_len={MAX_SEQ_LEN}" in refused(model, random_prompts(MAX_SEQ_LEN), 1)
    assert "the prompt has 65 tokens" in refused(model, random_prompts(MAX_SEQ_LEN + 1), [0])


def test_a_device_where_the_model_is_not_is_refused_and_nothing_moves(model: Transformer) -> None:
    for device in ("cuda", "cuda:1", "meta", torch.device("mps")):
        words = refused(model, [[1]], device=device)
        assert "the model is on cpu" in words
        assert f"model.to('{device}')" in words
    for device in ("cpu", torch.device("cpu"), None):
        assert len(model.generate_tokens([[1]], 1, device=device)[0]) == 1
    assert model.device.type == "cpu"


def test_settings_are_refused_when_a_stream_is_asked_for_and_not_when_it_is_read() -> None:
    model: Any = scripted([1], [2])
    for bad in ({"seed": [1]}, {"temperature": -1}, {"stop": ""}):
        with pytest.raises(ValueError):  # noqa: PT011  (which one is the claim of other tests)
            model.stream(Bytes(), [[1], [2]], 3, **bad)


def test_an_unknown_option_is_refused_by_name() -> None:
    for unknown in ("prompts", "temprature"):
        with pytest.raises(TypeError, match=f"unknown option {unknown}"):
            scripted([1]).generate_tokens([[1]], 1, **{unknown: [[2]]})  # type: ignore[arg-type]


def test_stop_ids_for_a_text_are_refused_with_the_call_that_takes_them() -> None:
    for call in (scripted([1]).generate, scripted([1]).stream):
        with pytest.raises(TypeError, match=r"unknown option stop_ids; .*; generate_tokens also has stop_ids, and "):
            call(Bytes(), "a", 1, stop_ids=[2])  # type: ignore[call-arg]
