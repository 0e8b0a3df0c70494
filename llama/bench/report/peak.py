"""What a cell's memory is made of at its peak, and the sentence that names its largest part.

Read from the memory ledger alone. MB is 2^20 bytes.
"""

from llama.bench.report.cells import CellView, groups
from llama.bench.report.columns import megabytes
from llama.bench.schema import Report, Row

BEYOND_LEDGER = "beyond the ledger"
PARTS = ("weights", "KV cache", "logits", "activations", "workspace", BEYOND_LEDGER)  # as they are stacked


def peak_parts(view: CellView) -> dict[str, int]:
    """Return the bytes of each part that is there at the peak, measured if they were."""
    parts = dict.fromkeys(PARTS, 0)
    for line in (line for line in view.memory if line.get("counts")):
        parts[_part(line["name"])] += stored_bytes(line)
    parts[BEYOND_LEDGER] += max(0, peak_bytes(view) - sum(parts.values()))
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def _part(line: str) -> str:
    """Return the part that a line of the ledger belongs to: logits of a step, activations of the prefill."""
    if line in ("head", "tied head"):
        return "weights"
    return next((name for name in PARTS if line.startswith(name) or line.endswith(name)), BEYOND_LEDGER)


def stored_bytes(line: Row) -> int:
    """Return the bytes of a line or a peak, predicted if they were not measured."""
    measured = line.get("measured_bytes")
    return int(line["predicted_bytes"] if measured is None else measured)


def peak_bytes(view: CellView) -> int:
    """Return the most bytes in tensors of a cell that has a peak, predicted if the device shows none."""
    return next(stored_bytes(line) for line in view.memory if line["name"] == "peak")


def is_peak_predicted(view: CellView) -> bool:
    """Return True if the peak was not measured, as on a device that shows none."""
    return any(line["name"] == "peak" and line.get("measured_bytes") is None for line in view.memory)


def peak_words(view: CellView) -> str:
    """Return the largest part of the peak of a cell: 513 of 532 MB at the peak are weights."""
    parts = peak_parts(view)
    largest = max(parts, key=parts.__getitem__)
    kind = "predicted peak" if is_peak_predicted(view) else "peak"
    name = f"the {largest}" if largest == "KV cache" else largest
    return f"{megabytes(parts[largest])} of {megabytes(peak_bytes(view))} MB at the {kind} are {name}"


def peak_sentence(report: Report) -> str:
    """Return the largest part of the highest peak of the cells with times; nothing without any."""
    views = [view for group in groups(report) for view in group if view.has_peak]
    highest = max(views, key=peak_bytes, default=None)
    return "" if highest is None else f"Highest peak, {highest.label}: {peak_words(highest)}"
