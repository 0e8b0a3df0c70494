"""The server as a process: a socket, uvicorn, and an end that lets running texts finish. Knows no requests."""

import ipaddress
import logging
import socket
import time
from types import FrameType

import uvicorn

from llama.serve.app import App

TOLD_SECONDS = 5.0  # for cancelled texts to tell their clients


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


class Server(uvicorn.Server):
    """Runs an App until a signal, after which running texts have `grace` seconds; a second signal ends it at once."""

    def __init__(self, app: App, *, grace: float) -> None:
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every request that is not HTTP
        options = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off", "ws": "none"}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=5, **options))  # type: ignore[arg-type]
        self.app, self._grace = app, grace
        self._until: float | None = None  # when running texts are cancelled
        self._told = False

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
        late = time.monotonic() - self._until
        if late > 0 and not self._told:
            self.app.cancel_all()
            self._told = True
        return not self.app.open or late > TOLD_SECONDS
