"""Bytes that are taken for the files of a tokenizer: nothing but ValueError may come out, and what loads must work.

Each `run_*` takes the bytes of one file. Knows which parser reads them; does not know where bytes come from.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llama.tokenizer import Tokenizer

TEXTS = ("", "the other é 😀", " <s>a</s> <|im_end|>\n", "\x00\u2581  1234")


def run_json(data: bytes) -> bool:
    """Read the bytes as a tokenizer.json; return whether it is one."""
    return _run("tokenizer.json", data, Tokenizer.from_huggingface)


def run_model_proto(data: bytes) -> bool:
    """Read the bytes as a tokenizer.model; return whether it is one."""
    return _run("tokenizer.model", data, Tokenizer)


def run_gguf_metadata(metadata: Mapping[str, Any]) -> bool:
    """Read plain values as a GGUF file's keys; return whether they hold a tokenizer."""
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except ValueError:
        return False
    _use(tokenizer)
    return True


def _run(name: str, data: bytes, read: Callable[[Path], Tokenizer]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            tokenizer = read(path)
        except ValueError:
            return False
    _use(tokenizer)
    return True


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
    tokenizer.decode(range(min(tokenizer.n_words, 100)))
    tokenizer.fingerprint()


PARSERS: dict[str, Callable[[bytes], object]] = {"tokenizer.json": run_json, "tokenizer.model": run_model_proto}


def seeds(name: str) -> list[bytes]:
    """Return a tokenizer of each kind that is right."""
    from checkpoints import write_huggingface_tokenizer, write_meta_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        if name == "tokenizer.json":
            write_huggingface_tokenizer(Path(folder))
        else:
            write_meta_tokenizer(Path(folder) / name)
        return [(Path(folder) / name).read_bytes()]
