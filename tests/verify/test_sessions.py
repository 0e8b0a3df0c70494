"""The passes through a session do what their names say, equal one uncached pass, and fail if a session is broken."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, watched

from llama.kv_cache import Cache, PagedCache, StaticCache
from llama.texts.session import Session
from llama.texts.session_file import Content
from llama.verify.measured_run import FREE_GUESSED, PASSES, Figures, measure_run
from llama.verify.passes import reference_of
from llama.verify.sessions import AMONG_OTHERS, IN_ROWS, SESSION, SESSIONS, session_passes

KINDS = ("static", "concat", "paged")
PROMPTS = [[(7 * position + row) % 40 for position in range(length)] for row, length in enumerate((14, 10, 12))]
TEXT = [(7 * position) % 40 for position in range(24)]
LIMIT = 48


def certify(kv_cache: str = "static", *, exact: bool = False, seed: int = 0) -> Figures:
    """Measure a run of texts that are longer than a block of the paged kind."""
    model = tiny_model(max_seq_len=LIMIT, dtype=torch.float32, kv_cache=kv_cache, n_layers=1)
    model.exact = exact
    return measure_run(model, reference_of(model), PROMPTS, 8, seed=seed)


def wrong(figures: Figures) -> set[str]:
    """Return the passes that a violation names."""
    return {text.partition(":")[0] for text in figures.violations}


def test_guesses_that_are_accepted_although_they_are_wrong_are_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without exact mode, where a near tie may go the other way."""
    assert certify().violations == []
    monkeypatch.setattr("llama.generation.accepted", lambda guess, chosen: len(guess))
    for exact in (False, True):
        assert wrong(certify(exact=exact)) >= {FREE_GUESSED}


# ---- sound sessions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", ["paged", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2])])
def test_in_exact_mode_every_pass_has_the_bits_of_one_uncached_pass(kv_cache: str) -> None:
    figures = certify(kv_cache, exact=True)
    assert figures.violations == []
    assert set(SESSIONS) < set(PASSES) == set(figures.compared)
    assert figures.bit_equal == figures.compared
    assert min(figures.compared.values()) >= 2
    assert (figures.max_delta, figures.kl_max) == (0, 0)


def test_without_exact_mode_they_are_equal_down_to_rounding() -> None:
    figures = [certify(kind, seed=seed) for seed, kind in enumerate(KINDS)]
    assert [one.violations for one in figures] == [[]] * 3
    assert any(one.bit_equal[name] < one.compared[name] for one in figures for name in SESSIONS), "it has no power"


def test_no_position_is_compared_twice_and_each_is_one_of_the_text() -> None:
    model = tiny_model(max_seq_len=LIMIT, n_layers=1)
    for length, seed in ((2, 0), (3, 1), (5, 2), (24, 3)):
        for name, chunks in session_passes(model, [TEXT[:length]], seed).items():
            with torch.inference_mode():
                positions = [position for _, position, logits in chunks for _ in logits]
            assert len(positions) == len(set(positions)), name
            assert positions, name
            assert set(positions) <= set(range(length)), name


def test_a_pass_runs_on_one_text_in_four_that_the_seed_draws() -> None:
    model, found = tiny_model(max_seq_len=LIMIT, n_layers=1), set()
    for seed in range(8):
        rows = {row for row, _, _ in session_passes(model, [TEXT[:5]] * 5, seed)[SESSION]}
        assert len(rows) == 2
        found |= rows
    assert found == set(range(5))


def test_a_text_may_be_as_long_as_the_model_allows() -> None:
    model = tiny_model(max_seq_len=len(TEXT), n_layers=1)
    for seed in range(4):
        with torch.inference_mode():
            assert all([*chunks] for chunks in session_passes(model, [TEXT], seed).values())


@pytest.mark.parametrize("kv_cache", KINDS)
def test_cached_tokens_are_not_fed_again(kv_cache: str) -> None:
    """The other tests would pass with sessions that feed the whole text each time."""
    model, length, fed = tiny_model(max_seq_len=LIMIT, kv_cache=kv_cache), len(TEXT), {}
    for name, chunks in session_passes(model, [TEXT], 0).items():
        with torch.inference_mode(), watched(model) as steps:
            list(chunks)
        fed[name] = steps.widths
        assert min(steps.nbytes) > 0
    assert length < sum(fed[SESSION]) < 3 * length
    assert fed[SESSION].count(1) >= 2, "a token is computed again after it was rewound, and generated"
    assert fed[IN_ROWS][0] + fed[IN_ROWS][1] <= length
    assert fed[IN_ROWS][-1] == 1


def test_a_switch_that_is_off_stays_off_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = tiny_model(max_seq_len=LIMIT, kv_caching=False)
    for chunks in session_passes(model, [TEXT], 0).values():
        with torch.inference_mode(), watched(model) as steps:
            list(chunks)
        assert min(steps.nbytes) > 0
        assert not model.kv_caching
        assert model.cache is None
        assert not model._forward_hooks
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_takes_one_row_is_certified_too() -> None:
    model = tiny_model(max_seq_len=LIMIT, dtype=torch.float32, max_batch_size=1)
    figures = measure_run(model, reference_of(model), PROMPTS[:1], 8, seed=0)
    assert figures.violations == []
    assert all(figures.compared[name] for name in SESSIONS)


# ---- broken sessions -------------------------------------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def shares_writes(patch: pytest.MonkeyPatch) -> None:
    """Fork without a copy of the cache."""
    real = Session.fork

    def fork(self: Session) -> Session:
        branch = real(self)
        branch.cache = self.cache
        return branch

    patch.setattr(Session, "fork", fork)


def rewinds_the_text_alone(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Session, position: int) -> None:
        if position < len(self.tokens):
            self.tokens, self._logits = self.tokens[:position], None

    patch.setattr(Session, "_cut", cut)


def keeps_the_logits(patch: pytest.MonkeyPatch) -> None:
    real = Session._cut

    def cut(self: Session, position: int) -> None:
        before = self._logits
        real(self, position)
        self._logits = before

    patch.setattr(Session, "_cut", cut)


def restores_one_key_wrong(patch: pytest.MonkeyPatch) -> None:
    real = Session.restore

    def restore(self: Session, content: Content) -> None:
        content.layers[0]["keys"][0, 0] *= -1
        real(self, content)

    patch.setattr(Session, "restore", restore)


def loads_other_logits(patch: pytest.MonkeyPatch) -> None:
    real = Session.restore

    def restore(self: Session, content: Content) -> None:
        real(self, content)
        assert self._logits is not None
        self._logits = self._logits.roll(1, -1)

    patch.setattr(Session, "restore", restore)


def shifts_what_is_repeated(patch: pytest.MonkeyPatch) -> None:
    """Store the keys of a common prefix one position late."""
    real = StaticCache.repeat_first_row

    def repeat_first_row(self: StaticCache, rows: int) -> None:
        real(self, rows)
        assert self.keys is not None
        self.keys = self.keys.roll(1, 1)

    patch.setattr(StaticCache, "repeat_first_row", repeat_first_row)


def counts_no_row(patch: pytest.MonkeyPatch) -> None:
    """Share blocks between rows that do not know it, so that rows overwrite each other."""
    real = PagedCache.repeat_first_row

    def repeat_first_row(self: PagedCache, rows: int) -> None:
        real(self, rows)
        self.shared = [0] * rows

    patch.setattr(PagedCache, "repeat_first_row", repeat_first_row)


def joins_one_position_short(patch: pytest.MonkeyPatch) -> None:
    """Leave the last position of a text behind when it joins others."""
    real = StaticCache.join

    def join(self: StaticCache, other: StaticCache, rows: int, length: int) -> None:
        assert other.keys is not None
        other.keys[:, length - 1] = 0
        real(self, other, rows, length)

    patch.setattr(StaticCache, "join", join)


FAULTS: list[tuple[Break, str, set[str]]] = [
    (shares_writes, "concat", {SESSION}),
    (rewinds_the_text_alone, "paged", {SESSION}),
    (restores_one_key_wrong, "paged", {SESSION}),
    (shifts_what_is_repeated, "static", {IN_ROWS}),
    (joins_one_position_short, "static", {AMONG_OTHERS}),
]
OF_PARTS: list[tuple[Break, str, set[str]]] = [
    (keeps_the_logits, "static", {SESSION}),
    (loads_other_logits, "concat", {SESSION}),
    (counts_no_row, "paged", {IN_ROWS}),  # with a row of other tokens
]
CASES = [*FAULTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OF_PARTS)]


@pytest.mark.parametrize(("fault", "kv_cache", "found_by"), CASES)
def test_a_broken_session_is_a_violation_of_its_pass_and_of_no_other(
    fault: Break, kv_cache: str, found_by: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert wrong(certify(kv_cache)) == found_by


def test_in_exact_mode_wrong_last_bits_of_a_restored_position_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.restore

    def restore(self: Session, content: Content) -> None:
        numbers = content.layers[0]["values"].view(torch.int32)[0, 0]
        numbers ^= 1
        real(self, content)

    monkeypatch.setattr(Session, "restore", restore)
    assert certify().violations == [], "it is rounding without exact mode"
    (violation,) = certify(exact=True).violations
    assert violation.startswith(f"{SESSION}: row ")
    assert "the bits are not those of the uncached pass" in violation


def test_nan_in_a_session_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.cache_copy

    def cache_copy(self: Session, *, kv_caching: bool) -> Cache:
        cache = real(self, kv_caching=kv_caching)
        assert cache is not None
        assert cache.layers[0].values is not None
        cache.layers[0].values[:, 0] = torch.nan
        return cache

    monkeypatch.setattr(Session, "cache_copy", cache_copy)
    (violation,) = certify().violations
    assert violation.startswith(f"{IN_ROWS}: row ")
    assert "the logits are not finite" in violation
