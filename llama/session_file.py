"""A session on disk: its ids and what its caches hold as safetensors, and what all of that was computed from.

The keys and values of a text are right for one model alone, so the file says by digests which one it was, and any other
refuses it. It names a kind of cache, never code, and is never unpickled.

Format: the length of a header, 8 bytes; the header, in JSON; the tensors' bytes. `_Facts` stand as text in the header's
metadata. Source: https://github.com/huggingface/safetensors, whose library maps files into memory; that would crash
where one is cut under its hands, so files are read here.
Knows tensors, files, and of a model what `Model` says; does not know the Session, nor what a kind of cache holds.
"""

import hashlib
import json
import math
import os
import platform
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.digest import Digest
from llama.files import replace_private
from llama.kv_cache import KVCache
from llama.kv_cache.names import read_kind
from llama.machine import available_memory
from llama.ranks import Ranks
from llama.runner import Execution, Runner
from llama.streaming import TextCodec, TextStream
from llama.words import printable

FORMAT, VERSION = "llama-kv session", "1"
_MOST_HEADER = 2**24  # bytes; a tensor takes about 100
_MOST_SIDES = 16
_LIMITS = {"max_batch_size", "max_seq_len", "kv_caching", "kv_cache"}  # of ModelArgs, what changes no number
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Model(Protocol):
    """What a file has to know of a model."""

    @property
    def args(self) -> ModelArgs: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def exact(self) -> bool: ...
    @property
    def execution(self) -> Execution: ...
    @property
    def runner(self) -> Runner[Any] | None: ...
    @property
    def ranks(self) -> Ranks: ...
    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Content:
    """A session as plain values: its text, and what is held of it.

    held: of how many of the ids the caches hold something; written: up to where they were written, see Session.
    bound: how many positions a cache holds at most, None: as many as the text has. logits: those that follow the text,
    where they are known. layers: what every layer's cache holds, by name; nothing where `held` is 0. note: a text that
    its owner keeps beside it.
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


@dataclass(frozen=True)
class _Facts:
    """What stands in the file beside tensors.

    `place` is where exact mode computed, None without it. The first files of this format had neither `note` nor
    `activations`.
    """

    kv_cache: str
    max_seq_len: int
    bound: int | None
    held: int
    written: int
    dtype: str
    exact: bool
    place: str | None
    sizes: dict[str, Any]
    weights: str
    tokenizer: str
    tensors: str
    note: str | None = None
    activations: int | None = None


class IdsOnly:
    """Stands where a tokenizer would, in a session that was loaded without one: ids need none, texts are refused."""

    bos_id: int | None = None
    adds_bos = False
    stop_tokens: Sequence[int] = ()

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> str:
        """Return that of the tokenizer that the session was saved with."""
        return self._fingerprint

    def encode(self, s: str, *, bos: bool, eos: bool, begins: bool = True) -> list[int]:
        raise self._refusal()

    def decode(self, ids: Sequence[int], /) -> str:
        raise self._refusal()

    def stream(self) -> TextStream:
        raise self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(
            "this session was loaded without a tokenizer, so it takes and gives ids alone; "
            "give one to text: model.load_session(path, tokenizer)"
        )


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_session(path: str | PathLike[str], content: Content, model: Model, tokenizer: TextCodec) -> None:
    """Write the file, which only its owner may read, or replace it as a whole. Raises ValueError where that fails."""
    _check_alone(model)
    file = Path(path)
    tensors = _tensors(content)
    facts = _Facts(
        **{name: getattr(content, name) for name in ("kv_cache", "max_seq_len", "bound", "held", "written")},
        dtype=str(model.dtype),
        exact=model.exact,
        place=_place(model) if model.exact else None,
        sizes=_sizes(model),
        weights=weights_digest(model),
        tokenizer=_fingerprint(tokenizer, model.args.vocab_size),
        tensors=_digest_of(tensors),
        note=content.note,
        activations=model.execution.activations,
    )
    try:
        replace_private(file, (_header(facts, tensors), *map(_bytes_of, tensors.values())))
    except OSError as error:
        raise ValueError(f"the session cannot be saved as {file}: {_reason(error)}") from error


def weights_digest(model: Model) -> str:
    """Return what only a model of the same weights has: names, shapes, dtypes and bits; one that two share once."""
    digest, seen = Digest(), set[int]()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            digest.take(name, weight)
        seen.add(id(weight))
    return digest.hex()


def _tensors(content: Content) -> dict[str, Tensor]:
    """Return what the file holds by its names there, on the CPU, the widest numbers first, so that all are aligned."""
    named = {"ids": torch.tensor(content.ids, dtype=torch.int64, device="cpu")}
    if content.logits is not None:
        named["logits"] = content.logits
    for layer, state in enumerate(content.layers):
        named |= {f"layers.{layer}.{name}": tensor for name, tensor in state.items()}
    strange = {name: tensor.dtype for name, tensor in named.items() if tensor.dtype not in _NAMES}
    if strange:
        raise ValueError(f"kv_cache={content.kv_cache!r} holds what a file cannot: {strange}")
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    return dict(sorted(named.items(), key=lambda item: -item[1].itemsize))


def _header(facts: _Facts, tensors: Mapping[str, Tensor]) -> bytes:
    """Return what stands before the tensors' bytes."""
    text = json.dumps(asdict(facts))
    metadata = {"format": FORMAT, "version": VERSION, "session": text, "digest": _digest_of_text(text)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_session(path: str | PathLike[str], model: Model, tokenizer: TextCodec | None) -> tuple[Content, TextCodec]:
    """Return what was saved, its tensors on the model's device, and a tokenizer: the one given, or one for ids alone.

    Raises ValueError, each with its reason, for what is no session, was damaged, or belongs to something else.
    """
    _check_alone(model)
    file = Path(path)
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # opening a pipe would wait for ever
            raise ValueError(f"{file} is no file; give the path of a session that was saved")
        with file.open("rb") as opened:
            facts, spans = _read_header(file, opened)
            _check_kind(file, facts)
            _check_model(file, facts, model)
            codec = _check_tokenizer(file, facts, tokenizer, model.args.vocab_size)
            tensors = _read_tensors(file, opened, facts, spans, model)
    except (OSError, OverflowError) as error:
        raise ValueError(f"the session {file} cannot be read: {_reason(error)}") from error
    if weights_digest(model) != facts.weights:
        raise ValueError(
            f"{file} was saved with other weights than this model has, or with the same held in another way (quantize, "
            "repack); load the model as it was saved with"
        )
    return _content(file, facts, tensors, model), codec


@dataclass(frozen=True)
class _Span:
    """A tensor as the header describes it; `begin` and `end` count from where the header ends."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def _read_header(file: Path, opened: BinaryIO) -> tuple[_Facts, dict[str, _Span]]:
    """Return what the header says, once that is known to fit the file. Leaves the file where the tensors begin."""
    size = os.fstat(opened.fileno()).st_size
    strange = ValueError(f"{file} is no session: it is not laid out as session.save does it")
    length = int.from_bytes(opened.read(8), "little")
    if size < 8 or not 2 <= length <= _MOST_HEADER:
        raise strange
    if 8 + length > size:
        raise ValueError(f"{file} is no session, or was cut: it has {size} bytes, less than its header alone")
    try:
        header = json.loads(opened.read(length), object_pairs_hook=_once)
        metadata = header.pop("__metadata__", {})
        said = {name: metadata.get(name) for name in ("format", "version", "session", "digest")}
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise strange from None
    if said["format"] != FORMAT:
        raise ValueError(f"{file} is laid out as safetensors, but is no session: session.save did not write it")
    if said["version"] != VERSION:
        raise ValueError(f"{file} has version {said['version']!r:.20} of the format; this library reads {VERSION}")
    text = said["session"]
    if not isinstance(text, str) or _digest_of_text(text) != said["digest"]:
        raise _damaged(file, "what it says of itself")
    facts = _facts(file, text)
    spans = {name: _span(file, name, entry) for name, entry in header.items()}
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)))  # as they stand
    _check_spans(file, spans, size - 8 - length)
    return facts, spans


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return what JSON gives as an object; of two members of one name a reader would see the second alone."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _facts(file: Path, text: str) -> _Facts:
    try:
        facts = _Facts(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise _damaged(file, "what it says of itself") from None
    counts = (facts.max_seq_len, facts.held, facts.written, 0 if facts.bound is None else facts.bound)
    texts = (facts.kv_cache, facts.dtype, facts.weights, facts.tokenizer, facts.tensors)
    if not (
        all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
        and all(isinstance(text, str) for text in texts)
        and isinstance(facts.sizes, dict)
        and isinstance(facts.exact, bool)
        and isinstance(facts.place, str | None)
        and isinstance(facts.note, str | None)
        and facts.activations in (None, 8, 16)
        and facts.held <= facts.written
    ):
        raise _damaged(file, "what it says of itself")
    return facts


def _span(file: Path, name: str, entry: Any) -> _Span:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], list(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and len(entry) == 3
        strides = math.prod(max(size, 1) for size in shape)  # which count in 64 bits where nothing stands, too
        if whole and end - begin == math.prod(shape) * dtype.itemsize and strides < 2**60 and len(shape) <= _MOST_SIDES:
            return _Span(dtype, shape, begin, end)
    except (KeyError, TypeError, ValueError):
        pass
    raise _damaged(file, f"what it says of {name!r:.40}")


def _check_spans(file: Path, spans: Mapping[str, _Span], size: int) -> None:
    """Refuse tensors that overlap or leave holes, and more or less than `size` bytes of them."""
    end = 0
    for name, span in spans.items():
        if span.begin != end:
            raise _damaged(file, f"where {name!r:.40} stands")
        end = span.end
    if end > size:
        raise ValueError(f"{file} was cut: it has {size} bytes of tensors, and its header speaks of {end}")
    if end < size:
        raise _damaged(file, f"its length: {size - end} bytes follow its last tensor")


def _check_kind(file: Path, facts: _Facts) -> None:
    kind = read_kind(facts.kv_cache)
    if kind.file:
        raise ValueError(
            f"{file} names the code of its cache, {facts.kv_cache!r:.80}; a session may not, and none is run"
        )
    if kind.name not in KVCache.kinds:
        raise ValueError(
            f"{file} was saved with kv_cache={facts.kv_cache!r:.80}, a kind that is not known here; register it first, "
            "by importing or running the file that defines it"
        )


def _check_model(file: Path, facts: _Facts, model: Model) -> None:
    """Refuse a model of other sizes, or one that computes in another way; its weights are looked at later."""
    sizes = _sizes(model)
    for name in sorted(sizes.keys() | facts.sizes.keys()):
        saved, ours = facts.sizes.get(name), sizes.get(name)
        if saved != ours:
            raise ValueError(
                f"{file} was saved with another model: {printable(name, 40)} was {saved!r:.80}, "
                f"and is {ours!r:.80} here; load the model that it was saved with"
            )
    if facts.dtype != str(model.dtype):
        raise ValueError(
            f"{file} was saved with a model in {printable(facts.dtype, 40)}, and this one is in {model.dtype}; "
            "load the model in the dtype of then"
        )
    if facts.activations not in (None, ours := model.execution.activations):
        raise ValueError(
            f"{file} was saved with activations={facts.activations}, and here they have {ours} bits, which gives other "
            "keys and values; load the model as it was then"
        )
    if facts.exact is not model.exact:
        raise ValueError(
            f"{file} was saved with model.exact={facts.exact}, and here it is {model.exact}, which gives "
            "other bits; set it as it was"
        )
    place = _place(model) if model.exact else None
    if facts.place != place:
        raise ValueError(
            f"{file} was computed in exact mode by {facts.place!r:.120}, and here is {place!r}, which may give other "
            "bits; feed the text again"
        )


def _check_tokenizer(file: Path, facts: _Facts, tokenizer: TextCodec | None, vocab_size: int) -> TextCodec:
    if tokenizer is None:
        return IdsOnly(facts.tokenizer)
    if _fingerprint(tokenizer, vocab_size) != facts.tokenizer:
        raise ValueError(
            f"{file} was saved with another tokenizer, for which its ids are another text; give the one it was saved "
            "with, or none, to go on by ids"
        )
    return tokenizer


def _read_tensors(
    file: Path, opened: BinaryIO, facts: _Facts, spans: Mapping[str, _Span], model: Model
) -> dict[str, Tensor]:
    """Return the tensors on the CPU, to the bit as they were saved."""
    size = max((span.end for span in spans.values()), default=0)
    for device in {torch.device("cpu"), model.device}:
        room = available_memory(device)
        if room is not None and size > room:
            raise ValueError(f"{file} holds {size} bytes, more than the {room} that are free on {device}; free some")
    tensors = {}
    with torch.inference_mode(False):  # or a cache could not be written outside inference mode
        for name, span in spans.items():
            tensors[name] = torch.empty(span.shape, dtype=span.dtype, device="cpu")
            if span.end - span.begin != opened.readinto(_bytes_of(tensors[name])):  # type: ignore[attr-defined]
                raise ValueError(f"{file} was cut while it was read")
    if _digest_of(tensors) != facts.tensors:
        raise _damaged(file, "its tensors")
    return tensors


def _content(file: Path, facts: _Facts, tensors: dict[str, Tensor], model: Model) -> Content:
    """Return what the tensors are, by their names; refuse names and ids that no session of this model has."""
    ids, logits = tensors.pop("ids", None), tensors.pop("logits", None)
    vocab = model.args.vocab_size
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) < facts.held:
        raise _damaged(file, "its ids")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"{file} has ids from {int(ids.min())} to {int(ids.max())}; the model knows 0 to {vocab - 1}")
    if logits is not None and (logits.shape != (1, vocab) or not logits.is_floating_point() or not len(ids)):
        raise _damaged(file, "its logits")
    if facts.bound is None and len(ids) > model.args.max_seq_len:
        raise ValueError(
            f"{file} has a text of {len(ids)} tokens, more than max_seq_len={model.args.max_seq_len}; "
            "load the model with a larger max_seq_len"
        )
    layers: list[dict[str, Tensor]] = [{} for _ in range(model.args.n_layers if facts.held else 0)]
    for name, tensor in tensors.items():
        word, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        if word != "layers" or not part or layer not in map(str, range(len(layers))):
            raise _damaged(file, f"{name!r:.40}, which is nothing of a session")
        layers[int(layer)][part] = tensor.to(model.device)
    return Content(
        facts.kv_cache,
        min(facts.max_seq_len, model.args.max_seq_len),
        facts.bound,
        ids.tolist(),
        facts.held,
        facts.written,
        None if logits is None else logits.to(model.device),
        layers,
        facts.note,
    )


# ---- facts -----------------------------------------------------------------------------------------------------------


def _check_alone(model: Model) -> None:
    if model.ranks.size > 1:
        raise ValueError(
            f"a session of a model that {model.ranks.size} processes share is held by all of them, and a file by one; "
            "start without torchrun to save or load it"
        )


def _sizes(model: Model) -> dict[str, Any]:
    """Return the sizes that decide what is computed, as JSON gives them back."""
    sizes = {field.name: getattr(model.args, field.name) for field in fields(model.args) if field.name not in _LIMITS}
    scaling = model.args.rope_scaling
    sizes["rope_scaling"] = asdict(scaling) if hasattr(scaling, "factor") else scaling  # type: ignore[arg-type]
    said: dict[str, Any] = json.loads(json.dumps(sizes))
    return said


def _place(model: Model) -> str:
    """Return what may decide the bits of a sum: the names that can be read, and how products round."""
    from llama.exact.probe import rounding_digest  # deferred: only exact mode needs it

    device = model.device
    if model.runner is not None:
        return f"{model.runner.name} code {model.runner.code}"
    if device.type == "cuda":
        return f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    rounding = rounding_digest(model.state_dict(keep_vars=True).values())
    return f"torch {torch.__version__} on {device.type}, {cpu}, rounding {rounding}"


def _fingerprint(tokenizer: TextCodec, vocab_size: int) -> str:
    """Return what only a tokenizer has that reads ids alike: its own word for that, else the texts of all ids."""
    own = getattr(tokenizer, "fingerprint", None)
    if callable(own):
        return str(own())
    facts = [tokenizer.bos_id, tokenizer.adds_bos, list(tokenizer.stop_tokens)]
    return _digest_of_text(repr([*facts, *(_text_of(tokenizer, id) for id in range(vocab_size))]))


def _text_of(tokenizer: TextCodec, id: int) -> str | None:
    try:
        return tokenizer.decode([id])
    except Exception:  # whatever a tokenizer raises for an id that it does not have
        return None


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = Digest()
    for name in sorted(tensors):
        digest.take(name, tensors[name])
    return digest.hex()


def _digest_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(
        f"{file} is damaged: {what} is not what was saved; feed the text again, or take a copy of the file"
    )


def _reason(error: BaseException) -> str:
    """Return what the system says, without the path, which the sentence has already."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
