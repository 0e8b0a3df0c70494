"""A conversation in lines: messages and commands in, answers out as they are made, from a terminal or a pipe.

Knows `Chat`, and what a terminal shows. Does not know how an answer is made.
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

COMMANDS = "/undo, /save FILE, /load FILE, /stats, /quit"
ANSWER_LEN = 512  # the most tokens of an answer, where nothing else is asked for
LOW = 0.2  # of the context: with less left, every answer says how much


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
    """Answer the lines of standard input, one message a line, until they end or say /quit; return the exit code.

    On a terminal there is a prompt, with history by the arrow keys, `about` stands before the first one, and Ctrl-C
    ends an answer; in a pipe it ends all. What goes wrong in a turn is one line on stderr, and the conversation goes
    on. Answer n draws from the random stream seed + n. The options are those of `Chat.say`.
    """
    longest = ANSWER_LEN if max_gen_len is None else max_gen_len
    return Conversation(Chat(model, tokenizer), longest, {**options, "stop": stop}, seed).run(about)


class Conversation:
    """A chat, and the lines that go in and out of it."""

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
            self.note(f"{about}; {COMMANDS}; Ctrl-C ends an answer")
        for line in terminal_lines(self.note) if self.interactive else piped_lines():
            if line.strip() == "/quit":
                break
            try:
                self.take(line)
            except BrokenPipeError:
                raise  # nobody reads any more
            except (ValueError, RuntimeError, OSError) as error:
                self.complain(error)
            except KeyboardInterrupt as stop:
                if not self.interactive or not console.is_ctrl_c(stop):
                    raise
                self.note("interrupted; /quit or Ctrl-D ends the conversation")
        return 0

    def take(self, line: str) -> None:
        """Do what a line says, or answer it."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self.answer(line)
            return
        command, _, rest = line.partition(" ")
        if command not in self.commands:
            raise ValueError(
                f"{command} is not known: there are {COMMANDS}; begin a message that starts with / by a space"
            )
        takes_a_file, rest = command in ("/save", "/load"), rest.strip()
        if takes_a_file != bool(rest):
            raise ValueError(f"{command} needs a file: {command} FILE" if takes_a_file else f"{command} stands alone")
        self.commands[command](*[rest] * takes_a_file)

    def answer(self, text: str) -> None:
        seed = next(self.seeds) % 2**64  # however large the first one is
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
        """Return what the last answer took, and how much room there is left where that is little."""
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
            said.append(f"{left} of {limit} tokens left (/undo makes room, {self.endless()} needs none)")
        return ", ".join(said)

    def endless(self) -> str:
        """Return flags under which a conversation may go on for ever."""
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

    # ---- the page ----------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Print a line about the conversation, dim where a terminal can."""
        console.put(text, dim=True)

    def complain(self, error: Exception) -> None:
        text = in_one_line(error)
        if isinstance(error, ContextFull):
            text = (
                f"the context is full: it has {error.tokens} of {error.limit} tokens, and this message needs "
                f"{error.new} and some for an answer; /undo takes the last exchange back, and {self.endless()} or a "
                "larger --max_seq_len, given at the start, makes more room"
            )
        console.say(f"error: {text}")


def terminal_lines(note: Callable[[str], None]) -> Iterator[str]:
    """Yield what is typed at a prompt, up to Ctrl-D."""
    with suppress(ImportError):  # not every system has it
        import readline  # noqa: F401  (gives `input` its history; not above, for it may write where it is imported)
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
        lines.reconfigure(errors="surrogateescape")  # a line that is no UTF-8 must not lose the others
    for line in iter(lines.readline, ""):
        yield line.rstrip("\r\n")


@contextmanager
def interrupts(wanted: bool) -> Iterator[list[int]]:
    """Note the first Ctrl-C, so that it cannot break into a step; a second one is a KeyboardInterrupt."""
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
