"""The verdict on runs of the certificate, the report that is printed, and the file in which runs add up.

Knows JSON, runs and text; does not know models, or which difference is a violation.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from llama.host import console
from llama.host.files import replace_file
from llama.host.machine import DTYPES
from llama.verify.certificate import FLOAT64_PASSES, PASSES, Figures, FirstDivergence
from llama.verify.passes import STEPS, UNCACHED

RUNS_SCHEMA = "llama-kv/verify/3"
# Runs are added up if these are equal; their seeds differ.
_CONFIG_KEYS = (
    *("model", "weights", "dtype", "exact", "runner", "quantize", "activations", "kv_cache", "device"),
    "slack",  # the factor of the bound
)
_MACHINE_KEYS = ("cpu", "torch", "threads")


@dataclass(frozen=True)
class CertificateRun:
    """One run: how it was configured, the seed of its prompts, the machine, and what was measured."""

    config: dict[str, Any]
    seed: int
    environment: dict[str, Any]
    figures: Figures


def read_runs(path: Path) -> list[CertificateRun]:
    """Return the runs in the file, [] if there is no file; raise ValueError for a file of another kind or damaged."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] != RUNS_SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        runs = [CertificateRun(**{**run, "figures": _figures(run["figures"])}) for run in content["runs"]]
        for group in grouped(runs):
            group_table(group)  # raises if a value is missing or has another type
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged, or is not a file of this command ({reason}); move it away, or give another --output"
        ) from None
    return runs


def add_run(path: Path, run: CertificateRun) -> None:
    """Add a run to those that the file has now, unless another process has added the same run."""
    runs = read_runs(path)
    if not any(_group_of(one) == _group_of(run) and one.seed == run.seed for one in runs):
        write_runs(path, [*runs, run])


def write_runs(path: Path, runs: Sequence[CertificateRun]) -> None:
    """Replace the file in one operation, one run a line: no reader and no interruption sees a part of it."""
    lines = ",\n".join(json.dumps(asdict(run), allow_nan=False) for run in runs)
    replace_file(path, f'{{"schema": "{RUNS_SCHEMA}", "runs": [\n{lines}\n]}}\n'.encode())


# ---- the report ------------------------------------------------------------------------------------------------------


def report(runs: Sequence[CertificateRun], path: Path) -> int:
    """Print the sum of each group of runs, and return the exit code."""
    console.put(f"runs in {path}: {len(runs)}\n")
    console.put("\n\n".join(f"{group_table(group)}\n\n{verdict(group)}" for group in grouped(runs)))
    return int(any(run.figures.violations for run in runs))


def grouped(runs: Sequence[CertificateRun]) -> list[list[CertificateRun]]:
    """Return the groups of runs that may be added up, in the order of their first runs."""
    groups: dict[tuple[Any, ...], list[CertificateRun]] = {}
    for run in runs:
        groups.setdefault(_group_of(run), []).append(run)
    return list(groups.values())


def _group_of(run: CertificateRun) -> tuple[Any, ...]:
    return (*comparable(run.config), *(run.environment[key] for key in _MACHINE_KEYS))


def comparable(config: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a configuration that must be equal in runs that are added up."""
    return tuple(config[key] for key in _CONFIG_KEYS)


def add_up(several: Sequence[Figures]) -> Figures:
    """Return the figures of all runs together: the sum of integers, the maximum of floats, joined lists."""

    def together(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            keys = dict.fromkeys(chain(*values))
            return {key: together([value[key] for value in values if key in value]) for key in keys}
        if isinstance(values[0], list):
            return list(chain(*values))
        return max(values) if isinstance(values[0], float) else sum(values)

    return Figures(**{f.name: together([getattr(one, f.name) for one in several]) for f in fields(Figures)})


def _figures(stored: dict[str, Any]) -> Figures:
    return Figures(**{**stored, "divergences": [FirstDivergence(**one) for one in stored["divergences"]]})


def group_table(group: Sequence[CertificateRun]) -> str:
    """Return the measures of a group, one a line."""
    total, config = add_up([run.figures for run in group]), group[0].config
    mode = "exact mode" if config["exact"] else "default mode"
    commits = ", ".join(dict.fromkeys(str(run.environment["commit"])[:7] for run in group))
    cpu, build, threads = (group[0].environment[key] for key in _MACHINE_KEYS)
    title = f"{name_of(config)} on {config['device']}, KV cache {config['kv_cache']}, {mode}; runs: {len(group)}"
    title += f"\n  {cpu}, torch {build}, threads: {threads}, commit {commits}"
    rows = list(measures(total))
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    lines = [f"  {name:<{left}}  {value:>{right}}" for name, value in rows]
    legend = "  C: cached, step by step; U: uncached, in one pass; R: the same weights in float64"
    return "\n".join([title, legend, *lines, *divergence_lines(group)])


def measures(total: Figures) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each measure."""
    yield "greedy tokens", f"{total.tokens:,}"
    yield "the same, cached and uncached", part_of(total.equal_tokens, total.tokens)
    unexplained = sum(not divergence.explained for divergence in total.divergences)
    yield "rows that diverge, unexplained ones", f"{len(total.divergences)}, {unexplained}"
    yield "positions decided by their margin", part_of(total.positions - total.near_ties, total.positions)
    for name in PASSES:
        if name in total.compared:  # a run that failed at once compared nothing
            yield f"bit-equal to U: {name}", part_of(total.bit_equal[name], total.compared[name])
    yield "same top token: C and U", part_of(total.same_top, total.positions)
    yield "|C - U|, largest", f"{total.max_delta:.2e}"
    yield "KL(U || C), largest", f"{total.kl_max:.2e}"
    yield "|U - R|, largest", f"{total.errors.get(UNCACHED, 0):.2e}"
    yield "|C - R|, largest", f"{total.errors.get(STEPS, 0):.2e}"
    yield "largest error divided by its bound", f"{total.error_ratio:.2f}"
    yield "C in float64 - R, largest", f"{max(total.errors.get(name, 0) for name in FLOAT64_PASSES):.2e}"


def divergence_lines(group: Sequence[CertificateRun], most: int = 3) -> Iterator[str]:
    """Yield the first rows that diverged, and how many more there are."""
    found = [(run.seed, divergence) for run in group for divergence in run.figures.divergences]
    for seed, d in found[:most]:
        sizes = ("not finite" if margin is None else f"{margin:.2g}" for margin in d.margins)
        margins = ", ".join(f"{name} {size}" for name, size in zip("UCR", sizes, strict=True))
        why = "explained by rounding" if d.explained else "unexplained"
        yield f"  seed {seed}, row {d.row} diverges at step {d.step}: margins {margins}; {why}"
    if len(found) > most:
        yield f"  and {len(found) - most} more"


def verdict(group: Sequence[CertificateRun]) -> str:
    """Return the verdict: what is certified, or the first bug."""
    total, config = add_up([run.figures for run in group]), group[0].config
    if total.violations:
        wrong, more = next(run for run in group if run.figures.violations), len(total.violations) - 1
        others, commit = f" (and {more} more)" if more else "", str(wrong.environment["commit"])[:7]
        return f"BUG: seed {wrong.seed}: {total.violations[0]}{others}; found at commit {commit}"
    tokens = f"{total.tokens:,} greedy tokens of {name_of(config)}, cached and uncached alike"
    if config["exact"]:
        pairs, passes = sum(total.compared.values()), len(total.compared)
        return f"certified: {pairs:,} (configuration, position) pairs bit-equal, in {passes} ways; {tokens}"
    if total.divergences:
        rows = len(total.divergences)
        tokens = f"{total.equal_tokens:,} of {tokens}, up to where rounding lets {rows} row{'s' * (rows > 1)} diverge"
    share = percent(total.positions - total.near_ties, total.positions)
    return (
        f"certified: {tokens}; {share} of positions decided by margins above 2 x their bound, at most "
        f"{total.bound:.1e}; 0 unexplained divergences"
    )


def name_of(config: dict[str, Any]) -> str:
    """Return a model's name and dtype as text, and its runner and weights if they are not the plain ones."""
    short = {str(dtype).removeprefix("torch."): word for word, dtype in DTYPES.items()}
    how = "" if config["runner"] in ("plain", "exact") else f", {config['runner']}"
    how += "" if config["quantize"] is None else f" with {config['quantize']} weights"
    how += "" if config["activations"] == 16 else f" and {config['activations']}-bit activations"
    return f"{config['model']} in {short.get(config['dtype'], config['dtype'])}{how}"


def part_of(part: int, whole: int) -> str:
    """Return a count and its share of the whole, as text."""
    return f"{part:,} of {whole:,} = {percent(part, whole)}"


def percent(part: int, whole: int) -> str:
    """Return a share, rounded down, so that only a complete count is 100 %."""
    return f"{10000 * part // max(1, whole) / 100:.2f} %"
