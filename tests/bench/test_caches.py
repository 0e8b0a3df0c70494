"""The preset of kinds of cache measures bytes, time and quality of each at one length, within its budget."""

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fakes import Bytes, write_checkpoint
from jobs_here import Here, jobs_here, run_of

from llama import load
from llama.bench import presets
from llama.bench.cell import Cell
from llama.bench.presets import FEWEST, plan_report, quality_plan, text_plan
from llama.bench.report.text import report_markdown
from llama.bench.run import cache_kind, step_times, worker
from llama.bench.run.cache_kind import STEPS, greedy_divergence
from llama.bench.run.directory import new_run, resumed_run
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.run.kind_validity import CHECKS
from llama.bench.run.models import find_model
from llama.bench.schema import Report, Row, cell_row, merge, new_report, rows_of
from llama.bench.texts import read_corpus
from llama.cli import benchmark_inference as script
from llama.host.cores import OtherLoad
from llama.kv_cache import KVCache
from llama.quality import intervals
from llama.quality.perplexity import compare
from llama.quality.samples import Sample
from llama.streaming import encode_prompt

KINDS = ["int8", "window:20+4", "paged", "h2o:100"]
LENGTH, SCORED = 64, 16
TEXT = read_corpus()[:6000]
POSITION = 2 * 2 * 2 * 8 * 4  # bytes of one: layers, keys and values, heads of 8, fp32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=160)
    return Cell(input_len=64, output_len=1, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return on_little_text(monkeypatch)


def on_little_text(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Do the jobs in this process, on little text, beside no other work."""
    monkeypatch.setattr(presets, "KIND_CONTEXTS", (32, LENGTH, 512))
    monkeypatch.setattr(presets, "LENGTH", LENGTH)
    monkeypatch.setattr(intervals, "BLOCK", 6)
    monkeypatch.setattr(presets, "NEEDLE_LENGTHS", (120,))
    monkeypatch.setattr(presets, "SCORED", SCORED)
    monkeypatch.setattr(presets, "MOST_SCORED", SCORED)
    monkeypatch.setattr(presets, "GREEDY", 10)
    monkeypatch.setattr(presets, "NEEDLES", 1)
    monkeypatch.setattr(cache_kind, "samples_of", lambda *_: [Sample(TEXT[:119], " ?", ("no",), max_gen_len=3)])
    monkeypatch.setattr(presets, "FEWEST", 8)
    monkeypatch.setattr(cache_kind, "read_corpus", lambda: TEXT)
    monkeypatch.setattr(OtherLoad, "stop", lambda _: 0.0)
    return jobs_here(monkeypatch, lambda kind, cell: f"{kind} {cell.kv_cache}")


def measured(
    base: Cell, out: Path, *, kinds: list[str] = KINDS, minutes: float = 60, resume: bool = False, **asked: Any
) -> Report:
    run = run_of(plan_report("caches", base, kinds=kinds, budget=minutes, **asked), out, resume=resume)
    run.run()
    return run.report


def judged(cell: Cell, needles: int = 0, **changes: Any) -> list[Row]:
    """Return the rows of the job that judges a kind on the text of a whole run."""
    lengths = [120] * bool(needles)
    plan = quality_plan(cache_kind.OWN_TEXT, LENGTH, SCORED, greedy=10, needle_lengths=lengths, needles=needles)
    plan |= changes
    rows: list[Row] = worker.JOBS["cache_quality"](cell, plan=plan)["rows"]
    return rows


class Whole(NamedTuple):
    """A run with room for everything: its report and its jobs."""

    report: Report
    jobs: list[str]


@pytest.fixture(scope="module")
def whole(base: Cell, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    with pytest.MonkeyPatch.context() as monkeypatch:
        here = on_little_text(monkeypatch)
        return Whole(measured(base, tmp_path_factory.mktemp("run")), here.done)


def quality(report: Report, cell: int) -> Row:
    (row,) = rows_of(report, "quality", cell)
    return row


def test_every_kind_is_measured_beside_the_full_cache_at_one_length(whole: Whole) -> None:
    report, all_kinds = whole.report, ["static", *KINDS]
    assert [cell["kv_cache"] for cell in report["cells"]] == all_kinds
    assert whole.jobs == [
        "machine static",
        *(f"cache_quality {kind}" for kind in all_kinds),
        *(f"cache_costs {kind}" for kind in all_kinds),
    ]
    assert report["plan"]["contexts"] == [32, LENGTH], "as far as the model's limit goes"
    assert report["failures"] == []
    for place in range(len(all_kinds)):
        steps, row, (needle,) = rows_of(report, "step", place), quality(report, place), rows_of(report, "task", place)
        assert [(step["context"], len(step["step_seconds"])) for step in steps] == [(32, STEPS), (LENGTH, STEPS)]
        for one in (*steps, row, needle):
            assert one["cache_bytes"] == one["predicted_cache_bytes"]
        assert (row["context"], row["tokens"], row["greedy_tokens"]) == (LENGTH, SCORED, 10)
        assert len(row["step_seconds"]) == STEPS
        assert (needle["task"], needle["context"], needle["answer_lens"]) == ("needle", 120, [3])
        assert cell_row(report, place)["path"] == row["path"] == "plain"
    static, int8, window, paged, _ = rows_of(report, "quality")
    for row in (static, paged):
        assert row["mean_kl"] < 1e-9
        assert (row["top1_agreement"], row["divergence_token"]) == (1.0, None)
    assert static["cache_bytes"] == (LENGTH - 1) * POSITION
    assert window["cache_bytes"] == 24 * POSITION
    assert 0 < int8["mean_kl"] < window["mean_kl"]
    assert static["nll"] == pytest.approx(paged["nll"])
    facts = [cell_row(report, place) for place in range(5)]
    assert [row["lossless"] for row in facts] == [True, False, False, True, False]
    assert [row["saves"] for row in facts] == [False, True, True, False, True]
    assert [row["quantized"] for row in facts] == [False, True, *[False] * 3], "the window stores keys as they come"
    assert [row["judged"] for row in rows_of(report, "quality")] == [True] * 4 + [False], "h2o has dropped nothing"
    assert [row["judged"] for row in rows_of(report, "task")] == [True] * 5
    assert {row["status"] for row in rows_of(report, "check") if row["name"] in CHECKS} <= {"ok", "not observed"}


def test_the_divergence_is_that_of_two_caches_in_lockstep(base: Cell, whole: Whole) -> None:
    """Against a full cache fed step by step; the preset compares with one pass without a cache."""
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    ids = encode_prompt(tokenizer, TEXT)[:LENGTH]
    for place, kind in enumerate(["static", *KINDS]):
        wanted, found = compare(model, kind, ids, prompt_len=LENGTH - SCORED), quality(whole.report, place)
        assert (found["tokens"], found["top1_agreement"]) == (wanted.tokens, wanted.top1_agreement)
        assert found["mean_kl"] == pytest.approx(wanted.mean_kl, rel=1e-3, abs=1e-9)
        assert found["nll"] == pytest.approx(wanted.other_nll)
        blocks = [wanted.other_nlls[:6], wanted.other_nlls[6:12], wanted.other_nlls[12:]]
        assert found["nlls"] == pytest.approx([fmean(block) for block in blocks])
        assert found["kls"] == pytest.approx([fmean(wanted.kls[i : i + 6]) for i in (0, 6, 12)], rel=1e-3, abs=1e-9)


def test_greedy_text_is_what_generation_writes_and_its_divergence_is_found_in_one_pass(base: Cell) -> None:
    tiny = {"device": "cpu", "dtype": "fp32"}
    model, tokenizer = load(base.model, **tiny)
    prompt = encode_prompt(tokenizer, TEXT)[:60]
    full = model.generate_tokens([prompt], 30, temperature=0.0)[0][0]
    assert greedy_divergence(model, prompt, 30) == {"greedy_tokens": 30, "divergence_token": None}
    window, _ = load(base.model, kv_cache="window:8+2", **tiny)
    ours = window.generate_tokens([prompt], 30, temperature=0.0)[0][0]
    token = next(place for place, (one, other) in enumerate(zip(full, ours, strict=True)) if one != other)
    found = greedy_divergence(window, prompt, 30)
    assert (found["divergence_token"], found["uncached_id"], found["cached_id"]) == (token, full[token], ours[token])
    with torch.inference_mode():
        logits = model.with_kv_caching(False)(torch.tensor([prompt + full[:token]]))[0, -1].topk(2).values
    assert found["margin"] == pytest.approx(float(logits[0] - logits[1]), rel=1e-3, abs=1e-5)


PROMPT_END = """
import torch

from llama.kv_cache import KVCache


class PromptEnd(KVCache, kind="prompt_end"):
    lossless = False
    seen = set()

    def predicted_bytes(self, *, prompts, ends, reserved, itemsize):
        return len(prompts) * min(max(ends), 8) * self.position_bytes(itemsize)

    def update(self, rows, xk, xv):
        if rows.start > 0:
            xk, xv = torch.cat((self.keys, xk), dim=1), torch.cat((self.values, xv), dim=1)
        self.keys, self.values = xk, xv
        return xk, xv

    def observe(self, attended):
        if attended.rows.prompt_ends:
            self.keys, self.values = self.keys[:, -8:], self.values[:, -8:]
            self.seen.add((attended.rows.width, bool(attended.x.abs().sum() > 0)))
"""


@pytest.fixture
def own(base: Cell, tmp_path: Path) -> Cell:
    (tmp_path / "own.py").write_text(PROMPT_END)
    return base.but(kv_cache=f"{tmp_path / 'own.py'}:prompt_end")


@pytest.mark.usefixtures("here")
def test_a_kind_that_drops_keys_where_a_prompt_ends_is_given_a_real_prompt(
    own: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt it keeps 8 keys, and all behind it: the steps that are timed, and the tokens that are scored."""
    monkeypatch.setattr(step_times, "CHUNK", 32)  # of what is written without a forward
    steps, (_, row, *_) = worker.JOBS["cache_costs"](own, contexts=[32, LENGTH])["rows"][1:], judged(own)
    assert KVCache.kinds["prompt_end"].seen >= {(32 - STEPS - 1, True), (LENGTH - SCORED, True)}  # type: ignore[attr-defined]
    assert [step["cache_bytes"] for step in steps] == [(8 + STEPS + 1) * POSITION] * 2
    assert [step["predicted_cache_bytes"] for step in steps] == [8 * POSITION] * 2, "a wrong prediction shows"
    report = new_report("caches", [own])
    merge(report, steps, 0)
    assert "own.py:prompt_end does not store what its predicted_bytes says" in report_markdown(report)
    assert row["cache_bytes"] == (8 + SCORED - 1) * POSITION
    assert row["judged"]


@pytest.mark.slow
def test_a_kind_of_ones_own_is_judged_in_a_process_of_its_own(own: Cell) -> None:
    plan = {"text": cache_kind.OWN_TEXT, "length": LENGTH, "tokens": SCORED, "greedy_tokens": 0}
    rows = run_job("cache_quality", own, plan={**plan, "needle_lengths": [], "needles": 0})["rows"]
    assert [row["judged"] for row in rows if row["figures"] == "quality"] == [True]


def test_a_budget_of_a_moment_judges_the_full_cache_and_one_kind_and_lists_what_is_left_out(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["int8", "window:20+4"]
    report = measured(base, tmp_path, kinds=kinds, minutes=0.0001)
    assert here.done == ["machine static", "cache_quality static", "cache_quality int8"]
    costs = [f"{kind}: bytes and times" for kind in ("static", *kinds)]
    assert report["failures"] == [f"{what}: no room in the budget" for what in ("window:20+4: quality", *costs)]
    assert script.report_exit_code(report) == 0
    assert "| 64 | int8 |" in report_markdown(report)
    (left,) = rows_of(report, "quality", 2)
    assert f"| 64 | window:20+4 | {' | '.join(['not measured'] * 2)} |" in report_markdown(report)
    here.done = []
    monkeypatch.setattr(OtherLoad, "stop", lambda _: float(1 << 20))
    whole = measured(base, tmp_path, kinds=kinds, minutes=0, resume=True)
    assert here.done[1:] == ["cache_quality window:20+4", *(f"cache_costs {kind}" for kind in ("static", *kinds))]
    (judged_row,) = rows_of(whole, "quality", 2)
    assert judged_row["cache_bytes"] == left["predicted_cache_bytes"], "the bytes of a kind that was left out"
    noisy = {row["cell"] for row in rows_of(whole, "check") if row["status"] == "noisy"}
    assert noisy == {0, 1, 2}, "steps that others disturbed are marked"
    assert script.report_exit_code(whole, strict=True) == 4


def test_named_tasks_are_measured_for_every_kind_before_all_else_if_they_fit(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    file = tmp_path / "own.jsonl"
    line = {"context": "the day and the night " * 5, "question": " ?", "answers": ["a"], "metric": "contains"}
    file.write_text("".join(json.dumps({**line, "max_gen_len": n}) + "\n" for n in (2, 3)))
    report = measured(base, tmp_path, kinds=["int8"], tasks=[str(file)])
    assert here.done[1:3] == ["cache_task static", "cache_task int8"]
    rows = [row for row in rows_of(report, "task") if row["task"] == str(file)]
    assert [(row["cell"], row["context"], row["answer_lens"]) for row in rows] == [(0, None, [2, 3]), (1, None, [2, 3])]
    assert f"| {file} | as in the file | int8 |" in report_markdown(report).replace("\\", "")
    here.done = []
    short = measured(base, tmp_path / "short", kinds=["int8"], tasks=[str(file)], minutes=0.0001)
    assert here.done[1:] == ["cache_quality static", "cache_quality int8"], (
        "tasks may take hours: they never run anyway"
    )
    assert f"int8: {file}: no room in the budget" in short["failures"]


def test_a_kind_that_dies_leaves_the_others_and_is_told(base: Cell, here: Here, tmp_path: Path) -> None:
    dead = {("cache_quality", "int8"), ("cache_costs", "paged")}
    here.fail = lambda kind, cell: JobDied("its process was ended") if (kind, cell.kv_cache) in dead else None
    report = measured(base, tmp_path, kinds=["int8", "paged"])
    assert report["failures"] == ["paged: bytes and times: died: its process was ended"]
    assert [row["error"] for row in rows_of(report, "cell")] == [None, "died: its process was ended", None]
    assert [row["cell"] for row in rows_of(report, "quality")] == [0, 2], "what died has no row"
    assert script.report_exit_code(report) == script.DIED
    assert "its process was ended" in report_markdown(report)
    assert {row["cell"] for row in rows_of(report, "step") if "step_seconds" in row} == {0, 1}, (
        "another job of a kind that died"
    )


@pytest.mark.usefixtures("here")
def test_kinds_are_judged_on_a_text_of_ones_own_behind_a_prompt_of_a_given_length(base: Cell, tmp_path: Path) -> None:
    """As `llama.quality.perplexity.compare` judges them there."""
    file = tmp_path / "own.txt"
    file.write_text("".join(f"{n} apples and {n * n} pears. " for n in range(60)))
    report, _ = plan_report("caches", base, kinds=["int8"], budget=60, text=str(file), prompt_len=50)
    _, found, *_ = judged(base.but(kv_cache="int8"), **report["plan"] | {"needle_lengths": []})
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    ids = encode_prompt(tokenizer, file.read_text())[: 50 + SCORED]
    assert (found["context"], found["tokens"]) == (50 + SCORED, SCORED)
    assert found["nll"] == pytest.approx(compare(model, "int8", ids, prompt_len=50).other_nll)
    new_run(tmp_path / "out", report)
    assert resumed_run(tmp_path / "out", report)[1]["plan"] == report["plan"]
    with pytest.raises(ValueError, match="nothing to resume"):
        resumed_run(tmp_path / "out", plan_report("caches", base, kinds=["int8"], budget=60)[0])


def test_a_run_does_not_resume_with_a_text_or_a_kind_that_was_edited(base: Cell, tmp_path: Path) -> None:
    (text := tmp_path / "own.txt").write_text("a pear. " * 300)
    own = "from llama.kv_cache.concat import ConcatCache\nclass Mine(ConcatCache, kind='edited'): ratio = "
    (kind := tmp_path / "mine.py").write_text(f"{own}1")

    def planned() -> Report:
        return plan_report("caches", base, kinds=[f"{kind}:edited"], budget=60, text=str(text))[0]

    _, begun = new_run(tmp_path / "out", planned())
    for path, content in ((text, "a pair. " * 300), (kind, f"{own}2")):
        before = path.read_text()
        path.write_text(content)
        with pytest.raises(ValueError, match="nothing to resume"):
            resumed_run(tmp_path / "out", planned())
        path.write_text(before)
    assert resumed_run(tmp_path / "out", planned())[1]["cells"] == begun["cells"]
    kind.write_text(f"{own}2")
    with pytest.raises(RuntimeError, match=r"the file of .*mine.py:edited was edited during the run"):
        find_model(Cell(**begun["cells"][1]))


def test_a_text_of_twice_the_fewest_tokens_is_enough(tmp_path: Path) -> None:
    source: Any = SimpleNamespace(tokenizer=Bytes(), args=SimpleNamespace(max_seq_len=9999))
    file = tmp_path / "own.txt"
    file.write_text("a" * (2 * FEWEST - 1))  # and a BOS
    assert text_plan(source, str(file), None)["length"] == 2 * FEWEST


@pytest.mark.usefixtures("here")
def test_steps_are_timed_at_the_contexts_that_were_asked_for(base: Cell) -> None:
    asked: Any = {"kinds": ["int8"], "budget": 1}
    assert plan_report("caches", base, contexts=[120, 40], **asked)[0]["plan"]["contexts"] == [40, 120]
    with pytest.raises(ValueError, match=r"^--contexts 161 must be from 16 to the model's max_seq_len=160; for longer"):
        plan_report("caches", base, contexts=[40, 161], **asked)


@pytest.mark.usefixtures("here")
def test_without_a_name_every_kind_of_the_library_is_measured_and_the_window_drops_something(base: Cell) -> None:
    report, _ = plan_report("caches", base, budget=1)
    named = [cell["kv_cache"] for cell in report["cells"]]
    assert sorted(kind.partition(":")[0] for kind in named) == sorted(KVCache.kinds)
    assert named[0] == "static"
    assert "window:40+4" in named, "of a model of 160 tokens"


@pytest.mark.usefixtures("here")
def test_a_needle_is_not_judged_if_the_kind_has_dropped_nothing_of_its_text(base: Cell) -> None:
    for budget, dropped in ((100, True), (140, False)):
        (needle,) = (row for row in judged(base.but(kv_cache=f"h2o:{budget}"), 1) if row["figures"] == "task")
        assert needle["judged"] == dropped, budget
