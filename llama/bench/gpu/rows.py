"""The figures of a GPU report: plain rows, as its JSON has them. Knows nothing of how they come about."""

from dataclasses import dataclass, field
from typing import Any

from llama.bench.schema import Line, Spread


class NotHere(Exception):
    """A section cannot have figures here; the message says why."""


@dataclass(frozen=True)
class Check:
    """A fast path beside the plain one. `passed` is None where it was not run."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class StepRow:
    """The cached step alone: what its replays take by the device's clock. The floor is bytes / copy bandwidth."""

    way: str
    rows: int
    milliseconds: Spread
    record_seconds: float  # compiling and recording
    bytes: int
    floor: float | None


@dataclass(frozen=True)
class JobRow:
    """A whole generation by the host's clock. Bytes are the device's, from before compiling and recording to after."""

    way: str
    rows: int
    kv_caching: bool
    milliseconds: Spread | None = None
    step: Spread | None = None  # (the job - the job of one token) / the steps between them
    first: float | None = None  # milliseconds of the first job, which compiles and records
    peak: int | None = None
    peak_floor: int | None = None  # llama.costs', of weights, cache, logits and activations
    reserved: int | None = None
    graph_pool: int | None = None
    workspace: int | None = None
    note: str = ""


@dataclass(frozen=True)
class KernelRow:
    """All calls of a kernel in one step; `bytes` is what they must move together, None where nobody knows."""

    name: str
    count: int
    microseconds: float
    bytes: int | None


@dataclass
class Report:
    """All that a call found out. `missing` says of every section without figures why it has none."""

    command: str
    facts: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    copied: float | None = None  # bytes a second, read and written
    read: float | None = None
    steps: list[StepRow] = field(default_factory=list)
    jobs: list[JobRow] = field(default_factory=list)
    ledgers: dict[str, list[Line]] = field(default_factory=dict)
    kernels: list[KernelRow] = field(default_factory=list)
    gaps: Spread | None = None  # microseconds between a kernel's end and the next one's start; 0 where they overlap
    gap_sum: float | None = None
    starts: list[dict[str, float]] = field(default_factory=list)  # seconds
    missing: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # sections that raised

    @property
    def status(self) -> int:
        return int(bool(self.broken) or any(check.passed is False for check in self.checks))
