"""Sum the CPU time of the tests, print it in one line, and fail if a function costs more than its share.

A cost is the CPU time of the process and of the children that it waited for, over set-up, call and teardown. Fixtures
of a module count by themselves; if several processes make one, the most expensive one counts. Costs are compared with a
fixed piece of work that the same processes time repeatedly, so that a slow or busy machine does not fail. Work that all
later cases reuse does not count for the limit: native code that is compiled, and packages that are imported.
"""

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from llama.host.files import cache_dir

# The limit of the default cases of one function together, in pieces of work: some 4 s. CONTRIBUTING.md asks for 1 s.
# The margin is wide: a collection of garbage takes a second, and falls into any case.
LIMIT = 300
# Functions that cost more, with a limit of their own.
LIMITS = {
    "tests/kv_cache/test_kinds.py::test_every_kind_of_ours_keeps_the_contract": 500,  # all claims, of two kinds
}
EVERY = 50  # cases between two pieces
IMPORTS = 20  # a case that loads so many modules imports a package for all later cases


def piece_of_work() -> float:
    """Return the CPU seconds of interpreted Python and of small tensors, some 13 ms: what the tests spend time on."""
    begin = time.process_time()
    x = torch.ones(8, 8)
    for number in range(1000):
        x = (x @ x).clamp(max=1)
        sum({str(key): key for key in range(number % 40)}.values())
    return time.process_time() - begin


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Reused(NamedTuple):
    """The native code and the modules of the process, which later cases reuse."""

    compiled: int  # the time of the folder's last change
    modules: int

    @classmethod
    def now(cls) -> "Reused":
        folder = cache_dir() / "native"
        return cls(folder.stat().st_mtime_ns if folder.exists() else 0, len(sys.modules))

    def is_still_all(self) -> bool:
        """Return True if no native code was compiled and no package was imported since."""
        now = self.now()
        return now.compiled == self.compiled and now.modules < self.modules + IMPORTS


class Seconds:
    """A plugin of pytest; with xdist each worker sends its costs to the process that prints the line."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.begin = time.perf_counter()
        self.cases = 0
        self.pieces: list[float] = []
        self.costs: dict[str, float] = defaultdict(float)  # file::function, or file::fixture
        self.limited: dict[str, float] = defaultdict(float)  # those parts that count for the limit
        self.collecting = 0.0
        # Of the case that runs: the cost of the fixtures of modules that were made in it, and whether it is slow.
        self.shared, self.slow = 0.0, False
        self.worker = hasattr(config, "workerinput")

    def pytest_collection_finish(self) -> None:
        self.collecting = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        if self.cases % EVERY == 0:
            self.pieces.append(piece_of_work())
        self.cases += 1
        self.shared, reused, begin = 0.0, Reused.now(), cpu_seconds()
        self.slow = item.get_closest_marker("slow") is not None
        result = yield
        file = item.nodeid.partition("::")[0]  # with slashes on every system, as in `fixturedef.baseid`
        key = f"{file}::{getattr(item, 'originalname', item.name)}"
        self._add(key, cpu_seconds() - begin - self.shared, limited=not self.slow and reused.is_still_all())
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        reused, begin, inner = Reused.now(), cpu_seconds(), self.shared
        result = yield
        if fixturedef.scope != "function":
            cost = cpu_seconds() - begin - (self.shared - inner)
            self.shared += cost
            limited = fixturedef.scope == "module" and not self.slow and reused.is_still_all()
            home = fixturedef.baseid if fixturedef.baseid.endswith(".py") else "tests/conftest.py"
            self._add(f"{home}::{fixturedef.argname}", cost, limited=limited)
        return result

    def _add(self, key: str, seconds: float, *, limited: bool) -> None:
        self.costs[key] += seconds
        if limited:
            self.limited[key] += seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get("seconds")
        if sent is None:  # the worker crashed
            return
        self.cases += sent["cases"]
        self.pieces += sent["pieces"]
        self.collecting += sent["collecting"]
        for key, seconds in sent["costs"].items():
            self.costs[key] += seconds
        for key, seconds in sent["limited"].items():
            is_test = key.partition("::")[2].startswith("test")  # whose cases are divided; a fixture is made again
            self.limited[key] = self.limited[key] + seconds if is_test else max(self.limited[key], seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.worker:
            names = ("cases", "pieces", "collecting", "costs", "limited")
            self.config.workeroutput["seconds"] = {  # type: ignore[attr-defined]
                name: dict(value) if isinstance(value := getattr(self, name), dict) else value for name in names
            }
        elif self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def over(self) -> list[str]:
        """Return a sentence for each function over its limit. A run of some tests only has none."""
        if self.config.args_source != pytest.Config.ArgsSource.TESTPATHS or not self.pieces:
            return []
        piece = statistics.median(self.pieces)
        return [
            f"{key} costs {seconds / piece:.0f} pieces of work ({seconds:.1f} CPU s), more than {limit}: mark its "
            "most expensive cases slow, or raise the limit in tests/support/seconds.py and say why"
            for key, seconds in sorted(self.limited.items())
            if seconds > (limit := LIMITS.get(key, LIMIT)) * piece
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.worker or not self.pieces:
            return
        files: dict[str, float] = defaultdict(float)
        for key, seconds in self.costs.items():
            files[key.split("::")[0]] += seconds
        slowest = sorted(files.items(), key=lambda pair: -pair[1])[:5]
        wall, total = time.perf_counter() - self.begin, self.collecting + sum(files.values())
        terminalreporter.write_line(
            f"{self.cases:,} tests, {wall:.0f} s, {total:.0f} CPU s, {self.collecting:.0f} of them to collect; "
            f"a piece of work takes {statistics.median(self.pieces) * 1e3:.1f} ms; "
            "the slowest files: " + ", ".join(f"{file} {seconds:.0f}" for file, seconds in slowest)
        )
        for sentence in self.over():
            terminalreporter.write_line(sentence, red=True)
