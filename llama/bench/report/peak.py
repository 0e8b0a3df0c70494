"""What a cell's memory is made of at its peak, and the sentence that names its largest part.

Read from the memory ledger alone. MB is 2^20 bytes.
"""

from collections.abc import Iterable, Sequence

from llama.bench.report.cells import CellView, group_name, groups
from llama.bench.schema import Report
from llama.costs import MB

UNNAMED = "beyond the ledger"
PARTS = ("weights", "KV cache", "logits", "activations", "workspace", UNNAMED)  # in the order in which they are stacked


def peak_parts(view: CellView) -> dict[str, int]:
    """Return the bytes of each part that is there at the peak, measured if they were."""
    parts = dict.fromkeys(PARTS, 0)
    for line in view.memory:
        if line.get("counts"):
            measured = line.get("measured_bytes")
            parts[_part(line["name"])] += line["predicted_bytes"] if measured is None else measured
    parts[UNNAMED] += max(0, peak_bytes(view) - sum(parts.values()))
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def _part(line: str) -> str:
    """Return the part that a line of the ledger belongs to: logits of a step, activations of the prefill."""
    if line in ("head", "tied head"):
        return "weights"
    return next((name for name in PARTS if line.startswith(name) or line.endswith(name)), UNNAMED)


def peak_bytes(view: CellView) -> int:
    """Return the most bytes in tensors: measured, or predicted if the system does not report them."""
    peak = view.line("peak")
    assert peak is not None
    measured = peak.get("measured_bytes")
    return peak["predicted_bytes"] if measured is None else measured


def is_peak_predicted(view: CellView) -> bool:
    """Return True if no peak was measured."""
    peak = view.line("peak")
    return peak is not None and peak.get("measured_bytes") is None


def peak_sentence(report: Report) -> str:
    """Return the largest part of the peak of all cells in one sentence, with the cells' names if the parts differ."""
    grouped = groups(report)
    found: dict[str, list[CellView]] = {}
    for view in (view for group in grouped for view in group if view.line("peak") is not None):
        found.setdefault(_largest(view), []).append(view)
    said = []
    for largest, views in found.items():
        names = dict.fromkeys(group_name(view, grouped) for view in views)
        said.append(_share(largest, views) + (f" ({', '.join(names)})" if len(found) > 1 else ""))
    return f"{'; '.join(said)}." if said else ""


def peak_words(view: CellView) -> str:
    """Return the largest part of the peak of one cell: 513 of 532 MB at the peak are weights."""
    return f"{_share(_largest(view), [view])}."


def _largest(view: CellView) -> str:
    parts = peak_parts(view)
    return max(parts, key=parts.__getitem__)


def _share(largest: str, views: Sequence[CellView]) -> str:
    own, whole = [peak_parts(view)[largest] for view in views], [peak_bytes(view) for view in views]
    predicted = [is_peak_predicted(view) for view in views]
    kind = "predicted peak" if all(predicted) else "peak (partly predicted)" if any(predicted) else "peak"
    is_most = all(2 * part > peak for part, peak in zip(own, whole, strict=True))
    name = f"the {largest}" if largest == "KV cache" else largest
    return f"{_range(own)} of {_range(whole)} MB at the {kind} are {name}{'' if is_most else ', the largest part'}"


def _range(values: Iterable[int]) -> str:
    low, high = (_megabytes(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / MB:,.0f}" if nbytes >= 10 * MB else f"{nbytes / MB:.2g}"
