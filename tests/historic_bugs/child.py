"""Inside of a copy of the repository: import all of it, run the named tests, and write down how each case ended.

    python -P child.py LIBRARY...

run.py starts it, with a line of JSON on standard input for each copy: the arguments of `begin`. It imports the
libraries that the tests need, nothing of ours, and forks a process for each copy, which saves the seconds that the
libraries take; its exit code is a line of standard output. The report is JSON: `endings` by the case's name, and
`trouble`, in words, where there are none to tell.
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest


def serve(*libraries: str) -> None:
    """Fork a process for each line of standard input, one after the other, and print how it ended."""
    for library in libraries:
        importlib.import_module(library)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            begin(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def begin(*, copy: str, printed: str, limit: int, **what: Any) -> None:
    """In a process of its own, of `limit` seconds at most: enter the copy, do `main` there, and end.

    What is printed goes into a file. SIGALRM ends a process that takes longer.
    """
    code = 1
    try:
        signal.alarm(limit)
        for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(printed, os.O_WRONLY | os.O_CREAT))):
            os.dup2(file, stream)
        os.dup2(1, 2)
        os.chdir(copy)
        sys.path.insert(0, copy)
        os.environ["PYTHONPATH"] = copy
        main(**what)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(report: str, scratch: str, tests: Sequence[str], *, stop: bool = False, slow: bool = False) -> None:
    """Run the tests, named by file or by file::test, and write the report.

    `stop` ends at the first failure. `slow` adds the tests that are marked slow, after the others.
    """
    record = Record(tests)
    trouble = import_all()
    if not trouble:
        files = [file for file in dict.fromkeys(test.partition("::")[0] for test in tests) if Path(file).is_file()]
        if files:  # without any, pytest would look for some
            pytest.main(
                [
                    "-q",
                    *["-x"] * stop,
                    *["--slow"] * slow,
                    "-p",
                    "no:cacheprovider",
                    "--rootdir=.",
                    f"--basetemp={scratch}",
                    *files,
                ],
                plugins=[record],
            )
        trouble = record.trouble
    Path(report).write_text(json.dumps({"trouble": trouble, "endings": record.endings}), encoding="utf-8")


def import_all() -> str:
    """Import every module of the copy but the one that needs lm-eval; return what is wrong with that, in words."""
    try:
        import llama

        for module in pkgutil.walk_packages(llama.__path__, "llama."):
            if not module.name.endswith((".__main__", ".lm_eval")):
                importlib.import_module(module.name)
    except Exception as error:
        return f"the copy does not import: {type(error).__name__}: {error}"
    where = Path(str(llama.__file__)).resolve()
    return "" if where.is_relative_to(Path.cwd()) else f"the copy's tests would run on {where}, which is not the copy's"


class Record:
    """A plugin of pytest that runs the wanted tests alone, in their order, and keeps how each case ended."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.tests = tests
        self.endings: dict[str, str] = {}
        self.trouble = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble = f"{report.nodeid} cannot be collected: {report.longreprtext.splitlines()[-1]}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: place for place, test in enumerate(self.tests)}
        names = {item: (item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]) for item in items}
        places = {item: [order[name] for name in names[item] if name in order] for item in items}
        wanted = (item for item in items if places[item])
        items[:] = sorted(wanted, key=lambda item: (item.get_closest_marker("slow") is not None, places[item][0]))

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
    serve(*sys.argv[1:])
