"""A model as the native code is told of it: sizes, and where its weights lie; or why it is not told.

Nothing reaches native code unchecked: the sizes are those of the tensors, not what a configuration says of them, and
every tensor is of the dtype, shape, device and layout that the code reads. Knows the modules of model.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import cast

import torch
from torch import Tensor, nn

from llama.fast.native_library import Layer, Matrix, Model
from llama.fast.supported import Unsupported, check_modules
from llama.model import RMSNorm, Transformer, TransformerBlock
from llama.quant.layers import PackedEmbedding, PackedLinear, quantized_weights
from llama.quant.packed import Format, MappedWeight, QuantizedWeight, part_sizes
from llama.untrusted.gguf_sizes import FILE_BLOCKS

# The bits, span and whether there are zeros of packed weights that it reads.
_PACKED = {(bits, 32, zeros) for bits in (4, 5, 8) for zeros in (False, True)} | {(6, 16, False)}
# The types of a .gguf file whose blocks it reads, as the file numbers them, and what is in one.
_BLOCKS = {
    "Q4_0": (2, Format(4, offset=8)),
    "Q4_1": (3, Format(4)),
    "Q5_0": (6, Format(5, offset=16)),
    "Q5_1": (7, Format(5)),
    "Q8_0": (8, Format(8, offset=128)),
    "Q4_K": (12, Format(4, nested=True)),
    "Q5_K": (13, Format(5, nested=True)),
    "Q6_K": (14, Format(6, span=16, offset=32, nested=True)),
}
_MULTIPLE = 32  # of numbers that the native code takes at a time


@dataclass(frozen=True)
class NativeModel:
    """What the native code computes, without any text. It holds no weight: the caller checks that they still lie there.

    dtype: of norms, cache, and plain matrices. vocab_size: how many ids the embedding knows. trainable: whether some
    weight may want a gradient.
    """

    sizes: Model
    dtype: torch.dtype
    vocab_size: int
    trainable: bool


def describe(model: Transformer) -> NativeModel:
    """Return what native code has to know of the model. Raises Unsupported."""
    check_modules(model)
    dtype = model.norm.weight.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"there is native code for float32 and bfloat16, not for {dtype}")
    sizes = _sizes(model)
    sizes.norm = check_tensor(model.norm.weight, (sizes.dim,), dtype)
    sizes.embedding = _matrix(model.tok_embeddings.weight, model.tok_embeddings.weight.shape[0], sizes.dim, sizes)
    if model.output.bias is not None:
        raise Unsupported("the head has a bias")
    sizes.output = _matrix(model.output.weight, model.output.weight.shape[0], sizes.dim, sizes)
    sizes.layers = (Layer * sizes.layer_count)(*(_layer(block, sizes, dtype) for block in model.blocks))
    return NativeModel(
        sizes=sizes,
        dtype=dtype,
        vocab_size=sizes.embedding.columns,
        trainable=any(weight.requires_grad for weight in model.parameters()),
    )


def check_tensor(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return where a tensor lies. Raises Unsupported where the native code would read it for something else."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise Unsupported(f"there is native code for plain tensors on a CPU alone, not for a {kind}")
    if tensor.dtype != dtype:
        raise Unsupported(f"a tensor is {tensor.dtype} where the others ask for {dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise Unsupported(f"a tensor is {tuple(tensor.shape)} where the others ask for {tuple(shape)}")
    if not tensor.data_ptr():
        raise Unsupported("a tensor has no memory")
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.data_ptr() % tensor.element_size():
        raise Unsupported("a tensor is not contiguous, not aligned, or a view that negates")
    return tensor.data_ptr()


def _sizes(model: Transformer) -> Model:
    """Return the sizes, without addresses; refuse what the native code computes otherwise than the modules, or not."""
    attention, embedding = model.blocks[0].attention, model.tok_embeddings.weight
    if any(len(weight.shape) != 2 for weight in (embedding, attention.wq.weight, attention.wk.weight)):
        raise Unsupported("a matrix has not two dimensions")
    head_dim, eps = attention.head_dim, model.norm.eps
    if not isinstance(eps, Real):
        raise Unsupported(f"a norm's eps is {eps!r}")
    sizes = Model(
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
            raise Unsupported(f"{name} of the model, {size}, is no multiple of {_MULTIPLE}")
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
    """Return how many bits activations have in the products with packed weights; 0 where no weight is packed."""
    found = {module.activations for module in model.modules() if isinstance(module, PackedLinear)}
    if not found and quantized_weights(model):
        return 16  # an embedding alone, whose vectors are widened
    if len(found) > 1 or not found <= {8, 16}:
        raise Unsupported(f"layers round activations to {sorted(found)} bits")
    return found.pop() if found else 0


def _layer(block: TransformerBlock, sizes: Model, dtype: torch.dtype) -> Layer:
    attention, mlp = block.attention, block.feed_forward
    queries, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if any(layer.bias is not None for layer in (attention.wo, mlp.w1, mlp.w2, mlp.w3)):
        raise Unsupported("a layer other than wq, wk and wv has a bias")
    return Layer(
        attention_norm=check_tensor(block.attention_norm.weight, (sizes.dim,), dtype),
        ffn_norm=check_tensor(block.ffn_norm.weight, (sizes.dim,), dtype),
        q_bias=_bias(attention.wq, queries, dtype),
        k_bias=_bias(attention.wk, kv, dtype),
        v_bias=_bias(attention.wv, kv, dtype),
        q_norm=_head_norm(attention.q_norm, sizes, dtype),
        k_norm=_head_norm(attention.k_norm, sizes, dtype),
        wq=_matrix(attention.wq.weight, queries, sizes.dim, sizes),
        wk=_matrix(attention.wk.weight, kv, sizes.dim, sizes),
        wv=_matrix(attention.wv.weight, kv, sizes.dim, sizes),
        wo=_matrix(attention.wo.weight, sizes.dim, queries, sizes),
        w1=_matrix(mlp.w1.weight, sizes.hidden, sizes.dim, sizes),
        w2=_matrix(mlp.w2.weight, sizes.dim, sizes.hidden, sizes),
        w3=_matrix(mlp.w3.weight, sizes.hidden, sizes.dim, sizes),
    )


def _bias(layer: nn.Module, length: int, dtype: torch.dtype) -> int | None:
    bias = cast(Tensor | None, layer.bias)
    return None if bias is None else check_tensor(bias, (length,), dtype)


def _head_norm(norm: nn.Module, sizes: Model, dtype: torch.dtype) -> int | None:
    if isinstance(norm, nn.Identity):
        return None
    if not isinstance(norm, RMSNorm):
        raise Unsupported(f"queries or keys go through a {type(norm).__name__}")
    return check_tensor(norm.weight, (sizes.head_dim,), dtype)


def _matrix(weight: Tensor | QuantizedWeight, rows: int, columns: int, sizes: Model) -> Matrix:
    """Return a weight (rows, columns) as the native code is told of it, whose columns are our rows."""
    if isinstance(weight, Tensor):
        sizes.mixed |= bool(sizes.activations)
        dtype = torch.bfloat16 if sizes.bfloat16 else torch.float32
        return Matrix(weight=check_tensor(weight, (rows, columns), dtype), columns=rows, length=columns)
    if tuple(weight.shape) != (rows, columns):
        raise Unsupported(f"a matrix is {tuple(weight.shape)} where the others ask for {(rows, columns)}")
    format = weight.format
    if isinstance(weight, MappedWeight):
        sizes.mapped = True
        return mapped_matrix(weight)
    if (format.bits, format.span, format.offset is None) not in _PACKED:
        raise Unsupported(f"there is no native code for weights packed as {format}")
    parts = part_sizes(rows, columns, format)
    places = {name: check_tensor(getattr(weight, name), *size) for name, size in parts.items()}
    return Matrix(
        places.pop("codes"), **places, columns=rows, length=columns, bits=format.bits, offset=format.offset or 0
    )


def mapped_matrix(weight: MappedWeight) -> Matrix:
    """Return a matrix as it lies in a file, as the native code is told of it. Raises Unsupported."""
    number, format = _BLOCKS.get(weight.block, (0, None))
    if format is None or format != weight.format:
        raise Unsupported(f"there is no native code for {weight.format} in blocks of {weight.block}")
    rows, columns = weight.shape
    length, size = FILE_BLOCKS[weight.block]
    place = check_tensor(weight.raw, (rows, columns // length, size), torch.uint8)
    return Matrix(weight=place, columns=rows, length=columns, bits=format.bits, offset=format.offset or 0, block=number)
