"""Meta's tokenizer.model for Llama 1 and 2, and what it shares with GGUF's vocabularies of that kind: SentencePiece.

Knows the library, which is given a model written from what was checked. Does not know how a file is laid out.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llama.tokenizer.vocabulary import (
    UNSPELLED,
    Spelling,
    Vocabulary,
    WholeTokens,
    calling,
    check_text,
    refuse_unrepresentable,
)
from llama.untrusted.model_proto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    ModelProto,
    Piece,
    read_model_proto,
    write_model_proto,
)

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


def read_sentencepiece(data: bytes) -> Vocabulary:
    """Return the vocabulary of a file with this content. Raises ValueError."""
    proto = read_model_proto(data)
    special = {piece.text: i for i, piece in enumerate(proto.pieces) if piece.kind in (CONTROL, UNKNOWN)}
    return Vocabulary(
        codec=SentencePieceCodec(proto, special, {}),
        size=len(proto.pieces),
        pieces=pieces_of(proto),
        special_tokens=special,
        user_tokens={},
        bos_id=proto.bos_id,
        eos_ids=[] if proto.eos_id is None else [proto.eos_id],
        pad_id=proto.pad_id,
        adds_bos=proto.bos_id is not None,
        chat_template=None,
        strips_space=proto.add_dummy_prefix,
    )


def pieces_of(proto: ModelProto) -> dict[int, bytes]:
    """Return the bytes that each id adds to a text."""
    return {i: _bytes_of(piece) for i, piece in enumerate(proto.pieces)}


def _bytes_of(piece: Piece) -> bytes:
    if piece.kind == BYTE:
        return bytes([int(piece.text[3:5], 16)])
    text = piece.text if piece.kind in (CONTROL, UNKNOWN) else piece.text.replace(UNSPELLED, " ")
    return text.encode()


class SentencePieceCodec:
    """Encodes by `sentencepiece`, between the tokens that are taken whole: users' always, special ones where asked.

    A text behind a token that was taken whole gets a space before it, too, as llama.cpp and transformers do.
    """

    def __init__(self, proto: ModelProto, special_tokens: Mapping[str, int], user_tokens: Mapping[str, int]) -> None:
        self.proto, self._special_tokens, self._user_tokens = proto, special_tokens, user_tokens
        self._known = {piece.text for piece in proto.pieces if piece.kind not in (CONTROL, UNKNOWN)}
        self._whole = WholeTokens(special_tokens, user_tokens)
        self._processor  # noqa: B018  the library has a say in whether the file is sound

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        check_text(text, "the text")
        ids: list[int] = []
        for place, part in enumerate(self._whole.parts(text, special)):
            if isinstance(part, int):
                ids.append(part)
                continue
            processor = self._processor if begins or place > 0 else self._going_on
            with calling("sentencepiece", f"encode the text that begins {part[:40]!r}"):
                found = processor.encode(part)
            if self._unknown in found:
                refuse_unrepresentable(
                    set(part.replace(" ", UNSPELLED)) - self._known, "it has no tokens for them, nor for bytes"
                )
            ids.extend(found)
        return ids

    @property
    def _unknown(self) -> int:
        return len(self.proto.pieces)

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        return self._load(self.proto.add_dummy_prefix)

    @cached_property
    def _going_on(self) -> "SentencePieceProcessor":
        """The library for a text that goes on from another, before which it puts no space."""
        return self._load(False)

    def _load(self, add_dummy_prefix: bool) -> "SentencePieceProcessor":
        """Return the library with the pieces, and one more for what is unknown: the file's own is a special token."""
        from sentencepiece import SentencePieceProcessor

        pieces = [replace(piece, kind=CONTROL) if piece.kind == UNKNOWN else piece for piece in self.proto.pieces]
        texts = {piece.text for piece in pieces}
        unknown = next(text for i in range(len(texts) + 1) if (text := f"<unknown {i}>") not in texts)
        proto = replace(self.proto, pieces=[*pieces, Piece(unknown, 0.0, UNKNOWN)], add_dummy_prefix=add_dummy_prefix)
        with calling("sentencepiece", "take this vocabulary"):
            return SentencePieceProcessor(model_proto=write_model_proto(proto))

    def spelling(self) -> Spelling:
        facts = {"model": "llama", "add_space_prefix": self.proto.add_dummy_prefix}
        whole = {*self._special_tokens.values(), *self._user_tokens.values()}
        ordinary = {i: p for i, p in enumerate(self.proto.pieces) if i not in whole and p.kind != UNUSED}
        return Spelling(
            facts,
            {i: piece.text for i, piece in ordinary.items()},
            {i: piece.kind for i, piece in ordinary.items() if piece.kind != NORMAL},
            {i: piece.score for i, piece in enumerate(self.proto.pieces)},
        )
