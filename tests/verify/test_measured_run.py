"""The certificate passes sound models, whatever their rounding, and names planted faults, however small."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import test_certificate
import torch
from tiny import some_tokens, tiny_model
from torch import Tensor

from llama.exact import operations
from llama.generation import Generation, PlainStepper
from llama.kv_cache import KVCache, StaticCache
from llama.model import Transformer
from llama.ops import PLAIN
from llama.rope import RopeTable
from llama.rows import Rows
from llama.verify.measured_run import (
    FLOAT64_PASSES,
    PASSES,
    Difference,
    Figures,
    measure_run,
)
from llama.verify.passes import ALONE, FREE_CACHED, FREE_UNCACHED, PIECES, STEPS, UNCACHED, reference_of
from llama.verify.sessions import SESSIONS
from llama.verify.tolerance import FLOAT64_TOLERANCE, TOLERANCE_FACTOR

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = 8
assert test_certificate.NewestFirst in KVCache.kinds.values()  # a kind as a researcher would add it


def one_layer(**changes: Any) -> Transformer:
    return tiny_model(n_layers=1, **changes)


def certify(model: Transformer, *, rows: int = 3, tokens: int = TOKENS, seed: int = 0) -> Figures:
    """Measure a run of random prompts of 1 to 5 ids."""
    dice = random.Random(seed)
    vocab_size = model.args.vocab_size
    prompts = [[dice.randrange(vocab_size) for _ in range(dice.randint(1, 5))] for _ in range(rows)]
    return measure_run(model, reference_of(model), prompts, tokens, seed=seed)


def first_of(figures: Figures, way: str) -> str:
    """Return the first violation of a way, or fail."""
    return next(text for text in figures.violations if text.startswith(f"{way}: "))


# ---- sound models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("fp32", "static"), ("bf16", "newest_first")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("fp64", "static"), ("fp16", "poisoned"))],
)
def test_a_sound_model_is_certified(dtype: str, kind: str) -> None:
    figures = certify(tiny_model(dtype=DTYPES[dtype], kv_cache=kind), seed=1)
    assert figures.violations == []
    assert figures.error_ratio <= 1
    assert figures.tokens == 3 * TOKENS
    assert all(d.explained for d in figures.divergences)
    assert (figures.near_ties == 0) == (dtype in ("fp64", "fp32"))


@pytest.mark.parametrize("rows", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_pass_computes_every_position_once(rows: int) -> None:
    figures = certify(one_layer(dtype=torch.float32), rows=rows)
    whole, new = figures.positions, rows * TOKENS
    assert whole >= new
    counts = {STEPS: whole, PIECES: whole, ALONE: whole, FREE_CACHED: new, FREE_UNCACHED: new}
    assert figures.compared.keys() == {*counts, *SESSIONS}
    assert {name: figures.compared[name] for name in counts} == counts
    assert figures.equal_tokens == figures.tokens == new
    assert set(figures.errors) == {UNCACHED, *PASSES, *FLOAT64_PASSES}
    assert all(figures.bit_equal[name] <= figures.compared[name] for name in PASSES)


def test_plain_float32_is_not_bit_equal_so_that_the_comparison_has_power() -> None:
    figures = certify(one_layer(dtype=torch.float32))
    assert figures.bit_equal[STEPS] < figures.positions
    assert figures.max_delta > 0
    assert figures.kl_max > 0


def test_a_divergence_between_nearly_tied_tokens_is_explained_by_rounding() -> None:
    model = one_layer(dtype=torch.float64)
    with torch.no_grad():  # every token has a twin whose logit is a hundredth away
        half = model.args.vocab_size // 2
        model.output.weight[half:] = model.output.weight[:half] * 1.003
    model = model.to(torch.bfloat16)
    figures = certify(model, rows=8, tokens=16, seed=1)
    assert figures.divergences, "no row diverged: the test shows nothing"
    assert all(d.explained for d in figures.divergences)
    assert all(abs(d.tokens[0] - d.tokens[1]) == half for d in figures.divergences)
    assert figures.violations == []
    assert figures.equal_tokens < figures.tokens


@pytest.mark.parametrize("kv_caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_model_is_left_as_it_was(kv_caching: bool) -> None:
    model = one_layer(dtype=torch.float32, kv_caching=kv_caching)
    certify(model)
    assert model.kv_caching == kv_caching
    assert not model._forward_hooks
    assert model.cache is None


def test_the_reference_has_the_same_weights_and_ties_in_float64() -> None:
    model = one_layer(dtype=torch.bfloat16, tied_head=True)
    reference = reference_of(model)
    assert reference.output.weight is reference.tok_embeddings.weight
    assert not reference.exact
    for name, weight in reference.state_dict().items():
        assert weight.dtype == torch.float64
        assert torch.equal(weight, model.state_dict()[name].double())


# ---- planted faults --------------------------------------------------------------------------------------------------


class StaleKeys(StaticCache, kind="stale_keys"):
    """Writes, for a single token, the key of the call before."""

    _before: Any = ()

    def _write(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        stale = rows.width == 1 and rows.start != 0 and len(xk) <= len(self._before)
        super()._write(rows, self._before[: len(xk)] if stale else xk, xv)
        self._before = xk[:, -1:]


class OldestDropped(StaticCache, kind="oldest_dropped"):
    """A window that loses the oldest position once there are more than six."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        self.places = range(int(xk.shape[1] == 1 and keys.shape[1] > 6), keys.shape[1])
        return keys[:, self.places.start :], values[:, self.places.start :]

    def key_positions(self) -> Tensor:
        return torch.tensor(self.places)

    def _allocate(self, *of: Any) -> Tensor:
        return super()._allocate(*of).zero_()  # where positions are given, all keys are read


@pytest.mark.parametrize(("kind", "dtype"), [("stale_keys", "fp32"), ("oldest_dropped", "bf16")])
def test_a_wrong_cache_is_found_and_named(kind: str, dtype: str) -> None:
    figures = certify(one_layer(dtype=DTYPES[dtype], kv_cache=kind), tokens=12)
    assert "differ from those of float64" in first_of(figures, f"float64 {STEPS}")
    assert "differ from those of float64" in first_of(figures, STEPS)
    assert "row " in figures.violations[0]
    assert "position " in figures.violations[0]
    assert not any(text.startswith((ALONE, UNCACHED, FREE_UNCACHED)) for text in figures.violations)


class LateUncached(RopeTable):
    """With the cache off, counts positions from 1; all distances stay the same."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.rope.freqs)
        model.register_forward_pre_hook(self.look)

    def look(self, model: Transformer, _: object) -> None:
        self.late = not model.kv_caching

    def at(self, starts: Sequence[int], seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return super().at([1] if self.late else starts, seqlen, device)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_positions_that_only_the_uncached_path_has_wrong_are_found(dtype: str) -> None:
    """Attention depends on distances only, so only float64 shows it: other angles round differently."""
    model = one_layer(dtype=DTYPES[dtype])
    model.rope = LateUncached(model)
    assert "differ from those of float64" in first_of(certify(model), f"float64 {STEPS}")


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_an_uncached_loop_that_feeds_another_text_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PlainStepper._decode

    def from_the_second_token(self: PlainStepper) -> None:
        texts = [row.ids for row in self.batch.rows]
        for row in self.batch.rows if self.cache is None else ():
            row.ids = [*row.ids[1:], row.ids[0]]
        real(self)
        for row, ids in zip(self.batch.rows, texts, strict=True):
            row.ids = ids

    monkeypatch.setattr(PlainStepper, "_decode", from_the_second_token)
    figures = certify(one_layer(dtype=DTYPES[dtype]))
    assert "differ from those of float64" in first_of(figures, FREE_UNCACHED)
    assert all(text.startswith((FREE_UNCACHED, "free runs")) for text in figures.violations)


def test_a_token_that_the_logits_do_not_prefer_and_its_divergence_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PlainStepper._decode

    def worst_first(self: PlainStepper) -> None:
        real(self)
        assert self.logits is not None
        self.logits = -self.logits if self.cache is None else self.logits

    monkeypatch.setattr(PlainStepper, "_decode", worst_first)
    figures = certify(one_layer(dtype=torch.float32))
    assert "was taken, and its logits prefer" in first_of(figures, FREE_UNCACHED)
    assert "more than rounding explains" in first_of(figures, "free runs")
    assert [(d.step, d.explained) for d in figures.divergences] == [(1, False)] * 3


def test_a_cached_run_that_feeds_the_whole_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_prefix(self: PlainStepper) -> None:
        begin = [0] * len(self.batch.rows)
        self.logits = self._feed(self.batch.tokens(begin, self.device), Rows.at(begin, self.batch.cur_pos))[:, -1]

    monkeypatch.setattr(PlainStepper, "_decode", whole_prefix)
    (violation,) = certify(one_layer(dtype=torch.float32)).violations
    assert violation.startswith(f"{FREE_CACHED}: the steps fed [")


class HalfKeys(StaticCache, kind="half_keys"):
    """Rounds the keys of a float32 model to 16 bits."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        return super().update(rows, xk.bfloat16().float() if xk.dtype == torch.float32 else xk, xv)


def test_a_fault_too_small_for_any_choice_is_found() -> None:
    figures = certify(one_layer(dtype=torch.float32, kv_cache="half_keys"))
    assert figures.same_top == figures.positions
    assert figures.equal_tokens == figures.tokens
    assert max(figures.errors[name] for name in FLOAT64_PASSES) < FLOAT64_TOLERANCE
    assert {text.partition(":")[0] for text in figures.violations} == {STEPS, PIECES, FREE_CACHED, *SESSIONS}
    assert "rounding explains" in figures.violations[0]


class Huge(StaticCache, kind="huge"):
    """Returns values a hundred times too large in float32."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        return keys, values * 100 if values.dtype == torch.float32 else values


def test_a_large_error_does_not_excuse_itself() -> None:
    figures = certify(one_layer(dtype=torch.float32, kv_cache="huge"))
    assert figures.bound <= TOLERANCE_FACTOR[4] * figures.errors[UNCACHED] * 1.0001
    assert figures.error_ratio > 1000
    assert figures.near_ties == 0
    assert any("is preferred, and" in text for text in figures.violations)
    assert any(not d.explained for d in figures.divergences)


def three_times(xq: Tensor, keys: Tensor, values: Tensor, *positions: Any) -> Tensor:
    """Attention that is wrong below 64 bits, if several tokens are fed from position 0 on."""
    out = PLAIN.attend(xq, keys, values, *positions)
    return out * 3 if out.dtype != torch.float64 and keys.shape[1] == xq.shape[1] and xq.shape[1] > 1 else out


@pytest.mark.parametrize(
    ("dtype", "says"), [(torch.float32, "explains at most"), (torch.bfloat16, "more than half the spread")]
)
def test_a_large_error_of_the_uncached_path_excuses_nothing(dtype: torch.dtype, says: str) -> None:
    model = one_layer(dtype=dtype)
    model.use(PLAIN._replace(name="wrong", attend=three_times))
    assert says in first_of(certify(model), UNCACHED)


def test_exact_mode_that_computes_something_else_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are equal, and all are wrong."""
    monkeypatch.setattr(operations, "exact_silu", torch.relu)
    model = one_layer(dtype=torch.float32)
    model.exact = True
    figures = certify(model)
    assert figures.bit_equal == figures.compared
    assert "rounding in float32 explains at most" in first_of(figures, UNCACHED)


# ---- not a number ----------------------------------------------------------------------------------------------------


class NotANumber(StaticCache, kind="not_a_number"):
    """Has nan in the keys of position 6 once it is fed; with `only_parts`, steps of one token are sound."""

    only_parts = False

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        if keys.shape[1] > 6 and (not self.only_parts or (rows.width > 1 and max(rows.starts))):
            keys[:, 6] = torch.nan
        return keys, values


class NotANumberInParts(NotANumber, kind="not_a_number_in_parts"):
    only_parts = True


def test_nan_in_the_cached_run_is_a_bug_in_words() -> None:
    figures = certify(one_layer(dtype=torch.float32, kv_cache="not_a_number"))
    (violation,) = figures.violations
    assert violation.startswith(f"{FREE_CACHED}: the logits of row ")
    assert "not finite" in violation


def test_nan_that_the_loop_does_not_meet_is_a_bug_too() -> None:
    figures = certify(one_layer(dtype=torch.float32, kv_cache="not_a_number_in_parts"), seed=0)
    assert "the logits are not finite" in first_of(figures, PIECES)
    assert all("not finite" in text for text in figures.violations if not text.startswith("float64"))
    json.dumps(asdict(figures), allow_nan=False)  # as the file stores them


def test_an_overflow_without_the_cache_is_a_bug() -> None:
    model = one_layer(dtype=torch.float32)
    hook = model.register_forward_hook(lambda fed, given, logits: None if fed.kv_caching else logits + torch.inf)
    figures = certify(model)
    hook.remove()
    assert any("not finite" in text for text in figures.violations if text.startswith(UNCACHED))


# ---- exact mode ------------------------------------------------------------------------------------------------------


def test_in_exact_mode_a_difference_to_the_bit_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer(dtype=torch.float32)
    assert certify(model).violations == []
    monkeypatch.setattr(Transformer, "exact", property(lambda self: True, lambda self, value: None))
    figures = certify(model)
    assert "the bits are not those of the uncached pass" in first_of(figures, STEPS)
    wrong = {text.partition(":")[0] for text in figures.violations}
    assert wrong == {name for name in PASSES if figures.bit_equal[name] < figures.compared[name]}


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_the_divergence_of_distributions_and_the_largest_difference_are_those_of_torch() -> None:
    dice = torch.Generator().manual_seed(1)
    u = 3 * torch.randn(20, 300, generator=dice)
    c = u + 0.1 * torch.randn(20, 300, generator=dice).exp()
    difference = Difference()
    difference.add(c[:5], u[:5])
    difference.add(c[5:], u[5:])
    log_c, log_u = c.double().log_softmax(-1), u.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_c, log_u, reduction="none", log_target=True).sum(-1)
    assert difference.kl_max == pytest.approx(float(expected.max()))
    assert difference.max_delta == float((c.double() - u.double()).abs().max())


def test_the_margins_of_a_divergence_are_those_of_the_logits() -> None:
    """The divergence is planted at the third step of row 1."""
    model = one_layer(dtype=torch.float32)
    real = Generation.generate_tokens

    def tampered(self: Any, *given: Any, **options: Any) -> Any:
        ids, scores = real(self, *given, **options)
        if options.get("kv_caching") is False:
            ids[1][2] = (ids[1][2] + 1) % 40
        return ids, scores

    prompts = [row.tolist() for row in some_tokens(2, 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "generate_tokens", tampered)
        figures = measure_run(model, reference_of(model), prompts, 5, seed=0)
    (ids,), _ = model.generate_tokens([prompts[1]], 5, temperature=0)
    with torch.inference_mode():
        logits = reference_of(model)(torch.tensor([[*prompts[1], *ids[:2]]]), logits="last")[0, 0]
    (d,) = figures.divergences
    top = logits.topk(2).values.tolist()
    assert (d.row, d.step, d.position, d.tokens) == (1, 2, 5, [ids[2], (ids[2] + 1) % 40])
    assert d.margins == pytest.approx([top[0] - top[1]] * 3, abs=1e-4)
    assert figures.equal_tokens == 5 + 2
