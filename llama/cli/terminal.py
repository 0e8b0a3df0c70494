"""A conversation on a terminal or in a pipe: lines are messages or commands, and answers are printed as they are made.

Knows `Chat` and terminals. Does not know how an answer is made.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import count
from typing import TYPE_CHECKING, Any

from llama.cli import in_one_line
from llama.host import console
from llama.tokenizer.conversation import Chat

if TYPE_CHECKING:
    from llama.model import Transformer
    from llama.tokenizer import Tokenizer

CHAT_COMMANDS = "/undo, /stats, /quit"
LOW = 0.2  # the share of the context below which every answer says how much is left


class TerminalChat:
    """A conversation whose messages and commands are the lines of standard input.

    On a terminal, the arrow keys show earlier lines, and Ctrl-C ends an answer; in a pipe Ctrl-C ends the command.
    Answer n draws from the random stream seed + n. The options are those of `Chat.say`.
    """

    def __init__(self, model: "Transformer", tokenizer: "Tokenizer", *, seed: int, **options: Any) -> None:
        self.chat = Chat(model, tokenizer)
        self.options, self.seeds = options, count(seed)
        self.interactive = console.standard_input().isatty() and sys.stdout.isatty()
        self.commands = {"/undo": self.undo, "/stats": self.stats}

    def run(self, about: str) -> int:
        """Answer all lines up to the end or /quit, and return the exit code. On a terminal print `about` first.

        An error in a turn is one line on stderr, and the conversation continues.
        """
        if self.interactive:
            self.note(f"{about}; {CHAT_COMMANDS}; Ctrl-C ends an answer")
        for line in terminal_lines(self.note) if self.interactive else piped_lines():
            if line.strip() == "/quit":
                break
            try:
                self.take(line)
            except BrokenPipeError:
                raise  # the reader of standard output has ended
            except (ValueError, RuntimeError, OSError) as error:
                console.say(f"error: {in_one_line(error)}")
            except KeyboardInterrupt as stop:
                if not self.interactive or not console.is_ctrl_c(stop):
                    raise
                self.note("interrupted; /quit or Ctrl-D ends the conversation")
        return 0

    def take(self, line: str) -> None:
        """Run the command in a line, or answer the message."""
        command = line.strip()
        if not line.startswith("/"):
            if command:
                self.answer(line)
        elif command in self.commands:
            self.commands[command]()
        else:
            raise ValueError(
                f"{command} is not known: there are {CHAT_COMMANDS}; put a space before a message that starts with /"
            )

    def answer(self, text: str) -> None:
        seed = next(self.seeds) % 2**64
        pieces = self.chat.say(text, seed=seed, **self.options)
        try:
            with interrupts(self.interactive) as pressed:
                for piece in pieces:
                    console.put(piece, end="")
                    if pressed:
                        break
        finally:
            self.chat.finish()
            console.put()
        self.note(self.summary())
        console.put()

    def summary(self) -> str:
        """Return the tokens and times of the last answer, and the tokens left if these are few."""
        last, left, limit = self.chat.last, self.chat.left, self.chat.session.max_seq_len
        if last is None:
            return "no answer"
        said = [f"fed {last.fed} of {last.context} tokens", f"first token after {last.first:.2f} s"]
        if last.per_second is not None:
            said.append(f"{last.per_second:.{0 if last.per_second >= 10 else 1}f} tokens/s")
        if last.finish_reason is None:
            said.append("ended by Ctrl-C")
        elif last.finish_reason == "length":
            said.append(f"cut after {last.made} tokens")
        if left is not None and left < LOW * limit:
            said.append(f"{left} of {limit} tokens left")
        return ", ".join(said)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        taken = self.chat.undo()
        self.note(f"taken back: {taken[0]['content']}")

    def stats(self) -> None:
        chat, session = self.chat, self.chat.session
        left = "" if chat.left is None else f", {chat.left} left"
        cache = f"{session.kv_cache}, {session.nbytes / 1e6:.1f} MB" if chat.model.kv_caching else "off"
        said = f"{len(chat.messages)} messages, {session.position} tokens{left}"
        self.note(f"{said}; {session.fed} tokens fed in all; KV cache {cache}")

    # ---- output ------------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Print a line about the conversation, dim on a terminal."""
        console.put(text, dim=True)


def terminal_lines(note: Callable[[str], None]) -> Iterator[str]:
    """Yield what is typed at a prompt, up to Ctrl-D."""
    with suppress(ImportError):  # not every system has it
        import readline  # noqa: F401  (adds history to `input`; imported here because it may print when imported)
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.put()
            return
        except KeyboardInterrupt as stop:
            console.put()
            if not console.is_ctrl_c(stop):
                raise
            note("/quit or Ctrl-D ends the conversation")
            continue
        yield line


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input as they come."""
    lines = console.standard_input()
    if isinstance(lines, TextIOWrapper):
        lines.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 does not end the others
    for line in iter(lines.readline, ""):
        yield line.rstrip("\r\n")


@contextmanager
def interrupts(wanted: bool) -> Iterator[list[int]]:
    """Record the first Ctrl-C, so that it does not interrupt a step; a second one raises KeyboardInterrupt."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: Any) -> None:
        if pressed:
            console.stop(number, frame)
        pressed.append(number)

    ours = wanted and before in (signal.default_int_handler, console.stop)
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
