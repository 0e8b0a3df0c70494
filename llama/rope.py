"""Rotary position embedding (RoPE): each pair of numbers in a head is rotated by an angle that depends on the position.

Knows sizes and positions, no model. A pair is (x[2i], x[2i+1]), as in Meta's checkpoints; Hugging Face pairs
(x[i], x[i + head_dim/2]), and llama/checkpoint converts.
Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.

Everything up to cos and sin is float32, whatever the model's dtype: bf16 angles would be off by whole turns past a
few hundred positions, and the released models were trained with float32.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling


def rope_frequencies(head_dim: int, theta: float | None) -> Tensor:
    """Return the angle in radians that rotates each pair per position, (head_dim / 2,) float32, fastest first.

    With a theta of None all angles are 0: a rotation by 0 changes no bit of a finite number.
    """
    if theta is None:
        return torch.zeros(head_dim // 2)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def scale_frequencies(freqs: Tensor, rule: RopeScaling) -> Tensor:
    """Return frequencies by the rule of Llama 3.1: low ones divided by `factor`, high ones as they are, blends between.

    Source: `apply_scaling` in https://github.com/meta-llama/llama-models. The order of operations is the same, because
    the last bit depends on it.
    """
    wavelengths = 2 * math.pi / freqs
    low, high, length = rule.low_freq_factor, rule.high_freq_factor, rule.original_max_seq_len
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * freqs / rule.factor + smooth * freqs
    scaled = torch.where(wavelengths > length / low, freqs / rule.factor, blended)
    return torch.where(wavelengths < length / high, freqs, scaled)


def yarn_frequencies(freqs: Tensor, theta: float, rule: YarnScaling) -> Tensor:
    """Return frequencies by the rule of YaRN, see `YarnScaling`.

    Source: the formulas of https://arxiv.org/abs/2309.00071. The order of operations is that of Hugging Face's
    transformers, because the last bit depends on it.
    """
    count = len(freqs)

    def place(turns: float) -> float:
        """Return the index, as a float, of the frequency with so many turns in the original length."""
        return count * math.log(rule.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first, last = place(rule.beta_fast), place(rule.beta_slow)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)  # 2 * count: transformers clamps by head_dim
    ramp = (torch.arange(count, dtype=torch.float32) - first) / max(last - first, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    slowed = 1.0 / (rule.factor * theta ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)))
    return slowed * (1 - kept) + freqs * kept


def scaled_frequencies(args: ModelArgs) -> Tensor:
    """Return the scaled angles of a model in radians per position, (head_dim / 2,) float32."""
    freqs, scaling = rope_frequencies(args.head_dim, args.rope_theta), args.rope_scaling
    if scaling is None or args.rope_theta is None:
        return freqs
    if isinstance(scaling, RopeScaling):
        return scale_frequencies(freqs, scaling)
    if isinstance(scaling, LinearScaling):
        return freqs / scaling.factor
    if isinstance(scaling, YarnScaling):
        return yarn_frequencies(freqs, args.rope_theta, scaling)
    return freqs / torch.tensor(scaling, dtype=torch.float32)  # one divisor each


class RopeTable:
    """A table of cos and sin by position, which is made on first use and grows.

    It is not an nn.Module: a buffer would follow `.to(torch.bfloat16)` and lose its precision.
    """

    def __init__(self, freqs: Tensor, attention_factor: float = 1.0) -> None:
        self.freqs, self.attention_factor = freqs, attention_factor
        self._freqs_cis: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(args: ModelArgs) -> "RopeTable":
        """Return the table of a model."""
        with torch.device("cpu"):  # real numbers even if the model is built on the meta device
            freqs = scaled_frequencies(args)
        scaling = args.rope_scaling
        factor = scaling.attention_factor if isinstance(scaling, LinearScaling | YarnScaling) else 1.0
        return RopeTable(freqs, factor)

    def at(self, starts: Sequence[int], seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) for `seqlen` positions from each start, each (1 or bsz, seqlen, 1, head_dim) float32.

        The first dimension is 1 if all rows start together. Both numbers of a pair have the same cos; sin is -sin for
        the first number and +sin for the second.
        """
        first, end = starts[0], max(starts) + seqlen
        cos, sin = self.up_to(end, device)
        if len(set(starts)) == 1:
            return cos[None, first:end], sin[None, first:end]
        places = torch.tensor(starts, device="cpu").to(device, non_blocking=True)
        positions = places[:, None] + torch.arange(seqlen, device=device)  # (bsz, seqlen)
        return cos[positions], sin[positions]

    def up_to(self, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of at least the positions 0 .. end - 1, each (positions, 1, head_dim)."""
        table = self._freqs_cis  # another thread may replace it meanwhile
        if table is None or table[0].device != device or len(table[0]) < end:
            length = 1 << (end - 1).bit_length()  # powers of two: a growing text rebuilds the table rarely
            with torch.inference_mode(False):  # a backward pass cannot use a table made in inference mode
                cos, sin = (part * self.attention_factor for part in _cos_sin(self.freqs, length))
                table = cos.to(device), sin.to(device)
            if type(cos) is Tensor:  # not a tensor of a tracer or an export
                self._freqs_cis = table
        return table


def _cos_sin(freqs: Tensor, length: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length, dtype=torch.float32, device=freqs.device)
    angles = torch.outer(positions, freqs)  # (length, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    cos = torch.stack((cos, cos), dim=-1).flatten(-2)  # (length, head_dim)
    sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    return cos[:, None], sin[:, None]  # (length, 1, head_dim): one for all heads


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, (bsz, seqlen, heads, head_dim), by the (cos, sin) of their positions."""
    return rotate(xq, freqs_cis), rotate(xk, freqs_cis)


def rotate(x: Tensor, freqs_cis: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x, (bsz, seqlen, heads, head_dim), by (cos, sin), which broadcast to it."""
    cos, sin = freqs_cis
    # Two products and a sum, each rounded: a fused complex product rounds differently at the end of a vector.
    swapped = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return (x * cos + swapped * sin).type_as(x)  # 16-bit inputs are promoted to the table's float32
