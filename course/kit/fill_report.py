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
TABLE = re.compile(r"(<!-- table[^>]*-->\n).*?(<!-- end of table -->)", flags=re.DOTALL)


def main(words: list[str]) -> int:
    try:
        source = Path(words[0]) if words else newest(Path("results"))
        fill(REPORT, json.loads(source.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{REPORT} has the table of {source}")
    return 0


def newest(folder: Path) -> Path:
    """Return the file of the newest run. Raises ValueError if there is none."""
    found = sorted(folder.glob("*/results.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there are no results yet; run python benchmark_inference.py --preset table first")
    return found[-1]


def fill(report: Path, results: dict[str, Any]) -> None:
    """Write a row for each measured cell into the table of a report. Raises ValueError if it has no table."""
    text = report.read_text("utf-8")
    rows = ["| batch | cache | seconds | peak MB | tokens/s | cache MB |", "|---|---|---|---|---|---|"]
    measured = [found for found in results["rows"] if found["figures"] == "cell" and found.get("seconds")]
    rows += [row(results["cells"][found["cell"]], found) for found in measured if not found.get("predicted")]
    filled, count = TABLE.subn(lambda found: "\n".join([found[1], *rows, "", found[2]]), text)
    if count != 1:
        raise ValueError(f"{report} has lost the comments around its table; take them from the folder as you got it")
    report.write_text(filled, encoding="utf-8")


def row(cell: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the row of a cell: medians over its repetitions."""
    peaks = found.get("tensor_peak_bytes") or found.get("resident_peak_bytes")
    numbers = [
        f"{statistics.median(found['seconds']):.2f}",
        f"{statistics.median(peaks) / 2**20:.1f}" if peaks else "",
        f"{found['tokens_per_second']:.1f}",
        f"{found['cache_bytes'] / 2**20:.1f}" if found.get("cache_bytes") is not None else "",
    ]
    return f"| {cell['batch_size']} | {'on' if cell['kv_caching'] else 'off'} | {' | '.join(numbers)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
