"""`llama-kv compare`: what is a difference, what may be compared, and how often the interval is right."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from bench_reports import caches_report, check, noisy, table_report
from refusals import unrefused

from llama.bench.report.contents import NOISY
from llama.bench.schema import Report
from llama.bench.two_reports import ALLOWED, BETTER, SAME, WORSE, Figure, differences, figures
from llama.cli.compare import main
from llama.quality.intervals import ratio_interval

TIMES = ("seconds", "first_token_seconds", "step_seconds")


def run(n: int = 5, *, slower: float = 1.0) -> Report:
    """Return the report of one cell, with its times multiplied."""
    report = table_report([{"batch_size": 1, "kv_caching": True, "n": n}])
    row = report["rows"][0]
    for name in TIMES:
        row[name] = [[s * slower for s in one] if isinstance(one, list) else one * slower for one in row[name]]
    return report


def changed(where: str, value: Any) -> Report:
    """Return a report with one value changed, at a path of keys."""
    report = run()
    *keys, last = where.split(".")
    place: Any = report
    for key in keys:
        place = place[int(key) if key.isdecimal() else key]
    place[last] = value
    return report


def saved(folder: Path, *reports: Report) -> list[str]:
    """Write each report into a file, and return the paths."""
    paths = [folder / f"{i}.json" for i in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        path.write_text(json.dumps(report), "utf-8")
    return list(map(str, paths))


def by_column(a: Report, b: Report) -> dict[str, Figure]:
    return {one.column: one for one in figures(a, b)}


def test_equal_runs_show_no_difference_also_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = saved(tmp_path, run())
    Path(path).rename(tmp_path / "results.json")
    assert main(str(tmp_path), str(tmp_path / "results.json")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| cell, batch 1")]
    assert sum(SAME in line for line in lines) == 4  # three times and resident memory
    assert [line for line in lines if "1.000" not in line] == []


def test_a_slower_run_is_found_and_ends_with_1(tmp_path: Path) -> None:
    a, b, out = *saved(tmp_path, run(), run(slower=1.2)), tmp_path / "comparison.json"
    assert main(a, b, json=str(out)) == 1
    rows = {row["column"]: row for row in json.loads(out.read_text("utf-8"))["figures"]}
    assert [(round(rows[name]["ratio"], 9), rows[name]["verdict"]) for name in TIMES] == [(1.2, WORSE)] * 3
    assert rows["resident_peak_bytes"]["verdict"] == SAME
    assert main(a, b, allow=21.0) == main(b, a) == 0


def test_a_verdict_follows_from_ratio_interval_and_what_is_allowed() -> None:
    worse, better = (Figure("", "", [1.0], [1.0], 1 + d, (1 + d / 2, 1 + 2 * d)) for d in (0.2, -0.2))
    assert [worse.verdict(allow) for allow in (0.0, 19.0, 21.0)] == [WORSE, WORSE, ALLOWED]
    assert better._replace(interval=(0.6, 0.9)).verdict(0.0) == BETTER
    assert worse._replace(interval=(1.0, 1.5)).verdict(0.0) == SAME


def test_figures_are_medians_and_the_steps_of_a_repetition_one_sample() -> None:
    """Steps of one process are not independent: as separate samples they would show differences that are none."""
    found = by_column(changed("rows.0.seconds", [2.0] * 9), changed("rows.0.seconds", [3.0] * 8 + [400.0]))
    assert (found["seconds"].ratio, found["seconds"].interval) == (1.5, (1.5, 1.5))
    assert found["step_seconds"].a == [median(steps) for steps in run()["rows"][0]["step_seconds"]]


@pytest.mark.parametrize("n", [1, 4])
def test_few_samples_have_a_ratio_without_interval_and_are_never_worse(n: int) -> None:
    found = by_column(run(n), run(n, slower=9.0))["seconds"]
    assert found.ratio == pytest.approx(9)
    assert (found.interval, found.verdict(0.0)) == (None, "not judged")


def test_figures_of_one_side_are_listed() -> None:
    a, b = caches_report(["static", "int8"]), caches_report(["static", "int4"])
    for report in (a, b):
        report["rows"] = [row for row in report["rows"] if row["figures"] == "quality"]
    found = {(one.name.split(", ")[-2], one.verdict(5.0)) for one in figures(a, b)}
    assert found == {("cache on", "not judged"), ("int8 cache", "only in A"), ("int4 cache", "only in B")}


def scored(scores: list[float], digest: str | None = "d") -> Report:
    """Return the report of the full cache with these scores of a task."""
    report = caches_report(["static"])
    report["rows"] = [row for row in report["rows"] if row["figures"] == "task"]
    report["rows"][0] |= {"digest": digest, "scores": scores, "score": fmean(scores)}
    return report


def test_scores_are_compared_sample_by_sample_and_more_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, none = [1.0] * 12 + [0.0] * 8, [0.0] * 20
    like, worse = [*full[:10], 0.0, 0.0, 1.0, *full[13:]], [0.0] * 9 + full[9:]
    for a, b, verdict in ((full, like, SAME), (full, worse, WORSE), (worse, full, BETTER), (none, full, BETTER)):
        assert by_column(scored(a), scored(b))["score"].verdict(5.0) == verdict
    assert by_column(scored(none), scored(none))["score"].verdict(5.0) == "not judged", "no sample passes"
    assert by_column(scored(full), scored(worse))["score"].verdict(80.0) == ALLOWED
    assert main(*saved(tmp_path, scored(full), scored(worse))) == 1
    assert "| 60.0 | 15.0 | 0.250 | B - A: -45.0 (-70.0 to -25.0) | 20 pairs | worse |" in capsys.readouterr().out
    del (bare := scored(none))["rows"][0]["scores"]
    for other in (bare, scored(none, "e"), scored(none[:9]), scored(none, None)):
        assert main(*saved(tmp_path, scored(full), other)) == 0
        assert "a score without B - A: the samples or the weights differ or are unknown" in capsys.readouterr().out


def test_another_setup_is_refused_by_name_unless_it_is_asked_for_and_then_in_the_title(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {f"environment.{name}": "x" for name in ("cpu", "cpu_capability", "cores", "threads", "gpu", "torch")}
    others |= {f"model.{name}": "x" for name in ("name", "weights", "parameters", "sizes.dim")}
    others |= {"cells.0.dtype": "bf16", "cells.0.device": "cuda", "preset": "chat", "plan.text": "x"}
    for where, value in others.items():
        (found,) = differences(run(), changed(where, value))
        assert where.split(".")[-1] in found.split(" is ")[0].split(" "), where
    assert differences(run(), changed("model.sizes.kv_cache", "int8")) == []  # of the last job
    a, b = saved(tmp_path, run(), changed("cells.0.dtype", "bf16"))
    assert unrefused([(lambda: main(a, b), r"measured alike: dtype is \['fp32'\] in A .*--other_setup")]) == []
    assert main(a, b, other_setup=True) == 0
    out = capsys.readouterr().out
    assert "NOT measured alike: dtype is ['fp32'] in A and ['bf16'] in B" in out.splitlines()[0]
    assert SAME in out  # figures of both dtypes are paired
    assert "only in" not in out


def test_noise_is_in_the_title_and_a_comparison_that_judges_nothing_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = run(3)
    loaded["rows"].append(check(0, "other work", "occupied 1.50 of 2 cores", "noisy"))
    assert main(*saved(tmp_path, run(3), loaded)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith(f"; B: {NOISY}**")
    assert "no figure has 5 samples on both sides" in err


def test_mistakes_are_refused(tmp_path: Path) -> None:
    bad = [changed("rows", [{"seconds": [1.0]}]), changed("rows.0.seconds", ["one"]), changed("rows", [])]
    good, rowless, word, empty, old = saved(tmp_path, run(), *bad, changed("schema", "llama-kv/benchmark/2"))
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "link").symlink_to(good)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: main(good), "1 results"),
        (lambda: main(good, good, allow=-1.0), "allow=-1.0"),
        (lambda: main(good, good, allow=math.nan), "allow=nan"),
        (lambda: main(good, good, json=str(tmp_path / "link")), "link is one of the results; choose another"),
        (lambda: main(good, rowless), "a result is malformed"),
        (lambda: main(good, word), "a result is malformed"),
        (lambda: main(good, empty), "no figure in common"),
        (lambda: main(good, old), "schema is 'llama-kv/benchmark/2'"),
        (lambda: main(good, str(tmp_path / "text")), "text: "),
    ]
    assert unrefused(calls) == []


def test_the_interval_is_seeded() -> None:
    a, b = noisy(1.0, 60, "a"), noisy(1.0, 60, "b")  # so many medians that no two seeds find the same ends
    assert len({ratio_interval(a, b) for _ in range(3)}) == 1


@pytest.mark.slow  # 200 intervals
def test_the_interval_covers_the_true_ratio_in_about_95_percent() -> None:
    draw, covered = random.Random(5), 0
    for _ in range(200):
        a, b = ([draw.lognormvariate(mu, 0.1) for _ in range(10)] for mu in (0.0, 0.2))
        low, high = ratio_interval(a, b) or (0.0, 0.0)
        covered += low <= math.exp(0.2) <= high
    assert 0.91 <= covered / 200 <= 0.99, covered
