"""Words on a command line arrive as they were typed, or are refused in one line before anything runs."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import cli
from llama.cli import console
from llama.cli.inference import main, read_prompts, show
from llama.kv_cache import cache_kind

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
    "\\n",
    "$HOME",
    "-5",
    "-x\n",
]
FLAGS = ["--", "--debug", "--help", "-h", "--prompts", "--stream", "--zzz", "-hello", "-x=1"]  # prompts all the same

Result = tuple[tuple[str, ...], dict[str, Any]]


def asked(*words: str) -> Result:
    """Return the prompts and flags with which a command is called."""
    calls: list[Result] = []

    def command(
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
        """Do nothing."""
        given = locals()
        calls.append((prompts, {name: given[name] for name in defaults if given[name] != defaults[name]}))
        return 0

    defaults: dict[str, Any] = command.__kwdefaults__
    code = cli.run(command, list(words))
    if code:
        raise Refused(code)
    return calls[0]


class Refused(Exception):
    pass


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which words are refused."""
    with pytest.raises(Refused, match="2"):
        asked(*words)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_seq_len=32768)


@pytest.fixture(scope="module")
def inference() -> Callable[..., int]:
    """The command of inference.py."""
    return main


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_arrives_unchanged_as_a_plain_word(prompt: str) -> None:
    assert asked(prompt) == ((prompt,), {})
    assert asked(prompt, "--max_gen_len", "3") == ((prompt,), {"max_gen_len": 3})


@pytest.mark.parametrize("prompt", PROMPTS + FLAGS)
def test_a_prompt_arrives_unchanged_under_its_name_and_after_two_dashes(
    prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("--prompts", prompt) == ((prompt,), {})
    assert asked(f"--prompts={prompt}", "--stream", "--max_gen_len=3")[0] == (prompt,)
    assert asked("--max_gen_len=3", "--", prompt) == ((prompt,), {"max_gen_len": 3})
    assert asked("--debug", "--", "first", prompt) == (("first", prompt), {})
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


def test_no_words_are_no_prompts_and_all_defaults() -> None:
    assert asked() == ((), {})


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--kv_caching", "false"], {"kv_caching": False}),
        (["--kv_caching=False"], {"kv_caching": False}),
        (["--kv-caching=FALSE"], {"kv_caching": False}),
        (["--kv_caching"], {}),
        (["--kv_caching", "true"], {}),
        (["--stream"], {"stream": True}),
        (["--max_gen_len", "7", "--temperature=0"], {"max_gen_len": 7, "temperature": 0.0}),
        (["--temperature", "1e-3", "--top_k=5"], {"temperature": 1e-3, "top_k": 5}),
        (["--temperature", "-1"], {"temperature": -1.0}),  # refused by whoever knows the limit
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


def test_a_bare_switch_does_not_eat_the_prompt_after_it() -> None:
    assert asked("--stream", "x") == (("x",), {"stream": True})
    assert asked("0", "--kv_caching") == (("0",), {})
    assert asked("--kv_caching", "--", "off") == (("off",), {})


@pytest.mark.parametrize("word", ["0", "1", "yes", "No", "on", "OFF", "none"])
def test_a_switch_before_a_word_that_may_be_meant_for_it_is_refused(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        refusal(capsys, "--kv_caching", word)
        == refusal(capsys, f"--kv_caching={word}")
        == (
            f"error: --kv_caching={word} must be true or false: write --kv_caching=true or --kv_caching=false "
            "(a prompt that is this word goes before the flag, or after --)\n"
        )
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--kvcaching=False"], "unknown flag --kvcaching; did you mean --kv_caching?"),
        (["--nokv_caching"], "did you mean --kv_caching?"),
        (["--max-gen-length", "5"], "unknown flag --max-gen-length; did you mean --max_gen_len?"),
        (["-stream"], "unknown flag -stream; did you mean --stream?"),
        (["--zzz"], "unknown flag --zzz; --help lists the flags"),
        (["-m=5"], "unknown flag -m"),
        (["-p", "-"], "unknown flag -p"),
        (["-hello"], "unknown flag -hello"),
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
def test_bad_words_are_refused_in_one_line_with_code_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(capsys, *words)
    assert expected in refusal(capsys, "a prompt", *words)


@pytest.mark.parametrize(
    "error", [ValueError("top_p=2 is\n  too much"), OSError("top_p=2 is too much"), RuntimeError("top_p=2 is too much")]
)
def test_an_error_of_the_command_is_one_line_and_debug_shows_the_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*prompts: str, on: bool = True) -> int:
        raise error

    assert cli.run(command, ["x"]) == 2
    assert capsys.readouterr() == ("", "error: top_p=2 is too much\n")
    assert cli.run(command, ["x", "--debug"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" in err
    assert "raise error" in err
    assert err.endswith("\nerror: top_p=2 is too much\n")


@pytest.mark.parametrize("words", [["--debug", "--zzz"], ["--zzz", "--debug"], ["--max_gen_len=x", "--debug=TRUE"]])
def test_debug_shows_the_traceback_of_an_error_in_the_words_too(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refused, match="2"):
        asked(*words)
    assert "Traceback" in capsys.readouterr().err


def test_a_plain_word_is_refused_where_a_command_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    def command(*, on: bool = True) -> int:
        return 0

    assert cli.run(command, []) == 0
    assert cli.run(command, ["x"]) == 2
    assert capsys.readouterr() == ("", "error: 'x' is not a flag; --help lists the flags\n")


def test_an_error_that_no_user_can_cause_is_not_hidden() -> None:
    def command(*prompts: str, on: bool = True) -> int:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        cli.run(command, [])


def test_the_command_s_code_is_the_exit_code_and_an_interrupt_130(capsys: pytest.CaptureFixture[str]) -> None:
    def command(*prompts: str, on: bool = True) -> int:
        if not on:
            raise KeyboardInterrupt
        return 7

    assert cli.run(command, []) == 7
    assert cli.run(command, ["--on=false"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


# ---- inference.py ----------------------------------------------------------------------------------------------------


def infer(command: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run inference.py's command on the tiny checkpoint and return what it printed."""
    code = cli.run(command, ["--ckpt_dir", str(checkpoint), "--device=cpu", *words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return str(out)


def without_speed(printed: str) -> str:
    return re.sub(r"\n\d+ tokens in .*\n$", "", printed)


def test_prompts_reach_the_model_and_the_page_unchanged(
    inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = infer(inference, checkpoint, capsys, "--max_gen_len=2", *PROMPTS)
    at = 0
    for prompt in PROMPTS:
        at = printed.index(f"{prompt}\n> ", at) + len(prompt)
    assert printed.count("==================================") == len(PROMPTS)
    assert re.search(
        r"\n\d+ tokens in \d+\.\d\d s: .* \(batch 21, KV cache on \(static\), float32 on cpu\)\n$", printed
    )


def test_text_is_the_same_with_and_without_the_cache_streamed_or_not(
    inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--max_gen_len=12", "hello", "the", "x", "--seed", "4"]
    printed = {
        infer_words: infer(inference, checkpoint, capsys, *words, *infer_words)
        for infer_words in ((), ("--kv_caching=False",), ("--stream",), ("--kv_cache=concat",), ("--stop", "zzz"))
    }
    assert len({without_speed(text) for text in printed.values()}) == 1
    assert "KV cache off" in printed[("--kv_caching=False",)]
    assert "KV cache on (concat)" in printed[("--kv_cache=concat",)]
    assert without_speed(infer(inference, checkpoint, capsys, *words[:-1], "5")) != without_speed(printed[()])


@pytest.mark.parametrize("kind", ["window:40+4", "paged:64", "int8", "{file}:mine"])
def test_every_kind_of_cache_is_taken_and_named(
    kind: str, inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from llama.kv_cache import ConcatCache\n\n\nclass Mine(ConcatCache, kind='mine'): ...\n")
    named = kind.format(file=file)
    words = ["--max_gen_len=4", "--temperature=0", "hello the x", "hello the y", "--kv_cache", named]
    printed = [infer(inference, checkpoint, capsys, *words, *more) for more in ((), ("--share_prefix",))]
    assert all(f"KV cache on ({named})" in text for text in printed)
    assert without_speed(printed[0]) == without_speed(printed[1])


def test_a_window_longer_than_the_model_reads_is_refused_in_one_line(
    inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(inference, ["--ckpt_dir", str(checkpoint), "hello", "--kv_cache", "window:99999999+4"]) == 2
    _, err = capsys.readouterr()
    assert (err.count("\n"), "take a smaller window" in err) == (1, True)


def test_a_prompt_is_read_from_a_file_or_standard_input(
    inference: Callable[..., int],
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = " # a file, 3.10\nwith lines\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text + "\n")
    words = ["--max_gen_len=1", "first"]
    from_file = infer(inference, checkpoint, capsys, *words, "--prompt_file", str(file))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
    from_stdin = infer(inference, checkpoint, capsys, *words, "--prompt_file", "-")
    assert without_speed(from_file) == without_speed(from_stdin)
    assert f"{text}\n> " in from_file
    assert from_file.startswith("first\n> ")


@pytest.mark.parametrize(
    ("text", "lines"),
    [('{"prompt": "a"}\n\n{"prompt": "b"}\n', 2), ('"a"\n"b"\n"c"', 3), ('"a"\n{"b": [1, 2]}\n', 2)],
)
def test_json_lines_are_not_taken_for_one_prompt(
    text: str,
    lines: int,
    inference: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    for file, name in ((str(tmp_path / "x.jsonl"), f"{tmp_path / 'x.jsonl'}"), ("-", "standard input")):
        assert cli.run(inference, ["--prompt_file", file, "--ckpt_dir", "not/there"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {name} has {lines} lines of JSON, and a prompt file is one prompt; ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ['{"one": "object"}\n', '"a quotation"', 'a line\n{"b": 1}\n', "1\n2\n3\n", "[1]\n[2]\n", '{\n  "a": 1\n}', '"'],
)
def test_any_other_text_is_one_prompt(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    assert read_prompts((), str(tmp_path / "x")) == [text.removesuffix("\n")]


def test_a_missing_prompt_file_and_a_missing_checkpoint_are_one_line(
    inference: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flag in ("--prompt_file", "--ckpt_dir"):
        missing = tmp_path / "none.txt"
        assert cli.run(inference, [flag, str(missing)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: ")
        assert str(missing) in err


@pytest.mark.parametrize(
    "words",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top_p", "2"],
        ["--top_k", "0"],
        ["--top_k", str(2**63)],
        ["--min_p=-0.1"],
        ["--repetition_penalty", "0"],
        ["--seed", str(2**64)],
        ["--timeout", "nan"],
        ["--max_gen_len", "0"],
        ["--stop", ""],
        ["--device", "gpu"],
        ["--dtype", "fp8"],
        ["--kv_cache", "rolling"],
        ["--kv_cache", "window:4+8"],
        ["--kv_cache", "int8:2"],
        ["--kv_cache", "nowhere.py:mine"],
        ["--share_prefix", "--kv_caching=False"],
        ["--max_seq_len", "0"],
        ["--max_batch_size", "0"],
        ["--max_batch_size", "3"],  # of the four example prompts
        ["--stream", "--trace"],
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    words: list[str], inference: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(inference, ["--ckpt_dir", "not/there", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words[0].lstrip("-").split("=")[0] in err
    assert "not/there" not in err  # was not looked for


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("import sys\nsys.exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Mine(:", "SyntaxError: "),
        ("x = '\x00'", "null bytes"),
        ("raise ValueError('\\n'.join('ab'))", "ValueError: a b"),
        ("print('loud')", "kv_cache='x' is not a known kind of cache"),
    ],
)
def test_a_cache_file_that_ends_or_fails_is_named_in_one_line(
    code: str,
    expected: str,
    inference: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{code}\n")
    assert cli.run(inference, ["hello", "--kv_cache", f"{file}:x", "--ckpt_dir", "not/there"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), expected in err) == (1, True)
    assert ("mine.py" in err) == (not code.startswith("print"))  # which a file may do


def test_a_command_s_own_interrupt_is_not_taken_for_the_cache_file_s(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import signal\nfrom llama.cli import console\nconsole.stop(signal.SIGTERM, None)\n")
    with pytest.raises(console.Stopped):
        cache_kind(f"{file}:x")


def test_code_that_ends_a_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command(*prompts: str) -> int:
        raise SystemExit(7)

    assert cli.run(command, []) == 2
    err = capsys.readouterr().err
    assert err == "error: code that this command ran ended it by SystemExit(7); --debug shows where\n"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/dev/zero", "/dev/zero is longer than 16 MB, the limit for a text; cut it"),
        ("{folder}", "Is a directory"),
        ("{folder}/huge", "huge is longer than 16 MB"),
        ("{folder}/latin", "latin is not UTF-8 at byte 3; convert it first"),
        ("{folder}/pipe", "pipe is a named pipe without a writer"),
        ("{folder}/\x1b[31m", "No such file"),
        ("a\0b", "null byte"),
        ("x" * 300, "File name too long"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="devices and named pipes are POSIX's")
def test_a_prompt_file_of_any_kind_is_read_or_refused_in_one_line(
    file: str,
    expected: str,
    inference: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llama.untrusted.files.WRITER_S", 0.05)
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(2 << 30)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    os.mkfifo(tmp_path / "pipe")
    assert cli.run(inference, ["--prompt_file", file.format(folder=tmp_path), "--ckpt_dir", "not/there"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), expected in err, "not/there" in err) == ("", 1, True, False)


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes are POSIX's")
def test_a_pipe_is_no_cache_file(
    inference: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert cli.run(inference, ["--kv_cache", f"{tmp_path / 'pipe.py'}:x", "hello", "--ckpt_dir", "not/there"]) == 2
    assert f"{tmp_path / 'pipe.py'} is no regular file\n" in capsys.readouterr().err


class Endless(io.StringIO):
    """A stream that never ends."""

    def read(self, size: int | None = -1) -> str:
        assert size is not None
        assert size > 0
        return "x" * size


def test_no_more_of_standard_input_is_read_than_a_prompt_may_have(
    inference: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Endless())
    assert cli.run(inference, ["--prompt_file", "-", "--ckpt_dir", "not/there"]) == 2
    assert "standard input holds more than the 16 MB" in capsys.readouterr().err
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", latin)
    assert cli.run(inference, ["--prompt_file", "-", "--ckpt_dir", "not/there"]) == 2
    assert "standard input is no UTF-8 text" in capsys.readouterr().err


# Words that mean something to Python, to a shell, or to a float, and more of them than any type holds.
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


def test_a_trace_shows_one_token_a_row_with_the_cache_and_the_growing_prefix_without(
    inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["hello the", "x", "--max_gen_len=4", "--trace", "--temperature=0"]  # 3 and 2 tokens with their BOS
    cached = infer(inference, checkpoint, capsys, *words)
    starts = [(0, 0, 3, 3), (1, 0, 2, 2)]
    assert traced(cached) == starts + [row for n in range(1, 4) for row in [(0, 2 + n, 3 + n, 1), (1, 1 + n, 2 + n, 1)]]
    plain = infer(inference, checkpoint, capsys, *words, "--kv_caching=False")
    assert traced(plain) == starts + [row for n in range(1, 4) for row in [(0, 0, 3 + n, 3 + n), (1, 0, 2 + n, 2 + n)]]
    assert [line for line in cached.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(4)]
    assert "'<|begin_of_text|>hello the'" in cached


def test_a_trace_leaves_out_rows_that_have_ended(
    inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["hello the", "x", "--max_gen_len=6", "--temperature=0"]
    long, short = re.findall(r"> (.*?)\n\n===", infer(inference, checkpoint, capsys, *words), re.DOTALL)
    stop = next(piece for piece in short if piece not in long)  # it ends the second row and not the first
    rows = [row for row, *_ in traced(infer(inference, checkpoint, capsys, *words, "--trace", "--stop", stop))]
    assert rows.count(0) == 6
    assert 1 <= rows.count(1) < 6
    assert rows[-1] == 0


class Broken:
    """A stream that ends in an error after some pieces."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.results = [{"generation": "one "}, {"generation": "two "}]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        yield from [(0, "one "), (1, "two ")]
        raise self.error

    def close(self) -> None:
        """Let go of what was held back, as a real one does."""
        self.results[0]["generation"] += "held"


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("error", [ValueError("the logits are not finite"), RuntimeError("out of memory")])
def test_an_error_in_the_middle_is_one_line_after_the_text_so_far(
    error: Exception, live: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*prompts: str) -> int:
        return show(prompts, Broken(error), live=live)

    assert cli.run(command, ["first", "second"]) == 2
    end = "\n\n==================================\n\n"
    assert capsys.readouterr() == (f"first\n> one held{end}second\n> two {end}", f"error: {error}\n")


def test_chat_answers_a_user_s_message(
    inference: Callable[..., int], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = infer(inference, checkpoint, capsys, "--chat", "hello", "--max_gen_len=3", "--trace")
    marks = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nhello<|eot_id|><|start_header_id|>assistant"
    assert marks in printed
    assert "hello\n> " in printed


# ---- as a process ----------------------------------------------------------------------------------------------------


def start(*words: str, environment: Mapping[str, str] = {}, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_an_unknown_flag_is_refused_before_torch_is_imported() -> None:
    look = (
        "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv[1:] = ['x', '--kvcachin']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", look],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "error: unknown flag --kvcachin; did you mean --kv_caching?\n"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_flag_and_exits_0(word: str, inference: Callable[..., int]) -> None:
    process = start("a prompt", word)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    text = out.decode()
    for flag in [*cli.flag_types(inference), "debug"]:
        assert f"--{flag}" in text
    assert "PROMPTS" in text
    assert not re.search(r"(?<![-\w])-\w", text), "it promises a one-letter flag"


def test_a_page_that_cannot_hold_a_character_gets_a_mark_in_its_place(checkpoint: Path) -> None:
    words = ["日本", "second", "--max_gen_len=1", "--device=cpu"]
    process = start("--ckpt_dir", str(checkpoint), *words, environment={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"??\n> ")
    assert b"second\n> " in out
    assert b" tokens/s" in out


def test_an_interrupt_prints_the_text_so_far_and_exits_130(checkpoint: Path) -> None:
    # 30,000 tokens take minutes; the first are out after a second.
    words = ["first", "second", "--stream", "--max_gen_len=30000", "--temperature=0", "--device=cpu"]
    # A shell starts what goes into the background with interrupts ignored, and the children of that inherit it.
    process = start(
        "--ckpt_dir",
        str(checkpoint),
        *words,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    seen = b""
    try:
        while len(seen) < 60:
            more = os.read(process.stdout.fileno(), 1000)
            assert more, "it ended before it was interrupted"
            seen += more
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    printed = (seen + out).decode(errors="replace")
    assert printed.startswith("first\n> ")
    end = "\n\n==================================\n\n"
    first, second, speed = printed.split(end)
    assert len(first) > 20
    assert re.fullmatch(r"second\n> .+", second, re.DOTALL)
    assert re.match(r"\d+ tokens in ", speed)
    assert err == b""
