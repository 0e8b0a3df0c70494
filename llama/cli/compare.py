"""The command that compares two results of the benchmark: llama-kv compare A B."""

import json as json_format
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama.bench.report.contents import NOISY, is_noisy
from llama.bench.report.files import RESULTS
from llama.bench.report.text import markdown
from llama.bench.schema import SCHEMA
from llama.bench.two_reports import WORSE, comparison_table, differences, figures
from llama.host import console
from llama.host.files import check_writable, replace_file
from llama.quality.intervals import LEAST_SAMPLES
from llama.untrusted.files import read_regular
from llama.untrusted.json_object import parse_object

_MOST = 1 << 28  # bytes of a result


def main(*results: str, allow: float = 5.0, other_setup: bool = False, json: str | None = None) -> int:
    """Compare two results of the benchmark, A and B: each figure's ratio B / A with a bootstrap interval.

    The exit code is 1 if a figure became worse and its interval does not contain 1, 2 for a mistake, and otherwise 0.

    Args:
        results: A and B, each a result as JSON or the folder of a preset.
        allow: The percentage by which a figure may become worse without exit code 1.
        other_setup: Compare although the hardware, torch, dtype, model or preset differ; the title names what differs.
        json: Write the comparison into this file.
    """
    if len(results) != 2 or not 0 <= allow < math.inf:
        given = f"{len(results)} results, --allow={allow}"
        raise ValueError(f"{given}: give two results, A and B, and a percentage of at least 0")
    if json is not None:
        check_writable(Path(json))
    a, b = map(read_result, results)
    if json is not None and Path(json).exists() and any(_file_of(name).samefile(json) for name in results):
        raise ValueError(f"--json {json} is one of the results; choose another file")
    with malformed_refused():
        differ, found = differences(a, b), figures(a, b)
        noisy = [side for side, report in (("A", a), ("B", b)) if is_noisy(report)]
    if differ and not other_setup:
        raise ValueError(f"A and B were not measured alike: {'; '.join(differ)}; add --other_setup to compare anyway")
    title = f"B against A, which were NOT measured alike: {'; '.join(differ)}" if differ else "B against A"
    title += "".join(f"; {side}: {NOISY}" for side in noisy)
    verdicts = [one.verdict(allow) for one in found]
    if json is not None:
        rows = [{**one._asdict(), "verdict": verdict} for one, verdict in zip(found, verdicts, strict=True)]
        whole = {"a": results[0], "b": results[1], "differences": differ, "allow_percent": allow, "figures": rows}
        replace_file(Path(json), (json_format.dumps(whole, indent=1, allow_nan=False) + "\n").encode())
    counted = "; ".join(f"{verdict}: {n}" for verdict, n in Counter(verdicts).items())
    console.put(f"{markdown(comparison_table(title, found, allow))}\nA: {results[0]}\nB: {results[1]}\n{counted}")
    if all(one.interval is None for one in found):
        console.say(
            f"warning: no figure has {LEAST_SAMPLES} samples on both sides that can be compared, so none is judged; "
            "repeat more often"
        )
    return int(WORSE in verdicts)


@contextmanager
def malformed_refused() -> Iterator[None]:
    """Raise ValueError in place of an error of the block, which a result of wrong types or without a field causes."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"a result is malformed ({error!r}); measure it again") from error


def _file_of(name: str) -> Path:
    return Path(name) / RESULTS if Path(name).is_dir() else Path(name)


def read_result(name: str) -> Any:
    """Return the report in a file, or in a folder's results.json. Raises ValueError if it is none of this version."""
    path = _file_of(name)
    try:
        report = parse_object(read_regular(path, limit=_MOST))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if (found := report.get("schema")) != SCHEMA:
        raise ValueError(f"{path}: its schema is {found!r:.40}, and only {SCHEMA!r} is read; measure again")
    return report
