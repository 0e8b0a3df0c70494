"""Text <-> ids, with the vocabulary of Meta's tokenizer.model, a Hugging Face tokenizer.json or GGUF metadata."""

import codecs
import hashlib
from collections.abc import Collection, Iterable, Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from llama.tokenizer.vocabulary import SPACE_MARK, Vocabulary, check_text, read_file

_END_MARKS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


class Tokenizer:
    """Converts text to ids and back; `Tokenizer(path)` reads Meta's tokenizer.model of Llama 3 or of Llama 1 and 2.

    special_tokens: text -> id. stop_tokens: the file's end tokens and the special tokens with the well-known name of an
    end. adds_bos: whether a text begins with `bos_id`. n_words: the number of ids in the file; see `widen` for more.
    sentencepiece: whether the tokens are SentencePiece's, as those of Llama 1 and 2.
    """

    def __init__(self, model_path: str | PathLike[str]) -> None:
        file = Path(model_path)
        data = read_file(file)
        if data.startswith(b"\n"):  # protobuf's tag of the first piece; a file of ranks never begins with it
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
        """Return the tokenizer of a tokenizer.json, or of the one in a directory, and the configuration beside it."""
        from llama.tokenizer.huggingface_file import read_huggingface

        file = Path(path)
        tokenizer = cls.__new__(cls)
        tokenizer._take(read_huggingface(file / "tokenizer.json" if file.is_dir() else file))
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Return the tokenizer of the `tokenizer.*` keys of a GGUF file, given as plain Python values."""
        from llama.tokenizer.gguf_vocabulary import read_gguf_vocabulary

        tokenizer = cls.__new__(cls)
        tokenizer._take(read_gguf_vocabulary(metadata))
        return tokenizer

    def to_gguf(self, size: int) -> dict[str, Any]:
        """Return the `tokenizer.*` keys with which `from_gguf` and llama.cpp encode and decode as this tokenizer does.

        `size`: the model's vocabulary. Ids without a token get unused tokens, because llama.cpp needs one for every row
        of the embedding. Raises ValueError if the keys cannot express the vocabulary.
        """
        from llama.tokenizer.gguf_vocabulary import write_gguf_vocabulary

        return write_gguf_vocabulary(self._vocabulary, size)

    def widen(self, size: int) -> None:
        """Decode ids below `size`, the rows of a model's embedding, that have no token in the file to nothing."""
        self._size = max(self._vocabulary.size, size)

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
        self.sentencepiece = vocabulary.codec.sentencepiece

    def fingerprint(self) -> str:
        """Return a digest of the tokens, the ends of a text, and the chat template."""
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

        By default special tokens in the text are plain text. Those in `allowed_special` become their id; those in
        `disallowed_special` that are not allowed raise ValueError, and so does text that the vocabulary cannot
        represent. `begins=False`: the text continues another one, so SentencePiece adds no space before it.
        """
        check_text(s, "the text")
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

    def fewest(self, s: str) -> int:
        """Return a lower bound of the number of ids of a text, by its length alone; 0 if the vocabulary has none."""
        known, text = self._vocabulary, s.replace(SPACE_MARK, " ")  # a SentencePiece token may have both
        return 0 if known.codec.shortens else -(-len(text.encode(errors="replace")) // known.longest)

    def decode(self, ids: Iterable[int], *, begins: bool = True) -> str:
        """Return the text of `ids`; special tokens give their text, broken UTF-8 gives U+FFFD.

        Without `begins` the ids continue others: the text keeps the space at the front that `encode` may have added.
        """
        return self.decode_bytes(ids, begins=begins).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, begins: bool = True) -> bytes:
        """Return the bytes of `ids`, as `decode` does. Raises ValueError for an id outside the file and the model."""
        pieces = self._vocabulary.pieces
        data = b"".join([pieces[id] if id in pieces else self._nothing(id) for id in ids])
        return data[1:] if begins and self._vocabulary.strips_space and data.startswith(b" ") else data

    def _nothing(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size:
            raise ValueError(f"id {token_id!r} is not in this vocabulary of {self._size} tokens")
        return b""

    def stream(self, *, begins: bool = False) -> "TextStream":
        """Return a decoder that takes one id at a time; without `begins` the text continues another one."""
        return TextStream(self, begins=begins)


class MissingTokenizer(Tokenizer):
    """Stands for the tokenizer that a checkpoint lacks: what needs one raises ValueError, and work on ids does not."""

    n_words = 0
    sentencepiece = False  # of Meta's folders without one, those that state all their sizes are Llama 3's

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy and pickle
            raise AttributeError(name)
        raise ValueError(f"{self._why}; text needs it: give tokenizer_path, or work on ids (model.generate_tokens)")

    def fingerprint(self) -> str:
        return "none"

    def widen(self, size: int) -> None:
        pass


class TextStream:
    """Decodes ids one by one; the results of `feed`, and of `flush` at the end, join to that of `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, *, begins: bool = False) -> None:
        self._tokenizer, self._begins = tokenizer, begins
        self._at_begin = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that `token_id` completes; bytes of an incomplete character are stored."""
        data = self._tokenizer.decode_bytes([token_id], begins=False)
        if data and self._at_begin:
            data, self._at_begin = self._tokenizer.decode_bytes([token_id]), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the stored bytes as U+FFFD, and start a new text."""
        self._at_begin = self._begins
        return self._decoder.decode(b"", final=True)


def _present(token_id: int | None, name: str) -> int:
    if token_id is None:
        raise ValueError(f"this tokenizer has no {name} token")
    return token_id
