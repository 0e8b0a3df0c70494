"""A report as files in a folder: for people, for spreadsheets and for programs."""

import json
from pathlib import Path

from llama.bench.report.page import report_page
from llama.bench.report.plots.canvas import as_png
from llama.bench.report.plots.pictures import figures
from llama.bench.report.text import report_csv, report_markdown
from llama.bench.schema import Report
from llama.host.files import replace_file

STEPS_FILE = "watch.html"


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.md, table.csv, results.json, page.html and plots/*.png, and return their paths.

    Each file is replaced as a whole. Raises ValueError before anything is written if a figure is not a number, and
    OSError if the folder cannot be written.
    """
    results = write_json(report, folder / "results.json")  # first: everything else can be made from it
    files = {
        "report.md": report_markdown(report).encode(),
        "table.csv": report_csv(report).encode(),
        "page.html": report_page(report, steps_of(folder)).encode(),
    }
    files |= {f"plots/{name}.png": as_png(figure) for name, figure in figures(report).items()}
    return [results, *(replace_file(folder / name, content) for name, content in files.items())]


def keep_steps(folder: Path, steps: str) -> None:
    """Write the page of a recorded generation, which the report's page then includes."""
    replace_file(folder / STEPS_FILE, steps.encode())


def steps_of(folder: Path) -> str | None:
    """Return that page, or None."""
    return (folder / STEPS_FILE).read_text("utf-8") if (folder / STEPS_FILE).is_file() else None


def write_json(report: Report, path: Path) -> Path:
    """Write the report as JSON, replacing the file as a whole. Raises like `write_report`."""
    return replace_file(path, (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
