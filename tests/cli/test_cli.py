"""Words of a command line arrive as typed, or are refused in one line before anything runs."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf
from commands import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from native import needs_a_compiler
from tables import table

import llama.api
from llama import cli
from llama.cli.inference import main, read_prompts, show
from llama.cli.perplexity import main as perplexity_main
from llama.host.cores import FreeCores

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "inference.py"
PROMPTS = [
    "Hello, world",
    "hello # x",
    "3.10",
    "[1]",
    "-5 degrees",
    '{"a": 1}',
    "None",
    "  spaces ",
    "",
    "-",
    "a=b",
    "(1, 2)",
    "'quoted'",
    "1e5",
    "true",
    "line\nbreak",
    "日本 😀",
    "\033]0;title\a\033[31mred\x9b2J\u202e\x7f",
    "\\n",
    "$HOME",
    "-5",
    "-x\n",
]
FLAGS = ["--", "--debug", "--help", "-h", "--prompts", "--stream", "--zzz", "-hello", "-x=1"]  # prompts all the same

Result = tuple[tuple[str, ...], dict[str, Any]]
CALLS: list[Result] = []


def noted(
    *prompts: str,
    max_gen_len: int = 64,
    temperature: float = 0.6,
    top_k: int | None = None,
    ckpt_dir: str = "demo",
    prompt_file: str | None = None,
    kv_caching: bool = True,
    stream: bool = False,
    stop: list[str] = [],  # noqa: B006  (read only)
) -> int:
    """Note the prompts, and the flags that are not the defaults."""
    given, defaults = locals(), noted.__kwdefaults__ or {}
    CALLS.append((prompts, {name: given[name] for name in defaults if given[name] != defaults[name]}))
    return 0


def asked(*words: str) -> Result:
    """Return the prompts and flags with which a command is called."""
    CALLS.clear()
    assert cli.run(noted, list(words)) == 0
    return CALLS[0]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_arrives_unchanged_plain_under_its_name_and_after_two_dashes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked() == ((), {})
    for prompt in PROMPTS:
        assert asked(prompt, "--max_gen_len", "3") == ((prompt,), {"max_gen_len": 3})
    for prompt in PROMPTS + FLAGS:
        assert asked("--prompts", prompt) == ((prompt,), {})
        assert asked(f"--prompts={prompt}", "--stream", "--max_gen_len=3")[0] == (prompt,)
        assert asked("--debug", "--max_gen_len=3", "--", "first", prompt) == (("first", prompt), {"max_gen_len": 3})
    assert capsys.readouterr() == ("", "")


def test_a_flag_s_value_may_look_like_a_flag() -> None:
    assert asked("--stop", "--debug", "--stop", "-h", "--stop=--") == ((), {"stop": ["--debug", "-h", "--"]})
    assert asked("--ckpt_dir", "--help") == ((), {"ckpt_dir": "--help"})


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_any_text_after_two_dashes_arrives_unchanged(prompt: str) -> None:
    assert asked("--kv_caching=False", "--", "first", prompt) == (("first", prompt), {"kv_caching": False})


def test_several_prompts_arrive_in_order_plain_or_named() -> None:
    assert asked(*PROMPTS[:8])[0] == tuple(PROMPTS[:8])
    assert asked("one", "--prompts", "two", "three", "--stream", "--prompts=four")[0] == ("one", "two", "three", "four")
    assert asked("--prompts", "--max_gen_len")[0] == ("--max_gen_len",)


# ---- flags -----------------------------------------------------------------------------------------------------------


@table(
    "words, expected",
    [
        (["--kv_caching", "false"], {"kv_caching": False}),
        (["--kv_caching=False"], {"kv_caching": False}),
        (["--kv-caching=FALSE"], {"kv_caching": False}),
        (["--kv_caching"], {}),
        (["--kv_caching", "true"], {}),
        (["--stream"], {"stream": True}),
        (["--max_gen_len", "7", "--temperature=0"], {"max_gen_len": 7, "temperature": 0.0}),
        (["--temperature", "1e-3", "--top_k=5"], {"temperature": 1e-3, "top_k": 5}),
        (["--temperature", "-1"], {"temperature": -1.0}),  # refused later
        (["--top_k", "None"], {}),
        (["--ckpt_dir", "3.10", "--prompt_file=[1]"], {"ckpt_dir": "3.10", "prompt_file": "[1]"}),
        (["--ckpt_dir=None"], {"ckpt_dir": "None"}),
        (["--ckpt_dir=a=b"], {"ckpt_dir": "a=b"}),
        (["--stop", "a,b", "--stop=# x", "--stop", "None"], {"stop": ["a,b", "# x", "None"]}),
        (["--prompt_file", "-"], {"prompt_file": "-"}),
        (["--debug=false"], {}),
    ],
)
def test_flags_are_read_by_their_types(words: list[str], expected: dict[str, Any]) -> None:
    assert asked(*words) == ((), expected)
    assert asked("x", *words, "--", "y") == (("x", "y"), expected)


def test_variables_set_flags_that_no_word_sets_and_must_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"rows": int, "kv_cache": str, "check": float, "prompts": list[str]}
    for name, text in {"ROWS": "8", "KV_CACHE": "paged", "CHECK": ""}.items():
        monkeypatch.setenv(f"LLAMA_KV_{name}", text)
    assert cli.from_environment("LLAMA_KV_", types, set()) == [("kv_cache", "paged"), ("rows", "8")]
    assert cli.from_environment("LLAMA_KV_", types, {"rows"}) == [("kv_cache", "paged")]
    monkeypatch.setenv("LLAMA_KV_ROW", "8")
    with pytest.raises(ValueError, match=r"variable LLAMA_KV_ROW sets no flag; did you mean LLAMA_KV_ROWS\?"):
        cli.from_environment("LLAMA_KV_", types, set())


def test_a_bare_switch_leaves_the_next_prompt() -> None:
    assert asked("--stream", "x") == (("x",), {"stream": True})
    assert asked("0", "--kv_caching") == (("0",), {})
    assert asked("--kv_caching", "--", "off") == (("off",), {})


def test_a_switch_before_a_word_that_may_be_meant_for_it_is_refused(command: Command) -> None:
    for word in ("0", "1", "yes", "No", "on", "OFF", "none"):
        said = (
            f"error: --kv_caching={word} must be true or false: write --kv_caching=true or --kv_caching=false "
            "(a prompt that is this word goes before the flag, or after --)\n"
        )
        assert command.refused(noted, "--kv_caching", word) == said
        assert command.refused(noted, f"--kv_caching={word}") == said


@table(
    "words, expected",
    [
        (["--kvcaching=False"], "unknown flag --kvcaching; did you mean --kv_caching?"),
        (["--nokv_caching"], "did you mean --kv_caching?"),
        (["--max-gen-length", "5"], "unknown flag --max-gen-length; did you mean --max_gen_len?"),
        (["--zzz"], "unknown flag --zzz; --help lists the flags"),
        (["-p", "-"], "unknown flag -p"),
        (["-kv-caching=False"], "unknown flag -kv-caching; did you mean --kv_caching?"),
        (["--max_gen_len", "many"], "--max_gen_len=many must be a whole number"),
        (["--max_gen_len=1.5"], "must be a whole number"),
        (["--max_gen_len="], "must be a whole number"),
        (["--temperature", "hot"], "--temperature=hot must be a number"),
        (["--kv_caching=yes"], "--kv_caching=yes must be true or false"),
        (["--kv_caching=0"], "must be true or false"),
        (["--max_gen_len"], "--max_gen_len needs a value"),
        (["--prompts"], "--prompts needs a value"),
        (["--max_gen_len=1", "--max_gen_len=2"], "--max_gen_len is given twice"),
        (["--max_gen_len", "--stream"], "--max_gen_len=--stream must be a whole number"),
    ],
)
def test_bad_words_are_refused_in_one_line_with_code_2(words: list[str], expected: str, command: Command) -> None:
    assert expected in command.refused(noted, *words)
    assert expected in command.refused(noted, "a prompt", *words)


@table("kind", [ValueError, OSError, RuntimeError])
def test_an_error_of_the_command_is_one_line_and_debug_shows_the_traceback(
    kind: type[Exception], command: Command
) -> None:
    def failing(*prompts: str, on: bool = True) -> int:
        raise kind("top_p=2 is\n  too much")

    assert command.refused(failing, "x") == "error: top_p=2 is too much\n"
    code, out, err = command(failing, "x", "--debug")
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert "raise kind" in err
    assert err.endswith("\nerror: top_p=2 is too much\n")
    code, _, err = command(failing, "--on=x", "--debug=TRUE")
    assert (code, "Traceback" in err) == (2, True)


def test_a_plain_word_is_refused_where_a_command_takes_none(command: Command) -> None:
    def without_words(*, on: bool = True) -> int:
        return 0

    assert command.printed(without_words) == ""
    assert command.refused(without_words, "x") == "error: 'x' is not a flag; --help lists the flags\n"


def test_an_error_that_no_user_can_cause_is_not_hidden() -> None:
    def command(*prompts: str, on: bool = True) -> int:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        cli.run(command, [])


def test_the_command_s_code_is_the_exit_code_and_an_interrupt_130(command: Command) -> None:
    def ends(*prompts: str, on: bool = True) -> int:
        if prompts:
            raise SystemExit(7)
        if not on:
            raise KeyboardInterrupt
        return 7

    said = "error: code that this command ran ended it by SystemExit(7); --debug shows where\n"
    assert command.refused(ends, "x") == said
    assert command(ends) == (7, "", "")
    assert command(ends, "--on=false") == (130, "", "interrupted\n")


# ---- inference.py ----------------------------------------------------------------------------------------------------


Infer = Callable[..., str]


@pytest.fixture
def infer(checkpoint: Path, command: Command) -> Infer:
    """Run inference.py's command on the tiny checkpoint and return what it prints."""
    return partial(command.printed, main, "--ckpt_dir", checkpoint, "--device=cpu")


def without_speed(printed: str) -> str:
    return re.sub(r"\n\d+ tokens in .*\n$", "", printed)


def test_prompts_reach_the_model_and_the_page_unchanged(infer: Infer) -> None:
    printed = infer("--max_gen_len=2", *PROMPTS)
    at = 0
    for prompt in PROMPTS:
        at = printed.index(f"{prompt}\n> ", at) + len(prompt)
    assert printed.count("==================================") == len(PROMPTS)
    assert re.search(
        r"\n\d+ tokens in \d+\.\d\d s: .* \(batch 22, KV cache on \(static\), float32 on cpu\)\n$", printed
    )


def test_without_a_prompt_the_four_examples_are_completed(infer: Infer) -> None:
    *sections, speed = infer("--max_gen_len=1").split("\n\n==================================\n\n")
    starts = ("I believe the meaning of life is", "Simply put,", "A brief message", "Translate English to French:")
    assert [section.startswith(start) for section, start in zip(sections, starts, strict=True)] == [True] * 4
    assert re.fullmatch(r"\d+ tokens in .* tokens/s, .*KV cache on \(static\), float32 on cpu\)\n", speed)


def test_text_is_the_same_with_and_without_the_cache_streamed_or_not(infer: Infer) -> None:
    words = ["--max_gen_len=12", "hello", "the", "x", "--seed", "4"]
    printed = {
        more: infer(*words, *more)
        for more in ((), ("--kv_caching=False",), ("--stream",), ("--kv_cache=concat",), ("--stop", "zzz"))
    }
    assert len({without_speed(text) for text in printed.values()}) == 1
    assert "KV cache off" in printed[("--kv_caching=False",)]
    assert "KV cache on (concat)" in printed[("--kv_cache=concat",)]
    assert without_speed(infer(*words[:-1], "5")) != without_speed(printed[()])


def test_a_text_has_the_form_of_the_file_that_schema_names(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "form.json"
    file.write_text('{"const": {"a": [1]}}')
    printed = infer("--max_gen_len=40", "hello", "--temperature=3", "--schema", str(file))
    assert json.loads(printed.partition("> ")[2].partition("\n\n====")[0]) == {"a": [1]}
    file.write_text('["const"]')
    with pytest.raises(ValueError, match=r"--schema .*form.json: .*"):
        main("hello", schema=str(file))


@table("kind", ["window:40+4", "{file}:mine"])
def test_every_kind_of_cache_is_accepted_and_named(kind: str, infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from llama.kv_cache import ConcatCache\n\n\nclass Mine(ConcatCache, kind='mine'): ...\n")
    named = kind.format(file=file)
    words = ["--max_gen_len=4", "--temperature=0", "hello the x", "hello the y", "--kv_cache", named]
    printed = [infer(*words, *more) for more in ((), ("--share_prefix",))]
    assert all(f"KV cache on ({named})" in text for text in printed)
    assert without_speed(printed[0]) == without_speed(printed[1])


def test_a_prompt_is_read_from_a_file_or_standard_input(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " # a file, 3.10\nwith lines\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text + "\n")
    words = ["--max_gen_len=1", "--fast=False", "first"]
    from_file = infer(*words, "--prompt_file", file)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
    from_stdin = infer(*words, "--prompt_file", "-")
    assert without_speed(from_file) == without_speed(from_stdin)
    assert f"{text}\n> " in from_file
    assert from_file.startswith("first\n> ")


@table("name", ["x.txt", "-"])
def test_json_lines_under_another_name_are_refused(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"prompt": "a"}\n\n  { "prompt": "b", "stop": ["}"]}  \r\n'
    file = tmp_path / name
    file.write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    said = command.refused(main, "--ckpt_dir", "not/there", "--prompt_file", name if name == "-" else file)
    assert f"{'standard input' if name == '-' else file} is a file of 2 JSON lines, and would be one prompt; " in said


@table("text", ['{"a": 1}', '{"a": 1}\nWhat is a?', "{x}\n{y}", '{\n  "a": 1\n}', "[1]\n[2]"])
def test_other_prompts_with_json_are_prompts(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    assert read_prompts((), str(file)) == [text]


def test_a_stop_string_that_the_shell_left_escaped_is_noted(infer: Infer, command: Command, checkpoint: Path) -> None:
    words = ["--ckpt_dir", checkpoint, "hello", "--max_gen_len=1", "--stop"]
    code, out, err = command(main, *words, "\\nUser:")
    assert (code, err.count("\n")) == (0, 1)
    assert "--stop '\\\\nUser:' has a backslash and the letter n" in err
    assert "$'\\n'" in err
    for stop in ("\n", "a\\b", "\\"):
        assert command.printed(main, *words, stop)
    assert without_speed(command.printed(main, *words, "\\n", "--quiet")) == without_speed(out)


def test_a_mistyped_kind_of_cache_is_refused_with_a_guess_before_a_model_is_looked_for(command: Command) -> None:
    for command_of in (main, perplexity_main):
        words = ["--text", __file__] if command_of is perplexity_main else []
        said = command.refused(command_of, *words, "--ckpt_dir", "not/there", "--kv_cache", "static@:2;snapvk:0.25")
        assert said.startswith("error: kv_cache='snapvk:0.25' is not a known kind of cache; known are: ")
        assert said.endswith("; did you mean snapkv?\n")


def test_wrong_values_of_a_flag_are_refused_before_weights_are_read(
    checkpoint: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.api, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    for kind, said in (("int4:x", "int4"), ("window:99999999+4", "take a smaller window")):
        assert said in command.refused(main, "--ckpt_dir", checkpoint, "hello", "--kv_cache", kind)
    missing = checkpoint / "none.txt"
    for flag in ("--prompt_file", "--ckpt_dir"):
        assert str(missing) in command.refused(main, flag, missing)


@table(
    "words",
    [
        ["--temperature", "-1"],
        ["--top_p", "2"],
        ["--top_k", "0"],
        ["--min_p=-0.1"],
        ["--repetition_penalty", "0"],
        ["--timeout", "nan"],
        ["--max_gen_len", "0"],
        ["--stop", ""],
        ["--share_prefix", "--kv_caching=False"],
        ["--stream", "--trace"],
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(words: list[str], command: Command) -> None:
    err = command.refused(main, "--ckpt_dir", "not/there", *words)
    assert words[0].lstrip("-").split("=")[0] in err
    assert "not/there" not in err  # nothing looked for it


@table(
    "file, expected",
    [
        ("{folder}", "Is a directory"),
        ("{folder}/latin", "latin is not UTF-8 at byte 3; convert it first"),
        ("{folder}/\x1b[31m", "No such file"),
        ("a\0b", "null byte"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_prompt_file_that_cannot_be_read_is_one_line(
    file: str, expected: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    err = command.refused(main, "--prompt_file", file.format(folder=tmp_path), "--ckpt_dir", "not/there")
    assert (expected in err, "not/there" in err) == (True, False)


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes are POSIX's")
def test_a_named_pipe_is_refused_as_a_cache_file(checkpoint: Path, command: Command, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.py")
    err = command.refused(main, "--kv_cache", f"{pipe}:x", "hello", "--ckpt_dir", checkpoint)
    assert f"{pipe} is no regular file\n" in err


class Endless(io.StringIO):
    """A stream that never ends."""

    def read(self, size: int | None = -1) -> str:
        assert size is not None
        assert size > 0
        return "x" * size


def test_standard_input_is_limited_and_must_be_utf_8(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    for stdin, said in ((Endless(), "has more than the limit of 16 MB"), (latin, "is not UTF-8")):
        monkeypatch.setattr(sys, "stdin", stdin)
        err = command.refused(main, "--prompt_file", "-", "--ckpt_dir", "not/there")
        assert f"standard input {said}" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffhello\n"))  # Windows begins texts with a byte order mark
    assert read_prompts((), "-") == ["hello"]


# Words with a meaning in Python, in a shell or as a float, and numbers beyond every type.
VALUES = ["0", "-1", "1", "7", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 25, "9" * 5000, "", " ", "None", "true"]
VALUES += ["x", "\0", "\x1b[31m", "\ud800", "é", "1_0", "a.py:b", ".py:", "window:0+0", "int8:", ":", "../..", "-"]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data())
def test_no_words_cause_a_traceback(data: st.DataObject) -> None:
    names = [name for name in cli.flag_types(main) if name not in ("max_gen_len", "chat", "prompt_file", "ckpt_dir")]
    given = data.draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(VALUES)), max_size=3))
    words = [f"--{name}={value}" for name, value in given]
    assert cli.run(main, ["--ckpt_dir", "not/there", "hello", *words]) == 2


def traced(printed: str) -> list[tuple[int, int, int, int]]:
    """Return (row, prev_pos, cur_pos, number fed) of every line of a trace."""
    lines = re.findall(r"^  row (\d+): prev_pos=(\d+) cur_pos=(\d+) fed (\d+): \[", printed, re.MULTILINE)
    return [(int(row), int(prev), int(cur), int(n)) for row, prev, cur, n in lines]


def test_a_trace_shows_one_token_a_row_with_the_cache_and_the_growing_prefix_without(infer: Infer) -> None:
    words = ["hello the", "x", "--max_gen_len=4", "--trace", "--temperature=0"]  # 3 and 2 tokens with their BOS
    cached = infer(*words)
    starts = [(0, 0, 3, 3), (1, 0, 2, 2)]
    assert traced(cached) == starts + [row for n in range(1, 4) for row in [(0, 2 + n, 3 + n, 1), (1, 1 + n, 2 + n, 1)]]
    plain = infer(*words, "--kv_caching=False")
    assert traced(plain) == starts + [row for n in range(1, 4) for row in [(0, 0, 3 + n, 3 + n), (1, 0, 2 + n, 2 + n)]]
    assert [line for line in cached.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(4)]
    assert "'<|begin_of_text|>hello the'" in cached


def test_a_trace_shows_only_active_rows(infer: Infer) -> None:
    words = ["hello the", "x", "--max_gen_len=6", "--temperature=0"]
    long, short = re.findall(r"> (.*?)\n\n===", infer(*words), re.DOTALL)
    stop = next(piece for piece in short if piece not in long)  # it ends the second row and not the first
    rows = [row for row, *_ in traced(infer(*words, "--trace", "--stop", stop))]
    assert rows.count(0) == 6
    assert 1 <= rows.count(1) < 6
    assert rows[-1] == 0


class Broken:
    """A stream that raises an error after some pieces."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.results = [{"generation": "one "}, {"generation": "two "}]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        yield from [(0, "one "), (1, "two ")]
        raise self.error

    def close(self) -> None:
        """Release held-back text, as a real stream does."""
        self.results[0]["generation"] += "held"


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("the logits are not finite"), 2, "error: the logits are not finite\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_in_the_middle_is_one_line_after_the_text_so_far(
    error: BaseException, code: int, said: str, live: bool, command: Command
) -> None:
    def breaks(*prompts: str) -> int:
        return show(prompts, Broken(error), live=live)

    end = "\n\n==================================\n\n"
    assert command(breaks, "first", "second") == (code, f"first\n> one held{end}second\n> two {end}", said)


def test_chat_answers_a_user_s_message(infer: Infer) -> None:
    printed = infer("--chat", "hello", "--fast=False", "--max_gen_len=3", "--trace")
    marks = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nhello<|eot_id|><|start_header_id|>assistant"
    assert marks in printed
    assert "hello\n> " in printed


@needs_a_compiler
def test_conversations_and_files_of_prompts_are_fast_by_default_with_a_notice(command: Command, tmp_path: Path) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    path = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.Q4_1)
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    said = "--chat and --prompt_file run with --fast by default; --fast=False chooses the plain path"

    def execution(*words: object) -> tuple[str, bool]:
        code, out, err = command(main, "--ckpt_dir", path, "--device=cpu", "--max_gen_len=1", *words)
        assert code == 0
        return out.rpartition(" on cpu")[2], said in err

    stored = ", native, stored weights)\n"
    assert execution("hello") == (")\n", False)
    assert execution("--prompt_file", file) == (stored, True)
    assert execution("hello", "--chat") == (stored, True)
    assert execution("hello", "--chat", "--fast=False") == (")\n", False)
    assert execution("hello", "--chat", "--exact") == (", exact)\n", False)


@needs_a_compiler
def test_the_execution_is_one_line_that_quiet_omits(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    path = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.Q4_1)
    monkeypatch.setattr(FreeCores, "choose_threads", lambda self, say: say("1 thread computes"))
    words = ["--ckpt_dir", path, "--device=cpu", "--max_gen_len=1", "--fast", "hello"]
    assert command(main, *words)[::2] == (0, "execution: native, stored weights; 1 thread computes\n")
    assert command.printed(main, *words, "--quiet")
    code, _, err = command(main, *words, "--quiet", "--kv_cache=tova", "--threads=0")
    assert (code, err[:7]) == (2, "error: ")
    assert command(main, *words)[2], "quiet applies to one call"


# ---- as a process ----------------------------------------------------------------------------------------------------


def test_an_unknown_flag_is_refused_before_torch_is_imported() -> None:
    look = (
        "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv[1:] = ['x', '--kvcachin']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "error: unknown flag --kvcachin; did you mean --kv_caching?\n"


@table("word", ["--help", "-h"])
def test_help_is_printed_whatever_else_is_given(word: str, command: Command) -> None:
    assert "PROMPTS" in command.printed(main, "a prompt", word, "--zzz")
