"""Opens the engine of a cell: our own model, or a peer with its weights."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from llama.bench.cell import Cell
from llama.bench.run.engines import Engine, LlamaEngine
from llama.bench.run.llama_cpp_engine import LlamaCppEngine
from llama.bench.run.memory import resident_bytes
from llama.bench.run.memory_ledger import check_length, check_memory
from llama.bench.run.models import Source, find_model
from llama.bench.run.peers import GPT2
from llama.bench.run.transformers_engine import TransformersEngine
from llama.costs import parameters
from llama.host.machine import DTYPES


class Opened(NamedTuple):
    """The engine of a cell, the facts of its model, the resident bytes before, and the bytes of stored weights."""

    engine: Engine
    facts: dict[str, Any]
    resident_before: int | None
    stored: Mapping[str, int] | None = None


def open_engine(cell: Cell) -> Opened:
    """Return the engine of a cell. Raises ValueError if it does not fit into the model's limits or into memory."""
    if cell.model in GPT2:
        before = resident_bytes()
        gpt2 = TransformersEngine.gpt2(cell.model, device=torch.device(cell.device), dtype=DTYPES[cell.dtype])
        return Opened(gpt2, {"name": cell.model, "weights": "random", "parameters": None, "sizes": None}, before)
    source = find_model(cell)
    check_length(cell, source.args.max_seq_len)
    check_memory(cell, source.args, source.device, held=0, stored=source.stored)
    before = resident_bytes()
    facts = {
        "name": cell.model,
        "weights": source.weights,
        "parameters": parameters(source.args),
        "sizes": json.loads(json.dumps(vars(source.args), default=vars)),
    }
    return Opened(_engine_of(cell, source), facts, before, source.stored)


def _engine_of(cell: Cell, source: Source) -> Engine:
    if cell.engine == "llama":
        return LlamaEngine(source.build(), source.tokenizer, logits=cell.logits)
    if cell.engine == "transformers":
        return TransformersEngine.of(source.build(), source.tokenizer)
    if cell.quantize == "stored":
        assert source.file is not None
        return LlamaCppEngine(source.file, source.args, source.tokenizer, weights="stored")
    return LlamaCppEngine.of(source.build(), source.tokenizer, quantize=cell.quantize)
