"""Run parsers on malicious bytes: `python -m tests.fuzz --minutes N [--parser NAME] [--executions N]`.

If atheris is installed (`pip install --no-deps atheris`), it mutates the corpus in build/fuzz/NAME and adds inputs that
reach new branches of the modules in INSTRUMENTED. Otherwise the seeds are mutated at random. The edit of a parser makes
three of four mutations. Every execution is watched, see watch.py. A finding is written to build/fuzz/NAME.finding.
"""

import argparse
import hashlib
import importlib
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from fuzz.edits import edited_bytes
from fuzz.watch import ROOT, watching

if TYPE_CHECKING:
    from fuzz.parsers import Parser

INSTRUMENTED = ["llama.checkpoint", "llama.tokenizer", "llama.untrusted"]
CORPUS = ROOT / "build" / "fuzz"


def parsers() -> "dict[str, Parser]":
    """Return the parsers by name. They are imported here, so that atheris can instrument what they import."""
    return importlib.import_module("fuzz.parsers").PARSERS  # type: ignore[no-any-return]


def _longest(seeds: list[bytes]) -> int:
    return max(1 << 14, *(2 * len(data) for data in seeds))


def watched(run: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def one(data: bytes) -> None:
        with watching():
            run(data)

    return one


def run_plainly(name: str, *, executions: int, seconds: float = float("inf"), seed: int = 0) -> int:
    """Run a parser on mutations of its seeds; return the number of executions."""
    parser = parsers()[name]
    one, seeds, dice = watched(parser.run), parser.seeds(), Random(seed)
    end, done, longest = time.monotonic() + seconds, 0, _longest(seeds)
    while done < executions and time.monotonic() < end:
        data = (parser.edit if dice.randrange(4) else edited_bytes)(dice.choice(seeds), dice)[:longest]
        try:
            one(data)
        except BaseException:
            CORPUS.mkdir(parents=True, exist_ok=True)
            (CORPUS / f"{name}.finding").write_bytes(data)
            raise
        done += 1
    return done


def run_guided(name: str, *, executions: int, seconds: int) -> int:
    """Run a parser with atheris, in another process, because atheris ends its process."""
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = parsers()[name].seeds()
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
        parser = parsers()[name]

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        return bytes(parser.edit(data, Random(seed))[:longest] if seed % 4 else atheris.Mutate(data, longest))

    atheris.Setup([sys.argv[0], *arguments], watched(parser.run), custom_mutator=mutate)
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
    for name in [asked.parser] if asked.parser else parsers():
        start = time.monotonic()
        done = run(name, executions=asked.executions, seconds=max(1, int(60 * asked.minutes)))
        print(f"{name}: {done:,} executions in {time.monotonic() - start:.0f} s, {mode}, nothing found", flush=True)
