"""The tasks of a sweep by submitit: whatever is killed, every cell is measured once, and the report is made."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import slurm_here
import sweep_task
from fakes import NATIVE_SIZES, write_checkpoint
from refusals import unrefused

from llama.bench.report.files import RESULTS
from llama.cli import submit
from llama.cli.submit import run_parts
from llama.cli.sweep import main as sweep

pytestmark = pytest.mark.slow
submitit = pytest.importorskip("submitit")
needs_slurm = pytest.mark.skipif(slurm_here.missing() != "", reason=f"no Slurm here: {slurm_here.missing()}")

PLAN = "contexts = [1, 2, 3, 4]\n"
CELLS = 8


class Sweep:
    """A sweep of CELLS cells that cost nothing, as the processes of tests/support/sweep_task.py measure it."""

    def __init__(self, folder: Path, cluster: str, environment: dict[str, str]) -> None:
        self.folder, self.log, self.gate = folder, folder / "log", folder / "gate"
        (folder / "plan.toml").write_text(PLAN)
        words = [folder / "plan.toml", "--out", folder / "out", "--submit", cluster, "--tasks", "2"]
        self.words = [sys.executable, sweep_task.__file__, *map(str, words)]
        paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(sweep_task.__file__).parent)])
        own = {"SWEEP_LOG": str(self.log), "SWEEP_GATE": str(self.gate), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.environment = {**environment, **own}

    def start(self) -> "subprocess.Popen[str]":
        with open(self.folder / "out.txt", "w") as out, open(self.folder / "said.txt", "w") as said:
            return subprocess.Popen(self.words, env=self.environment, stdout=out, stderr=said, text=True)

    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    def lines(self, word: str) -> list[list[str]]:
        """Return (id, process, node) of each line of the log that begins with a word."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(word)]

    def wait_for(self, ready: Callable[[], object]) -> None:
        slurm_here.wait_until(ready, 180, lambda: (self.said(), self.lines("")))

    def under_way(self) -> dict[str, int]:
        """Return the process that measures a cell now, by the name of its node."""
        return {node: int(pid) for _, pid, node in self.lines("began") if Path(f"/proc/{pid}").exists()}

    def wait_for_end(self, command: "subprocess.Popen[str]") -> None:
        """Wait for the end of the command, and check that every cell was done once."""
        assert command.wait(timeout=240) == 0, self.said()
        done = [id for id, *_ in self.lines("done")]
        assert len(done) == len(set(done)) == CELLS
        assert {path.stem for path in (self.folder / "out").glob("*.json")} == set(done)
        report = json.loads((self.folder / "out" / "report" / RESULTS).read_text("utf-8"))
        assert len(report["cells"]) == CELLS


def killed(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def test_local_tasks_are_started_again_after_kill_9_of_one_and_of_the_command(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "local", dict(os.environ))
    command = sweep.start()
    sweep.wait_for(lambda: len(sweep.lines("began")) == 2)
    os.kill(int(sweep.lines("began")[0][1]), signal.SIGKILL)
    killed(command)
    command = sweep.start()
    sweep.wait_for(lambda: len(sweep.lines("began")) == 3)  # the new task has the group of the killed one
    sweep.gate.touch()
    sweep.wait_for_end(command)
    assert "cells of 2 parts are not done; submitting 2 tasks" in sweep.said()
    assert len(sweep.lines("began")) == CELLS + 1


@needs_slurm
def test_a_slurm_array_outlives_kill_9_of_a_task_of_the_command_and_the_end_of_a_node(tmp_path: Path) -> None:
    with slurm_here.slurm_here(tmp_path / "slurm") as slurm:
        sweep = Sweep(tmp_path, "slurm", slurm.environment)
        command = sweep.start()
        sweep.wait_for(lambda: len(sweep.under_way()) == 2)
        tasks = sweep.under_way()
        assert tasks.keys() == {"one", "two"}
        killed(command)
        slurm.stop("two")
        os.kill(tasks["two"], signal.SIGKILL)
        slurm.asked("scontrol", "update", "nodename=two", "state=down", "reason=test")
        os.kill(tasks["one"], signal.SIGKILL)
        sweep.wait_for(lambda: len(sweep.lines("began")) == 3)  # Slurm has requeued the task of the node
        command = sweep.start()
        sweep.wait_for(lambda: "waiting for them" in sweep.said())
        sweep.gate.touch()
        sweep.wait_for_end(command)
        assert "4 cells of 1 parts are not done; submitting 1 tasks" in sweep.said()
        assert len(sweep.lines("began")) == CELLS + 2
        assert {node for *_, node in sweep.lines("done")} == {"one"}


def test_the_command_of_a_task_measures_its_part_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two cells that are too long for the model, which costs no measurement, it refuses its own."""
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=64, **NATIVE_SIZES)
    (tmp_path / "plan.toml").write_text(f'models = ["{model}"]\ncontexts = [64, 65]\nkinds = ["static"]\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(submitit.core.utils.FailedJobError):  # by its exit code
        submit._command([str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")])("--part=2/2")
    (file,) = (tmp_path / "out").glob("*.json")
    assert "goes past max_seq_len=64" in file.read_text()


def test_tasks_that_end_without_a_cell_are_given_up_after_some_rounds_and_the_other_cells_have_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from submitit.helpers import CommandFunction

    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    model = write_checkpoint(tmp_path / "tiny", max_seq_len=64, **NATIVE_SIZES)
    plan.write_text(f'models = ["{model}"]\ncontexts = [65]\nkinds = ["static"]\n')
    monkeypatch.setattr(submit, "LOOK_EVERY", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(submit, "_command", lambda words: CommandFunction(["false"]))
        assert sweep(str(plan), out=str(out), submit="local", tasks=1) == 1
    assert capsys.readouterr().err.count("error: ") == 1, "no cell, so no report"
    assert sweep(str(plan), out=str(out)) == 1  # refused, which is a result
    plan.write_text(f'models = ["{model}"]\ncontexts = [65, 66, 67]\nkinds = ["static"]\n')
    monkeypatch.setattr(submit, "_command", lambda words: CommandFunction(["false"]))
    capsys.readouterr()
    assert sweep(str(plan), out=str(out), submit="local", tasks=1) == 1
    assert "2 cells are not done, and 3 rounds of tasks have ended without one more" in capsys.readouterr().err
    assert len(json.loads((out / "report" / RESULTS).read_text("utf-8"))["cells"]) == 1


def test_wrong_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = partial(run_parts, [], tmp_path, dict, tasks=1)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: run(cluster="pbs", options=[]), "--submit=pbs --tasks=1: submit to slurm or local"),
        (lambda: run(cluster="local", options=[], tasks=0), "--tasks=0"),
        (lambda: run(cluster="local", options=["mem"]), "--option=mem must be NAME=VALUE"),
        (lambda: run(cluster="local", options=["colour=red"]), "submitit refuses .* colour=red"),
        (lambda: run(cluster="slurm", options=[]), "submitit refuses --submit=slurm"),
    ]
    assert unrefused(calls) == []
