"""The standard streams of a command, which may be closed or full, and the signals that end it.

Knows processes and terminals; does not know what a command does.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from llama.untrusted.words import without_middle

READER_ENDED = 128 + 13  # the exit code of SIGPIPE, which Windows lacks: the reader of standard output has ended
LONGEST_LINE = 1000  # characters of a message

# Characters that control a terminal, shown as Unicode's picture or as their number. The last ones change the direction
# of the text after them, so that it looks like another text.
_VISIBLE = {
    code: chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else f"\\x{code:02x}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


_quiet = False


class Stopped(KeyboardInterrupt):
    """Raised by Ctrl-C, SIGTERM and SIGHUP; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return 130 for Ctrl-C, 143 for SIGTERM and 129 for SIGHUP, as shells do."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def is_ctrl_c(stop: KeyboardInterrupt) -> bool:
    """Return whether it was Ctrl-C, after which a conversation continues; other signals end the process."""
    return exit_code(stop) == 128 + signal.SIGINT


def in_words(stop: KeyboardInterrupt) -> str:
    return "interrupted" if is_ctrl_c(stop) else "terminated"


def quiet_imports() -> None:
    """Let Ctrl-C end the process with one line until `stopping` begins; there is nothing to clean up before that."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    drop_frames()


def drop_frames() -> None:
    """Let torch print no warnings of C++ in a rank; call it before torch is imported.

    If another rank is lost, they are a warning of some 20 frames before each error of ours. TORCH_CPP_LOG_LEVEL wins.
    """
    if "WORLD_SIZE" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _leave(number: int, frame: Any) -> None:
    say(in_words(Stopped(number)))
    os._exit(128 + number)


@contextmanager
def stopping() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise Stopped in the block; after it they end the process at once.

    Ignored signals stay ignored. torchrun ends its processes by SIGTERM and SIGHUP, so these keep their handlers there.
    SIGHUP, which Windows lacks, means that the terminal was closed: temporary folders are removed then, too.
    """
    ours = [signal.SIGINT] if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _leave) else []
    ends = [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)] if "WORLD_SIZE" not in os.environ else []
    ours += [each for each in ends if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)


def stop(number: int, frame: Any) -> None:
    """Raise Stopped, as the handler of a signal."""
    raise Stopped(number)


def open_streams() -> None:
    """Open closed standard streams on the null device; else the next opened file would get the number of one of them.

    The system gives the lowest free number, so their order matters. A closed standard input stays None in Python, so
    that reading from it is an error.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for as long as we run)


def standard_input() -> TextIO:
    """Return standard input; raise ValueError if it is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed, so there is nothing to read; remove <&- from the command line")
    return sys.stdin


def visible(text: str) -> str:
    """Return the text with visible control characters; newlines and tabs stay."""
    return text.translate(_VISIBLE)


def put(text: str = "", end: str = "\n", *, dim: bool = False, alarm: str | None = None) -> None:
    """Print a text on standard output, on a terminal with visible control characters, elsewhere unchanged.

    On a terminal with colours, `dim` dims the text, and lines that begin with the word `alarm` are red.
    """
    on_terminal = sys.stdout.isatty()
    said = visible(text) if on_terminal else text
    if on_terminal and os.environ.get("TERM") != "dumb":
        if dim:
            said = f"\033[2m{said}\033[0m"
        elif alarm is not None:
            said = re.sub(rf"^ *{alarm}\b.*", "\033[31m\\g<0>\033[0m", said, flags=re.MULTILINE)
    print(said, end=end, flush=True)


def say(text: str, *, longest: int = LONGEST_LINE) -> None:
    """Print a message on standard error, with visible control characters, unless the stream is closed or full.

    Control characters are made visible in a file and a pipe, too, because messages end on a terminal.
    """
    with suppress(OSError, ValueError):  # full, left or closed
        print(visible(without_middle(text, longest)), file=sys.stderr, flush=True)


def be_quiet(value: bool) -> None:
    """Drop notices and progress from now on, or print them again."""
    global _quiet
    _quiet = value


def is_quiet() -> bool:
    return _quiet


def note(text: str) -> None:
    """Print a notice on standard error, about what the command does or chose; nothing with --quiet."""
    if not _quiet:
        say(text)


def unwritten() -> int:
    """Flush the standard streams; return 0, or the exit code if standard output cannot be written.

    The code is 141, without a message, if its reader has ended, as `head` does; else 2, with a message.
    """
    _flush(sys.stderr)
    error = _flush(sys.stdout)
    if error is None:
        return 0
    if isinstance(error, BrokenPipeError):
        return READER_ENDED
    say(f"error: standard output: {error.strerror}")
    return 2


def _flush(stream: TextIO) -> OSError | None:
    """Flush a stream; if that fails, redirect it to the null device and return the error."""
    try:
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error
    return None
