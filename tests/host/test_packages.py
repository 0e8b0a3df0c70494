"""A script that is run by a Python without the library's packages says what to do."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llama.host import packages

ROOT = Path(__file__).resolve().parents[2]
MAIN = str(ROOT / "llama" / "__main__.py")


def test_the_needed_packages_are_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert [re.split("[=>]", line)[0] for line in project["dependencies"]] == list(packages.NEEDED)
    assert project["requires-python"] == f">={packages.OLDEST[0]}.{packages.OLDEST[1]}"


@pytest.mark.parametrize("words", [["inference.py", "x"], ["benchmark_inference.py"], ["-m", "llama", "run"]], ids=str)
def test_a_python_without_the_packages_gets_one_line(words: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", *words]  # -S: without the installed packages
    bare = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (bare.returncode, bare.stdout, len(bare.stderr.splitlines())) == (2, "", 1)
    assert f"error: {sys.executable} (Python 3." in bare.stderr
    assert "lacks torch, tiktoken, " in bare.stderr
    assert "as README.md or an exercise's TASK.md says" in bare.stderr


def test_an_old_python_is_refused_and_this_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.check_packages()
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    monkeypatch.setattr(sys, "argv", ["llama", "--help"])  # which needs no package
    for refused in (packages.check_packages, lambda: runpy.run_path(MAIN, run_name="__main__")):
        with pytest.raises(SystemExit, match="2"):
            refused()
        assert "(Python 3.10.4) is older than Python 3.11" in capsys.readouterr().err
