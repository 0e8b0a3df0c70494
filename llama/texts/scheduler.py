"""Texts that come and go on one model: the scheduler of lists and files of prompts and of the server.

A prompt is fed alone, in pieces, between two steps of the batch that runs; then its row joins the batch. A position's
bits do not depend on what is computed with it, so no text depends on other texts or on the clock. Knows ids and bytes;
does not know text, and is for one thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from traceback import clear_frames
from typing import Any, NamedTuple, Unpack

import torch

from llama.batch import Batch, Chosen, Ended, Row, Token
from llama.generation import PlainStepper, make_stepper
from llama.request import OF_A_BATCH, Options, Request, Step, check_speculation, make_request
from llama.streaming import RowText
from llama.texts.text_caches import TextCaches


@dataclass(eq=False)
class Text:
    """A text of a list.

    row: its tokens and settings, once its prompt is being fed. reused: how many tokens of its prompt were not fed,
    because a text before begins alike. added: when it was added, by `time.monotonic`. A Writer sets the others. read:
    its text so far. began, ended: when it had its first token, and ended. error: why it has failed.
    """

    number: int
    request: Request
    row: Row | None = None
    reused: int = 0
    added: float = field(default_factory=time.monotonic)
    read: RowText = field(init=False, repr=False)
    began: float | None = None
    ended: float | None = None
    error: Exception | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompts[0])

    @property
    def guesses(self) -> tuple[int, int]:
        """How many guessed tokens it was fed so far, and how many of these were right."""
        guesser = None if self.row is None else self.row.guesser
        return (0, 0) if guesser is None else (guesser.proposed, guesser.accepted)


class Event(NamedTuple):
    """What has happened to a text: its next token, if there is one, and why it has ended, if it has.

    A text that has "failed" has an `error`, and no further events.
    """

    text: Text
    token: Token | None
    finish: Ended | None
    error: Exception | None = None


LEAST_PIECE = 64  # tokens of a prompt: shorter pieces read the weights more often than they compute
MOST_PAUSE = 1_000_000  # seconds


class Texts:
    """Texts on one model, of which up to `rows` generate at a time. `llama.texts.many` has them as text."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 16,
        piece: int = 256,
        kv_cache: str | None = None,
        cache_bytes: int | None = None,
        max_pause: float | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Make an empty list of texts. Raises ValueError for a kind of cache whose rows cannot join.

        piece: prompts are cut at multiples of so many tokens, whatever the load: for kinds of cache that round or drop
        keys the cut decides bits. cache_bytes: the most bytes of all caches; a text waits until its whole length fits.
        None: no limit, and no text is kept after its end for others that begin alike. max_pause: the seconds that
        prompts may take between two steps of texts that run, as well as pieces of at least LEAST_PIECE tokens can keep
        that; it counts only where no bit depends on the cuts. None: `piece` alone. on_step: see `Options`.
        """
        if rows < 1 or piece < 1:
            raise ValueError(f"rows={rows!r} and piece={piece!r} must be whole numbers of at least 1")
        if max_pause is not None and (isinstance(max_pause, bool) or not 0 < max_pause <= MOST_PAUSE):
            raise ValueError(f"max_pause={max_pause!r:.60} must be seconds above 0, at most {MOST_PAUSE:,}, or None")
        self._model, self._rows, self._piece = model, min(rows, model.args.max_batch_size or rows), piece
        self._on_step = on_step
        self._caches = TextCaches(model, kv_cache or model.kv_cache, cache_bytes)
        self._max_pause = max_pause
        self._may_cut: bool | None = None  # see `_cuts`; None: the model may have changed
        self._token_seconds = float("inf")  # of a prompt's token, by the last piece
        self._numbers = count()
        self._texts: dict[int, Text] = {}  # those that have not ended, by number
        self._waiting: deque[Text] = deque()
        self._fed: PlainStepper | None = None  # of the text whose prompt is being fed
        self._running: PlainStepper | None = None
        self._steps: Iterator[Chosen] = iter(())  # of the running stepper

    @property
    def waiting(self) -> int:
        """The number of texts of which nothing was fed yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of texts that generate, or whose prompt is being fed."""
        return len(self._texts) - len(self._waiting)

    @property
    def vocab_size(self) -> int:
        vocab_size: int = self._model.args.vocab_size
        return vocab_size

    @property
    def idle(self) -> bool:
        return not self._texts

    @property
    def nbytes(self) -> int:
        """The bytes of all caches. Memory that they share counts once."""
        return self._caches.nbytes([stepper for stepper in (self._running, self._fed) if stepper is not None])

    @property
    def predicted_bytes(self) -> int:
        """The most bytes of all caches until the texts that run have ended."""
        return self._caches.predicted(self._requests()) + self._caches.kept_bytes

    def check_speculation(self, speculate: object) -> None:
        """Raise ValueError if a text of this list cannot speculate."""
        check_speculation(speculate, self._caches.root, self._model.ranks.size)

    def add(
        self,
        prompt: Sequence[int],
        max_gen_len: int = 64,
        *,
        stop_ids: Sequence[int] = (),
        **options: Unpack[Options],
    ) -> Text:
        """Add a text, with the arguments of `generate_tokens`.

        `seed` is that of the text itself. Raises ValueError for bad input, for an option that concerns all rows of a
        batch, and for a text that can never fit.
        """
        refused = [name for name in OF_A_BATCH if options.get(name) is not None]
        if refused:
            raise ValueError(f"{', '.join(refused)} concerns a batch, not a text among others; use model.generate")
        limits, options["on_step"] = self._model.args, self._on_step
        request = make_request(limits, True, [prompt], max_gen_len, stop_ids, options, bound=self._caches.root.bound)
        self.check_speculation(request.speculate)
        needed, most = self._caches.alone(request), self._caches.most_bytes
        if most is not None and needed > most:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with max_gen_len={max_gen_len} needs {needed:,} bytes of cache, and "
                f"there are {most:,} for all texts; shorten it, or allow more"
            )
        text = Text(next(self._numbers), request)
        self._texts[text.number] = text
        self._waiting.append(text)
        return text

    def cancel(self, text: Text) -> None:
        """End a text wherever it is; it has no further events. A text that has ended is ignored."""
        if self._texts.get(text.number) is not text:
            return
        del self._texts[text.number]
        if text.row is None:
            self._waiting.remove(text)
            return
        text.row.ended = "stop"
        if self._fed is not None and self._fed.batch.rows[0] is text.row:
            self._fed = None
        elif self._running is not None:
            self._caches.keep(text.row, self._running, self._requests())
        self._drop_ended()

    def step(self, *, maybe_changed: bool = True) -> list[Event]:
        """Make the next token of all texts that generate, then feed about one piece of prompts; return the events.

        maybe_changed: False if the model is certainly the one of the last step: comparing it takes some milliseconds.
        """
        if maybe_changed or self._on_step is not None:
            self._caches.maybe_changed, self._may_cut = True, None
            if self._running is not None:
                self._running.batch.maybe_changed = True
        with torch.inference_mode():
            events = self._decoded()
            _free_frames(events)
            events += self._prompts_fed()
        if self._running is None:
            self._drop_ended()  # of a text that has ended with its first token
        return events

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _decoded(self) -> list[Event]:
        """Make the next token of every row that runs; several, if guesses of them were right."""
        stepper = self._running
        if stepper is None:
            return []
        events = self._chosen(stepper, self._steps)
        while stepper.pending and stepper.batch.goes_on:
            events += self._chosen(stepper, self._steps)
        self._drop_ended()
        return events

    def _drop_ended(self) -> None:
        """Free the memory of rows that have ended, and of the batch if it has no other rows."""
        if self._running is not None and self._running.batch.goes_on:
            self._running.drop_ended()
        else:
            self._running, self._steps = None, iter(())
            self._caches.begin_batch(self._requests())

    def _prompts_fed(self) -> list[Event]:
        """Feed pieces of prompts, about `piece` tokens in all; the texts whose prompts end there begin to generate."""
        events: list[Event] = []
        left = self._piece
        if cuts := self._cuts():
            left = int(min(left, max(LEAST_PIECE, (self._max_pause or 0.0) / self._token_seconds)))
        least = min(LEAST_PIECE, self._piece) if cuts else 1
        while left >= least and (self._fed is not None or self._admitted(events)):
            left -= self._piece_fed(events, left if cuts else None)
            _free_frames(events)
        return events

    def _cuts(self) -> bool:
        """Whether prompts are cut so that the texts that run wait at most `max_pause`."""
        if self._max_pause is None or self._running is None:
            return False
        if self._may_cut is None:
            runner, root = self._model.runner, self._caches.root
            native = self._model.exact or (runner is not None and runner.left(self._model, root) == "none")
            self._may_cut = native and self._caches.lossless and not root.whole_prompt
        return self._may_cut

    def _piece_fed(self, events: list[Event], most: int | None) -> int:
        """Feed a piece of a prompt, and return its number of tokens. A call of its own, so that caches are freed.

        most: the most tokens of the piece; None: up to the next multiple of `piece`.
        """
        stepper = self._fed
        assert stepper is not None
        batch, began = stepper.batch, time.perf_counter()
        begin, end = batch.prefix_len, len(batch.rows[0].ids)
        cut = end if self._caches.root.whole_prompt else (begin // self._piece + 1) * self._piece
        cut = cut if most is None else begin + most
        try:
            if cut < end:
                stepper.feed(cut)
                self._token_seconds = (time.perf_counter() - began) / (cut - begin)
                return cut - begin
            self._fed = None
            for _ in stepper.prefill():
                pass
            steps = iter(stepper)
            events += self._chosen(stepper, steps)
            if batch.goes_on and self._running is not None:
                self._running.join(stepper)
            elif batch.goes_on:
                self._running, self._steps = stepper, steps
        except Exception as error:
            self._fed = None
            events += self._failed([row.number for row in batch.rows], error)
        return end - begin

    def _chosen(self, stepper: PlainStepper, steps: Iterator[Chosen]) -> list[Event]:
        """Make the next choice of a stepper, add the tokens to their texts, and return the events of these."""
        batch = stepper.batch
        try:
            chosen = next(steps)
        except Exception as error:
            return self._failed([row.number for row in batch.rows], error)
        for row, id in zip(batch.rows, chosen.ids, strict=True):
            if id is not None and id < 0 and not row.ended:
                row.ended = "failed"
        tokens = {token.row: token for token in batch.record(chosen)}
        events = []
        for row in batch.rows:
            if row.number in self._texts and (row.ended or row.number in tokens):
                failure = row.failure if row.ended == "failed" else None
                events.append(Event(self._texts[row.number], tokens.get(row.number), row.ended, failure))
                if row.ended:
                    del self._texts[row.number]
                    self._caches.keep(row, stepper, self._requests())
        return events

    def _failed(self, numbers: Sequence[int], error: Exception) -> list[Event]:
        """End texts because of an error."""
        texts = [self._texts.pop(number) for number in numbers if number in self._texts]
        for text in texts:
            if text.row is not None:
                text.row.ended = "failed"
        return [Event(text, None, "failed", error) for text in texts]

    # ---- which text is next ------------------------------------------------------------------------------------------

    def _admitted(self, events: list[Event]) -> bool:
        """Begin to feed the first text that waits, if a row is free and its whole length fits beside the others.

        So no text that runs is ever stopped for lack of memory. A text that cannot begin fails, which is an event.
        """
        while self._waiting and self.running < self._rows:
            text = self._waiting[0]
            if not self._caches.admit(self._requests(), text.request):
                return False
            self._waiting.popleft()
            try:
                cache, text.reused = self._caches.beginning(text.request, self._running)
                batch = Batch(text.request, self._model.args.vocab_size, prefix_len=text.reused)
                (text.row,) = batch.rows
                text.row.number = text.number
                stepper = make_stepper(self._model, batch, cache)
                assert isinstance(stepper, PlainStepper)
                self._fed = stepper
                return True
            except Exception as error:
                events += self._failed([text.number], error)
        return False

    def _requests(self) -> list[Request]:
        """Return the texts that run."""
        return [text.request for text in self._texts.values() if text.row is not None]


def _free_frames(events: Sequence[Event]) -> None:
    """Drop the local variables of the calls of errors and of their callers that have returned.

    They would keep a text's cache as long as the error.
    """
    for event in events:
        error: BaseException | None = event.error
        while error is not None:
            clear_frames(error.__traceback__)
            caller = error.__traceback__.tb_frame.f_back if error.__traceback__ else None
            with suppress(RuntimeError):  # of the first caller that still runs
                while caller is not None:
                    caller.clear()
                    caller = caller.f_back
            error = error.__context__
