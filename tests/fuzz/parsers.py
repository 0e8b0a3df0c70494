"""The parsers of untrusted files: what one accepts must be valid, and it may only raise its own errors.

The tokenizers have two parsers each: the whole, and NAME.checks without the library, which takes milliseconds to build
what our checks have checked in a fraction of one.
"""

import io
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import tiktoken
import torch
from checkpoints import write_meta_tokenizer
from forge import BPE, IDENTITY, header, number, piece, small_gguf, tensor
from fuzz.edits import BETWEEN, Edit, edited_archive, edited_bytes, edited_json, edited_pickle, edited_proto
from untrusted.malformed.cases import BROKEN_JSON, GGUF_FILES

from llama.checkpoint import huggingface
from llama.checkpoint.assemble import needed_shapes, same_bits
from llama.checkpoint.meta import read_pth
from llama.tokenizer import Tokenizer
from llama.tokenizer.bpe import BpeCodec
from llama.untrusted.errors import CheckpointError
from llama.untrusted.gguf_header import parse_header as parse_gguf
from llama.untrusted.json_object import parse_object

_HERE = Path(tempfile.gettempdir()) / f"fuzzed-{os.getpid()}"


class Parser(NamedTuple):
    """run: returns, or raises for a finding. seeds: small files, most of them valid. edit: of most mutations."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    edit: Edit


def _check_message(message: str) -> None:
    assert message.isprintable(), message
    assert len(message) < 1000, message


def _as_json(content: object) -> bytes:
    return json.dumps(content).encode()


# ---- headers and configurations --------------------------------------------------------------------------------------


def run_gguf(data: bytes) -> None:
    for arrays in (None, ("k",)):
        try:
            found = parse_gguf(data, arrays=arrays)
        except (ValueError, struct.error):
            continue
        spans = sorted((info.start, info.start + info.nbytes) for info in found.tensors.values())
        assert all(0 < begin < end <= len(data) for begin, end in spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(type(key) is str for key in found.metadata)


def run_json(data: bytes) -> None:
    try:
        content = parse_object(data)
    except ValueError:
        return
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)  # no NaN, and no half of a character
    assert parse_object(text.encode("utf-8")) == content


def run_index(data: bytes) -> None:
    try:
        places = huggingface.shards_of(Path("index.json"), parse_object(data))
    except CheckpointError as error:
        _check_message(str(error))
    except ValueError:
        pass
    else:
        assert all(Path("folder", file).parent == Path("folder") for file in places)
        assert all(file.endswith(".safetensors") and "\0" not in file for file in places)


def run_config(data: bytes) -> None:
    path = Path("config.json")
    try:
        config = parse_object(data)
        args, *_ = huggingface._args(path, config, huggingface._family(path, config))
    except CheckpointError as error:
        _check_message(str(error))
    except ValueError:
        pass
    else:
        assert needed_shapes(args)  # what is accepted can be built


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 520,
}
_CONFIG: dict[str, Any] = {"model_type": "llama", **_SIZES}
_MORE = {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
_FLAGS = {"tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "sliding_window": 64}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "beta_fast": 32, "original_max_position_embeddings": 32}
_CONFIGS = [
    _CONFIG,
    _CONFIG | _MORE | _FLAGS | {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    _CONFIG | _MORE | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **_LLAMA3}},
    _CONFIG | _FLAGS | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **_YARN}},
]
_VALUE = {"a": [1, -2.5, None, True, "é"], "b": {"c": [[], {}], "\x1b[2J": 10**60}}
_PLACES = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "a.safetensors"}}


def _of_json(*valid: Any) -> list[bytes]:
    return [*map(_as_json, valid), *(data for *_, data in BROKEN_JSON if len(data) < 1 << 14)]


def _gguf_headers() -> list[bytes]:
    valid = header(number(b"k", 7), tensors=(tensor(),)) + bytes(256)
    return [valid, *(data for _, _, data, _ in GGUF_FILES if len(data) < 1 << 14)]


# ---- .pth ------------------------------------------------------------------------------------------------------------


def run_pickle(data: bytes) -> None:
    """Read the bytes as the data.pkl of an archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archives()[0])) as opened, zipfile.ZipFile(buffer, "w") as made:
        for name in opened.namelist():
            made.writestr(name, data if name.endswith("/data.pkl") else opened.read(name))
    run_archive(buffer.getvalue())


def run_archive(data: bytes) -> None:
    """Read the bytes as a .pth file: what is accepted must be what torch reads record by record, without a mapping."""
    path = _HERE.with_suffix(".pth")
    path.write_bytes(data)
    try:
        tensors = read_pth(path)
    except CheckpointError as error:
        _check_message(str(error))
        return
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    assert list(tensors) == list(theirs)
    assert all(same_bits(tensor, theirs[name].detach()) for name, tensor in tensors.items())


def archives() -> list[bytes]:
    torch.manual_seed(0)
    flat = torch.randn(24)
    linear = torch.nn.Linear(3, 2)
    contents: list[object] = [
        {"norm.weight": torch.randn(3), "output.weight": torch.randn(2, 3).bfloat16()},
        {"a": flat[:8].view(2, 4), "b": flat[8:20], "c": torch.ones(2, 1, 3).half()},
        linear.state_dict(),
        dict(linear.named_parameters()),
        {"tok_embeddings.weight": flat, "output.weight": flat},
        {},
    ]
    found = []
    for content in contents:
        torch.save(content, buffer := io.BytesIO())
        found.append(buffer.getvalue())
    return found


def _pickle_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("/data.pkl")))


# ---- tokenizers ------------------------------------------------------------------------------------------------------

_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_TEXTS = ("", "the other é 😀", " <s>a</s> <|im_end|>\n", "\x00\u2581  1234")


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
    _HERE.mkdir(exist_ok=True)
    for name in set(os.listdir(_HERE)) - files.keys():
        (_HERE / name).unlink()
    for name, data in files.items():
        (_HERE / name).write_bytes(data)
    return _HERE


def run_tokenizer(read: Callable[[bytes], Tokenizer], whole: bool, data: bytes) -> None:
    """Read a tokenizer and use it; without the library unless `whole`."""
    with ExitStack() as stack:
        for owner, name, instead in () if whole else ((BpeCodec, "_model", None), (tiktoken, "Encoding", dict)):
            stack.enter_context(patch.object(owner, name, instead))
        try:
            tokenizer = read(data)
        except (ValueError, RecursionError):  # RecursionError: Python's own JSON reader, of read_gguf
            return
        if whole:
            _use(tokenizer)
        named = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, *tokenizer.stop_tokens} - {None}
        special = tokenizer.special_tokens
        assert all(type(each) is int and 0 <= each < tokenizer.n_words for each in (*named, *special.values()))
        assert len(set(special.values())) == len(special)
        assert all(text and type(text) is str for text in special)
        tokenizer.decode(range(min(tokenizer.n_words, 100)))
        tokenizer.fingerprint().encode()


def _use(tokenizer: Tokenizer) -> None:
    """Encode and decode: no special token comes out of plain text, and each id has a text."""
    special = set(tokenizer.special_tokens.values())
    for text in _TEXTS:
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


_LETTERS = ("a", "b", "ab", "\u0120", "\u0120a", "abab")
_PIECES = ("\u2581", "a", "b", "\u2581a", "ab")


def _json_of(vocab: tuple[str, ...], merges: list[object], **steps: object) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {text: i for i, text in enumerate(vocab)}, "merges": merges}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(vocab) + i, "content": text, **flags, "special": i != 1}
        for i, text in enumerate(("<s>", "<|im_end|>", "</s>"))
    ]
    return {"added_tokens": added, "model": model, **steps}


_TO_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_OPENING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_BACK = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_DECODER = {"type": "Sequence", "decoders": [_BACK, {"type": "ByteFallback"}, {"type": "Fuse"}]}
_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, _REPLACE]}
_METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
_JSONS = [
    _json_of(_LETTERS, [["a", "b"], ["\u0120", "a"], "ab ab"], pre_tokenizer=_TO_BYTES, decoder={"type": "ByteLevel"}),
    _json_of(_PIECES, [["\u2581", "a"], ["a", "b"]], normalizer=_PREPEND, decoder=_DECODER, post_processor=_OPENING),
    _json_of(_PIECES, [["\u2581", "a"]], pre_tokenizer=_METASPACE, decoder=_DECODER),
]
_CONFIG_BESIDE = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "x"}],
}


def _jsons() -> list[bytes]:
    beside = [_JSONS[1], _CONFIG_BESIDE, {"eos_token_id": [7, 6], "pad_token_id": -1}]
    return [*map(_as_json, _JSONS), BETWEEN.join([*map(_as_json, beside), b"{{ x }}"])]


def _ggufs() -> list[bytes]:
    more = {"add_bos_token": True, "eot_token_id": 1}
    of_pieces = [{"add_space_prefix": True}, {"remove_extra_whitespaces": False, "unknown_token_id": 0}]
    found = [
        small_gguf(**more),
        small_gguf(pre="llama3", **more),
        *(small_gguf("llama", **more, **o) for o in of_pieces),
    ]
    return [_as_json(keys | {"tokenizer.chat_template": "x"}) for keys in found]


def _models() -> list[bytes]:
    write_meta_tokenizer(path := _folder({}) / "lines")
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_end|>": 4}
    pieces = [piece(text.encode(), -1.0 * i, kinds.get(text, 1)) for i, text in enumerate([*kinds, *_PIECES])]
    return [path.read_bytes(), b"".join(pieces) + BPE + IDENTITY]


_TOKENIZERS: dict[str, tuple[Callable[[bytes], Tokenizer], Callable[[], list[bytes]], Edit]] = {
    "tokenizer.json": (read_json, _jsons, edited_json),
    "tokenizer.model": (read_model, _models, edited_proto),
    "tokenizer.gguf": (read_gguf, _ggufs, edited_json),
}
PARSERS = {
    "gguf": Parser(run_gguf, _gguf_headers, edited_bytes),
    "json": Parser(run_json, partial(_of_json, _VALUE), edited_json),
    "index": Parser(run_index, partial(_of_json, _PLACES), edited_json),
    "config": Parser(run_config, partial(_of_json, *_CONFIGS), edited_json),
    "pickle": Parser(run_pickle, lambda: [*map(_pickle_of, archives())], edited_pickle),
    "pth": Parser(run_archive, archives, edited_archive),
    **{
        f"{name}{'' if whole else '.checks'}": Parser(partial(run_tokenizer, read, whole), seeds, edit)
        for name, (read, seeds, edit) in _TOKENIZERS.items()
        for whole in (True, False)
    },
}
