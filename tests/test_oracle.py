"""The model is Llama as in the papers: without a cache it gives the numbers of a page of NumPy loops.

The page is tests/support/oracle_numpy.py. It shares no code with the package, and is itself compared with transformers.
checkpoint/test_checkpoint.py and test_families.py compare the model with llama.cpp, and verify/test_certificate.py the
cached runs with the uncached one.

Angles, cos and sin are float32 in the model, as in Meta's code and in transformers. Rounding them in the oracle would
not make the two equal, because libraries differ in the last bit of a float32 power, cos and sin. So the rotations are
compared separately, with a bound that follows from the roundings. Everything else is compared strictly: the oracle then
uses the rotations of the other program.
"""

import ast
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import oracle_numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import hf_llama
from tiny import FP64_TOLERANCE, some_tokens, tiny_model
from torch import Tensor

from llama.args import ModelArgs, RopeScaling
from llama.model import Transformer

LONGEST = 12  # positions: the oracle's loops take quadratic time
CPU = torch.device("cpu")

# Logits are about 5. With the same rotations in both, 38,000 comparisons of drawn models differed by at most 3e-12, and
# FP64_TOLERANCE is 1e-10. With exact angles in the oracle, a drawn model differed by 5e-4, because some models magnify
# roundings; so only SHAPES are compared that way, which differ by at most 2e-6.
ANGLES_TOLERANCE = 2e-5

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_head": True},
    "wide heads": {"head_dim": 16, "n_kv_heads": 1},
    "scaled": {"rope_scaling": RopeScaling(original_max_seq_len=16)},
    "divisors": {"rope_scaling": (1.0, 2.0, 4.0, 8.0)},
}

Weights = dict[str, np.ndarray]


@st.composite
def configurations(draw: st.DrawFn, *, for_transformers: bool = False) -> ModelArgs:
    """Draw the sizes of a small Llama of any shape, or of any shape that transformers supports."""
    n_heads, head_dim = draw(st.integers(1, 8)), 2 * draw(st.integers(1, 8))
    low, high = draw(st.sampled_from([(1.0, 4.0), (2.0, 8.0), (1.0, 2.5)]))
    rule = RopeScaling(
        factor=draw(st.sampled_from([2.0, 8.0, 32.0])),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_seq_len=draw(st.sampled_from([4, 16, 64, 8192])),
    )
    one_each = draw(st.lists(st.floats(0.5, 32, width=32), min_size=head_dim // 2, max_size=head_dim // 2))
    return ModelArgs(
        dim=n_heads * draw(st.integers(1, 4)) if for_transformers else draw(st.integers(1, 32)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=n_heads,
        n_kv_heads=draw(st.sampled_from([n for n in range(1, n_heads + 1) if n_heads % n == 0])),
        head_dim=head_dim,
        vocab_size=draw(st.integers(3, 60)),
        multiple_of=draw(st.sampled_from([1, 8, 24])),
        ffn_dim_multiplier=draw(st.sampled_from([None, 0.5, 1.3])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([100.0, 10000.0, 500000.0])),
        rope_scaling=draw(st.sampled_from([None, rule] if for_transformers else [None, rule, tuple(one_each)])),
        tied_head=draw(st.booleans()),
        max_seq_len=2 * LONGEST,
    )


lengths = st.integers(1, LONGEST)


def weights_of(model: Transformer) -> Weights:
    """Return the weights as in Meta's files, without a tied head."""
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    if model.args.tied_head:
        del state["output.weight"]
    return state


def sizes_of(args: ModelArgs) -> dict[str, Any]:
    """Return the arguments of the oracle that weights do not determine."""
    scaling = asdict(args.rope_scaling) if isinstance(args.rope_scaling, RopeScaling) else args.rope_scaling
    told = {name: getattr(args, name) for name in ("n_heads", "n_kv_heads", "norm_eps", "rope_theta")}
    return {**told, "rope_scaling": scaling}


def oracle(model: Transformer, ids: Tensor | Sequence[int], rotations: np.ndarray | None = None) -> Tensor:
    """Return the oracle's logits of one row of ids, (seqlen, vocab), with exact angles or with these rotations."""
    row = [int(id) for id in ids]
    rotations = None if rotations is None else rotations[: len(row)]
    made = oracle_numpy.logits(weights_of(model), row, **sizes_of(model.args), rotations=rotations)
    return torch.from_numpy(made)


def rotations_of(model: Transformer) -> np.ndarray:
    """Return the model's rotation of each pair at each position, (max_seq_len, head_dim / 2) complex."""
    cos, sin = model.rope.at([0], model.args.max_seq_len, CPU)  # (1, max_seq_len, 1, head_dim)
    return torch.complex(cos.double(), sin.double())[0, :, 0, 1::2].numpy()


def assert_angles_are_the_oracles(rotations: np.ndarray, args: ModelArgs) -> None:
    """Compare float32 rotations, (seqlen, head_dim / 2), with exact ones.

    The product of frequency and position is rounded, then cos and sin, of which libraries may miss the last bit.
    """
    exact, off = exact_frequencies(args)
    for position, turn in enumerate(rotations):
        allowed = position * off + 2**-22
        assert (abs(turn - oracle_numpy.rotation(position, exact)) <= allowed).all()


def exact_frequencies(args: ModelArgs) -> tuple[np.ndarray, np.ndarray]:
    """Return the angles per position, (head_dim / 2,), and the largest error of float32.

    In units of 2^-24 of the frequency before scaling: ln(theta) for the rounded exponent, and 3 for the power and a
    division. The place in the blended band adds 4 roundings, and the division by the band's width multiplies all that
    by up to 3, if high_freq_factor is at least 1.5 low_freq_factor. The blend adds 5. A divisor below one increases
    the frequency and its roundings.
    """
    plain = np.array(oracle_numpy.frequencies(args.head_dim, args.rope_theta))
    exact = np.array(oracle_numpy.frequencies(args.head_dim, args.rope_theta, sizes_of(args)["rope_scaling"]))
    return exact, (30 + 4 * math.log(args.rope_theta)) * 2**-24 * np.maximum(plain, exact)


def assert_equal(made: Tensor, expected: Tensor, atol: float = FP64_TOLERANCE) -> None:
    torch.testing.assert_close(made, expected, rtol=0, atol=atol)


# ---- the oracle ------------------------------------------------------------------------------------------------------


def test_the_oracle_is_a_page_that_imports_numpy_alone() -> None:
    source = Path(oracle_numpy.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 120
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {f"{'.' * node.level}{node.module or ''}" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported == {"math", "numpy", "collections.abc"}  # the last for annotations
    assert not {"__import__", "importlib", "exec", "eval"} & {getattr(node, "id", "") for node in nodes}


@settings(max_examples=20)
@given(configurations(for_transformers=True), lengths)
def test_the_oracle_gives_the_logits_of_transformers(args: ModelArgs, length: int) -> None:
    model, ids = tiny_model(args), some_tokens(1, length, vocab_size=args.vocab_size)
    hf = hf_llama(model)
    with torch.no_grad():
        made = hf(ids, use_cache=False).logits[0]
        cos, sin = hf.model.rotary_emb(made, torch.arange(length)[None])  # (1, seqlen, head_dim), its pairs twice over
    rotations = torch.complex(cos, sin)[0, :, : args.head_dim // 2].numpy()
    assert_angles_are_the_oracles(rotations, args)
    assert_equal(made, oracle(model, ids[0], rotations))


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_equal_the_oracles_with_exact_angles(changes: dict[str, Any]) -> None:
    """End to end: the oracle gets only the weights from us."""
    model, ids = tiny_model(kv_caching=False, **changes), some_tokens(1, LONGEST)
    with torch.inference_mode():
        assert_equal(model(ids)[0], oracle(model, ids[0]), ANGLES_TOLERANCE)


@settings(max_examples=40)
@given(configurations(), lengths, st.integers(0, 99))
def test_logits_equal_the_oracles_in_one_pass_without_a_cache(args: ModelArgs, length: int, seed: int) -> None:
    """Catches bugs 2, 4, 6 and 7, even if transformers had the same ones."""
    model, ids = tiny_model(args), some_tokens(1, length, vocab_size=args.vocab_size, seed=seed)
    model.kv_caching = False
    with torch.inference_mode():
        (made,) = model(ids)
    assert_angles_are_the_oracles(rotations_of(model), args)
    assert_equal(made, oracle(model, ids[0], rotations_of(model)))
