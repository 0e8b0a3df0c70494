"""What an engine finds the most likely behind every position of a text: beside float32's, the price of rounding.

A job of `llama.bench.run.worker`, which every way with rounded weights does once, and our own float32. Texts are fed as
they are (teacher forcing), so that positions stay comparable behind one at which two engines differ.
"""

from typing import Any

from llama.bench.cell import Cell
from llama.bench.run.engines import LlamaEngine
from llama.bench.run.llama_cpp_engine import LlamaCppEngine
from llama.bench.run.opening import open_engine
from llama.bench.texts import read_text


def most_likely(cell: Cell) -> dict[str, Any]:
    """Feed the first `cell.input_len` tokens of the text, and return the most likely next token behind each of them."""
    engine = open_engine(cell).engine
    assert isinstance(engine, LlamaEngine | LlamaCppEngine)  # the others have no rounded weights
    ids = engine.encode(read_text())[: cell.input_len]
    found, path = engine.most_likely(ids)
    return {"ids": found, "path": path}
