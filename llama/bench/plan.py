"""Runs groups of jobs: each once, groups of cells again while the budget lasts, and late groups in between.

One rule decides what is measured: a group is begun if it fits into what is left of the budget, by the time that the
last jobs alike took for their work. Groups are never torn: one that the budget ends is left out as a whole. No time is
predicted; memory is, from the sizes. Finished rows are saved at once, so a run can be resumed.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from llama.bench.comparisons import add_note, add_result, compare_engines, compare_pair, compare_turns, with_rates
from llama.bench.merged import with_ratios
from llama.bench.noise import judge_noise
from llama.bench.presets import Group, Job, cells_of
from llama.bench.report.sentences import findings
from llama.bench.run.cache_kind import predicted_kind
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.measure import peak_row, predicted_memory
from llama.bench.run.models import find_model
from llama.bench.schema import NO_ROOM, Report, Row, cell_row, merge, pairs, peaks_of, rows_of
from llama.bench.statistics import LEAST_REPETITIONS

REPETITIONS, OF_A_REPORT = 5, 100  # at most; of a report as many as its minutes permit
OVERRUN = 0.2  # of the budget: a job that would end later under load is ended
WRITING = 20.0  # seconds of a report's minutes to write its files


class OverBudgetError(Exception):
    """A job was ended because the time of the whole run was over."""


def schedule(groups: Sequence[Group], repetitions: int) -> list[tuple[Group, int]]:
    """Return each group with the numbers of its repetitions, in order."""

    def turns(begin: int, end: int, which: Callable[[Group], bool]) -> list[tuple[Group, int]]:
        return [(group, number) for number in range(begin, min(end, repetitions)) for group in groups if which(group)]

    once, late = turns(0, 1, lambda group: not group.late), turns(0, 1, lambda group: group.late)
    few, more = ((1, LEAST_REPETITIONS), (LEAST_REPETITIONS, repetitions))
    return [*once, *turns(*few, lambda group: group.repeats), *late, *turns(*more, lambda group: group.repeats)]


class Run:
    """A run of groups of jobs: its report, and how long jobs took.

    waiting: called twice a second with the name of the job. save: called after every group, with a page that it made.
    began: when the budget began, of `time.monotonic`. The minutes of a report end with its files, whatever lacks then;
    other runs measure their first cells in any case.
    """

    def __init__(
        self,
        report: Report,
        groups: Sequence[Group],
        *,
        repetitions: int = 1,
        waiting: Callable[[str], None] = lambda name: None,
        save: Callable[[str | None], None] = lambda page: None,
        began: float | None = None,
    ) -> None:
        self.report, self.groups = report, groups
        self.waiting, self.save = waiting, save
        self.is_hand_in = report["preset"] == "report"
        self.repetitions = OF_A_REPORT if self.is_hand_in and report["budget_minutes"] else repetitions
        self.budget = 60 * (report["budget_minutes"] or math.inf) - WRITING * self.is_hand_in
        self.began = time.monotonic() if began is None else began
        self._start = math.inf  # seconds of the shortest job, as if it was all start of a process
        self._pace: dict[tuple[Any, ...], float] = {}  # seconds that the last job alike took for a unit of its work
        self._failed = set[str]()  # jobs whose cell has their error

    def seconds_left(self) -> float:
        """Return the seconds of the budget that are left."""
        return self.began + self.budget - time.monotonic()

    def run(self) -> None:
        """Measure what the report lacks, as far as the budget goes, and write what follows from it."""
        try:
            self.measure()
            self._compare()
            self._predict()
        finally:
            with_rates(self.report)
            with_ratios(self.report)
            judge_noise(self.report)
            self.report["reading"] = findings(self.report)
            self.save(None)

    def measure(self) -> None:
        """Measure the machine, and then every group that is due and fits; of a report the texts come first."""
        if not self.is_hand_in:
            ceilings = Job("the machine's ceilings", "machine", cells_of(self.report)[0], 0, of_cell=False)
            self._measure((ceilings,), limited=False)
        done, is_first = self.report["done"], True
        for group, repetition in schedule(self.groups, self.repetitions):
            jobs = [job for job in group.jobs if done.get(job.name, 0) == repetition and job.name not in self._failed]
            start = self._start if self._start < math.inf else 0.0  # no job has ended yet
            expected = sum(start + self._pace.get(_alike(job), 0.0) * job.work for job in jobs)
            must = is_first and group.jobs[0].of_cell and not self.is_hand_in
            if jobs and not must and expected >= self.seconds_left():
                self._leave_out(jobs)
            elif jobs:
                self._measure(jobs, limited=not must)
            is_first = is_first and not must

    def _leave_out(self, jobs: Sequence[Job]) -> None:
        """List the jobs without rows; a repetition that is left out is not listed."""
        lacking = [job for job in jobs if job.name not in self.report["done"]]
        self.report["failures"] += [f"{job.name}: {NO_ROOM}" for job in lacking]

    def _measure(self, jobs: Sequence[Job], *, limited: bool = True) -> None:
        """Do the jobs of a group and keep their rows; none of them if the budget ends one."""
        done = self.report["done"]
        found_of: list[tuple[Job, dict[str, Any]]] = []
        errors: list[tuple[Job, str]] = []
        for job in jobs:
            try:
                found_of.append((job, self._do(job, limited=limited)))
            except OverBudgetError:
                return self._leave_out(jobs)
            except (ValueError, JobDied) as error:
                errors.append((job, f"{'refused' if isinstance(error, ValueError) else 'died'}: {error}"))
        for job, found in found_of:
            add_result(self.report, found, job.place)
            done[job.name] = done.get(job.name, 0) + 1
        for job, why in errors:
            again = job.name in done
            if not job.of_cell or (cell_row(self.report, job.place).get("path") and not again):
                self.report["failures"].append(f"{job.name}: {why}")
            elif again:
                add_note(self.report, job.place, f"a repetition failed: {why}")
            else:  # the cell has no figures of an earlier repetition
                cell_row(self.report, job.place)["error"] = why
                self._failed.add(job.name)
        judge_noise(self.report)
        return self.save(next((found["page"] for _, found in found_of if "page" in found), None))

    def _do(self, job: Job, *, limited: bool) -> dict[str, Any]:
        """Run a job. If `limited`, raise OverBudgetError once the budget is passed by OVERRUN."""
        started, overrun = time.monotonic(), 0.0 if self.is_hand_in else OVERRUN
        end = self.began + (1 + overrun) * self.budget

        def waiting() -> None:
            self.waiting(job.name)
            if limited and time.monotonic() > end:
                raise OverBudgetError

        trace = {"trace": job.name not in self.report["done"]} if job.kind == "cell" else {}
        done = run_job(job.kind, job.cell, waiting=waiting, **job.options, **trace)
        took = time.monotonic() - started
        self._start = min(self._start, took)
        self._pace[_alike(job)] = (took - self._start) / job.work
        return done

    def _compare(self) -> None:
        """Compare the tokens of both modes, of the peers with ours, and of the turns of a conversation."""
        report = self.report
        report["rows"] = [row for row in report["rows"] if row["figures"] != "comparison"]
        for pair in pairs(report):
            compare_pair(report, *pair, with_margin=not self.is_hand_in)  # a process would pass a report's minutes
        compare_engines(report)
        compare_turns(report)

    def _predict(self) -> None:
        """Give cells that were not measured their memory, and a report its peaks: these follow from the sizes."""
        report = self.report
        for place, cell in enumerate(cells_of(report)):
            rows, there = list[Row](), rows_of(report, "quality", place) + rows_of(report, "step", place)
            if report["preset"] == "caches" and not cell_row(report, place)["error"]:
                lacks = len(there) <= len(report["plan"]["contexts"])
                rows = predicted_kind(cell, report["plan"]) if lacks else []
            elif report["preset"] in ("table", "report") and cell.engine == "llama" and not cell.speculate:
                rows = [] if rows_of(report, "memory", place) else predicted_memory(cell, find_model(cell))
            merge(report, rows, place)
            if self.is_hand_in and (cell.batch_size, cell.kv_caching) not in peaks_of(report):
                merge(report, [peak_row(cell.but(logits="all"), find_model(cell))], 0)


def _alike(job: Job) -> tuple[Any, ...]:
    return job.kind, job.cell.rounding, job.cell.kv_caching, job.cell.speculate
