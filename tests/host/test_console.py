"""A command ends with one line or in silence, whatever its streams, its environment and its signals.

Most tests run a command of a few lines, in a process of its own; some run inference.py with a tiny checkpoint.
"""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llama.host import console
from llama.ranks import torchrun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "inference.py"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the streams and signals are POSIX's")

COMMAND = """
import sys, time
from llama import cli
from llama.host import console

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


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}


def shell(line: str, **changes: str) -> tuple[int, str, str]:
    """Run a line of bash; return the exit code of the first command in it, and what is printed."""
    words = ["bash", "-c", f"{line}\nexit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(
        words, env=environment(**changes), capture_output=True, text=True, errors="replace", timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_reader_that_ends_early_ends_a_command_in_silence(command: str, unbuffered: str) -> None:
    for lines, reader in ((1, "true"), (100_000, "head -n 1")):
        code, _, err = shell(f"{command} --lines {lines} | {reader}", PYTHONUNBUFFERED=unbuffered)
        assert (code in (5, 141), err) == (True, "")
    assert shell(f"{command} --lines 100000 | true", PYTHONUNBUFFERED=unbuffered)[0] == 141
    assert shell(f"{command} --help | true")[0] in (0, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_full_disk_behind_standard_output_is_one_line(command: str, unbuffered: str) -> None:
    for lines in (1, 100_000):
        code, _, err = shell(f"{command} --lines {lines} > /dev/full", PYTHONUNBUFFERED=unbuffered)
        assert (code, err.count("\n"), "No space left on device" in err) == (2, 1, True)
    assert shell(f"{command} --fail 2> /dev/full") == (2, "line 0\n", "")
    assert shell(f"{command} --fail > /dev/full 2>&1") == (2, "", "")


def test_a_character_that_the_output_cannot_encode_is_replaced(command: str) -> None:
    assert shell(f"{command} 日本", PYTHONIOENCODING="ascii") == (5, "line 0 ??\n", "")


def test_closed_streams_are_the_null_device(command: str) -> None:
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


# ---- signals ---------------------------------------------------------------------------------------------------------


def default_signals() -> None:
    """Restore default signals: a shell ignores them in background jobs, whose children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def running(line: str, until: str = "waiting\n", **changes: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command, and continue when it has printed `until`."""
    process = subprocess.Popen(
        line.split(),
        env=environment(PYTHONUNBUFFERED="1", **changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
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
def test_a_signal_is_one_line_after_the_output_so_far(command: str, number: int, word: str) -> None:
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
        default_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # which sends SIGHUP when it is closed

    file = tmp_path / "command.py"
    file.write_text(
        "import tempfile, time\nfrom llama import cli\nfrom llama.host import console\n"
        "from llama.host.progress import progress_bar\n\n"
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


def test_an_ignored_hangup_stays_ignored(command: str) -> None:
    with running(f"nohup {command} --wait") as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        assert b"waiting" in os.read(process.stdout.fileno(), 1000)


def test_sigterm_under_a_launcher_is_not_handled(command: str) -> None:
    with running(f"{command} --wait", WORLD_SIZE="1") as process:
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGTERM, b"")


# Naps: a signal that comes just before a long sleep is handled after it.
SLOW = "import time\nprint('waiting', flush=True)\nfor _ in range(600):\n    time.sleep(0.1)\n"


@pytest.mark.parametrize(
    "words",
    [
        [str(SCRIPT), "x"],
        pytest.param(["-m", "llama", "bench"], marks=pytest.mark.slow),
        pytest.param(["-m", "llama.verify"], marks=pytest.mark.slow),
        pytest.param([str(ROOT / "scripts" / "compare_outputs.py")], marks=pytest.mark.slow),
    ],
    ids=lambda words: Path(words[-1]).name,
)
def test_ctrl_c_while_a_command_imports_is_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW)  # found before the real one, and slower
    with running(" ".join([sys.executable, *words]), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"interrupted\n")


def test_every_script_that_imports_torch_handles_ctrl_c_before() -> None:
    for script in (ROOT / "scripts").glob("*.py"):
        text = script.read_text("utf-8")
        if "cli.main(main)" in text and "\nimport torch\n" in text:
            assert text.index("console.quiet_imports()") < text.index("\nimport torch\n"), script


# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "asked"),
    [
        ("WORLD_SIZE", "0", torchrun.world_size),
        ("WORLD_SIZE", "1.5", torchrun.world_size),
        ("RANK", "x", torchrun.world_rank),
        ("RANK", "2", torchrun.world_rank),
        ("LOCAL_WORLD_SIZE", "0", torchrun.local_size),
        ("LLAMA_TIMEOUT", "x", torchrun.default_timeout),
        ("LLAMA_TIMEOUT", "nan", torchrun.default_timeout),
        ("LLAMA_TIMEOUT", "1e300", torchrun.default_timeout),
        ("LLAMA_TIMEOUT", "-1", torchrun.default_timeout),
        ("MASTER_PORT", "abc", lambda: torchrun.job_store(1.0)),
        ("MASTER_PORT", "70000", lambda: torchrun.job_store(1.0)),
    ],
)
def test_variables_of_a_launcher_are_checked_by_name(
    name: str, value: str, asked: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}='{value}' in the environment must be "):
        asked()


def test_empty_variables_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LLAMA_TIMEOUT"):
        monkeypatch.setenv(name, "")
    assert (torchrun.world_size(), torchrun.world_rank(), torchrun.local_size()) == (1, 0, 1)
    assert torchrun.default_timeout() == 60


# ---- control characters ----------------------------------------------------------------------------------------------


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


def test_control_characters_are_visible_on_a_terminal_and_in_messages(tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(
        "import logging\nfrom llama import cli\nfrom llama.host import console\n\ndef main(*prompts: str) -> int:\n"
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
    for words in ([EVIL], [EVIL, "--debug"]):  # in a pipe, messages are the same, and texts unchanged
        done = subprocess.run([sys.executable, str(file), *words], env=environment(), capture_output=True, check=False)
        assert done.stdout == f"{EVIL}\n{EVIL}\n  BAD {EVIL}\nnot BAD\n".encode()
        assert done.stderr.decode().splitlines()[:: len(done.stderr.splitlines()) - 1] == [
            safe,
            f"error: {safe[:-2]}: not there",
        ]


def test_only_the_console_prints() -> None:
    # `files` prints results that it cannot write to a file.
    for file in {*(ROOT / "llama").rglob("*.py")} - {ROOT / "llama/host/console.py", ROOT / "llama/host/files.py"}:
        text = file.read_text()
        parsed = ast.walk(ast.parse(text)) if "print(" in text else ()
        calls = [each.func for each in parsed if isinstance(each, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"], file


def test_long_messages_lose_their_middle(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("x" * 100_000 + "; use this")
    err = capsys.readouterr().err
    assert (len(err), err.endswith("x; use this\n")) == (console.LONGEST_LINE + 1, True)
