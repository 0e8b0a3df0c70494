"""Text <-> ids: from Meta's tokenizer.model, a Hugging Face tokenizer.json or GGUF metadata.

Knows what all of them have in common, and that the library which defines each turns texts into ids. Does not know
models or dialogs, nor how vocabularies stand in files.
"""

import codecs
import hashlib
from collections.abc import Collection, Iterable, Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from llama.tokenizer.vocabulary import Vocabulary, read_file

_END_MARKS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


class Tokenizer:
    """Turns text into ids and back; `Tokenizer(path)` reads Meta's tokenizer.model, of Llama 3 or of Llama 1 and 2.

    `special_tokens` maps their text to ids. `stop_tokens` are the file's end tokens and every special token that
    marks an end by its well-known name. `adds_bos`: whether the file asks for `bos_id` before a text. `n_words`: how
    many ids the file has; those beyond, of which a model may have some, decode to nothing up to what `widen` was told.
    """

    n_words: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    stop_tokens: list[int]
    special_tokens: dict[str, int]
    adds_bos: bool
    chat_template: str | None

    def __init__(self, model_path: str | PathLike[str]) -> None:
        file = Path(model_path)
        data = read_file(file)
        if data.startswith(b"\n"):  # the tag of a first piece in protobuf's encoding; lines of ranks never begin so
            from llama.tokenizer.sentencepiece_file import read_sentencepiece

            try:
                self._take(read_sentencepiece(data))
            except ValueError as error:
                raise ValueError(f"{file}: SentencePiece: {error}") from error
        else:
            from llama.tokenizer.tiktoken_file import read_tiktoken

            self._take(read_tiktoken(file, data))

    @classmethod
    def from_huggingface(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Read a tokenizer.json, or the one in a directory, and the configuration files beside it."""
        from llama.tokenizer.huggingface_file import read_huggingface

        file = Path(path)
        tokenizer = cls.__new__(cls)
        file = file / "tokenizer.json" if file.is_dir() else file
        tokenizer._take(read_huggingface(file))
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Read the `tokenizer.*` keys of a GGUF file, given as plain Python values."""
        from llama.tokenizer.gguf_vocabulary import read_gguf_vocabulary

        tokenizer = cls.__new__(cls)
        tokenizer._take(read_gguf_vocabulary(metadata))
        return tokenizer

    def to_gguf(self, size: int) -> dict[str, Any]:
        """Return the `tokenizer.*` keys that make `from_gguf`, and llama.cpp, encode and decode as this tokenizer does.

        `size` is the model's vocabulary: ids without a token are filled up with unused ones, because llama.cpp wants a
        token for every row of the embedding. Raises ValueError for what those keys cannot say.
        """
        from llama.tokenizer.gguf_vocabulary import write_gguf_vocabulary

        return write_gguf_vocabulary(self._vocabulary, size)

    def widen(self, size: int) -> None:
        """Let ids up to `size`, the rows of a model's embedding, decode to nothing where the file has no token."""
        self._size = max(self.n_words, size)

    def _take(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.n_words = self._size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else None
        self.pad_id = vocabulary.pad_id
        self.special_tokens = dict(vocabulary.special_tokens)
        ends = [self.special_tokens[text] for text in _END_MARKS if text in self.special_tokens]
        self.stop_tokens = list(dict.fromkeys([*vocabulary.eos_ids, *ends]))
        self.adds_bos = vocabulary.adds_bos
        self.chat_template = vocabulary.chat_template

    def fingerprint(self) -> str:
        """Return a digest that only a tokenizer with the same tokens and ends shares."""
        pieces = sorted(self._vocabulary.pieces.items())
        facts = (pieces, sorted(self.special_tokens.items()), self.stop_tokens, self.adds_bos)
        return hashlib.sha256(repr((*facts, self.chat_template)).encode()).hexdigest()

    def encode(
        self,
        s: str,
        *,
        bos: bool,
        eos: bool,
        allowed_special: Literal["all"] | Set[str] = frozenset(),
        disallowed_special: Literal["all"] | Collection[str] = (),
        begins: bool = True,
    ) -> list[int]:
        """Return the ids of a text.

        By default special tokens in the text are plain text, whatever they spell. Those in `allowed_special` become
        their id, those in `disallowed_special` (that are not allowed) raise ValueError. ValueError also for text that
        the vocabulary cannot represent. SentencePiece's vocabularies put a space before a text, but not before one that
        goes on from another: `begins=False`.
        """
        allowed = frozenset(self.special_tokens if allowed_special == "all" else allowed_special)
        if unknown := allowed - self.special_tokens.keys():
            raise ValueError(f"allowed_special has {sorted(unknown)}, which this tokenizer does not know")
        disallowed = self.special_tokens if disallowed_special == "all" else disallowed_special
        for token in disallowed:
            if token not in allowed and token in s:
                raise ValueError(f"the text contains {token!r}, which disallowed_special forbids")
        ids = self._vocabulary.codec.encode(s, allowed, begins=begins)
        before = [_present(self.bos_id, "BOS")] if bos else []
        after = [_present(self.eos_id, "EOS")] if eos else []
        return before + ids + after

    def decode(self, ids: Iterable[int], *, begins: bool = True) -> str:
        """Return the text of `ids`; special tokens give their text, broken UTF-8 gives U+FFFD.

        Without `begins` the ids go on from others, and keep a space at the front that `encode` may have put there.
        """
        return self.decode_bytes(ids, begins=begins).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, begins: bool = True) -> bytes:
        """Return the bytes of `ids`, as `decode` does; ValueError for an id that neither file nor model has."""
        pieces = self._vocabulary.pieces
        data = b"".join([pieces[id] if id in pieces else self._nothing(id) for id in ids])
        return data[1:] if begins and self._vocabulary.strips_space and data.startswith(b" ") else data

    def _nothing(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size:
            raise ValueError(f"id {token_id!r} is not in this vocabulary of {self._size} tokens")
        return b""

    def stream(self, *, begins: bool = False) -> "TextStream":
        """Return a decoder that takes one id at a time; the text goes on from another unless it `begins` one."""
        return TextStream(self, begins=begins)


class TextStream:
    """Decodes ids as they come; what `feed` returned, and `flush` at the end, together equal `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, *, begins: bool = False) -> None:
        self._tokenizer, self._begins = tokenizer, begins
        self._at_begin = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that `token_id` completes; the bytes of one that is not whole yet wait."""
        data = self._tokenizer.decode_bytes([token_id], begins=False)
        if data and self._at_begin:
            data, self._at_begin = self._tokenizer.decode_bytes([token_id]), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return what still waits, as U+FFFD, and start afresh."""
        self._at_begin = self._begins
        return self._decoder.decode(b"", final=True)


def _present(token_id: int | None, name: str) -> int:
    if token_id is None:
        raise ValueError(f"this tokenizer has no {name} token")
    return token_id
