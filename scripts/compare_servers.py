"""Measure `llama-kv serve` beside llama.cpp's server on the same file, for 1, 4 and 16 clients.

    python scripts/compare_servers.py --model model.gguf --llama_server build/bin/llama-server [--threads 1]

Each client sends its next request when its last one has ended. Both servers complete the same words of a novel, whose
lengths are log-normal, greedily. They take turns, and each run has a fresh process, so that no prompt is in a cache.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

from llama import cli
from llama.bench.statistics import percentiles
from llama.bench.texts import read_corpus
from llama.host.cores import threads

OPENER, PATIENCE = build_opener(ProxyHandler({})), 600.0  # this machine is asked directly; seconds without a byte
ROWS, POSITIONS, MOST = 16, 1024, 300  # texts at a time, tokens of each at most; words of a prompt, and new tokens


class Answer(NamedTuple):
    """The text of a request, its number of tokens, and the seconds from its start to each piece of text."""

    text: str
    tokens: int
    arrivals: list[float]


class Run(NamedTuple):
    """The answers to all requests, and the seconds and CPU seconds of the server that they took together."""

    answers: list[Answer]
    seconds: float
    cpu_seconds: float


def some_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Return bodies of requests with fields that both servers have."""
    draw, words = random.Random(seed), read_corpus().split()

    def length() -> int:
        return min(max(round(draw.lognormvariate(3.7, 0.7)), 4), MOST)

    begins = (draw.randrange(len(words) - MOST) for _ in range(count))
    prompts = [" ".join(words[begin : begin + length()]) for begin in begins]
    how = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return [{"prompt": prompt, "max_tokens": length(), **how} for prompt in prompts]


def answer(port: int, body: dict[str, Any]) -> Answer:
    """Send a request and read its stream. Raises ValueError for an error in it."""
    pieces, tokens, began = list[tuple[str, float]](), 0, time.perf_counter()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with OPENER.open(Request(url, json.dumps(body).encode(), headers), timeout=PATIENCE) as response:
        for line in response:
            if line.startswith(b"data: {"):
                arrived, chunk = time.perf_counter() - began, json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(f"a request has failed: {line[:300]!r}")
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                if piece := "".join(choice["text"] for choice in chunk["choices"]):
                    pieces.append((piece, arrived))
    return Answer("".join(piece for piece, _ in pieces), tokens, [arrived for _, arrived in pieces])


def measured(port: int, pid: int, requests: Sequence[dict[str, Any]], clients: int) -> Run:
    """Send all requests to the server of a process, `clients` at a time."""

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # utime and stime of proc(5)

    cpu, began = cpu_seconds(), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda body: answer(port, body), requests))
    return Run(answers, time.perf_counter() - began, cpu_seconds() - cpu)


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Start a server, and yield its port and its process when it is ready. Raises ValueError if it ends before."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with suppress(OSError), OPENER.open(f"http://127.0.0.1:{port}/health", timeout=PATIENCE):
                    break
                time.sleep(0.1)
            else:
                raise ValueError(f"{command[0]} has ended before it was ready; its message is above")
            yield port, process.pid
        finally:
            process.terminate()


def figures(runs: Sequence[Run]) -> dict[str, float]:
    """Return the figures of several runs of the same requests, by their names."""
    answers = [one for run in runs for one in run.answers]
    seconds, cpu = (sum(times) for times in zip(*(run[1:] for run in runs), strict=True))
    tokens = sum(one.tokens for one in answers)
    first = percentiles([1e3 * one.arrivals[0] for one in answers if one.arrivals])
    gap = percentiles([1e3 * (b - a) for one in answers for a, b in pairwise(one.arrivals)])
    spreads = {"first": first["median"], "first p99": first["p99"], "gap": gap["median"], "gap p99": gap["p99"]}
    return {"tokens/s": tokens / seconds, "CPU ms": 1e3 * cpu / tokens, **spreads}


def main(*, model: str, llama_server: str, requests: int = 32, rounds: int = 2, peer_flags: str = "") -> int:
    """Print tokens/s, ms to the first token and between tokens, and CPU ms a token, of both servers.

    Args:
        model: A .gguf file.
        llama_server: The program llama-server of llama.cpp.
        requests: Requests of a run.
        rounds: Runs of each server and number of clients.
        peer_flags: More flags of llama-server, such as "-ctk f32 -ctv f32 -fa off" for a cache in float32.
    """
    given, warm_up = some_requests(requests, 1), [{**body, "max_tokens": 8} for body in some_requests(ROWS, 2)]
    ours = f"-m llama serve --quiet --rows {ROWS} --max_seq_len {POSITIONS} --threads {threads()} --ckpt_dir"
    theirs = f"-lv 1 -np {ROWS} -no-kvu -c {ROWS * POSITIONS} -t {threads()} -tb {threads()} {peer_flags} -m"
    commands = {"ours": [sys.executable, *ours.split()], "llama.cpp": [llama_server, *theirs.split()]}
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for clients in (1, 4, 16):
        for name in list(commands) * rounds:
            with started([*commands[name], model]) as (port, pid):
                measured(port, pid, warm_up[:clients], clients)
                runs[name].append(measured(port, pid, given, clients))
        made = {name: figures(some[-rounds:]) for name, some in runs.items()}
        made["ratio"] = {key: made["ours"][key] / value for key, value in made["llama.cpp"].items()}
        for name, values in made.items():
            print(f"{clients:2} clients, {name:9}:", ", ".join(f"{key} {value:.2f}" for key, value in values.items()))
    each = {name: zip(*([one.text for one in run.answers] for run in some), strict=True) for name, some in runs.items()}
    differing = {name: sum(len(set(texts)) > 1 for texts in found) for name, found in each.items()}
    print(f"texts that are not the same in all runs, of {len(given)}: {differing}")
    return int(differing["ours"] > 0)


if __name__ == "__main__":
    cli.main(main)
