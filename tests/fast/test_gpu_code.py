"""A layer compiles to few kernels on a GPU, by the code that Inductor generates for an H100.

Between two kernels a GPU reads no weights for about 2 us, and a layer of one row reads its weights in 27 us. No GPU is
needed, and nothing runs: only a device shows the time.
"""

from shutil import which
from typing import Any

import pytest
import torch
from gpu_code import Case, GpuCode, Size, codes_of
from torch import Tensor

from llama.fast import graph_ops
from llama.fast.graph_ops import FLASH, PYTORCH, LayerWeights

pytestmark = [pytest.mark.slow, pytest.mark.skipif(which("c++") is None, reason="needs a C++ compiler")]
DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2048, 32, 8, 64, 8192  # those of Llama 3.2 1B
LLAMA = {
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
QWEN = LLAMA | {
    "attention.wq.bias": (HEADS * HEAD_DIM,),
    "attention.wk.bias": (KV_HEADS * HEAD_DIM,),
    "attention.wv.bias": (KV_HEADS * HEAD_DIM,),
    "attention.q_norm.weight": (HEAD_DIM,),
    "attention.k_norm.weight": (HEAD_DIM,),
}


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def weights_of(shapes: dict[str, tuple[int, ...]]) -> LayerWeights:
    eps = dict.fromkeys(("attention_norm", "ffn_norm", "attention.q_norm", "attention.k_norm"), 1e-5)
    return LayerWeights({name: on_gpu(*shape) for name, shape in shapes.items()}, eps)


def cos_sin(tokens: int) -> tuple[Tensor, Tensor]:
    return tuple(on_gpu(tokens, 1, HEAD_DIM, dtype=torch.float32) for _ in range(2))


def step(shapes: dict[str, tuple[int, ...]], count: int) -> Case:
    """Return a layer of a step of `count` rows; several rows are a dynamic size."""

    def inputs(dynamic: Size) -> tuple[Any, ...]:
        rows, slots = dynamic(count) if count > 1 else 1, dynamic(1024)
        prepared = tuple(on_gpu(length, dtype=torch.int32) for length in (rows + 1, rows + 1, rows))
        positions = on_gpu(rows, dtype=torch.int64)
        keys, values = (on_gpu(rows, slots, KV_HEADS, HEAD_DIM) for _ in range(2))
        shared = weights_of(shapes), cos_sin(rows), prepared, positions
        return OPS.attention.attend, OPS.product, on_gpu(rows, DIM), *shared, keys, values

    return Case(OPS.layer, inputs)


OPS = graph_ops.compiled("inductor", PYTORCH._replace(attention=FLASH))
CASES = {"1 row": step(LLAMA, 1), "Qwen, 16 rows": step(QWEN, 16)}  # the code of Llama's 16 rows has less


@pytest.fixture(scope="module")
def codes() -> dict[str, GpuCode]:
    return codes_of(__file__)


def test_a_layer_of_one_row_is_7_kernels_and_attention(codes: dict[str, GpuCode]) -> None:
    assert codes["1 row"].summary == {"triton": 7, "_flash_attention_forward": 1}


def test_the_table_of_rotations_is_the_only_float32_that_a_layer_of_one_row_reads(codes: dict[str, GpuCode]) -> None:
    assert [dtypes for dtypes in codes["1 row"].dtypes if "fp32" in dtypes] == [{"bf16", "fp32", "i64"}]


def test_a_layer_of_many_rows_is_5_kernels_7_products_and_attention(codes: dict[str, GpuCode]) -> None:
    launches = codes["Qwen, 16 rows"].summary
    assert launches.pop("mm") + launches.pop("addmm", 0) == 7
    assert launches == {"triton": 5, "_flash_attention_forward": 1}


@pytest.mark.parametrize("name", list(CASES))
def test_a_layer_copies_nothing(codes: dict[str, GpuCode], name: str) -> None:
    assert codes[name].copies == 0
