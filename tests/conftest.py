"""What tests share: one thread, a fixed seed, the same randomised examples every time, and the two real tokenizers."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from llama.checkpoint.gguf import read_header
from llama.demo import demo_model_path, meta_tokenizer_path
from llama.tokenizer import Tokenizer

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


LONG = ("test_ranks.py", "test_native.py", "test_demo_model.py", "test_presets.py", "test_exact.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-build", action="store_true", help="compile native code under the flags of many CPUs")
    parser.addoption(
        "--long", action="store_true", help="draw as many examples as the figures on record were drawn from"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that two processes end at about the same time."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and sums in one order give the same bits everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def meta() -> Tokenizer:
    return Tokenizer(meta_tokenizer_path())


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(read_header(demo_model_path()).metadata)
