"""The files of a release agree with the package and with the README."""

import os
import re
import runpy
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import table

from llama import __version__
from llama.host.version import WHOLE, code_digest, content_digest

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


def released(changelog: str, citation: str) -> set[tuple[str, str]]:
    """Return the version and date of the newest release, as CHANGELOG.md and CITATION.cff have them."""
    cited = tuple(re.findall(r"^(?:version|date-released): (.*)", citation, flags=re.MULTILINE))
    return {*re.findall(r"^## ([\d.]+) - (\d{4}-\d\d-\d\d)$", changelog, flags=re.MULTILINE)[:1], cited}


def test_a_release_has_one_version_and_one_date_in_all_files() -> None:
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    found = released(changelog, citation)
    assert len(found) == 1, f"CHANGELOG.md and CITATION.cff differ: {found}"
    assert [version for version, _ in found] == [__version__]


@table(
    "unreleased, version, date, agrees",
    [
        ("## Unreleased", "0.3.0", "2026-11-27", True),
        ("## Unreleased", "0.4.0", "2026-11-27", False),  # the section has no version yet
        ("## 0.4.0 - 2026-12-24", "0.4.0", "2026-11-27", False),  # the date is that of the version before
        ("## 0.4.0 - 2026-12-24", "0.3.0", "2026-11-27", False),
        ("## 0.4.0 - 2026-12-24", "0.4.0", "2026-12-24", True),
    ],
)
def test_half_a_release_is_seen(unreleased: str, version: str, date: str, agrees: bool) -> None:
    changelog, citation = f"{unreleased}\n\n## 0.3.0 - 2026-11-27\n", f"version: {version}\ndate-released: {date}\n"
    assert (len(released(changelog, citation)) == 1) is agrees


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        wanted for extra, names in project["optional-dependencies"].items() if extra != "eval" for wanted in names
    ]
    pins = {*re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)}
    assert {re.split(r"[^\w-]", wanted)[0] for wanted in (*project["dependencies"], *extras)} - pins == set()


def test_what_other_packages_deprecate_is_an_error_of_the_core_alone() -> None:
    def deprecate(category: type[Warning], module: str) -> None:
        warnings.warn_explicit("it is deprecated", category, "file.py", 1, module=module)

    for category in (DeprecationWarning, FutureWarning):
        for module in ("transformers.models.llama", "torch.nn", "test_model", "llama.bench.run.transformers_engine"):
            deprecate(category, module)
        for module in ("llama.model", "llama.bench.run.jobs", "course.grade"):
            with pytest.raises(category):
                deprecate(category, module)


def test_the_citation_names_the_authors_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
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


def test_the_digest_of_files_changes_with_their_content_and_of_large_ones_with_any_block(tmp_path: Path) -> None:
    file, made = tmp_path / "weights", [content_digest(tmp_path)]
    for size, fill in ((3, b"a"), (3, b"b"), (4, b"b"), (WHOLE + 9, b"a"), (WHOLE + 9, b"b"), (3, b"a")):
        file.write_bytes(fill * size)
        made.append(content_digest(tmp_path))
    assert len(set(made)) == 6
    os.mkfifo(tmp_path / "pipe")
    assert content_digest(tmp_path) == made[1] == made[-1] != content_digest(file)
    assert content_digest(tmp_path / "pipe") == content_digest(tmp_path / "pipe")  # which no process writes
