"""The GPU report, rehearsed on a CPU: it checks, then times, counts bytes right, and a part that fails loses no other.

Its figures mean nothing there. What CUDA alone has, streams and graphs, is left to a GPU.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from oracles import tiny_args
from torch import Tensor

from llama import cli
from llama.bench import presets
from llama.bench.cell import Cell
from llama.bench.gpu import checks, kernels
from llama.bench.gpu.checks import Check, each_kernel, run_checks
from llama.bench.gpu.kernels import Span, kernel_bytes, kernel_rows, profile_step, time_kernels, uneven_model
from llama.bench.run import aggregate, worker
from llama.bench.run.jobs import JobDied
from llama.commands import benchmark_inference
from llama.costs import RELEASED, step_bytes, weights_bytes
from llama.fast import graph_ops
from llama.fast.graph_ops import PYTORCH, GraphOps

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_report.py"
CPU = torch.device("cpu")

Rehearse = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256, **NATIVE_SIZES)
    return Cell(model=str(folder), input_len=9, output_len=3, threads=1)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_here(kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
    """Do a job in this process, which takes milliseconds."""
    job.pop("waiting", None)
    done: dict[str, Any] = json.loads(json.dumps(worker.JOBS[kind](cell, **job)))
    return done


@pytest.fixture
def rehearse(script: ModuleType, tiny: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Return a function that runs the script, and all that it starts, here: its exit code, its JSON, its Markdown."""
    for module in (script, presets, aggregate):
        monkeypatch.setattr(module, "run_job", job_here)
    ceilings = {"read_bytes_per_second": 1e9, "read_by": "sum", "flops_per_second": 1e9, "flops_by": "linear"}
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: {**ceilings, "dtype": "fp32"})
    monkeypatch.setattr(presets, "BATCHES", (1, 2))
    monkeypatch.setattr(kernels, "SECONDS", 0.01)
    monkeypatch.setattr(script, "run_benchmark", lambda command: cli.run(benchmark_inference.main, command[2:]))

    def call(*words: str) -> tuple[int, dict[str, Any], str]:
        asked = [f"--ckpt_dir={tiny.model}", "--device=cpu", "--input_len=9", "--output_len=3", "--budget=0"]
        status = cli.run(script.main, [*asked, f"--out={tmp_path}", *words])
        (folder,) = tmp_path.glob("*-gpu-report")
        return status, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    return call


def only(*parts: str) -> list[str]:
    return [f"--skip={part}" for part in ("checks", "kernels", "profile", "cells") if part not in parts]


def test_a_rehearsal_checks_and_times_and_starts_the_ordinary_benchmark(rehearse: Rehearse, tmp_path: Path) -> None:
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        pytest.skip("needs a C++ compiler, for the fast path of a CPU")
    status, report, page = rehearse()
    assert (status, report["failures"]) == (0, {})
    assert {check["passed"] for check in report["checks"]} == {True, None}
    assert [(row["kernels"], row["batch_size"]) for row in report["steps"]] == [("plain", 1), ("plain", 2)]
    assert report["profile"]["kernels"]
    assert report["cells"]["exit_code"] == 0
    assert "rehearsed on a CPU: no figure here says anything of a GPU" in page
    (beside,) = tmp_path.glob("*-tiny-table/results.json")
    cells = [record["cell"] for record in json.loads(beside.read_text())["cells"]]
    assert {(cell["engine"], cell["fast"]) for cell in cells} == {
        *(("llama", False), ("llama", True), ("transformers", False))
    }
    assert {(cell["input_len"], cell["output_len"], cell["device"]) for cell in cells} == {(9, 3, "cpu")}


def wrong_project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return graph_ops.project(x, weight, h) + 0.1 * h.roll(1, dims=-1)


def one_key_too_many(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    return graph_ops.attend_project(q, keys, values, (positions + 1).clamp(max=keys.shape[1] - 1), wo, h)


def broken_gate(*given: object) -> Any:
    raise RuntimeError("an illegal memory access | was encountered")


@pytest.fixture
def with_ops(monkeypatch: pytest.MonkeyPatch) -> Callable[[GraphOps], None]:
    def use(ops: GraphOps) -> None:
        for module in (checks, kernels):
            monkeypatch.setattr(module, "find_ops", lambda model: ops)

    return use


WithOps = Callable[[GraphOps], None]


def outcomes(found: list[Check], start: str) -> list[bool | None]:
    return [check["passed"] for check in found if check["name"].startswith(start)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_that_are_right_pass_every_check(tiny: Cell, with_ops: WithOps, dtype: str) -> None:
    with_ops(PYTORCH._replace(name="right"))
    found = run_checks(tiny.but(dtype=dtype))["checks"]
    assert {check["passed"] for check in found} == {True}
    assert len(found) == (13 if dtype == "fp32" else 4)


def test_a_kernel_that_computes_wrongly_is_a_failed_check_and_exit_code_1(
    rehearse: Rehearse, with_ops: WithOps
) -> None:
    with_ops(PYTORCH._replace(name="wrong", project=wrong_project))
    status, report, page = rehearse(*only("checks", "profile"))
    assert status == 1
    assert "**FAILED**" in page
    assert outcomes(report["checks"], "each kernel") == [False, False]
    assert outcomes(report["checks"], "fused logits") == [False, False]
    assert outcomes(report["checks"], "greedy ids in fp32, batch 3, ragged: plain") == [True]
    assert False in outcomes(report["checks"], "greedy ids in fp32, batch 3, ragged: fast")
    assert report["profile"] is not None  # the parts behind it were run
    assert "skipped by --skip" in page


def test_a_kernel_that_raises_is_a_failed_check_and_the_others_are_run(tiny: Cell, with_ops: WithOps) -> None:
    with_ops(PYTORCH._replace(name="broken", gate=broken_gate))
    found = run_checks(tiny)["checks"]
    assert outcomes(found, "each kernel") == [False]
    assert outcomes(found, "exact mode") == [True]
    assert any("RuntimeError: an illegal memory access" in check["detail"] for check in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kernel_is_named_with_its_own_distance(dtype: torch.dtype) -> None:
    model = uneven_model(tiny_args(max_seq_len=64), dtype, CPU)
    right, told = each_kernel(model, PYTORCH._replace(name="right"), 40)
    assert right, told
    for name, kernel in (("project", wrong_project), ("attend_project", one_key_too_many)):
        right, told = each_kernel(model, PYTORCH._replace(name="wrong", **{name: kernel}), 40)
        off = dict(part.split() for part in told.removeprefix("off from float64 by ").split(", "))
        assert not right
        assert [which for which, far in off.items() if not float(far) < 2e-2] == [name]


def test_a_kernel_that_leaves_a_norm_out_is_found_out() -> None:
    def without_norm(x: Tensor, norm: Tensor, eps: float, w1: Tensor, w3: Tensor) -> Tensor:
        return graph_ops.gate(x, torch.ones_like(norm), eps, w1, w3)

    model = uneven_model(tiny_args(max_seq_len=64), torch.float32, CPU)
    assert not each_kernel(model, PYTORCH._replace(name="wrong", gate=without_norm), 40)[0]


def test_a_part_that_dies_is_named_and_the_next_ones_are_run(
    rehearse: Rehearse, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(kind: str, cell: Cell) -> dict[str, Any]:
        if kind == "kernels" and cell.batch_size == 1:
            raise JobDied("its process was ended by SIGSEGV")
        return job_here(kind, cell)

    monkeypatch.setattr(script, "run_job", die)
    status, report, page = rehearse(*only("kernels", "profile"))
    assert status == 1
    assert report["failures"]["steps at batch 1"] == "its process was ended by SIGSEGV"
    assert [row["batch_size"] for row in report["steps"]] == [2]
    assert report["profile"]["kernels"]
    assert "| steps at batch 1 | its process was ended by SIGSEGV |" in page


def test_cells_that_fail_are_told_by_the_exit_code_of_the_benchmark(
    rehearse: Rehearse, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "run_benchmark", lambda command: 3)
    status, report, page = rehearse(*only("cells"))
    assert (status, report["cells"]["exit_code"]) == (1, 3)
    assert report["cells"]["command"] in page
    assert page.count("not measured") >= 3  # checks, steps and the profile


def test_the_page_tells_command_commit_and_hardware(rehearse: Rehearse) -> None:
    _, report, page = rehearse(*only())
    assert report["command"] in page
    for fact in ("commit", "gpu", "torch", "best read bandwidth that was seen"):
        assert f"| {fact} |" in page


def test_without_a_gpu_it_says_so_and_what_can_be_tried(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(script.main, [f"--out={tmp_path}"]) == 2
    words = capsys.readouterr().err
    assert "no CUDA GPU here; --device cpu rehearses" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--skip=jobs"], "--skip=jobs is no part"),
        (["--output_len=0"], "output_len=0"),
        (["--model=llama-9"], "model=llama-9 is not known"),
        (["--input_len=8190"], "passes the model's max_seq_len=8192"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_in_one_line(
    script: ModuleType, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(script.main, [*words, "--device=cpu"]) == 2
    assert error in capsys.readouterr().err


def test_the_script_shows_its_help_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "--budget" in done.stdout


def test_a_step_is_timed_by_itself_with_what_compiling_it_took(tiny: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []

    def record(step: Any, device: torch.device) -> Callable[[], None]:
        time.sleep(0.05)
        return lambda: (replayed.append(1), time.sleep(0.002))[0]

    monkeypatch.setattr(kernels, "record", record)
    monkeypatch.setattr(kernels, "SECONDS", 0.05)
    (row,) = time_kernels(tiny.but(output_len=5))["steps"]
    assert 0.002 <= row["seconds"]["median"] < 0.008
    assert row["record_seconds"] >= 0.05
    assert len(replayed) % 4 == 0  # whole generations of four steps


def test_fused_kernels_are_left_out_where_a_batch_is_too_large_for_them(tiny: Cell, with_ops: WithOps) -> None:
    with_ops(PYTORCH._replace(name="fused", most_rows=2))
    steps = [time_kernels(tiny.but(batch_size=rows))["steps"] for rows in (2, 3)]
    assert [[row["kernels"] for row in rows] for rows in steps] == [["fused", "plain"], ["plain"]]


def test_the_profile_is_of_one_step(tiny: Cell) -> None:
    found = profile_step(tiny)["profile"]
    assert {row["name"]: row["count"] for row in found["kernels"]}["aten::argmax"] == 1
    assert found["gaps"]["n"] == sum(row["count"] for row in found["kernels"]) - 1


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
    assert [(row["name"], row["count"], row["microseconds"], row["bytes"]) for row in rows] == [
        ("_gate", 2, 5.0, 10),
        ("gather", 1, 0.5, None),
    ]
