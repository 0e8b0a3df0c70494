"""The file in which runs of the certificate add up, and what is printed of it.

Knows JSON, runs and words; does not know models, or what of a difference is a violation.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from filelock import SoftFileLock

from llama.cli import console
from llama.host.files import keep_file
from llama.host.machine import DTYPES
from llama.verify.certificate import PASSES, WIDE, Divergence, Figures, quantile
from llama.verify.passes import STEPS, UNCACHED

SCHEMA = "llama-kv/verify/1"
# What must be the same of runs that are added up; seeds differ among them.
_GROUP = ("model", "weights", "dtype", "exact", "runner", "quantize", "activations", "kv_cache", "device", "slack")
_MACHINE = ("cpu", "torch", "threads")


class Run(TypedDict):
    """One run, as the file holds it: `config` says of what, `figures` are those of `certificate.Figures`.

    exact_cost: how many times longer a step and a prefill take in exact mode; None where it was off, or native code's.
    """

    config: dict[str, Any]
    seed: int
    started: str
    seconds: float
    environment: dict[str, Any]
    exact_cost: dict[str, float] | None
    figures: dict[str, Any]


def read_runs(path: Path) -> list[Run]:
    """Return the runs in the file, none where there is no file; raise ValueError where it is not ours or damaged."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        runs: list[Run] = content["runs"]
        if any(run.keys() != Run.__annotations__.keys() for run in runs):
            raise ValueError("a run has not the fields that it should have")
        for run in runs:  # older ones lack some of these
            run["config"] = {
                "runner": "exact" if run["config"]["exact"] else "plain",
                "quantize": None,
                "activations": 16,
                **run["config"],
            }
        list(map(table, grouped(runs)))  # finds whatever is not there, or is of another kind
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged, or is not a file of this command ({reason}); move it away, or give another --output"
        ) from None
    return runs


def add_run(path: Path, run: Run) -> None:
    """Add a run to the file, unless another process has added the same one meanwhile."""
    with SoftFileLock(path.with_name(f".{path.name}.lock")):
        runs = read_runs(path)
        alike = [one for one in runs if _key_of(one) == _key_of(run) and one["seed"] == run["seed"]]
        if not alike:
            write_runs(path, [*runs, run])


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    """Replace the file as a whole, a run a line: a reader, or an interruption, never meets half of one."""
    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
    keep_file(path, f'{{"schema": "{SCHEMA}", "runs": [\n{lines}\n]}}\n'.encode())


# ---- the sum of the file ---------------------------------------------------------------------------------------------


def report(runs: Sequence[Run], path: Path) -> int:
    """Print the sum of each group of runs, and return the exit code."""
    console.put(f"runs in {path}: {len(runs)}\n")
    console.put("\n\n".join(f"{table(group)}\n\n{sentence(group)}" for group in grouped(runs)))
    return int(any(run["figures"]["violations"] for run in runs))


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs that may be added up, together, in the order in which their first ones came."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_key_of(run), []).append(run)
    return list(groups.values())


def _key_of(run: Run) -> tuple[Any, ...]:
    return (*group_of(run["config"]), *(run["environment"][key] for key in _MACHINE))


def group_of(config: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(config[key] for key in _GROUP)


def add_up(several: Sequence[Figures]) -> Figures:
    """Return the figures of all runs together: counts by sum, sizes by maximum, lists one after the other."""

    def together(name: str, values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            add = max if name == "errors" else sum
            keys = dict.fromkeys(chain(*values))
            return {key: add(value[key] for value in values if key in value) for key in keys}
        if isinstance(values[0], list):
            return list(chain(*values))
        return max(values) if isinstance(values[0], float) and name != "kl_sum" else sum(values)

    return Figures(**{f.name: together(f.name, [getattr(one, f.name) for one in several]) for f in fields(Figures)})


def figures_of(run: Run) -> Figures:
    """Return a run's figures, as they were before they became JSON, each violation with its seed."""
    divergences = [Divergence(**divergence) for divergence in run["figures"]["divergences"]]
    violations = [f"seed {run['seed']}: {violation}" for violation in run["figures"]["violations"]]
    return Figures(**{**run["figures"], "divergences": divergences, "violations": violations})


def table(group: Sequence[Run]) -> str:
    """Return the measures of a group, a line each."""
    total, config = add_up([figures_of(run) for run in group]), group[0]["config"]
    mode = "exact mode" if config["exact"] else "fast mode"
    commits = ", ".join(dict.fromkeys(str(run["environment"]["commit"])[:7] for run in group))
    cpu, build, threads = (group[0]["environment"][key] for key in _MACHINE)
    title = f"{name_of(config)} on {config['device']}, KV cache {config['kv_cache']}, {mode}; runs: {len(group)}"
    title += f"\n  {cpu}, torch {build}, threads: {threads}, commit {commits}"
    rows = list(measures(total))
    costs = [run["exact_cost"] for run in group if run["exact_cost"]]
    for what in ("step", "prefill") if costs else ():
        times = statistics.median(cost[what] for cost in costs)
        rows.append((f"a {what} in exact mode takes", f"{times:.1f}x"))
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    lines = [f"  {name:<{left}}  {value:>{right}}" for name, value in rows]
    legend = "  C: cached, step by step; U: uncached, in one pass; R: the same weights in float64"
    return "\n".join([title, legend, *lines, *parted(group)])


def measures(total: Figures) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each measure."""
    yield "greedy tokens", f"{total.tokens:,}"
    yield "alike, cached and uncached", of(total.alike, total.tokens)
    unexplained = sum(not divergence.explained for divergence in total.divergences)
    yield "rows that part, unexplained ones", f"{len(total.divergences)}, {unexplained}"
    yield "positions decided by their margin", of(total.places - total.undecided, total.places)
    for way in PASSES:
        if way in total.compared:  # runs of before have not all of them
            yield f"bit-equal to U: {way}", of(total.equal[way], total.compared[way])
    for pair, alike in total.top1.items():
        yield f"same top token: {pair}", of(alike, total.places)
    yield "|C - U|, largest", f"{total.max_delta:.2e}"
    yield "|C - U|, 99.9 % are below (+ 4.5 %)", f"{quantile(total.deltas, 0.999):.2e}"
    yield "KL(U || C), mean", f"{total.kl_sum / max(1, total.places):.2e}"
    yield "KL(U || C), largest", f"{total.kl_max:.2e}"
    yield "|U - R|, largest", f"{total.errors.get(UNCACHED, 0):.2e}"
    yield "|C - R|, largest", f"{total.errors.get(STEPS, 0):.2e}"
    yield "largest error, as a share of its bound", f"{total.strain:.2f}"
    yield "C in float64 - R, largest", f"{max(total.errors.get(way, 0) for way in WIDE):.2e}"


def parted(group: Sequence[Run], most: int = 3) -> Iterator[str]:
    """Yield the first rows that parted, and how many more there are."""
    found = [(run["seed"], divergence) for run in group for divergence in figures_of(run).divergences]
    for seed, d in found[:most]:
        sizes = ("not finite" if margin is None else f"{margin:.2g}" for margin in d.margins)
        margins = ", ".join(f"{name} {size}" for name, size in zip("UCR", sizes, strict=True))
        taken = f"{d.tokens[0]} cached, {d.tokens[1]} uncached"
        why = "explained by rounding" if d.explained else "unexplained"
        yield f"  seed {seed}, row {d.row} parts at step {d.step}: {taken}; margins {margins}; {why}"
    if len(found) > most:
        yield f"  and {len(found) - most} more"


def sentence(group: Sequence[Run]) -> str:
    """Return what is certified, or the first bug."""
    total, config = add_up([figures_of(run) for run in group]), group[0]["config"]
    if total.violations:
        more = len(total.violations) - 1
        wrong = next(run for run in group if run["figures"]["violations"])
        commit = str(wrong["environment"]["commit"])[:7]
        return f"BUG: {total.violations[0]}" + (f" (and {more} more)" if more else "") + f"; found at commit {commit}"
    alike = f"{total.tokens:,} greedy tokens of {name_of(config)}, cached and uncached alike"
    if config["exact"]:
        pairs, ways = sum(total.compared.values()), len(total.compared)
        return f"certified: {pairs:,} (configuration, position) pairs bit-equal, in {ways} ways; {alike}"
    if total.divergences:
        rows = len(total.divergences)
        alike = f"{total.alike:,} of {alike}, up to where rounding parts {rows} row{'s' * (rows > 1)}"
    share = percent(total.places - total.undecided, total.places)
    return (
        f"certified: {alike}; {share} of positions decided by margins above 2 x their bound, at most "
        f"{total.bound:.1e}; 0 unexplained divergences"
    )


def name_of(config: dict[str, Any]) -> str:
    """Return a model's name and dtype as text, and what runs it where that is no operation of ours."""
    short = {str(dtype).removeprefix("torch."): word for word, dtype in DTYPES.items()}
    way = "" if config["runner"] in ("plain", "exact") else f", {config['runner']}"
    way += "" if config["quantize"] is None else f" with {config['quantize']} weights"
    way += "" if config["activations"] == 16 else f" and {config['activations']}-bit activations"
    return f"{config['model']} in {short.get(config['dtype'], config['dtype'])}{way}"


def of(part: int, whole: int) -> str:
    """Return a count beside what it is a part of."""
    return f"{part:,} of {whole:,} = {percent(part, whole)}"


def percent(part: int, whole: int) -> str:
    """Return a share, rounded down, so that only all is 100 %."""
    return f"{10000 * part // max(1, whole) / 100:.2f} %"
