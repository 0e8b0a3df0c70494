"""The program of the process that renders a chat template, with limits that it sets on itself.

It is started by its path and imports nothing of this package. It reads requests from stdin, a line of JSON each, and
writes a line for each: {"texts": [...]}, or {"error": TEXT}, with "refused": true if the template rejects the dialog.
"""

import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 1.0  # of CPU, for a request
MEMORY = 256 << 20  # bytes of address space
MOST_TEXT = 1 << 20  # characters of one rendering
# Rendered before the limits are set: Python and Jinja import modules at the first use.
WARM_UP = "{% set text = 'é' %}{{ text | tojson }}{{ strftime_now('%d %b %Y') }}{{ text.none.none }}"


class Refused(Exception):
    """The template called `raise_exception`."""


class TooLong(Exception):
    """The text is above its limit."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; its content is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own spelling)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def jinja_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return the environment of https://huggingface.co/docs/transformers/chat_templating_writing."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = to_json
    # Functions instead of classes: a class has more attributes to attack.
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": now.strftime,
        "dict": lambda *a, **more: dict(*a, **more),
    }
    return made


def refuse(reason: object) -> None:
    raise Refused(str(reason))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(request: Mapping[str, Any]) -> list[list[str]]:
    """Return the text for each set of variables in `request["each"]`, split at the words in `request["cut_at"]`."""
    template = compile_template(request["template"], request["now"])
    texts = ["".join(bounded(template.generate(variables))) for variables in request["each"]]
    return [cut(text, request["cut_at"]) for text in texts]


@lru_cache(maxsize=1)
def compile_template(template: str, now: str) -> Template:
    return jinja_environment(datetime.fromisoformat(now)).from_string(template)


def bounded(pieces: Iterator[str]) -> Iterator[str]:
    left = MOST_TEXT
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise TooLong
        yield piece


def cut(text: str, words: Sequence[str]) -> list[str]:
    """Return the text split at the words, with the words. It may take long, and so it is done under the CPU limit."""
    found = [word for word in words if word in text]
    return re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]


def answer(line: bytes) -> dict[str, Any]:
    try:
        return {"texts": render(json.loads(line))}
    except Refused as error:
        return {"error": f"rejects this dialog: {error}"[:1000], "refused": True}
    except TooLong:
        reason = "gives more than a mebibyte of text"
    except MemoryError:
        reason = "takes more than 256 MiB of memory"
    except SecurityError as error:
        reason = f"does something that the sandbox forbids: {error}"
    except TemplateSyntaxError as error:
        reason = f"is not valid Jinja: line {error.lineno}: {error.message}"
    except Exception as error:  # an operation of the template
        reason = f"fails: {type(error).__name__}: {error}"
    return {"error": reason[:1000]}


def limit() -> None:
    """Limit memory, files, sockets and processes, as far as the system supports it.

    macOS ignores the limit of memory, and Windows has none of the limits: there only the parent's timeout applies.
    """
    try:
        import resource
    except ImportError:
        return
    limits = {"AS": MEMORY, "NOFILE": 3, "NPROC": 0, "FSIZE": 0, "CORE": 0}
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (AttributeError, ValueError, OSError):
            continue


def set_clock(seconds: float) -> None:
    """Limit the CPU time, in seconds from now, after which the system ends this process; 0 cancels the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent handles it
    answer(json.dumps({"template": WARM_UP, "now": "2000-01-01", "each": [{}], "cut_at": []}).encode())
    limit()
    while line := sys.stdin.buffer.readline():
        set_clock(CPU_SECONDS)
        reply = json.dumps(answer(line), ensure_ascii=False).encode(errors="surrogatepass")
        set_clock(0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
