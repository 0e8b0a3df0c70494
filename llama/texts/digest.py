"""Digests of tensors, computed at the speed of memory. They detect accidental changes, not intended ones.

Knows tensors only.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

# The number of 64-bit words that are processed together: they fit a CPU's cache, and are enough for several threads.
LANES = 2**16
_FACTOR = -7046029254386353131  # 2^64 over the golden ratio; odd, so that no bit of a lane is lost
_FOLD = 29  # a product moves bits upwards only; the shift moves them down


class Digest:
    """A digest of named tensors in order: of their names, shapes, dtypes and bits.

    Each lane is multiplied by an odd factor and added to the next 64-bit word. So a digest depends on the position of a
    word: swapping two words, or changing one bit, changes it. It does not resist intended collisions.
    """

    def __init__(self) -> None:
        self._names = hashlib.blake2b(digest_size=16)
        self._lanes: Tensor | None = None

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        self._names.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        words = _words(tensor.detach())
        if self._lanes is None:
            self._lanes = torch.zeros(LANES, dtype=torch.int64, device=words.device)
            self._high = torch.empty_like(self._lanes)
        for begin in range(0, len(words), LANES):
            row = words[begin : begin + LANES]
            lanes, high = self._lanes[: len(row)], self._high[: len(row)]
            torch.add(row, lanes, alpha=_FACTOR, out=lanes)
            torch.bitwise_right_shift(lanes, _FOLD, out=high)
            lanes.bitwise_xor_(high)

    def hex(self) -> str:
        whole = self._names.copy()
        if self._lanes is not None:
            whole.update(self._lanes.cpu().numpy().data)
        return whole.hexdigest()


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of named tensors in order."""
    digest = Digest()
    for name, tensor in tensors:
        digest.take(name, tensor)
    return digest.hex()


def digest_of_text(text: str) -> str:
    """Return the digest of a text, with as many digits as that of tensors."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, in order of its elements, as int64, (words,), padded with zeros."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -len(raw) % 8
    if missing or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = torch.cat((raw, raw.new_zeros(missing)))
    return raw.view(torch.int64)
