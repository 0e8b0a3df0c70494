"""SentencePiece vocabularies: Meta's tokenizer.model for Llama 1 and 2, and those in GGUF files.

Scores become merges, and `tokenizers` encodes.
"""

from collections.abc import Mapping

from llama.tokenizer.bpe import Added, BpeCodec, Spaces, merges_by_score
from llama.tokenizer.vocabulary import SPACE_MARK, GgufTokens, Vocabulary, parts
from llama.untrusted.model_proto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    ModelProto,
    Piece,
    read_model_proto,
)


def read_sentencepiece(data: bytes) -> Vocabulary:
    """Return the vocabulary in the content of a file. Raises ValueError."""
    proto = read_model_proto(data)
    if unused := [piece.text for piece in proto.pieces if piece.kind == UNUSED]:
        raise ValueError(f"token {unused[0]!r:.80} is unused, and SentencePiece would split it; remove such tokens")
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
    """Encodes the text between user tokens and allowed special tokens.

    Text behind such a token gets a space before it, too, as in llama.cpp and transformers. Tokens that the file itself
    calls user-defined are found by the library, and get none, as in SentencePiece.
    """

    sentencepiece, shortens = True, False

    def __init__(self, proto: ModelProto, special_tokens: Mapping[str, int], user_tokens: Mapping[str, int]) -> None:
        self.proto, self._special_tokens, self._user_tokens = proto, special_tokens, user_tokens
        kinds = {kind: {p.text: i for i, p in enumerate(proto.pieces) if p.kind == kind} for kind in range(1, 7)}
        scores = {text: proto.pieces[i].score for text, i in kinds[NORMAL].items()}
        users = [Added(text, i, special=False) for text, i in kinds[USER_DEFINED].items()]
        self._bpe = BpeCodec(
            kinds[NORMAL] | kinds[BYTE],
            merges_by_score(scores),
            users,
            Spaces(metaspace=False, scheme="never", split=False, strips=False),
            byte_fallback=proto.byte_fallback,
        )

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        ids: list[int] = []
        whole = {**self._user_tokens, **{token: self._special_tokens[token] for token in special}}
        for place, part in enumerate(parts(text, whole)):
            if isinstance(part, int):
                ids.append(part)
            else:
                space = " " if self.proto.add_dummy_prefix and (begins or place > 0) else ""
                marked = (space + part).replace(" ", SPACE_MARK)  # as user-defined tokens are written
                ids.extend(self._bpe.encode(marked, frozenset(), begins=False))
        return ids

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
