"""The Triton kernels of a step give the results of `cached_layer`, and compile for a GPU that is not here.

Results are computed in Triton's interpreter, in float32: its bfloat16 is wrong. Only a GPU shows the results of tensor
cores and the speed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generations import WAYS
from machine_code import SHARED, launches, machine_code
from paths import WITH_PROMPTS
from skips import can_interpret, check_in_interpreter, interpreted, not_interpreted
from tiny import tiny_args, tiny_model
from torch import Tensor

from llama.fast import graph_ops
from llama.fast.graph_ops import (
    PYTORCH,
    LayerWeights,
    Shared,
    attend_masked,
    cached_layer,
    fresh,
    layer,
    prepare_mask,
    shared_by_layers,
)
from llama.fast.graph_runner import GraphRunner
from llama.rope import RopeTable, rope_frequencies, rotate

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("llama.fast.graph_kernels")
Tile = kernels.Tile
TILES = [Tile(16, 32, 1, 1, 1), Tile(16, 32, 4, 1, 1), Tile(64, 64, 1, 1, 1), Tile(32, 64, 2, 1, 1)]
# Sums of hundreds of float32 products of size 1, in another order.
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.mark.slow
@not_interpreted
@can_interpret
def test_the_claims_of_this_file_of_sampling_and_of_exact_mode_s_kernels_hold_in_tritons_interpreter() -> None:
    here = Path(__file__)
    exact = here.parents[1] / "exact" / "test_exact_triton_kernels.py"
    check_in_interpreter(here, here.with_name("test_graph_sampling.py"), exact)


def gathered(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    cos, sin = RopeTable(rope_frequencies(head_dim, 10_000.0)).up_to(int(positions.max()) + 1, torch.device("cpu"))
    return cos[positions], sin[positions]


def cache(positions: Tensor, slots: int, n_kv_heads: int, head_dim: int) -> Tensor:
    """Return random keys or values before the positions, and NaN in all other slots, of one row more than there are."""
    kept = torch.randn(len(positions) + 1, slots, n_kv_heads, head_dim)
    kept[:-1][torch.arange(slots) >= positions[:, None]] = torch.nan
    return kept


@interpreted
@pytest.mark.parametrize(
    ("slots", "joined", "group"),
    [(40, True, 1), (100, False, 4), (129, True, 3)],  # 1, 2 and 3 splits
)
def test_attention_equals_the_plain_one(slots: int, joined: bool, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ONE_SPLIT": 64, "SPLIT": 64, "BLOCK": 16}.items():
        monkeypatch.setattr(kernels, name, value)
    n_kv_heads, head_dim = 2, 16
    positions = torch.tensor([0, 16, 17, slots - 1])
    sizes = (group * n_kv_heads, n_kv_heads, n_kv_heads)
    heads = torch.randn(len(positions), sum(sizes), head_dim).split(sizes, 1)
    q, k, v = heads if joined else (part.contiguous() for part in heads)
    cos, sin = gathered(positions, head_dim)
    keys, values = (cache(positions, slots, n_kv_heads, head_dim) for _ in range(2))

    xq, xk = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    expected_keys, expected_values = keys.clone(), values.clone()
    rows = torch.arange(len(positions))
    expected_keys[rows, positions], expected_values[rows, positions] = xk, v
    seen = prepare_mask(positions[:, None], slots)
    expected = attend_masked(xq, expected_keys[:-1], expected_values[:-1], seen)

    output = kernels.attend_step(q, k, v, cos, sin, positions, keys[:-1], values[:-1])
    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(keys, expected_keys, **CLOSE, equal_nan=True)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)


@interpreted
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "tile"),
    [
        *((1, 128, 64, tile) for tile in TILES),
        *((5, 96, 70, tile) for tile in TILES[:2]),
        *((16, 32, 5, TILES[3]), (1, 160, 200, TILES[1]), (17, 64, 70, TILES[0])),
    ],
)
def test_products_equal_the_plain_ones(rows: int, in_features: int, out_features: int, tile: Any) -> None:
    x, first, second = (torch.randn(n, in_features) for n in (rows, out_features, out_features))
    residual = torch.randn(rows, out_features)
    plain, gate = F.linear(x, first), F.silu(F.linear(x, first)) * F.linear(x, second)
    torch.testing.assert_close(kernels.product(x, first, tile=tile), plain, **CLOSE)
    torch.testing.assert_close(kernels.product(x, first, tile=tile, residual=residual), plain + residual, **CLOSE)
    # A product of two such sums is off by the sum of their errors, each times the other number, of up to 50.
    torch.testing.assert_close(kernels.product(x, first, second, tile=tile, gated=True), gate, rtol=0, atol=1e-3)


@interpreted
@pytest.mark.parametrize(
    ("rows", "tile", "count"), [(1, TILES[0], 2), (5, TILES[1], 3), (16, TILES[2], 3), (1, TILES[3], 3)]
)
def test_products_of_several_weights_lie_side_by_side(rows: int, tile: Any, count: int) -> None:
    x, *weights = (torch.randn(n, 96) for n in (rows, 128, 64, 70)[: 1 + count])
    torch.testing.assert_close(kernels.product(x, *weights, tile=tile), F.linear(x, torch.cat(weights)), **CLOSE)


@interpreted
def test_rows_and_inputs_outside_a_product_are_not_read() -> None:
    x, weight = torch.full((6, 96), torch.nan), torch.full((80, 96), torch.nan)
    x[:5], weight[:70] = torch.randn(5, 96), torch.randn(70, 96)
    for tile in TILES[1:3]:
        expected = F.linear(x[:5], weight[:70])
        torch.testing.assert_close(kernels.product(x[:5], weight[:70], tile=tile), expected, **CLOSE)


def layer_inputs(rows: int, slots: int, dtype: torch.dtype, *more: str) -> tuple[Any, ...]:
    """Return the arguments of a layer of dim 64 with 4 heads of 16, 2 key heads, and a hidden size of 96.

    more: "biases" or "norms" of heads, as in models of Qwen.
    """
    sizes = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64), "wo": (64, 64)}
    weights = {f"attention.{name}.weight": torch.randn(size) / 8 for name, size in sizes.items()}
    sizes = {"w1": (96, 64), "w3": (96, 64), "w2": (64, 96)}
    weights |= {f"feed_forward.{name}.weight": torch.randn(size) / 8 for name, size in sizes.items()}
    weights |= {f"{name}_norm.weight": torch.rand(64) + 0.5 for name in ("attention", "ffn")}
    if "biases" in more:
        weights |= {name: torch.randn(len(weights[name.replace("bias", "weight")])) for name in kernels.BIASES}
    if "norms" in more:
        weights |= {name: torch.rand(16) + 0.5 for name in kernels.HEAD_NORMS}
    eps = {"attention_norm": 1e-5, "ffn_norm": 1e-3, "attention.q_norm": 0.1, "attention.k_norm": 0.3}
    positions = torch.tensor([0, 7, slots - 1]).repeat(6)[:rows]
    keys, values = (cache(positions, slots, 2, 16).to(dtype) for _ in range(2))
    own = LayerWeights({name: weight.to(dtype) for name, weight in weights.items()}, eps)
    cos_sin = RopeTable(rope_frequencies(16, 10_000.0)).up_to(slots, torch.device("cpu"))
    shared = shared_by_layers(PYTORCH.attention, positions[:, None], slots, *cos_sin)
    return torch.randn(rows, 64).to(dtype), own, shared, keys, values


@interpreted
@pytest.mark.parametrize(
    ("rows", "slots", "dtype", "atol", "more"),
    # float16: results of about 5, three roundings of 2**-11 each on the way.
    [
        (1, 20, torch.float16, 1e-2, ()),
        (2, 20, torch.float16, 1e-2, ("biases", "norms")),
        (3, 1100, torch.float32, 1e-4, ()),
        (3, 1100, torch.float32, 1e-4, ("norms",)),
        (3, 20, torch.float32, 1e-4, ("biases",)),
        (17, 20, torch.float32, 1e-4, ()),
        (17, 20, torch.float16, 1e-2, ("biases", "norms")),
    ],
)
def test_a_layer_and_the_head_equal_the_plain_ones(
    rows: int, slots: int, dtype: torch.dtype, atol: float, more: tuple[str, ...]
) -> None:
    ops = kernels.TRITON
    h, weights, shared, *cached = layer_inputs(rows, slots, dtype, *more)
    copies = [each.clone() for each in cached]
    expected = cached_layer(PYTORCH, h, weights, shared, *copies)
    made = ops.step(h, weights, shared, *cached)
    torch.testing.assert_close(made, expected, rtol=0, atol=atol)
    for ours, plain in zip(cached, copies, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=atol, equal_nan=True)
    last = weights.tensors["ffn_norm.weight"], 1e-5, torch.randn(70, 64).to(dtype)
    logits = ops.head(h, *last)
    torch.testing.assert_close(logits, graph_ops.head(h, *last), rtol=0, atol=3 * atol)
    assert torch.equal(logits, logits.to(dtype).float())  # rounded first, as the module's are


@interpreted
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_equal_the_plain_ones(rows: int) -> None:
    """With attention that both share: flash attention needs a GPU."""
    _, weights, *_ = layer_inputs(1, 20, torch.float32)
    positions = torch.arange(7).repeat(rows, 1)
    shared = shared_by_layers(PYTORCH.attention, positions, 7, *gathered(torch.arange(7), 16))
    given = torch.randn(rows * 7, 64), weights, shared, fresh
    own = kernels.TRITON._replace(attention=PYTORCH.attention)
    torch.testing.assert_close(layer(own, *given), layer(PYTORCH, *given), **CLOSE)


@interpreted
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_texts_by_all_kernels_together_are_those_of_the_plain_path(way: str) -> None:
    """Steps, prompts and choices of a model of Qwen's kind; only the attention of prompts is PyTorch's."""
    sizes = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128, "vocab_size": 2500}
    args = tiny_args(**sizes, n_layers=1, attention_bias=True, qk_norm=True, max_seq_len=64)
    plain, fast = (tiny_model(args, dtype=torch.float32).requires_grad_(False) for _ in range(2))
    fast.runner = GraphRunner(kernels.TRITON._replace(attention=WITH_PROMPTS.attention))
    prompts, how = [[5, 9, 2, 44, 1000], [7]], WAYS[way]
    assert fast.generate_tokens(prompts, 4, **how) == plain.generate_tokens(prompts, 4, **how)
    assert fast.runner.forwards == 4


# Compilation by Triton, which the interpreter leaves out. It needs no GPU.


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def llama_1b() -> None:
    """Launch a layer and the head in the shape of Llama 3.2 1B, in bfloat16, and its first product with biases."""
    rows, slots = 16, 4096
    sizes = {"wq": (2048, 2048), "wk": (512, 2048), "wv": (512, 2048), "wo": (2048, 2048)}
    tensors = {f"attention.{name}.weight": empty(*size) for name, size in sizes.items()}
    sizes = {"w1": (8192, 2048), "w3": (8192, 2048), "w2": (2048, 8192)}
    tensors |= {f"feed_forward.{name}.weight": empty(*size) for name, size in sizes.items()}
    tensors |= {f"{name}_norm.weight": empty(2048) for name in ("attention", "ffn")}
    weights = LayerWeights(tensors, {"attention_norm": 1e-5, "ffn_norm": 1e-5})
    assert kernels.serves(weights, 64)
    cos, sin = (empty(rows, 1, 64, dtype=torch.float32) for _ in range(2))
    shared = Shared(empty(rows, 1, dtype=torch.int64), (cos, sin), ())
    ops = kernels.TRITON
    h = ops.step(empty(rows, 2048), weights, shared, empty(rows, slots, 8, 64), empty(rows, slots, 8, 64))
    ops.head(h, empty(2048), 1e-5, empty(128_256, 2048))
    each = [tensors[f"attention.{name}.weight"] for name in ("wq", "wk", "wv")]
    kernels.product(h, *each, tile=kernels.TILES["wqkv"], biases=[empty(len(weight)) for weight in each])


def wide_heads() -> None:
    """Launch attention of heads of 128 in float16, with 8 queries a key, without norms of heads and with them."""
    q, k, norm = (empty(*size, dtype=torch.float16) for size in ((1, 64, 128), (1, 8, 128), (128,)))
    angle, keys = empty(1, 1, 128, dtype=torch.float32), empty(1, 8192, 8, 128, dtype=torch.float16)
    for norms in ([], [(norm, 1e-6)] * 2):
        kernels.attend_step(q, k, k, angle, angle, empty(1, dtype=torch.int64), keys, keys, norms)


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize(
    ("capability", "runs", "names"),
    # Others than Hopper: the kernels with most registers, and those with most shared memory, of which 8.9 has least.
    [
        (80, [wide_heads], ["_attend"]),
        (89, [llama_1b], ["_product"]),
        (90, [llama_1b, wide_heads], ["_attend", "_combine", "_product", "_norm"]),
    ],
)
def test_kernels_compile_without_spills(
    capability: int,
    runs: list[Callable[[], None]],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "shared_memory", lambda device: SHARED[capability] << 10)
    every = ["_attend", "_combine", "_product", "_norm"]
    for kernel, given, options in launches(monkeypatch, kernels, every, lambda: [run() for run in runs]):
        if kernel.__name__ not in names:
            continue
        ptx = machine_code(kernel, given, options, capability).ptx
        assert "atom." not in ptx  # no program adds to the sum of another
        assert "\tred." not in ptx
        if kernel.__name__ in ("_attend", "_product"):
            assert "cp.async.cg.shared.global" in ptx  # 16 bytes at a time
            assert "cp.async.ca" not in ptx
        if kernel.__name__ == "_product":
            values = dict(zip([each.name for each in kernel.params], given, strict=True))
            wgmma = capability == 90 and values["BLOCK_OUT"] >= 64
            sizes = [values[name] for name in ("BLOCK_OUT", "BLOCK_K", "PARTS")]
            tile = Tile(*sizes, options["num_stages"], options["num_warps"])
            assert capability != 90 or tile in kernels.TILES.values()  # Hopper has memory for all stages
            assert ("wgmma.mma_async.sync.aligned.m64n16k16" in ptx) == wgmma, given


def test_layers_are_served_with_all_biases_and_norms_of_heads_or_none() -> None:
    plain = {f"attention.{name}.weight": empty(64, 64) for name in ("wq", "wk", "wv", "wo")}
    plain |= {f"{name}.weight": empty(64, 64) for name in ("attention_norm", "ffn_norm")}
    plain |= {f"feed_forward.{name}.weight": empty(64, 64) for name in ("w1", "w2", "w3")}
    for more, served in [
        ((), True),
        (kernels.BIASES, True),
        (kernels.HEAD_NORMS, True),
        (kernels.BIASES + kernels.HEAD_NORMS, True),
        (kernels.BIASES[1:], False),
        (kernels.HEAD_NORMS[:1], False),
        (("attention.wo.bias",), False),
        (("post_norm.weight",), False),
    ]:
        assert kernels.serves(LayerWeights(plain | {name: empty(64) for name in more}, {}), 64) == served, more
    del plain["attention_norm.weight"]
    assert not kernels.serves(LayerWeights(plain, {}), 64)
