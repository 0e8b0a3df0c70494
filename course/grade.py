"""Grade submissions of an exercise: python -m course.grade DIR... [--exercise NAME] [--json FILE] [--csv FILE].

Each runs in a copy, in a process of its own (course/sandbox.py), and its facts are compared with those of the real
package (course/diagnose.py). A submission that cannot run gets 0 points and the reason, and grading continues. No line
of a submission runs in this process.
"""

import csv as csv_file
import io
import json as json_file
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course.diagnose import Finding
from course.exercises import CACHE, EXERCISES, Exercise, named
from course.make import ROOT, make
from course.sandbox import Limits, Outcome, digests, run
from llama.host.files import check_writable, replace_file
from llama.untrusted.words import printable

FULL = 100
ROW = re.compile(r"^\| *(\d+) *\| *(on|off) *\| *([\d.,]*) *\| *([\d.,]*) *\|", flags=re.MULTILINE)
TEXT_LIMIT = 1_000_000  # characters


@dataclass(frozen=True)
class Grade:
    """The points of a submission, its mistakes, and the `reason` if it could not run."""

    submission: str
    points: int
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    printed: str = ""
    exercise: Exercise = CACHE

    def as_json(self) -> dict[str, Any]:
        known = self.exercise.mistakes
        listed = [asdict(known[finding.name]) | {"where": finding.where} for finding in self.findings]
        return {"submission": self.submission, "points": self.points, "reason": self.reason, "mistakes": listed}


def grade(
    submission: Path, outcome: Outcome, right: dict[str, Any], *, exercise: Exercise = CACHE, report: bool = False
) -> Grade:
    """Return the grade of a submission; `right` are the facts of the real package."""
    if outcome.facts is None:
        return Grade(str(submission), 0, reason=outcome.reason, printed=outcome.printed)
    findings = exercise.explain(outcome.facts, right)
    if report and (empty := empty_rows(submission / "report.md")):
        findings.append(Finding("report-missing", f"rows without a time or a peak: {'; '.join(empty)}"))
    lost = sum(exercise.mistakes[finding.name].points for finding in findings)
    return Grade(str(submission), max(FULL - lost, 0), tuple(findings), printed=outcome.printed, exercise=exercise)


def empty_rows(report: Path) -> list[str]:
    """Return the names of the task's rows without a time or a peak in the table of a report, which may be missing."""
    filled = {(batch, cache) for batch, cache, *numbers in ROW.findall(_beginning(report)) if all(numbers)}
    task = ROW.findall(_beginning(ROOT / "course" / "kit" / "report.md"))
    return [f"batch {batch}, cache {cache}" for batch, cache, *_ in task if (batch, cache) not in filled]


def _beginning(path: Path) -> str:
    """Return what a file begins with; "" if there is no such file, or if it cannot be read."""
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open(encoding="utf-8-sig", errors="replace") as file:
                return file.read(TEXT_LIMIT)
    return ""


def tried(submission: Path, limits: Limits, exercise: Exercise) -> Outcome:
    """Run a submission if its task is that of the exercise: in the folder of another one all would be right."""
    title = _beginning(submission / "TASK.md").partition("\n")[0].rstrip()
    if title == exercise.title:
        return run(submission, limits, *exercise.arguments())
    others = [other.name for other in EXERCISES.values() if other.title == title]
    if others:
        return Outcome(reason=f"it is of another exercise: grade it with --exercise {others[0]}")
    wanted = f"its TASK.md does not begin with the line {exercise.title!r}"
    return Outcome(reason=f"{wanted}: put it back, or grade the folder as another --exercise")


def real_facts(limits: Limits, exercise: Exercise = CACHE) -> dict[str, Any]:
    """Return the facts of the real package, the answer, and of versions with a mistake.

    Raises RuntimeError if it cannot run, or if an error ends its trials.
    """
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        make(Path(folder), exercise, holes=())
        outcome = run(Path(folder), limits, *exercise.arguments(versions=True))
    if outcome.facts is None:
        raise RuntimeError(f"the real package does not run here: {outcome.reason}\n{outcome.printed}")
    if error := outcome.facts.get("trials", {}).get("error"):
        raise RuntimeError(f"the trials of the real package do not end here: {error['type']}: {error['words']}")
    return outcome.facts


def as_text(grade: Grade) -> str:
    """Return the grade for a terminal."""
    lines = [f"{grade.submission}: {grade.points} of {FULL} points"]
    if grade.reason:
        lines.append(f"  could not be graded: {grade.reason}")
        lines += [f"    | {line}" for line in grade.printed.strip().splitlines()[-5:]]
    for finding in grade.findings:
        mistake = grade.exercise.mistakes[finding.name]
        lines.append(f"  -{mistake.points}  {mistake.title} [{mistake.name}]")
        lines.append(f"       seen: {finding.where}")
        lines.append(f"       hint: {mistake.hint}")
    if not grade.reason and not grade.findings:
        lines.append("  every experiment has the results of the real package")
    return "\n".join(map(printable, lines))


def table(grades: Sequence[Grade]) -> str:
    """Return one line for each submission."""
    width = max(len(one.submission) for one in grades)
    return "\n".join(printable(f"{one.submission:<{width}}  {one.points:>3}  {_summary(one)}") for one in grades)


def _summary(grade: Grade) -> str:
    return grade.reason or ", ".join(finding.name for finding in grade.findings) or "right"


def as_csv(grades: Sequence[Grade]) -> str:
    file = io.StringIO()
    rows = csv_file.writer(file)
    rows.writerow(["submission", "points", "mistakes", "reason"])
    for one in grades:
        rows.writerow([one.submission, one.points, " ".join(finding.name for finding in one.findings), one.reason])
    return file.getvalue()


def main(
    *submissions: str,
    exercise: str = "cache",
    csv: str | None = None,
    json: str | None = None,
    report: bool = False,
    seconds: float = Limits.seconds,
) -> int:
    """Grade submissions of an exercise, each a folder, and print every mistake with a hint.

    The exit code is 2 if a submission changed the grader's own files.

    Args:
        submissions: The folders to grade, one after another.
        exercise: cache, truncate, int8, eviction or lookup.
        csv: Write a table to this file, one line for each submission.
        json: Write all grades to this file.
        report: Require a report.md with a filled table, too.
        seconds: The time limit of each submission.
    """
    if not submissions:
        raise ValueError("no submission was given; name their folders: python -m course.grade submissions/*")
    limits, set_one = Limits(seconds=seconds), named(exercise)
    if report and set_one is not CACHE:
        raise ValueError(f"--report: the exercise {exercise} has no report; leave it out")
    for path in filter(None, (json, csv)):
        check_writable(Path(path))  # before grading, which may take an hour
    ours, right = _own_digests(), real_facts(limits, set_one)
    grades: list[Grade] = []
    code = 0
    for submission in map(Path, submissions):
        outcome = tried(submission, limits, set_one)
        if _own_digests() != ours:
            print(f"{submission} changed the grader's own files: restore them; it and the rest are not graded")
            code = 2
            break
        grades.append(grade(submission, outcome, right, exercise=set_one, report=report))
        print(as_text(grades[-1]), end="\n\n", flush=True)
    if len(grades) > 1:
        print(table(grades))
    if json is not None:
        replace_file(Path(json), (json_file.dumps([one.as_json() for one in grades], indent=2) + "\n").encode())
    if csv is not None:
        replace_file(Path(csv), as_csv(grades).encode(errors="replace"))
    return code


def _own_digests() -> list[dict[str, str]]:
    return [digests(ROOT / folder) for folder in ("course", "llama")]


if __name__ == "__main__":
    from llama import cli

    cli.main(main)
