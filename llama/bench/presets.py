"""The presets: many cells in turn, each repetition in a process of its own, within a budget of time.

`table` measures batch 1, 8 and 16 with the cache on and off; `sweep` how the difference grows with what is generated,
the context and the batch. What is finished is saved at once, and a run that was interrupted can go on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llama.bench.book import Book
from llama.bench.cell import Cell
from llama.bench.cells import compare_modes, comparison_words, gathered, note_machine, with_figures
from llama.bench.grids import pairs
from llama.bench.jobs import JobDied, run_job
from llama.bench.peers import GPT2
from llama.bench.probe import crossover, grid
from llama.bench.progress import Progress
from llama.bench.reading import fits, growth, read
from llama.bench.record import CellRecord, Sweep
from llama.costs import forwards

REPETITIONS = 5
BATCHES = (1, 8, 16)
SWEEP_BATCHES = [1, 2, 4, 8, 16]
GENERATED = (10, 20, 50, 100, 200)
CACHE_LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
CONTEXTS = [16, 32, 64, 128, 256, 512, 1024, 2048]

_STARTING = 3.0  # seconds that a process needs before it loads a model, about
_PEER_IS_SLOWER = 2.0  # what is assumed of an engine before it has run once


def table_cells(base: Cell, peers: Sequence[str]) -> list[Cell]:
    """Return the cells of the table: every batch size, the cache on and off, we and every peer in turn."""
    ours = [] if base.model in GPT2 else ["llama"]
    return [
        base.but(batch_size=batch, kv_caching=kv_caching, engine=engine)
        for batch in BATCHES
        for kv_caching in (True, False)
        for engine in [*ours, *peers]
        if kv_caching or engine != "llama.cpp"  # it has no way to run without its cache
    ]


def sweep_cells(base: Cell) -> list[Cell]:
    """Return the two long generations out of which the speed-up at every shorter length is read."""
    longest = base.but(batch_size=1, output_len=max(GENERATED))
    return [longest.but(kv_caching=True), longest.but(kv_caching=False)]


@dataclass
class Session:
    """A run of a preset: where it writes, how long it may take, and how long each piece is expected to."""

    book: Book
    deadline: float
    progress: Progress
    calibration: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)

    def has_room(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.deadline

    def do(self, what: str, kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
        """Run a job with the bar going on, and remember how long it took."""
        started = time.monotonic()
        self.progress.begin(what, self.expected.get(what, 0.0))
        result = run_job(kind, cell, waiting=self.progress.tick, **job)
        self.expected[what] = time.monotonic() - started
        return result


def run_table(session: Session) -> None:
    """Measure the table: every cell once, the crossovers, then the cells again while the budget lasts."""
    calibrate(session)
    plan(session)
    for repetition in range(REPETITIONS):
        one_round(session, repetition)
        if repetition == 0:
            measure_crossovers(session)
    finish(session)


def run_sweep(session: Session) -> None:
    """Measure the curves, then the long generations while the budget lasts."""
    calibrate(session)
    plan(session)
    one_round(session, 0)
    measure_curves(session)
    for repetition in range(1, REPETITIONS):
        one_round(session, repetition)
    finish(session)


def calibrate(session: Session) -> None:
    """Measure the machine's ceilings, and what the prediction of all other times is made of."""
    cell = session.book.cells[0].but(engine="llama", kv_caching=True, batch_size=1)
    found = session.do("the machine's ceilings", "calibrate", cell)
    note_machine(session.book.report, found)
    session.calibration = found
    session.book.save()


def plan(session: Session) -> None:
    """Say how long it will take, before it starts."""
    for cell in session.book.cells:
        session.expected[cell.name] = expected_seconds(cell, session.calibration)
    left = planned(session)
    session.progress.plan(sum(left))
    once, budget = sum(session.expected.values()), max(0.0, session.deadline - time.monotonic())
    session.progress.say(
        f"{len(session.book.cells)} cells, {len(left)} repetitions, every one in a process of its own: about "
        f"{duration(sum(left))} in all. A round takes about {duration(once)}, the budget is {duration(budget)}; "
        f"what does not fit into it is repeated less than {REPETITIONS} times."
    )


def planned(session: Session) -> list[float]:
    """Return how long each repetition is expected to take that is still to come, in turn, as far as the budget goes."""
    now, seconds = time.monotonic(), list[float]()
    for repetition in range(REPETITIONS):
        for cell, record in zip(session.book.cells, session.book.report["cells"], strict=True):
            expected = session.expected[cell.name]
            fits = repetition == 0 or now + sum(seconds) + expected <= session.deadline
            if record["error"] is None and len(record["samples"]) <= repetition and fits:
                seconds.append(expected)
    return seconds


def expected_seconds(cell: Cell, calibration: dict[str, Any]) -> float:
    """Predict how long a repetition of a cell takes, from a prefill and a step of one row."""
    token = calibration["prefill_seconds"] / calibration["input_len"]
    fed = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
    seconds: list[float] = [max(calibration["step_seconds"], cell.batch_size * seqlen * token) for _, seqlen in fed]
    slower = 1.0 if cell.engine == "llama" else _PEER_IS_SLOWER
    loading: float = calibration["load_seconds"]
    return _STARTING + loading + slower * (sum(seconds) + sum(seconds[:2]))


def duration(seconds: float) -> str:
    """Return seconds in words: 45 s, 4.2 min."""
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"


def one_round(session: Session, repetition: int) -> None:
    """Measure every cell once more, in turn, so that a machine that drifts does so for all of them.

    The first repetition always runs; a later one only where it is expected to end within the budget.
    """
    for place, cell in enumerate(session.book.cells):
        record = session.book.report["cells"][place]
        if len(record["samples"]) != repetition or record["error"] is not None:
            continue
        if repetition > 0 and not session.has_room(session.expected[cell.name]):
            continue
        session.book.put(place, repeat(session, cell, record))
        session.progress.plan(sum(planned(session)))


def repeat(session: Session, cell: Cell, record: CellRecord) -> CellRecord:
    """Return the record with one more repetition, or with why there is none."""
    try:
        done = session.do(cell.name, "cell", cell, ledger=record["ledger"] is None)
    except (ValueError, JobDied) as error:
        if record["samples"]:
            return {**record, "notes": [*record["notes"], f"a repetition failed: {error}"]}
        return {**record, "error": str(error)}
    note_machine(session.book.report, done)
    return with_figures(gathered(record, done["record"]), session.book.report["ceilings"])


def measure_crossovers(session: Session) -> None:
    """Time single steps by context, for every batch of ours in the table, as far as the budget goes."""
    report = session.book.report
    known = {entry["batch_size"] for entry in report["crossovers"]}
    for cell in session.book.cells:
        if cell.engine != "llama" or not cell.kv_caching or cell.batch_size in known:
            continue
        contexts = grid(cell.input_len)
        what = f"steps at batch {cell.batch_size}"
        token = session.calibration["prefill_seconds"] / cell.input_len
        session.expected[what] = _STARTING + 4 * cell.batch_size * sum(contexts) * token
        if session.has_room(session.expected[what]):
            report["crossovers"].append(crossover(session.do(what, "steps", cell, contexts=contexts)["steps"]))
            session.book.save()


def measure_curves(session: Session) -> None:
    """Measure what the sweep is about beside the long generations: caches, contexts and batches."""
    report = session.book.report
    cell = session.book.cells[0]
    sweep: Sweep = report["sweep"] or {"growth": [], "cache": [], "contexts": [], "batches": [], "fits": []}
    report["sweep"] = sweep
    limit = session.calibration["max_seq_len"]
    if not sweep["cache"]:
        lengths = [length for length in CACHE_LENGTHS if length <= limit]
        sweep["cache"] = session.do("cache sizes", "caches", cell, lengths=lengths)["sizes"]
        session.book.save()
    if not sweep["contexts"]:
        contexts = [length for length in CONTEXTS if length <= limit]
        sweep["contexts"] = session.do("steps by context", "steps", cell, contexts=contexts)["steps"]
        sweep["fits"] = fits(sweep["contexts"])
        session.book.save()
    for batch in SWEEP_BATCHES:
        if all(step["batch_size"] != batch for step in sweep["batches"]):
            one = cell.but(batch_size=batch)
            sweep["batches"] += session.do(f"steps at batch {batch}", "steps", one, contexts=[cell.input_len])["steps"]
            session.book.save()


def finish(session: Session) -> None:
    """Compare the modes' tokens and read what follows from the numbers."""
    report = session.book.report
    report["cells"] = [with_figures(record, report["ceilings"]) for record in report["cells"]]
    report["comparisons"] = [compare_modes(on, off) for on, off in pairs(report)]
    for comparison in report["comparisons"]:
        for record in report["cells"]:
            if (record["cell"]["engine"], record["cell"]["batch_size"]) == (
                comparison["engine"],
                comparison["batch_size"],
            ):
                record["notes"] = list(dict.fromkeys([*record["notes"], comparison_words(comparison)]))
    if report["sweep"] is not None:
        report["sweep"]["growth"] = [entry for on, off in pairs(report) for entry in growth(on, off, GENERATED)]
    report["reading"] = read(report)
    session.book.save()
