"""The fast step of a CPU: a whole forward, prompts too, as one native function over the model's weights and cache."""

import logging
from collections.abc import Callable, Iterator
from ctypes import c_int64
from pathlib import Path
from threading import Lock
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import Described
from llama.fast.native_build import NoNativeCode
from llama.fast.native_caches import NativeCaches, check_cache, ends_noted, steps_left
from llama.fast.native_call import Chooser, Frame, Look, choice_by
from llama.fast.native_description import NativeModel, check_tensor, describe
from llama.fast.native_library import NativeForward
from llama.fast.supported import Unsupported, WarnOnce, caching_of
from llama.generation import PlainStepper
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.rows import Rows
from llama.sampling import Sampling
from llama.switches import check_call

logger = logging.getLogger(__name__)


class NativeRunner:
    """Runs a forward as one native function, over the model's own weights and a text's cache. `forwards` counts them.

    Nothing of a call is kept here, so any number of texts may be computed at a time, in any threads. While `exact` is
    set, what it cannot run is refused: the plain path would give other bits.
    """

    name, takes_prompts = "native", True

    def __init__(self, folder: Path) -> None:
        self._folder, self._native = folder, NativeForward(folder)
        self.instructions, self.code = self._native.instructions, self._native.code
        self.forwards, self._counting = 0, Lock()
        self.exact: bool | None = False
        self.watch: Callable[[int, int], None] | None = None
        self._warn = WarnOnce(logger)
        self._described = Described(describe)
        self._caches = WeakKeyDictionary[Cache, NativeCaches]()

    def __reduce__(self) -> tuple[Callable[..., "NativeRunner | None"], tuple[Path, bool | None]]:
        return _again, (self._folder, self.exact)  # the copy of a model has weights of its own

    def __call__(
        self, model: Transformer, tokens: Tensor, rows: Rows, cache: Cache | None, *, logits: Literal["all", "last"]
    ) -> Tensor | None:
        """Return what `model(...)` returns, or None where the plain path has to do it, which is said once.

        Raises ValueError where it would return None, and is `exact`.
        """
        frame = self.frame(model, tokens, rows, cache, whole=logits == "all")
        if frame is None:
            return None
        self.run(frame)
        return frame.logits

    def stepper(self, model: Transformer, batch: Batch, cache: Cache | None) -> "NativeStepper | None":
        """Return what makes the tokens of a batch; None where each step has to be a call of the model."""
        if batch.request.on_step is not None or not self.may_step(model):
            return None
        return NativeStepper(self, model, batch, cache)

    def may_step(self, model: Transformer) -> bool:
        """Whether a cached step of the model would come here, and may pass the hooks of the model's calls by.

        It may where there are none, or all of them only look, by an attribute `only_looks`, and `watch` looks for them.
        """
        hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
        watched = hooks and (self.watch is None or not all(getattr(hook, "only_looks", False) for hook in hooks))
        return model.runner is self and model.kv_caching and not watched

    def describe(self, model: Transformer) -> NativeModel:
        """Return what the native code is told of the model now. Raises Unsupported."""
        return self._described.of(model)

    def caches_of(self, cache: Cache) -> NativeCaches:
        """Return what native code was told of a cache."""
        known = self._caches.get(cache)
        if known is None:
            known = self._caches[cache] = NativeCaches()
        return known

    def frame(
        self,
        model: Transformer,
        tokens: Tensor,
        rows: Rows,
        cache: Cache | None,
        *,
        whole: bool = False,
        look: Look | None = None,
    ) -> Frame | None:
        """Return what computes a call, with room in the cache; None where the plain path has to do it, said once.

        whole: whether the logits of all tokens are asked for. look: what was found, where no other code ran since.
        """
        try:
            look = self._look(model, cache) if look is None else look
            if look.described.trainable and torch.is_grad_enabled():
                self._check_leaving("gradients are recorded, which torch.inference_mode() prevents")
                return None  # whoever records gradients needs the modules
            ids = _ids(tokens, look.described)
            cos_sin = _rotations(model, rows.end, look.described)
            taken = None if cache is None else self.caches_of(cache).take(look.described, cache, rows, whole=whole)
        except Unsupported as why:
            self._check_leaving(why)
            self._warn(why)
            return None
        return Frame(look, ids, rows, cos_sin, taken, whole=whole)

    def _look(self, model: Transformer, cache: Cache | None) -> Look:
        """Look at a model and at a cache. Raises Unsupported where native code would not compute what they do."""
        look = Look(*self._described.lasting(model))
        if caching_of(model) != (cache is not None):
            raise Unsupported("the cache's switch was set in the middle of a call")
        if cache is not None:
            check_cache(look.described, cache, model.rope)
        return look

    def _check_leaving(self, why: object) -> None:
        """Refuse to leave a forward to the plain path where its bits would be others."""
        if self.exact:
            raise ValueError(
                f"exact mode computes by native code here, and the plain path has other bits; but {why}: undo that, or "
                "set model.exact = False"
            )

    def choose(self, logits: Tensor, sampling: Sampling, draws: Tensor, seen: Tensor | None = None) -> list[int]:
        """Return what (bsz, vocab) logits, (bsz,) draws and the tokens `seen` so far give, as far as `Choice` says."""
        rows, vocab = logits.shape
        ids = (c_int64 * rows)()
        choice = choice_by(sampling, ids, seen)
        choice.logits, choice.rows, choice.vocab = logits.data_ptr(), rows, vocab
        choice.draws = draws.data_ptr()
        self._native.choose(choice)
        return list(ids)

    def run(self, frame: Frame) -> None:
        """Compute a call, and choose if the frame does."""
        frame.run(self._native)
        with self._counting:
            self.forwards += 1


class NativeStepper(PlainStepper):
    """Makes the tokens of a batch by native code, one call a step, in which the token is chosen, too.

    A step is taken when it is asked for, so the reader of the tokens may have changed the model since the one before:
    then everything is looked at. Otherwise what was found, and the room in the cache, serve a stretch of steps. Where
    native code cannot go on, the plain steps do.
    """

    model: Transformer

    def __init__(self, runner: NativeRunner, model: Transformer, batch: Batch, cache: Cache | None) -> None:
        super().__init__(model, batch, cache)
        assert self.cache is not None
        self._runner, self._cache, self._caches = runner, self.cache, runner.caches_of(self.cache)
        self._look: Look | None = None  # what was found, until other code may have run
        # Of the stretch:
        self._left = 0  # steps
        self._ends: list[list[int]] = []  # where the cache notes how far each row was written

    def __iter__(self) -> Iterator[Chosen]:
        """Yield what each step chooses: those behind the prompts, then one native call each, then plain steps."""
        yield self._choose()
        while (chosen := self._step()) is not None:
            yield chosen
        while True:
            self._decode()
            yield self._choose()

    def _step(self) -> Chosen | None:
        """Feed every row's newest token, and choose the next; None where the plain path has to."""
        batch, cache = self.batch, self._cache
        if len(batch.live) < len(batch.rows):
            cache.select_rows(batch.drop_ended())
            self._left = 0
        starts, newest = [pos - 1 for pos in batch.cur_pos], [batch.texts[row][-1] for row in batch.rows]
        if (batch.disturbed or self._look is None) and not self._may_go_on():
            return None
        with cache.feeding(self._source, begins=False):
            if self._left and self._in_place():
                self._left -= 1
                self._frame.go_on(newest, starts)
                for ends in self._ends:
                    ends[: len(starts)] = batch.cur_pos
            elif not self._begin_stretch():
                return None
            if self._runner.watch is not None:
                self._runner.watch(len(starts), 1)
            chosen = self._chooser()
        batch.fed += len(starts)
        batch.append(chosen.ids)
        self.logits = self._chooser.logits
        return chosen

    def _may_go_on(self) -> bool:
        """Check what a call of the model would, as other code may have run; tell whether native code goes on."""
        self._look, self._left = None, 0
        if not self._runner.may_step(self.model):
            return False
        check_call(self.model, *self._fed(), self._cache, "last")
        self._source = self.model.source
        return True

    def _in_place(self) -> bool:
        """Tell whether the buffers are those of the stretch: a fork in another thread may let their pool grow."""
        return not self._shared or not self._caches.moved(self._cache, self._taken)

    def _fed(self) -> tuple[Tensor, Rows]:
        """Return what a step feeds."""
        starts = [pos - 1 for pos in self.batch.cur_pos]
        return self.batch.tokens(starts), Rows.at(starts, [1] * len(starts))

    def _begin_stretch(self) -> bool:
        """Look at the model where other code may have run, take room for a step, and tell whether native code can."""
        tokens, rows = self._fed()
        frame = self._runner.frame(self.model, tokens, rows, self._cache, look=self._look)
        if frame is None or frame.cache is None or not frame.closed:
            return False
        self._frame, self._taken, self._look = frame, frame.cache, frame.look
        self._left = min(steps_left(self._cache, rows.starts, frame.cache), frame.positions - rows.end)
        self._ends, self._shared = ends_noted(self._cache), any(layer.shares_memory for layer in self._cache.layers)
        self._chooser = Chooser(self._runner.run, frame, self.batch)
        self.batch.disturbed = False
        return True


def _again(folder: Path, exact: bool | None) -> NativeRunner | None:
    """Return a runner for a copy of a model; None, and that is said, where no native code can be had and none must."""
    try:
        runner = NativeRunner(folder)
    except NoNativeCode as why:
        if exact:
            raise
        logger.warning("fast: %s; the plain path runs instead", why)
        return None
    runner.exact = exact
    return runner


def _ids(tokens: Tensor, described: NativeModel) -> Tensor:
    """Return the token ids as the native code reads them."""
    if type(tokens) is not Tensor or tokens.dtype not in (torch.int64, torch.int32) or tokens.device.type != "cpu":
        raise Unsupported(f"tokens are {tokens.dtype} on {tokens.device}, in a {type(tokens).__name__}")
    low, high = tokens.aminmax()
    if not 0 <= int(low) <= int(high) < described.vocab_size:
        raise IndexError("a token id is outside of the vocabulary")
    ids = tokens.to(torch.int64).contiguous()
    if ids.is_neg() or ids.data_ptr() % ids.element_size():
        ids = ids.clone()
    check_tensor(ids, tokens.shape, torch.int64)
    return ids


def _rotations(model: Transformer, end: int, described: NativeModel) -> tuple[Tensor, Tensor]:
    """Return the cos and sin of the positions 0 to end - 1, and perhaps of more."""
    cos, sin = model.rope.up_to(end, torch.device("cpu"))
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise Unsupported("gradients of the angles are recorded")
    for part in (cos, sin):
        check_tensor(part, (max(end, len(cos)), 1, described.sizes.head_dim), torch.float32)
    return cos, sin
