"""Session files: the ids and the contents of the caches as safetensors, and the origin of both.

Keys and values are valid for one model only, so the file has digests of the model, and loading rejects any other model.
The file names a kind of cache, never code, and is never unpickled.

Format: safetensors; the facts are stored as a JSON text in the metadata, with a digest of it and one of the tensors.
Knows tensors and files; does not know the Session, the tensors of a kind of cache, or what decides a model's numbers.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llama.host.files import replacing_private
from llama.kv_cache import KVCache
from llama.kv_cache.names import kinds_named, read_kind
from llama.streaming import TextCodec
from llama.switches import Switches
from llama.texts.digest import digest_of, digest_of_text
from llama.texts.origin import check_origin, fingerprint, kind_classes, origin, own_code, weights_digest
from llama.untrusted.files import check_regular
from llama.untrusted.words import printable

logger = logging.getLogger(__name__)

FORMAT, VERSION = "llama-kv session", "1"
_HEADER_LIMIT = 1 << 24  # bytes, most of them a note; the library reads six times as many
# The facts, which are the values besides the tensors: those of Content, those of `origin`, and digests.
_OWN = {"kv_cache": str, "max_seq_len": int, "bound": int | None, "held": int, "written": int, "note": str | None}
_TYPES = {
    **_OWN,
    **{"sizes": dict, "dtype": str, "activations": int, "exact": bool, "place": str | None},
    **{"weights": str, "tokenizer": str, "tensors": str},
    **{"execution": str | None, "own_code": str | None},  # None in older files
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
    tensors = {"ids": torch.tensor(content.ids, dtype=torch.int64, device="cpu")}
    tensors |= {} if content.logits is None else {"logits": content.logits}
    tensors |= {f"layers.{n}.{name}": part for n, state in enumerate(content.layers) for name, part in state.items()}
    facts = {
        **{name: getattr(content, name) for name in _OWN},
        **origin(model),
        "weights": weights_digest(model),
        "tokenizer": fingerprint(tokenizer, model.args.vocab_size),
        "tensors": digest_of(sorted(tensors.items())),
        "execution": str(model.execution_with(content.kv_cache)),
        "own_code": own_code(*kind_classes(content.kv_cache)),
    }
    text = json.dumps(facts)
    if len(text) > _HEADER_LIMIT:
        raise ValueError(
            f"the header would have {len(text)} bytes, and the limit is {_HEADER_LIMIT}; shorten session.note"
        )
    metadata = {"format": FORMAT, "version": VERSION, "session": text, "digest": digest_of_text(text)}
    apart = {name: _copied(tensor) for name, tensor in tensors.items()}
    try:
        with replacing_private(Path(path)) as new:
            save_file(apart, new, metadata)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the session cannot be saved as {Path(path)}: {_reason(error)}") from error


def _copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU; the library rejects tensors that share memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_session(path: str | PathLike[str], model: Switches, tokenizer: TextCodec | None) -> tuple[Content, TextCodec]:
    """Return the saved session, with its tensors on the model's device, and the tokenizer; an IdsOnly if it is None.

    Raises ValueError with the reason if the file is not a session, is damaged, or belongs to another model.
    """
    _check_alone(model)
    try:
        facts, tensors = _read(Path(path))
        _check_kind(facts["kv_cache"])
        check_origin(model, facts)
        if facts["own_code"] not in (None, own_code(*kind_classes(facts["kv_cache"]))):
            raise ValueError(
                f"it was saved with kv_cache={facts['kv_cache']!r:.80}, whose file was edited since; "
                "feed the text again"
            )
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
        if weights_digest(model) != facts["weights"]:
            raise ValueError(
                "it was saved with other weights, or in another layout (quantize); load the model as it was"
            )
        return _content(facts, tensors, model), IdsOnly(facts["tokenizer"]) if tokenizer is None else tokenizer
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the session {Path(path)} cannot be loaded: {_reason(error)}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the facts, and the tensors on the CPU, with their saved bits."""
    check_regular(os.stat(path).st_mode)
    try:
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:  # else no call could write the cache
            facts = _facts(file.metadata() or {})  # before any tensor is read: a model's file may be huge
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"it is not a session, or is damaged: {error}") from error
    if digest_of(sorted(tensors.items())) != facts["tensors"]:
        raise _damaged("its tensors")
    return facts, tensors


def _facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked facts. Raises ValueError."""
    if metadata.get("format") != FORMAT:
        raise ValueError("it is a safetensors file, but not a session; give one that session.save wrote")
    if (version := metadata.get("version")) != VERSION:
        raise ValueError(f"its format has version {version!r:.20}, this library reads {VERSION}; feed the text again")
    try:
        if digest_of_text(metadata["session"]) == metadata["digest"]:
            facts = {"execution": None, "own_code": None, **json.loads(metadata["session"])}
            if _are_valid(facts):
                return facts
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


def _reason(error: Exception) -> str:
    """Return the system's message without the path, which our message contains."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _damaged(what: str) -> ValueError:
    return ValueError(f"it is damaged: {what} is not what was saved; feed the text again, or use a copy of the file")
