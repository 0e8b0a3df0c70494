"""What a cell runs on: a model of ours behind the benchmark's protocol, or a peer with its weights."""

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
from llama.bench.run.peers import GPT2, check_engine
from llama.bench.run.transformers_engine import TransformersEngine
from llama.costs import parameters
from llama.machine import DTYPES
from llama.model import Transformer
from llama.streaming import TextCodec


class Opened(NamedTuple):
    """What a cell runs on, what it is, the resident memory before there was a model, and the bytes of stored weights.

    Those are predicted, see `llama.bench.run.models.Source`, and None for a cell that has none.
    """

    engine: Engine
    facts: dict[str, Any]
    resident_before: int | None
    stored: Mapping[str, int] | None = None


def open_engine(cell: Cell) -> Opened:
    """Return what a cell runs on."""
    if cell.model in GPT2:
        before = resident_bytes()
        gpt2 = TransformersEngine.gpt2(cell.model, seed=0, device=torch.device(cell.device), dtype=DTYPES[cell.dtype])
        return Opened(gpt2, {"name": cell.model, "weights": gpt2.weights, "parameters": None, "sizes": None}, before)
    source = find_model(cell)
    check_length(cell, source.args.max_seq_len)
    check_memory(cell, source.args, source.device, held=0, stored=source.stored)
    before = resident_bytes()
    sizes = json.loads(json.dumps(vars(source.args), default=vars))
    count = parameters(source.args)
    facts = {"name": cell.model, "weights": source.weights, "parameters": count, "sizes": sizes}
    return Opened(_engine_of(cell, source), facts, before, source.stored)


def _engine_of(cell: Cell, source: Source) -> Engine:
    if cell.engine == "llama":
        return LlamaEngine(source.build(), source.tokenizer, logits=cell.logits)
    if cell.quantize == "stored" and cell.engine == "llama.cpp":
        assert source.file is not None
        return LlamaCppEngine.of_file(source.file, source.args, source.tokenizer)
    return open_peer(cell.engine, source.build(), source.tokenizer, quantize=cell.quantize)


def open_peer(engine: str, model: Transformer, tokenizer: TextCodec, *, quantize: str | None = None) -> Engine:
    """Return the engine of that name, with the weights, the dtype and the device of `model`.

    It computes on as many threads as torch is set to. `quantize` lets llama.cpp bring the weights into int8 or int4.
    Raises ValueError for an unknown name, a package that is not installed, and a model that the engine cannot run.
    """
    check_engine(engine)
    if engine == "llama.cpp":
        return LlamaCppEngine.of(model, tokenizer, quantize=quantize)
    if quantize is not None:
        raise ValueError(f"quantize={quantize}: transformers is measured with the weights as they are; leave it out")
    return TransformersEngine.of(model, tokenizer)
