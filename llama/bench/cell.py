"""A cell: everything that decides what one measurement measures."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict

from llama.host.machine import DTYPES

# Quantized weights: int8 and int4 are our own layouts, or a peer's Q8_0 and Q4_0; stored are those of a .gguf file.
QUANTIZED = ("int8", "int4", "stored")
FULL = "static"  # the kind of cache that the others are compared with


class Modes(TypedDict):
    """The fields of a cell that `--engine` sets."""

    engine: str
    fast: bool
    quantize: str | None
    activations: int


def read_engine(words: str) -> Modes:
    """Return the engine and the modes of a text such as transformers, FILE.py:CLASS:int8 or llama:fast:int8:a8.

    Raises ValueError for an unknown mode. A Cell checks which modes are ours alone, and `check_cell` the others.
    """
    head, in_file, rest = words.rpartition(".py:")
    name, *modes = rest.split(":")
    found = [mode for mode in modes if mode not in ("fast", "a8")]
    if unknown := [mode for mode in found if mode not in QUANTIZED]:
        known = "known are fast, int8, int4, stored and a8, as in llama:fast:int8"
        raise ValueError(f"engine={words!r}: {unknown[0]!r} is no mode; {known}")
    if len(found) > 1 or len(set(modes)) < len(modes):
        raise ValueError(f"engine={words!r} has more modes than one cell can; give --engine once for each")
    return {
        "engine": f"{head}{in_file}{name}",
        "fast": "fast" in modes,
        "quantize": found[0] if found else None,
        "activations": 8 if "a8" in modes else 16,
    }


@dataclass(frozen=True)
class Cell:
    """`batch_size` rows of `input_len` tokens, each continued by `output_len`, with the cache on or off.

    `model` is "demo", the name of a released Llama 3.x (random weights), or the path of a checkpoint. `kv_cache` is a
    kind that the library has, or "file.py:kind"; `engine` one of `llama.bench.run.models.ENGINES`, or "file.py:class".
    `text` replaces the random ids of every row; `input_len` is then its count of tokens. `ranks` processes share the
    model. `quantize` and `activations` are those of `llama.load`; `speculate` is that of `generate`. `code`
    is a digest of the user's files that define the kind and the engine; None if none does. Raises ValueError.
    """

    batch_size: int = 1
    input_len: int = 256
    output_len: int = 32
    kv_caching: bool = True
    engine: str = "llama"
    model: str = "demo"
    tokenizer_path: str | None = None
    kv_cache: str = "static"
    speculate: str | None = None
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
    code: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "output_len", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")
        if self.logits not in ("last", "all"):
            raise ValueError(f"logits={self.logits!r} must be last or all")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.text is not None and not self.text.strip():
            raise ValueError("text is empty; give it some words, or leave it out for random ids")
        self._check_engine()

    def _check_engine(self) -> None:
        """Raise ValueError for modes that no engine has, or only our own."""
        if self.quantize not in (None, *QUANTIZED):
            raise ValueError(f"quantize={self.quantize!r} must be {', '.join(QUANTIZED)} or left out")
        own = {
            "logits=all": self.logits == "all",
            "exact mode": self.exact,
            "the fast step": self.fast,
            "activations=8": self.activations != 16,
            "speculate": self.speculate is not None,
        }
        for what, asked in own.items():
            if asked and self.engine != "llama":
                raise ValueError(f"{what} is ours alone; leave it out for {self.engine}")
        if self.kv_cache != FULL and self.engine not in ("llama", "transformers"):
            raise ValueError(f"kv_cache={self.kv_cache!r}: {self.engine} has a cache of its own; leave it out")
        if self.engine != "llama" and self.ranks > 1:
            raise ValueError(f"{self.engine} is measured in one process; start it without torchrun")

    @property
    def name(self) -> str:
        """The name of the cell within its table."""
        mode = f"batch {self.batch_size}, cache {'on' if self.kv_caching else 'off'}"
        mode += f", {self.ranks} ranks" if self.ranks > 1 else ""
        mode += ", fast" if self.fast else ""
        mode += f", {self.quantize} weights" if self.quantize else ""
        mode += f", {self.activations}-bit activations" if self.activations != 16 else ""
        mode += f", {self.kv_cache} cache" if self.kv_caching and self.kv_cache != "static" else ""
        mode += f", guesses by {self.speculate}" if self.speculate else ""
        return mode if self.engine == "llama" else f"{self.engine}, {mode}"

    @property
    def rounding(self) -> tuple[Any, ...]:
        """The fields that decide how the weights and the activations are rounded."""
        return self.engine, self.fast, self.quantize, self.activations

    @property
    def workload(self) -> "Cell":
        """The same cell on the plain path with unrounded weights: identifies the workload, whatever the engine."""
        return self.but(**read_engine("llama"), code=None)

    @property
    def other(self) -> "Cell":
        """The cell that it is compared with: without its guesses, or if it has none, with the other mode."""
        return self.but(speculate=None) if self.speculate else self.but(kv_caching=not self.kv_caching)

    @property
    def compared(self) -> str:
        """The words for the comparison with the `other` cell."""
        return "with and without guesses" if self.speculate else "cache on and off"

    @property
    def total_len(self) -> int:
        """The positions of a row at the end."""
        return self.input_len + self.output_len

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cell's dtype."""
        return DTYPES[self.dtype].itemsize

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a number in the KV cache; llama.cpp's default beside quantized weights is fp16."""
        return 2 if self.engine == "llama.cpp" and self.quantize else self.itemsize

    @property
    def layout(self) -> str | None:
        """The layout of the matrices if their bytes are known beforehand: of our own, and of a .gguf file."""
        return self.quantize if self.engine == "llama" or self.quantize == "stored" else None

    @property
    def from_file(self) -> bool:
        """Whether the matrices are those of a .gguf file, so that its header has their bytes."""
        return self.quantize == "stored"

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def but(self, **changes: Any) -> "Cell":
        """Return the same cell with some fields changed."""
        return replace(self, **changes)
