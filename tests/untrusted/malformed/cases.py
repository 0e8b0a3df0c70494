"""Malformed and malicious checkpoints: each case is named after what is wrong, with the source of the attack.

A table of functions that write them. "case N" is a row of the table in `docs/security.md` of what was once accepted.
"""

import base64
import json
import os
import pickle
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import (
    config_of,
    finish,
    gguf_writer,
    meta_params,
    meta_weights,
    random_model,
    write_gguf,
    write_huggingface,
    write_meta,
)

Make = Callable[[Path], Path]
Change = Callable[[Any], object]
Content = bytes | Callable[[], bytes]  # a function makes a long content when it is needed


@dataclass(frozen=True)
class Case:
    """source: a CVE, an issue, or a case. `make` writes it into an empty folder and returns the path to open.

    `make` finds valid checkpoints beside that folder, see `write_originals`.
    """

    source: str
    make: Make


CASES: dict[str, Case] = {}

ESCAPES = "\x1b]0;owned\x07\x1b[2J\n\0\u202e\u2028\u009b"  # sets a title, clears the screen, reverses the text

QUADRATIC = "CWE-407, quadratic work"
TERMINAL = "CWE-150; case 12"
TYPES = "CWE-843; case 16"
TRAVERSAL = "transformers #47176, CWE-22"
RESOURCES = "CWE-789, memory by claim"
WAITING = "case 5"
TRUNCATED = "CWE-130, a length that is not so"
ANOTHER_MODEL = "differs from the model"


def write_originals(folder: Path) -> None:
    """Write a valid checkpoint of each format; cases are made in folders beside them."""
    model = random_model(config_of())
    weights = meta_weights(model)
    write_meta(folder / "meta", weights, meta_params(model.config))
    write_huggingface(folder / "huggingface", model, max_shard_size="60KB")
    write_huggingface(folder / "huggingface-one", model)
    write_gguf(folder / "model.gguf", weights, model.config)


def add(name: str, source: str, make: Make) -> None:
    assert name not in CASES, name
    CASES[name] = Case(source, make)


def bytes_of(content: Content) -> bytes:
    return content() if callable(content) else content


def copied(folder: Path, name: str) -> Path:
    return shutil.copytree(folder.parent / name, folder, dirs_exist_ok=True)


def spoiled(original: str, file: str, spoil: Callable[[Path], object]) -> Make:
    """Return a function that copies a valid folder and spoils one of its files."""

    def make(folder: Path) -> Path:
        spoil(copied(folder, original) / file)
        return folder

    return make


def replaced(original: str, file: str, content: Content, *, length: int | None = None) -> Make:
    """Return a function that copies a folder with other content of a file, which has zeros up to `length`."""

    def spoil(path: Path) -> None:
        path.write_bytes(bytes_of(content))
        if length is not None:
            os.truncate(path, length)

    return spoiled(original, file, spoil)


def changed(original: str, file: str, change: Change) -> Make:
    """Return a function that copies a folder with a change of the content of a JSON file."""

    def spoil(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoiled(original, file, spoil)


def updated(original: str, file: str, values: Mapping[str, Any]) -> Make:
    return changed(original, file, lambda content: content.update(values))


# ---- not a regular file ----------------------------------------------------------------------------------------------


def _replace_by(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "a folder":
        path.mkdir()
    else:
        listener = socket.socket(socket.AF_UNIX)
        os.chdir(path.parent)  # names of sockets are short
        listener.bind(path.name)
        listener.close()


def _special(original: str, file: str, kind: str) -> None:
    def make(folder: Path) -> Path:
        _replace_by(kind, (folder if original == "model.gguf" else copied(folder, original)) / file)
        return folder

    add(f"{file} of {original} is {kind}", WAITING, make)


if hasattr(os, "mkfifo"):
    for _kind in ("a named pipe", "a link to a device", "a link to itself", "a folder", "a socket"):
        _special("model.gguf", "model.gguf", _kind)
    for _kind in ("a named pipe", "a link to a device", "a folder"):
        _special("huggingface-one", "model.safetensors", _kind)
    for _original, _file in (
        ("meta", "params.json"),
        ("meta", "consolidated.00.pth"),
        ("meta", "tokenizer.model"),
        ("huggingface", "config.json"),
        ("huggingface", "tokenizer.json"),
        ("huggingface", "model.safetensors.index.json"),
        ("huggingface", "model-00002-of-00004.safetensors"),
    ):
        _special(_original, _file, "a named pipe")
    _special("meta", "params.json", "a link to a device")
    _special("huggingface", "config.json", "a socket")

    def _pipe(folder: Path) -> Path:
        os.mkfifo(folder / "model.gguf")
        return folder / "model.gguf"

    add("a .gguf path that is a named pipe", WAITING, _pipe)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _one_twice() -> bytes:
    return json.dumps({f"{i:04x}": i for i in range(60_000)}).encode()[:-1] + b', "0000": 0}'


BROKEN_JSON: dict[str, tuple[str, Content]] = {
    "that ends at once": (TRUNCATED, b"{"),
    "of nothing": (TRUNCATED, b""),
    "that is a list": (TYPES, b"[1]"),
    "with NaN": ("RFC 8259, section 6", b'{"dim": NaN}'),
    "with Infinity": ("RFC 8259, section 6", b'{"norm_eps": -Infinity}'),
    "with 1e999": ("RFC 8259, section 6", b'{"norm_eps": 1e999}'),
    "with a key twice": ("RFC 8259, section 4", b'{"dim": 1, "dim": 2}'),
    "of 60,000 keys, one twice": ("case 6", _one_twice),
    "nested 100,000 deep": ("CWE-674", b'{"dim": ' + b"[" * 100_000),
    "nested 100,000 objects deep": ("CWE-674", b'{"a":' * 50_000),
    "with a number of 5,000 digits": ("CVE-2020-10735", b'{"dim": ' + b"9" * 5000 + b"}"),
    "with a number of 900,000 digits": ("CVE-2020-10735", b'{"dim": ' + b"9" * 900_000 + b"}"),
    "longer than 1 MiB": (RESOURCES, b" " * (1 << 20) + b"{}"),
    "of 300,000 empty objects": (RESOURCES, b'{"a": [' + b"{}," * 300_000 + b"{}]}"),
    "that is not UTF-8": ("CWE-176", b'{"\xff": 1}'),
    "in UTF-16": ("CWE-176", '{"dim": 32}'.encode("utf-16")),
    "with half a character": ("CWE-176", b'{"dim": "\\ud800"}'),
    "with a raw NUL": ("CWE-158", b'{"dim": "\0"}'),
    "and more after it": ("CWE-436", b'{"dim": 32} {"dim": 64}'),
}


FILES_OF_JSON = (("meta", "params.json"), ("huggingface", "config.json"))
for _original, _file in FILES_OF_JSON:
    for _what, (_source, _content) in BROKEN_JSON.items():
        add(f"{_file} {_what}", _source, replaced(_original, _file, _content))
    add(f"{_file} of 4 GiB, sparse", RESOURCES, replaced(_original, _file, b"", length=4 << 30))

CHANGED_PARAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys of another library": (ANOTHER_MODEL, {"quantization_args": {}, "lora_args": {}}),
    "true for a width": (TYPES, {"dim": True}),
    "a width of 2^40": (RESOURCES, {"dim": 1 << 40}),
    "5 heads of a width of 32": (ANOTHER_MODEL, {"n_heads": 5}),
    "no heads": ("CWE-369", {"n_heads": 0}),
    "3 key heads of 4 heads": (ANOTHER_MODEL, {"n_kv_heads": 3}),
    "a multiplier of 1e308": (RESOURCES, {"ffn_dim_multiplier": 1e308}),
    "an epsilon of 0.5": (ANOTHER_MODEL, {"norm_eps": 0.5}),
    "text for a RoPE base": (TYPES, {"rope_theta": "500000"}),
    "null for a RoPE base": (ANOTHER_MODEL, {"rope_theta": None}),
    "text for a flag": (TYPES, {"use_scaled_rope": "false"}),
    "2^30 words": (RESOURCES, {"vocab_size": 1 << 30}),
    "texts of 10^30 tokens": (RESOURCES, {"max_seq_len": 10**30}),
    "an object for RoPE scaling": (TYPES, {"rope_scaling": {}}),
    "10,000 unknown keys of escapes": (TERMINAL, {f"{ESCAPES}{i:05}": 0 for i in range(10_000)}),
}
for _what, (_source, _change) in CHANGED_PARAMS.items():
    add(f"params.json with {_what}", _source, updated("meta", "params.json", _change))

CHANGED_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "true for a number of layers": (TYPES, {"num_hidden_layers": True}),
    "text for a number of layers": (TYPES, {"num_hidden_layers": "2"}),
    "0 for a flag": (TYPES, {"tie_word_embeddings": 0}),
    "a flag in words": (TYPES, {"tie_word_embeddings": "false"}),
    "512 layers, of which the file has 2": ("case 11", {"num_hidden_layers": 512}),
    "10^9 layers": (RESOURCES, {"num_hidden_layers": 10**9}),
    "2^40 words": (RESOURCES, {"vocab_size": 1 << 40}),
    "a negative width": (RESOURCES, {"hidden_size": -32}),
    "no heads": ("CWE-369", {"num_attention_heads": 0}),
    "escapes in its name": (TERMINAL, {"model_type": ESCAPES}),
    "a name of 900,000 letters": ("case 11", {"model_type": "x" * 900_000}),
    "code to import": ("CVE-2023-6730, trust_remote_code", {"model_type": "mine", "auto_map": {"AutoModel": "evil.M"}}),
    "experts": (ANOTHER_MODEL, {"model_type": "mixtral"}),
    "another activation": (ANOTHER_MODEL, {"hidden_act": "gelu"}),
    "biases": (ANOTHER_MODEL, {"attention_bias": True}),
    "quantised weights": (ANOTHER_MODEL, {"quantization_config": {"quant_method": "awq"}}),
    "text for a window": (TYPES, {"sliding_window": "4096"}),
    "half a RoPE": (ANOTHER_MODEL, {"partial_rotary_factor": 0.5}),
    "null for a width": (TYPES, {"hidden_size": None}),
    "-1 words": (RESOURCES, {"vocab_size": -1}),
    "a negative epsilon": (ANOTHER_MODEL, {"rms_norm_eps": -1.0}),
    "text for a RoPE base": (TYPES, {"rope_parameters": None, "rope_theta": "x"}),
    "longrope": (ANOTHER_MODEL, {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}}),
    "half a RoPE in its scaling": (ANOTHER_MODEL, {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "half a RoPE scaling": (ANOTHER_MODEL, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}),
    "a list for a RoPE scaling": (TYPES, {"rope_parameters": {"rope_type": ["llama3"]}}),
    "text for RoPE's keys": (TYPES, {"rope_parameters": "llama3"}),
    "dynamic": (ANOTHER_MODEL, {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}),
    "two RoPE scalings": (ANOTHER_MODEL, {"rope_scaling": {"type": "llama3"}}),
}
for _what, (_source, _change) in CHANGED_CONFIGS.items():
    add(f"config.json with {_what}", _source, updated("huggingface", "config.json", _change))


# ---- the index of Hugging Face's shards ------------------------------------------------------------------------------


def _indexed(change: Change) -> Make:
    return changed("huggingface", "model.safetensors.index.json", lambda content: change(content["weight_map"]))


PLACES: dict[str, tuple[str, Any]] = {
    "leads to the folder above": (TRAVERSAL, "../model.gguf.safetensors"),
    "is the folder above": (TRAVERSAL, ".."),
    "leads to the root": (TRAVERSAL, "/etc/passwd.safetensors"),
    "leads to a folder below": (TRAVERSAL, "a/b.safetensors"),
    "leads away on Windows": (TRAVERSAL, "..\\b.safetensors"),
    "leads to a drive": (TRAVERSAL, "C:b.safetensors"),
    "leads to a stream of a file": (TRAVERSAL, "model.safetensors:b.safetensors"),
    "has a NUL": ("CWE-158", "\0.safetensors"),
    "leads to a pickle": ("CVE-2025-32434, the other format", "pytorch_model.bin"),
    "is a number": (TYPES, 7),
    "is a list": (TYPES, ["model-00001-of-00004.safetensors"]),
    "has escapes": (TERMINAL, f"{ESCAPES}.safetensors"),
    "is missing": (TRUNCATED, "model-00009-of-00004.safetensors"),
    "is another shard's": ("CWE-345", "model-00001-of-00004.safetensors"),
}
for _what, (_source, _where) in PLACES.items():
    _misplaced = {"model.norm.weight": _where}
    add(f"a place in the index that {_what}", _source, _indexed(lambda places, new=_misplaced: places.update(new)))
_FIRST = "model-00001-of-00004.safetensors"
_UNKNOWN = {f"{ESCAPES}{i}": _FIRST for i in range(20_000)}
add("an index of 20,000 tensors that no shard has", "case 11", _indexed(lambda places: places.update(_UNKNOWN)))
_SHARDS = {f"{i}": f"{i}.safetensors" for i in range(20_000)}
add("an index of 20,000 shards", QUADRATIC, _indexed(lambda places: places.update(_SHARDS)))
add("an index without places", TRUNCATED, _indexed(lambda places: places.clear()))
_NO_MAP = updated("huggingface", "model.safetensors.index.json", {"weight_map": [_FIRST]})
add("an index whose map is a list", TYPES, _NO_MAP)


# ---- safetensors -----------------------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any = (1,), begin: Any = 0, end: Any = 4, dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


_NONE = json.dumps(entry([0], 0, 0)).encode()
_AUDIT = "safetensors, attacks/ of its repository"


def _many_empty() -> bytes:
    return safetensors(b"{%s}" % b",".join(b'"%d":%s' % (i, _NONE) for i in range(60_000)))


def _many_unknown() -> bytes:
    return safetensors({f"{ESCAPES}{i}": entry([1], 4 * i, 4 * i + 4) for i in range(10_000)}, bytes(40_000))


# What the package rejects has its tests there; here are a few of each kind.
SAFETENSORS: dict[str, tuple[str, Content]] = {
    "with nothing in it": (TRUNCATED, b""),
    "whose header has 2^64-1 bytes": ("CVE-2023-37470 of its kind; " + _AUDIT, safetensors({}, length=(1 << 64) - 1)),
    "whose header is longer than the file": (TRUNCATED, safetensors({"a": entry()}, length=4096)),
    "with 60,000 empty tensors": ("case 10", _many_empty),
    "with an empty tensor": (_AUDIT, safetensors({"a": entry([0, 1], 0, 0)})),
    "with 10,000 unknown tensors": ("case 11", _many_unknown),
    "with escapes in a name": (TERMINAL, safetensors({ESCAPES: entry()}, bytes(4))),
    "with a NUL in a name": ("safetensors #748", safetensors({"model.norm.weight\0": entry()}, bytes(4))),
    "with a hole": (_AUDIT, safetensors({"a": entry(), "b": entry([1], 8, 12)}, bytes(12))),
    "with tensors that overlap": (_AUDIT, safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12))),
    "with a shape that does not fit its bytes": ("CVE-2026-7482", safetensors({"a": entry([1000], 0, 4)}, bytes(4))),
    "with whole numbers for weights": (TYPES, safetensors({"a": entry(dtype="I32")}, bytes(4))),
    "that is a pickle": ("CVE-2025-32434", pickle.dumps({"a": [1.0]})),
}
for _what, (_source, _content) in SAFETENSORS.items():
    add(f"model.safetensors {_what}", _source, replaced("huggingface-one", "model.safetensors", _content))
_LONG = replaced("huggingface-one", "model.safetensors", safetensors(b"", length=100_000_000), length=100_000_008)
add("model.safetensors whose header has 100 MB", RESOURCES, _LONG)


# ---- GGUF ------------------------------------------------------------------------------------------------------------

U8, U16, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 6, 7, 8, 9, 10
DATA = bytes(256)


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


_N_TENSORS, _N_PAIRS = "CVE-2024-21836", "CVE-2024-23605"
_STRINGS, _ARRAYS, _DIMS = "CVE-2024-23496", "CVE-2024-21825", "CVE-2024-21802"
_SIZES = "CVE-2025-53630"
GGUF_FILES: dict[str, tuple[str, bytes]] = {
    "of nothing": (TRUNCATED, b""),
    "of its magic alone": (TRUNCATED, b"GGUF"),
    "with another magic": (TYPES, b"GGML" + bytes(20)),
    "of version 1": (TYPES, header(version=1)),
    "in big-endian order": (TYPES, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    "with 2^62 bytes in an array": ("gguf 0.19 hangs; " + _ARRAYS, header(array(U8, 1 << 62))),
    "with 2^64-1 strings in an array": (_ARRAYS, header(array(STRING, (1 << 64) - 1))),
    "with 2^64-1 numbers in an array": (_ARRAYS, header(array(U64, (1 << 64) - 1))),
    "with an array of an unknown type": (_ARRAYS, header(array(77, 1, bytes(64)))),
    "with nested arrays": ("llama.cpp #28880", header(array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 2000))),
    "with a string longer than the file": (_STRINGS, header(text(b"k") + struct.pack("<IQ", STRING, 1000))),
    "with a string of 2^64-1 bytes": (_STRINGS, header(text(b"k") + struct.pack("<IQ", STRING, (1 << 64) - 1))),
    "with a key longer than the file": (_STRINGS, header(struct.pack("<Q", 1 << 40))),
    "with a string of 2 MiB": (_STRINGS, header(text(b"k") + struct.pack("<I", STRING) + text(bytes(2 << 20)))),
    "with 2^63 tensors": (_N_TENSORS, header(n_tensors=1 << 63)),
    "with 10^6 tensors in no bytes": (_N_TENSORS, header(n_tensors=10**6)),
    "with 16,000 tensors in no bytes": (_N_TENSORS, header(n_tensors=16_000)),
    "with 2^63 pairs of metadata": (_N_PAIRS, b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63)),
    "with 16,000 pairs in no bytes": (_N_PAIRS, b"GGUF" + struct.pack("<IQQ", 3, 0, 16_000)),
    "with a value of unknown type": (TYPES, header(text(b"k") + struct.pack("<II", 77, 0))),
    "with a truth value of 2": (TYPES, header(text(b"k") + struct.pack("<IB", BOOL, 2))),
    "with a key twice": ("llama.cpp #19856", header(number(b"k", 1), number(b"k", 2))),
    "with a key that is not UTF-8": ("CWE-176", header(number(b"\xff", 1))),
    "with escapes in a name": (TERMINAL, header(tensors=(tensor(ESCAPES.encode(), dims=(0,)),)) + DATA),
    "with escapes in a key twice": (TERMINAL, header(number(ESCAPES.encode(), 1), number(ESCAPES.encode(), 2))),
    "with escapes for an architecture": (
        TERMINAL,
        header(text(b"general.architecture") + struct.pack("<I", STRING) + text(ESCAPES.encode())),
    ),
    "with two tensors on the same bytes": ("CWE-436", header(tensors=(tensor(b"a"), tensor(b"b"))) + DATA),
    "with two tensors of one name": ("CWE-436", header(tensors=(tensor(), tensor(offset=32))) + DATA),
    "with a hole between tensors": ("case 18", header(tensors=(tensor(b"a"), tensor(b"b", offset=64))) + DATA),
    "with a hole before the first tensor": ("case 18", header(tensors=(tensor(offset=32),)) + DATA),
    "with tensors in another order": ("case 18", header(tensors=(tensor(b"a", offset=32), tensor(b"b"))) + DATA),
    "with an offset that wraps": (_SIZES, header(tensors=(tensor(offset=(1 << 64) - 64),)) + DATA),
    "with an offset past the end": (TRUNCATED, header(tensors=(tensor(offset=1 << 20),)) + DATA),
    "with an offset that is not aligned": ("llama.cpp #19856", header(tensors=(tensor(offset=1),)) + DATA),
    "with a tensor larger than the file": ("CVE-2026-7482", header(tensors=(tensor(dims=(1 << 30,)),)) + DATA),
    "with a size that wraps": (_SIZES, header(tensors=(tensor(dims=(1 << 32, 1 << 32)),)) + DATA),
    "with a size that wraps to 0 when padded": (
        "llama.cpp #26978",
        header(tensors=(tensor(dims=(4, (1 << 30) - 1, (1 << 30) + 1)),)) + DATA,
    ),
    "with a size that bypasses the check for wrapping": (
        "CVE-2026-27940",
        header(tensors=(tensor(b"a", (8, 1 << 60)), tensor(b"b", (8, 1 << 60), offset=1 << 63))) + DATA,
    ),
    "with rows that wrap": ("llama.cpp #18674", header(tensors=(tensor(dims=(1152, (1 << 42) + 1)),)) + DATA),
    "with a negative count of numbers": ("llama.cpp #27203", header(tensors=(tensor(dims=((1 << 63) - 1, 2)),)) + DATA),
    "with a zero dimension": ("CWE-369", header(tensors=(tensor(dims=(0, 8)),)) + DATA),
    "with no dimensions": (_DIMS, header(tensors=(tensor(dims=()),)) + DATA),
    "with five dimensions": (_DIMS, header(tensors=(tensor(dims=(1,) * 5),)) + DATA),
    "with 2^32-1 dimensions": (_DIMS, header(tensors=(text(b"t") + struct.pack("<I", (1 << 32) - 1),)) + DATA),
    "with half a block": (TYPES, header(tensors=(tensor(dims=(16, 4), kind=8),)) + DATA),
    "with a quantised vector": (TYPES, header(tensors=(tensor(dims=(32,), kind=8),)) + DATA),
    "with a tensor of unknown type": ("ggml #709", header(tensors=(tensor(kind=999),)) + DATA),
    "with a tensor of type 2^32-1": ("ggml #709", header(tensors=(tensor(kind=(1 << 32) - 1),)) + DATA),
    "with a tensor of a removed type": ("ggml #709", header(tensors=(tensor(kind=4),)) + DATA),
    "with a name that is too long": (_STRINGS, header(tensors=(tensor(b"x" * 65),)) + DATA),
    "with a name that is not UTF-8": ("CWE-176", header(tensors=(tensor(b"\xff"),)) + DATA),
    "with alignment 0": ("llama.cpp #19856", header(number(b"general.alignment", 0), tensors=(tensor(),)) + DATA),
    "with alignment 3": ("llama.cpp #19856", header(number(b"general.alignment", 3), tensors=(tensor(),)) + DATA),
    "with alignment 2^31": (RESOURCES, header(number(b"general.alignment", 1 << 31), tensors=(tensor(),)) + DATA),
    "with an array for alignment": (
        "llama.cpp #26318",
        header(array(U8, 1, b"\x20", key=b"general.alignment"), tensors=(tensor(),)) + DATA,
    ),
    "that is a zip archive": ("CWE-436", b"PK\x03\x04" + bytes(60)),
}


def _gguf(content: bytes, zeros: int = 0) -> Make:
    """Return a function that writes a .gguf file of this content, with so many zeros behind it."""

    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(content)
        os.truncate(path, len(content) + zeros)
        return path

    return make


for _what, (_source, _content) in GGUF_FILES.items():
    add(f"a .gguf file {_what}", _source, _gguf(_content))
_EMPTY = array(STRING, 1 << 22, key=b"tokenizer.ggml.tokens")
_KINDS = array(U32, 25_000_000, key=b"tokenizer.ggml.token_type")
_NUMBERS = array(U16, 60_000_000)
add("a .gguf file of 4 million empty strings", "case 8", _gguf(header(_EMPTY), 8 << 22))
add(
    "a .gguf file with 120 MB of unused numbers",
    "case 9",
    _gguf(header(_NUMBERS), 120_000_000),
)
add("a .gguf file with 100 MB of numbers for token types", "case 9", _gguf(header(_KINDS), 100_000_000))

METADATA: dict[str, tuple[str, str, str, Any]] = {
    "a float for BOS": ("case 15", "tokenizer.ggml.bos_token_id", "float32", 264.0),
    "a negative id for BOS": ("case 17", "tokenizer.ggml.bos_token_id", "int32", -1),
    "text for add_bos_token": ("case 16", "tokenizer.ggml.add_bos_token", "string", "false"),
    "a number for a chat template": ("case 16", "tokenizer.chat_template", "uint32", 7),
    "an array for a chat template": ("case 16", "tokenizer.chat_template", "array", ["a"]),
    "numbers for tokens": ("case 16", "tokenizer.ggml.tokens", "array", [1, 2]),
    "a token of 1 MB": ("CVE-2025-49847", "tokenizer.ggml.tokens", "array", ["x" * (1 << 20)]),
    "an array for a number of heads": (TYPES, "llama.attention.head_count_kv", "array", [2, 1]),
    "512 layers, of which it has 2": ("case 11", "llama.block_count", "uint32", 512),
    "three splits": (ANOTHER_MODEL, "split.count", "uint16", 3),
    "experts": (ANOTHER_MODEL, "llama.expert_count", "uint32", 8),
    "the name of another architecture": (ANOTHER_MODEL, "general.architecture", "string", "qwen2"),
    "a RoPE scaling that is not supported": (ANOTHER_MODEL, "llama.rope.scaling.type", "string", "longrope"),
    "a RoPE scale": (ANOTHER_MODEL, "llama.rope.scale_linear", "float32", 4.0),
    "half a RoPE": (ANOTHER_MODEL, "llama.rope.dimension_count", "uint32", 4),
    "other heads for values": (ANOTHER_MODEL, "llama.attention.value_length", "uint32", 16),
    "text for a window": (ANOTHER_MODEL, "llama.attention.sliding_window", "string", "4096"),
    "attention to what follows": (ANOTHER_MODEL, "llama.attention.causal", "bool", False),
    "another scale of attention": (ANOTHER_MODEL, "llama.attention.scale", "float32", 0.5),
    "clamped attention": (ANOTHER_MODEL, "llama.attention.clamp_kqv", "float32", 8.0),
    "ALiBi": (ANOTHER_MODEL, "llama.attention.max_alibi_bias", "float32", 8.0),
    "a scaled embedding": (ANOTHER_MODEL, "llama.embedding_scale", "float32", 12.0),
    "scaled residuals": (ANOTHER_MODEL, "llama.residual_scale", "float32", 0.5),
    "scaled logits": (ANOTHER_MODEL, "llama.logit_scale", "float32", 0.5),
    "2^31 layers": (ANOTHER_MODEL, "llama.block_count", "uint32", 1 << 31),
    "text for a width": (ANOTHER_MODEL, "llama.embedding_length", "string", "32"),
    "NaN for a RoPE base": (ANOTHER_MODEL, "llama.rope.freq_base", "float32", float("nan")),
    "a RoPE base of 1e300": (ANOTHER_MODEL, "llama.rope.freq_base", "float64", 1e300),
    "fewer words than tokens": (ANOTHER_MODEL, "llama.vocab_size", "uint32", 3),
    "a number for tokens": (ANOTHER_MODEL, "tokenizer.ggml.tokens", "uint32", 3),
    "another kind of tokenizer": (ANOTHER_MODEL, "tokenizer.ggml.model", "string", "llama"),
}


def _written(metadata: Mapping[str, tuple[str, Any]], *tensors: str) -> Make:
    """Return a function that lets the gguf package write a file, with other metadata and tensors of one number."""

    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        writer = gguf_writer(path, config_of())
        for key, (kind, value) in metadata.items():
            for pairs in writer.kv_data:
                pairs.pop(key, None)
            getattr(writer, f"add_{kind}")(key, value)
        for name in tensors:
            writer.add_tensor(name, np.zeros(1, dtype=np.float32))
        finish(writer)
        return path

    return make


for _what, (_source, _key, _kind, _value) in METADATA.items():
    add(f"a .gguf file with {_what}", _source, _written({_key: (_kind, _value)}))
_TENSORS = _written({}, *(f"\x1b[{i}" for i in range(10_000)))
add("a .gguf file with 10,000 unknown tensors", "case 11", _TENSORS)
_SCALED = {"llama.rope.scaling.factor": ("float32", 4.0)}
add("a .gguf file with two RoPE scalings", ANOTHER_MODEL, _written(_SCALED, "rope_freqs.weight"))
_NO_LETTERS = {
    "tokenizer.ggml.tokens": ("array", ["", *(f"t{i}" for i in range(519))]),
    "tokenizer.ggml.token_type": ("array", [4] + [1] * 519),
    "tokenizer.ggml.bos_token_id": ("uint32", 0),
}
add("a .gguf file whose BOS is a user's token of no letters", "found by tests/fuzz", _written(_NO_LETTERS))


# ---- .pth ------------------------------------------------------------------------------------------------------------


class _Global:
    """Pickled, a global of this name that is called with a text when it is loaded."""

    def __init__(self, module: str, name: str) -> None:
        self.place = module, name

    def pickled(self, argument: str = "true") -> bytes:
        module, name = self.place
        text = struct.pack("<I", len(argument)) + argument.encode()
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X" + text + b"\x85R."


def _archive(
    path: Path, pickled: bytes, *, records: Mapping[str, bytes] | None = None, kind: int = 0, order: str = "little"
) -> None:
    with zipfile.ZipFile(path, "w", compression=kind) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", order)
        archive.writestr("archive/version", "3\n")
        for name, data in (records or {}).items():
            archive.writestr(f"archive/{name}", data)


def _rezipped(path: Path, change: Callable[[str, bytes], Iterator[tuple[str, bytes]]], kind: int = 0) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression=kind) as archive:
        for name, data in entries:
            for new_name, new_data in change(name, data):
                archive.writestr(new_name, new_data)


def _unchanged(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, data


def _shortened(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, data[: len(data) // 2] if name.endswith("data/3") else data


def _exchanged(path: Path) -> None:
    """Exchange two records of different sizes, so that the sizes of all records stay the same."""
    with zipfile.ZipFile(path) as archive:
        first, other = (next(name for name in archive.namelist() if name.endswith(key)) for key in ("data/0", "data/1"))
        data = {first: archive.read(other), other: archive.read(first)}
    assert len(data[first]) != len(data[other])
    _rezipped(path, lambda name, old: iter([(name, data.get(name, old))]))


def _renamed(path: Path) -> None:
    """Give a record another name in its own header than in the directory, and so another place to the data."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\3\4", 0, data.index(b"/data/3")) + 26] -= 1
    path.write_bytes(data)


def _with_unused(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, data
    if name.endswith("data/3"):
        yield name.replace("data/3", "data/999"), b"unused"


def _shared() -> dict[str, torch.Tensor]:
    storage = torch.ones(48)
    return {"norm.weight": storage[:32], "layers.0.ffn_norm.weight": storage[16:]}


def _with_a_note() -> torch.Tensor:
    tensor = torch.ones(32)
    tensor.note = "untyped_storage may be replaced so"  # type: ignore[attr-defined]
    return tensor


_IN_NO_RECORD = b"\x80\x02}X\x0b\0\0\0norm.weightctorch\nFloatTensor\nK\x20\x85Rs."
_BYTEARRAY = b"\x80\x02}X\1\0\0\0ac__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85Rs."
_DOUBLED = b"\x80\x02]()q\0" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b"e}h\x3cK\1s."
_DEEP = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\1s."


def _pickled(pickled: bytes, **more: Any) -> Callable[[Path], object]:
    return lambda path: _archive(path, pickled, **more)


def _saved(make: Callable[[], object], **more: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(make(), path, **more)


_OLD = {"_use_new_zipfile_serialization": False}
PTH_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "of nothing": (TRUNCATED, lambda path: path.write_bytes(b"")),
    "that calls os.system": ("CWE-502", _pickled(_Global("os", "system").pickled())),
    "that imports torch.hub": ("CWE-502", _pickled(_Global("torch.hub", "load").pickled("x"))),
    "whose global has escapes": ("case 13", _pickled(_Global("os\x1b]0;x\x07", "system\x1b[2J").pickled())),
    "in old torch's layout": ("CVE-2025-32434", _saved(lambda: {"a": torch.ones(2)}, **_OLD)),
    "whose pickle unpacks to 80 MB": (
        "CVE-2019-9674",
        _pickled(b"\x80\x02}." + bytes(80 << 20), kind=zipfile.ZIP_DEFLATED),
    ),
    "with a record that is too short": ("CVE-2026-24747", lambda path: _rezipped(path, _shortened)),
    "with a record whose header has another length of its name": ("CWE-436", _renamed),
    "with two records exchanged": ("CVE-2026-24747", _exchanged),
    "with a record that no tensor has": ("CWE-436", lambda path: _rezipped(path, _with_unused)),
    "with a sparse tensor": ("CVE-2025-62164", _saved(lambda: {"norm.weight": torch.eye(32).to_sparse()})),
    "with 2^40 numbers out of one": ("CVE-2026-7482", _saved(lambda: {"norm.weight": torch.ones(1).expand(1 << 40)})),
    "with an empty tensor of 2^40 columns": (RESOURCES, _saved(lambda: {"norm.weight": torch.ones(0, 1 << 40)})),
    "with tensors that overlap": ("CWE-436", _saved(_shared)),
    "with a tensor on the meta device": ("case 4", _saved(lambda: {"norm.weight": torch.ones(32, device="meta")})),
    "whose pickle doubles a tuple 60 times": ("case 1", _pickled(_DOUBLED)),
    "whose pickle puts a tuple in tuples a million times": ("CWE-674", _pickled(_DEEP)),
    "whose pickle puts a list in lists 300,000 times": (
        RESOURCES,
        _pickled(b"\x80\x02}X\1\0\0\0a" + b"]" * 300_000 + b"a" * 299_999 + b"s."),
    ),
    "whose pickle makes 2 GB of bytes": ("case 2", _pickled(_BYTEARRAY)),
    "with big-endian numbers": ("CWE-436", _pickled(b"\x80\x02}.", order="big")),
    "with numbers that are negated when they are read": (
        "CWE-436",
        _saved(lambda: {"norm.weight": torch._neg_view(torch.ones(32))}),
    ),
    "with compressed records": ("CWE-436", lambda path: _rezipped(path, _unchanged, zipfile.ZIP_DEFLATED)),
    "whose pickle makes 130,000 dicts in tuples": (RESOURCES, _pickled(b"\x80\x02" + b"}\x85" * 130_000 + b".")),
    "with a tensor that has attributes": ("case 3", _saved(lambda: {"norm.weight": _with_a_note()})),
    "with a tensor in no record": ("case 4", _pickled(_IN_NO_RECORD, records={"data/0": bytes(128)})),
    "with escapes in a name": (TERMINAL, _saved(lambda: {ESCAPES: torch.ones(2)})),
    "with 2,000 unknown tensors": ("case 11", _saved(lambda: {f"x{i}": torch.ones(1) for i in range(2000)})),
}
for _what, (_source, _spoil) in PTH_FILES.items():
    add(f"a .pth file {_what}", _source, spoiled("meta", "consolidated.00.pth", _spoil))


# ---- tokenizers ------------------------------------------------------------------------------------------------------

TOKENIZERS: dict[str, tuple[str, str, bytes]] = {
    "of nothing": (TRUNCATED, "tokenizer.model", b""),
    "of other lines": (TRUNCATED, "tokenizer.model", b"nonsense\n"),
    "with ranks that wrap": ("CWE-190", "tokenizer.model", b"YQ== 18446744073709551616\n"),
    "with escapes": (TERMINAL, "tokenizer.model", ESCAPES.encode()),
    "that is a list": (TYPES, "tokenizer.json", b"[]"),
    "nested 100,000 deep": ("CWE-674", "tokenizer.json", b'{"model":' + b"[" * 100_000),
    "that ends at once": (TRUNCATED, "tokenizer.json", b"{"),
    "without a model": (TRUNCATED, "tokenizer.json", b"{}"),
}
for _what, (_source, _file, _content) in TOKENIZERS.items():
    _home = "meta" if _file.endswith("model") else "huggingface"
    add(f"{_file} {_what}", _source, replaced(_home, _file, _content))


def _million_lines(path: Path) -> None:
    """Write 1,100,000 valid lines: the single bytes, and tokens of three bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [(1 << 22 | i).to_bytes(3, "big") for i in range(1_099_744)]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)))


def _piece(*contents: bytes) -> bytes:
    """Return pieces of SentencePiece's file, with these fields."""
    return b"".join(b"\n" + bytes([len(content)]) + content for content in contents)


_LENGTH = 30 << 20  # bytes of 15 million fields: the number 0 in field 15, which no message has
_SETTINGS = b"\x12" + bytes([0x80 | _LENGTH >> shift & 0x7F for shift in (0, 7, 14)]) + bytes([_LENGTH >> 21])


def _fields() -> bytes:
    return b"\x78\x00" * (_LENGTH // 2)


_BPE = b"\x12\x02\x18\x02\x1a\x02\x20\x00"
LONG_TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "of 1,100,000 lines": _million_lines,
    "of one line of 40 MB": lambda path: path.write_bytes(b"A" * (40 << 20)),
    "of 40 million ends of lines": lambda path: path.write_bytes(b"\r" * (40 << 20)),
    "of 15 million fields": lambda path: path.write_bytes(_piece(b"\n\x01a") + _fields()),
    "whose settings have 15 million fields": lambda path: path.write_bytes(_piece(b"\n\x01a") + _SETTINGS + _fields()),
    "whose pieces have 60 fields each": lambda path: path.write_bytes(
        _piece(*(b"\n\x01%c" % (33 + i % 90) + b"\x78\x00" * 60 for i in range(300_000))) + _BPE
    ),
}
for _what, _spoil in LONG_TOKENIZERS.items():
    add(f"tokenizer.model {_what}", "case 19", spoiled("meta", "tokenizer.model", _spoil))


# Each takes a tenth of a second or more to write or to open.
SLOW = {f"tokenizer.model {what}" for what in LONG_TOKENIZERS} | {
    "model.safetensors with 10,000 unknown tensors",
    "a .gguf file with 10,000 unknown tensors",
    "a .pth file with 2,000 unknown tensors",
    "a .pth file whose pickle unpacks to 80 MB",
    "an index of 20,000 tensors that no shard has",
    "config.json of 60,000 keys, one twice",
}


def _added(key: str, value: object) -> Change:
    return lambda spec: spec["added_tokens"][1].update({key: value})


def _model(**values: object) -> Change:
    return lambda spec: spec["model"].update(values)


def _chain(length: int) -> Change:
    """Merges that make "a" twice, three times, ... as long; the last one's parts took cubic work to find."""

    def change(spec: dict[str, Any]) -> None:
        vocab = {chr(letter): letter for letter in range(ord("a"), ord("z") + 1)}
        vocab |= {"a" * n: 100 + n for n in range(2, length)}
        merges = [["a" * n, "a"] for n in range(1, length - 1)]
        spec["model"] |= {"vocab": vocab, "merges": [*merges, ["a" * length, "a"]]}

    return change


_CHANGES: dict[str, tuple[str, Change]] = {
    "with a chain of 1,023 merges": ("case 7", _chain(1023)),
    "with -1 for an added token's id": ("case 17", _added("id", -1)),
    "with half a character in an added token": ("case 17", _added("content", "\ud800")),
    "with an empty added token": ("case 17", _added("content", "")),
    "with ids of 2^40": (RESOURCES, _model(vocab={"a": 1 << 40})),
    "with a regex that takes exponential time": (
        "CWE-1333",
        lambda spec: spec.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        ),
    ),
    "with a normaliser of an untrusted table": (
        RESOURCES,
        lambda spec: spec.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ),
    "with escapes in a key": (TERMINAL, lambda spec: spec.update({ESCAPES: 1})),
}
for _what, (_source, _change) in _CHANGES.items():
    add(f"a tokenizer.json {_what}", _source, changed("huggingface", "tokenizer.json", _change))
