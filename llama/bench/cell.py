"""A cell: one square of the table, everything that decides what is measured, and the words that name its engine.

Knows nothing of how it is measured.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict

from llama.host.machine import DTYPES

# Whose weights can be in what: int8 and int4 are our own layouts, or llama.cpp's Q8_0 and Q4_0; stored is as a .gguf
# file has them, and mapped the same left in that file, which is `load`'s repack=False.
QUANTIZED = {"llama": ("int8", "int4", "stored", "mapped"), "llama.cpp": ("int8", "int4", "stored")}


Rounding = tuple[str, bool, str | None, int]


def rounding_of(cell: Mapping[str, Any]) -> Rounding:
    """Return what decides how a cell, or what was measured of one, rounds its weights and activations."""
    return cell["engine"], cell["fast"], cell["quantize"], cell["activations"]


class Modes(TypedDict):
    """The fields of a cell that `--engine` can say in one word."""

    engine: str
    fast: bool
    quantize: str | None
    activations: int


def read_engine(words: str) -> Modes:
    """Return what an engine's name and the modes behind it mean: transformers, llama.cpp:int8, llama:fast:int8:a8.

    Raises ValueError for a word that is no mode. Which engine has which modes, a Cell knows.
    """
    engine, *modes = words.split(":")
    found = [mode for mode in modes if mode not in ("fast", "a8")]
    if unknown := [mode for mode in found if mode not in QUANTIZED["llama"]]:
        known = "known are fast, int8, int4, stored, mapped and a8, as in llama:fast:int8"
        raise ValueError(f"engine={words!r}: {unknown[0]!r} is no mode; {known}")
    if len(found) > 1 or len(set(modes)) < len(modes):
        raise ValueError(f"engine={words!r} has more modes than one cell can; give --engine once for each")
    activations = 8 if "a8" in modes else 16
    return {
        "engine": engine,
        "fast": "fast" in modes,
        "quantize": found[0] if found else None,
        "activations": activations,
    }


@dataclass(frozen=True)
class Cell:
    """`batch_size` rows of `input_len` tokens, each continued by `output_len`, with the cache on or off.

    `model` is "demo", the name of a released Llama 3.x (random weights), or the path of a checkpoint. `kv_cache` is a
    kind that the library has, or "file.py:kind" for one that a file defines. `text` replaces the random ids of every
    row; `input_len` is then the count of its tokens. `ranks` are the processes that share the model. `fast` asks for
    the fast step, and `quantize` for weights in "int8" or "int4", or as a .gguf file has them, "stored" or "mapped";
    with these `activations` are the bits of what they multiply. Raises ValueError.
    """

    batch_size: int = 1
    input_len: int = 256
    output_len: int = 32
    kv_caching: bool = True
    engine: str = "llama"
    model: str = "demo"
    tokenizer_path: str | None = None
    kv_cache: str = "static"
    logits: Literal["last", "all"] = "last"
    exact: bool = False
    fast: bool = False
    quantize: str | None = None
    activations: int = 16
    device: str = "cpu"
    dtype: str = "fp32"
    threads: int | None = None
    text: str | None = None
    seed: int = 1
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "output_len", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")
        if self.logits not in ("last", "all"):
            raise ValueError(f"logits={self.logits!r} must be last or all")
        own = {
            "logits=all": self.logits == "all",
            "exact mode": self.exact,
            "the fast step": self.fast,
            "activations=8": self.activations != 16,
        }
        for what, asked in own.items():
            if asked and self.engine != "llama":
                raise ValueError(f"{what} is ours alone; leave it out for {self.engine}")
        if self.engine != "llama" and self.ranks > 1:
            raise ValueError(f"{self.engine} is measured in one process; start it without torchrun")
        if self.quantize is not None:
            self._check_quantize()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.text is not None and not self.text.strip():
            raise ValueError("text is empty; give it some words, or leave it out for random ids")

    def _check_quantize(self) -> None:
        known = QUANTIZED.get(self.engine)
        if known is None:
            raise ValueError(
                f"quantize={self.quantize}: {self.engine} is measured with the weights as they are; leave it out"
            )
        if self.quantize not in known:
            raise ValueError(
                f"quantize={self.quantize!r}: the engine {self.engine} has weights in {', '.join(known)}; "
                "choose of these, or leave it out"
            )

    @property
    def name(self) -> str:
        """What tells the cell from the others of its table."""
        mode = f"batch {self.batch_size}, cache {'on' if self.kv_caching else 'off'}"
        mode += f", {self.ranks} ranks" if self.ranks > 1 else ""
        mode += ", fast" if self.fast else ""
        mode += f", {self.quantize} weights" if self.quantize else ""
        mode += f", {self.activations}-bit activations" if self.activations != 16 else ""
        mode += f", {self.kv_cache} cache" if self.kv_caching and self.kv_cache != "static" else ""
        return mode if self.engine == "llama" else f"{self.engine}, {mode}"

    @property
    def total_len(self) -> int:
        """Positions that a row comes to."""
        return self.input_len + self.output_len

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cell's dtype."""
        return DTYPES[self.dtype].itemsize

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a number in the KV cache: beside quantized weights llama.cpp has its default there, fp16."""
        return 2 if self.engine != "llama" and self.quantize else self.itemsize

    @property
    def layout(self) -> str | None:
        """In which layout the matrices are, where its bytes are known beforehand: ours, and whatever a file has."""
        return self.quantize if self.engine == "llama" or self.quantize == "stored" else None

    @property
    def from_file(self) -> bool:
        """Whether the matrices are those that a .gguf file has, so that their bytes are told by its header."""
        return self.layout in ("stored", "mapped")

    @property
    def packing(self) -> dict[str, Any]:
        """What `load` is told of the weights."""
        mapped = self.layout == "mapped"
        return {
            "quantize": "stored" if mapped else self.layout,
            "activations": self.activations,
            "repack": not mapped,
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def but(self, **changes: Any) -> "Cell":
        """Return the same cell with some of it changed."""
        return replace(self, **changes)
