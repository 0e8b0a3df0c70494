"""A fast model that is trained in part, the rest of it frozen, gets its gradients from the plain path.

Whether the fast step may serve a forward is a question to each parameter and to the grad mode, at every forward.
"""

import copy
import shutil

import pytest
import torch
from oracles import some_tokens, tiny_args, tiny_model
from torch import Tensor

from llama.fast.choose import make_fast
from llama.host.files import cache_dir
from llama.model import Transformer

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler, so there is no native code"
)
# Sizes that the native code computes.
ARGS = tiny_args(dim=64, n_heads=2, n_kv_heads=1, multiple_of=32, kv_caching=False)
TOKENS = some_tokens(2, 6)
# The first that the forward meets, the last, and one of each kind between them.
TRAINED = [
    "tok_embeddings.weight",
    "layers.0.attention_norm.weight",
    "layers.0.attention.wk.weight",
    "layers.1.feed_forward.w2.weight",
    "norm.weight",
    "output.weight",
]


@pytest.fixture
def plain() -> Transformer:
    return tiny_model(ARGS, dtype=torch.float32).requires_grad_(False)


@pytest.fixture
def fast(plain: Transformer) -> Transformer:
    model = copy.deepcopy(plain)
    make_fast(model, cache_dir() / "native")  # where the library is compiled once for all
    assert model.runner is not None
    return model


def served(model: Transformer) -> int:
    assert model.runner is not None
    return model.runner.forwards


def gradients(model: Transformer) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS).square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", TRAINED)
def test_one_trained_weight_among_frozen_ones_gets_its_gradient(
    name: str, plain: Transformer, fast: Transformer
) -> None:
    for model in (plain, fast):
        model.get_parameter(name).requires_grad_(True)
    expected, found = gradients(plain), gradients(fast)
    assert found.keys() == expected.keys() == {name}
    assert torch.equal(found[name], expected[name])
    assert served(fast) == 0


@pytest.mark.parametrize("name", TRAINED)
def test_one_frozen_weight_among_trained_ones_takes_no_gradient_from_the_others(
    name: str, plain: Transformer, fast: Transformer
) -> None:
    for model in (plain, fast):
        model.requires_grad_(True).get_parameter(name).requires_grad_(False)
    expected, found = gradients(plain), gradients(fast)
    assert found.keys() == expected.keys() == {other for other, _ in plain.named_parameters()} - {name}
    assert all(torch.equal(found[other], expected[other]) for other in expected)
    assert served(fast) == 0


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_a_partly_frozen_model_is_fast(off: type, fast: Transformer) -> None:
    fast.norm.weight.requires_grad_(True)
    with off():
        fast(TOKENS)
    assert served(fast) == 1


def test_a_weight_may_be_thawed_and_frozen_again_between_two_forwards(plain: Transformer, fast: Transformer) -> None:
    frozen = fast(TOKENS)
    assert served(fast) == 1
    assert not frozen.requires_grad
    for model in (plain, fast):
        model.output.weight.requires_grad_(True)
    assert torch.equal(gradients(fast)["output.weight"], gradients(plain)["output.weight"])
    assert served(fast) == 1
    fast.output.weight.requires_grad_(False)
    assert torch.equal(fast(TOKENS), frozen)
    assert served(fast) == 2


def test_with_the_cache_on_gradients_of_a_fast_model_are_refused_as_of_a_plain_one(fast: Transformer) -> None:
    fast.kv_caching = True
    fast.get_parameter("layers.0.ffn_norm.weight").requires_grad_(True)  # on which the keys of layer 1 depend
    with pytest.raises(ValueError, match="gradients cannot flow through the KV cache"):
        fast(TOKENS)
    assert served(fast) == 0
