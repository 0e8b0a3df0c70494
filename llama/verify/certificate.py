"""The certificate of one command: its runs, their sum, the report that is printed, and the verdict.

Knows figures and text; does not know models, or which difference is a violation.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from llama.host.files import replace_file
from llama.host.machine import DTYPES
from llama.verify.measured_run import FLOAT64_PASSES, PASSES, Figures
from llama.verify.passes import STEPS, UNCACHED
from llama.verify.tolerance import DECIDED

SCHEMA = "llama-kv/verify/5"


@dataclass(frozen=True)
class Certificate:
    """What one command measured.

    config: the model, the sizes of a run, and what computes.
    environment: the machine, versions and the commit.
    runs: the figures of each run by the seed of its prompts.
    """

    config: dict[str, Any]
    environment: dict[str, Any]
    runs: dict[int, Figures]

    @property
    def total(self) -> Figures:
        """The figures of all runs together."""
        return add_up(list(self.runs.values()))

    def write(self, path: Path) -> None:
        """Write the certificate as JSON, replacing the file as a whole."""
        runs = [{"seed": seed, "figures": asdict(figures)} for seed, figures in self.runs.items()]
        content = {"schema": SCHEMA, "config": self.config, "environment": self.environment, "runs": runs}
        replace_file(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


# ---- the report ------------------------------------------------------------------------------------------------------


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


def report(certificate: Certificate) -> str:
    """Return the measures of all runs, one a line, and the verdict."""
    total, config, machine = certificate.total, certificate.config, certificate.environment
    mode = "exact mode" if config["exact"] else "default mode"
    title = f"{name_of(config)} on {config['device']}, KV cache {config['kv_cache']}, {mode}; "
    title += f"runs: {len(certificate.runs)}\n  {machine['cpu']}, torch {machine['torch']}, "
    title += f"threads: {machine['threads']}, commit {str(machine['commit'])[:7]}"
    rows = list(measures(total))
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    lines = [f"  {name:<{left}}  {value:>{right}}" for name, value in rows]
    legend = "  C: cached, step by step; U: uncached, in one pass; R: the same weights in float64"
    return "\n".join([title, legend, *lines, *divergence_lines(certificate), "", verdict(certificate)])


def measures(total: Figures) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each measure."""
    yield "greedy tokens", f"{total.tokens:,}"
    yield "the same, cached and uncached", part_of(total.equal_tokens, total.tokens)
    yield "the same with guesses", part_of(total.guessed_tokens, total.tokens)
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


def divergence_lines(certificate: Certificate, most: int = 3) -> Iterator[str]:
    """Yield the first rows that diverged, and how many more there are."""
    found = [(seed, divergence) for seed, run in certificate.runs.items() for divergence in run.divergences]
    for seed, d in found[:most]:
        sizes = ("not finite" if margin is None else f"{margin:.2g}" for margin in d.margins)
        margins = ", ".join(f"{name} {size}" for name, size in zip("UCR", sizes, strict=True))
        why = "explained by rounding" if d.explained else "unexplained"
        yield f"  seed {seed}, row {d.row} diverges at step {d.step}: margins {margins}; {why}"
    if len(found) > most:
        yield f"  and {len(found) - most} more"


def verdict(certificate: Certificate) -> str:
    """Return the verdict: what is certified, or the first bug."""
    total, config = certificate.total, certificate.config
    if total.violations:
        seed = next(seed for seed, run in certificate.runs.items() if run.violations)
        others = f" (and {len(total.violations) - 1} more)" if len(total.violations) > 1 else ""
        commit = str(certificate.environment["commit"])[:7]
        return f"BUG: seed {seed}: {total.violations[0]}{others}; found at commit {commit}"
    tokens = f"{total.tokens:,} greedy tokens of {name_of(config)}, cached and uncached alike"
    if config["exact"]:
        pairs, passes = sum(total.compared.values()), len(total.compared)
        return f"certified: {pairs:,} (configuration, position) pairs bit-equal, in {passes} ways; {tokens}"
    if total.divergences:
        rows = len(total.divergences)
        tokens = f"{total.equal_tokens:,} of {tokens}, up to where rounding lets {rows} row{'s' * (rows > 1)} diverge"
    share = percent(total.positions - total.near_ties, total.positions)
    return (
        f"certified: {tokens}; {share} of positions decided by margins above {DECIDED:g} x their bound, at most "
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
