"""ModelArgs reads Meta's params.json as Meta's code does, and names the values that it rejects."""

import math
from dataclasses import FrozenInstanceError, asdict, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import unrefused

from llama.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling

# The params.json of the released models.
COMMON: dict[str, Any] = {"vocab_size": 128256, "norm_eps": 1e-05, "rope_theta": 500000.0}
SIZES: dict[str, dict[str, Any]] = {
    "3.2 1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "3.2 3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256},
    "3 8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "3 70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
    "3.1 405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
}
SCALED = {"3.2 1B": True, "3.2 3B": True, "3.1 405B": True}


def released(name: str) -> ModelArgs:
    scaled = {"use_scaled_rope": True} if name in SCALED else {}
    return ModelArgs(**COMMON, **SIZES[name], n_kv_heads=8, **scaled)


@pytest.mark.parametrize(
    ("name", "ffn_dim", "head_dim"),
    [
        ("3.2 1B", 8192, 64),
        ("3.2 3B", 8192, 128),
        ("3 8B", 14336, 128),
        ("3 70B", 28672, 128),
        ("3.1 405B", 53248, 128),
    ],
)
def test_released_params_give_the_released_widths(name: str, ffn_dim: int, head_dim: int) -> None:
    """Catches bug 30: the order of the two roundings and of the multiplication."""
    args = released(name)
    assert (args.ffn_dim, args.head_dim, args.n_kv_heads) == (ffn_dim, head_dim, 8)


@pytest.mark.parametrize(
    ("name", "factor"), [("3.2 1B", 32), ("3.2 3B", 32), ("3 8B", None), ("3 70B", None), ("3.1 405B", 8)]
)
def test_scaled_rope_means_32_for_the_small_models_and_8_for_the_others(name: str, factor: float | None) -> None:
    """Catches bugs 5 and 6: 8 for all, and scaling Llama 3.0, which has none."""
    scaling = None if factor is None else RopeScaling(factor, low_freq_factor=1, high_freq_factor=4)
    assert released(name).rope_scaling == scaling
    assert scaling is None or scaling.original_max_seq_len == 8192


def test_stated_scaling_wins_over_metas_switch() -> None:
    stated = RopeScaling(factor=3.0)
    assert ModelArgs(use_scaled_rope=True, rope_scaling=stated).rope_scaling is stated


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(1, 64), st.one_of(st.none(), st.floats(0.1, 4)))
def test_ffn_width_is_the_next_multiple(heads: int, multiple_of: int, multiplier: float | None) -> None:
    args = ModelArgs(dim=8 * heads, n_heads=heads, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    least = int(2 * 4 * args.dim / 3)
    least = least if multiplier is None else int(multiplier * least)
    assert args.ffn_dim % multiple_of == 0
    assert args.ffn_dim - multiple_of < least <= args.ffn_dim


def test_stated_sizes_are_kept() -> None:
    args = ModelArgs(dim=576, n_heads=9, n_kv_heads=3, head_dim=32, ffn_dim=1000)
    assert (args.n_kv_heads, args.head_dim, args.ffn_dim) == (3, 32, 1000)
    assert ModelArgs(dim=10, n_heads=4, head_dim=2).head_dim == 2  # then dim need not be a multiple of n_heads


def test_limits_and_switch_default_to_the_promised_values() -> None:
    args = ModelArgs()
    assert (args.max_batch_size, args.max_seq_len) == (None, 2048)
    assert (args.kv_caching, args.kv_cache, args.tied_head) == (True, "static", False)


def test_unknown_key_is_refused_by_name() -> None:
    """A new key in params.json must not be ignored: deleting it gives a wrong model."""
    with pytest.raises(TypeError, match="use_sliding_window"):
        ModelArgs(**COMMON, use_sliding_window=True)


NAN, INF = float("nan"), float("inf")
BAD: list[dict[str, Any]] = [
    *({name: value} for name in ("dim", "n_layers", "n_heads", "n_kv_heads") for value in (0, -1, 2.0, "8", True)),
    *({name: value} for name in ("head_dim", "ffn_dim", "multiple_of") for value in (0, -2, 4.0, "8", False)),
    *({name: value} for name in ("max_seq_len", "max_batch_size") for value in (0, -1, 1.5, "8", True)),
    *({"dim": None}, {"max_seq_len": None}, {"norm_eps": None}, {"kv_caching": None}),
    *({"vocab_size": value} for value in (0, -2, 1.0)),
    *(
        {name: value}
        for name in ("norm_eps", "rope_theta", "ffn_dim_multiplier")
        for value in (0, -1.0, NAN, INF, "1", True)
    ),
    *({"dim": 30, "n_heads": 4}, {"n_heads": 32, "n_kv_heads": 5}, {"n_heads": 4, "n_kv_heads": 8}, {"head_dim": 7}),
    {"ffn_dim_multiplier": 1e-9},
    *({"rope_scaling": value} for value in ({"factor": 8.0}, [1.0] * 64, (1.0,) * 63, (0.0,) * 64, (NAN,) * 64)),
    {"rope_scaling": ("1",) * 64},
    *({"kv_caching": "False"}, {"tied_head": "no"}, {"use_scaled_rope": 0.5}),
]


def test_bad_values_are_refused_by_name() -> None:
    named = [("ffn_dim" if "ffn_dim_multiplier" in given else next(iter(given)), given) for given in BAD]
    assert unrefused((partial(ModelArgs, **given), name) for name, given in named) == []


def test_bad_scaling_is_refused_by_name() -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
    values: list[Any] = [0, -1.0, NAN, INF, "8", None, True]
    assert unrefused((partial(RopeScaling, **{name: value}), name) for name in names for value in values) == []
    tiny = partial(ModelArgs, dim=8, n_heads=2)
    others = [
        (
            lambda: RopeScaling(high_freq_factor=1.0),
            "high_freq_factor=1.0 must be above low_freq_factor=1.0",
        ),
        (lambda: LinearScaling(0), "factor=0 must be a finite number above 0"),
        (lambda: LinearScaling(2.0, NAN), "attention_factor=nan"),
        (lambda: YarnScaling(4.0, 0), "original_max_seq_len=0"),
        (lambda: YarnScaling(4.0, 32, attention_factor=0.0), "attention_factor=0.0"),
        (lambda: YarnScaling(4.0, 32, beta_fast=1.0), "beta_fast=1.0 must be above beta_slow=1.0"),
        (lambda: YarnScaling(4.0, 32, truncate="no"), "truncate='no' must be True or False"),
        (lambda: tiny(rope_scaling=YarnScaling(4.0, 32), rope_theta=1.0), "must be above 1 for YaRN"),
        (lambda: tiny(rope_scaling=4.0), "must be a RopeScaling, LinearScaling, YarnScaling"),
        (lambda: tiny(qk_norm=1), "qk_norm=1 must be True or False"),
        (lambda: ModelArgs(rope_theta=None, rope_scaling=LinearScaling(2.0)), "which rope_theta=None switches off"),
        (lambda: ModelArgs(rope_theta=None, use_scaled_rope=True), "leave out rope_scaling and use_scaled_rope"),
    ]
    assert unrefused(others) == []


def test_args_are_frozen_and_can_be_replaced() -> None:
    args = ModelArgs(dim=64, n_heads=4)
    with pytest.raises(FrozenInstanceError):
        args.dim = 128  # type: ignore[misc]
    assert replace(args, max_seq_len=7).max_seq_len == 7
    assert ModelArgs(**asdict(args)) == args
    assert hash(replace(args)) == hash(args)


def test_a_share_has_the_heads_hidden_numbers_and_words_of_one_rank() -> None:
    args = ModelArgs(dim=64, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=40)
    half, quarter = args.share(2), args.share(4)
    assert (half.n_heads, half.n_kv_heads, half.ffn_dim, half.vocab_size) == (4, 1, 48, 20)
    assert (quarter.n_heads, quarter.n_kv_heads, quarter.ffn_dim, quarter.vocab_size) == (2, 1, 24, 10)
    assert (quarter.dim, quarter.head_dim) == (64, 8)
    assert args.share(1) == args


def test_a_model_that_cannot_be_divided_names_the_possible_ranks() -> None:
    small = {"n_heads": 9, "n_kv_heads": 3, "dim": 576, "ffn_dim": 1536, "vocab_size": 49152}
    twelve = {"n_heads": 12, "n_kv_heads": 4, "dim": 48, "ffn_dim": 48, "vocab_size": 48}
    odd = {"n_heads": 8, "dim": 64, "ffn_dim": 96, "vocab_size": 41}
    table = [(small, 2, "1 or 3 can"), (twelve, 3, "1 or 2 or 4 or 12 can"), (odd, 2, "; 1 can")]
    assert unrefused((partial(ModelArgs(**sizes).share, ranks), fits) for sizes, ranks, fits in table) == []


def test_yarn_sharpens_attention_by_the_logarithm_of_its_factor() -> None:
    """Source: section 3.4 of https://arxiv.org/abs/2309.00071."""
    assert YarnScaling(1.0, 32).attention_factor == 1.0
    assert YarnScaling(16.0, 32).attention_factor == pytest.approx(1 + 0.1 * math.log(16))
    assert YarnScaling(16.0, 32, attention_factor=2.0).attention_factor == 2.0
