"""The options of one generation, checked before anything runs.

Knows ids and limits; does not know models, text or how tokens are made.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import cleandoc
from itertools import takewhile
from typing import Any, Protocol, TypedDict, TypeVar

import torch

from llama.args import ModelArgs
from llama.kv_cache import Cache, check_lossless
from llama.sampling import Sampling, row_streams, whole_number
from llama.schemas import Schema
from llama.speculation import Speculate, check_speculate

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Step:
    """The input of one step, with an entry for each row that is still in the batch.

    rows: the numbers of these rows.
    prev_pos, cur_pos: the first position that is fed of each row, and the end of the row.
    ids: the tokens of each row from prev_pos up to, not including, cur_pos. With `speculate` a step may feed a guess
        behind the newest token: then cur_pos is its end, and the next step begins behind the tokens that were right.
    cache: the cache that is fed; None with the switch off.
    """

    rows: list[int]
    prev_pos: list[int]
    cur_pos: list[int]
    ids: list[list[int]]
    cache: Cache | None


class Prefix(Protocol):
    """The part of a Session that a request uses."""

    model: Any
    tokens: list[int]

    @property
    def limits(self) -> ModelArgs: ...
    @property
    def bound(self) -> int | None: ...
    def cache_copy(self, *, kv_caching: bool) -> Cache | None: ...


class Options(TypedDict, total=False):
    """The options of every form of generation, with their defaults in brackets.

    temperature (0.6): 0 takes the most likely token each time; higher is more varied, see `llama.sampling.Sampling`.
    top_p (0.9): draw from the fewest most likely tokens whose probabilities sum to top_p; 1 keeps all.
    top_k (None): draw from the top_k most likely tokens; None keeps all.
    min_p (0.0): draw from tokens at least min_p times as likely as the most likely one.
    repetition_penalty (1.0): above 1 makes tokens that the row already contains less likely.
    schema (None): a JSON Schema that every new text satisfies, as a dict or JSON; needs the extra `json`.
    seed (None): an int seeds row i with seed + i, a list has a seed for each row, None draws a random seed.
    logprobs (False): also return the log-probability of each token under the model, before temperature and penalty.
    echo (False): begin with the prompt.
    kv_caching (None): None follows the model's setting; True and False apply to this call.
    kv_cache (None): the kind of cache for this call, NAME or NAME:PARAMS; None follows the model's.
    share_prefix (False): feed a common beginning once, unless the kind of cache has `whole_prompt`; no text changes.
    speculate (None): guess tokens by "lookup", or "lookup:N" for at most N; see `llama.speculation`; no text changes.
    prefix (None): a session of the model; every row continues its text, which is cached and not fed again.
    device (None): the device on which the model must be; nothing is moved.
    on_step (None): a function that is called before each step with its input, a `Step`.
    """

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    repetition_penalty: float
    schema: Schema | Mapping[str, Any] | str | None
    seed: int | Sequence[int] | None
    logprobs: bool
    echo: bool
    kv_caching: bool | None
    kv_cache: str | None
    share_prefix: bool
    speculate: Speculate | None
    prefix: Prefix | None
    device: torch.device | str | None
    on_step: Callable[[Step], None] | None


OF_A_BATCH = ("echo", "kv_caching", "kv_cache", "share_prefix", "prefix", "device", "on_step")  # not of a row


def listing_options(*, but: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Return a decorator that adds the Options, except those in `but`, to a function's docstring."""

    def listing(function: Function) -> Function:
        lines = [line for line in cleandoc(Options.__doc__ or "").splitlines() if line.partition(" ")[0] not in but]
        own = cleandoc(function.__doc__ or "")
        function.__doc__ = "\n".join([own, "", "Options, each by its name:", "", *lines[2:]])
        return function

    return listing


@dataclass(frozen=True)
class Request:
    """The checked options of one generation.

    max_new: the most new tokens of each row.
    """

    prompts: list[list[int]]
    max_new: list[int]
    stop_ids: frozenset[int]
    sampling: Sampling
    kv_caching: bool
    schema: Schema | None = None
    seed: int | Sequence[int] | None = None
    logprobs: bool = False
    echo: bool = False
    on_step: Callable[[Step], None] | None = None
    kv_cache: str | None = None
    share_prefix: bool = False
    speculate: Speculate | None = None

    @property
    def shared(self) -> int:
        """The number of tokens that are fed once for all rows: the common prefix, but never a whole prompt."""
        if not self.share_prefix or len(self.prompts) == 1 or (self.echo and self.logprobs):
            return 0
        return min(common_beginning(*self.prompts), min(map(len, self.prompts)) - 1)

    @property
    def longest(self) -> int:
        """The most positions of any row."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.max_new, strict=True))


def common_beginning(*texts: Sequence[object]) -> int:
    """Return the length of the common prefix of all texts."""
    return sum(1 for _ in takewhile(lambda ids: ids.count(ids[0]) == len(ids), zip(*texts, strict=False)))


def make_request(
    limits: ModelArgs,
    kv_caching: bool,
    prompts: Sequence[Sequence[int]],
    max_gen_len: int | Sequence[int],
    stop_ids: Sequence[int],
    options: Options,
    *,
    bound: int | None = None,
) -> Request:
    """Return the checked options. Raises ValueError, and TypeError for an unknown option.

    `limits` and `kv_caching` are the model's; `bound` is the most positions that its cache stores, None without a
    limit. The caller checks `options["device"]`, the name `options["kv_cache"]`, and `check_scored`.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(
            f"unknown option {', '.join(sorted(unknown))}; there are {known}; generate_tokens also has stop_ids, and "
            "calls that return text have stop, and end at the tokenizer's stop tokens"
        )
    rest: dict[str, Any] = {name: value for name, value in options.items() if name not in ("device", "prefix")}
    sampling = Sampling(**{f.name: rest.pop(f.name) for f in fields(Sampling) if f.name in rest})
    for name in ("kv_caching", "logprobs", "echo", "share_prefix"):
        if not isinstance(rest.get(name), bool | None):
            raise ValueError(f"{name}={rest[name]!r} must be True or False")
    switch = rest.pop("kv_caching", None)
    caching = kv_caching if switch is None else switch
    if rest.get("share_prefix") and not caching:
        raise ValueError("share_prefix=True needs the KV cache, which is off: the cache stores what is fed once")
    if not isinstance(rest.get("schema"), Schema | None):
        raise ValueError("schema needs a tokenizer, and ids have none: use a call that returns text")
    check_speculate(rest.get("speculate"))
    if rest.get("speculate") is not None and not caching:
        raise ValueError("speculate needs the KV cache, which is off: switch it on, or leave out speculate")
    ids = _rows_of_ids("the prompts", prompts)
    (stops,) = _rows_of_ids("stop_ids", [stop_ids])
    _check_prompts(limits, ids)
    prefix = options.get("prefix")
    if prefix is not None:
        _check_prefix(prefix, rest)
        ids = [[*prefix.tokens, *row] for row in ids]
    max_new = _max_new(max_gen_len, len(ids))
    if bound is None or not caching:
        for row, (prompt, tokens) in enumerate(zip(ids, max_new, strict=True)):
            because = f"{_name(row, ids)} has {len(prompt)} tokens and max_gen_len={tokens}: "
            limits.check_room(len(ids), len(prompt) + tokens, because=because)
    row_streams(rest.get("seed"), len(ids))  # refuses bad seeds
    return Request(ids, max_new, frozenset(stops), sampling, caching, **rest)


def _check_prefix(prefix: Prefix, options: dict[str, Any]) -> None:
    if not prefix.tokens:
        raise ValueError("prefix is a session without a text; feed it one first")
    if options.get("kv_cache") is not None:
        raise ValueError("kv_cache and prefix exclude each other: the cache of a prefix has the session's kind")
    if options.get("echo") and options.get("logprobs"):
        raise ValueError("echo with logprobs needs the logits of every position, and a prefix is not fed again")


def _rows_of_ids(what: str, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        return [[operator.index(id) for id in row] for row in rows]
    except TypeError:
        raise ValueError(f"{what} must be lists of token ids, which are whole numbers, not {rows!r:.80}") from None


def _check_prompts(limits: ModelArgs, prompts: list[list[int]]) -> None:
    if not prompts:
        raise ValueError("no prompts were given; give at least one")
    limits.check_room(len(prompts), 0)
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"{_name(row, prompts)} has no tokens, and there is no BOS to begin with; give it some text"
            )
        wrong = next((id for id in prompt if not 0 <= id < limits.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"{_name(row, prompts)} has the token id {wrong}, but ids are whole numbers from 0 to "
                f"{limits.vocab_size - 1}"
            )


def _name(row: int, prompts: Sequence[object]) -> str:
    return f"prompt {row}" if len(prompts) > 1 else "the prompt"


def _max_new(max_gen_len: int | Sequence[int], rows: int) -> list[int]:
    """Return the most new tokens of each of `rows`."""
    several = isinstance(max_gen_len, Sequence)
    asked = list(max_gen_len) if isinstance(max_gen_len, Sequence) else [max_gen_len] * rows
    least = 0 if several else 1  # a row of several may get no tokens
    max_new = [tokens for tokens in map(whole_number, asked) if tokens is not None and tokens >= least]
    if len(max_new) < len(asked):
        raise ValueError(f"max_gen_len={max_gen_len!r} must be a whole number of at least {least}")
    if len(max_new) != rows:
        raise ValueError(f"{len(max_new)} lengths were given for {rows} prompts; give one, or one per prompt")
    return max_new


def check_scored(request: Request, cache: Cache) -> None:
    """Raise ValueError for log-probabilities of a prompt that depend on positions that a layer of the cache drops."""
    if not (request.kv_caching and request.echo and request.logprobs):
        return
    bound = min((layer.bound for layer in cache.layers if layer.bound is not None), default=request.longest)
    for row, prompt in enumerate(request.prompts):
        if len(prompt) > bound:
            raise ValueError(
                f"{_name(row, request.prompts)} has {len(prompt)} tokens, whose log-probabilities depend on positions "
                f"that this cache drops: it holds {bound}; shorten the prompt, or choose another kind of cache"
            )


def check_speculation(speculate: object, cache: Cache, ranks: int) -> None:
    """Raise ValueError if a text speculates and the cache is lossy, or if `ranks` processes share the model."""
    if speculate is None:
        return
    if ranks > 1:
        raise ValueError(f"speculate needs one process, and {ranks} share this model; leave out speculate")
    check_lossless(cache.layers, "speculation")
