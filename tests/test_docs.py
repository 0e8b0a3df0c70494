"""The documents are true: their Python runs, their commands parse, their figures add up, their files exist."""

import csv
import functools
import importlib
import inspect
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_reports import caches_report, chat_report, hand_in_report, table_report
from recordings import DEMO
from tiny import tiny_model

from llama import cli, costs
from llama.__main__ import COMMANDS
from llama.bench import schema
from llama.bench.sweep import read_plan
from llama.costs import MB
from llama.ops import attend

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
RESEARCH = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README + RESEARCH, flags=re.DOTALL)


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(snippet, marks=[pytest.mark.slow] * ("load(" in snippet), id=str(n))
        for n, snippet in enumerate(SNIPPETS)
    ],
)
def test_python_of_the_readme_and_the_research_page_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@functools.cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


TESTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
PAGES = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]


def test_every_link_leads_to_a_file() -> None:
    texts = {ROOT / page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    links = [(page, name) for page, text in texts.items() for name in re.findall(r"\]\((?!http)([^)#]+)", text)]
    assert [(str(page), name) for page, name in links if not (page.parent / name).exists()] == []


def commands_of(page: str) -> list[str]:
    """Return the commands in a page's code blocks and inline code that run Python or llama-kv."""
    page = page.replace("\\\n", " ")  # a command may go on in the next line
    page = re.sub(r"torchrun (?:--\w+ \S+ )+", "python ", page).replace("python -m llama ", "llama-kv ")
    lines = re.findall(r"^(?: {4}|\$ )(?:\.venv/bin/)?((?:python|llama-kv) .*)", page, flags=re.MULTILINE)
    spans = re.findall(r"(?<!`)`(?:\.venv/bin/)?((?:(?:python|llama-kv) |(?:benchmark_)?inference\.py)[^`]*)`", page)
    return [line.partition(" > ")[0] for line in (*lines, *spans)]


def main_of(program: str, name: str) -> Callable[..., int]:
    """Return the main function of `llama-kv NAME`, `python FILE.py` or `python -m MODULE`."""
    if program == "llama-kv":
        module, function = COMMANDS[name]
        module = f"llama.cli.{module}"
    else:
        module, function = name.removesuffix(".py").replace("/", "."), "main"
        module = "course.kit.fill_report" if module == "fill_report" else module
    command: Callable[..., int] = getattr(importlib.import_module(module), function)
    return command


CURRENT = [page for page in PAGES if page not in ("docs/log.md", "CHANGELOG.md")]  # the others are of their time
TASKS = ["course/kit/TASK.md", *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("course/tasks/*.md"))]
OTHERS = ("-O", "--version", "NAME", "llama.quality.lm_eval")  # without flags, or with those of lm-eval's own command


@pytest.mark.parametrize("page", [*CURRENT, *TASKS])
def test_every_command_in_a_page_has_flags_and_values_that_exist(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "course")  # scripts/record_mistakes.py imports from it
    for line in commands_of((ROOT / page).read_text(encoding="utf-8")):
        usage = "..." in line or "[--" in line
        words = shlex.split(re.sub(r"[][]|\.\.\.", "", line) if usage else line, comments=True)
        program, *words = words if words[0] in ("python", "llama-kv") else ["python", *words]
        if words[0] == "-c":
            compile(words[1], page, "exec")
            continue
        name, *rest = words[1:] if words[0] == "-m" else words
        if name.startswith("tests"):
            path = ROOT / name.removesuffix(".py").replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), line
        elif name not in OTHERS:
            types = cli.flag_types(main_of(program, name))
            given = cli.sort_words(rest, types)
            if usage:
                assert [flag for flag, _ in given if flag.startswith("-")] == [], line
            else:
                cli.read_values(given, types)  # raises ValueError


# Flags of pip, Git, lm-eval, torchrun, SentencePiece, Slurm and nvidia-smi; and a variable of CSS.
FOREIGN = {
    *("dest", "disable_pip_version_check", "hash", "no_deps", "no_input", "requirement"),
    *("error_unmatch", "no_optional_locks", "porcelain", "apply_chat_template", "model_args", "nproc_per_node"),
    *("normalization_rule_name", "remove_extra_whitespaces", "format", "me", "name", "noheader", "query_gpu", "cache"),
}


def test_every_flag_that_a_page_or_a_message_names_exists() -> None:
    mains = [main_of("llama-kv", name) for name in COMMANDS]
    mains += [main_of("python", name) for name in ("course.make", "course.grade")]
    options = re.findall(r'addoption\(\s*"--([\w-]+)"', (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    known = {flag for main in mains for flag in cli.flag_types(main)} | {option.replace("-", "_") for option in options}
    known |= {"threads", "quiet", "debug", "help", "version"} | FOREIGN
    texts = {page: " ".join(re.findall(r"(?<!`)`(--[^`]*)`", read(page))) for page in (*CURRENT, *TASKS)}
    sources = (path for folder in ("llama", "course") for path in (ROOT / folder).rglob("*.py"))
    texts |= {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources}
    named = {(file, flag) for file, text in texts.items() for flag in re.findall(r"(?<![\w-])--(\w[\w-]*)", text)}
    assert len(named) > 200
    assert [(file, flag) for file, flag in sorted(named) if flag.replace("-", "_") not in known] == []


def used_flags(module: str) -> set[str]:
    """Return the flags that a test of a file of llama/cli passes to it, or that a page shows in a command."""
    started = {f"{module}.py", *(name for name, (of, _) in COMMANDS.items() if of == module)}
    lines = [line for page in (*CURRENT, *TASKS) for line in commands_of(read(page)) if started & {*line.split()[:2]}]
    naming = re.compile(rf"llama\.cli\.{module} |from llama\.cli import .*\b{module}\b|\"{module}\.py\"")
    rows = re.compile(rf'\("(?:{"|".join(started)})", (".*)')  # of a table of commands and their words
    lines += [words for text in TESTS.values() for words in rows.findall(text)]
    own = [text for path, text in TESTS.items() if path.parent.name == module or naming.search(text)]
    words = [call for text in own for call in re.findall(r"\bmain\((.*)", text)]
    return {*re.findall(r"--(\w+)", "\n".join(lines + own)), *re.findall(r"(\w+)=", "\n".join(words))}


def test_every_flag_of_a_command_is_named_by_a_page_and_used_by_a_test() -> None:
    on_pages = {flag for page in (*CURRENT, *TASKS) for flag in re.findall(r"--(\w+)", read(page))}
    lacking = []
    for module in dict.fromkeys(module for module, _ in COMMANDS.values()):
        mains = [main_of("llama-kv", name) for name, (of, _) in COMMANDS.items() if of == module]
        used = used_flags(module)
        for flag in dict.fromkeys(flag for main in mains for flag in cli.flag_types(main) if flag != "prompts"):
            lacking += [f"{module} --{flag} is on no page"] * (flag not in on_pages)
            lacking += [f"{module} --{flag} is in no test"] * (flag not in used)
    assert lacking == []


def test_pages_and_messages_spell_each_command_in_one_way() -> None:
    """CONTRIBUTING.md has the rule. Stubs, whose docstrings begin with `python -m`, are the other way to start one."""
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in CURRENT)
    assert re.findall(r"(?<!a stub for )python -m llama(?!\.quality).*|llama-kv (?:run|bench)\b.*", pages) == []
    docs = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in CURRENT if page.startswith("docs/"))
    assert re.findall(r"^    \.venv/bin/.*", docs, flags=re.MULTILINE) == []
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "llama").rglob("*.py")}
    spelled = r"python -m llama(?!\.bench|\.quality).*|python (?:benchmark_)?inference\.py.*"
    named = {
        str(path): found
        for path, text in sources.items()
        if path.name != "__main__.py" and not text.startswith('"""python -m') and (found := re.findall(spelled, text))
    }
    assert named == {}


FIVE_MINUTES = (ROOT / "docs" / "kv_cache_in_five_minutes.md").read_text(encoding="utf-8")


SELF_TEST = (ROOT / "docs" / "kv_cache_self_test.md").read_text(encoding="utf-8")


def test_the_self_test_folds_its_answers_and_cites_headings_that_exist() -> None:
    answers = re.findall(r"<details><summary>Answer</summary>\n\n(.*?)\n\n</details>", SELF_TEST, flags=re.DOTALL)
    cited = [name for answer in answers for name in re.findall(r"\*\(([^)]+)\)\*$", answer)]
    assert len(cited) == len(answers) == len(re.findall(r"^\*\*\d\. ", SELF_TEST, flags=re.MULTILINE)) == 6
    assert [name for name in cited if f"## {name}\n" not in FIVE_MINUTES] == []


def test_the_self_test_states_what_the_library_computes() -> None:
    def peaks(output_len: int, all_logits: bool) -> list[str]:
        sizes: Any = {"rows": 8, "input_len": 512, "output_len": output_len, "itemsize": 4, "all_logits": all_logits}
        return [f"{costs.peak_memory(DEMO, kv_caching=on, **sizes).total / MB:,.0f}" for on in (True, False)]

    def fed(rows: int, input_len: int, on: bool) -> str:
        calls = [rows * seqlen for _, seqlen in costs.forwards(input_len=input_len, output_len=32, kv_caching=on)]
        return " | ".join(f"{calls[step]:,}" for step in (0, 1, 2, 31))

    def cached(n_kv_heads: int) -> int:
        return costs.kv_bytes(22, n_kv_heads, 64, positions=2048, itemsize=2)

    def cache_mb(rows: int, length: int) -> float:
        return costs.cache_bytes(DEMO, rows=rows, length=length, itemsize=4) / MB

    weights, packed = (costs.weights_bytes(DEMO, itemsize=4, quantize=kind) / MB for kind in (None, "int8"))
    runs = {"A": (1, 4096, True), "B": (1, 5000, False), "C": (16, 256, True), "D": (16, 100, False)}
    stated = [
        *(f"| {n} | {' | '.join(peaks(n, True))} |" for n in (1, 32)),
        f"same logits, {costs.logits_bytes(DEMO, rows=8, positions=512) / MB:.0f} MB",
        f"his second line is {' and '.join(peaks(32, False))} MB",
        *(f"| {name} | {fed(*run)} |" for name, run in runs.items()),
        f"= {cached(32) / MB:.0f} MB of cache",
        f"count: {cached(4) / MB:.0f} MB. Eight texts fit.",
        f"weights: {weights:.0f} MB become {packed:.0f}, and all of its cache is {cache_mb(1, 288):.1f} MB",
        f"Of its {cache_mb(4, 8192):,.0f} MB, `int8` stores 0.30.",
        f"That saves {0.7 * cache_mb(4, 8192):,.0f} MB, and eight bits for the weights save {weights - packed:.0f}.",
    ]
    assert [one for one in stated if one not in SELF_TEST] == []
    assert cached(32) == 8 * cached(4)


def test_the_self_test_shows_steps_of_the_published_table() -> None:
    with (ROOT / "docs" / "results" / "table" / "table.csv").open(encoding="utf-8") as file:
        cells = [row for row in csv.DictReader(file) if row["figures"] == "cell"]
    steps = {(row["batch_size"], row["kv_caching"]): float(row["step_seconds_median"]) * 1000 for row in cells}
    for rows in ("1", "16"):
        assert f"| {rows} | {steps[rows, 'on']:.1f} | {steps[rows, 'off']:.1f} |" in SELF_TEST
    grown = [steps["16", on] / steps["1", on] for on in ("on", "off")]
    assert f"{grown[0]:.1f} times with the cache, and {grown[1]:.0f} times without" in SELF_TEST


def test_another_tenth_token_changes_the_keys_of_the_91_from_it_on() -> None:
    """Deeper layers show it: the keys of the first one follow from the token alone."""
    model = tiny_model(max_seq_len=100)
    keys = []
    for tenth in (1, 2):
        cache = model.new_cache()
        with torch.inference_mode():
            model(torch.tensor([[3] * 9 + [tenth] + [4] * 90]), 0, cache=cache)
        keys.append(cache.layers[-1].keys[0])
    changed = (keys[0] != keys[1]).any(dim=(1, 2))
    assert changed.nonzero().flatten().tolist() == list(range(9, 100))


def test_pages_and_the_exercise_show_attend_with_its_parameters() -> None:
    wanted = ", ".join(inspect.signature(attend).parameters)
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in (*PAGES, "course/kit/TASK.md")}
    shown = {page: re.findall(r"`attend\(([^.)]+)\)`", text) for page, text in pages.items()}
    assert sum(map(len, shown.values())) >= 2
    assert [page for page, found in shown.items() if set(found) - {wanted}] == []


def test_every_variable_of_the_environment_that_a_user_can_set_has_a_page() -> None:
    """LLAMA_JOB is set by the benchmark for its own processes."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llama").rglob("*.py"))
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    named = {*re.findall(r'"(LLAMA_[A-Z_]+)"', sources)} - {"LLAMA_JOB"}
    assert len(named) >= 3
    assert {*re.findall(r"^\| `(LLAMA_[A-Z_]+)", page, flags=re.MULTILINE)} == named


def test_the_five_minutes_count_bytes_as_their_formula_does() -> None:
    counted = re.findall(r"\| (2 x [\dx ]+) \| ([\d,]+)", FIVE_MINUTES)
    assert len(counted) == 3
    for formula, nbytes in counted:
        assert math.prod(map(int, formula.split(" x "))) == int(nbytes.replace(",", "")), formula


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_the_branch_and_the_line_of_a_page_are_those_of_the_sources(page: str) -> None:
    """In a snippet, `...` stands for the end of a line or for whole lines. Comments are the page's own."""

    def pattern_of(line: str) -> str:
        code = re.escape(line.partition("  #")[0].strip())
        return r"(?:.*\n)*?" if code == r"\.\.\." else f" *{code}\n".replace(r"\.\.\.", ".*")

    text = (ROOT / page).read_text(encoding="utf-8")
    shown = re.findall(r"^    # [\w.]+ in (llama/\w+\.py): .*\n((?:    (?!#).*\n)+)", text, flags=re.MULTILINE)
    assert [file for file, _ in shown] == ["llama/model.py", "llama/generation.py"]
    for file, snippet in shown:
        pattern = "^" + "".join(pattern_of(line[4:]) for line in snippet.splitlines())
        assert re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), snippet


def test_every_module_and_folder_of_the_library_is_on_the_map() -> None:
    on_the_map = set(re.findall(r"^    ((?:llama/|inference|benchmark)\S+)", MAP, flags=re.MULTILINE))
    modules = {f"llama/{path.name}" for path in (ROOT / "llama").glob("*.py")} - {"llama/__init__.py"}
    folders = {f"llama/{path.parent.name}/" for path in (ROOT / "llama").glob("*/__init__.py")}
    assert on_the_map == {*modules, *folders, "inference.py", "benchmark_inference.py"}


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


def test_the_plan_of_growth_measures_both_modes_at_every_size() -> None:
    points = read_plan((ROOT / "docs" / "examples" / "growth.toml").read_text(encoding="utf-8"))
    sizes = {(point.context, point.batch) for point in points}
    assert len(sizes) == 12
    assert {(*size, kind) for size in sizes for kind in ("off", "static")} == {
        (point.context, point.batch, point.kind) for point in points
    }


def test_the_page_on_the_benchmarks_json_has_every_field_and_no_other() -> None:
    page = (ROOT / "docs" / "benchmark_json.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    fields = {"Head": [name for name in schema.Report.__annotations__ if name != "rows"], "Rows": list(schema.KEYS)}
    for name, expected in fields.items():
        assert re.findall(r"^\| `(\w+)` \|", sections[name], flags=re.MULTILINE) == expected, name
    assert schema.SCHEMA in page
    columns = re.findall(r"^\| `(\w+)` \|", sections["Columns"], flags=re.MULTILINE)
    assert len(columns) == len(set(columns))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llama" / "bench").rglob("*.py"))
    assert [name for name in columns if f'"{name}"' not in sources] == [], "what no code writes or reads"
    reports = [table_report(), caches_report(), chat_report(), hand_in_report()]
    assert {name for report in reports for row in report["rows"] for name in row} <= set(columns)
