"""BPE by Hugging Face's `tokenizers`, for vocabularies of byte-level letters or of SentencePiece's pieces.

The library gets checked tokens and merges, never a file. Each call gives it only the special tokens that the text may
contain; it cannot find another one, so user text never becomes a special token.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from llama.tokenizer.byte_letters import byte_letters
from llama.tokenizer.patterns import PRE_TOKENIZERS
from llama.tokenizer.vocabulary import (
    MAX_MERGES,
    SPACE_MARK,
    GgufTokens,
    library_errors,
    reject_unrepresentable,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE

logger = logging.getLogger(__name__)

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_KIND = 6  # tokenizer.ggml.token_type
_MAX_VARIANTS = 8
_MAX_SPLITS = 1 << 24  # places at which tokens can be split into two, at a third of a microsecond each
_MAX_ADDED_LENGTH = 1 << 19  # characters of all added tokens; twice as many take the library 1 s, 40 times 15 s
_UNKNOWN = -1  # not an id


@dataclass(frozen=True)
class Added:
    """A token that was added to a vocabulary, with the library's flags for finding it in a text."""

    text: str
    id: int
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class ByteLevel:
    """Bytes as GPT-2's letters, split by `PRE_TOKENIZERS[pre]`. nfc: the text is normalised to NFC before."""

    pre: str
    nfc: bool = False


@dataclass(frozen=True)
class Spaces:
    """SentencePiece's form: U+2581 for a space, and a space before the text.

    metaspace: by the library's Metaspace, with its scheme and `split`; else by normalisation, with the scheme "always"
    or "never". strips: decoding removes one space at the front of a text.
    """

    metaspace: bool
    scheme: str
    split: bool
    strips: bool


class BpeCodec:
    """Encodes by `tokenizers`. Raises ValueError for merges that do not fit the tokens.

    masks: a special token that is not allowed still hides the added tokens inside it, as in transformers.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        added: Sequence[Added],
        form: ByteLevel | Spaces,
        *,
        whole_words: bool = False,
        byte_fallback: bool = False,
        masks: bool = True,
    ) -> None:
        self.vocab, self.merges, self.added, self.form = vocab, merges, added, form
        self.whole_words, self.byte_fallback, self._masks = whole_words, byte_fallback, masks
        _check_merges(vocab, merges)
        if (length := sum(len(token.text) for token in added)) > _MAX_ADDED_LENGTH:
            raise ValueError(f"the added tokens have {length} characters; the limit is {_MAX_ADDED_LENGTH}")
        if not vocab:
            raise ValueError("the vocabulary has no ordinary tokens")
        self._letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        if isinstance(form, ByteLevel) and not set("".join(vocab)) <= self._letters.keys():
            odd = next(text for text in vocab if not set(text) <= self._letters.keys())
            raise ValueError(f"token {odd!r:.80} with id {vocab[odd]} is not a byte-level token")
        self._variant = lru_cache(_MAX_VARIANTS)(self._make_variant)
        self._model  # noqa: B018  builds the library's model now, so that its errors appear on opening

    @property
    def sentencepiece(self) -> bool:
        return isinstance(self.form, Spaces)

    @property
    def shortens(self) -> bool:
        strips = any(token.lstrip or token.rstrip for token in self.added)
        return strips or (isinstance(self.form, ByteLevel) and self.form.nfc)

    # ---- text -> ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        with library_errors("tokenizers", "take this vocabulary"):
            library, ids = self._variant(special, begins or isinstance(self.form, ByteLevel))
        with library_errors("tokenizers", f"encode the text that begins {text[:40]!r}"):
            # `encode` would keep Python's lock: a long text would stop all other threads for seconds.
            (encoded,) = library.encode_batch_fast([text], add_special_tokens=False)
        found = [ids[number] for number in encoded.ids]
        if _UNKNOWN in found:
            self._reject_unknown(text if library.normalizer is None else library.normalizer.normalize_str(text))
        return found

    def _make_variant(self, special: frozenset[str], begins: bool) -> "tuple[Library, list[int]]":
        """Return the library that finds these special tokens, and the id for each of its numbers 0, 1, 2, ...

        The library numbers added tokens itself, whatever their ids are.
        """
        from tokenizers import AddedToken, Tokenizer

        library = Tokenizer(self._model)
        library.encode_special_tokens = True  # tokens that are marked special are found and left as text
        self._set_form(library, begins)
        ids = [*self.vocab.values(), _UNKNOWN]
        added = [token for token in self.added if self._masks or not token.special or token.text in special]
        tokens = [
            AddedToken(
                token.text,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special and token.text not in special,
            )
            for token in added
        ]
        library.add_tokens(tokens)
        for token in added:
            number = library.token_to_id(token.text)
            assert number is not None
            assert number <= len(ids), f"{token.text!r:.80} is number {number} of {len(ids)}"
            if number == len(ids):
                ids.append(token.id)
        return library, ids

    def _set_form(self, library: "Library", begins: bool) -> None:
        from tokenizers import Regex, normalizers, pre_tokenizers

        form = self.form
        if isinstance(form, ByteLevel):
            if form.nfc:
                library.normalizer = normalizers.NFC()
            pre = PRE_TOKENIZERS[form.pre]
            chain: list[Any] = []
            if pre.pattern is not None:
                chain.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
            if pre.digits:
                chain.append(pre_tokenizers.Digits(individual_digits=True))
            chain.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
            library.pre_tokenizer = pre_tokenizers.Sequence(chain)
            return
        scheme = form.scheme if begins else "never"
        if form.metaspace:
            library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=form.split)
            return
        prefix = [] if scheme == "never" else [normalizers.Prepend(SPACE_MARK)]
        library.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])

    @cached_property
    def _model(self) -> "BPE":
        """The library's model, shared by all variants, with a token for unknown characters, which it would drop.

        No text becomes that token: it is not a letter and no merge gives it. With ignore_merges whole words are looked
        up, and byte-level words never contain U+0000.
        """
        from tokenizers.models import BPE

        numbers = {text: number for number, text in enumerate(self.vocab)}
        unknown = next(text for i in range(len(numbers) + 1) if (text := f"\0unknown {i}") not in numbers)
        numbers[unknown] = len(numbers)
        with library_errors("tokenizers", "take this vocabulary"):
            return BPE(
                vocab=numbers,
                merges=list(self.merges),
                unk_token=unknown,
                byte_fallback=self.byte_fallback,
                ignore_merges=self.whole_words,
            )

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _reject_unknown(self, normal: str) -> None:
        if isinstance(self.form, ByteLevel):
            lacking = {byte for letter, byte in self._letters.items() if letter not in self.vocab}
            culprits = [char for char in set(normal) if lacking.intersection(char.encode())]
            reject_unrepresentable(culprits, "it lacks some of their bytes")
        chars = set(normal.replace(" ", SPACE_MARK)) - self.vocab.keys()
        bytes_ = {char: {f"<0x{byte:02X}>" for byte in char.encode()} for char in chars}
        culprits = [char for char in chars if not (self.byte_fallback and bytes_[char] <= self.vocab.keys())]
        reject_unrepresentable(culprits, "it has no tokens for them")

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def pieces(self) -> dict[int, bytes]:
        """Return the bytes of every ordinary and every added token."""
        if isinstance(self.form, ByteLevel):
            table = {ord(letter): byte for letter, byte in self._letters.items()}
            pieces = {token_id: text.translate(table).encode("latin-1") for text, token_id in self.vocab.items()}
            return pieces | {token.id: token.text.encode() for token in self.added}
        pieces = {token_id: _bytes_of(text) for text, token_id in self.vocab.items()}
        added = {t.id: t.text.encode() if t.special else _bytes_of(t.text) for t in self.added}
        return pieces | added

    def to_gguf(self) -> GgufTokens:
        tokens = {token_id: text for text, token_id in self.vocab.items()}
        if isinstance(self.form, ByteLevel):
            if self.whole_words != PRE_TOKENIZERS[self.form.pre].whole_words:
                raise ValueError(
                    f"a .gguf file with tokenizer.ggml.pre={self.form.pre} cannot have ignore_merges={self.whole_words}"
                )
            if self.form.nfc:
                logger.warning("a .gguf file has no key for NFC normalisation, and llama.cpp does not normalise")
            merges = [" ".join(pair) for pair in self.merges]
            return GgufTokens({"model": "gpt2", "pre": self.form.pre, "merges": merges}, tokens, {})
        kinds = {token_id: _BYTE_KIND for text, token_id in self.vocab.items() if BYTE_TOKEN.fullmatch(text)}
        facts = {"model": "llama", "add_space_prefix": self.form.scheme != "never"}
        return GgufTokens(facts, tokens, kinds, self._scores())

    def _scores(self) -> dict[int, float]:
        """Return scores with which SentencePiece merges in the order of these merges.

        SentencePiece merges every pair that gives a token, ordered by the token's score. So every pair must be in the
        list, and the pairs of one token must be neighbours. Raises ValueError otherwise.
        """
        order = [text for text, _ in groupby(left + right for left, right in self.merges)]
        listed = set(self.merges)
        scattered = len(set(order)) < len(order)
        for text in self.vocab:
            if BYTE_TOKEN.fullmatch(text):
                continue
            splits = ((text[:i], text[i:]) for i in range(1, len(text)))
            if scattered or any(a in self.vocab and b in self.vocab and (a, b) not in listed for a, b in splits):
                raise ValueError(f"a .gguf file cannot have these merges: scores would merge {text!r:.80} differently")
        scores = {self.vocab[text]: -float(place) for place, text in enumerate(order)}
        return {token_id: scores.get(token_id, 0.0) for token_id in self.vocab.values()}


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a piece, as the library's decoders give them: a byte, or its characters with spaces."""
    return bytes([int(text[3:5], 16)]) if BYTE_TOKEN.fullmatch(text) else text.replace(SPACE_MARK, " ").encode()


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that gives a third, the third with the highest score first, as SentencePiece merges.

    Raises ValueError for two such tokens with one score: SentencePiece would first merge the one on the left.
    """
    if (length := sum(map(len, scores))) > _MAX_SPLITS:
        raise ValueError(f"the tokens have {length} characters; the limit is {_MAX_SPLITS}")
    own = {text: text for text in scores}  # so that merges need no texts of their own
    merges, before = list[tuple[str, str]](), ""
    for text in sorted(scores, key=scores.__getitem__, reverse=True):
        splits = ((own.get(text[:at]), own.get(text[at:])) for at in range(1, len(text)))
        found = [(left, right) for left, right in splits if left is not None and right is not None]
        merges += found
        if len(merges) > MAX_MERGES:
            raise ValueError(f"{len(merges)} merges are more than the limit of {MAX_MERGES}")
        if found and before and scores[before] == scores[text]:
            raise ValueError(f"tokens {before!r:.80} and {text!r:.80} have one score, which is not supported")
        before = text if found else before
    return merges


def _check_merges(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
    if len(merges) > MAX_MERGES:
        raise ValueError(f"{len(merges)} merges are more than the limit of {MAX_MERGES}")
    for pair in merges:
        if len(pair) != 2 or pair[0] not in vocab or pair[1] not in vocab or pair[0] + pair[1] not in vocab:
            raise ValueError(f"merge {list(pair)!r:.200}: not two ordinary tokens of the vocabulary that give a third")
    if len(set(merges)) != len(merges):
        raise ValueError("a merge is in the list twice")
