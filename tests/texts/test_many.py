"""llama/texts/many.py on real models: a text among others has the bits of the text alone."""

import logging
import runpy
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Bytes, Ids, Remembering
from native import ARGS, VOCAB, needs_a_compiler, twins
from refusals import unrefused
from tables import cases
from tiny import some_tokens, tiny_model

from llama.batch import NonFiniteLogits
from llama.kv_cache import Cache, KVCache, StaticCache
from llama.model import Transformer
from llama.speculation import EveryGuess
from llama.texts.many import Writer, steady
from llama.texts.scheduler import Text, Texts

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 30, "seed": 5},
    {"temperature": 0.8, "repetition_penalty": 1.3, "top_p": 0.9, "seed": 6},
]


def alone(model: Transformer, given: list[dict[str, Any]]) -> list[tuple[list[int], list[float | None]]]:
    made = []
    for one in given:
        ids, logprobs = model.generate_tokens([one["prompt"]], **{k: v for k, v in one.items() if k != "prompt"})
        assert logprobs is not None
        made.append((ids[0], logprobs[0]))
    return made


@needs_a_compiler
def test_a_text_for_whose_row_a_layer_has_no_memory_fails_alone_and_its_error_keeps_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model = twins("fp32", ARGS)
    given = [{"prompt": [row + 1] * 9, "max_gen_len": 9 + row, "logprobs": True, **WAYS[row % 3]} for row in range(4)]
    expected, allocate, join = alone(model, given), KVCache._allocate, Cache.join
    joining: list[Any] = []

    def joined(self: Cache, other: Cache, *of: int) -> None:
        joining.append(weakref.ref(other))
        join(self, other, *of)

    monkeypatch.setattr(Cache, "join", joined)
    for layer in range(ARGS.n_layers):
        texts, made, errors = Texts(model), [([], []) for _ in given], list[Exception]()

        def step(texts: Texts = texts, made: Any = made, errors: list[Exception] = errors) -> None:
            for event in texts.step():
                errors += [] if event.error is None else [event.error]
                if event.token is not None:
                    made[event.text.number][0].append(event.token.id)
                    made[event.text.number][1].append(event.token.logprob)

        def poor(self: KVCache, shape: Any, *of: Any, layer: int = layer) -> Any:
            if self.layer == layer and shape[0] > 2:
                raise MemoryError("no memory")
            return allocate(self, shape, *of)

        for one in given[:2]:
            texts.add(**one)
            step()
            step()
        texts.add(**given[2])
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "_allocate", poor)
            step()
        (error,) = errors
        assert joining[-1]() is None
        texts.add(**given[3])
        while not texts.idle:
            step()
        assert errors == [error]
        assert isinstance(error, MemoryError)
        assert [*made[:2], made[3]] == [*expected[:2], expected[3]]


# ---- a text among others is the text alone ---------------------------------------------------------------------------


def soaked(model: Transformer, *, tokens: int = 300, rows: int = 5, cache_bytes: int | None = None) -> Any:
    """Return what scripts/soak_texts.py has compared: texts that come, guess, leave and are cancelled, each alone."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "soak_texts.py"))
    script["soak"](model, done := script["Soak"](), tokens=tokens, rows=rows, seed=1, cache_bytes=cache_bytes)
    return done


@needs_a_compiler
@pytest.mark.parametrize(
    ("kind", "kv_cache"),
    cases(
        product(("fp32", "bf16", "int8", "int8 in bf16", "int4"), ("static", "paged")),
        *(("fp32", "static"), ("int8", "paged")),
    ),
)
def test_native_texts_have_the_bits_that_they_have_alone(kind: str, kv_cache: str) -> None:
    _, model = twins(kind, replace(ARGS, kv_cache=kv_cache))
    for rows, cache_bytes in ((5, None), (16, 300_000)):
        assert soaked(model, rows=rows, cache_bytes=cache_bytes).differing == []


@needs_a_compiler
@pytest.mark.parametrize(
    ("kv_cache", "native", "cuts"), [("static", True, 64), ("int8", True, 300), ("static", False, 256)]
)
def test_a_pause_cuts_prompts_beside_texts_that_run_and_only_where_no_bit_depends_on_the_cuts(
    kv_cache: str, native: bool, cuts: int
) -> None:
    plain, fast = twins("fp32", replace(ARGS, max_seq_len=400))
    model, ends = fast if native else plain, list[int]()
    texts, made = Texts(model, kv_cache=kv_cache, max_pause=1e-9), dict[Text, list[int]]()
    first, second = ([n % VOCAB for n in range(row, row + 300)] for row in (1, 2))
    expected = [model.generate_tokens([ids], 60, kv_cache=kv_cache, temperature=0)[0][0] for ids in (first, second)]
    for ids in (first, second):
        made[texts.add(ids, 60, temperature=0)] = []
        while texts.waiting or not (texts._running or texts.idle):
            for event in texts.step():
                made[event.text].append(event.token.id)
            ends += [] if texts._fed is None or not texts._running else [texts._fed.batch.prefix_len]
    while not texts.idle:
        for event in texts.step():
            made[event.text].append(event.token.id)
    assert (ends or [300])[0] == cuts
    assert list(made.values()) == expected


def test_a_pause_must_be_some_seconds() -> None:
    model = tiny_model()
    calls = [
        (partial(Texts, model, max_pause=pause), "max_pause") for pause in (0, -1.0, float("nan"), float("inf"), True)
    ]
    assert unrefused(calls) == []


@needs_a_compiler
def test_after_a_change_that_native_code_declines_prompts_are_cut_as_without_a_pause() -> None:
    _, model = twins("fp32", replace(ARGS, max_seq_len=400))
    texts, ends = Texts(steady(model), max_pause=1e-9), list[int]()
    texts.add([5] * 9, 300, temperature=0)
    texts.step()
    hook = model.layers[0].register_forward_hook(lambda *_: None)
    texts.add([n % VOCAB for n in range(300)], 3, temperature=0)
    while texts.waiting or texts._fed:
        texts.step()
        ends += [] if texts._fed is None else [texts._fed.batch.prefix_len]
    hook.remove()
    assert ends == [256]


@pytest.mark.slow
@needs_a_compiler
def test_the_soak_compares_every_text_and_finds_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = twins("fp32", ARGS)
    done = soaked(model, tokens=600, rows=4)
    assert done.tokens >= 600
    assert done.texts > done.cancelled > 0
    join = StaticCache.join
    monkeypatch.setattr(StaticCache, "join", lambda self, other, rows, length: join(self, other, rows, length - 1))
    assert soaked(model, tokens=100, rows=4).differing


@needs_a_compiler
def test_no_prompt_of_many_texts_is_left_to_the_plain_path_because_it_is_faster() -> None:
    """The bits of a prompt would then depend on its pieces."""
    _, model = twins("fp32", ARGS)
    assert model.runner is not None
    model.runner.plain_prompts = True  # type: ignore[misc]
    prompts = some_tokens(3, 50, vocab_size=VOCAB).tolist()
    made = dict(model.generate_many(Ids(), prompts, 9, temperature=0, logprobs=True))
    model.runner.plain_prompts = False  # type: ignore[misc]
    given = [{"prompt": prompt, "max_gen_len": 9, "temperature": 0.0, "logprobs": True} for prompt in prompts]
    assert [(made[row]["ids"], made[row]["logprobs"]) for row in range(3)] == alone(model, given)


LIMITED = ["static", "concat", "paged", "paged:24", "paged@0;static"]


@pytest.mark.parametrize("kv_cache", cases(LIMITED, "static", "paged:24"))
def test_texts_wait_for_rows_and_memory_and_none_fails(kv_cache: str) -> None:
    """Some end at their first token, long ones stand beside short ones, and a pool or the model has its own limit."""
    model = tiny_model(replace(ARGS, max_batch_size=3 if kv_cache == "static" else None)).requires_grad_(False)
    sizes = [(100, 1), (100, 1), (100, 28), (2, 20), (2, 20), (2, 20), (2, 20)]
    given = [{"prompt": [5] * prompt, "max_gen_len": n} for prompt, n in sizes]
    position = model.new_cache("static").position_bytes(8)
    texts = Texts(model, rows=8, kv_cache=kv_cache, cache_bytes=None if kv_cache == "paged:24" else 600 * position)
    added = [texts.add(**one, temperature=0) for one in given]
    finish = {}
    while not texts.idle:
        for event in texts.step():
            assert event.error is None
            finish[event.text] = event.finish
        assert texts.nbytes <= (texts._caches.most_bytes or 0)
    assert finish == dict.fromkeys(added, "length")


def test_long_prompts_beside_a_long_answer_take_the_bytes_that_are_predicted_where_parts_are_kept() -> None:
    """Each row then has memory for its own part of a prompt, and for as many new tokens as the longest answer."""
    model = tiny_model(replace(ARGS, n_layers=1, max_seq_len=160)).requires_grad_(False)
    texts = Texts(model, rows=9, kv_cache="snapkv:0.9")
    texts.add([1], 75, temperature=0)
    for _ in range(70):
        texts.step()
    for _ in range(8):
        texts.add([2] * 150, 9, temperature=0)
    used = predicted = 0
    while not texts.idle:
        texts.step()
        used, predicted = max(used, texts.nbytes), max(predicted, texts.predicted_bytes)
    assert 0.8 * predicted < used <= predicted


def test_a_text_that_ends_with_its_first_token_or_while_it_is_fed_leaves_no_memory() -> None:
    model = tiny_model(ARGS).requires_grad_(False)
    for max_gen_len, cancelled in ((1, False), (9, True)):
        texts = Texts(model, kv_cache="paged", piece=64)
        text = texts.add([1] * 100, max_gen_len, temperature=0)
        texts.step()
        assert not texts._caches.root.empty
        texts.cancel(text) if cancelled else texts.step()
        assert texts.idle
        assert texts._caches.root.empty


@needs_a_compiler
def test_a_change_of_the_model_between_two_steps_counts_in_the_next_one() -> None:
    _, model = twins("fp32", ARGS)
    texts, text = Texts(steady(model), rows=2), [1, 2, 3]
    texts.add(text, 9, temperature=0)
    for change in (False, False, True, False):
        if change:
            model.output.weight = torch.nn.Parameter(model.output.weight.roll(1, 0), requires_grad=False)
        expected = model.generate_tokens([text], 1, temperature=0)[0][0]
        text = [*text, *(event.token.id for event in texts.step() if event.token is not None)]
        assert text[-1:] == expected


@needs_a_compiler
def test_a_change_of_the_model_by_the_end_of_the_prompts_counts_in_the_next_step() -> None:
    _, model = twins("fp32", ARGS)
    weights = [torch.nn.Parameter(model.output.weight.roll(by, 0), requires_grad=False) for by in (0, 1)]

    def prompts() -> Iterator[list[int]]:
        yield [1, 2, 3]
        yield [4, 5]  # after the first step
        model.output.weight = weights[1]  # after the second one

    made = dict(model.generate_many(Ids(), prompts(), 4, rows=2, temperature=0))
    text = [1, 2, 3]
    for id, weight in zip(made[0]["ids"], [*weights[:1] * 2, *weights[1:] * 2], strict=True):
        model.output.weight = weight
        assert model.generate_tokens([text], 1, temperature=0)[0][0] == [id]
        text.append(id)


@needs_a_compiler
@pytest.mark.parametrize("kv_cache", ["static", "paged"])
def test_a_text_begins_with_no_keys_that_were_computed_before_the_weights_were_edited_in_place(kv_cache: str) -> None:
    model, common = twins("fp32", ARGS)[1], some_tokens(1, 60, vocab_size=VOCAB)[0].tolist()
    texts, made = Texts(steady(model), rows=3, kv_cache=kv_cache, cache_bytes=10**8), dict[Text, list[int]]()

    def run(last: int, length: int) -> Text:
        text = texts.add([*common, last], length, temperature=0)
        made[text] = []
        return text

    def steps(until: Text) -> None:
        while until.number in texts._texts:
            for event in texts.step():
                made[event.text] += [] if event.token is None else [event.token.id]

    ended, running = run(1, 3), run(2, 40)
    steps(ended)
    with torch.no_grad():
        model.layers[0].attention.wk.weight.mul_(1.7)
    beside, later = run(3, 4), run(4, 4)
    steps(beside)
    steps(later)
    steps(running)
    last = run(5, 4)
    steps(last)
    for text in (beside, later, last):
        assert made[text] == model.generate_tokens([[*common, text.number + 1]], 4, temperature=0)[0][0]
    assert [text.reused for text in (running, beside, later, last)] == [60, 0, 60, 60]


# ---- generate_many ---------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2], [3], [4, 5, 6], [1, 2, 6], [2, 2]]
OPTIONS: dict[str, Any] = {"temperature": 1.0, "logprobs": True}


def test_every_prompt_has_the_completion_of_generate_with_the_seed_of_its_number() -> None:
    model, tokenizer = Remembering(), Ids()
    expected = model.generate(tokenizer, PROMPTS, 9, seed=3, stop="4 2", **OPTIONS)
    made = model.generate_many(tokenizer, iter(PROMPTS), 9, seed=3, stop="4 2", rows=2, **OPTIONS)
    assert dict(made) == dict(enumerate(expected))


def test_a_text_is_one_prompt_as_in_generate() -> None:
    model = tiny_model(vocab_size=257)
    expected = model.generate(Bytes(), "abc", 3, temperature=0)
    assert [made for _, made in model.generate_many(Bytes(), "abc", 3, temperature=0)] == expected


def test_guesses_change_no_completion_and_are_counted() -> None:
    model, loop = Remembering(max_seq_len=200, repeats=True), [1, 2, 3] * 9
    expected = [model.generate_tokens([[*loop, id]], 80, temperature=0)[0][0] for id in range(5)]
    writer = Writer(model, Ids(), rows=3, speculate="lookup")
    texts = [writer.add([*loop, id], 80, temperature=0) for id in range(5)]
    while not writer.texts.idle:
        list(writer.step())
    assert [one.read.completion["ids"] for one in texts] == expected
    proposed, accepted = (sum(counts) for counts in zip(*(one.guesses for one in texts), strict=True))
    assert proposed >= accepted > 0


def test_a_stop_string_among_several_tokens_of_a_step_ends_the_text_there() -> None:
    model, loop = Remembering(max_seq_len=200, repeats=True), [1, 2, 3] * 9
    expected, behind = model.generate(Ids(), [loop], 80, temperature=0)[0]["ids"], False
    for at in range(20, 32):
        stop = " ".join(map(str, expected[:at]))
        writer = Writer(model, Ids())
        text = writer.add(loop, 80, stop, temperature=0, speculate=EveryGuess("lookup"))
        while not writer.texts.idle:
            list(writer.step())
        assert text.row is not None
        behind = behind or text.prompt_len + at < len(text.row.ids)
        assert (text.read.completion["ids"], text.read.completion["finish_reason"]) == (expected[:at], "stop")
    assert behind, "no step had tokens behind the stop string"


def test_completions_come_as_they_end_or_in_order() -> None:
    model, lengths = Remembering(), [9, 1, 5]
    writer = Writer(model, Ids(), rows=3)
    added = [writer.add(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=False)]
    ended = []
    while not writer.texts.idle:
        ended += [added.index(text) for text, _ in writer.step() if text.ended is not None]
    assert ended == [1, 2, 0]
    made = model.generate_many(Ids(), PROMPTS, 4, rows=3, ordered=True, stop="5")
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]


def test_a_prompt_is_taken_only_when_a_row_is_free() -> None:
    taken: list[int] = []
    endless = ([taken.append(number) or 1] for number in count())  # type: ignore[func-returns-value]
    made = Remembering().generate_many(Ids(), endless, 5, rows=2)
    assert [number for number, _ in islice(made, 4)] == [0, 1, 2, 3]
    assert len(taken) <= 6


def test_pieces_and_times_of_a_text_and_the_tokens_that_were_not_fed() -> None:
    writer = Writer(Remembering(vocab_size=120), Bytes(adds_bos=False), rows=2)
    prompt = list(range(50))
    first, pieces = writer.add(prompt, 14), [""]
    while first.began is None:
        pieces += [piece for _, piece in writer.step()]
    second = writer.add([*prompt, 7], 3, logprobs=True)
    while not writer.texts.idle:
        pieces += [piece for text, piece in writer.step() if text is first]
    assert "".join(pieces) == first.read.completion["generation"]
    assert (first.reused, second.reused, second.prompt_len, first.guesses) == (0, 50, 51, (0, 0))
    assert second.ended is not None
    assert second.began is not None
    assert second.added <= second.began <= second.ended
    assert len(second.read.completion["logprobs"]) == 3


def test_a_cancelled_text_keeps_what_it_has_and_the_others_go_on() -> None:
    model = Remembering()
    writer = Writer(model, Ids(), rows=2)
    first, second = (writer.add([id], 9, temperature=0) for id in (1, 2))
    list(writer.step())
    writer.cancel(first)
    assert writer.texts.running == 1
    while not writer.texts.idle:
        assert [text for text, _ in writer.step()] == [second]
    alone = model.generate_tokens([[1], [2]], 9, temperature=0)[0]
    assert (first.read.completion["ids"], second.read.completion["ids"]) == (alone[0][:1], alone[1])


def test_a_text_whose_logits_are_not_numbers_fails_alone() -> None:
    model = Remembering()
    writer = Writer(model, Ids(), rows=3)
    first, second = (writer.add([id], 9, temperature=0) for id in (1, 2))
    for _ in range(2):
        list(writer.step())
    model.nan = True
    while not writer.texts.idle:
        list(writer.step())
    assert (first.error, first.read.completion["ids"]) == (None, model.generate_tokens([[1]], 9, temperature=0)[0][0])
    assert "not finite" in str(second.error)
    assert second.read.completion["finish_reason"] is None


def test_what_cannot_be_generated_is_refused_with_the_number_of_the_prompt() -> None:
    model, uncached = Remembering(), Remembering()
    uncached.kv_caching = False
    many = partial(model.generate_many, Ids())

    def drain(made: Iterator[Any]) -> None:
        list(made)

    assert (
        unrefused(
            [
                (lambda: drain(many([[1], []], 9)), "prompt 1: .* no tokens"),
                (lambda: drain(many([[1], [1] * 99], 9)), "prompt 1: .*max_seq_len=64"),
                (lambda: drain(many([[1]], 9, echo=True)), "echo concerns a batch.*model.generate"),
                (lambda: drain(many([[1]], 9, stop=["x", ""])), r"prompt 0: stop=\['x', ''\] must be texts"),
                (lambda: drain(many([[1]], 9, stop=5)), "prompt 0: stop=5 must be texts"),
                (lambda: many([[1]], seed=[1]), r"seed=\[1\] must be a whole number"),
                (lambda: many([[1]], rows=0), "rows=0 must be a whole number of at least 1"),
                (
                    lambda: drain(many([[1] * 9], 4, cache_bytes=10)),
                    "prompt 0: .* needs 13 bytes of cache, and there are 10",
                ),
                (lambda: Texts(Remembering()).add([1], 2, seed=2**64), f"seed={2**64} must be a whole number"),
                (lambda: Texts(Remembering(), rows=0), "rows=0 and piece=256 must be whole numbers of at least 1"),
                (lambda: Texts(Remembering(), piece=0), "piece=0 must be"),
                (lambda: uncached.generate_many(Ids(), [[1]]), "KV cache, which is off; set model.kv_caching = True"),
            ]
        )
        == []
    )


def test_guesses_with_a_lossy_cache_are_an_error_of_the_call_and_of_no_prompt() -> None:
    with pytest.raises(ValueError, match="speculation needs a lossless cache, and kv_cache='int8'"):
        Writer(tiny_model(ARGS), Ids(), kv_cache="int8", speculate="lookup")


class FixedRows:
    """A runner whose batches no row can join."""

    name, plain_prompts = "recorded", False

    def steady(self) -> None: ...
    def stepper(self, *_: Any) -> None: ...


def test_where_rows_cannot_join_prompts_are_taken_in_chunks_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Remembering()
    expected = dict(model.generate_many(Ids(), PROMPTS, 6, seed=1))
    model.runner = FixedRows()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        assert dict(model.generate_many(Ids(), PROMPTS, 6, seed=torch.tensor(1), rows=2, cache_bytes=1)) == expected
    assert "cannot join a batch whose steps are recorded: prompts are taken in chunks of 2" in caplog.text
    assert "cache_bytes has no effect" in caplog.text
    with pytest.raises(ValueError, match=r"^prompt 3: the prompt has no tokens"):
        list(model.generate_many(Ids(), [*PROMPTS[:3], []], 6, rows=2))
    made = model.generate_many(Ids(), PROMPTS, 6, rows=2)
    list(islice(made, 2))
    model.nan = True
    with pytest.raises(NonFiniteLogits, match="logits of row 3 at step 0"):
        list(made)
    with pytest.raises(ValueError, match="cannot join a batch"):
        Writer(model, Ids())
