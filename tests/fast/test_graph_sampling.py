"""The Triton kernels that choose tokens choose those of `llama.sampling`, or report that they are unsure.

They run in Triton's interpreter; tests/fast/test_graph_kernels.py starts it. Only a GPU shows that programs that run at
the same time add correctly.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import launches, machine_code
from skips import interpreted, needs_cuda, not_interpreted
from torch import Tensor

from llama.sampling import Settings, choose

triton = pytest.importorskip("triton")
sampling = pytest.importorskip("llama.fast.graph_sampling")
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {  # of noise, logits
    "flat": lambda noise: noise * 1e-3,
    "normal": lambda noise: noise * 3,
    "peaked": lambda noise: noise * 12,
    "tied": lambda noise: (noise * 8).round() / 8,
    "zeros of both signs": lambda noise: (noise * 1e-30).clamp(-0.0, 0.0) - (torch.arange(noise.shape[1]) % 3).float(),
    "far outlier": lambda noise: noise.index_fill(1, torch.tensor([7]), -1e9),
    "some impossible": lambda noise: noise.masked_fill(noise < 0, -torch.inf),
}


@pytest.fixture(autouse=True)
def _garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory, in which a GPU has anything, with numbers that are not zero."""
    empty = torch.empty
    monkeypatch.setattr(sampling.torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(77))


def shaped(name: str, rows: int, vocab: int) -> Tensor:
    return SHAPES[name](torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)))


def drawn(logits: Tensor, temperature: float, top_p: float, draws: Tensor) -> list[int]:
    """Return the ids of the sort in float64."""
    settings = Settings(temperature, top_p, None, None, None)
    return choose(logits, settings, None, draws, whole=True)[0].tolist()


@interpreted
@pytest.mark.parametrize(
    ("name", "vocab", "temperature", "top_p"),
    [
        ("normal", 2500, 0.7, 0.9),
        ("normal", 5003, 5.0, 0.9999),
        ("peaked", 2500, 0.7, 0.9999),
        ("peaked", 70, 0.05, 0.1),
        ("flat", 5003, 0.7, 0.9),
        ("tied", 2500, 0.7, 0.9),
        ("zeros of both signs", 600, 5.0, 0.3),
        ("normal", 1024, 1e300, 0.1),
        ("far outlier", 2048, 5.0, 0.9),
        ("some impossible", 1025, 1.0, 0.9),
        ("normal", 1025, 1e-300, 0.0),
        ("normal", 1, 1.0, 0.9),
        ("normal", 128_256, 0.7, 0.95),
    ],
)
def test_the_nucleus_has_the_tokens_of_a_sort(name: str, vocab: int, temperature: float, top_p: float) -> None:
    rows = 4 if vocab < 100_000 else 1
    logits = shaped(name, rows, vocab)
    draws = torch.tensor([0.37, 0.0, 1 - 2.0**-53, 0.93], dtype=torch.float64)[:rows]
    ids, sure = sampling.nucleus(logits, temperature, top_p, draws)
    assert ids.dtype == torch.int64
    assert sure.dtype == torch.bool
    assert ids.tolist() == drawn(logits, temperature, top_p, draws)
    assert sure.all()


@interpreted
def test_the_order_in_which_tokens_enter_a_list_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, draws = shaped("flat", 1, 300).repeat(2, 1), torch.tensor([0.3, 0.7], dtype=torch.float64)
    logits -= logits.amin()  # and one outlier, so that a few bins have all tokens
    logits[:, 5] = -100.0
    expected, lengths = drawn(logits, 1.0, 0.9, draws), []

    class Shuffled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*given: Any, **options: Any) -> None:
                state, lists, turn = given[3], given[5], given[8]
                for row, count in enumerate(state[:, sampling.BINS.value + turn].tolist()):
                    lengths.append(count)
                    lists[row, :count] = lists[row, torch.randperm(count)]
                resolve[grid](*given, **options)

            return launch

    resolve = sampling._resolve
    monkeypatch.setattr(sampling, "_resolve", Shuffled())
    ids, sure = sampling.nucleus(logits, 1.0, 0.9, draws)
    assert min(lengths) > 100
    assert sure.all()
    assert ids.tolist() == expected


@interpreted
def test_what_rounding_might_decide_is_not_certain() -> None:
    """Of a running sum of 2 ** 46 units, 256 are within the margin, and 1024 are not."""
    logits = torch.tensor([-50.0, 1.0, -50.0, 1.0])
    near = torch.tensor([0, -(2.0**-38), 2.0**-38, -(2.0**-36), 2.0**-36], dtype=torch.float64)
    ids, sure = sampling.nucleus(logits.repeat(5, 1), 1.0, 0.9, 0.5 + near)  # of the draw
    assert sure.tolist() == [False, False, False, True, True]
    assert ids[3:].tolist() == [1, 3]
    high = torch.tensor([0.99], dtype=torch.float64)
    for distance in near.tolist():  # of the cut
        ids, sure = sampling.nucleus(logits[None], 1.0, 0.5 + distance, high)
        assert sure.tolist() == [abs(distance) > 2.0**-37]
        assert not sure or ids.tolist() == [3 if distance > 0 else 1]


@interpreted
def test_the_margin_grows_with_the_sum_which_float64_rounds_coarsely() -> None:
    logits, unit = torch.zeros(2, 1000), 1 / (1000 * 2.0**45)
    draws = 0.5 + unit * 1064 * torch.tensor([30, 40], dtype=torch.float64)
    ids, sure = sampling.nucleus(logits, 1.0, 0.9995, draws)
    assert sure.tolist() == [False, True]
    assert ids.tolist() == [500, 500]


@interpreted
@pytest.mark.parametrize(
    ("equal", "top_p", "draw", "certain"),
    [
        (1500, 0.1, 0.03, False),  # the cut is among the equal tokens, the draw is not
        (1500, 0.95, 0.5, False),  # the draw is, the cut is not
        (1500, 0.95, 0.01, True),
        (1000, 0.3, 0.9, True),
    ],
)
def test_more_equal_tokens_than_a_list_has_slots_are_not_certain(
    equal: int, top_p: float, draw: float, certain: bool
) -> None:
    """The row before has 1500 equal tokens, and must not write into the list of this one."""
    logits = torch.cat(
        (torch.full((2, 1500), 1.0), torch.full((2, 2), 9.0), torch.linspace(0.5, 0, 500).expand(2, -1)), 1
    )
    logits[1, equal:1500] = -30.0
    draws = torch.tensor([draw, draw], dtype=torch.float64)
    ids, sure = sampling.nucleus(logits, 2.0, top_p, draws)
    assert sure[1] == certain
    assert ((ids >= 0) & (ids < logits.shape[1])).all()
    assert not certain or ids.tolist()[1:] == drawn(logits[1:], 2.0, top_p, draws[1:])


@interpreted
@pytest.mark.parametrize("vocab", [1, 1024, 2500])
def test_the_first_most_likely_token_is_written_into_the_text(vocab: int) -> None:
    torch.manual_seed(vocab)
    around = torch.full((9, vocab), torch.nan)
    around[:8] = torch.randn(8, vocab).clamp(max=2.5)
    logits = around[:8]
    logits[1] = torch.where(torch.arange(vocab) > 0, 0.0, -0.0)
    logits[2:5, 0] = 9.0  # in another part than the values that are not finite
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf), 2):
        logits[row, vocab // 2] = value
    logits[5] = torch.finfo(torch.float32).max  # whose sum is not finite, but each of them
    texts = torch.randint(9, (8, 12))
    tokens = texts[:, :10]
    positions, chosen = torch.tensor([0, 3, 4, 5, 6, 8, 9, 7]), torch.zeros(8, dtype=torch.int64)
    expected = logits.argmax(-1).where(logits.isfinite().all(-1), -1)
    places = (positions + 1).clamp(max=9)
    wanted = texts.clone()
    wanted[torch.arange(8), places] = expected.clamp(min=0)
    sampling.advance(logits, tokens, positions, chosen)
    assert torch.equal(chosen, expected)
    assert torch.equal(positions, places)
    assert torch.equal(texts, wanted)


@interpreted
@pytest.mark.filterwarnings("ignore:.*(invalid value|NaN):RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_ids_of_rows_that_are_not_finite_are_in_the_vocabulary(value: float) -> None:
    logits = torch.randn(3, 2000)
    logits[0, 5], logits[1] = value, value
    ids, sure = sampling.nucleus(logits, 0.7, 0.9, torch.full((3,), 0.6, dtype=torch.float64))
    assert ((ids >= 0) & (ids < 2000)).all()
    assert sure[1:].tolist() == [False, True]


def launched() -> None:
    """Launch all kernels for the vocabulary of Llama 3."""

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    logits, number = empty(4, 128_256, dtype=torch.float32), empty(dtype=torch.float64)
    sampling.advance(logits, empty(4, 90), empty(4), empty(4))
    sampling.nucleus(logits, number, number, empty(4, dtype=torch.float64))


@pytest.mark.slow
@not_interpreted
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_sampling_compile_without_spills(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ["_peaks", "_step_on", "_histogram", "_gather", "_resolve"]
    made = launches(monkeypatch, sampling, names, launched)
    assert len(made) == 8  # two of a greedy step, and six
    for launch in made:
        code = machine_code(*launch, capability=capability)
        adds = launch[0].__name__ in ("_histogram", "_gather")
        assert ("atom.global.gpu.relaxed.add.u64" in code.ptx) == adds


@pytest.mark.gpu
@needs_cuda
@not_interpreted
@pytest.mark.parametrize("name", SHAPES)
def test_a_gpu_draws_the_tokens_of_a_sort_twice_and_finds_the_most_likely(name: str) -> None:
    logits = shaped(name, 16, 128_256).cuda()
    draws = torch.rand(16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).cuda()
    ids, sure = sampling.nucleus(logits, 0.7, 0.9, draws)
    again = sampling.nucleus(logits, 0.7, 0.9, draws)
    assert torch.equal(sure, again[1])
    assert torch.equal(ids[sure], again[0][sure])
    expected = torch.tensor(drawn(logits, 0.7, 0.9, draws))
    assert torch.equal(ids[sure].cpu(), expected[sure.cpu()])
    assert sure.all() or name not in ("normal", "peaked")
    tokens, positions, chosen = (
        torch.zeros(*size, dtype=torch.int64, device="cuda") for size in ((16, 9), (16,), (16,))
    )
    sampling.advance(logits, tokens, positions, chosen)
    assert torch.equal(chosen, logits.argmax(-1).where(logits.isfinite().all(-1), -1))
    assert torch.equal(tokens[:, 1], chosen.clamp(min=0))
