"""A report as files in a folder: for people, for spreadsheets and for programs."""

import hashlib
import json
import logging
from collections.abc import Mapping
from itertools import count, product
from pathlib import Path

from llama.bench.report.pictures import METADATA, as_file, figures
from llama.bench.report.report_page import report_page
from llama.bench.report.text import report_csv, report_latex, report_markdown
from llama.bench.schema import Report
from llama.host.files import replace_file

RESULTS, STEPS_FILE = "results.json", "watch.html"
logger = logging.getLogger(__name__)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.md, table.csv, table.tex, results.json, report.html, and pictures into plots/; return all paths.

    Each file is replaced as a whole. A file except results.json and pictures that was edited stays, the new file gets a
    numbered name, and the log names both; the digests in `report["files"]` show which files were edited. Raises
    ValueError before anything is written if a figure is not a number, and OSError if the folder cannot be written.
    """
    drawn, steps, known = figures(report), steps_of(folder), _digests_in(folder / RESULTS)
    files = {
        "report.md": report_markdown(report, drawn).encode(),
        "table.csv": report_csv(report).encode(),
        "report.html": report_page(report, drawn, steps).encode(),
    }
    files |= {"table.tex": latex.encode()} if (latex := report_latex(report)) else {}
    names = {name: _free_name(folder, name, known, content) for name, content in files.items()}
    # Those of the present files as well: the writing may be interrupted before it comes to them.
    digests = {new: [*_present(folder / new), _digest(files[name])] for name, new in names.items()}
    report["files"] = {**known, **digests}
    written = [write_json(report, folder / RESULTS)]  # first: everything else can be made from it
    written += [replace_file(folder / names[name], content) for name, content in files.items()]
    pictures = product(drawn.items(), METADATA)
    written += [replace_file(folder / f"plots/{name}.{form}", as_file(one, form)) for (name, one), form in pictures]
    for old, new in names.items():
        if old != new:
            logger.warning("%s may be edited, so it stays as it is; the new file is %s", folder / old, folder / new)
    return [*written, *([folder / STEPS_FILE] if steps is not None else [])]


def _digests_in(results: Path) -> dict[str, list[str]]:
    """Return the digests of the files that were written beside these results; none if that is not known."""
    try:
        known = json.loads(results.read_text("utf-8"))["files"]
        return {name: list(map(str, digests)) for name, digests in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _free_name(folder: Path, name: str, known: Mapping[str, list[str]], content: bytes) -> str:
    """Return the name, or the first one with a number behind its stem that no edited file has."""
    path = Path(name)
    for number in count(1):
        one = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if {*_present(folder / one)} <= {*known.get(one.name, []), _digest(content)}:
            break
    return one.name


def _present(file: Path) -> list[str]:
    """Return the digest of a file: nothing if there is none, "" if it cannot be read."""
    try:
        return [_digest(file.read_bytes())]
    except FileNotFoundError:
        return []
    except OSError:
        return [""]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def keep_steps(folder: Path, steps: str) -> None:
    """Write the page of a recorded generation, which the report's page then includes."""
    replace_file(folder / STEPS_FILE, steps.encode())


def steps_of(folder: Path) -> str | None:
    """Return that page, or None."""
    return (folder / STEPS_FILE).read_text("utf-8") if (folder / STEPS_FILE).is_file() else None


def write_json(report: Report, path: Path) -> Path:
    """Write the report as JSON, replacing the file as a whole. Raises like `write_report`."""
    return replace_file(path, (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
