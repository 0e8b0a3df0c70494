"""What the documents say is what happens: the README's Python runs, and files, links and tests that are named exist."""

import re
from pathlib import Path
from typing import is_typeddict

import pytest

from llama.bench import schema

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0])
def test_python_in_the_readme_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


PAGES = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    linked = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in linked if not ((ROOT / page).parent / name).exists()] == []


def test_the_readme_fits_on_few_screens() -> None:
    assert len(README.splitlines()) <= 200


def test_every_module_and_wing_of_the_library_stands_on_the_map() -> None:
    on_the_map = set(re.findall(r"^    ((?:llama/|inference|benchmark)\S+)", MAP, flags=re.MULTILINE))
    modules = {f"llama/{path.name}" for path in (ROOT / "llama").glob("*.py")} - {"llama/__init__.py"}
    wings = {f"llama/{path.parent.name}/" for path in (ROOT / "llama").glob("*/__init__.py")}
    assert on_the_map == {*modules, *wings, "inference.py", "benchmark_inference.py"}


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
