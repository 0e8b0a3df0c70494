"""What is guessed, how much of it is fed, and what a guess may not do. `test_paths` tests that it changes no text."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from fakes import Ids, Remembering
from hypothesis import given, settings
from hypothesis import strategies as st
from native import ARGS, VOCAB, needs_a_compiler, served, twins
from paths import Noisy, guessed
from refusals import unrefused
from tiny import tiny_model

from llama.batch import NonFiniteLogits
from llama.fast.graph_runner import GraphRunner
from llama.request import Options, Step
from llama.speculation import MOST, Guesser, Lookup, Width, accepted
from llama.texts.scheduler import Text, Texts
from llama.verify.measured_run import measure_run
from llama.verify.passes import reference_of

PROMPTS = [[5, 9, 2, 44, 5, 9], [7] * 21, [3, 3, 8, 1, 60, 12, 30], [50, 51, 52] * 5]
LENGTHS = [20, 9, 33, 40]


def noisy(prompts: Sequence[list[int]], made: Sequence[list[int]]) -> Callable[[], Noisy]:
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, made, strict=True)]
    seeds = iter(range(1000))
    return lambda: Noisy(texts, next(seeds))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed every guess, whatever it costs."""
    monkeypatch.setattr(Width, "cut", lambda self, guesses, chances: guesses)


# ---- what is guessed -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), pieces=st.integers(1, 5), count=st.integers(1, 9))
def test_lookup_proposes_what_followed_the_last_occurrence_of_the_longest_n_gram(
    ids: list[int], pieces: int, count: int
) -> None:
    lookup = Lookup()
    for end in [*range(pieces, len(ids), pieces), len(ids)]:
        text = ids[:end]
        made = lookup.propose(text, count)
    ends = [
        end for n in (3, 2) for end in range(len(ids) - 1, n - 1, -1) if n < len(ids) and ids[end - n : end] == ids[-n:]
    ]
    wanted = list(ids)
    for place in range(ends[0], ends[0] + count) if ends else ():
        wanted.append(wanted[place])
    assert made == wanted[len(ids) :]


@pytest.mark.parametrize(("chosen", "right"), [([1, 2, 3, 4], 3), ([1, 2, 4, 4], 2), ([9, 2, 3, 4], 0), ([1, -1], 1)])
def test_a_guess_is_accepted_up_to_its_first_wrong_token(chosen: list[int], right: int) -> None:
    assert accepted([1, 2, 3], chosen) == right


class Fixed:
    """Proposes the same tokens again and again."""

    def __init__(self, guess: Sequence[int]) -> None:
        self.guess = guess

    def propose(self, ids: Sequence[int], count: int) -> Sequence[int]:
        return self.guess


@pytest.mark.parametrize(
    ("came", "least", "most"), [([7, 8, 9], 0.99, 1.0), ([1, 8, 9], 0.0, 0.01), ([7, 1, 9], 0.4, 0.6)]
)
def test_the_chance_of_a_row_is_its_share_of_right_tokens_up_to_the_first_wrong_one(
    came: list[int], least: float, most: float
) -> None:
    guesser, ids = Guesser(lambda: Fixed([7, 8, 9]), VOCAB), [5]  # type: ignore[arg-type,return-value]
    for _ in range(40):
        assert guesser.guess(ids, 3) == [7, 8, 9]
        ids = [*ids, *came]
    assert least <= guesser.chance <= most


def test_a_guess_is_cut_at_the_limit_and_before_an_unknown_id_and_is_empty_if_the_proposer_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def guessed(proposed: Any, count: int) -> list[int]:
        return Guesser(lambda: Fixed(proposed), VOCAB).guess([1, 2], count)  # type: ignore[arg-type,return-value]

    assert [guessed([0, 3, 4], count) for count in (0, 1, 2, 9)] == [[], [0], [0, 3], [0, 3, 4]]
    assert guessed([5, VOCAB - 1, VOCAB, 5], 9) == [5, VOCAB - 1]
    assert guessed([5, -1, 5], 9) == [5]
    assert len(guessed([5] * 40, 40)) == MOST
    assert guessed(None, 9) == []
    assert "a proposer of guesses failed: TypeError" in caplog.text


def fed_by(seconds: Callable[[int], float], *, chance: float, rows: int = 1, calls: int = 400) -> list[int]:
    """Return the tokens of each call when a call of n tokens takes `seconds(n)`."""
    width, fed = Width(), []
    for _ in range(calls):
        guesses = width.cut([[0] * MOST] * rows, [chance] * rows)
        fed.append(rows + sum(map(len, guesses)))
        width.took(fed[-1], seconds(fed[-1]))
    return fed


def test_only_guesses_that_make_more_tokens_a_second_are_fed() -> None:
    assert fed_by(lambda n: 1.0, chance=0.9)[-10:] == [16] * 10  # memory rules
    assert fed_by(lambda n: float(n), chance=0.9).count(1) > 380  # arithmetic rules: a guess never pays
    assert fed_by(lambda n: -(-n // 4) * 1.0, chance=0.7)[-10:] == [4] * 10  # four tokens cost what one does
    assert fed_by(lambda n: 1.0 if n <= 8 else 9.0, chance=0.95)[-10:] == [8] * 10
    assert fed_by(lambda n: 1 + n / 16, chance=0.01).count(1) > 380
    assert fed_by(lambda n: float(n), chance=0.9, rows=8).count(8) > 340


def test_only_the_rows_whose_guesses_are_likely_right_are_fed_one() -> None:
    width = Width()
    for tokens in range(2, 33):
        width.took(tokens, 1 + tokens / 16)
    assert [len(guess) for guess in width.cut([[0] * MOST] * 2, [0.01, 0.95])] == [0, MOST]


def test_a_call_that_other_work_made_slow_counts_little() -> None:
    calls = count()
    fed = fed_by(lambda n: 3.0 if next(calls) % 40 == 39 else 1.0, chance=0.9)
    assert fed[40:].count(16) > 350


def test_times_that_were_measured_under_load_are_measured_again() -> None:
    width = Width()
    for tokens, seconds in ((1, 1.0), (4, 9.0), (8, 9.0), (16, 9.0)):
        width.took(tokens, seconds)
    fed = []
    for _ in range(4000):
        fed.append(1 + len(width.cut([[0] * MOST], [0.9])[0]))
        width.took(fed[-1], 1.0)
    assert fed[:100] == [1] * 100
    assert fed[-1] == 16


# ---- no text changes -------------------------------------------------------------------------------------------------


@needs_a_compiler
@pytest.mark.usefixtures("always")
def test_a_truncated_copy_of_the_model_proposes() -> None:
    model = guessed("fp32").fast
    short = copy(model)
    short._modules = {**model._modules, "layers": model.layers[:1]}

    class Truncated:
        def propose(self, ids: Sequence[int], count: int) -> list[int]:
            guess, _ = short.generate_tokens([list(ids)], count, temperature=0.0, seed=0)
            return guess[0]

    plain = model.generate_tokens(PROMPTS[:2], 20, logprobs=True, seed=1)
    assert model.generate_tokens(PROMPTS[:2], 20, logprobs=True, seed=1, speculate=Truncated) == plain


# ---- calls, sessions and changes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always")
def test_a_guess_takes_the_place_of_steps_and_ends_before_the_text_does() -> None:
    model, steps = guessed("exact").fast, list[Step]()
    plain, _ = model.generate_tokens(PROMPTS[:2], [30, 50], temperature=0.0)
    how: Options = {"temperature": 0.0, "speculate": noisy(PROMPTS[:2], plain), "on_step": steps.append}
    assert model.generate_tokens(PROMPTS[:2], [30, 50], **how)[0] == plain
    assert len(steps) < 40
    texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, plain, strict=False)]
    used = [len(prompt) for prompt in PROMPTS[:2]]
    for step in steps[1:]:
        for row, begin, end, ids in zip(step.rows, step.prev_pos, step.cur_pos, step.ids, strict=True):
            assert begin >= used[row] - 1
            assert ids[0] == texts[row][begin], "a step begins with the newest token"
            assert begin < end <= min(begin + 1 + MOST, len(texts[row]) - 1), "the last token is never fed"
            used[row] = begin + 1


@pytest.mark.usefixtures("always")
def test_the_time_of_a_call_is_recorded_with_the_tokens_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    took, steps = list[int](), list[Step]()
    monkeypatch.setattr(Width, "took", lambda self, tokens, seconds: took.append(tokens))
    how: Options = {"temperature": 0.0, "speculate": "lookup", "on_step": steps.append}
    Remembering(max_seq_len=200, repeats=True).generate_tokens([[1, 2, 3] * 9, [1, 2, 3] * 8], 40, **how)
    assert took == [sum(map(len, step.ids)) for step in steps[1:]]
    assert max(took) > 2, "nothing was guessed"


@needs_a_compiler
@pytest.mark.usefixtures("always")
def test_native_code_computes_a_guess_in_one_forward_also_while_an_on_step_watches() -> None:
    model = guessed("int8").fast
    for on_step in (None, lambda step: None):
        how: Options = {"temperature": 0.0, "logprobs": True, "kv_cache": "paged", "on_step": on_step}
        before = served(model)
        plain = model.generate_tokens(PROMPTS, LENGTHS, **how)
        between = served(model)
        assert model.generate_tokens(PROMPTS, LENGTHS, speculate=noisy(PROMPTS, plain[0]), **how) == plain
        assert 0 < served(model) - between < (between - before) / 2


@needs_a_compiler
@pytest.mark.usefixtures("always")
def test_a_call_that_the_plain_path_would_run_verifies_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have other bits than the native steps. An `on_step` makes each step a call of the model."""
    model, fed = guessed("int8").fast, list[int]()
    how: Options = {"temperature": 0.0, "on_step": lambda step: fed.extend(map(len, step.ids))}
    plain = model.generate_tokens(PROMPTS[:1], 20, **how)
    for plain_prompts in (False, True):
        monkeypatch.setattr(model.runner, "plain_prompts", plain_prompts)
        fed.clear()
        made = model.generate_tokens(PROMPTS[:1], 20, speculate=noisy(PROMPTS[:1], plain[0]), **how)
        assert made == plain
        assert (max(fed[1:]) == 1) == plain_prompts


@needs_a_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("who", ["the reader", "the reader, beside an on_step", "an on_step"])
def test_a_text_that_the_plain_path_continues_has_no_guess_from_then_on(who: str) -> None:
    model, fed, steps = guessed("int8").fast, list[int](), list[Step]()
    guess = noisy(PROMPTS[:1], model.generate_tokens(PROMPTS[:1], 30, temperature=0.0)[0])

    def hook() -> None:
        model.layers[0].register_forward_hook(lambda _, inputs, __: fed.append(inputs[0].shape[1]))

    def on_step(step: Step) -> None:
        steps.append(step)
        if who == "an on_step" and len(steps) == 3:
            hook()

    how: Options = {"temperature": 0.0, "on_step": None if who == "the reader" else on_step}
    before, tokens = served(model), model.stream(Ids(), PROMPTS[:1], 30, speculate=guess, **how)
    made = [next(tokens) for _ in range(5)]
    assert served(model) - before < len(made), "nothing was guessed"
    if who != "an on_step":
        hook()
    made += tokens
    assert len(made) == 30
    assert set(fed) == {1}
    assert [len(step.ids[0]) for step in steps[-len(fed) :]] == [1] * len(fed) * bool(steps)


@needs_a_compiler
@pytest.mark.usefixtures("always")
def test_logits_that_are_not_finite_count_only_behind_tokens_that_are_used() -> None:
    model = twins("fp32", replace(ARGS, tied_head=False))[1]
    plain, _ = model.generate_tokens(PROMPTS[:1], 40, temperature=0.0)
    wrong = next(id for id in range(VOCAB) if id not in plain[0] + PROMPTS[0])
    fatal = sorted(set(plain[0]), key=plain[0].index)[9]

    def guesses() -> Noisy:
        return Noisy([[*PROMPTS[0], *plain[0]]], wrong=wrong)

    found: list[Any] = []
    for id, speculate in ((wrong, None), (wrong, guesses), (fatal, None), (fatal, guesses)):
        kept = model.tok_embeddings.weight[id].clone()
        model.tok_embeddings.weight[id] = torch.nan
        try:
            found.append(model.generate_tokens(PROMPTS[:1], 40, temperature=0.0, speculate=speculate)[0])
        except NonFiniteLogits as error:
            found.append((error.step, error.row))
        model.tok_embeddings.weight[id] = kept
    assert found == [plain, plain, found[2], found[2]]
    assert found[2] == (plain[0].index(fatal) + 1, 0)


def test_what_cannot_be_speculated_is_refused_by_name() -> None:
    model = tiny_model().requires_grad_(False)

    def made(speculate: Any, **how: Any) -> Callable[[], object]:
        return lambda: model.generate_tokens([[1, 2]], 3, speculate=speculate, **how)

    lossy = model.session(Ids(), kv_cache="int8")  # type: ignore[arg-type]
    lossy.feed([1, 2, 3])
    said = unrefused(
        [
            *((made(speculate), "must be .lookup., .lookup:N.") for speculate in ("look", "lookup:0", "lookup:16", 3)),
            (made("lookup", kv_caching=False), "needs the KV cache, which is off"),
            (made("lookup", kv_cache="int8"), "kv_cache='int8' drops or rounds .* choose static, concat or paged"),
            (made("lookup", kv_cache="static@0;window:9"), "speculation needs a lossless cache"),
            (made("lookup", prefix=lossy), "speculation needs a lossless cache"),
            (lambda: lossy.generate(3, speculate="lookup"), "speculation needs a lossless cache"),
        ]
    )
    assert not said


def test_the_steps_of_a_gpu_run_as_before_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    model.runner = GraphRunner()
    plain = model.generate_tokens([[1, 2, 1, 2]], 9, temperature=0.0)
    with caplog.at_level("INFO", "llama"):
        assert model.generate_tokens([[1, 2, 1, 2]], 9, temperature=0.0, speculate="lookup") == plain
    assert [record.message for record in caplog.records if "guessed" in record.message]


def test_guesses_that_change_a_text_are_a_violation_of_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = guessed("exact").fast, reference_of(guessed("exact").fast)
    figures = measure_run(model, reference, PROMPTS[:2], 12, seed=1)
    assert (figures.violations, figures.guessed_tokens) == ([], 24)
    one_too_many = lambda guess, chosen: min(len(guess), accepted(guess, chosen) + 1)  # noqa: E731
    monkeypatch.setattr("llama.generation.accepted", one_too_many)
    (violation,) = measure_run(model, reference, PROMPTS[:2], 12, seed=1).violations
    assert violation.startswith("free with guesses: ")


@needs_a_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kv_cache", ["static", "paged"])
def test_texts_that_join_and_leave_are_what_they_are_alone(kv_cache: str) -> None:
    model = guessed("int8").fast
    alone = [model.generate_tokens([ids], 9 + row, temperature=0.7, seed=row)[0][0] for row, ids in enumerate(PROMPTS)]
    texts, made = Texts(model, rows=3, kv_cache=kv_cache), dict[Text, list[int]]()
    for row, ids in enumerate(PROMPTS):
        propose = partial(Noisy, [[*ids, *alone[row]]], row)
        made[texts.add(ids, 9 + row, temperature=0.7, seed=row, speculate=propose if row else "lookup")] = []
        for _ in range(2):
            collect(texts, made)
    while texts.running or texts.waiting:
        collect(texts, made)
    assert list(made.values()) == alone
    with pytest.raises(ValueError, match="speculation needs a lossless cache"):
        Texts(model, kv_cache="int8").add([1, 2], 3, speculate="lookup")


def collect(texts: Texts, made: dict[Text, list[int]]) -> None:
    for event in texts.step():
        assert event.error is None
        made[event.text] += [] if event.token is None else [event.token.id]
