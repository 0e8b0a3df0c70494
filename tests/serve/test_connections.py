"""Clients that send half a request, no request or too much: they get an error, and all others are served."""

import asyncio
import json
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint
from serving import Served, served_by_a_process, serving
from tables import table
from test_texts_served import wait_for

from llama.serve import server as of_process

HEAD = b"POST /v1/completions HTTP/1.1\r\nX: "
BODY = b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"prompt'


def half_sent(served: Served, data: bytes, count: int) -> list[socket.socket]:
    """Open connections that send some bytes and then wait."""
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        served.connections.append(connection)
        connection.sendall(data)
        time.sleep(0.001)  # so that the server may read it before the next one comes
    return served.connections[-count:]


def answer(connection: socket.socket) -> tuple[int, str]:
    """Return the status and the message of the only answer on a connection that the server closes."""
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@table("data, part", [(HEAD, "head"), (BODY, "body")])
def test_a_client_has_limited_time_for_each_part_of_a_request(
    data: bytes, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(of_process.SECONDS, part, 0.2)
    with serving() as served:
        clients = half_sent(served, data, 9)
        assert served.ask("/health").status == 200
        assert {answer(one) for one in clients} == {
            (408, f"the {part} of the request did not come within 0.2 s; send it again")
        }
        (again,) = half_sent(served, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 1)
        assert again.recv(65536).startswith(b"HTTP/1.1 200")
        again.sendall(data)  # the second request of a connection
        assert answer(again)[0] == 408


@table("data", [HEAD, BODY, b""])
def test_of_too_many_connections_the_one_that_waits_longest_is_closed(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_process, "most_connections", lambda places: 8)
    with serving() as served:
        served.model.gate.clear()
        running = served.opened(prompt="a", max_tokens=3)
        wait_for(lambda: len(served.app.replies) == 1)
        clients = half_sent(served, data, 30)
        for _ in range(3):
            assert served.ask("/health").status == 200
        told = set()
        for one in clients[:20]:
            with suppress(ConnectionError, IndexError):  # one that was closed before the server read what it has sent
                told.add(answer(one))
        assert told <= {(503, "the server has 8 connections, which is the limit; try again")}
        assert bool(told) == bool(data)
        assert len(served.server.server_state.connections) <= 9
        served.model.gate.set()
        assert running.recv(65536).startswith(b"HTTP/1.1 200")


@table(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n", b"GET /" + b"a" * 50_000]
)
def test_bytes_that_are_no_http_get_openai_s_error(data: bytes, served: Served) -> None:
    (client,) = half_sent(served, data, 1)
    assert answer(client) == (400, "these bytes are no request of HTTP/1.1 with a head of at most 16 KB")


@table("headers, status", [({}, 401), ({"Authorization": "Bearer secret"}, 413)])
def test_a_client_whose_body_is_not_wanted_gets_the_error_and_no_reset(headers: dict[str, str], status: int) -> None:
    with serving(key="secret") as served:
        for how in ({}, {"Connection": "close"}):
            got = served.ask("/v1/completions", b" " * 9_000_000, **headers, **how)
            assert (got.status, got.json["error"]["type"]) == (
                status,
                "authentication_error" if status == 401 else "invalid_request_error",
            )


@pytest.fixture(scope="module")
def served() -> Any:
    with serving() as server:
        yield server


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of open files")
def test_the_limit_of_open_files_is_raised_as_far_as_connections_need() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert of_process.most_connections(80) == 2 * 80 + 256
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == 2 * 80 + 256 + of_process.OTHER_FILES
        assert of_process.most_connections(hard) == hard - of_process.OTHER_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_half_sent_bodies_do_not_delay_the_end() -> None:
    with serving(grace=60) as served:
        clients = half_sent(served, BODY, 3)
        served.until("num_requests_running", 0)
        served.server.handle_exit(15, None)
        assert {answer(one) for one in clients} == {(503, "the server ends; it takes no new requests")}
        wait_for(lambda: served.server.app.open == 0)  # an answer is read before its connection has ended


def test_a_report_of_the_event_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        assert served.ask("/health").status == 200  # it has started

        def report() -> None:
            loop = asyncio.get_running_loop()
            for number in (1, 1, 1, 2):
                loop.call_exception_handler({"message": "accept() failed", "exception": ValueError(number, "\x1b")})

        served.server.servers[0].get_loop().call_soon_threadsafe(report)
        served.ask("/health")
    assert [record.getMessage() for record in caplog.records] == [
        rf"the event loop reports, once: accept() failed: ValueError({number}, '\x1b')" for number in (1, 2)
    ]


@pytest.mark.slow
@table("data", [HEAD, BODY])
def test_a_process_that_may_open_200_files_answers_beside_240_half_sent_requests(data: bytes, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    with served_by_a_process("--ckpt_dir", str(path), files=200) as (process, served):
        with suppress(ConnectionError):
            half_sent(served, data, 240)
        began = time.monotonic()
        assert [served.ask("/health").status for _ in range(5)] == [200] * 5
        assert time.monotonic() - began < 5
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert len(errors) < 1000, errors[:2000]
