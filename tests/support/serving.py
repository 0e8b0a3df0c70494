"""A server on a free port, in a thread, with a model that follows its own draws; and small clients of it."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

import torch
from fakes import Remembering

from llama.serve.app import App
from llama.serve.engine import Engine
from llama.serve.server import Server, bind

MARKS = {"<|start_header_id|>": 1, "<|end_header_id|>": 2, "<|eot_id|>": 3}


class Letters:
    """A tokenizer of ASCII characters, with the marks of Llama 3's chat format."""

    bos_id, adds_bos, stop_tokens, chat_template, special_tokens = None, False, (3,), None, MARKS

    def encode(self, s: str, *, allowed_special: Collection[str] = (), **_: Any) -> list[int]:
        for mark in allowed_special:
            s = s.replace(mark, chr(MARKS[mark]))
        if not s.isascii():
            raise ValueError("the text has letters that are not ASCII")
        return [ord(letter) for letter in s]

    def fewest(self, s: str) -> int:
        return len(s)

    def decode_bytes(self, ids: Any, *, begins: bool = True) -> bytes:
        return bytes(ids).removeprefix(b" " if begins else b"")  # as SentencePiece, which adds a space

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def stream(self) -> "Letters":
        return self

    def feed(self, id: int) -> str:
        return chr(id)

    def flush(self) -> str:
        return ""


class Endless(Letters):
    """Letters whose texts do not end before their maximum length."""

    stop_tokens = ()  # type: ignore[assignment]


class Slow(Remembering):
    """A model whose forwards wait for `gate` and take `seconds`. waits: whether the newest forward had to wait."""

    exact = False

    def execution_with(self, kind: str | None) -> str:
        return "scripted"

    def __init__(self, max_seq_len: int = 400) -> None:
        super().__init__(vocab_size=128, max_seq_len=max_seq_len)
        self.gate, self.seconds, self.forwards, self.waits = threading.Event(), 0.0, 0, False
        self.gate.set()

    def __call__(self, *given: Any, **named: Any) -> torch.Tensor:
        self.waits = not self.gate.is_set()
        self.gate.wait()
        time.sleep(self.seconds)
        self.forwards += 1
        return super().__call__(*given, **named)


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without its end."""
        *events, end = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [json.loads(event) for event in events] + ([] if end == "[DONE]" else [json.loads(end)])


class Served:
    """A server, and how to ask it."""

    def __init__(self, model: Any, app: Any, server: Any, port: int) -> None:
        self.model, self.app, self.server, self.port = model, app, server, port
        self.connections: list[socket.socket] = []

    @property
    def engine(self) -> Engine:
        return self.app.engine  # type: ignore[no-any-return]

    def ask(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> Got:
        """Send a request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
            answer = connection.getresponse()
            return Got(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, **body: Any) -> Got:
        return self.ask("/v1/completions", {"prompt": prompt, **body})

    def opened(self, **body: Any) -> socket.socket:
        """Send a completion and return the connection, of which nothing was read; it is closed at the end."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        self.connections.append(connection)
        return connection

    def metric(self, name: str) -> float:
        lines = [line.split() for line in self.ask("/metrics").body.decode().splitlines()]
        return sum(float(line[1]) for line in lines if line[0].partition("{")[0] == f"llama_kv_{name}")

    def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        for _ in range(2000):
            if self.metric(name) == value:
                return
            time.sleep(0.005)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")


@contextmanager
def serving(
    model: Any = None, *, tokenizer: Any = None, queue: int = 8, grace: float = 5, names: Any = ("demo",), **how: Any
) -> Iterator[Served]:
    """Serve a model. `how`: options of the engine, and `key`, `time_limit` and `log` of the application."""
    own = {"key": how.pop("key", None), "time_limit": how.pop("time_limit", 60.0), "log": how.pop("log", None)}
    model, rows = model or Slow(), how.setdefault("rows", 4)
    engine = Engine(lambda: (model, tokenizer or Endless()), **how)
    app = App(engine, names=names, hosts=["127.0.0.1"], places=rows + queue, **own)
    listening = bind("127.0.0.1", 0)
    server = Server(app, grace=grace)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        engine.ready.result(60)
        yield (served := Served(model, app, server, listening.getsockname()[1]))
        for connection in served.connections:
            connection.close()
    finally:
        if isinstance(model, Slow):
            model.gate.set()
        server.should_exit = server.force_exit = True
        thread.join(60)
        engine.end()


@contextmanager
def served_by_a_process(
    *flags: str, files: int | None = None, **variables: str
) -> Iterator[tuple["subprocess.Popen[str]", Served]]:
    """Run `llama-kv serve`, which may open `files`, and yield its process and its server when the model is loaded."""
    command = [sys.executable, "-m", "llama", "serve", "--port", "0", *flags]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=os.environ | variables)
    try:
        assert process.stdout is not None
        address, _, about = process.stdout.readline().partition("  ")
        assert re.match(r"\S+, paged cache; .*Ctrl-C ends it\n$", about), (about, process.communicate(timeout=30))
        served = Served(None, None, None, int(address.rpartition(":")[2]))
        while served.ask("/health").status == 503:
            time.sleep(0.1)
        yield process, served
        for connection in served.connections:
            connection.close()
    finally:
        process.kill()
        process.communicate()


def asgi(app: App, path: str, body: bytes = b"", *, method: str = "GET", host: bytes = b"h") -> tuple[int, Any]:
    """Return the status and the body, as JSON if it is, that an application answers without a server."""
    sent: list[dict[str, Any]] = []
    given = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        return next(given, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", host)], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(content) if content[:1] == b"{" else content
