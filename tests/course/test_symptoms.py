"""What the page of --watch shows of the course's mistakes is what they do to a text of the demo model."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from planted import plants

from course.mistakes import MISTAKES

ROOT = Path(__file__).resolve().parents[2]
DATA: dict[str, Any] = json.loads((ROOT / "llama" / "watch" / "mistakes.json").read_text("utf-8"))
RIGHT, *WRONG = DATA["runs"]


def test_each_mistake_has_the_title_of_the_course_and_a_text_that_agrees_with_its_wrong_tokens() -> None:
    assert (set(RIGHT["wrong"]), max(RIGHT["kl"]) < 1e-6) == ({"0"}, True)
    for run in WRONG:
        assert run["title"] == MISTAKES[run["name"]].title
        assert len(run["text"]) - 1 == len(run["kl"]) == len(run["wrong"])
        differ = [place for place, pair in enumerate(zip(run["text"], RIGHT["text"], strict=True)) if len({*pair}) > 1]
        assert differ[0] == run["wrong"].index("1", DATA["calls"][-1] - 1) + 1, run["name"]


@pytest.mark.slow
def test_a_mistake_that_is_recorded_again_gives_the_same_curve() -> None:
    """On another CPU, one of two tokens whose logits are nearly equal may win: then the generated text is another."""
    recorded = next(run for run in WRONG if run["name"] == "mask-forgotten")
    plant = next(plant for plant in plants("mistakes.txt") if plant.name == "mask-forgotten")
    found = runpy.run_path(str(ROOT / "scripts" / "record_mistakes.py"))["symptom"](plant, DATA["ids"])
    assert abs(found["wrong"].count("1") - recorded["wrong"].count("1")) <= 1
    assert found["kl"] == pytest.approx(recorded["kl"], rel=0.02, abs=1e-6)
