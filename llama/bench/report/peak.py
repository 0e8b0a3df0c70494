"""What a cell's memory is made of at its peak, and the sentence that says what rules it.

Worked out from the memory ledger alone; knows nothing of tables or pictures. MB is 2^20 bytes.
"""

from collections.abc import Callable, Iterable, Sequence

from llama.bench.schema import CellRecord, Ledger
from llama.costs import MB

UNNAMED = "beyond the ledger"
PARTS = ("weights", "KV cache", "logits", "activations", "workspace", UNNAMED)  # in the order in which they are stacked


def peak_parts(ledger: Ledger) -> dict[str, int]:
    """Return the bytes of each part that is there at the peak, measured where it was."""
    parts = dict.fromkeys(PARTS, 0)
    for line in ledger["lines"]:
        if line["counts"]:
            parts[_part(line["name"])] += line["predicted"] if line["measured"] is None else line["measured"]
    parts[UNNAMED] += max(0, peak_bytes(ledger) - sum(parts.values()))
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def _part(line: str) -> str:
    """Return which part a line of the ledger belongs to: logits of a step, activations of the prefill."""
    if line in ("head", "tied head"):
        return "weights"
    return next((name for name in PARTS if line.startswith(name) or line.endswith(name)), UNNAMED)


def peak_bytes(ledger: Ledger) -> int:
    return ledger["predicted_peak"] if ledger["measured_peak"] is None else ledger["measured_peak"]


def peak_words(ledger: Ledger) -> str:
    """Return what rules the peak of one cell, in a sentence: 513 of 532 MB at the peak are weights."""
    return f"{_ruled(_ruler(ledger), [ledger])}."


def peak_sentence(records: Sequence[CellRecord], name: Callable[[CellRecord], str]) -> str:
    """Return what rules the peak of each of the cells, in one sentence; `name` tells them apart where it differs."""
    ledgers = [(record, ledger) for record in records if (ledger := record["ledger"]) is not None]
    ruled: dict[str, list[tuple[CellRecord, Ledger]]] = {}
    for record, ledger in ledgers:
        ruled.setdefault(_ruler(ledger), []).append((record, ledger))
    said = []
    for ruler, cells in ruled.items():
        where = f" ({', '.join(dict.fromkeys(name(record) for record, _ in cells))})" if len(ruled) > 1 else ""
        said.append(_ruled(ruler, [ledger for _, ledger in cells]) + where)
    return f"{'; '.join(said)}." if said else ""


def _ruler(ledger: Ledger) -> str:
    parts = peak_parts(ledger)
    return max(parts, key=parts.__getitem__)


def _ruled(ruler: str, ledgers: Sequence[Ledger]) -> str:
    own, whole = ([part(one) for one in ledgers] for part in (lambda one: peak_parts(one)[ruler], peak_bytes))
    predicted = "predicted " if any(one["measured_peak"] is None for one in ledgers) else ""
    most = all(2 * part > peak for part, peak in zip(own, whole, strict=True))
    kind = f"the {ruler}" if ruler == "KV cache" else ruler
    return (
        f"{_range(own)} of {_range(whole)} MB at the {predicted}peak are {kind}{'' if most else ', its largest part'}"
    )


def _range(values: Iterable[int]) -> str:
    low, high = (_megabytes(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / MB:,.0f}" if nbytes >= 10 * MB else f"{nbytes / MB:.2g}"
