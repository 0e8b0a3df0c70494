"""The preset of kinds of cache measures bytes, time and quality of each, within its budget, and shows them."""

import csv
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from jobs_here import CEILINGS, Here, session_of
from llama.cli import benchmark_inference as script
from native import needs_a_compiler

from llama import cli, load
from llama.bench import caches, presets
from llama.bench.caches import AMOUNTS, PROMPT_LEN, caches_report, default_kinds, run_caches
from llama.bench.cell import Cell
from llama.bench.report.caches import NOT_JUDGED, cache_tables, context_of_size
from llama.bench.report.files import write_report
from llama.bench.report.plots import figures, heading
from llama.bench.report.stored import read_report
from llama.bench.report.text import report_csv, report_markdown
from llama.bench.run import filling, worker
from llama.bench.run.cache_kind import STEPS, greedy, parting
from llama.bench.run.jobs import JobDied
from llama.bench.run.models import find_model
from llama.bench.schema import Report
from llama.bench.texts import read_text
from llama.host.cores import OtherLoad
from llama.host.machine import environment
from llama.kv_cache import KVCache
from llama.quality.perplexity import compare
from llama.streaming import encode_prompt

KINDS = ["int8", "window:40+4", "paged"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=160)
    return Cell(input_len=PROMPT_LEN, output_len=1, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return done_here(monkeypatch)


def done_here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Let jobs be done in this process, on little text."""
    jobs_done_here = Here(lambda kind, cell: f"{kind} {cell.kv_cache}")
    monkeypatch.setattr(presets, "run_job", jobs_done_here)
    monkeypatch.setattr(worker, "ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr(caches, "CONTEXTS", (64, 128, 512))
    monkeypatch.setattr(caches, "LENGTHS", (120,))
    monkeypatch.setattr(caches, "AMOUNTS", ((20, 8, 1, 1), (8, 4, 0, 0)))
    monkeypatch.setattr(presets, "_STARTING", 0.0)
    return jobs_done_here


def measured(base: Cell, out: Path, *, kinds: list[str] = KINDS, minutes: float = 60, resume: bool = False) -> Report:
    report = caches_report(base, kinds, find_model(base).args, command="a command", budget=minutes)
    session = session_of(report, out, minutes=minutes, resume=resume)
    run_caches(session)
    return session.report


class Whole(NamedTuple):
    """A run with room for everything: its report, its jobs, and the folder that it made."""

    report: Report
    jobs: list[str]
    out: Path


@pytest.fixture(scope="module")
def run(base: Cell, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    with pytest.MonkeyPatch.context() as monkeypatch:
        here, out = done_here(monkeypatch), tmp_path_factory.mktemp("run")
        return Whole(measured(base, out), here.done, out)


@pytest.fixture
def whole(run: Whole) -> Report:
    return run.report


def test_every_kind_is_measured_beside_the_full_cache_in_a_job_of_its_own_each(run: Whole) -> None:
    whole = run.report
    found = whole["caches"]
    assert found is not None
    all_kinds = ["static", *KINDS]
    assert [record["kind"] for record in found["kinds"]] == all_kinds
    assert run.jobs == [
        "machine static", "calibrate static", *(f"cache_costs {kind}" for kind in all_kinds),
        "cache_reference static", *(f"cache_quality {kind}" for kind in KINDS),
    ]  # fmt: skip
    assert found["contexts"] == [64, 128], "as far as the model's limit goes"
    for record in found["kinds"]:
        assert record["error"] is None
        assert [one["measured"] for one in record["bytes"]] == [one["predicted"] for one in record["bytes"]]
        assert [(one["context"], one["seconds"]["n"]) for one in record["steps"]] == [(64, STEPS), (128, STEPS)]
        assert record["path"] == "plain"
        assert record["quality"] is not None
        assert [(one["length"], one["tries"]) for one in record["quality"]["needles"]] == [(120, 5)]
    full, int8, window, paged = (record["quality"] for record in found["kinds"])
    assert full is not None
    assert int8 is not None
    assert window is not None
    assert paged is not None
    assert (paged["mean_kl"], paged["top1_agreement"], paged["parting"]) == (0.0, 1.0, None)
    assert 0 < int8["mean_kl"] < window["mean_kl"]
    assert full["nll"] == full["reference_nll"] == pytest.approx(int8["reference_nll"])
    assert whole["failures"] == []
    assert any("int8 holds" in sentence for sentence in whole["reading"])


def test_the_divergence_is_that_of_two_models_in_lockstep(base: Cell, whole: Report) -> None:
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    ids = encode_prompt(tokenizer, read_text())[: PROMPT_LEN + 20]
    assert whole["caches"] is not None
    for record in whole["caches"]["kinds"]:
        wanted, found = compare(model, record["kind"], ids), record["quality"]
        assert found is not None
        assert (found["tokens"], found["top1_agreement"]) == (wanted.tokens, wanted.top1_agreement)
        assert found["mean_kl"] == pytest.approx(wanted.mean_kl, rel=1e-6, abs=1e-12)
        assert (found["nll"], found["reference_nll"]) == pytest.approx((wanted.other_nll, wanted.reference_nll))


def test_a_report_without_the_bytes_of_its_texts_is_read_and_judges_no_quality(run: Whole, tmp_path: Path) -> None:
    """As they were written before kinds were compared at one length."""
    report = json.loads(next(run.out.rglob("results.json")).read_text())
    for kind in report["caches"]["kinds"]:
        del kind["saves"], kind["widens"], kind["quality"]["bytes"]
    (tmp_path / "results.json").write_text(json.dumps(report))
    old = read_report(tmp_path / "results.json")
    (row,) = [line for line in report_markdown(old).splitlines() if line.startswith("| int8 ") and NOT_JUDGED in line]
    assert "%" not in row
    assert "int8" in report_csv(old)


def test_greedy_text_is_what_generation_writes_and_its_gaps_are_told(base: Cell) -> None:
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    prompt = encode_prompt(tokenizer, read_text())[:20]
    ids, gaps, size = greedy(model, prompt, 8)
    assert size == {"length": 27, "predicted": 27 * 256, "measured": 27 * 256}, "the last id is not fed"
    assert model.generate_tokens([prompt], 8, temperature=0.0)[0] == [ids]
    with torch.inference_mode():
        top = model.with_kv_caching(False)(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1].topk(2).values
    assert gaps == pytest.approx((top[:, 0] - top[:, 1]).tolist(), rel=1e-3, abs=1e-5)
    assert parting([1, 2, 3], [1, 2, 3], [0.5, 0.6, 0.7]) is None
    assert parting([1, 2, 3], [1, 4, 5], [0.5, 0.6, 0.7]) == {"token": 1, "full_id": 2, "kind_id": 4, "margin": 0.6}


def test_a_report_comes_back_from_its_json_and_nothing_of_the_logits_is_left(run: Whole) -> None:
    (kept,) = run.out.glob("*-caches/results.json")
    assert json.loads(kept.read_text()) == json.loads(json.dumps(run.report))
    assert [path.name for path in kept.parent.iterdir()] == ["results.json"]


def test_tables_page_csv_and_both_pictures_show_every_kind(whole: Report, tmp_path: Path) -> None:
    drawn = figures(whole)
    assert list(drawn) == ["cache_quality", "cache_time"]
    for figure in drawn.values():
        words = {text for ax in figure.axes for note in ax.texts for text in note.get_text().split(", ")}
        assert words == {"static", *KINDS}
        assert len(figure.axes[0].lines) == 1 + len(KINDS)
        assert "Memory against" in heading(figure)
    files = {path.name: path for path in write_report(whole, tmp_path / "files")}
    assert {"cache_quality.png", "cache_time.png", "page.html", "report.md", "table.csv"} <= files.keys()
    page, markdown = files["page.html"].read_text(), report_markdown(whole)
    assert page.count('<svg class="wide"') == page.count('<svg class="narrow"') == 2
    for kind in ("static", *KINDS):
        assert f"<td>{kind}</td>" in page
        assert len(re.findall(rf"^\| {re.escape(kind)} \|", markdown, flags=re.MULTILINE)) == 3
    rows = list(csv.DictReader(io.StringIO(report_csv(whole))))
    assert [row["kv_cache"] for row in rows if row["figures"] == "kind"] == ["static", *KINDS]
    assert {row["context_tokens"] for row in rows if row["figures"] == "kind by context"} == {"64", "128"}


def test_the_tables_say_what_was_decided_and_which_caches_the_plain_path_widens(whole: Report) -> None:
    of_bytes, times, quality = cache_tables(whole)
    assert whole["caches"] is not None
    assert context_of_size(whole["caches"]) == 128
    assert of_bytes.rows[0][1] == of_bytes.rows[0][2] == "256"  # 2 layers, keys and values, 2 heads of 8, 4 bytes
    assert "in fewer bits, of int8: this takes" in times.notes[0], "the window keeps its keys as they come"
    assert "20 tokens of" in quality.notes[0]
    assert "fewer than 2,048" in quality.notes[0]


def test_a_kind_is_not_judged_on_a_text_at_whose_end_it_holds_no_fewer_bytes(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    """`h2o:100` drops keys in the needle's text of 120 tokens alone; `h2o:140` in none that is measured."""
    file = Path(__file__).parents[2] / "docs/examples/h2o.py"
    kinds = [f"{file}:h2o:{budget}" for budget in (40, 100, 140)]
    report = measured(base, tmp_path, kinds=kinds)
    assert report["caches"] is not None
    names = [record["kind"] for record in report["caches"]["kinds"]][1:]
    *_, times, quality = cache_tables(report)
    assert times.notes == []
    small, early, never = ({**dict(zip(quality.heads, row, strict=True))} for row in quality.rows[1:])
    assert [one["of static after 83"] for one in (small, early, never)] == ["0.51", "1.06", "1.06"]
    text = ("mean KL, nats", "top-1 agreement", "perplexity", "greedy text parts")
    for row, judged in ((small, {*text, "needles at 120"}), (early, {"needles at 120"}), (never, set[str]())):
        assert {name for name in (*text, "needles at 120") if row[name] != "not judged"} == judged
    assert "the text does not show what its savings cost" in quality.notes[1]
    first, second, third = report["reading"]
    assert first.startswith(f"{names[0]} holds 0.51 of the bytes of static after the 83 tokens of the scored text")
    assert second.startswith(f"{names[1]} holds 0.83 of the bytes of static at 128 tokens; its quality is not judged")
    assert "100.00%" not in second + third
    picture = figures(report)["cache_quality"]
    assert len(picture.axes[0].lines) == 2
    assert f"not judged, as no bytes are saved at that length: {names[1]}, {names[2]}" in " ".join(
        " ".join(text.get_text() for text in picture.texts).split()
    )


PROMPT_END = """
import torch

from llama.kv_cache import KVCache


class PromptEnd(KVCache, kind="prompt_end"):
    lossless = False

    def predicted_bytes(self, *, prompts, ends, reserved, itemsize):
        return len(prompts) * min(max(ends), 8) * self.position_bytes(itemsize)

    def update(self, rows, xk, xv):
        if rows.start > 0:
            xk, xv = torch.cat((self.keys, xk), dim=1), torch.cat((self.values, xv), dim=1)
        self.keys, self.values = (xk, xv) if rows.start > 0 else (xk[:, -8:], xv[:, -8:])
        return xk, xv
"""


def test_a_kind_that_drops_keys_where_a_prompt_ends_is_given_one_prompt_and_a_wrong_prediction_is_told(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt it keeps 8 keys, and all behind it: the steps that are timed."""
    monkeypatch.setattr(filling, "CHUNK", 32)
    (tmp_path / "own.py").write_text(PROMPT_END)
    report = measured(base, tmp_path / "out", kinds=[f"{tmp_path / 'own.py'}:prompt_end", "window:40+4"])
    assert report["caches"] is not None
    _, own, window = report["caches"]["kinds"]
    assert [one["measured"] for one in own["bytes"]] == [(8 + STEPS + 1) * 256] * 2
    assert [one["measured"] for one in window["bytes"]] == [44 * 256] * 2
    (note,) = cache_tables(report)[0].notes
    held = "4,352 bytes at 64, predicted 2,048; 4,352 bytes at 128, predicted 2,048"
    assert note == f"{own['kind']} does not hold what its predicted_bytes says: {held}"


def test_a_budget_decides_on_how_much_text_the_quality_is_measured(base: Cell, here: Here, tmp_path: Path) -> None:
    report = measured(base, tmp_path, kinds=["int8"], minutes=0)
    assert report["caches"] is not None
    assert report["caches"]["contexts"] == [64]
    plan = report["caches"]["plan"]
    assert plan is not None
    assert (plan["tokens"], plan["greedy_tokens"], plan["needle_lengths"]) == (8, 4, [])
    assert all(record["quality"] is not None for record in report["caches"]["kinds"]), "the least is always measured"


def test_a_budget_of_a_moment_measures_the_costs_of_two_kinds_and_names_all_that_is_left_out(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = measured(base, tmp_path, kinds=["int8", "paged"], minutes=0.0001)
    assert here.done == ["machine static", "calibrate static", "cache_costs static", "cache_costs int8"]
    left_out = ["paged: bytes and times", "static: quality"]
    assert report["failures"] == [f"{what}: no room in the budget" for what in left_out]
    assert script.exit_code(report) == 0


def test_a_kind_whose_turn_comes_after_the_end_of_the_budget_is_said_to_lack_its_quality(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = caches_report(base, ["int8", "paged"], find_model(base).args, command="", budget=60)
    session = session_of(report, tmp_path, minutes=60)

    def late(kind: str, cell: Cell) -> None:
        if kind == "cache_quality":
            session.deadline = 0.0

    here.fail = late  # type: ignore[method-assign]
    run_caches(session)
    assert report["failures"] == ["paged: quality: no room in the budget"]
    assert script.exit_code(report) == 0


@pytest.mark.slow
def test_times_that_others_disturbed_are_marked_as_such(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = environment(torch.device("cpu"))["cores"]
    for share, status in ((0.13, "disturbed"), (0.12, "ok")):
        monkeypatch.setattr(OtherLoad, "stop", lambda _, share=share: share * cores)
        report = measured(base, tmp_path / status, kinds=["int8"])
        assert [one["points"][0]["status"] for one in report["cells"]] == [status] * 2
        marked = status == "disturbed"
        assert ("NOISY" in report_markdown(report).partition("\n## ")[0]) is marked
        written = {name: " ".join(text.get_text() for text in one.texts) for name, one in figures(report).items()}
        assert {name for name, words in written.items() if "NOISY" in words} == ({"cache_time"} if marked else set())
        assert script.exit_code(report, strict=True) == (4 if marked else 0)


def test_it_is_said_beforehand_how_long_it_will_take(
    base: Cell, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(base, tmp_path, kinds=["int8"])
    out, err = capsys.readouterr()  # with a line of progress, "| ", every 10 seconds on a busy machine
    first, second = (line for line in (out + err).splitlines() if "about" in line and "| " not in line)
    assert "2 kinds of cache" in first
    assert "quality on 20 tokens" in second


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_it_lacks(base: Cell, here: Here, tmp_path: Path) -> None:
    def interrupt(kind: str, cell: Cell) -> None:
        if (kind, cell.kv_cache) == ("cache_quality", "paged"):
            raise KeyboardInterrupt

    here.fail = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        measured(base, tmp_path)
    here.fail, here.done = lambda kind, cell: None, []  # type: ignore[method-assign]
    report = measured(base, tmp_path, resume=True)
    assert here.done == ["machine static", "calibrate static", "cache_reference static", "cache_quality paged"]
    assert report["caches"] is not None
    assert all(record["quality"] is not None for record in report["caches"]["kinds"])


def test_a_kind_that_dies_leaves_the_others_and_is_told(base: Cell, here: Here, tmp_path: Path) -> None:
    def die(kind: str, cell: Cell) -> None:
        if (kind, cell.kv_cache) == ("cache_costs", "int8"):
            raise JobDied("its process was ended")

    here.fail = die  # type: ignore[method-assign]
    report = measured(base, tmp_path, kinds=["int8", "paged"])
    assert report["failures"] == ["int8: bytes and times: died: its process was ended"]
    assert report["caches"] is not None
    assert [record["quality"] is not None for record in report["caches"]["kinds"]] == [True, False, True]
    assert script.exit_code(report) == script.DIED
    assert "not measured" in report_markdown(report)
    assert len(figures(report)) == 2


def test_without_a_name_every_kind_of_the_library_is_measured_and_the_window_drops_something(base: Cell) -> None:
    args = find_model(base).args
    named = [kind.partition(":")[0] for kind in default_kinds(args)]
    assert named == sorted(KVCache.kinds)
    assert "window:80+4" in default_kinds(args)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kv_cache", "rolling"], "rolling"),
        (["--kv_cache", "int8", "--kv_cache", "window:4+9"], "smaller than its 9 sinks"),
        (["--kv_cache", "int8", "--kv_cache", "int8"], "twice"),
        (["--kv_cache", "nowhere.py:mine"], "No such file"),
        (["--input_len", "64"], "--input_len"),
        (["--output_len", "64"], "--output_len"),
        (["--batch_size", "2"], "--batch_size"),
        (["--logits", "all"], "--logits"),
        (["--engine", "transformers"], "--engine"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_runs(
    words: list[str], says: str, base: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.run(script.main, ["--preset=caches", "--ckpt_dir", base.model, "--out", str(out), *words]) == 2
    _, err = capsys.readouterr()
    assert (err.count("\n"), says in err) == (1, True), err
    assert not out.exists()


def test_a_cell_has_one_kind_of_cache(base: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(script.main, ["--kv_cache", "int8", "--kv_cache", "paged"]) == 2
    assert "--preset caches takes several" in capsys.readouterr().err


@pytest.mark.slow
def test_a_kind_of_ones_own_goes_through_the_command_from_its_file(
    base: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "own_kind.py", tmp_path / "out"
    file.write_text(
        "from llama.kv_cache import ConcatCache\n\n\nclass Own(ConcatCache, kind='own_kind'):\n    lossless = False\n\n"
        "    def update(self, rows, xk, xv):\n"
        "        keys, values = super().update(rows, xk, xv)\n"
        "        return keys, (values * 4).round() / 4\n"
    )
    words = ["--kv_cache", f"{file}:own_kind", "--budget", "0", "--threads", "1", "--out", str(out)]
    assert cli.run(script.main, ["--preset=caches", "--ckpt_dir", base.model, *words]) == 0
    printed, _ = capsys.readouterr()
    assert printed.count(f"| {file}:own_kind |") == 3
    assert "not judged" not in printed, "it never saves bytes, so that its quality is its own"
    report: Report = json.loads(next(out.glob("*/results.json")).read_text())
    assert report["caches"] is not None
    quality = report["caches"]["kinds"][1]["quality"]
    assert quality is not None
    assert quality["mean_kl"] > 0
    assert quality["tokens"] == min(AMOUNTS[-1][0], 160 - PROMPT_LEN)


@needs_a_compiler
def test_the_fast_path_is_named_where_it_ran(tmp_path: Path, here: Here) -> None:
    folder = write_checkpoint(tmp_path / "native", max_seq_len=160, **NATIVE_SIZES)
    cell = Cell(input_len=PROMPT_LEN, output_len=1, model=str(folder), threads=1, fast=True)
    report = measured(cell, tmp_path / "out", kinds=["concat"], minutes=0)
    assert report["caches"] is not None
    full, concat = report["caches"]["kinds"]
    assert (full["path"], concat["path"]) == ("native", "plain")
    assert full["quality"] is not None
    assert concat["quality"] is not None
    assert (full["quality"]["path"], concat["quality"]["path"]) == ("native", "plain")
    assert concat["quality"]["mean_kl"] < 1e-6
    assert "Times on different paths" in cache_tables(report)[1].notes[-1]
