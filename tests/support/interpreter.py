"""Helpers for tests of Triton kernels, which run in Triton's interpreter or on a GPU.

Triton chooses when it is imported, so tests in the interpreter run in a process of their own.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
triton = pytest.importorskip("triton")

INTERPRETED = triton.knobs.runtime.interpret
compiled = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")
with_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA GPU")


def interpreted(claim: Callable[..., None]) -> Callable[..., None] | None:
    """Collect a test only in the interpreter: `TRITON_INTERPRET=1 pytest FILE`."""
    return claim if INTERPRETED else None


def assert_claims_hold_interpreted(file: str) -> None:
    """Run the tests of a file in a process of their own: transformers imports Triton too."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def made(*size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(size, dtype=torch.float64).to(device, dtype)
