"""Marks of tests that need more than every machine has."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def _release(package: str) -> tuple[int, ...]:
    """Return the first two numbers of an installed package's version; () if it is not installed."""
    try:
        return tuple(map(int, version(package).split(".")[:2]))
    except PackageNotFoundError:
        return ()


can_interpret = pytest.mark.skipif(
    _release("triton") < (3, 7) and _release("numpy") >= (2, 4),
    reason="Triton's interpreter needs NumPy < 2.4 or Triton >= 3.7",
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
