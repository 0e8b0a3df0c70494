"""Merges reports into one: each cell once for every setup that measured it, and ratios only of what is comparable.

Times are comparable if everything that `llama.host.machine.environment` states is equal: the machine, its CPU, the
commit, the count of threads. Quality is comparable wherever the digest of weights and inputs is equal. Of a cell
stay its figures and its failed checks; ids, texts and memory ledgers stay in the files that were merged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from llama.bench.cell import FULL
from llama.bench.report.tasks import minus_full
from llama.bench.schema import KEYS, Report, Row, cell_of, cell_row, check_setups, differing, merge, new_report
from llama.bench.statistics import median_of, values_of

TIMES = {"cell": "seconds", "turn": "first_token_seconds", "prompts": "first_token_seconds"}  # others: step_seconds
LEFT = {"memory", "comparison"}  # rows that stay in the files
LEFT_COLUMNS = {"ids", "text"}
JUDGED = {"nll", "cache_bytes", "score", "score_question_seen", "scores", "scores_question_seen"}


def merged(reports: Iterable[Report], *, command: str = "") -> Report:
    """Return one report of many, which are read one at a time. Raises ValueError if they have no cell.

    Raises it, too, if one of them is merged from several setups.
    """
    report = new_report("merged", [], command=command)
    setups: list[dict[str, Any]] = []
    places: dict[tuple[str, int | None], int] = {}
    for one in reports:
        check_setups(one)
        setup = _setup_of(one, setups)
        found: dict[int, list[Row]] = {place: [] for place in range(len(one["cells"]))}
        for row in one["rows"]:
            if row["figures"] not in LEFT and not (row["figures"] == "check" and row["status"] == "ok"):
                slim = {name: row[name] for name in row if name not in LEFT_COLUMNS}
                found[row["cell"]].append({**slim, "setup": setup})
        for place, rows in found.items():
            key = repr(sorted(one["cells"][place].items())), setup
            apart = rows
            if key in places:
                errors = [cell_row(report, places[key])["error"], *(row.get("error") for row in rows)]
                merge(report, [row for row in rows if "digest" not in row], places[key])
                cell_row(report, places[key])["error"] = next(filter(None, errors), None)  # of any file of this cell
                apart = [row for row in rows if "digest" in row]
            else:
                places[key] = len(report["cells"])
                report["cells"].append(one["cells"][place])
            report["rows"] += [{**row, "cell": places[key]} for row in apart]
        report["failures"] += one["failures"]
    if not report["cells"]:
        raise ValueError("the results have no cell; give results of llama-kv sweep or bench, or folders of them")
    differ = {name for other in setups for name in differing(setups[0], other)}
    report["environment"] = {name: value for name, value in (setups or [{}])[0].items() if name not in differ}
    report["plan"] = {"setups": [{name: one.get(name) for name in sorted(differ)} for one in setups]}
    report["rows"], why = _joined(report)
    why += with_ratios(report)
    report["reading"] = [f"{words} ({count} of them)." for words, count in Counter(why).items()]
    return report


def _setup_of(report: Report, setups: list[dict[str, Any]]) -> int | None:
    """Return the number of a report's environment, None if nothing ran.

    An environment that does not identify its machine is equal to no other.
    """
    environment = report["environment"]
    if not environment:
        return None
    if environment.get("machine") and environment in setups:
        return setups.index(environment)
    setups.append(environment)
    return len(setups) - 1


def unlike(report: Report, one: Row, other: Row, *, timed: bool) -> list[str]:
    """Return the names of what forbids a ratio of two rows: facts of their setups, or the digest of their inputs."""
    if not timed and "digest" in one and "digest" in other:
        return ["digest"] * (one["digest"] != other["digest"])
    if (setups := report["plan"].get("setups")) is None:  # a run has one
        return []
    if None in (one["setup"], other["setup"]):
        return ["environment"]
    if one["setup"] == other["setup"]:
        return []
    return differing(setups[one["setup"]], setups[other["setup"]]) or ["machine"]


def _key(report: Report, row: Row, **changed: Any) -> tuple[Any, ...]:
    return row["figures"], cell_of(report, row).but(**changed), *(row.get(name) for name in KEYS[row["figures"]])


def _joined(report: Report) -> tuple[list[Row], list[str]]:
    """Return the rows with those of quality once for all setups with the same digest, and a phrase for each conflict.

    `also` lists the other setups of such a row; its times are those of the first.
    """
    first: dict[tuple[Any, ...], list[Row]] = {}
    rows, why = [], []
    measured = {_key(report, row) for row in report["rows"] if row.get("cache_bytes") is not None}
    for row in report["rows"]:
        if row.get("digest") is None:
            predicted = "predicted_cache_bytes" in row and row.get("cache_bytes") is None
            if not (predicted and _key(report, row) in measured):  # else another run has measured it
                rows.append(row)
            continue
        known = first.setdefault(_key(report, row), [])
        same = next((one for one in known if one["digest"] == row["digest"] and _alike(one, row)), None)
        if same is not None:
            if row["setup"] not in (seen := [same["setup"], *same.get("also", [])]):
                same["also"] = [*seen[1:], row["setup"]]
            continue
        if known:
            equal = any(one["digest"] == row["digest"] for one in known)
            what = "figures differ by more than rounding" if equal else "digest of the weights or the inputs differs"
            why.append(f"Not merged, because the {what}: {row['figures']}")
        known.append(row)
        rows.append(row)
    return rows, why


def _alike(one: Row, other: Row) -> bool:
    """Return whether two rows of quality have the same figures, up to rounding. Digests do not cover the code."""
    for name in JUDGED & one.keys() & other.keys():
        a, b = one[name], other[name]
        if a != b and not (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-3)):
            return False
    return True


def with_ratios(report: Report) -> list[str]:
    """Give each row its time, bytes and scores against those of the full cache, and return why others have none."""
    full: dict[tuple[Any, ...], list[Row]] = {}
    for row in _comparable(report):
        if cell_of(report, row).kv_cache == FULL and cell_of(report, row).kv_caching:
            full.setdefault(_key(report, row, code=None), []).append(row)
    why = []
    for row in _comparable(report):
        others = full.get(_key(report, row, kv_cache=FULL, kv_caching=True, code=None), [])
        for name, timed in (("time_of_full", True), ("of_full", False)):
            if (value := _value(row, timed=timed)) is None or not others:
                continue
            others = sorted(others, key=lambda other: other.get("tokens") != row.get("tokens"))
            reasons = [unlike(report, row, other, timed=timed) for other in others]
            if least := min(reasons, key=len):
                what = "time" if timed else "bytes"
                why.append(f"No ratio of {what} to {FULL}, because these differ: {', '.join(least)}")
                continue
            base_row = others[reasons.index([])]
            if base := _value(base_row, timed=timed):
                row[name] = value / base
            if row["figures"] == "task":
                row |= minus_full(row, base_row)
            own, base_own = row.get("nlls", ()), base_row.get("nlls", ())
            alike = row.get("tokens") == base_row.get("tokens") and len(own) == len(base_own) > 0
            if not timed and row is not base_row and alike:  # losses of the same tokens
                row["nlls_minus_full"] = [one - other for one, other in zip(own, base_own, strict=True)]
    return why


def _comparable(report: Report) -> Iterator[Row]:
    return (row for row in report["rows"] if row["figures"] != "check")


def _value(row: Row, *, timed: bool) -> float | None:
    """Return the median time of a row, or its bytes; None without them."""
    if not timed:
        return row.get("cache_bytes")
    name = TIMES.get(row["figures"], "step_seconds")
    return median_of(row, name) if values_of(row, name) else None
