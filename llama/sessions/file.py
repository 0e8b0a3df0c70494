"""Session files: the ids and the contents of the caches as safetensors, and the origin of both.

Keys and values are valid for one model only, so the file has digests of the model, and loading rejects any other model.
The file names a kind of cache, never code, and is never unpickled.

Format: `untrusted/safetensors_header.py`; the facts are stored as a JSON text in the metadata. The safetensors library
maps files into memory, and a mapped file that is truncated ends the process; so files are read here.
Knows tensors and files; does not know the Session, the tensors of a kind of cache, or what decides a model's numbers.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from llama.host.files import replace_private
from llama.host.machine import available_memory
from llama.kv_cache import KVCache
from llama.kv_cache.names import kinds_named, read_kind
from llama.sessions.digest import digest_of, digest_of_text
from llama.sessions.origin import check_origin, fingerprint, origin, weights_digest
from llama.streaming import TextCodec
from llama.switches import Switches
from llama.untrusted.files import open_regular
from llama.untrusted.safetensors_header import Span, read_header
from llama.untrusted.words import printable

logger = logging.getLogger(__name__)

FORMAT, VERSION = "llama-kv session", "1"
_HEADER_LIMIT = 1 << 24  # bytes, at least 64 a tensor; the note, which may be any text, is a part of it
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The facts, which are the values besides the tensors: those of Content, those of `origin`, and digests.
_OWN = {"kv_cache": str, "max_seq_len": int, "bound": int | None, "held": int, "written": int, "note": str | None}
_TYPES = {
    **_OWN,
    **{"sizes": dict, "dtype": str, "activations": int, "exact": bool, "place": str | None},
    **{"weights": str, "tokenizer": str, "tensors": str, "execution": str | None},  # execution: None in older files
}


@dataclass(frozen=True)
class Content:
    """A session as plain values.

    bound: the most positions that a cache stores; None without a limit.
    held: the number of ids that are cached.
    written: the end of the positions that may be written, see Session.
    logits: those after the text, if they are known.
    layers: the state of each layer's cache, by name; empty if `held` is 0.
    note: the caller's text.
    """

    kv_cache: str
    max_seq_len: int
    bound: int | None
    ids: list[int]
    held: int
    written: int
    logits: Tensor | None
    layers: list[dict[str, Tensor]]
    note: str | None


class IdsOnly:
    """The tokenizer of a session that was loaded without one: it rejects texts."""

    bos_id: int | None = None
    adds_bos = False
    stop_tokens: Sequence[int] = ()

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> str:
        """Return that of the tokenizer that the session was saved with."""
        return self._fingerprint

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "this session was loaded without a tokenizer, so it accepts and returns ids only; "
            "for text, load it with one: model.load_session(path, tokenizer)"
        )

    encode = decode = stream = _refuse


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_session(path: str | PathLike[str], content: Content, model: Switches, tokenizer: TextCodec) -> None:
    """Write the file, readable by its owner only, or replace it as a whole. Raises ValueError if that fails."""
    _check_alone(model)
    if not isinstance(content.note, str | None):
        raise ValueError(f"session.note={content.note!r:.80} must be a text or None")
    tensors = _tensors(content)
    facts = {
        **{name: getattr(content, name) for name in _OWN},
        **origin(model),
        "weights": weights_digest(model),
        "tokenizer": fingerprint(tokenizer, model.args.vocab_size),
        "tensors": digest_of(sorted(tensors.items())),
        "execution": str(model.execution_with(content.kv_cache)),
    }
    try:
        replace_private(Path(path), (_header(facts, tensors), *map(_bytes_of, tensors.values())))
    except (OSError, ValueError) as error:
        raise ValueError(f"the session cannot be saved as {Path(path)}: {_reason(error)}") from error


def _tensors(content: Content) -> dict[str, Tensor]:
    """Return the file's tensors by name, on the CPU; the widest dtypes come first, so that all are aligned."""
    named = {"ids": torch.tensor(content.ids, dtype=torch.int64, device="cpu")}
    if content.logits is not None:
        named["logits"] = content.logits
    for layer, state in enumerate(content.layers):
        named |= {f"layers.{layer}.{name}": tensor for name, tensor in state.items()}
    if strange := {name: tensor.dtype for name, tensor in named.items() if tensor.dtype not in _NAMES}:
        raise ValueError(f"kv_cache={content.kv_cache!r} has tensors of dtypes that a file cannot store: {strange}")
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    return dict(sorted(named.items(), key=lambda item: -item[1].itemsize))


def _header(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes before those of the tensors."""
    text = json.dumps(facts)
    metadata = {"format": FORMAT, "version": VERSION, "session": text, "digest": digest_of_text(text)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    if (size := len(encoded)) > _HEADER_LIMIT:
        raise ValueError(f"the header would have {size} bytes, and the limit is {_HEADER_LIMIT}; shorten session.note")
    return len(encoded).to_bytes(8, "little") + encoded


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_session(path: str | PathLike[str], model: Switches, tokenizer: TextCodec | None) -> tuple[Content, TextCodec]:
    """Return the saved session, with its tensors on the model's device, and the tokenizer; an IdsOnly if it is None.

    Raises ValueError with the reason if the file is not a session, is damaged, or belongs to another model.
    """
    _check_alone(model)
    try:
        with open_regular(Path(path)) as file:
            facts, spans = _read_facts(file)
            _check_kind(facts["kv_cache"])
            check_origin(model, facts)
            execution = str(model.execution_with(facts["kv_cache"]))
            if facts["execution"] not in (None, execution):
                logger.info(
                    "the session was computed by: %s; this model computes by: %s, which may round differently",
                    printable(facts["execution"], 120),
                    execution,
                )
            if tokenizer is not None and fingerprint(tokenizer, model.args.vocab_size) != facts["tokenizer"]:
                raise ValueError(
                    "it was saved with another tokenizer, whose ids are another text; give that one, or none for ids"
                )
            tensors = _read_tensors(file, facts["tensors"], spans, model)
        if weights_digest(model) != facts["weights"]:
            raise ValueError(
                "it was saved with other weights, or in another layout (quantize); load the model as it was"
            )
        return _content(facts, tensors, model), IdsOnly(facts["tokenizer"]) if tokenizer is None else tokenizer
    except (OSError, ValueError) as error:
        raise ValueError(f"the session {Path(path)} cannot be loaded: {_reason(error)}") from error


def _read_facts(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Span]]:
    """Return the facts, and the tensors' spans in order. The file's next byte is the first tensor's."""
    try:
        size, dtypes = os.fstat(file.fileno()).st_size, {name: dtype.itemsize for name, dtype in _DTYPES.items()}
        header = read_header(file, size, dtypes=dtypes, header_limit=_HEADER_LIMIT, tensor_limit=1 << 18, most_of={})
    except ValueError as error:
        raise ValueError(f"it is not a session, or is damaged: {error}") from error
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise ValueError("it is a safetensors file, but not a session; give one that session.save wrote")
    if (version := metadata.get("version")) != VERSION:
        raise ValueError(f"its format has version {version!r:.20}, this library reads {VERSION}; feed the text again")
    try:
        if digest_of_text(metadata["session"]) == metadata["digest"]:
            facts = {"execution": None, **json.loads(metadata["session"])}
            if _are_valid(facts):
                return facts, header.tensors
    except (KeyError, ValueError, TypeError, RecursionError):
        pass
    raise _damaged("its description in the header")


def _are_valid(facts: Mapping[str, Any]) -> bool:
    counts = [value for value in facts.values() if type(value) is int]
    return (
        facts.keys() == _TYPES.keys()
        and all(isinstance(facts[name], kind) for name, kind in _TYPES.items())
        and all(type(value) is not bool or name == "exact" for name, value in facts.items())
        and min(counts) >= 0
        and facts["activations"] in (8, 16)
        and facts["held"] <= facts["written"]
    )


def _check_kind(kv_cache: str) -> None:
    for named, _ in kinds_named(kv_cache):
        kind = read_kind(named)
        if kind.file:
            raise ValueError(f"it names the code of its cache, {named!r:.80}; a session may not, and none is run")
        if kind.name not in KVCache.kinds:
            raise ValueError(
                f"it was saved with kv_cache={named!r:.80}, a kind that is not known here; register it first: "
                "import or run the file that defines it"
            )


def _read_tensors(file: BinaryIO, digest: str, spans: Mapping[str, Span], model: Switches) -> dict[str, Tensor]:
    """Return the tensors on the CPU, with their saved bits."""
    size = max((span.end for span in spans.values()), default=0)
    for device in {torch.device("cpu"), model.device}:
        free = available_memory(device)
        if free is not None and size > free:
            raise ValueError(f"it has {size} bytes of tensors, more than the {free} free on {device}; free some")
    tensors = {}
    with torch.inference_mode(False):  # else the cache could not be written outside inference mode
        for name, span in spans.items():
            tensors[name] = torch.empty(span.shape, dtype=_DTYPES[span.dtype], device="cpu")
            if span.end - span.begin != file.readinto(_bytes_of(tensors[name])):  # type: ignore[attr-defined]
                raise ValueError("it was truncated while it was read")
    if digest_of(sorted(tensors.items())) != digest:
        raise _damaged("its tensors")
    return tensors


def _content(facts: Mapping[str, Any], tensors: dict[str, Tensor], model: Switches) -> Content:
    """Return the session. Raises ValueError for names and ids that no session of this model can have."""
    ids, logits = tensors.pop("ids", None), tensors.pop("logits", None)
    vocab, limit = model.args.vocab_size, model.args.max_seq_len
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) < facts["held"]:
        raise _damaged("its ids")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"it has ids from {int(ids.min())} to {int(ids.max())}; the model knows 0 to {vocab - 1}")
    if logits is not None and (logits.shape != (1, vocab) or not logits.is_floating_point() or not len(ids)):
        raise _damaged("its logits")
    if facts["bound"] is None and len(ids) > limit:
        raise ValueError(f"it has {len(ids)} tokens, more than max_seq_len={limit}; load the model with a larger one")
    layers: list[dict[str, Tensor]] = [{} for _ in range(model.args.n_layers if facts["held"] else 0)]
    for name, tensor in tensors.items():
        word, layer, part = (*name.split(".", 2), "", "")[:3]
        if word != "layers" or not part or layer not in map(str, range(len(layers))):
            raise _damaged(f"{name!r:.40}, which no session has,")
        layers[int(layer)][part] = tensor.to(model.device)
    return Content(
        **{**{name: facts[name] for name in _OWN}, "max_seq_len": min(facts["max_seq_len"], limit)},
        ids=ids.tolist(),
        logits=None if logits is None else logits.to(model.device),
        layers=layers,
    )


def _check_alone(model: Switches) -> None:
    if model.ranks.size > 1:
        raise ValueError(
            f"a session of a model that {model.ranks.size} processes share cannot be saved or loaded; start without "
            "torchrun"
        )


def _reason(error: OSError | ValueError) -> str:
    """Return the system's message without the path, which our message contains."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _damaged(what: str) -> ValueError:
    return ValueError(f"it is damaged: {what} is not what was saved; feed the text again, or use a copy of the file")
