"""The model's logits and gradients equal those of transformers' Llama, and its limits are enforced."""

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from references import hf_llama, hf_tensors
from refusals import unrefused
from tiny import FP64_TOLERANCE, bits, cache_nbytes, fp32_tolerance, kv_nbytes, some_tokens, tiny_args, tiny_model
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.kv_cache import Cache
from llama.model import RMSNorm, Transformer
from llama.ops import PLAIN, rms_norm
from llama.rows import Rows


@pytest.mark.parametrize("rope_theta", [10000.0, None])
def test_cached_steps_equal_transformers_own_cached_steps(rope_theta: float | None) -> None:
    model = tiny_model(rope_theta=rope_theta)
    hf, tokens, past = hf_llama(model), some_tokens(2, 9), None
    for start, end in [(0, 4), (4, 5), (5, 6), (6, 9)]:
        with torch.no_grad():
            step = hf(tokens[:, start:end], past_key_values=past, use_cache=True)
            ours = model(tokens[:, start:end], start)
        past = step.past_key_values
        torch.testing.assert_close(ours, step.logits, rtol=0, atol=FP64_TOLERANCE)


# --- Gradients, with the cache off


@pytest.mark.parametrize("rope_theta", [10000.0, None])
def test_gradients_equal_those_of_transformers(rope_theta: float | None) -> None:
    model = tiny_model(kv_caching=False, rope_theta=rope_theta)
    hf, tokens = hf_llama(model), some_tokens(2, 7)
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.functional.cross_entropy(hf(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    ours = hf_tensors({name: grad(weight) for name, weight in model.named_parameters()}, model.args)
    for name, weight in hf.named_parameters():
        torch.testing.assert_close(ours[name], grad(weight), rtol=0, atol=FP64_TOLERANCE)


def grad(weight: Tensor) -> Tensor:
    return weight.grad


def test_parameters_of_a_score_mod_get_gradients_of_their_layer() -> None:
    model, tokens, slopes = tiny_model(kv_caching=False), some_tokens(2, 7), torch.zeros(2, requires_grad=True)
    model(tokens).square().mean().backward()
    plain = [grad(weight).clone() for weight in model.parameters()]
    model.zero_grad()
    model.use(PLAIN._replace(score_mod=lambda scores, q, k, layer: scores + slopes[layer] * (k - q)))
    model(tokens).square().mean().backward()
    for weight, wanted in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(grad(weight), wanted, rtol=0, atol=FP64_TOLERANCE)
    assert grad(slopes).all()
    assert grad(slopes).unique().shape == (2,)


@pytest.mark.parametrize("kv_cache", ["static", "concat"])
def test_backward_works_twice_and_after_inference_mode(kv_cache: str) -> None:
    """Catches bug 32: a table or buffer made in inference mode cannot be saved for a backward pass."""
    model, tokens = tiny_model(kv_cache=kv_cache), some_tokens(2, 6)
    with torch.inference_mode():
        model(tokens)  # makes the RoPE table and the caches
        model(tokens[:, :1], [3, 5])
    model.kv_caching = False

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens).square().mean().backward()
        return [grad(weight).clone() for weight in model.parameters()]

    first = gradients()
    assert all(weight.any() for weight in first)
    with torch.inference_mode():
        model(tokens)
    assert all(map(torch.equal, first, gradients()))


def test_cached_call_that_needs_a_gradient_is_refused_and_leaves_the_cache_as_it_was() -> None:
    model, tokens = tiny_model(), some_tokens(2, 6)
    with torch.no_grad():
        model(tokens)
    assert model.cache is not None
    before = [bits(tensor).clone() for layer in model.cache.layers for tensor in layer.held().values()]
    for start_pos, fed in [(0, tokens), (6, tokens[:, :1]), ([4, 6], tokens[:, :1])]:
        with pytest.raises(ValueError, match="kv_caching=False"):
            model(fed, start_pos)
    assert all(
        map(torch.equal, before, [bits(tensor) for layer in model.cache.layers for tensor in layer.held().values()])
    )


@pytest.mark.parametrize("kv_cache", ["static", "concat"])
def test_cache_works_in_every_mode_without_gradients_in_any_order(kv_cache: str) -> None:
    """Catches bug 32: buffers that are made in inference mode are written outside it, and vice versa."""
    tokens = some_tokens(2, 12)
    expected = tiny_model(kv_caching=False)(tokens).detach()
    for modes in [("inference", "frozen", "no_grad"), ("frozen", "no_grad", "inference"), ("no_grad", "inference")]:
        model = tiny_model(kv_cache=kv_cache)
        for start in range(0, 12, 2):
            mode = modes[start // 2 % len(modes)]
            model.requires_grad_(mode != "frozen")
            with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "frozen"):
                logits = model(tokens[:, start : start + 2], start if start % 4 else [start, start])
            torch.testing.assert_close(logits, expected[:, start : start + 2], rtol=0, atol=FP64_TOLERANCE)


# --- Limits


@pytest.mark.parametrize("kv_caching", [True, False])
def test_max_seq_len_is_the_last_length_that_is_served(kv_caching: bool) -> None:
    """Catches bug 15: prompts at max_seq_len - 1, exactly, and one more."""
    model = tiny_model(max_seq_len=8, kv_caching=kv_caching).requires_grad_(False)
    assert model(some_tokens(1, 7)).shape == (1, 7, 40)
    assert model(some_tokens(1, 8)).shape == (1, 8, 40)
    with pytest.raises(ValueError, match=r"a text of 9 positions goes past max_seq_len=8; .*larger max_seq_len"):
        model(some_tokens(1, 9))


@pytest.mark.parametrize("start_pos", [8, [8, 3], [0, 8], 10**12])
def test_one_token_past_the_end_is_refused(start_pos: Any) -> None:
    """Catches the silent overflow of Meta-style caches: torch ignores a one-token write past the end."""
    model = tiny_model(max_seq_len=8).requires_grad_(False)
    model(some_tokens(2, 8))
    assert model.cache is not None
    held = [tensor for layer in model.cache.layers for tensor in layer.held().values()]
    before = [bits(tensor).clone() for tensor in held]
    with pytest.raises(ValueError, match="max_seq_len=8"):
        model(some_tokens(2, 1), start_pos)
    assert len(held) == 4
    assert all(map(torch.equal, before, map(bits, held)))


@pytest.mark.parametrize("kv_caching", [True, False])
def test_max_batch_size_is_kept_and_none_is_no_limit(kv_caching: bool) -> None:
    """Catches bug 16."""
    model = tiny_model(max_batch_size=2, kv_caching=kv_caching).requires_grad_(False)
    assert len(model(some_tokens(2, 3))) == 2
    with pytest.raises(ValueError, match="3 rows are more than max_batch_size=2"):
        model(some_tokens(3, 3))
    assert cache_nbytes(model) == (kv_nbytes(model.args, 2, 3, torch.float64) if kv_caching else 0)
    assert tiny_args().max_batch_size is None
    assert len(tiny_model(kv_caching=kv_caching).requires_grad_(False)(some_tokens(100, 2))) == 100


def test_start_pos_without_a_cache_is_refused() -> None:
    """Catches bug 2: the newest token is fed alone although nothing before it is cached."""
    model, why = tiny_model(kv_caching=False), "needs the KV cache, which is off: feed the whole prefix at start_pos=0"
    starts: list[Any] = [1, [0, 2], torch.tensor([2, 2])]
    assert unrefused((partial(model, some_tokens(2, 1), start_pos), why) for start_pos in starts) == []


def test_start_pos_with_an_empty_cache_is_refused() -> None:
    """Catches bug 13: a new, freed or switched-off cache is read as if it had contents."""
    for kind in ("static", "concat"):
        model = tiny_model(kv_cache=kind).requires_grad_(False)
        model(some_tokens(2, 3))
        model.free_cache()
        why = "with an empty KV cache: feed the positions before it first"
        assert unrefused((partial(model, some_tokens(2, 1), start_pos), why) for start_pos in (1, [0, 3])) == []


@pytest.mark.parametrize("before", [True, False])
def test_a_twin_with_the_other_switch_leaves_the_model_as_it_is(
    before: bool,
) -> None:
    model, calls = tiny_model(kv_caching=before).requires_grad_(False), []
    twin = model.with_kv_caching(not before)
    model.register_forward_hook(lambda *_: calls.append(1))
    model.blocks[0].attention.register_forward_hook(lambda *_: calls.append(2))
    assert (model.kv_caching, twin.kv_caching) == (before, not before)
    assert {layer.attention.kv_caching for layer in model.blocks} == {before}
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(model(some_tokens(2, 3)), twin(some_tokens(2, 3)))
    assert calls == [2, 1, 2, 1]
    assert (cache_nbytes(model) > 0, cache_nbytes(twin) > 0) == (before, not before)
    assert model.with_kv_caching(before) is model


def test_calls_that_no_model_can_compute_are_refused() -> None:
    """Catches bug 16: no rows, and rows without tokens."""
    model, uncached, tokens = tiny_model().requires_grad_(False), tiny_model(kv_caching=False), some_tokens(2, 3)
    last: Any = partial(model, tokens, logits="last")
    starts: list[Any] = [-1, [0, -1], [0], [0, 0, 0], [], torch.tensor([1, 2, 3]), 0.0, [0.0, 1.0], None]
    lengths = [[], [2], [2, 2, 2], [0, 2], [0, 0], [2, 4], [-1, 3]]
    table: list[tuple[Callable[[], object], str]] = [
        *(
            (partial(one, torch.zeros(shape, dtype=torch.int64)), r"tokens must be \(bsz, seqlen\), both at least 1")
            for shape in ((), (3,), (0, 3), (3, 0), (2, 3, 4))
            for one in (model, uncached)
        ),
        *((partial(model, tokens, start), "start_pos=.* an int or one per row.*, whole numbers") for start in starts),
        *((partial(last, lengths=each), "lengths") for each in lengths),
        (partial(uncached, tokens, logits="first"), "logits='first'"),
        *((partial(setattr, model, "kv_caching", on), "must be True or False") for on in ("False", 0, None)),
    ]
    assert unrefused(table) == []
    assert cache_nbytes(model) == 0


def test_an_unset_vocab_size_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=-1"):
        Transformer(ModelArgs())


# --- Last-position logits


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_last_logits_are_the_last_of_all(dtype: torch.dtype, kv_caching: bool) -> None:
    model, tokens = tiny_model(dtype=dtype, kv_caching=kv_caching).requires_grad_(False), some_tokens(3, 6)
    every = model(tokens)
    # The head multiplies 3 rows instead of 18, and sums of another shape may be taken in another order.
    atol = fp32_tolerance(every, model.args, dtype)
    last = model(tokens, logits="last")
    assert last.shape == (3, 1, 40)
    torch.testing.assert_close(last, every[:, -1:], rtol=0, atol=atol)
    for lengths in ([6, 6, 6], [2, 2, 2], [1, 6, 3]):
        own = torch.stack([every[row, length - 1] for row, length in enumerate(lengths)])[:, None]
        torch.testing.assert_close(model(tokens, logits="last", lengths=lengths), own, rtol=0, atol=atol)


def test_last_logits_never_make_the_others() -> None:
    """The logits of a whole prompt would be the largest tensor of an inference, and only one row of them is used."""
    model, widths = tiny_model().requires_grad_(False), []
    model.output.register_forward_hook(lambda _, __, made: widths.append(made.shape[1]))
    model(some_tokens(2, 9), logits="last")
    model(some_tokens(2, 9), logits="last", lengths=[4, 9])
    assert widths == [1, 1]


def test_16_bit_logits_are_returned_as_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model(dtype=dtype, kv_caching=False)
        assert model(some_tokens(1, 3)).dtype == torch.float32
        assert model.double()(some_tokens(1, 3)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norm_has_the_bits_of_its_definition(dtype: torch.dtype) -> None:
    """On a CPU; a GPU may sum in another order."""
    for dim, size in product((1, 7, 64, 576, 4097), (1e-4, 1.0, 1e4)):
        weight = torch.randn(dim).to(dtype)
        x = (size * torch.randn(2, 5, dim, dtype=torch.float64)).to(dtype)
        wide = x.to(torch.promote_types(dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        assert torch.equal(rms_norm(x, weight, 1e-5), normed.to(dtype) * weight)


def test_norm_squares_16_bit_numbers_in_float32() -> None:
    norm = RMSNorm(4, eps=1e-5).half()
    large = torch.tensor([300.0, -300.0, 300.0, 300.0]).half()  # 300^2 is past float16's 65504
    assert norm(large).tolist() == [1, -1, 1, 1]


# --- Tied head


def test_tied_head_is_one_tensor_counted_once() -> None:
    """Catches bug 7."""
    tied, untied = tiny_model(tied_head=True), tiny_model()
    assert tied.output.weight.data_ptr() == tied.tok_embeddings.weight.data_ptr()
    count = sum(weight.numel() for weight in untied.parameters())
    assert sum(weight.numel() for weight in tied.parameters()) == count - 40 * 32


def test_tied_head_stays_tied_when_moved_loaded_and_copied() -> None:
    """Catches bug 7."""
    model = tiny_model(tied_head=True)
    other = tiny_model(tied_head=True)
    with torch.no_grad():
        other.tok_embeddings.weight += 1
    model = copy.deepcopy(model.to(torch.bfloat16).to(torch.float64))
    model.load_state_dict(other.state_dict())
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, other.tok_embeddings.weight)
    with torch.no_grad():
        model.tok_embeddings.weight.zero_()
        assert not model(some_tokens(1, 3)).any()


# --- Side effects


def test_params_are_the_args() -> None:
    args = tiny_args()
    model = Transformer(args)
    assert model.params is args
    assert model.args is args


def test_making_and_running_a_model_changes_no_global_state() -> None:
    def state() -> list[Any]:
        return [
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.distributed.is_initialized(),
            dict(os.environ),
        ]

    before = state()
    model = tiny_model(dtype=torch.bfloat16)
    model.generate_tokens([[1, 2, 3], [4]], 2)
    with pytest.raises(ValueError, match="kv_caching=False"):
        model(some_tokens(1, 2))
    assert state() == before


def test_a_copy_of_a_model_begins_without_a_text_and_goes_its_own_way() -> None:
    model, tokens = tiny_model().requires_grad_(False), some_tokens(2, 9)
    model(tokens)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert (model.cache is None, twin.cache is None) == (False, True)
        assert torch.equal(twin(tokens), model(tokens))
    twin = copy.deepcopy(model)
    twin.kv_caching = False
    assert model.kv_caching


def test_args_stay_as_they_were_made_when_the_switch_is_thrown() -> None:
    model = tiny_model()
    before = asdict(model.args)
    model.kv_caching = False
    assert asdict(model.args) == before
    assert not model.kv_caching
    assert all(not layer.attention.kv_caching for layer in model.layers)
    assert not Transformer(replace(model.args, kv_caching=False)).kv_caching


def test_model_made_under_a_16_bit_default_dtype_computes_the_same() -> None:
    """Catches bug 6: Meta's build sets a 16-bit default dtype, in which frequencies would lose bits."""
    args = tiny_args(rope_scaling=(1.0, 1.7, 3.3, 31.0), kv_caching=False)
    expected = tiny_model(args)(some_tokens(2, 20))
    torch.set_default_dtype(torch.bfloat16)
    try:
        careless = Transformer(args)
    finally:
        torch.set_default_dtype(torch.float32)
    careless.double().load_state_dict(tiny_model(args).state_dict())
    assert torch.equal(careless(some_tokens(2, 20)), expected)


def test_model_runs_under_another_default_device() -> None:
    model, other, tokens = tiny_model(), tiny_model(), some_tokens(2, 6)
    with torch.no_grad():
        expected = [model(tokens), model(tokens[:, :2], [3, 4])]
        with torch.device("meta"):  # a device on which nothing can be computed
            made = [other(tokens), other(tokens[:, :2], [3, 4])]
    assert all(map(torch.equal, made, expected))


@pytest.mark.slow
def test_an_exported_model_is_itself_afterwards() -> None:
    tokens = some_tokens(1, 8)
    expected = tiny_model().requires_grad_(False)(tokens)
    model = tiny_model().requires_grad_(False)
    model.kv_caching = False
    torch.export.export(model, (tokens,))
    assert type(model(tokens)) is Tensor
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own files
@pytest.mark.parametrize(("kv_caching", "backend"), [(True, "inductor"), (False, "aot_eager")])
def test_pytorchs_compiler_takes_the_model_with_frozen_weights(kv_caching: bool, backend: str) -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    model.kv_caching = kv_caching
    tokens = some_tokens(2, 12)
    with torch.inference_mode():
        expected = model(tokens)
        torch.testing.assert_close(torch.compile(model, backend=backend)(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["static", "concat"])
def test_pytorchs_compiler_takes_a_cache_whose_sizes_change(kind: str) -> None:
    model, tokens = tiny_model(dtype=torch.float32, kv_cache=kind).requires_grad_(False), some_tokens(2, 12)
    compiled, cache, other = torch.compile(model, backend="eager"), model.new_cache(), model.new_cache()
    with torch.inference_mode():
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11)):
            made = compiled(tokens[:, start:end], start, cache=cache)
            torch.testing.assert_close(made, model(tokens[:, start:end], start, cache=other), rtol=0, atol=1e-4)


def test_a_layer_that_stands_twice_in_a_model_has_a_cache_for_each_place() -> None:
    model = tiny_model().requires_grad_(False)
    model.layers[1] = model.layers[0]
    cached, _ = model.generate_tokens([[1, 2]], 5, temperature=0.0)
    assert cached == model.generate_tokens([[1, 2]], 5, temperature=0.0, kv_caching=False)[0]


def test_one_row_with_one_kv_head_is_kept_where_it_stands() -> None:
    """Catches bug 1: the only shapes for which PyTorch accepts `keys[:, bsz, start_pos:end] = xk`."""
    model, tokens = tiny_model(n_kv_heads=1, kv_cache="poisoned").requires_grad_(False), some_tokens(1, 6)
    expected = tiny_model(n_kv_heads=1, kv_caching=False)(tokens).detach()
    cache = model.new_cache(rows=1, length=6)
    made = torch.cat([model(tokens[:, i : i + 1], i, cache=cache) for i in range(6)], dim=1)
    torch.testing.assert_close(made, expected, rtol=0, atol=FP64_TOLERANCE)


# --- Caches that are given


def other_size(**sizes: int) -> Cache:
    return tiny_model(tiny_args(**sizes)).new_cache()


def test_a_cache_that_does_not_fit_the_model_is_refused_before_anything_is_written() -> None:
    model = tiny_model().requires_grad_(False)
    one_twice = model.new_cache()
    one_twice.layers[1] = one_twice.layers[0]
    caches = [
        (other_size(n_layers=3), "the cache has 3 layers of its own, and the model 2"),
        (other_size(n_kv_heads=4), "the cache is for 4 KV heads of 8 numbers, and the model has 2 of 8"),
        (other_size(head_dim=16), "the cache is for 2 KV heads of 16 numbers"),
        (one_twice, "the cache has 1 layers of its own, and the model 2"),
    ]
    assert unrefused((partial(model, some_tokens(1, 3), cache=cache), why) for cache, why in caches) == []
    assert all(cache.empty for cache, _ in caches)
    deeper = tiny_model(n_layers=3).requires_grad_(False)
    fed = deeper.new_cache()
    deeper(some_tokens(1, 3), cache=fed)
    del deeper.layers[-1]
    assert unrefused([(partial(deeper, some_tokens(1, 1), 3, cache=fed), "the cache has 3 layers")]) == []


DUPLICATES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *zip(
            ("static", "concat", "paged", "int4", "window:8+2", "h2o:4", "static@0;fp8"),
            cycle(DUPLICATES),
            strict=False,
        )
    ],
)
def test_a_deep_copied_or_unpickled_cache_continues_with_the_model_that_fed_it(kind: str, how: str) -> None:
    duplicate = DUPLICATES[how]
    model, tokens = tiny_model(head_dim=32, max_seq_len=64).requires_grad_(False), some_tokens(1, 41)
    cache = model.new_cache(kind)
    model(tokens[:, :40], cache=cache)
    made, (other, with_it) = duplicate(cache), duplicate((model, cache))
    for owner, one in ((model, made), (other, with_it)):
        assert torch.equal(owner(tokens[:, 40:], 40, cache=one), model(tokens[:, 40:], 40, cache=cache.copy()))
    places = [{held.data_ptr() for held in one.layers[0].held().values() if held.nbytes} for one in (made, cache)]
    assert places[0].isdisjoint(places[1])
    if how == "deep copy":
        with pytest.raises(ValueError, match="fed by another model"):
            other(tokens[:, 40:], 40, cache=made)


@pytest.mark.parametrize("kind", ["concat", "static", "paged", "int8", "window:8+2", "h2o:4", "quest:16"])
def test_a_cache_that_was_fed_in_inference_mode_is_used_outside_of_it(kind: str) -> None:
    model, tokens = tiny_model(head_dim=32, max_seq_len=64).requires_grad_(False), some_tokens(3, 42)

    def fed(inference: bool) -> list[Tensor]:
        cache, made = model.new_cache(kind), []
        for change in (lambda: cache.select_rows([2, 1]), lambda: cache.repeat_first_row(3)):
            with torch.inference_mode(inference):
                model(tokens[:, :40], cache=cache)
                cache.repeat_first_row(4)
                cache.select_rows([0, 2, 3])
                model(tokens[:, 40:41], 40, cache=cache)
            change()
            rows = 2 if len(made) == 0 else 3
            made.append(model(tokens[:rows, 41:], [41] * rows, cache=cache))
        return made

    assert all(map(torch.equal, fed(inference=True), fed(inference=False)))


def test_a_row_that_is_named_twice_is_refused() -> None:
    model, tokens = tiny_model().requires_grad_(False), some_tokens(2, 9)
    cache = model.new_cache()
    model(tokens[:, :8], cache=cache)
    other = cache.copy()
    with pytest.raises(ValueError, match=r"rows=\[0, 0\] names a row twice; repeat_first_row copies a row"):
        cache.select_rows([0, 0])
    assert torch.equal(model(tokens[:, 8:], 8, cache=cache), model(tokens[:, 8:], 8, cache=other))


def test_a_cache_is_refused_while_the_switch_is_off() -> None:
    model = tiny_model().requires_grad_(False)
    cache = model.new_cache()
    model.kv_caching = False
    with pytest.raises(ValueError, match="a cache was given, but kv_caching is off"):
        model(some_tokens(1, 3), cache=cache)


CHANGES: dict[str, Callable[[Transformer], object]] = {
    "another model": copy.deepcopy,
    "another dtype": lambda model: model.to(torch.float32),
    "exact": lambda model: setattr(model, "exact", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_fed_in_another_mode_is_refused(change: str) -> None:
    model, tokens = tiny_model(tiny_args(max_seq_len=160)).requires_grad_(False), some_tokens(1, 5)
    cache = model.new_cache()
    model(tokens, cache=cache)
    before = {name: held.clone() for name, held in cache.layers[0].held().items()}
    model = made if isinstance(made := CHANGES[change](model), Transformer) else model
    with pytest.raises(
        ValueError, match=r"fed by another model|computed in another way .* than the model computes now"
    ):
        model(tokens[:, :1], 5, cache=cache)
    assert all(torch.equal(held, before[name]) for name, held in cache.layers[0].held().items())


def test_the_models_own_cache_is_dropped_with_what_it_was_made_for() -> None:
    drops: tuple[Callable[[Transformer], object], ...] = (
        *(lambda model: setattr(model, "kv_cache", "concat"), lambda model: setattr(model, "kv_caching", False)),
        *(Transformer.free_cache, lambda model: model.to(torch.float32)),
    )
    for drop in drops:
        model = tiny_model().requires_grad_(False)
        model(some_tokens(1, 3))
        assert model.cache is not None
        drop(model)
        assert model.cache is None


def test_a_cache_whose_layers_were_restored_one_by_one_is_continued() -> None:
    model, tokens = tiny_model().requires_grad_(False), some_tokens(1, 5)
    fed, restored = model.new_cache(), model.new_cache()
    model(tokens[:, :4], cache=fed)
    for layer, state in zip(restored.layers, fed.state(), strict=True):
        layer.restore(state, 1, 4)
    assert torch.equal(model(tokens[:, 4:], 4, cache=restored), model(tokens[:, 4:], 4, cache=fed))


def test_the_models_own_cache_survives_a_generation() -> None:
    model, tokens = tiny_model().requires_grad_(False), some_tokens(1, 5)
    expected = model(tokens)[:, 4:]
    model(tokens[:, :4])
    model.generate_tokens([[1, 2], [3]], 4)
    torch.testing.assert_close(model(tokens[:, 4:], 4), expected, rtol=0, atol=FP64_TOLERANCE)


def test_rows_of_several_tokens_end_a_prompt_by_default() -> None:
    tokens = some_tokens(2, 5)
    assert [Rows.of(tokens, 0).prompt_ends, Rows.of(tokens[:, :1], 4).prompt_ends] == [True, False]
    assert not Rows.of(tokens, Rows.at([0, 0], [5, 5])).prompt_ends
    assert Rows.of(tokens[:, :1], Rows.at([4, 4], [1, 1], prompt_ends=True)).prompt_ends
