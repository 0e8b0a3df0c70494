"""Read SentencePiece's file, a ModelProto in protobuf's encoding: the fields that decide on ids.

Source: https://github.com/google/sentencepiece, src/sentencepiece_model.proto.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_WORDS = 1 << 20
MAX_TOKEN_LENGTH = 1024

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece.Type, and tokenizer.ggml.token_type
BYTE_TEXT = re.compile("<0x[0-9A-F]{2}>")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_FIELDS = 1 << 16  # of the settings, and of the model besides its pieces; real ones have a few per added token
_MAX_PIECE_FIELDS = 4  # a piece has three
_BPE = 2  # TrainerSpec.ModelType
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A token: its text, its score (higher scores are merged first), and its type."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class ModelProto:
    """A BPE model of SentencePiece that changes only the spaces of a text."""

    pieces: list[Piece]
    add_dummy_prefix: bool = True
    byte_fallback: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        check_pieces(self.pieces)
        n_bytes = sum(piece.kind == BYTE for piece in self.pieces)
        if n_bytes != 256 * self.byte_fallback:
            raise ValueError(
                f"{n_bytes} tokens are bytes with byte_fallback={self.byte_fallback}; there must be 256 with "
                "byte_fallback, and none without"
            )


def check_pieces(pieces: list[Piece]) -> None:
    """Raise ValueError, with the piece, for one that is invalid or that would encode special tokens from plain text."""
    if not 0 < len(pieces) <= MAX_WORDS:
        raise ValueError(f"{len(pieces)} tokens; there must be 1 to {MAX_WORDS}")
    first: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        wrong = "is in the vocabulary twice" if first.setdefault(piece.text, i) != i else _wrong(piece)
        if wrong:
            raise ValueError(f"token {i}, {piece.text!r:.80}, {wrong}")


def _wrong(piece: Piece) -> str:
    """Return why a piece is invalid; "" if it is valid."""
    if not 0 < len(piece.text) <= MAX_TOKEN_LENGTH:
        return f"has {len(piece.text)} characters; it must have 1 to {MAX_TOKEN_LENGTH}"
    if not NORMAL <= piece.kind <= BYTE:
        return f"has type {piece.kind}, which is not supported"
    if piece.kind == BYTE and not BYTE_TEXT.fullmatch(piece.text):
        return "has the type of bytes; their texts are <0x00> to <0xFF>"
    if not math.isfinite(piece.score):
        return f"has the score {piece.score}, which is not finite"
    if piece.kind in (UNKNOWN, CONTROL) and len(piece.text) == 1:
        return "is special and one character, so that plain text would become it"
    return ""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_model_proto(data: bytes) -> ModelProto:
    """Return the model in a file. Raises ValueError for damaged bytes, and for models of another kind, by name."""
    messages: list[bytes] = []  # parsed after the settings, because there are many
    specs: dict[int, dict[int, int | bytes]] = {}
    for number, value in _fields(data, MAX_WORDS + _MAX_FIELDS):
        if number == 1:
            messages.append(_as_bytes(value))
            if len(messages) > MAX_WORDS:
                raise ValueError(f"there are more than {MAX_WORDS} tokens")
        elif number in (2, 3):
            if number in specs:
                raise ValueError(f"field {number} of the model is repeated")
            specs[number] = dict(_fields(_as_bytes(value), _MAX_FIELDS))
    trainer, normalizer = specs.get(2, {}), specs.get(3, {})
    model_type = trainer.get(3, 1)
    if model_type != _BPE:
        raise ValueError(
            f"a SentencePiece model of type {_MODEL_TYPES.get(_as_int(model_type), model_type)!r} is not supported; "
            "supported: 'bpe', as Llama's"
        )
    if normalizer.get(2, b"") != b"" or normalizer.get(6, b"") != b"":
        raise ValueError(
            "a normalisation that changes the text is not supported; train with spm_train "
            "--normalization_rule_name=identity, as Llama's was"
        )
    if _flag(normalizer, 4, True):
        raise ValueError(
            "remove_extra_whitespaces=true is not supported: it drops spaces of a text; train with spm_train "
            "--remove_extra_whitespaces=false, as Llama's was, or set it to false in the file"
        )
    if not _flag(normalizer, 5, True) or _flag(trainer, 24, False):
        raise ValueError("escape_whitespaces=false or treat_whitespace_as_suffix=true is not supported")
    return ModelProto(
        [_piece(message) for message in messages],
        add_dummy_prefix=_flag(normalizer, 3, True),
        byte_fallback=_flag(trainer, 35, False),
        bos_id=_id(trainer, 41, 1),
        eos_id=_id(trainer, 42, 2),
        pad_id=_id(trainer, 43, -1),
    )


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message, _MAX_PIECE_FIELDS))
    score = fields.get(2, bytes(4))
    if not isinstance(score, bytes) or len(score) != 4:
        raise ValueError("the score of a piece must be a 32-bit float")
    if fields.get(1, b"") == b"":
        raise ValueError("a token has 0 characters")
    text = _as_bytes(fields[1]).decode("utf-8")
    return Piece(text, struct.unpack("<f", score)[0], _as_int(fields.get(3, NORMAL)))


def _flag(fields: dict[int, int | bytes], number: int, default: bool) -> bool:
    value = fields.get(number, int(default))
    if value not in (0, 1):
        raise ValueError(f"the flag in field {number} is {value!r:.40} and must be 0 or 1")
    return bool(value)


def _id(fields: dict[int, int | bytes], number: int, default: int) -> int | None:
    """Return an id; None for -1, which is encoded as 64 bits."""
    value = _as_int(fields.get(number, default))
    return None if value in (-1, (1 << 64) - 1, (1 << 32) - 1) else value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError(f"{value!r:.40} must be a number")
    return value


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError(f"the number {value} must be a text or message")
    return value


def _fields(data: bytes, most: int) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a message: an int, or bytes; a fixed number is its bytes.

    Raises ValueError for more than `most` fields: many short fields take too long to parse for the size of the file.
    """
    at, end, left = 0, len(data), most
    while at < end:
        if not left:
            raise ValueError(f"a message has more than {most:,} fields at byte {at}; this is not a SentencePiece file")
        left -= 1
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"byte {at} has a field of kind {wire}; this is not a SentencePiece file")
        if size > end - at:
            raise ValueError(f"{size} bytes are needed at byte {at} and {end - at} are left: the file is truncated")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, and the byte behind it."""
    if at < len(data) and data[at] < 0x80:  # fast path: most numbers have one byte
        return data[at], at + 1
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise ValueError("the file ends in the middle of a number: it is truncated")
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & (1 << 64) - 1, at + place + 1
    raise ValueError(f"the number at byte {at} has more than 10 bytes")
