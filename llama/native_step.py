"""The fast step of a CPU: a whole forward, prompts too, as one native function over the model's own weights and cache.

Knows the modules of model.py, so that it can tell whether they are what the native code computes, and where their
numbers lie.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_int64
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from llama.generation import Chosen
from llama.kernels.forward import Batch, Layer, Matrix, Model, NativeForward
from llama.known import NotServed, Warnings, check_modules
from llama.kv_cache import StaticCache
from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.model import Transformer
from llama.quantize import Int8Embedding, Int8Linear, Int8Weight
from llama.request import Request
from llama.sampling import Sampler

logger = logging.getLogger(__name__)

_MULTIPLE = 32  # of numbers that the native code takes at a time


class NativeStep:
    """Runs a forward as one native function, over the model's own weights and cache. `forwards` counts them."""

    name, takes_prompts = "native", True
    watch: Callable[[int, int], None] | None = None  # told nothing: whoever watches the model sees every forward

    def __init__(self, folder: Path) -> None:
        self._folder, self._native = folder, NativeForward(folder)
        self.instructions = self._native.instructions
        self.forwards = 0
        self._warn = Warnings(logger)
        self._model: Model | None = None
        self._held: list[Tensor] = []  # what the addresses of weights point to
        # Of the caches that the addresses are of. All layers' come and go together, and freed ones must not be held.
        self._first_keys: weakref.ref[Tensor] | None = None

    def __reduce__(self) -> tuple[type["NativeStep"], tuple[Path]]:
        return NativeStep, (self._folder,)  # the copy of a model has weights of its own

    def __call__(
        self,
        model: Transformer,
        tokens: Tensor,
        start_pos: int | Sequence[int],
        *,
        logits: Literal["all", "last"],
        lengths: Sequence[int] | None,
    ) -> Tensor | None:
        """Return what `model(...)` returns, or None where the plain path has to do it, which is said once."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
            return None  # whoever records gradients needs the modules
        bsz, seqlen = tokens.shape
        starts = [start_pos] * bsz if isinstance(start_pos, int) else list(start_pos)
        if logits == "all" or lengths is None:
            lengths = [seqlen] * bsz
        try:
            if self._model is None or max(starts) == 0:  # once a text: modules and weights may have been replaced
                self.describe(model)
            assert self._model is not None
            end = max(map(sum, zip(starts, lengths, strict=True)))
            slots = self._take_cache(model, bsz, end)
        except NotServed as why:
            self._warn(why)
            return None
        cos_sin = model.rope.up_to(end, tokens.device)
        return self._forward(model, self._model, tokens, starts, lengths, cos_sin, slots, all=logits == "all")

    def run_ahead(
        self, model: Transformer, request: Request, sampler: Sampler, tokens: Tensor, cur_pos: Sequence[int]
    ) -> Iterator[Chosen] | None:
        """Leave the loop to the host, which is here the same CPU."""
        return None

    def free_cache(self) -> None:
        """Nothing to do: no cache is held here but the model's own."""

    def describe(self, model: Transformer) -> None:
        """Write down the model's sizes and where its weights lie. Raises NotServed."""
        self._model = None  # what was written down before does not hold any more, whatever comes of this
        _check(model)
        args, dtype = model.args, model.norm.weight.dtype
        self._held = []
        layers = (Layer * args.n_layers)()
        for layer, block in zip(layers, model.blocks, strict=True):
            layer.attention_norm, layer.ffn_norm = (
                self._vector(norm.weight, dtype) for norm in (block.attention_norm, block.ffn_norm)
            )
            for owner, names in ((block.attention, ("wq", "wk", "wv", "wo")), (block.feed_forward, ("w1", "w2", "w3"))):
                for name in names:
                    setattr(layer, name, self._matrix(getattr(owner, name).weight, dtype))
        self._model = Model(
            bfloat16=dtype == torch.bfloat16,
            int8=isinstance(model.tok_embeddings.weight, Int8Weight),
            dim=args.dim,
            heads=args.n_heads,
            kv_heads=args.n_kv_heads,
            head_dim=args.head_dim,
            hidden=args.ffn_dim,
            layer_count=args.n_layers,
            eps=args.norm_eps,
            embedding=self._matrix(model.tok_embeddings.weight, dtype),
            output=self._matrix(model.output.weight, dtype),
            norm=self._vector(model.norm.weight, dtype),
            layers=layers,
        )
        self._first_keys = None

    def _vector(self, weight: Tensor, dtype: torch.dtype) -> int:
        if weight.dtype != dtype or not weight.is_contiguous():
            raise NotServed("its weights are not all of one dtype, or not contiguous")
        self._held.append(weight.detach())
        return weight.data_ptr()

    def _matrix(self, weight: Tensor | Int8Weight, dtype: torch.dtype) -> Matrix:
        columns, length = weight.shape
        if isinstance(weight, Tensor):
            return Matrix(self._vector(weight, dtype), None, None, columns, length)
        codes = self._vector(weight.codes, torch.uint8)
        scales, zeros = self._vector(weight.scales, torch.float16), self._vector(weight.zeros, torch.float16)
        return Matrix(codes, scales, zeros, columns, length)

    def _take_cache(self, model: Transformer, rows: int, length: int) -> int:
        """Make room in every layer's cache, and return for how many positions there is; 0 without a cache."""
        assert self._model is not None
        if not model.kv_caching:
            return 0
        keys = self._first_keys and self._first_keys()
        held = model.first_attention.cache.keys
        if held is None or keys is not held or held.shape[0] < rows or held.shape[1] < length:
            for layer, cache in zip(self._model.layers[: model.args.n_layers], model.caches, strict=True):
                assert isinstance(cache, StaticCache)  # `describe` has looked
                keys, values = cache.room(rows, length, like=model.norm.weight)
                if keys.dtype != model.norm.weight.dtype or keys.device.type != "cpu":
                    raise NotServed("the cache holds another dtype than the model")
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            held = model.first_attention.cache.keys
            assert held is not None
            self._first_keys = weakref.ref(held)
        return held.shape[1]

    def _forward(
        self,
        model: Transformer,
        described: Model,
        tokens: Tensor,
        starts: list[int],
        lengths: Sequence[int],
        cos_sin: tuple[Tensor, Tensor],
        slots: int,
        *,
        all: bool,
    ) -> Tensor:
        low, high = tokens.aminmax()
        if not 0 <= int(low) <= int(high) < model.args.vocab_size:
            raise IndexError("a token id is outside of the vocabulary")
        bsz, seqlen = tokens.shape
        tokens = tokens.contiguous()
        scores = torch.empty((bsz, seqlen if all else 1, model.args.vocab_size))
        first, count = (c_int64 * bsz)(*starts), (c_int64 * bsz)(*lengths)
        batch = Batch(
            rows=bsz,
            width=seqlen,
            tokens=tokens.data_ptr(),
            starts=addressof(first),
            lengths=addressof(count),
            all=all,
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            cached=model.kv_caching,
            slots=slots,
            logits=scores.data_ptr(),
            threads=torch.get_num_threads(),
        )
        workspace = torch.empty(self._native.workspace_size(described, batch), dtype=torch.uint8)
        batch.workspace = workspace.data_ptr()
        self._native(described, batch)
        self.forwards += 1
        return scores


def _check(model: Transformer) -> None:
    """Refuse what the native code would not compute, or not as it stands there."""
    args, dtype = model.args, model.norm.weight.dtype
    if model.device.type != "cpu":
        raise NotServed(f"there is native code for CPUs alone, and the model is on {model.device}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise NotServed(f"there is native code for float32 and bfloat16, not for {dtype}")
    check_modules(model)
    sizes = {"dim": args.dim, "head_dim": args.head_dim, "the hidden numbers": args.ffn_dim}
    for name, size in sizes.items():
        if size % _MULTIPLE:
            raise NotServed(f"{name} of the model, {size}, is no multiple of {_MULTIPLE}")
    if len({type(layer.weight) for layer in _matrices(model)}) > 1:
        raise NotServed("some matrices are int8 and some are not")


def _matrices(model: Transformer) -> list[nn.Module]:
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, Int8Linear, Int8Embedding)
    return [module for module in model.modules() if isinstance(module, kinds)]
