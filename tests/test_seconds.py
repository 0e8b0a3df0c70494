"""The costs of the tests: a line in every run, and a failure only if --limit-costs requires it."""

import pytest

pytest_plugins = ["pytester"]

PLUGIN = """
from seconds import Seconds
def pytest_addoption(parser):
    parser.addoption("--limit-costs", action="store_true")
def pytest_configure(config):
    config.pluginmanager.register(Seconds(config), "seconds")
"""
TESTS = """
import time
def test_cheap(): pass
def test_dear():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
"""


@pytest.mark.parametrize(
    ("share", "words", "warns", "fails"),
    [
        (0.1, [], True, False),
        (0.1, ["--limit-costs"], True, True),
        (0.6, ["--limit-costs"], True, False),  # not over twice the limit
        (0.1, ["--limit-costs", "-k", "dear"], False, False),  # a share of some tests says nothing
    ],
)
def test_a_cost_over_its_share_is_a_warning_and_fails_above_twice_of_it_on_demand(
    share: float,
    words: list[str],
    warns: bool,
    fails: bool,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("seconds.SHARE", share)
    pytester.makeconftest(PLUGIN)
    pytester.makeini("[pytest]\ntestpaths = .")
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("-p", "no:xdist", *words)
    (line,) = [line for line in done.outlines if " CPU s, " in line]
    assert "the slowest files: " in line
    assert ("warning: " in line and "::test_dear " in line) is warns
    assert "::test_cheap" not in line
    assert done.ret == int(fails)
    assert ("::test_dear " in done.outlines[-1]) is fails
