"""What each preset measures: its cells, and the jobs that measure them. `llama.bench.plan` runs any of them.

`table`: batch 1, 8 and 16 with the cache on and off.
`caches`: kinds of cache beside the full one. `chat`: a conversation, prompts that begin alike, and a saved session.
`report`: what a student hands in, the table with four texts and the peaks of code that computes all logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama.args import ModelArgs
from llama.bench.cell import FULL, Cell, read_engine
from llama.bench.run.cache_kind import OWN_TEXT, STEPS, text_ids
from llama.bench.run.conversation import turns_of
from llama.bench.run.engines import Source
from llama.bench.run.memory_ledger import check_length
from llama.bench.run.models import check_cell, engine_class, find_model, has_rounded_weights, read_by, with_code
from llama.bench.run.step_times import context_lengths
from llama.bench.run.tasks import plan_tasks
from llama.bench.schema import TEXTS, Report, new_report
from llama.bench.texts import read_dialog
from llama.costs import RELEASED, token_forwards
from llama.host.version import content_digest
from llama.kv_cache import Cache, KVCache, cache_kind
from llama.kv_cache.window import DEFAULT_SINKS
from llama.tokenizer import Tokenizer

BATCHES = (1, 8, 16)
AGREED_ON = 1024  # tokens of a text: 1 % of them is 10
KIND_CONTEXTS = (1024, 8192)
WINDOW = 1024  # positions of the kind `window` if none are given: its default stores a whole text
LENGTH, SCORED, GREEDY = 2048, 256, 64  # tokens of the text at whose end a kind is judged, scored, and made greedily
MOST_SCORED = 1024  # behind a prompt of a length that the user chose
FEWEST = 32  # scored tokens that judge a kind
NEEDLE_LENGTHS, NEEDLES = (256,), 5
RECORDING: dict[str, Any] = {"prompt": "Once upon a time", "steps": 32}  # the generation of a page
TEXT_LENGTH = 16  # tokens behind each prompt of a report: without a cache more would take a minute on a busy machine
SHARED_ROWS, SHARED, OWN = 16, 1000, 30  # prompts that begin alike, and their tokens


@dataclass(frozen=True)
class Job:
    """One process of `llama.bench.run.worker`, which returns rows of one cell of the report.

    work: in any unit, to compare jobs that are alike: one of twice the work is expected to take twice as long.
    """

    name: str
    kind: str
    cell: Cell
    place: int  # the index of the report's cell
    work: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    of_cell: bool = True  # the cell fails with this job, unless it has figures


@dataclass(frozen=True)
class Group:
    """Jobs whose figures are only meaningful together: run all of them or none."""

    jobs: tuple[Job, ...]
    repeats: bool = False  # run again while the budget lasts
    late: bool = False  # run only after the other groups and their first repetitions


Planned = tuple[list[Cell], dict[str, Any], list[Group]]  # cells, what is measured beside them, and jobs in their order


def plan_report(
    preset: str, base: Cell, *, watched: bool = False, command: str = "", budget: float | None = None, **asked: Any
) -> tuple[Report, list[Group]]:
    """Return the report of a preset in which nothing is measured, and its groups of jobs.

    watched: record a generation behind the first group, for the page. asked: the arguments of the preset's own plan.
    Raises ValueError if it cannot be measured.
    """
    if preset != "table" and base.ranks > 1:
        raise ValueError(f"--preset={preset} measures one process; start it without torchrun")
    cells, plan, groups = PRESETS[preset](find_model(base), base, **asked)
    files = [name for name in (asked.get("text"), *asked.get("tasks", ())) if name is not None and Path(name).is_file()]
    plan["inputs"] = content_digest(*read_by(base, *files))
    if watched:
        page = Job("the page to step through", "page", watched_cell(base), 0, options=RECORDING, of_cell=False)
        groups.insert(1, Group((page,)))
    return new_report(preset, cells, command=command, budget_minutes=budget, plan=plan), groups


def checked(cells: Sequence[Cell], base: Cell, args: ModelArgs | None = None) -> list[Cell]:
    """Return cells with the digests of their code. Raises ValueError for wrong modes, and lengths over `args`."""
    for cell in cells:
        check_cell(cell)
        if cell.from_file != base.from_file:
            find_model(cell)  # raises ValueError if there is no such file
        if args is not None:
            check_length(cell, args)
    return [with_code(cell) for cell in cells]


def watched_cell(cell: Cell) -> Cell:
    """Return the cell of the generation that a page shows, always on the plain path."""
    return cell.but(engine="llama", fast=False, exact=False, batch_size=1, text=None)


def paired(jobs: Sequence[Job]) -> list[Group]:
    """Return jobs of cells in groups that differ in the cache or in guesses, the smallest batch and least work first.

    The first group stays first.
    """
    found: dict[Cell, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.cell.but(kv_caching=True, speculate=None), []).append(job)
    first, *rest = (Group(tuple(group), repeats=True) for group in found.values())
    return [first, *sorted(rest, key=lambda one: (one.jobs[0].cell.batch_size, sum(job.work for job in one.jobs)))]


def cell_jobs(cells: Sequence[Cell]) -> list[Job]:
    """Return the job that measures one repetition of each cell; its work is the tokens that are fed."""
    return [Job(cell.name, "cell", cell, place, work_of(cell)) for place, cell in enumerate(cells)]


def work_of(cell: Cell) -> int:
    sizes = {"input_len": cell.input_len, "output_len": cell.output_len}
    return cell.batch_size * token_forwards(**sizes, kv_caching=cell.kv_caching)


# ---- the table, and what a student hands in --------------------------------------------------------------------------


def plan_table(source: Source, base: Cell, *, engines: Sequence[str] = ()) -> Planned:
    """Plan the cells in pairs, how often rounded weights agree with float32, and, late, steps by context.

    engines: peers and modes of ours, such as llama.cpp:int8 and llama:fast; see `read_engine`.
    """
    cells = checked(table_cells(base, engines), base, source.args)
    length = min(AGREED_ON, source.args.max_seq_len - 1)
    late, options = list[Group](), {"contexts": context_lengths(base.input_len)}
    for batch in BATCHES:
        asked = cells[0].but(batch_size=batch, kv_caching=True)
        steps = Job(f"steps at batch {batch}", "steps", asked, 0, batch, options, of_cell=False)
        late.append(Group((steps,), late=True))
    agreed = [Group((job,)) for job in agreement_jobs(cells, length)]
    return cells, {"agreed_on": length}, [*paired(cell_jobs(cells)), *agreed, *late]


def agreement_jobs(cells: Sequence[Cell], length: int) -> Iterator[Job]:
    """Yield a job for each rounding of weights: how often it agrees with float32. Random weights have none."""
    seen = set()
    for place, cell in enumerate(cells):
        if has_rounded_weights(cell) and cell.model not in RELEASED and cell.rounding not in seen:
            seen.add(cell.rounding)
            asked = cell.but(batch_size=1, input_len=length, output_len=1, kv_caching=True, text=None)
            yield Job(f"top-1 of {asked.name}", "agreement", asked, place, of_cell=False)


def plan_hand_in(source: Source, base: Cell, *, prompts: Sequence[str]) -> Planned:
    """Plan the texts of a report, the first pair of its table, peaks and its page, and the other pairs."""
    cells = checked(table_cells(base, ()), base, source.args)
    texts: dict[str, Any] = {"prompts": [*prompts], "length": TEXT_LENGTH}
    of_texts = Job(TEXTS, "texts", cells[0], 0, options=texts, of_cell=False)
    every = cells[0].but(logits="all")
    peaks = Job("peaks and a page", "page", every, 0, options={**RECORDING, "peaks": True}, of_cell=False)
    first, *others = paired(cell_jobs(cells))
    return cells, {"prompts": [*prompts]}, [Group((of_texts,)), first, Group((peaks,)), *others]


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


# ---- kinds of cache --------------------------------------------------------------------------------------------------


def plan_kinds(
    source: Source,
    base: Cell,
    *,
    kinds: Sequence[str] = (),
    contexts: Sequence[int] = (),
    text: str | None = None,
    prompt_len: int | None = None,
    tasks: Sequence[str] = (),
    samples: int | None = None,
) -> Planned:
    """Plan the tasks that the user named, the quality of every kind, and then bytes and times by context.

    kinds: by default all that are registered. contexts: lengths at which steps are timed, by default KIND_CONTEXTS.
    text, prompt_len: as in `text_plan`. tasks, samples: see `plan_tasks`.
    """
    cells, limit = checked(kind_cells(base, kinds, source.args), base), source.args.max_seq_len
    lengths = check_contexts(contexts, limit) or [one for one in KIND_CONTEXTS if one <= limit] or [limit]
    plan = {"contexts": lengths, **text_plan(source, text or OWN_TEXT, prompt_len)}
    plan["tasks"] = plan_tasks(source, tasks, lengths, samples, base.seed)
    return cells, plan, list(kind_groups(cells, plan))


def kind_groups(cells: Sequence[Cell], plan: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the jobs of all kinds: a task of all together, else the full cache and the first kind, and each other."""
    for jobs in zip(*(kind_jobs(cell, place, plan) for place, cell in enumerate(cells)), strict=True):
        together = 2 if jobs[0].of_cell else len(jobs)
        yield from [Group(jobs[:together]), *(Group((job,)) for job in jobs[together:])]


def kind_jobs(cell: Cell, place: int, plan: Mapping[str, Any]) -> Iterator[Job]:
    """Yield the jobs that measure a kind, as far as a plan has them: each task, its quality, and its costs.

    A task is answered with the question seen and not.
    """
    for task in plan.get("tasks", ()):
        name = task["task"] if task["context"] is None else f"{task['task']} at {task['context']:,} tokens"
        work = task["tokens"] + task["steps"]
        yield Job(f"{cell.kv_cache}: {name}", "cache_task", cell, place, work, {"plan": task}, of_cell=False)
    if "text" in plan:
        yield Job(f"{cell.kv_cache}: quality", "cache_quality", cell, place, options={"plan": plan})
    if "contexts" in plan:
        options = {"contexts": plan["contexts"]}
        yield Job(f"{cell.kv_cache}: bytes and times", "cache_costs", cell, place, options=options)


def kind_cells(base: Cell, kinds: Sequence[str], args: ModelArgs) -> list[Cell]:
    """Return a cell for each kind of cache, the full one first."""
    window = f"window:{min(WINDOW, args.max_seq_len // 4)}+{DEFAULT_SINKS}"
    registered = [window if kind == "window" else kind for kind in sorted(KVCache.kinds)]
    wanted = [FULL, *(kind for kind in kinds or registered if kind != FULL)]
    for place, kind in enumerate(wanted):
        if kind in wanted[:place]:
            raise ValueError(f"--kv_cache {kind} would be in the table twice; name every kind once")
        Cache.of(args, cache_kind(kind))
    return [base.but(kv_cache=kind) for kind in wanted]


def check_contexts(asked: Sequence[int], limit: int) -> list[int]:
    """Return the lengths, each once; raise ValueError for one with too few tokens, or more than the model's limit."""
    for context in asked:
        if not 2 * STEPS <= context <= limit:
            raise ValueError(
                f"--contexts {context} must be from {2 * STEPS} to the model's max_seq_len={limit}; for longer texts "
                "measure a model with a higher limit, such as --model llama-3.2-1b"
            )
    return sorted({*asked})


def text_plan(source: Source, text: str, prompt_len: int | None) -> dict[str, Any]:
    """Return the text that kinds are judged on, how many tokens of it, and how many of these are scored.

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
    length = min(longest, LENGTH if prompt_len is None else prompt_len + MOST_SCORED)
    scored = min(SCORED, length // 2) if prompt_len is None else length - prompt_len
    needles = [length for length in NEEDLE_LENGTHS if length <= limit]
    return quality_plan(text, length, scored, greedy=GREEDY, needle_lengths=needles, needles=NEEDLES)


def quality_plan(
    text: str, length: int, scored: int, *, greedy: int, needle_lengths: Sequence[int], needles: int
) -> dict[str, Any]:
    """Return the arguments of `llama.bench.run.cache_kind.cache_quality`."""
    plan = {"text": text, "length": length, "tokens": scored, "greedy_tokens": min(greedy, scored)}
    return {**plan, "needle_lengths": [*needle_lengths], "needles": needles}


# ---- a conversation --------------------------------------------------------------------------------------------------


def plan_chat(source: Source, base: Cell, *, engines: Sequence[str] = ()) -> Planned:
    """Plan the conversations of each engine in both modes, and the prompts that begin alike."""
    cells, plan = chat_cells(base, engines, source.tokenizer, source.args.max_seq_len)
    cells = checked(cells, base)
    kinds = ["conversation" if cell.batch_size == 1 else "prompts" for cell in cells]
    jobs = [Job(cell.name, kinds[n], cell, n, options={"plan": plan}) for n, cell in enumerate(cells)]
    return cells, plan, paired(jobs)


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


PRESETS: dict[str, Callable[..., Planned]] = {
    "table": plan_table,
    "caches": plan_kinds,
    "chat": plan_chat,
    "report": plan_hand_in,
}


def cells_of(report: Report) -> list[Cell]:
    """Return what was asked for."""
    return [Cell(**cell) for cell in report["cells"]]
