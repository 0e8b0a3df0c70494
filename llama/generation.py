"""The generation loop: prefill, decode, choose and stop, for any model that maps ids and positions to logits.

With a cache, a step is fed only the tokens that the cache has not seen, `tokens[:, prev_pos:cur_pos]`; without it, the
whole prefix. Rows of different lengths decode at their own positions, and a row that has ended leaves the batch. The
loop uses token ids; `generate` and `stream` convert from and to text with the tokenizer that they are given. Does not
know the architecture of a model or the kinds of its cache.
"""

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import add, sub
from os import PathLike
from time import thread_time
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, Unpack

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.batch import Batch, Chosen, Token, padded
from llama.kv_cache import Cache
from llama.ranks import ALONE, Ranks
from llama.request import OF_A_BATCH, Options, Step, check_scored, check_speculation, listing_options, make_request
from llama.rows import Rows
from llama.sampling import Sampler, choose_rows
from llama.schemas import schema_of
from llama.speculation import Width, accepted, width_of
from llama.stepper import Runner, Stepper, inferring
from llama.streaming import Completion, Stream, TextCodec, encode_prompt

if TYPE_CHECKING:
    from llama.texts.session import Session

logger = logging.getLogger(__name__)


class LanguageModel(Protocol):
    """A model, as far as the loop uses it. `llama.Transformer` is one, and the tests have a small fake."""

    runner: Runner[Any] | None

    @property
    def args(self) -> ModelArgs: ...
    @property
    def kv_caching(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def ranks(self) -> Ranks: ...
    def __call__(
        self, tokens: Tensor, start_pos: Rows, *, cache: Cache | None, logits: Literal["all", "last"]
    ) -> Tensor: ...
    def new_cache(self, kind: str | None = None, *, rows: int = 0, length: int = 0) -> Cache: ...
    def with_kv_caching(self, value: bool) -> Self: ...


class PlainStepper:
    """Makes the tokens of a batch by one call of the model per step, or per guess of several; see `Stepper`."""

    def __init__(self, model: LanguageModel, batch: Batch, cache: Cache | None) -> None:
        self.model, self.batch, self.device = model, batch, model.device
        self.logits: Tensor | None = None
        self.cache = cache or made_cache(model, batch)
        self.pending = 0
        self.width = width_of(batch.request.speculate)

    def prefill(self) -> Iterator[Token]:
        """Feed all prompts in one pass; yield their tokens if `echo` is set."""
        batch, request = self.batch, self.batch.request
        scored = request.echo and request.logprobs  # the only case that needs the logits of all positions
        prev_pos = [self._share_prefix()] * len(batch.rows)
        rows = Rows.at(prev_pos, list(map(sub, batch.cur_pos, prev_pos)), prompt_ends=batch.prompt_ends)
        logits = self._feed(batch.tokens(prev_pos, self.device), rows, "all" if scored else "last")
        if not scored:
            self.logits = logits[:, -1]
            yield from (Token(row.number, id, None, True) for row in batch.rows if request.echo for id in row.ids)
            return
        self.logits = logits[list(range(len(prev_pos))), [pos - 1 for pos in batch.cur_pos]]
        for row, prompt in enumerate(request.prompts):
            predicted = torch.tensor(prompt[1:], dtype=torch.int64, device=logits.device)
            scores = logits[row, : len(prompt) - 1].log_softmax(-1).gather(-1, predicted[:, None])[:, 0].tolist()
            yield from (Token(row, id, score, True) for id, score in zip(prompt, [None, *scores], strict=True))

    def feed(self, end: int) -> None:
        """Feed the prompt of the only row up to position `end`, before its end; `prefill` feeds the rest."""
        begin, (row,) = self.batch.prefix_len, self.batch.rows
        self._feed(padded([row.ids[begin:end]], self.device), Rows.at([begin], [end - begin]))
        self.batch.prefix_len = end

    def join(self, other: "PlainStepper") -> None:
        """Take over the only row of a stepper that has chosen the row's first token, and what its cache holds."""
        assert self.cache is not None
        assert other.cache is not None
        (row,) = other.batch.rows
        self.cache.join(other.cache, len(self.batch.rows), len(row.ids) - 1)
        self.batch.rows.append(row)
        self.width = self.width or other.width

    def __iter__(self) -> Iterator[Chosen]:
        """Yield the choice of each step, first after the prompts, then after each row's newest token."""
        yield self._choose()
        while True:
            self.drop_ended()
            yield from (self._step(),) if self.width is None else self._guessed(self.width)

    def _guessed(self, width: Width) -> Iterator[Chosen]:
        """Yield the choices of one call: of a step, or of guesses if these make more tokens a second."""
        began, rows = thread_time(), self.batch.rows
        guesses = self.batch.guesses(self.model.args.max_seq_len)  # first: it updates the chances
        guesses = width.cut(guesses, [0.0 if row.guesser is None else row.guesser.chance for row in rows])
        made = self._verify(guesses) if any(guesses) else self._step()
        stepped = isinstance(made, Chosen)
        width.took(len(rows) + (0 if stepped else sum(map(len, guesses))), thread_time() - began)
        if isinstance(made, Chosen):
            yield made
        else:
            yield from self._pending(*made)

    def _step(self) -> Chosen:
        """Feed every row's newest token, and choose the next."""
        self._decode()
        return self._choose()

    def _verify(self, guesses: Sequence[list[int]]) -> tuple[list[Chosen], Tensor | None] | Chosen:
        """Feed a guess behind every row's newest token; return the choices of as many steps as it was right, and one.

        A step's choice instead, if the call that verifies guesses would have other bits than steps.

        Rows whose guess is wrong earlier get None from the further steps. Every row's draws are back in its sampler:
        `_pending` uses those of each step. The second result are the logits of these steps, if there is one row.
        A choice that is not finite may come from a wrong token behind it, whose nan is multiplied by 0 in attention:
        that row gets a step without a guess.
        """
        batch = self.batch
        samplers = [each for row, guess in zip(batch.rows, guesses, strict=True) for each in row.sampler.ahead(guess)]
        logits = self._feed_guesses(guesses)
        if logits is None:
            return self._step()
        drawn = [sampler.draw() for sampler in samplers]
        made = self._pick(logits, samplers, torch.tensor(drawn, dtype=torch.float64, device="cpu"))
        batch.maybe_changed = False  # since the call; `_feed_guesses` has compared what it must
        used: list[list[tuple[int | None, float | None]]] = []  # the choices of each row
        begin = 0
        for row, guess in zip(batch.rows, guesses, strict=True):
            end = begin + 1 + len(guess)
            row.sampler.put_back(drawn[begin:end])
            right = accepted(guess, made.ids[begin:end])
            if row.guesser is not None:
                row.guesser.count(len(guess), right)
            batch.proposed, batch.accepted = batch.proposed + len(guess), batch.accepted + right
            used.append(list(zip(made.ids[begin:end], made.logprobs[begin:end], strict=True))[: right + 1])
            if guess and made.ids[begin + right] == -1:
                row.guesser = None
                used[-1].pop()
            begin = end
        choices = [Chosen(*zip(*step, strict=True)) for step in zip_longest(*used, fillvalue=(None, None))]
        return choices, logits if len(guesses) == 1 else None

    def _pending(self, choices: Sequence[Chosen], logits: Tensor | None) -> Iterator[Chosen]:
        """Yield the choices of a call, up to a change of the model: the further ones come from the model before it.

        Between two of them the samplers are as plain steps leave them.
        """
        before = self._model_now() if len(choices) > 1 else None
        for step, chosen in enumerate(choices):
            if step and self.batch.maybe_changed and self._model_now() != before:
                break
            for row, id in zip(self.batch.rows, chosen.ids, strict=True):
                if id is not None:
                    row.sampler.draw()
            self.pending = len(choices) - 1 - step
            self.logits = None if logits is None else logits[step : step + 1].clone()
            yield chosen
        self.pending = 0

    def _feed_guesses(self, guesses: Sequence[list[int]]) -> Tensor | None:
        """Feed every row's newest token and a guess; return the logits of all tokens, one row after the other.

        None if nothing was fed, because the call would have other bits than steps.
        """
        fed = [[row.ids[-1], *guess] for row, guess in zip(self.batch.rows, guesses, strict=True)]
        starts, lengths = [pos - 1 for pos in self.batch.cur_pos], list(map(len, fed))
        tokens, rows = padded(fed, self.device), Rows.at(starts, lengths)
        self._announce(tokens, rows)
        if self.leaves_guesses:  # the model has changed, perhaps by `on_step`
            self.width = None
            return None
        logits = self._forward(tokens, rows, "all")
        return torch.cat([own[:length] for own, length in zip(logits, lengths, strict=True)])

    @property
    def leaves_guesses(self) -> bool:
        """Whether the plain path would run calls that verify guesses, and these would have other bits than steps."""
        runner = self.model.runner
        if runner is None:
            return False
        return runner.plain_prompts or (runner.exact is not None and runner.left(self.model, self.cache) != "none")

    def _pick(self, logits: Tensor, samplers: Sequence[Sampler], draws: Tensor) -> Chosen:
        """Return the choices from logits, (n, vocab), by n samplers and draws."""
        return self.batch.outcome(choose_rows(logits, samplers, draws), logits)

    def _model_now(self) -> object:
        """Return a value that differs after a change of the model, except numbers written through `Tensor.data`."""
        return state_of(self.model)

    def _choose(self) -> Chosen:
        """Choose the next token of every row from the logits."""
        assert self.logits is not None
        ids, ranks = choose_rows(self.logits, self.batch.samplers, self.batch.draw()), self.model.ranks
        return self.batch.outcome(ids if ranks.size == 1 else ranks.decide(ids), self.logits)

    def drop_ended(self) -> None:
        """Remove the rows that have ended from the batch and the cache."""
        places = self.batch.drop_ended()
        if places is not None and self.cache is not None:
            self.cache.select_rows(places)

    def _decode(self) -> None:
        """Feed every row's newest token or, without a cache, its whole prefix."""
        batch = self.batch
        prev_pos = [0] * len(batch.rows) if self.cache is None else [pos - 1 for pos in batch.cur_pos]
        lengths = list(map(sub, batch.cur_pos, prev_pos))
        self.logits = self._feed(batch.tokens(prev_pos, self.device), Rows.at(prev_pos, lengths))[:, -1]

    def _feed(self, fed: Tensor, rows: Rows, logits: Literal["all", "last"] = "last") -> Tensor:
        """Call `on_step`, then the model, with tokens[:, prev_pos:cur_pos]; return the logits."""
        self._announce(fed, rows)
        return self._forward(fed, rows, logits)

    def _announce(self, fed: Tensor, rows: Rows) -> None:
        batch, on_step = self.batch, self.batch.request.on_step
        if on_step is not None:
            ids = [row[:length] for row, length in zip(fed.tolist(), rows.lengths, strict=True)]
            cur_pos = list(map(add, rows.starts, rows.lengths))
            numbers = [row.number for row in batch.rows[: len(ids)]]
            on_step(Step(numbers, list(rows.starts), cur_pos, ids, self.cache))

    def _forward(self, fed: Tensor, rows: Rows, logits: Literal["all", "last"]) -> Tensor:
        self.batch.fed += sum(rows.lengths)
        return self.model(fed, rows, cache=self.cache, logits=logits)

    def _share_prefix(self) -> int:
        """Feed the common prefix once, unless it is cached, and copy it to every row; return its length."""
        batch, shared, rows = self.batch, self.batch.request.shared, len(self.batch.rows)
        begin, whole = batch.prefix_len, self.cache is not None and self.cache.whole_prompt
        if shared > begin and not whole:
            logger.info("%d tokens that all %d prompts begin with are fed once", shared - begin, rows)
            common = padded([batch.rows[0].ids[begin:shared]], self.device)
            self._feed(common, Rows.at([begin], [shared - begin]))
            begin = shared
        elif shared > begin and self.cache is not None:
            logger.info("share_prefix has no effect: what kv_cache=%s stores depends on the cut", self.cache.kind)
        if begin and rows > 1 and self.cache is not None:
            self.cache.repeat_first_row(rows)
        return begin


def state_of(model: object) -> list[object]:
    """Return the identities of all attributes of a model's modules, and how often each of their tensors was written.

    A tensor that was made in inference mode counts no writes: then no two results are equal.
    """
    found: list[object] = []
    for module in model.modules() if isinstance(model, nn.Module) else ():
        found += map(id, vars(module).values())
        for parts in (module._parameters, module._buffers, module._modules, *_hooks(module)):
            found += map(id, parts.values())
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            found.append(None if tensor is None else object() if tensor.is_inference() else tensor._version)
    return found


def _hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def made_cache(model: LanguageModel, batch: Batch) -> Cache | None:
    """Return a cache of the requested kind, with capacity for the whole batch; None with the switch off."""
    request = batch.request
    if not request.kv_caching:
        return None
    return model.new_cache(request.kv_cache, rows=len(request.prompts), length=request.longest)


def make_stepper(model: LanguageModel, batch: Batch, cache: Cache | None) -> Stepper:
    """Return the stepper of the model's runner, or the plain one."""
    made = None if model.runner is None else model.runner.stepper(model, batch, cache)
    if made is not None:
        return made
    plain = PlainStepper(model, batch, cache)
    if plain.width is not None and plain.leaves_guesses:
        plain.width = None
    return plain


class Generation:
    """A mixin that adds generation to a LanguageModel."""

    ranks: Ranks = ALONE
    runner: Runner[Any] | None = None  # the slot for a faster way to run forwards

    @listing_options()
    def generate_tokens(
        self: LanguageModel,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int | Sequence[int] = 64,
        *,
        stop_ids: Sequence[int] = (),
        **options: Unpack[Options],
    ) -> tuple[list[list[int]], list[list[float | None]] | None]:
        """Continue every prompt by at most `max_gen_len` ids (one number, or one per row), up to a stop id.

        Returns the new ids of each row, and their log-probabilities if `logprobs` is set, else None. With `echo` each
        row begins with the prompt; the log-probability of its first token is None. Raises ValueError on bad input, and
        NonFiniteLogits.
        """
        batch, cache = _batch(self, prompt_tokens, max_gen_len, stop_ids, options)
        ids: list[list[int]] = [[] for _ in batch.rows]
        logprobs: list[list[float | None]] = [[] for _ in batch.rows]
        with torch.inference_mode():
            for token in _generate(self, batch, cache):
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
        """Continue every prompt, a text or its ids, and return a Completion for each: text, ids and reason to stop.

        `prompts` is one prompt, or a sequence with one for each row; `max_gen_len` is one number, or one for each row.
        A row ends before a stop token of the tokenizer, before any of the `stop` strings in its new text, or after
        `max_gen_len` tokens. If a stop string cuts the text, `ids` still contain its tokens.
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
        """Return an iterator over (row, piece of text), in the order in which pieces are generated.

        Takes the arguments of `generate`. A piece has whole characters; the pieces of a row together are the text that
        `generate` returns. `results` has the Completions so far.
        """
        return _stream(self, tokenizer, prompts, max_gen_len, stop, options)

    # ---- texts that outlive a call or share the model; llama/texts/ imports this file, so the methods import it ------

    def session(
        self: LanguageModel, tokenizer: TextCodec, *, max_seq_len: int | None = None, kv_cache: str | None = None
    ) -> "Session":
        """Return a new session: a text and its cache.

        `max_seq_len` limits the text, and `kv_cache` names the kind of cache; the defaults are the model's.
        """
        from llama.texts.session import Session

        return Session(self, tokenizer, max_seq_len=max_seq_len, kv_cache=kv_cache)

    def load_session(self: Any, path: str | PathLike[str], tokenizer: TextCodec | None = None) -> "Session":
        """Return the session that `session.save` stored. It continues as if it had never been saved.

        Without a tokenizer the session accepts and returns ids only. Raises ValueError for a file that is not a session
        or is damaged, and for a session of another model, tokenizer, dtype or mode.
        """
        from llama.texts.session import load_session

        return load_session(self, path, tokenizer)

    @listing_options(but=[name for name in OF_A_BATCH if name != "kv_cache"])
    def generate_many(
        self: Any,
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
        """Continue every prompt; yield (number, Completion) of each as soon as it ends, or in order of the prompts.

        Up to `rows` texts generate at a time; a prompt is taken from the iterable when a row is free, so it may have no
        end; a str is one prompt. Each text is what it is alone: prompt `i` has the seed `seed + i`. `cache_bytes`
        limits the bytes of all caches; within them, texts that have ended stay for prompts that begin alike. Raises
        ValueError for bad input, with the number of the prompt, and NonFiniteLogits. `docs/many_texts.md` says which
        kinds of cache can be used.
        """
        from llama.texts.many import generate_many

        how: Any = {"stop": stop, "rows": rows, "ordered": ordered, "cache_bytes": cache_bytes}
        return generate_many(self, tokenizer, prompts, max_gen_len, **how, **options)


@inferring
def _generate(model: LanguageModel, batch: Batch, cache: Cache | None) -> Generator[Token, None, None]:
    """Yield the tokens of all rows, step by step."""
    request = batch.request
    with model.ranks.one_at_a_time():
        model.ranks.agree(
            lambda: {"prompts": request.prompts, "options": replace(request, prompts=[], seed=None, on_step=None)}
        )
        stepper = make_stepper(model.with_kv_caching(request.kv_caching), batch, cache)
        yield from stepper.prefill()
        for chosen in stepper if batch.goes_on else ():
            yield from batch.record(chosen)
            if not batch.goes_on:
                return


def _batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop_ids: Sequence[int],
    options: Options,
) -> tuple[Batch, Cache | None]:
    """Return the checked batch, and the cache of the prefix that all rows continue, if any."""
    _check_device(model, options.get("device"))
    prefix = options.get("prefix")
    if prefix is None:
        empty = model.new_cache(options.get("kv_cache"))
        limits, caching = model.args, model.kv_caching
        request = make_request(limits, caching, prompts, max_gen_len, stop_ids, options, bound=empty.bound)
        check_scored(request, empty)
        check_speculation(request.speculate, empty, model.ranks.size)
        return Batch(request, limits.vocab_size), None
    if prefix.model is not model:
        raise ValueError("prefix is a session of another model; give one of this model's")
    request = make_request(prefix.limits, model.kv_caching, prompts, max_gen_len, stop_ids, options, bound=prefix.bound)
    cache = prefix.cache_copy(kv_caching=request.kv_caching)
    if cache is not None:
        check_speculation(request.speculate, cache, model.ranks.size)
    prefix_len = 0 if cache is None else len(prefix.tokens)
    return Batch(request, model.args.vocab_size, prefix_len=prefix_len, prompt_ends=False), cache


def _stream(
    model: LanguageModel,
    tokenizer: TextCodec,
    prompts: str | Sequence[str | Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop: str | Sequence[str],
    options: Options,
) -> Stream:
    prompts = [prompts] if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable) else list(prompts)
    options["schema"] = schema_of(options.get("schema"), tokenizer, model.args.vocab_size)
    bos = options.get("prefix") is None  # a prefix has BOS already
    ids = [encode_prompt(tokenizer, prompt, bos=bos) for prompt in prompts]
    batch, cache = _batch(model, ids, max_gen_len, tokenizer.stop_tokens, options)
    return Stream(_generate(model, batch, cache), batch, tokenizer, prompts, stop)


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
