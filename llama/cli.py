"""Command lines: words in, typed arguments out, and every error in one line.

fire turns a function into a command and its docstring into help, but it also guesses: it reads `3.10` as a number,
`[1]` as a list, and runs the command before it complains about an unknown flag. So the words are sorted here first,
by the function's annotations, and fire is handed only what it cannot misread. Knows nothing of models.
"""

import difflib
import functools
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable
from types import UnionType
from typing import Any, get_args, get_origin

import fire

_BOOLS = {"true": True, "false": False}
_HELP = ("--help", "-h")


def main(command: Callable[..., int]) -> None:
    """Run `command` on this process's arguments and exit with what it returns; see `run`."""
    sys.exit(run(command, sys.argv[1:]))


def run(command: Callable[..., int], words: list[str]) -> int:
    """Call `command(*plain words, **flags)` and return its exit code.

    The command's keyword parameters are the flags, their annotations (str, int, float, bool, `X | None`, `list[str]`
    for a flag that may be repeated) decide how a value is read. An error in the words, or one that the command raises
    as ValueError, OSError or RuntimeError, becomes one line on stderr and exit code 2; --debug shows its traceback.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("llama").setLevel(logging.INFO)  # what was chosen for the user, in words, on stderr
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        if any(word in _HELP for word in words):
            fire.Fire(command, command=["--help"], name=sys.argv[0])
            return 0
        plain, flags = sort_words(words, flag_types(command))
        return call_through_fire(command, plain, flags)
    except (ValueError, OSError, RuntimeError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_in_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _in_one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())


def flag_types(command: Callable[..., int]) -> dict[str, Any]:
    """Return the annotation of every keyword parameter, by name."""
    parameters = inspect.signature(command).parameters.values()
    return {p.name: p.annotation for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def sort_words(words: list[str], types: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Part plain words, which stay as they are, from flags, whose values are read by their types."""
    plain: list[str] = []
    flags: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return plain + queue, flags
        if not re.match(r"--\w|-[A-Za-z]\w*(=|$)", word):
            plain.append(word)
            continue
        name, has_value, text = word.partition("=")
        name = _full_name(name, types)
        if name != "prompts" and name not in types:
            raise ValueError(_unknown(word.partition("=")[0], types))
        if not has_value:
            text = _next_value(name, types, queue)
        if name == "prompts":  # the plain words under a name
            plain.append(text)
        elif get_origin(types[name]) is list:
            flags.setdefault(name, []).append(text)
        elif name in flags:
            raise ValueError(f"--{name} is given twice")
        else:
            flags[name] = _read(name, text, types[name])
    return plain, flags


def _full_name(flag: str, types: dict[str, Any]) -> str:
    """Return what a flag stands for: --kv-caching is kv_caching, and -p the only flag that begins with p."""
    if flag.startswith("--"):
        return flag[2:].replace("-", "_")
    names = [name for name in types if name[0] == flag[1:]]
    return names[0] if len(names) == 1 else flag


def _next_value(name: str, types: dict[str, Any], queue: list[str]) -> str:
    if types.get(name) is bool:  # a bare switch is on; only a plain true or false after it is its value
        return queue.pop(0) if queue and queue[0].lower() in _BOOLS else "true"
    if not queue:
        raise ValueError(f"--{name} needs a value")
    return queue.pop(0)


def _read(name: str, text: str, kind: Any) -> object:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    if str in kinds:
        return text
    if bool in kinds:
        if text.lower() not in _BOOLS:
            raise ValueError(f"--{name}={text} must be true or false")
        return _BOOLS[text.lower()]
    reader, what = (int, "a whole number") if int in kinds else (float, "a number")
    try:
        return reader(text)
    except ValueError:
        raise ValueError(f"--{name}={text} must be {what}") from None


def _unknown(word: str, types: dict[str, Any]) -> str:
    close = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), types, n=1)
    hint = f"did you mean --{close[0]}?" if close else "--help lists the flags"
    return f"unknown flag {word}; {hint}"


def call_through_fire(command: Callable[..., int], plain: list[str], flags: dict[str, Any]) -> int:
    """Let fire make the call, with the words and values replaced by their numbers, which it cannot misread."""
    values = [*plain, *flags.values()]
    codes: list[int] = []

    @functools.wraps(command)
    def numbered(*places: int, **named: int) -> None:
        codes.append(command(*(values[i] for i in places), **{name: values[i] for name, i in named.items()}))

    places = [str(i) for i in range(len(plain))]
    fire.Fire(numbered, command=places + [f"--{name}={len(plain) + i}" for i, name in enumerate(flags)])
    return codes[0]
