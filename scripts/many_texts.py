"""Measure texts that come and go against batches that wait for their longest text, and print what was to be expected.

    python scripts/many_texts.py [--quantize none] [--texts 200] [--rows 16] [--kv_cache static]

Prompts and new tokens have log-normal lengths. The expected gain follows from these lengths and from the measured time
of a step of 1, 2, 4, ... rows: chunks make a step of all their rows that have not ended; texts that come and go fill
the rows that have become free. Prompts cost the same in both. All figures are CPU seconds of this process with one
thread, so that a busy machine disturbs them little; the wall time is printed beside them.
"""

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from llama import load
from llama.texts.many import Writer

CONTEXT = 128  # cached positions at which steps are timed


class Ids:
    """A tokenizer that leaves ids as they are, and has no stop tokens."""

    bos_id, adds_bos, stop_tokens = None, False, ()

    def stream(self) -> "Ids":
        return self

    def feed(self, _: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the CPU seconds and the seconds of a call, and its result."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = run()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def step_curve(model: Any, most: int, kv_cache: str) -> dict[int, float]:
    """Return the CPU seconds of a step by its number of rows: the least of three measurements of 16 steps."""

    def generated(rows: int, tokens: int) -> float:
        prompts = [[1] * CONTEXT] * rows
        return timed(lambda: model.generate_tokens(prompts, tokens, temperature=0, kv_cache=kv_cache))[0]

    numbers = [2**n for n in range(most.bit_length()) if 2**n < most] + [most]
    return {rows: min((generated(rows, 20) - generated(rows, 4)) / 16 for _ in range(3)) for rows in numbers}


def at(curve: dict[int, float], rows: int) -> float:
    """Return the seconds of a step of so many rows, between the measured numbers on a straight line."""
    for (low, fast), (high, slow) in pairwise(sorted(curve.items())):
        if rows <= high:
            return fast + (slow - fast) * (rows - low) / (high - low)
    return max(curve.values())


def in_chunks(lengths: Sequence[int], rows: int, curve: dict[int, float]) -> float:
    """Return the seconds of all steps if each chunk of `rows` texts waits for its longest one."""
    chunks = [lengths[i : i + rows] for i in range(0, len(lengths), rows)]
    return sum(at(curve, sum(n > step for n in chunk)) for chunk in chunks for step in range(1, max(chunk)))


def coming_and_going(lengths: Sequence[int], rows: int, curve: dict[int, float]) -> float:
    """Return the seconds of all steps if the next text takes the row of one that has ended."""
    waiting, ends, now, total = list(reversed(lengths)), list[int](), 0, 0.0
    while waiting or ends:
        while waiting and len(ends) < rows:
            heapq.heappush(ends, now + waiting.pop() - 1)
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        if ends:
            total += at(curve, len(ends))
        now += 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quantize", choices=["stored", "int8", "int4", "none"], help="none: float32")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--kv_cache", default="static")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = load("demo", fast=True, quantize=given.quantize)
    draw = random.Random(given.seed)
    lengths = [min(max(round(draw.lognormvariate(4.1, 0.7)), 2), 400) for _ in range(given.texts)]
    prompts = [
        [draw.randrange(1000, 40000) for _ in range(min(max(round(draw.lognormvariate(3.7, 0.7)), 2), 400))]
        for _ in range(given.texts)
    ]
    print(f"{model.execution}, kv_cache={given.kv_cache}, {given.texts} texts, {given.rows} rows, one thread")
    print(
        f"prompts of {statistics.mean(map(len, prompts)):.0f} tokens, {sum(lengths):,} new tokens, up to {max(lengths)}"
    )
    curve = step_curve(model, given.rows, given.kv_cache)
    print("a step of rows, ms:", ", ".join(f"{rows}: {1000 * seconds:.1f}" for rows, seconds in curve.items()))

    def chunks() -> list[list[int]]:
        made: list[list[int]] = []
        for i in range(0, given.texts, given.rows):
            some = slice(i, i + given.rows)
            made += model.generate_tokens(prompts[some], lengths[some], temperature=0, kv_cache=given.kv_cache)[0]
        return made

    def many() -> list[list[int]]:
        writer = Writer(model, Ids(), rows=given.rows, kv_cache=given.kv_cache)
        written = [writer.add(prompt, n, temperature=0) for prompt, n in zip(prompts, lengths, strict=True)]
        while not writer.texts.idle:
            for _ in writer.step():
                pass
        return [one.completion["ids"] for one in written]

    fed = timed(lambda: [model.generate_tokens([p], 1, temperature=0, kv_cache=given.kv_cache) for p in prompts])[0]
    expected = [fed + run(lengths, given.rows, curve) for run in (in_chunks, coming_and_going)]
    ratio = expected[0] / expected[1]
    print(f"expected: {expected[0]:.1f} and {expected[1]:.1f} s, {ratio:.2f} times; prompts take {fed:.1f} s of each")
    old, new = timed(chunks), timed(many)
    print(
        f"measured: {old[0]:.1f} and {new[0]:.1f} s, {old[0] / new[0]:.2f} times; wall {old[1]:.1f} and {new[1]:.1f} s"
    )
    same = sum(one == other for one, other in zip(old[2], new[2], strict=True))
    print(f"the same ids: {same} of {given.texts} texts; {sum(lengths) / new[0]:.0f} new tokens a CPU second")


if __name__ == "__main__":
    main()
