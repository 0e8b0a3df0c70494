"""Random edits of valid and malformed bytes: each format is cut into pieces, and some pieces change.

An edit is a function of the bytes and a random generator. Bytes that cannot be cut come back unchanged.
"""

import json
import pickletools
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from random import Random
from typing import Any

from forge import message, varint, whole

from llama.untrusted.model_proto import _fields

Edit = Callable[[bytes, Random], bytes]
BETWEEN = b"\0"  # of several JSON texts, none of which has it
_EDGES = (0, 1, 127, 255, 256, 65535, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


def edited(pieces: Sequence[bytes], pool: Sequence[bytes], dice: Random) -> bytes:
    """Return the pieces after up to four changes: pieces left out, repeated, swapped, new, or with one other bit."""
    items = list(pieces)
    for _ in range(dice.randint(1, 4)):
        at, other, how = dice.randint(0, len(items)), dice.randint(0, len(items)), dice.randrange(6)
        if how == 0:
            del items[at : at + dice.randint(1, 3)]
        elif how == 1:
            items[at:at] = items[at : at + dice.randint(1, 8)]
        elif how == 2 and max(at, other) < len(items):
            items[at], items[other] = items[other], items[at]
        elif how < 5:
            items[at : at + how - 3] = [dice.choice(pool)]
        elif at < len(items) and items[at]:
            changed = bytearray(items[at])
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
            items[at] = bytes(changed)
    return b"".join(items)


# ---- any bytes -------------------------------------------------------------------------------------------------------

_ODD = (bytes(8), b"\xff" * 8, b"\x1b[", b'"', b"{", b"9" * 70, b"")


def edited_bytes(data: bytes, dice: Random) -> bytes:
    """Cut anywhere; the pool has odd bytes, random ones, and some of the data."""
    cuts = sorted({0, len(data), *(dice.randint(0, len(data)) for _ in range(8))})
    start = dice.randint(0, len(data))
    return edited([data[a:b] for a, b in pairwise(cuts)], (*_ODD, dice.randbytes(4), data[start : start + 32]), dice)


# ---- pickles and archives --------------------------------------------------------------------------------------------

_WIDTHS = [(b"K", 1), (b"M", 2), (b"J", 4), (b"q", 1), (b"r", 4), (b"h", 1), (b"j", 4), (b"\x8a\x08", 8)]
# One of each operation that there is, and arguments at the edges of what they may be.
_OPERATIONS = [
    *(info.code.encode("latin-1") for info in pickletools.opcodes),
    *(code + (edge % (1 << 8 * width)).to_bytes(width, "little") for code, width in _WIDTHS for edge in _EDGES),
    *(b"X" + edge.to_bytes(8, "little")[:4] + b"x" for edge in _EDGES),
    *(b"ctorch\n%s\n" % name for name in (b"LongStorage", b"FloatTensor", b"HalfStorage", b"FloatStorage")),
    *(b"ccollections\nOrderedDict\n)R", b"}X\x09\0\0\0_metadataNs", b"cos\nsystem\n"),
]


def edited_pickle(data: bytes, dice: Random) -> bytes:
    """Cut into operations."""
    try:
        places = [*(at for _, _, at in pickletools.genops(data)), len(data)]
    except Exception:  # pickletools raises anything
        return data
    operations = [data[start:end] for start, end in pairwise(places)]
    return edited(operations, _OPERATIONS + operations, dice)


def edited_archive(data: bytes, dice: Random) -> bytes:
    """Cut a zip file where a header begins, and each header into two bytes each: no number is shorter."""
    cuts = sorted({0, len(data), *(at for at in range(len(data)) if data[at : at + 2] == b"PK")})
    pieces: list[bytes] = []
    for start, end in pairwise(cuts):
        head = min(end, start + 66)
        pieces += [data[at : min(at + 2, head)] for at in range(start, head, 2)] + [data[head:end]]
    return edited(pieces, _OPERATIONS, dice)


# ---- SentencePiece's file --------------------------------------------------------------------------------------------

_TEXTS = (b"", b"a", b"ab", b"<s>", b"<0x41>", b"\xff", b"\xe2\x96\x81", bytes(4), b"\0\0\x80\x7f", b"\0\0\xc0\x7f")


def edited_proto(data: bytes, dice: Random) -> bytes:
    """Cut into fields; one of the messages in it is edited, too."""
    try:
        fields = [*_fields(data, len(data))]
    except ValueError:
        return data
    inner = [at for at, (_, value) in enumerate(fields) if isinstance(value, bytes) and len(value) > 4]
    if inner and dice.randrange(4):
        at = dice.choice(inner)
        fields[at] = fields[at][0], edited_proto(bytes(fields[at][1]), dice)
        return b"".join(_field(*field) for field in fields)
    number = dice.choice((1, 2, 3, dice.randint(1, 46)))
    return edited([_field(*field) for field in fields], [_field(number, value) for value in (*_EDGES, *_TEXTS)], dice)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return whole(number, value)
    # The score of a piece is 32 bits.
    return varint(number << 3 | 5) + value if number == 2 and len(value) == 4 else message(number, value)


# ---- JSON ------------------------------------------------------------------------------------------------------------

_WORDS = ["", "a", "ab", "a b", "<s>", "</s>", "<0x41>", "<0xFF>", "\u2581", "\x1b[2J", "é", "\ud800", "x" * 1025]
_NUMBERS = (-1, 0, 1, 2, 3, 6, 8, 1 << 20, 1 << 40, 10**80, 5.0, 1.5, -0.0, float("inf"), float("nan"))
_VALUES: tuple[Any, ...] = (
    *(*_WORDS, *_NUMBERS, None, True, False, "llama", "llama3", "linear", "yarn", "default", "first"),
    *([], {}, ["a"], [[]], {"type": "BPE"}, {"type": "ByteLevel"}, {"type": "Sequence"}, {"String": " "}, ["a", "b"]),
    *("../a.safetensors", "b.safetensors", {"rope_type": "yarn", "factor": 4.0}),
)


def edited_json(data: bytes, dice: Random) -> bytes:
    """Change a few values of one of the JSON texts in the bytes: others' take their place, or odd ones, or nothing."""
    parts = data.split(BETWEEN)
    at = dice.randrange(len(parts))
    try:
        content = json.loads(parts[at])
    except (ValueError, RecursionError):
        return data
    for _ in range(dice.randint(1, 4)):
        places = list(_places(content))
        if not places:
            break
        (home, key), (other_home, other_key) = dice.choice(places), dice.choice(places)
        how = dice.randrange(8)
        if how == 0:
            del home[key]
        elif how == 1 and type(home) is list:
            home.insert(key, deepcopy(other_home[other_key]))
        elif how == 2 and type(home) is dict:
            home[str(dice.choice(_VALUES))] = home.pop(key)
        else:
            home[key] = deepcopy(dice.choice(_VALUES) if how < 6 else other_home[other_key])
    parts[at] = json.dumps(content).encode()
    return BETWEEN.join(parts)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where each value is: the dict or list that has it, and its key there."""
    inner = content.items() if type(content) is dict else enumerate(content) if type(content) is list else ()
    for key, value in inner:
        yield content, key
        yield from _places(value)
