"""What every kind of tokenizer file says once it is read, and what of it can be checked without knowing which kind.

Knows ids, texts and bytes. Does not know files, nor who turns a text into ids.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llama.untrusted.files import read_regular
from llama.untrusted.model_proto import MAX_TOKEN_LENGTH, MAX_WORDS

# Far above every released vocabulary (262,144 tokens, 33 MB), and low enough that a hostile one costs little.
MAX_FILE_BYTES = 64 << 20
MAX_MERGES = 1 << 21

UNSPELLED = "\u2581"  # SentencePiece's sign for a space


@dataclass(frozen=True)
class Spelling:
    """A vocabulary as a GGUF file has it: `facts` by key, and of each ordinary token its text, type and score."""

    facts: dict[str, Any]
    tokens: Mapping[int, str]
    kinds: Mapping[int, int]  # those that are not normal
    scores: Mapping[int, float] | None = None


class Codec(Protocol):
    """Turns a text into ids."""

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        """Return the ids of a text in which the tokens named in `special`, and no other special ones, are looked for.

        `begins`: the text begins one; else it goes on from another. Raises ValueError for a text that the vocabulary
        cannot represent.
        """

    def spelling(self) -> Spelling:
        """Raises ValueError where GGUF has no way to say the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What the files have in common. `size`: one more than the highest id, of tokens that nothing becomes, too.

    pieces: the bytes that each id adds to a text. user_tokens: added as plain text, taken whole wherever a text has
    them. strips_space: a text is encoded with a space before it, which decoding takes away.
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


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_tokens(tokens: Mapping[str, object]) -> None:
    """Refuse ids that are no ids and texts that are no tokens, in linear time. Raises ValueError that names one."""
    if len(tokens) > MAX_WORDS:
        raise ValueError(f"{len(tokens)} tokens are more than the limit of {MAX_WORDS}")
    for text, token_id in tokens.items():
        if type(token_id) is not int or not 0 <= token_id < MAX_WORDS:
            raise ValueError(f"token {text!r:.80} has id {token_id!r:.40}, which is no whole number from 0 on")
        if not 0 < len(text) <= MAX_TOKEN_LENGTH:
            raise ValueError(f"token {text!r:.80} has {len(text)} characters; it must have 1 to {MAX_TOKEN_LENGTH}")
    if len(set(tokens.values())) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens share {len(set(tokens.values()))} ids")
    check_text("".join(tokens), "a token")


def check_text(text: str, what: str) -> None:
    """Refuse half of a surrogate pair, which is no text and which no library takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of {what}, {text[error.start]!r}, is half of a surrogate pair; "
            "decode the text properly first"
        ) from None


def check_template(template: object) -> str | None:
    """Return the chat template of a file. Raises ValueError for one that is no text."""
    if template is None:
        return None
    if not isinstance(template, str):
        raise ValueError(f"the chat template is {template!r:.80} and must be a text")
    check_text(template, "the chat template")
    return template


def apart(user_tokens: Mapping[str, int], ends: Collection[int | None]) -> tuple[dict[str, int], dict[str, int]]:
    """Sort tokens that a file calls a user's: those that begin or end a text stay out of plain text nevertheless."""
    special = {text: token_id for text, token_id in user_tokens.items() if token_id in ends}
    return special, {text: token_id for text, token_id in user_tokens.items() if text not in special}


def refuse_unrepresentable(characters: Iterable[str], why: str) -> None:
    """Raise ValueError that names characters which the vocabulary cannot represent."""
    culprits = sorted(set(characters))
    raise ValueError(
        f"the vocabulary cannot represent {', '.join(map(repr, culprits[:10]))}"
        f"{' and others' if len(culprits) > 10 else ''}: {why}"
    )


# ---- parts of texts --------------------------------------------------------------------------------------------------


class Cutter:
    """Finds tokens that are taken whole, however many there are; of two that begin at one place it takes the longer."""

    def __init__(self, whole: Mapping[str, int]) -> None:
        self._whole = dict(whole)
        lengths: dict[str, set[int]] = {}
        for token in whole:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._firsts = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]") if whole else None

    def parts(self, text: str) -> Iterator[str | int]:
        """Yield the texts between the tokens, none of them empty, and the ids of the tokens."""
        at = done = 0
        while self._firsts is not None and (found := self._firsts.search(text, at)):
            token = self._token_at(text, found.start())
            at = found.start() + 1
            if token is not None:
                if done < found.start():
                    yield text[done : found.start()]
                yield self._whole[token]
                at = done = found.start() + len(token)
        if done < len(text):
            yield text[done:]

    def _token_at(self, text: str, start: int) -> str | None:
        spelled = (text[start : start + length] for length in self._lengths[text[start]])
        return next((token for token in spelled if token in self._whole), None)


class WholeTokens:
    """The tokens of a vocabulary that are taken whole: users' always, special ones where they are asked for."""

    def __init__(self, special_tokens: Mapping[str, int], user_tokens: Mapping[str, int]) -> None:
        self._special_tokens, self._user_tokens = special_tokens, user_tokens
        self._latest: tuple[frozenset[str], Cutter] | None = None  # one object, for threads may share it

    def parts(self, text: str, special: frozenset[str]) -> Iterator[str | int]:
        """Yield what `Cutter.parts` does, for users' tokens and these special ones."""
        latest = self._latest
        if latest is None or latest[0] != special:
            asked = {token: self._special_tokens[token] for token in special}
            self._latest = latest = special, Cutter({**self._user_tokens, **asked})
        return latest[1].parts(text)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_file(path: Path, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return what a regular file of at most `limit` bytes holds. Raises FileNotFoundError, ValueError."""
    try:
        return read_regular(path, limit=limit)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no tokenizer file {path}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no file of a tokenizer: {error}") from error


# ---- libraries -------------------------------------------------------------------------------------------------------


@contextmanager
def calling(library: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises into a ValueError.

    A panic in Rust arrives as a PanicException, which is not an Exception and cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{library} cannot {what}: {str(error)[:200]}") from error
        raise
