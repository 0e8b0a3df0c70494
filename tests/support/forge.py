"""Small valid files of each format, and the pieces of which valid and malformed ones are made."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import gguf

# ---- JSON ------------------------------------------------------------------------------------------------------------


def put(content: Any, values: Mapping[str, Any]) -> None:
    """Set values in the content of a JSON file. Each key is a path, such as "model/vocab/a" or "added_tokens/0/id"."""
    for path, value in values.items():
        *parents, last = path.split("/")
        place = content
        for key in parents:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value


# ---- safetensors -----------------------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any = (1,), begin: Any = 0, end: Any = 4, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# ---- GGUF ------------------------------------------------------------------------------------------------------------

U8, U16, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 6, 7, 8, 9, 10


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, n_tensors: int = -1) -> bytes:
    count = len(tensors) if n_tensors < 0 else n_tensors
    return b"GGUF" + struct.pack("<IQQ", version, count, len(pairs)) + b"".join(pairs) + b"".join(tensors)


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def array(kind: int, count: int, data: bytes = b"", key: bytes = b"k") -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + data


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a value, in place of another one of its key, with the type that llama.cpp expects for it."""
    for pairs in writer.kv_data:
        pairs.pop(key, None)
    if isinstance(value, float):
        (writer.add_float64 if abs(value) > 1e38 else writer.add_float32)(key, value)
    elif isinstance(value, bool | str):
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    else:
        writer.add_array(key, value)


def small_gguf(kind: str = "gpt2", /, **changes: Any) -> dict[str, Any]:
    """Return the keys of a vocabulary: letters and their merges, or SentencePiece's pieces. None: without the key."""
    facts: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<s>", "a", "b", "c", "ab", "abc", "aab", "<|im_end|>", "hello there", "[PAD]"],
        "token_type": [3, 1, 1, 1, 1, 1, 1, 3, 4, 5],
        "merges": ["a b", "ab c", "a ab"],
        "bos_token_id": 0,
        "eos_token_id": 7,
    }
    if kind == "llama":
        pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "<|im_end|>"]
        facts = {"model": kind, "tokens": pieces, "token_type": [2, 3, 3, 1, 1, 1, 1, 1, 4]}
        facts["scores"] = [-1.0 * i for i in range(len(pieces))]
    return {f"tokenizer.ggml.{key}": value for key, value in (facts | changes).items() if value is not None}


# ---- SentencePiece's file --------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    head = bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else b""
    return head or bytes([value])


def whole(number: int, value: int) -> bytes:
    """Return a field that is a whole number."""
    return varint(number << 3) + varint(value)


def message(number: int, *fields: bytes) -> bytes:
    """Return a field that is a message of fields, or a text."""
    content = b"".join(fields)
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece(text: bytes = b"x", score: float = 0.0, kind: int = 1) -> bytes:
    return message(1, message(1, text), b"\x15" + struct.pack("<f", score), whole(3, kind))


PIECES = piece(b"<unk>", kind=2) + piece(b"a") + piece(b"b")
BPE, IDENTITY = message(2, whole(3, 2)), message(3, whole(4, 0))
