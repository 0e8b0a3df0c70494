"""The native libraries, and the structs that their functions read: addresses and sizes; `native/` declares the same.

`Transformer.forward` defines the results.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from llama.fast.native_build import load_library

SOURCE = Path(__file__).with_name("native") / "forward.cpp"


class Matrix(ctypes.Structure):
    """A weight (columns, length); if packed, its codes and the other parts in the layout of `llama/quant/packed.py`.

    bits: of a code; 0 for a plain weight. block: the type number of a mapped weight's blocks, else 0.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scales", "zeros", "scale_units", "zero_units")),
        *((name, c_int64) for name in ("columns", "length", "bits", "offset", "block")),
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
        ("table", c_void_p),
        ("kept_keys", c_void_p),
        ("kept_values", c_void_p),
        ("runs", c_void_p),
        ("lows", c_void_p),
        ("highs", c_void_p),
    )


class Groups(ctypes.Structure):
    """How a quantised cache stores positions, see `llama/kv_cache/quantized.py`; all 0 for other kinds."""

    _fields_ = tuple(
        (name, c_int64)
        for name in ("key_bits", "value_bits", "tokens", "window", "sinks", "parts", "before_rope", "rotates_values")
    )


class NativeModel(ctypes.Structure):
    """A model's sizes, and the addresses of its weights. It stores no weight: the caller keeps them in memory.

    trainable: whether a weight requires a gradient.
    """

    trainable = False
    _fields_ = (
        ("bfloat16", c_int64),  # 1: norms, cache and plain matrices are bfloat16; 0: float32
        ("activations", c_int64),  # bits of activations in products with packed matrices, 8 or 16; 0: all are plain
        ("mixed", c_int64),  # 1: some matrices are plain and others are packed
        ("mapped", c_int64),  # 1: some matrices are the blocks of a file
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
        ("rows", c_int64),
        ("width", c_int64),
        ("tokens", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("all", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kind", c_int64),  # of the cache, see KINDS in native_caches.py; 0: no cache
        ("slots", c_int64),
        ("caches", POINTER(LayerCache)),  # of every layer, or null
        ("groups", Groups),
        ("bases", c_void_p),  # or null
        ("pages", c_int64),
        ("kept", c_void_p),
        ("logits", c_void_p),
        ("choice", c_void_p),  # a Choice, or null
        ("threads", c_int64),
        ("workspace", c_void_p),
    )


class Choice(ctypes.Structure):
    """How tokens are chosen from logits. The id TOO_NEAR: rounding may decide this row, so no token was chosen."""

    TOO_NEAR = -2
    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", c_int64),
        ("penalty", c_double),
        ("seen", c_void_p),  # or null
        ("draws", c_void_p),
        ("ids", c_void_p),
        ("threads", c_int64),  # unless a forward chooses
    )


class NativeForward:
    """The functions of native code. `instructions`: those of the CPU that it was compiled for.

    The forward of each kind of numbers and of products is a library of its own, compiled when a model first needs it.
    """

    def __init__(self, folder: Path) -> None:
        library = load_library(SOURCE.with_name("common.cpp"), folder)
        self._choose = library.choose_tokens
        self._choose.restype, self._choose.argtypes = None, (c_void_p,)
        self._unpack = library.unpack
        self._unpack.restype, self._unpack.argtypes = None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        library.instructions.restype = c_char_p
        self.instructions: str = library.instructions().decode()
        key = Path(library._name).stem.rpartition("-")[2]  # depends on all sources, flags and CPU, see native_build.py
        self.code = f"{SOURCE.stem}-{key}"
        self._folder = folder
        self._forwards: dict[tuple[int, int], Any] = {}

    def load(self, model: NativeModel) -> Any:
        """Return the forward of models of this kind; compile it if necessary. Raises NoNativeCode."""
        kind = model.bfloat16, model.activations
        if kind not in self._forwards:
            number = "bfloat" if model.bfloat16 else "float"
            product = f"Packed<{model.activations}, {number}>" if model.activations else f"Plain<{number}>"
            forward = load_library(SOURCE, self._folder, (f"-DNUMBER={number}", f"-DPRODUCT={product}")).forward
            forward.restype, forward.argtypes = c_int64, (c_void_p, c_void_p, c_int64)
            self._forwards[kind] = forward
        return self._forwards[kind]

    def __call__(self, model: NativeModel, batch: NativeBatch, room: int) -> int:
        """Return the bytes that `batch.workspace` needs; compute nothing if its `room` is less."""
        size: int = self.load(model)(byref(model), byref(batch), room)
        return size

    def unpack(self, matrix: Matrix, first: int, panels: int, room: int) -> Matrix:
        """Return panels of a mapped matrix, from column `first` on, as a packed matrix in memory at address `room`."""
        panel = Matrix()
        self._unpack(byref(matrix), first, panels, room, byref(panel))
        return panel

    def choose(self, choice: Choice) -> None:
        """Write the token of each row to `choice.ids`: -1 if a logit of the row is not finite."""
        self._choose(byref(choice))
