"""Parse untrusted JSON: an object, or another value, with only one possible meaning."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# The number of braces, brackets and commas bounds the memory of all values: an empty object takes 20 times its two
# bytes. The largest tokenizers have some 6 thousand, 0.6 and 2 million of them.
MOST_OF: Mapping[str, int] = {"{": 1 << 16, "[": 3 << 18, ",": 1 << 22}
# Real files have some ten levels. Python 3.14 parses 60,000 of them, for which json.dumps raises RecursionError.
MOST_LEVELS = 200
_TOO_DEEP = f"it is nested too deeply; the limit is {MOST_LEVELS} levels"
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(data: bytes, *, most_of: Mapping[str, int] = MOST_OF) -> dict[str, Any]:
    """Return the object in bytes of JSON. Raises ValueError for another value, and as `parse_json`."""
    content = parse_json(data, most_of=most_of)
    if not isinstance(content, dict):
        raise ValueError(f"it must be an object in braces, not a {type(content).__name__}")
    return content


def parse_json(data: bytes, *, most_of: Mapping[str, int] = MOST_OF) -> Any:
    """Return the value in bytes of JSON.

    Raises ValueError for JSON that readers interpret differently: bytes that are not UTF-8, surrogates, repeated keys,
    NaN, infinity and numbers beyond float64; also for whole numbers of more digits than Python's limit, more values
    than any real file has, and more than MOST_LEVELS levels of lists and objects. `most_of`: the limits of how often a
    character occurs.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    for sign, most in most_of.items():
        if text.count(sign) > most:
            raise ValueError(f"it has {sign!r} {text.count(sign):,} times, and the limit is {most:,}")
    try:
        content = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if _is_deep(content):
        raise ValueError(_TOO_DEEP)
    if _HALF_CHARACTER.search(text):
        _refuse_halves(content)
    return content


def _is_deep(content: Any) -> bool:
    level: list[Any] = [[content]]
    for _ in range(MOST_LEVELS + 1):
        values = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [inner for outer in values for inner in outer if type(inner) in (dict, list)]
    return bool(level)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is beyond the numbers of float64")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
    raise ValueError(f"repeats the key {key!r:.80}")


def _refuse_halves(content: Any) -> None:
    """Raise ValueError for an unpaired surrogate, such as an escaped D800 without the second half."""
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is half of a surrogate pair") from error
