"""The files of a release agree with the package and with the README."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama import __version__
from llama.host.version import code_digest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def metadata(monkeypatch: pytest.MonkeyPatch, address: str) -> dict[str, Any]:
    """Return what setup.py passes to setuptools, in a build that has `address` in SOURCE_URL."""
    passed: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=passed.update))  # importing it takes longer
    monkeypatch.setenv("SOURCE_URL", address)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return passed


def test_links_of_the_published_readme_lead_to_files_of_the_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    page: str = metadata(monkeypatch, "https://host.example/llama-kv/")["long_description"]
    tagged = rf"\]\(https://host\.example/llama-kv/(blob|raw)/v{re.escape(__version__)}/([^)#]+)"
    links = re.findall(tagged, page)
    relative = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert [path for _, path in links] == relative
    assert len(relative) > 20
    assert [path for _, path in links if not (ROOT / path).is_file()] == []
    images = re.findall(r"!\[[^]]*\]\(([^)]+)", README)
    assert images == [path for view, path in links if view == "raw"] != []


def test_a_build_without_an_address_publishes_the_readme_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    built = metadata(monkeypatch, "")
    assert (built["long_description"], built["project_urls"]) == (README, {})


def test_the_citation_names_the_version_and_authors_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)", citation, flags=re.MULTILINE) == [__version__]
    authors = re.findall(r"^  - name: (.*)", citation, flags=re.MULTILINE)
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert authors == re.findall(r"Copyright \(c\) \d+ (.*)", licence)
    assert authors == re.findall(r'^authors = \[\{ name = "(.*)" \}\]', project, flags=re.MULTILINE)


def test_the_workflow_runs_the_two_lines_of_the_readme_that_install() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    lines = re.findall(r"^    (python3 -m venv .*)", README, flags=re.MULTILINE)
    assert len(lines) == 2
    assert re.findall(r"^ +- (python3 .*)", workflow, flags=re.MULTILINE) == lines


def test_the_line_that_installs_a_small_pytorch_has_the_pinned_version() -> None:
    (pinned,) = re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"pip install (torch==\S+)", page) == [pinned]


def test_the_digest_of_the_code_changes_with_each_name_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama.host.version._PACKAGE", tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "c.py").mkdir()  # no file, as the link of an editor's lock
    without = code_digest()  # as beside .pyc files alone
    made = []
    for name, code in (("a.py", "1"), ("a.py", "2"), ("b.py", "1"), ("sub/a.py", "1"), ("a.pyc", "1"), ("a.py", "1")):
        (tmp_path / name).write_text(code)
        made.append(code_digest())
        (tmp_path / name).unlink()
    assert len({*made, without}) == 5
    assert (made[0], without) == (made[-1], made[-2])
