"""A step's layer compiles to few kernels on a GPU, by the code that Inductor generates for an H100.

Between two kernels a GPU reads no weights for about 2 us, and a layer of one row reads its weights in 27 us. No GPU is
needed, and nothing runs: only a device shows the time.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_code import Case, GpuCode, Size, codes_of
from native import needs_a_compiler
from torch import Tensor

from llama.fast import graph_ops

pytestmark = [pytest.mark.slow, needs_a_compiler]  # 15 s
FLASH = "_flash_attention_forward"
DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2048, 32, 8, 64, 8192  # those of Llama 3.2 1B
WEIGHTS = {
    "attention.wq.weight": (HEADS * HEAD_DIM, DIM),
    "attention.wk.weight": (KV_HEADS * HEAD_DIM, DIM),
    "attention.wv.weight": (KV_HEADS * HEAD_DIM, DIM),
    "attention.wo.weight": (DIM, HEADS * HEAD_DIM),
    "feed_forward.w1.weight": (HIDDEN, DIM),
    "feed_forward.w3.weight": (HIDDEN, DIM),
    "feed_forward.w2.weight": (DIM, HIDDEN),
    "attention_norm.weight": (DIM,),
    "ffn_norm.weight": (DIM,),
}


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def layer_inputs(count: int) -> Callable[[Size], tuple[Any, ...]]:
    """Return a function that returns the arguments of `layer` for `count` rows; more than one are dynamic."""

    def inputs(dynamic: Size) -> tuple[Any, ...]:
        rows, slots = dynamic(count) if count > 1 else 1, dynamic(1024)
        weights = {name: on_gpu(*shape) for name, shape in WEIGHTS.items()}
        cos, sin = (on_gpu(4096, 1, HEAD_DIM, dtype=torch.float32) for _ in range(2))
        keys, values = (on_gpu(rows, slots, KV_HEADS, HEAD_DIM) for _ in range(2))
        positions = on_gpu(rows, dtype=torch.int64)
        return OPS.attend, on_gpu(rows, DIM), weights, (1e-5, 1e-5), cos, sin, positions, keys, values

    return inputs


OPS = graph_ops.compiled("inductor", graph_ops.FLASH)
CASES = {"1 row": Case(OPS.layer, layer_inputs(1)), "16 rows": Case(OPS.layer, layer_inputs(16))}


@pytest.fixture(scope="module")
def codes() -> dict[str, GpuCode]:
    return codes_of(__file__)


def test_a_layer_of_one_row_is_at_most_8_kernels_beside_attention(codes: dict[str, GpuCode]) -> None:
    summary = codes["1 row"].summary
    assert summary.pop(FLASH) == 1
    assert summary.keys() == {"triton"}  # no product of a library
    assert summary["triton"] <= 8


def test_a_layer_of_16_rows_is_at_most_5_kernels_7_products_and_attention(codes: dict[str, GpuCode]) -> None:
    summary = codes["16 rows"].summary
    assert summary.pop(FLASH) == 1
    assert summary.pop("triton") <= 5
    assert summary.keys() <= {"mm", "addmm"}
    assert sum(summary.values()) == 7


@pytest.mark.xfail(strict=True, reason="the sum with the residual becomes addmm, which copies it")
def test_a_layer_of_16_rows_copies_nothing(codes: dict[str, GpuCode]) -> None:
    assert codes["16 rows"].copies == 0


@pytest.mark.xfail(strict=True, reason="w1 and w3 write float32, from which w2 computes SiLU")
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_the_products_of_one_row_read_16_bits(codes: dict[str, GpuCode], name: str) -> None:
    (operands,) = codes["1 row"].reading(*WEIGHTS[f"feed_forward.{name}.weight"])
    assert {operand.dtype for operand in operands} == {"bf16"}
