"""Runs parsers on hostile bytes: `python -m tests.fuzz --minutes N [--parser NAME] [--executions N]`.

A file `fuzz_*.py` beside this one brings parsers along:

    PARSERS = {"name": run}         run(data: bytes) returns, or raises what is a finding
    STRATEGIES = {"name": strategy} a hypothesis strategy of bytes that are nearly right
    MUTATORS = {"name": change}     change(data, seed) returns the bytes with another value here or there
    def seeds(name): ...            files to begin with; may be missing, as may STRATEGIES and MUTATORS

Where atheris is installed (`pip install --no-deps atheris`), it mutates what is kept in build/fuzz/NAME and keeps what
reaches new branches of the modules in INSTRUMENTED. Elsewhere random mutations of the seeds and the strategies take
turns. Where a parser has a mutator, it makes three mutations in four, and one changes bytes anywhere. Every execution
is watched, see watch.py. A finding is written to build/fuzz/NAME.finding.
"""

import argparse
import hashlib
import importlib
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from fuzz.watch import ROOT, watching
from hypothesis import HealthCheck, given, settings

INSTRUMENTED = ["llama.checkpoint", "llama.quant.gguf_types", "llama.tokenizer", "llama.untrusted"]
KEPT = ROOT / "build" / "fuzz"
_AT_ONCE = 200  # examples of a strategy, between as many mutations


def modules() -> list[ModuleType]:
    return [importlib.import_module(f"fuzz.{path.stem}") for path in sorted(Path(__file__).parent.glob("fuzz_*.py"))]


def homes() -> dict[str, ModuleType]:
    """Return the module that every parser is in, by the parser's name."""
    return {name: module for module in modules() for name in module.PARSERS}


def seeds_of(module: ModuleType, name: str) -> list[bytes]:
    return list(module.seeds(name)) if hasattr(module, "seeds") else [b""]


def _longest(seeds: list[bytes]) -> int:
    return max(1 << 14, *(2 * len(data) for data in seeds))


def watched(run: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def one(data: bytes) -> None:
        with watching():
            run(data)

    return one


def mutator_of(module: ModuleType, name: str) -> Callable[[bytes, int], bytes] | None:
    mutators: dict[str, Callable[[bytes, int], bytes]] = getattr(module, "MUTATORS", {})
    return mutators.get(name)


def mutations(
    seeds: list[bytes], dice: random.Random, change: Callable[[bytes, int], bytes] | None = None
) -> Iterator[bytes]:
    """Yield damaged seeds for ever: bytes changed, cut out, doubled, taken from another; or what `change` makes."""
    longest = _longest(seeds)
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
        yield bytes(data[:longest])


def run_plainly(name: str, *, executions: int, seconds: float = float("inf"), seed: int = 0) -> int:
    """Execute a parser so often, or so long, on mutations and on what its grammar draws; return how often."""
    module = homes()[name]
    one = watched(module.PARSERS[name])
    strategy = getattr(module, "STRATEGIES", {}).get(name)
    damaged = mutations(seeds_of(module, name), random.Random(seed), mutator_of(module, name))
    end, done, turn = time.monotonic() + seconds, 0, 0
    while done < executions and time.monotonic() < end:
        for _ in range(min(_AT_ONCE, executions - done)):
            _keep_finding(name, one, next(damaged))
            done += 1
        if strategy is not None and done < executions:
            count = min(_AT_ONCE, executions - done)
            _draw(strategy, one, count, seed + turn)
            done, turn = done + count, turn + 1
    return done


def _draw(strategy: object, one: Callable[[bytes], None], count: int, seed: int) -> None:
    from hypothesis import seed as seeded

    quiet = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seeded(seed)(quiet(given(strategy)(one)))()  # type: ignore[arg-type]


def _keep_finding(name: str, one: Callable[[bytes], None], data: bytes) -> None:
    try:
        one(data)
    except BaseException:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{name}.finding").write_bytes(data)
        raise


def run_guided(name: str, *, seconds: int, executions: int) -> int:
    """Let atheris execute a parser, in a process of its own, for it ends the one that it is in."""
    corpus = KEPT / name
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = seeds_of(homes()[name], name)
    for data in seeds:
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    limits = [
        f"-max_total_time={seconds}",
        f"-runs={executions}",
        f"-max_len={_longest(seeds)}",
        "-timeout=10",
        "-rss_limit_mb=4096",
    ]
    artifacts = f"-artifact_prefix={KEPT}/{name}."
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--guided",
        name,
        *limits,
        artifacts,
        "-print_final_stats=1",
        str(corpus),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    if done.returncode or count is None:
        raise SystemExit(f"{name}: a finding, exit code {done.returncode}\n{done.stderr[-4000:]}")
    return int(count[1])


def guided(name: str, words: list[str]) -> None:
    """Be the process that atheris drives."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        module = homes()[name]
    change = mutator_of(module, name)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        if change is None or seed % 4 == 0:
            return bytes(atheris.Mutate(data, longest))
        return change(data, seed)[:longest]

    atheris.Setup([sys.argv[0], *words], watched(module.PARSERS[name]), custom_mutator=mutate)
    atheris.Fuzz()


def main(words: list[str]) -> None:
    if words[:1] == ["--guided"]:
        guided(words[1], words[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=1, help="for each parser")
    parser.add_argument("--executions", type=int, default=10**9, help="at most so many of each parser")
    parser.add_argument("--parser", help="this one alone")
    parser.add_argument("--plain", action="store_true", help="without atheris, also where it is installed")
    asked = parser.parse_args(words)
    names = [asked.parser] if asked.parser else list(homes())
    for name in names:
        start = time.monotonic()
        if asked.plain or not _has_atheris():
            way, done = "plain", run_plainly(name, executions=asked.executions, seconds=60 * asked.minutes)
        else:
            way = "guided"
            done = run_guided(name, seconds=max(1, int(60 * asked.minutes)), executions=asked.executions)
        print(f"{name}: {done:,} executions in {time.monotonic() - start:.0f} s, {way}, nothing found", flush=True)


def _has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True
