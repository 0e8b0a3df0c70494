"""A vocabulary, whichever kind of file it comes from, and the checks that all kinds share."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from llama.untrusted.files import read_regular
from llama.untrusted.model_proto import MAX_TOKEN_LENGTH, MAX_WORDS

# Far above every released vocabulary (262,144 tokens, 33 MB), and low enough that a malicious file costs little.
MAX_FILE_BYTES = 64 << 20
MAX_MERGES = 1 << 21

SPACE_MARK = "\u2581"  # SentencePiece's character for a space


@dataclass(frozen=True)
class GgufTokens:
    """The ordinary tokens in the form of a GGUF file: values by key, and the text, type and score of each token."""

    facts: dict[str, Any]
    tokens: Mapping[int, str]
    kinds: Mapping[int, int]  # without tokens of the normal type
    scores: Mapping[int, float] | None = None


class Codec(Protocol):
    """Turns a text into ids.

    sentencepiece: the tokens are SentencePiece's pieces, as those of Llama 1 and 2, not byte-level letters.
    shortens: a text may have more bytes than its tokens.
    """

    @property
    def sentencepiece(self) -> bool: ...

    @property
    def shortens(self) -> bool: ...

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        """Return the ids of a text. Of the special tokens only those in `special` are recognised.

        Without `begins` the text continues another one. Raises ValueError for a text that the vocabulary cannot
        represent.
        """

    def to_gguf(self) -> GgufTokens:
        """Return the ordinary tokens for a GGUF file. Raises ValueError if GGUF cannot express the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The content of a tokenizer file.

    size: the highest id plus 1, including unused tokens. pieces: the bytes of each id. user_tokens: added tokens that
    are not special; they are recognised in every text. strips_space: encoding adds a space before the text, and
    decoding removes it.
    """

    codec: Codec
    size: int
    pieces: Mapping[int, bytes]
    special_tokens: Mapping[str, int]
    user_tokens: Mapping[str, int]
    bos_id: int | None
    eos_ids: list[int]
    pad_id: int | None
    adds_bos: bool
    chat_template: str | None
    strips_space: bool = False

    def __post_init__(self) -> None:
        for named in (self.bos_id, self.pad_id, *self.eos_ids):
            if named is not None and not 0 <= named < self.size:
                raise ValueError(f"bos, eos or pad id {named!r} is not in the vocabulary of {self.size} tokens")
        if self.adds_bos and self.bos_id is None:
            raise ValueError("the file asks for a BOS token before each text but names none")

    @cached_property
    def longest(self) -> int:
        """The most bytes of a token."""
        return max(map(len, self.pieces.values()))


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_tokens(tokens: Mapping[str, object]) -> None:
    """Raise ValueError, with the token, for an invalid id or text, in linear time."""
    if len(tokens) > MAX_WORDS:
        raise ValueError(f"{len(tokens)} tokens are more than the limit of {MAX_WORDS}")
    for text, token_id in tokens.items():
        if type(token_id) is not int or not 0 <= token_id < MAX_WORDS:
            raise ValueError(f"token {text!r:.80} has id {token_id!r:.40}; it must be a whole number from 0 on")
        if not 0 < len(text) <= MAX_TOKEN_LENGTH:
            raise ValueError(f"token {text!r:.80} has {len(text)} characters; it must have 1 to {MAX_TOKEN_LENGTH}")
    if len(set(tokens.values())) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens share {len(set(tokens.values()))} ids")
    check_text("".join(tokens), "a token")


def check_text(text: str, what: str) -> None:
    """Raise ValueError for half of a surrogate pair: the libraries reject it, too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of {what}, {text[error.start]!r}, is half of a surrogate pair; "
            "decode the text properly first"
        ) from None


def check_template(template: object) -> str | None:
    """Return the chat template of a file. Raises ValueError unless it is a text or None."""
    if not isinstance(template, str | None):
        raise ValueError(f"the chat template is {template!r:.80} and must be a text")
    if template is not None:
        check_text(template, "the chat template")
    return template


def split_ends(user_tokens: Mapping[str, int], ends: Collection[int | None]) -> tuple[dict[str, int], dict[str, int]]:
    """Split a file's user tokens into special ones, which begin or end a text, and the others."""
    special = {text: token_id for text, token_id in user_tokens.items() if token_id in ends}
    return special, {text: token_id for text, token_id in user_tokens.items() if text not in special}


def reject_unrepresentable(characters: Iterable[str], why: str) -> None:
    """Raise ValueError with the first ten of the characters, which the vocabulary cannot represent."""
    culprits = sorted(set(characters))
    raise ValueError(
        f"the vocabulary cannot represent {', '.join(map(repr, culprits[:10]))}"
        f"{' and others' if len(culprits) > 10 else ''}: {why}"
    )


# ---- parts of texts --------------------------------------------------------------------------------------------------


def parts(text: str, tokens: Mapping[str, int]) -> Iterator[str | int]:
    """Yield the ids of the tokens in a text, and the texts between them that are not empty. Time: linear in the text.

    Of two tokens that begin at one place the longer one is found.
    """
    lengths: dict[str, set[int]] = {}
    for token in tokens:
        lengths.setdefault(token[0], set()).add(len(token))
    firsts = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if tokens else None
    at = done = 0
    while firsts is not None and (found := firsts.search(text, at)):
        at = found.start() + 1
        for length in sorted(lengths[found[0]], reverse=True):
            token = text[found.start() : found.start() + length]
            if token in tokens:
                if done < found.start():
                    yield text[done : found.start()]
                yield tokens[token]
                at = done = found.start() + length
                break
    if done < len(text):
        yield text[done:]


# ---- files -----------------------------------------------------------------------------------------------------------


def read_file(path: Path, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises FileNotFoundError, ValueError."""
    try:
        return read_regular(path, limit=limit)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no tokenizer file {path}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer file: {error}") from error


# ---- libraries -------------------------------------------------------------------------------------------------------


@contextmanager
def library_errors(library: str, task: str) -> Iterator[None]:
    """Turn every exception of a library into a ValueError.

    A panic in Rust is a PanicException, which is not an Exception and cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{library} cannot {task}: {str(error)[:200]}") from error
        raise
