"""The memory ledger: what a cell's memory is predicted to hold at its peak, line by line, beside what was measured.

The predictions are `llama.costs`' and come from ModelArgs alone, and of stored weights from the header of their file;
what would not fit is refused by them. Knows nothing of how anything was measured.
"""

from collections.abc import Mapping
from functools import partial

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.schema import Ledger, Line
from llama.costs import Layout, PeakMemory, head_bytes, peak_memory, size
from llama.host.machine import available_memory
from llama.kv_cache import Cache
from llama.ranks.torchrun import local_size

ROWS = 1024  # a batch that cannot fit into any memory is refused, too, and without a list of its rows
CUBLAS_WORKSPACE = 8_519_680  # torch's default configuration, :4096:2:16:8, in bytes
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20  # and the one it takes from compute capability 9.0 on


def layout_of(cell: Cell, stored: Mapping[str, int] | None) -> Layout:
    """Return how a cell holds its matrices; `stored`: the bytes of each, where the weights are as a file has them."""
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
        held=partial(cache_bytes, args.share(cell.ranks), cell),
    )


def position_bytes(args: ModelArgs, cell: Cell) -> int:
    """Return the bytes of one position of a row over all layers: of our own cells, as their kind of cache tells."""
    return cache_of(args, cell).position_bytes(cell.cache_itemsize)


def cache_bytes(args: ModelArgs, cell: Cell, fed: int) -> int:
    """Return what a cache holds once `fed` positions of each row were fed, as its kinds predict it.

    Room is reserved for the whole text. All rows are alike: ROWS of them are predicted, and more in proportion.
    """
    rows = min(cell.batch_size, ROWS)
    predicted = cache_of(args, cell).predicted_bytes(
        prompts=[min(fed, cell.input_len)] * rows,
        ends=[fed] * rows,
        reserved=(rows, cell.total_len),
        itemsize=cell.cache_itemsize,
    )
    return predicted * cell.batch_size // rows


def cache_of(args: ModelArgs, cell: Cell) -> Cache:
    """Return an empty cache, to ask it: of our own cells of their kind, of other engines' a static one."""
    return Cache.of(args, args.kv_cache if cell.engine == "llama" else "static")


def make_ledger(
    args: ModelArgs,
    cell: Cell,
    predicted: PeakMemory,
    *,
    weights: int | None = None,
    head: int | None = None,
    cache: int | None = None,
    logits: int | None = None,
    peak: int | None = None,
    measured_by: str = "not measured",
    resident: tuple[int, int] | None = None,
    stored: Mapping[str, int] | None = None,
) -> Ledger:
    """Return the ledger of the tensors, and beside it the resident memory of the process.

    `weights`, of which `head` are those of a head of its own, `cache`, `logits`, `peak`, and `resident`, before the
    model was there and at the peak, are measured bytes, None where none was measured; `stored` as in `layout_of`.
    """
    own_head = head_bytes(args.share(cell.ranks), itemsize=cell.itemsize, quantize=layout_of(cell, stored))
    untied = 0 if args.tied_head else own_head
    at_head = predicted.at_head
    lines = [
        _line("weights", predicted.weights - untied, None if weights is None else weights - (head or 0)),
        _line("tied head", 0, head, note=f"is the embedding; on its own it would take {size(own_head)}")
        if args.tied_head
        else _line("head", own_head, head),
        _line("KV cache", predicted.cache, cache),
        _line("logits", predicted.logits, logits, counts=at_head),
    ]
    if predicted.narrow_logits:
        lines.append(_line("logits in 16 bits", predicted.narrow_logits, None, counts=at_head))
    if predicted.previous_logits:
        lines.append(_line("logits of the step before", predicted.previous_logits, None))
    doing = predicted.head_activations if at_head else predicted.activations
    moment = "prefill" if predicted.forward == 0 else "step"
    known = [line["predicted"] if line["measured"] is None else line["measured"] for line in lines if line["counts"]]
    rest = None if peak is None else peak - sum(known) - predicted.workspace
    note = _of_activations(cell, measured=rest is not None)
    lines.append(_line(f"{moment} activations", doing, rest, note=note))
    lines.append(_line("workspace", predicted.workspace, None))
    return {
        "moment": f"{'at the head' if at_head else 'in a layer'} of the {moment}",
        "lines": lines,
        "predicted_peak": predicted.total,
        "measured_peak": peak,
        "measured_by": measured_by,
        "residual": None if peak is None else peak - predicted.total,
        "resident_before_model": resident and resident[0],
        "resident_peak": resident and resident[1],
        "resident_residual": resident and resident[1] - resident[0] - predicted.total,
    }


def _of_activations(cell: Cell, *, measured: bool) -> str:
    if cell.exact and not cell.fast:
        return "predicted for the plain path; exact mode pads and copies"
    if cell.fast:
        return "predicted for the plain path; the fast step takes a workspace, or on a GPU a pool"
    if cell.layout is not None:
        return f"predicted for weights as they are; {cell.layout} layers widen some outputs at a time"
    words = ["measured is what the other lines leave of the measured peak"] if measured else []
    if cell.kv_caching and cell.kv_cache != "static":
        words.append(f"predicted for a cache that is read in place; {cell.kv_cache} may copy what it returns")
    return "; ".join(words)


def _line(name: str, predicted: int, measured: int | None, *, counts: bool = True, note: str = "") -> Line:
    return {"name": name, "predicted": predicted, "measured": measured, "counts": counts, "note": note}


def check_length(cell: Cell, max_seq_len: int) -> None:
    """Refuse what passes the model's limit."""
    if cell.total_len > max_seq_len:
        raise ValueError(
            f"input_len={cell.input_len} + output_len={cell.output_len} = {cell.total_len} passes the model's "
            f"max_seq_len={max_seq_len}; shorten one of the two"
        )


def check_memory(
    cell: Cell, args: ModelArgs, device: torch.device, *, held: int, stored: Mapping[str, int] | None = None
) -> None:
    """Refuse what is predicted to pass the memory that is free; `held` bytes of the prediction are taken already.

    `stored` as in `layout_of`.
    """
    predicted = predict(args, cell, workspace=workspace(device), stored=stored)
    free = available_memory(device)
    if free is not None and device.type != "cuda":
        free //= local_size()  # the other ranks of this host take as much
    if free is not None and predicted.total - held > free:
        lines = [line for line in make_ledger(args, cell, predicted, stored=stored)["lines"] if line["counts"]]
        parts = ", ".join(f"{line['name']} {size(line['predicted'])}" for line in lines)
        raise ValueError(
            f"{cell.name} does not fit: {parts}: {size(predicted.total)} at the peak, and {size(free)} are free "
            f"on {device}; make batch_size, input_len or output_len smaller"
        )


def workspace(device: torch.device) -> int:
    """Return what the device's libraries take through PyTorch's allocator: cuBLAS its workspace, a CPU nothing."""
    if device.type != "cuda":
        return 0
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    return CUBLAS_WORKSPACE_HOPPER if hopper else CUBLAS_WORKSPACE
