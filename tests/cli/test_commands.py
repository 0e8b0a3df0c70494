"""llama-kv is one command for the functions of the scripts and of `python -m llama.x`, with their flags and help."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from fire import docstrings
from tables import table

import llama
from llama import __main__ as commands
from llama import cli
from llama.cli import benchmark_inference
from llama.cli.inference import main as inference
from llama.kv_cache import KVCache

ROOT = Path(__file__).parents[2]


def test_the_overview_fits_a_screen_and_names_every_command() -> None:
    lines = commands.HELP.splitlines()
    assert len(lines) <= 23  # the prompt is the 24th
    assert max(map(len, lines)) <= 80
    assert re.findall(r"(?:^  |; )([a-z]+)(?=  |: )", commands.HELP, re.MULTILINE) == list(commands.COMMANDS)


def test_the_overview_needs_no_slow_import() -> None:
    look = (
        "import atexit, sys; from llama import __main__ as m; "
        "atexit.register(lambda: print({'torch', 'fire'} & set(sys.modules))); m.main()"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{commands.HELP}set()\n", "")


@table("word, hint", [("benhc", "did you mean bench?"), ("--kv_caching", "llama-kv --help lists them")])
def test_an_unknown_command_is_one_line(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.overview(word) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), hint in err, repr(word) in err) == ("", 1, True, True)


def test_a_command_is_started_with_its_flags_and_under_its_name() -> None:
    words = [sys.executable, "-m", "llama", "run", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\n    llama-kv run - Complete prompts" in done.stdout
    assert "\n    llama-kv run <flags> [PROMPTS]...\n" in done.stdout
    for flag in [*cli.flag_types(inference), "threads", "debug"]:
        assert f"--{flag}" in done.stdout
    assert not re.search(r"(?<![-\w])-\w", done.stdout), "it lists a one-letter flag"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "version"):
        assert commands.overview(word) == 0
        assert capsys.readouterr().out == f"llama-kv {llama.__version__}\n"


def test_a_command_has_its_help() -> None:
    text = cli.help_text(inference, "llama-kv run")
    assert "    llama-kv run - Complete prompts with a Llama model; " in text
    assert "--chat=CHAT Type: bool Default: False" in " ".join(text.split())


def test_the_help_of_kv_cache_names_every_kind() -> None:
    said = next(arg.description for arg in docstrings.parse(inference.__doc__ or "").args if arg.name == "kv_cache")
    ours = {name for name, kind in KVCache.kinds.items() if kind.__module__.startswith("llama.")}
    assert ours <= set(re.split(r"[ ,.]+", said))


@table(
    "program, expected",
    [
        ("/usr/bin/llama-kv", "llama-kv bench --text 'a b'"),
        ("C:/llama-kv.exe", "llama-kv bench --text 'a b'"),
        ("/x/llama/__main__.py", "llama-kv bench --text 'a b'"),
        ("./benchmark_inference.py", "python benchmark_inference.py bench --text 'a b'"),
    ],
)
def test_a_report_says_how_to_measure_again(program: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "bench", "--text", "a b"])
    assert benchmark_inference.as_started() == expected


# ---- the help of every command ---------------------------------------------------------------------------------------

FILES = sorted([*ROOT.glob("llama/**/*.py"), *ROOT.glob("scripts/*.py")])
MAINS = {
    path.relative_to(ROOT).as_posix(): node
    for path in FILES
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name == "main" and "Args:" in (ast.get_docstring(node) or "")
}


def test_every_command_has_a_help() -> None:
    own = {f"llama/cli/{module}.py" for module, _ in commands.COMMANDS.values()}
    assert own <= MAINS.keys()


@table("file", MAINS)
def test_help_describes_every_flag_in_whole_sentences(file: str) -> None:
    given, told = MAINS[file].args, docstrings.parse(ast.get_docstring(MAINS[file]) or "")  # as fire reads it
    names = [arg.arg for arg in (*given.args, *([given.vararg] if given.vararg else []), *given.kwonlyargs)]
    assert sorted(arg.name for arg in told.args) == sorted(names)
    for text in [told.summary, *(arg.description for arg in told.args)]:
        assert text[0].isupper() or not text[0].isalpha(), text
        assert text.endswith("."), text


@table("file", MAINS)
def test_a_command_reads_each_flag_before_it_assigns_to_its_name(file: str) -> None:
    """A flag with the name of a variable would have no effect."""
    names = [node for node in ast.walk(MAINS[file]) if isinstance(node, ast.Name)]
    names.sort(key=lambda name: -name.lineno)
    first = {(name.id, type(name.ctx)): name.lineno for name in names}
    passes_all = ("locals", ast.Load) in first
    passed = re.findall(r"\bflags\.(\w+)", (ROOT / file).read_text(encoding="utf-8")) if passes_all else []
    for flag in (arg.arg for arg in MAINS[file].args.kwonlyargs if arg.arg not in passed):
        assert (flag, ast.Load) in first, f"--{flag} is not read"
        assert first[flag, ast.Load] <= first.get((flag, ast.Store), sys.maxsize), f"--{flag} is a variable"


NOWHERE = "there is no tokenizer file /nowhere"


@table(
    "name, words, said",
    [
        ("run", "hi --tokenizer_path /nowhere", NOWHERE),
        ("run", "hi --dtype fp65", "dtype='fp65' is not known"),
        ("serve", "--port 0 --dtype fp65", "dtype='fp65' is not known"),
        ("serve", "--port 0 --max_seq_len -1", "max_seq_len=-1 must be a whole number"),
        ("serve", "--port 0 --quantize int3", "quantize='int3' is not known"),
        ("bench", "--tokenizer_path /nowhere", NOWHERE),
        ("bench", "--activations 3", "activations=3 must be 8 or 16"),
        ("costs", "--tokenizer_path /nowhere", NOWHERE),
        ("convert", "demo out.gguf --type q8_0 --tokenizer_path /nowhere", NOWHERE),
        ("perplexity", "--text README.md --dtype fp65", "dtype='fp65' is not known"),
        ("doctor", "demo --tokenizer_path /nowhere", NOWHERE),
    ],
)
def test_the_value_of_a_flag_reaches_the_check_of_it(
    name: str, words: str, said: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    module, function = commands.COMMANDS[name]
    code, out, err = command(getattr(importlib.import_module(f"llama.cli.{module}"), function), *words.split())
    assert (code in (1, 2), said in out + err) == (True, True), out + err
