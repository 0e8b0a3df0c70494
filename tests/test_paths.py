"""One contract for all steppers: the tokens, the log-probabilities, the sessions and the errors of the plain steps.

The paths are in `support/paths.py`. The behaviour of a single path is tested in the files of that path.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import pytest
from changes import CHANGES, REFUSALS, outcome
from fakes import Ids
from generations import GREEDY, WAYS, any_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import VOCAB
from paths import FOLDER, PATHS, Looping, forwards_of
from tables import cases
from tiny import failing
from torch import nn

from llama.batch import NonFiniteLogits
from llama.model import Transformer
from llama.request import Options

PROMPTS = [[5, 9, 2, 44, 5, 9], [7] * 40, [3, 3, 8, 1, 60, 12, 30]]
CACHED = [name for name in PATHS if not name.startswith(("cached", "exact", "graphs, "))]  # both models have a cache
NATIVE = ("native static", "native rotated:k4v3+1", "native adakv:0.25")
DEFAULT = ("cached paged", "exact", *NATIVE, "guessed fp32", "guessed int8, paged", "graphs", "graphs, uncached")
ways = {(name, way) for name in DEFAULT for way in ("greedy", "sampled in every way")}
ways |= {(name, way) for name in ("native static", "guessed fp32") for way in WAYS}
ways -= {("graphs, uncached", "greedy")}


def rows(model: Transformer, how: Options, *, room: list[int]) -> Iterator[object]:
    """Some end apart, and leave the batch; one gets no token, and one the last position of the model."""
    prompts = [*PROMPTS, [1] * 151][: len(room)]
    yield model.generate_tokens(prompts, room, **how)


@pytest.mark.parametrize(("name", "way"), cases([(name, way) for name in PATHS for way in WAYS], *ways))
def test_the_tokens_and_log_probabilities_of_a_batch(name: str, way: str) -> None:
    path = PATHS[name]()
    for room in ([1], [2, 2], [9], [40, 9, 33], [5, 0, 1, 9]):
        before = forwards_of(path.plain), forwards_of(path.fast)
        seed = {"seed": [4, 5, 6, 7][: len(room)]} if "seed" in WAYS[way] else {}
        path.same(partial(rows, room=room), how={**WAYS[way], **seed})
        ran = forwards_of(path.fast) - before[1]
        if name.startswith("native"):
            assert ran == forwards_of(path.plain) - before[0] >= max(room) - 1
        elif name.startswith("graphs"):
            assert ran == max(room)
        elif path.guesses and path.fast.runner is not None and room == [40, 9, 33]:
            penalty = "repetition_penalty" in WAYS[way]  # then nothing is guessed
            assert 0 < ran <= (forwards_of(path.plain) - before[0]) / (1 if penalty else 2)


shared_path = cache(lambda name: PATHS[name]())


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_batch_with_any_lengths_and_any_stops(data: st.DataObject) -> None:
    path = shared_path(data.draw(st.sampled_from(["graphs", *(name for name in CACHED if "4" not in name)])))
    prompts, room, stops, how = data.draw(any_batch(VOCAB, most_stops=40))
    path.same(lambda model, how: iter([model.generate_tokens(prompts, room, stop_ids=stops, **how)]), how=how)


class Stopping(Ids):
    stop_tokens: tuple[int, ...] = ()


def conversation(model: Transformer, how: Options) -> Iterator[object]:
    """Yield what sessions give that are continued, forked, rewound and left early, and texts that begin with them."""
    tokenizer = Stopping()
    first, second = model.session(tokenizer), model.session(tokenizer)  # type: ignore[arg-type]
    first.feed([5, 6, 7] * 12)
    yield from (first.generate(25, **how), first)
    tokenizer.stop_tokens = (first.tokens[45],)
    first.rewind(36)
    yield from (first.generate(25, **how), first)  # ends before a stop token, with its logits
    yield from (first.fork().generate(3, **how), first)
    tokenizer.stop_tokens = ()
    for turn in ([1, 2], [5, 6, 7, 5]):  # in turn
        for session in (first, second):
            session.append(turn)
            yield from (session.generate(11, **how), session)
    with first.stream(20, **how) as stream:
        yield [next(stream) for _ in range(13)]
        fork = first.fork()  # of a text that grows
        yield fork
        for prefix in (None, first):  # other texts of the model in between
            yield model.generate_tokens([[1, 2]], 5, prefix=prefix, **how)
        yield [*stream]
    yield from (fork.generate(20, **how), fork)
    with second.stream(30, **how) as stream:
        yield [next(stream) for _ in range(5)]
    yield from (second.generate(40, **how), second)
    second.rewind(9)
    for prompts in ([[1, 2]], [[1, 2], [3]]):
        yield model.generate_tokens(prompts, 9, prefix=second, **how)
        yield model.generate_tokens(prompts, 9, prefix=first, share_prefix=model.kv_caching, **how)
    alike = [[4] * 35 + [n] for n in range(3)]
    shared = model.generate_tokens(alike, 20, share_prefix=model.kv_caching, **how)
    assert shared[0] == model.generate_tokens(alike, 20, **how)[0]
    yield shared
    yield from (second.generate(5, **how), second, first)


@pytest.mark.parametrize(
    ("name", "way"),
    cases(
        [(name, way) for name in PATHS for way in ("greedy", "sampled in every way")],
        *((name, "greedy") for name in DEFAULT if name != "exact" and not name.startswith("graphs")),
        *((name, "sampled in every way") for name in ("native rotated:k4v3+1", "guessed int8, paged", "graphs")),
    ),
)
def test_sessions_that_are_continued_forked_rewound_and_left(name: str, way: str) -> None:
    how: Options = {**WAYS[way], "echo": False}
    made = PATHS[name]().same(conversation, how={**how, "seed": 5} if way != "greedy" else how)
    assert made[2]["finish_reason"] == "stop"  # type: ignore[index]


@pytest.mark.parametrize("name", cases([name for name in PATHS if "8-bit" not in name], *DEFAULT))
def test_after_an_error_a_session_has_whole_tokens_and_continues_with_the_others(name: str) -> None:
    def program(model: Transformer, how: Options) -> Iterator[object]:
        session = model.session(Ids())  # type: ignore[arg-type]
        session.feed(PROMPTS[0])
        for error in (MemoryError, KeyboardInterrupt):
            before, whole = list(session.tokens), session.fork().generate(9, **how)["ids"]
            with failing(model.layers[1], error, after=2), suppress(error):
                session.generate(9, **how)
            with failing(model.layers[1], error), suppress(error):
                session.append([60])
            assert len(before) < session.position < len(before) + 9
            assert session.tokens == [*before, *whole][: session.position]
        session.generate(24 - session.position, **how)
        yield session.tokens

    PATHS[name]().same(program, how=GREEDY)


@pytest.mark.parametrize(
    ("name", "way"),
    cases(
        [(name, way) for name in PATHS if "guessed int" not in name and "8-bit" not in name for way in list(WAYS)[::3]],
        *((name, "greedy") for name in DEFAULT),
        ("native static", "sampled"),
    ),
)
def test_logits_that_are_not_finite_are_reported_at_their_step_and_row(name: str, way: str) -> None:
    """A row that has ended does not feed the token."""
    path, how = PATHS[name](), WAYS[way]
    ((texts, _),) = path.same(partial(rows, room=[30, 4, 30]), how=how)  # type: ignore[misc]
    fatal = next(id for id in texts[2][5:] if id not in {*texts[0][:30], *texts[1], *chain(*PROMPTS)})
    step = texts[2].index(fatal) + 1

    def program(model: Transformer, how: Options) -> Iterator[object]:
        model.tok_embeddings.weight[fatal] = float("nan")
        for room in ([30, 4, 30], [30, 4, step]):
            try:
                yield model.generate_tokens(PROMPTS, room, **how)[0]
            except NonFiniteLogits as error:
                yield error.step, error.row

    assert path.same(program, partial(rows, room=[30, 4, 30]), how=how)[0] == (step, 2)


# ---- between two tokens ----------------------------------------------------------------------------------------------


def replace_the_runner(model: Transformer) -> None:
    model.runner = None


def put_another_runner(model: Transformer) -> None:
    model.runner = Looping(FOLDER)
    model.norm.weight = nn.Parameter(model.norm.weight.flip(0), requires_grad=False)


def hook_the_model(model: Transformer) -> None:
    model.register_forward_hook(lambda _, __, logits: -logits)


def switch_off_each_layer(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.kv_caching = False


def choose_what_is_no_token(model: Transformer) -> None:
    head = model.output.weight
    model.output.weight = nn.Parameter(nn.functional.pad(head * 9, (0, 0, 2 * len(head), 0)), requires_grad=False)


def limit_the_length(model: Transformer) -> None:
    model.args = replace(model.args, max_seq_len=10)


def choose_another_kind(model: Transformer) -> None:
    model.kv_cache = "paged"


OURS = (replace_the_runner, put_another_runner, hook_the_model, switch_off_each_layer, choose_what_is_no_token)
BETWEEN = {change.__name__: change for change in (*OURS, limit_the_length, choose_another_kind)}
# One of each outcome: the same graphs, other graphs, the plain path, an error. tests/fast/test_changed_models.py has
# every change.
SOME = ("edit_in_place", "assign_a_parameter", "double", "take_a_layer", "hook_that_changes", "break_a_shape")
BETWEEN |= {name: CHANGES[name] for name in (*SOME, "replace_a_method_of_the_model")}
# Errors name the tokens of a call. In few bits, plain calls that verify guesses round differently from plain steps.
NOT_GUESSED = ("switch_off_each_layer", "break_a_shape")
CHANGED = [
    *(("graphs, uncached", change) for change in BETWEEN),
    *((name, change) for name in CACHED if not name.startswith("guessed") for change in BETWEEN),
    *((name, change) for name in ("guessed exact", "guessed fp32") for change in BETWEEN if change not in NOT_GUESSED),
]
WRITTEN = ("edit_in_place",)  # numbers of weights: too late for steps that a GPU was given


def changing(model: Transformer, how: Options, *, change: str | None, room: list[int], at: int) -> Iterator[object]:
    """Yield a stream in whose middle the model changes, and a text after it."""
    runner, before, rest = model.runner, forwards_of(model), list[object]()
    with model.stream(Ids(), PROMPTS[: len(room)], room, **how) as stream:  # type: ignore[arg-type]
        yield [next(stream) for _ in range(at)]
        with suppress(*REFUSALS):  # some changes raise
            BETWEEN[change](model) if change is not None else None
        try:
            rest += iter(stream)
        except REFUSALS as error:
            rest.append((type(error), str(error)))
    model.runner = runner
    yield rest
    yield forwards_of(model) - before
    yield outcome(lambda: model.generate_tokens(PROMPTS, 4, **how))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("name", "change"),
    cases(
        CHANGED,
        *(case for case in CHANGED if case[0] == "native static"),
        *(("graphs", change) for change in SOME[1::2]),
        ("graphs, uncached", "take_a_layer"),
        *(("guessed fp32", change) for change in (*SOME[:5:2], "limit_the_length")),
    ),
)
def test_a_change_between_two_tokens_takes_effect_at_the_next_one(name: str, change: str) -> None:
    """Also if later tokens were verified before; the other rows keep their keys, their draws and their tokens."""
    differ = {1} if name.startswith("graphs") and change in WRITTEN else set()
    differ |= set() if name.startswith("native") else {2}  # the forwards of native code

    def program(change: str | None, model: Transformer, how: Options, *, room: list[int], at: int) -> Iterator[object]:
        made = enumerate(changing(model, how, change=change, room=room, at=at))
        yield from (one for number, one in made if number not in differ)

    for room, at in (([14], 4), ([14], 5), ([3, 20, 9], 10)):
        path = PATHS[name]()
        if len(room) == 1 or not path.guesses:  # a guess decides which row has its tokens first
            both = (partial(program, one, room=room, at=at) for one in (change, None))
            path.same(*both, how={"temperature": 0.9, "seed": 3}, share=1.0)


@pytest.mark.parametrize("name", ["native static", "graphs"])
def test_on_step_hooks_and_watch_see_every_step(name: str) -> None:
    path, seen = PATHS[name](), list[list[Any]]()
    for model in (path.plain, path.fast):
        seen.append([])
        before = forwards_of(model)
        model.generate_tokens(PROMPTS, 6, on_step=lambda step: seen[-1].append(replace(step, cache=None)), **GREEDY)
        hook = model.register_forward_hook(lambda _, given, __: seen[-1].append(tuple(given[0].shape)))
        model.generate_tokens(PROMPTS, 6, **GREEDY)
        assert name != "graphs" or forwards_of(model) == before + (2 if model is path.fast else 0)  # the prompts
        hook.only_looks = True  # type: ignore[attr-defined]
        model.generate_tokens(PROMPTS, 6, **GREEDY)  # without a `watch`
        hook.remove()
    assert seen[0] == seen[1]
    assert seen[0][6:] == [(3, 40), *[(3, 1)] * 5] * 2
    watched = list[Any]()
    assert path.fast.runner is not None
    path.fast.runner.watch = watched.append
    path.fast.generate_tokens(PROMPTS, 6, on_step=lambda _: None, **GREEDY)
    assert watched == []
    path.fast.generate_tokens(PROMPTS, [12, 2, 12], kv_caching=False, **GREEDY)
    # A step is launched before the tokens of the one before are read, so the second row leaves late.
    grown = [[len(prompt) + step for prompt in (PROMPTS if step < 4 else PROMPTS[::2])] for step in range(1, 12)]
    assert watched == (grown if name == "graphs" else [])
    watched.clear()
    path.fast.generate_tokens(PROMPTS, [4, 2, 4], **GREEDY)
    assert watched == ([[1, 1, 1]] * 3 if name == "graphs" else [[1, 1, 1], [1, 1], [1, 1]])
