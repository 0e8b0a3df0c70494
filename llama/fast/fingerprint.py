"""A snapshot of what a fast step relies on in a model, compared with the model at every call.

A fast step computes from weights and does not call the modules. So a snapshot contains everything that decides what the
modules compute: the modules, their classes, attributes and hooks, and the address, dtype, sizes and strides of every
weight. It contains no copy of a weight.

Not detected:
    - a replaced function, method of a class, or constant of PyTorch or of this library: the fast step computes what the
      installed library computes. An assignment on an instance is detected (`supported.check_modules`).
    - a change by another thread while a call runs.
Numbers written into a weight need no detection: a step reads them at every call. Knows torch.
"""

from collections.abc import Callable, Sequence, Set, Sized
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # None unless torch.compile looks at every frame
from torch._C._dynamo.guards import TensorGuards  # dynamo's own comparison of many tensors at a time
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from llama.fast.supported import Unsupported
from llama.model import Transformer

Description = TypeVar("Description")


def check_moment() -> None:
    """Raise Unsupported if PyTorch is in a mode that may change what the modules compute."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())  # type: ignore[no-untyped-call]
    for mode in modes:
        if type(mode) is not DeviceContext:  # a default device: every buffer of a fast step names its own
            raise Unsupported(f"{type(mode).__name__} watches PyTorch's operations")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Unsupported("autocast is on")
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise Unsupported("a transformation of torch.func, or forward-mode differentiation, is under way")
    if get_eval_frame_callback() is not None:  # a graph ended early, and this code runs between two graphs
        raise Unsupported("torch.compile is under way")
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise Unsupported("the model is being traced")
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        raise Unsupported("a hook watches all modules")


# Attributes of modules that are not compared: the switch, which a step reads itself; the caches of texts and their
# settings; references back to the model; PyTorch's own; the computed angles.
_OF_TEXTS = {"kv_caching", "_kv_cache", "_own", "runner", "original"}
_NOT_COMPARED = {*vars(nn.Module()), *_OF_TEXTS, "rope._freqs_cis"}


class TensorLayout:
    """The addresses, dtypes, sizes and strides of tensors, without references to them. No tensor may occur twice."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._addresses = list(map(Tensor.data_ptr, tensors))

    def same(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return True if the tensors have the same classes, dtypes, devices, sizes, strides and addresses.

        Also compares the modes of PyTorch's dispatcher.
        """
        return self._guards.check(*tensors) and self.same_addresses(tensors)

    def same_addresses(self, tensors: Sequence[Tensor | None]) -> bool:
        return list(map(Tensor.data_ptr, tensors)) == self._addresses  # type: ignore[arg-type]


class Snapshot:
    """What decides the results of a model's modules, at the time of its creation."""

    def __init__(self, model: Transformer) -> None:
        self._modules = [module for module in model.modules() if module is not model]  # no cycle through the model
        self._classes = list(map(type, self._modules))
        facts = [(vars(module), key) for module in self._modules for key in vars(module).keys() - _NOT_COMPARED]
        facts += [(module._modules, key) for module in (model, *self._modules) for key in module._modules]
        facts += [  # parameters that are None, such as a bias; the others are `_tensors`
            (module._parameters, name)
            for module in self._modules
            for name, weight in module._parameters.items()
            if weight is None
        ]
        self._owners, self._names = [owner for owner, _ in facts], [name for _, name in facts]
        self._values = list(map(dict.get, self._owners, self._names))
        self._sized: list[Sized] = [vars(module) for module in self._modules]  # a method assigned on one adds an entry
        self._sizes = list(map(len, self._sized))
        self._lists = [module._modules for module in self._modules if isinstance(module, nn.ModuleList)]
        self._orders = list(map(list, self._lists))
        self._hooks = [
            hooks for module in self._modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._hooked = any(self._hooks)  # with any hook, no step is fast
        self._model = _identities(model)
        weights = [
            (module._parameters, name, weight)
            for module in (model, *self._modules)
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        places = {weight: place for place, (_, _, weight) in reversed(list(enumerate(weights)))}  # the first of each
        self._holders, self._weights = [holder for holder, _, _ in weights], [name for _, name, _ in weights]
        self._first = [places[weight] for _, _, weight in weights]  # differ from the places for a tied head
        self._once = sorted(places.values())
        tensors = self._tensors_now()
        self._tensors = TensorLayout([tensors[place] for place in self._once])

    def _tensors_now(self) -> list[Any]:
        return list(map(dict.get, self._holders, self._weights))

    def _same_tensors(self) -> bool:
        now = self._tensors_now()
        if len(self._once) < len(now):
            if not all(map(is_, now, map(now.__getitem__, self._first))):
                return False
            now = list(map(now.__getitem__, self._once))
        return self._tensors.same(now)

    def matches(self, model: Transformer) -> bool:
        """Return True if the model is unchanged."""
        return (
            list(map(type, self._modules)) == self._classes
            and list(map(len, self._sized)) == self._sizes
            and list(map(list, self._lists)) == self._orders
            and any(self._hooks) == self._hooked
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and _identities(model) == self._model
            and self._same_tensors()
        )

    def writes(self) -> list[object]:
        """Return how often each weight was written, except through `Tensor.data`.

        PyTorch does not count this for tensors that were made in inference mode: then no two results are equal.
        """
        return [object() if one.is_inference() else one._version for one in self._tensors_now()]

    def memory(self) -> list[UntypedStorage] | None:
        """Return the memory of all weights, which stays allocated as long as the list; None if a weight has moved."""
        tensors = self._tensors_now()
        tensors = list(map(tensors.__getitem__, self._once))
        memory = list(map(Tensor.untyped_storage, tensors))
        return memory if self._tensors.same_addresses(tensors) else None


def _identities(model: Transformer) -> dict[str, int]:
    """Return the identities of the attributes of a model and its angles; no reference to the model itself."""
    angles: dict[str, object] = getattr(model.rope, "__dict__", {})
    values = {**vars(model), **{f"rope.{name}": value for name, value in angles.items()}}
    values |= {"its class": type(model), "rope's class": type(model.rope)}
    return {name: id(value) for name, value in values.items() if name not in _NOT_COMPARED}


def original_of(model: Transformer) -> Transformer:
    """Return the model that a twin was made from (`with_kv_caching`) if the two differ in nothing except the switch.

    Return the model itself if they differ in more, or if it is not a twin.
    """
    original: Transformer | None = vars(model).get("original")
    if original is None or list(model.layers._modules) != list(original.layers._modules):
        return model
    pairs: list[tuple[nn.Module, nn.Module]] = [(model, original), (model.layers, original.layers)]
    for one, other in zip(model.layers, original.layers, strict=True):
        pairs.append((one, other))
        if one is not other:  # a twin copies each layer that has an attention
            pairs.append((one.attention, other.attention))  # type: ignore[arg-type]
    return original_of(original) if all(_alike(one, other) for one, other in pairs) else model


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True if both modules have the same class, attributes and submodules, except those that a twin copies."""
    parts = isinstance(one, nn.ModuleList) or _same(one._modules, other._modules, {"layers", "attention"})
    return type(one) is type(other) and parts and _same(vars(one), vars(other), {"_modules", *_OF_TEXTS})


def _same(one: dict[str, Any], other: dict[str, Any], but: Set[str]) -> bool:
    names = one.keys() - but
    return names == other.keys() - but and all(one[name] is other[name] for name in names)


class Described(NamedTuple, Generic[Description]):
    """A model's description, and the memory of its weights, which stay at the described addresses as long as this."""

    description: Description
    memory: list[UntypedStorage]


class Descriptions(Generic[Description]):
    """The description of each model that a step runs. A model that has changed is described again."""

    def __init__(self, describe: Callable[[Transformer], Description]) -> None:
        self._describe = describe
        self._known = WeakKeyDictionary[Transformer, tuple[Snapshot, Description | Unsupported]]()

    def of(self, model: Transformer) -> Described[Description]:
        """Return the model's current description. Raises Unsupported if a fast step cannot compute this model.

        Also if another thread moves the model's weights at this moment.
        """
        check_moment()
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # a snapshot that was made in this mode matches in this mode only
                return self.of(model)
        model = original_of(model)
        known = self._known.get(model)
        if known is None or not known[0].matches(model):
            known = None  # release the old modules before others are described
            self._known.pop(model, None)
            known = self._known[model] = Snapshot(model), self._verdict(model)
        if isinstance(known[1], Unsupported):
            raise Unsupported(*known[1].args)
        memory = known[0].memory()
        if memory is None:
            raise Unsupported("another thread moves the model's weights")
        return Described(known[1], memory)

    def writes(self, model: Transformer) -> list[object]:
        """Return how often each weight of a described model was written, see `Snapshot.writes`."""
        return self._known[original_of(model)][0].writes()

    def _verdict(self, model: Transformer) -> Description | Unsupported:
        try:
            return self._describe(model)
        except Unsupported as why:
            return why.with_traceback(None)
