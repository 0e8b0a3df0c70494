"""Published claims: the page names what the file has, every rule can be judged by its plan, and a verdict is earned."""

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench_reports import check
from refusals import unrefused

from llama.bench import claims
from llama.bench.cell import Cell
from llama.bench.claims import COLUMNS, CONFIRMED, NOT_DECIDED, REFUTED, Claim, _checked, as_row, judge, read_claims
from llama.bench.report.files import write_json
from llama.bench.schema import Report, Row, cell_row, new_report
from llama.bench.sweep import Point, file_of
from llama.cli.claim import main

DOCS = Path(__file__).parents[2] / "docs"
CLAIMS = read_claims()
JUDGED = [claim for claim in CLAIMS.values() if claim.rule]
ENTRIES = tomllib.loads((Path(claims.__file__).with_name("claims.toml")).read_text("utf-8"))
SETUP = {"machine": "a", "cpu": "EPYC", "threads": 2, "commit": "c"}


def test_the_page_has_the_name_wording_source_and_rule_of_every_claim_and_its_verdict() -> None:
    page = (DOCS / "claims.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count(" | ") == 5][2:]
    assert [row[:4] for row in rows] == [as_row(claim, "")[:4] for claim in CLAIMS.values()]
    verdicts = [row[5] for row, claim in zip(rows, CLAIMS.values(), strict=True) if claim.rule]
    assert {*verdicts} == {CONFIRMED, REFUTED, NOT_DECIDED}
    counted = [verdicts.count(word) for word in (CONFIRMED, REFUTED, NOT_DECIDED)]
    assert f"{counted[0]} are confirmed, {counted[1]} refuted and {counted[2]} not decided." in page
    assert len(verdicts) >= 20


@pytest.mark.parametrize("claim", JUDGED, ids=lambda claim: claim.name)
def test_a_rule_names_figures_that_its_plan_makes_and_has_one_bound(claim: Claim) -> None:
    columns = re.findall(r"^\| `(\w+)` \|", (DOCS / "benchmark_json.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {column for known in COLUMNS.values() for column in known} <= {*columns}
    assert _checked(claim.name, ENTRIES[claim.name]).sides == claim.sides
    for side in claim.sides:
        figures, _, column = side["figure"].partition(".")
        settings = dict(claim.point(side).settings)
        assert figures != "comparison" or settings["compare"]
        assert not (figures == "cell" and column.endswith("seconds")) or settings["repeats"] >= 5
    assert {*map(claim.point, claim.sides)} == {*claim.points}, "a cell decides nothing"
    assert isinstance(claim.bound[1], int | float)
    assert not claim.needs


def test_the_words_of_a_rule_are_a_sentence() -> None:
    ends = r" (equals|is (below|above|at most|at least)) -?[\d.]+$"
    assert [claim.name for claim in JUDGED if not re.search(ends, claim.confirmed_if)] == []


def test_a_claim_without_a_rule_says_what_it_needs() -> None:
    assert [claim.name for claim in CLAIMS.values() if not claim.rule and not (claim.needs and not claim.plan)] == []


# ---- verdicts --------------------------------------------------------------------------------------------------------

QUALITY = {"figure": "quality.nlls", "of": {"kind": "int4"}, "minus": {"kind": "static"}, "at_most": 0.02}
TIMES = {"figure": "step.step_seconds", "of": {"kind": "int4"}, "over": {"kind": "static"}, "at_most": 0.5}
COSTS = {"kinds": ["int4", "static"], "tasks": ["costs"]}


def report_of(rows: dict[str, Row], point: Point, **setup: Any) -> Report:
    report = new_report("caches", [Cell(kv_cache=point.kind)])
    report["environment"] = SETUP | setup
    report["rows"].append({"cell": 0, **rows[point.kind]})
    return report


def verdict(rule: dict[str, Any], rows: dict[str, Row], plan: dict[str, Any] | None = None) -> str:
    return judge(Claim("x", "", "", plan or {}, rule), partial(report_of, rows)).word


def quality(more: float, *, noise: float = 0.001, digest: str = "d") -> dict[str, Row]:
    """Return rows of texts whose blocks differ much among each other, and by `more` with int4."""
    dice = Random(1)
    full = [dice.gauss(3, 1) for _ in range(40)]
    other = [one + more + dice.gauss(0, noise) for one in full]
    rows: dict[str, Row] = {"static": {"digest": "d", "nlls": full}, "int4": {"digest": digest, "nlls": other}}
    return {kind: {"figures": "quality", "judged": True, **row} for kind, row in rows.items()}


def times(factor: float, noise: float = 0.01, n: int = 8) -> dict[str, Row]:
    dice = Random(2)
    return {
        kind: {"figures": "step", "step_seconds": [by * (1 + dice.gauss(0, noise)) for _ in range(n)]}
        for kind, by in (("static", 1.0), ("int4", factor))
    }


def test_a_verdict_needs_the_whole_interval_on_one_side_of_the_bound() -> None:
    assert verdict(QUALITY, quality(0.01)) == CONFIRMED  # although the text itself differs by 1 nat from block to block
    assert verdict(QUALITY, quality(0.03)) == REFUTED
    assert verdict(QUALITY, quality(0.02)) == verdict(QUALITY, quality(0.01, noise=0.1)) == NOT_DECIDED
    words = [verdict(TIMES, times(*by), COSTS) for by in ((0.4,), (0.6,), (0.5, 0.2))]
    assert words == [CONFIRMED, REFUTED, NOT_DECIDED]


def test_equal_samples_are_sure_only_up_to_what_their_number_shows() -> None:
    """20 of 20 needles that are found do not show that more than 17 of 20 are."""
    row: Row = {"figures": "task", "digest": "d", "scores": [1.0] * 20}
    rule = {"figure": "task.scores", "of": {"kind": "int4"}, "minus": {"kind": "static"}}
    found = [verdict({**rule, "at_least": bound}, {"static": row, "int4": row}) for bound in (-0.2, -0.1)]
    assert found == [CONFIRMED, NOT_DECIDED]


def test_an_exact_figure_has_no_interval() -> None:
    rule = {"figure": "comparison.equal", "of": {"kind": "static"}, "at_least": 1}
    plan = {"kinds": ["static"], "compare": True}
    for equal, word in ((True, CONFIRMED), (False, REFUTED)):
        assert verdict(rule, {"static": {"figures": "comparison", "equal": equal}}, plan) == word


def test_other_tokens_refute_that_guesses_change_none_and_every_other_check_counts() -> None:
    rule = {"figure": "comparison.equal", "of": {"kind": "static"}, "at_least": 1}
    claim = Claim("x", "", "", {"kinds": ["static"], "compare": True}, rule)

    def report(name: str, point: Point) -> Report:
        made = report_of({"static": {"figures": "comparison", "equal": False}}, point)
        made["rows"].append(check(0, name, "other tokens", "violated"))
        return made

    assert judge(claim, partial(report, "same text with guesses"))[0] == REFUTED
    with pytest.raises(ValueError, match="static violates a check: tokens fed"):
        judge(claim, partial(report, "tokens fed"))


def _on_two_machines(point: Point) -> Report:
    return report_of({kind: {**row, "cache_bytes": 9} for kind, row in times(0.4).items()}, point, machine=point.kind)


def test_bytes_of_two_machines_are_compared_and_times_are_not() -> None:
    rule = {**TIMES, "figure": "step.cache_bytes", "at_most": 1}
    assert judge(Claim("x", "", "", COSTS, rule), _on_two_machines) == (CONFIRMED, 1, (1, 1))
    with pytest.raises(ValueError, match="machine differs between its cells; give --out"):
        judge(Claim("x", "", "", COSTS, TIMES), _on_two_machines)


def _violated(point: Point) -> Report:
    report = report_of(times(0.4), point)
    report["rows"] += [check(0, "cache", "it was off", "violated")] * (point.kind == "static")
    return report


def test_what_cannot_be_compared_has_no_verdict() -> None:
    lossless = quality(0.0)
    lossless["int4"]["judged"] = False
    failed: Row = {"figures": "task", "digest": "d", "scores": [0.0] * 20}
    needles = {"figure": "task.scores", "of": {"kind": "int4"}, "minus": {"kind": "static"}, "at_least": -0.2}
    other, few, nowhere = {**TIMES, "figure": "step.x"}, times(0.4, n=4), {**TIMES, "of": {}}
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: verdict(QUALITY, quality(0.0, digest="e")), "the digest of weights or inputs differs"),
        (lambda: verdict(QUALITY, lossless), "int4 has dropped or compressed nothing"),
        (lambda: verdict(TIMES, few, COSTS), "step.step_seconds has 4 samples, and an interval needs 5"),
        (lambda: verdict(other, times(0.4), COSTS), "step.x of int4 was not measured"),
        (lambda: judge(Claim("x", "", "", COSTS, TIMES), _violated), "static violates a check: cache: it was off"),
        (lambda: verdict(needles, {"static": failed, "int4": failed}), "static scores 0 in every sample"),
        (lambda: verdict(nowhere, times(0.4), COSTS), "is 2 cells of the plan, and must be one"),
    ]
    assert unrefused(refused) == []


def test_the_command_judges_cells_that_are_there_and_lists_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([0, 1, 3])
    monkeypatch.setattr("llama.cli.claim.measure_cells", lambda points, _: measured.extend(points) or next(codes))
    measured: list[Point] = []
    for point in CLAIMS["int4-lossless"].points:
        write_json(report_of(quality(0.01), point), file_of(tmp_path, point))
    assert main("int4-lossless", "kvzip", out=str(tmp_path)) == 0
    assert measured == CLAIMS["int4-lossless"].points
    shown = capsys.readouterr().out
    assert re.search(r"int4-lossless \|.*\| 0.0\d+ \(0.\d+ to 0.\d+\) \| confirmed +\|", shown)
    assert "kvzip |" in shown
    assert "EPYC, 2 threads, commit c, fp32" in shown
    for point in CLAIMS["int8-doubles"].points:
        report = new_report("caches", [Cell(kv_cache=point.kind)])
        report["environment"], cell_row(report, 0)["error"] = {}, "refused: too long"
        write_json(report, file_of(tmp_path, point))
    assert main("int8-doubles", out=str(tmp_path)) == 1
    assert "no verdict: step.step_seconds of int8 was not measured (refused: too long)" in capsys.readouterr().out
    assert main("int4-lossless", out=str(tmp_path)) == 3, "a check of a cell is violated"
    assert main() == 0
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in CLAIMS)
    with pytest.raises(ValueError, match=r"'int5' is not a claim; known are all, FILE\.toml, memory-off"):
        main("int5")


OWN = """
[mine]
    says = "four bits lose nothing on my text"
    source = "me"
    plan = { tasks = ["quality"], contexts = [256], kinds = ["static", "int4"] }
    rule = { figure = "quality.nlls", of = { kind = "int4" }, minus = { kind = "static" }, at_most = 0.02 }
"""


def test_a_file_of_ones_own_has_claims_that_are_judged_like_the_published_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama.cli.claim.measure_cells", lambda *_: 0)
    (file := tmp_path / "own.toml").write_text(OWN)
    for point in read_claims(OWN)["mine"].points:
        write_json(report_of(quality(0.01), point), file_of(tmp_path, point))
    assert main(str(file), out=str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| mine \| four bits lose nothing on my text \| me \|.*\| confirmed +\|", shown)
    assert "int4-lossless" not in shown, "the published ones were not asked for"
    file.write_text(OWN.replace("[mine]", "[int4-lossless]"))
    with pytest.raises(ValueError, match="int4-lossless is a claim already; give it another name"):
        main(str(file))


NO_KIND = """[mine]
says = "a"
source = "me"
rule = { figure = "quality.mean_kl", of = { context = 64 }, below = 1 }
"""
WRONG = {
    (OWN, "[mine"): "the claims are not TOML",
    (OWN, ""): "there is no claim",
    (OWN, "mine = 1"): "claim mine is 1, and must have",
    ('    source = "me"', ""): "claim mine is .*, and must have",
    ('"me"', "1"): "claim mine has source=1; known are says",
    ("source", "sauce"): "claim mine is .*, and must have",
    ("at_most", "around"): "the rule of claim mine has around=0.02; known are figure",
    ("at_most = 0.02", 'at_most = "0.02"'): "has at_most='0.02'; known are",
    (", at_most = 0.02", ""): "must have one of below, at_most",
    ("at_most = 0.02", "at_most = 0.02, below = 1"): "must have one of below, at_most",
    ("at_most = 0.02", "at_most = 0.02, over = { kind = 'static' }"): "at most one of minus and over",
    ('of = { kind = "int4" }', 'of = { kind = "int8" }'): "claim mine: int8 is 0 cells of the plan, and must be one",
    ('["static", "int4"]', '["static", "lru"]'): "is not a known kind of cache",
    (
        "quality.nlls",
        "quality.nll",
    ): "claim mine has figure='quality.nll'; known of its cell are quality.nlls",
    ("quality.nlls", "step.step_seconds"): "known of its cell are quality.nlls, quality.kls, quality.step_seconds",
    (OWN, NO_KIND): "the rule of claim mine has a side without a kind; give each a kind, or the claim a plan",
}


def test_a_wrong_claim_is_refused_by_its_name() -> None:
    cases = [(partial(read_claims, OWN.replace(*change)), error) for change, error in WRONG.items()]
    assert unrefused(cases) == []
