"""Sum the CPU time of the tests, print it in one line, and name the functions that cost more than their share.

A cost is the CPU time of the process and of the children that it waited for, over set-up, call and teardown. Fixtures
of a module count by themselves; if several processes make one, the most expensive one counts. The limit is a share of
the whole suite's cost, because a slower CPU makes both larger. Work that all later cases reuse does not count for it:
native code that is compiled, and packages that are imported. A cost fails a run only with --limit-costs, above twice
the limit.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from llama.host.files import cache_dir

# The limit of the default cases of one function together, as a share of those of all functions. On Zen 5 it is 1.7 s of
# 115 s, and the most expensive function takes 1.4 s; no other CPU was tried. A collection of garbage, which may fall
# into any case, takes up to a second.
SHARE = 0.015
# Functions with a share of their own.
SHARES = {
    "tests/test_crossings.py::test_a_text_is_the_text_alone_by_every_door": 0.12,  # a table in place of many functions
}
IMPORTS = 20  # a case that loads so many modules imports a package for all later cases


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
        self.costs: dict[str, float] = defaultdict(float)  # file::function, or file::fixture
        self.limited: dict[str, float] = defaultdict(float)  # those parts that count for the limit
        self.collecting, self.reason = 0.0, ""
        # Of the case that runs: the cost of the fixtures of modules that were made in it, and whether it is slow.
        self.shared, self.slow = 0.0, False
        self.worker = hasattr(config, "workerinput")

    def pytest_collection_finish(self) -> None:
        self.collecting = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
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
        self.collecting += sent["collecting"]
        for key, seconds in sent["costs"].items():
            self.costs[key] += seconds
        for key, seconds in sent["limited"].items():
            is_test = key.partition("::")[2].startswith("test")  # whose cases are divided; a fixture is made again
            self.limited[key] = self.limited[key] + seconds if is_test else max(self.limited[key], seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.worker:
            names = ("cases", "collecting", "costs", "limited")
            self.config.workeroutput["seconds"] = {  # type: ignore[attr-defined]
                name: dict(value) if isinstance(value := getattr(self, name), dict) else value for name in names
            }
        elif (
            self.config.getoption("--limit-costs")
            and session.exitstatus == pytest.ExitCode.OK
            and (dear := self.over(times=2))
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self.reason = (
                f"failed, because functions cost more than {2 * SHARE:.1%} of all tests: {', '.join(dear)}; "
                "mark their most expensive cases slow"
            )

    def over(self, times: int = 1) -> list[str]:
        """Return each function above so many times its limit, with its cost. A run of some tests only has none."""
        option, total = self.config.option, sum(self.limited.values())
        some = option.keyword or option.markexpr or self.config.args_source != pytest.Config.ArgsSource.TESTPATHS
        return [
            f"{key} {seconds / total:.1%} ({seconds:.1f} CPU s)"
            for key, seconds in sorted(self.limited.items())
            if seconds > times * SHARES.get(key, SHARE) * total and not some
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, float] = defaultdict(float)
        for key, seconds in self.costs.items():
            files[key.split("::")[0]] += seconds
        slowest = sorted(files.items(), key=lambda pair: -pair[1])[:5]
        wall, total = time.perf_counter() - self.begin, self.collecting + sum(files.values())
        dear = self.over()
        terminalreporter.write_line(
            f"{self.cases:,} tests, {wall:.0f} s, {total:.0f} CPU s, {self.collecting:.0f} of them to collect; "
            "the slowest files: "
            + ", ".join(f"{file} {seconds:.0f}" for file, seconds in slowest)
            + (f"; warning: functions above their share of {SHARE:.1%}: {', '.join(dear)}" if dear else ""),
            yellow=bool(dear),
        )

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Print why the cost of a test failed the run as the last line, after pytest's own."""
        if self.reason:
            print(self.reason)
