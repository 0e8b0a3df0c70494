"""Command lines: a function's annotations decide how words become its arguments, and every error is one line.

fire makes the help from a function's docstring. It does not read the words, because it guesses: it reads `3.10` as a
number and `[1]` as a list, and runs the command before it complains about an unknown flag. Knows nothing of models.
"""

import difflib
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

from llama.host import console
from llama.host.cores import use_threads

# Two dashes and a name, or one dash and only a name: `-5 degrees` is a prompt.
_FLAG = re.compile(r"--\w|-[A-Za-z][\w-]*(=|\Z)")
_BOOLS = {"true": True, "false": False}
_MEANT_AS_BOOLS = {*_BOOLS, "0", "1", "yes", "no", "on", "off", "none"}
_DEBUG_HELP = """
    --debug
        Show the traceback of an error."""
_QUIET_HELP = """
    --quiet
        Print no notices and no progress: only results, warnings and errors."""
_THREADS_HELP = """
    --threads=THREADS
        Threads of the CPU that compute, also in processes that the command starts; by default MKL_NUM_THREADS or
        OMP_NUM_THREADS, or one for each core that this process may use; commands that compute use fewer if other work
        occupies cores."""


def main(
    command: Callable[..., int],
    words: list[str] | None = None,
    *,
    name: str | None = None,
    variables: str | None = None,
) -> NoReturn:
    """Run `command` on words, by default the arguments of this process, and exit with its code; see `run`."""
    end_with(lambda: run(command, sys.argv[1:] if words is None else words, name=name, variables=variables))


def end_with(work: Callable[[], int]) -> NoReturn:
    """Exit with the code that `work` returns.

    Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in it. A standard stream may be closed or full, or its reader may
    have ended.
    """
    console.drop_frames()
    with console.stopping():
        console.open_streams()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # print the rest if the encoding lacks a character
        try:
            code = work()
        except KeyboardInterrupt as stop:  # a second signal, during the handling of the first
            code = console.exit_code(stop)
    sys.exit(console.unwritten() or code)


def run(command: Callable[..., int], words: list[str], *, name: str | None = None, variables: str | None = None) -> int:
    """Call `command(*prompts, **flags)` and return its exit code.

    Plain words are the prompts. The command's keyword parameters are the flags; their annotations (str, int, float,
    bool, `X | None`, `list[str]` for a flag that may be repeated) decide how a value is read. Wrong words are one line
    on stderr and exit code 2, and so are ValueError, OSError, RuntimeError, OverflowError and MemoryError of the
    command, and SystemExit of a user's code; --debug shows the traceback. Every command has --threads, see
    `llama.host.cores`, and --quiet. `name` is the command's name in the help, by default the file that was started.
    variables: what the names of environment variables begin with that set flags; a flag among the words counts more.
    """
    own = flag_types(command)
    types = {**own, "threads": int | None, "quiet": bool, "debug": bool, "help": bool}
    given = sort_words(words, types)
    switched_on = {name for name, text in given if text is not None and text.lower() == "true"}
    console.be_quiet("quiet" in switched_on)
    _log_to_stderr()
    try:
        if "help" in switched_on:
            console.put(help_text(command, name or Path(sys.argv[0]).name))
            return 0
        if variables is not None:
            given += from_environment(variables, types, {name for name, _ in given})
        values = read_values(given, types)
        use_threads(values.get("threads"))
        prompts = values.pop("prompts", [])
        return command(*prompts, **{name: value for name, value in values.items() if name in own})
    except KeyboardInterrupt as stop:
        console.say(console.in_words(stop))
        return console.exit_code(stop)
    except BrokenPipeError:
        return console.READER_ENDED
    except (ValueError, OSError, RuntimeError, OverflowError, MemoryError, SystemExit) as error:
        if "debug" in switched_on:
            console.say(traceback.format_exc().rstrip(), longest=sys.maxsize)
        if not (code := console.unwritten()):
            console.say(f"error: {_rank()}{in_one_line(error)}")
        return code or 2


def from_environment(prefix: str, types: dict[str, Any], given: set[str]) -> list[tuple[str, str | None]]:
    """Return (name, text) of the flags that variables such as PREFIX + "ROWS" set and that are not given.

    An empty variable sets nothing. Raises ValueError for one that names no flag.
    """
    found = {name: text for name, text in os.environ.items() if name.startswith(prefix) and text}
    flags = {prefix + name.upper(): name for name in types if name != "prompts"}
    for name in found.keys() - flags.keys():
        close = difflib.get_close_matches(name, flags, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists the flags"
        raise ValueError(f"the environment variable {name} sets no flag; {hint}")
    return [(flags[name], text) for name, text in sorted(found.items()) if flags[name] not in given]


def _log_to_stderr() -> None:
    """Print the log of this library on standard error: what it chose for the user."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            (console.say if record.levelno > logging.INFO else console.note)(self.format(record))

    logging.basicConfig(handlers=[Said()], format="%(message)s")
    logging.getLogger("llama").setLevel(logging.INFO)


def _rank() -> str:
    """Return "rank N: " in a process of a torchrun, because all of them write to one terminal; else ""."""
    size = os.environ.get("WORLD_SIZE", "")
    return f"rank {os.environ.get('RANK', '?')}: " if re.fullmatch("[0-9]{1,9}", size) and int(size) > 1 else ""


def in_one_line(error: BaseException) -> str:
    """Return the message of an error as one line."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, SystemExit):
        text = f"code that this command ran ended it by SystemExit({text}); --debug shows where"
    elif isinstance(error, MemoryError):
        text = f"out of memory {text}"
    return " ".join(text.split())


def flag_types(command: Callable[..., int]) -> dict[str, Any]:
    """Return the type of each parameter of the command by name; plain words are "prompts", a list."""
    parameters = inspect.signature(command).parameters.values()
    plain = inspect.Parameter.VAR_POSITIONAL
    return {
        "prompts" if p.kind is plain else p.name: list[str] if p.kind is plain else p.annotation for p in parameters
    }


def help_text(command: Callable[..., int], name: str) -> str:
    """Return fire's help without its one-letter flags, which are not supported, and with the flags of `run`."""
    from fire.helptext import HelpText  # here, so that Ctrl-C is handled before slow imports
    from fire.trace import FireTrace

    text = HelpText(command, FireTrace(command, name=name))
    added = ("" if "threads" in flag_types(command) else _THREADS_HELP) + _QUIET_HELP + _DEBUG_HELP
    return re.sub(r"^    -\w, (?=--)", "    ", text, flags=re.MULTILINE).replace(shlex.quote(name), name) + added


def sort_words(words: list[str], types: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return (name, text) of every prompt and flag; a plain word is a prompt, and None is a missing value.

    Raises nothing, so that --debug and --help work beside any mistake. An unknown flag keeps its dashes.
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
    """Return the values by name, read by their types; raise ValueError for unknown, missing or wrong ones."""
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
