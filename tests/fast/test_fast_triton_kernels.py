"""The kernels of a decode step give what their plain twins give, and touch nothing but what they are to touch.

Without a GPU they run in Triton's interpreter, which does their arithmetic in NumPy: indices and masks are those of a
GPU. What Triton makes of them for one is looked at, too; that it runs there, and early, is left to the last test.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import assert_claims_hold_interpreted, compiled, interpreted, made, triton, with_cuda
from torch import Tensor
from writes import rows_of

from llama.args import ModelArgs
from llama.fast import triton_kernels as fused
from llama.fast.choose import find_fused
from llama.fast.graph_runner import GraphRunner
from llama.model import RMSNorm, Transformer
from llama.ops import attend
from llama.request import Options
from llama.rope import RopeTable, apply_rotary_emb, rope_frequencies
from llama.rows import Rows

EPS = 1e-5
# Numbers of about 1, made of sums of up to 1100 products, which are off by some 30 roundings of 6e-8 where signs are
# random; positions of up to 600 turn by angles that both sides take from one table.
FP32_TOLERANCE = 2e-5
# Against float64: inputs are the same 16-bit numbers; normed and attended ones are rounded once more, to 8 bits of
# which hundreds are averaged, and results of up to 4 or so once, by up to 2**-7.
BF16_TOLERANCE = 4e-2


@pytest.mark.slow
@compiled
def test_all_claims_hold_in_tritons_interpreter() -> None:
    assert_claims_hold_interpreted(__file__)


def matrix(out_features: int, in_features: int, **kind: Any) -> Tensor:
    """A weight whose products with numbers of about 1 are of about 1."""
    return (made(out_features, in_features, **kind) / in_features**0.5).contiguous()


def norm_weight(dim: int, **kind: Any) -> Tensor:
    return 1 + made(dim, **kind) / 4


def normed(h: Tensor, weight: Tensor) -> Tensor:
    """The plain norm, in float64."""
    norm = RMSNorm(h.shape[-1], EPS).to(h.device, torch.float64).requires_grad_(False)
    norm.weight.copy_(weight)
    plain: Tensor = norm(h.double())
    return plain


def ragged(rows: int, slots: int) -> list[int]:
    """Positions that begin with the last slot and the first."""
    return [slots - 1, 0, *torch.randint(slots, (rows,)).tolist()][:rows]


def assert_close(given: Tensor, expected: Tensor, like: Tensor | None = None) -> None:
    dtype = given.dtype if like is None else like.dtype
    atol = FP32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    assert given.shape == expected.shape
    torch.testing.assert_close(given.double(), expected.double(), rtol=0, atol=atol)


# What each function equals, for the interpreter and for a GPU.


def queries_are_returned_and_keys_and_values_stored(
    rows: int, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, slots: int = 40, **kind: Any
) -> None:
    h, weight = made(rows, dim, **kind), norm_weight(dim, **kind)
    wq, wk, wv = (matrix(n * head_dim, dim, **kind) for n in (n_heads, n_kv_heads, n_kv_heads))
    keys, values = (made(rows + 1, slots, n_kv_heads, head_dim, **kind) for _ in range(2))
    at, rope = ragged(rows, slots), RopeTable(rope_frequencies(head_dim, 10000.0))

    xq, xk, xv = (F.linear(normed(h, weight), each.double()).view(rows, 1, -1, head_dim) for each in (wq, wk, wv))
    xq, xk = apply_rotary_emb(xq, xk, rope.at(at, 1, h.device))
    expected_keys, expected_values = keys.clone(), values.clone()
    everyone, positions = torch.arange(rows, device=h.device), torch.tensor(at, device=h.device)
    expected_keys[everyone, positions] = xk[:, 0].to(keys)
    expected_values[everyone, positions] = xv[:, 0].to(values)
    before = keys.clone(), values.clone()

    q = fused.qkv(h, weight, EPS, wq, wk, wv, *rope.up_to(slots, h.device), positions, keys, values)
    assert q.dtype == h.dtype
    assert_close(q, xq[:, 0])
    assert_close(keys, expected_keys)
    assert_close(values, expected_values)
    for now, then in zip((keys, values), before, strict=True):
        now[everyone, positions] = then[everyone, positions]
        assert torch.equal(now, then)  # nothing else was written


def attention_is_projected_and_added(
    rows: int, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, slots: int, at: list[int], **kind: Any
) -> None:
    q, h = made(rows, n_heads, head_dim, **kind), made(rows, dim, **kind)
    keys, values = (made(rows + 2, slots, n_kv_heads, head_dim, **kind) for _ in range(2))
    wo = matrix(dim, n_heads * head_dim, **kind)
    attended = attend(q[:, None].double(), keys[:rows].double(), values[:rows].double(), rows_of(at, q[:, None]))
    expected = h.double() + F.linear(attended.reshape(rows, -1), wo.double())
    for kept in (keys, values):
        kept[rows:] = torch.nan
        for row, position in enumerate(at):
            kept[row, position + 1 :] = torch.nan
    out = fused.attend_project(q, keys, values, torch.tensor(at, device=h.device), wo, h)
    assert out.dtype == h.dtype
    assert_close(out, expected)


def the_gated_half_of_the_mlp_is_the_plain_one(rows: int, dim: int, ffn_dim: int, **kind: Any) -> None:
    h, weight = made(rows, dim, **kind), norm_weight(dim, **kind)
    w1, w3 = matrix(ffn_dim, dim, **kind), matrix(ffn_dim, dim, **kind)
    n = normed(h, weight)
    out = fused.gate(h, weight, EPS, w1, w3)
    assert out.dtype == h.dtype
    assert_close(out, F.silu(F.linear(n, w1.double())) * F.linear(n, w3.double()))


def a_product_is_added(rows: int, dim: int, ffn_dim: int, **kind: Any) -> None:
    x, weight, h = made(rows, ffn_dim, **kind), matrix(dim, ffn_dim, **kind), made(rows, dim, **kind)
    out = fused.project(x, weight, h)
    assert out.dtype == h.dtype
    assert_close(out, h.double() + F.linear(x.double(), weight.double()))


def logits_are_the_plain_ones_and_each_tiles_largest_is_known(rows: int, dim: int, vocab: int, **kind: Any) -> None:
    h, weight, output = made(rows, dim, **kind), norm_weight(dim, **kind), matrix(vocab, dim, **kind)
    logits, best, at = fused.head(h, weight, EPS, output)
    assert logits.dtype == torch.float32
    assert_close(logits, F.linear(normed(h, weight), output.double()), like=h)
    columns = -(-vocab // best.shape[1])
    columns = 1 << (columns - 1).bit_length()
    tiles = F.pad(logits, (0, best.shape[1] * columns - vocab), value=-torch.inf).view(rows, -1, columns)
    assert torch.equal(best, tiles.amax(-1))
    offsets = torch.arange(best.shape[1], device=h.device) * columns
    assert torch.equal(at.long(), tiles.argmax(-1) + offsets)


ROWS = [1, 2, 5, 16]
HEADS = [(4, 4, 16), (4, 2, 20), (6, 2, 8), (8, 2, 10), (8, 1, 64), (9, 3, 2)]  # groups of 1, 2, 3, 4, 8 and 3


@interpreted
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", HEADS)
def test_queries_keys_and_values_are_the_plain_ones_and_nothing_else_is_written(
    rows: int, heads: tuple[int, int, int]
) -> None:
    queries_are_returned_and_keys_and_values_stored(rows, 36, *heads)


@interpreted
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dim", [512, 1024, 1100])
def test_sums_of_any_length_are_taken_in_steps(rows: int, dim: int) -> None:
    queries_are_returned_and_keys_and_values_stored(rows, dim, 2, 1, 6)


@interpreted
@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_may_lie_in_memory_in_any_way_but_for_the_numbers_of_a_head(rows: int) -> None:
    h, weight, at = made(rows, 24), norm_weight(24), torch.arange(rows) + 3
    wq, wk, wv = matrix(32, 24), matrix(16, 24), matrix(16, 24)
    tables = RopeTable(rope_frequencies(8, 10000.0)).up_to(9, h.device)
    plain = made(rows, 9, 2, 8), made(rows, 9, 2, 8)
    laid = tuple(torch.cat((kept, kept, kept)).transpose(1, 2).contiguous().transpose(1, 2) for kept in plain)
    assert laid[0].stride() != plain[0].stride()
    wo, out = matrix(24, 32), []
    for keys, values in (plain, laid):
        q = fused.qkv(h, weight, EPS, wq, wk, wv, *tables, at, keys, values)
        out.append(fused.attend_project(q, keys, values, at, wo, h))
    assert torch.equal(*out)
    assert torch.equal(laid[0][:rows], plain[0])
    assert torch.equal(laid[1][:rows], plain[1])


@interpreted
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_the_plain_one_and_never_sees_what_lies_past_a_rows_position(
    rows: int, heads: tuple[int, int, int]
) -> None:
    """It is nan, which would show even if it were multiplied by zero."""
    attention_is_projected_and_added(rows, 30, *heads, slots=70, at=ragged(rows, 70))


@interpreted
@pytest.mark.parametrize("at", [[599, 0], [63, 64], [65, 127], [128, 300]])
def test_splits_on_and_off_the_grid_or_without_keys_add_up_to_the_whole(at: list[int]) -> None:
    assert fused._splits(2, 1, 600) == 2
    attention_is_projected_and_added(2, 20, 2, 1, 16, slots=600, at=at)
    attention_is_projected_and_added(1, 20, 2, 1, 16, slots=600, at=at[:1])


@interpreted
@pytest.mark.parametrize("rows", [1, 2])
def test_eight_splits_of_which_seven_have_no_keys_are_one(rows: int) -> None:
    slots = fused.MAX_SPLITS * fused.MIN_SLOTS
    assert fused._splits(rows, 1, slots) == fused.MAX_SPLITS
    attention_is_projected_and_added(rows, 8, 1, 1, 16, slots=slots, at=[40, 0][:rows])
    attention_is_projected_and_added(rows, 8, 1, 1, 16, slots=slots, at=[slots - 1, 500][:rows])


@interpreted
@pytest.mark.parametrize("slope", [torch.linspace(0, 300, 140), torch.linspace(300, 0, 140)])
def test_scores_of_any_size_neither_overflow_nor_vanish(slope: Tensor) -> None:
    """No float holds exp(500). A later chunk of keys may raise the peak that is taken off, or not."""
    q, keys, values = made(1, 1, 16).abs(), made(1, 140, 1, 16).abs() * slope[:, None, None], made(1, 140, 1, 16)
    out = fused.attend_project(q, keys, values, torch.tensor([139]), torch.eye(16), torch.zeros(1, 16))
    assert_close(out, attend(q[:, None].double(), keys.double(), values.double(), Rows.at([139], [1])).view(1, 16))


@interpreted
def test_splits_follow_from_shapes_and_are_neither_too_many_nor_too_short() -> None:
    assert fused._splits(1, 8, 8192) == 8
    assert fused._splits(4, 8, 8192) == 4
    assert fused._splits(16, 8, 8192) == 1
    assert fused._splits(16, 32, 8192) == 1
    assert fused._splits(1, 8, 600) == 2
    assert fused._splits(1, 8, 10) == 1


@interpreted
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dim", "ffn_dim"), [(36, 50), (520, 16), (64, 33)])
def test_both_halves_of_the_mlp_are_the_plain_ones(rows: int, dim: int, ffn_dim: int) -> None:
    the_gated_half_of_the_mlp_is_the_plain_one(rows, dim, ffn_dim)
    a_product_is_added(rows, dim, ffn_dim)
    a_product_is_added(rows, ffn_dim, dim)


@interpreted
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dim", "vocab"), [(36, 131), (520, 64), (30, 1)])
def test_logits_and_the_largest_of_every_tile_are_the_plain_ones(rows: int, dim: int, vocab: int) -> None:
    logits_are_the_plain_ones_and_each_tiles_largest_is_known(rows, dim, vocab)


@interpreted
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_any_size_are_normed(rows: int) -> None:
    """Of which eps is next to nothing, and ten times the mean square."""
    weight, w1, w3 = norm_weight(40), matrix(12, 40), matrix(12, 40)
    for size in (1e3, 1e-3):
        h = size * made(rows, 40)
        n = normed(h, weight)
        expected = F.silu(F.linear(n, w1.double())) * F.linear(n, w3.double())
        assert_close(fused.gate(h, weight, EPS, w1, w3), expected)


@interpreted
@pytest.mark.parametrize("rows", [1, 2])
def test_of_equal_logits_the_first_of_its_tile_is_named(rows: int) -> None:
    weight = torch.zeros(70, 8)
    weight[[5, 6, 40, 69]] = 1.0
    logits, best, at = fused.head(torch.ones(rows, 8), torch.ones(8), EPS, weight)
    for row in range(rows):
        ids = at[row][best[row] == logits[row].max()].tolist()
        assert ids[0] == 5
        assert 6 not in ids
        assert ids[-1] == 69 if rows == 1 else 40 in ids


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of 0 * inf
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_tile_with_a_logit_that_is_not_finite_has_nan_for_its_largest(rows: int, strange: float) -> None:
    weight = matrix(70, 8).abs()
    weight[50, 3] = strange
    logits, best, _ = fused.head(torch.ones(rows, 8), torch.ones(8), EPS, weight)
    columns = (fused.WIDE if rows == 1 else fused.WIDE_ROWS).columns
    expected = [tile == 50 // columns for tile in range(best.shape[1])]
    assert best.isnan().tolist() == [expected] * rows
    assert (~logits.isfinite()).sum() == rows


def advanced(best: Tensor, at: Tensor, tokens: Tensor, positions: list[int]) -> tuple[Tensor, list[int], list[int]]:
    """Return tokens, positions and the chosen ids after one step; tokens are a copy."""
    tokens, now, chosen = tokens.clone(), torch.tensor(positions), torch.full((len(best),), 77)
    fused.advance(best, at.int(), tokens, now, chosen)
    return tokens, now.tolist(), chosen.tolist()


@interpreted
def test_a_step_writes_the_likeliest_id_after_each_rows_position() -> None:
    best = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0], [5.0, 5.0, 5.0]])
    at = torch.tensor([[10, 40, 70], [11, 41, 71], [12, 42, 72]])
    tokens, positions, chosen = advanced(best, at, torch.zeros(3, 6, dtype=torch.int64), [0, 3, 2])
    assert chosen == [40, 11, 12]  # the lowest of equals
    assert positions == [1, 4, 3]
    assert tokens.tolist() == [[0, 40, 0, 0, 0, 0], [0, 0, 0, 0, 11, 0], [0, 0, 0, 12, 0, 0]]


@interpreted
def test_a_row_at_the_end_of_its_text_stays_there() -> None:
    tokens, positions, chosen = advanced(torch.ones(2, 1), torch.tensor([[8], [9]]), torch.zeros(2, 4).long(), [3, 2])
    assert chosen == [8, 9]
    assert positions == [3, 3]
    assert tokens.tolist() == [[0, 0, 0, 8], [0, 0, 0, 9]]


@interpreted
def test_a_row_whose_logits_are_not_finite_chooses_no_id() -> None:
    best, at = torch.tensor([[1.0, torch.nan], [1.0, 2.0]]), torch.tensor([[3, 20], [4, 21]])
    tokens, positions, chosen = advanced(best, at, torch.full((2, 3), 5), [0, 0])
    assert chosen == [-1, 21]
    assert positions == [1, 1]
    assert tokens.tolist() == [[5, 0, 5], [5, 21, 5]]


@interpreted
@pytest.mark.parametrize("tiles", [1, 2047, 2048, 2049, 5000])
def test_any_number_of_tiles_is_looked_at(tiles: int) -> None:
    """Over several chunks, too, and of equals the first."""
    best, at = torch.randint(0, tiles // 2 + 2, (2, tiles)).float(), torch.arange(tiles).expand(2, -1) * 16 + 3
    _, _, chosen = advanced(best, at.contiguous(), torch.zeros(2, 3).long(), [0, 1])
    assert chosen == (best.argmax(-1) * 16 + 3).tolist()
    _, _, chosen = advanced(torch.ones(2, tiles), at.contiguous(), torch.zeros(2, 3).long(), [0, 1])
    assert chosen == [3, 3]


def drawn_model() -> Transformer:
    """A model off every grid, with large enough weights for each of them to show in its logits."""
    args = ModelArgs(dim=36, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=50, vocab_size=67)
    model = Transformer(args).requires_grad_(False)
    for weight in model.parameters():
        weight.uniform_(0.5, 1.5) if weight.ndim == 1 else weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
    return model.eval()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: a step is recorded over a cache that nobody has filled
@pytest.mark.parametrize(
    ("rows", "options"), [(1, {"temperature": 0.0}), (3, {"temperature": 0.8, "seed": 3, "logprobs": True})]
)
def test_a_generation_of_these_steps_is_the_loops(rows: int, options: Options) -> None:
    model, prompts = drawn_model(), [[5, 9, 2, 44], [7], [3, 3, 8, 1, 60, 12, 30]][:rows]
    ids, _ = model.generate_tokens(prompts, 5, **options)
    fused_kernels = find_fused(model)
    assert fused_kernels is not None
    model.runner = GraphRunner(fused_kernels)
    assert model.runner.name == "CUDA graphs of fused kernels"
    assert model.generate_tokens(prompts, 5, **options)[0] == ids
    assert model.runner.forwards == 4


@interpreted
def test_what_serves_is_not_refused() -> None:
    for rows in (1, 16):
        for dtype in (torch.float32, torch.bfloat16):
            assert fused.refusal(rows, dtype, torch.device("cuda")) is None
    assert fused.refusal(1, torch.float16, torch.device("cuda")) is None
    assert "one row in float16, not 2" in str(fused.refusal(2, torch.float16, torch.device("cuda")))


def attended(**other: Tensor) -> Tensor:
    operands = {
        **{"q": made(2, 4, 8), "keys": made(2, 9, 2, 8), "values": made(2, 9, 2, 8)},
        **{"positions": torch.tensor([1, 2]), "wo": made(5, 32), "h": made(2, 5)},
    }
    return fused.attend_project(**{**operands, **other})


def queried(**other: Tensor) -> Tensor:
    operands = {
        **{"h": made(2, 6), "norm_weight": made(6), "wq": made(32, 6), "wk": made(16, 6), "wv": made(16, 6)},
        **{"cos": made(16, 1, 8), "sin": made(16, 1, 8), "positions": torch.tensor([1, 2])},
        **{"keys": made(2, 9, 2, 8), "values": made(2, 9, 2, 8)},
    }
    return fused.qkv(eps=EPS, **{**operands, **other})


def chose(**other: Tensor) -> None:
    operands = {
        **{"best": made(2, 3), "at": torch.zeros(2, 3, dtype=torch.int32), "tokens": torch.zeros(2, 4).long()},
        **{"positions": torch.zeros(2).long(), "chosen": torch.zeros(2).long()},
    }
    fused.advance(**{**operands, **other})


@interpreted
@pytest.mark.parametrize(
    ("refused", "call"),
    [
        ("1 to 16 rows, not 17: feed fewer", lambda: fused.project(made(17, 4), made(3, 4), made(17, 3))),
        ("1 to 16 rows, not 0", lambda: fused.project(made(0, 4), made(3, 4), made(0, 3))),
        ("not torch.float64: convert", lambda: fused.gate(*(made(1, 4).double() for _ in range(2)), EPS, None, None)),
        ("one dtype on one .* h torch.float32 .* weight torch.float16",
         lambda: fused.head(made(1, 4), made(4), EPS, made(3, 4).half())),
        ("contiguous operands .* weight .*steps of .1, 3.",
         lambda: fused.project(made(1, 4), made(4, 3).T, made(1, 3))),
        ("no gradient: run .*inference_mode",
         lambda: fused.project(made(1, 4), made(3, 4).requires_grad_(), made(1, 3))),
        ("sizes of x, weight and h do not agree: .1, 4., .3, 5.",
         lambda: fused.project(made(1, 4), made(3, 5), made(1, 3))),
        ("sizes of h, norm_weight, w1 and w3 do not",
         lambda: fused.gate(made(1, 4), made(4), EPS, made(3, 4), made(2, 4))),
        ("sizes of h, norm_weight and weight do not", lambda: fused.head(made(1, 4), made(3), EPS, made(3, 4))),
        ("sizes of h, norm_weight, wq", lambda: queried(wk=made(15, 6))),
        ("sizes of h, norm_weight, wq", lambda: queried(wq=made(30, 6))),
        ("cos and sin must be .*length, 1, 8.* not .16, 8. torch.float32", lambda: queried(sin=made(16, 8))),
        ("cos and sin must be .* torch.float16", lambda: queried(cos=made(16, 1, 8).half())),
        ("sizes of q, keys, wo and h", lambda: attended(q=made(2, 3, 8))),
        ("sizes of q, keys, wo and h", lambda: attended(h=made(2, 6))),
        ("cache of torch.float32 on cpu, not torch.float16", lambda: attended(keys=made(2, 9, 2, 8).half())),
        ("keys and values must be alike", lambda: attended(keys=made(2, 8, 2, 8))),
        ("keys and values must be alike, .at least 2",
         lambda: attended(keys=made(1, 9, 2, 8), values=made(1, 9, 2, 8))),
        ("side by side", lambda: attended(keys=made(2, 9, 8, 2).mT, values=made(2, 9, 8, 2).mT)),
        (r"positions must be \(2,\) int64 .* not \(1,\)", lambda: attended(positions=torch.tensor([1]))),
        ("positions must be .* torch.int32", lambda: queried(positions=torch.tensor([1, 2]).int())),
        ("sizes of best, at, tokens, positions and chosen", lambda: chose(positions=torch.zeros(3).long())),
        ("int64 and int64, not .*float32, torch.int64", lambda: chose(at=torch.zeros(2, 3).long())),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_take_is_refused_in_words(refused: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=refused):
        call()


@compiled
def test_a_cpu_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="run on CUDA GPUs, not on cpu: move the model"):
        fused.project(made(1, 4), made(3, 4), made(1, 3))


# What Triton makes of the kernels for a GPU that is not here, in the sizes of Llama 3.2 1B.

ONE, MANY = 1, 16
NORM = {"EPS": EPS, "DIM": 2048}
KERNELS: list[tuple[Any, dict[str, Any], dict[int, fused.Tile]]] = [
    (
        fused._qkv,
        {**NORM, "QUERIES": 2048, "SHARED": 512, "HEAD_DIM": 64},
        {ONE: fused.NARROW, MANY: fused.NARROW_ROWS},
    ),
    (
        fused._combine,
        {"SPLITS": 4, "HEADS": 32, "HEAD_DIM": 64},
        {ONE: fused.WIDE._replace(slices=32, depth=64), MANY: fused.NARROW_ROWS},
    ),
    (fused._gate, NORM, {ONE: fused.WIDE, MANY: fused.WIDE_ROWS}),
    (fused._project, {"DIM": 8192}, {ONE: fused.LONG, MANY: fused.LONG_ROWS}),
    (fused._head, NORM, {ONE: fused.WIDE, MANY: fused.WIDE_ROWS}),
]
TYPES = {
    **dict.fromkeys(["cos", "sin", "sums", "weights", "logits", "best"], "*fp32"),
    **dict.fromkeys(["positions", "tokens", "chosen"], "*i64"),
    **dict.fromkeys(["n_rows", "n_columns", "vocab", "width", "by_row", "by_slot", "by_head"], "i32"),
    "at": "*i32",
}


@pytest.fixture(scope="module", autouse=True)
def kept_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile each kernel once for all tests here, and none out of what an earlier run left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def code(
    kernel: Any, constants: dict[str, Any], pdl: bool, options: dict[str, Any], dtype: str = "bf16", arch: int = 90
) -> Any:
    """Compile for a GPU that is not here, down to its machine code."""
    from triton.backends.compiler import GPUTarget

    types = {name: "constexpr" if name.isupper() else TYPES.get(name, f"*{dtype}") for name in kernel.arg_names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if not name.isupper() and name != "n_rows"  # as Triton sees for itself when it launches
    }
    source = triton.compiler.ASTSource(kernel, types, {**constants, "PDL": pdl}, divisible)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**options, "launch_pdl": pdl})


def assembly(
    kernel: Any, constants: dict[str, Any], pdl: bool, options: dict[str, Any] | None = None, dtype: str = "bf16"
) -> str:
    """Compile for Hopper, and return the assembly."""
    done = code(kernel, constants, pdl, options or {}, dtype)
    assert done.metadata.shared <= 232448  # bytes that a program may have on Hopper
    assert done.asm["cubin"]
    ptx: str = done.asm["ptx"]
    assert "tf32" not in ptx  # float32 is float32
    assert "atom." not in ptx  # nobody adds to the sum of another program
    assert "\tred." not in ptx
    return ptx


def before_the_wait(ptx: str) -> str:
    """Return what a program does before the kernel before it has ended, having asked the next one in."""
    assert ptx.count("griddepcontrol.launch_dependents") == ptx.count("griddepcontrol.wait") == 1
    early = ptx[: ptx.index("griddepcontrol.wait")]
    assert "griddepcontrol.launch_dependents" in early
    assert "st.global" not in early
    return early


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("rows", [ONE, MANY])
@pytest.mark.parametrize(("kernel", "sizes", "tiles"), KERNELS)
def test_products_compile_for_hopper_and_load_wide_and_early(
    kernel: Any,
    sizes: dict[str, Any],
    tiles: dict[int, fused.Tile],
    rows: int,
) -> None:
    tile = tiles[rows]
    constants = {**sizes, **tile.constants}
    ptx = assembly(kernel, constants, True, tile.options)
    loads = 2 * tile.columns * tile.slices * tile.depth // (16 * 32 * tile.warps)  # per thread, of 16 bytes
    assert before_the_wait(ptx).count("ld.global.v4.b32") == loads
    assert before_the_wait(ptx).count("ld.global") == loads
    assert ("mma.sync" in ptx) == (rows > 1)
    assert "griddepcontrol" not in assembly(kernel, constants, False, tile.options)


def machine_code(cubin: bytes, folder: Path) -> tuple[list[str], str]:
    """Return the opcodes of a kernel as the hardware has them, in order, and what it takes of a processor."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = {name: shutil.which(name, path=f"{tools}:/usr/local/cuda/bin") for name in ("nvdisasm", "cuobjdump")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"needs {missing[0]}, of Triton or of CUDA")
    (folder / "cubin").write_bytes(cubin)
    words = [str(found["nvdisasm"]), "-c"], [str(found["cuobjdump"]), "--dump-resource-usage"]
    text, usage = (
        subprocess.run([*command, str(folder / "cubin")], capture_output=True, text=True, check=True).stdout
        for command in words
    )
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text), usage


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("kernel", "sizes", "tiles"), KERNELS)
def test_one_row_is_multiplied_without_spills_or_barriers_behind_loads_that_come_before_the_wait(
    kernel: Any, sizes: dict[str, Any], tiles: dict[int, fused.Tile], arch: int, tmp_path: Path
) -> None:
    """In 16-bit numbers, by the machine code: the assembly does not tell where ptxas puts a load, or what it spills."""
    tile = tiles[ONE]
    early = arch >= 90
    done = code(kernel, {**sizes, **tile.constants}, early, tile.options, arch=arch)
    opcodes, usage = machine_code(done.asm["cubin"], tmp_path)
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage
    assert not [name for name in opcodes if name.startswith(("LDL", "STL"))]

    each = tile.columns * tile.slices * tile.depth // (32 * tile.warps)  # weights of a thread in a step
    steps = sizes.get("DIM", sizes.get("HEADS", 0) * sizes.get("HEAD_DIM", 0)) // (tile.slices * tile.depth)
    if early:  # a load brings 8 weights
        before = opcodes[: next(i for i, name in enumerate(opcodes) if name.startswith("ACQBULK"))]
        assert sum(name.startswith("LDG") and "128" in name for name in before) == each // 8
        assert not [name for name in before if name.startswith("BAR")]
    barriers = [i for i, name in enumerate(opcodes) if name.startswith("BAR")]
    if kernel is fused._combine:  # its float32 parts change hands once, in shared memory
        del barriers[0]
    products = [i for i, name in enumerate(opcodes) if name.startswith(("FFMA", "FMUL"))]
    pairs = {i: 2 if re.match(r"F(FMA|MUL)2", opcodes[i]) else 1 for i in products}
    assert sum(pairs[i] for i in products if i < barriers[0]) >= steps * each
    if kernel is fused._project and steps == 2:
        loads = [i for i, name in enumerate(opcodes) if name.startswith("LDG") and "128" in name]
        assert loads[2 * each // 8 - 1] < products[0]  # of both steps


@compiled
@pytest.mark.parametrize("pdl", [False, True])
def test_attention_and_the_choice_compile_for_hopper(pdl: bool) -> None:
    sizes = {"SPLITS": 4, "HEADS": 32, "GROUP": 4, "QUERIES": 16, "HEAD_DIM": 64, "WIDTH": 64, "KEYS": 64, "SCALE": 0.1}
    for ptx in (
        assembly(fused._attend, sizes, pdl),
        assembly(fused._advance, {"TILES": 16032}, pdl, {"num_warps": 8}),
    ):
        assert ("griddepcontrol" in ptx) == pdl
        if pdl:
            assert "ld.global" not in before_the_wait(ptx)


@compiled
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_numbers_compile_for_hopper(dtype: str) -> None:
    kernel, sizes, tiles = KERNELS[0]
    for tile in tiles.values():
        assembly(kernel, {**sizes, **tile.constants}, True, tile.options, dtype)
    keys = {"fp16": 64, "fp32": 32}[dtype]
    sizes = {"SPLITS": 8, "HEADS": 9, "GROUP": 3, "QUERIES": 16, "HEAD_DIM": 96, "WIDTH": 128, "KEYS": keys}
    assembly(fused._attend, {**sizes, "SCALE": 0.1}, True, None, dtype)


@with_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_every_function_gives_what_its_plain_twin_gives_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    """The sizes of Llama 3.2 1B, and some off the tile grid; 200 slots make one split, 2000 several."""
    if fused.refusal(rows, dtype, torch.device("cuda")) is not None:
        pytest.skip("float16 is for one row")
    kind: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    for dim, ffn_dim, vocab in ((2048, 8192, 1003), (520, 70, 64)):
        the_gated_half_of_the_mlp_is_the_plain_one(rows, dim, ffn_dim, **kind)
        a_product_is_added(rows, dim, ffn_dim, **kind)
        logits_are_the_plain_ones_and_each_tiles_largest_is_known(rows, dim, vocab, **kind)
    for heads in ((32, 8, 64), (8, 1, 128), *HEADS):
        queries_are_returned_and_keys_and_values_stored(rows, 520, *heads, **kind)
        for slots in (200, 2000):
            attention_is_projected_and_added(rows, 520, *heads, slots=slots, at=ragged(rows, slots), **kind)


@with_cuda
@pytest.mark.parametrize("rows", [1, 16])
def test_steps_in_a_cuda_graph_give_what_they_give_one_by_one(rows: int) -> None:
    """Several tokens through two layers' worth of kernels: where one began too early, it would have read the past."""
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    dim, ffn_dim, vocab, width = 512, 1024, 4096, 40
    weight, output = norm_weight(dim, **kind), matrix(vocab, dim, **kind)
    wq, wk, wv, wo = (matrix(n, dim, **kind) for n in (512, 128, 128, 512))
    w1, w3, w2 = matrix(ffn_dim, dim, **kind), matrix(ffn_dim, dim, **kind), matrix(dim, ffn_dim, **kind)
    cos, sin = RopeTable(rope_frequencies(64, 10000.0)).up_to(width, torch.device("cuda"))
    keys, values = (torch.zeros(2, rows, width, 2, 64, **kind) for _ in range(2))
    tokens = torch.zeros(rows, width, dtype=torch.int64, device="cuda")
    positions, chosen = tokens[:, 0].clone(), tokens[:, 0].clone()

    def step() -> None:
        h = output[tokens[torch.arange(rows, device="cuda"), positions]]
        for layer in range(2):
            q = fused.qkv(h, weight, EPS, wq, wk, wv, cos, sin, positions, keys[layer], values[layer])
            h = fused.attend_project(q, keys[layer], values[layer], positions, wo, h)
            h = fused.project(fused.gate(h, weight, EPS, w1, w3), w2, h)
        _, best, at = fused.head(h, weight, EPS, output)
        fused.advance(best, at, tokens, positions, chosen)

    def texts(run: Callable[[], None]) -> Tensor:
        tokens.zero_()
        tokens[:, 0] = torch.arange(rows, device="cuda") * 7
        positions.zero_()
        for _ in range(width - 1):
            run()
        return tokens.clone()

    def step_and_wait() -> None:
        step()
        torch.cuda.synchronize()

    expected = texts(step_and_wait)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert torch.equal(texts(graph.replay), expected)
    assert len(expected.unique()) > width // 4  # they say something
