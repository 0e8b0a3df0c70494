"""Read and check Hugging Face's tokenizer.json, and the files beside it with the ends of a text and chat templates.

Every type, key and step must be in a list of supported ones; anything else is rejected by name.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama.tokenizer.bpe import Added, BpeCodec, ByteLevel, Spaces
from llama.tokenizer.patterns import PRE_TOKENIZERS, steps
from llama.tokenizer.vocabulary import (
    MAX_FILE_BYTES,
    SPACE_MARK,
    Vocabulary,
    check_template,
    check_tokens,
    read_file,
    split_ends,
)
from llama.untrusted.json_object import parse_object

_MAX_CONFIG_BYTES = 8 << 20  # tokenizer_config.json repeats all added tokens

_SPEC_KEYS = {
    *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"),
    "model",
}
_MODEL_KEYS = {
    *("type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    *("ignore_merges", "vocab", "merges"),
}
_ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
_PREPEND = {"type": "Prepend", "prepend": SPACE_MARK}
_NFC = {"type": "NFC"}
_DECODE_PIECES = [
    {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_SCHEMES = ("always", "first", "never")

_SUPPORTED = (
    "supported are byte-level BPE with the pre-tokenizers of Llama 3, Qwen 2 and 3, Mistral Nemo, SmolLM2 and GPT-2, "
    "and SentencePiece's BPE as in Llama 2, TinyLlama and Mistral"
)


def read_huggingface(path: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json and the configuration beside it. Raises ValueError."""
    spec = _read(path, limit=MAX_FILE_BYTES)
    settings = _beside(path, "tokenizer_config.json")
    # As in transformers, config.json counts only if there is no generation_config.json.
    defaults = _beside(path, "generation_config.json") or _beside(path, "config.json")
    _only(spec, _SPEC_KEYS, "tokenizer.json")
    model = _model(spec)
    vocab: dict[str, Any] = _typed(model, "vocab", dict)
    check_tokens(vocab)
    added = _with_named(_added_tokens(spec), vocab, settings)
    ids = {token.text: token.id for token in added}
    opening = _template_opening(spec.get("post_processor"), ids)
    bos_ids = _named_ids("bos", settings, defaults, ids) or opening
    if opening and opening != bos_ids[:1]:
        raise ValueError("post_processor adds a token before each text that is not the BOS token")
    eos_ids = _named_ids("eos", settings, defaults, ids)
    ends, users = split_ends({token.text: token.id for token in added if not token.special}, {*bos_ids[:1], *eos_ids})
    added = [replace(token, special=True) if token.text in ends else token for token in added]
    special = {token.text: token.id for token in added if token.special}
    codec = BpeCodec(
        {text: token_id for text, token_id in vocab.items() if text not in special},
        _merges(model),
        added,
        _form(spec),
        whole_words=_flag(model, "ignore_merges"),
        byte_fallback=_flag(model, "byte_fallback"),
    )
    pieces = codec.pieces()
    return Vocabulary(
        codec=codec,
        size=max(pieces) + 1,
        pieces=pieces,
        special_tokens=special,
        user_tokens=users,
        bos_id=next(iter(bos_ids), None),
        eos_ids=eos_ids,
        pad_id=next(iter(_named_ids("pad", settings, defaults, ids)), None),
        adds_bos=bool(opening),  # transformers also ignores add_bos_token in tokenizer_config.json
        chat_template=_chat_template(path.parent, settings),
        strips_space=isinstance(codec.form, Spaces) and codec.form.strips,
    )


# ---- tokens and merges -----------------------------------------------------------------------------------------------


def _model(spec: Mapping[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = _typed(spec, "model", dict)
    if model.get("type") != "BPE":
        raise ValueError(f"model type {model.get('type')!r:.80} is not supported; {_SUPPORTED}")
    _only(model, _MODEL_KEYS, "the model")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key) not in (None, "", 0):
            raise ValueError(f"{key}={model[key]!r:.80} of the BPE model is not supported")
    if not isinstance(model.get("unk_token"), str | None):
        raise ValueError(f"unk_token={model['unk_token']!r:.80} must be a text")
    _flag(model, "fuse_unk")  # without effect: unknown characters are rejected
    return model


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges: texts with a space in older files, pairs in newer ones."""
    merges = []
    for merge in _typed(model, "merges", list):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ValueError(f"merge {merge!r:.200}: not two tokens")
        merges.append((pair[0], pair[1]))
    return merges


def _added_tokens(spec: Mapping[str, Any]) -> list[Added]:
    entries = _typed(spec, "added_tokens", list) if spec.get("added_tokens") is not None else []
    added: list[Added] = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"added token {entry!r:.80} must be an object")
        _only(entry, {"id", "content", *_ADDED_FLAGS}, "an added token")
        text: str = _typed(entry, "content", str)
        token_id: Any = entry.get("id")
        check_tokens({text: token_id})
        added.append(Added(text, token_id, **{flag: _flag(entry, flag) for flag in _ADDED_FLAGS}))
    return added


def _with_named(added: list[Added], vocab: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Added]:
    """Return the added tokens and the ordinary ones that tokenizer_config.json names, without clashes."""
    texts = {token.text for token in added}
    for name in ("bos", "eos", "pad"):
        text = _named_text(name, settings)
        if text is not None and text in vocab and text not in texts and type(vocab[text]) is int:
            texts.add(text)
            added = [*added, Added(text, vocab[text], special=True)]
    owner = {token_id: text for text, token_id in vocab.items() if type(token_id) is int}
    seen: dict[str | int, None] = {}
    for token in added:
        if token.text in seen or token.id in seen:
            raise ValueError(f"added token {token.text!r:.80}: another one has its text or its id {token.id}")
        if vocab.get(token.text, token.id) != token.id or owner.get(token.id, token.text) != token.text:
            raise ValueError(f"added token {token.text!r:.80}: an ordinary token has its id {token.id}, too")
        seen |= {token.text: None, token.id: None}
    return added


# ---- steps -----------------------------------------------------------------------------------------------------------


def _form(spec: Mapping[str, Any]) -> ByteLevel | Spaces:
    """Return the form of text that normalizer, pre_tokenizer and decoder describe together. Raises ValueError."""
    normalizers = _steps(spec, "normalizer", "normalizers")
    splitters = _steps(spec, "pre_tokenizer", "pretokenizers")
    decoders = _steps(spec, "decoder", "decoders")
    byte_fallback = _flag(spec["model"], "byte_fallback")
    if splitters and splitters[-1].get("type") == "ByteLevel":
        if normalizers not in ([], [_NFC]):
            raise ValueError(f"normalizer {_shown(normalizers)} is not supported: it changes the text; {_SUPPORTED}")
        if [_without(step, "add_prefix_space", "trim_offsets", "use_regex") for step in decoders] not in (
            [],
            [{"type": "ByteLevel"}],
        ):
            raise ValueError(f"decoder {_shown(decoders)} is not supported here, only ByteLevel")
        if byte_fallback:
            raise ValueError("byte_fallback=True of the BPE model is not supported with the pre_tokenizer ByteLevel")
        return ByteLevel(_pre(splitters), nfc=bool(normalizers))
    if decoders not in (_DECODE_PIECES, [*_DECODE_PIECES, _STRIP]):
        raise ValueError(f"decoder {_shown(decoders)} is not supported; {_SUPPORTED}")
    strips = decoders[-1] == _STRIP
    if not splitters:
        if normalizers not in ([_PREPEND, _REPLACE], [_REPLACE]):
            raise ValueError(f"normalizer {_shown(normalizers)} is not supported; {_SUPPORTED}")
        scheme = "always" if _PREPEND in normalizers else "never"
        return Spaces(metaspace=False, scheme=scheme, split=False, strips=strips)
    if normalizers:
        raise ValueError(f"normalizer {_shown(normalizers)} is not supported before a pre_tokenizer; {_SUPPORTED}")
    return _metaspace(splitters, strips)


def _pre(splitters: list[dict[str, Any]]) -> str:
    found = [_without(step, "trim_offsets") for step in splitters]
    for step in found:
        if step["type"] == "ByteLevel":
            step.setdefault("use_regex", True)  # absent from older files
    for name, pre in PRE_TOKENIZERS.items():
        if json.dumps(found, sort_keys=True) == json.dumps(steps(pre), sort_keys=True):  # in JSON True is not 1
            return name
    raise ValueError(f"pre_tokenizer {_shown(splitters)} is not supported; {_SUPPORTED}")


def _metaspace(splitters: list[dict[str, Any]], strips: bool) -> Spaces:
    step = splitters[0]
    keys = {"type", "replacement", "str_rep", "add_prefix_space", "prepend_scheme", "split"}
    is_known = step.get("type") == "Metaspace" and step.get("replacement") == SPACE_MARK and step.keys() <= keys
    if len(splitters) > 1 or not is_known:
        raise ValueError(f"pre_tokenizer {_shown(splitters)} is not supported; {_SUPPORTED}")
    prefix = _flag(step, "add_prefix_space", True)
    scheme = step.get("prepend_scheme", "always" if prefix else "never")
    if scheme not in _SCHEMES or (scheme != "never" and not prefix):
        raise ValueError(f"pre_tokenizer {_shown(splitters)}: prepend_scheme must be one of {', '.join(_SCHEMES)}")
    return Spaces(metaspace=True, scheme=scheme, split=_flag(step, "split", True), strips=strips)


def _steps(spec: Mapping[str, Any], key: str, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a part of tokenizer.json: a single one, or those of a Sequence."""
    part = spec.get(key)
    if part is None:
        return []
    found = [part]
    if isinstance(part, dict) and part.get("type") == "Sequence":
        _only(part, {"type", inner}, key)
        found = _typed(part, inner, list)
    if not all(isinstance(step, dict) and isinstance(step.get("type"), str) for step in found):
        raise ValueError(f"{key} {_shown(part)} is not a step or a Sequence of steps")
    return found


def _template_opening(processor: Any, ids: Mapping[str, int]) -> list[int]:
    """Return the id that a post_processor adds before a text, if any. Raises ValueError if it does more."""
    spec = {"post_processor": processor}
    # ByteLevel only changes offsets.
    steps = [step for step in _steps(spec, "post_processor", "processors") if step["type"] != "ByteLevel"]
    if not steps:
        return []
    step = steps[0]
    if len(steps) > 1 or step["type"] != "TemplateProcessing":
        raise ValueError(f"post_processor {steps[-1]['type']!r:.80} is not supported, only one TemplateProcessing")
    parts = _typed(step, "single", list)
    kinds = [list(part) if isinstance(part, dict) else None for part in parts]
    if kinds == [["Sequence"]]:
        return []
    if kinds != [["SpecialToken"], ["Sequence"]]:
        raise ValueError("post_processor adds tokens other than one before the text, which is not supported")
    text = _typed(_typed(parts[0], "SpecialToken", dict), "id", str)
    if text not in ids:
        raise ValueError(f"post_processor names {text!r:.80}, which is not an added token")
    stated = step.get("special_tokens")
    entry = stated.get(text) if isinstance(stated, dict) else None
    if not isinstance(entry, dict) or json.dumps(entry.get("ids")) != json.dumps([ids[text]]):
        raise ValueError(f"post_processor gives {text!r:.80} another id than the token's {ids[text]}")
    return [ids[text]]


# ---- files beside ----------------------------------------------------------------------------------------------------


def _beside(path: Path, name: str) -> dict[str, Any]:
    file = path.parent / name
    return _read(file, limit=_MAX_CONFIG_BYTES) if file.exists() else {}


def _read(path: Path, *, limit: int) -> dict[str, Any]:
    data = read_file(path, limit=limit)
    try:
        return parse_object(data)
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error


def _named_text(name: str, settings: Mapping[str, Any]) -> str | None:
    text = settings.get(f"{name}_token")
    text = text.get("content") if isinstance(text, dict) else text
    if not isinstance(text, str | None):
        raise ValueError(f"tokenizer_config.json: {name}_token {text!r:.80} must be a text")
    return text


def _named_ids(
    name: str, settings: Mapping[str, Any], defaults: Mapping[str, Any], ids: Mapping[str, int]
) -> list[int]:
    """Return the ids of "bos", "eos" or "pad" in the files beside tokenizer.json, tokenizer_config.json's first."""
    text = _named_text(name, settings)
    if text is not None and text not in ids:
        raise ValueError(f"tokenizer_config.json: {name}_token {text!r:.80} is not a token of tokenizer.json")
    stated = defaults.get(f"{name}_token_id")
    stated = stated if isinstance(stated, list) else [stated]
    if odd := [i for i in stated if i is not None and type(i) is not int]:
        raise ValueError(f"{name}_token_id {odd[0]!r:.80} must be a whole number")
    found = [*([] if text is None else [ids[text]]), *(i for i in stated if i not in (None, -1))]
    return list(dict.fromkeys(found))


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    beside = directory / "chat_template.jinja"
    if beside.exists():
        return check_template(read_file(beside, limit=_MAX_CONFIG_BYTES).decode())
    template = settings.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
            raise ValueError("chat_template of tokenizer_config.json must be a text or a list of named templates")
        template = {entry["name"]: entry.get("template") for entry in template}.get("default")
    return check_template(template)


# ---- typed values ----------------------------------------------------------------------------------------------------


def _typed(content: Mapping[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{key} of tokenizer.json is a {type(value).__name__}; it must be a {kind.__name__}")
    return value


def _flag(content: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = content.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r:.80} must be true or false")
    return value


def _only(content: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(content.keys() - known):
        raise ValueError(f"{what} has the unknown key {unknown[0]!r:.80}")


def _without(step: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key not in keys}


def _shown(part: object) -> str:
    return json.dumps(part)[:300]
