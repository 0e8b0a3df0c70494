"""Marks of tests that need more than every machine has, and Triton's interpreter, which needs no GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")


def interpreted(claim: Callable[..., None]) -> Callable[..., None] | None:
    """Collect a test only if the interpreter is on: `TRITON_INTERPRET=1 pytest FILE`."""
    return claim if INTERPRETED else None


def check_in_interpreter(*files: Path) -> None:
    """Run the tests of the files in Triton's interpreter, in another process: Triton reads the setting on import."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
