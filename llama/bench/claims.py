"""Claims about KV caches, published or a user's own: each is a plan of a sweep, and a rule that judges its cells.

`claims.toml` has them, and says what a rule is. Knows no folder of results: the caller finds the report of a cell.
"""

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import eq, ge, gt, le, lt
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from llama.bench.comparisons import SAME_TEXT
from llama.bench.schema import REPEATED, Report, Row, cell_row, differing, rows_of
from llama.bench.statistics import samples_of
from llama.bench.sweep import Point, points_of
from llama.quality.intervals import LEAST_SAMPLES, mean_interval, ratio_interval

CONFIRMED, REFUTED, NOT_DECIDED = "confirmed", "refuted", "not decided"
BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "below": lt,
    "at_most": le,
    "equals": eq,
    "at_least": ge,
    "above": gt,
}
BASE: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "threads": 1}  # of all plans
# The plan of a rule without one, with the kinds of the rule.
QUALITY: dict[str, Any] = {"tasks": ["quality"], "contexts": [768], "greedy_tokens": 0, "fast": True}
HEADS = ["llama-kv claim", "wording", "source", "confirmed if", "figure (95 % interval)", "verdict"]
EXACT = ("bytes", ".equal")  # figures without an interval
COLUMNS = {  # that a rule can name
    "cell": (*sorted(REPEATED - {"other_load_cores"}), "cache_bytes", "weights_bytes", "read_bytes", "step_read_bytes"),
    "comparison": ("equal",),
    "step": ("step_seconds", "cache_bytes"),
    "quality": ("nlls", "kls", "step_seconds", "cache_bytes"),
    "task": ("scores", "scores_question_seen", "answer_lens", "answer_lens_question_seen", "cache_bytes"),
}
OF_TASK = {"generate": ("cell", "comparison"), "costs": ("step",), "quality": ("quality", "task")}  # others: task
BLIND = 3  # n equal scores do not show what happens in 3 / n of all: Hanley and Lippman-Hand, JAMA 1983


class Verdict(NamedTuple):
    """What a rule says: a word, the figure, and the ends of its 95 % interval, which are equal if it is exact."""

    word: str
    value: float
    ends: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Claim:
    """A published claim. Without a rule it cannot be judged here, and `needs` is what that would take."""

    name: str
    says: str
    source: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    rule: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def sides(self) -> list[dict[str, Any]]:
        """The figure that is judged, and the one that it is compared with: `figure`, and what identifies its cell."""
        given = (self.rule[name] for name in ("of", "minus", "over") if name in self.rule)
        return [{"figure": self.rule["figure"], **side} for side in given]

    @cached_property
    def points(self) -> list[Point]:
        """The cells that decide it."""
        plan = self.plan or {**QUALITY, "kinds": [side["kind"] for side in self.sides]}
        return points_of({**BASE, **plan}) if self.rule else []

    @property
    def bound(self) -> tuple[str, float]:
        """The name of the rule's bound, and its value."""
        ((name, value),) = ((name, value) for name, value in self.rule.items() if name in BOUNDS)
        return name, value

    @property
    def confirmed_if(self) -> str:
        """The rule as text."""
        names = [f"{side['figure']} of {_cell(side)}" for side in self.sides]
        if len(names) > 1 and self.sides[0]["figure"] == self.sides[1]["figure"]:
            names[1] = f"that of {_cell(self.sides[1])}"
        how, (name, value) = "minus" if "minus" in self.rule else "over", self.bound
        verb = name if name == "equals" else f"is {name.replace('_', ' ')}"
        return f"{f' {how} '.join(names)} {verb} {value}"

    def point(self, side: Mapping[str, Any]) -> Point:
        """Return the cell of a side. Raises ValueError if it is not exactly one of the plan."""
        where = {name: value for name, value in side.items() if name != "figure"}
        found = [point for point in self.points if {**point._asdict(), **where} == point._asdict()]
        if len(found) != 1:
            raise ValueError(f"claim {self.name}: {_cell(side)} is {len(found)} cells of the plan, and must be one")
        return found[0]


def _cell(side: Mapping[str, Any]) -> str:
    """Return what identifies the cell of a side, as text; a kind stands alone."""
    return ", ".join(f"{name} {value}".removeprefix("kind ") for name, value in side.items() if name != "figure")


def read_claims(text: str | None = None) -> dict[str, Claim]:
    """Return the claims of a text in TOML by name, by default the published ones. Raises ValueError for a wrong one."""
    if text is None:
        text = Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
        return {name: Claim(name, **entry) for name, entry in tomllib.loads(text).items()}
    try:
        claims = {name: _checked(name, entry) for name, entry in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the claims are not TOML: {error}") from error
    if not claims:
        raise ValueError("there is no claim; llama/bench/claims.toml has examples")
    return claims


def _checked(name: str, entry: Any) -> Claim:
    """Return the claim of an entry. Raises ValueError with its name if it cannot be judged."""
    _check_table(f"claim {name}", entry, {"says": str, "source": str, "plan": dict, "rule": dict}, optional={"plan"})
    rule, sides = f"the rule of claim {name}", {"minus": dict, "over": dict}
    bounds = dict.fromkeys(BOUNDS, float)
    _check_table(rule, entry["rule"], {"figure": str, "of": dict, **sides, **bounds}, optional={*sides, *bounds})
    if len(bounds.keys() & entry["rule"]) != 1 or len(sides.keys() & entry["rule"]) == 2:
        raise ValueError(f"{rule} must have one of {', '.join(bounds)}, and at most one of minus and over")
    claim = Claim(name, **entry)
    if not claim.plan and not all("kind" in side for side in claim.sides):
        raise ValueError(f"{rule} has a side without a kind; give each a kind, or the claim a plan")
    for side in claim.sides:
        made_by = OF_TASK.get(claim.point(side).task, ("task",))
        known = [f"{figures}.{column}" for figures in made_by for column in COLUMNS[figures]]
        if side["figure"] not in known:
            raise ValueError(f"{rule} has figure={side['figure']!r:.80}; known of its cell are {', '.join(known)}")
    return claim


def _check_table(where: str, table: Any, types: Mapping[str, type], *, optional: Collection[str]) -> None:
    """Raise ValueError unless a table has all fields that are not optional, and no others, each of its type."""
    if not isinstance(table, dict) or types.keys() - optional - table.keys():
        raise ValueError(
            f"{where} is {table!r:.80}, and must have {', '.join(name for name in types if name not in optional)}"
        )
    for name, value in table.items():
        kind = types.get(name)
        if kind is None or not (type(value) is kind or (kind is float and type(value) is int)):
            known = ", ".join(f"{one} ({types[one].__name__})" for one in types)
            raise ValueError(f"{where} has {name}={value!r:.80}; known are {known}")


def judge(claim: Claim, report_of: Callable[[Point], Report]) -> Verdict:
    """Return the verdict of a claim's rule. Raises ValueError if its cells cannot be compared, or were not measured."""
    reports = [report_of(claim.point(side)) for side in claim.sides]
    rows = [_row(report, side) for report, side in zip(reports, claim.sides, strict=True)]
    if claim.plan.get("fast") and not all("native" in row["path"] for row in rows):
        raise ValueError("the native step did not run; `llama-kv doctor demo` and docs/speed.md say what it needs")
    digests = {row.get("digest") for row in rows}
    timed = None in digests and not claim.rule["figure"].endswith(EXACT)
    names = differing(reports[0]["environment"], reports[-1]["environment"]) if timed else []
    if names or len(digests) > 1:
        what = ", ".join(names) or "the digest of weights or inputs"
        raise ValueError(f"{what} differs between its cells; give --out another folder to measure all of them again")
    samples = [_samples(row, side) for row, side in zip(rows, claim.sides, strict=True)]
    if "minus" in claim.rule and claim.rule["figure"].startswith("task.") and not any(samples[-1]):
        raise ValueError(f"{_cell(claim.sides[-1])} scores 0 in every sample, so the task cannot judge")
    value, ends = _figure(claim.rule, samples[0], samples[-1])
    name, bound = claim.bound
    holds = [BOUNDS[name](end, bound) for end in ends]
    return Verdict(CONFIRMED if all(holds) else NOT_DECIDED if any(holds) else REFUTED, value, ends)


def _row(report: Report, side: Mapping[str, Any]) -> Row:
    figures, _, column = side["figure"].partition(".")
    for one in rows_of(report, "check", 0):
        is_figure = figures == "comparison" and one["name"] == SAME_TEXT
        if one["status"] == "violated" and not is_figure:
            raise ValueError(f"{_cell(side)} violates a check: {one['name']}: {one['detail']}")
    rows = [row for row in rows_of(report, figures, 0) if row.get(column) is not None]
    if len(rows) != 1:
        why = "; ".join([*filter(None, [cell_row(report, 0)["error"]]), *report["failures"]])
        raise ValueError(f"{side['figure']} of {_cell(side)} was not measured ({why})")
    if rows[0].get("judged") is False:
        raise ValueError(f"{_cell(side)} has dropped or compressed nothing of its text")
    return rows[0]


def _samples(row: Row, side: Mapping[str, Any]) -> list[float]:
    """Return the samples of a figure: one if it is exact."""
    values = samples_of(row, side["figure"].partition(".")[2])
    if side["figure"].endswith(EXACT):
        return values[:1]
    if len(values) < LEAST_SAMPLES:
        raise ValueError(f"{side['figure']} has {len(values)} samples, and an interval needs {LEAST_SAMPLES}")
    return values


def _figure(rule: Mapping[str, Any], a: list[float], b: list[float]) -> tuple[float, tuple[float, float]]:
    """Return the figure of a rule and its interval; without another cell, b is a."""
    if "over" in rule:
        ratio = median(a) / median(b)
        return ratio, (ratio_interval(b, a) if len(a) > 1 else None) or (ratio, ratio)
    values = [one - other * ("minus" in rule) for one, other in zip(a, b, strict=True)]
    mean = fmean(values)
    low, high = mean_interval(tuple(values)) or (mean, mean)
    if low == high and rule["figure"].startswith("task."):
        return mean, (mean - BLIND / len(values), mean + BLIND / len(values))
    return mean, (low, high)


def as_row(claim: Claim, found: Verdict | str) -> list[str]:
    """Return a claim as a row under HEADS. `found` is its verdict, or why there is none."""
    row, figure = [claim.name, claim.says, claim.source], "-"
    if not claim.rule:
        return [*row, f"(needs {claim.needs})", figure, "not judged here"]
    if isinstance(found, Verdict):
        value, low, high = (f"{one:,.0f}" if one >= 1e3 else f"{one:.3g}" for one in (found.value, *found.ends))
        figure, found = f"{value}{f' ({low} to {high})' * (low != high)}", found.word
    return [*row, claim.confirmed_if, figure, found]
