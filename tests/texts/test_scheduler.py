"""llama/texts/scheduler.py: a text among others is the text alone, whatever comes, leaves, is cancelled or fails."""

import gc
from typing import Any

import pytest
from fakes import Memory, Remembering
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llama.texts.scheduler import Event, Text, Texts

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": True, "speculate": "lookup"},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.7, "top_k": 3, "logprobs": True},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.3, "repetition_penalty": 1.2, "logprobs": True},
]


class Drain:
    """Collects what texts say."""

    def __init__(self) -> None:
        self.ids: dict[Text, list[int]] = {}
        self.logprobs: dict[Text, list[float | None]] = {}
        self.finish: dict[Text, str] = {}

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.text not in self.finish, "an event after the end"
            if event.token is not None:
                assert event.token.row == event.text.number
                self.ids.setdefault(event.text, []).append(event.token.id)
                self.logprobs.setdefault(event.text, []).append(event.token.logprob)
            if event.finish is not None:
                self.finish[event.text] = event.finish


class TextsComeAndGo(RuleBasedStateMachine):
    """Each text has the ids and log-probabilities that it has alone; a cancelled or failed one, their beginning."""

    @initialize(
        rows=st.integers(1, 4),
        piece=st.sampled_from([1, 3, 64]),
        cache_bytes=st.sampled_from([None, 70, 300]),
        repeats=st.booleans(),
    )
    def begin(self, rows: int, piece: int, cache_bytes: int | None, *, repeats: bool) -> None:
        self.model, self.rows, self.limit = Remembering(repeats=repeats), rows, cache_bytes
        Memory.most = 0
        Memory.all.clear()
        self.texts = Texts(self.model, rows=rows, piece=piece, cache_bytes=cache_bytes)
        self.given: dict[Text, dict[str, Any]] = {}
        self.said, self.cancelled = Drain(), set[Text]()

    @rule(
        prompt=st.lists(st.integers(0, 6), min_size=1, max_size=8),
        common=st.integers(0, 40),
        max_gen_len=st.integers(1, 12),
        way=st.sampled_from(WAYS),
        seed=st.integers(0, 3),
        stop_ids=st.sampled_from([(), (2,), (0, 5)]),
    )
    def add(self, prompt: list[int], common: int, **how: Any) -> None:
        prompt = [3, 1, 4, 1, 5] * (common // 5) + prompt  # many begin alike
        text = self.texts.add(prompt, how["max_gen_len"], stop_ids=how["stop_ids"], seed=how["seed"], **how["way"])
        self.given[text] = {"prompt": prompt, **how}

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.said.take(self.texts.step())

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        for text in [*self.given][which : which + 1]:
            self.texts.cancel(text)
            if text not in self.said.finish:
                self.cancelled.add(text)

    @rule()
    def fail(self) -> None:
        if not self.texts.idle:
            self.model.broken = OSError("a disk")

    @rule()
    def spoil(self) -> None:
        self.model.nan = not self.texts.idle

    @invariant()
    def no_more_texts_run_than_rows(self) -> None:
        assert not hasattr(self, "texts") or self.texts.running <= self.rows

    @invariant()
    def memory_is_within_the_limit(self) -> None:
        if getattr(self, "limit", None) is not None:
            assert Memory.most <= self.limit

    @invariant()
    def ended_texts_are_predicted_no_bytes(self) -> None:
        if hasattr(self, "texts"):
            kept = self.texts._caches.kept_bytes
            assert self.texts.predicted_bytes >= kept
            assert self.texts.predicted_bytes == kept or self.texts.running > 0

    def teardown(self) -> None:
        if not hasattr(self, "texts"):
            return
        self.model.broken, self.model.nan = None, False
        steps = 0
        while not self.texts.idle:
            self.said.take(self.texts.step())
            steps += 1
            assert steps < 2000, "texts that do not end"
        alone = Remembering(repeats=self.model.repeats)
        for text, how in self.given.items():
            made, logprobs = alone.generate_tokens(
                [how["prompt"]],
                how["max_gen_len"],
                stop_ids=how["stop_ids"],
                seed=how["seed"],
                **{**how["way"], "speculate": None},
            )
            ids = self.said.ids.get(text, [])
            if text in self.cancelled or self.said.finish[text] == "failed":
                assert ids == made[0][: len(ids)]
            else:
                assert ids == made[0]
                assert self.said.finish[text] == ("stop" if len(ids) < how["max_gen_len"] else "length")
                if logprobs is not None:
                    assert self.said.logprobs.get(text, []) == logprobs[0]


TextsComeAndGo.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_texts_that_come_and_go_are_what_they_are_alone = TextsComeAndGo.TestCase


# ---- what a text leaves behind ---------------------------------------------------------------------------------------


def reused(texts: Texts, prompt: list[int], max_gen_len: int = 1) -> int:
    """Run a text to its end, and return how many tokens of its prompt were not fed."""
    text = texts.add(prompt, max_gen_len)
    for _ in range(max_gen_len + 1):
        texts.step()
    assert texts.idle, "the text has not ended"
    return text.reused


def test_the_cache_of_a_text_that_fails_is_freed_before_the_next_prompt_is_fed_although_its_error_is_kept() -> None:
    model = Remembering()
    texts = Texts(model, rows=1, cache_bytes=70)
    Memory.all.clear()
    gc.disable()  # the collector would free what only a cycle holds, some time
    try:
        Memory.most = 0
        texts.add([3, 1] * 18, 4, seed=0)
        kept = [event for _ in range(3) for event in texts.step()]
        model.broken = OSError("a disk")
        texts.add([3, 1] * 16, 1, seed=0)
        kept += texts.step()
    finally:
        gc.enable()
    assert [event.finish for event in kept] == [None, None, None, "failed", "length"]
    assert Memory.most < 40


def test_ended_texts_stay_for_others_and_the_least_recently_used_leaves_first() -> None:
    """A prompt of 40 tokens takes 41 bytes while it runs, and 40 afterwards: four may stay, or three beside one."""
    texts = Texts(Remembering(), rows=1, cache_bytes=161)
    one, two, three = ([id] * 40 for id in (1, 2, 3))
    assert [reused(texts, prompt) for prompt in (one, two, [*one[:36], 4, 4, 4, 4], three)] == [0, 0, 36, 0]
    assert texts.predicted_bytes == 160
    assert reused(texts, one) == 39, "a beginning that was used later than another text leaves before it"
    assert texts.predicted_bytes == 120, "a text takes the place of those that it continues"
    assert reused(texts, two) == 0


def test_a_text_may_take_all_bytes_and_no_more() -> None:
    texts = Texts(Remembering(), cache_bytes=45)
    assert reused(texts, [1] * 40, 5) == 0
    assert texts.predicted_bytes == 44  # the newest token is not fed
    with pytest.raises(ValueError, match="needs 46 bytes of cache, and there are 45"):
        texts.add([1] * 40, 6)


def test_a_cancelled_text_frees_its_row_at_once_and_what_it_has_cached_stays() -> None:
    for cache_bytes, stays in ((None, 0), (200, 42)):
        Memory.all.clear()
        texts = Texts(Remembering(), rows=1, cache_bytes=cache_bytes)
        text = texts.add([1] * 40, 9)
        for _ in range(3):
            texts.step()
        waiting = texts.add([2], 9)
        for one in (text, waiting, waiting, text):
            texts.cancel(one)
        assert texts.idle
        assert sum(len(row) for cache in Memory.all for row in cache.rows) == stays
        assert reused(texts, [*[1] * 40, 5]) == (40 if stays else 0)


def test_the_last_piece_of_a_prompt_alone_ends_it() -> None:
    """Also behind a beginning of another text, on which nothing may depend."""
    ends: list[bool] = []

    class Watched(Remembering):
        def __call__(self, tokens: Any, start_pos: Any, **named: Any) -> Any:
            ends.append(start_pos.prompt_ends)
            return super().__call__(tokens, start_pos, **named)

    texts = Texts(Watched(), rows=2, piece=16, cache_bytes=10**6)
    for length in (40, 5, 40):
        texts.add([1] * length, 1)
        while not texts.idle:
            texts.step()
    assert ends == [False, False, True, True, True]


def test_a_step_feeds_about_one_piece_of_prompts() -> None:
    texts, left = Texts(Remembering(), rows=8, piece=16), []
    for prompt in (20, 20, 16, 5):
        texts.add([1] * prompt, 9)
    while texts.waiting:
        texts.step()
        left.append(texts.waiting)
    assert left == [3, 2, 1, 0]
