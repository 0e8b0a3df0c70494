"""Switch exact mode on, after a comparison of the model with itself, or off.

A model whose runner has batch-invariant bits is compared as the runner computes it, and no operation is changed. Knows
`ExactModel`, and how many slices ranks can share; does not know operations, nor runners.
"""

import math
from collections.abc import Iterator
from typing import Protocol

from torch import nn

from llama.args import ModelArgs
from llama.exact.batch_invariance import first_difference
from llama.exact.operations import exact_ops
from llama.generation import LanguageModel
from llama.kv_cache import check_lossless
from llama.ops import PLAIN, Ops
from llama.quant.packed import PackedWeight


class ExactModel(LanguageModel, Protocol):
    """The part of a model that exact mode uses; `llama.Transformer` has it."""

    @property
    def exact(self) -> bool: ...
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
        if model.runner is None:
            use_exact_ops(model)
        else:
            model.runner.exact = True
        if difference := first_difference(model):
            by = "" if model.runner is None else f" by {model.runner.name} code (leave out exact, or fast)"
            raise ValueError(f"exact mode is not available here{by}: {difference}")
    except BaseException:
        _switch_off(model)
        raise


def _switch_off(model: ExactModel) -> None:
    """Switch the model's runner to other bits, and put PLAIN in the place of exact mode's operations."""
    if model.runner is not None and model.runner.exact:
        model.runner.exact = False
    for module in model.modules():
        if _ops_of(module).exact:
            module.ops = PLAIN  # type: ignore[assignment]


def _ops_of(module: nn.Module) -> Ops:
    """Return the operations of a module; PLAIN for a module that has none."""
    ops = getattr(module, "ops", PLAIN)
    return ops if isinstance(ops, Ops) else PLAIN


def _check(model: ExactModel) -> None:
    """Raise ValueError for a model that exact mode does not support."""
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
    if model.runner is None and any(isinstance(module, PackedWeight) for module in model.modules()):
        raise ValueError(
            "exact mode computes with quantised weights by native code alone, which does not serve this model; load it "
            "with fast, which says why where it does not, or without quantize"
        )


def slices_of(args: ModelArgs) -> int:
    """Return the number of slices of a product: any number of ranks that divides it gives the same bits."""
    return math.gcd(args.n_heads, args.ffn_dim, args.vocab_size, 24)


def use_exact_ops(model: ExactModel) -> None:
    """Set the operations of exact mode on every module; each rank computes its slices of a product."""
    whole = slices_of(model.args)
    of_kv = math.gcd(whole, model.args.n_kv_heads)
    for name, module in model.named_modules():
        if hasattr(module, "ops"):
            slices = of_kv if name.endswith((".wk", ".wv")) else whole
            module.ops = exact_ops(model.device, max(1, slices // model.ranks.size))  # type: ignore[assignment]
