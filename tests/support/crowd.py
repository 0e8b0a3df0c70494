"""Clients of a server that come, go, stall and send garbage: a text that comes whole must be the text alone.

    PYTHONPATH=. python tests/support/crowd.py [--seconds 600] [--clients 64]

sends them to `llama-kv serve` with the demo model, in a process of its own, and prints its memory before and after.
"""

import argparse
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from serving import Got, Served, served_by_a_process

from llama.bench.texts import read_corpus

KINDS = ("whole", "whole", "left", "stalled", "garbage")
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n"


class Content(NamedTuple):
    text: str
    logprobs: list[float]


def content(got: Got) -> Content | None:
    """Return what a completion contains; None if it has ended with an error."""
    parts = got.events if got.headers["content-type"].startswith("text/event-stream") else [got.json]
    choices = [choice for part in parts for choice in part.get("choices", [])]
    logprobs = [score for choice in choices for score in choice["logprobs"]["token_logprobs"]]
    failed = any("error" in part for part in parts)
    return None if failed else Content("".join(choice["text"] for choice in choices), logprobs)


def crowd(
    served: Served,
    *,
    clients: int,
    seconds: float,
    patience: float,
    some_body: Callable[[random.Random], dict[str, Any]],
    alone: Callable[[dict[str, Any]], Content | None],
) -> Counter[str]:
    """Let clients visit a server for some seconds; `alone` returns the content of a body's text alone.

    patience: the most seconds of a client that stalls. Returns how many visits there were of each kind, and how many
    texts were compared and "wrong".
    """
    end = time.monotonic() + seconds

    def client(number: int) -> Counter[str]:
        draw, seen = random.Random(number), Counter[str]()
        while time.monotonic() < end:
            kind, body = draw.choice(KINDS), some_body(draw)
            seen[kind] += 1
            if kind == "whole":
                got = served.complete(**body, stream=draw.random() < 0.5, kv_caching=draw.random() < 0.9)
                made = content(got)
                seen["compared" if made else f"refused with {got.status}"] += 1
                time.sleep(float(got.headers.get("retry-after", 0)))
                seen["wrong"] += got.status not in (200, 429, 504) or (made is not None and made != alone(body))
            elif kind == "garbage":
                data = draw.randbytes(draw.randrange(300))
                with socket.create_connection(("127.0.0.1", served.port)) as connection:
                    connection.sendall(REQUEST + data if draw.random() < 0.5 else data)
            else:
                connection = served.opened(**body, stream=draw.random() < 0.7)
                time.sleep(draw.random() * patience * (1.0 if kind == "stalled" else 0.05))
                connection.close()
        return seen

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(client, range(clients)), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    draw, words = random.Random(1), read_corpus().split()

    def some_body(number: int) -> dict[str, Any]:
        begin, length = draw.randrange(len(words) - 200), draw.randrange(4, 40)
        prompt = " ".join(words[: draw.choice([0, 0, 90])] + words[begin : begin + length])
        how = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0, 0.8]), "seed": number, "logprobs": 0}
        return {"prompt": prompt, **how}

    bodies = [some_body(number) for number in range(40)]
    flags = "--threads 1 --rows 16 --queue 16 --cache_gb 0.25 --time_limit 45 --check 0.05 --max_pause_ms 20"
    with served_by_a_process(*flags.split()) as (process, served):

        def report() -> list[Content | None]:
            """Print the memory of the idle server after all texts alone, and return these."""
            made = [content(served.complete(**body)) for body in bodies]
            served.until("num_requests_running", 0)
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            names = ("cache_bytes", "predicted_cache_bytes", "texts_checked_total", "texts_differed_total")
            print(f"{pages >> 8} MB resident;", *(f"{name} {served.metric(name):.0f}" for name in names), flush=True)
            return made

        alone = report()
        how: dict[str, Any] = {"some_body": lambda draw: draw.choice(bodies), "alone": lambda body: alone[body["seed"]]}
        print(crowd(served, clients=given.clients, seconds=given.seconds, patience=20, **how), flush=True)
        print("the same texts alone:", report() == alone)


if __name__ == "__main__":
    main()
