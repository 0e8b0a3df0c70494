"""Tables of calls that must be refused: one test for each table, which lists every call that is not."""

import re
from collections.abc import Callable, Iterable


def unrefused(
    calls: Iterable[tuple[Callable[[], object], str]], error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> list[str]:
    """Return a line for each call that does not raise `error` with a message in which its pattern is found.

    A table without calls is an error, because such a test could not fail.
    """
    calls, lines = list(calls), []
    assert calls
    for number, (call, pattern) in enumerate(calls):
        try:
            found = f"returned {call()!r}"
        except error as why:
            if re.search(pattern, str(why)):
                continue
            found = f"raised {why!r}"
        except Exception as why:
            found = f"raised {why!r}"
        lines.append(f"call {number} must raise {pattern!r}, but {found}")
    return lines
