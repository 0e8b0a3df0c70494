"""Tables of cases in one test: every case runs, and the test fails with all cases that failed, not only the first.

`cases` divides parameters of a test instead: those that are not named run with --slow only.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def table(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Return a decorator that calls a test once for each row, whose values are the parameters `names`.

    The test's other parameters are fixtures, which all rows share. A row of one name is the value itself. A row that
    skips is a failure, because a skip would hide the failures of other rows.
    """
    own = names.replace(" ", "").split(",")
    rows = [tuple(row) if len(own) > 1 else (row,) for row in rows]

    def decorate(check: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            failures = []
            for row in rows:
                try:
                    check(**dict(zip(own, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    failures.append(f"{row!r:.200}: {type(error).__name__}: {error}")
            assert rows
            assert not failures, f"{len(failures)} of {len(rows)} cases:\n" + "\n".join(failures)

        signature = inspect.signature(check)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in own]
        vars(test)["__signature__"] = signature.replace(parameters=kept, return_annotation=None)
        return test

    return decorate


def cases(parameters: Iterable[Any], *default: Any) -> list[Any]:
    """Return parameters of which only those in `default` run without --slow."""
    made = []
    for one in parameters:
        values = one if isinstance(one, tuple) else (one,)
        made.append(one if one in default else pytest.param(*values, marks=pytest.mark.slow))
    return made
