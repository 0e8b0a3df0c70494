"""JSON files of other people, read strictly: an object of bounded size, each key once, numbers that are numbers.

Knows nothing of what stands in them.
"""

import json
import stat
from pathlib import Path
from typing import Any


def read_json(path: Path, *, limit: int) -> dict[str, Any]:
    """Return the object in a regular file of at most `limit` bytes. Raises ValueError for anything else."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes, the limit for such a file")
    try:
        content = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object in braces, not a {type(content).__name__}")
    return content


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"repeats the key {key!r:.80}")
        content[key] = value
    return content
