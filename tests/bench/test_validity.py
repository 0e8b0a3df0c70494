"""Each check of the validity block is judged by all that was seen: one sign that is wrong is enough to violate it."""

from typing import Any

import pytest

from llama.bench.cell import Cell
from llama.bench.run.engines import Run
from llama.bench.run.validity import judge, notes
from llama.bench.schema import Row
from llama.costs import MB

CELL = Cell(batch_size=3, input_len=7, output_len=3)
CACHED, WHOLE = [(3, 7), (3, 1), (3, 1)], [(3, 7), (3, 8), (3, 9)]


def good_run(**changes: Any) -> Run:
    """Return a cached run of CELL as it should be seen."""
    seen = {"fed": CACHED, "ids": [[1, 2, 3]] * 3, "cache_bytes": 100, "cache_length": 10}
    return Run(**seen | changes)


def good_warm_up(**changes: Any) -> Run:
    return Run(**{"fed": CACHED[:2], "greedy": True, **changes})


def checks(run: Run, warm_up: Run, cell: Cell = CELL, **changes: Any) -> dict[str, Row]:
    given = {"max_seq_len": 64, "reset_seen": (5 * MB, 5 * MB), **changes}
    return {check["name"]: check for check in judge(cell, run, warm_up, **given)}


def status(run: Run, warm_up: Run, name: str, cell: Cell = CELL, **changes: Any) -> str:
    return checks(run, warm_up, cell, **changes)[name]["status"]


@pytest.mark.parametrize(
    ("kv_caching", "fed", "held", "expected"),
    [
        (True, CACHED, 100, "ok"),
        (True, CACHED, 0, "violated"),  # one token a step, as with a cache, and none is held
        (True, WHOLE, 100, "violated"),  # a cache is held, and the whole text is fed all the same
        (True, WHOLE, 0, "violated"),
        (False, WHOLE, 0, "ok"),
        (False, WHOLE, 100, "violated"),
        (False, CACHED, 0, "violated"),
        (True, CACHED[:1], 100, "ok"),
        (True, CACHED[:1], 0, "violated"),
        (False, CACHED[:1], 100, "violated"),
        (True, CACHED, None, "ok"),
        (True, WHOLE, None, "violated"),
        (True, CACHED[:1], None, "not observed"),  # a prompt alone looks alike in both modes
    ],
)
def test_a_cache_is_on_or_off_by_what_is_fed_and_by_what_is_held(
    kv_caching: bool, fed: list[tuple[int, int]], held: int | None, expected: str
) -> None:
    run = good_run(fed=fed, cache_bytes=held)
    assert status(run, good_warm_up(), "cache", CELL.but(kv_caching=kv_caching)) == expected


def details(run: Run, warm_up: Run | None = None, cell: Cell = CELL, **changes: Any) -> dict[str, str]:
    found = checks(run, warm_up or good_warm_up(), cell, **changes)
    return {name: check["detail"] for name, check in found.items()}


def test_a_correct_run_passes_every_check_and_each_says_what_was_seen() -> None:
    assert {check["status"] for check in checks(good_run(), good_warm_up()).values()} == {"ok"}
    assert details(good_run(cache_bytes=3 * MB), reset_seen=(5 * MB, 4 * MB)) == {
        "cache": "asked for on; 1 fed per row and step, 3.0 MB cached",
        "tokens": "3 x 7 in, 3 x 3 out, 27 fed of 27 worked out",
        "no overflow": "9 positions fed, the cache's capacity is 10, the model's limit is 64",
        "no early end": "0 rows ended before 3 tokens",
        "warm-up": "3 x 7, 3 x 1 fed before the clock was started",
        "statistics reset": "the peak was 5.0 MB at the start, with 4.0 MB in use",
        "same sampler": "greedy was asked for; what the warm-up fed back was the most likely one",
    }
    told = details(good_run(fed=CACHED[:1], cache_bytes=None, ids=[[1], [1, 2]]), Run(), reset_seen=None)
    assert told == {
        "cache": "asked for on; the engine does not show it",
        "tokens": "3 x 7 in, 2 x 1/2 out, 21 fed of 27 worked out",
        "no overflow": "9 positions fed, the cache's capacity is 10, the model's limit is 64",
        "no early end": "2 rows ended before 3 tokens",
        "warm-up": "nothing fed before the clock was started",
        "statistics reset": "this system's peak cannot be reset; the process is a fresh one",
        "same sampler": "greedy was asked for; the engine does not show its logits",
    }


@pytest.mark.parametrize(
    ("fed", "proposed", "expected"),
    [
        ([(3, 7), (3, 2)], 3, {"tokens": "ok", "cache": "ok"}),
        ([(3, 7), (3, 2)], 2, {"tokens": "violated", "cache": "ok"}),  # more right ones than were fed
        ([(3, 7), *[(3, 1)] * 3], 9, {"tokens": "violated", "cache": "ok"}),  # more rows in calls than tokens were made
        ([(3, 6), (3, 2)], 3, {"tokens": "violated", "cache": "ok"}),  # another prompt
        ([(3, 7), (3, 17)], 48, {"tokens": "ok", "cache": "violated"}),  # no guess has 16 tokens
    ],
    ids=str,
)
def test_a_call_with_guesses_makes_a_token_for_each_row_and_for_each_guess_that_was_right(
    fed: list[tuple[int, int]], proposed: int, expected: dict[str, str]
) -> None:
    found = checks(good_run(fed=fed, proposed=proposed), good_warm_up(), CELL.but(speculate="lookup"))
    assert {name: found[name]["status"] for name in expected} == expected


def test_details_of_a_run_without_a_cache_name_the_whole_text() -> None:
    off = CELL.but(kv_caching=False)
    told = details(good_run(fed=WHOLE, cache_bytes=0), good_warm_up(fed=WHOLE[:2]), off)
    assert told["cache"] == "asked for off; 8 to 9 fed per row and step, 0.0 MB cached"
    assert told["tokens"] == "3 x 7 in, 3 x 3 out, 72 fed of 72 worked out"
    assert told["warm-up"].endswith("the 1 longer steps are each the first of their shape")
    assert "longer" not in details(good_run(), cell=off.but(output_len=2))["warm-up"]
    assert "longer" not in details(good_run(fed=WHOLE), good_warm_up(fed=WHOLE), off)["warm-up"]


def test_a_warm_up_of_one_token_is_a_prefill_alone() -> None:
    one = CELL.but(output_len=1)
    for fed, expected in ((CACHED[:1], "ok"), (CACHED[:2], "ok"), (CACHED[1:], "violated"), ([], "violated")):
        assert status(good_run(), good_warm_up(fed=fed), "warm-up", one) == expected


@pytest.mark.parametrize(
    ("changes", "weights", "expected"),
    [
        ({"text": "a"}, "checkpoint", []),
        ({"text": "a"}, "random", ["random weights: times and sizes are the model's, the text is noise"]),
        ({"text": "a"}, "pretrained", []),
        ({}, "checkpoint", ["random token ids as prompts, of exactly the length asked for"]),
        ({"text": "a", "dtype": "fp64"}, "checkpoint", []),
        *(
            ({"text": "a", "dtype": dtype}, "checkpoint", [f"low precision ({dtype}): near ties may fall differently "])
            for dtype in ("bf16", "fp16")
        ),
        ({"text": "a", "quantize": "int8"}, "checkpoint", ["int8 weights: rounded, so that another text may come out"]),
        (
            {"text": "a", "logits": "all"},
            "checkpoint",
            ["logits of all positions, on purpose: generation needs"],
        ),
        (
            {"dtype": "bf16", "quantize": "int8", "logits": "all"},
            "random",
            ["random weights", "random token ids", "low precision (bf16)", "int8 weights", "logits of all positions"],
        ),
    ],
    ids=str,
)
def test_each_note_is_given_only_if_it_is_true(changes: dict[str, Any], weights: str, expected: list[str]) -> None:
    found = notes(Cell(**changes), weights=weights)
    assert len(found) == len(expected)
    assert all(note.startswith(start) for note, start in zip(found, expected, strict=True))


@pytest.mark.parametrize("fed", [[], CACHED[:1], WHOLE[:2], [(2, 7), (2, 1)], [(3, 6), (3, 1)]], ids=str)
def test_a_warm_up_of_other_shapes_is_violated(fed: list[tuple[int, int]]) -> None:
    assert status(good_run(), good_warm_up(fed=fed), "warm-up") == "violated"


@pytest.mark.parametrize(
    "changes",
    [
        {"fed": [*CACHED, (3, 1)]},
        {"fed": CACHED[:2]},
        {"fed": [(3, 8), (3, 1), (3, 1)]},
        {"ids": [[1, 2, 3]] * 2},
        {"ids": [[1, 2, 3]] * 4},
        {"ids": [[1, 2, 3], [1, 2, 3], [1, 2]]},
    ],
    ids=str,
)
def test_tokens_fed_and_made_have_exactly_the_counts_asked_for(changes: dict[str, Any]) -> None:
    assert status(good_run(**changes), good_warm_up(), "tokens") == "violated"


def test_every_position_that_is_fed_has_room() -> None:
    """Seven positions of a prompt and two of new tokens: the third of those is never fed."""
    room = {held: status(good_run(cache_length=held), good_warm_up(), "no overflow") for held in (8, 9, 10, None)}
    assert room == {8: "violated", 9: "ok", 10: "ok", None: "ok"}
    limits = {n: status(good_run(), good_warm_up(), "no overflow", max_seq_len=n) for n in (9, 10)}
    assert limits == {9: "violated", 10: "ok"}
    off = CELL.but(kv_caching=False)
    assert status(good_run(fed=WHOLE, cache_length=8), good_warm_up(), "no overflow", off) == "ok"


def test_the_peak_may_be_slightly_above_the_memory_at_the_start() -> None:
    """By 2 % and four megabytes."""
    for present, most in ((100 * MB, 106 * MB), (1000 * MB, 1024 * MB)):
        for peak, expected in ((present, "ok"), (most, "ok"), (most + 1, "violated")):
            assert status(good_run(), good_warm_up(), "statistics reset", reset_seen=(peak, present)) == expected
    assert status(good_run(), good_warm_up(), "statistics reset", reset_seen=None) == "not observed"


@pytest.mark.parametrize(("greedy", "expected"), [(True, "ok"), (False, "violated"), (None, "not observed")])
def test_the_sampler_is_judged_by_the_tokens_of_the_warm_up(greedy: bool | None, expected: str) -> None:
    assert status(good_run(), good_warm_up(greedy=greedy), "same sampler") == expected


@pytest.mark.parametrize(
    ("served", "wanted", "expected", "words"),
    [
        (3, 3, "ok", "asked for; 3 of 3 forwards ran by it"),
        (2, 2, "ok", "asked for; 2 of 3 forwards ran by it, the prompt by the plain path"),
        (1, 1, "ok", "asked for; 1 of 3 forwards ran by it, the prompt by the plain path"),
        (2, 3, "violated", "asked for; 2 of 3 forwards ran by it, the others by the plain path"),
        (0, 3, "violated", "asked for; 0 of 3 forwards ran by it, the others by the plain path"),
        (0, 0, "not observed", "asked for; 0 of 3 forwards ran by it, the others by the plain path"),
    ],
)
def test_the_fast_step_must_run_every_forward_that_it_supports(
    served: int, wanted: int, expected: str, words: str
) -> None:
    run = good_run(fast_forwards=served, fast_wanted=wanted)
    check = checks(run, good_warm_up(), CELL.but(fast=True))["fast step"]
    assert (check["status"], check["detail"]) == (expected, words)
    assert "fast step" not in checks(run, good_warm_up())
