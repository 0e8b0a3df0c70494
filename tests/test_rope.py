"""Angles are those of the released models' training, at every position and in every dtype."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import hf_config
from tiny import FP64_TOLERANCE, bits, some_tokens, tiny_args, tiny_model
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from llama.args import RopeScaling
from llama.kv_cache import KVCache
from llama.model import Transformer
from llama.rope import RopeTable, apply_rotary_emb, rope_frequencies, scale_frequencies

CPU, META = torch.device("cpu"), torch.device("meta")
CONTEXT = 131072  # the longest text that a released model reads


def of_pair(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a table, (1, seqlen, 1, head_dim), for the first and the second number of every pair."""
    return table[0, :, 0, 0::2], table[0, :, 0, 1::2]


@pytest.mark.parametrize(
    ("head_dim", "factor"),
    [(64, 8.0), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 32.0), (128, 8.0), (128, None)))],
)
def test_cos_and_sin_equal_those_of_transformers_at_every_position(head_dim: int, factor: float | None) -> None:
    """Bit for bit. Catches bugs 5 and 6: factor 8 for all models, scaling of unscaled models, borders of the bands."""
    scaling = None if factor is None else RopeScaling(factor=factor)
    args = tiny_args(dim=2 * head_dim, n_heads=2, rope_theta=500000.0, rope_scaling=scaling)
    theirs = LlamaRotaryEmbedding(hf_config(args))
    cos, sin = Transformer(args).rope.at([0], CONTEXT, CPU)
    expected_cos, expected_sin = theirs(torch.zeros(1), torch.arange(CONTEXT)[None])
    for turn in of_pair(cos):
        assert torch.equal(turn, expected_cos[0, :, : head_dim // 2])
    first, second = of_pair(sin)
    assert torch.equal(second, expected_sin[0, :, : head_dim // 2])
    assert torch.equal(first, -second)


def scaled(*wavelengths: float, original: int = 8192, factor: float = 8.0) -> list[float]:
    """Return the wavelengths after scaling with the released models' bands."""
    freqs = 2 * math.pi / torch.tensor(wavelengths)
    scaled = scale_frequencies(freqs, RopeScaling(factor, original_max_seq_len=original))
    assert scaled.dtype == torch.float32
    return (2 * math.pi / scaled).tolist()


def test_scaling_bands_keep_stretch_and_blend() -> None:
    """Catches bug 6: short wavelengths stay, long ones are multiplied, and the blend is continuous at both borders."""
    assert scaled(10, 2047, 8193, 10**6) == pytest.approx([10, 2047, 8 * 8193, 8 * 10**6], rel=1e-6)
    assert scaled(2048, 8192) == pytest.approx([2048, 8 * 8192], rel=1e-6)
    assert scaled(4096) == pytest.approx([4096 / (1 / 3 + 2 / 3 / 8)], rel=1e-6)  # 8192 / 4096 is a third of 1 to 4
    assert scaled(4096, factor=1.0) == pytest.approx([4096], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_table_stays_float32_whatever_the_model_becomes(dtype: torch.dtype) -> None:
    """Catches bug 6: bf16 keeps 8 bits of a position, so angles past a few hundred would be off by whole turns."""
    model = tiny_model(dtype=torch.float32, kv_caching=False)
    before = model.rope.at([0], 16, CPU)
    model.to(dtype)(some_tokens(1, 16))
    after = model.rope.at([0], 16, CPU)
    assert after[0].dtype == after[1].dtype == model.rope.freqs.dtype == torch.float32
    assert all(map(torch.equal, before, after))


def test_table_is_no_part_of_a_checkpoint() -> None:
    model = tiny_model(kv_caching=False)
    model(some_tokens(1, 3))
    assert not any("rope" in name or "freqs" in name for name in model.state_dict())
    assert not list(model.buffers())


def test_table_grows_by_doubling_and_never_shrinks() -> None:
    table = RopeTable(rope_frequencies(8, 10000.0))
    lengths = []
    for start_pos, seqlen in [(0, 1), (1, 1), (2, 1), (0, 5), (7, 1), (8, 1), (2, 1), (40, 2)]:
        table.at([0, start_pos], seqlen, CPU)
        lengths.append(len(table._freqs_cis[0]))
    assert lengths == [1, 2, 4, 8, 8, 16, 16, 64]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 70))
def test_any_window_is_cut_from_one_table(starts: list[int], seqlen: int) -> None:
    freqs = rope_frequencies(8, 10000.0)
    whole = RopeTable(freqs).at([0], 200, CPU)
    for made, full in zip(RopeTable(freqs).at(starts, seqlen, CPU), whole, strict=True):
        assert made.shape == (1 if len(set(starts)) == 1 else len(starts), seqlen, 1, 8)
        for row, start in enumerate(starts[: len(made)]):
            assert torch.equal(made[row], full[0, start : start + seqlen])


def test_table_follows_the_device_that_asks() -> None:
    table = RopeTable(rope_frequencies(8, 10000.0))
    here = table.at([0], 4, CPU)
    assert {part.device for part in table.at([3], 2, META)} == {META}
    assert {part.device for part in table.at([3, 1], 2, META)} == {META}
    assert all(map(torch.equal, table.at([0], 4, CPU), here))


def test_model_built_on_the_meta_device_has_real_frequencies() -> None:
    with torch.device("meta"):
        model = Transformer(tiny_args(rope_scaling=RopeScaling(original_max_seq_len=32)))
    assert torch.equal(model.rope.freqs, Transformer(model.args).rope.freqs)


@settings(max_examples=30)
@given(st.integers(1, 32), st.integers(1, 4), st.integers(1, 2), st.integers(0, 1000))
def test_turning_equals_that_of_transformers_in_its_order_of_pairs(
    pairs: int, heads: int, groups: int, start_pos: int
) -> None:
    """transformers pairs (x[i], x[i + head_dim/2]), we pair (x[2i], x[2i+1]): the same numbers in another order."""
    head_dim = 2 * pairs
    args = tiny_args(dim=2 * head_dim, n_heads=2)
    xq, xk = torch.randn(2, 3, heads, head_dim), torch.randn(2, 3, groups, head_dim)
    freqs_cis = RopeTable(rope_frequencies(head_dim, args.rope_theta)).at([start_pos], 3, CPU)
    cos, sin = LlamaRotaryEmbedding(hf_config(args))(torch.zeros(1), torch.arange(start_pos, start_pos + 3)[None])
    expected = apply_rotary_pos_emb(half_split(xq), half_split(xk), cos, sin, unsqueeze_dim=2)
    for made, wanted in zip(apply_rotary_emb(xq, xk, freqs_cis), expected, strict=True):
        assert torch.equal(half_split(made), wanted)


def test_without_a_theta_queries_and_keys_keep_their_bits() -> None:
    args = tiny_args(rope_theta=None)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 50, 2, 8, dtype=dtype)
        by_a_kind = KVCache.of(args).rotated(x, torch.arange(1000, 1050), 1049)  # as window and int4 do
        for made in (*apply_rotary_emb(x, x, RopeTable.of(args).at([1000, 3], 50, CPU)), by_a_kind):
            assert torch.equal(bits(made), bits(x)), dtype


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["static", "int4", "window:20+3"])
def test_without_rope_one_layer_sees_no_order_in_the_past(kind: str) -> None:
    """So no kind of cache rotates keys, not even an unrotated one. With RoPE, the logits differ."""
    tokens = some_tokens(2, 12)
    shuffled = tokens[:, [7, 2, 9, 0, 4, 10, 1, 3, 8, 6, 5, 11]]
    for rope_theta, alike in ((None, True), (10000.0, False)):
        model = tiny_model(n_layers=1, kv_cache=kind, rope_theta=rope_theta)
        lasts = []
        for text in (tokens, shuffled):
            model(text[:, :5], 0)
            lasts += [model(text[:, at : at + 1], at) for at in range(5, 12)][-1:]
        assert torch.allclose(*lasts, rtol=0, atol=FP64_TOLERANCE) == alike


def half_split(x: Tensor) -> Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_rotated_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(1, 50, 2, 16, dtype=dtype)
    freqs_cis = RopeTable(rope_frequencies(16, 10000.0)).at([1000], 50, CPU)
    turned, _ = apply_rotary_emb(x, x, freqs_cis)
    assert turned.dtype == dtype
    assert torch.equal(turned, apply_rotary_emb(x.float(), x.float(), freqs_cis)[0].to(dtype))
