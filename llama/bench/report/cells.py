"""The cells of a report, each with its rows, its name and its path; their order, and which ones are compared."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama.bench.cell import Cell
from llama.bench.report.columns import NOT_MEASURED
from llama.bench.schema import Report, Row, cell_of, is_measured, rows_of
from llama.bench.statistics import spread


@dataclass(frozen=True)
class CellView:
    """A cell with its rows.

    index: its place in the head of the report.
    among: what distinguishes it from others of the same name.
    row: its figures.
    checks: what was checked in it.
    memory: the lines of its memory ledger.
    """

    index: int
    among: str
    cell: Cell
    row: Row
    checks: Sequence[Row]
    memory: Sequence[Row]

    @property
    def is_ours(self) -> bool:
        return self.cell.engine == "llama"

    @property
    def path(self) -> str:
        return self.row.get("path") or ""

    @property
    def is_measured(self) -> bool:
        return is_measured(self.row)

    @property
    def is_fast(self) -> bool:
        """Whether it is ours and ran on another path than the plain one."""
        return self.is_ours and self.path not in ("plain", "")

    @property
    def label(self) -> str:
        """The name of the cell, which no other cell of its report has."""
        name = self.cell.name
        if self.is_fast:  # its path names the modes
            name = f"{self.cell.workload.name}, {self.path}"
        return f"{name}{', logits of all positions' * (self.cell.logits == 'all')}{self.among}"

    @property
    def pair_label(self) -> str:
        """The label without the mode."""
        return self.label.replace(", cache on", "").replace(", cache off", "")

    @property
    def runs_on(self) -> str:
        """The path of ours, or the other engine."""
        return self.path if self.is_ours else " ".join(filter(None, (self.cell.engine, self.cell.quantize)))

    @property
    def outcome(self) -> str:
        """Why the cell has no figures: it died, was refused, or was not measured."""
        return self.row.get("error") or NOT_MEASURED

    def median(self, column: str) -> float | None:
        """Return the median of a repeated column, None if it has no values."""
        found = spread(self.row, column)
        return None if found is None else found["median"]

    def line(self, name: str) -> Row | None:
        """Return a line of the memory ledger."""
        return next((row for row in self.memory if row["name"] == name), None)

    @property
    def has_peak(self) -> bool:
        """Whether it has a memory ledger."""
        return self.line("peak") is not None


def cell_views(report: Report) -> list[CellView]:
    """Return the cells in the order of the head."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in report["rows"]:
        found.setdefault((row["figures"], row["cell"]), []).append(row)
    differ = [name for name in ("model", "input_len") if len({cell[name] for cell in report["cells"]}) > 1]
    views = []
    for row in sorted(rows_of(report, "cell"), key=lambda row: row["cell"]):
        checks, memory = (found.get((figures, row["cell"]), []) for figures in ("check", "memory"))
        among = "".join(f", {name.replace('_', ' ')} {report['cells'][row['cell']][name]}" for name in differ)
        views.append(CellView(row["cell"], among, cell_of(report, row), row, checks, memory))
    return views


def kind_names(report: Report) -> list[str]:
    """Return the one name of each cell's kind of cache: without the folder of its file, unless two would be equal."""
    whole = [cell["kv_cache"] for cell in report["cells"]]
    short = [re.sub(r"[^;]*[/\\]", "", name) for name in whole]
    return short if len({*short}) == len({*whole}) else whole


def in_table_order(views: Sequence[CellView]) -> list[CellView]:
    """Return cells by batch size; of one batch ours first, then the others; the cache on, with guesses, then off."""

    def place(view: CellView) -> tuple[Any, ...]:
        cell = view.cell
        modes = cell.engine, cell.fast, cell.quantize or "", cell.activations
        return cell.batch_size, not view.is_ours, *modes, not cell.kv_caching, cell.speculate or ""

    return sorted(views, key=place)


def groups(report: Report) -> list[list[CellView]]:
    """Return the cells with times, in groups that differ in the cache alone, on before off."""
    found: dict[tuple[Any, ...], list[CellView]] = {}
    for view in in_table_order(cell_views(report)):
        if view.row.get("seconds"):
            found.setdefault((view.cell.but(kv_caching=True), view.path, view.row.get("setup")), []).append(view)
    return list(found.values())
