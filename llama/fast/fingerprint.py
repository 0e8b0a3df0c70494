"""What a fast step relies on in a model, noted when the model is looked at, and compared at every call.

A fast step computes from weights, past the modules that hold them. So whatever would change what the modules compute
has to show here: which modules there are, what hangs on them, the code that they run, and of every weight where it
lies, and how. What is noted are facts, not copies: no weight is held, and nothing that was derived from one.

Not seen, and not to be seen: numbers written into a weight, which a step reads anew at every call, and what another
thread does to a model while a call is under way. Knows torch, and the files whose code the plain path runs.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from operator import attrgetter, is_
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # None unless torch.compile looks at every frame
from torch._C._dynamo.guards import TensorGuards  # dynamo's own check of many tensors at a time
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from llama import layers, limits, model, ops, packed, quantize, rope, rows, sampling
from llama.fast.supported import PATH, Unsupported
from llama.kv_cache import contract, counting, paged, quantized, static
from llama.model import Transformer

Description = TypeVar("Description")

# ---- the moment: what holds for every model --------------------------------------------------------------------------

_FILES = (contract, counting, paged, quantized, static, layers, limits, model, ops, packed, quantize, rope, rows)
# Numbers of ours by which native code was written.
_NUMBERS: dict[tuple[Any, str], object] = {
    (packed, "GROUP"): 32,
    (packed, "LANES"): 16,
    (packed, "UNIT"): 256,
    (paged, "BLOCK"): 16,
    (quantized, "GROUP"): 32,
    (quantized, "SCALES"): torch.float16,
    (quantized.Int8Cache, "bits"): 8,
    (quantized.Int8Cache, "unrotated"): False,
    (quantized.Int4Cache, "bits"): 4,
    (quantized.Int4Cache, "unrotated"): True,
}
_CALLS = {"__call__", "_call_impl", "_wrapped_call_impl"}  # of a module, by which its forward is reached
_FIELDS: dict[type, tuple[str, ...]] = {  # what modules hold, and a property of the class would cover
    model.RMSNorm: ("weight", "eps"),
    model.Attention: ("head_dim", "cache", "kv_caching"),
    layers.ColumnParallelLinear: ("weight", "bias"),
    layers.RowParallelLinear: ("weight", "bias"),
    layers.VocabParallelEmbedding: ("weight",),
    quantize.PackedLinear: ("weight", "bias", "activations"),
    quantize.PackedEmbedding: ("weight", "dtype"),
}
_TORCH = (
    (nn.Module, (*_CALLS, "__getattr__")),
    (nn.Embedding, ("forward",)),
    (nn.Identity, ("forward",)),
    (F, ("linear", "embedding", "rms_norm", "scaled_dot_product_attention")),
)


def _classes() -> Iterator[type]:
    """Yield the classes whose methods the plain path runs."""
    bases = nn.Module | rope.RopeTable | rows.Rows
    for file in _FILES:
        own = (one for one in vars(file).values() if isinstance(one, type) and one.__module__ == file.__name__)
        yield from (one for one in own if issubclass(one, bases))


def _code() -> Iterator[tuple[Any, str, object]]:
    """Yield the code that the plain path runs: whose it is, its name, and what stands there now."""
    ours = {file.__name__ for file in _FILES}
    for file in _FILES:
        yield from ((file, name, getattr(file, name)) for name in sorted(PATH & vars(file).keys()))
    for owner in _classes():
        # What a class inherits may be replaced in that class alone.
        names = PATH & {name for base in owner.__mro__ if base.__module__ in ours for name in vars(base)}
        names |= _CALLS if issubclass(owner, nn.Module) else set()
        yield from ((owner, name, getattr(owner, name)) for name in sorted(names))
    yield from ((owner, name, getattr(owner, name)) for owner, names in _TORCH for name in names)
    yield from ((owner, name, number) for (owner, name), number in _NUMBERS.items())


_OWNERS, _NAMES, _CODE = zip(*_code(), strict=True)
_FUNCTIONS = [value for value in _CODE if isinstance(value, FunctionType)]
_BODIES = [function.__code__ for function in _FUNCTIONS]  # which a reload in place replaces
_BARE = [(owner, name) for owner, names in _FIELDS.items() for name in names]


def _replaced_before() -> str | None:
    """Return the name of code of ours that had been replaced before it was noted here, if any."""
    ours = {file.__file__ for file in _FILES}
    for owner, name, value in zip(_OWNERS, _NAMES, _CODE, strict=True):
        elsewhere = owner in dict(_TORCH) or isinstance(value, ModuleType | bool) or (owner, name) in _NUMBERS
        elsewhere |= name in _CALLS and issubclass(owner, nn.Module)
        if not elsewhere and (not isinstance(value, FunctionType) or value.__code__.co_filename not in ours):
            return f"{owner.__name__}.{name}"
    return None


_REPLACED = _replaced_before()


def check_moment() -> None:
    """Raise Unsupported where PyTorch is in a mode, or code was replaced, that may change what the modules compute."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())  # type: ignore[no-untyped-call]
    for mode in modes:
        if type(mode) is not DeviceContext:  # a default device: every buffer of a fast step names its own
            raise Unsupported(f"{type(mode).__name__} watches PyTorch's operations")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Unsupported("autocast is on")
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise Unsupported("a transformation of torch.func, or forward-mode differentiation, is under way")
    if get_eval_frame_callback() is not None:  # where a graph ended early, and this is run as it stands
        raise Unsupported("torch.compile is under way")
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise Unsupported("the model is being traced")
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        raise Unsupported("a hook watches all modules")
    if _REPLACED is not None:
        raise Unsupported(f"{_REPLACED} was replaced")
    unchanged = list(map(is_, map(getattr, _OWNERS, _NAMES), _CODE))
    if not all(unchanged):
        place = unchanged.index(False)
        raise Unsupported(f"{_OWNERS[place].__name__}.{_NAMES[place]} was replaced")
    if list(map(attrgetter("__code__"), _FUNCTIONS)) != _BODIES:
        raise Unsupported("the code of a function was replaced in its place")
    for owner, name in _BARE:
        if hasattr(owner, name):
            raise Unsupported(f"{owner.__name__}.{name} is covered by the class's own")


_SAMPLER = sampling.Sampler
# What chooses a token on the plain path.
_CHOOSING: list[tuple[Any, str, object]] = [
    (_SAMPLER, "__call__", _SAMPLER.__call__),
    *((sampling, name, value) for name, value in vars(sampling).items() if isinstance(value, FunctionType)),
]


def is_our_sampler(sampler: object) -> bool:
    """Tell whether tokens are chosen as `llama.sampling` does it, by nothing of somebody's own."""
    return type(sampler) is _SAMPLER and all(getattr(owner, name) is value for owner, name, value in _CHOOSING)


# ---- a model ---------------------------------------------------------------------------------------------------------

# Attributes of modules that are no facts: PyTorch's own; the switch, which a step reads by itself, and what a cache was
# asked to reserve and was fed; those of the model that lead back to whoever holds its facts; the angles worked out.
_NO_FACTS = {
    *vars(nn.Module()),
    *("kv_caching", "reserved", "_ends", "tables", "pool", "runner", "ownership", "rope._freqs_cis"),
}


class TensorFacts:
    """Where tensors lie, and how, without holding them; no tensor twice."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._addresses = list(map(Tensor.data_ptr, tensors))

    def hold(self, tensors: Sequence[Tensor | None]) -> bool:
        """Tell whether as many tensors are of the same classes, dtypes, devices, sizes and strides at the same places.

        And whether the modes that PyTorch's dispatcher knows are the same.
        """
        return self._guards.check(*tensors) and list(map(Tensor.data_ptr, tensors)) == self._addresses  # type: ignore[arg-type]


class Fingerprint:
    """The facts of a model, as it is."""

    def __init__(self, model: Transformer) -> None:
        self._modules = [module for module in model.modules() if module is not model]  # no cycle through the model
        self._kinds = list(map(type, self._modules))
        facts = [(vars(module), key) for module in self._modules for key in vars(module).keys() - _NO_FACTS]
        facts += [(module._modules, key) for module in (model, *self._modules) for key in module._modules]
        facts += [  # what is none so far, a bias for one; the others are `_tensors`
            (module._parameters, name)
            for module in self._modules
            for name, weight in module._parameters.items()
            if weight is None
        ]
        self._owners, self._names = [owner for owner, _ in facts], [name for _, name in facts]
        self._values = list(map(dict.get, self._owners, self._names))
        self._sized: list[Sized] = [vars(module) for module in self._modules]  # a method of an instance's own adds one
        self._sizes = list(map(len, self._sized))
        self._lists = [module._modules for module in self._modules if isinstance(module, nn.ModuleList)]
        self._orders = list(map(list, self._lists))
        self._hooks = [
            hooks for module in self._modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._hooked = any(self._hooks)  # which hooks there are makes no difference: with any, no step is fast
        self._own = _own_facts(model)
        held = [
            (module._parameters, name, weight)
            for module in (model, *self._modules)
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        places = {weight: place for place, (_, _, weight) in reversed(list(enumerate(held)))}  # the first of each
        self._holders, self._weights = [holder for holder, _, _ in held], [name for _, name, _ in held]
        self._first = [places[weight] for _, _, weight in held]  # of two ends of a tied head
        self._once = sorted(places.values())
        tensors = self._tensors_now()
        self._tensors = TensorFacts([tensors[place] for place in self._once])

    def _tensors_now(self) -> list[Any]:
        return list(map(dict.get, self._holders, self._weights))

    def _tensors_hold(self) -> bool:
        now = self._tensors_now()
        if len(self._once) < len(now):
            if not all(map(is_, now, map(now.__getitem__, self._first))):
                return False
            now = list(map(now.__getitem__, self._once))
        return self._tensors.hold(now)

    def holds(self, model: Transformer) -> bool:
        """Tell whether the model is still what it was."""
        return (
            list(map(type, self._modules)) == self._kinds
            and list(map(len, self._sized)) == self._sizes
            and list(map(list, self._lists)) == self._orders
            and any(self._hooks) == self._hooked
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and _own_facts(model) == self._own
            and self._tensors_hold()
        )


def _own_facts(model: Transformer) -> dict[str, int]:
    """Return what the model and its angles hold, by identity; whoever holds the facts may not hold the model."""
    angles: dict[str, object] = getattr(model.rope, "__dict__", {})
    held = {**vars(model), **{f"rope.{name}": value for name, value in angles.items()}}
    held |= {"its class": type(model), "rope's class": type(model.rope)}
    return {name: id(value) for name, value in held.items() if name not in _NO_FACTS}


class Described(Generic[Description]):
    """What a step has to know of a model, described anew whenever the model is not what it was."""

    def __init__(self, describe: Callable[[Transformer], Description]) -> None:
        self._describe = describe
        self._known: tuple[Fingerprint, Description | Unsupported] | None = None

    def of(self, model: Transformer, *, look: bool = True) -> Description:
        """Return the description that holds now. Raises Unsupported where a fast step cannot compute this model.

        Without a `look`, for which `must_look` has to allow it, the description of the call before holds.
        """
        known = self._known
        if known is not None and not look:
            return _description(known[1])
        check_moment()
        if known is None or not known[0].holds(model):
            self._known = None  # not to hold the modules of before while others are described
            known = self._known = Fingerprint(model), self._verdict(model)
        return _description(known[1])

    def _verdict(self, model: Transformer) -> Description | Unsupported:
        try:
            return self._describe(model)
        except Unsupported as why:
            return why.with_traceback(None)


def _description(verdict: Description | Unsupported) -> Description:
    if isinstance(verdict, Unsupported):
        raise Unsupported(*verdict.args)
    return verdict


def must_look(model: Transformer) -> bool:
    """Whether anything but the generation that calls may have changed the model since its last call.

    A hook may, unless an attribute `only_looks` says that it does not.
    """
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    return not model.ownership.undisturbed or not all(getattr(hook, "only_looks", False) for hook in hooks)
