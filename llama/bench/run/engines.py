"""The base class of engines, and our own engine: greedy runs of a fixed length, and what was observed.

A subclass of `Engine` in a file of its own is an engine, too: `--engine FILE.py:CLASS`; scripts/engines/ has three.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.host.machine import DTYPES
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.request import Options, common_beginning
from llama.streaming import TextCodec, encode_prompt
from llama.tokenizer import MissingTokenizer, Tokenizer

Prompts = Sequence[Sequence[int]]  # the ids of each row
GREEDY: Options = {"temperature": 0.0}
PEERS = 'pip install -c constraints.txt -e ".[peers]"'
SCORED = 64  # positions whose logits are computed at a time, if those of all are needed


@dataclass(frozen=True)
class Source:
    """A model that is not in memory yet: its sizes, its tokenizer, and how to build it on a device."""

    args: ModelArgs
    tokenizer: Tokenizer
    weights: str
    device: torch.device
    dtype: torch.dtype
    build: Callable[[], Transformer]
    file: Path | None = None  # the .gguf file of its weights
    stored: Mapping[str, int] | None = None  # the bytes of each matrix, if the cell uses those of the file as they are


@dataclass
class Run:
    """One run, as it was observed from outside; None means that the engine does not show it."""

    started: float = 0.0  # of `time.perf_counter`, when the engine was called
    token_times: list[float] = field(default_factory=list)  # when each token of all rows was on the host, or the device
    ids: list[list[int]] = field(default_factory=list)
    fed: list[tuple[int, int]] = field(default_factory=list)  # rows, and the most tokens a row, of every forward
    proposed: int = 0  # guessed tokens that were fed
    cache_bytes: int | None = None  # at the last forward
    cache_length: int | None = None  # the capacity
    logits_bytes: int | None = None  # the most that a forward returned
    greedy: bool | None = None  # every token fed back was the most likely one; observed in warm-ups only
    path: str | None = None  # what executed the forwards
    fast_forwards: int = 0  # forwards that the fast step ran
    fast_wanted: int = 0  # forwards that it should have run

    def accepted(self, output_len: int) -> int:
        """Return how many guessed tokens were right: those that were made beyond one for each row and call."""
        return self.fed[0][0] * (output_len - 1) - sum(rows for rows, _ in self.fed[1:])


class Engine(ABC):
    """A model of the sizes `args` that is measured. `path` names what executes a forward, if a run does not show it."""

    always_cached: ClassVar[bool] = False  # it cannot run without its cache
    quantized: ClassVar[tuple[str, ...]] = ()  # the values of `--quantize` that it has
    whole_in: ClassVar[tuple[str, ...]] = tuple(DTYPES)  # dtypes in which it does not round the model's weights

    @staticmethod
    def package() -> Any:
        """Return the package that computes, or None if it is this one. Raises ValueError if it is not installed."""
        return None

    @classmethod
    @abstractmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        """Return the engine with a model's weights, as the cell wants them. Raises ValueError if it cannot run them."""

    def __init__(self, args: ModelArgs, tokenizer: TextCodec, *, path: str, weights_bytes: int) -> None:
        self.args, self.path, self.weights_bytes = args, path, weights_bytes
        self.encode = partial(encode_prompt, tokenizer)
        self.decode = (lambda ids: "") if isinstance(tokenizer, MissingTokenizer) else tokenizer.decode

    @abstractmethod
    def run(self, prompts: Prompts, output_len: int, *, kv_caching: bool, steps: int | None = None) -> Run:
        """Continue every prompt by its `output_len` most likely tokens, past any end-of-text.

        With `steps`, stop after so many forwards, with memory reserved for all: a warm-up.
        """

    def most_likely(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the most likely token after every position of a text, and what executed the forwards.

        Only engines that can have rounded weights need it: the tokens of the others are compared one by one.
        """
        raise NotImplementedError(f"{self.path} has no rounded weights")

    @abstractmethod
    def conversation(self, length: int, *, kv_caching: bool) -> "Conversation":
        """Return an empty text of up to `length` tokens, whose cache the engine keeps between calls."""


@contextmanager
def needed(engine: str, package: str, *, remedy: str = PEERS) -> Iterator[None]:
    """Raise ValueError with the remedy if an import in the block fails because a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"--engine {engine} needs {package}, which is not installed: {remedy}") from error


class Conversation(ABC):
    """A text of one row that grows, and its cache. `fed`: how many tokens went through the model for it."""

    fed = 0

    @property
    def cache_bytes(self) -> int | None:
        """The bytes of its cache; None if the engine does not show them."""
        return None

    @abstractmethod
    def feed(self, ids: list[int]) -> int:
        """Make `ids` the text, feed what the cache lacks of it, and return the most likely next id."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


def cached_prefix(cached: Sequence[int], ids: Sequence[int]) -> int:
    """Return how many ids of a text are cached: never the last one, which makes the logits."""
    return min(common_beginning(cached, ids), len(ids) - 1)


def check_cached(name: str, kv_caching: bool) -> None:
    """Raise ValueError without the cache, for an engine that always has it."""
    if not kv_caching:
        raise ValueError(f"kv_caching=False: {name} cannot run without its cache; use --engine transformers")


def check_on_cpu(name: str, model: Transformer) -> None:
    """Raise ValueError unless the model, whose weights an engine is to get, is on the CPU."""
    if model.device.type != "cpu":
        raise ValueError(f"the model is on {model.device}, and {name} is run on the CPU here; use --device cpu")


def stored_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights; weights that share their memory count once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@contextmanager
def hooked(model: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Hook `before` and `after` into every forward of a model."""
    hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forwards_by_runner(model: Transformer) -> int:
    """Return how many forwards the model's runner has run so far."""
    return 0 if model.runner is None else model.runner.forwards


def path_of(model: Transformer, *, fast: int, all: int) -> str:
    """Return what executed so many forwards of a model, `fast` of them by its runner."""
    plain, step = str(model.ops), model.runner
    names = [step.name] if step is not None and fast else []
    names += [plain] if fast < all or not names else []
    left = model.execution.plain_prompts and fast > 0 and len(names) == 1
    return str(replace(model.execution, runner=" and ".join(names), plain_prompts=left))


class LlamaEngine(Engine):
    """This library. `logits="all"` makes every forward compute the logits of all positions, as published code does."""

    quantized = ("int8", "int4", "stored")

    @classmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        return cls(source.build(), source.tokenizer, logits=cell.logits, speculate=cell.speculate)

    def __init__(
        self, model: Transformer, tokenizer: TextCodec, *, logits: str = "last", speculate: str | None = None
    ) -> None:
        path, weights = path_of(model, fast=0, all=0), stored_weight_bytes(model)
        super().__init__(model.args, tokenizer, path=path, weights_bytes=weights)
        self.model, self.tokenizer, self.logits, self.speculate = model, tokenizer, logits, speculate

    def run(self, prompts: Prompts, output_len: int, *, kv_caching: bool, steps: int | None = None) -> Run:
        run = Run(logits_bytes=0)
        times: list[float] = []  # when each forward began, and when the last token was there
        with self._watched(run, times, last=steps or output_len, steps=steps):
            run.started = time.perf_counter()
            options: Options = {**GREEDY, "kv_caching": kv_caching, "speculate": self.speculate}
            forwards_before = forwards_by_runner(self.model)
            with suppress(_EnoughError):
                run.ids, _ = self.model.generate_tokens(prompts, output_len, **options)
                times.append(time.perf_counter())
        run.token_times = times[1:]
        run.fast_forwards = forwards_by_runner(self.model) - forwards_before
        runner = self.model.runner
        left = runner is not None and runner.plain_prompts and not self.model.exact  # because it is faster at them
        wanted = [width == 1 or not left for _, width in run.fed]
        run.path = path_of(self.model.with_kv_caching(kv_caching), fast=run.fast_forwards, all=sum(wanted))
        if kv_caching and any(layer.observes for layer in self.model.new_cache().layers):
            wanted[0] = False  # only the plain path shows a prompt's attention to its cache
        run.fast_wanted = sum(wanted)
        return run

    @torch.inference_mode()
    def most_likely(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the most likely token after every position of a text, and what executed the forwards."""
        found: list[int] = []
        before, parts = forwards_by_runner(self.model), range(0, len(ids), SCORED)
        cached, cache = self.model.with_kv_caching(True), self.model.new_cache(rows=1, length=len(ids))
        for start in parts:
            fed = torch.tensor([ids[start : start + SCORED]], device=self.model.device)
            found += cached(fed, start, cache=cache)[0].argmax(-1).tolist()
        return found, path_of(self.model, fast=forwards_by_runner(self.model) - before, all=len(parts))

    def conversation(self, length: int, *, kv_caching: bool) -> "SessionConversation":
        return SessionConversation(self.model, self.tokenizer, kv_caching=kv_caching)

    @contextmanager
    def _watched(self, run: Run, times: list[float], *, last: int, steps: int | None) -> Iterator[None]:
        """Record when a forward begins, what it is fed and returns, and the cache at the last one; stop after `steps`.

        A forward begins once the tokens of the step before are on the host. The cache is freed after the generation has
        returned, outside the time.
        """
        likeliest: list[Tensor] = []
        cache: Cache | None = None
        step, clock = self.model.runner, DeviceClock(self.model.device, times)

        def before(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            nonlocal cache
            times.append(time.perf_counter())
            if len(times) - 1 == steps:
                raise _EnoughError
            cache = named["cache"]
            return given, {**named, "logits": "all"} if self.logits == "all" else named

        def saw(lengths: Sequence[int]) -> None:
            run.proposed += sum(lengths) - len(lengths) if run.fed else 0
            run.fed.append((len(lengths), max(lengths)))
            # With guesses, the number of forwards is not known before the end, and rows leave before it.
            if len(run.fed) == last or (self.speculate and len(lengths) == run.fed[0][0]):
                run.cache_bytes = 0 if cache is None else cache.nbytes
                run.cache_length = None if cache is None else cache.layers[0].slots

        def after(_: object, given: tuple[Any, ...], logits: Tensor) -> Tensor:
            saw(given[1].lengths)
            run.logits_bytes = max(run.logits_bytes or 0, logits.untyped_storage().nbytes())
            if steps is not None:  # only in a warm-up, because it takes time
                if likeliest:
                    same = torch.equal(likeliest.pop(), given[0][:, -1])
                    run.greedy = same and run.greedy is not False
                likeliest.append(logits[:, -1].argmax(-1))
            # A view, which keeps all of them until the next step.
            return logits[:, -1:] if self.logits == "all" else logits

        def ahead(lengths: Sequence[int]) -> None:
            clock.note()
            if len(times) - 1 == steps:
                raise _EnoughError
            saw(lengths)

        before.only_looks = after.only_looks = True  # type: ignore[attr-defined]
        if step is not None and self.logits == "last":  # all logits need the plain loop
            step.watch = ahead
        try:
            with hooked(self.model, before, after):
                yield
            clock.settle()
        finally:
            if step is not None:
                step.watch = None


class SessionConversation(Conversation):
    """A session of this library, with its cache on or off."""

    def __init__(self, model: Transformer, tokenizer: TextCodec, *, kv_caching: bool) -> None:
        self.session = model.with_kv_caching(kv_caching).session(tokenizer)

    @property
    def cache_bytes(self) -> int:
        return self.session.nbytes

    def feed(self, ids: list[int]) -> int:
        hook = self.session.model.register_forward_hook(self._count)
        try:
            self.session.feed(ids)
            logits = self.session.logits
            assert logits is not None
            return int(logits.argmax())
        finally:
            hook.remove()

    def close(self) -> None:
        self.session.drop()

    def _count(self, _: object, given: tuple[Any, ...], __: Tensor) -> None:
        self.fed += given[0].numel()

    _count.only_looks = True  # type: ignore[attr-defined]


class DeviceClock:
    """The times at which a device that runs ahead of the host reached some points, read at the end."""

    def __init__(self, device: torch.device, times: list[float]) -> None:
        self._device, self._times = device, times
        self._first = 0  # the index of the first time that was noted here
        self._events: list[torch.cuda.Event] = []

    def note(self) -> None:
        """Append the time at which the device comes here; until `settle`, that of the host."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._first = self._first if self._events else len(self._times)
            self._events.append(event)
        self._times.append(time.perf_counter())

    def settle(self) -> None:
        """Replace the host's times by the device's. It was idle at the first of them, so there both agree."""
        if self._events:
            torch.cuda.synchronize(self._device)
        for index, event in enumerate(self._events):
            self._times[self._first + index] = self._times[self._first] + self._events[0].elapsed_time(event) / 1e3


class _EnoughError(Exception):
    """Ends a generation from inside."""
