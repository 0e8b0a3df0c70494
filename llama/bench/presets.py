"""The presets: many cells in turn, each repetition in a process of its own, within a budget of time.

`table` measures batch 1, 8 and 16 with the cache on and off; `sweep` how the difference grows with what is generated,
the context and the batch. What is finished is saved at once, and a run that was interrupted can go on.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from llama.bench.cell import Cell, Rounding, read_engine, rounding_of
from llama.bench.quiet import judge_quiet
from llama.bench.report.findings import findings, fits, growth
from llama.bench.report.tables import comparison_words, pairs, stands_apart
from llama.bench.run.aggregate import (
    aggregated,
    check_machine,
    compare_modes,
    first_divergence,
    raise_ceilings,
    with_figures,
)
from llama.bench.run.directory import RunDirectory
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.peers import GPT2
from llama.bench.run.step_times import ENOUGH, context_lengths, crossover
from llama.bench.schema import Agreement, CellRecord, Report, Sweep
from llama.bench.statistics import best_ceilings
from llama.bench.texts import text_path
from llama.costs import RELEASED, forwards
from llama.host.machine import Ceilings

REPETITIONS = 5
BATCHES = (1, 8, 16)
SWEEP_BATCHES = [1, 2, 4, 8, 16]
GENERATED = (10, 20, 50, 100, 200)
CACHE_LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
CONTEXTS = [16, 32, 64, 128, 256, 512, 1024, 2048]
AGREED_ON = 1024  # tokens of a text: 1 % of them is 10
RECORDING, WATCHED_STEPS = "the page to step through", 32

_STARTING = 4.0  # seconds that a process needs before it loads a model, and for the ceilings at its end, about
PEER_IS_SLOWER = 2.0  # what is assumed of an engine before it has run once


def table_cells(base: Cell, engines: Sequence[str]) -> list[Cell]:
    """Return the cells of the table: every batch size, the cache on and off, we as asked and every engine in turn.

    `engines` are names of peers and ways of our own, such as llama.cpp:int8 and llama:fast (see `read_engine`).
    """
    return [
        variant.but(batch_size=batch, kv_caching=kv_caching)
        for batch in BATCHES
        for kv_caching in (True, False)
        for variant in variants(base, engines)
        if kv_caching or variant.engine != "llama.cpp"  # it has no way to run without its cache
    ]


def variants(base: Cell, engines: Sequence[str]) -> list[Cell]:
    """Return a cell for us as asked, and for every engine in turn; refuse one that is named twice."""
    found = [] if base.model in GPT2 else [base]
    for variant in (base.but(**read_engine(engine)) for engine in engines):
        if variant in found:
            raise ValueError(f"{variant.name} would stand in the table twice; name every engine once")
        found.append(variant)
    return found


def sweep_cells(base: Cell) -> list[Cell]:
    """Return the two long generations out of which the speed-up at every shorter length is read."""
    longest = base.but(batch_size=1, output_len=max(GENERATED))
    return [longest.but(kv_caching=True), longest.but(kv_caching=False)]


@dataclass
class Session:
    """A run of a preset: where it writes, how long it may take, and how long each piece is expected to."""

    directory: RunDirectory
    deadline: float
    progress: Any  # see `llama.cli.progress.seconds_bar`
    calibration: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    curves: list[str] = field(default_factory=list)  # jobs beside the cells that are still to come
    # The last cell's time over its prediction, of each engine.
    pace: dict[Rounding, float] = field(default_factory=dict)
    watched: Cell | None = None  # the cell whose model the page shows step by step
    reserved: float = 0.0  # seconds that `room` leaves for that recording

    @property
    def report(self) -> Report:
        return self.directory.report

    @property
    def cells(self) -> list[Cell]:
        return self.directory.cells

    @property
    def keeps_to_budget(self) -> bool:
        """Tell whether first measurements are left out where they do not fit: not with a budget of 0, or none."""
        return bool(self.report["budget_minutes"])

    @property
    def room(self) -> float:
        """The seconds that are left."""
        return max(0.0, self.deadline - self.reserved - time.monotonic())

    def has_room(self, what: str, *, must: bool = False) -> bool:
        """Tell whether a job fits, or `must` run where no budget is kept to; note that it was left out where not."""
        fits = self.expected[what] <= self.room or (must and not self.keeps_to_budget)
        if not fits:
            self.report["failures"].append(f"{what}: no room in the budget")
        return fits

    def do(self, what: str, kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
        """Run a job with the bar going on, and remember how long it took."""
        started = time.monotonic()
        self.progress.set_description_str(what)
        result = run_job(kind, cell, waiting=self.progress.refresh, **job)
        self.progress.update(self.expected.get(what, 0.0))
        self.expected[what] = time.monotonic() - started
        return result

    @contextmanager
    def noting_failure(self, what: str) -> Iterator[None]:
        """Let what can be done without go wrong, and keep why, or what came of it, on disk too."""
        try:
            yield
        except (ValueError, JobDied) as error:
            self.report["failures"].append(f"{what}: {error}")
        self.directory.save()


def run_session(session: Session) -> None:
    """Measure a preset: every cell once, its curves, then the cells again while the budget lasts."""
    is_table = session.report["preset"] == "table"
    begin(session, table_curves(session) if is_table else sweep_curves(session))
    one_round(session, 0)
    if is_table:
        measure_agreements(session)
    (measure_crossovers if is_table else measure_curves)(session)
    for repetition in range(1, REPETITIONS):
        one_round(session, repetition)
    finish(session)


def table_curves(session: Session) -> dict[str, tuple[int, int]]:
    """Return the jobs beside the table's cells: about how many tokens each feeds, and how many contexts it times.

    A step warms up, and is then timed three times or more often.
    """
    steps = {}
    for what, cell in crossover_cells(session).items():
        contexts = context_lengths(cell.input_len)
        steps[what] = 4 * cell.batch_size * sum(contexts), len(contexts)
    return dict.fromkeys(agreement_cells(session), (AGREED_ON, 0)) | steps


def sweep_curves(session: Session) -> dict[str, tuple[int, int]]:
    """Return the jobs beside the sweep's cells, as `table_curves` does."""
    fed = 4 * session.cells[0].input_len
    batches = {f"steps at batch {batch}": (fed * batch, 1) for batch in SWEEP_BATCHES}
    return {"cache sizes": (0, 0), "steps by context": (4 * sum(CONTEXTS), len(CONTEXTS)), **batches}


def begin(session: Session, curves: dict[str, tuple[int, int]]) -> None:
    """Measure what all begins with, and say how long all will take.

    `curves` are the other jobs by name, see `table_curves`. A short step is repeated for ENOUGH seconds in both modes.
    """
    measure_machine(session, session.cells[0])
    session.expected |= {cell.name: expected_seconds(cell, session.calibration) for cell in session.cells}
    for name, (tokens, contexts) in curves.items():
        session.expected[name] = expected_of_tokens(tokens, session.calibration) + 2 * ENOUGH * contexts
    session.curves = list(curves)
    once = sum(expected_of(session, chain(*due(session, 0)))) + sum(session.expected[name] for name in curves)
    words = (
        f"{len(session.cells)} cells and {len(curves)} curves, each repetition in a process of its own: about "
        f"{duration(plan(session))} in all. Everything once takes about {duration(once)}, of the budget are left "
        f"{duration(session.room)}; cells are repeated up to {REPETITIONS} times as far as it goes."
    )
    session.progress.write("\n".join([words, *too_little(session, once)]))


def measure_machine(session: Session, cell: Cell) -> None:
    """Measure the machine's ceilings, and what a prediction of all times is made of, with the sizes of a cell."""
    report, cell = session.report, cell.but(kv_caching=True)
    machine = session.do("the machine's ceilings", "machine", cell)
    check_machine(report, machine["environment"])
    report["ceilings"] = best_ceilings(report["ceilings"], machine["ceilings"])
    session.calibration = session.do("how long it will take", "calibrate", cell)
    report["model"] = session.calibration["model"]
    if session.watched is not None:
        reserve_recording(session, session.watched)
    session.directory.save()


def reserve_recording(session: Session, cell: Cell) -> None:
    """Predict how long the recording for the page takes, and reserve that time unless it is too much of the budget.

    The recording generates twice with the cache and once without. A repetition may end late, hence half as much again.
    """
    modes = (cell.but(batch_size=1, input_len=4, output_len=WATCHED_STEPS, kv_caching=on) for on in (True, True, False))
    starts = expected_of_tokens(0, session.calibration)  # one process, and each prediction has its own
    seconds = sum(expected_seconds(mode, session.calibration) for mode in modes) - 2 * starts
    session.expected[RECORDING] = seconds
    session.reserved = 1.5 * seconds if seconds <= session.room / 10 else 0.0


def due(session: Session, repetition: int) -> list[list[int]]:
    """Return the places of the cells that lack this repetition, in groups of one batch and engine, the smallest first.

    A group is a pair with the cache on and off, which says nothing apart; llama.cpp's, which has one mode, is one cell.
    """
    found: dict[Cell, list[int]] = {}
    for place, (cell, record) in enumerate(zip(session.cells, session.report["cells"], strict=True)):
        if record["error"] is None and len(record["samples"]) <= repetition:
            found.setdefault(cell.but(kv_caching=True), []).append(place)
    return sorted(found.values(), key=lambda places: session.cells[places[0]].batch_size)


def expected_of(session: Session, places: Iterable[int]) -> list[float]:
    """Return how long a repetition of each of these cells is expected to take: as long as the last, or as predicted.

    A prediction assumes an idle machine, so the cells of an engine that was slower than predicted correct the others.
    """
    cells, records = session.cells, session.report["cells"]

    def pace(place: int) -> float:
        return 1.0 if records[place]["samples"] else session.pace.get(rounding_of(records[place]["cell"]), 1.0)

    return [session.expected[cells[place].name] * pace(place) for place in places]


def first_round(session: Session) -> list[int]:
    """Return the places of the cells that get a first repetition: whole pairs, until one does not fit in the budget.

    The first pair of a run always gets one.
    """
    places: list[int] = []
    left = due(session, 0)
    none_yet = sum(map(len, left)) == len(session.cells)
    for pair in left:
        fits = sum(expected_of(session, [*places, *pair])) <= session.room
        if session.keeps_to_budget and not fits and not (none_yet and not places):
            break
        places += pair
    return places


def too_little(session: Session, once: float) -> list[str]:
    """Say what a budget leaves out, and with which flags everything fits; nothing where it does."""
    minutes = session.report["budget_minutes"]
    if not minutes or once <= session.room:
        return []
    first = first_round(session)
    left_out = set(chain(*due(session, 0))) - set(first)
    enough = math.ceil((60 * minutes - session.room + once) / 60)
    flags = [f"--budget {enough}", *shorter(session)]
    names = "; ".join(session.cells[place].name for place in sorted(left_out)) or "some curves"
    too_small = "The budget is too small, and"
    if sum(expected_of(session, first)) > session.room:
        pair = " and ".join(session.cells[place].name for place in first)
        too_small = f"The budget is too small for any pair of cells. The run still measures {pair};"
    return [
        f"{too_small} left out are: {names}. "
        f"Everything fits once with {' or with '.join(flags)}; --budget 0 measures every cell once, whatever it takes."
    ]


def shorter(session: Session) -> list[str]:
    """Return the flag of the longest output, and of the longest prompt, halved, with which all cells fit once."""
    base, found = session.cells[0], []
    of_table = ["output_len"] if session.report["preset"] == "table" else []  # the sweep has a length of its own
    for name in [*of_table, *(["input_len"] if base.text is None else [])]:
        lengths = (getattr(base, name) >> halved for halved in range(1, 16))
        for length in (length for length in lengths if length > 1):
            cells = [session.cells[place].but(**{name: length}) for place in chain(*due(session, 0))]
            if sum(expected_seconds(cell, session.calibration) for cell in cells) <= session.room:
                found.append(f"--{name} {length}")
                break
    return found


def plan(session: Session) -> float:
    """Return how long all is expected to take that is still to come, as far as the budget goes, and tell the bar."""
    first, room = first_round(session), session.room
    seconds = expected_of(session, first)
    for curve in (session.expected[name] for name in session.curves):
        whatever = session.report["preset"] == "sweep" and not session.keeps_to_budget
        seconds += [curve] if whatever or sum(seconds) + curve <= room else []
    for repetition in range(1, REPETITIONS):
        for pair in due(session, repetition):
            expected = expected_of(session, pair)
            measured = all(session.report["cells"][place]["samples"] or place in first for place in pair)
            if measured and sum(seconds + expected) <= room:
                seconds += expected
    session.progress.total = session.progress.n + sum(seconds)
    return sum(seconds)


def overrun(session: Session) -> list[str]:
    """Return a sentence about the time by which a run has passed its budget; none if it kept to it, or has none."""
    over = time.monotonic() - session.deadline
    if not session.keeps_to_budget or over < 1:
        return []
    minutes = session.report["budget_minutes"]
    return [f"The run passed its budget of {minutes:g} minutes by {duration(over)}: jobs took longer than predicted."]


def expected_seconds(cell: Cell, calibration: dict[str, Any]) -> float:
    """Predict how long a repetition of a cell takes, from a prefill and a step of one row."""
    token = calibration["prefill_seconds"] / calibration["input_len"]
    fed = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
    seconds: list[float] = [max(calibration["step_seconds"], cell.batch_size * seqlen * token) for _, seqlen in fed]
    slower = 1.0 if cell.engine == "llama" else PEER_IS_SLOWER
    return expected_of_tokens(0, calibration) + slower * (sum(seconds) + sum(seconds[:2]))


def expected_of_tokens(tokens: int, calibration: dict[str, Any]) -> float:
    """Predict how long a process takes that loads the model and feeds it so many tokens, many at a time."""
    loading: float = calibration["load_seconds"]
    return _STARTING + loading + tokens * float(calibration["prefill_seconds"]) / int(calibration["input_len"])


def duration(seconds: float) -> str:
    """Return seconds as text: 45 s, 4.2 min."""
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"


def one_round(session: Session, repetition: int) -> None:
    """Measure every pair of cells once more, in turn, so that a machine that drifts does so for all of them.

    A pair is repeated if both its cells are expected to end within the budget. For the first repetition see
    `first_round`: what it leaves out is noted.
    """
    for pair in due(session, repetition):
        records = [session.report["cells"][place] for place in pair]
        if repetition == 0 and pair[0] not in first_round(session):
            session.report["failures"] += [f"{session.cells[place].name}: no room in the budget" for place in pair]
            continue
        again = all(record["samples"] for record in records) and sum(expected_of(session, pair)) <= session.room
        if repetition > 0 and not again:
            continue
        for place, record in zip(pair, records, strict=True):
            session.report["cells"][place] = repeat(session, session.cells[place], record)
            judge_quiet(session.report)
            session.directory.save()
            plan(session)


def repeat(session: Session, cell: Cell, record: CellRecord) -> CellRecord:
    """Return the record with one more repetition, or with why there is none."""
    try:
        predicted = session.expected[cell.name]
        done = session.do(cell.name, "cell", cell, trace=not record["samples"])
        if not record["samples"]:
            session.pace[rounding_of(record["cell"])] = max(1.0, session.expected[cell.name] / predicted)
    except (ValueError, JobDied) as error:
        if record["samples"]:
            return {**record, "notes": [*record["notes"], f"a repetition failed: {error}"]}
        return {**record, "error": fate_of(error)}
    check_machine(session.report, done["environment"])
    if "ceilings" in done:
        session.report["ceilings"] = best_ceilings(session.report["ceilings"], done["ceilings"])
    return with_figures(aggregated(record, done["record"]), session.report["ceilings"])


def fate_of(error: ValueError | JobDied) -> str:
    """Return how a report calls a job that did not come to its end."""
    return f"{'refused' if isinstance(error, ValueError) else 'died'}: {error}"


def crossover_cells(session: Session) -> dict[str, Cell]:
    """Return a job and a cell for each batch of ours whose crossover is not known; of several ways, the first's."""
    first, batches = session.cells[0], dict.fromkeys(cell.batch_size for cell in session.cells)
    known = {entry["batch_size"] for entry in session.report["crossovers"]}
    left = [] if first.engine != "llama" else [batch for batch in batches if batch not in known]
    return {f"steps at batch {batch}": first.but(batch_size=batch, kv_caching=True) for batch in left}


def measure_crossovers(session: Session) -> None:
    """Time single steps by context, for every batch of ours in the table, as far as the budget goes."""
    for what, cell in crossover_cells(session).items():
        session.curves.remove(what)
        if not session.has_room(what):
            continue
        with session.noting_failure(what):
            steps = session.do(what, "steps", cell, contexts=context_lengths(cell.input_len))["steps"]
            session.report["crossovers"].append(crossover(steps))


def agreement_cells(session: Session) -> dict[str, Cell]:
    """Return a job and a cell for each way with rounded weights whose agreement is not known, and float32's before.

    There is none where weights are random, of which every token is about as likely as all others.
    """
    known = {rounding_of(one) for one in session.report["agreements"]}
    rounded = [cell for cell in session.cells if cell.quantize is not None and cell.model not in RELEASED]
    left = [cell for cell in rounded if rounding_of(cell.as_json()) not in known]
    job = {"batch_size": 1, "input_len": AGREED_ON, "output_len": 1, "kv_caching": True, "text": None}
    whole = {
        "engine": "llama",
        "fast": False,
        "quantize": None,
        "activations": 16,
        "dtype": "fp32",
        "kv_cache": "static",
    }
    ways = dict.fromkeys(cell.but(**job) for cell in left)
    cells = [cell.but(**whole) for cell in list(ways)[:1]] + list(ways)
    return {f"top-1 of {cell.name}": cell for cell in cells}


def measure_agreements(session: Session) -> None:
    """Count, once for each way with rounded weights, how often its most likely token is float32's."""
    reference: list[int] | None = None
    for what, cell in agreement_cells(session).items():
        session.curves.remove(what)
        if (cell.quantize is not None and reference is None) or not session.has_room(what, must=True):
            continue
        with session.noting_failure(what):
            tokens = min(AGREED_ON, session.calibration["max_seq_len"] - 1)
            done = session.do(what, "most_likely", cell.but(input_len=tokens))
            if reference is None:
                reference = done["ids"]
            else:
                session.report["agreements"].append(agreement(cell, done, reference))


def agreement(cell: Cell, done: dict[str, Any], reference: Sequence[int]) -> Agreement:
    """Return what a way's most likely tokens are beside the reference's."""
    assert cell.quantize is not None
    same = sum(one == other for one, other in zip(done["ids"], reference, strict=True))
    return {
        "engine": cell.engine,
        "fast": cell.fast,
        "quantize": cell.quantize,
        "activations": cell.activations,
        "path": done["path"],
        "text": text_path().name,
        "tokens": len(reference),
        "top1_agreement": same / len(reference),
    }


def measure_curves(session: Session) -> None:
    """Measure what the sweep is about beside the long generations: caches, contexts and batches."""
    report, cell, limit = session.report, session.cells[0], session.calibration["max_seq_len"]
    sweep: Sweep = report["sweep"] or {"growth": [], "cache": [], "contexts": [], "batches": [], "fits": []}
    report["sweep"] = sweep
    session.curves.clear()
    if not sweep["cache"] and session.has_room("cache sizes", must=True):
        with session.noting_failure("cache sizes"):
            lengths = [length for length in CACHE_LENGTHS if length <= limit]
            sweep["cache"] = session.do("cache sizes", "caches", cell, lengths=lengths)["sizes"]
    if not sweep["contexts"] and session.has_room("steps by context", must=True):
        with session.noting_failure("steps by context"):
            contexts = [length for length in CONTEXTS if length <= limit]
            done = session.do("steps by context", "steps", cell, contexts=contexts)
            slope = predicted_slope(cell, done["position_bytes"], report["ceilings"])
            sweep["contexts"], sweep["fits"] = done["steps"], fits(done["steps"], predicted_slope=slope)
    for batch in SWEEP_BATCHES:
        what, known = f"steps at batch {batch}", any(step["batch_size"] == batch for step in sweep["batches"])
        if not known and session.has_room(what, must=True):
            with session.noting_failure(what):
                done = session.do(what, "steps", cell.but(batch_size=batch), contexts=[cell.input_len])
                sweep["batches"] += done["steps"]


def predicted_slope(cell: Cell, position_bytes: int, ceilings: Ceilings | None) -> float | None:
    """Return the seconds that a static cache's next position takes to read; the ceilings are those of one process."""
    if ceilings is None or cell.kv_cache != "static" or cell.ranks > 1:
        return None
    return position_bytes / ceilings["read_bytes_per_second"]


def finish(session: Session) -> None:
    """Compare the modes' tokens, and the peers' with ours, and read what follows from the numbers."""
    report = session.report
    raise_ceilings(report)
    judge_quiet(report)
    report["comparisons"] = []
    for on, off in pairs(report):
        with session.noting_failure(f"the comparison at batch {on['cell']['batch_size']}"):
            report["comparisons"].append(compare_modes(on, off))
            for record in (on, off):
                note(record, comparison_words(report["comparisons"][-1]))
    compare_peers(report)
    if report["sweep"] is not None:
        report["sweep"]["growth"] = [entry for on, off in pairs(report) for entry in growth(on, off, GENERATED)]
    report["reading"] = findings(report)
    session.directory.save()


def compare_peers(report: Report) -> None:
    """Note for each peer's cell whether it made the tokens that ours did, on the same weights and prompts.

    Of several ways of ours the plain one counts; quantized weights are other weights.
    """

    def key(record: CellRecord) -> tuple[int, bool]:
        return record["cell"]["batch_size"], record["cell"]["kv_caching"]

    whole = [record for record in report["cells"] if record["ids"] and record["cell"]["quantize"] is None]
    own = [record for record in whole if record["cell"]["engine"] == "llama"]
    ours = {key(record): record["ids"] for record in sorted(own, key=stands_apart, reverse=True)}  # the plain one last
    for record in whole:
        if record["cell"]["engine"] != "llama" and key(record) in ours:
            where = first_divergence(ours[key(record)], record["ids"])
            apart = "" if where is None else f"from token {where['token']} of row {where['row']} on "
            note(record, "made the same tokens as we did" if where is None else f"{apart}made other tokens than we did")


def note(record: CellRecord, words: str) -> None:
    """Add a note that is not there yet."""
    record["notes"] = list(dict.fromkeys([*record["notes"], words]))
