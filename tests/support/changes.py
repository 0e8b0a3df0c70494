"""Changes of a model that researchers make: each a function that makes the same change to any model of the tests."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from tables import cases
from torch import Tensor, nn
from torch.nn.utils import parametrize

from llama.kv_cache import KVCache
from llama.model import RMSNorm, Transformer
from llama.quant.packed import PackedWeight
from llama.rope import RopeTable

Change = Callable[[Transformer], object]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class LoRA(nn.Module):
    """A linear layer plus an adapter of rank 1."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out + 0.1 * x.mean(-1, keepdim=True)


def first_weight(model: Transformer) -> nn.Parameter:
    """Return a float matrix, or a norm of an int8 model, which has no float matrix."""
    weight = model.blocks[0].attention.wo.weight
    return model.blocks[0].attention_norm.weight if isinstance(weight, PackedWeight) else weight


def edit_in_place(model: Transformer) -> None:
    with torch.no_grad():
        first_weight(model).mul_(1.5)


def add_to_a_bias(model: Transformer) -> None:
    """Add to the bias of wv, which is first made of zeros if the model has none."""
    layer = model.blocks[-1].attention.wv
    if layer.bias is None:
        layer.bias = nn.Parameter(model.norm.weight.new_zeros(layer.weight.shape[0]), requires_grad=False)
    with torch.no_grad():
        layer.bias.add_(0.3)


def take_a_bias(model: Transformer) -> None:
    model.blocks[0].attention.wq.bias = None


def swap_a_head_norm(model: Transformer) -> None:
    """Norm the keys of a layer if the model does not; else leave them without a norm."""
    attention = model.blocks[0].attention
    if isinstance(attention.k_norm, nn.Identity):
        attention.k_norm = RMSNorm(attention.head_dim, model.norm.eps).to(model.norm.weight.dtype).requires_grad_(False)
    else:
        attention.k_norm = nn.Identity()


def point_data_elsewhere(model: Transformer) -> None:
    weight = first_weight(model)
    weight.data = weight.data * 2


def transpose_data(model: Transformer) -> None:
    """Keep the numbers and their address, and transpose the strides; the matrix is square, or the model raises."""
    weight = first_weight(model)
    weight.data = weight.data.t() if weight.ndim == 2 else weight.data.flip(0)


def assign_a_parameter(model: Transformer) -> None:
    model.norm.weight = nn.Parameter(model.norm.weight.detach() * 0.5, requires_grad=False)


def scaled(model: Transformer, factor: float) -> dict[str, Tensor]:
    """Return other weights of the model's shapes and dtypes; the codes of int8 unchanged."""
    return {
        name: factor * weight if weight.is_floating_point() else weight.clone()
        for name, weight in model.state_dict().items()
    }


def load_by_assignment(model: Transformer) -> None:
    model.load_state_dict(scaled(model, 1.1), assign=True)
    model.requires_grad_(False)


def load_by_copy(model: Transformer) -> None:
    model.load_state_dict(scaled(model, 0.9))


def hook_that_changes(model: Transformer) -> None:
    model.blocks[0].attention.wo.register_forward_hook(lambda _, __, out: out * 2)


def pre_hook_that_changes(model: Transformer) -> None:
    model.norm.register_forward_pre_hook(lambda _, given: (given[0] + 1,))


def replace_a_method_of_an_instance(model: Transformer) -> None:
    attention = model.blocks[0].attention
    attention.forward = lambda *given: 2 * type(attention).forward(attention, *given)  # type: ignore[method-assign]


def replace_a_method_of_a_cache(model: Transformer) -> None:
    for cache in layers_held(model)[:1]:
        cache.update = lambda rows, xk, xv, cache=cache: type(cache).update(cache, rows, xk, 2 * xv)  # type: ignore[method-assign, misc]


def wrap_a_module(model: Transformer) -> None:
    model.blocks[0].attention.wq = LoRA(model.blocks[0].attention.wq)  # type: ignore[assignment]


def parametrize_a_weight(model: Transformer) -> None:
    parametrize.register_parametrization(model.norm, "weight", Doubled())


def change_one_eps(model: Transformer) -> None:
    model.blocks[0].ffn_norm.eps = 0.5


def change_every_eps(model: Transformer) -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 0.25


def change_an_operation(model: Transformer) -> None:
    model.use(model.ops._replace(name="mine", silu=torch.relu))


def change_one_operation(model: Transformer) -> None:
    feed_forward = model.blocks[0].feed_forward
    feed_forward.ops = feed_forward.ops._replace(name="mine", silu=torch.relu)


def take_a_layer(model: Transformer) -> None:
    model.layers = model.layers[:-1]


def add_a_layer(model: Transformer) -> None:
    model.layers.append(copy.deepcopy(model.layers[0]))


def use_a_layer_twice(model: Transformer) -> None:
    model.layers.append(model.layers[0])


def take_all_layers(model: Transformer) -> None:
    model.layers = nn.ModuleList()


def resize(layer: Any, rows: int | None = None, columns: int | None = None) -> None:
    """Change the size of a matrix, plain or packed."""
    weight = layer.weight
    if isinstance(weight, PackedWeight):
        wide = weight.rows(0, weight.shape[0])
        size = rows or wide.shape[0], columns or wide.shape[1]
        layer.weight = PackedWeight(*size, weight.format)
        layer.weight.fill(0, fitted(wide, *size))
        return
    size = rows or weight.shape[0], columns or weight.shape[1]
    layer.weight = nn.Parameter(fitted(weight.detach(), *size), requires_grad=False)


def fitted(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix cut to this size, its own numbers repeated if it is smaller."""
    return weight.repeat(-(-rows // weight.shape[0]), -(-columns // weight.shape[1]))[:rows, :columns].contiguous()


def resize_an_mlp(model: Transformer, block: int, width: int) -> None:
    mlp = model.blocks[block].feed_forward
    resize(mlp.w1, rows=width)
    resize(mlp.w3, rows=width)
    resize(mlp.w2, columns=width)


def widen_one_mlp(model: Transformer) -> None:
    resize_an_mlp(model, 0, model.args.ffn_dim + 32)


def prune_all_mlps(model: Transformer) -> None:
    for block in range(len(model.layers)):
        resize_an_mlp(model, block, 32)


def prune_a_query_head(model: Transformer) -> None:
    """Leave a number of query heads that the KV heads do not divide."""
    for block in model.blocks:
        attention = block.attention
        left = (model.args.n_heads - 1) * attention.head_dim
        resize(attention.wq, rows=left)
        resize(attention.wo, columns=left)


def enlarge_the_head(model: Transformer) -> None:
    resize(model.output, rows=model.args.vocab_size + 37)


def shrink_the_head(model: Transformer) -> None:
    resize(model.output, rows=2)


def break_a_shape(model: Transformer) -> None:
    """Make a shape that the plain path rejects."""
    resize(model.blocks[0].attention.wo, columns=32)


def renorm_the_embedding(model: Transformer) -> None:
    if isinstance(model.tok_embeddings, nn.Embedding):
        model.tok_embeddings.max_norm = 0.5


def unlike_the_others_uncached(model: Transformer) -> None:
    model.blocks[-1].attention.kv_caching = not model.kv_caching


def turn_by_other_angles(model: Transformer) -> None:
    model.rope.freqs = model.rope.freqs * 2
    model.rope._freqs_cis = None


def turn_by_float64(model: Transformer) -> None:
    model.rope.freqs = model.rope.freqs.double()
    model.rope._freqs_cis = None


def turn_by_a_method_of_an_instance(model: Transformer) -> None:
    at = model.rope.at
    model.rope.at = lambda *given: (at(*given)[0] * 1.5, at(*given)[1])  # type: ignore[method-assign]


def take_the_memory_of_a_matrix(model: Transformer) -> None:
    """Free the memory of a matrix; not of a norm or packed weights, which PyTorch itself would read."""
    if (weight := first_weight(model)).ndim == 2:
        weight.untyped_storage().resize_(0)


def assign_zeros_without_memory(model: Transformer) -> None:
    zeros = torch._efficientzerotensor(model.norm.weight.shape, dtype=model.norm.weight.dtype)  # type: ignore[attr-defined]
    model.norm.weight = nn.Parameter(zeros, requires_grad=False)


def replace_the_call_of_an_instance(model: Transformer) -> None:
    attention = model.blocks[0].attention
    attention._call_impl = lambda *given: 2 * attention.forward(*given)  # type: ignore[method-assign]


def louder_plain(model: Transformer, *given: Any) -> Tensor:
    return 2 * Transformer._plain(model, *given)


def replace_a_method_of_the_model(model: Transformer) -> None:
    model._plain = MethodType(louder_plain, model)  # type: ignore[method-assign]


def layers_held(model: Transformer) -> list[KVCache]:
    """Return the layers of the model's own cache, [] before its first text."""
    return [] if model.cache is None else model.cache.layers


def keep_keys_unrotated(model: Transformer) -> None:
    for cache in layers_held(model):
        cache.unrotated = not cache.unrotated  # type: ignore[misc]


def halve_what_is_kept(model: Transformer) -> None:
    for cache in layers_held(model):
        cache.observes = True  # type: ignore[misc]
        cache.observe = lambda attended, cache=cache: [held.mul_(0.5) for held in cache.held().values()]  # type: ignore[assignment, method-assign, misc]


def be_of_another_class(model: Transformer) -> None:
    plain = Transformer._plain
    model.__class__ = type("Louder", (Transformer,), {"_plain": lambda self, *given: 2 * plain(self, *given)})


def double_by_a_norm_of_another_class(model: Transformer) -> None:
    plain = RMSNorm.forward
    model.layers[1].ffn_norm.__class__ = type("Mine", (RMSNorm,), {"forward": lambda self, x: 2 * plain(self, x)})


def turn_by_another_class(model: Transformer) -> None:
    at = RopeTable.at

    def wider(table: RopeTable, *given: Any) -> tuple[Tensor, Tensor]:
        cos, sin = at(table, *given)
        return cos * 1.5, sin

    model.rope.__class__ = type("Wider", (RopeTable,), {"at": wider})


def change_the_order_of_layers(model: Transformer) -> None:
    layers = model.layers._modules
    layers["0"] = layers.pop("0")


def leave_eps_to_pytorch(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = None  # type: ignore[assignment]


def want_gradients_of_angles(model: Transformer) -> None:
    model.rope.freqs = model.rope.freqs.clone().requires_grad_()
    model.rope._freqs_cis = None


def put_a_cache_of_ones(model: Transformer) -> None:
    """Replace keys and values by tensors at another address, which are not contiguous."""
    for cache in layers_held(model):
        if cache.keys is not None:
            cache.keys = torch.ones_like(cache.keys.transpose(0, 1).contiguous()).transpose(0, 1)
            cache.values = torch.ones_like(cache.keys)


CHANGES: dict[str, Change] = {
    **{"halve": nn.Module.half, "double": nn.Module.double},
    **{"to_bfloat16": nn.Module.bfloat16, "to_float": nn.Module.float},
    **{
        change.__name__: change
        for change in (
            *(add_to_a_bias, take_a_bias, swap_a_head_norm, edit_in_place, point_data_elsewhere, transpose_data),
            *(assign_a_parameter, load_by_assignment, load_by_copy, hook_that_changes, pre_hook_that_changes),
            *(replace_a_method_of_an_instance, replace_a_method_of_a_cache, wrap_a_module, parametrize_a_weight),
            *(change_one_eps, change_every_eps, change_an_operation, change_one_operation, take_a_layer, add_a_layer),
            *(use_a_layer_twice, take_all_layers, widen_one_mlp, prune_all_mlps, prune_a_query_head, enlarge_the_head),
            *(shrink_the_head, break_a_shape, renorm_the_embedding, unlike_the_others_uncached, turn_by_other_angles),
            *(turn_by_float64, turn_by_a_method_of_an_instance, put_a_cache_of_ones, take_the_memory_of_a_matrix),
            *(assign_zeros_without_memory, replace_the_call_of_an_instance, keep_keys_unrotated, halve_what_is_kept),
            *(be_of_another_class, turn_by_another_class, change_the_order_of_layers, leave_eps_to_pytorch),
            *(want_gradients_of_angles, replace_a_method_of_the_model, double_by_a_norm_of_another_class),
        )
    },
}


# One of each family: a cast, a new parameter, a hook, a module, an operation, a size.
SOME = ("double", "assign_a_parameter", "hook_that_changes", "wrap_a_module", "change_one_operation", "prune_all_mlps")
# Parametrize a test of a runner; that each change is seen at all is the claim of the fingerprint's tests.
some_changes = pytest.mark.parametrize("change", cases(CHANGES, *SOME))

# What PyTorch and this project raise for unsupported values.
REFUSALS = (ValueError, RuntimeError, IndexError, KeyError, TypeError, AttributeError, NotImplementedError)


def outcome(call: Callable[[], Tensor]) -> Tensor | type[BaseException]:
    """Return the logits, or the class of the error."""
    try:
        return call()
    except REFUSALS as error:
        return type(error)


def check_alike(plain: Tensor | type[BaseException], fast: Tensor | type[BaseException], *, coarse: bool) -> None:
    """Assert that two models raised the same class of error, or gave the same logits up to rounding.

    Rounding, as a share of the largest logit: 1e-5 at most in float32; in 16 bits (`coarse`) 5 % as a rule, and 17 %
    once in some thousand. Other weights, positions or operations differ as much as another text.
    """
    if not isinstance(plain, Tensor) or not isinstance(fast, Tensor):
        assert plain is fast
        return
    assert (plain.shape, plain.dtype, plain.device) == (fast.shape, fast.dtype, fast.device)
    assert plain.requires_grad == fast.requires_grad
    plain, fast = plain.detach(), fast.detach()
    if plain.device.type != "meta":
        largest = float(plain.abs().max())
        torch.testing.assert_close(fast, plain, rtol=0, atol=(0.35 if coarse else 1e-3) * largest, equal_nan=True)
