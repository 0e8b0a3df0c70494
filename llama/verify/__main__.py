"""Certify that switching the KV cache changes nothing: python -m llama.verify [--dtype bf16] [--runs 50] [--exact].

Runs are drawn by their seeds, measured and judged by `certificate`, and kept in a JSON file in which they add up; what
is printed is the sum of that file. Knows models by their paths, files and words; nothing of what a violation is.
"""

import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypedDict

import torch
from tqdm import tqdm

from llama import cli
from llama.api import load
from llama.bench.run.models import DTYPES, cache_kind
from llama.costs import size
from llama.exact import slowdown
from llama.files import check_writable, replace_file
from llama.machine import available_memory, environment
from llama.model import Transformer
from llama.parallel import world_size
from llama.tokenizer import Tokenizer
from llama.verify import certificate
from llama.verify.certificate import WAYS, Divergence, Figures
from llama.verify.passes import STEPS, UNCACHED, reference_of

SCHEMA = "llama-kv/verify/1"
# What must be the same of runs that are added up; seeds differ among them.
_GROUP = ("model", "weights", "dtype", "exact", "kv_cache", "device", "slack")
_MACHINE = ("cpu", "torch", "threads")


class Run(TypedDict):
    """One run, as the file holds it: `config` says of what, `figures` are those of `certificate.Figures`.

    exact_cost: how many times longer a step and a prefill take in exact mode; None where it was off.
    """

    config: dict[str, Any]
    seed: int
    started: str
    seconds: float
    environment: dict[str, Any]
    exact_cost: dict[str, float] | None
    figures: dict[str, Any]


def main(
    *,
    ckpt_dir: str = "demo",
    dtype: str = "fp32",
    batch_size: int = 4,
    tokens: int = 64,
    prompt_len: int = 8,
    seed: int | None = None,
    runs: int = 1,
    exact: bool = False,
    kv_cache: str = "static",
    device: str = "auto",
    output: str = "results/verify.json",
) -> int:
    """Certify that a model writes the same with its KV cache on and off, down to rounding; or, if exact, to the bit.

    Exits with 0 where all runs of the file are certified, 1 where one found a bug, 2 on bad input. A run with a bug
    stays in the file; move the file away once the bug is mended.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        dtype: auto, fp32, bf16, fp16 or fp64.
        batch_size: The rows of a run.
        tokens: How many tokens each row grows by, greedily; at least 2.
        prompt_len: Prompts are random ids, from 1 to this many a row.
        seed: Of the first run, which draws its prompts; by default the first number that the file does not have.
        runs: How many runs to add to the file; 0 prints what it holds.
        exact: Measure exact mode, and allow not a bit to differ.
        kv_cache: The kind of cache: static, concat, or file.py:kind.
        device: auto, cpu, cuda or mps.
        output: The file in which runs add up.
    """
    if world_size() > 1:
        raise ValueError("this command certifies one process; exact mode across ranks is what the tests compare")
    path = Path(output)
    check_numbers(batch_size=batch_size, tokens=tokens, prompt_len=prompt_len, seed=seed, runs=runs)
    before = read_runs(path)
    if runs == 0:
        if not before:
            raise ValueError(f"{path} holds no runs yet; make some with --runs 1")
        return report(before, path)
    check_writable(path)
    model, tokenizer = load(ckpt_dir, dtype=dtype, device=device, kv_cache=cache_kind(kv_cache), exact=exact)
    config = {
        "model": ckpt_dir,
        "weights": weights_id(model),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "device": str(model.device),
        "batch_size": batch_size,
        "tokens": tokens,
        "prompt_len": prompt_len,
        "exact": exact,
        "kv_cache": kv_cache,
        "slack": certificate.SLACK[model.norm.weight.itemsize],
    }
    check_room(model, tokenizer, config)
    for run in make_runs(model, tokenizer, config, choose_seeds(before, config, seed, runs)):
        add_run(path, run)
    return report(read_runs(path), path)


# ---- what is asked for -----------------------------------------------------------------------------------------------


def check_numbers(*, seed: int | None, runs: int, **sizes: int) -> None:
    """Refuse what no model could do."""
    least = {"batch_size": 1, "tokens": 2, "prompt_len": 1}  # the cache is first read for the second token
    for name, number in sizes.items():
        if number < least[name]:
            raise ValueError(f"{name}={number} must be at least {least[name]}")
    if runs < 0:
        raise ValueError(f"runs={runs} must be at least 0, which prints the sum of the file")
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    if seed is not None and runs == 0:
        raise ValueError(f"seed={seed} means nothing with runs=0, which makes none; leave one of them out")


def check_room(model: Transformer, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Refuse, before anything slow, texts longer than the model's limit and what does not fit into memory."""
    rows, tokens, prompt_len = config["batch_size"], config["tokens"], config["prompt_len"]
    if prompt_len + tokens > model.args.max_seq_len:
        raise ValueError(
            f"prompt_len={prompt_len} and tokens={tokens} together pass max_seq_len={model.args.max_seq_len}; "
            "shorten one of them"
        )
    if tokenizer.adds_bos and prompt_len < 2:
        raise ValueError("prompt_len=1 leaves room for BOS alone, so that all prompts would be one; give at least 2")
    needed = certificate.bytes_needed(model, rows=rows, length=prompt_len + tokens, tokens=tokens)
    free = available_memory(model.device)
    if free is not None and needed > free:
        raise ValueError(
            f"{rows} rows of {prompt_len + tokens} positions need {size(needed)} beside the model, for its float64 "
            f"copy and the logits, and {model.device} has {size(free)} left; give a smaller batch_size, fewer tokens, "
            "or another device"
        )


def weights_id(model: Transformer) -> str:
    """Return 16 hexadecimal digits that tell models apart: SHA-256 of a sample of each tensor, some 1000 numbers."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        some = weight.flatten()[:: max(1, weight.numel() // 1000)].contiguous()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + bytes(some.view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def choose_seeds(runs: Sequence[Run], config: dict[str, Any], seed: int | None, wanted: int) -> list[int]:
    """Return `wanted` seeds that no run had with which these are added up; from `seed` on, or whichever come first."""
    used = {run["seed"] for run in runs if _group_of(run["config"]) == _group_of(config)}
    if seed is None:
        free = (number for number in count() if number not in used)
        return [next(free) for _ in range(wanted)]
    seeds = range(seed, seed + wanted)
    taken = sorted(used.intersection(seeds))
    if taken:
        raise ValueError(
            f"seed={taken[0]} has been run, and would count twice; leave seed out, or give one from {max(used) + 1} on"
        )
    return list(seeds)


def draw_prompts(seed: int, rows: int, longest: int, vocab_size: int, bos: int | None) -> list[list[int]]:
    """Return `rows` prompts of up to `longest` random ids, BOS first where there is one and never alone."""
    dice = random.Random(seed)
    head = [] if bos is None else [bos]
    lengths = [dice.randint(1, longest - len(head)) for _ in range(rows)]
    return [[*head, *(dice.randrange(vocab_size) for _ in range(length))] for length in lengths]


def make_runs(model: Transformer, tokenizer: Tokenizer, config: dict[str, Any], seeds: Sequence[int]) -> Iterator[Run]:
    """Make the runs of `seeds`, each when it is asked for."""
    with progress(model, config["exact"] + 1 + certificate.PARTS * len(seeds)) as begin:
        cost = None
        if config["exact"]:
            begin("timing what exact mode costs")
            cost = dict(zip(("prefill", "step"), slowdown(model), strict=True))
        machine = environment(model.device, torch.get_num_threads())
        begin("a copy in float64")
        reference = reference_of(model)
        bos = tokenizer.bos_id if tokenizer.adds_bos else None
        for number, seed in enumerate(seeds, 1):
            prompts = draw_prompts(seed, config["batch_size"], config["prompt_len"], model.args.vocab_size, bos)
            started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
            of_this = partial(begin, number=f"run {number} of {len(seeds)}: ")
            figures = certificate.measure(model, reference, prompts, config["tokens"], seed=seed, on_part=of_this)
            yield {
                "config": config,
                "seed": seed,
                "started": started,
                "seconds": round(time.perf_counter() - began, 3),
                "environment": machine,
                "exact_cost": cost,
                "figures": asdict(figures),
            }


@contextmanager
def progress(model: Transformer, parts: int) -> Iterator[Callable[..., None]]:
    """Show, on a terminal, which of how many parts is being made, and how many forwards the model has run for it.

    What it gives is called with the name of each part when it begins.
    """
    with tqdm(total=parts, unit="part", disable=None, leave=False) as bar:
        begun = forwards = 0

        def begin(part: str, *, number: str = "") -> None:
            nonlocal begun, forwards
            begun, forwards = begun + 1, 0
            bar.update(int(begun > 1))  # the part before is made
            bar.set_postfix_str("", refresh=False)
            bar.set_description(number + part)

        def count_forward(*_: Any) -> None:
            nonlocal forwards
            forwards += 1
            bar.set_postfix_str(f"forward {forwards}")

        hook = model.register_forward_hook(count_forward)  # which the copy in float64 will have, too
        try:
            yield begin
        finally:
            hook.remove()


# ---- the file --------------------------------------------------------------------------------------------------------


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
        list(map(table, grouped(runs)))  # finds whatever is not there, or is of another kind
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged, or is not a file of this command ({reason}); move it away, or give another --output"
        ) from None
    return runs


def add_run(path: Path, run: Run) -> None:
    """Add a run to the file, unless another process has added the same one meanwhile."""
    with _only_one(path):
        runs = read_runs(path)
        alike = [one for one in runs if _key_of(one) == _key_of(run) and one["seed"] == run["seed"]]
        if not alike:
            write_runs(path, [*runs, run])


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let no other process of this command change the file meanwhile. A lock that is a minute old was left behind."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        try:
            lock.touch(exist_ok=False)
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > 60:
                    lock.unlink()
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    """Replace the file as a whole, a run a line: a reader, or an interruption, never meets half of one."""
    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
    replace_file(path, f'{{"schema": "{SCHEMA}", "runs": [\n{lines}\n]}}\n'.encode())


# ---- the sum of the file ---------------------------------------------------------------------------------------------


def report(runs: Sequence[Run], path: Path) -> int:
    """Print the sum of each group of runs, and return the exit code."""
    print(f"runs in {path}: {len(runs)}\n")
    print("\n\n".join(f"{table(group)}\n\n{sentence(group)}" for group in grouped(runs)))
    return int(any(run["figures"]["violations"] for run in runs))


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs that may be added up, together, in the order in which their first ones came."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_key_of(run), []).append(run)
    return list(groups.values())


def _key_of(run: Run) -> tuple[Any, ...]:
    return (*_group_of(run["config"]), *(run["environment"][key] for key in _MACHINE))


def _group_of(config: dict[str, Any]) -> tuple[Any, ...]:
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
    for what in ("step", "prefill") if config["exact"] else ():
        times = statistics.median(run["exact_cost"][what] for run in group if run["exact_cost"])
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
    for way in WAYS:
        yield f"bit-equal to U: {way}", of(total.equal.get(way, 0), total.compared.get(way, 0))
    for pair, alike in total.top1.items():
        yield f"same top token: {pair}", of(alike, total.places)
    yield "|C - U|, largest", f"{total.max_delta:.2e}"
    yield "|C - U|, 99.9 % are below (+ 4.5 %)", f"{certificate.quantile(total.deltas, 0.999):.2e}"
    yield "KL(U || C), mean", f"{total.kl_sum / max(1, total.places):.2e}"
    yield "KL(U || C), largest", f"{total.kl_max:.2e}"
    yield "|U - R|, largest", f"{total.errors.get(UNCACHED, 0):.2e}"
    yield "|C - R|, largest", f"{total.errors.get(STEPS, 0):.2e}"
    yield "largest error, as a share of its bound", f"{total.strain:.2f}"
    yield "C in float64 - R, largest", f"{max(total.errors.get(way, 0) for way in certificate.WIDE):.2e}"


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
    """Return a model and its dtype in words."""
    short = {str(dtype).removeprefix("torch."): word for word, dtype in DTYPES.items()}
    return f"{config['model']} in {short.get(config['dtype'], config['dtype'])}"


def of(part: int, whole: int) -> str:
    """Return a count beside what it is a part of."""
    return f"{part:,} of {whole:,} = {percent(part, whole)}"


def percent(part: int, whole: int) -> str:
    """Return a share, rounded down, so that only all is 100 %."""
    return f"{10000 * part // max(1, whole) / 100:.2f} %"


if __name__ == "__main__":
    cli.main(main)
