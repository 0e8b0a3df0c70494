"""Command lines: words in, typed arguments out, and every error in one line.

fire turns a function into a command and its docstring into help, but it also guesses: it reads `3.10` as a number,
`[1]` as a list, and runs the command before it complains about an unknown flag. So the words are sorted here first,
by the function's annotations, and fire is handed only what it cannot misread. Knows nothing of models.
"""

import difflib
import functools
import inspect
import io
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin

from llama.cli import console
from llama.host.cores import say_if_crowded, use_threads

# A word of two dashes and a name, or of one dash and nothing but a name: `-5 degrees` is a prompt.
_FLAG = re.compile(r"--\w|-[A-Za-z][\w-]*(=|\Z)")
_BOOLS = {"true": True, "false": False}
_MEANT_AS_BOOLS = {*_BOOLS, "0", "1", "yes", "no", "on", "off", "none"}
_DEBUG_HELP = """
    --debug
        Show the traceback of an error."""
_THREADS_HELP = """
    --threads=THREADS
        Threads of the CPU that compute, in processes that the command starts, too; by default what MKL_NUM_THREADS or
        OMP_NUM_THREADS says, or one for each core that this process may use; run, chat and watch use fewer if other
        work occupies cores."""


def main(command: Callable[..., int], words: list[str] | None = None, *, name: str | None = None) -> None:
    """Run `command` on words, by default this process's arguments, and exit with what it returns; see `run`."""
    end_with(lambda: run(command, sys.argv[1:] if words is None else words, name=name))


def end_with(work: Callable[[], int]) -> NoReturn:
    """Exit with what `work` returns.

    Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in it.
    A standard stream may be closed, full, or left by its reader.
    """
    with console.stopping():
        console.open_streams()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a character that the page cannot hold must not lose the others
        try:
            code = work()
        except KeyboardInterrupt as stop:  # one more, while the first was answered
            code = console.exit_code(stop)
    sys.exit(console.unwritten() or code)


def run(command: Callable[..., int], words: list[str], *, name: str | None = None) -> int:
    """Call `command(*prompts, **flags)` and return its exit code.

    Plain words are the prompts. The command's keyword parameters are the flags, their annotations (str, int, float,
    bool, `X | None`, `list[str]` for a flag that may be repeated) decide how a value is read. An error in the words,
    or one that the command raises as ValueError, OSError, RuntimeError, OverflowError or MemoryError, or a user's code
    as SystemExit, becomes one line on stderr and exit code 2; --debug shows its traceback. --threads holds for every
    command, see `llama.host.cores`. `name` is what the help calls it, by default the file that was started.
    """
    said = logging.StreamHandler()
    said.setFormatter(_Visible("%(message)s"))
    logging.basicConfig(handlers=[said])
    logging.getLogger("llama").setLevel(logging.INFO)  # says on stderr what was chosen for the user
    own = flag_types(command)
    types = {**own, "threads": int | None, "debug": bool, "help": bool}
    given = sort_words(words, types)
    switched_on = {name for name, text in given if text is not None and text.lower() == "true"}
    try:
        if "help" in switched_on:
            console.put(help_text(command, name or Path(sys.argv[0]).name))
            return 0
        values = read_values(given, types)
        use_threads(values.get("threads"))
        # What names no device computes little; what takes threads itself gives them to processes that it watches.
        if "device" in own and "threads" not in own:
            say_if_crowded(console.say)
        return call_through_fire(command, {key: value for key, value in values.items() if key in own})
    except KeyboardInterrupt as stop:
        console.say(console.in_words(stop))
        return console.exit_code(stop)
    except BrokenPipeError:
        return console.LEFT
    except (ValueError, OSError, RuntimeError, OverflowError, MemoryError, SystemExit) as error:
        if "debug" in switched_on:
            console.say(traceback.format_exc().rstrip(), longest=sys.maxsize)
        return console.unwritten() or _refused(error)


class _Visible(logging.Formatter):
    """Messages of the library, which name files, as a terminal may show them."""

    def format(self, record: logging.LogRecord) -> str:
        return console.visible(super().format(record))


def _refused(error: BaseException) -> int:
    """Say what is wrong; return the exit code."""
    console.say(f"error: {_rank()}{in_one_line(error)}")
    return 2


def _rank() -> str:
    """Return which process of a torchrun this is, as text; all of them write to one terminal."""
    size = os.environ.get("WORLD_SIZE", "")
    return f"rank {os.environ.get('RANK', '?')}: " if re.fullmatch("[0-9]{1,9}", size) and int(size) > 1 else ""


def in_one_line(error: BaseException) -> str:
    """Return what an error says."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, SystemExit):
        text = f"code that this command ran ended it by SystemExit({text}); --debug shows where"
    elif isinstance(error, MemoryError):
        text = f"out of memory {text}"
    return " ".join(text.split())


def flag_types(command: Callable[..., int]) -> dict[str, Any]:
    """Return the type of everything that the command takes, by name; plain words are a list, whatever their name."""
    parameters = inspect.signature(command).parameters.values()
    plain = inspect.Parameter.VAR_POSITIONAL
    return {
        "prompts" if p.kind is plain else p.name: list[str] if p.kind is plain else p.annotation for p in parameters
    }


def help_text(command: Callable[..., int], name: str) -> str:
    """Return fire's help, without the one-letter flags that it would take and we do not, and with those of `run`."""
    from fire.helptext import HelpText  # here, so that Ctrl-C is known before anything is imported that takes long
    from fire.trace import FireTrace

    text = HelpText(command, FireTrace(command, name=name))
    added = _DEBUG_HELP if "threads" in flag_types(command) else _THREADS_HELP + _DEBUG_HELP
    return re.sub(r"^    -\w, (?=--)", "    ", text, flags=re.MULTILINE).replace(shlex.quote(name), name) + added


def sort_words(words: list[str], types: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return the (name, value) of all that is given, unread; a plain word is a prompt, None a value that is missing.

    Refuses nothing, so that --debug and --help are known whatever else is wrong. An unknown flag keeps its dashes.
    """
    given: list[tuple[str, str | None]] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return given + [("prompts", prompt) for prompt in queue]
        if not _FLAG.match(word):
            given.append(("prompts", word))
            continue
        flag, has_value, text = word.partition("=")
        name = "help" if flag == "-h" else flag[2:].replace("-", "_") if flag.startswith("--") else flag
        if name not in types:
            given.append((flag, None))
        else:
            given.append((name, text if has_value else _next_value(types[name], queue)))
    return given


def _next_value(kind: Any, queue: list[str]) -> str | None:
    if kind in (bool, bool | None) and not (queue and queue[0].lower() in _MEANT_AS_BOOLS):
        return "true"  # a bare switch is on
    return queue.pop(0) if queue else None


def read_values(given: list[tuple[str, str | None]], types: dict[str, Any]) -> dict[str, Any]:
    """Return the values of what is given, read by their types; raise ValueError for what is wrong."""
    values: dict[str, Any] = {}
    for name, text in given:
        if name not in types:
            raise ValueError(_unknown(name, text, types))
        if text is None:
            raise ValueError(f"--{name} needs a value")
        if get_origin(types[name]) is list:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise ValueError(f"--{name} is given twice")
        else:
            values[name] = _read(name, text, types[name])
    return values


def _read(name: str, text: str, kind: Any) -> object:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    if str in kinds:
        return text
    if bool in kinds:
        if text.lower() not in _BOOLS:
            raise ValueError(
                f"--{name}={text} must be true or false: write --{name}=true or --{name}=false "
                "(a prompt that is this word goes before the flag, or after --)"
            )
        return _BOOLS[text.lower()]
    reader, what = (int, "a whole number") if int in kinds else (float, "a number")
    try:
        return reader(text)
    except ValueError:
        raise ValueError(f"--{name}={text} must be {what}") from None


def _unknown(flag: str, text: str | None, types: dict[str, Any]) -> str:
    if not flag.startswith("-"):
        return f"{text!r} is not a flag; --help lists the flags"
    close = difflib.get_close_matches(flag.lstrip("-").replace("-", "_"), types, n=1)
    hint = f"did you mean --{close[0]}?" if close else "--help lists the flags"
    return f"unknown flag {flag}; {hint}"


def call_through_fire(command: Callable[..., int], values: dict[str, Any]) -> int:
    """Let fire make the call, with the words and values replaced by their numbers, which it cannot misread."""
    import fire

    flags = {name: value for name, value in values.items() if name != "prompts"}
    numbers = [*values.get("prompts", []), *flags.values()]
    codes: list[int] = []

    @functools.wraps(command)
    def numbered(*places: int, **named: int) -> None:
        codes.append(command(*(numbers[i] for i in places), **{name: numbers[i] for name, i in named.items()}))

    plain = len(numbers) - len(flags)
    fire.Fire(numbered, command=[*map(str, range(plain)), *(f"--{name}={plain + i}" for i, name in enumerate(flags))])
    return codes[0]
