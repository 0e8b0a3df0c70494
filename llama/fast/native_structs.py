"""The structs that native code reads: addresses and sizes. `native/` declares the same."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p

import torch


class Matrix(ctypes.Structure):
    """A weight (columns, length); if packed, its codes and the other parts in the layout of `llama/quant/packed.py`.

    bits: of a code; 0 for a plain weight.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scales", "zeros", "scale_units", "zero_units")),
        *((name, c_int64) for name in ("columns", "length", "bits", "offset")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("ffn_norm", c_void_p),
        *((name, c_void_p) for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")),  # or none
        *((name, Matrix) for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")),
    )


class LayerCache(ctypes.Structure):
    """The addresses of the buffers of one layer's cache, by name; null for buffers that its kind does not have."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((f"{side}_{part}", c_void_p) for side in ("key", "value") for part in ("codes", "scale", "zero")),
        *((name, c_void_p) for name in ("table", "kept_keys", "kept_values", "runs", "lows", "highs")),
    )


class Groups(ctypes.Structure):
    """How a quantised cache stores positions, see `llama/kv_cache/quantized.py`; all 0 for other kinds."""

    _fields_ = tuple(
        (name, c_int64)
        for name in ("key_bits", "value_bits", "tokens", "window", "sinks", "parts", "before_rope", "rotates_values")
    )


class NativeModel(ctypes.Structure):
    """A model's sizes, and the addresses of its weights. It stores no weight: the caller keeps them in memory."""

    trainable = False  # whether a weight requires a gradient
    _fields_ = (
        ("bfloat16", c_int64),  # 1: norms, cache and plain matrices are bfloat16; 0: float32
        ("activations", c_int64),  # bits of activations in products with packed matrices, 8 or 16; 0: all are plain
        ("mixed", c_int64),  # 1: some matrices are plain and others are packed
        *((name, c_int64) for name in ("dim", "heads", "kv_heads", "head_dim", "hidden", "layer_count")),
        ("eps", c_float),
        ("embedding", Matrix),
        ("output", Matrix),
        ("norm", c_void_p),
        ("layers", POINTER(Layer)),
    )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of norms, cache and plain matrices."""
        return torch.bfloat16 if self.bfloat16 else torch.float32

    @property
    def vocab_size(self) -> int:
        """The number of ids that the embedding has."""
        return int(self.embedding.columns)


class NativeBatch(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_void_p) for name in ("tokens", "starts", "lengths")),
        ("all", c_int64),
        *((name, c_void_p) for name in ("cos", "sin")),
        ("kind", c_int64),  # of the cache, see KINDS in native_caches.py; 0: no cache
        ("slots", c_int64),
        ("caches", POINTER(LayerCache)),  # of every layer, or null
        ("groups", Groups),
        ("bases", c_void_p),  # or null
        ("pages", c_int64),
        ("logits", c_void_p),
        ("choice", c_void_p),  # a Choice, or null
        ("threads", c_int64),
        ("workspace", c_void_p),
    )


class ChoiceSettings(ctypes.Structure):
    """How a row's token is chosen."""

    _fields_ = (
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", c_int64),
        ("penalty", c_double),
        ("seen", c_void_p),  # or null
    )


class Choice(ctypes.Structure):
    """How tokens are chosen from logits. The id TOO_NEAR: rounding may decide this row, so no token was chosen."""

    TOO_NEAR = -2
    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("settings", c_void_p),  # of each row, ChoiceSettings
        ("draws", c_void_p),
        ("ids", c_void_p),
        ("threads", c_int64),  # unless a forward chooses
    )
