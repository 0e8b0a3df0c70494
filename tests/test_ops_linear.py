"""A matrix product is the same in every kernel, and gradients flow through it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llama.layers import ColumnParallelLinear
from llama.ops import linear

# Two kernels may sum the K products of a dot product in any order: each sum is off by at most K * eps of the sum of
# magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), so two are by at most twice that.
EPS = torch.finfo(torch.float32).eps


def assert_same_product(x: Tensor, weight: Tensor) -> None:
    product, expected = linear(x, weight), F.linear(x, weight)
    assert product.shape == expected.shape
    assert product.dtype == expected.dtype
    bound = 2 * x.shape[-1] * EPS * F.linear(x.abs(), weight.abs())
    assert ((product - expected).abs() <= bound).all()


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 17]), max_size=3),
    st.sampled_from([1, 2, 31, 64, 200]),
    st.sampled_from([1, 3, 64, 130]),
)
def test_product_equals_that_of_pytorch(leading: list[int], in_features: int, out_features: int) -> None:
    """Vectors, matrices, batches of them, and no rows at all."""
    torch.manual_seed(0)
    assert_same_product(torch.randn(*leading, in_features), torch.randn(out_features, in_features))


def test_inputs_may_have_any_strides() -> None:
    for x in (
        torch.arange(12.0).view(4, 3).T,  # transposed
        torch.arange(24.0).view(3, 8)[:, ::2],  # every second column
        torch.arange(24.0).view(2, 3, 4).transpose(0, 1),
        torch.arange(24.0).view(2, 3, 4)[:, -1:],  # the last position
        torch.arange(4.0).expand(3, 4),  # one row, three times
        torch.arange(13.0)[1:].view(3, 4),  # not aligned to 16 bytes
    ):
        for weight in (torch.randn(6, 4), torch.randn(4, 6).T, torch.randn(6, 8)[:, ::2]):
            assert_same_product(x, weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_left_to_pytorch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, weight.float())


def test_product_may_be_made_in_inference_mode_and_a_layer_has_no_bias() -> None:
    layer = ColumnParallelLinear(4, 6)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    with torch.inference_mode():
        torch.testing.assert_close(layer(torch.eye(4)), layer.weight.T)


@pytest.mark.parametrize("frozen", ["x", "weight", None])
def test_gradients_flow(frozen: str | None) -> None:
    x = torch.randn(2, 3, 4, requires_grad=frozen != "x")
    weight = torch.randn(6, 4, requires_grad=frozen != "weight")
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
    ours = torch.autograd.grad(linear(x, weight).square().sum(), wanted)
    theirs = torch.autograd.grad(F.linear(x, weight).square().sum(), wanted)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # torch.func.jvp uses it itself
def test_gradients_flow_forward() -> None:
    """oneDNN's operator alone would silently give tangents of zero here."""
    x, weight, tangent = torch.randn(3, 4), torch.randn(6, 4), torch.randn(3, 4)
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            _, ours = torch.func.jvp(lambda x: linear(x, weight), (x,), (tangent,))
            torch.testing.assert_close(ours, tangent @ weight.T)
    torch.testing.assert_close(torch.func.grad(lambda x: linear(x, weight).sum())(x), weight.sum(0).expand(3, 4))
