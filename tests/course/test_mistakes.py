"""The grader names every mistake of its list that is planted in the answer, and nothing in right solutions."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from planted import Plant, plants

from course.diagnose import diagnose
from course.grade import grade
from course.make import make
from course.mistakes import MISTAKES
from course.sandbox import Outcome, read_facts

WARM = Path(__file__).with_name("warm.py")
Probe = Callable[[Plant], Outcome]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """Yield a function that plants a change in the answer and returns the outcome of the probe."""
    answer, scratch = tmp_path_factory.mktemp("answer"), tmp_path_factory.mktemp("trees")
    make(answer, holes=())
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, "-P", str(WARM)],
        env=kept | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(plant: Plant) -> Outcome:
        tree = scratch / re.sub(r"\W", "-", plant.name)
        shutil.copytree(answer / "llama", tree / "llama")
        plant.put_into(tree)
        facts = tree / "facts.json"
        print(json.dumps([str(tree), str(facts), "signed"]), file=server.stdin, flush=True)
        server.stdout.readline()
        return read_facts(facts, tree, "signed", 0, "")

    yield run
    server.communicate()


@pytest.fixture(scope="module")
def right(probe: Probe) -> dict[str, Any]:
    return probe(Plant("the real package")).facts


@pytest.mark.slow
@pytest.mark.parametrize("plant", plants("mistakes.txt"), ids=lambda plant: plant.name)
def test_a_planted_mistake_is_named_right(plant: Plant, probe: Probe, right: dict[str, Any]) -> None:
    outcome = probe(plant)
    assert outcome.facts is not None, outcome.reason
    found = diagnose(outcome.facts, right)
    assert {finding.name for finding in found} == plant.found, found


@pytest.mark.slow
@pytest.mark.parametrize("plant", plants("right.txt"), ids=lambda plant: plant.name)
def test_a_right_solution_of_any_shape_gets_all_points(plant: Plant, probe: Probe, right: dict[str, Any]) -> None:
    graded = grade(Path(), probe(plant), right)
    assert (graded.points, graded.findings) == (100, ())


def test_every_known_mistake_is_planted_and_stands_in_the_docs() -> None:
    planted = {name for plant in plants("mistakes.txt") for name in plant.found}
    assert planted | {"report-missing"} == set(MISTAKES)
    page = (Path(__file__).parents[2] / "docs" / "course.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert rows == [(mistake.name, str(mistake.points), mistake.title) for mistake in MISTAKES.values()]
