"""Kinds of cache in models of transformers: the logits of transformers' own cache, and the contents of this library's.

Models are tiny, random and in float64. Their norms and the softmax of Gemma 2 have lost a cast to float32, which would
hide differences below 1e-7.
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from crossings import kinds
from families import SCALINGS
from references import hf_llama
from tables import table
from tiny import failing, some_tokens, tiny_model
from torch import Tensor, nn

pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, DynamicCache

from llama.kv_cache import ScoredCache
from llama.kv_cache.transformers import FAMILIES, KindCache
from llama.rows import Rows
from llama.testing import reads

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "layer_types": ["full_attention"] * 2},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"attention_multiplier": 0.3},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 16},
}
YARN = "yarn with all its words"
MASK = torch.tensor([[0] * 5 + [1] * 11, [1] * 16])  # a prompt of 11 tokens, padded on the left, and one of 16
PROMPTS = some_tokens(2, 16) * MASK
NEXT = some_tokens(2, 12, seed=1)  # four steps, a turn of a chat, three steps


def model_of(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | OWN.get(family, {}) | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(("norm" in name) + 0.3 * torch.randn_like(parameter))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and dtype == torch.float64:
            module.forward = functools.partial(wide_norm, module, "gemma" in family)
    if family in ("mixtral", "olmoe") or "moe" in family:
        model.set_experts_implementation("eager")  # the default one has no float64
    return model.to(dtype).eval()


def wide_norm(module: Any, plus: bool, x: Tensor) -> Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return (module.weight + plus) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def softmax_in_float64(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float, **given: Any
) -> tuple[Tensor, Tensor]:
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores, cap = query @ key.mT * scaling, given.get("softcap")
    scores = scores if cap is None else cap * (scores / cap).tanh()
    mask = (
        scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None and scores.shape[-2] > 1 else mask
    )
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("float64", softmax_in_float64)
AttentionMaskInterface.register("float64", AttentionMaskInterface()["sdpa"])


def in_float64(model: Any, compute: Callable[[], Any]) -> Any:
    """Return what a model computes with an attention of its own here."""
    own = model.config._attn_implementation
    model.set_attn_implementation("float64")
    made = compute()
    model.set_attn_implementation(own)
    return made


def pairs(heads: Tensor) -> Tensor:
    """Return heads of 8 numbers with the pairs of RoPE as neighbours."""
    return heads[..., [0, 4, 1, 5, 2, 6, 3, 7]]


@torch.inference_mode()
def logits_of(model: Any, cache: Any, prompts: Tensor = PROMPTS, mask: Tensor = MASK) -> Tensor:
    """Return the logits of the tokens of two prompts, four steps, five tokens and three steps: (tokens, vocab)."""
    made, fed = [], torch.cat([prompts, NEXT], dim=1)
    mask = torch.cat([mask, torch.ones_like(NEXT)], dim=1)
    places, length = mask.cumsum(1) - 1, prompts.shape[1]
    edges = [0, *range(length, length + 5), *range(length + 9, fed.shape[1] + 1)]
    for begin, end in pairwise(edges):
        new = slice(begin, end)
        given = {"attention_mask": mask[:, :end], "position_ids": places[:, new].clamp(min=0)}
        logits = model(fed[:, new], past_key_values=cache, **given).logits
        made.append(logits[mask[:, new].bool()])
    return torch.cat(made)


# ---- the logits of transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_static_has_the_logits_of_transformers_own_cache(family: str) -> None:
    model = model_of(family)
    expected = in_float64(model, lambda: logits_of(model, DynamicCache(config=model.config)))
    cache = KindCache(model, rows=2, length=28)
    assert float((logits_of(model, cache) - expected).abs().max()) < 1e-12 < 1 < float(expected.abs().max())
    assert cache.get_seq_length() == 28
    lengths = [5, 28] if family == "gemma3_text" else [28, 28]  # a window of 6 stores 5 positions
    assert cache.nbytes == 2 * 2 * 2 * 8 * 8 * sum(lengths), "2 rows, 2 KV heads, keys and values of 8 numbers"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "scaling"),
    [*((family, "") for family in FAMILIES), *(("llama", name) for name in ("linear", "llama3", YARN))],
)
def test_keys_before_rope_are_those_of_the_projection(family: str, scaling: str) -> None:
    """`window` stores keys before RoPE. transformers passes rotated ones, so they are rotated back."""
    rope = {"rope_type": scaling.partition(" ")[0], "rope_theta": 1e4, **SCALINGS.get(scaling, {})}
    model, seen = model_of(family, **({"rope_parameters": rope} if scaling else {})), []
    attention = model.model.layers[1].self_attn
    last = next(getattr(attention, name) for name in ("k_norm", "k_proj", "qkv_proj") if hasattr(attention, name))
    last.register_forward_hook(lambda _, __, output: seen.append(output))
    cache = KindCache(model, "window")
    model(PROMPTS[1:], past_key_values=cache)
    keys = seen[0].transpose(1, 2) if seen[0].shape[1] == 2 else seen[0]  # Gemma 3 norms (1, n_kv_heads, 16, head_dim)
    keys = keys.flatten(2)[0, :, -32:][:, :16]  # of Phi-3's projection, which has values, too
    torch.testing.assert_close(cache.kinds.layers[1].keys[0], pairs(keys.unflatten(-1, (2, 8))), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_in_16_bits_keys_and_values_are_stored_as_transformers_computes_them() -> None:
    model, own = model_of("llama", torch.bfloat16), DynamicCache()
    static, window = KindCache(model), KindCache(model, "window")
    for cache in (own, static, window):
        model(PROMPTS[1:], past_key_values=cache)
    assert torch.equal(static.kinds.layers[0].keys, pairs(own.layers[0].keys.transpose(1, 2)))
    assert torch.equal(static.kinds.layers[0].values, own.layers[0].values.transpose(1, 2))
    layer = model.model.layers[0]
    keys = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(PROMPTS[1:])))
    before, rounding = pairs(keys.unflatten(-1, (2, 8))), 2**-7 * float(keys.abs().max())
    torch.testing.assert_close(window.kinds.layers[0].keys, before, rtol=0, atol=rounding)


def test_generate_draws_the_same_tokens_as_with_transformers_own_cache() -> None:
    model, made = model_of("llama", eos_token_id=None), []
    asked = {"attention_mask": MASK, "do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2}
    for cache in (None, KindCache(model)):
        torch.manual_seed(0)
        made.append(model.generate(PROMPTS, past_key_values=cache, **asked))
    assert torch.equal(*made)
    assert len({tuple(row) for row in made[0].tolist()}) == 4


def test_a_second_prompt_in_the_same_cache_is_stored_behind_the_first_and_not_compressed() -> None:
    model = model_of("llama", eos_token_id=None)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    for kind, least in (("static", 0), ("knorm:5", 5)):
        cache = KindCache(model, kind)
        text = torch.cat([model.generate(PROMPTS, attention_mask=MASK, past_key_values=cache, **asked), NEXT], dim=1)
        mask = torch.cat([MASK, torch.ones(2, 16, dtype=MASK.dtype)], dim=1)
        made = model.generate(text, attention_mask=mask, past_key_values=cache, **asked)
        assert cache.get_seq_length() == 35
        if not least:
            assert torch.equal(made, model.generate(text, attention_mask=mask, **asked))
    state = cache.kinds.layers[0].state()
    assert state["counts"].tolist() == [[5, 5]] * 2
    assert (state["ends"] - state["bases"]).tolist() == [35 - 16] * 2


# ---- the contents of this library's caches ---------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kind", kinds())
def test_every_kind_stores_what_it_stores_in_this_library(kind: str) -> None:
    """Prompts of 140 and 300 tokens, padded on the left there and on the right here, and what `logits_of` feeds."""
    ours, lengths = tiny_model(max_seq_len=700).requires_grad_(False), [140, 300]
    theirs = hf_llama(ours)
    prompts, mask = some_tokens(2, 300), (torch.arange(300) >= torch.tensor([[160], [0]])).long()
    there, here = KindCache(theirs, kind, max_seq_len=700), ours.new_cache(kind)
    found = logits_of(theirs, there, prompts * mask, mask)
    right = torch.stack([prompts[row].roll(length - 300) for row, length in enumerate(lengths)])
    logits = ours(right, Rows.at([0, 0], lengths, prompt_ends=True), cache=here)
    expected = [logits[row, :length] for row, length in enumerate(lengths)]
    for begin, end in pairwise([0, 1, 2, 3, 4, 9, 10, 11, 12]):
        rows = Rows.at([length + begin for length in lengths], [end - begin] * 2)
        expected.append(ours(NEXT[:, begin:end], rows, cache=here).flatten(0, 1))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    for own, held in zip(there.kinds.layers, here.layers, strict=True):
        assert own.nbytes == held.nbytes
        for row in range(2):
            read = (reads(one, [152, 312], row, positions=True) for one in (own, held))
            for mine, same in zip(*read, strict=True):
                assert torch.equal(mine[:, -1], same[:, -1]), "positions"
                torch.testing.assert_close(mine, same, rtol=0, atol=1e-5)


class Watcher(ScoredCache, kind="watcher"):
    """Keeps the attention of the last 4 queries of a prompt, as a kind sees it, and which calls end a prompt."""

    def observe(self, attended: Any) -> None:
        self.ended = [*getattr(self, "ended", ()), attended.rows.prompt_ends]
        super().observe(attended)

    def score(self, attended: Any) -> Tensor:
        self.saw = attended.attention(4)
        return attended.received().unflatten(0, (self.args.n_kv_heads, -1)).mean(1)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3"])
def test_a_kind_observes_the_attention_of_the_model_with_its_scaling_and_its_soft_cap(family: str) -> None:
    model = model_of(family)
    expected = in_float64(model, lambda: model(PROMPTS[1:], output_attentions=True).attentions)
    cache = KindCache(model, "watcher")
    for fed in (PROMPTS[1:], NEXT[1:]):
        model(fed, past_key_values=cache)
    for layer, weights in zip(cache.kinds.layers, expected, strict=True):
        torch.testing.assert_close(layer.saw, weights[0, :, -4:], rtol=0, atol=1e-12)
        assert layer.ended == [True, False]


# ---- what else the model does, and what is refused -------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_cache_of_the_model_and_none_compute_as_before(attention: str) -> None:
    model = model_of("llama", torch.float32, attn_implementation=attention)
    before = [logits_of(model, DynamicCache()), model(PROMPTS, attention_mask=MASK).logits]
    logits_of(model, KindCache(model, "snapkv:0.25"))
    after = [logits_of(model, DynamicCache()), model(PROMPTS, attention_mask=MASK).logits]
    assert all(map(torch.equal, before, after))


SHARED = {
    "vocab_size_per_layer_input": 40,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 1,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@table(
    "family, changes, kind, message",
    [
        ("gpt_oss", {"num_local_experts": 2}, "static", "model_type='gpt_oss': KindCache serves gemma, "),  # sinks
        ("cohere", {}, "static", "model_type='cohere': KindCache serves"),  # its pairs of RoPE are neighbours
        ("gemma3n_text", SHARED, "static", "model_type='gemma3n_text': KindCache serves"),  # layers share keys
        ("mistral", {"sliding_window": 8}, "static", "kv_cache='static': all layers have a window; set sliding_window"),
        ("llama", {"rope_parameters": DYNAMIC}, "static", "rope_parameters=.*'dynamic'.*: KindCache serves whole"),
        ("phi3", {"rope_parameters": PARTIAL}, "static", "rope_parameters=.*0.5.*: KindCache serves whole heads"),
        ("llama", {"attn_implementation": "flex_attention"}, "static", "attn_implementation='flex_attention': Kind"),
        ("llama", {"is_causal": False}, "static", "attention to later tokens: KindCache serves causal attention"),
        ("llama", {}, "quest", "kv_cache='quest' needs a prompt in one call; set prefill_chunk_size"),
    ],
)  # fmt: skip
def test_a_model_or_a_kind_that_cannot_be_served_is_refused_by_name_before_a_call(
    family: str, changes: dict[str, Any], kind: str, message: str
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | OWN.get(family, {}) | changes))
    model.generation_config.prefill_chunk_size = 8
    with pytest.raises(ValueError, match=message):
        KindCache(model, kind)
    assert not model.config._attn_implementation.startswith("llama-kv")


@torch.inference_mode()
def test_a_call_that_a_kind_would_compute_otherwise_is_refused() -> None:
    model, other, ones = model_of("llama"), model_of("llama"), torch.ones_like(MASK)

    def refused(message: str, fed: Tensor, cache: KindCache, model: Any = model, **given: Any) -> None:
        with pytest.raises(ValueError, match=message):
            model(fed, past_key_values=cache, **given)

    refused("must count the tokens of each row without padding", PROMPTS, KindCache(model), attention_mask=MASK)
    for hidden in (ones[0].diag().bool().expand(2, 1, -1, -1), ones.new_ones(2, 1, 16, 16, dtype=torch.bool)):
        refused("hides more than the future and padding", PROMPTS, KindCache(model), attention_mask=hidden)
    cache = KindCache(model)
    model(PROMPTS, past_key_values=cache)
    longer = torch.cat([MASK, ones[:, :1]], dim=1)
    given = {"attention_mask": longer, "position_ids": longer.cumsum(1)[:, -1:] - 1}
    refused("hides tokens that are stored", NEXT[:, :1], cache, **given)
    refused("had other rows; call reset", NEXT[:1, :1], cache)
    refused("each from 1", PROMPTS, KindCache(model), attention_mask=ones * torch.tensor([[0], [1]]))
    refused("past max_seq_len=15", PROMPTS, KindCache(model, max_seq_len=15))
    refused("layer 0 did not store its keys in this KindCache", PROMPTS, KindCache(model), other)

    cache = KindCache(model)
    with failing(model.model.layers[1].self_attn, MemoryError), pytest.raises(MemoryError):
        model(PROMPTS, past_key_values=cache)
    refused("the last call did not end", NEXT[:, :1], cache)
    cache.reset()
    assert cache.nbytes == cache.get_seq_length() == 0
    assert torch.equal(logits_of(model, cache), logits_of(model, KindCache(model)))

    for asked in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="without beams, an assistant and prompt lookup"):
            model.generate(PROMPTS[1:], past_key_values=KindCache(model), max_new_tokens=3, **asked)
    model.model.layers[0].self_attn.o_proj = nn.Sequential(model.model.layers[0].self_attn.o_proj)  # as a quantised one
    refused("reads the weight of o_proj, a Sequential", PROMPTS, KindCache(model, "criticalkv"))


def test_gradients_and_use_cache_false_are_refused_as_what_they_are() -> None:
    model = model_of("llama", eos_token_id=None)
    with pytest.raises(ValueError, match=r"gradients cannot .* torch.no_grad\(\), or train without past"):
        model(PROMPTS[1:], past_key_values=KindCache(model))
    for given in ({"inputs": PROMPTS[1:]}, {"inputs": PROMPTS, "attention_mask": MASK}):
        with pytest.raises(ValueError, match="with use_cache=False generate feeds these again: leave that out"):
            model.generate(**given, past_key_values=KindCache(model), use_cache=False, max_new_tokens=3)
