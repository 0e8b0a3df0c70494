"""The server as a process: a socket, uvicorn, limits of connections, and an end that lets running texts finish.

Knows no texts.
"""

import asyncio
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llama.serve.app import App
from llama.serve.requests import Refused

logger = logging.getLogger(__name__)

TOLD_SECONDS = 5.0  # for cancelled texts to tell their clients
SECONDS = {"head": 10.0, "body": 30.0}  # for a client to send a part of a request
BACKLOG = 64  # connections that the loop may accept at once, before one of them is looked at
OTHER_FILES = BACKLOG + 64  # open files that are no connections, and connections over the limit, which end at once


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes a free one. Raises ValueError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; choose another one") from None


def most_connections(places: int) -> int:
    """Return the limit of connections, and raise that of open files as far as they need and the system allows."""
    wanted = 2 * places + 256
    try:
        import resource
    except ImportError:  # Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        more = wanted + OTHER_FILES if hard == resource.RLIM_INFINITY else min(wanted + OTHER_FILES, hard)
        with suppress(OSError, ValueError):  # macOS has a limit below its hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, more), hard))
            soft = max(soft, more)
        wanted = min(wanted, max(16, soft - OTHER_FILES))
    return wanted


class Connection(H11Protocol):
    """uvicorn's connection. A client has limited time to send a request, and errors are OpenAI's JSON.

    Of more than `most` connections, the one that has waited longest for its client is closed.
    """

    def __init__(self, *given: Any, most: int, served: App, **named: Any) -> None:
        super().__init__(*given, **named)
        self._most, self._served = most, served
        self.awaited: str | None = None  # the part of a request that the client is to send
        self.since = 0.0  # when the client was to begin with it
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._most:
            oldest = min(awaiting(self.connections), key=lambda one: one.since)
            oldest.give_up(Refused(f"the server has {self._most} connections, which is the limit; try again", 503))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP; uvicorn calls it."""
        self._refuse(Refused("these bytes are no request of HTTP/1.1 with a head of at most 16 KB", 400))

    def _watch(self) -> None:
        """Limit the time for the part that the client is to send next; a body after its answer belongs to a head."""
        awaited = None
        if not self.transport.is_closing():
            under_way = self.cycle is not None and not self.cycle.response_complete
            awaited = "head" if not under_way else "body" if self.cycle.more_body else None
        if awaited == self.awaited:
            return
        if self._late is not None:
            self._late.cancel()
        self.awaited, self.since = awaited, self.loop.time()
        if awaited is not None:
            limit = SECONDS[awaited]
            why = Refused(f"the {awaited} of the request did not come within {limit:g} s; send it again", 408)
            self._late = self.loop.call_later(limit, self.give_up, why)

    def give_up(self, why: Refused) -> None:
        """End the connection; only a client that has begun a request expects an answer."""
        if self.awaited == "body" or self.conn.trailing_data[0]:
            self._refuse(why)
        self.transport.close()
        self._watch()

    def _refuse(self, why: Refused) -> None:
        """Send an error in place of the answer, unless a part of the answer was sent, and end the connection."""
        if self.cycle is None or self.cycle.response_complete:
            self._served.note({"client": self.client, "method": "-", "path": "-"}, why.status, 0.0)
        else:
            self.cycle.scope["state"]["refused"] = why.status
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(why.body).encode()
            head = f"HTTP/1.1 {why.status} {HTTPStatus(why.status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def awaiting(connections: Iterable[Any]) -> list[Connection]:
    """Return the connections whose clients are to send something."""
    return [one for one in connections if one.awaited is not None]


class Server(uvicorn.Server):
    """Runs an App until a signal, after which running texts have `grace` seconds; a second signal ends it at once."""

    def __init__(self, app: App, *, grace: float) -> None:
        # It warns of each request that is no HTTP, and logs a traceback of each one that is cancelled at the end.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        options: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "lifespan": "off",
            "ws": "none",
        }
        options |= {"http": partial(Connection, most=most_connections(app.places), served=app), "backlog": BACKLOG}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=5, **options))
        self.app, self._grace = app, grace
        self._until: float | None = None  # when running texts are cancelled
        self._told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(partial(_log_once, set()))
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end: new requests are refused. At a second signal, end at once."""
        if self._until is None:
            self.app.draining, self._until = True, time.monotonic() + self._grace
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end now; called ten times a second."""
        failed = self.app.engine.ready.done() and self.app.engine.ready.exception() is not None
        return failed or self._drained() or await super().on_tick(counter)

    def _drained(self) -> bool:
        if self._until is None:
            return False
        for one in awaiting(self.server_state.connections):
            if one.awaited == "body":
                one.give_up(Refused("the server ends; it takes no new requests", 503, code="ending"))
        late = time.monotonic() - self._until
        if late > 0 and not self._told:
            self.app.cancel_all()
            self._told = True
        return not self.app.open or late > TOLD_SECONDS


def _log_once(seen: set[str], _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what the event loop reports, each report once: clients may cause any number of them."""
    said = f"{context['message']}: {context.get('exception')!a}"
    if said not in seen and len(seen) < 100:
        seen.add(said)
        logger.error("the event loop reports, once: %s", said[:900])
