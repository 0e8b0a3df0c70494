"""Runs a preset within its budget: every group of jobs once, cells again while the budget lasts, then curves.

Groups are never torn: a group that does not fit into the budget, or that the budget ends, is left out as a whole.
Cells that were left out get predicted figures. Finished rows are saved at once, so a run can be resumed.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from llama.bench.cell import FULL, Cell
from llama.bench.compare import add_note, add_result, compare_engines, compare_pair, compare_turns, with_rates
from llama.bench.noise import judge_noise
from llama.bench.presets import GROUPS, RECORDING, REPORT_LENGTHS, Calibration, Group, Job, cells_of, recording_job
from llama.bench.report.derived import scatter
from llama.bench.report.files import RESULTS, keep_steps, steps_of, write_json
from llama.bench.report.sentences import findings
from llama.bench.run.cache_kind import predicted_kind
from llama.bench.run.engines import Source
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.measure import predicted_peak, predicted_rows
from llama.bench.run.models import find_model
from llama.bench.schema import TEXTS, Report, cell_row, is_measured, measured_rows, merge, pairs, rows_of
from llama.bench.statistics import LEAST_REPETITIONS, median_of, values_of

REPETITIONS = 5
OVERRUN = 0.2  # of the budget: a job that would end later under load is ended
RECORDING_SHARE = 10  # the recording is left out if it takes more than a tenth of what is left of the budget
LEAST_WITHIN = 1.25  # of a predicted time: SPREAD of an idle machine
WRITING = 20.0  # seconds of a report's minutes to write its files, or as many as a process takes to start


class OverBudgetError(Exception):
    """A job was ended because the time of the whole run was over."""


class Run:
    """A run of a preset: its report and folder, how long it may take, and how long each job took or should take."""

    def __init__(
        self, folder: Path, report: Report, progress: Any, *, watched: Cell | None = None, began: float | None = None
    ) -> None:
        """Begin the budget, now or at `began` of `time.monotonic`.

        `progress` is a `seconds_bar`; the page shows a generation of `watched`.
        """
        self.folder, self.report, self.progress, self.watched = folder, report, progress, watched
        self.budget = self._whole()  # without what a report needs to write its files
        self.is_hand_in = report["preset"] == "report"  # whose minutes end with its files
        self.overrun = 0.0 if self.is_hand_in else OVERRUN
        self.began = time.monotonic() if began is None else began
        self.calibration: Calibration
        self._sources: dict[Cell, Source] = {}
        self._took: dict[str, float] = {}  # seconds of a job's last repetition
        self._pace: dict[tuple[Any, ...], float] = {}  # seconds over prediction of the last job alike
        self._failed = set[str]()  # jobs whose cell has their error

    # ---- time --------------------------------------------------------------------------------------------------------

    def seconds_left(self) -> float:
        """Return the seconds of the budget that are left."""
        return max(0.0, self.began + self.budget - time.monotonic())

    def expected(self, group: Group) -> float:
        """Return how long a group should take: as long as before, or as predicted and as slow as jobs alike were."""
        return sum(self._took.get(one.name, one.seconds * self._pace.get(_alike(one), 1.0)) for one in group.jobs)

    def _do(self, job: Job, *, limited: bool) -> dict[str, Any]:
        """Run a job. If `limited`, raise OverBudgetError once the budget is passed by `overrun`."""
        started, end = time.monotonic(), self.began + (1 + self.overrun) * self.budget
        step, before = self.expected(Group((job,))), self.progress.n

        def waiting() -> None:
            self._advance(before + min(step, time.monotonic() - started))
            if limited and time.monotonic() > end:
                raise OverBudgetError(f"{job.name}: ended, because the budget was over")

        self.progress.set_description_str(job.name)
        done = run_job(job.kind, job.cell, waiting=waiting, **job.options)
        self._advance(before + step)
        self._took[job.name] = time.monotonic() - started
        if job.seconds:
            self._pace[_alike(job)] = max(1.0, self._took[job.name] / job.seconds)
        return done

    def _advance(self, done: float) -> None:
        """Move the bar to so many expected seconds; it never shows more time left than the budget has."""
        bar = self.progress
        bar.total = done + min(max(0.0, bar.total - done), self.seconds_left())
        bar.update(done - bar.n)
        bar.refresh()

    # ---- the whole run -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Measure what the report lacks, as far as the budget goes, and write what follows from it."""
        try:
            self._begin()
            late: list[Group] = []
            done = self._once(self._groups(self.report, self.seconds_left), late)
            repetitions = range(1, REPETITIONS if self.budget < math.inf else 1)
            self._repeat(done, repetitions[: LEAST_REPETITIONS - 1])
            self._once(late)
            self._repeat(done, repetitions[LEAST_REPETITIONS - 1 :])
            self._compare()
            self._predict()
        finally:
            self._finish()

    def _begin(self) -> None:
        """Measure the machine's ceilings and the pieces of all predictions; print how long everything takes."""
        report, cells = self.report, cells_of(self.report)
        first, rows = cells[0].but(kv_caching=True), max(cell.batch_size for cell in cells)
        first = first.but(input_len=min(first.input_len, 256), batch_size=1)
        if not self.is_hand_in:  # whose minutes are few; every cell measures the ceilings, too
            ceilings = Job("the machine's ceilings", "machine", first, 0, 0.0, of_cell=False)
            self._measure(Group((ceilings,)), limited=False)
        self._calibrate(first, rows if report["preset"] in ("table", "report") else 1)
        planned = self._planned()
        groups = [group for group in planned if self._due(group, 0)]
        once, left = sum(map(self.expected, groups)), self.seconds_left()
        again = sum(self.expected(group) for group in planned if group.repeats)
        self.progress.total = self.progress.n + (
            min(once + (REPETITIONS - 1) * again, left) if left < math.inf else once
        )
        words = f"{sum(len(group.jobs) for group in groups)} jobs, each in a process of its own: all of them once take"
        words += f" about {duration(once)}"
        if left < math.inf:
            words += f", {duration(left)} of the budget are left"
            words += f"; cells are repeated up to {REPETITIONS} times" if again else ""
        if once > left:
            passed = time.monotonic() - self.began + self._whole() - self.budget  # and what is reserved for writing
            enough = math.ceil((passed + once) / 60)
            flag = "minutes" if report["command"].startswith("llama-kv report") else "budget"
            words += ".\nThe budget is too small: what does not fit is left out. Everything fits once with "
            words += f"--{flag} {enough}; --{flag} 0 measures everything once, however long it takes"
        self.progress.write(f"{words}.")

    def _calibrate(self, cell: Cell, rows: int) -> None:
        """Time the pieces of all predictions, and make a report's texts; after a death once more, without the texts."""
        report, options = self.report, dict[str, Any](rows=rows)
        if self.is_hand_in and not rows_of(report, "text"):  # first: on a busy machine nothing else may fit
            options["texts"] = {"prompts": report["plan"]["prompts"], "lengths": REPORT_LENGTHS}
            options["texts"]["seconds"] = self.seconds_left()
        name = "the texts, and how long the rest takes" if "texts" in options else "how long it will take"
        timed = Job(name, "calibrate", cell, 0, 0.0, options)
        try:
            found = self._do(timed, limited=False)
        except JobDied as death:
            report["failures"] += [f"{TEXTS}: {death}"] * ("texts" in options)
            found = self._do(replace(timed, options={"rows": rows}), limited=False)
        starting = max(0.0, self._took[name] - found["seconds"])
        report["failures"] += found.get("failures", [])
        add_result(report, found, 0)
        self.calibration = Calibration(**found["timed"], start_seconds=starting)
        self.budget -= max(WRITING, starting) if self.is_hand_in else 0.0
        self._save()

    def _planned(self) -> list[Group]:
        """Return the groups as they will be if each takes as long as expected; the report's plan stays as it is."""
        report: Report = {**self.report, "plan": deepcopy(self.report["plan"])}
        found = list[Group]()

        def left() -> float:
            return max(0.0, self.seconds_left() - sum(self.expected(one) for one in found if self._due(one, 0)))

        for group in self._groups(report, left):
            found.append(group)  # before `left` is asked again
        return found

    def _groups(self, report: Report, left: Callable[[], float]) -> Iterator[Group]:
        """Yield the groups of the preset, and after the first one the recording for the page, so that it finds time."""
        groups = GROUPS[report["preset"]](report, self.calibration, left)
        yield next(groups)
        if self.watched is not None and not self.is_hand_in and steps_of(self.folder) is None:
            yield Group((recording_job(self.watched, self.calibration),))
        yield from groups

    def _whole(self) -> float:
        """Return the seconds of the budget; infinite without one: then everything is done once."""
        return 60 * (self.report["budget_minutes"] or math.inf)

    def _due(self, group: Group, repetition: int) -> tuple[Job, ...]:
        """Return the jobs of a group that lack this repetition; one that failed is not tried again in this run."""
        done = self.report["done"]
        return tuple(job for job in group.jobs if done.get(job.name, 0) <= repetition and job.name not in self._failed)

    def _once(self, groups: Iterable[Group], late: list[Group] | None = None) -> list[Group]:
        """Do every group once if it fits; return all groups that are done.

        The very first one of cells is done in any case, except in a report, whose minutes are a promise. Once a group
        of cells does not fit, no cells of a larger batch are measured. Late groups go into `late`, if it is given.
        """
        done, smallest_left_out = list[Group](), math.inf
        for group in groups:
            if group.late and late is not None:
                late.append(group)
                continue
            jobs, batch = self._due(group, 0), group.jobs[0].cell.batch_size
            due = Group(jobs, group.repeats)
            is_cell, before = group.jobs[0].of_cell, any(one.jobs[0].of_cell for one in done)
            first = late is not None and is_cell and not (before or self.is_hand_in)
            left = self.seconds_left()
            left /= RECORDING_SHARE if group.jobs[0].name == RECORDING else 1
            fits = self.expected(due) <= left and not (group.repeats and batch > smallest_left_out)
            if jobs and not first and not fits:
                self.report["failures"] += [f"{job.name}: no room in the budget" for job in jobs]
            elif not jobs or self._measure(due, limited=not first):
                done.append(group)
                continue
            smallest_left_out = min(smallest_left_out, batch if group.repeats else math.inf)
        return done

    def _repeat(self, groups: Sequence[Group], repetitions: Iterable[int]) -> None:
        """Do the groups of cells again, each as long as it fits."""
        for repetition in repetitions:
            for group in groups:
                jobs = self._due(group, repetition)
                if group.repeats and jobs and self.expected(group) <= self.seconds_left():
                    self._measure(Group(jobs))

    def _measure(self, group: Group, *, limited: bool = True) -> bool:
        """Do a group and keep its rows; return False if the budget ended it, with none of its rows kept."""
        found_of: list[tuple[Job, dict[str, Any]]] = []
        errors: list[tuple[Job, str]] = []
        for job in group.jobs:
            trace = {"trace": job.name not in self.report["done"]} if job.kind == "cell" else {}
            try:
                found = self._do(replace(job, options={**job.options, **trace}), limited=limited)
            except OverBudgetError:
                lacking = [job for job in group.jobs if job.name not in self.report["done"]]  # not a repetition
                self.report["failures"] += [f"{job.name}: no room in the budget" for job in lacking]
                return False
            except (ValueError, JobDied) as error:
                errors.append((job, f"{'refused' if isinstance(error, ValueError) else 'died'}: {error}"))
            else:
                found_of.append((job, found))
        for job, found in found_of:
            if "page" in found:
                keep_steps(self.folder, found["page"])
            add_result(self.report, found, job.place)
            self.report["done"][job.name] = self.report["done"].get(job.name, 0) + 1
        for job, why in errors:
            again = job.name in self.report["done"]
            if not job.of_cell or (cell_row(self.report, job.place).get("path") and not again):
                self.report["failures"].append(f"{job.name}: {why}")
            elif again:
                add_note(self.report, job.place, f"a repetition failed: {why}")
            else:  # the cell has no figures of an earlier repetition
                cell_row(self.report, job.place)["error"] = why
                self._failed.add(job.name)
        judge_noise(self.report)
        self._save()
        return True

    def _save(self) -> None:
        write_json(self.report, self.folder / RESULTS)

    # ---- after the measurements --------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Compare the tokens of both modes, of the peers with ours, and of the turns of a conversation."""
        report = self.report
        report["rows"] = [row for row in report["rows"] if row["figures"] != "comparison"]
        for pair in pairs(report):
            compare_pair(report, *pair, with_margin=not self.is_hand_in)  # a process would pass a report's minutes
        compare_engines(report)
        compare_turns(report)

    def _finish(self) -> None:
        """Write what follows from the figures into the report."""
        report, over = self.report, time.monotonic() - self.began - self._whole()
        with_rates(report)
        judge_noise(report)
        report["reading"] = findings(report)
        if over >= 1:
            words = f"The run passed its budget of {report['budget_minutes']:g} minutes by {duration(over)}"
            report["reading"].append(f"{words}: jobs took longer than predicted.")
        self._save()

    def _predict(self) -> None:
        """Give what was not measured its predicted figures: cells, bytes of kinds of cache, peaks of a report."""
        preset = self.report["preset"]
        for place, cell in enumerate(cells_of(self.report)):
            if preset == "caches":
                self._predict_kind(place, cell)
            elif preset != "chat":
                self._predict_cell(place, cell)
            if self.is_hand_in:
                self._predict_peak(cell)

    def _predict_kind(self, place: int, cell: Cell) -> None:
        report = self.report
        there = {(row["figures"], row.get("context")) for row in report["rows"] if row["cell"] == place}
        rows = [] if cell_row(report, place)["error"] else predicted_kind(cell, report["plan"])
        merge(report, [row for row in rows if (row["figures"], row["context"]) not in there], place)

    def _predict_cell(self, place: int, cell: Cell) -> None:
        """Predict all figures of a cell of ours, and the time of a peer's.

        The time is off by at most what measured times differ by, of equal work, of both modes and of the first forward.
        """
        report, row, (path, pace, paces) = self.report, cell_row(self.report, place), self._path_and_paces(cell)
        can_predict = cell.engine == "llama" or cell.kv_caching in paces
        if is_measured(row) or row["error"] or cell.speculate or not can_predict:
            return
        first, *later = self.calibration.of_forwards(cell)
        seconds = [pace * first, *(one * paces.get(cell.kv_caching, 1.0) for one in later)]
        known = pace, *paces.values()
        within = max(LEAST_WITHIN, scatter(report), self.calibration.scatter, max(known) / min(known))
        report["rows"] = [one for one in report["rows"] if one["cell"] != place or one["figures"] != "memory"]
        merge(report, predicted_rows(cell, self._source(cell), seconds, path, within=within), place)

    def _predict_peak(self, cell: Cell) -> None:
        cells = cells_of(self.report)
        first = next(place for place, one in enumerate(cells) if one.batch_size == cell.batch_size)
        if cell.kv_caching not in {row["kv_caching"] for row in measured_rows(self.report, "peak", first)}:
            merge(self.report, predicted_peak(cell.but(logits="all"), self._source(cell)), first)

    def _source(self, cell: Cell) -> Source:
        """Return the model of a cell, opened once for all batch sizes and modes: this takes a second of a core."""
        key = cell.but(batch_size=1, kv_caching=True)
        if key not in self._sources:
            self._sources[key] = find_model(key)
        return self._sources[key]

    def _path_and_paces(self, cell: Cell) -> tuple[str, float, dict[bool, float]]:
        """Return the path of measured cells like this one, and how many times its prediction the largest of them took.

        Cells like this one have the same engine and weights; the paces are that of the first forward, and those of all
        later ones with the cache and without.
        """
        path, firsts, paces = "fast" if cell.fast else "plain", dict[bool, list[float]](), dict[bool, float]()
        for other, row in zip(cells_of(self.report), rows_of(self.report, "cell"), strict=True):
            if is_measured(row) and other.rounding == cell.rounding:
                path = row["path"]
                if not other.speculate:
                    first, *later = self.calibration.of_forwards(other)
                    # The first forward is the same work in both modes, unless a kind rounds or drops what it stores.
                    if cell.kv_cache == FULL or other.kv_caching == cell.kv_caching:
                        firsts[other.kv_caching] = [one / first for one in values_of(row, "first_token_seconds")]
                    rest = median_of(row, "seconds") - median_of(row, "first_token_seconds")
                    paces[other.kv_caching] = rest / sum(later) if later else 1.0
        return path, median([one for each in firsts.values() for one in each] or [1.0]), paces


def _alike(job: Job) -> tuple[Any, ...]:
    return job.kind, job.cell.rounding, job.cell.kv_caching, job.cell.speculate


def duration(seconds: float) -> str:
    """Return seconds as text: 45 s, 4.2 min."""
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
