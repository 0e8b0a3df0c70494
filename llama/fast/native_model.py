"""Describe a model to native code: its sizes, and the addresses of its weights.

Everything is checked before native code reads it: sizes come from the tensors, not from a configuration, and every
tensor has the dtype, shape, device and layout that the code expects. Knows the modules of model.py.
"""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from llama.fast.native_structs import Layer, Matrix, NativeModel
from llama.fast.supported import Unsupported, check_modules
from llama.model import RMSNorm, Transformer, TransformerBlock
from llama.quant.layers import PackedEmbedding, PackedLinear, quantized_weights
from llama.quant.packed import PackedWeight, part_sizes

# The packed weights that native code reads: bits, span, and whether there are zeros.
_PACKED = {(bits, 32, zeros) for bits in (4, 5, 8) for zeros in (False, True)} | {(6, 16, False)}
_MULTIPLE = 32  # numbers that native code processes at a time


def describe(model: Transformer) -> NativeModel:
    """Return the model as native code reads it. Raises Unsupported."""
    check_modules(model)
    dtype = model.norm.weight.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"there is native code for float32 and bfloat16, not for {dtype}")
    native = _sizes(model)
    native.norm = check_tensor(model.norm.weight, (native.dim,), dtype)
    native.embedding = _matrix(model.tok_embeddings.weight, model.tok_embeddings.weight.shape[0], native.dim, native)
    if model.output.bias is not None:
        raise Unsupported("the head has a bias")
    native.output = _matrix(model.output.weight, model.output.weight.shape[0], native.dim, native)
    native.layers = (Layer * native.layer_count)(*(_layer(block, native) for block in model.blocks))
    native.trainable = any(weight.requires_grad for weight in model.parameters())
    return native


def check_tensor(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the address of a tensor. Raises Unsupported unless native code can read it as this shape and dtype."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise Unsupported(f"native code reads plain tensors on a CPU, not a {kind}")
    if tensor.dtype != dtype:
        raise Unsupported(f"a tensor is {tensor.dtype}, and the others need {dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise Unsupported(f"a tensor is {tuple(tensor.shape)}, and the others need {tuple(shape)}")
    if not tensor.data_ptr():
        raise Unsupported("a tensor has no memory")
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.data_ptr() % tensor.element_size():
        raise Unsupported("a tensor is not contiguous, not aligned, or a view that negates")
    return tensor.data_ptr()


def _sizes(model: Transformer) -> NativeModel:
    """Return the sizes, without addresses. Raises Unsupported if native code cannot compute what the modules do."""
    attention, embedding = model.blocks[0].attention, model.tok_embeddings.weight
    if any(len(weight.shape) != 2 for weight in (embedding, attention.wq.weight, attention.wk.weight)):
        raise Unsupported("a matrix does not have two dimensions")
    head_dim, eps = attention.head_dim, model.norm.eps
    if not isinstance(eps, Real):
        raise Unsupported(f"a norm's eps is {eps!r}")
    sizes = NativeModel(
        bfloat16=model.norm.weight.dtype == torch.bfloat16,
        activations=_activations(model),
        dim=embedding.shape[1],
        heads=attention.wq.weight.shape[0] // head_dim,
        kv_heads=attention.wk.weight.shape[0] // head_dim,
        head_dim=head_dim,
        hidden=model.blocks[0].feed_forward.w1.weight.shape[0],
        layer_count=len(model.blocks),
        eps=float(eps),
    )
    for name, size in {"dim": sizes.dim, "head_dim": head_dim, "ffn_dim": sizes.hidden}.items():
        if size % _MULTIPLE:
            raise Unsupported(f"{name}={size} of the model is not a multiple of {_MULTIPLE}")
    if not sizes.kv_heads or sizes.heads % sizes.kv_heads:
        raise Unsupported(f"{sizes.heads} heads cannot share {sizes.kv_heads} KV heads")
    if isinstance(model.tok_embeddings, PackedEmbedding) and model.tok_embeddings.dtype != model.norm.weight.dtype:
        raise Unsupported("activations are of another dtype than norms")
    if any(norm.eps != model.norm.eps for norm in model.modules() if isinstance(norm, RMSNorm)):
        raise Unsupported("norms differ in their eps")
    if any(block.attention.head_dim != head_dim for block in model.blocks):
        raise Unsupported("layers differ in their heads")
    return sizes


def _activations(model: Transformer) -> int:
    """Return the bits of activations in products with packed weights; 0 if no weight is packed."""
    found = {module.activations for module in model.modules() if isinstance(module, PackedLinear)}
    if not found and quantized_weights(model):
        return 16  # only the embedding is packed, and its vectors are widened
    if len(found) > 1 or not found <= {8, 16}:
        raise Unsupported(f"layers round activations to {sorted(found)} bits")
    return found.pop() if found else 0


def _layer(block: TransformerBlock, native: NativeModel) -> Layer:
    attention, mlp, dtype = block.attention, block.feed_forward, native.dtype
    queries, kv = native.heads * native.head_dim, native.kv_heads * native.head_dim
    if any(layer.bias is not None for layer in (attention.wo, mlp.w1, mlp.w2, mlp.w3)):
        raise Unsupported("a layer other than wq, wk and wv has a bias")
    layer = Layer(
        attention_norm=check_tensor(block.attention_norm.weight, (native.dim,), dtype),
        ffn_norm=check_tensor(block.ffn_norm.weight, (native.dim,), dtype),
        wq=_matrix(attention.wq.weight, queries, native.dim, native),
        wk=_matrix(attention.wk.weight, kv, native.dim, native),
        wv=_matrix(attention.wv.weight, kv, native.dim, native),
        wo=_matrix(attention.wo.weight, native.dim, queries, native),
        w1=_matrix(mlp.w1.weight, native.hidden, native.dim, native),
        w2=_matrix(mlp.w2.weight, native.dim, native.hidden, native),
        w3=_matrix(mlp.w3.weight, native.hidden, native.dim, native),
    )
    for name, product, size in (("q", attention.wq, queries), ("k", attention.wk, kv), ("v", attention.wv, kv)):
        if product.bias is not None:
            setattr(layer, f"{name}_bias", check_tensor(product.bias, (size,), dtype))
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if isinstance(norm, RMSNorm):
            setattr(layer, name, check_tensor(norm.weight, (native.head_dim,), dtype))
        elif not isinstance(norm, nn.Identity):
            raise Unsupported(f"queries or keys go through a {type(norm).__name__}")
    return layer


def _matrix(weight: Tensor | PackedWeight, rows: int, columns: int, native: NativeModel) -> Matrix:
    """Return a weight (rows, columns) as native code reads it; its `columns` are our rows; set `mixed`."""
    if isinstance(weight, Tensor):
        native.mixed |= bool(native.activations)
        return Matrix(weight=check_tensor(weight, (rows, columns), native.dtype), columns=rows, length=columns)
    if tuple(weight.shape) != (rows, columns):
        raise Unsupported(f"a matrix is {tuple(weight.shape)}, and the others need {(rows, columns)}")
    format = weight.format
    if (format.bits, format.span, format.offset is None) not in _PACKED:
        raise Unsupported(f"there is no native code for weights packed as {format}")
    parts = part_sizes(rows, columns, format)
    places = {name: check_tensor(getattr(weight, name), *size) for name, size in parts.items()}
    return Matrix(
        places.pop("codes"), **places, columns=rows, length=columns, bits=format.bits, offset=format.offset or 0
    )
