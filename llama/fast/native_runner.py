"""The fast step of a CPU: a whole forward, prompts too, as one native function over the model's weights and cache."""

import logging
from collections.abc import Callable, Iterator
from ctypes import addressof, c_int64
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import Described, must_look
from llama.fast.native_ahead import Ahead
from llama.fast.native_build import NoNativeCode
from llama.fast.native_caches import Call, NativeCaches
from llama.fast.native_call import Chooser, Frame, choice_by
from llama.fast.native_description import NativeModel, check_tensor, describe
from llama.fast.native_library import NativeForward
from llama.fast.supported import Unsupported, WarnOnce, caching_of
from llama.model import Transformer
from llama.rows import Rows
from llama.sampling import Sampling

logger = logging.getLogger(__name__)


class NativeRunner:
    """Runs a forward as one native function, over the model's own weights and cache. `forwards` counts them.

    While `exact` is set, what it cannot run is refused: the plain path would give other bits.
    """

    name, takes_prompts = "native", True

    def __init__(self, folder: Path) -> None:
        self._folder, self._native = folder, NativeForward(folder)
        self.instructions, self.code = self._native.instructions, self._native.code
        self.forwards = 0
        self.exact: bool | None = False
        self.watch: Callable[[int, int], None] | None = None
        self._warn = WarnOnce(logger)
        self._described = Described(describe)
        self._caches = NativeCaches()
        self._computed = False  # whether the call before was computed here: else what was found then may hold no more

    def __reduce__(self) -> tuple[Callable[..., "NativeRunner | None"], tuple[Path, bool | None]]:
        return _again, (self._folder, self.exact)  # the copy of a model has weights of its own

    def __call__(
        self,
        model: Transformer,
        tokens: Tensor,
        rows: Rows,
        *,
        logits: Literal["all", "last"],
    ) -> Tensor | None:
        """Return what `model(...)` returns, or None where the plain path has to do it, which is said once.

        Raises ValueError where it would return None, and is `exact`.
        """
        bsz, width, whole = len(rows.starts), rows.width, logits == "all"
        lengths = (width,) * bsz if whole else rows.lengths
        call = Call(rows.starts, lengths, rows.kept, range(bsz), width=width, all=whole, look=must_look(model))
        frame = self.frame(model, tokens, call)
        if frame is None:
            return None
        self.run(frame)
        return frame.logits

    def run_ahead(self, model: Transformer, batch: Batch) -> Iterator[Chosen]:
        """Yield what all further steps choose, each one native call; see Generation.run_ahead."""
        if batch.request.on_step is not None or not self.may_run_ahead(model):
            return iter(())  # who wants to see every step has the loop take it
        return Ahead(self, model, batch, Chooser(self.run, batch)).steps()

    def may_run_ahead(self, model: Transformer) -> bool:
        """Whether the loop, too, would ask this runner for cached steps, and nobody watches the model's calls."""
        watched = bool(model._forward_hooks or model._forward_pre_hooks) and self.watch is None
        return model.runner is self and model.kv_caching and not watched

    def free_cache(self) -> None:
        """Nothing to do: no cache is held here but the model's own."""

    def describe(self, model: Transformer) -> NativeModel:
        """Return what the native code is told of the model now. Raises Unsupported."""
        return self._described.of(model)

    def _check_leaving(self, why: object) -> None:
        """Refuse to leave a forward to the plain path where its bits would be others."""
        if self.exact:
            raise ValueError(
                f"exact mode computes by native code here, and the plain path has other bits; but {why}: undo that, or "
                "set model.exact = False"
            )

    def frame(self, model: Transformer, tokens: Tensor, call: Call) -> Frame | None:
        """Return what computes a call, with room in the cache; None where the plain path has to do it, said once."""
        if not self._computed:
            call = replace(call, look=True)
        self._computed = False
        try:
            described = self._described.of(model, look=call.look)
            if described.trainable and torch.is_grad_enabled():
                self._check_leaving("gradients are recorded, which torch.inference_mode() prevents")
                return None  # whoever records gradients needs the modules
            ids = _ids(tokens, described)
            cos_sin = _rotations(model, max(map(add, call.starts, call.lengths)), described)
            cache = None
            if caching_of(described.attentions if call.look else described.attentions[:1]):
                cache = self._caches.take(described, call)
        except Unsupported as why:
            self._check_leaving(why)
            self._warn(why)
            return None
        self._computed = True
        return Frame(described, ids, call, cos_sin, cache)

    def choose(self, logits: Tensor, sampling: Sampling, draws: Tensor, seen: Tensor | None = None) -> list[int]:
        """Return what (bsz, vocab) logits, (bsz,) draws and the tokens `seen` so far give, as far as `Choice` says."""
        rows, vocab = logits.shape
        ids, places = (c_int64 * rows)(), (c_int64 * rows)(*range(rows))
        choice = choice_by(sampling, ids, seen)
        choice.logits, choice.rows, choice.vocab = logits.data_ptr(), rows, vocab
        choice.draws, choice.places = draws.data_ptr(), addressof(places)
        self._native.choose(choice)
        return list(ids)

    def run(self, frame: Frame) -> None:
        """Compute a call, and choose if the frame does."""
        frame.run(self._native)
        self.forwards += 1


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
