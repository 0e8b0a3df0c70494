"""Malformed and malicious files: a row is (what is wrong, the source of the attack, the edit, a part of the refusal).

The edit of a valid file (`forged`) makes the malformed one. "case N" is a row of the table in `docs/security.md` of
what was once accepted.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from forge import (
    ARRAY,
    BOOL,
    BPE,
    IDENTITY,
    PIECES,
    STRING,
    U8,
    U16,
    U32,
    U64,
    add_value,
    array,
    entry,
    header,
    message,
    number,
    piece,
    put,
    safetensors,
    small_gguf,
    tensor,
    text,
    whole,
)

Edit = bytes | Mapping[str, Any] | Callable[[Path], object]
Row = tuple[str, str, Edit] | tuple[str, str, Edit, str]


class Case(NamedTuple):
    """source: a CVE, an issue, or a case. refusal: a part of the message. `make`: see `forged`."""

    source: str
    make: Callable[[Path], Path | dict[str, Any]]
    refusal: str


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
SHIFTED = "CWE-20, ids of other tokens"
ANOTHER_TEXT = "CWE-20, ids of another text"


def write_originals(folder: Path) -> None:
    """Write a valid checkpoint of each format; cases are made in folders beside them."""
    model = random_model(config_of())
    weights = meta_weights(model)
    write_meta(folder / "meta", weights, meta_params(model.config))
    write_huggingface(folder / "huggingface", model, max_shard_size="60KB")
    write_huggingface(folder / "huggingface-one", model)
    write_gguf(folder / "model.gguf", weights, model.config)


def forged(valid: str, edit: Edit, folder: Path) -> Path | dict[str, Any]:
    """Write a malformed checkpoint into an empty folder, beside the valid ones, and return the path to open.

    valid: a file of a valid folder that is copied, or "model.gguf", which the gguf package writes without tensors, or
    "small_gguf" and a model, whose keys are returned. edit: the whole content; or values of a JSON file by their paths,
    or of metadata by their keys; or a function that changes the file.
    """
    home, _, name = valid.rpartition("/")
    if home == "small_gguf":
        assert isinstance(edit, Mapping)
        return small_gguf(name, **edit)
    path = (shutil.copytree(folder.parent / home, folder, dirs_exist_ok=True) if home else folder) / name
    if isinstance(edit, bytes):
        path.write_bytes(edit)
    elif callable(edit):
        edit(path)
    elif not home:
        write_metadata(path, edit)
    else:
        content = json.loads(path.read_text())
        put(content, edit)
        path.write_text(json.dumps(content))
    return path if path.is_file() and not home else folder


def add(title: str, valid: str, rows: Iterator[Row] | list[Row]) -> None:
    for what, source, edit, *refusal in rows:
        assert f"{title} {what}" not in CASES, what
        CASES[f"{title} {what}"] = Case(source, partial(forged, valid, edit), "".join(refusal))


def write_metadata(path: Path, metadata: Mapping[str, Any], *tensors: str) -> None:
    """Let the gguf package write a file with other metadata and tensors of one number."""
    writer = gguf_writer(path, config_of())
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name in tensors:
        writer.add_tensor(name, np.zeros(1, dtype=np.float32))
    finish(writer)


def padded(content: bytes, zeros: int) -> Callable[[Path], object]:
    """Return a function that writes a content with so many zeros behind it, which take no space on a disk."""

    def write(path: Path) -> None:
        path.write_bytes(content)
        os.truncate(path, len(content) + zeros)

    return write


# ---- not a regular file ----------------------------------------------------------------------------------------------


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)  # names of sockets are short
        listener.bind(path.name)


MAKERS: dict[str, Callable[[Path], object]] = {
    "a named pipe": lambda path: os.mkfifo(path),  # which Windows lacks
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
    "a socket": bind,
}


def _in_its_place(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    MAKERS[kind](path)


_FIRST = "model-00001-of-00004.safetensors"
_INDEX = "huggingface/model.safetensors.index.json"
_PIPE = ("a named pipe",)
SPECIAL = {
    "model.gguf": [*MAKERS],
    "huggingface-one/model.safetensors": ["a named pipe", "a link to a device", "a folder"],
    "meta/params.json": ["a named pipe", "a link to a device"],
    "huggingface/config.json": ["a named pipe", "a socket"],
    **dict.fromkeys(("meta/consolidated.00.pth", "meta/tokenizer.model", "huggingface/tokenizer.json"), _PIPE),
    **dict.fromkeys((_INDEX, f"huggingface/{_FIRST}"), _PIPE),
}
CALLED = {"a link to a device": "a device", "a folder": "a directory"}
if hasattr(os, "mkfifo"):
    for _valid, _kinds in SPECIAL.items():
        for _kind in _kinds:
            _why = "" if "itself" in _kind else f"it is {CALLED.get(_kind, _kind)}, not a regular file"
            add(f"{_valid} is", _valid, [(_kind, WAITING, partial(_in_its_place, _kind), _why)])

    def _pipe(folder: Path) -> Path:
        os.mkfifo(folder / "model.gguf")
        return folder / "model.gguf"

    CASES["a .gguf path that is a named pipe"] = Case(WAITING, _pipe, "is not a regular file, or is a broken link")


# ---- the files of a folder -------------------------------------------------------------------------------------------


def _several(path: Path) -> None:
    path.unlink()
    for name in ("a.gguf", "b.gguf"):
        path.with_name(name).touch()


_BOTH = "more than one checkpoint (weights of Hugging Face's .safetensors and .gguf)"
add(
    "a folder of Meta's",
    "meta/consolidated.00.pth",
    [
        ("without weights", TRUNCATED, Path.unlink, "contains no weights, found params.json, tokenizer.model; "),
        ("with two other checkpoints", "CWE-436", _several, "more than one checkpoint (a.gguf, b.gguf)"),
    ],
)
add(
    "a folder of Hugging Face's",
    "huggingface-one/model.safetensors",
    [
        ("without weights", TRUNCATED, Path.unlink, "contains no weights, found config.json"),
        ("of pickles", TYPES, lambda path: path.rename(path.with_name("pytorch_model.bin")), "pytorch_model.bin"),
        ("with another checkpoint", "CWE-436", lambda path: path.with_name("a.gguf").touch(), _BOTH),
    ],
)


# ---- JSON ------------------------------------------------------------------------------------------------------------

_MANY = json.dumps({f"{i:04x}": i for i in range(60_000)}).encode()
BROKEN_JSON: list[tuple[str, str, bytes]] = [
    ("that ends at once", TRUNCATED, b"{"),
    ("of nothing", TRUNCATED, b""),
    ("that is a list", TYPES, b"[1]"),
    ("with NaN", "RFC 8259, section 6", b'{"dim": NaN}'),
    ("with Infinity", "RFC 8259, section 6", b'{"norm_eps": -Infinity}'),
    ("with 1e999", "RFC 8259, section 6", b'{"norm_eps": 1e999}'),
    ("with a key twice", "RFC 8259, section 4", b'{"dim": 1, "dim": 2}'),
    ("of 60,000 keys, one twice", "case 6", _MANY[:-1] + b', "0000": 0}'),
    ("nested 100,000 deep", "CWE-674", b'{"dim": ' + b"[" * 100_000),
    ("nested 100,000 objects deep", "CWE-674", b'{"a":' * 50_000),
    ("with a number of 5,000 digits", "CVE-2020-10735", b'{"dim": ' + b"9" * 5000 + b"}"),
    ("with a number of 900,000 digits", "CVE-2020-10735", b'{"dim": ' + b"9" * 900_000 + b"}"),
    ("longer than 1 MiB", RESOURCES, b" " * (1 << 20) + b"{}"),
    ("of 300,000 empty objects", RESOURCES, b'{"a": [' + b"{}," * 300_000 + b"{}]}"),
    ("that is not UTF-8", "CWE-176", b'{"\xff": 1}'),
    ("in UTF-16", "CWE-176", '{"dim": 32}'.encode("utf-16")),
    ("with half a character", "CWE-176", b'{"dim": "\\ud800"}'),
    ("with a raw NUL", "CWE-158", b'{"dim": "\0"}'),
    ("and more after it", "CWE-436", b'{"dim": 32} {"dim": 64}'),
]
for _valid in ("meta/params.json", "huggingface/config.json"):
    _file = Path(_valid).name
    add(_file, _valid, [(*row, "is not readable as JSON") for row in BROKEN_JSON])
    add(_file, _valid, [("of 4 GiB, sparse", RESOURCES, padded(b"", 4 << 30), "longer than 1,048,576 bytes")])

_ESCAPED = {f"{ESCAPES}{i:05}": 0 for i in range(10_000)}
add(
    "params.json with",
    "meta/params.json",
    [
        ("nothing in its place", TRUNCATED, Path.unlink, "lacks params.json"),
        ("keys of another library", ANOTHER_MODEL, {"x_args": {}, "lora_args": {}}, "unknown keys: lora_args, x_args"),
        ("true for a width", TYPES, {"dim": True}),
        ("a width of 2^40", RESOURCES, {"dim": 1 << 40}),
        ("5 heads of a width of 32", ANOTHER_MODEL, {"n_heads": 5}),
        ("no heads", "CWE-369", {"n_heads": 0}),
        ("3 key heads of 4 heads", ANOTHER_MODEL, {"n_kv_heads": 3}),
        ("a multiplier of 1e308", RESOURCES, {"ffn_dim_multiplier": 1e308}),
        ("an epsilon of 0.5", ANOTHER_MODEL, {"norm_eps": 0.5}),
        ("text for a RoPE base", TYPES, {"rope_theta": "500000"}),
        ("null for a RoPE base", ANOTHER_MODEL, {"rope_theta": None}, "rope_theta=None must be a finite number"),
        ("text for a flag", TYPES, {"use_scaled_rope": "false"}),
        ("fewer words than tokens", ANOTHER_MODEL, {"vocab_size": 519}, "has 520 tokens and the model only 519"),
        ("2^30 words", RESOURCES, {"vocab_size": 1 << 30}),
        ("texts of 10^30 tokens", RESOURCES, {"max_seq_len": 10**30}),
        ("an object for RoPE scaling", TYPES, {"rope_scaling": {}}),
        ("10,000 unknown keys of escapes", TERMINAL, _ESCAPED, r"\x1b[2J\n\x00\u202e\u2028\x9b00000, "),
    ],
)

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
_TWO_ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
_FACTOR = {"rope_parameters": {"rope_type": "linear", "factor": 10**80}}
_DEEPSEEK = {"rope_type": "yarn", "factor": 4.0, "mscale": True, "mscale_all_dim": 1.0}
_TWO_TYPES = {"factor": 2.0, "rope_type": "linear", "type": "yarn"}
_IMPORT = {"model_type": "mine", "auto_map": {"AutoModel": "evil.M"}}
add(
    "config.json with",
    "huggingface/config.json",
    [
        ("nothing in its place", TRUNCATED, Path.unlink, "lacks config.json"),
        ("true for a number of layers", TYPES, {"num_hidden_layers": True}),
        ("text for a number of layers", TYPES, {"num_hidden_layers": "2"}),
        ("0 for a flag", TYPES, {"tie_word_embeddings": 0}, "tie_word_embeddings=0 must be true or false"),
        ("a flag in words", TYPES, {"tie_word_embeddings": "false"}),
        ("512 layers, of which the file has 2", "case 11", {"num_hidden_layers": 512}, "missing: "),
        ("10^9 layers", RESOURCES, {"num_hidden_layers": 10**9}),
        ("2^40 words", RESOURCES, {"vocab_size": 1 << 40}),
        ("a negative width", RESOURCES, {"hidden_size": -32}),
        ("no heads", "CWE-369", {"num_attention_heads": 0}),
        ("escapes in its name", TERMINAL, {"model_type": ESCAPES}),
        ("a name of 900,000 letters", "case 11", {"model_type": "x" * 900_000}),
        ("code to import", "CVE-2023-6730, trust_remote_code", _IMPORT),
        ("experts", ANOTHER_MODEL, {"model_type": "mixtral"}, "'mixtral' is not supported; supported: \"llama\""),
        ("layers that are not attention", ANOTHER_MODEL, {"layer_types": ["linear_attention"] * 2}, "layer_types="),
        ("another activation", ANOTHER_MODEL, {"hidden_act": "gelu"}),
        ("biases", ANOTHER_MODEL, {"attention_bias": True}),
        ("0 for a flag that is off", TYPES, {"attention_bias": 0}, "attention_bias=0 is not supported"),
        ("quantised weights", ANOTHER_MODEL, {"quantization_config": {"quant_method": "awq"}}),
        ("text for a window", TYPES, {"sliding_window": "4096"}),
        ("half a RoPE", ANOTHER_MODEL, {"partial_rotary_factor": 0.5}),
        ("null for a width", TYPES, {"hidden_size": None}),
        ("-1 words", RESOURCES, {"vocab_size": -1}, "vocab_size=-1 must be a whole number of at least 1"),
        ("a negative epsilon", ANOTHER_MODEL, {"rms_norm_eps": -1.0}),
        ("text for a RoPE base", TYPES, {"rope_parameters": None, "rope_theta": "x"}),
        ("10^30 for a RoPE base", RESOURCES, {"rope_parameters/rope_theta": 10**30}, "0 is above the limit of"),
        ("longrope", ANOTHER_MODEL, {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}}),
        ("half a RoPE in its scaling", ANOTHER_MODEL, {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("half a RoPE scaling", ANOTHER_MODEL, {"rope_parameters": _LLAMA3}, "low_freq_factor=None must be a number"),
        ("a list for a RoPE scaling", TYPES, {"rope_parameters": {"rope_type": ["llama3"]}}),
        ("text for RoPE's keys", TYPES, {"rope_parameters": "llama3"}),
        ("text for a factor", TYPES, {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor='4' must be"),
        ("true for DeepSeek's factor", TYPES, {"rope_parameters": _DEEPSEEK}, "mscale=True must be a number"),
        ("10^80 for a factor", "found by tests/fuzz", _FACTOR, "factor=10000000000000000000000000000000000"),
        ("bounds in the wrong order", TYPES, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1}}),
        ("a factor and no type", ANOTHER_MODEL, {"rope_parameters": {"factor": 2.0}}, "no rope_type; add its type"),
        ("two types", ANOTHER_MODEL, {"rope_scaling": _TWO_TYPES, "rope_parameters": None}, "'yarn'; remove one"),
        ("two RoPEs", ANOTHER_MODEL, {"rope_parameters": _TWO_ROPES}, "this library has one RoPE for all layers"),
        ("dynamic", ANOTHER_MODEL, {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}),
        ("two RoPE scalings", ANOTHER_MODEL, {"rope_scaling": {"type": "llama3"}}, "needs one of rope_parameters"),
    ],
)


# ---- the index of Hugging Face's shards ------------------------------------------------------------------------------

_PLACES: list[tuple[str, str, Any, str]] = [
    ("leads to the folder above", TRAVERSAL, "../model.gguf.safetensors", "which is not the plain name"),
    ("is the folder above", TRAVERSAL, "..", "names '..', which is not a .safetensors file"),
    ("leads to the root", TRAVERSAL, "/etc/passwd.safetensors", "names '/etc/passwd.safetensors', which is not the"),
    ("leads to a folder below", TRAVERSAL, "a/b.safetensors", "which is not the plain name"),
    ("leads away on Windows", TRAVERSAL, "..\\b.safetensors", "which is not the plain name"),
    ("leads to a drive", TRAVERSAL, "C:b.safetensors", "which is not the plain name"),
    ("leads to a stream of a file", TRAVERSAL, "model.safetensors:b.safetensors", "which is not the plain name"),
    ("has a NUL", "CWE-158", "\0.safetensors", "which is not the plain name"),
    ("leads to a pickle", "CVE-2025-32434, the other format", "pytorch_model.bin", "is not a .safetensors file"),
    ("is a number", TYPES, 7, "names 7, which"),
    ("is a list", TYPES, [_FIRST], "which is not the plain name"),
    ("has escapes", TERMINAL, f"{ESCAPES}.safetensors", ""),
    ("is missing", TRUNCATED, "model-00009-of-00004.safetensors", "lacks model-00009-of-00004.safetensors"),
    ("is another shard's", "CWE-345", _FIRST, "the file and the index disagree about model.norm.weight"),
]
add(
    "a place in the index that",
    _INDEX,
    [(what, source, {"weight_map/model.norm.weight": place}, why) for what, source, place, why in _PLACES],
)
_UNKNOWN = {f"weight_map/{ESCAPES}{i}": _FIRST for i in range(20_000)}
add(
    "an index",
    _INDEX,
    [
        ("of 20,000 tensors that no shard has", "case 11", _UNKNOWN, "0004 and 19,990 more"),
        ("of 20,000 shards", QUADRATIC, {f"weight_map/{i}": f"{i}.safetensors" for i in range(20_000)}),
        ("without places", TRUNCATED, {"weight_map": {}}),
        ("whose map is a list", TYPES, {"weight_map": [_FIRST]}, "lacks weight_map"),
    ],
)


# ---- safetensors -----------------------------------------------------------------------------------------------------

_AUDIT = "safetensors, attacks/ of its repository"
_NONE = json.dumps(entry([0], 0, 0)).encode()
_MANY_EMPTY = safetensors(b"{%s}" % b",".join(b'"%d":%s' % (i, _NONE) for i in range(60_000)))
_MANY_UNKNOWN = {f"{ESCAPES}{i}": entry([1], 4 * i, 4 * i + 4) for i in range(10_000)}
add(
    "model.safetensors",
    "huggingface-one/model.safetensors",
    [  # What the package rejects has its tests there; here are a few of each kind.
        ("with nothing in it", TRUNCATED, b""),
        ("whose header has 2^64-1 bytes", "CVE-2023-37470; " + _AUDIT, safetensors({}, length=(1 << 64) - 1)),
        ("whose header is longer than the file", TRUNCATED, safetensors({"a": entry()}, length=4096)),
        ("whose header has 100 MB", RESOURCES, padded(safetensors(b"", length=100_000_000), 100_000_000)),
        ("with 60,000 empty tensors", "case 10", _MANY_EMPTY, "60000 tensors are more than the limit of 16384"),
        ("with an empty tensor", _AUDIT, safetensors({"a": entry([0, 1], 0, 0)}), "a is empty, a single number or not"),
        ("with 10,000 unknown tensors", "case 11", safetensors(_MANY_UNKNOWN, bytes(40_000)), "missing: "),
        ("with escapes in a name", TERMINAL, safetensors({ESCAPES: entry()}, bytes(4)), "missing: "),
        ("with NUL in a name", "safetensors #748", safetensors({"model.norm.weight\0": entry()}, bytes(4)), "missing:"),
        ("with a hole", _AUDIT, safetensors({"a": entry(), "b": entry([1], 8, 12)}, bytes(12)), "offset for tensor"),
        ("with tensors that overlap", _AUDIT, safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12))),
        ("with a shape that does not fit its bytes", "CVE-2026-7482", safetensors({"a": entry([1000])}, bytes(4))),
        ("with whole numbers for weights", TYPES, safetensors({"a": entry(dtype="I32")}, bytes(4)), "a is"),
        ("that is a pickle", "CVE-2025-32434", pickle.dumps({"a": [1.0]})),
    ],
)


# ---- GGUF ------------------------------------------------------------------------------------------------------------

DATA = bytes(256)


def _string(value: bytes, key: bytes = b"k") -> bytes:
    return text(key) + struct.pack("<I", STRING) + value


def _one(*tensors: bytes, alignment: int | None = None) -> bytes:
    pairs = [] if alignment is None else [number(b"general.alignment", alignment)]
    return header(*pairs, tensors=tensors) + DATA


_N_TENSORS, _N_PAIRS = "CVE-2024-21836", "CVE-2024-23605"
_STRINGS, _ARRAYS, _DIMS = "CVE-2024-23496", "CVE-2024-21825", "CVE-2024-21802"
_SIZES = "CVE-2025-53630"
_PADDED = (4, (1 << 30) - 1, (1 << 30) + 1)
_ARRAY = array(U8, 1, b"\x20", key=b"general.alignment")
_WRAPPED = (tensor(b"a", (8, 1 << 60)), tensor(b"b", (8, 1 << 60), offset=1 << 63))
GGUF_FILES: list[tuple[str, str, bytes, str]] = [
    ("of nothing", TRUNCATED, b"", "it is empty"),
    ("of its magic alone", TRUNCATED, b"GGUF", "4 bytes are needed at byte 4"),
    ("with another magic", TYPES, b"GGML" + bytes(20), "does not start with GGUF"),
    ("that is a zip archive", "CWE-436", b"PK\x03\x04" + bytes(60), "does not start with GGUF"),
    ("of version 1", TYPES, header(version=1), "version 1 is not supported"),
    ("in big-endian order", TYPES, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is not supported; supported: 2 and 3"),
    ("with 2^62 bytes in an array", "gguf 0.19 hangs; " + _ARRAYS, header(array(U8, 1 << 62)), "are needed at byte"),
    ("with 2^64-1 strings in an array", _ARRAYS, header(array(STRING, (1 << 64) - 1)), "more strings than the limit"),
    ("with 2^64-1 numbers in an array", _ARRAYS, header(array(U64, (1 << 64) - 1)), "are needed at byte"),
    ("with an array of an unknown type", _ARRAYS, header(array(77, 1, bytes(64))), "type 77 is not supported"),
    ("with nested arrays", "llama.cpp #28880", header(array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 2000)), "type 9"),
    ("with a string longer than the file", _STRINGS, header(_string(struct.pack("<Q", 1000))), "a string of 1000"),
    ("with a string of 2^64-1 bytes", _STRINGS, header(_string(b"\xff" * 8)), "is over a limit"),
    ("with a key longer than the file", _STRINGS, header(struct.pack("<Q", 1 << 40)), "is over a limit"),
    ("with a string of 2 MiB", _STRINGS, header(_string(text(bytes(2 << 20)))), "a string of 2097152 bytes"),
    ("with 2^63 tensors", _N_TENSORS, header(n_tensors=1 << 63), "tensors are more than the limit"),
    ("with 10^6 tensors in no bytes", _N_TENSORS, header(n_tensors=10**6), "tensors are more than the limit"),
    ("with 16,000 tensors in no bytes", _N_TENSORS, header(n_tensors=16_000), ""),
    ("with 2^63 pairs of metadata", _N_PAIRS, b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "are more than the limit"),
    ("with 16,000 pairs in no bytes", _N_PAIRS, b"GGUF" + struct.pack("<IQQ", 3, 0, 16_000), ""),
    ("with a value of unknown type", TYPES, header(text(b"k") + struct.pack("<II", 77, 0)), "type 77"),
    ("with a truth value of 2", TYPES, header(text(b"k") + struct.pack("<IB", BOOL, 2)), "neither 0 nor 1"),
    ("with a key twice", "llama.cpp #19856", header(number(b"k", 1), number(b"k", 2)), "repeats the key 'k'"),
    ("with a key that is not UTF-8", "CWE-176", header(number(b"\xff", 1)), "utf-8"),
    ("with escapes in a name", TERMINAL, _one(tensor(ESCAPES.encode(), dims=(0,))), "has dimensions [0]"),
    ("with escapes in a key twice", TERMINAL, header(*(number(ESCAPES.encode(), i) for i in (1, 2))), "repeats the"),
    ("with two tensors on the same bytes", "CWE-436", _one(tensor(b"a"), tensor(b"b")), "they overlap, or there is a"),
    ("with two tensors of one name", "CWE-436", _one(tensor(), tensor(offset=32)), "repeats the tensor t"),
    ("with a hole between tensors", "case 18", _one(tensor(b"a"), tensor(b"b", offset=64)), "64 and must be at 32,"),
    ("with a hole before the first tensor", "case 18", _one(tensor(offset=32)), "they overlap, or there is a gap"),
    ("with tensors in another order", "case 18", _one(tensor(b"a", offset=32), tensor(b"b")), "there is a gap"),
    ("with an offset that wraps", _SIZES, _one(tensor(offset=(1 << 64) - 64)), "there is a gap"),
    ("with an offset past the end", TRUNCATED, _one(tensor(offset=1 << 20)), "there is a gap"),
    ("with an offset that is not aligned", "llama.cpp #19856", _one(tensor(offset=1)), "there is a gap"),
    ("with a tensor larger than the file", "CVE-2026-7482", _one(tensor(dims=(1 << 30,))), "it is truncated"),
    ("with a size that wraps", _SIZES, _one(tensor(dims=(1 << 32, 1 << 32))), "it is truncated"),
    ("with a size that wraps when padded", "llama.cpp #26978", _one(tensor(dims=_PADDED)), "it is truncated"),
    ("with a size that bypasses the check for wrapping", "CVE-2026-27940", _one(*_WRAPPED), "it is truncated"),
    ("with rows that wrap", "llama.cpp #18674", _one(tensor(dims=(1152, (1 << 42) + 1))), "it is truncated"),
    ("with a negative count of numbers", "llama.cpp #27203", _one(tensor(dims=((1 << 63) - 1, 2))), "it is truncated"),
    ("with a zero dimension", "CWE-369", _one(tensor(dims=(0, 8))), "has dimensions [0, 8]"),
    ("with no dimensions", _DIMS, _one(tensor(dims=())), "t has 0 dimensions"),
    ("with five dimensions", _DIMS, _one(tensor(dims=(1,) * 5)), "t has 5 dimensions"),
    ("with 2^32-1 dimensions", _DIMS, _one(text(b"t") + struct.pack("<I", (1 << 32) - 1)), "dimensions"),
    ("with half a block", TYPES, _one(tensor(dims=(16, 4), kind=8)), "of type Q8_0 has dimensions [16, 4]"),
    ("with a quantised vector", TYPES, _one(tensor(dims=(32,), kind=8)), "of type Q8_0 has dimensions [32]"),
    ("with a tensor of unknown type", "ggml #709", _one(tensor(kind=999)), "of an unknown type (999)"),
    ("with a tensor of type 2^32-1", "ggml #709", _one(tensor(kind=(1 << 32) - 1)), "of an unknown type (4294967295)"),
    ("with a tensor of a removed type", "ggml #709", _one(tensor(kind=4)), "of an unknown type (4)"),
    ("with a tensor of a type that is not read", "ggml #709", _one(tensor(kind=10)), "t is Q2_K; supported: F32, F16,"),
    ("with a name that is too long", _STRINGS, _one(tensor(b"x" * 65)), "a string of 65 bytes"),
    ("with a name that is not UTF-8", "CWE-176", _one(tensor(b"\xff")), "utf-8"),
    ("with alignment 0", "llama.cpp #19856", _one(tensor(), alignment=0), "must be a power of two from 8"),
    ("with alignment 3", "llama.cpp #19856", _one(tensor(), alignment=3), "must be a power of two from 8"),
    ("with alignment 2^31", RESOURCES, _one(tensor(), alignment=1 << 31), "must be a power of two from 8"),
    ("with an array for alignment", "llama.cpp #26318", header(_ARRAY), "must be a power of two from 8"),
]
add("a .gguf file", "model.gguf", [*GGUF_FILES])
_EMPTY = header(array(STRING, 1 << 22, key=b"tokenizer.ggml.tokens"))
_KINDS = header(array(U32, 25_000_000, key=b"tokenizer.ggml.token_type"))
_ARCHITECTURE = _string(text(ESCAPES.encode()), key=b"general.architecture")
_NO_LETTERS = {
    "tokenizer.ggml.tokens": ["", *(f"t{i}" for i in range(519))],
    "tokenizer.ggml.token_type": [4] + [1] * 519,
    "tokenizer.ggml.bos_token_id": 0,
}


def _with_unknown(path: Path) -> None:
    write_metadata(path, {}, *(f"\x1b[{i}" for i in range(10_000)))


def _with_two_scalings(path: Path) -> None:
    write_metadata(path, {"llama.rope.scaling.factor": 4.0}, "rope_freqs.weight")


add(
    "a .gguf file",
    "model.gguf",
    [
        ("with escapes for an architecture", TERMINAL, header(_ARCHITECTURE), "general.architecture="),
        ("of 4 million empty strings", "case 8", padded(_EMPTY, 8 << 22), "more strings than the limit of 1048576"),
        ("with 120 MB of unused numbers", "case 9", padded(header(array(U16, 60_000_000)), 120_000_000)),
        ("with 100 MB of numbers for token types", "case 9", padded(_KINDS, 100_000_000), "more numbers than the"),
        ("with 10,000 unknown tensors", "case 11", _with_unknown, r"unexpected: \x1b[0, \x1b[1, \x1b[10, "),
        ("with two RoPE scalings", ANOTHER_MODEL, _with_two_scalings, "has rope_freqs.weight and another RoPE scaling"),
        ("whose BOS is a user's token of no letters", "found by tests/fuzz", _NO_LETTERS, "token '' has 0 characters"),
    ],
)
METADATA: list[tuple[str, str, str, Any, str]] = [
    ("a float for BOS", "case 15", "tokenizer.ggml.bos_token_id", 264.0, "=264.0 must be a whole number from 0 on"),
    ("a negative id for BOS", "case 17", "tokenizer.ggml.bos_token_id", -1, "=-1 must be a whole number from 0 on"),
    ("text for add_bos_token", "case 16", "tokenizer.ggml.add_bos_token", "false", "='false' must be true or false"),
    ("a number for a chat template", "case 16", "tokenizer.chat_template", 7, "template is 7 and must be a text"),
    ("an array for a chat template", "case 16", "tokenizer.chat_template", ["a"], "Unread(count=1) and must be a text"),
    ("numbers for tokens", "case 16", "tokenizer.ggml.tokens", [1, 2], "an array, of which each value is text"),
    ("a token of 1 MB", "CVE-2025-49847", "tokenizer.ggml.tokens", ["x" * (1 << 20)], "1 tokens but 520 token types"),
    ("an array for a number of heads", TYPES, "llama.attention.head_count_kv", [2, 1], "n_kv_heads=Unread(count=2)"),
    ("512 layers, of which it has none", "case 11", "llama.block_count", 512, "missing: "),
    ("three splits", ANOTHER_MODEL, "split.count", 3, "split.count=3 is not supported"),
    ("experts", ANOTHER_MODEL, "llama.expert_count", 8, "expert_count=8 is not supported"),
    ("the name of another architecture", ANOTHER_MODEL, "general.architecture", "qwen2", "lacks qwen2."),
    ("a RoPE scaling that is not supported", ANOTHER_MODEL, "llama.rope.scaling.type", "longrope", "'longrope' is not"),
    ("a RoPE scale", ANOTHER_MODEL, "llama.rope.scale_linear", 4.0, "scale_linear=4.0 is not supported"),
    ("half a RoPE", ANOTHER_MODEL, "llama.rope.dimension_count", 4, "it must be head_dim=8"),
    ("other heads for values", ANOTHER_MODEL, "llama.attention.value_length", 16, "it must be head_dim=8"),
    ("text for a window", ANOTHER_MODEL, "llama.attention.sliding_window", "4096", "must be a whole number from 0 on"),
    ("attention to what follows", ANOTHER_MODEL, "llama.attention.causal", False, "is not supported; supported: true"),
    ("another scale of attention", ANOTHER_MODEL, "llama.attention.scale", 0.5, "=0.5 is not supported"),
    ("clamped attention", ANOTHER_MODEL, "llama.attention.clamp_kqv", 8.0, "=8.0 is not supported"),
    ("ALiBi", ANOTHER_MODEL, "llama.attention.max_alibi_bias", 8.0, "=8.0 is not supported"),
    ("a scaled embedding", ANOTHER_MODEL, "llama.embedding_scale", 12.0, "=12.0 is not supported"),
    ("scaled residuals", ANOTHER_MODEL, "llama.residual_scale", 0.5, "=0.5 is not supported"),
    ("scaled logits", ANOTHER_MODEL, "llama.logit_scale", 0.5, "=0.5 is not supported"),
    ("a bound of YaRN", ANOTHER_MODEL, "llama.rope.scaling.yarn_beta_fast", 16.0, "=16.0 is not supported; supported:"),
    ("2^31 layers", ANOTHER_MODEL, "llama.block_count", 1 << 31, "is above the limit of 512"),
    ("text for a width", ANOTHER_MODEL, "llama.embedding_length", "32", "must be a whole number"),
    ("NaN for a RoPE base", ANOTHER_MODEL, "llama.rope.freq_base", float("nan"), "must be a finite number"),
    ("a RoPE base of 1e300", ANOTHER_MODEL, "llama.rope.freq_base", 1e300, "must be a finite number"),
    ("fewer words than tokens", ANOTHER_MODEL, "llama.vocab_size", 3, "has 520 tokens and the model only 3"),
    ("a number for tokens", ANOTHER_MODEL, "tokenizer.ggml.tokens", 3, "an array, of which each value is text"),
    ("another kind of tokenizer", ANOTHER_MODEL, "tokenizer.ggml.model", "llama", "scores must be an array"),
]
add(
    "a .gguf file with",
    "model.gguf",
    [(what, source, {key: value}, why) for what, source, key, value, why in METADATA],
)


# ---- .pth ------------------------------------------------------------------------------------------------------------


def _call(place: str, argument: str = "true") -> bytes:
    """Return a pickle that calls a global, "module\\nname", with a text when it is loaded."""
    return (
        b"\x80\x02c" + f"{place}\n".encode() + b"X" + struct.pack("<I", len(argument)) + argument.encode() + b"\x85R."
    )


def _pickled(
    pickled: bytes, *, records: Mapping[str, bytes] | None = None, kind: int = 0, order: str = "little"
) -> Callable[[Path], object]:
    """Return a function that writes an archive with this data.pkl."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression=kind) as archive:
            contents = {"data.pkl": pickled, "byteorder": order, "version": "3\n", **(records or {})}
            for name, data in contents.items():
                archive.writestr(f"archive/{name}", data)

    return write


def _saved(content: object, **more: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(content, path, **more)


def _rezipped(change: Callable[[dict[str, bytes], str, str], object], kind: int = 0) -> Callable[[Path], object]:
    """Return a function that changes the records, of which it gets those of the first and the fourth tensor by name."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        first, fourth = (next(name for name in records if name.endswith(f"/data/{n}")) for n in (0, 3))
        change(records, first, fourth)
        with zipfile.ZipFile(path, "w", compression=kind) as archive:
            for name, data in records.items():
                archive.writestr(name, data)

    return write


def _exchange(records: dict[str, bytes], first: str, fourth: str) -> None:
    """Exchange two records of different sizes, so that the sizes of all records stay the same."""
    assert len(records[first]) != len(records[fourth])
    records[first], records[fourth] = records[fourth], records[first]


def _shorten(records: dict[str, bytes], _: str, fourth: str) -> None:
    records[fourth] = records[fourth][: len(records[fourth]) // 2]


def _add_unused(records: dict[str, bytes], _: str, fourth: str) -> None:
    records[fourth + "99"] = b"unused"


def _renamed(path: Path) -> None:
    """Give a record another name in its own header than in the directory, and so another place to the data."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\3\4", 0, data.index(b"/data/3")) + 26] -= 1
    path.write_bytes(data)


_STORAGE, _NOTED = torch.ones(48), torch.ones(32)
_SHARED = {"norm.weight": _STORAGE[:32], "layers.0.ffn_norm.weight": _STORAGE[16:]}
_NOTED.note = "untyped_storage may be replaced so"  # type: ignore[attr-defined]
_IN_NO_RECORD = b"\x80\x02}X\x0b\0\0\0norm.weightctorch\nFloatTensor\nK\x20\x85Rs."
_BYTEARRAY = b"\x80\x02}X\1\0\0\0ac__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85Rs."
_DOUBLED = b"\x80\x02]()q\0" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b"e}h\x3cK\1s."
_DEEP = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\1s."
_LISTS = b"\x80\x02}X\1\0\0\0a" + b"]" * 300_000 + b"a" * 299_999 + b"s."
_OTHER_SIZES = "its records have other sizes than its tensors"
_DEFLATED = zipfile.ZIP_DEFLATED


def _norm(make: Callable[[], torch.Tensor]) -> Callable[[Path], object]:
    return lambda path: torch.save({"norm.weight": make()}, path)


add(
    "a .pth file",
    "meta/consolidated.00.pth",
    [
        ("of nothing", TRUNCATED, b""),
        ("that calls os.system", "CWE-502", _pickled(_call("os\nsystem")), "it names 'os system'"),
        ("that imports torch.hub", "CWE-502", _pickled(_call("torch.hub\nload", "x")), "it names 'torch.hub load'"),
        ("whose global has escapes", "case 13", _pickled(_call("os\x1b]0;x\x07\nsystem\x1b[2J")), "it names 'os"),
        ("in old torch's layout", "CVE-2025-32434", _saved({}, _use_new_zipfile_serialization=False)),
        ("whose pickle unpacks to 80 MB", "CVE-2019-9674", _pickled(b"\x80\x02}." + bytes(80 << 20), kind=_DEFLATED)),
        ("with a record that is too short", "CVE-2026-24747", _rezipped(_shorten), _OTHER_SIZES),
        ("with a record whose header has another length of its name", "CWE-436", _renamed, "in directory"),
        ("with two records exchanged", "CVE-2026-24747", _rezipped(_exchange), _OTHER_SIZES),
        ("with a record that no tensor has", "CWE-436", _rezipped(_add_unused), _OTHER_SIZES),
        ("with compressed records", "CWE-436", _rezipped(lambda *_: None, _DEFLATED), "is compressed; save a dict"),
        ("with a sparse tensor", "CVE-2025-62164", _norm(lambda: torch.eye(32).to_sparse())),
        ("with 2^40 numbers out of one", "CVE-2026-7482", _norm(lambda: torch.ones(1).expand(1 << 40)), "not"),
        ("with an empty tensor of 2^40 columns", RESOURCES, _norm(lambda: torch.ones(0, 1 << 40)), "norm.weight is"),
        ("with tensors that overlap", "CWE-436", _saved(_SHARED), "missing:"),
        ("with a tensor on the meta device", "case 4", _norm(lambda: torch.ones(32, device="meta"))),
        ("whose pickle doubles a tuple 60 times", "case 1", _pickled(_DOUBLED), "a tuple of 127 values, and the limit"),
        ("whose pickle puts a tuple in tuples a million times", "CWE-674", _pickled(_DEEP), "it has a tuple of 65"),
        ("whose pickle puts a list in lists 300,000 times", RESOURCES, _pickled(_LISTS), "more than 262144 operations"),
        ("whose pickle makes 2 GB of bytes", "case 2", _pickled(_BYTEARRAY), "it names '__builtin__ bytearray'"),
        ("with big-endian numbers", "CWE-436", _pickled(b"\x80\x02}.", order="big"), "numbers are not little-endian"),
        ("with numbers negated when read", "CWE-436", _norm(lambda: torch._neg_view(torch.ones(32))), "contiguous"),
        ("whose pickle makes 130,000 dicts in tuples", RESOURCES, _pickled(b"\x80\x02" + b"}\x85" * 130_000 + b".")),
        ("with a tensor that has attributes", "case 3", _norm(lambda: _NOTED)),
        ("with a tensor in no record", "case 4", _pickled(_IN_NO_RECORD, records={"data/0": bytes(128)}), "'torch"),
        ("with escapes in a name", TERMINAL, _saved({ESCAPES: torch.ones(2)}), r"unexpected: \x1b]0;owned\x07\x1b["),
        ("with 2,000 unknown tensors", "case 11", _saved({f"x{i}": torch.ones(1) for i in range(2000)}), "unexpected:"),
    ],
)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def _line(at: int, line: bytes) -> Callable[[Path], object]:
    """Return a function that replaces a line, "<base64 of a token> <rank>", of Meta's file of Llama 3."""

    def write(path: Path) -> None:
        lines = path.read_bytes().splitlines()
        lines[at] = line
        path.write_bytes(b"\n".join(lines))

    return write


def _million_lines(path: Path) -> None:
    """Write 1,100,000 valid lines: the single bytes, and tokens of three bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [(1 << 22 | i).to_bytes(3, "big") for i in range(1_099_744)]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)))


_EXPECTED = ": expected a token in base64"
_XYZ, _LONG_TOKEN = base64.b64encode(b"xyz"), base64.b64encode(b"x" * 1025)
add(
    "a tokenizer.model of Llama 3",
    "meta/tokenizer.model",
    [
        ("of nothing", TRUNCATED, b"", "256 of the 256 single bytes are missing"),
        ("of other lines", TRUNCATED, b"nonsense\n", "line 1" + _EXPECTED),
        ("with ranks that wrap", "CWE-190", b"YQ== 18446744073709551616\n", "line 1: the rank is"),
        ("with escapes", TERMINAL, ESCAPES.encode(), "line 1" + _EXPECTED),
        ("with an empty line", SHIFTED, _line(5, b""), "line 6"),
        ("with a line that is not base64", SHIFTED, _line(5, b"!!!! 5"), "line 6" + _EXPECTED),
        ("with three words on a line", SHIFTED, _line(5, b"JQ== 5 5"), "line 6"),
        ("with a rank left out", SHIFTED, _line(5, b"JQ== 6"), "line 6: the rank is b'6' but must be 5"),
        ("with a rank of two digits", SHIFTED, _line(5, b"JQ== 05"), "line 6: the rank is b'05'"),
        ("with a rank and no token", SHIFTED, _line(5, b" 5"), "line 6: a token of 0 bytes"),
        # The last line: no later one is there to disagree.
        ("whose last line is not base64", SHIFTED, _line(263, b"!!!! 263"), "line 264" + _EXPECTED),
        ("with a token twice", SHIFTED, _line(263, b"IQ== 263"), "line 264: token b'!' is also on line 34"),
        ("without a single byte", SHIFTED, _line(5, _XYZ + b" 5"), "1 of the 256 single bytes are missing"),
        ("with a token of 1,025 bytes", RESOURCES, _line(263, _LONG_TOKEN + b" 263"), "a token of 1025 bytes"),
        ("that begins as SentencePiece's", TRUNCATED, _line(0, b"\x0a\x0e\x0a\x05<unk>"), ": SentencePiece: "),
        ("that is a text", TYPES, _line(0, b"no such thing"), "or Llama 2"),
        ("of 1,100,000 lines", "case 19", _million_lines, "1100000 lines are more than the limit of 1048320 tokens"),
        ("of one line of 40 MB", "case 19", b"A" * (40 << 20), "line 1" + _EXPECTED),
        ("of 40 million ends of lines", "case 19", b"\r" * (40 << 20), "line 1" + _EXPECTED),
        ("of 64 MiB and a byte, sparse", RESOURCES, padded(b"", (64 << 20) + 1), "longer than 67,108,864 bytes"),
    ],
)

_FIELDS = b"\x78\x00" * (15 << 20)  # 15 million fields: the number 0 in field 15, which no message has
_LONG_PIECES = b"".join(message(1, message(1, b"%c" % (33 + i % 90)), b"\x78\x00" * 60) for i in range(90))
_BYTES = message(2, whole(3, 2), whole(35, 1))
_SPM = PIECES + BPE + IDENTITY
add(
    "a SentencePiece file",
    "meta/tokenizer.model",
    [
        ("of unigrams", ANOTHER_TEXT, PIECES + IDENTITY, "of type 'unigram' is not supported; supported: 'bpe'"),
        ("of words", ANOTHER_TEXT, PIECES + message(2, whole(3, 3)) + IDENTITY, "'word'"),
        ("that drops spaces", ANOTHER_TEXT, PIECES + BPE, "spm_train --remove_extra_whitespaces=false"),
        ("that normalises", ANOTHER_TEXT, PIECES + BPE + message(3, message(2, b"abc")), "rule_name=identity"),
        ("that keeps spaces", ANOTHER_TEXT, PIECES + BPE + message(3, whole(4, 0), whole(5, 0)), "escape_whitespaces"),
        ("with a flag of 5", TYPES, PIECES + BPE + message(3, whole(4, 5)), "the flag in field 4 is 5"),
        ("with its settings twice", "CWE-436", PIECES + BPE + BPE + IDENTITY, "field 2 of the model is repeated"),
        ("of bytes without their tokens", SHIFTED, PIECES + _BYTES + IDENTITY, "0 tokens are bytes with"),
        ("with one byte", SHIFTED, piece(b"<0x00>", kind=6) + _SPM, "1 tokens are bytes"),
        ("with a byte of another name", SHIFTED, piece(b"byte", kind=6) + _SPM, "has the type of bytes"),
        ("with a token twice", SHIFTED, _SPM + piece(b"a"), "token 3, 'a', is in the vocabulary twice"),
        ("with an empty token", SHIFTED, _SPM + piece(b""), "has 0 characters"),
        ("with an empty piece", SHIFTED, b"\n\x00" + BPE + IDENTITY, "has 0 characters"),
        ("with a token that is not UTF-8", "CWE-176", _SPM + piece(b"\xff"), "utf-8"),
        ("with a token of 1,025 characters", RESOURCES, _SPM + piece(b"x" * 1025), "it must have 1 to 1024"),
        ("with a special character", ANOTHER_TEXT, _SPM + piece(b"c", kind=3), "special and one character"),
        ("with an unused token", ANOTHER_TEXT, _SPM + piece(b"ab", kind=5), "'ab' is unused, and SentencePiece would"),
        ("with two tokens of one score", ANOTHER_TEXT, _SPM + piece(b"ab") + piece(b"ba"), "'ab' and 'ba' have one"),
        ("with a type of 7", TYPES, _SPM + piece(b"c", kind=7), "has type 7"),
        ("with NaN for a score", TYPES, _SPM + piece(b"c", float("nan")), "the score nan, which is not finite"),
        ("with infinity for a score", TYPES, _SPM + piece(b"c", float("inf")), "not finite"),
        ("with a number for a score", TYPES, _SPM + message(1, message(1, b"c"), whole(2, 5)), "must be a 32-bit"),
        ("with 8 bytes for a score", TYPES, _SPM + message(1, message(1, b"c"), b"\x11" + bytes(8)), "a 32-bit float"),
        ("with a number for a piece", TYPES, _SPM + whole(1, 1), "number 1 must be a text or message"),
        ("with text for a type", TYPES, PIECES + message(2, message(3, b"ab")) + IDENTITY, "b'ab' must be a number"),
        ("that ends in a piece", TRUNCATED, PIECES + b"\x0a\x7f", "127 bytes are needed at byte"),
        ("that ends in a number", TRUNCATED, PIECES + b"\x0a", "in the middle of a number"),
        ("of one byte", TRUNCATED, b"\n", "in the middle of a number"),
        ("with a number of 11 bytes", RESOURCES, PIECES + b"\x0a" + b"\xff" * 10 + b"\1", "more than 10 bytes"),
        ("with a field of an unknown kind", TYPES, PIECES + b"\x0b", "of kind 3"),
        ("of a million pieces", RESOURCES, b"\n\x00" * ((1 << 20) + 1), "there are more than 1048576 tokens"),
        ("of 15 million fields", "case 19", PIECES + _FIELDS, "has more than 1,114,112 fields at byte 22"),
        ("whose settings have 15 million fields", "case 19", PIECES + message(2, _FIELDS), "has more than 65,536"),
        ("whose pieces have 60 fields each", "case 19", _LONG_PIECES * 3333 + BPE + IDENTITY, "has more than 4 fields"),
    ],
)

_REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
_BOS = "<|begin_of_text|>"


def _opening(*single: object, ids: object = None) -> dict[str, Any]:
    """Return a post_processor that makes a text of parts: "A" is the text, and others are special tokens."""
    parts = [{"Sequence": {"id": "A"}} if each == "A" else {"SpecialToken": {"id": each}} for each in single]
    tokens = {str(each): {"id": each, "ids": ids} for each in single}
    return {"post_processor": {"type": "TemplateProcessing", "single": parts, "special_tokens": tokens}}


def _chain(length: int) -> dict[str, Any]:
    """Merges that make "a" twice, three times, ... as long; the last one's parts took cubic work to find."""
    vocab = {chr(letter): letter for letter in range(ord("a"), ord("z") + 1)} | {
        "a" * n: 200 + n for n in range(2, length)
    }
    merges = [["a" * n, "a"] for n in range(1, length - 1)]
    return {"added_tokens": [], "model/vocab": vocab, "model/merges": [*merges, ["a" * length, "a"]]}


def _many_added(path: Path) -> None:
    content = json.loads(path.read_text())
    flags = content["added_tokens"][0]
    content["added_tokens"] = [flags | {"id": 1000 + i, "content": f"{i:01000}"} for i in range(600)]
    path.write_text(json.dumps(content))


def _beside(name: str, content: object) -> Callable[[Path], object]:
    return lambda path: path.with_name(name).write_text(json.dumps(content))


def _long_template(path: Path) -> None:
    padded(b"", (8 << 20) + 1)(path.with_name("chat_template.jinja"))


_METASPACE = {"type": "Metaspace", "replacement": "\u2581"}
_SPECIAL_TH = {"added_tokens/1/content": "th", "added_tokens/1/id": 256}
_SOME = _METASPACE | {"prepend_scheme": "some"}
_DECODE = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_OF_SPACES = {"decoder": {"type": "Sequence", "decoders": _DECODE}}
_OTHERS = "adds tokens other than one before the text"
_UNSUPPORTED = "is not supported; supported are"
add(
    "a tokenizer.json",
    "huggingface-one/tokenizer.json",
    [
        ("that is a list", TYPES, b"[]", "is not readable as JSON"),
        ("nested 100,000 deep", "CWE-674", b'{"model":' + b"[" * 100_000, "is not readable as JSON"),
        ("that ends at once", TRUNCATED, b"{", "is not readable as JSON"),
        ("without a model", TRUNCATED, b"{}", "model of tokenizer.json is a NoneType; it must be a dict"),
        ("with escapes in a key", TERMINAL, {ESCAPES: 1}, "the unknown key"),
        ("with an unknown key", ANOTHER_TEXT, {"new": 5}, "tokenizer.json has the unknown key 'new'"),
        ("of unigrams", ANOTHER_TEXT, {"model/type": "Unigram"}, "model type 'Unigram' is not supported"),
        ("with dropout", ANOTHER_TEXT, {"model/dropout": 0.1}, "dropout=0.1"),
        ("with bytes beside letters", ANOTHER_TEXT, {"model/byte_fallback": True}, "byte_fallback=True"),
        ("with 1 for a flag", TYPES, {"model/ignore_merges": 1}, "ignore_merges=1 must be true or false"),
        ("with a number for a token", TYPES, {"model/unk_token": 5}, "unk_token=5 must be a text"),
        ("with an unknown key of the model", ANOTHER_TEXT, {"model/new": 5}, "the model has the unknown key 'new'"),
        ("with a list for a vocabulary", TYPES, {"model/vocab": []}, "vocab of tokenizer.json is a list; it must be a"),
        ("with ids of 2^40", RESOURCES, {"model/vocab": {"a": 1 << 40}}, "it must be a whole number from 0 on"),
        ("with a token of other letters", SHIFTED, {"model/vocab/hello there": 600}, "not a byte-level token"),
        ("with -1 for an id", "case 17", {"model/vocab/th": -1}, "id -1; it must be a whole number"),
        ("with an id twice", SHIFTED, {"model/vocab/th": 17}, "share"),
        ("with a merge of no token", SHIFTED, {"model/merges/3": ["a", "zzz"]}, "merge ['a', 'zzz']: not two ordinary"),
        ("with a merge that gives no token", SHIFTED, {"model/merges/3": ["a", "b"]}, "merge ['a', 'b']: not two"),
        ("with a merge of three", SHIFTED, {"model/merges/3": "a b c"}, "merge 'a b c': not two tokens"),
        ("with a merge of numbers", TYPES, {"model/merges/3": [1, 2]}, "merge [1, 2]: not two tokens"),
        ("with a merge of a list of three", SHIFTED, {"model/merges/3": ["t", "h", "e"]}, "not two tokens"),
        ("with a merge twice", SHIFTED, {"model/merges/3": ["t", "h"]}, "a merge is in the list twice"),
        ("with a merge of special tokens", SHIFTED, {"model/merges/0": [_BOS, "a"]}, "not two ordinary tokens"),
        ("with a merge that gives a special token", SHIFTED, _SPECIAL_TH, "merge ['t', 'h']: not two ordinary tokens"),
        ("with a chain of 1,023 merges", "case 7", _chain(1023), "not two ordinary tokens of the vocabulary"),
        ("with a normaliser of more keys", ANOTHER_TEXT, {"normalizer": {"type": "NFC", "more": 1}}, "normalizer"),
        ("in small letters", ANOTHER_TEXT, {"normalizer": {"type": "Lowercase"}}, 'normalizer [{"type": "Lowercase"}]'),
        ("with a normaliser of an untrusted table", RESOURCES, {"normalizer": {"type": "Precompiled"}}, "Precompiled"),
        ("with no pre-tokenizer", ANOTHER_TEXT, {"pre_tokenizer": None}, 'decoder [{"type": "ByteLevel"'),
        ("with a list for a step", TYPES, {"pre_tokenizer": [{"type": "ByteLevel"}]}, "is not a step or a Sequence"),
        ("with 0 for a flag of a step", TYPES, {"pre_tokenizer/pretokenizers/1/use_regex": 0}, _UNSUPPORTED),
        ("with a regex that takes exponential time", "CWE-1333", {"pre_tokenizer/pretokenizers/0": _REGEX}, "(a+)+$"),
        ("with a space before", ANOTHER_TEXT, {"pre_tokenizer/pretokenizers/1/add_prefix_space": True}, _UNSUPPORTED),
        ("with another decoder", ANOTHER_TEXT, {"decoder": {"type": "WordPiece"}}, 'decoder [{"type": "WordPiece"}]'),
        ("that lowers pieces", ANOTHER_TEXT, _OF_SPACES | {"pre_tokenizer": None, "normalizer": _REGEX}, "normalizer"),
        ("with two marks of spaces", ANOTHER_TEXT, _OF_SPACES | {"normalizer": _REGEX, "pre_tokenizer": _METASPACE}),
        ("that cuts at spaces", ANOTHER_TEXT, _OF_SPACES | {"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ("with an unknown scheme", TYPES, _OF_SPACES | {"pre_tokenizer": _SOME}, "must be one of always, first, never"),
        ("with another processor", ANOTHER_TEXT, {"post_processor": {"type": "BertProcessing"}}, "'BertProcessing'"),
        ("with a token behind", ANOTHER_TEXT, _opening("A", _BOS), _OTHERS),
        ("with no parts", ANOTHER_TEXT, _opening(), _OTHERS),
        ("with an end in front", ANOTHER_TEXT, _opening("<|end_of_text|>", "A", ids=[265]), "is not the BOS token"),
        ("with another id in front", SHIFTED, _opening(_BOS, "A", ids=[7]), "another id than the token's 264"),
        ("with no id in front", SHIFTED, _opening(_BOS, "A"), "another id than the token's 264"),
        ("with an unknown token in front", SHIFTED, _opening("x", "A"), "names 'x', which is not an added token"),
        ("with 5 for parts", TYPES, {"post_processor": {"type": "TemplateProcessing", "single": 5}}, "; it must be a"),
        ("with text for a flag", TYPES, {"added_tokens/0/lstrip": "true"}, "lstrip='true' must be true or false"),
        ("with an ordinary token's id", SHIFTED, {"added_tokens/0/id": 50}, "an ordinary token has its id 50, too"),
        ("with an ordinary token's text", SHIFTED, {"added_tokens/1/content": "th"}, "token has its id 265, too"),
        ("with an added token twice", SHIFTED, {"added_tokens/1/content": _BOS}, "another one has its text or its id"),
        ("with an added id twice", SHIFTED, {"added_tokens/1/id": 264}, "another one has its text or its id 264"),
        ("with -1 for an added token's id", "case 17", {"added_tokens/1/id": -1}, "a whole number from 0 on"),
        ("with true for an added token's id", "case 17", {"added_tokens/1/id": True}, "id True; it must be a whole"),
        ("with 2^40 for an added token's id", RESOURCES, {"added_tokens/1/id": 1 << 40}, "a whole number from 0 on"),
        ("with text for an added token", TYPES, {"added_tokens/0": _BOS}, "must be an object"),
        ("with an unknown key of a token", ANOTHER_TEXT, {"added_tokens/0/other": 1}, "the unknown key 'other'"),
        ("with a long added token", RESOURCES, {"added_tokens/1/content": "x" * 1025}, "has 1025 characters"),
        ("with half a character in an added token", "case 17", {"added_tokens/1/content": "\ud800"}, "half of a"),
        ("with an empty added token", "case 17", {"added_tokens/1/content": ""}, "has 0 characters"),
        ("with an object for added tokens", TYPES, {"added_tokens": {}}, "added_tokens of tokenizer.json is a dict"),
        ("with 600,000 added characters", RESOURCES, _many_added, "have 600000 characters; the limit is 524288"),
    ],
)
add(
    "a file beside tokenizer.json",
    "huggingface-one/tokenizer.json",
    [
        ("with an unknown end", SHIFTED, _beside("tokenizer_config.json", {"eos_token": "no"}), "'no' is not a token"),
        ("with 5 for BOS", TYPES, _beside("tokenizer_config.json", {"bos_token": 5}), "bos_token 5 must be a text"),
        ("with 5 for a template", TYPES, _beside("tokenizer_config.json", {"chat_template": 5}), "5 and must be a"),
        ("with a list of texts", TYPES, _beside("tokenizer_config.json", {"chat_template": ["x"]}), "of named"),
        ("with 1.5 for an id", "case 17", _beside("generation_config.json", {"eos_token_id": [0, 1.5]}), "1.5 must be"),
        ("with true for an id", TYPES, _beside("generation_config.json", {"eos_token_id": True}), "True must be a"),
        ("of 8 MiB and a byte, sparse", RESOURCES, _long_template, "longer than 8,388,608 bytes"),
    ],
)

_KINDS_OF_WORDS = [3, 1, 1, 1, 1, 1, 1, 3]
add(
    "the keys of a vocabulary with",
    "small_gguf/gpt2",
    [
        ("an unknown model", ANOTHER_TEXT, {"model": "bert"}, "model='bert' is not supported; supported: 'gpt2'"),
        ("an unknown way to cut", ANOTHER_TEXT, {"pre": "default"}, "supported: deepseek-r1-qwen, gpt-2, llama-bpe"),
        ("a list of ways to cut", TYPES, {"pre": ["smollm"]}, "pre=['smollm'] is not supported"),
        ("EOS behind each text", ANOTHER_TEXT, {"add_eos_token": True}, "add_eos_token=true is not supported"),
        ("a space before each text", ANOTHER_TEXT, {"add_space_prefix": True}, "add_space_prefix=true is not"),
        ("one token", TRUNCATED, {"tokens": ["a"]}, "1 tokens but 10 token types"),
        ("no tokens' key", TRUNCATED, {"tokens": None}, "an array, of which each value is text, and is missing"),
        ("no tokens", TRUNCATED, {"tokens": [], "token_type": [], "merges": []}, "has no ordinary tokens"),
        ("a long token", RESOURCES, {"tokens": ["<s>", "a" * 1025], "token_type": [3, 1]}, "has 1025 characters"),
        ("an empty token", TYPES, {"tokens": ["<s>", ""], "token_type": [3, 1]}, "has 0 characters"),
        ("an empty user's token", TYPES, {"tokens": ["", "a"], "token_type": [4, 1]}, "has 0 characters"),
        ("a number among tokens", TYPES, {"tokens": ["<s>", 5], "token_type": [3, 1]}, "of which each value is text"),
        ("true for types", TYPES, {"token_type": [True] * 10}, "each value is a whole number"),
        ("no types", TRUNCATED, {"token_type": None}, "a whole number from 0 on, and is missing"),
        ("true for BOS", TYPES, {"bos_token_id": True}, "bos_token_id=True must be a whole number from 0 on"),
        ("a float for EOS", "case 15", {"eos_token_id": 7.0}, "eos_token_id=7.0 must be a whole number from 0 on"),
        ("-1 for EOS", "case 17", {"eos_token_id": -1}, "eos_token_id=-1 must be a whole number from 0 on"),
        ("text for a flag", "case 16", {"add_bos_token": "false"}, "add_bos_token='false' must be true or false"),
        ("0 for a flag", "case 16", {"add_bos_token": 0}, "must be true or false"),
        ("a token ten times", SHIFTED, {"tokens": ["a"] * 10}, "'a', is in the vocabulary twice"),
        ("a byte among letters", TYPES, {"token_type": [*_KINDS_OF_WORDS, 4, 6]}, "has type 6"),
        ("a type of 7", TYPES, {"token_type": [*_KINDS_OF_WORDS, 4, 7]}, "has type 7"),
        ("a token of other letters", SHIFTED, {"token_type": [*_KINDS_OF_WORDS, 1, 3]}, "not a byte-level token"),
        ("BOS behind the tokens", SHIFTED, {"bos_token_id": 10}, "id 10 is not in the vocabulary of 10 tokens"),
        ("no BOS that it adds", ANOTHER_TEXT, {"bos_token_id": None, "add_bos_token": True}, "names none"),
        ("a merge of one", SHIFTED, {"merges": ["a b", "ab c", "ab"]}, "not two tokens with a space between"),
        ("a merge twice", SHIFTED, {"merges": ["a b", "ab c", "a b"]}, "twice"),
        ("a merge of three", SHIFTED, {"merges": ["a b", "a b c"]}, "not two tokens with a space between"),
        ("a merge that gives no token", SHIFTED, {"merges": ["a b", "a d", "ab c"]}, "not two ordinary tokens"),
        ("a merge of no token", SHIFTED, {"merges": ["a b", "a bc"]}, "not two ordinary tokens"),
        ("numbers for merges", TYPES, {"merges": [1]}, "merges must be an array"),
    ],
)
add(
    "the keys of pieces with",
    "small_gguf/llama",
    [
        *(
            (f"{value!r:.9} for {key}", TYPES, {key: value}, f"tokenizer.ggml.{key} must be an array")
            for key in ("token_type", "scores")
            for value in (None, ["x"] * 9, 5)
        ),
        ("a float for a type", TYPES, {"token_type": [1.0] * 9}, "token_type must be an array"),
        ("NaN for a score", TYPES, {"scores": [float("nan")] * 9}, "has the score nan, which is not finite"),
        ("no types", TRUNCATED, {"token_type": []}, "9 tokens but 0 token types"),
        ("one score", TRUNCATED, {"scores": [0.0]}, "9 tokens but 1 scores"),
        ("spaces that it drops", ANOTHER_TEXT, {"remove_extra_whitespaces": True}, "=true is not supported"),
        ("text for a flag", TYPES, {"add_space_prefix": "false"}, "add_space_prefix='false' must be true or false"),
        ("a table of characters", ANOTHER_TEXT, {"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is not"),
        ("nothing in them", TRUNCATED, {"tokens": [], "token_type": [], "scores": []}, "there must be 1 to 1048576"),
        ("a long piece", RESOURCES, {"tokens": ["x" * 1025], "token_type": [1], "scores": [0.0]}, "has 1025"),
        ("BOS behind the pieces", SHIFTED, {"bos_token_id": 9}, "id 9 is not in the vocabulary of 9 tokens"),
    ],
)


# Each takes a tenth of a second or more to write or to open.
SLOW = {name for name, case in CASES.items() if case.source == "case 19"} | {
    "model.safetensors with 10,000 unknown tensors",
    "a .gguf file with 10,000 unknown tensors",
    "a .pth file with 2,000 unknown tensors",
    "a .pth file whose pickle unpacks to 80 MB",
    "a SentencePiece file of a million pieces",
    "an index of 20,000 tensors that no shard has",
    "config.json of 60,000 keys, one twice",
}
