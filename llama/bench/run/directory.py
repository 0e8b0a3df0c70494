"""A report that is being written: the cells that are planned, those that are finished, and the folder that keeps them.

Everything is saved as soon as it is measured, so an interrupted run loses at most the repetition it was in.
"""

import json
import os
import re
from datetime import date
from pathlib import Path

from llama.bench.cell import Cell
from llama.bench.report.files import write_json
from llama.bench.schema import SCHEMA, Report

RESULTS = "results.json"


class RunDirectory:
    """A report and its folder. Its cells are the plan: those without samples or error are still to be measured."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder, self.report = folder, report

    @property
    def cells(self) -> list[Cell]:
        return [Cell(**record["cell"]) for record in self.report["cells"]]

    def save(self) -> None:
        write_json(self.report, self.folder / RESULTS)


def new_run_directory(out: Path, report: Report) -> RunDirectory:
    """Make a folder for a report, named with date, model and preset."""
    directory = RunDirectory(make_folder(out, _kind(report)), report)
    directory.save()
    return directory


def make_folder(out: Path, name: str) -> Path:
    """Make a folder with today's date before its name, and a number behind it where that is taken.

    Raises OSError where it cannot be made, and ValueError where today has a thousand of them.
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
    raise ValueError(f"{out} holds a thousand runs of today; give another --out")


def resumed_run_directory(out: Path, report: Report) -> RunDirectory:
    """Return the newest directory under `out` with this plan. Raises ValueError where there is none."""
    wanted = [record["cell"] for record in report["cells"]]
    found = sorted(out.glob(f"*-{_kind(report)}*/{RESULTS}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        kept = _read(path)
        if kept is not None and [record["cell"] for record in kept["cells"]] == wanted:
            kept.setdefault("agreements", [])  # which reports of before did not have
            kept["failures"], kept["budget_minutes"] = [], report["budget_minutes"]
            for record in kept["cells"]:
                record["error"] = None  # what died may live now
            return RunDirectory(path.parent, kept)
    raise ValueError(
        f"nothing to resume: {out} holds no run of this preset with these cells "
        f"({len(found)} of this model were found); run it without --resume"
    )


def _read(path: Path) -> Report | None:
    """Return the report in a file, or None where there is none of this version."""
    try:
        report: Report = json.loads(path.read_text("utf-8"))
        return report if report["schema"] == SCHEMA and report["cells"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kind(report: Report) -> str:
    """Return the model's and the preset's name, fit for a folder."""
    model = str(report["cells"][0]["cell"]["model"])
    name = Path(model).resolve().name if os.sep in model else model
    return f"{re.sub(r'[^A-Za-z0-9.-]', '-', name.removesuffix('.gguf'))}-{report['preset']}"
