"""Every malformed checkpoint is rejected at once, within the memory of its files, and with a printable reason."""

import json
import multiprocessing
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, random_model
from untrusted.malformed import measure
from untrusted.malformed.cases import CASES, SLOW
from untrusted.malformed.measure import MIB


def write_results(path: Path, slow: bool) -> None:
    path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in measure.results(slow=slow)))


@pytest.fixture(scope="module", params=["quick", pytest.param("slow", marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Open the cases in a fork of this process, which has imported everything already."""
    random_model(config_of())  # imports transformers
    path = tmp_path_factory.mktemp("malformed") / "results"
    with warnings.catch_warnings(action="ignore"):  # of a fork beside threads, which do not matter here
        process = multiprocessing.get_context("fork").Process(
            target=write_results, args=(path, request.param == "slow")
        )
        process.start()
    process.join(300)  # s, for all: a case that waits would have no end
    process.kill()
    assert process.exitcode == 0
    return {result["name"]: result for result in map(json.loads, path.read_text().splitlines())}


def test_every_case_is_refused_at_once_with_its_path_and_a_printable_reason(results: dict[str, dict[str, Any]]) -> None:
    faults = []
    for name, result in results.items():
        message, memory, refusal = result["message"], result["memory"] or 0, CASES[name].refusal
        if result["error"] == "CheckpointError":
            right = "malformed" in message and message.isprintable() and len(message) < 1000  # the folder's name
        else:
            right = result["error"] == "ValueError" and name.startswith("the keys of")
        right &= result["seconds"] <= result["limit"] and memory <= result["size"] + 64 * MIB
        right &= refusal in message and ("missing:" in message) == ("missing:" in refusal or "unexpected:" in refusal)
        if not right:
            faults.append((refusal, result))
    assert results
    assert faults == []


def test_the_cases_have_sources_and_cover_every_format() -> None:
    assert len(CASES) >= 400
    assert CASES.keys() >= SLOW
    assert all(case.source for case in CASES.values())
