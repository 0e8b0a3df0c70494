"""The GPU report, rehearsed on a CPU: a path that is wrong fails its checks, and a part that fails leaves the others.

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
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from torch import Tensor

from llama import cli
from llama.bench.cell import Cell
from llama.bench.gpu import checks
from llama.bench.gpu.checks import check_gpu
from llama.bench.run import worker
from llama.bench.run.jobs import JobDied
from llama.fast import graph_ops
from llama.fast.graph_ops import PYTORCH, LayerWeights
from llama.host.machine import environment

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
    """Return a function that runs the script and its jobs here: its exit code, its JSON, its Markdown."""
    monkeypatch.setattr(script, "run_job", job_here)
    ceilings = {"read_bytes_per_second": 1e9, "read_by": "sum", "flops_per_second": 1e9, "flops_by": "linear"}
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: {**ceilings, "dtype": "fp32"})

    def call(*words: str) -> tuple[int, dict[str, Any], str]:
        asked = [f"--ckpt_dir={tiny.model}", "--device=cpu", "--input_len=9", "--output_len=3"]
        status = cli.run(script.main, [*asked, f"--out={tmp_path}", *words])
        (folder,) = tmp_path.glob("*-gpu-report")
        return status, json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    return call


def test_a_rehearsal_passes_all_checks_and_says_what_is_next(rehearse: Rehearse) -> None:
    status, report, page = rehearse()
    assert status == 0
    assert {check["passed"] for check in report["checks"]} == {True}
    names = [check["name"] for check in report["checks"]]
    assert [sum(name.startswith(kind) for name in names) for kind in ("greedy", "steps", "exact")] == [6, 2, 2]
    assert "rehearsed on a CPU: no figure here says anything about a GPU" in page
    assert "**Next: whole generations, memory and peers:**" in page[: page.index("**Checks**")]
    assert report["command"] in page
    checkout = ["commit"] if environment(torch.device("cpu"))["commit"] else []  # copies for mutants have none
    for fact in (*checkout, "cpu", "torch", "best read bandwidth that was seen"):
        assert f"| {fact} |" in page


def test_the_limits_of_all_parts_make_eight_minutes(script: ModuleType) -> None:
    assert script.MACHINE_S + 3 * script.PART_S <= 8 * 60


def wrong_layer(attend: Any, product: Any, h: Tensor, *given: Any) -> Tensor:
    return graph_ops.decode_layer(attend, product, h, *given) + 0.5 * h.roll(1, dims=-1)


def layer_without_norm(attend: Any, product: Any, h: Tensor, weights: LayerWeights, *given: Any) -> Tensor:
    norm = torch.ones_like(weights.tensors["ffn_norm.weight"])
    unnormed = weights._replace(tensors={**weights.tensors, "ffn_norm.weight": norm})
    return graph_ops.decode_layer(attend, product, h, unnormed, *given)


def broken_layer(*given: object) -> Any:
    raise RuntimeError("an illegal memory access | was encountered")


def test_wrong_and_broken_kernels_fail_their_checks_and_the_others_pass(
    tiny: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"wrong": wrong_layer, "unnormed": layer_without_norm, "broken": broken_layer}
    sets = {name: PYTORCH._replace(name=name, layer=layer) for name, layer in made.items()}
    known = checks.kernels_of
    monkeypatch.setattr(checks, "kernels_of", lambda device: {**known(device), **sets})
    for part, kind in (("ids", "greedy ids in fp32, batch 3, ragged: {} kernels"), ("bf16", "steps of {} kernels")):
        found = {check["name"]: check for check in check_gpu(tiny, part=part)["checks"]}
        passed = {
            name: [check["passed"] for key, check in found.items() if key.startswith(kind.format(name))]
            for name in ("plain", *made)
        }
        # A step that raises makes the fast path decline, so that the ids are those of the plain path.
        assert passed == {"plain": [True], "wrong": [False], "unnormed": [False], "broken": [part == "ids"]}
    assert any("RuntimeError: an illegal memory access" in check["detail"] for check in found.values())


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_part_that_crashes_or_hangs_leaves_the_others(
    rehearse: Rehearse, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In forked processes: what a process does, and for how long, is up to the system."""

    def forked(kind: str, cell: Cell, *, part: str = "", waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        if kind == "machine":
            return job_here(kind, cell)
        act = {"ids": crash, "fp32": lambda: time.sleep(600)}.get(part, lambda: None)
        process = multiprocessing.get_context("fork").Process(target=act)
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
        return {"checks": [{"name": "a check", "passed": True, "detail": "seen"}]}

    monkeypatch.setattr(script, "run_job", forked)
    monkeypatch.setattr(script, "PART_S", 0.5)
    status, report, page = rehearse()
    assert status == 1
    assert [check["detail"] for check in report["checks"]] == [
        "its process was ended by SIGKILL",
        "ended after its limit of 0.5 s",
        "seen",
    ]
    assert "**Next: fix ids:** its process was ended by SIGKILL" in page[: page.index("**Checks**")]
    assert "Next: whole generations" not in page
    assert "ids: 0 of 1 checks passed" in capsys.readouterr().out.splitlines()  # printed when it ended


def test_a_gpu_that_does_not_start_is_reported_in_one_line(
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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "no CUDA GPU here; --device cpu rehearses"),
        (["--device=cpu", "--output_len=0"], "output_len=0"),
        (["--device=cpu", "--model=llama-9"], "model=llama-9 is not known"),
        (["--device=cpu", "--input_len=8190"], "goes past max_seq_len=8192"),
    ],
    ids=str,
)
def test_wrong_flags_are_rejected_in_one_line(
    script: ModuleType, words: list[str], error: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(script.main, [*words, f"--out={tmp_path}"]) == 2
    assert error in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_script_shows_its_help_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "--ckpt_dir" in done.stdout
