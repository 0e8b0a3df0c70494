"""Every historic bug can be put back into the current code, and the runner distinguishes caught bugs from others.

That all of them are caught takes minutes to show: `python tests/historic_bugs/run.py`.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from historic_bugs.run import FOLDER, ROOT, apply, bugs_in, main
from tiny import FP64_TOLERANCE, some_tokens, tiny_model

BUGS = bugs_in(FOLDER)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed, which applies the patches")


@needs_git
def test_every_bug_can_be_put_back_into_this_tree() -> None:
    assert {bug.name: why for bug in BUGS if (why := apply(bug.path, ROOT, check_only=True))} == {}


def test_every_bug_is_described_is_in_the_library_and_names_a_test_that_exists() -> None:
    for bug in BUGS:
        assert bug.files
        assert all(file.startswith("llama/") for file in bug.files), bug.name
        title, blank, *lines = bug.text.partition("\nCaught by: ")[0].splitlines()
        assert (bool(title), blank) == (True, ""), bug.name
        assert sum(map(bool, lines)) >= 2, bug.name  # the mistake, its effect, where it was seen
        file, _, test = bug.test.partition("::")
        assert f"\ndef {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), bug.name


def test_bugs_are_numbered_from_1_without_a_gap_and_there_are_at_least_25() -> None:
    assert [bug.number for bug in BUGS] == [f"{i:02d}" for i in range(1, len(BUGS) + 1)]
    assert len(BUGS) >= 25


def test_numbers_of_known_bugs_that_are_cited_exist() -> None:
    listed = (ROOT / "docs" / "known-bugs.md").read_text(encoding="utf-8")
    known = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", listed, flags=re.MULTILINE))))
    for bug in BUGS:
        prose = " ".join(bug.text.partition("\nCaught by: ")[0].split())
        for cited in re.findall(r"[Bb]ugs? ([\d, and]+) of docs/known-bugs\.md", prose):
            assert set(re.findall(r"\d+", cited)) <= known, bug.name


# ---- the runner ------------------------------------------------------------------------------------------------------

CODE = "def double(x):\n    return 2 * x\n"
TESTS = """import pytest

from llama.model import double


def test_double():
    assert double(2) == 4


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError):
        double(None)


def test_skipped():
    pytest.skip("not today")


def test_that_never_passes():
    assert double(2) == 5
"""


def write_bug(folder: Path, name: str, line: str, test: str, *, was: str = "    return 2 * x") -> None:
    (folder / f"{name}.patch").write_text(
        f"A bug\n\nCaught by: tests/test_model.py::{test}\n\n"
        f"--- a/llama/model.py\n+++ b/llama/model.py\n@@ -1,2 +1,2 @@\n def double(x):\n-{was}\n+{line}\n"
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with a repository of two files that do not import torch."""
    files = {"llama/__init__.py": "", "llama/model.py": CODE, "tests/test_model.py": TESTS, "pyproject.toml": ""}
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "bugs").mkdir()
    return tmp_path


@pytest.mark.slow
@needs_git
def test_the_runner_names_caught_missed_and_invalid_bugs(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bugs = tree / "bugs"
    write_bug(bugs, "01-triples", "    return 3 * x", "test_double")
    write_bug(bugs, "02-breaks-nothing", "    return x + x", "test_double")
    write_bug(bugs, "03-breaks-the-import", "    return 2 *", "test_double")
    write_bug(bugs, "04-divides-by-zero", "    return 2 * x / 0", "test_double")
    write_bug(bugs, "05-of-other-code", "    return 3 * x", "test_double", was="    return x * 2")
    write_bug(bugs, "06-names-no-test", "    return 3 * x", "test_triple")
    write_bug(bugs, "07-names-a-skipped-test", "    return 3 * x", "test_skipped")
    write_bug(bugs, "08-names-a-broken-test", "    return 3 * x", "test_that_never_passes")

    assert main([], root=tree / "tree", folder=bugs, libraries=[]) == 1
    *lines, count = capsys.readouterr().out.splitlines()
    expected = [
        "01-triples: caught by test_model.py::test_double",
        "02-breaks-nothing: NOT CAUGHT: tests/test_model.py::test_double passes with the bug",
        "03-breaks-the-import: INVALID: the copy does not import: SyntaxError",
        "04-divides-by-zero: INVALID: tests/test_model.py::test_double ended in ZeroDivisionError in its call",
        "05-of-other-code: INVALID: the patch does not apply: error: patch failed: llama/model.py:1",
        "06-names-no-test: INVALID: there is no test tests/test_model.py::test_triple",
        "07-names-a-skipped-test: INVALID: without the bug, tests/test_model.py::test_skipped is skipped",
        "08-names-a-broken-test: INVALID: without the bug, tests/test_model.py::test_that_never_passes failed on an",
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert re.fullmatch(r"1 of 8 caught in \d+ s", count)
    assert (tree / "tree" / "llama" / "model.py").read_text() == CODE


@needs_git
def test_the_runner_succeeds_if_all_chosen_bugs_are_caught(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bug(tree / "bugs", "01-accepts-everything", "    return 2 * (x or 0)", "test_what_is_no_number_is_refused")
    write_bug(tree / "bugs", "02-breaks-nothing", "    return x + x", "test_double")
    assert main(["01"], root=tree / "tree", folder=tree / "bugs", libraries=[]) == 0
    assert re.search(r"^1 of 1 caught in \d+ s$", capsys.readouterr().out, flags=re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["01", "99"], root=tree / "tree", folder=tree / "bugs")
    assert "no bug has the number 99" in capsys.readouterr().err


# ---- a claim that no other test makes --------------------------------------------------------------------------------


def test_one_row_with_one_kv_head_is_kept_where_it_stands() -> None:
    """The only shapes for which PyTorch accepts `keys[:, bsz, start_pos:end] = xk` (bug 01)."""
    model = tiny_model(n_kv_heads=1, kv_cache="poisoned").requires_grad_(False)
    tokens = some_tokens(1, 6)
    expected = tiny_model(n_kv_heads=1, kv_caching=False)(tokens).detach()
    cache = model.new_cache(rows=1, length=6)
    made = torch.cat([model(tokens[:, i : i + 1], i, cache=cache) for i in range(6)], dim=1)
    torch.testing.assert_close(made, expected, rtol=0, atol=FP64_TOLERANCE)
