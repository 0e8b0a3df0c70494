"""The code that torch.compile generates for an H100, on a machine without a GPU.

    python tests/support/gpu_code.py FILE    print the code of each of the CASES in a test module, as JSON

The inputs are fake tensors on "cuda", PyTorch's Python functions that query a GPU are replaced, and compilation stops
when the code is complete. All of this changes the process, so `codes_of` starts one for all cases of a test module.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
namespace at { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>) }
"""
H100 = SimpleNamespace(
    name="H100",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
)

Size = Callable[[int], int]


class Case(NamedTuple):
    """What to compile.

    call: compiles by torch.compile's Inductor when it is called.
    inputs: returns the arguments of `call`, tensors on "cuda", given a function that returns a dynamic size with the
        given example.
    """

    call: Callable[..., Any]
    inputs: Callable[[Size], tuple[Any, ...]]


class GpuCode:
    """Generated code: what one call launches.

    launches: the names of Triton kernels, library products and other operators, in order.
    dtypes: the dtypes of the tensors of each Triton kernel.
    copies: the number of whole tensors that are copied.
    """

    def __init__(self, text: str) -> None:
        body = text[text.index("def call(") : text.index("\nrunner = ")]
        self.launches = [name.removesuffix(".run") for name in re.findall(_LAUNCH, body, re.MULTILINE)]
        signatures = re.findall(r"'triton_\w+', '''.*?'signature': {(.*?)}", text, re.DOTALL)
        self.dtypes = [set(re.findall(r"'\*(\w+)'", signature)) for signature in signatures]
        shapes = {a or b: re.findall(r"[\w*]+", shape) for a, b, shape in re.findall(_SHAPE, body)}
        added = re.findall(r"extern_kernels\.addmm\((?:reinterpret_tensor\()?(\w+)", body)
        copied = sum(name.endswith("copy_") for name in self.launches)
        # addmm copies a matrix to its output before it adds to that. A bias, (out_features,), is added without a copy.
        self.copies = copied + sum(len(shapes.get(name, ())) > 1 for name in added)

    @property
    def summary(self) -> dict[str, int]:
        """The number of launches of each kind: "triton", and the names of operators."""
        return dict(Counter("triton" if name.startswith("triton_") else name.split(".")[-1] for name in self.launches))


_LAUNCH = r"^ +(?:\w+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.\w+\.\w+|aten\.\w+|\w+\.copy_)\b"
_SHAPE = r"(?:assert_size_stride\((\w+)|(\w+) = (?:empty_strided_cuda\(|reinterpret_tensor\(\w+)),? ?\(([^)]*)\)"


def codes_of(file: str) -> dict[str, GpuCode]:
    """Return the code of each of the CASES of a test module, compiled in a process of its own."""
    pytest.importorskip("triton")
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this PyTorch is built for a GPU, which cannot be replaced")
    if torch.__version__ < "2.13":
        pytest.skip("the functions that are replaced are those of PyTorch 2.13")
    child = subprocess.run([sys.executable, __file__, file], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return {name: GpuCode(text) for name, text in json.loads(child.stdout).items()}


class Complete(Exception):
    """Ends a compilation, with the code as its argument."""


def pretend_to_have_a_gpu() -> None:
    """Make PyTorch and Triton compile for an H100 that nothing can run on."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        of = Path(torch.__file__).parent
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{of / 'include'}", f"-L{of / 'lib'}"]
        subprocess.run(["c++", *flags, str(source), "-lc10", "-o", str(library)], check=True)
        CDLL(str(library))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: H100
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda._exchange_device = lambda device: 0
    torch.cuda._maybe_exchange_device = lambda device: 0
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad  # after the replacements, which they copy
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    config.fx_graph_cache, config.compile_threads = False, 1  # a graph in the cache has no code; start no workers
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    for passes in (joint_graph, post_grad):  # they trace their patterns with real tensors
        passes.lazy_init = lambda device=None, on=passes.lazy_init: on(torch.device("cpu"))

    def stop(graph: GraphLowering) -> None:
        raise Complete(graph.codegen()[0].value)

    GraphLowering.compile_to_module = stop


def code_of(case: Case) -> str:
    """Return the code that Inductor generates for the case."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    torch._dynamo.reset()
    sizes = ShapeEnv()

    def dynamic(example: int) -> int:
        source = ConstantSource(f"size{len(sizes.var_to_range)}")
        symbol = sizes.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return sizes.create_symintnode(symbol, hint=example, source=source)

    with torch.inference_mode():
        with FakeTensorMode(shape_env=sizes):
            inputs = case.inputs(dynamic)
        try:
            case.call(*inputs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, Complete):
                return str(error.inner_exception)
            raise
    raise AssertionError("the call compiled nothing")


if __name__ == "__main__":
    tests = Path(sys.argv[1])
    sys.path[:0] = [str(Path(__file__).parents[2]), str(tests.parent)]
    pretend_to_have_a_gpu()
    cases = importlib.import_module(tests.stem).CASES
    json.dump({name: code_of(case) for name, case in cases.items()}, sys.stdout)
