"""The cores that a process may use, the threads that it computes with, and what it says if those are too many."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import torch
from cgroups import write_group
from commands import Command, Main
from fakes import write_checkpoint

from llama import ModelArgs, Transformer, cli, load
from llama.host import cores
from llama.host.cgroups import quota
from llama.host.cores import FreeCores, OtherLoad, usable_cores

ROOT = Path(__file__).resolve().parents[2]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test set the count of threads, here and in the environment, and put it back."""
    before = torch.get_num_threads()
    monkeypatch.setattr(FreeCores, "chosen", False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    yield
    torch.set_num_threads(before)


# ---- --threads -------------------------------------------------------------------------------------------------------


def nothing() -> int:
    """Do nothing."""
    return 0


def count(*prompts: str) -> int:
    """Print the counts."""
    print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"])
    return 0


def own_count(*, threads: int | None = None) -> int:
    """Print the counts."""
    print(threads, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
    return 0


@pytest.mark.parametrize("main", [count, own_count])
def test_threads_hold_for_torch_children_and_the_command(main: Main, counts: None, command: Command) -> None:
    assert command.printed(main, "--threads", "2") == "2 2 2\n"


def test_impossible_threads_are_one_line(counts: None, command: Command) -> None:
    for asked in ("0", "4000000", "many"):
        assert command.refused(nothing, f"--threads={asked}").startswith("error: --threads=")
    assert torch.get_num_threads() == 1


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"OMP": "1"}, {"OMP": "1", "MKL": "2"}])
def test_before_torch_is_imported_the_threads_are_those_that_it_will_have(variables: dict[str, str]) -> None:
    look = "from llama.host.cores import threads; early = threads(); import torch; print(early, threads())"
    if not torch.backends.mkl.is_available() and "MKL" in variables:
        pytest.skip("this PyTorch has no MKL, which would read its variable")
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment |= {f"{name}_NUM_THREADS": number for name, number in variables.items()}
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [variables.get("MKL", variables["OMP"])] * 2


def test_a_quota_limits_the_default_and_not_what_the_user_set(counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "bound_cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name)
    torch.set_num_threads(2)
    for limit, expected in ((None, (2, None)), (1, (1, "1"))):
        monkeypatch.setattr(cores, "quota", lambda groups, root, limit=limit: limit)
        assert cli.run(nothing, []) == 0
        assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert cli.run(nothing, []) == 0
    assert torch.get_num_threads() == 2


# ---- the cores that a process may use --------------------------------------------------------------------------------


def test_a_quota_is_the_tightest_of_a_group_and_its_ancestors_in_whole_cores(tmp_path: Path) -> None:
    write_group(tmp_path / "pod" / "box", cpu__max="max 100000\n")
    write_group(tmp_path / "pod", cpu__max="150000 100000\n")
    assert quota("0::/pod/box\n", tmp_path) == 2
    write_group(tmp_path / "pod" / "box", cpu__max="50000 100000\n")
    assert quota("0::/pod/box\n", tmp_path) == 1
    # The first generation: the CPU controller's path is that of the host.
    write_group(tmp_path / "cpu", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    assert quota("7:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n", tmp_path) == 3
    write_group(tmp_path / "cpu", cpu__cfs_quota_us="-1\n")
    assert quota("7:cpu,cpuacct:/docker/1\n", tmp_path) is None
    assert quota("", tmp_path) is None


@on_linux
def test_a_process_that_is_bound_to_a_core_may_use_one() -> None:
    look = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from llama.host import cores; "
        "print(cores.usable_cores())"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "1\n"


def test_cores_are_counted_where_the_system_binds_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cores, "own_groups", str)
    assert usable_cores() == 3


# ---- cores that other work occupies ----------------------------------------------------------------------------------


@pytest.fixture
def free_counts(counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch compute with 4 threads on 4 cores, without a setting of the user."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name)
    for name in ("usable_cores", "bound_cores"):
        monkeypatch.setattr(cores, name, lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    torch.set_num_threads(4)


@pytest.mark.parametrize(
    ("others", "chosen"), [(None, 4), (0.0, 4), (0.5, 4), (0.6, 3), (1.0, 3), (2.6, 1), (3.4, 1), (9.0, 1)]
)
def test_a_busy_machine_gets_fewer_threads_and_a_message(
    others: float | None, chosen: int, free_counts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherLoad, "stop", lambda self: others)
    said: list[str] = []
    FreeCores().choose_threads(said.append)
    assert torch.get_num_threads() == chosen
    assert os.environ.get("OMP_NUM_THREADS") == (None if chosen == 4 else str(chosen))  # for the processes it starts
    words = f"other work occupies {others} of 4 cores: computing with {chosen} thread{'s' * (chosen > 1)} instead of 4;"
    assert [line.startswith(words) for line in said] == [True] * (chosen < 4)


@pytest.mark.parametrize("name", ["inference", "verify", "perplexity"])
def test_every_command_that_computes_in_this_process_takes_fewer_threads(
    name: str, free_counts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    """It does so before it reads the checkpoint, which is missing here; `inference` says so later, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OtherLoad, "stop", lambda self: 2.0)
    (tmp_path / "text").write_text("a text")
    text = ["--text=text"] if name == "perplexity" else []
    code, _, err = command(import_module(f"llama.cli.{name}").main, "--ckpt_dir=not/there", "--device=cpu", *text)
    assert code == 2
    assert torch.get_num_threads() == 2
    *said, error = err.splitlines()
    words = "other work occupies 2.0 of 4 cores: computing with 2 threads instead of 4;"
    assert [line.startswith(words) for line in said] == [True] * (name != "inference")
    assert "not/there" in error


def train_once(model: Transformer) -> None:
    model.with_kv_caching(False)(torch.tensor([[1, 2, 3]])).sum().backward()


@pytest.mark.parametrize("way", ["README.md", "docs/tutorial.ipynb", "generate", "train"])
def test_a_program_that_imports_the_library_takes_fewer_threads_once_before_it_computes(
    way: str, free_counts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The two pages show `load`. Native code has torch's count, too. What the program starts chooses by itself."""
    busy = iter([2.6])
    monkeypatch.setattr(OtherLoad, "stop", lambda self: next(busy))
    model = Transformer(ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=9, max_seq_len=16))
    assert torch.get_num_threads() == 4, "a model that was made has computed nothing"
    if way.endswith(("md", "ipynb")):
        page = (ROOT / way).read_text(encoding="utf-8").replace('\\"', '"')
        (call,) = re.findall(r'model, tokenizer = (load\("demo".*?\))', page)
        eval(call.replace('"demo"', "path, device='cpu'"), {"load": load, "path": write_checkpoint(tmp_path / "tiny")})
    elif way == "generate":
        model.generate_tokens([[1, 2]], 2, temperature=0.0)
    else:
        train_once(model)
    assert torch.get_num_threads() == 1
    assert "OMP_NUM_THREADS" not in os.environ
    (said,) = [record.message for record in caplog.records if "other work" in record.message]
    assert said.endswith("computing with 1 thread instead of 4; pass threads=4 to load to override")
    torch.set_num_threads(3)
    train_once(model)
    load(write_checkpoint(tmp_path / "again"), device="cpu")
    assert torch.get_num_threads() == 3, "it is chosen once, and a later count of the program's own stays"
    load(write_checkpoint(tmp_path / "third"), device="cpu", threads=2)
    assert torch.get_num_threads() == 2


def test_a_program_computes_within_its_quota(free_counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr(OtherLoad, "stop", lambda self: 0.0)
    cores.choose_once(pytest.fail)
    assert torch.get_num_threads() == 2


def test_threads_of_load_and_the_environment_win(
    free_counts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(OtherLoad, "stop", lambda self: pytest.fail("looked"))
    folder = write_checkpoint(tmp_path / "tiny")
    with pytest.raises(ValueError, match=r"^threads=0 must be from 1 to 32"):
        load(folder, device="cpu", threads=0)
    model, _ = load(folder, device="cpu", threads=3)
    model.generate_tokens([[1, 2]], 2, temperature=0.0)
    assert torch.get_num_threads() == 3
    monkeypatch.setattr(FreeCores, "chosen", False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    load(folder, device="cpu")
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE"])
def test_a_count_that_is_asked_for_stays(variable: str, free_counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherLoad, "stop", lambda self: pytest.fail("looked"))
    monkeypatch.setenv(variable, "4")
    for known in (None, 1):
        FreeCores().choose_threads(pytest.fail, known=known)
        assert torch.get_num_threads() == 4
    monkeypatch.delenv(variable)
    FreeCores().choose_threads(pytest.fail, known=2)  # a resumed run computes with the threads that it had
    assert torch.get_num_threads() == 2


@on_linux
def test_a_busy_process_takes_a_thread_away(free_counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child occupies each core, so that at most one core counts as free, whatever else is running."""
    count = len(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "usable_cores", lambda: count)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    torch.set_num_threads(count + 1)
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    children = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for child in children:
            child.stdout.readline()
        said: list[str] = []
        FreeCores().choose_threads(said.append)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert torch.get_num_threads() <= max(1, count - 1)
    assert len(said) == 1


# ---- the load of other work ------------------------------------------------------------------------------------------


def multiply_until(end: float) -> None:
    a = torch.rand(512, 512)
    while time.perf_counter() < end:
        a @ a


@on_linux
def test_other_load_leaves_our_own_work_out() -> None:
    """Other load and our own are at most all cores; our threads counted twice would be more."""
    count = os.cpu_count() or 1
    load = OtherLoad()
    load.start()
    began, own_before = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(multiply_until, began + 0.6)
    own = (time.process_time() - own_before) / (time.perf_counter() - began)
    seen = load.stop()
    assert seen + own < count + 0.3  # ticks of 10 ms on every core, over 0.6 s


@pytest.mark.parametrize(("everyone", "expected"), [(108.0, 1.5), (102.0, 0.0), (101.0, 0.0)])
def test_other_load_is_a_mean_and_never_negative(
    monkeypatch: pytest.MonkeyPatch, everyone: float, expected: float
) -> None:
    """Over four seconds, two of them our own; the kernel's ticks may add up to less than our own time."""
    clocks = iter([(10.0, 1.0, 100.0), (14.0, 3.0, everyone)])
    monkeypatch.setattr(OtherLoad, "_clocks", lambda self: next(clocks))
    load = OtherLoad()
    load.start()
    assert load.stop() == expected


@pytest.mark.parametrize("stat", [None, ""], ids=["no file", "a masked file"])
def test_other_load_is_unknown_if_the_kernel_does_not_count_it(
    stat: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "kernel_text", lambda path: stat)
    load = OtherLoad()
    load.start()
    assert load.stop() is None


def test_busy_seconds_are_all_but_idle_and_waiting_and_count_guests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # proc(5): user, nice, system, idle, iowait, irq, softirq, steal, and guests, which are in user and nice already
    stat = "cpu  1 20 300 4000 50000 600000 7000000 80000000 900000000 1000000000\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    monkeypatch.setattr(cores, "kernel_text", lambda path: stat)
    assert cores._busy_seconds() == (1 + 20 + 300 + 600000 + 7000000 + 80000000) / os.sysconf("SC_CLK_TCK")
