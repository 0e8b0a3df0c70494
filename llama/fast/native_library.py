"""The native forward, and the structs by which it is told of a model; `native/` declares the same in this order.

Its plain twin is `Transformer.forward`. Knows no modules: addresses and sizes only.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int64, c_void_p
from pathlib import Path

from llama.fast.native_build import load_library

SOURCE = Path(__file__).with_name("native") / "forward.cpp"


class Matrix(ctypes.Structure):
    """A weight (columns, length); of a packed one the codes and the other parts, as `llama/quant/packed.py` has them.

    bits: of a code; 0 where the weight is plain. block: the number of a mapped one's type, else 0.
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
    """Where the buffers of one layer's cache lie, under their names there; null for those that its kind lacks."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((f"{side}_{part}", c_void_p) for side in ("key", "value") for part in ("codes", "scale", "zero")),
        ("table", c_void_p),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("bfloat16", c_int64),  # whether norms, cache and plain matrices are bfloat16, not float32
        ("activations", c_int64),  # bits that packed matrices are multiplied with, 8 or 16; 0: all matrices are plain
        ("mixed", c_int64),  # whether some are plain where others are packed
        ("mapped", c_int64),  # whether some lie as a file has them
        *((name, c_int64) for name in ("dim", "heads", "kv_heads", "head_dim", "hidden", "layer_count")),
        ("eps", c_float),
        ("embedding", Matrix),
        ("output", Matrix),
        ("norm", c_void_p),
        ("layers", POINTER(Layer)),
    )


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
        ("kind", c_int64),  # of the cache, see native_caches.py
        ("slots", c_int64),
        ("caches", POINTER(LayerCache)),  # of every layer, or none
        ("kept", c_void_p),
        ("logits", c_void_p),
        ("choice", c_void_p),  # a Choice, or none
        ("threads", c_int64),
        ("workspace", c_void_p),
    )


class Choice(ctypes.Structure):
    """How tokens are chosen, and where; an id of TOO_NEAR was not chosen, for rounding may decide it."""

    TOO_NEAR = -2
    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", c_int64),
        ("penalty", c_double),
        ("seen", c_void_p),  # or none
        ("draws", c_void_p),
        ("ids", c_void_p),
        ("threads", c_int64),  # where no forward's choose
    )


class NativeForward:
    """The library's functions, and the CPU's instructions that they were compiled for."""

    def __init__(self, folder: Path) -> None:
        library = load_library(SOURCE, folder, ("forward", "choose_tokens", "unpack", "instructions"))
        self._run = library.forward
        self._run.restype, self._run.argtypes = c_int64, (c_void_p, c_void_p, c_int64)
        self._choose = library.choose_tokens
        self._choose.restype, self._choose.argtypes = None, (c_void_p,)
        self._unpack = library.unpack
        self._unpack.restype, self._unpack.argtypes = None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        library.instructions.restype = c_char_p
        self.instructions: str = library.instructions().decode()
        self.code = Path(library._name).stem  # by source, flags and CPU, see native_build.py

    def __call__(self, model: Model, batch: NativeBatch, room: int) -> int:
        """Return how many bytes `batch.workspace` has to have; where its `room` is less, nothing was computed."""
        size: int = self._run(byref(model), byref(batch), room)
        return size

    def unpack(self, matrix: Matrix, first: int, panels: int, room: int) -> Matrix:
        """Return panels of a mapped matrix, from column `first` on, as a packed one in the memory at `room`."""
        panel = Matrix()
        self._unpack(byref(matrix), first, panels, room, byref(panel))
        return panel

    def choose(self, choice: Choice) -> None:
        """Write what every row of logits gives to `choice.ids`: -1 where they are not finite."""
        self._choose(byref(choice))
