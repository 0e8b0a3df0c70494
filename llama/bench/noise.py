"""Judge whether times were measured under load, and wait for an idle machine.

A cell is judged by the load and the spread of its repetitions, and by a ratio that contradicts the counted work. A
noisy cell did what it claims to do, but its times are those of other work too.
"""

import os
import time
from collections.abc import Callable

from llama.bench.schema import Report, Row, Status, cell_of, pairs, rows_of
from llama.bench.statistics import LEAST_REPETITIONS, median_of, spread
from llama.host.cores import BUSY_SHARE, LEAST_SECONDS, OtherLoad, is_busy
from llama.host.progress import seconds_bar

OTHER_WORK = "other work"  # the name of the check

SPREAD = 1.25  # p90 over p10 of the time: 1.0 to 1.2 on an idle machine, 1.8 beside half a busy core (docs/results)
# How many times fewer tokens the cache must feed until it cannot be slower: crossovers lie at contexts of a few tokens
# (docs/kv_cache.md), and texts that short feed less than 8 times fewer.
FEWER = 8.0

IDLE_SHARE, IDLE_LOOKS = BUSY_SHARE / 2, 5  # of all cores, and in how many looks in a row, each of a second


def judge_noise(report: Report) -> None:
    """Give every cell with measured times its check, by everything that is known now."""
    modes = [pair for pair in pairs(report) if not cell_of(report, pair[0]).speculate]
    contradictions = {row["cell"]: _contradiction(report, *pair) for pair in modes for row in pair}
    for row in rows_of(report, "cell"):
        if row.get("other_load_cores"):
            check = other_work(row, report, contradictions.get(row["cell"]))
            others = [one for one in report["rows"] if one.get("name") != OTHER_WORK or one["cell"] != row["cell"]]
            report["rows"] = [*others, check]


def other_work(row: Row, report: Report, contradiction: str | None) -> Row:
    """Return the check of a cell's times: "noisy" if the load, the spread or `contradiction` shows other work.

    It is "not observed" if the load is unknown and there are too few repetitions to judge by.
    """
    cores = report["environment"].get("cores")
    times = row.get("seconds") or []
    loads = [load for place, load in enumerate(row["other_load_cores"]) if not times or times[place] >= LEAST_SECONDS]
    if cell_of(report, row).ranks > 1:  # the other ranks of the same job count as others
        loads = []
    known = [load for load in loads if load is not None]
    words, signs = ["not known how many cores it occupied"], [contradiction] if contradiction else []
    if known and cores is not None:
        words = [f"occupied {max(known):.2f} of {cores} cores"]
        signs += words if is_busy(max(known), cores) else []
    seconds = spread(row, "seconds")
    enough = seconds is not None and seconds["n"] >= LEAST_REPETITIONS
    if seconds is not None:
        words.append(f"n = {seconds['n']}" + ("" if enough else ", too few to judge by"))
        if seconds["n"] > 1:
            words.append(f"p90 is {seconds['p90'] / seconds['p10']:.2f}x p10")
            signs += words[-1:] if seconds["p90"] > SPREAD * seconds["p10"] else []
    status: Status = "noisy" if signs else "ok" if enough or (known and cores is not None) else "not observed"
    detail = "; ".join([*words, *([contradiction] if contradiction else [])])
    return {"figures": "check", "cell": row["cell"], "name": OTHER_WORK, "status": status, "detail": detail}


def _contradiction(report: Report, cached: Row, uncached: Row) -> str | None:
    """Return words if the cache is slower and neither the work nor single steps explain it."""
    slower = median_of(cached, "seconds") / median_of(uncached, "seconds")
    fewer = uncached["token_forwards"] / cached["token_forwards"]
    batch = cell_of(report, cached).batch_size
    steps = [row for row in rows_of(report, "step") if row["batch_size"] == batch and row.get("step_seconds")]
    longest = max((row["context"] for row in steps), default=0)
    last = {row["kv_caching"]: median_of(row, "step_seconds") for row in steps if row["context"] == longest}
    explained = len(last) == 2 and last[True] >= last[False]
    if slower <= 1 or fewer < FEWER or explained:
        return None
    return f"the cache takes {slower:.2f}x the time for {fewer:.1f}x fewer tokens fed"


def wait_until_idle(minutes: float, look: Callable[[], float | None] | None = None) -> bool:
    """Wait until others occupy few cores, at most so many minutes; say on stderr that it waits, and what came of it.

    `look` measures for a second and returns how many cores others occupied, or None if the system does not report it.
    """
    cores, deadline, calm, load = os.cpu_count() or 1, time.monotonic() + 60 * minutes, 0, 0.0
    asked = f"less than {IDLE_SHARE * cores:.2f} of {cores} cores for {IDLE_LOOKS} s"
    with seconds_bar("waiting for an idle machine") as bar:
        bar.total = 60 * minutes
        bar.write(f"waiting until other work occupies {asked}, at most {minutes:g} min")
        while calm < IDLE_LOOKS and time.monotonic() < deadline:
            seen = (look or _look)()
            if seen is None:
                bar.write("this system does not report the load of other work, so there is no wait")
                return False
            load, calm = seen, calm + 1 if seen < IDLE_SHARE * cores else 0
            bar.update(min(1.0, bar.total - bar.n))
        idle = calm >= IDLE_LOOKS
        busy = (
            f"the machine never got idle: other work occupies {load:.2f} cores; measuring now, and the table is marked"
        )
        bar.write("the machine is idle" if idle else busy)
    return idle


def _look() -> float | None:
    load = OtherLoad()
    load.start()
    time.sleep(1.0)
    return load.stop()
