"""What tests share: one thread, a fixed seed, the same randomised examples every time, and the two real tokenizers."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Command
from fakes import write_checkpoint
from hypothesis import settings

from llama.checkpoint.demo import demo_model_path, meta_tokenizer_path
from llama.tokenizer import Tokenizer
from llama.untrusted.gguf_header import read_gguf_header

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


# The longest first, by the seconds that they and their processes compute with --slow: some 130 to 10.
LONG = (
    *("test_ranks.py", "test_demo_model.py", "test_console.py", "test_presets.py", "test_caches.py"),
    *("test_sessions.py", "test_exact.py"),
    *("test_native.py", "test_reports.py", "test_kinds.py", "test_quantize.py"),
    *("test_terminal.py", "test_changed_models.py", "test_native_caches.py", "test_checkpoint_memory.py"),
    *("test_session_file.py", "test_tokenizer.py", "test_certificate_of_the_demo.py", "test_gpu_report.py"),
    *("test_verify.py", "test_malformed.py", "test_measure.py", "test_exact_triton_kernels.py", "test_chat.py"),
    *("test_gpu_code.py", "test_native_builds.py", "test_tutorial.py", "test_texts_at_once.py", "test_certificate.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too, as .ci/run does")
    parser.addoption("--every-build", action="store_true", help="compile native code under the flags of many CPUs")
    parser.addoption(
        "--long", action="store_true", help="draw as many examples as the figures on record were drawn from"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless --slow asks for them or tests are named, and begin with the longest files.

    With these first, two processes end at about the same time.
    """
    named = any("::" in word for word in config.invocation_params.args)
    slow = {item for item in items if item.get_closest_marker("slow")}
    if slow and not (named or config.getoption("--slow")):
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Leave what collecting made, half a million objects that stay, out of every later garbage collection."""
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
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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
