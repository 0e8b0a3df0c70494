"""Inside of a copy of the repository: import all of it, run the named tests, and write down how each case ended.

    python -P child.py REPORT SCRATCH TEST...

run.py starts it with the copy as its working directory and PYTHONPATH. The report is JSON: `endings` by the case's
name, and `trouble`, in words, where there are none to tell.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest


def main(report: str, scratch: str, *tests: str) -> None:
    record = Record(tests)
    trouble = import_all()
    if not trouble:
        files = [file for file in dict.fromkeys(test.partition("::")[0] for test in tests) if Path(file).is_file()]
        if files:  # without any, pytest would look for some
            # Without hypothesis's plugin, which only reports and which pytest would rewrite anew each time: a second.
            unwanted = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
            pytest.main(["-q", *unwanted, "--rootdir=.", f"--basetemp={scratch}", *files], plugins=[record])
        trouble = record.trouble
    Path(report).write_text(json.dumps({"trouble": trouble, "endings": record.endings}), encoding="utf-8")


def import_all() -> str:
    """Import every module of the copy; return what is wrong with that, in words."""
    try:
        import llama

        for module in pkgutil.walk_packages(llama.__path__, "llama."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    except Exception as error:
        return f"the copy does not import: {type(error).__name__}: {error}"
    where = Path(str(llama.__file__)).resolve()
    return "" if where.is_relative_to(Path.cwd()) else f"the copy's tests would run on {where}, which is not the copy's"


class Record:
    """A plugin of pytest that runs the wanted tests alone and keeps how each case ended."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.tests = tests
        self.endings: dict[str, str] = {}
        self.trouble = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = f"{report.nodeid} cannot be collected: {report.longreprtext.splitlines()[-1]}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if {item.nodeid, item.nodeid.partition("[")[0]}.intersection(self.tests)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            self.endings[item.nodeid] = ending(call.excinfo.value, report.when)
        elif report.skipped:
            self.endings[item.nodeid] = "is skipped"
        elif report.when == "call":
            self.endings[item.nodeid] = "passed"
        return report


def ending(error: BaseException, phase: str) -> str:
    if phase == "call" and is_assertion(error):
        return "failed on an assertion"
    return f"ended in {type(error).__name__} in its {phase}, and not on an assertion: {str(error)[:200]}"


def is_assertion(error: BaseException) -> bool:
    """Whether a test's own claim failed; pytest reports an error that was expected and not raised by its fail()."""
    if isinstance(error, BaseExceptionGroup):  # several cases that hypothesis found
        return all(map(is_assertion, error.exceptions))
    return isinstance(error, AssertionError | pytest.fail.Exception)


if __name__ == "__main__":
    main(*sys.argv[1:])
