"""The one thread that uses the model: it steps the texts of all requests. Knows no HTTP.

Requests reach it as calls in a queue, which it reads once a step. Each job has a function that gets the updates of its
text.
"""

import json
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple

from llama.batch import SchemaFailed
from llama.request import Options, Step
from llama.serve.metrics import Metrics
from llama.serve.requests import Refused, in_openai_s_words
from llama.streaming import Completion
from llama.texts.digest import digest_of_text
from llama.texts.many import Writer, steady
from llama.texts.origin import text_origin
from llama.texts.scheduler import Text
from llama.tokenizer.chat import day_of
from llama.untrusted.words import printable

logger = logging.getLogger(__name__)

MOST_CHECKS = 64  # ended texts that wait for an idle moment


class Update(NamedTuple):
    """What a text has gained, and its counts; the first update of a text says that it is accepted.

    piece: new text. tokens: new ids, each with its log-probability. fed, reused: the tokens that were fed for the text
    so far, and those of its prompt that were not. guesses: how many guessed tokens were fed, and how many were right.
    nbytes: of all caches, if asked for. made: the number of ids so far. first, newest: when the first and the newest of
    them came, by `time.monotonic`. finish: why the text has ended. whole: the text that has. error: why it has failed,
    and so ended.
    """

    piece: str = ""
    tokens: tuple[tuple[int, float | None], ...] = ()
    fed: int = 0
    reused: int = 0
    guesses: tuple[int, int] = (0, 0)
    nbytes: int | None = None
    made: int = 0
    first: float | None = None
    newest: float = 0.0
    finish: Literal["stop", "length"] | None = None
    whole: Completion | None = None
    error: Refused | None = None


NOTHING = Update()


@dataclass(eq=False)
class Job:
    """A text that a client waits for. `deliver` is called in the engine's thread."""

    prompt: list[int]
    max_tokens: int
    stop: Sequence[str]
    options: Options
    kv_caching: bool = True
    with_bytes: bool = False
    prompt_field: str = "prompt"
    deliver: Callable[[Update], None] = lambda update: None
    added: float = field(default_factory=time.monotonic)
    # of the engine
    checked: bool = False
    last: Update = NOTHING
    text: Text | None = None
    alone: Generator[Update, None, None] | None = None  # with the cache off


class Engine:
    """A model and its texts, in a thread of its own.

    load: returns the model and the tokenizer; it is called in the thread. check: the share of ended texts that are
    generated again, alone, when nothing else is to do. options: those of `Writer`; `cache_bytes` may be a function of
    the model. model, tokenizer, fingerprint, execution, and `longest`, the most positions of a text or None, exist once
    `ready` is done, unless loading has failed.
    """

    model: Any
    tokenizer: Any
    fingerprint: str | None
    execution: str
    longest: int | None

    def __init__(self, load: Callable[[], tuple[Any, Any]], *, check: float = 0.0, **options: Any) -> None:
        self._load, self._check, self.options, self.metrics = load, check, options, Metrics()
        self.ready: Future[None] = Future()
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by the numbers of their texts
        self._uncached: deque[Job] = deque()  # the first one generates
        self._unchecked: deque[tuple[Job, Completion]] = deque(maxlen=MOST_CHECKS)
        self._checking: tuple[Writer, Text, Completion] | None = None
        self._ending = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------------------------------

    def add(self, jobs: Sequence[Job]) -> None:
        """Generate texts. Before the next step, each has an update."""
        self._inbox.put(lambda: list(map(self._add, jobs)))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End texts before the next step, wherever they are; those that have ended are ignored."""
        self._inbox.put(lambda: list(map(self._cancel, jobs)))

    def gauges(self) -> Future[None]:
        """Set the gauges between two steps."""
        done: Future[None] = Future()
        self._inbox.put(lambda: self._measure(done))
        return done

    def end(self) -> None:
        """End the thread after its step. Texts that have not ended have no more updates."""
        self._inbox.put(lambda: setattr(self, "_ending", True))
        self._thread.join()

    # ---- in the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while not self._ending:
            idle = not (self._jobs or self._uncached or self._unchecked or self._checking)
            try:
                for _ in range(max(self._inbox.qsize(), idle)):
                    self._inbox.get()()
                self._step()
            except Exception as error:  # an error of a text is an update; this is one of the engine
                logger.error("all texts are dropped: %s", printable(f"{type(error).__name__}: {error}"))
                self._restart()

    def _begin(self) -> None:
        model, self.tokenizer = self._load()
        if callable(limit := self.options.get("cache_bytes")):
            self.options["cache_bytes"] = limit(model)
        self.model = steady(model)
        bounded = model.new_cache(self.options.get("kv_cache")).bound is not None
        self.longest = None if bounded else model.args.max_seq_len
        self.day = day_of(self.tokenizer)
        self.fingerprint = fingerprint_of(self.model, self.tokenizer, self.options.get("kv_cache"), self.day)
        self.execution = str(self.model.execution_with(self.options.get("kv_cache") or self.model.kv_cache))
        facts = {"execution": self.execution, "kv_cache": self.options.get("kv_cache"), "fingerprint": self.fingerprint}
        self.metrics.model.info({name: str(fact or "") for name, fact in facts.items()})
        self._restart()

    def _restart(self) -> None:
        """Begin without texts; clients of those that there are get an error."""
        for job in [*self._jobs.values(), *self._uncached]:
            self._tell(job, Update(error=Refused("the server failed; try again", 500)))
        self._jobs.clear()
        self._uncached.clear()
        self._checking = None
        self._writer = Writer(self.model, self.tokenizer, **self.options)

    def _add(self, job: Job) -> None:
        job.options.setdefault("seed", secrets.randbits(63))
        job.checked = job.kv_caching and random.random() < self._check
        options: Options = {**job.options, "logprobs": job.checked or job.options.get("logprobs", False)}
        try:
            if job.kv_caching:
                job.text = self._writer.add(job.prompt, job.max_tokens, job.stop, **options)
                self._jobs[job.text.number] = job
            else:
                job.alone = self._without_cache(job)
                self._uncached.append(job)
        except ValueError as error:
            said = in_openai_s_words(error)
            param = "max_tokens" if "max_tokens" in said else job.prompt_field
            self._tell(job, Update(error=Refused(said, param=param)))
        except Exception as error:
            self._tell(job, Update(error=Refused(str(error), 500)))
        else:
            self.metrics.prompts.inc(len(job.prompt))
            self._tell(job, Update())

    def _cancel(self, job: Job) -> None:
        if job.text is not None and self._jobs.get(job.text.number) is job:  # a new writer counts from 0 again
            del self._jobs[job.text.number]
            self._writer.cancel(job.text)
        elif job.alone is not None and job in self._uncached:
            self._uncached.remove(job)
            job.alone.close()
        else:
            return
        self.metrics.failed.labels("cancelled").inc()

    def _step(self) -> None:
        """Make the next token of every text, one of the first text without cache, and, if there is none, of a check."""
        for text, piece in self._writer.step(maybe_changed=False):
            self._tell(self._jobs[text.number], self._gained(text, piece))
        if self._uncached and (job := self._uncached[0]).alone is not None:
            update = next(job.alone)
            if update.finish or update.error:
                self._uncached.popleft()
            self._tell(job, update)
        elif not self._jobs and (self._unchecked or self._checking):
            self._check_again()

    def _gained(self, text: Text, piece: str) -> Update:
        """Return what a text of the writer has gained in this step."""
        job, completion = self._jobs[text.number], text.read.completion
        made, finish = len(completion["ids"]), completion["finish_reason"]
        # The last token was fed only if a stop token has come after it.
        fed = text.prompt_len - text.reused + made - (finish != "stop" or text.read.stopped)
        fed += text.guesses[0] - text.guesses[1]
        nbytes = self._writer.texts.nbytes if job.with_bytes else None
        error = None if text.error is None else _failed(text.error)
        if finish and job.checked:
            self._unchecked.append((job, completion))
        gained = Update(piece, tokens_of(completion, job.last.made), fed, text.reused, text.guesses, nbytes)
        return gained._replace(finish=finish, whole=completion, error=error)

    def _tell(self, job: Job, update: Update) -> None:
        """Deliver an update, and count it."""
        count, now, first = self.metrics, time.monotonic(), job.last.first
        update = update._replace(made=job.last.made + len(update.tokens), first=first, newest=job.last.newest)
        count.fed.inc(max(0, update.fed - job.last.fed))
        count.reused.inc(max(0, update.reused - job.last.reused))
        count.made.inc(len(update.tokens))
        count.proposed.inc(max(0, update.guesses[0] - job.last.guesses[0]))
        count.accepted.inc(max(0, update.guesses[1] - job.last.guesses[1]))
        if update.tokens and first is None:
            count.first.observe(now - job.added)
        for _ in update.tokens if first is not None else ():
            count.between.observe((now - update.newest) / len(update.tokens))
        if update.tokens:
            update = update._replace(first=now if first is None else first, newest=now)
        if update.error:
            count.failed.labels("refused" if update.error.status < 500 else "failed").inc()
        elif update.finish:
            count.ended.labels(update.finish).inc()
        if (update.finish or update.error) and job.text is not None:
            self._jobs.pop(job.text.number, None)
        job.last = update
        job.deliver(update)

    def _without_cache(self, job: Job) -> Generator[Update, None, None]:
        """Return the updates of a text whose whole prefix is fed at every step. Raises ValueError."""
        fed = 0

        def count(step: Step) -> None:
            nonlocal fed
            fed += sum(map(len, step.ids))

        stream = self.model.stream(
            self.tokenizer, [job.prompt], job.max_tokens, stop=job.stop, kv_caching=False, on_step=count, **job.options
        )

        def updates() -> Generator[Update, None, None]:
            result = stream.results[0]
            try:
                with stream:
                    while (made := stream.step()) is not None:  # one token: a client may leave before the next
                        yield Update(made[1], tokens_of(result, job.last.made), fed, nbytes=0)
                last = Update("", tokens_of(result, job.last.made), fed, nbytes=0)
                yield last._replace(finish=result["finish_reason"], whole=result)
            except Exception as error:
                yield Update(error=_failed(error))

        return updates()

    def _check_again(self) -> None:
        """Make a step of an ended text that is generated again, alone, and begins with no other text's cache."""
        if self._checking is None:
            job, expected = self._unchecked.popleft()
            writer = Writer(self.model, self.tokenizer, **{**self.options, "rows": 1, "speculate": None})
            options: Options = {**job.options, "logprobs": True}
            self._checking = writer, writer.add(job.prompt, job.max_tokens, job.stop, **options), expected
        writer, text, expected = self._checking
        for _ in writer.step(maybe_changed=False):
            pass
        if writer.texts.idle:
            self._checking = None
            self.metrics.checked.inc()
            if text.read.completion != expected:
                self.metrics.differed.inc()
                logger.error("a text differs from the same text alone; its prompt has %d tokens", text.prompt_len)

    def _measure(self, done: Future[None]) -> None:
        texts, metrics = self._writer.texts, self.metrics
        metrics.running.set(texts.running + bool(self._uncached))
        metrics.waiting.set(texts.waiting + max(0, len(self._uncached) - 1))
        metrics.cache.set(texts.nbytes)
        metrics.predicted.set(texts.predicted_bytes)
        if done.set_running_or_notify_cancel():  # else the request was cancelled meanwhile
            done.set_result(None)


def _failed(error: Exception) -> Refused:
    """Return the answer for a text that has failed after it began; the client's own schema may be too complex."""
    if isinstance(error, SchemaFailed):
        return Refused(str(error).replace("schema:", "response_format:", 1), param="response_format")
    return Refused(str(error), 500)


def tokens_of(completion: Completion, seen: int = 0) -> tuple[tuple[int, float | None], ...]:
    """Return the ids behind the first `seen` ones, each with its log-probability."""
    ids = completion["ids"][seen:]
    return tuple(zip(ids, completion.get("logprobs", [None] * (seen + len(ids)))[seen:], strict=True))


def fingerprint_of(model: Any, tokenizer: Any, kv_cache: str | None, day: str | None) -> str | None:
    """Return a name of all that decides a text except the request; None if other texts may decide its bits.

    They do not in native code and in exact mode.
    """
    runner = model.runner
    if not model.exact and (runner is None or runner.exact is None):
        return None
    facts = text_origin(model, tokenizer, day, kv_cache)
    return f"fp_{digest_of_text(json.dumps(facts))}"
