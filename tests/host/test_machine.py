"""The facts about the machine and its memory are true: planted files, pages and tensors are found."""

import json
import math
import mmap
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cgroups import write_group

import llama
from llama.bench.run import jobs, memory
from llama.bench.run.memory import peaks, reset_peaks, tensor_peak
from llama.host import machine
from llama.host.machine import available_memory, ceilings, environment

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
MIB = 2**20
FLOATS = MIB // 4  # float32 numbers in a MiB

on_linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux reports it")
with_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
with_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def test_facts_of_the_environment_are_json_and_name_what_a_number_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(machine, "_version", lambda _: None)  # as in a checkout that was never installed
    facts = environment(CPU)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["threads"] == 3
    assert facts["torch"] == torch.__version__
    assert facts["llama_kv"] == llama.__version__
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert facts["gpu"] is None


def test_versions_are_those_of_the_packages_that_are_installed() -> None:
    peers = environment(CPU)["peers"]
    assert peers["transformers"] == metadata.version("transformers")
    assert None not in peers.values()
    assert machine._version("a-package-that-nobody-has-installed") is None


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *named, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@with_git
def test_the_commit_is_that_of_the_checkout_of_this_package(tmp_path: Path) -> None:
    package, installed = tmp_path / "package", tmp_path / "venv" / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / ".gitignore").write_text("venv\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(package, "rev-parse", "HEAD")
    (tmp_path / "results").write_text("written beside the package")
    assert machine._checkout(package) == {"commit": head, "dirty": False}
    shutil.copytree(package, installed)  # a package inside the checkout of another project
    assert machine._checkout(installed) == {"commit": None, "dirty": None}
    (package / "__init__.py").write_text("changed = True\n")
    assert machine._checkout(package) == {"commit": head, "dirty": True}


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._checkout(ROOT / "llama") == {"commit": None, "dirty": None}


@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_ceilings_are_positive_and_finite(dtype: torch.dtype, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._READ_BYTES, "cpu", 2**22)
    random_state = torch.get_rng_state()
    found = ceilings(CPU, dtype, seconds=0.01)
    assert found["dtype"] == word
    for rate in (found["read_bytes_per_second"], found["flops_per_second"]):
        assert 0 < rate < math.inf
    assert " x " in found["flops_by"]
    assert "threads" in found["read_by"]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_best_operation_is_named_and_run_again_if_other_work_slowed_its_first_run() -> None:
    """The warm-up and the first run are slow; a later run shows the rate."""

    def operation(name: str, *seconds: float) -> machine._Operation:
        left = [*seconds]
        return machine._Operation(name, 1000, lambda: time.sleep(left.pop(0) if len(left) > 1 else left[0]))

    steady, unlucky = operation("steady", 0.02), operation("unlucky", 0.03, 0.03, 0.005)
    rate, name = machine._best_rate([steady, unlucky], CPU, 0.3)
    assert name == "unlucky"
    assert 100_000 < rate <= 200_000


def test_available_memory_is_at_most_that_of_the_machine() -> None:
    free = available_memory(CPU)
    assert 0 < free <= environment(CPU)["memory_bytes"]


def test_memory_left_in_a_cgroup_is_its_limit_less_what_the_kernel_cannot_free(tmp_path: Path) -> None:
    stat = "anon 500\ninactive_file 200\n"
    write_group(tmp_path / "pod" / "box", memory__max="1000\n", memory__current="700\n", memory__stat=stat)
    assert machine._cgroup_free("0::/pod/box\n", tmp_path) == 500
    files = {"memory__limit_in_bytes": "1000\n", "memory__usage_in_bytes": "600\n"}  # of the first generation
    write_group(tmp_path / "memory", **files)  # the path is the host's, as in a container: only the top is mounted
    assert machine._cgroup_free("7:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n", tmp_path) == 400
    write_group(tmp_path / "box", memory__max="max\n", memory__current="100\n")
    assert machine._cgroup_free("0::/box\n", tmp_path) is None
    assert machine._cgroup_free("", tmp_path) is None


def touch(nbytes: int) -> None:
    """Map new memory, write to each page, and unmap it."""
    with mmap.mmap(-1, nbytes) as fresh:
        for page in range(0, nbytes, mmap.PAGESIZE):
            fresh[page] = 1


@on_linux
def test_a_peak_sees_memory_that_was_touched_and_freed_and_none_from_before() -> None:
    touch(300 * MIB)
    reset_seen = reset_peaks(CPU)
    touch(100 * MIB)
    seen = peaks(CPU)
    at_reset, began = reset_seen
    assert abs(at_reset - began) < 8 * MIB
    assert 95 * MIB < seen["resident_peak_bytes"] - began < 150 * MIB
    assert "tensor_peak_bytes" not in seen


@on_linux
def test_a_reset_that_does_not_work_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    touch(200 * MIB)
    monkeypatch.setattr(memory, "reset_peak_resident", lambda: True)
    reset_seen = reset_peaks(CPU)
    assert reset_seen[0] - reset_seen[1] > 150 * MIB


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no getrusage")
def test_where_proc_is_missing_the_peak_is_that_of_getrusage_in_bytes() -> None:
    peak = memory._peak_of_usage()
    assert 50 * MIB < peak < 2**40  # PyTorch alone takes more than the one, and no unit mistaken fits below the other


@with_cuda
def test_a_peak_on_a_gpu_counts_allocated_bytes() -> None:
    device = torch.device("cuda")
    reset_seen = reset_peaks(device)
    torch.ones(100 * FLOATS, device=device)
    seen = peaks(device)
    assert reset_seen[0] == reset_seen[1]
    assert seen["tensor_peak_bytes"] == reset_seen[1] + 100 * MIB


def repeat_temporaries() -> None:
    one = torch.ones(FLOATS)
    for _ in range(3):
        one = one + one  # the old and the new at a time


def make_and_free_in_turn() -> None:
    for _ in range(5):
        torch.ones(4 * FLOATS)


HELD = torch.ones(512, 512)  # a MiB that is there before


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        pytest.param(lambda: None, 0, id="nothing"),
        pytest.param(lambda: torch.empty(FLOATS), MIB, id="one tensor, touched or not"),
        pytest.param(lambda: HELD.t()[3:].view(-1, 1, 512), 0, id="views"),
        pytest.param(lambda: HELD.mul_(HELD), 0, id="in place"),
        pytest.param(lambda: HELD @ HELD, MIB, id="product"),
        pytest.param(lambda: torch.cat([HELD, HELD, HELD]), 3 * MIB, id="cat"),
        pytest.param(lambda: HELD.to(torch.bfloat16), MIB // 2, id="half the size"),
        pytest.param(lambda: (HELD + HELD) + (HELD + HELD), 3 * MIB, id="two terms and their sum"),
        pytest.param(repeat_temporaries, 2 * MIB, id="temporaries"),
        pytest.param(make_and_free_in_turn, 4 * MIB, id="one after another"),
    ],
)
def test_tensor_peak_is_exact_to_the_byte(work: Callable[[], object], expected: int) -> None:
    assert tensor_peak(work) == expected


def test_tensor_peak_sees_what_an_operator_allocates_and_frees_inside() -> None:
    targets = torch.zeros(512, dtype=torch.int64)
    peak = tensor_peak(lambda: F.cross_entropy(HELD, targets))
    assert MIB <= peak < MIB + 1024  # log_softmax(HELD), which nobody outside sees; beside it single numbers
    values_and_indices = MIB + 2 * MIB
    assert tensor_peak(lambda: torch.sort(HELD.view(-1))) > values_and_indices


def test_tensor_peak_counts_what_its_work_freed_of_an_earlier_call() -> None:
    held: list[torch.Tensor] = []
    tensor_peak(lambda: held.append(torch.ones(2 * FLOATS)))

    def swap() -> torch.Tensor:
        held.clear()
        return torch.ones(3 * FLOATS)

    assert tensor_peak(swap) == MIB


def test_tensor_peak_raises_an_error_of_its_work_and_works_again() -> None:
    with pytest.raises(ZeroDivisionError):
        tensor_peak(lambda: 1 // 0)
    assert tensor_peak(lambda: torch.ones(FLOATS)) == MIB


@pytest.mark.slow
def test_tensor_peak_prints_nothing_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from llama.bench.run.memory import tensor_peak; tensor_peak(lambda: None); tensor_peak(lambda: None)"
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=jobs._environment(tmp_path, "0"),
        check=True,
    )
    assert done.stdout + done.stderr == ""
