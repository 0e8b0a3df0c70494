"""The program that renders a chat template: a process of its own, which may do nothing else.

Knows Jinja and the limits that it puts on itself. Does not know tokens, or what the texts are for. It is started by
its path, with nothing of this package beside it, and reads requests from stdin, a line of JSON each: the template, and
what it is rendered with, several times. A line goes back: {"texts": [...]}, or {"error": KIND, "reason": TEXT}.
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

SECONDS = 1.0  # of CPU, for a request
MEMORY = 256 << 20  # bytes of address space
MOST_TEXT = 1 << 20  # characters of one rendering
# Rendered before files can no longer be opened, for Python and Jinja load some of themselves at the first use.
WARM_UP = "{% set text = 'é' %}{{ text | tojson }}{{ strftime_now('%d %b %Y') }}{{ text.none.none }}"


class Refused(Exception):
    """The template itself says that it cannot render this, by `raise_exception`."""


class TooLong(Exception):
    """The template made more text than it may."""


class Generation(Extension):
    """`{% generation %}` marks, for training, what an assistant said; here it is rendered like all else."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own spelling)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return what templates are written for: https://huggingface.co/docs/transformers/chat_templating_writing."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = to_json
    # Functions in place of classes, which have more to be got hold of.
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
    """Return JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(request: Mapping[str, Any]) -> list[list[str]]:
    """Return a text for each of `request["each"]`, the variables that it is rendered with, cut at some words."""
    template = compiled(request["template"], request["now"])
    texts = ["".join(bounded(template.generate(variables))) for variables in request["each"]]
    return [cut(text, request["cut_at"]) for text in texts]


@lru_cache(maxsize=1)
def compiled(template: str, now: str) -> Template:
    return environment(datetime.fromisoformat(now)).from_string(template)


def bounded(pieces: Iterator[str]) -> Iterator[str]:
    left = MOST_TEXT
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise TooLong
        yield piece


def cut(text: str, words: Sequence[str]) -> list[str]:
    """Return what stands before, at and behind each of the words; here, for there may be enough to take for ever."""
    there = [word for word in words if word in text]
    return re.split(f"({'|'.join(map(re.escape, there))})", text) if there else [text]


def answer(line: bytes) -> dict[str, Any]:
    try:
        return {"texts": render(json.loads(line))}
    except Refused as error:
        return {"error": "refused", "reason": str(error)[:1000]}
    except TooLong:
        return {"error": "long", "reason": ""}
    except MemoryError:
        return {"error": "memory", "reason": ""}
    except SecurityError as error:
        return {"error": "forbidden", "reason": str(error)[:1000]}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "reason": f"line {error.lineno}: {error.message}"[:1000]}
    except Exception as error:  # whatever a template's operations raise
        return {"error": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]}


def limit() -> None:
    """Give up what rendering needs not: memory, further files, sockets and processes; as far as the system has limits.

    macOS does not keep a limit of memory, and Windows has none of these: there the parent's clock is what is left.
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
    """Let the system end this process after so much more CPU time; 0 takes that back."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and here the parent decides
    answer(json.dumps({"template": WARM_UP, "now": "2000-01-01", "each": [{}], "cut_at": []}).encode())
    limit()
    while line := sys.stdin.buffer.readline():
        set_clock(SECONDS)
        said = json.dumps(answer(line), ensure_ascii=False).encode(errors="surrogatepass")
        set_clock(0)
        sys.stdout.buffer.write(said + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
