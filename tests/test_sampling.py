"""A token is chosen as documented: the same as by a slow and simple sampler in float64."""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import unrefused
from torch import Tensor

import llama.sampling
from llama.sampling import Sampler, Sampling, Settings, choose, choose_rows, most_likely, penalize, row_streams

META_VOCAB = 128_256
# Sums of up to 128,256 probabilities in float64, each rounded by at most 2^-53 of a total of 1.
SUM_ERROR = META_VOCAB * 2.0**-53

few = settings(max_examples=40, derandomize=True, deadline=None)
# Logits on a grid, so that ties are frequent and what is not tied is far apart.
grids = st.lists(st.integers(-6, 6), min_size=2, max_size=24).map(lambda row: [x / 2 for x in row])
shares = st.sampled_from([0.01, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0])


def oracle(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the ids that may be drawn, the most likely first, with their probabilities: the definition, step by step.

    For a temperature above 0 and no penalty. The slack of 1e-12 is for sums that equal p except for rounding.
    """
    scaled = [(x - max(logits)) / sampling.temperature for x in logits]
    total = math.fsum(map(math.exp, scaled))
    kept = sorted(((math.exp(x) / total, id) for id, x in enumerate(scaled)), key=lambda pair: (-pair[0], pair[1]))
    kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        reach = sampling.top_p * math.fsum(p for p, _ in kept)
        kept = [pair for n, pair in enumerate(kept) if n == 0 or math.fsum(p for p, _ in kept[:n]) < reach - 1e-12]
    kept = [(p, id) for p, id in kept if p >= sampling.min_p * kept[0][0]]
    left = math.fsum(p for p, _ in kept)
    return {id: p / left for p, id in kept}


def sample(logits: Tensor, draws: Tensor, sampling: Sampling) -> Tensor:
    return choose(logits, sampling.settings, None, draws)[0]


def support(logits: Tensor, sampling: Sampling) -> set[int]:
    """Return every id that some draw chooses, by draws from all over the unit interval."""
    probs = oracle(logits.double().tolist(), sampling)
    # Draws as fine as the smallest share, wherever the order of the shares puts it.
    n = 4 * math.ceil(1 / min(probs.values()))
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return set(sample(logits.expand(n, -1), draws, sampling).tolist())


def kept(logits: Tensor, top_k: int | None, top_p: float) -> set[int]:
    """Return the ids to which `most_likely` gives a probability above 0."""
    probs, ids, _ = most_likely(logits, logits.double().softmax(-1), top_k, top_p if top_p < 1 else None)
    return set(ids[probs > 0].tolist())


def full_sort(probs: Tensor, top_k: int | None, top_p: float) -> dict[int, float]:
    """Return what top_k and top_p keep of a sorted row, independently of the code under test."""
    top, ids = probs[0].sort(descending=True, stable=True)
    top, ids = top[:top_k], ids[:top_k]
    before = top.cumsum(0) - top
    keep = before < (top_p * top.sum() if top_p < 1 else math.inf)
    keep[0] = True
    return dict(zip(ids[keep].tolist(), top[keep].tolist(), strict=True))


# ---- what may be drawn -----------------------------------------------------------------------------------------------


@few
@given(
    grids,
    st.sampled_from([1.0, 1.5, 2.0]),
    shares,
    st.none() | st.integers(1, 30),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_support_of_all_settings_together_is_the_oracle_s(
    row: list[float], temperature: float, top_p: float, top_k: int | None, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = torch.tensor([row])
    assert support(logits[0], sampling) == set(oracle(row, sampling))


@few
@given(grids, shares)
def test_top_p_keeps_the_fewest_tokens_that_reach_p_and_the_argmax(row: list[float], top_p: float) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    probs = logits.softmax(-1)[0]
    ids = kept(logits, None, top_p)
    assert logits.argmax().item() in ids
    mass, least = sum(probs[id].item() for id in ids), min(probs[id].item() for id in ids)
    assert mass >= top_p - SUM_ERROR
    assert mass - least < top_p + SUM_ERROR
    assert len(ids) == 1 or mass - least < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_top_p_of_one_drops_nothing_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, META_VOCAB, generator=generator).to(dtype)
    everything = Sampling(temperature=1, top_p=1)
    # Probabilities are at least 1e-8 here; the last id is drawn by the last draw below 1, the first by 0.
    assert sample(logits, torch.tensor([1 - 2.0**-53]), everything).item() == META_VOCAB - 1
    assert sample(logits, torch.tensor([0.0]), everything).item() == 0
    # A draw from the middle of each token's share finds it, whichever it is.
    probs = logits.double().softmax(-1)[0]
    middles = probs.cumsum(0) - probs / 2
    for start in range(0, META_VOCAB, META_VOCAB // 16):
        ids = torch.arange(start, min(start + 8, META_VOCAB))
        assert torch.equal(sample(logits.expand(len(ids), -1), middles[ids], everything), ids)


@pytest.mark.parametrize("vocab", [10, 5000])  # without and with the first look at 1024 candidates
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 3 / 8), (4, 0.75)])
def test_of_equal_logits_at_the_cut_the_lowest_ids_stay(vocab: int, top_k: int | None, top_p: float) -> None:
    logits = torch.full((1, vocab), -torch.inf).index_fill(1, torch.tensor([0, 2, 3, 5, 6, 7, 8, 9]), 1.0)
    assert kept(logits, top_k, top_p) == {0, 2, 3}


def test_of_equal_logits_greedy_takes_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]]).expand(2, -1)
    assert sample_with(logits, Sampling(temperature=0)) == [1, 1]
    assert sample_with(logits, Sampling(temperature=1, top_p=0)) == [1, 1]
    assert sample_with(logits, Sampling(temperature=1, top_k=1)) == [1, 1]
    assert sample_with(torch.zeros(2, META_VOCAB), Sampling(temperature=0)) == [0, 0]
    assert sample_with(torch.zeros(2, META_VOCAB), Sampling(temperature=1, top_p=0)) == [0, 0]


def sample_with(logits: Tensor, sampling: Sampling, seed: int = 0) -> list[int]:
    return chosen_by(samplers(sampling, seed, [[0]] * len(logits), logits.shape[1]), logits)


def samplers(sampling: Sampling, seed: int | None, prompts: list[list[int]], vocab: int) -> list[Sampler]:
    streams = row_streams(seed, len(prompts))
    return [Sampler(sampling, stream, prompt, vocab) for stream, prompt in zip(streams, prompts, strict=True)]


def chosen_by(rows: list[Sampler], logits: Tensor) -> list[int]:
    """Return the next token of each row, which the row then contains."""
    ids: list[int] = choose_rows(logits, rows, torch.tensor([row.draw() for row in rows], dtype=torch.float64)).tolist()
    for row, id in zip(rows, ids, strict=True):
        row.saw(id)
    return ids


# ---- how it behaves --------------------------------------------------------------------------------------------------


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {  # of noise, logits
    "flat": lambda noise: noise * 1e-3,
    "normal": lambda noise: noise,
    "peaked": lambda noise: noise * 12,
    "tied": lambda noise: (noise * 2).round() / 2,
    "all equal": torch.zeros_like,
    "tied at the top": lambda noise: noise.clamp(max=1.5),
    "one certain": lambda noise: noise.index_fill(1, torch.tensor([noise.shape[1] - 1]), 800.0),
    "tied beyond 1024 candidates": lambda noise: torch.arange(noise.shape[1])[None].double() % 2 * -20,
}


def shaped(name: str, vocab: int) -> Tensor:
    return SHAPES[name](torch.randn(1, vocab, generator=torch.Generator().manual_seed(7), dtype=torch.float64))


@pytest.mark.parametrize(("name", "vocab"), [*zip(SHAPES, cycle([2048, 2049, 5000]), strict=False)])
def test_a_look_at_1024_candidates_equals_a_full_sort(name: str, vocab: int) -> None:
    probs = shaped(name, vocab).softmax(-1)
    for top_k in (None, 1, 50, 1023, 1024, 1025, 2 * vocab):
        for top_p in (0.0, 0.2, 0.7, 0.95, 0.9999, 1.0):
            if top_k is None and top_p == 1:
                continue  # nothing is dropped, so nothing is looked at
            found, ids, _ = most_likely(probs, probs, top_k, top_p if top_p < 1 else None)
            shown = {id: p for id, p in zip(ids[0].tolist(), found[0].tolist(), strict=True) if p > 0}
            expected = {id: p for id, p in full_sort(probs, top_k, top_p).items() if p > 0}
            assert list(shown.items()) == list(expected.items()), (top_k, top_p)


def test_where_few_tokens_are_kept_only_the_candidates_are_sorted() -> None:
    for name, looked_at in (("peaked", 1024), ("flat", 5000)):
        logits = shaped(name, 5000)
        assert most_likely(logits, logits.softmax(-1), None, 0.9)[0].shape == (1, looked_at)


rows_of_logits = st.tuples(
    st.sampled_from(list(SHAPES)[:-1]),  # of fewer than 1024
    st.integers(1, 40),  # how many are possible at all
    st.integers(0, 2**31),
)


@few
@given(
    st.lists(rows_of_logits, min_size=1, max_size=3),
    st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    shares,
    st.none() | st.integers(1, 8),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([1.0, 1.3]),
    st.integers(0, 2**31),
)
def test_choose_ahead_equals_choose_or_reports_that_it_is_unsure(
    rows: list[tuple[str, int, int]], temperature: float, top_p: float, top_k: int | None, min_p: float,
    penalty: float, seed: int,
) -> None:  # fmt: skip
    """With settings as tensors, and eight candidates of forty tokens, some of them impossible."""
    sampling = Sampling(temperature, top_p, top_k, min_p, penalty)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.cat([shaped(name, 40) for name, _, _ in rows])
    for row, (_, possible, order) in enumerate(rows):
        logits[row, torch.randperm(40, generator=torch.Generator().manual_seed(order))[possible:]] = -torch.inf
    seen = torch.rand(logits.shape, generator=generator) < 0.2
    draws = torch.rand(len(rows), generator=generator, dtype=torch.float64)
    expected, _ = choose(logits, sampling.settings, after := seen.clone(), draws)
    assert torch.equal(after, seen if penalty == 1 else seen.scatter(1, expected[:, None], True))
    settings = Settings(*(None if x is None else torch.tensor(x, dtype=torch.float64) for x in sampling.settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.sampling, "_CANDIDATES", 8)
        few_ids, sure = choose(logits, settings, seen.clone(), draws, whole=False)
        plain, _ = choose(logits, sampling.settings, seen.clone(), draws)
    all_ids, none_unsure = choose(logits, settings, seen.clone(), draws, whole=True)
    assert none_unsure is None
    assert all_ids.tolist() == plain.tolist() == expected.tolist()
    filtered = top_k is not None or top_p < 1
    assert (sure is not None) == filtered
    for row in range(len(rows)):
        assert few_ids[row] == expected[row] or (sure is not None and not sure[row])
        if top_k is not None and top_k < 8 and sure is not None and rows[row][0] in ("normal", "peaked"):
            assert sure[row]  # and often so


def test_a_nucleus_that_is_given_replaces_the_sort_of_top_p_alone() -> None:
    """It gets penalized logits, and the ids that it returns are marked."""
    logits, draws = torch.tensor([[4.0, 2.0, 1.0]] * 2), torch.tensor([0.1, 0.2], dtype=torch.float64)
    seen = torch.tensor([[True, False, False], [False, False, False]])
    given, certain = [], torch.tensor([False, True])

    def nucleus(*values: Any) -> tuple[Tensor, Tensor]:
        given.append(values)
        return torch.tensor([2, 1]), certain

    ids, sure = choose(logits, Settings(0.7, 0.9, None, None, 8.0), seen, draws, nucleus=nucleus)
    assert ids.tolist() == [2, 1]
    assert sure is certain
    assert seen.tolist() == [[True, False, True], [False, True, False]]
    assert given[0][0].tolist() == [[0.5, 2.0, 1.0], [4.0, 2.0, 1.0]]
    assert given[0][1:] == (0.7, 0.9, draws)
    top_p = Settings(0.7, 0.9, None, None, None)
    others = [{"top_k": 2}, {"min_p": 0.1}, {"top_p": None}, {"temperature": None}]
    for chosen, whole in [*((top_p._replace(**other), None) for other in others), (top_p, True)]:
        assert choose(logits, chosen, None, draws, whole=whole, nucleus=nucleus)[0].tolist() == [0, 0]
    assert choose(logits, top_p, None, None, nucleus=nucleus)[0].tolist() == [0, 0]
    assert len(given) == 1


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_draws_have_the_probabilities_of_the_softmax(top_p: float) -> None:
    logits = torch.tensor([1.5, 0.5, 0.0, -0.5, -1.0, 2.0])
    sampling = Sampling(temperature=0.9, top_p=top_p)
    expected = oracle(logits.tolist(), sampling)
    n = 100_000
    draws = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = sample(logits.expand(n, -1), draws, sampling).bincount(minlength=6).tolist()
    chi2 = sum((counts[id] - n * p) ** 2 / (n * p) for id, p in expected.items())
    # 99.9 % of fair samples stay below this for 5 degrees of freedom, and fewer freedoms only lower it.
    assert chi2 < 20.52
    assert sum(counts[id] for id in expected) == n


def test_200_000_draws_never_leave_the_support() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 3
    logits[0, [0, 1, 39]] = -torch.inf  # shares of nothing at both ends of the running sum
    sampling = Sampling(temperature=1, top_p=1)
    draws = torch.rand(200_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    draws[:3] = torch.tensor([0.0, 1 - 2.0**-53, 2.0**-60])
    chosen = set(sample(logits.expand(len(draws), -1), draws, sampling).tolist())
    assert not chosen & {0, 1, 39}
    sampling = Sampling(temperature=1, top_p=0.8, top_k=9, min_p=0.02)
    some = draws[:20_000]
    assert {*sample(logits.expand(len(some), -1), some, sampling).tolist()} == {*oracle(logits[0].tolist(), sampling)}


# ---- greedy, and the limits of numbers -------------------------------------------------------------------------------


@few
@given(grids, shares, st.none() | st.integers(1, 5), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_temperature_0_is_the_argmax_whatever_else_is_set(
    row: list[float], top_p: float, top_k: int | None, min_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=0, top_p=top_p, top_k=top_k, min_p=min_p)
    assert sample_with(torch.tensor([row]), sampling, seed) == [row.index(max(row))]


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[-3e4, 2.0, 2.1, 3e4, 0.0], [5.0, 1.0, 2.0, 3.0, 4.0]])
    for temperature, top_p in product((1e-45, 1e-300, 5e-324), (1.0, 0.9)):
        assert sample_with(logits, Sampling(temperature=temperature, top_p=top_p)) == [3, 0], (temperature, top_p)


@few
@given(
    st.sampled_from([1e-300, 0.7, 1e13, 1e30, 1.7e308]),
    st.sampled_from([7, 3000]),
    shares,
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_top_k_keeps_the_most_likely_at_any_temperature(
    temperature: float, vocab: int, top_p: float, top_k: int, seed: int
) -> None:
    """If all probabilities are equal in float64, the logits still order the tokens."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
    largest = logits.topk(top_k).indices
    chosen = sample_with(logits, Sampling(temperature=temperature, top_p=top_p, top_k=top_k), seed)
    assert all(id in ids for id, ids in zip(chosen, largest.tolist(), strict=True))


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("options", [{}, {"top_p": 1.0}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}])
def test_a_row_of_nan_gives_some_id_and_leaves_other_rows_alone(vocab: int, options: dict[str, float]) -> None:
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    sound = chosen_by(samplers(Sampling(**options), 5, [[1], [2]], vocab), logits)
    logits[0, 3] = torch.nan
    spoiled = chosen_by(samplers(Sampling(**options), 5, [[1], [2]], vocab), logits)
    assert 0 <= spoiled[0] < vocab  # the loop says which row and step it was
    assert spoiled[1] == sound[1]


# ---- bad settings ----------------------------------------------------------------------------------------------------

_NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "0.5", None, [0.5], 1j]


BAD: dict[str, list[Any]] = {
    "temperature": [-1, -1e-9, 10**400, *_NOT_NUMBERS],
    "top_p": [-0.1, 1.0000001, 2, *_NOT_NUMBERS],
    "min_p": [-0.1, 1.1, *_NOT_NUMBERS],
    "repetition_penalty": [0, -1.0, 10**400, *_NOT_NUMBERS],
    "top_k": [0, -1, 1.5, True, "5", math.nan, math.inf],
}


def test_a_bad_setting_is_refused_with_its_value_and_the_limit() -> None:
    limits = r"between 0 and 1|at least [01]|above 0"
    calls = [(name, value, partial(Sampling, **{name: value})) for name, values in BAD.items() for value in values]
    assert unrefused((call, f"{name}={re.escape(repr(value))}.*({limits})") for name, value, call in calls) == []


# ---- the repetition penalty ------------------------------------------------------------------------------------------


def _penalty_of_transformers(penalty: float) -> Any:
    from transformers import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(penalty)


@few
@given(grids, st.sampled_from([0.5, 1.0, 1.1, 2.0, 10.0]), st.data())
def test_penalty_is_that_of_transformers(row: list[float], penalty: float, data: st.DataObject) -> None:
    logits = torch.tensor([row])
    tokens = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=9))
    seen = torch.zeros(1, len(row), dtype=torch.bool).index_fill(1, torch.tensor(tokens), True)
    theirs = _penalty_of_transformers(penalty)(torch.tensor([tokens]), logits.clone())
    assert torch.equal(penalize(logits, seen, penalty), theirs)


def test_penalty_comes_before_the_argmax() -> None:
    rows = samplers(Sampling(temperature=0, repetition_penalty=2.0), None, [[0]], 4)
    logits = torch.tensor([[3.0, 2.0, 1.8, -1.0]])
    assert [chosen_by(rows, logits) for _ in range(3)] == [[1], [2], [0]]  # 3/2 < 2, then 2/2 < 1.8, then 1.5 leads


def test_tokens_of_the_prompt_count_as_seen_and_those_of_other_rows_and_padding_do_not() -> None:
    rows = samplers(Sampling(temperature=0, repetition_penalty=2.0), None, [[1], [2, 2, 3]], 5)
    assert [row.seen.nonzero()[:, 0].tolist() for row in rows if row.seen is not None] == [[1], [2, 3]]
    assert chosen_by(rows, torch.tensor([[1.9, 3.0, 0, 0, 0], [1.9, 1.0, 3.0, 0, 0]])) == [0, 0]


def test_penalty_of_1_keeps_no_account() -> None:
    assert samplers(Sampling(), 0, [[1]], 5)[0].seen is None


def test_a_penalty_past_the_range_of_float32_still_orders_the_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    for (penalty, expected), temperature in product(((1e-300, 1), (1e-40, 1), (1e40, 3), (1e300, 3)), (0, 1e-3)):
        sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
        assert chosen_by(samplers(sampling, 0, [[0, 1, 2]], 4), logits) == [expected], (penalty, temperature)


# ---- random streams --------------------------------------------------------------------------------------------------


def test_row_i_has_the_stream_of_seed_plus_i_and_a_list_gives_each_row_its_own() -> None:
    assert [stream.initial_seed() for stream in row_streams(7, 3)] == [7, 8, 9]
    assert [stream.initial_seed() for stream in row_streams([5, 1, 5], 3)] == [5, 1, 5]


def test_seeds_are_whole_numbers_of_any_kind_within_the_limits() -> None:
    bad: list[Any] = [2**64, -(2**63) - 1, True, [True, 0], 1.5, "12", [0, 1.5], [0, None], [0, "1"]]
    why = r"must be a whole number from -2\*\*63 to 2\*\*64 - 1"
    assert unrefused((partial(row_streams, seed, 2), why) for seed in bad) == []
    good: list[Any] = [numpy.int64(3), torch.tensor(3), numpy.array([3, 4]), torch.tensor([3, 4])]
    assert [[stream.initial_seed() for stream in row_streams(seed, 2)] for seed in good] == [[3, 4]] * 4
    assert len(row_streams([2**64 - 1, -(2**63)], 2)) == 2


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    together = samplers(Sampling(temperature=1), 10, [[0]] * 5, 300)
    first, second = chosen_by(together, logits), chosen_by(together, logits)
    for row in range(5):
        alone = samplers(Sampling(temperature=1), 10 + row, [[0]], 300)
        assert [chosen_by(alone, logits[row : row + 1]) for _ in range(2)] == [[first[row]], [second[row]]]


def test_rows_of_different_settings_choose_what_each_chooses_alone() -> None:
    logits = 3 * torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    settings = [Sampling(0), Sampling(1.0), Sampling(0.5, top_k=3), Sampling(0, repetition_penalty=9.0), Sampling(1.0)]
    settings += [Sampling(0.9, 0.5, min_p=0.1, repetition_penalty=1.5)]
    together = [samplers(sampling, row, [[row]], 3000)[0] for row, sampling in enumerate(settings)]
    alone = [samplers(sampling, row, [[row]], 3000) for row, sampling in enumerate(settings)]
    for _ in range(3):
        each = [chosen_by(rows, logits[row : row + 1])[0] for row, rows in enumerate(alone)]
        assert chosen_by(together, logits) == each


def test_draws_that_are_put_back_are_drawn_again_in_order() -> None:
    (row,), (other,) = (samplers(Sampling(1.0), 3, [[0]], 9) for _ in range(2))
    expected = [other.draw() for _ in range(5)]
    first = [row.draw() for _ in range(3)]
    row.put_back(first[1:])
    row.put_back([row.draw()])  # before the other one
    assert [first[0], *(row.draw() for _ in range(4))] == expected


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    results = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        results.append(sample_with(logits, Sampling(temperature=1), seed=3))
        sample_with(logits, Sampling(temperature=1), seed=3)
        row_streams(None, 3)
        assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


def test_draws_are_made_on_the_cpu_under_any_default_device() -> None:
    """A CPU's generator cannot draw on another default device."""
    (row,), (same,) = (samplers(Sampling(), 3, [[1]], 9) for _ in range(2))
    with torch.device("meta"):
        draw = row.draw()
    assert draw == same.draw()
