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
    """Write report.md, table.csv, results.json, report.html and plots/*.png; return all paths in the folder.

    Each file is replaced as a whole. Raises ValueError before anything is written if a figure is not a number, and
    OSError if the folder cannot be written.
    """
    results = write_json(report, folder / "results.json")  # first: everything else can be made from it
    drawn, steps = figures(report), steps_of(folder)
    files = {
        "report.md": report_markdown(report, drawn).encode(),
        "table.csv": report_csv(report).encode(),
        "report.html": report_page(report, drawn, steps).encode(),
    }
    files |= {f"plots/{name}.png": as_png(figure) for name, figure in drawn.items()}
    written = [replace_file(folder / name, content) for name, content in files.items()]
    return [results, *written, *([folder / STEPS_FILE] if steps is not None else [])]


def keep_steps(folder: Path, steps: str) -> None:
    """Write the page of a recorded generation, which the report's page then includes."""
    replace_file(folder / STEPS_FILE, steps.encode())


def steps_of(folder: Path) -> str | None:
    """Return that page, or None."""
    return (folder / STEPS_FILE).read_text("utf-8") if (folder / STEPS_FILE).is_file() else None


def write_json(report: Report, path: Path) -> Path:
    """Write the report as JSON, replacing the file as a whole. Raises like `write_report`."""
    return replace_file(path, (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
