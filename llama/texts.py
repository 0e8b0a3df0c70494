"""Texts that come and go on one model: the scheduler of lists and files of prompts and of the server.

A prompt is fed alone, in pieces, between two steps of the batch that runs; then its row joins the batch. A position's
bits do not depend on what is computed with it, so no text depends on other texts or on the clock. Knows ids and bytes;
does not know text, and is for one thread.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple, Unpack

import torch

from llama.batch import Batch, Chosen, NonFiniteLogits, Row, Token
from llama.generation import PlainStepper, make_stepper
from llama.kept import Kept, common_length
from llama.kv_cache import Cache
from llama.kv_cache.paged import BLOCK
from llama.request import Options, Request, make_request

LEAST = 32  # tokens that are worth copying from another text's cache
OF_A_BATCH = ("echo", "kv_caching", "kv_cache", "share_prefix", "prefix", "device", "on_step")


class Event(NamedTuple):
    """What has happened to a text.

    token: its next token; None if it ends without one.
    finish: why it has ended; None if it goes on. A text that has "failed" has an `error`, and no further events.
    reused: how many tokens of its prompt were not fed, because a text before begins alike.
    """

    number: int
    token: Token | None
    finish: Literal["stop", "length", "failed"] | None
    error: Exception | None = None
    reused: int = 0


@dataclass
class _Text:
    """A text that has not ended: its row in a batch, once its prompt is being fed."""

    request: Request
    row: Row | None = None
    reused: int = 0


class Texts:
    """Texts on one model, of which up to `rows` generate at a time.

    Raises ValueError for a kind of cache whose rows cannot join, and for a model that computes in another way:
    `llama.many` says how its texts are generated.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 16,
        piece: int = 256,
        kv_cache: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """Make an empty list of texts.

        piece: prompts are cut at multiples of so many tokens, whatever the load: for kinds of cache that round or drop
        keys the cut decides bits. cache_bytes: the most bytes of all caches; a text waits until its whole length fits.
        None: no limit, and no text is kept after its end for others that begin alike.
        """
        self._model, self._rows, self._piece, self._cache_bytes = model, rows, piece, cache_bytes
        self._root: Cache = model.new_cache(self._limited(kv_cache or model.kv_cache))  # all others are its siblings
        self._root.check_joins()
        self._lossless = all(layer.lossless for layer in self._root.layers)
        self._numbers = count()
        self._texts: dict[int, _Text] = {}
        self._waiting: deque[int] = deque()
        self._fed: PlainStepper | None = None  # of the text whose prompt is being fed
        self._running: PlainStepper | None = None
        self._steps: Iterator[Chosen] = iter(())  # of the running stepper
        self._most = (0, 0)  # rows, and positions of the longest, since the batch began
        self._kept = Kept()

    @property
    def waiting(self) -> int:
        """The number of texts of which nothing was fed yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of texts that generate, or whose prompt is being fed."""
        return len(self._texts) - len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._texts

    @property
    def nbytes(self) -> int:
        """The bytes of all caches. Memory that they share counts once."""
        steppers = [stepper.cache for stepper in (self._running, self._fed) if stepper is not None]
        layers = [layer for cache in (*steppers, *self._kept.caches) if cache is not None for layer in cache.layers]
        return sum({held.data_ptr(): held.nbytes for layer in layers for held in layer.held().values()}.values())

    @property
    def predicted_bytes(self) -> int:
        """The most bytes of all caches until the texts that run have ended."""
        return self._predicted() + self._kept.nbytes

    def add(
        self,
        prompt: Sequence[int],
        max_gen_len: int = 64,
        *,
        stop_ids: Sequence[int] = (),
        **options: Unpack[Options],
    ) -> int:
        """Add a text, with the arguments of `generate_tokens`, and return its number.

        `seed` is that of the text itself. Raises ValueError for bad input, for an option that concerns all rows of a
        batch, and for a text that can never fit.
        """
        refused = [name for name in OF_A_BATCH if options.get(name) is not None]
        if refused:
            raise ValueError(f"{', '.join(refused)} concerns a batch, not a text among others; use model.generate")
        limits = self._model.args
        request = make_request(limits, True, [prompt], max_gen_len, stop_ids, options, bound=self._root.bound)
        needed = self._bytes([request], (1, request.longest))
        if self._cache_bytes is not None and needed > self._cache_bytes:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with max_gen_len={max_gen_len} needs {needed:,} bytes of cache, and "
                f"there are {self._cache_bytes:,} for all texts; shorten it, or allow more"
            )
        number = next(self._numbers)
        self._texts[number] = _Text(request)
        self._waiting.append(number)
        return number

    def cancel(self, number: int) -> None:
        """End a text wherever it is; it has no further events. Other numbers, also of ended texts, are ignored."""
        text = self._texts.pop(number, None)
        if text is None:
            return
        if text.row is None:
            self._waiting.remove(number)
            return
        text.row.ended = "stop"
        if self._fed is not None and self._fed.batch.rows[0] is text.row:
            self._fed = None
        elif self._running is not None:
            self._keep(self._running, text.row)
            self._drop_ended()

    def step(self) -> list[Event]:
        """Make the next token of all texts that generate, then feed about one piece of prompts; return the events."""
        with torch.inference_mode():
            return [*self._decoded(), *self._prompts_fed()]

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
        """Free the memory of rows that have ended."""
        if self._running is not None and self._running.batch.goes_on:
            self._running.drop_ended()
        else:
            self._running, self._steps, self._most = None, iter(()), (0, 0)

    def _prompts_fed(self) -> list[Event]:
        """Feed pieces of prompts, about `piece` tokens in all; the texts whose prompts end there begin to generate."""
        events: list[Event] = []
        left = self._piece
        while left > 0 and (stepper := self._fed or self._admitted()) is not None:
            self._fed, batch = stepper, stepper.batch
            begin, end = batch.prefix_len, len(batch.rows[0].ids)
            cut = end if self._root.whole_prompt else (begin // self._piece + 1) * self._piece
            left -= min(cut, end) - begin
            try:
                if cut < end:
                    stepper.feed(cut)
                    continue
                for _ in stepper.prefill():
                    pass
            except Exception as error:
                events += self._failed(stepper, error)
                self._fed = None
                continue
            self._fed, steps = None, iter(stepper)
            events += self._chosen(stepper, steps)
            if stepper.batch.goes_on:
                self._join(stepper, steps)
        return events

    def _join(self, stepper: PlainStepper, steps: Iterator[Chosen]) -> None:
        """Let the row of a stepper, which has its first token, run with the others."""
        if self._running is not None:
            self._running.join(stepper)
        else:
            self._running, self._steps = stepper, steps

    def _chosen(self, stepper: PlainStepper, steps: Iterator[Chosen]) -> list[Event]:
        """Make the next choice of a stepper, add the tokens to their texts, and return the events of these."""
        batch, errors = stepper.batch, dict[int, Exception]()
        try:
            chosen = next(steps)
        except Exception as error:
            return self._failed(stepper, error)
        for row, id in zip(batch.rows, chosen.ids, strict=True):
            if id is not None and id < 0 and not row.ended:
                row.ended, errors[row.number] = "failed", NonFiniteLogits(row.made, row.number)
        tokens = {token.row: token for token in batch.record(chosen)}
        events = []
        for row in batch.rows:
            if row.number in self._texts and (row.ended or row.number in tokens):
                text, token = self._texts[row.number], tokens.get(row.number)
                events.append(Event(row.number, token, row.ended, errors.get(row.number), text.reused))
                if row.ended:
                    del self._texts[row.number]
                    self._keep(stepper, row)
        return events

    def _failed(self, stepper: PlainStepper, error: Exception) -> list[Event]:
        """End all texts of a stepper whose call raised an error."""
        events = []
        for row in stepper.batch.rows:
            row.ended = "failed"
            if self._texts.pop(row.number, None) is not None:
                events.append(Event(row.number, None, "failed", error))
        return events

    def _predicted(self, *more: Request) -> int:
        """Return the most bytes of cache that the texts that run, and `more`, take until all have ended."""
        going = [text.request for text in self._texts.values() if text.row is not None]
        together = [*going, *more]
        most = max(self._most[0], len(together)), max([self._most[1], *(one.longest for one in together)])
        alone = [self._bytes([one], (1, one.longest)) for one in together]  # memory of kinds that store row by row
        fed = alone[-1:] if going and self._root.kind != "paged" else []  # a cache of its own, until the row joins
        return max(self._bytes(together, most), sum(alone)) + sum(fed)

    def _limited(self, kind: str) -> str:
        """Return a kind of cache; a paged one has a pool of at most `cache_bytes`."""
        if kind != "paged" or self._cache_bytes is None:
            return kind
        block = BLOCK * self._model.new_cache(kind).position_bytes(self._model.dtype.itemsize)
        return f"{kind}:{max(self._cache_bytes // block, 1)}"

    def _bytes(self, requests: Sequence[Request], reserved: tuple[int, int]) -> int:
        """Return the bytes of cache that texts take if all begin together."""
        if not requests:
            return 0
        return self._root.predicted_bytes(
            prompts=[len(request.prompts[0]) for request in requests],
            ends=[request.longest for request in requests],
            reserved=reserved,
            itemsize=self._model.dtype.itemsize,
        )

    # ---- which text is next, and what it begins with -----------------------------------------------------------------

    def _admitted(self) -> PlainStepper | None:
        """Return a stepper for the first text that waits, if a row is free and its whole length fits beside the others.

        So no text that runs is ever stopped for lack of memory.
        """
        if not self._waiting or self.running >= self._rows:
            return None
        text = self._texts[self._waiting[0]]
        needed = self._predicted(text.request)
        if self._cache_bytes is not None:
            if needed > self._cache_bytes:
                return None
            self._kept.shrink(self._cache_bytes - needed)
        self._most = max(self._most[0], self.running + 1), max(self._most[1], text.request.longest)
        number = self._waiting.popleft()
        cache, text.reused = self._beginning(text.request.prompts[0], text.request.longest)
        batch = Batch(text.request, self._model.args.vocab_size, prefix_len=text.reused)
        (text.row,) = batch.rows
        text.row.number = number
        stepper = make_stepper(self._model, batch, cache)
        assert isinstance(stepper, PlainStepper)
        return stepper

    def _beginning(self, prompt: Sequence[int], longest: int) -> tuple[Cache, int]:
        """Return a cache for a prompt, and how many of its tokens it holds because another text begins alike.

        It holds none of a lossy kind: behind another text's cut, keys would be rounded or dropped in another way.
        """
        kept, best = self._kept.longest(prompt)
        source, place = kept, 0
        if self._running is not None:
            for at, row in enumerate(self._running.batch.rows):
                same = common_length(row.ids[:-1], prompt)  # the newest token may not be fed yet
                if same > best:
                    source, place, best = self._running.cache, at, same
        best = min(best, len(prompt) - 1)  # the logits after the prompt come from its last token
        cache = self._root.sibling(longest)
        if source is None or best < LEAST or not self._lossless:
            return cache, 0
        cache.join(source.row_copy(place, best), 0, best)
        return cache, best

    def _keep(self, stepper: PlainStepper, row: Row) -> None:
        """Keep a text that has ended for others that begin alike, if there is a limit of bytes, and room within it."""
        if self._cache_bytes is None or not self._lossless or row.ended == "failed" or len(row.ids) <= LEAST:
            return
        ids = row.ids[:-1]  # the newest token may not be fed yet
        size = -(-len(ids) // BLOCK) * BLOCK * self._root.position_bytes(self._model.dtype.itemsize)
        left = self._cache_bytes - self._predicted() - size
        if left >= 0:
            self._kept.shrink(left)
            assert stepper.cache is not None
            self._kept.add(ids, stepper.cache.row_copy(stepper.batch.rows.index(row), len(ids)), size)
