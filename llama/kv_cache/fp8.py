"""A cache of floating-point numbers of 8 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.static import StaticCache
from llama.rope import RopeTable
from llama.rows import Rows

NUMBERS, SCALES = torch.float8_e4m3fn, torch.bfloat16  # scales have the range of float32


class Fp8Cache(StaticCache, kind="fp8"):
    """Keys and values in e4m3: 8 bits, 3 of them mantissa. Each token has a scale for each KV head, in bfloat16.

    A query reads its own key and value in 8 bits, too, so results do not depend on how a text is cut into chunks.
    Source of the format: Micikevicius et al., FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433.
    """

    lossless = False
    _like: Tensor | None = None

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        self.key_scale: Tensor | None = None
        self.value_scale: Tensor | None = None

    @property
    def like(self) -> Tensor | None:
        return None if self.keys is None else self._like

    def free(self) -> None:
        super().free()
        self._like = None

    def position_bytes(self, itemsize: int) -> int:
        return 2 * self.args.n_kv_heads * (self.args.head_dim + SCALES.itemsize)

    def sizes(self, rows: int, length: int, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        shape = (rows, length, self.args.n_kv_heads)
        numbers, scale = ((*shape, self.args.head_dim), torch.uint8), ((*shape, 1), SCALES)
        return {"keys": numbers, "values": numbers, "key_scale": scale, "value_scale": scale}

    def prepare(self, rows: Rows, like: Tensor) -> None:
        super().prepare(rows, like)
        self._like = like.new_empty(())

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        bsz, end = keys.shape[:2]
        key_scale, value_scale = (self.held()[name][:bsz, :end].to(xk.dtype) for name in ("key_scale", "value_scale"))
        return keys.view(NUMBERS).to(xk.dtype) * key_scale, values.view(NUMBERS).to(xk.dtype) * value_scale

    def _write(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        for side, x in (("key", xk), ("value", xv)):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            scale = (wide.abs().amax(-1, keepdim=True) / torch.finfo(NUMBERS).max).float()
            scale = (scale.view(torch.int32) & -1 << 16).view(torch.float32).to(SCALES)  # down: no number may overflow
            scale = scale.clamp(min=max(torch.finfo(one).tiny for one in (x.dtype, SCALES)))
            numbers = (wide / scale.to(wide.dtype)).to(NUMBERS).view(torch.uint8)
            for row, start in enumerate(rows.starts):
                written = slice(start, start + rows.width)
                self.held()[f"{side}s"][row, written] = numbers[row]
                self.held()[f"{side}_scale"][row, written] = scale[row]
