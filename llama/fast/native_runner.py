"""The fast runner of a CPU: a whole forward, prompts too, as one native function over the model's weights and cache."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llama.args import Refused
from llama.batch import Batch, Chosen, padded
from llama.fast.fingerprint import Described, Descriptions
from llama.fast.native_build import NoNativeCode
from llama.fast.native_caches import NativeCache, check_cache, stored_ends
from llama.fast.native_call import NativeCall, NativeChoice, NativeForward, NativeSampler
from llama.fast.native_model import check_tensor, describe
from llama.fast.native_structs import NativeModel
from llama.fast.supported import Unsupported, WarnOnce, caching_of
from llama.generation import PlainStepper
from llama.kv_cache import Cache
from llama.locked import locked
from llama.model import Transformer
from llama.rows import Rows
from llama.sampling import Sampler
from llama.stepper import Left
from llama.switches import check_call

logger = logging.getLogger(__name__)

Fed = TypeVar("Fed")


class NativeRunner:
    """Run a forward as one native function, over the model's own weights and a text's cache.

    It stores nothing of a call, so any threads may compute any number of texts at a time.

    instructions, code: those of `NativeForward`.
    forwards: how many forwards native code has run.
    plain_prompts: whether the plain path runs prompts, see `native_trial`.
    exact: if set, native code runs these too, and a forward that it cannot run raises ValueError: the plain path gives
    other bits.
    watch: called before each step of a stepper with the number of tokens that each row is fed.
    """

    name = "native"

    def __init__(self, folder: Path) -> None:
        self._folder, self._native = folder, NativeForward(folder)
        self.instructions, self.code = self._native.instructions, self._native.code
        self.forwards, self._counting = 0, Lock()
        self.exact: bool | None = False
        self.plain_prompts = False
        self.watch: Callable[[Sequence[int]], None] | None = None
        self._warn = WarnOnce(logger)
        self._descriptions = Descriptions(partial(_describe, self._native))
        self._caches = WeakKeyDictionary[Cache, NativeCache]()

    def __reduce__(self) -> tuple[Callable[..., "NativeRunner | None"], tuple[Any, ...]]:
        return _copied, (self._folder, self.exact, self.plain_prompts)  # a copied model has other weights

    def __call__(
        self, model: Transformer, tokens: Tensor, rows: Rows, cache: Cache | None, *, logits: Literal["all", "last"]
    ) -> Tensor | None:
        """Return what `model(...)` returns, or None if the plain path has to compute it; the reason is logged once.

        Raises ValueError in the place of None if `exact` is set.
        """
        call = self.prepare(model, tokens, rows, cache, whole=logits == "all")
        if call is None:
            return None
        self.run(call)
        return call.padded

    def stepper(self, model: Transformer, batch: Batch, cache: Cache | None) -> "NativeStepper | None":
        """Return a stepper for the batch, or None if each step has to be a call of the model."""
        if batch.request.on_step is not None or not self.may_step(model):
            return None
        return NativeStepper(self, model, batch, cache)

    def steady(self) -> "NativeRunner":
        """Return this runner without prompts that it leaves to the plain path."""
        steady = object.__new__(type(self))  # the same one otherwise: `copy` makes one for another model
        vars(steady).update(vars(self), plain_prompts=False)
        return steady

    def may_step(self, model: Transformer) -> bool:
        """Return True if cached steps of the model may run without calls of the model, and so of its hooks.

        They may if it has no hooks, or if `watch` is set and all hooks have the attribute `only_looks`.
        """
        hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
        watched = hooks and (self.watch is None or not all(getattr(hook, "only_looks", False) for hook in hooks))
        return model.runner is self and model.kv_caching and not watched

    def describe(self, model: Transformer) -> NativeModel:
        """Return the model as native code reads it now. Raises Unsupported."""
        return self._descriptions.of(model).description

    def left(self, model: Transformer, cache: Cache | None) -> Left:
        """Return the calls with such a cache, or without one, that the plain path runs."""
        try:
            native = self.describe(model)
            if cache is not None:
                check_cache(native, cache, model.rope)
        except Unsupported:
            return "all"
        return "prompts" if self.plain_prompts or (cache is not None and cache.layers[0].observes) else "none"

    def state(self, model: Transformer) -> object:
        """Return a value that differs after a change of the model, except numbers written through `Tensor.data`."""
        try:
            description = self._descriptions.of(model).description
        except Unsupported:
            return object()
        switches = self.may_step(model), caching_of(model), model.args, model.source
        return description, self._descriptions.writes(model), switches

    def cache_of(self, cache: Cache) -> NativeCache:
        """Return the cache as native code reads it."""
        known = self._caches.get(cache)
        if known is None:
            known = self._caches[cache] = NativeCache()
        return known

    def prepare(
        self,
        model: Transformer,
        tokens: Tensor,
        rows: Rows,
        cache: Cache | None,
        *,
        whole: bool = False,
        steps: bool = False,
        described: Described[NativeModel] | None = None,
    ) -> NativeCall | None:
        """Return a call with memory in the cache, or None if the plain path has to compute it; log the reason once.

        whole: compute the logits of all tokens.
        steps: the call takes the place of steps, whose path it has to take.
        described: the model's description, if no other code has run since; None: the model is compared again.
        """
        if self.plain_prompts and rows.width > 1 and not steps and not self.exact:
            return None
        try:
            described = self._described(model, cache) if described is None else described
            if described.description.trainable and torch.is_grad_enabled():
                self._check_leaving("gradients are recorded, which torch.inference_mode() prevents")
                return None  # the modules record gradients
            ids = _ids(tokens, described.description)
            cos_sin = _rotations(model, rows.end, described.description)
            room = None
            if cache is not None:
                room = self.cache_of(cache).reserve(described.description, cache, rows)
        except Unsupported as why:
            self._check_leaving(why)
            self._warn(why)
            return None
        return NativeCall(described, ids, rows, cos_sin, room, whole=whole)

    def _described(self, model: Transformer, cache: Cache | None) -> Described[NativeModel]:
        """Return the description of a model. Raises Unsupported if native code would not compute it with this cache."""
        described = self._descriptions.of(model)
        if caching_of(model) != (cache is not None):
            raise Unsupported("the cache's switch was set in the middle of a call")
        if cache is not None:
            check_cache(described.description, cache, model.rope)
        return described

    def _check_leaving(self, why: object) -> None:
        """Raise ValueError in exact mode, because the plain path would give other bits."""
        if self.exact:
            raise Refused(
                f"exact mode computes by native code here, and the plain path has other bits; but {why}: undo that, or "
                "set model.exact = False"
            )

    def choose(self, logits: Tensor, samplers: Sequence[Sampler], draws: Tensor | None) -> list[int]:
        """Return the ids chosen from (bsz, vocab) logits and (bsz,) draws, or what `Choice` says."""
        own = NativeChoice(logits, samplers)
        return own.made(partial(self._native.choose, own.choice), draws)

    def run(self, call: NativeCall) -> None:
        """Compute a call, and choose tokens if it does."""
        call.run(self._native)
        with locked(self._counting):
            self.forwards += 1


class NativeStepper(PlainStepper):
    """Make the tokens of a batch by native code: one call a step, which also chooses the token.

    A step runs when its token is requested, so the caller may have changed the model since the last one: then model and
    cache are compared again. Otherwise one description, and memory reserved once, serve a stretch of steps. Plain steps
    continue where native code cannot.
    """

    model: Transformer

    def __init__(self, runner: NativeRunner, model: Transformer, batch: Batch, cache: Cache | None) -> None:
        super().__init__(model, batch, cache)
        assert self.cache is not None
        self._runner, self._cache, self._native_cache = runner, self.cache, runner.cache_of(self.cache)
        self._described: Described[NativeModel] | None = None  # valid until other code may have run
        self._native = True  # until the plain path continues
        self._guess: NativeCall | None = None  # the last one that verified guesses
        # Of the stretch:
        self._left = 0  # steps
        self._ends: list[list[int]] = []  # where the cache stores the end of each row

    def join(self, other: PlainStepper) -> None:
        super().join(other)
        self._left = 0

    def drop_ended(self) -> None:
        if any(row.ended for row in self.batch.rows):
            super().drop_ended()
            self._left = 0

    def _step(self) -> Chosen:
        batch = self.batch
        starts, newest = [pos - 1 for pos in batch.cur_pos], [row.ids[-1] for row in batch.rows]
        chosen = self._fed_natively(starts, partial(self._computed, starts, newest))
        if chosen is None:
            return super()._step()
        batch.fed += len(starts)
        self.logits = self._sampler.logits
        return chosen

    def _fed_natively(self, starts: list[int], compute: Callable[[], Fed | None]) -> Fed | None:
        """Return `compute()`, which feeds the cache from `starts` on; None, now and from now on, for the plain path."""
        if not self._native:
            return None
        changed = self.batch.maybe_changed or self._described is None
        made = self._cache.feed(self._source, starts, compute) if not changed or self._may_continue() else None
        self._native = made is not None
        return made

    def _computed(self, starts: list[int], newest: list[int]) -> Chosen | None:
        """Return what a step chooses; None if the plain path has to."""
        if self._can_step():
            self._left -= 1
            self._call.feed(newest, starts)
            for ends in self._ends:
                ends[: len(starts)] = self.batch.cur_pos
        elif not self._begin_stretch():
            return None
        if self._runner.watch is not None:
            self._runner.watch([1] * len(starts))
        return self._sampler()

    def _can_step(self) -> bool:
        """Return True if memory is reserved for a step, and has not moved: another thread may enlarge a shared pool."""
        return bool(self._left) and not (self._shared and self._native_cache.moved(self._cache, self._room))

    def _may_continue(self) -> bool:
        """Check what a call of the model would: other code may have run. Return True if native code continues."""
        self._described, self._left = None, 0
        if not self._runner.may_step(self.model):
            return False
        check_call(self.model, *self._fed(), self._cache, "last")
        self._source = self.model.source
        return True

    def _fed(self) -> tuple[Tensor, Rows]:
        """Return the tokens and rows of a step."""
        starts = [pos - 1 for pos in self.batch.cur_pos]
        return self.batch.tokens(starts, self.device), Rows.at(starts, [1] * len(starts))

    def _feed_guesses(self, guesses: Sequence[list[int]]) -> Tensor | None:
        batch = self.batch
        fed = [[row.ids[-1], *guess] for row, guess in zip(batch.rows, guesses, strict=True)]
        rows = Rows.at([pos - 1 for pos in batch.cur_pos], list(map(len, fed)))
        logits = self._fed_natively(list(rows.starts), partial(self._logits_of, padded(fed, self.device), rows))
        if logits is not None:
            batch.fed += sum(rows.lengths)
        return logits

    def _logits_of(self, tokens: Tensor, rows: Rows) -> Tensor | None:
        """Return the logits of all tokens of a call; None if the plain path has to compute them."""
        call = self._call_of(tokens, rows)
        if call is None or not call.can_repeat:
            return None
        if self._guess is not None:
            call.take_memory(self._guess)
        self._guess, self._described = call, call.described
        if self._runner.watch is not None:
            self._runner.watch(rows.lengths)
        self._runner.run(call)
        call.cache = None  # its workspace alone is used again; the cache's memory may be replaced by larger one
        return call.logits

    def _call_of(self, tokens: Tensor, rows: Rows) -> NativeCall | None:
        """Return a call in the memory of the stretch, or in memory that is reserved for this call alone."""
        if not self._can_step() and self._cache.layers[0].steps_left(rows.starts) >= rows.width:
            self._begin_stretch()
        if self._left >= rows.width and self._can_step():
            described, cos_sin = self._call.described, self._call.cos_sin
            ids = _ids(tokens, described.description)
            return NativeCall(described, ids, rows, cos_sin, self._room, whole=True)
        self._left = 0
        return self._runner.prepare(
            self.model, tokens, rows, self._cache, whole=True, steps=True, described=self._described
        )

    def _verify(self, guesses: Sequence[list[int]]) -> tuple[list[Chosen], Tensor | None] | Chosen:
        made = super()._verify(guesses)
        if not isinstance(made, Chosen):
            self._left = max(0, self._left - len(made[0]))
        return made

    def _pick(self, logits: Tensor, samplers: Sequence[Sampler], draws: Tensor) -> Chosen:
        if not self._native or not all(sampler.plain for sampler in samplers):
            return super()._pick(logits, samplers, draws)
        ids = self._runner.choose(logits, samplers, draws)
        if min(ids) < 0:
            return super()._pick(logits, samplers, draws)
        if any(row.logprobs for row in self.batch.rows):
            return self.batch.outcome(torch.tensor(ids, device="cpu"), logits)
        return Chosen(ids, [None] * len(ids))

    def _model_now(self) -> object:
        return self._runner.state(self.model) if self._native else super()._model_now()

    def _begin_stretch(self) -> bool:
        """Prepare a call for the next steps; return True if native code runs them."""
        tokens, rows = self._fed()
        call = self._runner.prepare(self.model, tokens, rows, self._cache, described=self._described)
        if call is None or call.cache is None or not call.can_repeat:
            return False
        self._call, self._room, self._described = call, call.cache, call.described
        self._left = min(self._cache.layers[0].steps_left(rows.starts), call.positions - rows.end)
        self._ends, self._shared = stored_ends(self._cache), any(layer.shares_memory for layer in self._cache.layers)
        self._sampler = NativeSampler(self._runner.run, call, self.batch)
        self.batch.maybe_changed = False
        return True


def _describe(native: NativeForward, model: Transformer) -> NativeModel:
    """Return the description of a model whose forward is compiled. Raises Unsupported."""
    described = describe(model)
    try:
        native.load(described)
    except NoNativeCode as why:
        raise Unsupported(str(why)) from why
    return described


def _copied(folder: Path, exact: bool | None, plain_prompts: bool) -> NativeRunner | None:
    """Return a runner for a copied model; None, which is logged, without native code unless the model is exact."""
    try:
        runner = NativeRunner(folder)
    except NoNativeCode as why:
        if exact:
            raise
        logger.warning("fast: %s; the plain path runs instead", why)
        return None
    runner.exact, runner.plain_prompts = exact, plain_prompts
    return runner


def _ids(tokens: Tensor, model: NativeModel) -> Tensor:
    """Return the token ids as the native code reads them."""
    if type(tokens) is not Tensor or tokens.dtype not in (torch.int64, torch.int32) or tokens.device.type != "cpu":
        raise Unsupported(f"tokens are {tokens.dtype} on {tokens.device}, in a {type(tokens).__name__}")
    low, high = tokens.aminmax()
    if not 0 <= int(low) <= int(high) < model.vocab_size:
        raise IndexError("a token id is outside of the vocabulary")
    ids = tokens.to(torch.int64).contiguous()
    if ids.is_neg() or ids.data_ptr() % ids.element_size():
        ids = ids.clone()
    check_tensor(ids, tokens.shape, torch.int64)
    return ids


def _rotations(model: Transformer, end: int, native: NativeModel) -> tuple[Tensor, Tensor]:
    """Return the cos and sin of at least the positions 0 to end - 1."""
    cos, sin = model.rope.up_to(end, torch.device("cpu"))
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise Unsupported("gradients of the angles are recorded")
    for part in (cos, sin):
        check_tensor(part, (max(end, len(cos)), 1, native.head_dim), torch.float32)
    return cos, sin
