"""Write the results of the benchmark into report.md: python fill_report.py [results/.../results.json].

Without a file, it reads the newest one under results/. Only the table between the two comments changes.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

REPORT = Path("report.md")
REMEDY = "measure them: python benchmark_inference.py --preset table --resume --budget 0, then run this again"
TABLE = re.compile(r"(<!-- table[^>]*-->\n).*?(<!-- end of table -->)", flags=re.DOTALL)


def main(words: list[str]) -> int:
    try:
        source = Path(words[0]) if words else newest(Path("results"))
        missing = fill(REPORT, json.loads(source.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{REPORT} has the table of {source}")
    if missing:
        why = f"{len(missing)} rows are empty, because their cells were not measured ({'; '.join(missing)})"
        print(f"error: {why}; {REMEDY}", file=sys.stderr)
    return 1 if missing else 0


def newest(folder: Path) -> Path:
    """Return the file of the newest run. Raises ValueError if there is none."""
    found = sorted(folder.glob("*/results.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there are no results yet; run python benchmark_inference.py --preset table first")
    return found[-1]


def fill(report: Path, results: dict[str, Any]) -> list[str]:
    """Write a row for each cell into the table of a report, and return the names of those that were not measured.

    Their figures are empty. Raises ValueError if the report has no table.
    """
    text = report.read_text("utf-8")
    rows = ["| batch | cache | seconds | peak MB | tokens/s | cache MB |", "|---|---|---|---|---|---|"]
    cells = [(results["cells"][found["cell"]], found) for found in results["rows"] if found["figures"] == "cell"]
    rows += [row(*one) for one in cells]
    filled, count = TABLE.subn(lambda found: "\n".join([found[1], *rows, "", found[2]]), text)
    if count != 1:
        raise ValueError(f"{report} has lost the comments around its table; take them from the folder as you got it")
    report.write_text(filled, encoding="utf-8")
    return [f"batch {cell['batch_size']}, cache {mode(cell)}" for cell, found in cells if not is_measured(found)]


def mode(cell: dict[str, Any]) -> str:
    return "on" if cell["kv_caching"] else "off"


def is_measured(found: dict[str, Any]) -> bool:
    return bool(found.get("seconds"))


def row(cell: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the row of a cell: medians over its repetitions; without figures if it was not measured."""
    if not is_measured(found):
        return f"| {cell['batch_size']} | {mode(cell)} | | | | |"
    peaks = found.get("tensor_peak_bytes") or found.get("resident_peak_bytes")
    numbers = [
        f"{statistics.median(found['seconds']):.2f}",
        f"{statistics.median(peaks) / 2**20:.1f}" if peaks else "",
        f"{found['tokens_per_second']:.1f}",
        f"{found['cache_bytes'] / 2**20:.1f}" if found.get("cache_bytes") is not None else "",
    ]
    return f"| {cell['batch_size']} | {mode(cell)} | {' | '.join(numbers)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
