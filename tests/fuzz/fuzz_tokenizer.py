"""Malicious bytes as the files of a tokenizer: only ValueError may come out, and what loads must work.

Each kind has two parsers: the whole, and NAME.checks without the library, which takes milliseconds to build what our
checks have checked in a fraction of one.
"""

import json
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiktoken

from llama.tokenizer import Tokenizer
from llama.tokenizer.bpe import BpeCodec
from llama.untrusted.model_proto import _fields

TEXTS = ("", "the other é 😀", " <s>a</s> <|im_end|>\n", "\x00\u2581  1234")
BETWEEN = b"\0"  # of tokenizer.json and the files beside it, none of which has it
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def read_json(data: bytes) -> Tokenizer:
    """Read the bytes as a tokenizer.json and the files beside it."""
    return Tokenizer.from_huggingface(_folder(dict(zip(_BESIDE, data.split(BETWEEN), strict=False))))


def read_model(data: bytes) -> Tokenizer:
    """Read the bytes as a tokenizer.model."""
    return Tokenizer(_folder({"tokenizer.model": data}) / "tokenizer.model")


def read_gguf(data: bytes) -> Tokenizer:
    """Read the bytes, in JSON, as the keys of a .gguf file, of which each can be any plain value."""
    metadata = json.loads(data)
    if type(metadata) is not dict:
        raise ValueError("no keys")
    return Tokenizer.from_gguf(metadata)


def _folder(files: dict[str, bytes]) -> Path:
    folder = Path(tempfile.gettempdir()) / f"fuzzed-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    for name in set(os.listdir(folder)) - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _run_whole(read: Callable[[bytes], Tokenizer], data: bytes) -> None:
    try:
        tokenizer = read(data)
    except (ValueError, RecursionError):  # RecursionError: Python's own JSON reader, of read_gguf
        return
    _use(tokenizer)


def _use(tokenizer: Tokenizer) -> None:
    """Encode and decode: no special token comes out of plain text, and each id has a text."""
    special = set(tokenizer.special_tokens.values())
    for text in TEXTS:
        for begins in (True, False):
            try:
                ids = tokenizer.encode(text, bos=False, eos=False, begins=begins)
            except ValueError:
                continue
            assert special.isdisjoint(ids), (text, ids)
            stream = tokenizer.stream(begins=begins)
            assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids, begins=begins)
        try:
            tokenizer.encode(text, bos=False, eos=False, allowed_special="all")
        except ValueError:
            continue
    _check(tokenizer)


def _run_checks(read: Callable[[bytes], Tokenizer], data: bytes) -> None:
    with _no_library():
        try:
            tokenizer = read(data)
        except (ValueError, RecursionError):
            return
        _check(tokenizer)


@contextmanager
def _no_library() -> Iterator[None]:
    """Let our code come to the place where it would give a vocabulary to a library, and go on without."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(BpeCodec, "_model", None))
        stack.enter_context(patch.object(tiktoken, "Encoding", dict))
        yield


def _check(tokenizer: Tokenizer) -> None:
    """Hold what was accepted to what a Vocabulary promises."""
    named = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, *tokenizer.stop_tokens} - {None}
    special = tokenizer.special_tokens
    assert all(type(each) is int and 0 <= each < tokenizer.n_words for each in (*named, *special.values()))
    assert len(set(special.values())) == len(special)
    assert all(text and type(text) is str for text in special)
    tokenizer.decode(range(min(tokenizer.n_words, 100)))
    tokenizer.fingerprint().encode()


# ---- what is right ---------------------------------------------------------------------------------------------------

_VOCAB = ("a", "b", "ab", "\u0120", "\u0120a", "abab")
_PIECES = ("\u2581", "a", "b", "\u2581a", "ab")


def _as_json(content: object) -> bytes:
    return json.dumps(content).encode()


def _added(*texts: str, first: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": first + i, "content": text, **flags, "special": i != 1} for i, text in enumerate(texts)]


def _json_of(vocab: tuple[str, ...], merges: list[object], **steps: object) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {text: i for i, text in enumerate(vocab)}, "merges": merges}
    return {"added_tokens": _added("<s>", "<|im_end|>", "</s>", first=len(vocab)), "model": model, **steps}


_TO_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_OPENING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_DECODE = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}]
_DECODER = {"type": "Sequence", "decoders": [*_DECODE, {"type": "Fuse"}]}
_JSONS = [
    _json_of(_VOCAB, [["a", "b"], ["\u0120", "a"], "ab ab"], pre_tokenizer=_TO_BYTES, decoder={"type": "ByteLevel"}),
    _json_of(
        _PIECES,
        [["\u2581", "a"], ["a", "b"]],
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, _REPLACE]},
        decoder=_DECODER,
        post_processor=_OPENING,
    ),
    _json_of(
        _PIECES,
        [["\u2581", "a"]],
        pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        decoder=_DECODER,
    ),
]
_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "x"}],
}
_DEFAULTS = {"eos_token_id": [7, 6], "pad_token_id": -1}


def _gguf_of(model: str, tokens: tuple[str, ...], **facts: object) -> dict[str, Any]:
    texts = [*tokens, "<s>", "<|im_end|>", "</s>"]
    kinds = [1] * len(tokens) + [3, 4, 3]
    ends = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 2, "eot_token_id": 0}
    found = {"model": model, "tokens": texts, "token_type": kinds, "add_bos_token": True, **ends, **facts}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | {"tokenizer.chat_template": "x"}


_GGUFS = [
    _gguf_of("gpt2", _VOCAB, pre="smollm", merges=["a b", "\u0120 a"]),
    _gguf_of("gpt2", _VOCAB, pre="llama3", merges=["a b", "ab ab"]),
    _gguf_of("llama", _PIECES, scores=[-1.0 * i for i in range(8)], add_space_prefix=True),
    _gguf_of("llama", _PIECES, scores=[-2.5 * i for i in range(8)], remove_extra_whitespaces=False, unknown_token_id=0),
]


# ---- what is right, changed ------------------------------------------------------------------------------------------

_ODD_TEXTS = ["", "a", "ab", "a b", "<s>", "</s>", "<0x41>", "<0xFF>", "\u2581", "\x1b[2J", "é", "\ud800", "x" * 1025]
_ODD_VALUES: tuple[Any, ...] = (
    *(*_ODD_TEXTS, "llama", "first"),
    *(None, True, False, -1, 0, 1, 2, 3, 6, 8, 1 << 20, 1 << 40, 10**80, 5.0, 1.5, -0.0, float("inf"), float("nan")),
    *([], {}, ["a"], [[]], {"type": "BPE"}, {"type": "ByteLevel"}, {"type": "Sequence"}, {"String": " "}, ["a", "b"]),
)
_ODD_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, (1 << 32) - 1, (1 << 64) - 1)
_ODD_BYTES = (b"", b"a", b"ab", b"<s>", b"<0x41>", b"\xff", b"\xe2\x96\x81", bytes(4), b"\0\0\x80\x7f", b"\0\0\xc0\x7f")


def changed_json(data: bytes, seed: int) -> bytes:
    """Change a few values of one of the JSON files in the bytes: others' take their place, or odd ones, or nothing."""
    dice = random.Random(seed)
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
        home, key = dice.choice(places)
        other_home, other_key = dice.choice(places)
        how = dice.randrange(8)
        if how == 0:
            del home[key]
        elif how == 1 and type(home) is list:
            home.insert(key, deepcopy(other_home[other_key]))
        elif how == 2 and type(home) is dict:
            home[str(dice.choice(_ODD_VALUES))] = home.pop(key)
        else:
            home[key] = deepcopy(dice.choice(_ODD_VALUES) if how < 6 else other_home[other_key])
    parts[at] = json.dumps(content).encode()
    return BETWEEN.join(parts)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where each value is: the dict or list that has it, and its key there."""
    inner = content.items() if type(content) is dict else enumerate(content) if type(content) is list else ()
    for key, value in inner:
        yield content, key
        yield from _places(value)


def changed_proto(data: bytes, seed: int) -> bytes:
    """Change a few fields of a message, and of the messages in it."""
    dice = random.Random(seed)
    try:
        fields = [(number, value) for number, value in _fields(data, len(data))]
    except ValueError:
        return data
    for _ in range(dice.randint(1, 4)):
        at, how = dice.randint(0, len(fields)), dice.randrange(8)
        if how == 0:
            del fields[at : at + 1]
        elif how == 1:
            fields[at:at] = fields[at : at + dice.randint(1, 3)]
        elif how == 2:
            fields.insert(at, (dice.choice((1, 2, 3, dice.randint(1, 46))), dice.choice(_ODD_NUMBERS + _ODD_BYTES)))
        elif at < len(fields):
            number, value = fields[at]
            inside = type(value) is bytes and len(value) > 4 and how > 3
            fields[at] = number, changed_proto(value, seed + 1) if inside else dice.choice(_ODD_NUMBERS + _ODD_BYTES)
    return b"".join(_written(*field) for field in fields)


def _written(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _number(number, value)
    return b"\x15" + value if number == 2 and len(value) == 4 else _message(number, value)  # the score of a piece


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    head = bytes([value & 0x7F | 0x80]) + _varint(value >> 7) if value > 0x7F else b""
    return head or bytes([value])


def _piece(text: str, score: float, kind: int) -> bytes:
    return _message(1, _message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))


_KINDS = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_end|>": 4}
_PROTO = b"".join(_piece(text, -1.0 * i, _KINDS.get(text, 1)) for i, text in enumerate([*_KINDS, *_PIECES]))
_PROTO += _message(2, _number(3, 2)) + _message(3, _number(4, 0))
_READERS = {"tokenizer.json": read_json, "tokenizer.model": read_model, "tokenizer.gguf": read_gguf}
PARSERS: dict[str, Callable[[bytes], object]] = {
    **{name: partial(_run_whole, read) for name, read in _READERS.items()},
    **{f"{name}.checks": partial(_run_checks, read) for name, read in _READERS.items()},
}
_CHANGES = {"tokenizer.json": changed_json, "tokenizer.model": changed_proto, "tokenizer.gguf": changed_json}
STRATEGIES: dict[str, Any] = {}
MUTATORS = {name: _CHANGES[name.removesuffix(".checks")] for name in PARSERS}


def seeds(name: str) -> list[bytes]:
    """Return tokenizers of each kind that are right, small, so that many a second are read."""
    from checkpoints import write_meta_tokenizer

    kind = name.removesuffix(".checks")
    if kind == "tokenizer.gguf":
        return [*map(_as_json, _GGUFS)]
    if kind == "tokenizer.json":
        beside = BETWEEN.join([_as_json(_JSONS[1]), _as_json(_CONFIG), _as_json(_DEFAULTS), b"{{ x }}"])
        return [*map(_as_json, _JSONS), beside]
    path = _folder({}) / "lines"
    write_meta_tokenizer(path)
    return [path.read_bytes(), _PROTO]
