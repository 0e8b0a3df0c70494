"""The generation loop: prefill, decode, stopping, for any model that maps ids at positions to logits.

With a cache, a step is fed just the tokens that the model has not seen, `tokens[:, prev_pos:cur_pos]`; without it, the
whole prefix. Rows of different lengths decode at their own positions. The loop speaks token ids; text enters and leaves
at `generate` and `stream`, through a tokenizer that is handed in. Does not know what a model is made of, nor how its
cache works.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Unpack

import torch
from torch import Tensor

from llama.batch import Batch, Chosen, NonFiniteLogits, Token, padded
from llama.ownership import Ownership
from llama.ranks import ALONE, Ranks
from llama.request import Limits, Options, Step, listing_options, make_request
from llama.rows import Rows
from llama.runner import Runner
from llama.streaming import Completion, Stream, TextCodec, encode_prompt

__all__ = [
    "Chosen",
    "Completion",
    "Generation",
    "LanguageModel",
    "NonFiniteLogits",
    "Options",
    "Step",
    "Stream",
    "grow",
    "padded",
]


logger = logging.getLogger(__name__)
Given = ParamSpec("Given")
Made = TypeVar("Made")


class LanguageModel(Protocol):
    """What the loop needs of a model. `llama.Transformer` has it, and so has a small fake in the tests."""

    kv_caching: bool
    kv_cache: str
    caches: list[Any]  # of each layer; the loop lets their rows share a prefix, and puts them back

    @property
    def args(self) -> Limits: ...
    @property
    def ownership(self) -> Ownership: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def ranks(self) -> Ranks: ...
    def __call__(self, tokens: Tensor, start_pos: Rows, *, logits: Literal["all", "last"]) -> Tensor: ...
    def reserve_cache(self, rows: int, length: int) -> None: ...
    def free_cache(self) -> None: ...
    def bound(self, kv_cache: str | None) -> int | None: ...
    def put_back(self, caches: list[Any]) -> None: ...
    def run_ahead(self, batch: Batch) -> Iterator[Chosen]: ...


class Generation:
    """Mix into a LanguageModel to let it generate."""

    ranks: Ranks = ALONE
    runner: Runner[Any] | None = None  # the slot for a faster way to run forwards

    @cached_property
    def ownership(self) -> Ownership:
        """Who may use the model now."""
        return Ownership()

    def bound(self, kv_cache: str | None) -> int | None:
        """Return how many positions a cache of that kind, or the model's own, holds at most; None: no such number."""
        return None

    @contextmanager
    def switched(self: LanguageModel, *, kv_caching: bool, kv_cache: str | None = None) -> Iterator[None]:
        """Switch the cache, and its kind unless that is None, for what stands under `with`; free it and switch back.

        Other threads are refused meanwhile.
        """
        with self.ownership.kept():
            back = _switch(self, kv_caching, kv_cache)
            try:
                yield
            finally:
                self.ownership.keep_here()  # a generator that holds the block may be closed by anybody
                back()

    @property
    def generating(self) -> bool:
        """Whether a generation owns the model, which refuses all others meanwhile."""
        return self.ownership.generating

    def run_ahead(self, batch: Batch) -> Iterator[Chosen]:
        """Yield what further steps choose, several of them computed at a time; where it ends, the loop goes on itself.

        Every row's newest token, not fed yet, stands before its cur_pos. The batch stays as it is but for `fed`: the
        loop appends what was chosen. At most as many steps are asked for as the longest row grows.
        """
        return iter(()) if self.runner is None else self.runner.run_ahead(self, batch)

    @listing_options()
    def generate_tokens(
        self: LanguageModel,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int | Sequence[int] = 64,
        *,
        stop_ids: Sequence[int] = (),
        **options: Unpack[Options],
    ) -> tuple[list[list[int]], list[list[float | None]] | None]:
        """Continue every prompt by at most `max_gen_len` ids (one number, or one per row), ending before a stop id.

        Returns the new ids of each row and, where `logprobs` is set, the log-probability of each, else None. With
        `echo` the prompt's come first; nothing predicts the first of them, so its log-probability is None. Raises
        ValueError on bad input, and NonFiniteLogits.
        """
        batch = _batch(self, prompt_tokens, max_gen_len, stop_ids, options)
        ids: list[list[int]] = [[] for _ in batch.cur_pos]
        logprobs: list[list[float | None]] = [[] for _ in batch.cur_pos]
        with torch.inference_mode():
            for token in _generate(self, batch):
                ids[token.row].append(token.id)
                logprobs[token.row].append(token.logprob)
        return ids, logprobs if batch.request.logprobs else None

    @listing_options()
    def generate(
        self: LanguageModel,
        tokenizer: TextCodec,
        prompts: str | Sequence[str | Sequence[int]],
        max_gen_len: int | Sequence[int] = 64,
        *,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Continue every prompt, a text or its ids, and return a Completion for each: its text, ids, and why it ended.

        `prompts` is one, or a sequence of them, a row for each; `max_gen_len` is one number, or one for each row.
        A row ends before a stop token of the tokenizer, before any of the `stop` strings in its new text, or after
        `max_gen_len` tokens. Where a stop string cuts the text, `ids` still hold the tokens that spelled it.
        Raises ValueError on bad input, and NonFiniteLogits.
        """
        stream = _stream(self, tokenizer, prompts, max_gen_len, stop, options)
        with torch.inference_mode():
            stream.finish()
        return stream.results

    @listing_options()
    def stream(
        self: LanguageModel,
        tokenizer: TextCodec,
        prompts: str | Sequence[str | Sequence[int]],
        max_gen_len: int | Sequence[int] = 64,
        *,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> Stream:
        """Return an iterator over (row, piece of its text), in the order in which the pieces are made.

        The pieces of a row never split a character, and together they are what `generate` returns, which takes the same
        arguments. `results` has the Completions so far.
        """
        return _stream(self, tokenizer, prompts, max_gen_len, stop, options)


def _inferring(steps: Callable[Given, Generator[Made, None, None]]) -> Callable[Given, Generator[Made, None, None]]:
    """Let a generator compute in inference mode, whoever asks for what it yields; who is in it already enters no other.

    As torch.inference_mode does, which enters one each time: at a step of a small model that is a time to be seen.
    """

    @wraps(steps)
    def inferring(*given: Given.args, **named: Given.kwargs) -> Generator[Made, None, None]:
        with closing(steps(*given, **named)) as made:
            while True:
                if torch.is_inference_mode_enabled():
                    one = next(made, None)
                else:
                    with torch.inference_mode():
                        one = next(made, None)
                if one is None:
                    return
                yield one

    return inferring


@_inferring
def _generate(model: LanguageModel, batch: Batch) -> Generator[Token, None, None]:
    """Yield every row's tokens, step by step."""
    with _running(model, batch):
        batch.begin(model.args.vocab_size, model.device)
        logits, echo = _prefill(model, batch)
        yield from echo
        if not batch.live:
            return
        for chosen in _steps(model, batch, logits):
            yield from batch.record(chosen)
            if not batch.live:
                return


@_inferring
def grow(
    model: LanguageModel, batch: Batch, begin: int, logits: Tensor | None
) -> Generator[tuple[list[Token], Tensor | None], None, None]:
    """Yield what each step makes of one text whose first `begin` tokens are in the cache, and who calls owns the model.

    A step is its tokens, none where the text ends, and the logits that they were chosen from, (1, vocab), which hold
    until the next step. `logits` are those that follow the text; None: the rest of it is fed for them.
    """
    batch.lasting = True
    if logits is None:
        logits = _feed(model, batch, [begin])[:, -1]
    for chosen in _steps(model, batch, logits):
        yield list(batch.record(chosen)), chosen.logits
        if not batch.live:
            return


def _steps(model: LanguageModel, batch: Batch, logits: Tensor) -> Iterator[Chosen]:
    """Yield what every step chooses, for as long as the caller asks; `logits` are those that follow the prompts."""
    yield _choose(model, batch, logits)
    yield from _run_ahead(model, batch)
    while True:
        logits = _decode(model, batch)
        yield _choose(model, batch, logits)


def _prefill(model: LanguageModel, batch: Batch) -> tuple[Tensor, list[Token]]:
    """Feed all prompts in one pass; return the logits of each row's next token, (bsz, vocab), and what to echo."""
    request, begin = batch.request, [_share_prefix(model, batch)] * len(batch.cur_pos)
    if not (request.echo and request.logprobs):
        logits = _feed(model, batch, begin)
        prompts = request.prompts if request.echo else []
        return logits[:, -1], [Token(row, id, None, True) for row, ids in enumerate(prompts) for id in ids]
    logits = _feed(model, batch, begin, logits="all")  # the only case that looks at the logits of all positions
    echo = []
    for row, prompt in enumerate(request.prompts):
        predicted = torch.tensor(prompt[1:], dtype=torch.int64, device=logits.device)
        scores = logits[row, : len(prompt) - 1].log_softmax(-1).gather(-1, predicted[:, None])[:, 0].tolist()
        echo += [Token(row, id, score, True) for id, score in zip(prompt, [None, *scores], strict=True)]
    return logits[list(range(len(begin))), [pos - 1 for pos in batch.cur_pos]], echo


def _share_prefix(model: LanguageModel, batch: Batch) -> int:
    """Let every row have what all prompts begin with, fed once or held already; return how many tokens these are."""
    shared, rows, begin = batch.request.shared, len(batch.cur_pos), batch.held
    if shared > begin:
        logger.info("%d tokens that all %d prompts begin with are fed once", shared - begin, rows)
        _run(model, batch, batch.tokens[:1, begin:shared], Rows.at([begin], [shared - begin]))
        begin = shared
    if begin:
        with model.ownership.acting():
            for cache in model.caches:
                cache.spread(rows)
    return begin


def _decode(model: LanguageModel, batch: Batch) -> Tensor:
    """Feed every row's newest token, or without a cache its whole prefix; return the next logits, (bsz, vocab)."""
    prev_pos = [pos - 1 for pos in batch.cur_pos] if model.kv_caching else [0] * len(batch.cur_pos)
    active = [row in batch.live for row in range(len(prev_pos))]
    return _feed(model, batch, prev_pos, active=active)[:, -1]


def _feed(
    model: LanguageModel,
    batch: Batch,
    prev_pos: list[int],
    *,
    logits: Literal["all", "last"] = "last",
    active: Sequence[bool] | None = None,
) -> Tensor:
    """Run the model on tokens[:, prev_pos:cur_pos]."""
    lengths = [cur - prev for prev, cur in zip(prev_pos, batch.cur_pos, strict=True)]
    rows = Rows.at(prev_pos, lengths, active=active)
    return _run(model, batch, batch.window(prev_pos, rows.width), rows, logits)


def _run(
    model: LanguageModel, batch: Batch, fed: Tensor, rows: Rows, logits: Literal["all", "last"] = "last"
) -> Tensor:
    """Run the model on `fed`; call `on_step` before."""
    if batch.request.on_step is not None:
        prev_pos, lengths = list(rows.starts), rows.lengths
        ids = [row[:length] for row, length in zip(fed.tolist(), lengths, strict=True)]
        cur_pos = [prev + length for prev, length in zip(prev_pos, lengths, strict=True)]
        batch.request.on_step(Step(prev_pos, cur_pos, ids, frozenset(batch.live)))
        batch.disturbed = True
    with model.ownership.acting(undisturbed=not batch.disturbed):
        batch.disturbed = False
        batch.fed += sum(rows.lengths)
        return model(fed, rows, logits=logits)


def _choose(model: LanguageModel, batch: Batch, logits: Tensor) -> Chosen:
    """Choose the next token of every row from its logits, (bsz, vocab), and append it."""
    ids = model.ranks.decide(batch.sampler(logits))
    batch.append(ids)
    return batch.outcome(ids, logits)


def _run_ahead(model: LanguageModel, batch: Batch) -> Iterator[Chosen]:
    """Yield what steps ahead of the loop choose; where they end, the batch is brought to where they ended."""
    made = []
    for chosen in model.run_ahead(batch):
        yield chosen
        made.append(chosen.ids)
    for ids in made:
        appended = torch.tensor(ids, device="cpu").clamp(min=0).to(batch.tokens.device)  # -1: of a row that has ended
        batch.sampler.note(appended)
        batch.append(appended)


@contextmanager
def _running(model: LanguageModel, batch: Batch) -> Iterator[None]:
    """Give the model its cache and its switch for one generation, and take both back whatever happens."""
    request = batch.request
    with model.ownership.hold():
        model.ranks.agree(
            lambda: {"prompts": request.prompts, "options": replace(request, prompts=[], seed=None, on_step=None)}
        )
        with model.ownership.acting():
            back = _switch(model, request.kv_caching, batch.caches or request.kv_cache)
        try:
            if not batch.caches:
                with model.ownership.acting():
                    model.reserve_cache(len(request.prompts), request.longest)
            yield
        finally:
            with model.ownership.acting():
                back()


def _switch(model: LanguageModel, kv_caching: bool, kv_cache: str | list[Any] | None) -> Callable[[], None]:
    """Switch the cache, and its kind unless that is None, or the caches; return what frees and sets all as it was."""
    caching = model.kv_caching
    caches = None if kv_cache is None else model.caches

    def back() -> None:
        model.free_cache()
        model.kv_caching = caching
        if caches is not None:
            model.put_back(caches)

    try:
        if isinstance(kv_cache, list):
            model.caches = kv_cache
        elif kv_cache is not None:
            model.kv_cache = kv_cache
        model.kv_caching = kv_caching
    except BaseException:
        back()
        raise
    return back


def _batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop_ids: Sequence[int],
    options: Options,
) -> Batch:
    """Return the batch that is asked for, checked."""
    _check_device(model, options.get("device"))
    prefix = options.get("prefix")
    if prefix is None:
        bound = model.bound(options.get("kv_cache"))
        return Batch(make_request(model.args, model.kv_caching, prompts, max_gen_len, stop_ids, options, bound=bound))
    if prefix.model is not model:
        raise ValueError("prefix is a session of another model; give one of this model's")
    request = make_request(prefix, model.kv_caching, prompts, max_gen_len, stop_ids, options, bound=prefix.bound)
    batch = Batch(request)
    batch.caches = prefix.copies(kv_caching=request.kv_caching)
    batch.held = len(prefix.tokens) if batch.caches else 0
    return batch


def _stream(
    model: LanguageModel,
    tokenizer: TextCodec,
    prompts: str | Sequence[str | Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop: str | Sequence[str],
    options: Options,
) -> Stream:
    prompts = [prompts] if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable) else list(prompts)
    bos = options.get("prefix") is None  # which has one
    ids = [encode_prompt(tokenizer, prompt, bos=bos) for prompt in prompts]
    batch = _batch(model, ids, max_gen_len, tokenizer.stop_tokens, options)
    return Stream(_generate(model, batch), batch, tokenizer, prompts, stop)


def _check_device(model: LanguageModel, device: torch.device | str | None) -> None:
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r} is not known; the model is on {model.device}") from None
    if wanted.type != model.device.type or wanted.index not in (None, model.device.index):
        raise ValueError(
            f"the model is on {model.device}, not on {wanted}; move it with model.to({str(wanted)!r}) first"
        )
