"""A sweep: a plan of cells in TOML, each of which gets a file of its own in the folder of the sweep.

The folder is the only state. A cell is done when its file is there, which appears as a whole. So the same command
continues a sweep that ended in any way, and any number of processes may share one. A cell is measured by the jobs of
single cells and of the preset `caches`.
"""

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

from llama.api import pick_cache
from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.comparisons import OtherSetup
from llama.bench.plan import Run
from llama.bench.presets import (
    FEWEST,
    MOST_SCORED,
    Group,
    check_contexts,
    kind_jobs,
    quality_plan,
    text_plan,
)
from llama.bench.report.files import write_json
from llama.bench.run.cache_kind import OWN_TEXT
from llama.bench.run.directory import read_report
from llama.bench.run.models import find_model, make_cell, read_by, with_code
from llama.bench.run.tasks import IN_FILE, plan_tasks
from llama.bench.schema import Report, cell_row, new_report
from llama.bench.single import measure_cell
from llama.costs import RELEASED
from llama.host.files import lock_file
from llama.host.version import code_digest, content_digest
from llama.kv_cache import Cache, cache_kind
from llama.kv_cache.names import read_kind
from llama.quality.ruler import TASKS

GENERATE, OFF = "generate", "off"  # the task of a single cell; the kind that stands for no cache
KIND_TASKS = {"costs": "cache_costs", "quality": "cache_quality"}  # of `caches`, as are those of its --task: one row
AXES: dict[str, list[Any]] = {
    "models": ["demo"], "tasks": [GENERATE], "contexts": [256], "batch": [1], "kinds": [OFF, "static"],
}  # fmt: skip
SETTINGS: dict[str, type] = {
    **dict.fromkeys(("repeats", "samples", "greedy_tokens", "output_len", "threads", "activations", "seed"), int),
    **dict.fromkeys(("compare", "exact", "fast"), bool),
    **dict.fromkeys(("device", "dtype", "logits", "quantize", "speculate", "text", "tokenizer_path"), str),
}
OF_TASK = ("repeats", "samples", "greedy_tokens", "compare", "text")  # settings that are no fields of a cell
NEEDLE_CONTEXTS, MOST_GREEDY = (256, 512, 1024), 256
OLD = "old"  # the folder of superseded results, which no report reads
LOOK_EVERY = 1.0  # seconds, at a lock that another process has


class Point(NamedTuple):
    """What decides one cell of a sweep. Points that differ in the kind alone are a group.

    inputs: a digest of the library's code and of all files that the cell reads, as they were when it was planned.
    """

    model: str
    task: str
    context: int
    batch: int
    kind: str
    settings: tuple[tuple[str, Any], ...] = ()
    inputs: str = ""

    @property
    def asked(self) -> str:
        """A digest of what the plan asks for, which is the same on every machine."""
        return hashlib.blake2b(json.dumps(self[:-1]).encode(), digest_size=8).hexdigest()

    @property
    def id(self) -> str:
        """The name of the cell's file: what the plan asks for, and what its files are."""
        return f"{self.asked}-{self.inputs}"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.task}, {self.kind}, {self.context} tokens, batch {self.batch}"

    @property
    def group(self) -> "Point":
        return self._replace(kind="", inputs="")

    def cell(self) -> Cell:
        """Return the cell to measure. Raises ValueError if it cannot be measured."""
        sizes = {"input_len": self.context, **{name: value for name, value in self.settings if name not in OF_TASK}}
        if self.task != GENERATE:  # the context is the length of the whole text
            sizes |= {"input_len": max(1, self.context - 1), "output_len": 1}
        named = {"model": self.model} if self.model in ("demo", *RELEASED) else {"ckpt_dir": self.model}
        kind = {"kv_caching": False} if self.kind == OFF else {"kv_cache": self.kind}
        return make_cell(**named, **kind, batch_size=self.batch, **{"output_len": 32, **sizes})


# ---- plans -----------------------------------------------------------------------------------------------------------


def read_plan(text: str) -> list[Point]:
    """Return the points of a plan in TOML. Raises ValueError as `points_of` does."""
    try:
        return points_of(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the plan is not TOML: {error}") from error


def points_of(plan: Mapping[str, Any]) -> list[Point]:
    """Return the points of a plan, group by group. Raises ValueError for a name or a value that no cell can have."""
    lists = {**{name: type(default[0]) for name, default in AXES.items()}, "ratios": float}
    if unknown := plan.keys() - {*lists, *SETTINGS}:
        raise ValueError(f"the plan has {sorted(unknown)[0]!r}; known are {', '.join([*lists, *SETTINGS])}")
    for name, value in plan.items():
        kind, values = (SETTINGS[name], [value]) if name in SETTINGS else (lists[name], value)
        is_list = isinstance(values, list) and bool(values) and all(type(one) is kind for one in values)
        if not is_list or len(set(values)) < len(values):
            what = "of the type" if name in SETTINGS else "a list of different values of the type"
            raise ValueError(f"the plan has {name}={value!r:.80}, which must be {what} {kind.__name__}")
    axes = {name: plan.get(name, default) for name, default in AXES.items()}
    settings = tuple((name, plan[name]) for name in SETTINGS if name in plan)
    _check(axes, dict(settings))
    axes["kinds"] = with_ratios(axes["kinds"], plan.get("ratios", []))
    points = []
    for model, task, context, batch, kind in product(*axes.values()):
        if task == GENERATE:
            points.append(Point(model, task, context, batch, kind, settings))
        elif kind != OFF:  # the samples of a file have lengths of their own
            points.append(Point(model, task, 1 if task.endswith(IN_FILE) else context, 1, kind, settings))
    if not points:
        raise ValueError(f"the plan has no cell: no task of {', '.join(axes['tasks'])} measures the kind {OFF}")
    library, read = code_digest(), cache(content_digest)  # each file once
    return [point._replace(inputs=inputs_of(point, library, read)) for point in dict.fromkeys(points)]


def with_ratios(kinds: Sequence[str], ratios: Sequence[float]) -> list[str]:
    """Return kinds, each that takes a ratio once with every ratio. Raises ValueError if none takes one."""
    if wrong := [ratio for ratio in ratios if not 0 < ratio <= 1]:
        raise ValueError(f"the plan has ratios={wrong}, which must be above 0 and at most 1")
    found = [[f"{kind}:{ratio:g}" for ratio in ratios if takes_ratio(kind)] or [kind] for kind in kinds]
    if ratios and found == [[kind] for kind in kinds]:
        raise ValueError(f"the plan has ratios, and none of its kinds takes one: {', '.join(kinds)}; leave ratios out")
    return list(dict.fromkeys(kind for own in found for kind in own))


def takes_ratio(kind: str) -> bool:
    """Return whether a kind without parameters and layers can have a ratio as its parameter."""
    if kind == OFF or read_kind(kind).params or {"@", ";"} & {*kind}:
        return False
    with suppress(ValueError):
        return bool(Cache.of(ModelArgs(vocab_size=1), cache_kind(f"{kind}:0.5")).layers)
    return False


def inputs_of(point: Point, library: str, read: Callable[[str], str]) -> str:
    """Return the digest of the library's code and of the files that a cell reads, each of which `read` digests."""
    known = Cell(model=point.model, tokenizer_path=dict(point.settings).get("tokenizer_path"))
    code = None if point.kind == OFF else with_code(known.but(kv_cache=point.kind)).code
    own = {"quality": dict(point.settings).get("text")}.get(point.task, point.task)
    files = read_by(known, *([own] if own is not None and Path(own).is_file() else []))
    words = json.dumps([library, code, *map(read, files)])
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _check(axes: Mapping[str, list[Any]], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown name, and for settings that no cell can have."""
    for model in axes["models"]:
        if model not in ("demo", *RELEASED) and not Path(model).exists():
            raise ValueError(f"the plan has the model {model!r}; known are demo, {', '.join(RELEASED)} and paths")
    for task in axes["tasks"]:
        family, _, names = task.partition(":")
        ruler = family == "ruler" and {*names.split(",")} <= {"", *TASKS}
        if not (ruler or task in (GENERATE, *KIND_TASKS) or (task.endswith(IN_FILE) and Path(task).is_file())):
            known = f"{', '.join([GENERATE, *KIND_TASKS])}, ruler, ruler:NAME,NAME and files FILE{IN_FILE}"
            raise ValueError(f"the plan has the task {task!r}; known are {known}; NAME is {', '.join(TASKS)}")
    for kind in axes["kinds"]:
        if kind != OFF:
            pick_cache(kind)
    for name, least in (("repeats", 1), ("samples", 1), ("greedy_tokens", 0)):
        if settings.get(name, least) < least:
            raise ValueError(f"the plan has {name}={settings[name]}, which must be at least {least}")
    if settings.get("greedy_tokens", 0) > MOST_GREEDY:
        raise ValueError(f"the plan has greedy_tokens={settings['greedy_tokens']}, which must be at most {MOST_GREEDY}")
    for name in ("compare", "speculate"):
        if name in settings and GENERATE not in axes["tasks"]:
            raise ValueError(f"the plan has {name}, which only the task {GENERATE} can have")
    if "text" in settings and ("quality" not in axes["tasks"] or not Path(settings["text"]).is_file()):
        raise ValueError(f"the plan has text={settings['text']!r}, which must be a file, for the task quality")
    if "speculate" in settings and OFF in axes["kinds"]:
        raise ValueError(f"the plan has speculate, and guesses need a cache: give kinds without {OFF}")
    fields = {name: value for name, value in settings.items() if name not in OF_TASK and value != "auto"}
    for context, batch in product(axes["contexts"], axes["batch"]):
        Cell(input_len=context, batch_size=batch, **fields)


def part_of(points: Sequence[Point], i: int, n: int) -> list[Point]:
    """Return the i-th of n parts. A group stays whole, so that its cells run on one machine and can be compared."""
    groups = [list(group) for _, group in groupby(points, key=lambda point: point.group)]
    return [point for group in groups[i - 1 :: n] for point in group]


# ---- cells -----------------------------------------------------------------------------------------------------------


def file_of(folder: Path, point: Point) -> Path:
    return folder / f"{point.id}.json"


def superseded(folder: Path, point: Point) -> list[Path]:
    """Return the results of a cell that other code or other contents of its files have made."""
    return [path for path in folder.glob(f"{point.asked}*.json") if path != file_of(folder, point)]


def error_of(folder: Path, point: Point) -> str | None:
    """Return why a cell has no figures: refused, died, or not measured yet."""
    report = read_report(file_of(folder, point))
    error: str | None = "not measured" if report is None else cell_row(report, 0)["error"]
    return error


def is_done(folder: Path, point: Point) -> bool:
    """Return whether a cell has its file; one that died has none that counts, and is measured again."""
    error = error_of(folder, point)
    return error is None or error.startswith("refused")


def measure_points(
    points: Sequence[Point],
    folder: Path,
    *,
    command: str,
    waiting: Callable[[], None] = lambda: None,
    begin: Callable[[Point], None] = lambda point: None,
) -> Iterator[Point]:
    """Measure every cell that is not done, and yield each point as soon as its file is there.

    `begin` is called before a cell is measured, `waiting` twice a second meanwhile.

    A process that finds a group in use waits until the other one has ended, in any way. Results that the new one
    supersedes are moved into OLD. Raises OSError for the folder.
    """
    for group, cells in groupby(points, key=lambda point: point.group):
        with _locked(folder / "locks" / group.id, waiting):
            for point in cells:
                if not is_done(folder, point):
                    begin(point)
                    write_json(measure(point, command=command, waiting=waiting), file_of(folder, point))
                for path in superseded(folder, point):
                    (folder / OLD).mkdir(exist_ok=True)
                    path.replace(folder / OLD / path.name)
                yield point


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        while True:
            try:
                lock_file(file)
                break
            except BlockingIOError:
                waiting()
                time.sleep(LOOK_EVERY)
        yield


def measure(point: Point, *, command: str = "", waiting: Callable[[], None] = lambda: None) -> Report:
    """Return the report of one cell; if it cannot be measured, its row has an `error`.

    A cell during which the code or the machine changed has died: it is measured again.
    """
    try:
        cell = point.cell()
        if point.task == GENERATE:
            given = {name: value for name, value in point.settings if name in ("repeats", "compare")}
            report = measure_cell(cell, **given, command=command, waiting=waiting)
        else:
            report = new_report("caches", [cell], command=command, plan=_kind_plan(point, cell))
            groups = [Group((replace(job, of_cell=True),)) for job in kind_jobs(cell, 0, report["plan"])]
            Run(report, groups, waiting=lambda _: waiting()).measure()
    except ValueError as why:
        known = Cell(model=point.model, input_len=point.context, batch_size=point.batch)
        kind = {"kv_caching": False} if point.kind == OFF else {"kv_cache": point.kind}
        report = new_report("cell", [known.but(**kind)], command=command)
        cell_row(report, 0)["error"] = f"{'died' if isinstance(why, OtherSetup) else 'refused'}: {why}"
    if point.inputs not in ("", inputs_of(point, code_digest(), content_digest)):
        cell_row(report, 0)["error"] = "died: the code, or a file that the cell reads, was edited during the run"
    report["plan"] = {**report["plan"], "sweep": point._asdict()}
    return report


def _kind_plan(point: Point, cell: Cell) -> dict[str, Any]:
    """Return what is measured of a kind at one context, for `kind_jobs`."""
    source, asked = find_model(cell), dict(point.settings)
    if point.task == "costs":
        return {"contexts": check_contexts([point.context], source.args.max_seq_len)}
    if point.task == "quality":
        scored = min(MOST_SCORED, point.context // 2)
        if scored < FEWEST:
            raise ValueError(f"context={point.context} is too short: a kind is judged on texts of {2 * FEWEST} tokens")
        text = asked.get("text", OWN_TEXT)
        length = min(point.context, text_plan(source, text, point.context - scored)["length"])
        needles = [point.context] if point.context in NEEDLE_CONTEXTS else []
        greedy = asked.get("greedy_tokens", MOST_GREEDY)
        return quality_plan(text, length, scored, greedy=greedy, needle_lengths=needles, needles=20)
    return {"tasks": plan_tasks(source, [point.task], [point.context], asked.get("samples"), cell.seed)}
