"""A report as files in a folder: for people, for spreadsheets and for programs.

Knows nothing of what stands in them.
"""

import json
from pathlib import Path

from llama.bench.report.page import page
from llama.bench.report.plots import as_png, figures
from llama.bench.report.text import report_csv, report_markdown
from llama.bench.schema import Report
from llama.host.files import keep_file, replace_file

STEPS = "watch.html"


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.md, table.csv, results.json, page.html and plots/*.png, and return their paths.

    Each file is replaced as a whole: a reader, or an interruption, never meets half of one. Raises ValueError, before
    anything is written, where a figure is not a number, and OSError where the folder cannot be written; results.json
    is then where `keep_file` has put it.
    """
    results = keep_json(report, folder / "results.json")  # first: all else can be made of it
    files = {
        "report.md": report_markdown(report).encode(),
        "table.csv": report_csv(report).encode(),
        "page.html": page(report, steps_of(folder)).encode(),
    }
    files |= {f"plots/{name}.png": as_png(figure) for name, figure in figures(report).items()}
    return [results, *(replace_file(folder / name, content) for name, content in files.items())]


def keep_steps(folder: Path, steps: str) -> None:
    """Keep a page of HTML on which one steps through a generation; the report's page has it in it, too."""
    replace_file(folder / STEPS, steps.encode())


def steps_of(folder: Path) -> str | None:
    """Return that page, if there is one."""
    return (folder / STEPS).read_text("utf-8") if (folder / STEPS).is_file() else None


def write_json(report: Report, path: Path) -> Path:
    """Write the report alone, as JSON, replacing the file as a whole. Raises like `write_report`."""
    return replace_file(path, _json(report))


def keep_json(report: Report, path: Path) -> Path:
    """Write the report alone, when it is finished: what was measured is not lost where that fails; see `keep_file`."""
    return keep_file(path, _json(report))


def _json(report: Report) -> bytes:
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()
