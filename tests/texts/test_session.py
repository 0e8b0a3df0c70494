"""A session feeds only what is not cached, continues as the whole text would, and does not affect other texts."""

import copy
import gc
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Bytes
from paths import Forgetful
from refusals import unrefused
from tables import cases
from tiny import FP64_TOLERANCE, tiny_args, tiny_model, watched

from llama.kv_cache import KVCache, PagedCache
from llama.model import Transformer
from llama.request import Options
from llama.texts.session import Session

GREEDY: Options = {"temperature": 0.0}
LOSSLESS = ("static", "concat", "paged")
KINDS = (*LOSSLESS, "int8", "int4", "window:20+3")


def kinds(*default: str, of: Sequence[str] = KINDS) -> Any:
    """Parametrize a test with kinds of cache; those that are not `default` are slow."""
    return pytest.mark.parametrize("kv_cache", cases(of, *default))


EVERY = (*KINDS, "rotated:k4v3+2", "kivi:2+16", "fp8", "quest:16", "adakv:0.3", "h2o:20", "tova", "snapkv:30", "random")
ARGS = tiny_args(vocab_size=258, head_dim=32, max_seq_len=160)
TEXT = "a text that is long enough to fill a group, and to leave a window of twenty"


assert Forgetful in KVCache.kinds.values()


def made(kv_cache: str = "static", *, text: str = "", **changes: Any) -> tuple[Transformer, Session]:
    """Return a model and a session of it that was fed `text`."""
    model = tiny_model(ARGS, **changes)
    session = model.session(Bytes(), kv_cache=kv_cache)
    if text:
        session.feed(text)
    return model, session


def ids(text: str) -> list[int]:
    return Bytes().encode(text, bos=True, eos=False)


def whole(model: Transformer, text: list[int], count: int) -> list[int]:
    """Return the continuation of a text without a cache."""
    return model.generate_tokens([text], count, kv_caching=False, stop_ids=Bytes().stop_tokens, **GREEDY)[0][0]


# ---- what is fed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KINDS)
def test_only_what_is_new_is_fed(kv_cache: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llama")
    model, session = made(kv_cache)
    with watched(model) as steps:
        first = session.feed(TEXT)
        assert first == len(session.tokens) == session.position == session.fed == len(ids(TEXT))
        assert session.feed(TEXT) == 0
        assert session.feed(TEXT + " more") == 5
        assert session.append(" and more") == 9
        assert session.fed == session.position == first + 14
        session.generate(3, **GREEDY)  # the newest one is fed with what follows it
    assert steps.widths == [first, 5, 9, 1, 1]
    assert session.tokens[:-3] == ids(TEXT + " more and more")
    assert session.fed == session.position - 1
    assert "differs from the one before" not in caplog.text


@pytest.mark.parametrize("kv_cache", [*KINDS, "forgetful"])
def test_a_text_that_was_edited_is_fed_from_where_it_differs(kv_cache: str, caplog: pytest.LogCaptureFixture) -> None:
    model, session = made(kv_cache, text=TEXT)
    caplog.set_level(logging.INFO, "llama")
    fed = session.feed(TEXT[:-3] + "!")
    assert "differs from the one before at token" in caplog.text
    again = session.position if "all is fed again" in caplog.text else 1
    assert fed == again
    assert ("forgetful" in kv_cache) <= (again > 1)
    expected = model.session(Bytes(), kv_cache=kv_cache)
    expected.feed(TEXT[:-3] + "!")
    assert session.tokens == expected.tokens
    if kv_cache in LOSSLESS:
        assert session.generate(9, **GREEDY) == expected.generate(9, **GREEDY)


@pytest.mark.parametrize(("kv_cache", "start"), {"int8": 96, "int4": 96, "static@0;int8": 96, "kivi:2+16": 0}.items())
def test_an_edit_in_a_rounded_group_feeds_from_its_beginning(
    kv_cache: str, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, session = made(kv_cache, text="a" * 150, n_layers=2)
    caplog.set_level(logging.INFO, "llama")
    with watched(model) as steps:
        for turn in ("b" * 40, "c" * 40):
            session.feed("a" * 110 + turn)
    assert steps.widths == [151 - start] * 2
    said = [message for message in caplog.messages if "cannot go back to position 111" in message]
    assert len(said) == 1, "once a session"
    expected = model.session(Bytes(), kv_cache=kv_cache)
    if start:
        expected.feed("a" * 150)
        expected.rewind(start)
    expected.feed("a" * 110 + "c" * 40)
    torch.testing.assert_close(session.logits, expected.logits, rtol=0, atol=1e-4)


def test_a_prompt_ends_where_a_text_is_fed_from_its_beginning_unless_the_caller_decides() -> None:
    """Kinds that drop keys compress there."""
    model, session = made()
    ends = list[bool]()
    model.register_forward_pre_hook(lambda _, given: ends.append(given[1].prompt_ends))
    session.feed("one")
    session.feed("two")  # from position 1: both begin with a BOS
    session.feed("three", prompt_ends=True)
    model.session(Bytes()).feed("four", prompt_ends=False)
    assert ends == [True, False, True, False]


def test_without_the_cache_everything_is_fed_each_time() -> None:
    model, session = made(text=TEXT)
    length, held = session.position, session.nbytes
    assert held > 0
    model.kv_caching = False
    assert session.feed(TEXT) == length
    assert session.nbytes == 0
    cached = made()[1]
    cached.feed(TEXT)
    assert session.generate(3, **GREEDY) == cached.generate(3, **GREEDY)
    assert session.fed == 2 * length + (length + 1) + (length + 2)  # the logits after `feed` give the first token
    model.kv_caching = True
    assert session.generate(3, **GREEDY) == cached.generate(3, **GREEDY)


def test_rows_that_begin_with_an_uncached_session_feed_its_text() -> None:
    model, session = made()
    model.kv_caching = False
    session.feed(TEXT)
    rows = [ids(" one"), ids(" and two")]
    made_of = model.generate_tokens(rows, 4, prefix=session, kv_caching=True, **GREEDY)[0]
    assert made_of == [whole(model, [*session.tokens, *row], 4) for row in rows]


def test_the_switch_may_be_set_for_one_call() -> None:
    model, session = made(text=TEXT)
    before = list(session.tokens)
    fed = session.fed
    assert session.generate(2, kv_caching=False, **GREEDY)["ids"] == whole(model, before, 2)
    assert model.kv_caching
    assert session.fed == fed + len(before) + len(before) + 1
    before = list(session.tokens)
    assert session.generate(2, **GREEDY)["ids"] == whole(model, before, 2)


# ---- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("kv_cache", LOSSLESS)
def test_the_logits_are_those_after_the_text(kv_cache: str, kv_caching: bool) -> None:
    model, session = made(kv_cache, kv_caching=kv_caching)

    def assert_known() -> None:
        with torch.inference_mode():
            wanted = model(torch.tensor([session.tokens]), logits="last")[0, -1]
        torch.testing.assert_close(session.logits, wanted, rtol=0, atol=FP64_TOLERANCE)

    session.feed(TEXT)
    assert_known()
    session.append(" and more")
    assert_known()
    branch = session.fork()
    branch.append("!")
    assert_known()  # the fork does not change it
    session.rewind(20)
    session.append([])
    assert_known()
    before = session.logits.argmax()
    session.logits.fill_(0)  # a copy
    assert session.generate(1, **GREEDY)["ids"] == [before]


def test_logits_that_are_not_known_are_none() -> None:
    model, session = made()
    assert session.logits is None
    session.feed(TEXT)
    assert session.logits.shape == (ARGS.vocab_size,)
    session.generate(3, **GREEDY)
    assert session.logits is None  # the newest token was not fed
    session.append([])
    assert session.logits is not None
    session.rewind(20)
    assert session.logits is None
    session.append([])
    model.exact = True  # they are different in exact mode
    assert session.logits is None
    session.append([])
    assert session.logits is not None
    session.drop()
    assert session.logits is None


# ---- forks -----------------------------------------------------------------------------------------------------------


def test_forks_of_a_paged_session_share_memory_until_they_write_and_give_it_back() -> None:
    session = made("paged", text=TEXT)[1]
    (cache, *_) = session.cache.layers
    assert isinstance(cache, PagedCache)
    blocks = len(cache.tables[0])
    branch = session.fork()
    other = branch.cache.layers[0]
    assert isinstance(other, PagedCache)
    assert other.tables == cache.tables
    branch.append("x" * 40)
    assert other.keys is cache.keys  # also after the pool grew
    assert len({*cache.tables[0]} & {*other.tables[0]}) == blocks - 1
    for duplicate in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        own = duplicate(cache)
        assert (own.keys is cache.keys, own.pool is cache.pool) == (False, False)
    del branch, other
    gc.collect()
    session.append("y")  # in the block that a deleted fork shared
    assert len(cache.pool.used()) == blocks
    session.fork().drop()
    session.append("z")
    assert len(cache.pool.used()) == blocks


# ---- rewinding -------------------------------------------------------------------------------------------------------


@kinds("paged", "int4", "h2o:20", "forgetful", of=(*EVERY, "forgetful"))
def test_rows_may_begin_with_a_session_that_was_rewound(kv_cache: str) -> None:
    """The cache is truncated, or fed again, and the session can still go on."""
    model, session = made(kv_cache, text=TEXT)
    for position in (70, 33):
        session.rewind(position)
        fed, fresh = session.fed, model.session(Bytes(), kv_cache=kv_cache)
        fresh.feed(session.tokens)
        rows = [ids(" one"), ids(" and two")]
        made_of = model.generate_tokens(rows, 4, prefix=session, **GREEDY)[0]
        assert list(map(len, made_of)) == [4, 4]
        if kv_cache in (*LOSSLESS, "forgetful"):
            assert made_of == [whole(model, [*session.tokens, *row], 4) for row in rows]
        elif session.fed - fed == position:  # all was fed again
            assert made_of == model.generate_tokens(rows, 4, prefix=fresh, **GREEDY)[0]
        session.append("!")
        session.rewind(position)


@pytest.mark.parametrize(("kv_cache", "all_again"), [("static", False), ("h2o:20", True)])
def test_after_a_call_that_did_not_end_a_text_is_fed_again_only_if_its_cache_cannot_go_back(
    kv_cache: str, all_again: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llama")
    model, session = made(kv_cache, text=TEXT)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers[-1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        session.append(" more")
    hook.remove()
    branch = session.fork()
    branch.save(tmp_path / "session")
    assert (branch.nbytes == 0) == all_again
    caplog.clear()
    assert session.append(" more") == (session.position if all_again else 5)
    assert (f"a call did not end, and kv_cache={kv_cache} cannot go on" in caplog.text) == all_again


# ---- others ----------------------------------------------------------------------------------------------------------


def test_a_stream_whose_text_was_changed_is_refused() -> None:
    model, session = made(text=TEXT)
    stream = session.stream(10, **GREEDY)
    next(stream)
    session.append("else")
    with pytest.raises(RuntimeError, match="start a new one"):
        next(stream)
    stream = session.stream(10, **GREEDY)
    model.kv_caching = False
    with pytest.raises(RuntimeError, match="start a new one"):
        next(stream)


@kinds("paged", "h2o:0.5", of=("static", "paged", "int8", "window:20+2", "snapkv:0.5", "h2o:0.5"))
def test_a_stream_continues_after_its_session_was_a_prefix(kv_cache: str) -> None:
    _, session = made(kv_cache=kv_cache, text=TEXT)
    alone = session.fork().generate(10, **GREEDY)["ids"]
    stream = session.stream(10, **GREEDY)
    for _ in range(3):
        next(stream)
        branch = session.fork()
        branch.append([])  # the newest token alone, because h2o depends on the cut
        branch.append("x")
        (result,) = session.model.generate(Bytes(), ["x"], 4, prefix=session, **GREEDY)
        assert result["ids"] == branch.generate(4, **GREEDY)["ids"]
    assert stream.finish()["ids"] == alone


def test_a_deep_copy_of_a_session_is_in_no_call() -> None:
    _, session = made(text=TEXT)
    copies: list[Session] = []
    session.generate(3, on_step=lambda _: copies.append(copy.deepcopy(session)), **GREEDY)
    copies[0].feed(TEXT + "!")
    assert copies[0].tokens == ids(TEXT + "!")
    assert copies[0].fed == session.fed + 1 - 2  # only what was new


def test_a_session_serves_from_any_thread_but_one_at_a_time(tmp_path: Path) -> None:
    _, session = made(text=TEXT)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(session.generate(5, **GREEDY)))
    thread.start()
    thread.join()
    assert results == [made(text=TEXT)[1].generate(5, **GREEDY)]
    inside: list[Callable[[], object]] = [
        lambda: session.feed("other"),
        lambda: session.append("!"),
        lambda: session.generate(1),
        lambda: session.save(tmp_path / "session"),
        session.fork,
        lambda: session.rewind(0),
        session.drop,
    ]

    def within(_: object) -> None:
        for act in inside:
            with pytest.raises(RuntimeError, match="in the middle of"):
                act()

    session.generate(2, on_step=within, **GREEDY)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_no_session_can_do_is_refused() -> None:
    model, session = made(text=TEXT)
    (other, _), empty = made(), model.session(Bytes())
    positions: list[Any] = [-1, len(TEXT) + 2, 1.5, True]
    prefixed: Any = partial(model.generate, Bytes(), ["x"], prefix=session)
    table = [
        (partial(empty.generate, 3), "no text yet"),
        *((partial(session.rewind, position), "where the text ends") for position in positions),
        (partial(session.generate, 100), "max_seq_len=160"),
        (partial(session.append, "x" * 100), "max_seq_len=160"),
        (partial(session.feed, [1, 258]), "from 0 to 257"),
        (partial(session.generate, 3, kv_cache="paged"), "no option here"),  # type: ignore[call-arg]
        (partial(session.generate, 3, echo=True, logprobs=True), "echo with logprobs"),
        (partial(model.session, Bytes(), max_seq_len=161), "max_seq_len=161"),
        (partial(model.session, Bytes(), kv_cache="none"), "known are"),
        (partial(other.generate, Bytes(), ["x"], prefix=session), "another model"),
        (partial(model.generate, Bytes(), ["x"], prefix=empty), "without a text"),
        (partial(prefixed, kv_cache="paged"), "kv_cache and prefix"),
        (partial(model.generate, Bytes(), [""], prefix=session), "no tokens"),
    ]
    assert unrefused(table) == []
    assert session.generate(3, **GREEDY) == made(text=TEXT)[1].generate(3, **GREEDY)
    session.drop()
    acts = partial(session.feed, "x"), partial(session.generate, 1), session.fork, session.drop
    assert unrefused((act, "was dropped") for act in acts) == []


def test_a_model_that_computes_in_another_way_feeds_all_again(caplog: pytest.LogCaptureFixture) -> None:
    model, session = made(dtype=torch.float32, text=TEXT)
    model.to(torch.float64)
    caplog.set_level(logging.INFO, "llama")
    before = list(session.tokens)
    assert session.generate(5, **GREEDY)["ids"] == whole(model, before, 5)
    assert "fed again" in caplog.text
    assert session.nbytes > 0
