"""Interrupts at chosen lines of the library, and what must hold for a cache after one.

An interrupt is an exception that is raised before the n-th line that runs inside `llama/`, as Ctrl-C may raise it.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fakes import Bytes
from torch import Tensor

import llama
from llama.args import Refused
from llama.kv_cache import Cache, PagedCache
from llama.model import Transformer
from llama.rows import Rows
from llama.texts.session import Session

INSIDE = str(Path(llama.__file__).parent)
PROMPT, FED = 40, 30  # the tokens before the call that is interrupted, and the most that it feeds


class Interrupt(BaseException):
    """Raised at a line."""


def lines_of(act: Callable[[], object]) -> int:
    """Return the number of lines of the library that `act` runs."""
    return _traced(act, None)


def interrupted(act: Callable[[], object], at: int) -> bool:
    """Raise Interrupt before line `at` of `act`; return False if it ended before."""
    try:
        _traced(act, at)
    except Interrupt:
        return True
    return False


def kill_at(act: Callable[[], object], at: int) -> None:
    """End this process as kill -9 does before line `at` of `act`, unless `act` ends before."""
    _traced(act, at, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _interrupt() -> None:
    raise Interrupt


def _traced(act: Callable[[], object], at: int | None, strike: Callable[[], None] = _interrupt) -> int:
    count = 0

    def line(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == at:
                strike()
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        return line if code.co_filename.startswith(INSIDE) and code.co_name != "__del__" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


class Texts:
    """A cache with a text of two rows, and acts on copies of it that are interrupted.

    The cache of each act shares memory with the others, if its kind does.
    """

    def __init__(self, model: Transformer, kind: str) -> None:
        self.model, stream = model, torch.Generator().manual_seed(0)
        self.first, self.second = (
            torch.randint(model.args.vocab_size, (rows, PROMPT + FED + 2), generator=stream) for rows in (2, 3)
        )
        self.base = model.new_cache(kind)
        self.feed(self.base, self.first, 0, PROMPT)
        self.whole = [self.feed(model.new_cache(kind), text, 0, PROMPT) for text in (self.first, self.second)]
        self.acts: list[tuple[Callable[[Cache], object], Tensor | None]] = []
        for width in (1, FED):
            wanted = self.feed(self.base.copy(), self.first, PROMPT, width)
            self.acts.append((lambda cache, width=width: self.feed(cache, self.first, PROMPT, width), wanted))
        starts, lengths = (PROMPT, PROMPT - 5), (3, 8)
        ragged = self.first[torch.arange(2)[:, None], torch.tensor(starts)[:, None] + torch.arange(8)]
        if self.base.truncate(PROMPT - 5):
            rows = Rows.at(starts, lengths)
            self.acts.append(
                (lambda cache: model(ragged, rows, cache=cache), model(ragged, rows, cache=self.base.copy()))
            )
        self.acts.append((lambda cache: self.feed(cache, self.second, 0, PROMPT), None))
        self.acts += [(lambda cache: cache.select_rows([1]), None), (lambda cache: cache.repeat_first_row(3), None)]
        self.acts += [(self._join, None)]
        self.acts += [(Cache.free, None), (lambda cache: cache.reserve(2, 60), None), (Cache.copy, None)]
        self.lines = [lines_of(lambda act=act: act(self.base.copy())) for act, _ in self.acts]
        self.after = self.feed(self.base.copy(), self.first, PROMPT, 1), self._after_second()

    def feed(self, cache: Cache, text: Tensor, start: int, width: int) -> Tensor:
        rows = Rows.at([start] * len(text), [width] * len(text), prompt_ends=not start)
        return self.model(text[:, start : start + width], rows, cache=cache)

    def _join(self, cache: Cache) -> None:
        """Let a row of the second text join the rows of the first one."""
        text = cache.sibling()
        self.feed(text, self.second[:1], 0, PROMPT)
        cache.join(text, 2, PROMPT)

    def _after_second(self) -> Tensor:
        cache = self.base.copy()
        self.feed(cache, self.second, 0, PROMPT)
        return self.feed(cache, self.second, PROMPT, 1)

    def interrupt(self, dice: random.Random) -> None:
        """Interrupt an act at a line, and check what follows."""
        number = dice.choices(range(len(self.acts)), [max(lines, 200) for lines in self.lines])[0]
        (act, wanted), cache, fork = self.acts[number], self.base.copy(), self.base.copy()
        at = dice.randint(1, self.lines[number])
        interrupted(lambda: act(cache), at)
        where = f"after an interrupt at line {at} of {self.lines[number]} of act {number}"
        check_free(cache, where)
        if wanted is not None:
            found = unless_refused(lambda: act(cache))
            assert found is None or torch.equal(found, wanted), where
        else:
            self._check_contents(cache, where)
        for text, whole in zip((self.first, self.second), self.whole, strict=True):
            assert torch.equal(self.feed(cache, text, 0, PROMPT), whole), where
        assert torch.equal(self.feed(cache, self.second, PROMPT, 1), self.after[1]), where
        assert torch.equal(self.feed(fork, self.first, PROMPT, 1), self.after[0]), where

    def _check_contents(self, cache: Cache, where: str) -> None:
        """Assert that the cache is one of both texts, or a part of the first one's rows, or refuses to go on."""
        expected: list[tuple[Sequence[int], Tensor, Tensor]] = [
            ([0, 1], self.first, self.after[0]),
            ([0, 1, 2], self.second, self.after[1]),
            ([1], self.first[1:], self.after[0][1:]),
            ([0, 0, 0], self.first[[0, 0, 0]], self.after[0][[0, 0, 0]]),
            ([0, 1, 0], torch.cat((self.first, self.second[:1])), torch.cat((self.after[0], self.after[1][:1]))),
        ]
        right = []
        for _, text, wanted in expected:
            found = unless_refused(lambda text=text: self.feed(cache.copy(), text, PROMPT, 1))
            if found is None:
                right.append(cache.failed_at is not None or cache.empty)
            else:
                right.append(torch.allclose(found, wanted, atol=1e-4))
        assert any(right), where


def unless_refused(act: Callable[[], Tensor]) -> Tensor | None:
    """Return what `act` returns, or None if the cache refuses to go on by name."""
    try:
        return act()
    except Refused:  # the act had ended, and its kind cannot go back
        return None
    except ValueError as why:
        if "did not end" in str(why) or "empty KV cache" in str(why):
            return None
        raise


def check_free(cache: Cache, where: str) -> None:
    """Assert that no lock of the cache is held."""
    assert not cache._call.locked(), where
    assert not cache._turn._is_owned(), where  # type: ignore[attr-defined]
    assert not any(isinstance(layer, PagedCache) and layer.pool.lock.locked() for layer in cache.layers), where


class Sessions:
    """A session, and acts on forks of it that are interrupted."""

    def __init__(self, model: Transformer, kind: str, *, tolerance: float = 1e-8) -> None:
        self.tolerance = tolerance
        self.model, self.kind, stream = model, kind, torch.Generator().manual_seed(0)
        ids = torch.randint(1, model.args.vocab_size, (PROMPT + FED,), generator=stream).tolist()
        self.base = self._fresh(ids[:PROMPT])
        self.acts: list[Callable[[Session], object]] = [
            lambda session: session.append(ids[:3]),
            lambda session: session.append(ids[PROMPT:]),
            lambda session: session.generate(6, temperature=0.0),
            lambda session: session.feed([*ids[:9], *ids[20:40]]),
            lambda session: (session.rewind(PROMPT - 3), session.generate(2, temperature=0.0)),
            lambda session: (session.generate(2, temperature=0.0), session.append(ids[:2])),
            lambda session: model.generate_tokens([[1], [2, 3]], 2, prefix=session),
            lambda session: session.fork(),
        ]
        self.lines = [lines_of(lambda act=act: act(self.base.fork())) for act in self.acts]

    def _fresh(self, ids: Sequence[int]) -> Session:
        session = self.model.session(Bytes(), kv_cache=self.kind)
        session.feed(ids)
        return session

    def interrupt(self, dice: random.Random) -> None:
        """Interrupt an act at a line, go on with the text, and compare the logits after it."""
        number = dice.randrange(len(self.acts))
        at, session = dice.randint(1, self.lines[number]), self.base.fork()
        interrupted(lambda: self.acts[number](session), at)
        where = f"after an interrupt at line {at} of {self.lines[number]} of act {number}"
        check_free(session.cache, where)
        assert not session._lock.locked(), where
        text = list(session.tokens)
        session.append([5])
        assert session.tokens == [*text, 5]
        found = session.logits
        assert any(torch.allclose(found, wanted, atol=self.tolerance) for wanted in self._possible(text)), where

    def _possible(self, text: list[int]) -> Iterator[Tensor]:
        """Yield the logits after a text and one more token, for each way to cut it into calls."""
        new = len(text) - len(self.base.tokens)
        for begin in (self.base.fork, lambda: self.model.session(Bytes(), kv_cache=self.kind)):
            for calls in ([[*text, 5]], [text, [*text, 5]], [text[:-1], [*text, 5]]):
                session = begin()
                for call in calls:
                    session.feed(call)
                yield session.logits
        for position in (PROMPT, PROMPT - 3):
            session = self.base.fork()
            session.rewind(position)
            session.generate(max(len(text) - position, 1), temperature=0.0)
            session.feed([*text, 5])
            yield session.logits
        for count in (new - 2, new):  # the newest token was fed by itself
            session = self.base.fork()
            session.generate(max(count, 1), temperature=0.0)
            session.feed(text)
            session.feed([*text, 5])
            yield session.logits
