"""Tasks are planned before anything runs, measured for every kind, and compared sample by sample."""

import json
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from bench_reports import caches_report
from fakes import Bytes
from tiny import tiny_model

from llama.bench.cell import Cell
from llama.bench.merged import with_ratios
from llama.bench.presets import kind_groups
from llama.bench.report.tables import figure_tables
from llama.bench.run.tasks import plan_tasks, samples_of, task_row
from llama.bench.schema import Report, Row
from llama.cli import benchmark_inference as script
from llama.quality.intervals import mean_interval
from llama.quality.samples import Sample

LINE = {"context": "a b c " * 9, "question": "?", "answers": ["c"], "metric": "contains", "max_gen_len": 4}


def source(max_seq_len: int = 3000) -> Any:
    return SimpleNamespace(tokenizer=Bytes(), args=SimpleNamespace(max_seq_len=max_seq_len))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({**LINE, "question": f"{n}?"}) + "\n" for n in range(3)))
    return str(path)


def test_every_task_that_is_asked_for_is_planned_at_every_length_with_its_tokens(file: str) -> None:
    planned = plan_tasks(source(), ["ruler:vt,fwe", file], [2000, 3000], 2, seed=7)
    names = [(one["task"], one["context"], one["samples"]) for one in planned]
    assert names == [("vt", 2000, 2), ("fwe", 2000, 2), ("vt", 3000, 2), ("fwe", 3000, 2), (file, None, 2)]
    assert [one["steps"] for one in planned] == [60, 100, 60, 100, 8]
    for one in planned:
        samples = samples_of(source(), one)
        tokens = sum(sample.total_len(Bytes()) for sample in samples)
        assert tokens == pytest.approx(one["tokens"] + one["steps"], rel=0.05)
        assert len({sample.context + sample.question for sample in samples}) == 2
    assert plan_tasks(source(), [file], [], None, seed=1)[0]["samples"] == 3, "all of a file"
    assert plan_tasks(source(), [], [512], None, seed=1) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("rulers", "--task rulers is not known; give ruler, ruler:NAME,NAME or a file FILE.jsonl"),
        ("ruler:qa_1", "task 'qa_1' is not known; choose ruler, or some of needle"),
        ("ruler:vt,vt", "--task vt is named twice"),
        ("FILE", r"a sample has 6\d tokens with its longest answer, and the model's max_seq_len is 20"),
    ],
)
def test_tasks_that_cannot_be_measured_are_rejected_before_anything_runs(asked: str, message: str, file: str) -> None:
    few = asked == "FILE"
    with pytest.raises(ValueError, match=message):
        plan_tasks(source(20 if few else 3000), [file if few else asked], [2000], 1, seed=1)
    with pytest.raises(ValueError, match="--samples=0 must be at least 1"):
        plan_tasks(source(), [file], [], 0, seed=1)


def test_a_file_is_rejected_if_a_later_sample_is_too_long(file: str) -> None:
    Path(file).write_text("".join(json.dumps({**LINE, "context": "a" * count}) + "\n" for count in (9, 200)))
    with pytest.raises(ValueError, match=r"a sample has 2\d\d tokens with its longest answer"):
        plan_tasks(source(100), [file], [], None, seed=1)


def test_flags_of_tasks_are_those_of_the_preset_and_contexts_may_be_listed() -> None:
    defaults: dict[str, Any] = script.main.__kwdefaults__ or {}
    flags = SimpleNamespace(**{**defaults, "preset": "caches", "task": ["ruler"], "contexts": ["1024,4096", "8192"]})
    script.check_flags(flags)
    assert flags.contexts == ["1024", "4096", "8192"]
    for changed, message in (
        ({"preset": "table", "task": ["ruler"]}, "--task cannot be combined with --preset table"),
        ({"preset": "caches", "samples": 3}, "--samples counts the samples of a task"),
    ):
        with pytest.raises(ValueError, match=message):
            script.check_flags(SimpleNamespace(**{**defaults, **changed}))


def test_a_task_is_done_for_all_kinds_or_for_none() -> None:
    """Scores of different kinds are only meaningful together."""
    tasks = [{"task": "vt", "context": 512, "samples": 2, "seed": 1, "tokens": 900, "steps": 60}]
    (first,) = kind_groups([Cell(kv_cache=kind) for kind in ("static", "int8", "int4")], {"tasks": tasks})
    assert [(job.kind, job.name) for job in first.jobs] == [
        ("cache_task", "static: vt at 512 tokens"),
        ("cache_task", "int8: vt at 512 tokens"),
        ("cache_task", "int4: vt at 512 tokens"),
    ]
    assert first.jobs[0].work == 960


def test_a_row_has_the_score_and_the_length_of_every_sample_both_ways() -> None:
    model = tiny_model(vocab_size=258, max_seq_len=128).requires_grad_(False)
    model.kv_cache = "h2o:16"
    samples = [Sample("x" * n, "?", tuple("abcdefghijklmnop"), max_gen_len=5) for n in (30, 40)]
    row = task_row(model, source(), {"task": "own", "context": None}, samples)
    assert row["judged"]
    assert row["answer_lens"] == row["answer_lens_question_seen"] == [5, 5]
    assert row["score"] == fmean(row["scores"])
    assert len(row["scores"]) == len(row["scores_question_seen"]) == 2
    assert row["cache_bytes"] < 31 * 2 * 2 * 2 * 8 * 8
    fewer, same = (task_row(model, source(), {"task": "own", "context": None}, samples[:1]) for _ in range(2))
    assert row["digest"] != fewer["digest"] == same["digest"]


# ---- the table -----------------------------------------------------------------------------------------------------


def with_tasks(*scores: dict[str, list[float]], judged: bool = True) -> Report:
    """Return a report of kinds, of which each has the scores of some tasks at 512 tokens."""
    report = caches_report(["static", "int8", "int4"][: len(scores)])
    report["rows"] = [row for row in report["rows"] if row["figures"] != "task"]
    for cell, tasks_of in enumerate(scores):
        for task, values in tasks_of.items():
            lens, seen = [3 + cell] * len(values), [1.0] * len(values)
            row: Row = {"figures": "task", "cell": cell, "task": task, "context": 512, "cache_bytes": 1 << 20}
            row |= {"scores": values, "score": fmean(values), "answer_lens": lens, "judged": judged or not cell}
            row |= {"scores_question_seen": seen, "score_question_seen": 1.0, "answer_lens_question_seen": lens}
            report["rows"].append(row)
    return report


def cells(report: Report) -> list[dict[str, str]]:
    """Return the scores as rows by their heads."""
    with_ratios(report)
    (table,) = (one for one in figure_tables(report) if one.title == "Scores of tasks")
    return [dict(zip(table.heads, row, strict=True)) for row in table.rows]


SCORE, MINUS, LOST = "score, %", "minus full, %", "lost"


def test_a_kind_is_compared_sample_by_sample_with_the_full_cache() -> None:
    full = [1.0] * 12 + [0.0] * 8
    same, worse = [*full[:11], 0.0, 1.0, *full[13:]], [0.0] * 9 + full[9:]
    first, other, one = cells(with_tasks({"vt": full}, {"vt": same}, {"vt": worse}))
    assert [row["KV cache"] for row in (first, other, one)] == ["static", "int4", "int8"]
    assert (first["task"], first["context"], first["KV cache, MB"]) == ("vt", "512", "1.00")
    assert (first[SCORE], first[MINUS], first[LOST]) == ("60.0 (40.0 to 80.0)", "-", "-")
    assert (one[SCORE], one[MINUS], one[LOST]) == ("60.0 (40.0 to 80.0)", "no difference shown", "1: 11")
    assert one["answer, tokens"] == "4.0"
    assert (other[MINUS], other[LOST]) == ("-45.0 (-70.0 to -25.0)", "9: 0, 1, 2, 3, 4, 5, 6, 7 and 1 more")
    seen = ("score, question seen, %", "minus full, question seen, %", "lost, question seen")
    assert [other[name] for name in seen] == ["100.0", "no difference shown", "0"]


def test_a_report_of_scores_alone_has_no_table_of_cells_without_times() -> None:
    report = with_tasks({"vt": [1.0] * 4}, {"vt": [1.0] * 4})
    report["rows"] = [row for row in report["rows"] if row["figures"] in ("cell", "task")]
    assert [table.title for table in figure_tables(report)] == ["Scores of tasks"]


def test_a_task_that_the_full_cache_fails_in_every_sample_does_not_judge_a_kind() -> None:
    full, better = [0.0] * 20, [0.0, 1.0] * 10
    _, one, other = cells(with_tasks({"vt": full}, {"vt": full}, {"vt": better}))
    assert one[MINUS] == other[MINUS] == "the task cannot judge"
    assert one["minus full, question seen, %"] == "no difference shown", (
        "with the question seen, the full cache has all"
    )


def test_few_samples_have_a_difference_without_interval_and_a_kind_that_did_not_act_is_not_judged() -> None:
    (_, one) = cells(with_tasks({"vt": [1.0] * 4}, {"vt": [0.0] * 4}))
    assert (one[SCORE], one[MINUS], one[LOST]) == ("0.0", "-100.0 (too few samples)", "4: 0, 1, 2, 3")
    assert one["minus full, question seen, %"] == "+0.0 (too few samples)"
    (_, one) = cells(with_tasks({"vt": [1.0] * 9}, {"vt": [0.0] * 9}, judged=False))
    assert (one[SCORE], one[MINUS], one[LOST]) == ("not judged",) * 3


def test_several_tasks_have_a_mean_over_all_samples_of_kinds_that_have_all_of_them() -> None:
    scores = {"vt": [1.0] * 6, "fwe": [0.5] * 6, "needle": [0.0] * 6}
    found = cells(with_tasks(scores, {**scores, "fwe": [0.0] * 6}))
    means = [row for row in found if row["task"] == "the 2 tasks of RULER"]
    assert [row[SCORE].partition(" ")[0] for row in means] == ["75.0", "50.0"]
    assert means[-1][MINUS].startswith("-25.0 (")
    lacking = cells(with_tasks(scores, {"vt": [1.0] * 6}))
    assert not any("RULER" in row["task"] for row in lacking)


def test_the_interval_of_a_mean_misses_the_truth_in_about_one_case_of_twenty() -> None:
    dice, missed = Random(1), 0
    for _ in range(40):
        low, high = mean_interval(tuple(dice.gauss(0, 1) for _ in range(20))) or (1.0, 0.0)
        missed += not low <= 0 <= high
    assert 1 <= missed <= 6
