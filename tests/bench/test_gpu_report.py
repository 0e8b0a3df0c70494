"""The GPU report, rehearsed on a CPU: it checks, then times, counts bytes right, and a part that fails loses no other.

Its figures mean nothing there. What CUDA alone has, streams and graphs, is left to a GPU.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from oracles import tiny_args
from torch import Tensor

from llama import cli
from llama.bench.cell import Cell
from llama.bench.gpu import checks, experiments, kernels
from llama.bench.gpu.checks import Check, each_kernel, run_checks
from llama.bench.gpu.experiments import Found
from llama.bench.gpu.kernels import Span, kernel_bytes, kernel_rows, profile_step, step_row, uneven_model
from llama.bench.run import worker
from llama.bench.run.jobs import JobDied
from llama.costs import RELEASED, step_bytes, weights_bytes
from llama.fast import graph_ops
from llama.fast.graph_ops import PYTORCH, GraphOps
from llama.fast.graph_runner import Recorder

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
    monkeypatch.setattr(script, "run_job", job_here)
    ceilings = {"read_bytes_per_second": 1e9, "read_by": "sum", "flops_per_second": 1e9, "flops_by": "linear"}
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: {**ceilings, "dtype": "fp32"})
    monkeypatch.setattr(experiments, "BATCHES", (1, 2))
    monkeypatch.setattr(kernels, "SECONDS", 0.01)

    def call(*words: str) -> tuple[int, dict[str, Any], str]:
        asked = [f"--ckpt_dir={tiny.model}", "--device=cpu", "--input_len=9", "--output_len=3"]
        status = cli.run(script.main, [*asked, f"--out={tmp_path}", *words])
        (folder,) = tmp_path.glob("*-gpu-report")
        return status, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    return call


NAMES = ("checks", "early launch", "kernels", "tiles", "ways", "lengths")


def only(*names: str) -> list[str]:
    return [f"--skip={name}" for name in NAMES if name not in names]


def test_a_rehearsal_runs_all_experiments_and_says_what_is_next(rehearse: Rehearse) -> None:
    status, report, page = rehearse()
    found = report["experiments"]
    assert status == 0
    assert tuple(found) == NAMES
    assert [found[name]["passed"] for name in NAMES] == [True, None, True, None, True, True]
    assert [row[:2] for row in found["ways"]["rows"]] == [
        *(["plain", "1"], ["compiled", "1"]),
        *(["plain", "2"], ["compiled", "2"]),
    ]
    assert {row[0] for row in found["kernels"]["rows"]} == {"plain", "compiled"}
    assert "rehearsed on a CPU: no figure here says anything of a GPU" in page
    head = page[: page.index("What was asked")]
    assert "**Next: whole generations, memory and peers:**" in head
    assert "**Fused kernels:** not decided" in head


def test_the_limits_of_all_experiments_make_eight_minutes(script: ModuleType) -> None:
    assert script.MACHINE_S + sum(experiment.limit for experiment in script.EXPERIMENTS) <= 8 * 60
    assert {f"gpu {experiment.name}" for experiment in script.EXPERIMENTS} == experiments.EXPERIMENTS.keys()


def wrong_project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return graph_ops.project(x, weight, h) + 0.1 * h.roll(1, dims=-1)


def one_key_too_many(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    return graph_ops.attend_project(q, keys, values, (positions + 1).clamp(max=keys.shape[1] - 1), wo, h)


def broken_gate(*given: object) -> Any:
    raise RuntimeError("an illegal memory access | was encountered")


WithOps = Callable[[GraphOps], None]


@pytest.fixture
def with_ops(monkeypatch: pytest.MonkeyPatch) -> WithOps:
    """Return a function that puts these kernels into the place of the fused ones."""

    def use(ops: GraphOps) -> None:
        monkeypatch.setattr(kernels, "find_fused", lambda model: ops._replace(name="fused"))

    return use


def outcomes(found: list[Check], start: str) -> list[bool | None]:
    return [check["passed"] for check in found if check["name"].startswith(start)]


def test_kernels_that_are_right_pass_every_check(tiny: Cell, with_ops: WithOps) -> None:
    with_ops(PYTORCH)
    assert {check["passed"] for check in run_checks(tiny)} == {True}


def test_a_kernel_that_computes_wrongly_is_a_failed_check(tiny: Cell, with_ops: WithOps) -> None:
    with_ops(PYTORCH._replace(project=wrong_project))
    found = run_checks(tiny)
    assert outcomes(found, "each of the fused kernels") == [False, False]
    assert outcomes(found, "each of the compiled kernels") == [True, True]
    assert outcomes(found, "steps of fused kernels") == [False, False]
    assert outcomes(found, "greedy ids in fp32, batch 3, ragged: plain path") == [True]
    assert False in outcomes(found, "greedy ids in fp32, batch 3, ragged: fused kernels")


def test_a_kernel_that_raises_is_a_failed_check_and_the_others_are_run(tiny: Cell, with_ops: WithOps) -> None:
    with_ops(PYTORCH._replace(gate=broken_gate))
    found = run_checks(tiny)
    assert outcomes(found, "each of the fused kernels") == [False, False]
    assert outcomes(found, "exact mode") == [True, True]
    assert any("RuntimeError: an illegal memory access" in check["detail"] for check in found)


def test_checks_for_which_no_time_is_left_are_told_apart(
    tiny: Cell, with_ops: WithOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ops(PYTORCH)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=count().__next__))  # a second at each look
    monkeypatch.setattr(experiments, "CHECKING", 5.0)
    found = experiments.checks(tiny)
    outcomes = [row[1] for row in found["rows"]]
    assert outcomes == ["passed"] * 4 + ["not run"] * (len(outcomes) - 4)
    assert found["passed"] is True
    assert found["words"].startswith(f"all 4 hold; for {len(outcomes) - 4} no time was left")


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


def crash(cell: Cell) -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(cell: Cell) -> Found:
    time.sleep(600)
    raise AssertionError


def fine(cell: Cell) -> Found:
    return {"passed": True, "words": "seen", "heads": [], "rows": [], "figures": {}}


def test_an_experiment_that_crashes_or_hangs_leaves_the_others(
    rehearse: Rehearse, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, forked here: what a process does, and how long, is up to the system."""

    def forked(kind: str, cell: Cell, *, waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        if kind == "machine":
            return job_here(kind, cell)
        act = {"gpu checks": crash, "gpu kernels": hang}.get(kind, fine)
        process = multiprocessing.get_context("fork").Process(target=act, args=(cell,))
        process.start()
        try:
            while process.is_alive():
                waiting()
                process.join(0.05)
        finally:
            process.kill()
            process.join()
        if process.exitcode:
            raise JobDied(f"its process was ended by {signal.Signals(-process.exitcode).name}")
        return dict(fine(cell))

    monkeypatch.setattr(script, "run_job", forked)
    monkeypatch.setattr(script, "EXPERIMENTS", [one._replace(limit=0.5) for one in script.EXPERIMENTS])
    status, report, page = rehearse()
    assert status == 1
    found = report["experiments"]
    assert [found[name]["passed"] for name in NAMES] == [False, True, False, True, True, True]
    assert found["checks"]["words"] == "its process was ended by SIGKILL"
    assert found["kernels"]["words"] == "ended after its limit of 0.5 s"
    head = page[: page.index("What was asked")]
    assert "**Next: mend what checks found:** its process was ended by SIGKILL" in head
    assert "Next: whole generations" not in head
    said = capsys.readouterr().out.splitlines()  # as each ended
    assert said[0] == "checks: **FAILED**, its process was ended by SIGKILL"
    assert said[1] == "early launch: passed, seen"


def test_a_gpu_that_does_not_come_up_is_given_up_in_one_line(
    rehearse: Rehearse, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hanging(kind: str, cell: Cell, *, waiting: Callable[[], None]) -> dict[str, Any]:
        while True:
            waiting()
            time.sleep(0.01)

    monkeypatch.setattr(script, "run_job", hanging)
    monkeypatch.setattr(script, "MACHINE_S", 0.05)
    with pytest.raises(FileNotFoundError):  # no report
        rehearse()
    assert "ended after its limit of 0.05 s" in capsys.readouterr().err


def decided(script: ModuleType, fused: float, *, passed: bool) -> str:
    early: Found = {**fine(Cell()), "passed": passed, "words": f"{0 if passed else 9} of 2000 steps differ"}
    figures = {"fused at batch 1": fused, "compiled at batch 1": 0.90, "plain at batch 1": 1.2}
    words: str = script.verdict({"early launch": early, "ways": {**fine(Cell()), "figures": figures}})
    return words


def test_the_rule_of_the_log_decides_about_the_fused_kernels(script: ModuleType) -> None:
    assert decided(script, 0.70, passed=True).startswith("keep them, for one row only: 1.29 times as fast as the comp")
    assert decided(script, 0.80, passed=True).startswith("delete them: 1.1")
    assert decided(script, 0.70, passed=False).startswith("delete them: 1.29")
    assert "9 of 2000 steps differ" in decided(script, 0.70, passed=False)
    assert script.verdict({}).startswith("not decided")


def test_steps_that_differ_in_a_bit_are_told_by_their_number(tiny: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "REPLAYS", 6)
    model = uneven_model(tiny_args(max_seq_len=64), torch.float32, CPU)

    def nudged(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
        steps.append(1)
        out = graph_ops.project(x, weight, h)
        return out + (1e-6 if len(steps) > 4 * len(model.blocks) else 0)

    steps: list[int] = []
    with torch.inference_mode():
        ours, theirs = (experiments._noting(model, tiny, PYTORCH) for _ in range(2))
        assert experiments.same_bits(ours, theirs)["passed"]
        other = experiments._noting(model, tiny, PYTORCH._replace(project=nudged))
        found = experiments.same_bits(experiments._noting(model, tiny, PYTORCH), other)
    assert found["passed"] is False
    assert found["words"].startswith("3 of 6 steps differ, the first is step 3")


def test_the_page_tells_command_commit_and_hardware(rehearse: Rehearse) -> None:
    _, report, page = rehearse(*only())
    assert report["command"] in page
    for fact in ("commit", "cpu", "torch", "best read bandwidth that was seen"):
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
        (["--skip=jobs"], "--skip=jobs is no experiment"),
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


@pytest.mark.slow
def test_the_script_shows_its_help_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "--skip" in done.stdout


def test_a_step_is_timed_by_itself_with_what_compiling_it_took(tiny: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    waited_for: list[torch.device] = []

    class Slow(Recorder):
        def __call__(self, step: Any) -> Callable[[], None]:
            time.sleep(0.05)
            return lambda: (replayed.append(1), time.sleep(0.002))[0]

    monkeypatch.setattr(kernels, "Recorder", Slow)
    monkeypatch.setattr(kernels, "SECONDS", 0.05)
    monkeypatch.setattr(kernels, "wait_for", waited_for.append)
    row = step_row(kernels.model_for(tiny), tiny.but(output_len=5), PYTORCH)
    assert 0.002 <= row["seconds"]["median"] < 0.008
    assert row["record_seconds"] >= 0.05
    assert len(replayed) % 4 == 0  # whole generations of four steps
    assert len(waited_for) == 1 + len(replayed) // 4  # by the model's own device: a timer knows the current one alone


def test_fused_kernels_are_left_out_where_a_batch_is_too_large_for_them(
    tiny: Cell, with_ops: WithOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "BATCHES", (2, 3))
    monkeypatch.setattr(kernels, "SECONDS", 0.01)
    with_ops(PYTORCH._replace(most_rows=2))
    assert [row[:2] for row in experiments.ways(tiny)["rows"]] == [
        *(["plain", "2"], ["compiled", "2"], ["fused", "2"]),
        *(["plain", "3"], ["compiled", "3"]),
    ]


def test_the_profile_is_of_one_step(tiny: Cell) -> None:
    rows, gaps = profile_step(kernels.model_for(tiny), tiny, PYTORCH)
    assert {row["name"]: row["count"] for row in rows}["aten::argmax"] == 1
    assert gaps is not None
    assert gaps["n"] == sum(row["count"] for row in rows) - 1


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
