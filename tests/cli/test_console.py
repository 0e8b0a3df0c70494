"""A command ends in a sentence or in silence, whatever its streams, its environment and the signals that it gets.

Most claims are made of a command of a few lines, in a process of its own; some of inference.py and a tiny checkpoint.
"""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint

from llama.cli import console
from llama.ranks import torchrun as parallel

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "inference.py"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the streams and signals are POSIX's")

COMMAND = """
import sys, time
from llama import cli
from llama.cli import console

def main(*prompts: str, lines: int = 1, wait: bool = False, fail: bool = False, read: bool = False) -> int:
    if read:
        print(len(console.standard_input().read()))
    try:
        for line in range(lines):
            print(f"line {line}", *prompts)
        while wait:
            print("waiting", flush=True)
            time.sleep(0.01)
    finally:
        if wait:
            print("what was made")
    if fail:
        raise ValueError("it fails")
    return 5

cli.main(main)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("command") / "command.py"
    file.write_text(COMMAND)
    return f"{sys.executable} {file}"


@pytest.fixture(scope="module")
def infer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """inference.py on a tiny checkpoint."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_seq_len=32768)
    return f"{sys.executable} {SCRIPT} --ckpt_dir {checkpoint} --device cpu"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def shell(line: str, **changes: str) -> tuple[int, str, str]:
    """Run a line of bash; return the exit code of the first command in it, and what is printed."""
    words = ["bash", "-c", f"{line}\nexit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(
        words, env=environment(**changes), capture_output=True, text=True, errors="replace", timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_leaves_ends_a_command_in_silence(command: str, unbuffered: str) -> None:
    for lines in (1, 100_000):
        for reader in ("head -n 1", "true", "head -c 5"):
            code, _, err = shell(f"{command} --lines {lines} | {reader}", PYTHONUNBUFFERED=unbuffered)
            assert (code in (5, 141), err) == (True, "")
    assert shell(f"{command} --lines 100000 | true", PYTHONUNBUFFERED=unbuffered)[0] == 141
    assert shell(f"{command} --help | true")[0] in (0, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_one_line(command: str, unbuffered: str) -> None:
    for lines in (1, 100_000):
        code, _, err = shell(f"{command} --lines {lines} > /dev/full", PYTHONUNBUFFERED=unbuffered)
        assert (code, err.count("\n"), "No space left on device" in err) == (2, 1, True)
    assert shell(f"{command} --fail 2> /dev/full") == (2, "line 0\n", "")
    assert shell(f"{command} --fail > /dev/full 2>&1") == (2, "", "")


def test_closed_streams_lead_nowhere(command: str) -> None:
    assert shell(f"{command} >&-") == (5, "", "")
    assert shell(f"{command} 2>&- <&-") == (5, "line 0\n", "")
    assert shell(f"{command} --fail >&-") == (2, "", "error: it fails\n")
    assert shell(f"{command} --fail 2>&-") == (2, "line 0\n", "")
    assert shell(f"{command} --fail <&- >&- 2>&-") == (2, "", "")
    code, _, err = shell(f"{command} --read <&-")
    assert (code, err.count("\n"), "standard input is closed" in err) == (2, 1, True)


def test_a_closed_stream_s_number_is_given_to_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(
        "import os\nfrom llama import cli\n\ndef main(*, name: str = '') -> int:\n"
        "    with open(name, 'w') as file:\n        os.write(1, b'lost')\n        file.write('kept')\n    return 0\n\n"
        "cli.main(main)\n"
    )
    assert shell(f"{sys.executable} {file} --name {tmp_path / 'out'} >&-") == (0, "", "")
    assert (tmp_path / "out").read_text() == "kept"


@pytest.mark.slow
def test_inference_meets_such_streams_without_noise(infer: str) -> None:
    made = f"{infer} --max_gen_len 40 x"
    for line in (f"{made} | head -n 1", f"{made} --stream | head -c 5", f"{made} | true", f"{made} <&- >&-"):
        code, _, err = shell(line)
        assert (code in (0, 141), err) == (True, ""), line
    for line, words in (
        (f"{made} > /dev/full", "No space left on device"),
        (f"{made} --prompt_file - <&-", "standard input is closed"),
        (f"{infer} --chat <&-", "standard input is closed"),
    ):
        code, out, err = shell(line)
        assert (code, out, err.count("\n"), words in err) == (2, "", 1, True), line


# ---- signals ---------------------------------------------------------------------------------------------------------


def heed_signals() -> None:
    """Undo what a shell does to a child in the background: signals are ignored, and its children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def running(line: str, until: str = "waiting\n", **changes: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command, and go on once it has printed `until`."""
    process = subprocess.Popen(
        line.split(),
        env=environment(PYTHONUNBUFFERED="1", **changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )
    assert process.stdout is not None
    try:
        seen = b""
        while until.encode() not in seen:
            more = os.read(process.stdout.fileno(), 1000)
            assert more, process.communicate()[1].decode()
            seen += more
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "terminated")],
)
def test_a_signal_is_one_line_behind_what_was_made(command: str, number: int, word: str) -> None:
    with running(f"{command} --wait") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err.decode()) == (128 + number, f"{word}\n")
    assert out.decode().endswith("what was made\n")


def test_a_terminal_that_is_closed_leaves_no_folder_behind(tmp_path: Path) -> None:
    import fcntl
    import pty
    import termios

    def of_this_terminal() -> None:
        heed_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # which sends SIGHUP when it is closed

    file = tmp_path / "command.py"
    file.write_text(
        "import tempfile, time\nfrom llama import cli\nfrom llama.cli import console\n"
        "from llama.cli.progress import progress_bar\n\n"
        "def main() -> int:\n    with tempfile.TemporaryDirectory(), progress_bar('work', total=9) as bar:\n"
        "        print('begun', flush=True)\n        while True:\n            bar.refresh()\n"
        "            time.sleep(0.05)\n\ncli.main(main)\n"
    )
    (tmp_path / "temporary").mkdir()
    terminal, its_other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(file)],
        env=environment(TMPDIR=str(tmp_path / "temporary")),
        **dict.fromkeys(("stdin", "stdout", "stderr"), its_other_end),
        start_new_session=True,
        preexec_fn=of_this_terminal,
    )
    os.close(its_other_end)
    while b"begun" not in os.read(terminal, 1000):
        pass
    assert [*(tmp_path / "temporary").iterdir()]
    os.close(terminal)
    process.wait(timeout=30)
    assert not [*(tmp_path / "temporary").iterdir()]


def test_a_hangup_that_is_ignored_stays_so(command: str) -> None:
    with running(f"nohup {command} --wait") as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        assert b"waiting" in os.read(process.stdout.fileno(), 1000)


def test_sigterm_is_a_launcher_s_own(command: str) -> None:
    with running(f"{command} --wait", WORLD_SIZE="1") as process:
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGTERM, b"")


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "until"), [("--stream", "first\n> "), ("--trace", "step 5\n")])
def test_sigterm_prints_what_was_generated(infer: str, flag: str, until: str) -> None:
    """A trace shows how far it is, where the text is printed at the end alone."""
    with running(f"{infer} first second --max_gen_len 30000 --temperature 0 {flag}", until) as process:
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, b"")
    assert out.count(b"==================================") == 2
    assert b" tokens in " in out


def test_sigterm_ends_a_conversation_on_a_pipe(infer: str) -> None:
    process = subprocess.Popen(
        f"{infer} --chat --max_gen_len 30000".split(),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1)  # an answer of minutes has begun
        process.terminate()
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (143, b"terminated\n")


SLOW = "import time\nprint('waiting', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    "words",
    [
        [str(SCRIPT), "x"],
        [str(ROOT / "benchmark_inference.py")],
        ["-m", "llama", "bench"],
        ["-m", "llama.convert", "demo", "x.gguf"],
        ["-m", "llama.verify"],
        ["-m", "llama.perplexity"],
        *([str(file)] for file in sorted((ROOT / "scripts").glob("*.py"))),
    ],
    ids=lambda words: Path(words[-1]).name,
)
def test_ctrl_c_while_a_command_imports_is_one_line(words: list[str], tmp_path: Path) -> None:
    for name in ("torch", "llama_cpp", "selenium"):  # found before the real ones, and slower still
        (tmp_path / f"{name}.py").write_text(SLOW)
    with running(" ".join([sys.executable, *words]), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"interrupted\n")


# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "-1"),
        ("WORLD_SIZE", "1.5"),
        ("WORLD_SIZE", "9" * 5000),
        ("LLAMA_CACHE_DIR", "/dev/null/x"),
        ("LLAMA_CACHE_DIR", "~nobody-of-this-name/x"),
        ("LLAMA_CACHE_DIR", "x" * 300),
    ],
)
def test_an_environment_that_makes_no_sense_is_one_line(name: str, value: str, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "x", "--device", "cpu"]  # of the demo, which is not in such a cache
    done = subprocess.run(
        words, env=environment(**{name: value}), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert name in done.stderr
    assert len(done.stderr) <= console.LONGEST_LINE + 1


@pytest.mark.parametrize(
    ("name", "value", "asked"),
    [
        ("RANK", "x", parallel.world_rank),
        ("RANK", "2", parallel.world_rank),
        ("LOCAL_WORLD_SIZE", "0", parallel.local_size),
        ("LLAMA_TIMEOUT", "x", parallel.default_timeout),
        ("LLAMA_TIMEOUT", "nan", parallel.default_timeout),
        ("LLAMA_TIMEOUT", "1e300", parallel.default_timeout),
        ("LLAMA_TIMEOUT", "-1", parallel.default_timeout),
        ("MASTER_PORT", "abc", lambda: parallel.job_store(1.0)),
        ("MASTER_PORT", "70000", lambda: parallel.job_store(1.0)),
    ],
)
def test_what_a_launcher_leaves_in_the_environment_is_checked_by_name(
    name: str, value: str, asked: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}='{value}' in the environment must be "):
        asked()


def test_empty_variables_are_none(infer: str) -> None:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LLAMA_TIMEOUT", "LLAMA_CACHE_DIR")
    code, _, err = shell(f"{infer} x --max_gen_len 1", **dict.fromkeys(names, ""))
    assert (code, err) == (0, "")


# ---- what a terminal shows -------------------------------------------------------------------------------------------


def on_terminal(words: list[str], **changes: str) -> str:
    """Return what a command shows on a terminal of its own."""
    import pty

    main, its_other_end = pty.openpty()
    process = subprocess.Popen(
        words, env=environment(**changes), stdin=its_other_end, stdout=its_other_end, stderr=its_other_end
    )
    os.close(its_other_end)
    shown = b""
    with suppress(OSError):  # a terminal whose process has ended reads as an error
        while part := os.read(main, 1000):
            shown += part
    process.wait(timeout=30)
    os.close(main)
    return shown.decode()


EVIL = "\033]0;title\a\033[31mred\x9b2J\u202e\r\x7f"


@pytest.mark.slow
def test_prompts_names_and_errors_reach_a_terminal_with_control_characters_visible(infer: str, tmp_path: Path) -> None:
    for words in (["--max_gen_len", "1", EVIL], ["--stream", "--max_gen_len", "1", EVIL], ["--prompt_file", EVIL]):
        shown = on_terminal([*infer.split(), *words])
        assert "␛]0;title␇␛[31mred\\x9b2J\\u202e" in shown
        assert not set(shown) & (set(EVIL) - set("\r") - {chr(code) for code in range(32, 127)})


def test_whatever_a_command_prints_acts_on_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(
        "import logging\nfrom llama import cli\nfrom llama.cli import console\n\ndef main(*prompts: str) -> int:\n"
        "    console.put(prompts[0])\n    console.put(prompts[0], dim=True)\n"
        "    console.put(f'  BAD {prompts[0]}\\nnot BAD', alarm='BAD')\n"
        "    logging.getLogger('llama').warning(prompts[0])\n"
        "    raise OSError(2, 'not there', prompts[0].strip('\\r\\x7f'))\n\n"
        "cli.main(main)\n"
    )
    safe = "␛]0;title␇␛[31mred\\x9b2J\\u202e␍␡"
    lines = [
        safe,
        f"\033[2m{safe}\033[0m",
        f"\033[31m  BAD {safe}\033[0m",
        "not BAD",
        safe,
        f"error: {safe[:-2]}: not there",
    ]
    assert on_terminal([sys.executable, str(file), EVIL], TERM="xterm").splitlines() == lines
    plain = [line.replace("\033[2m", "").replace("\033[31m", "").replace("\033[0m", "") for line in lines]
    assert on_terminal([sys.executable, str(file), EVIL], TERM="dumb").splitlines() == plain
    for words in ([EVIL], [EVIL, "--debug"]):  # in a pipe, messages are the same, and texts are as they are
        done = subprocess.run([sys.executable, str(file), *words], env=environment(), capture_output=True, check=False)
        assert done.stdout == f"{EVIL}\n{EVIL}\n  BAD {EVIL}\nnot BAD\n".encode()
        assert done.stderr.decode().splitlines()[:: len(done.stderr.splitlines()) - 1] == [
            safe,
            f"error: {safe[:-2]}: not there",
        ]


def test_nothing_prints_but_by_the_console() -> None:
    # `files` prints what was made where no file takes it, which must be whole.
    for file in {*(ROOT / "llama").rglob("*.py")} - {ROOT / "llama/cli/console.py", ROOT / "llama/host/files.py"}:
        calls = [each.func for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"], file


def test_a_pipe_gets_text_as_it_is(infer: str) -> None:
    done = subprocess.run(
        [*infer.split(), "--max_gen_len", "1", EVIL], env=environment(), capture_output=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"{EVIL}\n> ".encode())


def test_long_messages_lose_their_middle_and_keep_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("x" * 100_000 + "; use this")
    err = capsys.readouterr().err
    assert (len(err), err.endswith("x; use this\n")) == (console.LONGEST_LINE + 1, True)


def test_a_signal_has_its_own_exit_code_and_word() -> None:
    outcome: Callable[[KeyboardInterrupt], Any] = lambda stop: (  # noqa: E731
        console.exit_code(stop),
        console.in_words(stop),
        console.is_ctrl_c(stop),
    )
    assert outcome(KeyboardInterrupt()) == outcome(console.Stopped(signal.SIGINT)) == (130, "interrupted", True)
    assert outcome(console.Stopped(signal.SIGTERM)) == (143, "terminated", False)
