"""The GPU report, rehearsed on a CPU: it checks before it times, says what it could not do, and counts bytes right.

Its figures mean nothing there. What CUDA alone has, events, graphs and an allocator that tells, is left to a GPU.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llama.bench.gpu import others, run, times
from llama.bench.gpu.checks import each_kernel
from llama.bench.gpu.page import as_markdown, plot
from llama.bench.gpu.rows import Check, NotHere, Report
from llama.bench.gpu.run import TINY, Options, random_model
from llama.bench.gpu.times import Span, kernel_bytes, kernel_rows
from llama.costs import RELEASED, parameters, step_bytes, weights_bytes
from llama.fast import graph_ops
from llama.fast.graph_ops import PYTORCH, GraphOps

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_report.py"
SECTIONS = ["checks", "bandwidth", "steps", "jobs", "profile", "start", "transformers", "static", "gpt_fast"]
SMALL = ["--device=cpu", "--model=tiny", "--batch_sizes=1,2", "--input_len=9", "--output_len=3"]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST", run.LEAST)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rehearse(script: ModuleType, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Return a function that runs the script in this process: its exit status, its JSON and its Markdown."""

    def call(*words: str, only: str = "") -> tuple[int, dict[str, Any], str]:
        skipped = [name for name in SECTIONS if name not in only.split()] if only else ["static"]
        status = script.main([*SMALL, f"--out={tmp_path}", f"--skip={','.join(skipped)}", *words])
        folder = tmp_path / f"{date.today().isoformat()}-gpu-report"
        return status, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    return call


Rehearse = Callable[..., tuple[int, dict[str, Any], str]]


def test_a_rehearsal_writes_every_section_and_all_three_files(rehearse: Rehearse, tmp_path: Path) -> None:
    status, report, page = rehearse("--batch_sizes=2")
    assert status == 0, report["missing"]
    assert {file.name for file in next(tmp_path.iterdir()).iterdir()} == {"report.json", "report.md", "plot.png"}
    assert set(report["missing"]) == {"static", "gpt_fast"}
    assert "skipped by --skip" in page
    assert "not installed: --gpt_fast takes the folder of a checkout" in page
    assert "cpu rehearsal" in page
    assert {check["passed"] for check in report["checks"]} == {True, None}
    (step,) = report["steps"]
    assert (step["way"], step["rows"]) == ("plain", 2)
    assert step["floor"] < step["milliseconds"]["median"]
    ways = {(row["way"], row["kv_caching"]) for row in report["jobs"]}
    assert len(ways) == len(report["jobs"]) == 3 * 2  # fast, plain, transformers; with the cache and without
    assert all(row["milliseconds"]["n"] >= 5 and row["first"] > 0 for row in report["jobs"])
    assert all((row["step"] is not None) == row["kv_caching"] for row in report["jobs"])
    assert report["kernels"]
    assert len(report["starts"]) == 2
    assert "not measured" in page  # reserved bytes, pools and workspaces, which a CPU does not have
    assert_ledgers(report["ledgers"])


def assert_ledgers(ledgers: dict[str, Any]) -> None:
    """Weights, cache and logits are what was predicted; but a fast step takes whole buffers of 32 positions."""
    assert len(ledgers) == 2
    for job, lines in ledgers.items():
        measured = {line["name"]: (line["predicted"], line["measured"]) for line in lines}
        assert measured["weights"] == (4 * parameters(TINY),) * 2
        assert len(set(measured["logits"])) == 1
        predicted, held = measured["KV cache"]
        assert (predicted, held) == (0, 0) if "without" in job else held == predicted / 12 * 32


def test_the_page_tells_command_commit_and_hardware(rehearse: Rehearse) -> None:
    _, report, page = rehearse(only="bandwidth")
    assert f"    python scripts/gpu_report.py {' '.join(SMALL)}" in page
    assert f"- commit: {report['facts']['commit'] or 'unknown'}" in page
    for fact in (
        "GPU: not known",
        "driver: not known",
        f"torch: {torch.__version__}",
        f"date: {date.today()}",
        "triton",
    ):
        assert fact in page


def wrong_project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return graph_ops.project(x, weight, h) + 0.1 * h.roll(1, dims=-1)


def one_key_too_many(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    return graph_ops.attend_project(q, keys, values, (positions + 1).clamp(max=keys.shape[1] - 1), wo, h)


def with_ops(monkeypatch: pytest.MonkeyPatch, ops: GraphOps) -> None:
    monkeypatch.setattr(run, "find_ops", lambda model: ops)


def outcome(report: dict[str, Any], start: str) -> list[bool | None]:
    return [check["passed"] for check in report["checks"] if check["name"].startswith(start)]


def test_kernels_that_are_right_pass_every_check(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ops(monkeypatch, PYTORCH._replace(name="right"))
    status, report, _ = rehearse(only="checks")
    assert status == 0
    assert {check["passed"] for check in report["checks"]} == {True}


def test_a_kernel_that_computes_wrongly_is_a_failed_check_and_exit_status_1(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ops(monkeypatch, PYTORCH._replace(name="wrong", project=wrong_project))
    status, report, page = rehearse(only="checks bandwidth")
    assert status == report["status"] == 1
    assert "**FAILED**" in page
    assert outcome(report, "each kernel, tiny in fp32") == [False]
    assert outcome(report, "fused logits") == [False, False]
    assert outcome(report, "greedy ids in fp32, batch 3, ragged: plain") == [True]
    assert False in outcome(report, "greedy ids in fp32, batch 3, ragged: fast")
    assert report["copied"] is not None  # the sections behind it were run


def test_a_kernel_that_raises_is_a_failed_check_and_the_others_are_run(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> Any:
        raise RuntimeError("an illegal memory access | was encountered")

    with_ops(monkeypatch, PYTORCH._replace(name="broken", gate=broken))
    status, report, page = rehearse(only="checks")
    assert status == 1
    assert outcome(report, "each kernel") == [False, False]
    assert outcome(report, "exact mode") == [True, True]
    assert "RuntimeError: an illegal memory access / was encountered" in page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kernel_is_named_with_its_own_distance(dtype: torch.dtype) -> None:
    model = random_model(TINY, dtype, torch.device("cpu"))
    right, told = each_kernel(model, PYTORCH._replace(name="right"), 40)
    assert right, told
    for name, kernel in (("project", wrong_project), ("attend_project", one_key_too_many)):
        right, told = each_kernel(model, PYTORCH._replace(name="wrong", **{name: kernel}), 40)
        off = dict(part.split() for part in told.removeprefix("off from float64 by ").split(", "))
        assert not right
        assert [which for which, far in off.items() if not float(far) < 2e-2] == [name]


def test_what_there_is_no_time_for_is_named_not_run(rehearse: Rehearse) -> None:
    status, report, page = rehearse("--minutes=0", only=" ".join(SECTIONS))
    assert status == 0
    assert set(report["missing"]) == {*SECTIONS, "plot"}
    assert all(why == "out of time" for name, why in report["missing"].items() if name != "plot")
    assert page.count("out of time") >= len(SECTIONS)


def test_a_section_that_runs_out_of_time_says_where(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.Run, "left", property(lambda self: 2.0 if not self.report.jobs else 0.0))
    _, report, page = rehearse(only="jobs")
    assert [row["note"] for row in report["jobs"]] == [""] + ["out of time"] * 7  # two batches, two ways, cache on, off
    assert report["jobs"][-1]["milliseconds"] is None
    assert "| llama, plain | 2 | off | not measured | not measured | not measured | out of time |" in page


def test_a_section_that_raises_is_named_and_the_next_is_run(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "START", "raise SystemExit('no room')")
    status, report, page = rehearse(only="start bandwidth gpt_fast")
    assert status == 1
    assert report["broken"] == ["start"]
    assert "no room" in report["missing"]["start"]
    assert "gpt_fast" in report["missing"]
    assert "no room" in page


def test_without_a_gpu_it_says_so_and_what_can_be_tried(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([f"--out={tmp_path}"]) == 2
    words = capsys.readouterr().err
    assert "there is no CUDA GPU here" in words
    assert "--device cpu --model tiny" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--skip=jobs,joobs", "--batch_sizes=1,0", "--output_len=0", "--model=llama-9"])
def test_options_that_mean_nothing_are_refused_by_name(
    script: ModuleType, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        script.main([words])
    assert left.value.code == 2
    assert words.partition("=")[0] in capsys.readouterr().err


def test_lengths_past_the_models_limit_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*SMALL, "--input_len=2048"]) == 2
    assert "2048 at most" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b"])
def test_what_the_kernels_must_move_is_the_weights_and_the_keys_and_values(name: str) -> None:
    args = RELEASED[name]
    moved = kernel_bytes(args, rows=8, context=256, itemsize=2)
    unread = 0 if args.tied_head else 2 * args.vocab_size * args.dim  # of an embedding, only the rows' vectors
    assert sum(moved.values()) - moved["_attend"] == weights_bytes(args, itemsize=2) - unread
    tokens = 0 if args.tied_head else 8 * 2 * args.dim
    assert sum(moved.values()) == step_bytes(args, rows=8, context=256, itemsize=2) - tokens


def test_kernels_are_summed_by_name_and_unknown_ones_have_no_bytes() -> None:
    spans = [Span("_gate", 0, 2), Span("gather", 2, 2.5), Span("_gate", 3, 6)]
    rows = kernel_rows(spans, {"_gate": 10})
    assert [(row.name, row.count, row.microseconds, row.bytes) for row in rows] == [
        ("_gate", 2, 5.0, 10),
        ("gather", 1, 0.5, None),
    ]


def test_nothing_measured_is_a_page_that_says_so() -> None:
    report = Report(
        "command", {"kind": "rehearsal", "gpu": None, "commit": None, "peers": {}, "input_len": 1, "output_len": 1}
    )
    report.checks.append(Check("a | b", None, "two\nlines"))
    page = as_markdown(report)
    assert "- commit: unknown" in page
    assert "| a / b | not run | two lines |" in page
    assert page.count("not measured") >= 8
    with pytest.raises(NotHere, match="no step was measured"):
        plot(report.steps)


def test_without_matplotlib_the_report_has_no_plot_and_says_so(
    rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, report, _ = rehearse(only="steps")
    assert report["missing"]["plot"] == "matplotlib is not installed"
    assert not (next(tmp_path.iterdir()) / "plot.png").exists()


def test_without_transformers_its_rows_say_so(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, report, page = rehearse(only="transformers static")
    assert status == 0
    assert report["missing"]["transformers"].startswith("not installed")
    assert "| transformers, static cache |  |  |  |  |  | not installed" in page


def test_options_survive_the_way_into_another_process() -> None:
    options = replace(Options(), batch_sizes=(1, 2), device="cpu")
    assert Options(**json.loads(json.dumps(vars(options)))) == replace(options, batch_sizes=[1, 2], skip=[])  # type: ignore[arg-type]


def test_it_is_times_that_are_sampled_until_there_is_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        left = 1.0

    def measure() -> float:
        Clock.left -= 0.25
        return 1.0

    assert len(times.samples(Clock(), measure)) == 4  # type: ignore[arg-type]
