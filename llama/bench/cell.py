"""A cell: one square of the table, everything that decides what is measured.

Knows nothing of how it is measured.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number


@dataclass(frozen=True)
class Cell:
    """`batch_size` rows of `input_len` tokens, each continued by `output_len`, with the cache on or off.

    `model` is "demo", the name of a released Llama 3.x (random weights), or the path of a checkpoint. `kv_cache` is a
    kind that the library has, or "file.py:kind" for one that a file defines. `text` replaces the random ids of every
    row; `input_len` is then the count of its tokens. `ranks` are the processes that share the model. Raises ValueError.
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
        if self.engine != "llama" and self.logits == "all":
            raise ValueError(f"logits=all is ours alone; {self.engine} computes what it computes")
        if self.engine != "llama" and self.ranks > 1:
            raise ValueError(f"{self.engine} is measured in one process; start it without torchrun")
        if self.engine != "llama" and self.exact:
            raise ValueError(f"exact mode is ours alone; leave it out for {self.engine}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(ITEMSIZE)}")
        if self.text is not None and not self.text.strip():
            raise ValueError("text is empty; give it some words, or leave it out for random ids")

    @property
    def name(self) -> str:
        """What tells the cell from the others of its table."""
        mode = f"batch {self.batch_size}, cache {'on' if self.kv_caching else 'off'}"
        mode += f", {self.ranks} ranks" if self.ranks > 1 else ""
        return mode if self.engine == "llama" else f"{self.engine}, {mode}"

    @property
    def total_len(self) -> int:
        """Positions that a row comes to."""
        return self.input_len + self.output_len

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cell's dtype."""
        return ITEMSIZE[self.dtype]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def but(self, **changes: Any) -> "Cell":
        """Return the same cell with some of it changed."""
        return replace(self, **changes)
