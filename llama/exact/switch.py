"""The switch of exact mode: nothing is promised before the model was compared with itself; and what the mode costs.

A model with a runner that can keep its bits is compared as that runs it, and no operation is changed. Knows
`ExactModel`, and how many slices ranks can share; does not know how an operation is done, nor what a runner does.
"""

import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.exact.batch_invariance import CachedModel, first_difference
from llama.exact.operations import exact_ops
from llama.kv_cache import Cache, check_lossless
from llama.ops import PLAIN, Ops
from llama.quant.packed import QuantizedWeight
from llama.ranks import Ranks
from llama.stepper import Runner


class ExactModel(CachedModel, Protocol):
    """What is needed of a model to switch exact mode; `llama.Transformer` has it."""

    @property
    def exact(self) -> bool: ...
    @property
    def runner(self) -> Runner[Any] | None: ...
    @property
    def ranks(self) -> Ranks: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


def set_exact(model: ExactModel, value: bool) -> None:
    """Switch exact mode on or off; see `Transformer.exact`, which calls this."""
    if not isinstance(value, bool):
        raise ValueError(f"exact={value!r} must be True or False")
    if value == model.exact:
        return
    if not value:
        _switch_off(model)
        return
    _check(model)
    try:
        _switch_on(model)
        if difference := first_difference(model):
            raise ValueError(f"exact mode is not available here{_by(model.runner)}: {difference}")
    except BaseException:
        _switch_off(model)
        raise


def _switch_on(model: ExactModel) -> None:
    if model.runner is None:
        use_exact_ops(model)
        return
    model.runner.exact = True


def _switch_off(model: ExactModel) -> None:
    """Release the model's runner from exact mode, or put PLAIN back wherever the mode has put its own operations."""
    if model.runner is not None and model.runner.exact:
        model.runner.exact = False
    for module in model.modules():
        if _ops_of(module).exact:
            module.ops = PLAIN  # type: ignore[assignment]


def _ops_of(module: nn.Module) -> Ops:
    """Return the operations by which a module computes; PLAIN for a module that needs none."""
    ops = getattr(module, "ops", PLAIN)
    return ops if isinstance(ops, Ops) else PLAIN


def _by(runner: Runner[Any] | None) -> str:
    return "" if runner is None else f" by {runner.name} code (leave out exact, or fast)"


def _check(model: ExactModel) -> None:
    """Refuse what exact mode cannot go together with."""
    if slices_of(model.args) % model.ranks.size:
        raise ValueError(
            f"exact mode computes in {slices_of(model.args)} slices, which {model.ranks.size} ranks cannot share"
        )
    if model.runner is not None and model.runner.exact is None:
        raise ValueError(f"exact mode and the fast step ({model.runner.name}) exclude each other: choose one")
    check_lossless(model.new_cache().layers)
    own = next((ops for ops in map(_ops_of, model.modules()) if ops != PLAIN and not ops.exact), None)
    if own is not None:
        raise ValueError(
            f"exact mode replaces all operations of the model, and cannot keep the operations {str(own)!r} that were "
            "put in place of the plain ones; call model.use(PLAIN) first, or leave exact mode off"
        )
    if model.runner is None and any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise ValueError(
            "exact mode computes with quantised weights by native code alone, which does not serve this model; load it "
            "with fast, which says why where it does not, or without quantize"
        )


def slices_of(args: ModelArgs) -> int:
    """Return in how many slices exact mode computes products: ranks of any number that divides it get the same bits."""
    return math.gcd(args.n_heads, args.ffn_dim, args.vocab_size, 24)


def use_exact_ops(model: ExactModel) -> None:
    """Let every module compute by the operations of exact mode, a layer's products in the slices of its rank."""
    whole = slices_of(model.args)
    of_kv = math.gcd(whole, model.args.n_kv_heads)
    for name, module in model.named_modules():
        if hasattr(module, "ops"):
            slices = of_kv if name.endswith((".wk", ".wv")) else whole
            module.ops = exact_ops(model.device, max(1, slices // model.ranks.size))  # type: ignore[assignment]


@torch.inference_mode()
def slowdown(model: ExactModel, *, prompt: int = 64, repeats: int = 5, patience: float = 3.0) -> tuple[float, float]:
    """Return how many times as long one row takes in exact mode: to prefill `prompt` tokens, and a cached step.

    The ratios of the median seconds, both ways timed in turns, `repeats` times after one that warms up; or fewer, and
    at worst in that one alone, where `patience` seconds have passed. The model needs room for one position more, and no
    runner, which does in exact mode what it does without.
    """
    _check(model)
    prompt = min(prompt, model.args.max_seq_len - 1)
    tokens = torch.zeros(1, prompt, dtype=torch.int64, device=model.device)
    ways = {"plain": partial(_switch_off, model), "exact": partial(use_exact_ops, model)}
    put_back = ways["exact" if model.exact else "plain"]
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "exact": []}
    began = time.perf_counter()
    try:
        for turn in range(repeats + 1):
            if turn and time.perf_counter() - began > patience:
                break
            for name, use in ways.items():
                use()
                cached, cache = model.with_kv_caching(True), model.new_cache()
                prefill = _timed(cached, tokens, 0, cache)
                seconds[name].append((prefill, _timed(cached, tokens[:, :1], prompt, cache)))
    finally:
        put_back()
    medians = {
        name: [statistics.median(times) for times in zip(*(pairs[1:] or pairs), strict=True)]
        for name, pairs in seconds.items()
    }
    prefill, step = (slow / quick for slow, quick in zip(medians["exact"], medians["plain"], strict=True))
    return prefill, step


def slowdown_words(model: ExactModel) -> str:
    """Return a sentence that says what exact mode costs this model here, measured now."""
    if model.runner is not None:
        return f"exact mode by {model.runner.name} code takes no longer: the fast step is the same without it"
    prefill, step = slowdown(model)
    return f"exact mode: a short prompt takes {prefill:.1f} times as long as without it, a step {step:.1f} times"


def _timed(model: ExactModel, tokens: Tensor, start_pos: int, cache: Cache) -> float:
    started = time.perf_counter()
    model(tokens, start_pos, cache=cache).sum().item()  # the sum is on the host once the logits are made
    return time.perf_counter() - started
