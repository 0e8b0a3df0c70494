"""The memory ledger: the predicted parts of a cell's memory at its peak, beside what was measured.

`llama.costs` predicts from ModelArgs alone, and stored weights from the header of their file. A cell that would not fit
is refused by its prediction.
"""

from collections.abc import Mapping
from functools import partial

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.schema import Row
from llama.costs import Layout, PeakMemory, peak_memory, size
from llama.host.machine import available_memory
from llama.kv_cache import Cache
from llama.ranks.torchrun import local_size

ROWS = 1024  # rows that are predicted one by one: a batch that cannot fit into any memory is refused, too
CUBLAS_WORKSPACE = 8_519_680  # bytes of torch's default configuration, :4096:2:16:8
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20  # bytes from compute capability 9.0 on


def layout_of(cell: Cell, stored: Mapping[str, int] | None) -> Layout:
    """Return how a cell stores its matrices. `stored`: the bytes of each, if the weights are those of a .gguf file."""
    assert cell.from_file == (stored is not None)
    return cell.layout if stored is None else stored


def predict(args: ModelArgs, cell: Cell, *, workspace: int = 0, stored: Mapping[str, int] | None = None) -> PeakMemory:
    """Return the predicted peak of a cell; `stored` as in `layout_of`."""
    return peak_memory(
        args,
        rows=cell.batch_size,
        input_len=cell.input_len,
        output_len=cell.output_len,
        kv_caching=cell.kv_caching,
        itemsize=cell.itemsize,
        all_logits=cell.logits == "all",
        workspace=workspace,
        ranks=cell.ranks,
        quantize=layout_of(cell, stored),
        held=partial(reserved_cache_bytes, args.share(cell.ranks), cell),
    )


def reserved_cache_bytes(args: ModelArgs, cell: Cell, fed: int) -> int:
    """Return the predicted bytes of a cache after `fed` positions of each row, with memory reserved for the whole text.

    All rows are alike: ROWS of them are predicted, and more in proportion.
    """
    rows = min(cell.batch_size, ROWS)
    predicted = cache_of(args).predicted_bytes(
        prompts=[min(fed, cell.input_len)] * rows,
        ends=[fed] * rows,
        reserved=(rows, cell.total_len),
        itemsize=cell.cache_itemsize,
    )
    return predicted * cell.batch_size // rows


def cache_of(args: ModelArgs) -> Cache:
    """Return an empty cache of the cell's kind, which predicts its bytes."""
    return Cache.of(args, args.kv_cache)


def make_ledger(
    args: ModelArgs,
    cell: Cell,
    predicted: PeakMemory,
    measured: Mapping[str, int | None] | None = None,
    *,
    measured_by: str = "not measured",
) -> list[Row]:
    """Return a row for each part of the memory at the peak, and their sum; `measured` has bytes by the name of a line.

    The line of activations is the measured peak without the other lines.
    """
    at_head, measured = predicted.at_head, measured or {}

    def line(name: str, nbytes: int, *, counts: bool = True, note: str = "") -> Row:
        row: Row = {"figures": "memory", "name": name, "predicted_bytes": nbytes, "measured_bytes": measured.get(name)}
        return {**row, "counts": counts, "note": note}

    rows = [
        line("weights", predicted.weights - (0 if args.tied_head else predicted.head)),
        line("tied head", 0, note=f"is the embedding; on its own it would take {size(predicted.head)}")
        if args.tied_head
        else line("head", predicted.head),
        line("KV cache", predicted.cache),
        line("logits", predicted.logits, counts=at_head),
    ]
    if predicted.narrow_logits:
        rows.append(line("logits in 16 bits", predicted.narrow_logits, counts=at_head))
    if predicted.previous_logits:
        rows.append(line("logits of the step before", predicted.previous_logits))
    known = [row["predicted_bytes"] if row["measured_bytes"] is None else row["measured_bytes"]
             for row in rows if row["counts"]]  # fmt: skip
    most = measured.get("peak")
    rest = None if most is None else most - sum(known) - predicted.workspace
    moment = "prefill" if predicted.forward == 0 else "step"
    doing = predicted.head_activations if at_head else predicted.activations
    activations = line(f"{moment} activations", doing, note=_of_activations(cell, measured=rest is not None))
    rows += [{**activations, "measured_bytes": rest}, line("workspace", predicted.workspace)]
    peak: Row = {"figures": "memory", "name": "peak", "predicted_bytes": predicted.total, "measured_bytes": most}
    where = f"{'at the head' if at_head else 'in a layer'} of the {moment}"
    return [*rows, {**peak, "note": measured_by, "moment": where}]


def _of_activations(cell: Cell, *, measured: bool) -> str:
    if cell.exact and not cell.fast:
        return "predicted for the plain path; exact mode pads and copies"
    if cell.fast:
        return "predicted for the plain path; the fast step takes a workspace, or on a GPU a pool"
    if cell.layout is not None:
        return f"predicted for weights as they are; {cell.quantize} layers widen some outputs at a time"
    words = ["measured is what the other lines leave of the measured peak"] if measured else []
    if cell.kv_caching and cell.kv_cache != "static":
        words.append(f"predicted for a cache that is read in place; {cell.kv_cache} may copy what it returns")
    return "; ".join(words)


def check_length(cell: Cell, args: ModelArgs) -> None:
    """Raise ValueError if a cell's rows are longer than the model's limit."""
    args.check_room(0, cell.total_len, because=f"input_len={cell.input_len} + output_len={cell.output_len}: ")


def check_memory(cell: Cell, args: ModelArgs, device: torch.device, *, stored: Mapping[str, int] | None = None) -> None:
    """Raise ValueError if a cell is predicted to need more memory than is free; `stored` as in `layout_of`."""
    predicted = predict(args, cell, workspace=workspace(device), stored=stored)
    free = available_memory(device)
    if free is not None and device.type != "cuda":
        free //= local_size()  # the other ranks of this host take as much
    if free is not None and predicted.total > free:
        lines = [line for line in make_ledger(args, cell, predicted) if line.get("counts")]
        parts = ", ".join(f"{line['name']} {size(line['predicted_bytes'])}" for line in lines)
        raise ValueError(
            f"{cell.name} does not fit: {parts}: {size(predicted.total)} at the peak, and {size(free)} are free "
            f"on {device}; make batch_size, input_len or output_len smaller"
        )


def workspace(device: torch.device) -> int:
    """Return the bytes that cuBLAS allocates through PyTorch; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    return CUBLAS_WORKSPACE_HOPPER if hopper else CUBLAS_WORKSPACE
