"""Exact mode: a token's logits have the same bits with the cache on or off, in any chunks, alone or in any batch."""

import random
from functools import partial, reduce
from typing import Any

import pytest
import torch
from tiny import fed_in_pieces, tiny_args, tiny_model
from torch import Tensor
from writes import rows_of

from llama.args import YarnScaling
from llama.exact import operations, products
from llama.exact.batch_invariance import first_difference
from llama.exact.operations import exact_attend, exact_linear, exact_ops, exact_silu
from llama.exact.products import Block, block_for, exact_product
from llama.model import Transformer
from llama.ops import PLAIN, UNCHANGED, attend

every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16),
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.float16)),
    ],
    ids=str,
)
# Each shape once, and each dtype.
MODELS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "tied": (
        torch.float64,
        {"dim": 48, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 131, "tied_head": True},
    ),
    "odd": (torch.bfloat16, {"dim": 80, "n_heads": 5, "n_kv_heads": 1, "vocab_size": 97, "multiple_of": 8}),
    "wide": (
        torch.float16,
        {"dim": 64, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 200, "head_dim": 12, "rope_theta": None},
    ),
    "families": (torch.float32, {"attention_bias": True, "qk_norm": True, "rope_scaling": YarnScaling(4.0, 64)}),
}
LENGTH = 80  # more than the 64 keys of a chunk


def plain_model(dtype: torch.dtype = torch.float32, **sizes: Any) -> Transformer:
    return tiny_model(tiny_args(**{"max_seq_len": 96, **sizes}), dtype=dtype).requires_grad_(False)


def exact_model(dtype: torch.dtype, **sizes: Any) -> Transformer:
    model = plain_model(dtype, **sizes)
    model.exact = True
    return model


def test_without_exact_mode_a_difference_shows() -> None:
    """The comparison has power: the plain path does not pass it."""
    model = plain_model()
    assert first_difference(model) is not None
    model.exact = True
    assert first_difference(model) is None


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MODELS][1:])])
def test_logits_are_equal_to_the_bit_however_they_come_about(name: str) -> None:
    dtype, sizes = MODELS[name]
    model = exact_model(dtype, **sizes)
    draw = random.Random(name)
    with torch.inference_mode():
        for rows in (3, 16):
            tokens = torch.randint(model.args.vocab_size, (rows, LENGTH))
            model.kv_caching = False
            whole = model(tokens)
            alone = draw.randrange(rows)
            assert torch.equal(model(tokens[alone : alone + 1]), whole[alone : alone + 1])
            model.kv_caching = True
            cuts = sorted(draw.sample(range(1, LENGTH), draw.randrange(1, 12)))
            assert torch.equal(fed_in_pieces(model, tokens, cuts), whole), cuts
        one_by_one = [*range(1, 6), *range(14, 18), *range(62, 68)]
        assert torch.equal(fed_in_pieces(model, tokens[:1], one_by_one), whole[:1])


def test_exact_logits_are_the_plain_ones_up_to_rounding() -> None:
    model = tiny_model(tiny_args(max_seq_len=160)).requires_grad_(False)
    tokens = torch.randint(model.args.vocab_size, (2, 90))
    plain = model(tokens)
    model.exact = True
    torch.testing.assert_close(model(tokens), plain, rtol=0, atol=1e-10)
    model.exact = False
    assert torch.equal(model(tokens), plain)
    assert not model.exact


def stays_plain(model: Transformer, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        model.exact = True
    assert not model.exact


def test_a_machine_without_a_block_raises_and_the_model_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCKS", ())
    monkeypatch.setattr(products, "_FOUND", {})
    stays_plain(plain_model(), "round differently from call to call")


def test_a_model_that_differs_from_itself_raises_and_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is not enough: the whole model is compared, and attention over more positions than a whole model."""
    with monkeypatch.context() as patch:
        patch.setattr(operations, "exact_silu", lambda x: torch.nn.functional.silu(x) + x.shape[1] * 1e-6)
        stays_plain(plain_model(), "the first 21 tokens, in row 1, are not what they are alone")
    plain = operations._attend_in_step

    def longer(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int) -> Tensor:
        return plain(xq, keys, values, start_pos) + (start_pos > 100) * 1e-6

    monkeypatch.setattr(operations, "_attend_in_step", longer)
    monkeypatch.setattr(operations, "_ATTENDS", set())
    stays_plain(plain_model(max_seq_len=400), r"attention to \d+ positions")


def test_moving_to_another_dtype_compares_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact_model(torch.float32)
    silu = operations.exact_silu
    monkeypatch.setattr(operations, "exact_silu", lambda x: silu(x) + (x.dtype == torch.float64) * x.shape[1] * 1e-6)
    with pytest.raises(ValueError, match="the first 21 tokens"):
        model.to(torch.float64)
    assert not model.exact
    monkeypatch.undo()
    assert exact_model(torch.float32).to(torch.float64).exact


@every_dtype
@pytest.mark.parametrize("in_features", [16, 48, 576])
def test_another_order_of_summing_shows_in_most_numbers(dtype: torch.dtype, in_features: int) -> None:
    """So a probe needs few of them: only rounding errors remain of these sums."""
    x, weight = products.sensitive(8, torch.empty(32, in_features, dtype=dtype))
    wide = torch.promote_types(dtype, torch.float32)
    terms = (x[:, None].to(wide) * weight.to(wide)).unbind(-1)  # in_features times (8, 32)
    one, other = (reduce(torch.add, some).to(dtype) for some in (terms, terms[::2] + terms[1::2]))
    assert (one != other).float().mean() > 0.5


def test_the_probe_finds_how_many_rows_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library that rounds the last rows of a product differently, unless they are a multiple of `n`."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return (x[:, None] * weight).sum(-1)  # each sum by itself: batch-invariant on every machine

    def tails_differ(n: int, x: Tensor, weight: Tensor) -> Tensor:
        out = plain(x, weight)
        out[len(x) - len(x) % n :] += 1e-3
        return out

    def places_differ(x: Tensor, weight: Tensor) -> Tensor:
        out = plain(x, weight)
        out[1::2] += 1e-3
        return out

    for n in (1, 4, 32):
        monkeypatch.setattr(products, "linear", partial(tails_differ, n))
        monkeypatch.setattr(products, "_FOUND", {})
        assert block_for(torch.ones(16, 32)) == Block(n)
    monkeypatch.setattr(products, "linear", places_differ)
    monkeypatch.setattr(products, "_FOUND", {})
    assert block_for(torch.ones(16, 32)) == Block(1, in_one=False)


def test_recording_gradients_raises() -> None:
    model = tiny_model(tiny_args(), dtype=torch.float32)
    model.exact = True
    with pytest.raises(ValueError, match="records no gradients"):
        model(torch.tensor([[1, 2]]))
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))


def test_a_cache_with_its_own_positions_raises() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="choose kv_cache=static or concat"):
        exact_ops(x.device).attend(x, x, x, rows_of(0, x), torch.zeros(1, dtype=torch.int64), UNCHANGED)


def test_other_values_than_true_and_false_raise() -> None:
    model = tiny_model()
    for value in (1, None, "yes"):
        with pytest.raises(ValueError, match="must be True or False"):
            model.exact = value


def test_memory_after_a_position_is_never_read() -> None:
    x, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 20, 2, 8)
    clean = exact_attend(x, keys, keys, rows_of(5, x))
    poisoned = keys.clone()
    poisoned[:, 8:] = torch.nan
    assert torch.equal(exact_attend(x, poisoned, poisoned, rows_of(5, x)), clean)


def test_exact_operations_equal_their_plain_twins_to_rounding() -> None:
    x, weight = torch.randn(5, 30, dtype=torch.float64), torch.randn(7, 30, dtype=torch.float64)
    torch.testing.assert_close(exact_product(x, weight), x @ weight.T)
    torch.testing.assert_close(exact_silu(x), torch.nn.functional.silu(x))
    assert torch.equal(exact_silu(torch.tensor([-1e30, 1e30])), torch.tensor([-0.0, 1e30]))


@pytest.mark.parametrize("rows", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_a_product_for_each_block_is_exact_where_no_padding_is(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The last blocks are exact too: here a model is compared with itself as on machines that need them."""
    monkeypatch.setattr(products, "BLOCKS", (Block(rows, in_one=False),))
    monkeypatch.setattr(products, "_FOUND", {})
    assert exact_model(torch.float32).exact


@every_dtype
def test_attention_keeps_its_bits_at_long_lengths(dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(2)
    xq, keys, values = (torch.randn(1, 1300, n, 24, generator=stream).to(dtype) for n in (4, 2, 2))
    whole = exact_attend(xq, keys, values, rows_of(0, xq))
    for start, end in ((0, 1), (15, 17), (63, 64), (64, 65), (193, 200), (575, 600), (1023, 1025), (1299, 1300)):
        part = xq[:, start:end]
        assert torch.equal(exact_attend(part, keys, values, rows_of(start, part)), whole[:, start:end]), (start, end)


@pytest.mark.parametrize(("everywhere", "name"), [(True, "capped"), (False, "exact")])
def test_exact_mode_rejects_other_operations_and_leaves_them(everywhere: bool, name: str) -> None:
    model = plain_model()
    mine = PLAIN._replace(name=name, attend=lambda *given: torch.tanh(attend(*given)))
    if everywhere:
        model.use(mine)
    else:
        model.blocks[1].attention.ops = mine
    before, tokens = [module.ops for module in model.modules() if hasattr(module, "ops")], torch.tensor([[1, 2, 3]])
    logits = model(tokens)
    stays_plain(model, rf"the operations '{name}' .* model\.use\(PLAIN\)")
    assert [module.ops for module in model.modules() if hasattr(module, "ops")] == before
    assert torch.equal(model(tokens), logits)


def test_exact_mode_rejects_a_score_mod_by_name() -> None:
    def soft_cap(scores: Tensor, *_: Any) -> Tensor:
        return 30 * (scores / 30).tanh()

    model = plain_model()
    model.use(PLAIN._replace(score_mod=soft_cap))
    stays_plain(model, r"the operations 'plain with score_mod=soft_cap' .* model\.use\(PLAIN\)")
    model.use(PLAIN)
    model.exact = True
    model.use(model.ops._replace(score_mod=soft_cap))
    with pytest.raises(ValueError, match="exact mode cannot apply a score_mod"):
        model(torch.tensor([[1, 2, 3]]))


def test_switching_exact_mode_off_leaves_other_operations() -> None:
    model = exact_model(torch.float32)
    mine = model.blocks[1].attention.ops = PLAIN._replace(name="mine")
    model.exact = False
    assert model.blocks[1].attention.ops is mine
    assert all(block.feed_forward.ops is PLAIN for block in model.blocks)
    model.use(mine)
    model.exact = False
    assert model.double().ops.name == "mine"


@every_dtype
def test_a_product_has_the_bits_of_its_slices(dtype: torch.dtype) -> None:
    """So ranks with one slice each get the same bits, whichever of the two ways this machine uses."""
    stream = torch.Generator().manual_seed(3)
    x, weight = torch.randn(37, 48, generator=stream).to(dtype), torch.randn(96, 48, generator=stream).to(dtype)
    pieces = torch.cat([exact_product(x, rows) for rows in weight.chunk(4)], dim=-1)
    assert torch.equal(exact_linear(x, weight, 4), pieces)


@every_dtype
def test_a_product_of_many_outputs_is_computed_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head has more outputs than one product may have; with a limit of 32, so has every matrix here."""
    monkeypatch.setattr(products, "OUTPUTS", 32)
    stream = torch.Generator().manual_seed(3)
    x, weight = torch.randn(37, 48, generator=stream).to(dtype), torch.randn(144, 48, generator=stream).to(dtype)
    whole = exact_linear(x, weight, 1)
    assert torch.equal(exact_linear(x[5:6], weight, 1), whole[5:6])
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().T, rtol=0.02, atol=0.1)
    by_rank = torch.cat([exact_linear(x, rows, 2) for rows in weight.chunk(2)], dim=-1)  # each has two slices
    assert torch.equal(exact_linear(x, weight, 4), by_rank)
    if dtype == torch.float32:
        assert exact_model(dtype, dim=48, n_heads=6, vocab_size=131).exact  # compared with itself


# ---- the cost of switching it on: counted, because seconds depend on the machine -------------------------------------

DEMO = [(576, 576), (192, 576), (64, 576), (576, 192), (1536, 576), (512, 576), (576, 512), (8192, 576)]


def counting(monkeypatch: pytest.MonkeyPatch, multiplied: list[int]) -> None:
    """Record the size of each product, in products of two numbers, and return zeros instead of it."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        assert len(x) <= products.ROWS
        assert len(weight) <= products.OUTPUTS
        multiplied.append(len(x) * weight.numel())
        return x.new_zeros(len(x), len(weight))

    monkeypatch.setattr(products, "linear", linear)
    monkeypatch.setattr(products, "_FOUND", {})
    monkeypatch.setattr(products, "_WHOLE", {})


@pytest.mark.parametrize(("fails", "tokens"), [(False, 40), (True, 80)])
def test_probing_costs_few_tokens_of_the_demo(fails: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 10 GFLOP/s, 40 tokens are a second. A block that is not enough fails at its first products."""
    multiplied: list[int] = []
    counting(monkeypatch, multiplied)
    head = torch.empty(49152, 576)
    exact_linear(head[:1], head, 3)  # all parts of a head have one shape
    if fails:
        counted, calls = products.linear, iter(range(10**6))
        monkeypatch.setattr(products, "_FOUND", {})
        monkeypatch.setattr(products, "linear", lambda x, w: counted(x, w) + (len(x) > 1) * next(calls))
    blocks = {block_for(torch.empty(out_features, in_features)) for out_features, in_features in DEMO}
    assert len(products._FOUND) == len(DEMO)
    assert blocks == ({Block(1, in_one=False)} if fails else {Block(1)})
    assert sum(multiplied) < tokens * 135e6


def test_switching_it_on_multiplies_the_model_by_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the comparison and its padding, without the probes."""
    model = plain_model()
    model.exact = True  # runs the probes
    plain, multiplied = products.linear, []

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        multiplied.append(len(x) * weight.numel())
        return plain(x, weight)

    monkeypatch.setattr(products, "linear", counted)
    model.exact = False
    model.exact = True
    matrices = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    most = max(block.rows for block in products._FOUND.values())  # a step is padded to these
    assert sum(multiplied) < (300 + 20 * most) * matrices
