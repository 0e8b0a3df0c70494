"""Render chat templates in a process without any rights: Jinja from an untrusted file is an untrusted program.

Starts, asks and ends that process. Does not import Jinja.
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from llama.untrusted.words import printable

MOST_TEMPLATE = 64 << 10  # bytes of a template, in UTF-8
WALL_SECONDS = 10.0  # for one request; the process itself stops after one second of CPU time
_MAX_REPLY = 32 << 20  # bytes; two renderings at their limit take less
_MAX_REASON = 200  # characters of a template's own error message

_CHILD = Path(__file__).with_name("template_child.py")
# -S: `site` would run the .pth files of the user's packages; so the folders of Jinja are arguments.
_START = (
    "import sys; sys.path += sys.argv[2:]; exec(compile(open(sys.argv[1], encoding='utf-8').read(), 'child', 'exec'))"
)
_ENVIRONMENT = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # an interpreter may need these to start


class TemplateFailed(ValueError):
    """A template could not be rendered; the message is safe to print."""


class DialogRefused(TemplateFailed):
    """The template itself rejects the dialog, by its `raise_exception`."""


class Renderer:
    """Renders one template, in a process that starts at the first use and serves later ones.

    The process has no open file except its two pipes. It ends with the renderer, at a limit, and after a malformed
    reply. `strftime_now` gives the time `now`, by default that of the constructor, so that the date does not change
    during a conversation. Raises TemplateFailed for a template that is too long.
    """

    def __init__(self, template: str, now: datetime | None = None) -> None:
        size = len(template.encode(errors="surrogatepass"))
        if size > MOST_TEMPLATE:
            raise TemplateFailed(f"the chat template has {size} bytes; the limit is {MOST_TEMPLATE}")
        self.template = template
        self._now = (now or datetime.now()).isoformat()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, each: Sequence[Mapping[str, Any]], cut_at: Sequence[str] = ()) -> list[list[str]]:
        """Return the template's text for each of these sets of variables, split at the words in `cut_at`.

        A text is a list: text, word, text, word, ..., text. Of words that begin at one place the first in `cut_at`
        counts. Raises TemplateFailed.
        """
        request = json.dumps({"template": self.template, "now": self._now, "each": each, "cut_at": cut_at}).encode()
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
        """Return the process; a new one if there is none, if it has ended, or if this process is a fork."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._process, self._owner = _start(), os.getpid()
            weakref.finalize(self, _end, self._process)
        return self._process


def _start() -> "subprocess.Popen[bytes]":
    folders = {str(metadata.distribution(name).locate_file("")) for name in ("jinja2", "markupsafe")}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(_CHILD), *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    except OSError as error:
        raise TemplateFailed(f"the process that renders the chat template could not be started: {error}") from error


def _ask(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Return the reply; an incomplete line if the process ended before."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request + b"\n")
        process.stdin.flush()
        return process.stdout.readline(_MAX_REPLY)
    except OSError:  # the process ended before it had read the request
        return b""


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # closing flushes what the process did not read
                pipe.close()


def _why_it_ended(code: int, overdue: bool) -> str:
    if overdue:
        return f"the chat template took longer than {WALL_SECONDS:g} seconds"
    if code == -getattr(signal, "SIGPROF", 0):  # Windows has no such limit
        return "the chat template took more than a second of CPU time"
    return "the chat template ended the process that renders it"


def _texts(reply: bytes, count: int, words: Set[str]) -> list[list[str]]:
    """Return the texts in a reply, which is untrusted. Raises TemplateFailed if it has none."""
    try:
        fields = json.loads(reply.decode(errors="surrogatepass"))
        texts, error, refused = (fields.get(name) for name in ("texts", "error", "refused"))
    except (ValueError, AttributeError, RecursionError):
        texts, error, refused = None, None, None
    if isinstance(texts, list) and len(texts) == count and all(_is_split(text, words) for text in texts):
        return texts
    failed = DialogRefused if refused is True else TemplateFailed
    reason = printable(error, _MAX_REASON) if isinstance(error, str) else "gave no text"
    raise failed(f"the chat template {reason}")


def _is_split(text: object, words: Set[str]) -> bool:
    """Return whether `text` is a list: text, word, text, ..., text."""
    if not isinstance(text, list) or len(text) % 2 == 0 or not all(isinstance(part, str) for part in text):
        return False
    return words >= set(text[1::2])
