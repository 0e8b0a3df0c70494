"""What the documents say is what happens: the README's Python runs, and files, links and tests that are named exist."""

import re
from pathlib import Path
from typing import is_typeddict

import pytest

from llama.bench import schema

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0])
def test_python_in_the_readme_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_file_the_readme_names_is_there() -> None:
    named = re.findall(r"^    ((?:llama/|inference)\S+)", README, flags=re.MULTILINE)
    linked = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(named) >= 10
    assert [name for name in named + linked if not (ROOT / name).exists()] == []


def test_every_module_of_the_library_stands_in_the_reading_order() -> None:
    modules = {path.name for path in (ROOT / "llama").glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(modules) if name not in README] == []


def test_every_known_bug_has_tests_that_exist() -> None:
    text = (ROOT / "docs" / "known-bugs.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)?test_\w+\.py)::(\w+|@\w+)`", text)
    lacking = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")
    ]
    assert lacking == []
    numbers = {int(n) for row in re.findall(r"^\| ([\d, ]+) \|", text, flags=re.MULTILINE) for n in row.split(",")}
    assert numbers == set(range(1, 41))


def test_the_page_on_the_benchmarks_json_has_every_field_and_no_other() -> None:
    page = (ROOT / "docs" / "benchmark_json.md").read_text(encoding="utf-8")
    types = {name: kind for name, kind in vars(schema).items() if is_typeddict(kind)}
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    assert sections.keys() == types.keys()
    for name, kind in types.items():
        assert re.findall(r"^\| `(\w+)` \|", sections[name], flags=re.MULTILINE) == list(kind.__annotations__), name
    assert schema.SCHEMA in page
