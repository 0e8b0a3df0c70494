"""SentencePiece vocabularies: Meta's tokenizer.model for Llama 1 and 2, and those in GGUF files.

The library gets a model that is written from the checked pieces, never the file.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llama.tokenizer.vocabulary import (
    SPACE_MARK,
    GgufTokens,
    Vocabulary,
    library_errors,
    parts,
    reject_unrepresentable,
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
    """Return the vocabulary in the content of a file. Raises ValueError."""
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
    """Return the bytes of each id."""
    return {i: _bytes_of(piece) for i, piece in enumerate(proto.pieces)}


def _bytes_of(piece: Piece) -> bytes:
    if piece.kind == BYTE:
        return bytes([int(piece.text[3:5], 16)])
    text = piece.text if piece.kind in (CONTROL, UNKNOWN) else piece.text.replace(SPACE_MARK, " ")
    return text.encode()


class SentencePieceCodec:
    """Encodes by `sentencepiece` the text between user tokens and allowed special tokens.

    Text behind such a token gets a space before it, too, as in llama.cpp and transformers.
    """

    sentencepiece, shortens = True, False

    def __init__(self, proto: ModelProto, special_tokens: Mapping[str, int], user_tokens: Mapping[str, int]) -> None:
        self.proto, self._special_tokens, self._user_tokens = proto, special_tokens, user_tokens
        self._known = {piece.text for piece in proto.pieces if piece.kind not in (CONTROL, UNKNOWN)}
        self._processor  # noqa: B018  builds the library's model now, so that its errors appear on opening

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        ids: list[int] = []
        whole = {**self._user_tokens, **{token: self._special_tokens[token] for token in special}}
        for place, part in enumerate(parts(text, whole)):
            if isinstance(part, int):
                ids.append(part)
                continue
            space = " " if self.proto.add_dummy_prefix and (begins or place > 0) else ""
            with library_errors("sentencepiece", f"encode the text that begins {part[:40]!r}"):
                found = self._processor.encode(space + part)
            if len(self.proto.pieces) in found:
                reject_unrepresentable(
                    set(part.replace(" ", SPACE_MARK)) - self._known, "it has no tokens for them, nor for bytes"
                )
            ids.extend(found)
        return ids

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        """The library with the pieces and one more for unknown characters: the file's own is a special token.

        It adds no space before a text, because texts that continue another one have none.
        """
        from sentencepiece import SentencePieceProcessor

        pieces = [replace(piece, kind=CONTROL) if piece.kind == UNKNOWN else piece for piece in self.proto.pieces]
        texts = {piece.text for piece in pieces}
        unknown = next(text for i in range(len(texts) + 1) if (text := f"<unknown {i}>") not in texts)
        proto = replace(self.proto, pieces=[*pieces, Piece(unknown, 0.0, UNKNOWN)], add_dummy_prefix=False)
        with library_errors("sentencepiece", "take this vocabulary"):
            return SentencePieceProcessor(model_proto=write_model_proto(proto))

    def to_gguf(self) -> GgufTokens:
        facts = {"model": "llama", "add_space_prefix": self.proto.add_dummy_prefix}
        whole = {*self._special_tokens.values(), *self._user_tokens.values()}
        ordinary = {i: p for i, p in enumerate(self.proto.pieces) if i not in whole and p.kind != UNUSED}
        return GgufTokens(
            facts,
            {i: piece.text for i, piece in ordinary.items()},
            {i: piece.kind for i, piece in ordinary.items() if piece.kind != NORMAL},
            {i: piece.score for i, piece in enumerate(self.proto.pieces)},
        )
