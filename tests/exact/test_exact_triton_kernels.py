"""The batch-invariant kernels give the results of `llama.ops`, and a row the same bits in any batch.

Without a GPU they run in Triton's interpreter, which computes in NumPy with a GPU's indices and masks: these tests
check what is read, and in which tile; tests/fast/test_graph_kernels.py starts them there. The last test needs a GPU,
which rounds differently.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from skips import interpreted, needs_cuda, not_interpreted
from torch import Tensor
from writes import rows_of

from llama.model import RMSNorm
from llama.ops import attend, linear
from llama.rows import Rows

triton = pytest.importorskip("triton")
triton_kernels = pytest.importorskip("llama.exact.triton_kernels")
KERNELS = (triton_kernels._linear, triton_kernels._attend, triton_kernels._rms_norm)
DTYPES = [torch.float32, torch.float64]  # the interpreter's bfloat16 is wrong
FP64_TOLERANCE = 1e-13  # averages of numbers of about 1, a hundred roundings of 1e-16 each
FP32_TOLERANCE = 1e-5  # the same with roundings of 6e-8


def made(*size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(size, dtype=torch.float64).to(device, dtype)


def assert_same_product(x: Tensor, weight: Tensor) -> None:
    """Two orders of summing K products are each off by at most K * eps of the sum of magnitudes."""
    product, expected = triton_kernels.linear(x, weight), linear(x, weight)
    assert product.shape == expected.shape
    assert product.dtype == expected.dtype
    bound = 2 * x.shape[-1] * torch.finfo(x.dtype).eps * linear(x.abs(), weight.abs())
    assert ((product - expected).abs() <= bound).all()


def attend_exactly(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int | list[int]) -> Tensor:
    return triton_kernels.attend(xq, keys, values, rows_of(start_pos, xq))


def assert_attends(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int | list[int]) -> None:
    output = attend_exactly(xq, keys, values, start_pos)
    assert output.dtype == xq.dtype
    atol = FP64_TOLERANCE if output.dtype == torch.float64 else FP32_TOLERANCE
    expected = attend(xq.double(), keys.double(), values.double(), rows_of(start_pos, xq))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("leading", "in_features", "out_features"),
    [((16,), 64, 64), ((2, 3), 5, 7), ((17,), 65, 1), ((1,), 130, 129), ((), 3, 66), ((0,), 4, 5), ((2, 0), 4, 5)],
)
def test_products_equal_the_plain_ones_on_and_off_the_tile_grid(
    leading: tuple[int, ...], in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    assert_same_product(made(*leading, in_features, dtype=dtype), made(out_features, in_features, dtype=dtype))


@interpreted
@pytest.mark.parametrize("lay", [lambda x: x.T.contiguous().T, lambda x: x.repeat(1, 2)[:, 3:9], lambda x: x[1:]])
def test_operands_of_a_product_may_have_any_strides(lay: Callable[[Tensor], Tensor]) -> None:
    assert_same_product(lay(made(5, 6)), lay(made(7, 6)))


@interpreted
@pytest.mark.parametrize(
    ("seqlen", "start_pos", "dtype"),
    [
        *((seqlen, start, torch.float32) for seqlen, start in ((1, 0), (1, 60), (13, 3), (16, 0), (16, 60), (40, 3))),
        *((seqlen, start, torch.float64) for seqlen, start in ((1, 16), (40, 60))),
    ],
)
def test_attention_equals_the_plain_one_on_and_off_the_grid(seqlen: int, start_pos: int, dtype: torch.dtype) -> None:
    xq, keys, values = (made(1, n, 2, 16, dtype=dtype) for n in (seqlen, start_pos + seqlen, start_pos + seqlen))
    assert_attends(xq, keys, values, start_pos)


@interpreted
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(3, 3, 16), (4, 2, 1), (4, 1, 20), (9, 3, 20)])
def test_heads_of_any_size_share_keys_in_groups(n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    assert_attends(*(made(2, 5, heads, head_dim) for heads in (n_heads, n_kv_heads, n_kv_heads)), start_pos=0)


@interpreted
@pytest.mark.parametrize("seqlen", [2, 20])
def test_rows_may_have_different_positions(seqlen: int) -> None:
    """And different numbers of blocks: two tokens from 15 on are in two, from 16 on in one."""
    assert_attends(made(4, seqlen, 2, 16), made(4, 90, 1, 16), made(4, 90, 1, 16), [15, 0, 16, 63])


@interpreted
@pytest.mark.parametrize(
    "slope", [torch.linspace(0, 300, 140), torch.linspace(300, 0, 140), torch.linspace(-300, 0, 140)]
)
def test_scores_of_any_size_neither_overflow_nor_vanish(slope: Tensor) -> None:
    """No float holds exp(500). A later chunk of keys may raise the peak that is taken off, or not."""
    keys = made(1, 140, 1, 16).abs() * slope[:, None, None]
    assert_attends(made(1, 1, 1, 16).abs(), keys, made(1, 140, 1, 16), 139)


@interpreted
@pytest.mark.parametrize(("seqlen", "start_pos"), [(1, 64), (2, 0), (2, 3), (1, [0, 30]), (2, [64, 15])])
def test_memory_behind_a_row_s_end_is_never_read(seqlen: int, start_pos: int | list[int]) -> None:
    """Not even multiplied by zero: zero times nan is nan."""
    xq, keys, values = made(2, seqlen, 2, 16), made(2, 70, 1, 16), made(2, 70, 1, 16)
    expected = attend_exactly(xq, keys, values, start_pos)
    for row, start in enumerate([start_pos] * 2 if isinstance(start_pos, int) else start_pos):
        keys[row, start + seqlen :] = values[row, start + seqlen :] = torch.nan
    assert torch.equal(attend_exactly(xq, keys, values, start_pos), expected)
    assert expected.isfinite().all()


@interpreted
@pytest.mark.parametrize(
    "lay",
    [
        lambda kept: kept[:2, :9],  # the beginning of a larger cache
        lambda kept: kept.transpose(1, 2).contiguous().transpose(1, 2)[:2, 1:10],  # heads before positions
        lambda kept: kept.mT.contiguous().mT[1:, :9],  # the numbers of a head apart
        lambda kept: kept[:1, :9].expand(2, -1, -1, -1),  # one row, twice
    ],
)
def test_queries_keys_and_values_may_have_any_strides(lay: Callable[[Tensor], Tensor]) -> None:
    xq, laid, plain = made(2, 2, 4, 20), lay(made(3, 30, 2, 20)), made(2, 9, 2, 20)
    assert_attends(xq, laid, plain, 7)
    assert_attends(xq, plain, laid, 7)
    assert_attends(laid[:, 7:], plain, plain, 7)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 16), (5, 17), (1,), (3, 100), (0, 4)])
def test_norms_equal_the_plain_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = RMSNorm(shape[-1], 1e-5).to(dtype).requires_grad_(False)
    plain.weight.uniform_(0.5, 1.5)
    for size in (1, 1e-3):  # eps is negligible, and ten times the mean square
        x = size * made(*shape, dtype=dtype)
        # A sum of dim positive numbers is off by dim roundings at most, its root by half of that.
        rtol = (4 + shape[-1]) * torch.finfo(dtype).eps
        torch.testing.assert_close(triton_kernels.rms_norm(x, plain.weight, 1e-5), plain(x), rtol=rtol, atol=0)


@interpreted
def test_norms_are_rounded_before_the_weight_comes() -> None:
    """Squares and sums of whole numbers are exact, so nothing but the roundings to float16 can differ."""
    plain = RMSNorm(100, 1e-5).half().requires_grad_(False)
    plain.weight.uniform_(0.5, 1.5)
    x = torch.randint(-300, 300, (20, 100)).half()  # 300 squared is too much for float16
    assert torch.equal(triton_kernels.rms_norm(x, plain.weight, 1e-5), plain(x))


@interpreted
@pytest.mark.parametrize(
    ("refused", "call"),
    [
        (r"\[0, 0\] must be one per row \(of 1\)", lambda x: triton_kernels.attend(x, x, x, Rows.at([0, 0], [3, 3]))),
        (r"start_pos=\[1\] must be .* from 0 to 3 keys - 3", lambda x: attend_exactly(x, x, x, 1)),
        (r"do not agree: .*keys \(1, 2, 2, 4\)", lambda x: attend_exactly(x[:, :1], x[:, :2], x, 0)),
        ("do not agree", lambda x: attend_exactly(x, x[..., :3], x[..., :3], 0)),
        ("do not agree", lambda x: attend_exactly(x[:, :, :1], x, x, 0)),
        ("last sizes must agree", lambda x: triton_kernels.linear(x, x[0, :, 0, :3])),
        ("last sizes must agree", lambda x: triton_kernels.rms_norm(x, x[0, 0, 0, :3], 1e-5)),
        ("one dtype on one .* torch.float32 .* torch.float64", lambda x: triton_kernels.linear(x, x[0, 0].double())),
        ("one device .* on cpu, .* on meta", lambda x: triton_kernels.linear(x, x[0, 0].to("meta"))),
        ("float32 or float64 .given x torch.int64", lambda x: triton_kernels.linear(x.long(), x[0, 0].long())),
        ("no gradient: run .*inference_mode", lambda x: triton_kernels.linear(x, x[0, 0].clone().requires_grad_())),
        ("no gradient", lambda x: attend_exactly(x, x, x.clone().requires_grad_(), 0)),
    ],
)
def test_unsupported_operands_raise(refused: str, call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=refused):
        call(made(1, 3, 2, 4))


@interpreted
def test_weights_that_require_a_gradient_pass_in_inference_mode() -> None:
    x, weight = made(2, 4), made(3, 4).requires_grad_()
    with torch.inference_mode():
        assert_same_product(x, weight)


# Compilation by Triton, which the interpreter leaves out. It needs no GPU.


@not_interpreted
def test_a_cpu_raises() -> None:
    with pytest.raises(ValueError, match=r"run on CUDA GPUs.*given x torch.float32 on cpu"):
        triton_kernels.linear(made(2, 4), made(3, 4))


@not_interpreted
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_is_compiled_again_for_values_that_differ_between_calls(kernel: Any) -> None:
    """Not for the number 1, multiples of 16 and aligned addresses: another program may sum in another order."""
    fixed = {"weight", "out_features", "in_features"}  # by the model
    for each in kernel.params:
        unseen = each.do_not_specialize or each.do_not_specialize_on_alignment
        assert each.is_constexpr or each.name in fixed or unseen, each.name


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*((kernel, "fp32") for kernel in KERNELS), *zip(KERNELS, ("fp64", "bf16", "fp16"), strict=True)],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(
    kernel: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"HEADS": 4, "GROUP": 2, "HEAD_DIM": 20, "DIM": 20, "WIDTH": 32, "SCALE": 0.2, "EPS": 1e-5}
    constants = {**sizes, "WIDE": triton.language.float64 if dtype == "fp64" else triton.language.float32}
    types = {each.name: each.annotation_type or "i32" for each in kernel.params}
    types |= dict.fromkeys(types.keys() & {"x", "weight", "out", "xq", "keys", "values"}, f"*{dtype}")
    types |= dict.fromkeys(types.keys() & {"starts"}, "*i32")
    types |= dict.fromkeys(types.keys() & constants.keys(), "constexpr")
    source = triton.compiler.ASTSource(
        kernel, types, {name: constants[name] for name in types.keys() & constants.keys()}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
    assert "tf32" not in ptx  # float32 is float32
    assert "atom." not in ptx  # no program adds to the sum of another
    assert "\tred." not in ptx


# Claims about bits. In the interpreter they show that a row is computed in the same tiles, without its neighbours'
# numbers. Only a GPU shows that it rounds them the same way.


def products_keep_their_bits(**kind: Any) -> None:
    x, weight = made(50, 150, **kind), made(70, 150, **kind)
    whole = triton_kernels.linear(x, weight)
    for start in range(0, 50, 1 if x.is_cuda else 16):  # NumPy rounds the rows of one tile differently
        for end in (start + 1, start + 16, 50):
            assert torch.equal(triton_kernels.linear(x[start:end], weight), whole[start:end])


def norms_keep_their_bits(**kind: Any) -> None:
    x, weight = made(2, 5, 150, **kind), made(150, **kind)
    whole = triton_kernels.rms_norm(x, weight, 1e-5)
    for row in range(2):
        for i in range(5):  # at addresses of many alignments
            assert torch.equal(triton_kernels.rms_norm(x[row, i], weight, 1e-5), whole[row, i])


def attention_keeps_its_bits(**kind: Any) -> None:
    xq, xk, xv = (made(3, 140, heads, 20, **kind) for heads in (2, 1, 1))
    whole = attend_exactly(xq, xk, xv, 0)  # as without a cache
    keys, values = (torch.full((3, 200, 1, 20), torch.nan).to(xk) for _ in range(2))
    start, all_ends = 0, (5, *range(6, 20), 50, *range(60, 68), 127, 128, 129, 140)
    for end in all_ends if xq.is_cuda else (5, 6, 16, 17, 63, 65, 140):  # through a cache, in pieces
        keys[:, start:end], values[:, start:end] = xk[:, start:end], xv[:, start:end]
        assert torch.equal(attend_exactly(xq[:, start:end], keys, values, start), whole[:, start:end])
        start = end
    starts = [77, 0, 15]
    ragged = torch.stack([xq[row, pos : pos + 3] for row, pos in enumerate(starts)])
    expected = torch.stack([whole[row, pos : pos + 3] for row, pos in enumerate(starts)])
    assert torch.equal(attend_exactly(ragged, keys, values, starts), expected)
    for row, pos in enumerate(starts):
        one = slice(row, row + 1)
        assert torch.equal(attend_exactly(ragged[one], keys[one], values[one], pos), expected[one])


CLAIMS = [products_keep_their_bits, norms_keep_their_bits, attention_keeps_its_bits]


@interpreted
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_row_is_computed_in_the_same_tiles_in_any_batch(claim: Callable[..., None]) -> None:
    claim()


@pytest.mark.gpu
@needs_cuda
@not_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_row_keeps_its_bits_in_any_batch_on_a_gpu(claim: Callable[..., None], dtype: torch.dtype) -> None:
    claim(dtype=dtype, device="cuda")
