"""What the tests of Triton's kernels share: where a claim is run, in Triton's interpreter or on a GPU.

Triton decides as it is imported, so one process does either; claims for the interpreter have a process of their own.
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
    """Collect a claim only where the interpreter is on: `TRITON_INTERPRET=1 pytest FILE`."""
    return claim if INTERPRETED else None


def assert_claims_hold_interpreted(file: str) -> None:
    """In a process of its own: transformers imports Triton too, and nothing else may meet an interpreted kernel."""
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
