"""A cache of floating-point numbers of 8 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.static import StaticCache
from llama.rope import RopeTable
from llama.rows import Rows

NUMBERS, SCALES = torch.float8_e4m3fn, torch.float16


class Fp8Cache(StaticCache, kind="fp8"):
    """Keys and values in e4m3: 8 bits, 3 of them mantissa. Each token has a scale for each KV head, in float16.

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

    def position_bytes(self, itemsize: int) -> int:
        return 2 * self.args.n_kv_heads * (self.args.head_dim + SCALES.itemsize)

    def sizes(self, rows: int, length: int, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        shape = (rows, length, self.args.n_kv_heads)
        numbers, scale = ((*shape, self.args.head_dim), torch.uint8), ((*shape, 1), SCALES)
        return {"keys": numbers, "values": numbers, "key_scale": scale, "value_scale": scale}

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        assert self.key_scale is not None
        assert self.value_scale is not None
        self._like, (bsz, end) = xk.new_empty(0), keys.shape[:2]
        wide = (codes.view(NUMBERS).to(xk.dtype) for codes in (keys, values))
        scales = (scale[:bsz, :end].to(xk.dtype) for scale in (self.key_scale, self.value_scale))
        return next(wide) * next(scales), next(wide) * next(scales)

    def _write(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        for x, codes, scales in ((xk, self.keys, self.key_scale), (xv, self.values, self.value_scale)):
            assert codes is not None
            assert scales is not None
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            scale = (wide.abs().amax(-1, keepdim=True) / torch.finfo(NUMBERS).max).to(SCALES)
            scale = scale.clamp(min=torch.finfo(SCALES).tiny)
            numbers = (wide / scale.to(wide.dtype)).to(NUMBERS).view(torch.uint8)
            for row, start in enumerate(rows.starts):
                codes[row, start : start + rows.width] = numbers[row]
                scales[row, start : start + rows.width] = scale[row]
