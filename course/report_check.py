"""Read the table of a student's report.md, and find numbers that a correct measurement cannot give.

Knows the table of course/kit/report.md; runs nothing.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.diagnose import Finding

LIMIT = 1_000_000  # characters of a report
ROW = re.compile(r"^\|\s*(\d{1,9})\s*\|\s*(on|off)\s*\|\s*([\d.,]+)\s*\|\s*([\d.,]+)\s*\|", flags=re.MULTILINE)


@dataclass(frozen=True)
class Measured:
    """A row of the table: seconds and MB of a batch in one mode of the cache."""

    batch: int
    kv_caching: bool
    seconds: float
    peak: float


def check_report(path: Path, *, wanted: bool) -> list[Finding]:
    """Return the mistakes of a report. A missing or blank report is a mistake only if it is `wanted`."""
    rows = read_rows(path)
    if len(rows) < 6:
        return [Finding("report-missing", f"{len(rows)} of 6 rows are filled in")] if wanted else []
    return list(_findings(rows))


def read_rows(path: Path) -> list[Measured]:
    """Return the filled rows of the table in their order."""
    if path.is_symlink() or not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(LIMIT)
    return [
        Measured(int(batch), mode == "on", _number(seconds), _number(peak))
        for batch, mode, seconds, peak in ROW.findall(text)
    ]


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def _findings(rows: list[Measured]) -> Iterator[Finding]:
    biggest = max(rows, key=lambda row: row.batch).batch
    by_mode = {mode: [row for row in rows if row.kv_caching is mode] for mode in (True, False)}
    # The peak of one process never falls: equal peaks, to the last digit, mean that the peak was not reset.
    same = [(a, b) for a, b in itertools.pairwise(rows) if a.peak == b.peak]
    falls = [(a, b) for a, b in itertools.pairwise(rows) if a.peak > b.peak]
    if len(same) >= 2 and not falls:
        first, second = same[0]
        yield Finding(
            "report-peaks-not-reset", f"{_cell(first)} and {_cell(second)} both have a peak of {first.peak:g}"
        )
    first = rows[0]
    larger = [row for row in by_mode[first.kv_caching] if row.batch > first.batch and row.seconds < first.seconds]
    if larger:
        where = f"{_cell(first)} took {first.seconds:g} s, and {_cell(larger[0])} {larger[0].seconds:g} s"
        yield Finding("report-no-warm-up", where)
    pairs = [(a, b) for a in by_mode[True] for b in by_mode[False] if a.batch == b.batch]
    if pairs and all(on.seconds >= off.seconds for on, off in pairs):
        yield Finding("report-on-is-off", f"at batch {biggest}, too")


def _cell(row: Measured) -> str:
    return f"batch {row.batch} with the cache {'on' if row.kv_caching else 'off'}"
