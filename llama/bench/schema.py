"""What a benchmark writes down, from one repetition to a whole report: the shape of its JSON, and the blank forms.

docs/benchmark_json.md describes it field by field. Times are seconds, sizes bytes, shares 0 to 1; None stands where a
machine or an engine does not tell.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, cast

from llama.bench.cell import Cell
from llama.host.machine import Ceilings

SCHEMA = "llama-kv/benchmark/1"

Status = Literal["ok", "violated", "disturbed", "not observed"]


class Spread(TypedDict):
    """A figure with its count: `n` values, and the values under which 10 %, half and 90 % of them lie."""

    n: int
    median: float
    p10: float
    p90: float


class Sample(TypedDict):
    """One repetition; allocated are the bytes in tensors, which on a CPU are traced in the first repetition alone."""

    seconds: float
    first_token_seconds: float
    step_seconds: list[float]
    peak_resident_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_bytes: int | None
    other_load_cores: float | None


class Point(TypedDict):
    """One point of the validity block; `detail` says what was seen."""

    name: str
    status: Status
    detail: str


class Line(TypedDict):
    """One line of the memory ledger; `counts` tells whether it is there at the moment of the peak."""

    name: str
    predicted: int
    measured: int | None
    counts: bool
    note: str


class Ledger(TypedDict):
    """Predicted against measured. `measured_by` names where `measured_peak` comes from; resident is the process."""

    moment: str
    lines: list[Line]
    predicted_peak: int
    measured_peak: int | None
    measured_by: str
    residual: int | None
    resident_before_model: int | None
    resident_peak: int | None
    resident_residual: int | None


class Work(TypedDict):
    """What the job asks of any machine, over all rows; the step is the middle one."""

    token_forwards: int
    flops: int
    bytes: int
    prefill_flops: int
    step_flops: int
    step_bytes: int


class RooflineShares(TypedDict):
    """Which shares of the measured ceilings prefill and the middle step reach, and what holds the step back."""

    prefill_flops_share: float
    step_flops_share: float
    step_bandwidth_share: float
    bound_by: str


class Summary(TypedDict):
    """A cell's figures over all its repetitions; tokens per second are those of the medians."""

    seconds: Spread
    first_token_seconds: Spread
    step_seconds: Spread | None
    peak_bytes: Spread | None
    resident_bytes: Spread | None
    tokens_per_second: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None


class CellRecord(TypedDict):
    """One cell: what was asked for, each repetition, and what follows; `error` where it died before its first."""

    cell: dict[str, Any]
    path: str
    samples: list[Sample]
    summary: Summary | None
    weights_bytes: int | None
    cache_bytes: int | None
    ids: list[list[int]]
    text: str
    points: list[Point]
    notes: list[str]
    ledger: Ledger | None
    work: Work | None
    limits: RooflineShares | None
    error: str | None


class Divergence(TypedDict):
    """Where two texts part: `margin` is the gap between the two largest logits there, without the cache."""

    row: int
    token: int
    cached_id: int
    uncached_id: int
    margin: float | None


class Comparison(TypedDict):
    """The ids with the cache on against those with it off, over `tokens` tokens."""

    engine: str
    path: str
    batch_size: int
    tokens: int
    equal: bool
    divergence: Divergence | None


class Agreement(TypedDict):
    """How often a way with rounded weights finds the same token the most likely as our float32, over a text."""

    engine: str
    fast: bool
    quantize: str
    activations: int
    path: str
    text: str
    tokens: int
    top1_agreement: float


class StepTimes(TypedDict):
    """How long a step takes that makes one token per row at a context length, in one mode."""

    batch_size: int
    context: int
    kv_caching: bool
    seconds: Spread


class Crossover(TypedDict):
    """From which context on a cached step is the faster one; None where it was at none that was tried."""

    batch_size: int
    context: int | None
    steps: list[StepTimes]


class Growth(TypedDict):
    """How much the cache speeds up a whole generation of so many tokens."""

    generated: int
    cached_seconds: Spread
    uncached_seconds: Spread
    speedup: float


class CacheSize(TypedDict):
    length: int
    predicted: int
    measured: int


class Fit(TypedDict):
    """seconds = base + slope x context, and the exponent p of seconds ~ context^p over the longer half of them."""

    of: Literal["token", "text"]
    kv_caching: bool
    base: float
    slope: float
    exponent: float
    lengths: int
    r_squared: float
    predicted_slope: float | None


class Sweep(TypedDict):
    growth: list[Growth]
    cache: list[CacheSize]
    contexts: list[StepTimes]
    batches: list[StepTimes]
    fits: list[Fit]


class CachesPlan(TypedDict):
    """How the quality of kinds of cache is measured: as much of it as the budget has room for, and the text allows."""

    prompt_len: int
    tokens: int
    greedy_tokens: int
    needle_lengths: list[int]
    needle_seeds: int


class Parting(TypedDict):
    """Where the greedy text of a kind leaves the full cache's: `margin` is the gap of the latter's largest logits."""

    token: int
    full_id: int
    kind_id: int
    margin: float


class NeedleRecall(TypedDict):
    """How many of the needles in texts of so many tokens were found."""

    length: int
    tries: int
    found: int


class CacheQuality(TypedDict):
    """A kind of cache against the full one on the same tokens, in nats; `parting` is None where there is none.

    bytes: what the caches held at the end of each text: the greedy one, the scored one, and those that hide needles.
    """

    path: str
    bytes: list[CacheSize]
    tokens: int
    mean_kl: float
    top1_agreement: float
    reference_nll: float
    nll: float
    greedy_tokens: int
    parting: Parting | None
    needles: list[NeedleRecall]


class KindRecord(TypedDict):
    """One kind of cache: bytes and step times by context, and its quality; `error` where something was not measured.

    saves: whether the kind predicts fewer bytes for a long text than the full cache. widens: whether it stores a
    position in fewer bytes than its keys and values take where they are read. None where it was not measured.
    """

    kind: str
    lossless: bool | None
    saves: bool | None
    widens: bool | None
    path: str
    bytes: list[CacheSize]
    steps: list[StepTimes]
    quality: CacheQuality | None
    error: str | None


class Caches(TypedDict):
    """Kinds of cache side by side, in the order of the report's cells; the first is the full one."""

    text: str
    contexts: list[int]
    plan: CachesPlan | None
    kinds: list[KindRecord]


WayName = Literal["kept", "anew", "off", "shared", "not shared"]


class TurnLength(TypedDict):
    history: int
    new: int


class ChatPlan(TypedDict):
    """The work of the preset `chat`: of each turn how many tokens stand before it and are new, and the prompts."""

    text: str
    turns: list[TurnLength]
    rows: int
    shared: int
    own: int


class Way(TypedDict):
    """One way to do the work of a cell, turn by turn; the prompts are done at once, as one turn.

    name: kept, anew or off; shared or not shared. seconds: to the first token, of every turn a number a repetition.
    fed: how many tokens were seen going through the model, and asked: how many the way should feed. ids: the first
    tokens of all rows.
    """

    name: WayName
    seconds: list[list[float]]
    fed: list[int]
    asked: list[int]
    cache_bytes: list[int | None]
    ids: list[list[int]]


class OnDisk(TypedDict):
    """A session of so many tokens saved, loaded, and its text fed anew, a number a repetition.

    alike: whether what was loaded went on as what was saved.
    """

    tokens: int
    file_bytes: int
    save_seconds: list[float]
    load_seconds: list[float]
    feed_seconds: list[float]
    alike: bool


class ChatRecord(TypedDict):
    """What was measured of one cell; other_load_cores: a number a repetition. `disk` is None but for our own cache."""

    path: str
    other_load_cores: list[float | None]
    ways: list[Way]
    disk: OnDisk | None


class Chats(TypedDict):
    """A conversation, and prompts that share their beginning; the records are those of the report's cells, in order."""

    plan: ChatPlan
    records: list[ChatRecord]


class ModelFacts(TypedDict):
    """`parameters` and `sizes` are None for an engine that does not tell."""

    name: str
    weights: str
    parameters: int | None
    sizes: dict[str, Any] | None


class Report(TypedDict):
    """A whole run of the benchmark. `reading`: what follows from its numbers. `failures`: what was not measured."""

    schema: str
    preset: str
    command: str
    started: str
    budget_minutes: float | None
    model: ModelFacts | None
    environment: dict[str, Any]
    ceilings: Ceilings | None
    cells: list[CellRecord]
    comparisons: list[Comparison]
    agreements: list[Agreement]
    crossovers: list[Crossover]
    sweep: Sweep | None
    caches: Caches | None
    chat: Chats | None
    reading: list[str]
    failures: list[str]


def new_record(cell: Cell) -> CellRecord:
    """Return the record of a cell that nothing is known of yet."""
    blank: dict[str, Any] = dict.fromkeys(CellRecord.__annotations__)
    blank |= {"cell": cell.as_json(), "path": "plain", "text": ""}
    return cast(CellRecord, blank | {name: [] for name in ("samples", "ids", "points", "notes")})


def new_report(preset: str, cells: Sequence[Cell], *, command: str = "", budget_minutes: float | None = None) -> Report:
    """Return a report, begun now, in which nothing has been measured yet."""
    blank: dict[str, Any] = dict.fromkeys(Report.__annotations__)
    blank |= {name: [] for name in ("comparisons", "agreements", "crossovers", "reading", "failures")}
    blank |= {"schema": SCHEMA, "preset": preset, "command": command, "budget_minutes": budget_minutes}
    blank |= {"started": datetime.now().astimezone().isoformat(timespec="seconds"), "environment": {}}
    return cast(Report, blank | {"cells": [new_record(cell) for cell in cells]})
