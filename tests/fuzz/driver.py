"""Run parsers on malicious bytes: `python -m tests.fuzz --minutes N [--parser NAME] [--executions N]`.

A file `fuzz_*.py` beside this one brings parsers along:

    PARSERS = {"name": run}         run(data: bytes) returns, or raises for a finding
    STRATEGIES = {"name": strategy} a hypothesis strategy of bytes that are nearly valid
    MUTATORS = {"name": change}     change(data, seed) returns the bytes with some values changed
    def seeds(name): ...            valid files

If atheris is installed (`pip install --no-deps atheris`), it mutates the corpus in build/fuzz/NAME and adds inputs that
reach new branches of the modules in INSTRUMENTED. Otherwise random mutations of the seeds alternate with the
strategies. A mutator makes three of four mutations. Every execution is watched, see watch.py. A finding is written to
build/fuzz/NAME.finding.
"""

import argparse
import hashlib
import importlib
import importlib.util
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz.watch import ROOT, watching
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

INSTRUMENTED = ["llama.checkpoint", "llama.tokenizer", "llama.untrusted"]
CORPUS = ROOT / "build" / "fuzz"
_BATCH = 50  # examples of a strategy, between as many mutations

Run = Callable[[bytes], object]
Mutator = Callable[[bytes, int], bytes]


def homes() -> dict[str, ModuleType]:
    """Return the module of every parser, by the parser's name."""
    paths = sorted(Path(__file__).parent.glob("fuzz_*.py"))
    modules = [importlib.import_module(f"fuzz.{path.stem}") for path in paths]
    return {name: module for module in modules for name in module.PARSERS}


def _longest(seeds: list[bytes]) -> int:
    return max(1 << 14, *(2 * len(data) for data in seeds))


def watched(run: Run) -> Callable[[bytes], None]:
    def one(data: bytes) -> None:
        with watching():
            run(data)

    return one


def mutations(seeds: list[bytes], dice: random.Random, change: Mutator | None) -> Iterator[bytes]:
    """Yield damaged seeds for ever: bytes changed, cut out, doubled, or copied from another; or by `change`."""
    while True:
        if change is not None and dice.randrange(4):
            yield change(dice.choice(seeds), dice.getrandbits(32))
            continue
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(1, 4)):
            begin, end = sorted(dice.randint(0, len(data)) for _ in range(2))
            other = dice.choice(seeds)
            at = dice.randint(0, len(other))
            damages = [
                dice.randbytes(min(end - begin, 8)),
                b"",
                bytes(data[begin:end]) * 2,
                other[at : at + 32],
                dice.choice([b"\0" * 8, b"\xff" * 8, b"\x1b[", b'"', b"{", b"9" * 70]),
            ]
            data[begin : min(end, begin + 32)] = dice.choice(damages)
        yield bytes(data[: _longest(seeds)])


def run_plainly(name: str, *, executions: int, seconds: float = float("inf"), seed: int = 0) -> int:
    """Run a parser on mutations and on examples of its strategy; return the number of executions."""
    module = homes()[name]
    one = watched(module.PARSERS[name])
    strategy = module.STRATEGIES.get(name)
    damaged = mutations(module.seeds(name), random.Random(seed), module.MUTATORS.get(name))
    end, done = time.monotonic() + seconds, 0
    while done < executions and time.monotonic() < end:
        count = min(_BATCH, executions - done)
        for _ in range(count):
            _run(name, one, next(damaged))
        if strategy is not None and (count := min(_BATCH, executions - done - count)):
            quiet = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            seeded(seed + done)(quiet(given(strategy)(one)))()
        done += _BATCH if strategy is None else 2 * _BATCH
    return min(done, executions)


def _run(name: str, one: Callable[[bytes], None], data: bytes) -> None:
    try:
        one(data)
    except BaseException:
        CORPUS.mkdir(parents=True, exist_ok=True)
        (CORPUS / f"{name}.finding").write_bytes(data)
        raise


def run_guided(name: str, *, executions: int, seconds: int) -> int:
    """Run a parser with atheris, in another process, because atheris ends its process."""
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = homes()[name].seeds(name)
    for data in seeds:
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    limits = [f"-max_total_time={seconds}", f"-runs={executions}", f"-max_len={_longest(seeds)}", "-timeout=10"]
    limits += ["-rss_limit_mb=4096", f"-artifact_prefix={CORPUS}/{name}.", "-print_final_stats=1", str(corpus)]
    command = [sys.executable, "-m", "tests.fuzz", "--guided", name, *limits]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    if done.returncode or count is None:
        raise SystemExit(f"{name}: a finding, exit code {done.returncode}\n{done.stderr[-4000:]}")
    return int(count[1])


def guided(name: str, arguments: list[str]) -> None:
    """Be the process that atheris drives."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=INSTRUMENTED):
        module = homes()[name]
    change = module.MUTATORS.get(name)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        if change is None or seed % 4 == 0:
            return bytes(atheris.Mutate(data, longest))
        return bytes(change(data, seed)[:longest])

    atheris.Setup([sys.argv[0], *arguments], watched(module.PARSERS[name]), custom_mutator=mutate)
    atheris.Fuzz()


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--guided"]:
        guided(arguments[1], arguments[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=1, help="for each parser")
    parser.add_argument("--executions", type=int, default=10**9, help="the most of each parser")
    parser.add_argument("--parser", help="only this one")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    asked = parser.parse_args(arguments)
    plain = asked.plain or importlib.util.find_spec("atheris") is None
    run, mode = (run_plainly, "plain") if plain else (run_guided, "guided")
    for name in [asked.parser] if asked.parser else homes():
        start = time.monotonic()
        done = run(name, executions=asked.executions, seconds=max(1, int(60 * asked.minutes)))
        print(f"{name}: {done:,} executions in {time.monotonic() - start:.0f} s, {mode}, nothing found", flush=True)
