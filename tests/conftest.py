"""What tests share: one thread, a fixed seed, the same randomised examples every time, and the two real tokenizers."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Command
from fakes import write_checkpoint
from hypothesis import find, settings
from hypothesis.strategies import none
from seconds import Seconds
from tqdm import tqdm

from llama.checkpoint.demo import demo_model_path, meta_tokenizer_path
from llama.tokenizer import Tokenizer
from llama.untrusted.gguf_header import read_gguf_header

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


# Some environments forbid bytecode files. Without them each process rewrites and compiles every module again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too, as .ci/run does")
    parser.addoption("--limit-costs", action="store_true", help="fail if a function costs over twice its share")
    parser.addoption("--every-build", action="store_true", help="compile native code under the flags of many CPUs")
    parser.addoption(
        "--long", action="store_true", help="draw as many examples as the figures on record were drawn from"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds(config), "seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests, unless --slow or -m slow asks for them or tests are named."""
    named = any("::" in word for word in config.invocation_params.args) or "slow" in config.getoption("markexpr")
    slow = {item for item in items if item.get_closest_marker("slow")}
    if slow and not (named or config.getoption("--slow")):
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    """Leave what collecting made, half a million objects that stay, out of every later garbage collection."""
    find(none(), lambda _: True)  # its first example registers a generator, which it cannot find among frozen objects
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and sums in one order give the same bits everywhere.

    That holds for the processes that a test starts, too: with as many threads as cores each, two of them beside each
    other spend most of their time waiting in turn, up to eight times what the work takes. They import this checkout.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("LLAMA_NATIVE_TRIAL", "off")  # bits must not depend on which path was faster
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        patch.setattr("llama.host.progress.EVERY_S", 1e9)  # no test expects these lines
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_bars() -> None:
    """Forget the bars that earlier tests left open: they would move those of this test down a line."""
    tqdm._instances.clear()


@pytest.fixture(scope="session")
def every_build(request: pytest.FixtureRequest) -> None:
    """Skip without --every-build: these builds of native code take a minute each."""
    if not request.config.getoption("--every-build"):
        pytest.skip("this build of native code is made with --every-build")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny checkpoint of texts of any length."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_seq_len=32768)


@pytest.fixture(scope="session")
def meta() -> Tokenizer:
    return Tokenizer(meta_tokenizer_path())


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf_header(demo_model_path()).metadata)
