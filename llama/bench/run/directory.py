"""The folder of a run: its report is saved after every measurement, so that an interrupted run can be resumed."""

import json
import os
import re
from datetime import date
from pathlib import Path

from llama.bench.report.files import RESULTS, write_json
from llama.bench.schema import SCHEMA, Report, cell_row, rows_of


def new_run(out: Path, report: Report) -> tuple[Path, Report]:
    """Make a folder for a report, named with date, model and preset; return both."""
    folder = make_folder(out, _kind(report))
    write_json(report, folder / RESULTS)
    return folder, report


def make_folder(out: Path, name: str) -> Path:
    """Make a folder with today's date before its name, and a number behind it if the name is taken.

    Raises OSError if it cannot be made, and ValueError if there are a thousand of today.
    """
    stem = f"{date.today().isoformat()}-{name}"
    for number in range(1, 1000):
        folder = out / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.parent.is_dir():
                raise
        else:
            return folder
    raise ValueError(f"{out} has a thousand runs of today; give another --out")


def resumed_run(out: Path, report: Report) -> tuple[Path, Report]:
    """Return the newest folder under `out` that measures the same cells on the same files, and its report.

    Raises ValueError if there is none.
    """
    found = sorted(out.glob(f"*-{_kind(report)}*/{RESULTS}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        kept = read_report(path)
        if kept is not None and kept["cells"] == report["cells"] and kept["plan"] == report["plan"]:
            kept["failures"], kept["budget_minutes"] = [], report["budget_minutes"]
            for row in rows_of(kept, "cell"):
                row["error"] = None  # what died is tried again
            return path.parent, kept
    raise ValueError(
        f"nothing to resume: {out} has no run of this preset with these cells "
        f"({len(found)} of this model were found); run it without --resume"
    )


def read_report(path: Path) -> Report | None:
    """Return the report in a file; None if it is not one of this version, or has lost its rows or its plan."""
    try:
        report: Report = json.loads(path.read_text("utf-8"))
        # `_kind` raises without a model.
        whole = report["schema"] == SCHEMA and report["preset"] and isinstance(report["plan"], dict) and _kind(report)
        return report if whole and "error" in cell_row(report, 0) else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def _kind(report: Report) -> str:
    """Return the names of the model and the preset for a folder."""
    model = str(report["cells"][0]["model"])
    name = Path(model).resolve().name if os.sep in model else model
    return f"{re.sub(r'[^A-Za-z0-9.-]', '-', name.removesuffix('.gguf'))}-{report['preset']}"
