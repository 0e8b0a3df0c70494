"""Chat templates, rendered by a process that may do nothing else: Jinja from a file is a program of a stranger.

Knows how that process is started, asked and ended. Does not know Jinja, dialogs or tokens.
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from importlib import metadata, util
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from llama.untrusted.words import printable

MOST_TEMPLATE = 64 << 10  # bytes of a template, in UTF-8
WALL_SECONDS = 10.0  # for one request, where the process's own second of CPU time does not end it
_MOST_REPLY = 32 << 20  # bytes; three renderings of the most text that one may have take less
_LONGEST_REASON = 200  # characters of what a template says of itself
_LEAST_JINJA = (3, 1, 6)  # older ones have known ways out of the sandbox, such as CVE-2025-27516

_CHILD = Path(__file__).with_name("template_child.py")
# Without site, which would run the .pth files of the user's packages; so the folders of Jinja are named.
_START = (
    "import sys; sys.path += sys.argv[2:]; exec(compile(open(sys.argv[1], encoding='utf-8').read(), 'child', 'exec'))"
)
_KEPT_OF_ENVIRONMENT = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # what an interpreter may need to start


class TemplateFailed(ValueError):
    """A template could not be rendered. The text says why, in words that are safe to print."""


class DialogRefused(TemplateFailed):
    """The template itself refuses what it was given, by its `raise_exception`."""


class Renderer:
    """Renders one template, in a process that is started at the first use and kept for the next.

    The process holds no file but its two pipes, and is ended with the renderer, at a limit, and when it says anything
    that is no answer. `strftime_now` gives the time when the renderer was made, so that a text which carries the date
    does not change under a conversation. Raises TemplateFailed for a template that is too long.
    """

    def __init__(self, template: str) -> None:
        size = len(template.encode(errors="surrogatepass"))
        if size > MOST_TEMPLATE:
            raise TemplateFailed(f"the chat template has {size} bytes, and may have {MOST_TEMPLATE}")
        self.template = template
        self._now = datetime.now().isoformat()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, each: Sequence[Mapping[str, Any]], cut_at: Sequence[str] = ()) -> list[list[str]]:
        """Return the template's text for each of these sets of variables, cut where it has one of some words.

        A text is a list: what stands before such a word, the word, what stands behind it, and so on. Of words that
        begin at one place the first in `cut_at` counts. Raises TemplateFailed.
        """
        said = {"template": self.template, "now": self._now, "each": each, "cut_at": cut_at}
        request = json.dumps(said).encode()
        with self._lock:
            process = self._running()
            late = Timer(WALL_SECONDS, process.kill)
            late.start()
            try:
                reply = _ask(process, request)
            except BaseException:
                _end(process)
                raise
            finally:
                overdue = not late.is_alive()
                late.cancel()
            if overdue or not reply.endswith(b"\n"):
                _end(process)
                raise TemplateFailed(_why_it_ended(process.returncode, overdue))
        return _texts(reply, len(each), {*cut_at})

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process; a new one where there is none, it has ended, or another process forked this one."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._process, self._owner = _start(), os.getpid()
            weakref.finalize(self, _end, self._process)
        return self._process


def _start() -> "subprocess.Popen[bytes]":
    folders = list(dict.fromkeys([_home("jinja2"), _home("markupsafe")]))
    found = metadata.version("jinja2")
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < _LEAST_JINJA:
        least = ".".join(map(str, _LEAST_JINJA))
        raise TemplateFailed(f"Jinja {found} has known ways out of its sandbox; install jinja2>={least}")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(_CHILD), *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_OF_ENVIRONMENT if name in os.environ},
        )
    except OSError as error:
        raise TemplateFailed(f"no process could be started that renders the chat template: {error}") from error


def _home(package: str) -> str:
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        raise TemplateFailed(f"the chat template needs {package}, which is not installed: pip install jinja2")
    return str(Path(spec.origin).parents[1])


def _ask(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Return the line that comes back; less than a line where the process ended before it was there."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request + b"\n")
        process.stdin.flush()
        return process.stdout.readline(_MOST_REPLY)
    except OSError:  # it ended before it had read all
        return b""


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what it was not told any more
                continue


def _why_it_ended(code: int, overdue: bool) -> str:
    if overdue:
        return f"the chat template took longer than {WALL_SECONDS:g} seconds"
    if code == -getattr(signal, "SIGPROF", 0):  # Windows has no such limit
        return "the chat template took more than a second of CPU time"
    return "the chat template ended the process that renders it"


def _texts(reply: bytes, count: int, words: Set[str]) -> list[list[str]]:
    """Return what the process made; nothing that it says is trusted to be well-formed."""
    try:
        said = json.loads(reply.decode(errors="surrogatepass"))
        texts, error, reason = (said.get(name) for name in ("texts", "error", "reason"))
    except (ValueError, AttributeError, RecursionError):
        texts, error, reason = None, None, None
    if isinstance(texts, list) and len(texts) == count and all(_is_cut(text, words) for text in texts):
        return texts
    told = f": {printable(reason, _LONGEST_REASON)}" if isinstance(reason, str) and reason else ""
    failed = DialogRefused if error == "refused" else TemplateFailed
    raise failed(_WORDS.get(error if isinstance(error, str) else "", "the chat template gave no text") + told)


def _is_cut(text: object, words: Set[str]) -> bool:
    if not isinstance(text, list) or len(text) % 2 == 0 or not all(isinstance(part, str) for part in text):
        return False
    return words >= set(text[1::2])


_WORDS = {
    "refused": "the chat template refuses this dialog",
    "long": "the chat template makes more than a mebibyte of text",
    "memory": "the chat template takes more than 256 MiB of memory",
    "forbidden": "the chat template does what none may do",
    "syntax": "the chat template is no Jinja",
    "failed": "the chat template fails",
}
