"""The exercise is made from the current sources: it runs, and only the answer is missing."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from bench_reports import table_report
from commands import Command

from course.exercises import EXERCISES
from course.holes import HOLES, AnchorLost, cut
from course.make import KIT, ROOT, make
from course.make import main as make_main
from llama.rows import Rows

TRY = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from llama.model import ModelArgs, Transformer
model = Transformer(ModelArgs(dim=24, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=29, max_seq_len=16))
print(len(model.generate_tokens([[1, 2], [3]], 4, kv_caching=False)[0]))
try:
    model.generate_tokens([[1, 2]], 4)
except NotImplementedError as missing:
    print(missing)
import llama.api, llama.bench.plan, llama.bench.presets, llama.bench.run.worker, llama.cli.benchmark_inference
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("llama.") and name.count(".") == 1}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    make(out)
    return out


@pytest.mark.slow
def test_the_exercise_runs_without_the_cache_and_says_what_is_missing_with_it(made: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-P", "-c", TRY, str(made)], capture_output=True, text=True, check=False, cwd=made
    )
    assert done.stdout.splitlines()[:2] == ["2", "TODO 1 in llama/model.py, Attention.forward: see TASK.md"], (
        done.stderr
    )
    modules = ast.literal_eval(done.stdout.splitlines()[2])
    assert "model" in modules
    assert {"verify", "testing"}.isdisjoint(modules)


def test_only_the_holes_differ_from_the_sources(made: Path) -> None:
    kit = {path.relative_to(KIT).as_posix() for path in KIT.rglob("*") if path.is_file()}
    ours = {path.relative_to(made).as_posix(): path.read_text() for path in made.rglob("*") if path.is_file()}
    changed = {file for file, text in ours.items() if file not in kit and _source(file) != text}
    assert changed == {hole.file for hole in HOLES} | {"requirements.txt"}
    for file in changed - {"requirements.txt"}:
        before = set(_source(file).splitlines())
        added = [line.strip() for line in ours[file].splitlines() if line not in before]
        assert all(
            re.match(r"#|raise NotImplementedError|if |else:|prev_pos = \[0\]|keys, values, visible", line)
            for line in added
        )


def _source(file: str) -> str:
    return (ROOT / file).read_text() if (ROOT / file).is_file() else ""


def test_the_answer_is_not_left_anywhere_in_the_exercise(made: Path) -> None:
    texts = {path: path.read_text() for path in (made / "llama").rglob("*.py")}
    for answer in (
        ".cache.update(",
        "def _write(self, rows",
        "def _enlarge(",
        "else [pos - 1 for pos in batch.cur_pos]\n",
        "torch.cat((self.keys",
        "Int8Cache",
    ):
        assert [path for path, text in texts.items() if answer in text] == [], answer
    wings = {path.name for wing in ("fast", "exact") for path in (made / "llama" / wing).iterdir()}
    assert wings == {"__init__.py", "choose.py", "switch.py"}
    todos = sorted(todo for text in texts.values() for todo in re.findall(r"# TODO (\d)", text))
    assert todos == ["1", "2", "3"]


def test_the_task_names_files_and_functions_that_exist(made: Path) -> None:
    task = (made / "TASK.md").read_text()
    for file in re.findall(r"`((?:llama/[\w/]+|\w+)\.(?:py|md))`", task):
        assert (made / file).is_file(), file
    contract = (made / "llama/kv_cache/contract.py").read_text()
    for name in ("check", "reserve", "free", "nbytes", "_allocate"):
        assert f"def {name}(" in contract
    for hole in HOLES:
        assert hole.number is None or f"TODO {hole.number}, `{hole.file}`" in task


def test_the_task_explains_every_field_of_rows(made: Path) -> None:
    task = (made / "TASK.md").read_text()
    explained = re.findall(r"^\| `rows\.(\w+)` \| (?:int|tuple|bool)", task, flags=re.MULTILINE)
    assert sorted(explained) == sorted(field.name for field in fields(Rows))
    examples = re.findall(r"\| (\(\d, \d\)) \| (\w+) \| (\d) \| (\d) \| (\(\d, \d\)) \|", task)
    assert len(examples) == 3
    for starts, start, width, end, lengths in examples:
        rows = Rows.at(ast.literal_eval(starts), ast.literal_eval(lengths))
        assert [str(rows.start), str(rows.width), str(rows.end)] == [start, width, end]


def test_sources_that_have_moved_on_are_refused() -> None:
    for hole in (hole for exercise in EXERCISES.values() for hole in exercise.holes):
        text, name = (ROOT / hole.file).read_text(), hole.function.rpartition(".")[2]
        twice = replace(hole, find=lambda function, hole=hole: [*hole.find(function), *hole.find(function)])
        moved_on = text.replace(f"def {name}(", "def moved_on(")
        for source, cuts, count in ((moved_on, hole, 0), (text, twice, 2)):
            with pytest.raises(AnchorLost, match=f"has {count} places"):
                cut(hole.file, source, (cuts,))


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "mine").touch()
    assert "is there already" in command.refused(make_main, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_benchmark_fills_the_reports_table(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(made / "report.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    fill = runpy.run_path(str(made / "fill_report.py"))
    assert fill["main"]([]) == 2  # no results yet
    (tmp_path / "results" / "run").mkdir(parents=True)
    (tmp_path / "results" / "run" / "results.json").write_text(json.dumps(table_report()))
    assert fill["main"]([]) == 0
    filled = (tmp_path / "report.md").read_text()
    assert len(re.findall(r"^\| (?:1|8|16) \| (?:on|off) \| [\d.]+ \| [\d.]+ \|", filled, flags=re.MULTILINE)) == 6
    assert fill["main"]([]) == 0
    assert (tmp_path / "report.md").read_text() == filled


def test_a_cell_that_was_not_measured_is_an_empty_row_that_the_command_names(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(made / "report.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    report = table_report()
    *_, late, dead = (row for row in report["rows"] if row["figures"] == "cell")
    late["seconds"], dead["seconds"], dead["error"] = None, None, "died: gone"
    (results := tmp_path / "results.json").write_text(json.dumps(report))
    assert runpy.run_path(str(made / "fill_report.py"))["main"]([str(results)]) == 1
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| 16 |")] == ["| 16 | on | | | | |", "| 16 | off | | | | |"]
    said = "error: 2 rows are empty, because their cells were not measured (batch 16, cache on; batch 16, cache off)"
    assert said in capsys.readouterr().err
