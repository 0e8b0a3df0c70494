"""A conversation on a terminal or in a pipe: lines are messages or commands, and answers are printed as they are made.

Knows `Chat` and terminals. Does not know how an answer is made.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import count
from typing import TYPE_CHECKING, Any

from llama.cli import console, in_one_line
from llama.tokenizer.conversation import Chat, ContextFull, endless

if TYPE_CHECKING:
    from llama.model import Transformer
    from llama.tokenizer import Tokenizer

CHAT_COMMANDS = "/undo, /save FILE, /load FILE, /stats, /quit"
ANSWER_LEN = 512  # the default for the most tokens of an answer
LOW = 0.2  # the share of the context below which every answer says how much is left


def converse(
    model: "Transformer",
    tokenizer: "Tokenizer",
    max_gen_len: int | None = None,
    *,
    stop: Sequence[str] = (),
    seed: int = 1,
    about: str = "",
    **options: Any,
) -> int:
    """Answer the lines of standard input, one message a line, up to the end or /quit; return the exit code.

    On a terminal, `about` is printed first, the arrow keys show earlier lines, and Ctrl-C ends an answer; in a pipe
    Ctrl-C ends the command. An error in a turn is one line on stderr, and the conversation continues. Answer n draws
    from the random stream seed + n. The options are those of `Chat.say`.
    """
    longest = ANSWER_LEN if max_gen_len is None else max_gen_len
    return TerminalChat(Chat(model, tokenizer), longest, {**options, "stop": stop}, seed).run(about)


class TerminalChat:
    """A chat, its commands, and the lines that are printed."""

    def __init__(self, chat: Chat, max_gen_len: int, options: dict[str, Any], seed: int) -> None:
        self.chat = chat
        self.max_gen_len, self.options = max_gen_len, options
        self.seeds = count(seed)
        self.interactive = console.standard_input().isatty() and sys.stdout.isatty()
        self.commands: dict[str, Callable[..., None]] = {
            "/undo": self.undo,
            "/save": self.save,
            "/load": self.load,
            "/stats": self.stats,
        }

    def run(self, about: str) -> int:
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
                self.print_error(error)
            except KeyboardInterrupt as stop:
                if not self.interactive or not console.is_ctrl_c(stop):
                    raise
                self.note("interrupted; /quit or Ctrl-D ends the conversation")
        return 0

    def take(self, line: str) -> None:
        """Run the command in a line, or answer the message."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self.answer(line)
            return
        command, _, rest = line.partition(" ")
        if command not in self.commands:
            raise ValueError(
                f"{command} is not known: there are {CHAT_COMMANDS}; put a space before a message that starts with /"
            )
        takes_a_file, rest = command in ("/save", "/load"), rest.strip()
        if takes_a_file != bool(rest):
            raise ValueError(
                f"{command} needs a file: {command} FILE" if takes_a_file else f"{command} takes no argument"
            )
        self.commands[command](*[rest] * takes_a_file)

    def answer(self, text: str) -> None:
        seed = next(self.seeds) % 2**64
        pieces = self.chat.say(text, self.max_gen_len, seed=seed, **self.options)
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
            said.append(f"{left} of {limit} tokens left (/undo frees some, {self.endless()} has no limit)")
        return ", ".join(said)

    def endless(self) -> str:
        """Return flags for a conversation without a limit."""
        on = "" if self.chat.model.kv_caching else " with the cache on"
        return f"--kv_cache {endless(self.chat.session.max_seq_len)}{on}"

    # ---- commands ----------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        taken = self.chat.undo()
        self.note(f"taken back: {taken[0]['content']}")

    def save(self, file: str) -> None:
        self.chat.save(file)
        self.note(f"saved to {file}")

    def load(self, file: str) -> None:
        self.chat = Chat.load(self.chat.model, self.chat.tokenizer, file)
        self.note(f"{len(self.chat.messages)} messages; the last: {self.chat.messages[-1]['content']}")

    def stats(self) -> None:
        chat, session = self.chat, self.chat.session
        left = "" if chat.left is None else f", {chat.left} left"
        held = (
            f"KV cache {session.kv_cache}, {session.nbytes / 1e6:.1f} MB" if chat.model.kv_caching else "KV cache off"
        )
        said = f"{len(chat.messages)} messages, {session.position} tokens{left}"
        self.note(f"{said}; {session.fed} tokens fed in all; {held}")

    # ---- output ------------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Print a line about the conversation, dim on a terminal."""
        console.put(text, dim=True)

    def print_error(self, error: Exception) -> None:
        text = in_one_line(error)
        if isinstance(error, ContextFull):
            text = (
                f"the context is full: it has {error.tokens} of {error.limit} tokens, and this message needs "
                f"{error.new} and some for an answer; /undo takes the last exchange back, and {self.endless()} or a "
                "larger --max_seq_len at the start allows longer conversations"
            )
        console.say(f"error: {text}")


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
