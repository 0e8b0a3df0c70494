"""Machine code of launches of Triton kernels, for a GPU that is not here."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
NAMES |= {torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}
# KiB of shared memory that one program can have, by compute capability.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}


class Launches:
    """Records launches of a kernel in place of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **options: self.calls.append((self.kernel, given, options))


def launches(
    monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, names: list[str], run: Callable[[], Any]
) -> list[Any]:
    """Return the launches of the named kernels of a module, in place of which nothing runs."""
    recorders = [Launches(getattr(kernels, name)) for name in names]
    with monkeypatch.context() as patch:
        for recorder in recorders:
            patch.setattr(kernels, recorder.kernel.__name__, recorder)
        run()
    return [call for recorder in recorders for call in recorder.calls]


class Code(NamedTuple):
    """The PTX of a launch, its registers per thread, and the bytes of shared memory of a program."""

    ptx: str
    registers: int
    shared: int


def machine_code(kernel: Any, given: tuple[Any, ...], options: dict[str, Any], capability: int = 90) -> Code:
    """Compile a launch for a compute capability, and assert that it spills no registers and fits the shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    types, constants, attributes = {}, {}, {}
    for i, (each, value) in enumerate(zip(kernel.params, given, strict=True)):
        types[each.name] = NAMES[value.dtype] if isinstance(value, Tensor) else "i32"
        if each.is_constexpr or value is None or (type(value) is int and value == 1):
            types[each.name], constants[each.name] = "constexpr", value
        elif isinstance(value, Tensor) or value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, types, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    uses = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    assert uses["STACK"] == uses["LOCAL"] == 0, (kernel, given, said)  # where registers would be spilled to
    assert binary.metadata.shared <= SHARED[capability] << 10, (kernel, given, binary.metadata.shared)
    return Code(binary.asm["ptx"], uses["REG"], binary.metadata.shared)
