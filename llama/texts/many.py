"""Continue any number of prompts, of which some run at a time: `generate_many`, and the `Writer` of files and servers.

Turns prompts into ids and ids into text; `llama.texts.scheduler` decides which texts run.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any, Unpack

from llama.batch import NonFiniteLogits
from llama.request import Options
from llama.sampling import whole_number
from llama.schemas import schema_of
from llama.streaming import Completion, RowText, TextCodec, encode_prompt
from llama.texts.scheduler import Text, Texts

logger = logging.getLogger(__name__)


class Writer:
    """Texts that come and go, as text. For one thread."""

    def __init__(self, model: Any, tokenizer: TextCodec, *, speculate: str | None = None, **options: Any) -> None:
        """Make a writer without texts. Takes the options of `Texts`; for `speculate`, of all texts, see `Options`.

        Raises ValueError if texts cannot join others in a cache of this kind, or cannot speculate with it.
        """
        self.texts, self.tokenizer, self._speculate = Texts(steady(model), **options), tokenizer, speculate
        self.texts.check_speculation(speculate)

    def add(
        self,
        prompt: str | Sequence[int],
        max_gen_len: int = 64,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> Text:
        """Add a prompt, a text or its ids; it also ends before any of the `stop` strings. Raises ValueError."""
        read = RowText(self.tokenizer, stop, logprobs=options.get("logprobs", False))
        ids = encode_prompt(self.tokenizer, prompt)
        options.setdefault("speculate", self._speculate)
        options["schema"] = schema_of(options.get("schema"), self.tokenizer, self.texts.vocab_size)
        text = self.texts.add(ids, max_gen_len, stop_ids=self.tokenizer.stop_tokens, **options)
        text.read = read
        return text

    def cancel(self, text: Text) -> None:
        """End a text; its completion keeps what was generated."""
        self.texts.cancel(text)
        text.ended = time.monotonic()

    def step(self, *, maybe_changed: bool = True) -> Iterator[tuple[Text, str]]:
        """Make one step; yield each text that has grown or ended, with its new piece of text. See `Texts.step`."""
        for text, token, finish, error in self.texts.step(maybe_changed=maybe_changed):
            if text.ended is not None:  # by a stop string, or cancelled, in the same step
                continue
            if token is not None:
                text.began = text.began or time.monotonic()
            text.error, piece = error, text.read.take(token, finish)
            if finish or text.read.stopped:
                self.cancel(text)
            yield text, piece


def why_not(model: Any) -> str | None:
    """Return why rows cannot join a running batch of the model; None if they can."""
    if not model.kv_caching:
        return "rows join a batch by the KV cache, which is off; set model.kv_caching = True"
    if model.ranks.size > 1:
        return "rows cannot join a batch of a model that several processes share"
    if model.runner is not None and model.runner.steady() is None:
        return f"rows cannot join a batch whose steps are {model.runner.name}"
    return None


def steady(model: Any) -> Any:
    """Return the model as many texts use it: how a row is computed does not depend on the number of rows.

    Raises ValueError if rows cannot join a batch of the model.
    """
    if (why := why_not(model)) is not None:
        raise ValueError(why)
    if model.runner is None:
        return model
    twin = copy(model)
    twin.__dict__["original"] = model  # not a submodule
    twin.runner = model.runner.steady()
    return twin


def generate_many(
    model: Any,
    tokenizer: TextCodec,
    prompts: str | Iterable[str | Sequence[int]],
    max_gen_len: int = 64,
    *,
    stop: str | Sequence[str] = (),
    rows: int = 16,
    ordered: bool = False,
    cache_bytes: int | None = None,
    **options: Unpack[Options],
) -> Iterator[tuple[int, Completion]]:
    """Continue every prompt; see `Generation.generate_many`."""
    seed = options.pop("seed", None)
    first = whole_number(seed)
    if first is None and seed is not None:
        raise ValueError(f"seed={seed!r} must be a whole number, from which prompt i has seed + i, or None")
    if whole_number(rows) is None or rows < 1:  # `Texts` checks it too, but chunks need no `Texts`
        raise ValueError(f"rows={rows!r} must be a whole number of at least 1")
    prompts = [prompts] if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable) else prompts
    numbered = ((i, prompt, None if first is None else first + i) for i, prompt in enumerate(prompts))
    if model.kv_caching and (why := why_not(model)) is not None:
        also = "" if cache_bytes is None else "; cache_bytes has no effect"
        told = "%s: prompts are taken in chunks of %d, each of which waits for its longest text%s"
        logger.warning(told, why, rows, also)
        return _in_chunks(model, tokenizer, numbered, max_gen_len, stop, rows, options)
    kind = options.pop("kv_cache", None)
    writer = Writer(model, tokenizer, rows=rows, kv_cache=kind, cache_bytes=cache_bytes)
    made = _completions(writer, numbered, max_gen_len, stop, options)
    return _in_order(made) if ordered else made


Numbered = Iterator[tuple[int, str | Sequence[int], int | None]]  # a prompt's number, the prompt, and its seed


def _completions(
    writer: Writer, prompts: Numbered, max_gen_len: int, stop: str | Sequence[str], options: Options
) -> Iterator[tuple[int, Completion]]:
    """Yield each prompt's number and Completion as soon as it ends; take a prompt when none waits."""
    maybe_changed = more = True  # the caller's code may change the model, as the iterable's may, also at its end
    while True:
        while more and writer.texts.waiting == 0:
            item, maybe_changed = next(prompts, None), True
            if more := item is not None:
                number, prompt, seed = item
                own: Options = {**options, "seed": seed}
                try:
                    writer.add(prompt, max_gen_len, stop, **own)
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error
        if writer.texts.idle:
            return
        grown, maybe_changed = writer.step(maybe_changed=maybe_changed), False
        for text, _ in grown:
            if text.error is not None:
                raise text.error
            if text.ended is not None:
                maybe_changed = True
                yield text.number, text.read.completion  # texts have the numbers of their prompts


def _in_chunks(
    model: Any,
    tokenizer: TextCodec,
    prompts: Numbered,
    max_gen_len: int,
    stop: str | Sequence[str],
    rows: int,
    options: Options,
) -> Iterator[tuple[int, Completion]]:
    """Yield each prompt's number and Completion; batches of `rows` prompts run one after another."""
    while chunk := list(islice(prompts, rows)):
        for number, prompt, seed in chunk:
            try:
                model.stream(tokenizer, [prompt], max_gen_len, stop=stop, seed=seed, **options)  # checks, runs nothing
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        numbers, texts, each = zip(*chunk, strict=True)
        seeds = None if each[0] is None else list(each)
        try:
            made = model.generate(tokenizer, texts, max_gen_len, stop=stop, seed=seeds, **options)
        except NonFiniteLogits as error:
            raise NonFiniteLogits(error.step, numbers[error.row]) from error
        yield from zip(numbers, made, strict=True)


def _in_order(made: Iterator[tuple[int, Completion]]) -> Iterator[tuple[int, Completion]]:
    """Yield the completions in order of their numbers."""
    early: dict[int, Completion] = {}
    due = 0
    for number, completion in made:
        early[number] = completion
        while due in early:
            yield due, early.pop(due)
            due += 1
