"""The GPU report, rehearsed on a CPU: it checks, then times, and a part that fails does not stop the others.

Its figures mean nothing there. Streams and graphs, which only CUDA has, are not tested.
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
from torch import Tensor

from llama import cli
from llama.bench.cell import Cell
from llama.bench.gpu import checks, experiments, kernels
from llama.bench.gpu.checks import Check, run_checks
from llama.bench.gpu.experiments import Found
from llama.bench.gpu.kernels import step_row
from llama.bench.run import worker
from llama.bench.run.jobs import JobDied
from llama.fast import graph_ops
from llama.fast.graph_ops import PYTORCH
from llama.fast.graph_runner import Recorder

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_report.py"
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


NAMES = ("checks", "ways", "lengths")


def test_a_rehearsal_runs_all_experiments_and_says_what_is_next(rehearse: Rehearse) -> None:
    status, report, page = rehearse()
    found = report["experiments"]
    assert status == 0
    assert tuple(found) == NAMES
    assert [found[name]["passed"] for name in NAMES] == [True, True, True]
    assert [row[:2] for row in found["ways"]["rows"]] == [
        *(["plain", "1"], ["compiled", "1"]),
        *(["plain", "2"], ["compiled", "2"]),
    ]
    assert "rehearsed on a CPU: no figure here says anything about a GPU" in page
    assert "**Next: whole generations, memory and peers:**" in page[: page.index("**Experiments**")]
    assert report["command"] in page
    for fact in ("commit", "cpu", "torch", "best read bandwidth that was seen"):
        assert f"| {fact} |" in page


def test_the_limits_of_all_experiments_make_six_minutes(script: ModuleType) -> None:
    assert script.MACHINE_S + sum(experiment.limit for experiment in script.EXPERIMENTS) <= 6 * 60
    assert {f"gpu {experiment.name}" for experiment in script.EXPERIMENTS} == experiments.EXPERIMENTS.keys()


def wrong_project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return graph_ops.project(x, weight, h) + 0.1 * h.roll(1, dims=-1)


def broken_gate(*given: object) -> Any:
    raise RuntimeError("an illegal memory access | was encountered")


def outcomes(found: list[Check], start: str) -> list[bool | None]:
    return [check["passed"] for check in found if check["name"].startswith(start)]


def test_wrong_and_broken_kernels_fail_their_checks_and_the_others_pass(
    tiny: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"right": {}, "wrong": {"project": wrong_project}, "broken": {"gate": broken_gate}}
    sets = {name: PYTORCH._replace(name=name, **kernels) for name, kernels in made.items()}  # type: ignore[arg-type]
    known = checks.ways_of
    monkeypatch.setattr(checks, "ways_of", lambda model: {**known(model), **sets})
    found = run_checks(tiny)
    for name, passed in (("right", True), ("wrong", False), ("broken", False)):
        assert outcomes(found, f"steps of {name} kernels") == [passed] * 2
    assert False in outcomes(found, "greedy ids in fp32, batch 3, ragged: wrong kernels")
    assert outcomes(found, "greedy ids in fp32, batch 3, ragged: plain path") == [True]
    assert outcomes(found, "exact mode") == [True, True]
    assert any("RuntimeError: an illegal memory access" in check["detail"] for check in found)


def test_checks_without_time_left_are_not_run(tiny: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=count().__next__))  # a second at each look
    monkeypatch.setattr(experiments, "CHECKING", 5.0)
    found = experiments.checks(tiny)
    outcomes = [row[1] for row in found["rows"]]
    assert outcomes == ["passed"] * 4 + ["not run"] * (len(outcomes) - 4)
    assert found["passed"] is True
    assert found["words"].startswith(f"all 4 hold; for {len(outcomes) - 4} no time was left")


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
        act = {"gpu checks": crash, "gpu ways": hang}.get(kind, fine)
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
    assert [found[name]["passed"] for name in NAMES] == [False, False, True]
    assert found["checks"]["words"] == "its process was ended by SIGKILL"
    assert found["ways"]["words"] == "ended after its limit of 0.5 s"
    head = page[: page.index("**Experiments**")]
    assert "**Next: fix what checks found:** its process was ended by SIGKILL" in head
    assert "Next: whole generations" not in head
    said = capsys.readouterr().out.splitlines()  # as each ended
    assert said[0] == "checks: **FAILED**, its process was ended by SIGKILL"
    assert said[2] == "lengths: passed, seen"


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


def test_without_a_gpu_the_error_names_the_rehearsal(
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
def test_wrong_flags_are_rejected_in_one_line(
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
