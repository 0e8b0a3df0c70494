"""The preset `caches`: kinds of cache beside the full one, on bytes, time and quality, within a budget of time.

First every kind's bytes and step times, which take seconds; what these leave of the budget decides on how many tokens
the quality is measured. Each kind has a process of its own for both, and what is measured is saved at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.presets import Session, duration, expected_of_tokens, fate_of, measure_machine
from llama.bench.quiet import beside_others
from llama.bench.report.caches import cache_findings
from llama.bench.run.cache_kind import STEPS
from llama.bench.run.jobs import JobDied
from llama.bench.run.needle import DEPTHS, LENGTHS, SEEDS
from llama.bench.schema import Caches, CachesPlan, KindRecord, Report, new_report
from llama.kv_cache import Cache, KVCache, cache_kind
from llama.kv_cache.window import DEFAULT_SINKS

FULL = "static"  # the kind that the others are held against
TEXT = "llama/bench/texts/persuasion.txt"
PROMPT_LEN = 64
CONTEXTS = (1024, 2048, 4096, 8192)
WINDOW = 1024  # of the kind `window`, where none is asked for: by default it holds a whole text
# From the most to the least: tokens of the text, tokens of greedy text, lengths of needle tests, and seeds for each.
AMOUNTS: tuple[tuple[int, int, int, int], ...] = (
    (2048, 256, len(LENGTHS), len(SEEDS)),
    (2048, 256, len(LENGTHS), 1),
    (1024, 256, len(LENGTHS), 1),
    (512, 128, 2, 1),
    (256, 128, 1, 1),
    (128, 64, 1, 1),
    (64, 32, 0, 0),
)

_QUESTION = 30  # tokens behind a haystack, about
_SECRET = 8  # tokens that it takes at most


def caches_report(base: Cell, kinds: Sequence[str], args: ModelArgs, *, command: str, budget: float) -> Report:
    """Return the report of the preset, in which nothing is measured; `args` are the model's sizes.

    `kinds` are asked for by name; without any, all that are registered. The full cache comes first, named or not.
    Raises ValueError for a kind that is not known, or cannot be of these sizes, and for one that is named twice.
    """
    wanted = [FULL, *(kind for kind in kinds or default_kinds(args) if kind != FULL)]
    for place, kind in enumerate(wanted):
        if kind in wanted[:place]:
            raise ValueError(f"--kv_cache {kind} would stand in the table twice; name every kind once")
        Cache.of(args, cache_kind(kind))
    if base.ranks > 1:
        raise ValueError("--preset=caches measures one process; start it without torchrun")
    if args.max_seq_len < 2 * PROMPT_LEN:
        raise ValueError(
            f"--preset=caches feeds texts of {2 * PROMPT_LEN} tokens and more, and the model's max_seq_len is "
            f"{args.max_seq_len}; measure another model"
        )
    report = new_report("caches", [base.but(kv_cache=kind) for kind in wanted], command=command, budget_minutes=budget)
    contexts = [context for context in CONTEXTS if context <= args.max_seq_len] or [args.max_seq_len]
    report["caches"] = {"text": TEXT, "contexts": contexts, "plan": None, "kinds": list(map(blank, wanted))}
    return report


def default_kinds(args: ModelArgs) -> list[str]:
    """Return every kind that is registered, the window with a length that drops something."""
    window = f"window:{min(WINDOW, args.max_seq_len // 2)}+{DEFAULT_SINKS}"
    return [window if kind == "window" else kind for kind in sorted(KVCache.kinds)]


def blank(kind: str) -> KindRecord:
    return {"kind": kind, "lossless": None, "saves": None, "widens": None, "path": "",
            "bytes": [], "steps": [], "quality": None, "error": None}  # fmt: skip


def run_caches(session: Session) -> None:
    """Measure every kind's costs, then as much of its quality as the budget has room for."""
    caches, logits = caches_of(session), session.directory.folder / "reference.logits"
    for record in caches["kinds"]:
        record["error"] = None  # what died in an earlier run may live now
    begin(session)
    try:
        for place in range(len(caches["kinds"])):
            measure_costs(session, place)
        places = decide(session)
        if places:
            measure_qualities(session, places, logits)
    finally:
        logits.unlink(missing_ok=True)
        session.report["reading"] = cache_findings(caches)
        session.directory.save()


def caches_of(session: Session) -> Caches:
    caches = session.report["caches"]
    assert caches is not None
    return caches


def begin(session: Session) -> None:
    """Measure what all begins with, drop contexts that the budget has no room for, and say how long all takes."""
    measure_machine(session, session.cells[0])
    caches, left = caches_of(session), session.room
    if not any(record["steps"] for record in caches["kinds"]):
        while len(caches["contexts"]) > 1 and costs_seconds(session) > left / 2:
            caches["contexts"].pop()
    session.directory.save()
    costs, step = costs_seconds(session), session.calibration["step_seconds"]
    most = costs + sum(quality_seconds(session, amount_plan(session, AMOUNTS[0]), step) for _ in caches["kinds"])
    session.progress.total = min(most, max(left, costs))
    session.progress.write(
        f"{len(caches['kinds'])} kinds of cache: bytes and times of all take about {duration(costs)}, and everything "
        f"about {duration(session.progress.total)}, if no kind is slower than {FULL}; the budget is {duration(left)}.",
    )


def costs_seconds(session: Session) -> float:
    """Predict how long the bytes and times of all kinds take, filling a cache as long as a few steps at its end."""
    known, caches = session.calibration, caches_of(session)
    steps = sum(STEPS + 1 + 10 * context / 1024 for context in caches["contexts"])
    one = expected_of_tokens(0, known) + steps * float(known["step_seconds"])
    left = [record["kind"] for record in caches["kinds"] if not record["steps"]]
    session.expected |= dict.fromkeys(map(costs_of, left), one)
    return one * len(left)


def quality_seconds(session: Session, plan: CachesPlan, step: float) -> float:
    """Predict how long the quality of a kind takes whose step takes `step` seconds."""
    needles = len(DEPTHS) * plan["needle_seeds"]
    steps = plan["tokens"] + plan["greedy_tokens"] + needles * len(plan["needle_lengths"]) * _QUESTION
    return expected_of_tokens(needles * sum(plan["needle_lengths"]), session.calibration) + steps * step


def amount_plan(session: Session, amount: tuple[int, int, int, int]) -> CachesPlan:
    """Return what is measured of quality, as far as the model's texts go."""
    limit = int(session.calibration["max_seq_len"])
    tokens, greedy, lengths, seeds = amount
    return {
        "prompt_len": PROMPT_LEN,
        "tokens": min(tokens, limit - PROMPT_LEN),
        "greedy_tokens": min(greedy, limit - PROMPT_LEN),
        "needle_lengths": [length for length in LENGTHS[:lengths] if length + _SECRET <= limit],
        "needle_seeds": seeds,
    }


def decide(session: Session) -> list[int]:
    """Choose on how much text the quality is measured, say so, and return the places of the kinds that lack it.

    A run that goes on has chosen before, and what is compared must be alike.
    """
    caches = caches_of(session)
    places = [n for n, kind in enumerate(caches["kinds"]) if kind["steps"] and (n == 0 or kind["quality"] is None)]
    if places in ([], [0]) and caches["kinds"][0]["quality"] is not None:
        return []
    plans = [amount_plan(session, amount) for amount in AMOUNTS] if caches["plan"] is None else [caches["plan"]]
    for plan in plans:
        for place in places:
            record = caches["kinds"][place]
            expected = quality_seconds(session, plan, record["steps"][0]["seconds"]["median"])
            session.expected[quality_of(record["kind"])] = expected
        seconds = sum(session.expected[quality_of(caches["kinds"][place]["kind"])] for place in places)
        caches["plan"] = plan
        if seconds <= session.room:
            break
    session.progress.total = session.progress.n + seconds
    lengths = ", ".join(map(str, plan["needle_lengths"]))
    session.progress.write(
        f"quality on {plan['tokens']:,} tokens, {plan['greedy_tokens']} greedy ones, and "
        f"{f'needles in texts of {lengths} tokens' if lengths else 'no needles'}: about {duration(seconds)}.",
    )
    return places


def costs_of(kind: str) -> str:
    return f"{kind}: bytes and times"


def quality_of(kind: str) -> str:
    return f"{kind}: quality"


@contextmanager
def noting_error(session: Session, record: KindRecord, what: str) -> Iterator[None]:
    """Let what can be done without go wrong; keep why, in the kind's record too, or what came of it, on disk."""
    try:
        yield
    except (ValueError, JobDied) as error:
        record["error"] = fate_of(error)
        session.report["failures"].append(f"{what}: {record['error']}")
    session.directory.save()


def measure_costs(session: Session, place: int) -> None:
    """Measure the bytes and step times of a kind, unless they are known; the budget does not limit the first two."""
    caches = caches_of(session)
    record, cell = caches["kinds"][place], session.cells[place]
    what = costs_of(record["kind"])
    if record["steps"] or (place > 1 and not session.has_room(what, must=True)):
        return
    with noting_error(session, record, what):
        done = session.do(what, "cache_costs", cell, contexts=caches["contexts"])
        record["lossless"], record["saves"], record["widens"] = done["lossless"], done["saves"], done["widens"]
        record["path"], record["bytes"], record["steps"] = done["path"], done["bytes"], done["steps"]
        point = beside_others(done["other_load_cores"], session.report["environment"].get("cores"))
        session.report["cells"][place]["points"] = [point]
        left = [costs_of(kind["kind"]) for kind in caches["kinds"] if not kind["steps"]]
        session.expected |= dict.fromkeys(left, session.expected[what])  # what one took, the next is expected to


def measure_qualities(session: Session, places: Sequence[int], logits: Path) -> None:
    """Measure the quality of the full cache, which leaves its logits in a file, and of the kinds at `places`."""
    caches, greedy_text = caches_of(session), None
    full, job = caches["kinds"][0], {"plan": caches["plan"], "logits": str(logits.resolve())}
    if not session.has_room(quality_of(full["kind"]), must=True):
        return
    with noting_error(session, full, quality_of(full["kind"])):
        done = session.do(quality_of(full["kind"]), "cache_reference", session.cells[0], **job)
        full["quality"], greedy_text = done["quality"], done["greedy"]
    for place in (place for place in places if place > 0 and greedy_text is not None):
        record = caches["kinds"][place]
        what = quality_of(record["kind"])
        if not session.has_room(what, must=True):
            continue
        with noting_error(session, record, what):
            done = session.do(what, "cache_quality", session.cells[place], **job, greedy_text=greedy_text)
            record["quality"] = done["quality"]
