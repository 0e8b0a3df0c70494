"""What a command shares with whoever runs it: three streams, which may be closed or full, and signals that end it.

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

LEFT = 128 + 13  # the exit code where nobody reads any more: SIGPIPE's, which Windows does not have
LONGEST_LINE = 1000  # characters of a message; what a library says may be longer than anyone reads

# What a terminal would obey: shown as the picture that Unicode has for it, or as its number. The last ones turn the
# direction of what follows, and so make it look like another text.
_VISIBLE = {
    code: chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else f"\\x{code:02x}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


class Stopped(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, in a command that ends alike by each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return 130 for Ctrl-C, 143 for SIGTERM and 129 for SIGHUP, as shells do."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def is_ctrl_c(stop: KeyboardInterrupt) -> bool:
    """Return whether a person pressed a key, who may want something else now; other signals end all."""
    return exit_code(stop) == 128 + signal.SIGINT


def in_words(stop: KeyboardInterrupt) -> str:
    return "interrupted" if is_ctrl_c(stop) else "terminated"


def quiet_imports() -> None:
    """Let Ctrl-C end the process in one line until `stopping` begins: there is nothing yet that needs tidying up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: Any) -> None:
    say(in_words(Stopped(number)))
    os._exit(128 + number)


@contextmanager
def stopping() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise Stopped in the block; behind it they end the process at once.

    Signals that are ignored stay so. A launcher, such as torchrun, ends its processes by the last two, which stay its
    own. SIGHUP, which Windows lacks, comes where the terminal is closed: temporary folders are removed then, too.
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
    """Let closed standard streams lead nowhere; else the next file to be opened would be taken for one of them.

    A closed standard input stays None in Python: whoever wants to read there says so.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for as long as we run)


def standard_input() -> TextIO:
    """Return standard input; raise ValueError where it is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed, so there is nothing to read; leave out what closes it (<&-)")
    return sys.stdin


def visible(text: str) -> str:
    """Return the text with what a terminal would obey made visible; newlines and tabs stay."""
    return text.translate(_VISIBLE)


def put(text: str = "", end: str = "\n", *, dim: bool = False, alarm: str | None = None) -> None:
    """Print a text on standard output: visible on a terminal; a file or a pipe gets it as it is.

    dim: print it dim where the terminal can. alarm: print lines that begin with this word red there.
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
    """Print a message on standard error, if anyone is there to read it.

    It is visible in a file and a pipe, too: a message is read by people, and what is piped ends on their terminal.
    """
    with suppress(OSError, ValueError):  # full, left or closed
        print(visible(without_middle(text, longest)), file=sys.stderr, flush=True)


def unwritten() -> int:
    """Write out what the standard streams still hold; return 0, or the exit code where standard output takes no more.

    That is 141, without a word, where its reader has left, as `head` does, and else 2. Python itself would say so in
    words of its own when it ends.
    """
    _flush(sys.stderr)
    error = _flush(sys.stdout)
    if error is None:
        return 0
    if isinstance(error, BrokenPipeError):
        return LEFT
    say(f"error: standard output: {error.strerror}")
    return 2


def _flush(stream: TextIO) -> OSError | None:
    """Write out what a stream holds; where that fails, let it lead nowhere from now on and return why."""
    try:
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error
    return None
