"""What each preset measures: its cells, and the jobs that measure them. `llama.bench.plan` runs any of them.

`table`: batch 1, 8 and 16 with the cache on and off.
`caches`: kinds of cache beside the full one. `chat`: a conversation, prompts that begin alike, and a saved session.
`report`: what a student hands in, the table with four texts and the peaks of code that computes all logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llama.args import ModelArgs
from llama.bench.cell import FULL, Cell, read_engine
from llama.bench.run.cache_kind import OWN_TEXT, STEPS, text_ids
from llama.bench.run.conversation import turns_of
from llama.bench.run.engines import Source
from llama.bench.run.memory_ledger import check_length
from llama.bench.run.models import check_cell, engine_class, find_model, has_rounded_weights, read_by, with_code
from llama.bench.run.step_times import ENOUGH, context_lengths
from llama.bench.run.tasks import plan_tasks
from llama.bench.schema import Report, measured_rows, new_report
from llama.bench.texts import read_dialog
from llama.costs import RELEASED, forwards
from llama.host.version import content_digest
from llama.kv_cache import Cache, KVCache, cache_kind
from llama.kv_cache.window import DEFAULT_SINKS
from llama.tokenizer import Tokenizer

BATCHES = (1, 8, 16)
AGREED_ON = 1024  # tokens of a text: 1 % of them is 10
KIND_CONTEXTS = (1024, 8192)
WINDOW = 1024  # positions of the kind `window` if none are given: its default stores a whole text
LENGTH = 2048  # tokens of the text at whose end a kind is judged
NEEDLE_LENGTHS = (256, 512, 1024)
NEEDLE_STEPS = 8  # the most tokens of a needle's answer
# From the most to the least: scored tokens at the end of the text, greedy tokens, lengths and number of the needles.
AMOUNTS: tuple[tuple[int, int, int, int], ...] = (
    (1024, 256, len(NEEDLE_LENGTHS), 20),
    (1024, 256, len(NEEDLE_LENGTHS), 5),
    (512, 256, len(NEEDLE_LENGTHS), 5),
    (256, 128, 2, 5),
    (128, 64, 1, 5),
    (32, 32, 0, 0),
    (32, 0, 0, 0),
)
FEWEST = AMOUNTS[-1][0]  # scored tokens that judge a kind
RECORDING, WATCHED_STEPS, WATCHED_PROMPT = "the page to step through", 32, "Once upon a time"
REPORT_LENGTHS = (32, 16, 8)  # tokens behind each prompt of a report, and steps of its page: as many as fit
SHARED_ROWS, SHARED, OWN = 16, 1000, 30  # prompts that begin alike, and their tokens

STARTING = 4.0  # seconds of a process before it loads a model, and at its end for the ceilings, on an idle machine
SPARED = 0.2  # of the budget, for quality that takes longer than predicted: all kinds must have the same text
PEER_IS_SLOWER = 2.0  # assumed of an engine before its first cell


@dataclass(frozen=True)
class Calibration:
    """The timed pieces that predictions are made of: loading, a prefill, and a step of one row and of many rows."""

    max_seq_len: int
    input_len: int
    load_seconds: float
    prefill_seconds: float
    step_seconds: float
    many_rows: int
    many_seconds: float
    start_seconds: float = 0.0  # of a process, as the first one took: on a busy machine many times STARTING
    scatter: float = 1.0  # the longest of equal pieces over the shortest

    def of_tokens(self, tokens: int) -> float:
        """Predict the seconds of a process that loads the model and feeds it so many tokens, many at a time."""
        return max(STARTING, self.start_seconds) + self.load_seconds + tokens * self.prefill_seconds / self.input_len

    def of_forwards(self, cell: Cell) -> list[float]:
        """Predict the seconds of every forward of a cell of ours."""
        slope = (self.many_seconds - self.step_seconds) / max(1, self.many_rows - 1)
        step = self.step_seconds + slope * (cell.batch_size - 1)
        token = cell.batch_size * self.prefill_seconds / self.input_len
        fed = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
        return [max(step, seqlen * token) for _, seqlen in fed]


@dataclass(frozen=True)
class Job:
    """One process of `llama.bench.run.worker`, which returns rows of one cell of the report."""

    name: str
    kind: str
    cell: Cell
    place: int  # the index of the report's cell
    seconds: float  # predicted for an idle machine
    options: dict[str, Any] = field(default_factory=dict)
    of_cell: bool = True  # the cell fails with this job, unless it has figures


@dataclass(frozen=True)
class Group:
    """Jobs whose figures are only meaningful together: run all of them or none."""

    jobs: tuple[Job, ...]
    repeats: bool = False  # run again while the budget lasts
    late: bool = False  # run only after the other groups and their first repetitions


# ---- reports ---------------------------------------------------------------------------------------------------------


def plan_report(
    preset: str,
    base: Cell,
    *,
    engines: Sequence[str],
    kinds: Sequence[str],
    contexts: Sequence[int] = (),
    text: str | None = None,
    prompt_len: int | None = None,
    tasks: Sequence[str] = (),
    samples: int | None = None,
    prompts: Sequence[str] = (),
    command: str = "",
    budget: float | None,
) -> Report:
    """Return the report of a preset in which nothing is measured. Raises ValueError if it cannot be measured.

    engines: peers and modes of ours, such as llama.cpp:int8 and llama:fast; see `read_engine`.
    kinds: kinds of cache for `caches`, by default all that are registered.
    contexts: lengths at which `caches` times steps, by default KIND_CONTEXTS.
    text: the file on whose text `caches` judges kinds.
    prompt_len: tokens of that text that are fed in one pass before the scored ones, by default all but those of LENGTH.
    tasks, samples: what `caches` judges kinds by beside that text, see `plan_tasks`.
    prompts: those that `report` continues in both modes.
    """
    if preset in ("caches", "chat", "report") and base.ranks > 1:
        raise ValueError(f"--preset={preset} measures one process; start it without torchrun")
    plan: dict[str, Any] = {}
    source = find_model(base)
    if preset in ("table", "report"):
        cells = table_cells(base, engines)
        if preset == "report":
            plan = {"prompts": [*prompts]}
    elif preset == "caches":
        cells, plan = kind_cells(base, kinds, contexts, source.args)
        plan |= text_plan(source, text or OWN_TEXT, prompt_len)
        plan["tasks"] = plan_tasks(source, tasks, plan["contexts"], samples, base.seed)
    else:
        cells, plan = chat_cells(base, engines, source.tokenizer, source.args.max_seq_len)
    cells = [with_code(cell) for cell in cells]
    for cell in cells:
        check_cell(cell)
        if cell.from_file != base.from_file:
            find_model(cell)  # raises ValueError if there is no such file
        if preset in ("table", "report"):
            check_length(cell, source.args)
    files = [name for name in (text, *tasks) if name is not None and Path(name).is_file()]
    plan["inputs"] = content_digest(*read_by(base, *files))
    return new_report(preset, cells, command=command, budget_minutes=budget, plan=plan)


def table_cells(base: Cell, engines: Sequence[str]) -> list[Cell]:
    """Return the cells of the table: every batch size with the cache on and off, of our own and of every engine."""
    return [cell.but(batch_size=batch) for batch in BATCHES for cell in variants(base, engines)]


def variants(base: Cell, engines: Sequence[str]) -> list[Cell]:
    """Return the base cell and one for each engine, with the cache on and, if the engine can run without it, off.

    If the base cell speculates, each cell of ours with the cache on stands there with guesses, too.
    Raises ValueError for an engine that is named twice.
    """
    plain = base.but(speculate=None)
    found = [plain]
    for engine in engines:
        variant = plain.but(**read_engine(engine))
        if variant in found:
            raise ValueError(
                f"--engine {engine} would be in the table twice: this library, as the other flags set it, is always "
                "in it, and each other engine once; leave this --engine out"
            )
        found.append(variant)
    cells = []
    for on in (one.but(kv_caching=True) for one in found):
        guessed = [on.but(speculate=base.speculate)] if base.speculate and on.engine == "llama" else []
        off = [] if engine_class(on.engine).always_cached else [on.but(kv_caching=False)]
        cells += [on, *guessed, *off]
    return cells


def kind_cells(
    base: Cell, kinds: Sequence[str], asked: Sequence[int], args: ModelArgs
) -> tuple[list[Cell], dict[str, Any]]:
    """Return a cell for each kind of cache, the full one first, and at which lengths they are measured.

    Raises ValueError for a context that was asked for and has too few tokens, or more than the model's limit.
    """
    limit = args.max_seq_len
    window = f"window:{min(WINDOW, limit // 4)}+{DEFAULT_SINKS}"
    registered = [window if kind == "window" else kind for kind in sorted(KVCache.kinds)]
    wanted = [FULL, *(kind for kind in kinds or registered if kind != FULL)]
    for place, kind in enumerate(wanted):
        if kind in wanted[:place]:
            raise ValueError(f"--kv_cache {kind} would be in the table twice; name every kind once")
        Cache.of(args, cache_kind(kind))
    for context in asked:
        if not 2 * STEPS <= context <= limit:
            raise ValueError(
                f"--contexts {context} must be from {2 * STEPS} to the model's max_seq_len={limit}; for longer texts "
                "measure a model with a higher limit, such as --model llama-3.2-1b"
            )
    contexts = sorted({*asked}) or [context for context in KIND_CONTEXTS if context <= limit] or [limit]
    return [base.but(kv_cache=kind) for kind in wanted], {"contexts": contexts}


def text_plan(source: Source, text: str, prompt_len: int | None) -> dict[str, Any]:
    """Return the text that kinds are judged on, and how much of it the prompt and the scored tokens may be at most.

    Raises ValueError if the model's limit or the text is too short, and OSError for the file.
    """
    limit = source.args.max_seq_len
    if limit < 2 * FEWEST:
        raise ValueError(
            f"--preset=caches needs texts of {2 * FEWEST} tokens, and the model's max_seq_len is {limit}; measure "
            "another model"
        )
    there = len(text_ids(source, text))
    if there < 2 * FEWEST:
        raise ValueError(f"--text {text} has {there} tokens, and kinds are judged on at least {2 * FEWEST}")
    longest = min(limit, there)
    if prompt_len is not None and not 1 <= prompt_len <= longest - FEWEST:
        raise ValueError(
            f"--prompt_len={prompt_len} must be from 1 to {longest - FEWEST}: the text has {there} tokens, the model's "
            f"max_seq_len is {limit}, and at least {FEWEST} tokens are scored behind the prompt"
        )
    length = LENGTH if prompt_len is None else prompt_len + AMOUNTS[0][0]
    return {"text": text, "prompt_len": prompt_len, "longest": min(length, longest)}


def chat_cells(
    base: Cell, engines: Sequence[str], tokenizer: Tokenizer, max_seq_len: int
) -> tuple[list[Cell], dict[str, Any]]:
    """Return cells for each engine's conversation in both modes and for the prompts of ours, and what they feed.

    A short model gets as many turns of the conversation as fit. Raises ValueError if these are fewer than two.
    """
    turns = turns_of(tokenizer, read_dialog())
    question = len(turns[0].prompt) - turns[0].history  # fed behind the last turn to the session from disk
    fit = [turn for turn in turns if len(turn.whole) + question < max_seq_len]
    if len(fit) < 2:
        raise ValueError(
            f"--preset=chat replays a conversation, two turns of which have {len(turns[1].whole)} tokens, and the "
            f"model's max_seq_len is {max_seq_len}; measure another model"
        )
    own = min(OWN, max_seq_len // 4)
    shared = min(SHARED, max_seq_len - own - 1)
    plan = {
        "text": "llama/bench/texts/conversation.json",
        "turns": [{"history": turn.history, "new": len(turn.prompt) - turn.history} for turn in fit],
        "rows": SHARED_ROWS,
        "shared": shared,
        "own": own,
    }
    length = len(fit[-1].prompt)
    cells = variants(base.but(batch_size=1, input_len=length, output_len=1), engines)
    ours = [cell for cell in cells if cell.engine == "llama" and cell.kv_caching]
    return cells + [cell.but(batch_size=SHARED_ROWS, input_len=shared + own) for cell in ours], plan


# ---- jobs ------------------------------------------------------------------------------------------------------------


def paired(jobs: Sequence[Job]) -> list[Group]:
    """Return jobs of cells in groups that differ in the cache or in guesses, the smallest batch and the shortest first.

    The first group stays first.
    """
    found: dict[Cell, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.cell.but(kv_caching=True, speculate=None), []).append(job)
    first, *rest = (Group(tuple(group), repeats=True) for group in found.values())
    return [first, *sorted(rest, key=lambda one: (one.jobs[0].cell.batch_size, sum(job.seconds for job in one.jobs)))]


def table_groups(report: Report, known: Calibration, left: Callable[[], float]) -> Iterator[Group]:
    """Yield the cells in pairs, how often rounded weights agree with float32, and, late, steps by context."""
    cells = cells_of(report)
    yield from paired([cell_job(place, cell, known) for place, cell in enumerate(cells)])
    seen = set()
    for place, cell in enumerate(cells):
        # Random weights find all tokens about equally likely.
        if not has_rounded_weights(cell) or cell.model in RELEASED or cell.rounding in seen:
            continue
        seen.add(cell.rounding)
        length = min(AGREED_ON, known.max_seq_len - 1)
        asked = cell.but(batch_size=1, input_len=length, output_len=1, kv_caching=True, text=None)
        seconds = 2 * known.of_tokens(length)
        yield Group((Job(f"top-1 of {asked.name}", "agreement", asked, place, seconds, of_cell=False),))
    if cells[0].engine == "llama":
        for batch in dict.fromkeys(cell.batch_size for cell in cells):
            yield replace(steps_group(cells[0], batch, context_lengths(cells[0].input_len), known), late=True)


def report_groups(report: Report, known: Calibration, left: Callable[[], float]) -> Iterator[Group]:
    """Yield the first pair of the table, the peaks and the page of a report, and the other pairs.

    The texts come before: they are made where the pieces of predictions are timed.
    """
    cells = cells_of(report)
    first, *others = paired([cell_job(place, cell, known) for place, cell in enumerate(cells)])
    yield first
    cell = cells[0].but(logits="all")
    for steps in REPORT_LENGTHS:
        recorded = recording_job(cell, known, most=steps)
        seconds = known.of_tokens(3 * cell.total_len) + recorded.seconds - known.of_tokens(0)
        if 2 * seconds <= left():  # a job that the budget ends has no rows: allow twice the predicted time
            break
    options = {"watched": recorded.options}
    yield Group((Job("peaks and a page", "hand_in", cell, 0, seconds, options, of_cell=False),))
    yield from others


def recording_job(watched: Cell, known: Calibration, *, most: int | None = None) -> Job:
    """Return the job that records WATCHED_STEPS steps, or `most`, for the page: twice with the cache, once without."""
    steps = min(WATCHED_STEPS, most or WATCHED_STEPS)
    plain = watched.but(engine="llama", fast=False, exact=False, batch_size=1, text=None)
    cells = (plain.but(input_len=4, output_len=steps, kv_caching=on) for on in (True, True, False))
    seconds = known.of_tokens(0) + sum(sum(known.of_forwards(cell)) for cell in cells)
    options = {"prompt": WATCHED_PROMPT, "steps": steps}
    return Job(RECORDING, "watch", plain, 0, seconds, options, of_cell=False)


def steps_group(cell: Cell, batch: int, contexts: Sequence[int], known: Calibration) -> Group:
    """Return the job that times steps at these contexts: each warms up, and is timed at least three times."""
    seconds = known.of_tokens(4 * batch * sum(contexts)) + 2 * ENOUGH * len(contexts)
    asked = cell.but(batch_size=batch, kv_caching=True)
    options = {"contexts": list(contexts)}
    return Group((Job(f"steps at batch {batch}", "steps", asked, 0, seconds, options, of_cell=False),))


def kind_groups(report: Report, known: Calibration, left: Callable[[], float]) -> Iterator[Group]:
    """Yield the tasks that the user named, the quality of every kind, and then bytes and times by context.

    The full cache and the first kind are a pair. All kinds have the same text, which is chosen once: as much as lets
    all of them and the shortest context fit, and if nothing does the fewest tokens that judge.
    """
    plan, kinds = report["plan"], [*enumerate(cells_of(report))]

    def costs(contexts: Sequence[int]) -> float:
        return len(contexts) * 3 * STEPS * known.step_seconds + known.of_tokens(sum(contexts))

    def grouped(jobs: list[Job]) -> Iterator[Group]:
        yield Group(tuple(jobs[:2]))
        yield from (Group((job,)) for job in jobs[2:])

    yield from (task_group(task, kinds, known) for task in plan["tasks"])
    shortest = len(kinds) * costs(plan["contexts"][:1])
    for amount in () if measured_rows(report, "quality") else AMOUNTS:
        choose_text(plan, amount, known.max_seq_len)
        if len(kinds) * quality_seconds(plan, known) + shortest <= (1 - SPARED) * left():
            break
    seconds = quality_seconds(plan, known)
    yield from grouped(
        [Job(f"{cell.kv_cache}: quality", "cache_quality", cell, n, seconds, {"plan": plan}) for n, cell in kinds]
    )
    chosen = bool(measured_rows(report, "step"))
    while len(plan["contexts"]) > 1 and not chosen and len(kinds) * costs(plan["contexts"]) > left():
        plan["contexts"].pop()
    each, options = costs(plan["contexts"]), {"contexts": plan["contexts"]}
    yield from grouped(
        [Job(f"{cell.kv_cache}: bytes and times", "cache_costs", cell, n, each, options) for n, cell in kinds]
    )


def task_group(task: dict[str, Any], kinds: Sequence[tuple[int, Cell]], known: Calibration) -> Group:
    """Return the jobs that answer the samples of a task, with the question seen and not, one for each kind."""
    name = task["task"] if task["context"] is None else f"{task['task']} at {task['context']:,} tokens"
    each, options = known.of_tokens(2 * task["tokens"]) + 2 * task["steps"] * known.step_seconds, {"plan": task}
    jobs = [Job(f"{cell.kv_cache}: {name}", "cache_task", cell, n, each, options, of_cell=False) for n, cell in kinds]
    return Group(tuple(jobs))


def choose_text(plan: dict[str, Any], amount: tuple[int, int, int, int], max_seq_len: int) -> None:
    """Write one of AMOUNTS into the plan of `caches`, as far as the text and the model's limit allow it."""
    (tokens, greedy, lengths, needles), prompt, longest = amount, plan["prompt_len"], plan["longest"]
    plan["tokens"] = min(tokens, longest // 2 if prompt is None else longest - prompt)
    plan["length"] = longest if prompt is None else prompt + plan["tokens"]
    plan["greedy_tokens"] = min(greedy, plan["tokens"])
    plan["needle_lengths"] = [length for length in NEEDLE_LENGTHS[:lengths] if length <= max_seq_len]
    plan["needles"] = needles


def quality_seconds(plan: dict[str, Any], known: Calibration) -> float:
    """Predict the seconds of the quality of a kind: the text is fed twice, and twice again around greedy tokens."""
    needles, greedy = 2 * plan["needles"], plan["greedy_tokens"]  # the question is seen, and is not
    steps = plan["tokens"] + greedy + needles * len(plan["needle_lengths"]) * NEEDLE_STEPS
    whole = (4 if greedy else 2) * plan["length"] + needles * sum(plan["needle_lengths"])
    seconds: float = steps * known.step_seconds + known.of_tokens(whole)
    return seconds


def chat_groups(report: Report, known: Calibration, left: Callable[[], float]) -> Iterator[Group]:
    """Yield the conversations of each engine in both modes, and the prompts that begin alike."""
    plan = report["plan"]
    contexts = [turn["history"] + turn["new"] for turn in plan["turns"]]
    jobs = []
    for place, cell in enumerate(cells_of(report)):
        if cell.batch_size > 1:
            kind, tokens = "prompts", plan["rows"] * (plan["shared"] + 2 * plan["own"]) + plan["shared"]
        else:
            kind, tokens = "conversation", sum(contexts) + (3 * contexts[-1] if cell.kv_caching else 0)
        seconds = known.of_tokens(round(slower(cell) * tokens))
        jobs.append(Job(cell.name, kind, cell, place, seconds, {"plan": plan}))
    yield from paired(jobs)


GROUPS: dict[str, Callable[[Report, Calibration, Callable[[], float]], Iterator[Group]]] = {
    "table": table_groups,
    "caches": kind_groups,
    "chat": chat_groups,
    "report": report_groups,
}


def cells_of(report: Report) -> list[Cell]:
    """Return what was asked for."""
    return [Cell(**cell) for cell in report["cells"]]


def cell_job(place: int, cell: Cell, known: Calibration) -> Job:
    """Return the job that measures one repetition of a cell; the first two forwards run once more, to warm up."""
    seconds = known.of_forwards(cell)
    whole = known.of_tokens(0) + slower(cell) * (sum(seconds) + sum(seconds[:2]))
    return Job(cell.name, "cell", cell, place, whole)


def slower(cell: Cell) -> float:
    """Return how many times our time an engine is assumed to take before it has run."""
    return 1.0 if cell.engine == "llama" else PEER_IS_SLOWER
