"""Every exhibit of the museum is refused, with one exception, at once, and within the memory that its files take."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from museum.exhibits import EXHIBITS
from museum.measure import MIB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Let one process, which does nothing else, open all exhibits in turn."""
    errors = tmp_path_factory.mktemp("museum") / "errors"
    with errors.open("w") as file:
        command = [sys.executable, "-m", "tests.museum"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True, check=False)
    assert done.returncode == 0, errors.read_text()[-2000:]
    found = map(json.loads, done.stdout.splitlines())
    return {visit["name"]: visit for visit in found}


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_is_refused_at_once_with_its_path_and_a_printable_reason(
    name: str, visits: dict[str, dict[str, Any]]
) -> None:
    visit = visits[name]
    assert visit["error"] == "CheckpointError", visit
    assert visit["message"].isprintable()
    assert len(visit["message"]) < 1000
    assert "exhibit" in visit["message"]  # the folder's name: a message says where
    assert visit["seconds"] <= 0.1 + 0.02 * visit["parsed"] / MIB, visit
    if visit["memory"] is not None:
        assert visit["memory"] <= visit["size"] + 64 * MIB, visit


def test_the_museum_has_its_sources_and_shows_every_format() -> None:
    assert len(EXHIBITS) >= 80
    assert all(exhibit.source for exhibit in EXHIBITS.values())
    for word in (".pth", "safetensors", ".gguf", "config.json", "params.json", "tokenizer", "index"):
        assert sum(word in name for name in EXHIBITS) >= 8, word
