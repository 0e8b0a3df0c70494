"""The preset of kinds of cache measures bytes, time and quality of each at one length, within its budget."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from jobs_here import CEILINGS, Here, jobs_here, run_of
from native import needs_a_compiler

from llama import cli, load
from llama.bench import plan as plan_module
from llama.bench import presets
from llama.bench.cell import Cell
from llama.bench.presets import Calibration, plan_report
from llama.bench.report.text import report_markdown
from llama.bench.run import step_times
from llama.bench.run.cache_kind import STEPS, greedy_divergence
from llama.bench.run.directory import resumed_run
from llama.bench.run.jobs import JobDied
from llama.bench.run.kind_validity import CHECKS
from llama.bench.schema import Report, Row, cell_row, rows_of
from llama.bench.texts import read_corpus
from llama.cli import benchmark_inference as script
from llama.host.cores import OtherLoad
from llama.kv_cache import KVCache
from llama.quality.perplexity import compare
from llama.streaming import encode_prompt

KINDS = ["int8", "window:40+4", "paged"]
LENGTH, SCORED = 128, 40
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
    monkeypatch.setattr(presets, "KIND_CONTEXTS", (64, LENGTH, 512))
    monkeypatch.setattr(presets, "LENGTH", LENGTH)
    monkeypatch.setattr(presets, "LENGTHS", (120,))
    monkeypatch.setattr(presets, "AMOUNTS", ((SCORED, 20, 1, 1), (16, 8, 0, 0), (16, 0, 0, 0)))
    monkeypatch.setattr(OtherLoad, "stop", lambda _: 0.0)
    return jobs_here(monkeypatch, lambda kind, cell: f"{kind} {cell.kv_cache}")


def measured(base: Cell, out: Path, *, kinds: list[str] = KINDS, minutes: float = 60, resume: bool = False) -> Report:
    run = run_of(plan_report("caches", base, engines=[], kinds=kinds, budget=minutes), out, resume=resume)
    run.run()
    return run.report


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
        *("machine static", "calibrate static"),
        *(f"cache_quality {kind}" for kind in all_kinds),
        *(f"cache_costs {kind}" for kind in all_kinds),
    ]
    assert report["plan"]["contexts"] == [64, LENGTH], "as far as the model's limit goes"
    assert report["failures"] == []
    for place in range(4):
        steps, row = rows_of(report, "step", place), quality(report, place)
        assert [(step["context"], len(step["step_seconds"])) for step in steps] == [(64, STEPS), (LENGTH, STEPS)]
        for one in (*steps, row, *rows_of(report, "needle", place)):
            assert one["cache_bytes"] == one["predicted_cache_bytes"]
        assert (row["context"], row["tokens"], row["greedy_tokens"]) == (LENGTH, SCORED, 20)
        assert len(row["step_seconds"]) == STEPS
        assert row["judged"]
        assert [(one["context"], one["tries"]) for one in rows_of(report, "needle", place)] == [(120, 5)]
        assert cell_row(report, place)["path"] == row["path"] == "plain"
    static, int8, window, paged = (quality(report, place) for place in range(4))
    for row in (static, paged):
        assert row["mean_kl"] < 1e-9
        assert (row["top1_agreement"], row["divergence_token"]) == (1.0, None)
    assert static["cache_bytes"] == (LENGTH - 1) * POSITION
    assert window["cache_bytes"] == 44 * POSITION
    assert 0 < int8["mean_kl"] < window["mean_kl"]
    assert static["nll"] == pytest.approx(paged["nll"])
    facts = [cell_row(report, place) for place in range(4)]
    assert [row["lossless"] for row in facts] == [True, False, False, True]
    assert [row["saves"] for row in facts] == [False, True, True, False]
    assert [row["quantized"] for row in facts] == [False, True, False, False], "the window stores keys as they come"


def test_the_divergence_is_that_of_two_caches_in_lockstep(base: Cell, whole: Whole) -> None:
    """Against a full cache fed step by step; the preset compares with one pass without a cache."""
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    ids = encode_prompt(tokenizer, read_corpus())[:LENGTH]
    for place, kind in enumerate(["static", *KINDS]):
        wanted, found = compare(model, kind, ids, prompt_len=LENGTH - SCORED), quality(whole.report, place)
        assert (found["tokens"], found["top1_agreement"]) == (wanted.tokens, wanted.top1_agreement)
        assert found["mean_kl"] == pytest.approx(wanted.mean_kl, rel=1e-3, abs=1e-9)
        assert found["nll"] == pytest.approx(wanted.other_nll)


def test_greedy_text_is_what_generation_writes_and_its_divergence_is_found_in_one_pass(base: Cell) -> None:
    tiny = {"device": "cpu", "dtype": "fp32"}
    model, tokenizer = load(base.model, **tiny)
    prompt = encode_prompt(tokenizer, read_corpus())[:60]
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


@pytest.mark.usefixtures("here")
def test_a_kind_is_not_judged_where_it_has_dropped_nothing(base: Cell, tmp_path: Path) -> None:
    """`h2o:140` keeps everything that is fed; `h2o:100` drops keys in the needle's text and the scored one."""
    report = measured(base, tmp_path, kinds=[f"h2o:{budget}" for budget in (40, 100, 140)])
    for place, judged in ((1, True), (2, True), (3, False)):
        row = quality(report, place)
        assert (row["judged"], rows_of(report, "needle", place)[0]["judged"]) == (judged, judged)
        assert (row["cache_bytes"] < (LENGTH - 1) * POSITION) == judged
        assert not cell_row(report, place)["quantized"]
    assert {row["status"] for row in rows_of(report, "check") if row["name"] in CHECKS} <= {"ok", "not observed"}


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


@pytest.mark.usefixtures("here")
def test_a_kind_that_drops_keys_where_a_prompt_ends_is_given_a_real_prompt(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt it keeps 8 keys, and all behind it: the steps that are timed, and the tokens that are scored."""
    monkeypatch.setattr(step_times, "CHUNK", 32)  # of what is written without a forward
    (tmp_path / "own.py").write_text(PROMPT_END)
    report = measured(base, tmp_path / "out", kinds=[f"{tmp_path / 'own.py'}:prompt_end", "window:40+4"])
    assert KVCache.kinds["prompt_end"].seen >= {(64 - STEPS - 1, True), (LENGTH - SCORED, True)}  # type: ignore[attr-defined]
    own, window = (rows_of(report, "step", place) for place in (1, 2))
    assert [row["cache_bytes"] for row in own] == [(8 + STEPS + 1) * POSITION] * 2
    assert [row["predicted_cache_bytes"] for row in own] == [8 * POSITION] * 2, "a wrong prediction shows"
    assert [row["cache_bytes"] for row in window] == [44 * POSITION] * 2
    assert quality(report, 1)["cache_bytes"] == (8 + SCORED - 1) * POSITION
    assert quality(report, 1)["judged"]


@pytest.mark.usefixtures("here")
def test_a_budget_decides_on_how_much_text_the_quality_is_measured(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "quality_seconds", lambda plan, known: 10.0 * plan["tokens"])
    report = measured(base, tmp_path, kinds=["int8"], minutes=10)
    plan = report["plan"]
    assert (plan["tokens"], plan["greedy_tokens"], plan["needle_lengths"]) == (16, 8, [])
    assert [quality(report, place)["tokens"] for place in (0, 1)] == [16, 16]


def test_a_budget_of_a_moment_judges_the_full_cache_and_one_kind_and_predicts_the_bytes_of_what_is_left_out(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = measured(base, tmp_path, kinds=["int8", "window:40+4"], minutes=0.0001)
    assert here.done == ["machine static", "calibrate static", "cache_quality static", "cache_quality int8"]
    assert (report["plan"]["contexts"], report["plan"]["tokens"]) == ([64], 16)
    left_out = ["window:40+4: quality", *(f"{kind}: bytes and times" for kind in ("static", "int8", "window:40+4"))]
    assert report["failures"] == [f"{what}: no room in the budget" for what in left_out]
    assert script.report_exit_code(report) == 0
    shown = report_markdown(report)
    assert "| window:40+4 | predicted | ~0.01 | ~0.35 | not measured |" in shown
    assert "| window:40+4 | 64 | not observed | 0.01 | not measured | predicted |" in shown
    assert quality(report, 2)["predicted_cache_bytes"] == 44 * POSITION
    whole = measured(base, tmp_path, kinds=["int8", "window:40+4"], minutes=0, resume=True)
    assert "predicted |" not in report_markdown(whole), "what is measured replaces its prediction"
    for place in range(3):
        assert quality(whole, place)["cache_bytes"] == quality(report, place)["predicted_cache_bytes"]
        assert quality(whole, place)["tokens"] == 16, "what is compared is alike"


@pytest.mark.parametrize(("load", "minutes", "kinds"), [(1.0, 6.0, 8), (3.0, 6.0, 7), (1.0, 2.0, 3), (6.0, 6.0, 8)])
def test_all_kinds_are_judged_before_any_curve_is_drawn_however_busy_the_machine_is(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, minutes: float, kinds: int
) -> None:
    """5 s to start and load, 500 tokens a second in a prompt and 25 in steps, as the demo does, each `load` times."""
    now, done = [0.0], list[str]()
    timed = {"max_seq_len": 8192, "input_len": 100, "load_seconds": load, "prefill_seconds": 0.2 * load}
    timed |= {"step_seconds": 0.04 * load, "many_rows": 1, "many_seconds": 0.04 * load}

    def do(kind: str, cell: Cell, *, waiting: Any, plan: Any = None, contexts: Any = None, **options: Any) -> Any:
        known = Calibration(**timed, start_seconds=4 * load)
        if kind in ("machine", "calibrate"):
            now[0] += 5 * load
            return {"environment": {}, "ceilings": CEILINGS, "model": None, "timed": timed, "seconds": load}
        now[0] += presets.quality_seconds(plan, known) if plan else known.of_tokens(sum(contexts))
        done.append(kind)
        figures = {"figures": "quality", "context": plan["length"]} if plan else {"figures": "cell", "error": None}
        return {"rows": [{**figures, "notes": [], "cache_bytes": 1, "predicted_cache_bytes": 1, "judged": False}]}

    monkeypatch.setattr(plan_module, "run_job", do)
    monkeypatch.setattr(plan_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(presets, "LENGTH", 2048)
    names = [f"window:{40 + n}+4" for n in range(kinds - 1)]
    report = plan_report("caches", base, engines=[], kinds=names, budget=minutes)
    report["plan"] |= {"longest": 2048, "contexts": [1024]}
    run_of(report, tmp_path).run()
    judged = done.count("cache_quality")
    assert done == sorted(done, reverse=True), "quality first"
    assert judged == kinds or load > 3
    assert report["plan"]["tokens"] >= 32
    assert now[0] <= 1.2 * 60 * minutes


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("share", "status"), [(0.13, "noisy"), (0.12, "ok")])
def test_times_that_others_disturbed_are_marked_as_such(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, status: str
) -> None:
    """Of a machine of 100 cores."""
    monkeypatch.setattr(OtherLoad, "stop", lambda _: 100 * share)
    monkeypatch.setattr("llama.bench.run.worker.environment", lambda device: {"cores": 100})
    report = measured(base, tmp_path, kinds=["int8"])
    checks = [row for row in rows_of(report, "check") if row["name"] not in CHECKS]
    assert [row["status"] for row in checks] == [status] * 2
    assert script.report_exit_code(report, strict=True) == (4 if status == "noisy" else 0)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_it_lacks_on_as_much_text(base: Cell, here: Here, tmp_path: Path) -> None:
    def interrupt(kind: str, cell: Cell) -> None:
        if (kind, cell.kv_cache) == ("cache_quality", "paged"):
            raise KeyboardInterrupt

    here.fail = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        measured(base, tmp_path)
    here.fail, here.done = lambda kind, cell: None, []  # type: ignore[method-assign]
    report = measured(base, tmp_path, resume=True, minutes=0)
    costs = [f"cache_costs {kind}" for kind in ("static", *KINDS)]
    assert here.done == ["machine static", "calibrate static", "cache_quality paged", *costs]
    assert [quality(report, place)["tokens"] for place in range(4)] == [SCORED] * 4


def test_a_kind_that_dies_leaves_the_others_and_is_told(base: Cell, here: Here, tmp_path: Path) -> None:
    def die(kind: str, cell: Cell) -> None:
        if (kind, cell.kv_cache) in (("cache_quality", "int8"), ("cache_costs", "paged")):
            raise JobDied("its process was ended")

    here.fail = die  # type: ignore[method-assign]
    report = measured(base, tmp_path, kinds=["int8", "paged"])
    assert report["failures"] == ["paged: bytes and times: died: its process was ended"]
    assert [row["error"] for row in rows_of(report, "cell")] == [None, "died: its process was ended", None]
    assert [row["cell"] for row in rows_of(report, "quality")] == [0, 2], "what died is not predicted"
    assert script.report_exit_code(report) == script.DIED
    assert "its process was ended" in report_markdown(report)


@pytest.mark.usefixtures("here")
def test_kinds_are_judged_on_a_text_of_ones_own_behind_a_prompt_of_a_given_length(base: Cell, tmp_path: Path) -> None:
    """As `llama.quality.perplexity.compare` judges them there."""
    file = tmp_path / "own.txt"
    file.write_text("".join(f"{n} apples and {n * n} pears. " for n in range(60)))
    report = plan_report("caches", base, engines=[], kinds=["int8"], budget=60, text=str(file), prompt_len=50)
    run_of(report, tmp_path / "out").run()
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    ids = encode_prompt(tokenizer, file.read_text())[: 50 + SCORED]
    for place, kind in enumerate(("static", "int8")):
        wanted, found = compare(model, kind, ids, prompt_len=50), quality(report, place)
        assert (found["context"], found["tokens"]) == (50 + SCORED, SCORED)
        assert found["nll"] == pytest.approx(wanted.other_nll)
    assert str(file) in report_markdown(report)
    with pytest.raises(ValueError, match="nothing to resume"):
        resumed_run(tmp_path / "out", plan_report("caches", base, engines=[], kinds=["int8"], budget=60))


def test_steps_are_timed_at_the_contexts_that_were_asked_for(base: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"engines": [], "kinds": ["int8"], "budget": 1}
    assert plan_report("caches", base, contexts=[120, 40], **asked)["plan"]["contexts"] == [40, 120]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^--contexts 161 must be from 16 to the model's max_seq_len=160; for longer"):
        plan_report("caches", base, contexts=[40, 161], **asked)  # type: ignore[arg-type]
    for words in (["--preset", "caches", "--contexts", "many"], ["--preset", "table", "--contexts", "40"]):
        with pytest.raises(SystemExit):
            cli.main(script.main, words)
        assert "--contexts" in capsys.readouterr().err


def test_without_a_name_every_kind_of_the_library_is_measured_and_the_window_drops_something(base: Cell) -> None:
    report = plan_report("caches", base, engines=[], kinds=[], budget=1)
    named = [cell["kv_cache"] for cell in report["cells"]]
    assert sorted(kind.partition(":")[0] for kind in named) == sorted(KVCache.kinds)
    assert named[0] == "static"
    assert "window:40+4" in named, "of a model of 160 tokens"


@pytest.mark.slow
def test_a_kind_of_ones_own_goes_through_the_command_from_its_file(
    base: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It never saves bytes, so that its quality is its own."""
    file, out = tmp_path / "own_kind.py", tmp_path / "out"
    file.write_text(
        "from llama.kv_cache import ConcatCache\n\n\nclass Own(ConcatCache, kind='own_kind'):\n    lossless = False\n\n"
        "    def update(self, rows, xk, xv):\n"
        "        keys, values = super().update(rows, xk, xv)\n"
        "        return keys, (values * 4096).round() / 4096\n"
    )
    words = ["--kv_cache", f"{file}:own_kind", "--budget", "0.01", "--threads", "1", "--out", str(out)]
    assert cli.run(script.main, ["--preset=caches", "--ckpt_dir", base.model, *words]) == 0
    assert f"{file}:own_kind" in capsys.readouterr().out
    report: Any = json.loads(next(out.glob("*/results.json")).read_text())
    assert not any(row.get("judged") is False for row in report["rows"])


@needs_a_compiler
@pytest.mark.usefixtures("here")
def test_the_fast_path_is_named_where_it_ran(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "native", max_seq_len=160, **NATIVE_SIZES)
    cell = Cell(input_len=64, output_len=1, model=str(folder), threads=1, fast=True)
    report = measured(cell, tmp_path / "out", kinds=["concat"], minutes=0)
    assert [cell_row(report, place)["path"] for place in (0, 1)] == ["native", "plain"]
    assert [quality(report, place)["path"] for place in (0, 1)] == ["native", "plain"]
    assert quality(report, 1)["mean_kl"] < 1e-6
