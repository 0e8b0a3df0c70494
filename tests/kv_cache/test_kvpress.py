"""Kinds that keep the keys with the highest scores keep the positions that kvpress keeps, in the same tiny models.

kvpress.json has kvpress' positions and logits; `scripts/kvpress_harness.py` made it, and says why not all kinds are in.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from references import hf_llama
from tables import cases
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache import Cache, KVCache
from llama.kv_cache.scored import ScoredCache
from llama.model import Transformer
from llama.testing import tiny_model

MODELS = json.loads((Path(__file__).parent / "kvpress.json").read_text(encoding="utf-8"))["models"]
RUNS = [(number, kind) for number, model in enumerate(MODELS) for kind in model["runs"]]


@functools.cache
def model_of(number: int) -> tuple[Transformer, Tensor]:
    """Return a tiny model and its tokens, (1, vocab_size), each once."""
    stored = MODELS[number]
    args, stream = ModelArgs(**stored["sizes"]), torch.Generator().manual_seed(stored["seed"])
    return tiny_model(args, seed=stored["seed"]), torch.randperm(args.vocab_size, generator=stream)[None]


def expected_positions(run: dict[str, Any]) -> list[list[list[int]]]:
    """Return the positions that kvpress keeps, by layer and KV head."""
    return [
        [[position for position in range(run["length"]) if int(head, 16) >> position & 1] for head in layer.split()]
        for layer in run["positions"]
    ]


def kept_positions(cache: Cache, row: int) -> list[list[list[int]]]:
    """Return the positions that our cache keeps of a row, by layer and KV head."""
    layers = []
    for state in cache.state():
        counts = state["counts"]
        heads = state["kept_positions"].split(counts.flatten().tolist())
        layers.append([head.tolist() for head in heads[row * counts.shape[1] :][: counts.shape[1]]])
    return layers


@torch.inference_mode()
@pytest.mark.parametrize(
    ("number", "kind"), [pytest.param(*run, marks=[pytest.mark.slow] * (run[0] > 0)) for run in RUNS]
)
def test_positions_and_next_logits_are_those_of_kvpress(number: int, kind: str) -> None:
    (model, tokens), run = model_of(number), MODELS[number]["runs"][kind]
    length, cache = run["length"], model.new_cache(kind)
    model(tokens[:, :length], cache=cache, logits="last")
    assert kept_positions(cache, 0) == expected_positions(run)
    logits = model(tokens[:, length : length + 1], length, cache=cache)[0, -1]
    expected = torch.tensor([float(logit) for logit in run["logits"].split()], dtype=torch.float64)
    torch.testing.assert_close(logits[: len(expected)], expected, rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", sorted(MODELS[0]["runs"])[1::2])  # each kind with the other share
def test_a_kind_in_a_model_of_transformers_keeps_the_positions_of_kvpress(kind: str) -> None:
    pytest.importorskip("transformers")
    from llama.kv_cache.transformers import KindCache  # takes seconds

    (model, tokens), run = model_of(0), MODELS[0]["runs"][kind]
    theirs = hf_llama(model)
    cache = KindCache(theirs, kind)
    theirs(tokens[:, : run["length"]], past_key_values=cache)
    assert kept_positions(cache.kinds, 0) == expected_positions(run)


@torch.inference_mode()
@pytest.mark.parametrize("number", cases(range(len(MODELS)), 0))
def test_steps_of_tova_have_the_logits_of_kvpress_with_a_budget_held_at_each_step(number: int) -> None:
    (model, tokens), run = model_of(number), MODELS[number]["steps"]
    prompt, cache = run["budget"], model.new_cache(f"tova:{run['budget']}")
    logits = model(tokens[:, :prompt], cache=cache)
    for at in range(prompt, prompt + run["count"]):
        logits = model(tokens[:, at : at + 1], at, cache=cache)
    expected = torch.tensor([float(logit) for logit in run["logits"].split()], dtype=torch.float64)
    torch.testing.assert_close(logits[0, -1, : len(expected)], expected, rtol=0, atol=1e-4)


def test_every_scored_kind_is_compared_or_has_no_counterpart() -> None:
    """`scripts/kvpress_harness.py` has the reasons."""
    ours = {
        name
        for name, kind in KVCache.kinds.items()
        if issubclass(kind, ScoredCache) and kind.__module__.startswith("llama.")
    }
    compared = {kind.partition(":")[0] for _, kind in RUNS}
    assert ours - compared == {"random", "h2o", "duo-attention"}
    assert compared <= ours


def test_adakv_leaves_each_head_a_fifth_of_the_mean_budget() -> None:
    """kvpress does, too, but no head has so few in the positions above."""
    cache = KVCache.of(ModelArgs(**MODELS[0]["sizes"], kv_cache="adakv"))
    assert isinstance(cache, ScoredCache)
    scores = torch.rand(2, 100, generator=torch.Generator().manual_seed(0)) + torch.tensor([[1.0], [0.0]])
    kept = cache.choose(scores, 50)
    assert kept.sum(1).tolist() == [90, 10]
    assert scores[1][kept[1]].min() > scores[1][~kept[1]].max()
