"""The models that a benchmark can measure, a checkpoint, the demo or a released shape, and the engines by their names.

Meta's weights are gated, and no time or size depends on their values. The tokenizer is Meta's.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from inspect import isabstract
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama.api import check_modes, pick_cache, pick_device, pick_dtype
from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.engines import Engine, LlamaEngine, Source
from llama.bench.run.llama_cpp_engine import LlamaCppEngine
from llama.bench.run.memory import resident_bytes
from llama.bench.run.memory_ledger import check_length, check_memory
from llama.bench.run.transformers_engine import TransformersEngine
from llama.checkpoint import Checkpoint, file_bytes_of, load_weights, materialise, open_checkpoint, stored_bytes
from llama.checkpoint.assemble import Weight, needed_shapes
from llama.checkpoint.demo import demo_model_path, meta_tokenizer_path
from llama.costs import RELEASED, parameters
from llama.fast.choose import make_fast
from llama.host.files import cache_dir
from llama.host.machine import DTYPES, dtype_name
from llama.kv_cache import Cache, cache_kind
from llama.kv_cache.names import run_file
from llama.model import Transformer
from llama.quant.layers import quantize_layers, weights_of
from llama.quant.packed import PackedWeight
from llama.ranks import cut_for
from llama.ranks.torchrun import join, own_device, world_size
from llama.request import check_speculation
from llama.sampling import check_seed
from llama.speculation import check_speculate
from llama.streaming import encode_prompt
from llama.texts.origin import kind_classes, own_code
from llama.tokenizer import Tokenizer

ENGINES: dict[str, type[Engine]] = {
    "llama": LlamaEngine,
    "transformers": TransformersEngine,
    "llama.cpp": LlamaCppEngine,
}


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine, NAME or FILE.py:CLASS. Raises ValueError if there is none."""
    head, in_file, own = name.rpartition(".py:")
    if not in_file:
        known = f"known are {', '.join(ENGINES)} and FILE.py:CLASS, such as scripts/engines/openvino.py:OpenVino"
        classes = ENGINES
    else:
        there = vars(run_file(Path(f"{head}.py"), f"engine={name!r}"))
        classes = {one: value for one, value in there.items() if isinstance(value, type) and issubclass(value, Engine)}
        classes = {one: value for one, value in classes.items() if not isabstract(value)}
        known = f"{head}.py has {', '.join(classes) or 'no subclass of llama.bench.run.engines.Engine'}"
    if own not in classes:
        raise ValueError(f"engine={name!r} is not known; {known}")
    return classes[own]


def has_rounded_weights(cell: Cell) -> bool:
    """Return whether a cell computes with other weights than the model's in the cell's dtype."""
    return cell.quantize is not None or cell.dtype not in engine_class(cell.engine).whole_in


def make_cell(
    *, model: str | None = None, ckpt_dir: str | None = None, device: str = "auto", dtype: str = "auto", **rest: Any
) -> Cell:
    """Return a cell with all defaults and the length of a text. Raises ValueError if it cannot be measured.

    The default model is the demo on a CPU and llama-3.2-1b on a GPU. `rest` are fields of Cell.
    """
    if model is not None and ckpt_dir is not None:
        raise ValueError("model and ckpt_dir both name a model; give one of them")
    known = ("demo", *RELEASED)
    if model is not None and model not in known:
        raise ValueError(f"model={model} is not known; known are {', '.join(known)}; ckpt_dir takes a path")
    on = pick_device(device)
    name = ckpt_dir or model or ("llama-3.2-1b" if on.type == "cuda" else "demo")
    cell = Cell(model=name, device=str(on), dtype=dtype_name(pick_dtype(dtype, on)), ranks=world_size(), **rest)
    check_cell(cell)
    check_seed(cell.seed)
    pick_cache(cell.kv_cache)
    cell = with_code(cell)
    source = find_model(cell)
    check_speculation(cell.speculate, Cache.of(source.args, source.args.kv_cache), cell.ranks)
    if cell.text is not None:
        cell = cell.but(input_len=len(encode_prompt(source.tokenizer, cell.text)))
    check_length(cell, source.args)
    check_memory(cell, source.args, source.device, stored=source.stored)
    return cell


def check_cell(cell: Cell) -> None:
    """Raise ValueError for modes that an engine does not have, or does not have together, or not on this device."""
    has = engine_class(cell.engine).quantized
    if cell.quantize is not None and cell.quantize not in has:
        words = f"has weights in {', '.join(has)}" if has else "is measured with the weights as they are"
        raise ValueError(f"quantize={cell.quantize!r}: the engine {cell.engine} {words}; leave it out")
    check_speculate(cell.speculate)
    if cell.speculate and not cell.kv_caching:
        raise ValueError("speculate needs the KV cache, which is off: switch it on, or leave out speculate")
    if cell.speculate and cell.logits == "all":
        raise ValueError("logits=all and speculate exclude each other: what verifies guesses needs logits of its own")
    if cell.engine == "llama":
        modes: Any = {"fast": cell.fast, "exact": cell.exact, "activations": cell.activations}
        # A cell names its weights.
        check_modes(pick_device(cell.device), DTYPES[cell.dtype], quantize=cell.quantize or "none", **modes)


def with_code(cell: Cell) -> Cell:
    """Return a cell with the digest of the user's files that define its kind and its engine."""
    return cell.but(code=own_code(*kind_classes(cache_kind(cell.kv_cache)), engine_class(cell.engine)))


def read_by(cell: Cell, *others: str) -> list[str]:
    """Return the files and folders that a cell reads: the checkpoint, the tokenizer, and others that are given."""
    named = [] if cell.model in ("demo", *RELEASED) else [cell.model]
    return [*named, *([cell.tokenizer_path] if cell.tokenizer_path is not None else []), *others]


def find_model(cell: Cell) -> Source:
    """Return the model that `cell.model` names, fetched if necessary. Raises ValueError, and DemoUnavailable.

    Raises RuntimeError if a user's file was edited after the cell was planned.
    """
    if cell.code not in (None, with_code(cell).code):
        files = " or ".join(name for name in (cell.kv_cache, cell.engine) if ".py:" in name)
        raise RuntimeError(f"the file of {files} was edited during the run; start the same command again")
    device = own_device(pick_device(cell.device))
    dtype = pick_dtype(DTYPES[cell.dtype], device)
    checkpoint = None
    if cell.model in RELEASED:
        args, tokenizer = RELEASED[cell.model], Tokenizer(cell.tokenizer_path or meta_tokenizer_path())
    else:
        path = demo_model_path() if cell.model == "demo" else cell.model
        checkpoint = open_checkpoint(path, tokenizer_path=cell.tokenizer_path)
        args, tokenizer = checkpoint.args, checkpoint.tokenizer
    args = replace(args, kv_cache=cache_kind(cell.kv_cache))

    def build() -> Transformer:
        packing: Any = {"quantize": cell.layout, "activations": cell.activations}
        if checkpoint is None:
            model = random_model(args, dtype=dtype, device=device, **packing)
        else:
            ranks = join(device)
            model = load_weights(checkpoint, args, dtype=dtype, device=device, ranks=ranks, **packing).eval()
        if cell.fast:  # compiles here, before anything is timed
            make_fast(model, cache_dir() / "native", trial=not cell.exact)
        model.exact = cell.exact
        return model

    weights = "random" if checkpoint is None else "checkpoint"
    file = checkpoint.path if checkpoint is not None and checkpoint.path.is_file() else None
    stored = _stored_of(cell, checkpoint, dtype) if cell.from_file else None
    return Source(args, tokenizer, weights, device, dtype, build, file, stored)


def _stored_of(cell: Cell, checkpoint: Checkpoint | None, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each matrix of a .gguf file: ours in memory, a peer's in the file, which it maps."""
    if checkpoint is None or not checkpoint.path.is_file():
        raise ValueError(
            f"quantize=stored takes the weights as a .gguf file has them, and {cell.model} is none; name one "
            "with ckpt_dir, or choose int8 or int4"
        )
    if cell.engine != "llama":
        return file_bytes_of(checkpoint)
    return stored_bytes(checkpoint, dtype)


class Opened(NamedTuple):
    """The engine of a cell, the facts of its model, the resident bytes before, and the bytes of stored weights."""

    engine: Engine
    facts: dict[str, Any]
    resident_before: int | None = None
    stored: Mapping[str, int] | None = None


def open_engine(cell: Cell) -> Opened:
    """Return the engine of a cell. Raises ValueError if it does not fit into the model's limits or into memory."""
    source = find_model(cell)
    check_length(cell, source.args)
    check_memory(cell, source.args, source.device, stored=source.stored)
    before = resident_bytes()
    engine = engine_class(cell.engine).load(source, cell)
    return Opened(engine, facts_of(cell, source), before, source.stored)


def facts_of(cell: Cell, source: Source) -> dict[str, Any]:
    """Return what a report says of a model."""
    sizes = json.loads(json.dumps(vars(source.args), default=vars))
    count = parameters(source.args)
    return {"name": cell.model, "weights": source.weights, "parameters": count, "sizes": sizes}


def random_model(
    args: ModelArgs, *, dtype: torch.dtype, device: torch.device, quantize: str | None = None, activations: int = 16
) -> Transformer:
    """Return a model of these sizes, or this rank's slice of it, with the same random weights each time.

    With `quantize` they are these weights rounded, and no whole matrix is ever in memory in a wider dtype.
    """
    ranks = join(device)
    facts = {"configuration": args, "dtype": dtype, "device": device.type, "versions": torch.__version__}
    ranks.agree(lambda: facts)
    with torch.device("meta"), cut_for(ranks):
        model = Transformer(args)
        if quantize is not None:
            quantize_layers(model, dtype, quantize, activations=activations)
    whole = needed_shapes(args)
    materialise(model, dtype=dtype, device=device)
    stream = torch.Generator(device).manual_seed(0)
    for name, parameter in weights_of(model.requires_grad_(False)).items():
        if isinstance(parameter, PackedWeight):
            _draw_packed(parameter, stream, dtype)
            continue
        assert isinstance(parameter, torch.nn.Parameter)
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # the norms
            continue
        bound = whole[name][-1] ** -0.5
        drawn = parameter if ranks.size == 1 else parameter.new_empty(whole[name])
        drawn.uniform_(-bound, bound, generator=stream)
        if ranks.size > 1:
            Weight.of(drawn).part(tuple(parameter.shape), ranks.rank, ranks.size).copy_to(parameter)
    return model.eval()


def _draw_packed(weight: PackedWeight, stream: torch.Generator, dtype: torch.dtype) -> None:
    """Draw a matrix in the order in which a whole one is drawn, some rows at a time, and round it."""
    bound = weight.shape[1] ** -0.5
    for start, stop in weight.blocks():
        drawn = torch.empty((stop - start, weight.shape[1]), dtype=dtype, device=weight.device)
        weight.fill(start, drawn.uniform_(-bound, bound, generator=stream))
