"""The contract of a cache: keys and values of past tokens, for one attention layer.

Knows tensors and positions. Does not know masks, sampling, or how many tokens were generated: the position is an
argument of every call and nothing here counts, so there is nothing to reset between prompts.
Shapes: xk and xv are (bsz, seqlen, n_kv_heads, head_dim).

To add a kind, subclass KVCache in a file of your own and choose it by name:

    class Mine(KVCache, kind="mine"):
        def update(self, start_pos, xk, xv): ...

    model = Transformer(ModelArgs(..., kv_cache="mine"))
"""

from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.limits import row_starts


class KVCache(nn.Module):
    """The contract: store new keys and values at their positions, return all that attention may look at."""

    kinds: ClassVar[dict[str, type["KVCache"]]] = {}
    keys: Tensor | None
    values: Tensor | None

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        if kind is None:
            return
        taken = KVCache.kinds.get(kind, cls)
        if taken.__qualname__ != cls.__qualname__:  # the same class made again, as notebooks do, replaces itself
            raise ValueError(f"kind={kind!r} is taken by {taken.__qualname__}; choose another name")
        KVCache.kinds[kind] = cls

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        # Buffers follow the module's .to(); persistent=False keeps them out of checkpoints.
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("values", None, persistent=False)

    @staticmethod
    def of(args: ModelArgs) -> "KVCache":
        """Make the cache that `args.kv_cache` names."""
        if args.kv_cache not in KVCache.kinds:
            known = ", ".join(sorted(KVCache.kinds))
            raise ValueError(f"kv_cache={args.kv_cache!r} is not a known kind of cache; known are: {known}")
        return KVCache.kinds[args.kv_cache](args)

    @classmethod
    def position_bytes(cls, args: ModelArgs, itemsize: int) -> int:
        """Return the bytes that one position of a row takes in a layer, where the model's numbers take `itemsize` each.

        A kind that holds keys and values in another way than as they come tells so here; memory is predicted from it.
        """
        return 2 * args.n_kv_heads * args.head_dim * itemsize

    def update(self, start_pos: int | Sequence[int], xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        """Store xk and xv from `start_pos` on and return all keys and values up to the furthest of them.

        `start_pos` is an int where all rows stand at the same position, else one per row. What is returned has shape
        (bsz, kv_len, n_kv_heads, head_dim); past a row's own end it is undefined and must not be read. Raises
        ValueError, with nothing written, on what `check` refuses.
        """
        raise NotImplementedError

    def key_positions(self) -> Tensor | None:
        """Return where the keys of the last update stand, (kv_len,) or (bsz, kv_len); None: at 0 .. kv_len - 1.

        Keys and values whose positions are given must be finite, also where no query may look yet: they are masked.
        """
        return None

    def reserve(self, rows: int, length: int) -> None:
        """Drop what is held; a kind that preallocates then takes room for `rows` x `length` on its first update."""
        self.free()

    def free(self) -> None:
        """Hold no memory until the next update."""
        self.keys = self.values = None

    @property
    def nbytes(self) -> int:
        """The bytes that the cache holds now."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def check(self, start_pos: int | Sequence[int], xk: Tensor, xv: Tensor) -> list[int]:
        """Return each row's end, `start_pos + seqlen`; raise ValueError for a write that must not happen.

        Limits are checked where memory is taken, see `check_room`: a model has checked them before it asks a cache.
        """
        wanted = (self.args.n_kv_heads, self.args.head_dim)
        if xk.shape != xv.shape or xk.ndim != 4 or xk.shape[2:] != wanted or 0 in xk.shape:
            raise ValueError(
                f"the KV cache takes keys and values of shape (bsz, seqlen, {wanted[0]}, {wanted[1]}), "
                f"not {tuple(xk.shape)} and {tuple(xv.shape)}"
            )
        held = xk if self.keys is None else self.keys
        for new in (xk, xv):
            if new.dtype != held.dtype or new.device != held.device:
                raise ValueError(
                    f"the KV cache holds {held.dtype} on {held.device}, so it cannot take {new.dtype} on "
                    f"{new.device}; move the model as a whole, or free the cache first"
                )
        if torch.is_grad_enabled() and (xk.requires_grad or xv.requires_grad):
            raise ValueError(
                "gradients cannot flow through the KV cache: set kv_caching=False to train, "
                "or run the model under torch.inference_mode()"
            )
        bsz, seqlen = xk.shape[:2]
        return [start + seqlen for start in row_starts(start_pos, bsz)]

    def _write(self, start_pos: int | Sequence[int], xk: Tensor, xv: Tensor) -> None:
        """Copy xk and xv into the buffers, which must have the room."""
        assert self.keys is not None
        assert self.values is not None
        bsz, seqlen = xk.shape[:2]
        if isinstance(start_pos, int):
            self.keys[:bsz, start_pos : start_pos + seqlen] = xk
            self.values[:bsz, start_pos : start_pos + seqlen] = xv
            return
        rows = torch.arange(bsz, device=xk.device)[:, None]
        starts = torch.tensor(start_pos, device="cpu").to(xk.device, non_blocking=True)
        positions = starts[:, None] + torch.arange(seqlen, device=xk.device)
        self.keys[rows, positions] = xk
        self.values[rows, positions] = xv


def cache_kind(name: str) -> str:
    """Return the name of a kind of cache; of "file.py:kind", after running the file, which defines it."""
    path, _, kind = name.rpartition(":")
    if not path.endswith(".py"):
        return name
    if kind not in KVCache.kinds:
        spec = spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module_from_spec(spec))
    return kind
