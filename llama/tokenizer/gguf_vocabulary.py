"""Read, check and write the vocabulary in the metadata of a GGUF file, with llama.cpp's meaning of the keys.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama.tokenizer.bpe import Added, BpeCodec, ByteLevel
from llama.tokenizer.patterns import ALIASES, PRE_TOKENIZERS
from llama.tokenizer.sentencepiece_file import SentencePieceCodec, pieces_of
from llama.tokenizer.vocabulary import Codec, Vocabulary, check_template, check_tokens, split_ends
from llama.untrusted.model_proto import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, ModelProto, Piece

_PREFIX = "tokenizer.ggml."
_TYPE_NAMES = {str: "text", int: "a whole number from 0 on", float: "a float", bool: "true or false"}
_END_OF_MESSAGE = "<|eom_id|>"
_ENDS = ("eos", "eot", "eom")
_READ_BACK = ("pieces", "user_tokens", "special_tokens", "bos_id", "adds_bos", "pad_id", "strips_space")


@dataclass(frozen=True)
class _Words:
    """The tokens of a file: texts and types by id, and the ids of special tokens and user tokens."""

    texts: list[str]
    kinds: list[int]
    special: dict[str, int]
    users: dict[str, int]


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary in the values of `tokenizer.*` keys. Raises ValueError."""
    stated = {key: value for key, value in metadata.items() if value is not None}
    facts = {key.removeprefix(_PREFIX): value for key, value in stated.items() if key.startswith(_PREFIX)}
    model = facts.get("model")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model={model!r:.80} is not supported; supported: 'gpt2', byte-level BPE, and 'llama', "
            "SentencePiece"
        )
    is_pieces = model == "llama"
    if _flag(facts, "add_eos_token", False):
        raise ValueError(
            "tokenizer.ggml.add_eos_token=true is not supported: a prompt that ends with EOS is not continued, by "
            "llama.cpp neither; for a model that generates text, set it to false in the file"
        )
    for key in ("remove_extra_whitespaces", *(() if is_pieces else ("add_space_prefix",))):
        if _flag(facts, key, False):
            raise ValueError(f"tokenizer.ggml.{key}=true is not supported: it changes the text")
    # For SentencePiece llama.cpp has default ids.
    bos_id = _id(facts, "bos", 1 if is_pieces else None)
    ends = [_id(facts, name, 2 if is_pieces and name == "eos" else None) for name in _ENDS]
    eos_ids = list(dict.fromkeys(end for end in ends if end is not None))
    words = _words(facts, {bos_id, *eos_ids})
    codec, pieces = _pieces(facts, words) if is_pieces else _byte_level(facts, words)
    unused = {token_id for token_id, kind in enumerate(words.kinds) if kind == UNUSED}
    return Vocabulary(
        codec=codec,
        size=len(words.texts),
        pieces={token_id: piece for token_id, piece in pieces.items() if token_id not in unused},
        special_tokens=words.special,
        user_tokens=words.users,
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=_id(facts, "padding", None),
        adds_bos=_flag(facts, "add_bos_token", is_pieces or PRE_TOKENIZERS[_pre(facts)].adds_bos),
        chat_template=check_template(metadata.get("tokenizer.chat_template")),
        strips_space=is_pieces and _flag(facts, "add_space_prefix", True),
    )


def _words(facts: Mapping[str, Any], ends: set[int | None]) -> _Words:
    """Return the tokens, split into ordinary, special, and user tokens. Raises ValueError."""
    texts, kinds = _array(facts, "tokens", str), _array(facts, "token_type", int)
    if len(texts) != len(kinds):
        raise ValueError(f"{len(texts)} tokens but {len(kinds)} token types")
    if odd := [i for i, kind in enumerate(kinds) if not NORMAL <= kind <= BYTE]:
        raise ValueError(f"token {odd[0]}, {texts[odd[0]]!r:.80}, has type {kinds[odd[0]]}, which is not supported")
    if len(set(texts)) != len(texts):
        last = {text: i for i, text in enumerate(texts)}
        twice = next(last[text] for i, text in enumerate(texts) if last[text] != i)
        raise ValueError(f"token {twice}, {texts[twice]!r:.80}, is in the vocabulary twice")
    check_tokens({text: i for i, text in enumerate(texts)})
    named = list(enumerate(kinds))
    special = {texts[i]: i for i, kind in named if kind in (UNKNOWN, CONTROL)}
    forbidden, users = split_ends({texts[i]: i for i, kind in named if kind == USER_DEFINED}, ends)
    special |= forbidden
    return _Words(texts, kinds, special, users)


def _byte_level(facts: Mapping[str, Any], words: _Words) -> tuple[Codec, dict[int, bytes]]:
    if BYTE in words.kinds:
        at = words.kinds.index(BYTE)
        raise ValueError(f"token {at}, {words.texts[at]!r:.80}, has type {BYTE}, which is not supported with 'gpt2'")
    merges = [_pair(merge) for merge in _array(facts, "merges", str)]
    # Merges may give a user token, too, if its byte-level letters are its text.
    vocab = {text: i for text, i in words.users.items() if text.isascii() and text.isprintable() and " " not in text}
    vocab |= {text: i for i, (text, kind) in enumerate(zip(words.texts, words.kinds, strict=True)) if kind == NORMAL}
    added = [Added(text, i, special=True) for text, i in words.special.items()]
    added += [Added(text, i, special=False) for text, i in words.users.items()]
    pre = _pre(facts)
    codec = BpeCodec(vocab, merges, added, ByteLevel(pre), whole_words=PRE_TOKENIZERS[pre].whole_words, masks=False)
    return codec, codec.pieces()


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise ValueError(f"merge {merge!r:.200}: not two tokens with a space between")
    return left, right


def _pieces(facts: Mapping[str, Any], words: _Words) -> tuple[Codec, dict[int, bytes]]:
    scores = _array(facts, "scores", float)
    if len(scores) != len(words.texts):
        raise ValueError(f"{len(words.texts)} tokens but {len(scores)} scores")
    if facts.get("precompiled_charsmap"):
        raise ValueError("tokenizer.ggml.precompiled_charsmap is not supported: it changes the text")
    special = set(words.special.values())
    # User tokens are split off before the library gets the text; merges may give them, too, as in llama.cpp.
    kinds = [NORMAL if kind == USER_DEFINED else CONTROL if kind == UNUSED else kind for kind in words.kinds]
    kinds = [CONTROL if i in special else kind for i, kind in enumerate(kinds)]
    proto = ModelProto(
        [Piece(*each) for each in zip(words.texts, scores, kinds, strict=True)],
        add_dummy_prefix=_flag(facts, "add_space_prefix", True),
        byte_fallback=BYTE in kinds,
    )
    return SentencePieceCodec(proto, words.special, words.users), pieces_of(proto)


# ---- typed values ----------------------------------------------------------------------------------------------------


def _pre(facts: Mapping[str, Any]) -> str:
    pre = facts.get("pre")
    name = ALIASES.get(pre, pre) if isinstance(pre, str) else None
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted([*PRE_TOKENIZERS, *ALIASES]))
        raise ValueError(f"tokenizer.ggml.pre={pre!r:.80} is not supported; supported: {known}")
    return name


def _array(facts: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = facts.get(key)
    if type(values) is not list or set(map(type, values)) - {kind}:
        missing = ", and is missing" if values is None else ""
        raise ValueError(f"tokenizer.ggml.{key} must be an array, of which each value is {_TYPE_NAMES[kind]}{missing}")
    return values


def _flag(facts: Mapping[str, Any], key: str, default: bool) -> bool:
    value = facts.get(key, default)
    if type(value) is not bool:
        raise ValueError(f"tokenizer.ggml.{key}={value!r:.80} must be {_TYPE_NAMES[bool]}")
    return value


def _id(facts: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = facts.get(f"{name}_token_id", default)
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"tokenizer.ggml.{name}_token_id={value!r:.80} must be {_TYPE_NAMES[int]}")
    return value


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_gguf_vocabulary(vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """Return the keys from which `read_gguf_vocabulary` reads this vocabulary, padded to `size` with unused tokens.

    Raises ValueError if GGUF cannot express the vocabulary.
    """
    size = max(size, vocabulary.size)
    ordinary = vocabulary.codec.to_gguf()
    tokens, kinds = [f"[PAD{token_id}]" for token_id in range(size)], [UNUSED] * size
    for token_id, text in ordinary.tokens.items():
        tokens[token_id], kinds[token_id] = text, ordinary.kinds.get(token_id, NORMAL)
    for kind, table in ((CONTROL, vocabulary.special_tokens), (USER_DEFINED, vocabulary.user_tokens)):
        for text, token_id in table.items():
            tokens[token_id], kinds[token_id] = text, kind
    facts: dict[str, Any] = {**ordinary.facts, "tokens": tokens, "token_type": kinds}
    if ordinary.scores is not None:
        facts["scores"] = [float(ordinary.scores.get(token_id, 0.0)) for token_id in range(size)]
        facts["add_eos_token"] = False
        if (unknown := vocabulary.special_tokens.get("<unk>")) is not None:
            kinds[unknown], facts["unknown_token_id"] = UNKNOWN, unknown
    ids = {"bos": vocabulary.bos_id, "padding": vocabulary.pad_id, **_named_ends(vocabulary)}
    facts |= {f"{name}_token_id": token_id for name, token_id in ids.items() if token_id is not None}
    facts["add_bos_token"] = vocabulary.adds_bos
    metadata = {f"{_PREFIX}{key}": value for key, value in facts.items()}
    if vocabulary.chat_template is not None:
        metadata["tokenizer.chat_template"] = vocabulary.chat_template
    _check_read_back(vocabulary, read_gguf_vocabulary(metadata))
    return metadata


def _named_ends(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ends of a text by the three names in a file; further ones are lost."""
    named = dict(zip(("eos",), vocabulary.eos_ids, strict=False))
    for token_id in vocabulary.eos_ids[1:]:
        is_eom = vocabulary.special_tokens.get(_END_OF_MESSAGE) == token_id
        named.setdefault("eom" if is_eom else "eot", token_id)
    return named


def _check_read_back(written: Vocabulary, read: Vocabulary) -> None:
    """Raise ValueError with the names of the properties that differ after reading; padding tokens do not count."""
    lost = [name for name in _READ_BACK if getattr(written, name) != getattr(read, name)]
    if set(written.eos_ids) != set(read.eos_ids):
        lost.append("eos_ids")
    if lost:
        raise ValueError(f"a .gguf file cannot express this tokenizer's {', '.join(lost)}")
