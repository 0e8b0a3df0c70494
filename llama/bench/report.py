"""A report as files in a folder: for people, for spreadsheets and for programs.

Knows nothing of what stands in them.
"""

import errno
import json
import os
from pathlib import Path

from llama.bench.page import page
from llama.bench.plots import as_png, figures
from llama.bench.record import Report
from llama.bench.tables import report_csv, report_markdown


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.md, table.csv, results.json, page.html and plots/*.png, and return their paths.

    Each file is replaced as a whole: a reader, or an interruption, never meets half of one. Raises ValueError, before
    anything is written, where a figure is not a number, and OSError where the folder cannot be written.
    """
    files = {
        "results.json": _json(report),
        "report.md": report_markdown(report).encode(),
        "table.csv": report_csv(report).encode(),
        "page.html": page(report).encode(),
    }
    files |= {f"plots/{name}.png": as_png(figure) for name, figure in figures(report).items()}
    return [_replace(folder / name, content) for name, content in files.items()]


def write_json(report: Report, path: Path) -> Path:
    """Write the report alone, as JSON, replacing the file as a whole. Raises like `write_report`."""
    return _replace(path, _json(report))


def check_writable(path: Path) -> None:
    """Raise OSError now, not after minutes of measuring, where the file could not be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    new = _beside(path)
    new.touch()
    new.unlink()


def _json(report: Report) -> bytes:
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def _replace(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path)
    try:
        new.write_bytes(content)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path
