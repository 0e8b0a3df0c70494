"""help() of what users call names every option, with what holds where nothing is said."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from tables import table

from llama.api import load
from llama.generation import Generation
from llama.request import Options, Request
from llama.sampling import Sampling
from llama.texts.session import Session
from llama.tokenizer.conversation import Chat

DEFAULTS = {field.name: field.default for of in (Sampling, Request) for field in fields(of)}
DEFAULTS |= {"kv_caching": None}  # a Request has it decided
TAKE_ALL = (Generation.generate, Generation.stream, Generation.generate_tokens)


def listed(function: Callable[..., Any]) -> dict[str, str]:
    """Return the options that the help lists, with what it says of each."""
    told = (inspect.getdoc(function) or "").partition("Options, each by its name:\n\n")[2]
    found = (re.fullmatch(r"(\w+ \([\w.]+\)): (.+\.)", line) for line in told.splitlines())
    return {match[1]: match[2] for match in found if match is not None}


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        *((function, set[str]()) for function in TAKE_ALL),
        (Session.generate, {"kv_cache", "prefix"}),
        (Session.stream, {"kv_cache", "prefix"}),
        (Chat.say, {"kv_caching", "kv_cache", "prefix", "echo"}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_help_lists_every_option_with_its_default(function: Callable[..., Any], refused: set[str]) -> None:
    taken = [name for name in Options.__annotations__ if name not in refused]
    assert list(listed(function)) == [f"{name} ({DEFAULTS.get(name)})" for name in taken]


@table("function", [*TAKE_ALL, Session.generate, Session.stream, Chat.say])
def test_help_begins_with_the_function_s_own_docstring(function: Callable[..., Any]) -> None:
    first, blank = (inspect.getdoc(function) or "").splitlines()[:2]
    assert first.endswith(".")
    assert blank == ""


def test_help_of_load_says_what_each_argument_does() -> None:
    told = inspect.getdoc(load) or ""
    assert [name for name in inspect.signature(load).parameters if name != "path" and f"`{name}" not in told] == []
