"""The generation loop: prefill, decode, stopping, streaming, for any model that maps ids at positions to logits.

The loop speaks token ids; text enters and leaves at `generate` and `stream`, through a tokenizer that is handed in.
Does not know what a model is made of, nor how its cache works: only that with it, a step is fed just the tokens that
the model has not seen, `tokens[:, prev_pos:cur_pos]`, and without it, the whole prefix.

Rows of different lengths stand in one matrix, padded on the right, and each decodes at its own position.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from llama.sampling import Sampler, Sampling

T = TypeVar("T")


class Limits(Protocol):
    """How large a batch may be, and how long a text."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def max_batch_size(self) -> int | None: ...


class LanguageModel(Protocol):
    """What the loop needs of a model. `llama.Transformer` has it, and so has a small fake in the tests."""

    kv_caching: bool
    generating: bool

    @property
    def args(self) -> Limits: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(
        self,
        tokens: Tensor,
        start_pos: Sequence[int],
        *,
        logits: Literal["all", "last"],
        lengths: Sequence[int],
    ) -> Tensor: ...
    def reserve_cache(self, rows: int, length: int) -> None: ...
    def free_cache(self) -> None: ...


class TextStream(Protocol):
    """Turns ids into text, whole characters only."""

    def feed(self, id: int, /) -> str: ...
    def flush(self) -> str: ...


class TextCodec(Protocol):
    """What text needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def stop_tokens(self) -> Sequence[int]: ...
    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def stream(self) -> TextStream: ...


class NonFiniteLogits(ValueError):
    """The model's logits held a nan or an infinity."""

    def __init__(self, step: int, row: int) -> None:
        super().__init__(
            f"the logits of row {row} at step {step} are not finite; "
            "a wider dtype (bf16 or fp32 instead of fp16) or an undamaged checkpoint may help"
        )
        self.step, self.row = step, row


@dataclass(frozen=True)
class Step:
    """What one step was fed: row b got its tokens from position prev_pos[b] up to, not including, cur_pos[b]."""

    prev_pos: list[int]
    cur_pos: list[int]
    fed: list[list[int]]


class Options(TypedDict, total=False):
    """What all forms of generation can be told.

    temperature, top_p, top_k, min_p, repetition_penalty: how a token is chosen, see `llama.sampling.Sampling`.
    seed: an int seeds row i with seed + i, a list gives every row its own, None (the default) draws afresh.
    logprobs: also return the log-probability of each token under the model, before temperature and penalty.
    echo: begin with the prompt.
    kv_caching: None follows the model's setting; True or False holds for this call.
    device: where the model must be; nothing is moved.
    on_step: called before each step with what it is about to be fed.
    """

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    repetition_penalty: float
    seed: int | Sequence[int] | None
    logprobs: bool
    echo: bool
    kv_caching: bool | None
    device: torch.device | str | None
    on_step: Callable[[Step], None] | None


class Completion(TypedDict):
    """What `generate` returns for a prompt; `logprobs`, one for each of `ids`, only where it was asked for."""

    generation: str
    ids: list[int]
    finish_reason: Literal["stop", "length"]
    logprobs: NotRequired[list[float | None]]


class Generation:
    """Mix into a LanguageModel to let it generate."""

    generating: bool = False

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
        request = _request(self, prompt_tokens, max_gen_len, stop_ids, options)
        ids: list[list[int]] = [[] for _ in request.prompts]
        logprobs: list[list[float | None]] = [[] for _ in request.prompts]
        for token in _generate(self, request):
            ids[token.row].append(token.id)
            logprobs[token.row].append(token.logprob)
        return ids, logprobs if request.logprobs else None

    def generate(
        self: LanguageModel,
        tokenizer: TextCodec,
        prompts: str | Sequence[str | Sequence[int]],
        max_gen_len: int | Sequence[int] = 64,
        *,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Continue every prompt, a text or its ids, and return a Completion for each.

        A row ends before a stop token of the tokenizer, before any of the `stop` strings in its new text, or after
        `max_gen_len` tokens. Where a stop string cuts the text, `ids` still hold the tokens that spelled it.
        Raises ValueError on bad input, and NonFiniteLogits.
        """
        texts = _stream(self, tokenizer, prompts, max_gen_len, stop, options)
        for _ in texts:
            pass
        return texts.results

    def stream(
        self: LanguageModel,
        tokenizer: TextCodec,
        prompts: str | Sequence[str | Sequence[int]],
        max_gen_len: int | Sequence[int] = 64,
        *,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> "Stream":
        """Return an iterator over (row, piece of its text), in the order in which the pieces are made.

        The pieces of a row never split a character, and together they are what `generate` returns.
        """
        return _stream(self, tokenizer, prompts, max_gen_len, stop, options)


class Stream(Iterator[tuple[int, str]]):
    """The texts of one generation, made while it is iterated; `results` always holds what there is so far."""

    def __init__(self, pieces: "Generator[Piece, None, None]", request: "Request") -> None:
        self._pieces, self._request = pieces, request
        self.results: list[Completion] = [
            {"generation": "", "ids": [], "finish_reason": "length"} for _ in request.prompts
        ]
        if request.logprobs:
            for result in self.results:
                result["logprobs"] = []

    def __next__(self) -> tuple[int, str]:
        for row, text, token in self._pieces:
            result = self.results[row]
            result["generation"] += text
            if token is not None:
                result["ids"].append(token.id)
                if self._request.logprobs:
                    result["logprobs"].append(token.logprob)
            if row in self._request.stopped:
                result["finish_reason"] = "stop"
            if text:
                return row, text
        raise StopIteration

    def close(self) -> None:
        """End the generation here and give the model back."""
        self._pieces.close()


@dataclass(frozen=True)
class Request:
    """One generation, checked. `room` is how many tokens each row may grow by."""

    prompts: list[list[int]]
    room: list[int]
    stop_ids: frozenset[int]
    sampling: Sampling
    kv_caching: bool
    seed: int | Sequence[int] | None = None
    logprobs: bool = False
    echo: bool = False
    on_step: Callable[[Step], None] | None = None
    live: set[int] = field(default_factory=set)  # the rows that still grow; the reader of the tokens may end one
    stopped: set[int] = field(default_factory=set)  # the rows that ended by a stop token or a stop string


@dataclass(frozen=True)
class Token:
    """One token of a row. `echoed` tokens come from the prompt."""

    row: int
    id: int
    logprob: float | None
    echoed: bool = False


@torch.inference_mode()
def _generate(model: LanguageModel, request: Request) -> Generator[Token, None, None]:
    """Yield every row's tokens, step by step."""
    with _running(model, request):
        prompts = request.prompts
        ends = [len(prompt) + room for prompt, room in zip(prompts, request.room, strict=True)]
        tokens = _padded(prompts, width=max(ends) + 1, device=model.device)
        sampler = Sampler(request.sampling, request.seed, prompts, model.args.vocab_size, model.device)

        cur_pos = [len(prompt) for prompt in prompts]
        logits, echo = _prefill(model, request, tokens, cur_pos)
        yield from echo
        step = 0
        while request.live:
            chosen = sampler(logits)
            tokens[torch.arange(len(prompts)), cur_pos] = chosen
            yield from _record(request, step, logits, chosen)
            if not request.live:
                return
            # A row that has all it may have is fed its last token again, to no effect, so that the others can go on.
            cur_pos = [min(pos + 1, end) for pos, end in zip(cur_pos, ends, strict=True)]
            logits = _decode(model, request, tokens, cur_pos)
            step += 1


def _prefill(model: LanguageModel, request: Request, tokens: Tensor, cur_pos: list[int]) -> tuple[Tensor, list[Token]]:
    """Feed all prompts in one pass; return the logits of each row's next token, (bsz, vocab), and what to echo."""
    scored = request.echo and request.logprobs  # the only case that looks at the logits of all positions
    logits = _feed(model, request, tokens, [0] * len(cur_pos), cur_pos, logits="all" if scored else "last")
    if not request.echo:
        return logits[:, -1], []
    if not scored:
        return logits[:, -1], [Token(row, id, None, True) for row, ids in enumerate(request.prompts) for id in ids]
    echo = []
    for row, prompt in enumerate(request.prompts):
        predicted = torch.tensor(prompt[1:], dtype=torch.int64, device=logits.device)
        scores = logits[row, : len(prompt) - 1].log_softmax(-1).gather(-1, predicted[:, None])[:, 0].tolist()
        echo += [Token(row, id, score, True) for id, score in zip(prompt, [None, *scores], strict=True)]
    return logits[torch.arange(len(cur_pos)), [pos - 1 for pos in cur_pos]], echo


def _decode(model: LanguageModel, request: Request, tokens: Tensor, cur_pos: list[int]) -> Tensor:
    """Feed every row's newest token, or without a cache its whole prefix; return the next logits, (bsz, vocab)."""
    prev_pos = [pos - 1 if model.kv_caching else 0 for pos in cur_pos]
    return _feed(model, request, tokens, prev_pos, cur_pos)[:, -1]


def _feed(
    model: LanguageModel,
    request: Request,
    tokens: Tensor,
    prev_pos: list[int],
    cur_pos: list[int],
    logits: Literal["all", "last"] = "last",
) -> Tensor:
    """Run the model on tokens[:, prev_pos:cur_pos]."""
    lengths = [cur - prev for prev, cur in zip(prev_pos, cur_pos, strict=True)]
    fed = _window(tokens, prev_pos, max(lengths))
    if request.on_step is not None:
        ids = [row[:length] for row, length in zip(fed.tolist(), lengths, strict=True)]
        request.on_step(Step(prev_pos, cur_pos, ids))
    return model(fed, prev_pos, logits=logits, lengths=lengths)


def _window(tokens: Tensor, prev_pos: list[int], width: int) -> Tensor:
    """Return `width` columns of every row from its own position on, (bsz, width)."""
    first = prev_pos[0]
    if all(pos == first for pos in prev_pos):
        return tokens[:, first : first + width]
    columns = torch.tensor(prev_pos)[:, None] + torch.arange(width)
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1).to(tokens.device))


def _record(request: Request, step: int, logits: Tensor, chosen: Tensor) -> Iterator[Token]:
    """Yield the chosen token of every live row, and end the rows that met a stop id or have grown enough."""
    finite = logits.sum(-1).isfinite()  # one pass: a nan or an infinity anywhere shows in the sum
    ids = chosen.where(finite, -1).tolist()  # host sync: the only one per step, where stopping is checked
    scores: list[float | None] = [None] * len(ids)
    if request.logprobs:
        scores = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
    for row in sorted(request.live):
        if ids[row] < 0:
            raise NonFiniteLogits(step, row)
        if ids[row] in request.stop_ids:
            request.live.discard(row)
            request.stopped.add(row)
            continue
        if step + 1 == request.room[row]:
            request.live.discard(row)
        yield Token(row, ids[row], scores[row])


def _stream(
    model: LanguageModel,
    tokenizer: TextCodec,
    prompts: str | Sequence[str | Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop: str | Sequence[str],
    options: Options,
) -> Stream:
    prompts, stops = _as_list(prompts), _as_list(stop)
    if "" in stops:
        raise ValueError("a stop string is empty, so it would end every text before it began")
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    request = _request(model, ids, max_gen_len, tokenizer.stop_tokens, options)
    echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    texts = [_Text(tokenizer.stream(), stops) for _ in prompts]
    return Stream(_pieces(model, request, texts, echo), request)


# A row, some of its text, and the token that it came with: none, or no text, where a character needs several tokens.
Piece = tuple[int, str, Token | None]


def _pieces(
    model: LanguageModel, request: Request, texts: "list[_Text]", echo: list[str]
) -> Generator[Piece, None, None]:
    """Yield the texts of all rows, piece by piece, and what a row still holds back as soon as it has ended."""
    if request.echo:
        yield from ((row, prompt, None) for row, prompt in enumerate(echo))
    unfinished = set(range(len(texts)))
    with closing(_generate(model, request)) as tokens:
        for token in tokens:
            text = texts[token.row]
            piece = "" if token.echoed else text.feed(token.id)
            if text.stopped:
                request.live.discard(token.row)
                request.stopped.add(token.row)
            yield token.row, piece, token
            ended = unfinished - request.live
            unfinished -= ended
            yield from _flush(request, texts, ended)
    yield from _flush(request, texts, unfinished)


def _flush(request: Request, texts: "list[_Text]", rows: set[int]) -> Iterator[Piece]:
    for row in sorted(rows):
        piece = texts[row].flush()
        if texts[row].stopped:
            request.stopped.add(row)
        yield row, piece, None


class _Text:
    """The text of one row, let out as soon as no stop string can begin in it."""

    def __init__(self, stream: TextStream, stops: list[str]) -> None:
        self.stream, self.stops = stream, stops
        self.held = ""
        self.stopped = False

    def feed(self, id: int) -> str:
        return self._let_out(self.stream.feed(id), last=False)

    def flush(self) -> str:
        return self._let_out(self.stream.flush(), last=True)

    def _let_out(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self.held + piece
        found = [text.index(stop) for stop in self.stops if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@contextmanager
def _running(model: LanguageModel, request: Request) -> Iterator[None]:
    """Give the model its cache and its switch for one generation, and take both back whatever happens."""
    if model.generating:
        raise RuntimeError(
            "this model is in the middle of another generation, which owns its cache; finish or close that stream first"
        )
    before = model.kv_caching
    model.generating, model.kv_caching = True, request.kv_caching
    longest = max(len(prompt) + room for prompt, room in zip(request.prompts, request.room, strict=True))
    try:
        model.reserve_cache(len(request.prompts), longest)
        yield
    finally:
        model.generating, model.kv_caching = False, before
        model.free_cache()


def encode_prompt(tokenizer: TextCodec, prompt: str | Sequence[int]) -> list[int]:
    """Return a prompt's ids, with BOS as the file asks for; an empty text is BOS alone where there is one."""
    if not isinstance(prompt, str):
        return list(prompt)
    ids = tokenizer.encode(prompt, bos=tokenizer.adds_bos, eos=False)
    return ids if ids or tokenizer.bos_id is None else [tokenizer.bos_id]


def _as_list(given: str | Sequence[T]) -> list[str | T]:
    return [given] if isinstance(given, str) else list(given)


def _padded(prompts: list[list[int]], *, width: int, device: torch.device) -> Tensor:
    """Return the prompts as one matrix, (bsz, width), filled up with zeros on the right."""
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    return tokens.to(device)


def _request(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop_ids: Sequence[int],
    options: Options,
) -> Request:
    """Check everything that a user can get wrong before anything runs."""
    rest: dict[str, Any] = dict(options)
    sampling = Sampling(**{f.name: rest.pop(f.name) for f in fields(Sampling) if f.name in rest})
    switch, device = rest.pop("kv_caching", None), rest.pop("device", None)
    ids = [list(prompt) for prompt in prompts]
    room = list(max_gen_len) if isinstance(max_gen_len, Sequence) else [max_gen_len] * len(ids)
    least = 0 if isinstance(max_gen_len, Sequence) else 1  # a row of several may stay as it is
    if any(isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < least for tokens in room):
        raise ValueError(f"max_gen_len={max_gen_len!r} must be a whole number of at least {least}")
    if switch not in (None, True, False):
        raise ValueError(f"kv_caching={switch!r} must be True, False or None")
    _check_device(model, device)
    _check_prompts(model.args, ids)
    _check_room(model.args, ids, room)
    live = {row for row, tokens in enumerate(room) if tokens > 0}
    caching = model.kv_caching if switch is None else switch
    return Request(ids, room, frozenset(stop_ids), sampling, caching, live=live, **rest)


def _check_device(model: LanguageModel, device: torch.device | str | None) -> None:
    wanted = None if device is None else torch.device(device)
    here = model.device
    if wanted is not None and (wanted.type != here.type or wanted.index not in (None, here.index)):
        raise ValueError(f"the model is on {here}, not on {wanted}; move it with model.to({str(wanted)!r}) first")


def _check_prompts(limits: Limits, prompts: list[list[int]]) -> None:
    if not prompts:
        raise ValueError("no prompts were given; give at least one")
    if limits.max_batch_size is not None and len(prompts) > limits.max_batch_size:
        raise ValueError(
            f"{len(prompts)} prompts are more than max_batch_size={limits.max_batch_size}; "
            "give fewer at a time, or load the model with a larger max_batch_size"
        )
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} has no tokens, and there is no BOS to begin with; give it some text")
        wrong = next((id for id in prompt if not 0 <= id < limits.vocab_size or id != int(id)), None)
        if wrong is not None:
            raise ValueError(
                f"prompt {row} has the token id {wrong}, but ids are whole numbers from 0 to {limits.vocab_size - 1}"
            )


def _check_room(limits: Limits, prompts: list[list[int]], room: list[int]) -> None:
    if len(room) != len(prompts):
        raise ValueError(f"{len(room)} lengths were given for {len(prompts)} prompts; give one, or one per prompt")
    for row, (prompt, tokens) in enumerate(zip(prompts, room, strict=True)):
        if len(prompt) + tokens > limits.max_seq_len:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens, and with max_gen_len={tokens} it would pass "
                f"max_seq_len={limits.max_seq_len}; shorten one of the two, or load the model with a larger max_seq_len"
            )
