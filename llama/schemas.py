"""JSON Schemas -> masks of the tokens that may come next, by llguidance (https://github.com/guidance-ai/llguidance).

Knows the bytes of tokens; does not know models, logits or sampling. llguidance is the extra `json`.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST = 1 << 16  # characters of a schema
SECONDS, WALL_SECONDS = 2.0, 10.0  # of CPU, and at all, to compile a client's schema; Windows has no first limit
ANY_OBJECT = {"type": "object"}  # OpenAI's json_object
# What a schema cannot change by its own `x-guidance`: texts are JSON, keywords are never ignored, and a text cannot
# consist of spaces without end.
_FIXED: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{1,32}",
    "coerce_one_of": False,
    "lenient": False,
}
# A process that ends at the limit, or once a schema was compiled or refused.
_CHILD = """
import json, signal, sys
if hasattr(signal, "setitimer"):
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
sys.path[:] = sys.argv[2:]
from llguidance import LLMatcher
text, fixed = json.load(sys.stdin)
try:
    LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text, overrides=fixed))
except ValueError:
    pass
"""


def llguidance_version() -> str | None:
    """Return the version of llguidance, which decides texts with a schema; None without it."""
    with suppress(PackageNotFoundError):
        return version("llguidance")
    return None


class Matcher:
    """The part of one text that was generated, against its schema.

    ended: whether the text is complete and no token can follow it. error: why no mask can be computed; "" if one can.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.ended, self.error = False, ""

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> Tensor:
        """Return which tokens may come next, (vocab,) bool on the CPU: stop tokens only where the text may end."""
        bias = bytearray(self._matcher.compute_logit_bias())  # a byte for each token, 0 for those that may not
        self.error = self._matcher.get_error()
        return torch.frombuffer(bias, dtype=torch.uint8)[: self._vocab_size].bool() & (not self.error)

    def accept(self, id: int) -> None:
        """Add a token to the text."""
        self._matcher.consume_token(id)
        self.error = self._matcher.get_error()
        self.ended = self._matcher.is_stopped() and not self.error


@dataclass(frozen=True)
class Schema:
    """A JSON Schema for the texts of one tokenizer and model."""

    text: str
    _begin: Matcher = field(repr=False, compare=False)

    def matcher(self) -> Matcher:
        """Return the matcher of a text of which nothing was generated."""
        return self._begin.copy()


def schema_of(given: Any, tokenizer: Any, vocab_size: int, *, limited: bool = False) -> Schema | None:
    """Return a JSON Schema, given as a mapping or the text of one, for a tokenizer and the ids of a model.

    limited: also refuse a schema that takes long to compile, which a process finds out: it may take any time,
    in native code that this process could not stop.

    Raises ValueError without llguidance, for a schema that it refuses, and for a tokenizer without bytes of tokens.
    """
    if given is None or isinstance(given, Schema):
        return given
    try:
        text = given if isinstance(given, str) else json.dumps(dict(given) if isinstance(given, Mapping) else given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"schema={given!r:.60} must be a JSON Schema: {error}") from None
    if not text.lstrip().startswith("{"):
        raise ValueError(f"schema={text:.60} must be a JSON Schema: an object in braces")
    if len(text) > LONGEST:
        raise ValueError(f"a schema of {len(text):,} characters is too long: at most {LONGEST:,}")
    known = _VOCABULARIES.get(tokenizer)
    if known is None or known.size != vocab_size:
        known = _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer, vocab_size)
    return known.schema(text, limited)


class _Vocabulary:
    """The bytes of a tokenizer's tokens, and the schemas that were compiled for them lately."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(f"schema needs {error.name}: pip install 'llama-kv[json]'") from None
        if not hasattr(tokenizer, "decode_bytes"):
            raise ValueError("schema needs a tokenizer with decode_bytes, which returns the bytes of a token")
        ends = list(tokenizer.stop_tokens) or [size]  # an id that the model does not have
        wrapped: Any = _Tokens(tokenizer, size, ends)
        self.size = size
        self._tokens: LLTokenizer = LLTokenizer(wrapped, n_vocab=max(size, *ends) + 1, eos_token=ends)
        self._lately = lru_cache(maxsize=16)(self._compiled)

    def schema(self, text: str, limited: bool) -> Schema:
        """Return a compiled schema, a new one if a text has failed: its further texts would fail at once."""
        (first := self._lately(text, limited).matcher()).mask()
        if first.error:
            self._lately.cache_clear()
        return self._lately(text, limited)

    def _compiled(self, text: str, limited: bool) -> Schema:
        from llguidance import LLMatcher

        if limited:
            _check_time(text)
        try:
            matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_json_schema(text, overrides=_FIXED), log_level=0)
            if not (why := matcher.get_error()):
                (first := Matcher(matcher, self.size).copy()).mask()
                why = first.error  # no text satisfies the schema
        except ValueError as error:
            why = str(error)
        if why:
            raise ValueError(f"schema={text:.60} is refused by llguidance: {why.splitlines()[0]}")
        return Schema(text, Matcher(matcher, self.size))


def _check_time(text: str) -> None:
    """Raise ValueError for a schema that takes longer than the limit to compile."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(SECONDS), *sys.path]
    given = json.dumps([text, _FIXED]).encode()
    try:
        code = subprocess.run(command, input=given, capture_output=True, timeout=WALL_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    if code:
        limit = f"{SECONDS:g} s of CPU time" if hasattr(signal, "setitimer") else f"{WALL_SECONDS:g} s"
        raise ValueError(f"schema={text:.60} takes more than {limit} to compile; use fewer patterns, or none in allOf")


class _Tokens:
    """What llguidance reads of a tokenizer. Special tokens are no part of a text."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        special: Mapping[str, int] = getattr(tokenizer, "special_tokens", {})
        self._tokenizer = ref(tokenizer)  # the table of vocabularies keeps no tokenizer alive
        self.special_token_ids, self.eos_token_id = sorted({*special.values(), *ends}), ends[0]
        self.tokens = [_bytes_of(tokenizer, id) for id in range(size)] + [b""] * (max(ends) + 1 - size)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of a part of a text that a schema leaves no choice of."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else list(tokenizer.encode(text, bos=False, eos=False, begins=False))


def _bytes_of(tokenizer: Any, id: int) -> bytes:
    """Return the bytes of a token; b"" for an id of the model that the tokenizer does not have."""
    try:
        return bytes(tokenizer.decode_bytes([id], begins=False))
    except ValueError:
        return b""


_VOCABULARIES: "WeakKeyDictionary[Any, _Vocabulary]" = WeakKeyDictionary()
