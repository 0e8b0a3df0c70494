"""Several ranks are one model with the same logits, bits and texts; and a job that loses a rank ends."""

import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
import ranks_child
from checkpoints import (
    Kind,
    config_of,
    meta_params,
    meta_weights,
    random_model,
    write_gguf,
    write_huggingface,
    write_meta,
)
from families import config_of as config_of_family
from families import random_model as random_family

from llama.checkpoint import open_checkpoint
from llama.costs import parameters

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 5  # of a job that is to lose a rank
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **changes}


def run(command: list[str], *, cwd: Path = ROOT, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd
    )


def torchrun(size: int, *words: object, cwd: Path = ROOT, forked: bool = False) -> subprocess.Popen[str]:
    """Start a job. Forked ranks have PyTorch already; others import it in two seconds each.

    Do not fork a job that loses a rank: torchrun takes some seconds longer to end forked ranks.
    """
    job = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
    if forked and sys.platform == "linux":
        job += ["--run-path", "--start-method=fork"]
    return run([sys.executable, *job, *map(str, words)], cwd=cwd)


def ended(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Return a job's exit code and output. Raises TimeoutExpired, and ends the job, if it takes too long."""
    try:
        printed, _ = job.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.communicate()
        raise
    return job.returncode, printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, "meta-1", of 4 heads that share 2 KV heads."""
    folder, config = tmp_path_factory.mktemp("ranks"), config_of()
    write_meta(folder / "meta-1", meta_weights(random_model(config)), meta_params(config))
    return folder


@pytest.fixture(scope="module")
def formats(folder: Path) -> Path:
    """The same weights in every other format, and those of another model."""
    config = config_of()
    model = random_model(config)
    weights, params = meta_weights(model), meta_params(config)
    write_meta(folder / "meta-2", weights, params, shards=2)
    write_meta(folder / "other", meta_weights(random_model(config, seed=1)), params)
    write_huggingface(folder / "huggingface", model)
    for family in ("qwen2", "qwen3"):
        write_huggingface(folder / family, random_family(config_of_family(family)))
    write_gguf(folder / "weights.gguf", weights, config)
    write_gguf(folder / "weights-q8.gguf", weights, config, kind=Kind.Q8_0)
    return folder


def failures(folder: Path, size: int, cases: Sequence[str]) -> list[str]:
    """Return a line for each of these cases and each rank where it failed, or was not run."""
    outcomes = [json.loads((folder / f"outcomes.{rank}.json").read_text("utf-8")) for rank in range(size)]
    named = [(rank, name, outcome.get(name, "not run")) for rank, outcome in enumerate(outcomes) for name in cases]
    return [f"rank {rank}, {name}: {found}" for rank, name, found in named if found]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def forks(target: Callable[..., None], folder: Path, *words: object) -> list[multiprocessing.Process]:
    """Fork two ranks from this process, which has imported what they need, instead of starting them by torchrun."""
    import_module("fairscale.nn.model_parallel")
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=target, args=(folder, rank, port, *words)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks  # type: ignore[return-value]


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_ranks_have_the_logits_and_texts_of_one_process(folder: Path) -> None:
    ranks = forks(ranks_child.run_fork, folder)
    for rank in ranks:
        rank.join(150)
    codes = [rank.exitcode for rank in ranks]  # None for a rank that has not ended
    for rank in ranks:
        rank.kill()
    assert codes == [0, 0]
    assert failures(folder, 2, ranks_child.FEW) == []


@pytest.mark.slow
@pytest.mark.parametrize(("size", "cases"), [(2, [*ranks_child.CASES]), (4, ranks_child.BY_SIZE)], ids=["2", "4"])
def test_a_torchrun_of_several_ranks_is_one_model(size: int, cases: list[str], formats: Path) -> None:
    child = ROOT / "tests" / "support" / "ranks_child.py"
    code, printed = ended(torchrun(size, child, formats, "", 30, *cases, forked=True))
    assert code == 0, printed
    assert failures(formats, size, cases) == []


FAULTS = {
    "killed": r"rank\s+: 1 \(local_rank: 1\)\s+exitcode  : -9",
    "raising": "RuntimeError: rank 1 met something unforeseen",
    "absent": rf"RankLost: a rank has not come so far.*: wait timeout after {TIMEOUT_S}000ms, keys: .*/rank 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_that_loses_a_rank_ends_and_says_why(fault: str, folder: Path) -> None:
    code, printed = ended(torchrun(2, ROOT / "tests" / "support" / "ranks_child.py", folder, fault, TIMEOUT_S))
    assert code == 1, printed
    assert re.search(FAULTS[fault], printed), printed


LOST = "RankLost: another rank has ended or does not answer; if it was only slow, give a longer --timeout: "
NOTICED = {
    "stopped": rf"{LOST}.*Timed out waiting {TIMEOUT_S}000ms",
    "ending": rf"{LOST}.*Connection (closed|reset) by peer",
}


@needs_fork
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_rank_raises_if_another_one_does_not_answer(folder: Path) -> None:
    jobs = {fault: forks(ranks_child.lose_fork, folder, fault, TIMEOUT_S) for fault in NOTICED}
    for first, second in jobs.values():
        first.join(60)
        first.kill()
        second.kill()
    for fault, (first, _) in jobs.items():
        said = (folder / f"{fault}.0.txt").read_text("utf-8")
        assert first.exitcode == 1, said
        assert re.search(NOTICED[fault], said), said


LOSES_ITS_MASTER = """
import os
from llama import cli

def main() -> int:
    import torch
    from llama.ranks.torchrun import join
    ranks = join(torch.device("cpu"), timeout=20.0)
    if ranks.rank == 0:
        os._exit(3)
    ranks.agree(dict)
    return 0

cli.main(main, [])
"""


@pytest.mark.slow
def test_a_rank_whose_master_is_gone_prints_one_line_without_frames_of_torch() -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    jobs = [run([sys.executable, "-c", LOSES_ITS_MASTER], **place, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    (first, _), (second, printed) = map(ended, jobs)
    assert (first, second) == (3, 2)
    assert re.fullmatch(r"error: rank 1: [^\n]*\n", printed), printed


# ---- the scripts -----------------------------------------------------------------------------------------------------

ASKED = ("the hat", "an inn in", "--ckpt_dir", "meta-1", "--temperature", "0", "--max_gen_len", "12", "--dtype", "fp64")


def texts_of(printed: str) -> str:
    """Return the printed texts without the line with the time."""
    return printed[printed.index("the hat\n>") : printed.rindex("tokens in")].rpartition("\n")[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "inference.py", *ASKED], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return texts_of(done.stdout)


@pytest.mark.slow
def test_the_script_prints_once_what_one_process_prints(folder: Path, alone: str) -> None:
    code, printed = ended(torchrun(2, ROOT / "inference.py", *ASKED, cwd=folder))
    assert code == 0, printed
    assert texts_of(printed) == alone
    assert printed.count("2 ranks") == 1


@pytest.mark.slow
def test_a_cell_is_measured_on_all_ranks_and_predicted_for_each(folder: Path) -> None:
    # A wide MLP, so that 5 % of the peak are more than the tensors of gloo's threads, whose release the trace misses.
    config = config_of(intermediate_size=8192)
    write_meta(folder / "wide", meta_weights(random_model(config)), meta_params(config))
    words = ("--ckpt_dir", "wide", "--batch_size", "2", "--input_len", "10", "--output_len", "4", "--compare")
    code, printed = ended(torchrun(2, ROOT / "benchmark_inference.py", *words, "--json", "cell.json", cwd=folder))
    assert code == 0, printed
    report = json.loads((folder / "cell.json").read_text("utf-8"))
    assert report["cells"][0]["ranks"] == 2
    checks = [row for row in report["rows"] if row["figures"] == "check" and row["name"] != "other work"]
    assert {row["status"] for row in checks} == {"ok"}
    assert report["rows"][0]["weights_bytes"] == parameters(open_checkpoint(folder / "wide").args.share(2)) * 4
    of_memory = [row for row in report["rows"] if row["figures"] == "memory" and row["cell"] == 0]
    (peak,) = [row for row in of_memory if row["name"] == "peak"]
    assert peak["measured_bytes"] == pytest.approx(peak["predicted_bytes"], rel=0.05)
    assert "the same 8 tokens" in printed


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two connected network namespaces, as two machines."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs the ip command, and to be root")
    a, b = (f"llama-{os.getpid()}-{i}" for i in range(2))
    try:
        sh(f"ip netns add {a} && ip netns add {b} && ip -n {a} link add cable0 type veth peer name cable0 netns {b}")
        for host, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            sh(f"ip -n {host} addr add {address} dev cable0 && ip -n {host} link set cable0 up")
            sh(f"ip -n {host} link set lo up")
        yield a, b
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    finally:
        for host in (a, b):
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


@pytest.mark.slow
def test_two_hosts_write_what_one_process_writes(folder: Path, alone: str, two_hosts: tuple[str, str]) -> None:
    def start(node: int) -> subprocess.Popen[str]:
        job = [
            "--nnodes=2",
            f"--node_rank={node}",
            "--nproc_per_node=1",
            "--master_addr=10.77.0.1",
            "--master_port=29511",
        ]
        command = ["ip", "netns", "exec", two_hosts[node], sys.executable, "-m", "torch.distributed.run", *job]
        return run([*command, str(ROOT / "inference.py"), *ASKED], cwd=folder, GLOO_SOCKET_IFNAME="cable0")

    jobs = [start(node) for node in range(2)]
    (code, printed), (other_code, other) = (ended(job) for job in jobs)
    assert (code, other_code) == (0, 0), printed + other
    assert texts_of(printed) == alone
    assert "the hat" not in other
