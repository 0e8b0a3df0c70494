"""The commands of sweeps: llama-kv sweep PLAN.toml measures the cells of a plan, llama-kv merge makes one report."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama.cli.benchmark_inference import DIED, as_started, report_exit_code, show_report
from llama.cli.compare import malformed_refused, read_result
from llama.cli.submit import TasksDied, run_parts
from llama.host import console
from llama.host.cores import FreeCores
from llama.host.parts import own_part
from llama.host.progress import progress_bar
from llama.untrusted.files import read_text

if TYPE_CHECKING:
    from llama.bench.schema import Report
    from llama.bench.sweep import Point

LONGEST_PLAN = 1 << 20  # bytes of a plan


def main(
    *plan: str,
    out: str | None = None,
    part: str | None = None,
    submit: str | None = None,
    tasks: int = 4,
    option: list[str] = [],  # noqa: B006  (read only)
) -> int:
    """Measure the cells of a plan, each once, and make one report of them.

    The exit code is 3 if a check is violated, 1 if a cell died or was refused, 2 for a mistake, and otherwise 0. A
    part returns the code of its own cells. The same command continues a sweep that ended in any way.

    Args:
        plan: A TOML file with lists: models, kinds, contexts, batch, tasks; docs/sweeps.md has the others.
        out: The folder of the cells' files, by default results/ and the name of the plan.
        part: Measure the i-th of n parts, i/n; by default that of a task of Slurm's job array.
        submit: Start the parts by submitit, slurm or local, wait, start again what died, and make the report.
        tasks: The number of parts that --submit starts.
        option: A parameter of submitit's executor, NAME=VALUE, such as slurm_partition=short; may be repeated.
    """
    if len(plan) != 1:
        raise ValueError(f"{len(plan)} plans; give one TOML file")
    file = Path(plan[0])
    folder = Path(out) if out is not None else Path("results") / file.stem
    exit_code = 0
    if submit is not None:
        try:
            _submit(file, folder, submit, tasks, option)
        except TasksDied as error:  # the cells that are done have a report all the same
            console.say(f"error: {error}")
            exit_code = DIED
            if not any(folder.glob("*.json")):
                return exit_code
    else:
        i, n = own_part(part)
        exit_code = _measure_part(file, folder, i, n)
        if n > 1:
            return exit_code
    return max(exit_code, merge(str(folder), out=str(folder / "report")))


def _measure_part(file: Path, folder: Path, i: int, n: int) -> int:
    """Measure the i-th of n parts of a plan; return its exit code, as `measure_cells`."""
    cores = FreeCores()  # looks while torch is loaded
    from llama.bench.sweep import error_of, is_done, part_of, read_plan

    points = part_of(read_plan(read_text(file, limit=LONGEST_PLAN)), i, n)
    cores.choose_threads(console.note)
    exit_code = measure_cells(points, folder)
    failed: dict[str, list[str]] = {}
    for point in points if n > 1 else ():  # without parts, the report names them
        if (error := error_of(folder, point)) is not None:
            failed.setdefault(error, []).append(point.name)
    for error, names in failed.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.say(f"{names[0]}{more}: {error}")
    done = sum(is_done(folder, point) for point in points)
    console.put(f"{folder}: {done} of {len(points)} cells of part {i} of {n} are done")
    return exit_code


def measure_cells(points: "Sequence[Point]", folder: Path) -> int:
    """Measure the cells that are not done, with a progress bar; return the exit code of all, done before or now."""
    from llama.bench.run.directory import read_report
    from llama.bench.sweep import OLD, file_of, is_done, measure_points, superseded

    undone = {point for point in points if not is_done(folder, point)}
    if again := sum(bool(superseded(folder, point)) for point in undone):
        changed = "the code or files that they read have changed"
        console.note(
            f"measuring {again} of {len(points)} cells again: {changed}; {folder / OLD} stores the old results"
        )
    done = len(points) - len(undone)
    look: dict[str, Any] = {"initial": done, "bar_format": "{desc}: {n_fmt} of {total_fmt} |{bar}| {elapsed}{postfix}"}
    try:
        with progress_bar("cells", total=len(points), **look) as bar:

            def begin(point: "Point") -> None:
                took = (time.perf_counter() - began) / max(1, bar.n - bar.initial)
                left = (
                    f", about {bar.format_interval(took * (len(points) - bar.n))} left" if bar.n > bar.initial else ""
                )
                bar.set_postfix_str(f"now {point.name}{left}")

            began = time.perf_counter()
            for point in measure_points(points, folder, command=as_started(), waiting=bar.refresh, begin=begin):
                if point in undone:
                    done += 1
                    bar.update()
    except BaseException:
        console.note(f"{done} of {len(points)} cells are done; the same command measures the others")
        raise
    reports = (read_report(file_of(folder, point)) for point in points)
    with malformed_refused():
        return max((DIED if report is None else report_exit_code(report) for report in reports), default=0)


def _submit(file: Path, folder: Path, cluster: str, tasks: int, options: list[str]) -> None:
    """Measure the parts of a plan by tasks of a cluster, until every cell is done or tasks die again and again."""
    from llama.bench.sweep import is_done, part_of, read_plan

    points = read_plan(read_text(file, limit=LONGEST_PLAN))
    parts = [part_of(points, i, tasks) for i in range(1, tasks + 1)]

    def undone() -> dict[int, int]:
        counts = {i: sum(not is_done(folder, point) for point in part) for i, part in enumerate(parts, 1)}
        return {i: count for i, count in counts.items() if count}

    words = [str(file.resolve()), "--out", str(folder.resolve())]
    run_parts(words, folder, undone, cluster=cluster, tasks=tasks, options=options)


def merge(*results: str, out: str = "merged") -> int:
    """Make one report of results of llama-kv sweep and bench, which may come from several machines.

    The exit code is that of llama-kv sweep.

    Args:
        results: Results as JSON, and folders of them: of a sweep, or of a preset of llama-kv bench.
        out: The folder of the report.
    """
    from llama.bench.merged import merged
    from llama.bench.report.files import RESULTS, write_report

    if _preset_of(Path(out) / RESULTS) not in (None, "merged"):
        raise ValueError(f"{out} has measured results, which a merge would replace; give --out another folder")
    with malformed_refused():
        report = merged(_different(results), command=as_started())
        show_report(report, write_report(report, Path(out)))
        return report_exit_code(report)


def _preset_of(results: Path) -> str | None:
    """Return the preset of results of any version; None if there are none, or if the file is torn."""
    try:
        return str(json.loads(results.read_text("utf-8"))["preset"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _different(results: tuple[str, ...]) -> Iterator["Report"]:
    """Yield the reports in files and folders, each content once. Raises ValueError for a folder without results."""
    seen = set()
    for name in results:
        files = sorted(Path(name).glob("*.json")) if Path(name).is_dir() else [Path(name)]
        if not files:
            raise ValueError(f"{name} has no .json file; give the folder of a sweep or of a preset, or a result")
        for file in files:
            report = read_result(str(file))
            digest = hashlib.blake2b(json.dumps(report).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield report
