"""The generation loop: prefill, decode, stopping, streaming, for any model that maps ids at positions to logits.

The loop speaks token ids; text enters and leaves at `generate` and `stream`, through a tokenizer that is handed in.
Does not know what a model is made of, nor how its cache works: only that with it, a step is fed just the tokens that
the model has not seen, `tokens[:, prev_pos:cur_pos]`, and without it, the whole prefix.

Rows of different lengths stand in one matrix, padded on the right, and each decodes at its own position.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from types import TracebackType
from typing import Literal, NamedTuple, NotRequired, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from llama.ownership import Ownership
from llama.ranks import ALONE, Ranks
from llama.request import Limits, Options, Request, Step, make_request
from llama.sampling import Sampler
from llama.streaming import RowText, TextCodec, encode_prompt

__all__ = [
    "Chosen",
    "Completion",
    "Generation",
    "LanguageModel",
    "NonFiniteLogits",
    "Options",
    "Step",
    "Stream",
    "padded",
]


class LanguageModel(Protocol):
    """What the loop needs of a model. `llama.Transformer` has it, and so has a small fake in the tests."""

    kv_caching: bool

    @property
    def args(self) -> Limits: ...
    @property
    def ownership(self) -> Ownership: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def ranks(self) -> Ranks: ...
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
    def run_ahead(
        self, request: Request, sampler: Sampler, tokens: Tensor, cur_pos: Sequence[int]
    ) -> "Iterator[Chosen] | None": ...


class NonFiniteLogits(ValueError):
    """The model's logits held a nan or an infinity."""

    def __init__(self, step: int, row: int) -> None:
        super().__init__(
            f"the logits of row {row} at step {step} are not finite; "
            "a wider dtype (bf16 or fp32 instead of fp16) or an undamaged checkpoint may help"
        )
        self.step, self.row = step, row


class Completion(TypedDict):
    """What `generate` returns for a prompt.

    `finish_reason` is None while a stream goes on, or where it was broken off. `logprobs`, one for each of `ids`, are
    there only where they were asked for.
    """

    generation: str
    ids: list[int]
    finish_reason: Literal["stop", "length"] | None
    logprobs: NotRequired[list[float | None]]


class Chosen(NamedTuple):
    """What a step chose: the id of every row, -1 where its logits were not finite, and the log-probability of each.

    `logprobs` hold None for every row where nobody asked for them.
    """

    ids: list[int]
    logprobs: list[float | None]


class Generation:
    """Mix into a LanguageModel to let it generate."""

    ranks: Ranks = ALONE

    @cached_property
    def ownership(self) -> Ownership:
        """Who may use the model now."""
        return Ownership()

    @property
    def generating(self) -> bool:
        """Whether a generation owns the model, which refuses all others meanwhile."""
        return self.ownership.generating

    def run_ahead(
        self, request: Request, sampler: Sampler, tokens: Tensor, cur_pos: Sequence[int]
    ) -> "Iterator[Chosen] | None":
        """Return what further steps choose, made several at a time without the loop; None: step by step.

        `tokens` are the rows' texts, (bsz, longest), and row b's newest token, not fed yet, is the one before
        cur_pos[b]. Nobody iterates further than the longest row grows; where it ends before, the loop goes on itself.
        """
        return None

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
        for token in _generate(self, request, Rows(request)):
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
        stream = _stream(self, tokenizer, prompts, max_gen_len, stop, options)
        while stream.advance() is not None:
            pass
        return stream.results

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
    """The texts of one generation, made while it is iterated; `results` holds what there is so far.

    The model serves nobody else until the stream has ended. To leave a loop over it early, `close` it, or put the loop
    into `with model.stream(...) as stream:`.
    """

    def __init__(
        self, pieces: "Generator[Piece, None, None]", request: Request, rows: "Rows", texts: Sequence[RowText]
    ) -> None:
        self._pieces, self._rows, self._texts = pieces, rows, texts
        self.results: list[Completion] = [{"generation": "", "ids": [], "finish_reason": None} for _ in texts]
        if request.logprobs:
            for result in self.results:
                result["logprobs"] = []

    def __next__(self) -> tuple[int, str]:
        piece = self.advance()
        if piece is None:
            raise StopIteration
        self._rows.disturbed = True  # until the next piece is asked for, the caller may change the model
        return piece

    def advance(self) -> tuple[int, str] | None:
        """Return the next piece, None at the end, to a caller who leaves the model as it is."""
        for row, text, token in self._pieces:
            result = self.results[row]
            result["generation"] += text
            if token is not None:
                result["ids"].append(token.id)
                if "logprobs" in result:
                    result["logprobs"].append(token.logprob)
            if row not in self._rows.live:
                result["finish_reason"] = "stop" if row in self._rows.stopped else "length"
            if text:
                return row, text
        return None

    def close(self) -> None:
        """End the generation here, give the model back, and let what was held back of the texts into `results`."""
        self._pieces.close()
        for result, text in zip(self.results, self._texts, strict=True):
            result["generation"] += text.flush()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Rows:
    """How the rows of a generation stand; whoever reads the tokens may end one by taking it out of `live`."""

    def __init__(self, request: Request) -> None:
        self.live = {row for row, tokens in enumerate(request.room) if tokens > 0}
        self.stopped: set[int] = set()  # those that ended by a stop token or a stop string
        self.disturbed = True  # whether code of the caller's may have run since the last forward

    def stop(self, row: int) -> None:
        self.live.discard(row)
        self.stopped.add(row)


@dataclass(frozen=True)
class Token:
    """One token of a row. `echoed` tokens come from the prompt."""

    row: int
    id: int
    logprob: float | None
    echoed: bool = False


@torch.inference_mode()
def _generate(model: LanguageModel, request: Request, rows: Rows) -> Generator[Token, None, None]:
    """Yield every row's tokens, step by step."""
    with _running(model, request):
        prompts = request.prompts
        tokens = padded(prompts, width=request.longest, device=model.device)
        sampler = Sampler(request.sampling, request.seed, prompts, model.args.vocab_size, model.device)

        cur_pos = [len(prompt) for prompt in prompts]
        logits, echo = _prefill(model, request, rows, tokens, cur_pos)
        yield from echo
        if not rows.live:
            return
        for step, chosen in enumerate(_steps(model, request, rows, sampler, tokens, cur_pos, logits)):
            yield from _record(request, rows, step, chosen)
            if not rows.live:
                return


def _steps(
    model: LanguageModel,
    request: Request,
    rows: Rows,
    sampler: Sampler,
    tokens: Tensor,
    cur_pos: list[int],
    logits: Tensor,
) -> Iterator[Chosen]:
    """Yield what every step chooses, for as long as somebody asks; `logits` are those that follow the prompts."""
    for step in count():
        chosen = model.ranks.decide(sampler(logits))
        yield _on_host(request, logits, chosen)
        _append(tokens, cur_pos, chosen)
        # Rows that have ended go along, so that rows in step stay in step; there is room up to the longest.
        cur_pos = [min(pos + 1, request.longest) for pos in cur_pos]
        ahead = model.run_ahead(request, sampler, tokens, cur_pos) if step == 0 else None
        if ahead is not None:
            made = []
            for found in ahead:
                yield found
                made.append(found.ids)
            # Still asked for more: the model is not what ran ahead any more, and the loop goes on from there.
            for ids in made:
                chosen = torch.tensor(ids).to(tokens.device)
                sampler.note(chosen)
                _append(tokens, cur_pos, chosen)
                cur_pos = [min(pos + 1, request.longest) for pos in cur_pos]
        logits = _decode(model, request, rows, tokens, cur_pos)


def _prefill(
    model: LanguageModel, request: Request, rows: Rows, tokens: Tensor, cur_pos: list[int]
) -> tuple[Tensor, list[Token]]:
    """Feed all prompts in one pass; return the logits of each row's next token, (bsz, vocab), and what to echo."""
    scored = request.echo and request.logprobs  # the only case that looks at the logits of all positions
    logits = _feed(model, request, rows, tokens, [0] * len(cur_pos), cur_pos, logits="all" if scored else "last")
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


def _decode(model: LanguageModel, request: Request, rows: Rows, tokens: Tensor, cur_pos: list[int]) -> Tensor:
    """Feed every row's newest token, or without a cache its whole prefix; return the next logits, (bsz, vocab)."""
    prev_pos = [pos - 1 for pos in cur_pos] if model.kv_caching else [0] * len(cur_pos)
    return _feed(model, request, rows, tokens, prev_pos, cur_pos)[:, -1]


def _feed(
    model: LanguageModel,
    request: Request,
    rows: Rows,
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
        request.on_step(Step(prev_pos, cur_pos, ids, frozenset(rows.live)))
        rows.disturbed = True
    with model.ownership.acting(undisturbed=not rows.disturbed):
        rows.disturbed = False
        return model(fed, prev_pos, logits=logits, lengths=lengths)


def _window(tokens: Tensor, prev_pos: list[int], width: int) -> Tensor:
    """Return `width` columns of every row from its own position on, (bsz, width)."""
    first = prev_pos[0]
    if all(pos == first for pos in prev_pos):
        return tokens[:, first : first + width]
    columns = torch.tensor(prev_pos)[:, None] + torch.arange(width)
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1).to(tokens.device, non_blocking=True))


def _append(tokens: Tensor, cur_pos: list[int], chosen: Tensor) -> None:
    """Write tokens[:, cur_pos] = chosen; a full row has ended, so what becomes of its last token does not matter."""
    columns = torch.tensor(cur_pos).clamp(max=tokens.shape[1] - 1)
    tokens.scatter_(1, columns.to(tokens.device, non_blocking=True)[:, None], chosen[:, None])


def _on_host(request: Request, logits: Tensor, chosen: Tensor) -> Chosen:
    finite = logits.sum(-1).isfinite()  # one pass: a nan or an infinity anywhere shows in the sum
    ids = chosen.where(finite, -1).tolist()  # host sync: the only one per step, where stopping is checked
    if not request.logprobs:
        return Chosen(ids, [None] * len(ids))
    return Chosen(ids, logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist())


def _record(request: Request, rows: Rows, step: int, chosen: Chosen) -> Iterator[Token]:
    """Yield the chosen token of every live row, and end the rows that met a stop id or have grown enough."""
    for row in sorted(rows.live):
        id = chosen.ids[row]
        if id < 0:
            raise NonFiniteLogits(step, row)
        if id in request.stop_ids:
            rows.stop(row)
            continue
        if step + 1 == request.room[row]:
            rows.live.discard(row)
        yield Token(row, id, chosen.logprobs[row])


def _stream(
    model: LanguageModel,
    tokenizer: TextCodec,
    prompts: str | Sequence[str | Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop: str | Sequence[str],
    options: Options,
) -> Stream:
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop={stop!r} must be texts that are not empty: an empty one would end every text at once")
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    request = _request(model, ids, max_gen_len, tokenizer.stop_tokens, options)
    rows = Rows(request)
    echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    texts = [RowText(tokenizer.stream(), stops) for _ in prompts]
    return Stream(_pieces(model, request, rows, texts, echo), request, rows, texts)


# A row, some of its text, and the token that it came with: none, or no text, where a character needs several tokens.
Piece = tuple[int, str, Token | None]


def _pieces(
    model: LanguageModel, request: Request, rows: Rows, texts: Sequence[RowText], echo: list[str]
) -> Generator[Piece, None, None]:
    """Yield the texts of all rows, piece by piece, and what a row still holds back as soon as it has ended."""
    if request.echo:
        yield from ((row, prompt, None) for row, prompt in enumerate(echo))
    unfinished = set(range(len(texts)))
    with closing(_generate(model, request, rows)) as tokens:
        for token in tokens:
            text = texts[token.row]
            piece = "" if token.echoed else text.feed(token.id)
            if text.stopped:
                rows.stop(token.row)
            yield token.row, piece, token
            ended = unfinished - rows.live
            unfinished -= ended
            yield from _flush(rows, texts, ended)
    yield from _flush(rows, texts, unfinished)


def _flush(rows: Rows, texts: Sequence[RowText], ended: set[int]) -> Iterator[Piece]:
    for row in sorted(ended):
        piece = texts[row].flush()
        if texts[row].stopped:
            rows.stop(row)
        yield row, piece, None


@contextmanager
def _running(model: LanguageModel, request: Request) -> Iterator[None]:
    """Give the model its cache and its switch for one generation, and take both back whatever happens."""
    with model.ownership.hold():
        model.ranks.agree(
            lambda: {"prompts": request.prompts, "options": replace(request, prompts=[], seed=None, on_step=None)}
        )
        before = model.kv_caching
        try:
            with model.ownership.acting():
                model.kv_caching = request.kv_caching
                model.reserve_cache(len(request.prompts), request.longest)
            yield
        finally:
            with model.ownership.acting():
                model.kv_caching = before
                model.free_cache()


def padded(prompts: Sequence[Sequence[int]], *, width: int, device: torch.device) -> Tensor:
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
    _check_device(model, options.get("device"))
    return make_request(model.args, model.kv_caching, prompts, max_gen_len, stop_ids, options)


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
