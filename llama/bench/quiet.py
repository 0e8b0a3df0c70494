"""Was the machine quiet? Whether times were taken beside too much other work to be believed; and waiting for quiet.

Judges by the load, the spread and the count of a cell's repetitions, and by a ratio that the counted work contradicts.
A cell that was disturbed is not wrong: it did what it claims to do, and its times are those of other work too.
"""

import os
import time
from collections.abc import Callable, Sequence

from llama.bench.report.tables import pairs, summary_of
from llama.bench.schema import CellRecord, Crossover, Point, Report, Status
from llama.cli.progress import seconds_bar
from llama.host.cores import BUSY_SHARE, LEAST_SECONDS, OtherLoad, disturbs

OTHER_WORK = "other work"  # the name of the point; "undisturbed" in reports of before

SPREAD = 1.25  # p90 over p10 of the time: 1.0 to 1.2 where it was quiet, 1.8 where half a core was not (docs/results)
LEAST_REPETITIONS = 3  # of two, no one tells which is the disturbed one
# How many times fewer tokens the cache must feed until it cannot be slower: crossovers lie at contexts of a few tokens
# (docs/kv_cache.md), and texts that are as short feed less than 8 times fewer.
FEWER = 8.0

QUIET_SHARE, QUIET_LOOKS = BUSY_SHARE / 2, 5  # of all cores, and in how many looks in a row, each of a second


def judge_quiet(report: Report) -> None:
    """Give every measured cell its point, by all that is known now."""
    against = {id(one): words for on, off in pairs(report) for one, words in _against(on, off, report["crossovers"])}
    for record in report["cells"]:
        if record["summary"] is not None:
            point = other_work(record, report["environment"].get("cores"), against.get(id(record)))
            record["points"] = [
                *(one for one in record["points"] if one["name"] not in (OTHER_WORK, "undisturbed")),
                point,
            ]


def other_work(record: CellRecord, cores: int | None, against: str | None = None) -> Point:
    """Judge the times of a cell; `against` is what else speaks against them.

    One sign is enough for `disturbed`, shown as NOISY. `not observed`: the load is unknown, and there are too few
    repetitions.
    """
    loads = [one["other_load_cores"] for one in record["samples"] if one["seconds"] >= LEAST_SECONDS]
    known = [load for load in loads if load is not None and record["cell"]["ranks"] == 1]  # ranks are others, too
    seconds = summary_of(record)["seconds"]
    apart, enough = seconds["p90"] / seconds["p10"], seconds["n"] >= LEAST_REPETITIONS
    said, signs = ["not known how many cores it occupied"], [against] if against else []
    if known and cores is not None:
        said = [f"occupied {max(known):.2f} of {cores} cores"]
        signs += said if disturbs(max(known), cores) else []
    said.append(f"n = {seconds['n']}" + ("" if enough else ", too few to judge by"))
    if seconds["n"] > 1:
        said.append(f"p90 is {apart:.2f}x p10")
        signs += said[-1:] if apart > SPREAD else []
    words = "; ".join([*said, *([against] if against else [])])
    status: Status = "disturbed" if signs else "ok" if enough or (known and cores is not None) else "not observed"
    return {"name": OTHER_WORK, "status": status, "detail": words}


def beside_others(load: float | None, cores: int | None) -> Point:
    """Judge times that were taken while others kept `load` cores busy, where that alone is known."""
    if load is None or cores is None:
        return {"name": OTHER_WORK, "status": "not observed", "detail": "not known how many cores it occupied"}
    status: Status = "disturbed" if disturbs(load, cores) else "ok"
    return {"name": OTHER_WORK, "status": status, "detail": f"occupied {load:.2f} of {cores} cores"}


def _against(on: CellRecord, off: CellRecord, crossovers: Sequence[Crossover]) -> list[tuple[CellRecord, str]]:
    """Return both cells, with words, where the cache is slower and neither the work nor single steps explain it."""
    cached, uncached = (summary_of(record)["seconds"]["median"] for record in (on, off))
    if on["work"] is None or off["work"] is None or cached <= uncached:
        return []
    fewer = off["work"]["token_forwards"] / on["work"]["token_forwards"]
    steps = [step for one in crossovers if one["batch_size"] == on["cell"]["batch_size"] for step in one["steps"]]
    longest = max((step["context"] for step in steps), default=0)
    last = {step["kv_caching"]: step["seconds"]["median"] for step in steps if step["context"] == longest}
    if fewer < FEWER or (last and last[True] >= last[False]):
        return []
    words = f"the cache takes {cached / uncached:.2f}x the time for {fewer:.1f}x fewer tokens fed"
    return [(on, words), (off, words)]


def wait_until_quiet(minutes: float, look: Callable[[], float | None] | None = None) -> bool:
    """Wait until others keep few cores busy, at most so long; say on stderr that it waits, and what came of it.

    `look` takes a second, and tells how many cores others kept busy meanwhile, or None where the system does not.
    """
    cores, deadline, calm, load = os.cpu_count() or 1, time.monotonic() + 60 * minutes, 0, 0.0
    asked = f"less than {QUIET_SHARE * cores:.2f} of {cores} cores busy for {QUIET_LOOKS} s"
    with seconds_bar("waiting for a quiet machine") as bar:
        bar.total = 60 * minutes
        bar.write(f"waiting until others keep {asked}, at most {minutes:g} min")
        while calm < QUIET_LOOKS and time.monotonic() < deadline:
            seen = (look or _look)()
            if seen is None:
                bar.write("this system does not tell how busy others are, so there is no waiting")
                return False
            load, calm = seen, calm + 1 if seen < QUIET_SHARE * cores else 0
            bar.update(min(1.0, bar.total - bar.n))
        quiet = calm >= QUIET_LOOKS
        loud = f"it never got quiet: others keep {load:.2f} cores busy; measuring all the same, and the table is marked"
        bar.write("the machine is quiet" if quiet else loud)
    return quiet


def _look() -> float | None:
    load = OtherLoad()
    load.start()
    time.sleep(1.0)
    return load.stop()
