"""Text <-> ids, on tiktoken: from Meta's tokenizer.model, a Hugging Face tokenizer.json or GGUF metadata.

Knows bytes and special tokens. Does not know models or dialogs, nor how vocabularies stand in files.
"""

import codecs
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import tiktoken

from llama.tokenizer.vocabulary import (
    Vocabulary,
    gguf_metadata,
    gguf_vocabulary,
    huggingface_vocabulary,
    meta_vocabulary,
)

_END_MARKS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")

# Beyond these tiktoken panics or its patterns give up; the values are Meta's (https://github.com/openai/tiktoken/issues/195).
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")

# What Python raises at a value that is missing from a foreign file or of another type than in every known one.
_MISLAID = (AttributeError, IndexError, KeyError, TypeError)


class Tokenizer:
    """Turns text into ids and back; `Tokenizer(path)` reads Meta's tokenizer.model.

    `special_tokens` maps their text to ids. `stop_tokens` are the file's end tokens and every special token that
    marks an end by its well-known name. `adds_bos`: whether the file asks for `bos_id` before a text.
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
        self._take(meta_vocabulary(Path(model_path)))

    @classmethod
    def from_huggingface(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Read a tokenizer.json, or the one in a directory, and the configuration files beside it."""
        file = Path(path)
        tokenizer = cls.__new__(cls)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            tokenizer._take(huggingface_vocabulary(file))
        except _MISLAID as error:
            raise ValueError(f"{file} is not laid out as a tokenizer.json: {error!r}") from error
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Read the `tokenizer.*` keys of a GGUF file, given as plain Python values."""
        tokenizer = cls.__new__(cls)
        try:
            tokenizer._take(gguf_vocabulary(metadata))
        except _MISLAID as error:
            raise ValueError(f"the GGUF file has no tokenizer as expected: {error!r}") from error
        return tokenizer

    def to_gguf(self, size: int) -> dict[str, Any]:
        """Return the `tokenizer.*` keys that make `from_gguf`, and llama.cpp, encode and decode as this tokenizer does.

        `size` is the model's vocabulary: ids without a token are filled up with unused ones, because llama.cpp wants a
        token for every row of the embedding. Raises ValueError for what those keys cannot say.
        """
        return gguf_metadata(self._vocabulary, size)

    def _take(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else None
        self.pad_id = vocabulary.pad_id
        # An end or beginning stays out of plain text even where the file calls it a user's token.
        controls = {self.bos_id, *vocabulary.eos_ids}
        forbidden = {text: i for text, i in vocabulary.user_tokens.items() if i in controls}
        self.special_tokens = vocabulary.special_tokens | forbidden
        ends = [self.special_tokens[text] for text in _END_MARKS if text in self.special_tokens]
        self.stop_tokens = list(dict.fromkeys([*vocabulary.eos_ids, *ends]))
        self.adds_bos = vocabulary.adds_bos
        self.chat_template = vocabulary.chat_template
        self._user_tokens = {t: i for t, i in vocabulary.user_tokens.items() if t not in forbidden}
        added = self.special_tokens | self._user_tokens
        self._pieces = vocabulary.pieces | {i: text.encode() for text, i in added.items()}
        self.n_words = max(self._pieces) + 1
        self._ids = vocabulary.ids
        self._single_bytes = b"".join(token for token in vocabulary.ranks if len(token) == 1)
        # tiktoken is not told of special tokens: what it never knew, it cannot find in a text.
        self._bpe = tiktoken.Encoding(
            "llama", pat_str=vocabulary.pattern, mergeable_ranks=vocabulary.ranks, special_tokens={}
        )

    def fingerprint(self) -> str:
        """Return a digest that only a tokenizer with the same tokens and ends shares."""
        facts = (sorted(self._pieces.items()), sorted(self.special_tokens.items()), self.stop_tokens, self.adds_bos)
        return hashlib.sha256(repr((*facts, self.chat_template)).encode()).hexdigest()

    def encode(
        self,
        s: str,
        *,
        bos: bool,
        eos: bool,
        allowed_special: Literal["all"] | Set[str] = frozenset(),
        disallowed_special: Literal["all"] | Collection[str] = (),
    ) -> list[int]:
        """Return the ids of a text.

        By default special tokens in the text are plain text, whatever they spell. Those in `allowed_special` become
        their id, those in `disallowed_special` (that are not allowed) raise ValueError. ValueError also for text that
        the vocabulary cannot represent. Runs of more than 25,000 (non-)space characters, and texts of more than
        400,000, are cut there before they are merged, as Meta's tokenizer does.
        """
        allowed = set(self.special_tokens if allowed_special == "all" else allowed_special)
        if unknown := allowed - self.special_tokens.keys():
            raise ValueError(f"allowed_special has {sorted(unknown)}, which this tokenizer does not know")
        disallowed = self.special_tokens if disallowed_special == "all" else disallowed_special
        for token in disallowed:
            if token not in allowed and token in s:
                raise ValueError(f"the text contains {token!r}, which disallowed_special forbids")
        whole = self._user_tokens | {token: self.special_tokens[token] for token in allowed}
        ids: list[int] = []
        for index, part in enumerate(_cutter(whole).split(s) if whole else [s]):
            if index % 2:  # re.split with one group: text, token, text, token, ..., text
                ids.append(whole[part])
            else:
                ids.extend(self._encode_text(part))
        before = [_present(self.bos_id, "BOS")] if bos else []
        after = [_present(self.eos_id, "EOS")] if eos else []
        return before + ids + after

    def _encode_text(self, text: str) -> Iterator[int]:
        self._check_representable(text)
        for part in _slices(text):
            for rank in self._encode_slice(part):
                yield self._ids[rank]

    def _encode_slice(self, text: str) -> list[int]:
        try:
            return self._bpe.encode_ordinary(text)
        except BaseException as error:
            # A panic in tiktoken's Rust arrives as a PanicException, which is not an Exception and cannot be imported.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"tiktoken cannot encode the text that begins {text[:40]!r}: {error}") from error
            raise

    def _check_representable(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text, {text[error.start]!r}, is half of a surrogate pair; "
                "decode the text properly first"
            ) from None
        if missing := set(data.translate(None, self._single_bytes)):
            culprits = sorted({char for char in text if missing.intersection(char.encode())})
            raise ValueError(
                f"the vocabulary cannot represent {', '.join(map(repr, culprits[:10]))}"
                f"{' and others' if len(culprits) > 10 else ''}: it lacks bytes that they are made of"
            )

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special tokens give their text, broken UTF-8 gives U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`; ValueError for one that is not in the vocabulary."""
        try:
            return b"".join([self._pieces[token_id] for token_id in ids])
        except KeyError as error:
            raise ValueError(f"id {error.args[0]!r} is not in this vocabulary of {self.n_words} tokens") from None

    def stream(self) -> "TextStream":
        """Return a decoder that takes one id at a time."""
        return TextStream(self)


class TextStream:
    """Decodes ids as they come; what `feed` returned, and `flush` at the end, together equal `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that `token_id` completes; the bytes of one that is not whole yet wait."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id]))

    def flush(self) -> str:
        """Return what still waits, as U+FFFD, and start afresh."""
        return self._decoder.decode(b"", final=True)


def _cutter(tokens: Iterable[str]) -> re.Pattern[str]:
    # The longest first: of two that begin at the same place, Hugging Face takes the longer.
    return re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")


def _present(token_id: int | None, name: str) -> int:
    if token_id is None:
        raise ValueError(f"this tokenizer has no {name} token")
    return token_id


def _slices(text: str) -> Iterator[str]:
    """Cut a text where Meta's tokenizer does, so that tiktoken can digest it in linear time."""
    for begin in range(0, len(text), _MAX_CHARS):
        part = text[begin : begin + _MAX_CHARS]
        done = 0
        for run in _RUNS.finditer(part) if len(part) > _MAX_RUN else ():
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield part[done:cut]
                done = cut
        yield part[done:]
