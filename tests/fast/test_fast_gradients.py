"""A fast model of which a part is trained, and the rest is frozen, gets its gradients from the plain path.

At every forward, each parameter and the grad mode decide whether native code runs it.
"""

import pytest
import torch
from native import needs_a_compiler, served, twins
from tiny import some_tokens, tiny_args
from torch import Tensor

from llama.model import Transformer

pytestmark = needs_a_compiler
ARGS = tiny_args(dim=64, n_heads=2, n_kv_heads=1, multiple_of=32, kv_caching=False)
TOKENS = some_tokens(2, 6)


@pytest.fixture
def pair() -> tuple[Transformer, Transformer]:
    return twins("fp32", ARGS)


def gradients(model: Transformer) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS).square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "name", ["tok_embeddings.weight", "layers.0.attention.wk.weight", "layers.1.ffn_norm.weight", "output.weight"]
)
def test_one_trained_or_one_frozen_weight_of_all(
    name: str, trained: bool, pair: tuple[Transformer, Transformer]
) -> None:
    for model in pair:
        model.requires_grad_(not trained).get_parameter(name).requires_grad_(trained)
    expected, found = map(gradients, pair)
    assert found.keys() == expected.keys()
    assert (name in found) == trained
    assert all(torch.equal(found[other], expected[other]) for other in expected)
    assert served(pair[1]) == 0


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_partly_frozen_model_is_fast(off: type, pair: tuple[Transformer, Transformer]) -> None:
    fast = pair[1]
    fast.norm.weight.requires_grad_(True)
    with off():
        fast(TOKENS)
    assert served(fast) == 1


def test_a_weight_may_be_thawed_and_frozen_again_between_two_forwards(pair: tuple[Transformer, Transformer]) -> None:
    plain, fast = pair
    frozen = fast(TOKENS)
    assert served(fast) == 1
    assert not frozen.requires_grad
    for model in pair:
        model.output.weight.requires_grad_(True)
    assert torch.equal(gradients(fast)["output.weight"], gradients(plain)["output.weight"])
    assert served(fast) == 1
    fast.output.weight.requires_grad_(False)
    assert torch.equal(fast(TOKENS), frozen)
    assert served(fast) == 2


def test_with_the_cache_on_gradients_raise_the_error_of_the_plain_path(pair: tuple[Transformer, Transformer]) -> None:
    fast = pair[1]
    fast.kv_caching = True
    fast.get_parameter("layers.0.ffn_norm.weight").requires_grad_(True)  # the keys of layer 1 depend on it
    with pytest.raises(ValueError, match="gradients cannot flow through the KV cache"):
        fast(TOKENS)
    assert served(fast) == 0
