"""Batch-invariant matrix products, in blocks of rows whose size a probe finds.

A library rounds a row differently when it is alone, but not within blocks of enough rows. How many are enough depends
on the machine, so this is probed once for each weight's shape and dtype. Knows tensors; does not know a model.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama.ops import linear

SIDE = 16  # the inner sizes of a product are padded to multiples of it
# The most rows and outputs of one product: every size in use must be probed, and a probe should cost little beside a
# forward. More of them are not faster; both are multiples of their padding.
ROWS, OUTPUTS = 256, 8192


class Block(NamedTuple):
    """A way to multiply many rows: padded to a multiple of `rows`, then in one product or in one for each block."""

    rows: int
    in_one: bool = True


# The fewest rows first. The last, a product for each row, is exact on any machine that computes deterministically.
BLOCKS = (*(Block(2**n) for n in range(7)), Block(16, in_one=False), Block(1, in_one=False))


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in blocks of as many rows as this machine needs. Raises ValueError on gradients."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError(
            "exact mode records no gradients, because other kernels would compute them: run the model under "
            "torch.inference_mode(), or switch exact mode off"
        )
    if len(weight) <= OUTPUTS:
        return _product(x, weight, block_for(weight))
    return torch.cat([_product(x, some, block_for(some)) for some in torch.split(weight, OUTPUTS)], dim=-1)


def _product(x: Tensor, weight: Tensor, block: Block) -> Tensor:
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    # The rows are always copied: bits can depend on the address of an operand.
    whole = flat.new_zeros(round_up(flat.shape[0], block.rows), round_up(in_features, SIDE))
    whole[: flat.shape[0], :in_features] = flat
    if out_features % SIDE or in_features % SIDE:  # no published model has such sizes; copied at each call
        weight = pad(weight, (0, -in_features % SIDE, 0, -out_features % SIDE))
    tiles = torch.split(whole, ROWS if block.in_one else block.rows)
    product = torch.cat([linear(tile, weight) for tile in tiles])
    return product[: flat.shape[0], :out_features].reshape(*x.shape[:-1], out_features)


def round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


# Results of `block_for` and `is_its_slices` in this process, by weight (shape, dtype, device) and number of threads.
_Key = tuple[torch.Size, torch.dtype, torch.device, int]
_FOUND: dict[_Key, Block] = {}
_WHOLE: dict[tuple[_Key, int], bool] = {}


def _key_of(weight: Tensor) -> _Key:
    return weight.shape, weight.dtype, weight.device, torch.get_num_threads()


def block_for(weight: Tensor) -> Block:
    """Return the first of BLOCKS for which products with this weight are batch-invariant, or raise ValueError."""
    key = _key_of(weight)
    if key not in _FOUND:
        _FOUND[key] = _probe(weight)
    return _FOUND[key]


def _probe(weight: Tensor) -> Block:
    x, like = sensitive(ROWS, weight)
    whole = _product(x, like, Block(ROWS))  # for all blocks with in_one
    for block in BLOCKS:
        if not block.in_one:
            whole = _product(x, like, block)
        if all(_agrees(x, like, block, whole, size) for size in _sizes(block)):
            return block
    raise ValueError(
        f"exact mode is not available here: products with a weight of {tuple(weight.shape)} in {weight.dtype} on "
        f"{weight.device} round differently from call to call"
    )


def is_its_slices(weight: Tensor, slices: int) -> bool:
    """Return True if one product gives the same bits as slices of its outputs; one product is faster."""
    if len(weight) > OUTPUTS:
        return False
    key = _key_of(weight), slices
    if key not in _WHOLE:
        x, like = sensitive(64, weight)  # few rows are enough: `block_for` has probed more
        parts = like.chunk(slices)
        _WHOLE[key] = all(
            torch.equal(
                _product(some, like, block_for(like)),
                torch.cat([_product(some, part, block_for(part)) for part in parts], dim=-1),
            )
            for some in (x, x[:1], x[:7])
        )
    return _WHOLE[key]


def sensitive(rows: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` rows, and a matrix like `weight`, whose products differ with every other order of summing.

    Each term has its negative somewhere in the sum, so only rounding errors remain. Of ordinary sums in 16 bits, one in
    some ten thousand would differ.
    """
    stream = torch.Generator().manual_seed(0)
    half = weight.shape[1] // 2
    one, other = torch.randperm(2 * half, generator=stream).chunk(2)
    scale = torch.randint(-6, 7, (half,), generator=stream).float().exp2()
    terms, factors = torch.randn(rows, half, generator=stream) * scale, torch.randn(len(weight), half, generator=stream)
    x, like = weight.new_zeros(rows, weight.shape[1]), torch.zeros_like(weight)
    x[:, one], x[:, other] = terms.to(x), -terms.to(x)
    like[:, one] = like[:, other] = factors.to(x)
    return x, like


def _sizes(block: Block) -> list[int]:
    """Return numbers of rows that fill different numbers of blocks, the cheap ones first."""
    if not block.in_one:
        return [block.rows, 2 * block.rows]  # no product has more than one block
    blocks = (*range(1, 10), 12, 15, 16, 17, 31, 33, 48, 64, 65, 128)
    return [n * block.rows for n in blocks if n * block.rows < ROWS]


def _agrees(x: Tensor, weight: Tensor, block: Block, whole: Tensor, size: int) -> bool:
    """Return True if products of `size` rows, at other places of their blocks, have the bits of `whole`."""
    rows = max(size, -(-(2**12) // weight.shape[0]))  # some 4,000 numbers or more
    shift = (
        block.rows // 2 + 1 if size // block.rows % 2 == 0 else 1
    )  # one moves every row; half a block moves rows far
    return all(
        torch.equal(_product(part, weight, block), whole[shift + i * size :][: len(part)])
        for i, part in enumerate(torch.split(x[shift : shift + rows], size))
    )
