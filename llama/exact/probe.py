"""Matrix products whose rows have the same bits whatever is multiplied beside them: the probe finds how.

A library rounds a row differently when it is alone. In blocks of enough rows it does not; how many are enough belongs
to the machine, so it is probed once for each weight's shape and dtype. Knows tensors; does not know a model.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama.exact.digest import Digest
from llama.ops import linear

SIDE = 16  # what the inner sizes of a product are filled up to
# The most rows and outputs of a product: what is used is to be probed, and a probe is to cost little beside a forward.
# More of them gain no speed; both are multiples of whatever they are filled up to.
ROWS, OUTPUTS = 256, 8192


class Block(NamedTuple):
    """A way to multiply many rows: padded to a multiple of `rows`, then in one product or in one for each block."""

    rows: int
    in_one: bool = True


# The fewest rows first. The last, a product for each row, is exact on any machine that computes the same twice.
BLOCKS = (*(Block(2**n) for n in range(7)), Block(16, in_one=False), Block(1, in_one=False))


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in blocks of as many rows as this machine needs, OUTPUTS at a time.

    Raises ValueError on gradients.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError(
            "exact mode records no gradients, which other kernels would compute: run the model under "
            "torch.inference_mode(), or switch exact mode off"
        )
    if len(weight) <= OUTPUTS:
        return _product(x, weight, block_for(weight))
    return torch.cat([_product(x, some, block_for(some)) for some in torch.split(weight, OUTPUTS)], dim=-1)


def _product(x: Tensor, weight: Tensor, block: Block) -> Tensor:
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    # The rows are copied in any case: bits can depend on where in memory an operand begins.
    whole = flat.new_zeros(round_up(flat.shape[0], block.rows), round_up(in_features, SIDE))
    whole[: flat.shape[0], :in_features] = flat
    if out_features % SIDE or in_features % SIDE:  # sizes that no published model has: copied at each call
        weight = pad(weight, (0, -in_features % SIDE, 0, -out_features % SIDE))
    tiles = torch.split(whole, ROWS if block.in_one else block.rows)
    product = torch.cat([linear(tile, weight) for tile in tiles])
    return product[: flat.shape[0], :out_features].reshape(*x.shape[:-1], out_features)


def round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


# What a process has probed already, for each weight's shape, dtype and device and each count of threads: `block_for`,
# and `is_its_slices` by their count.
_Key = tuple[torch.Size, torch.dtype, torch.device, int]
_FOUND: dict[_Key, Block] = {}
_WHOLE: dict[tuple[_Key, int], bool] = {}


def _key_of(weight: Tensor) -> _Key:
    return weight.shape, weight.dtype, weight.device, torch.get_num_threads()


def block_for(weight: Tensor) -> Block:
    """Return the first of BLOCKS in which a product with this weight gives a row the same bits in any company.

    Raises ValueError where none does.
    """
    key = _key_of(weight)
    if key not in _FOUND:
        _FOUND[key] = _probe(weight)
    return _FOUND[key]


def _probe(weight: Tensor) -> Block:
    x, like = _sensitive(ROWS, weight)
    whole = _product(x, like, Block(ROWS))  # that of every block which is multiplied in one
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
    """Tell whether one product gives the bits that slices of its outputs give; it is quicker."""
    if len(weight) > OUTPUTS:
        return False
    key = _key_of(weight), slices
    if key not in _WHOLE:
        x, like = _sensitive(64, weight)  # few are enough: what more of them are beside a row has been probed
        parts = like.chunk(slices)
        _WHOLE[key] = all(
            torch.equal(
                _product(some, like, block_for(like)),
                torch.cat([_product(some, part, block_for(part)) for part in parts], dim=-1),
            )
            for some in (x, x[:1], x[:7])
        )
    return _WHOLE[key]


def rounding_digest(weights: Iterable[Tensor]) -> str:
    """Return a digest of how products with matrices like these round in this process: equal digests, equal kernels.

    A library chooses its kernels by the CPU's instruction set, by its version and by the environment (oneDNN by
    ONEDNN_MAX_CPU_ISA, for one), for each shape and dtype, and does not report its choice. The bits of a product do.
    """
    digest = Digest()
    for shape, weight in sorted({weight.shape: weight for weight in weights if weight.ndim == 2}.items()):
        x, like = _sensitive(64, weight[:1024])  # more outputs take the same kernels
        wide = torch.promote_types(x.dtype, torch.float32)  # in which attention multiplies
        digest.take(str(tuple(shape)), linear(x, like))
        digest.take("batched", torch.bmm(x[None].to(wide), like.mT[None].to(wide)))
    return digest.hex()[:16]


def _sensitive(rows: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` rows, and a matrix like `weight`, whose products show every other order of summing.

    Each term has its opposite somewhere in the sum, so nothing but rounding errors remains. Of ordinary sums in 16 bits
    one in some ten thousand would differ.
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
    """Return counts of rows that differ in how many blocks they fill, the cheap ones first."""
    if not block.in_one:
        return [block.rows, 2 * block.rows]  # no product has more than a block
    blocks = (*range(1, 10), 12, 15, 16, 17, 31, 33, 48, 64, 65, 128)
    return [n * block.rows for n in blocks if n * block.rows < ROWS]


def _agrees(x: Tensor, weight: Tensor, block: Block, whole: Tensor, size: int) -> bool:
    """Are the products of `size` rows at a time those of all of them, at other places of their blocks?"""
    rows = max(size, -(-(2**12) // weight.shape[0]))  # some 4,000 numbers or more
    shift = block.rows // 2 + 1 if size // block.rows % 2 == 0 else 1  # by one moves every row, by half a block far
    return all(
        torch.equal(_product(part, weight, block), whole[shift + i * size :][: len(part)])
        for i, part in enumerate(torch.split(x[shift : shift + rows], size))
    )
