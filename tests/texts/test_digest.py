"""A digest changes with every bit, place, name, shape and dtype, and with nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llama.texts.digest import LANES, Digest

# Some words, not whole ones, more than a row of lanes.
LENGTHS = (1, 7, 24, 1000, 2 * LANES + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def digest(*tensors: Tensor) -> str:
    made = Digest()
    for place, tensor in enumerate(tensors):
        made.take(f"tensor {place}", tensor)
    return made.hex()


def numbers(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(length, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)


def swapped(tensor: Tensor, one: int, other: int) -> Tensor:
    changed = tensor.clone()
    changed[one], changed[other] = tensor[other].clone(), tensor[one].clone()
    return changed


@pytest.mark.parametrize(("length", "dtype"), [*zip(LENGTHS, [*DTYPES, torch.float32], strict=True)])
def test_every_single_bit_counts(length: int, dtype: torch.dtype) -> None:
    tensor = numbers(length, dtype)
    seen = {digest(tensor)}
    places = {0, length // 2, length - 1}
    for place in places:
        for bit in range(8 * dtype.itemsize):
            raw = tensor.clone().view(torch.uint8)
            raw[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            seen.add(digest(raw.view(dtype)))
    assert len(seen) == 1 + len(places) * 8 * dtype.itemsize


@settings(max_examples=30)
@given(st.integers(0, 2 * LANES + 4), st.integers(0, 2 * LANES + 4))
def test_two_numbers_that_change_places_count(one: int, other: int) -> None:
    tensor = torch.arange(2 * LANES + 5, dtype=torch.float32) + 1
    assert (digest(swapped(tensor, one, other)) == digest(tensor)) == (one == other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_that_differ_in_their_sign_alone_may_not_change_places(dtype: torch.dtype) -> None:
    """If only the highest bit of a word differs, products alone would lose it."""
    tensor = torch.ones(4 * LANES, dtype=dtype)
    tensor[1::2] = -1
    seen = {
        digest(tensor),
        *(digest(swapped(tensor, 1, 2 * place)) for place in (0, 1, 5, LANES // 2, LANES, LANES + 9)),
    }
    assert len(seen) == 7


def test_names_shapes_dtypes_and_the_order_count() -> None:
    square, zeros = numbers(64).view(8, 8), torch.zeros(8, dtype=torch.float32)
    others = [
        *([square], [square.T], [square.view(16, 4)], [square.view(64)], [square.view(torch.int32)], [square, square]),
        *([zeros], [zeros[:7]], [zeros.view(torch.int32)], [zeros[:4].repeat(3)], [zeros, square], [square, zeros], []),
    ]
    assert len({digest(*tensors) for tensors in others}) == len(others)
    named = Digest()
    named.take("another name", square)
    assert named.hex() != digest(square)


def test_the_address_and_the_strides_of_a_tensor_do_not_count() -> None:
    tensor = numbers(35).view(5, 7)
    raw = torch.empty(1 + tensor.nbytes, dtype=torch.uint8)
    raw[1:] = tensor.flatten().view(torch.uint8)
    assert digest(tensor) == digest(tensor.T.contiguous().T) == digest(torch.cat((tensor, tensor))[5:])
    assert digest(tensor.flatten().view(torch.uint8)) == digest(raw[1:])
    threads = torch.get_num_threads()
    large = numbers(5 * LANES)
    alone = digest(large)
    try:
        torch.set_num_threads(4)
        assert digest(large) == alone
    finally:
        torch.set_num_threads(threads)


def test_the_digest_can_be_read_in_between() -> None:
    made = Digest()
    made.take("tensor 0", numbers(9))
    assert made.hex() == made.hex() == digest(numbers(9))
    made.take("tensor 1", torch.tensor(3.0))
    assert made.hex() == digest(numbers(9), torch.tensor(3.0)) != digest(numbers(9))
    assert digest(torch.empty(0, 3)) != digest(torch.empty(0, 4)) != digest()
