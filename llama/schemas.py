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
from importlib.metadata import PackageNotFoundError, version
from threading import Lock, Semaphore
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST = 1 << 16  # characters of a schema
SECONDS, WALL_SECONDS = 2.0, 10.0  # of CPU, and at all, to compile a client's schema; Windows has no first limit
BYTES = 1 << 30  # of address space of the process that tries it, which begins with 0.03 GB
WAITING = 4  # schemas of clients that are being compiled or wait for it, each in a thread of the server's pool
LATELY = 16  # schemas that are kept compiled, or refused
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
# Compiles a schema, as far as its first mask, in a process that ends at the limits of CPU time and memory.
_CHILD = """
import json, signal, sys
from contextlib import suppress
sys.path[:] = sys.argv[3:]
from llguidance import LLMatcher, LLTokenizer
print("ready", flush=True)
if hasattr(signal, "setitimer"):
    import resource
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    with suppress(ValueError, OSError):  # a lower limit is set, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
text, fixed = json.load(sys.stdin)
try:
    grammar = LLMatcher.grammar_from_json_schema(text, overrides=fixed)
    LLMatcher(LLTokenizer("byte"), grammar, log_level=0).compute_logit_bias()
except ValueError:
    pass
"""


class TooManySchemas(RuntimeError):
    """Others are being compiled, and as many wait as may."""


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

    def fails(self) -> str:
        """Return why a text fails at its first token; "" if it does not."""
        (first := self.matcher()).mask()
        return first.error


def schema_of(given: Any, tokenizer: Any, vocab_size: int, *, limited: bool = False) -> Schema | None:
    """Return a JSON Schema, given as a mapping or the text of one, for a tokenizer and the ids of a model.

    limited: compile it in another process first, and refuse a schema that takes longer there than SECONDS, or more
        memory than BYTES: this process could not stop native code.

    Raises ValueError without llguidance, for a schema that it refuses, and for a tokenizer without bytes of tokens;
    with `limited` TooManySchemas, and RuntimeError if the other process cannot be started.
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
        self._lately: dict[tuple[str, bool], Schema | str] = {}  # or why it is refused; the latest last
        self._places, self._one_at_a_time = Semaphore(WAITING), Lock()

    def schema(self, text: str, limited: bool) -> Schema:
        """Return a compiled schema. Raises ValueError if it is refused, and TooManySchemas."""
        key = text, limited
        found = self._lately.get(key) or self._waited_for(key)
        if not isinstance(found, str) and found.fails():  # an earlier text may have used up what its copies share
            found = self._compiled(text)
            if not isinstance(found, str) and found.fails():
                found = f"schema={text:.60} is too complex for llguidance"
        self._lately.pop(key, None)
        self._lately[key] = found
        for oldest in list(self._lately)[:-LATELY]:
            self._lately.pop(oldest, None)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _waited_for(self, key: tuple[str, bool]) -> "Schema | str":
        """Return the schema, compiled, or why it is refused; with a limit, one at a time."""
        text, limited = key
        if not limited:
            return self._compiled(text)
        if not self._places.acquire(blocking=False):
            raise TooManySchemas(f"{WAITING} schemas are being compiled or wait for it, which is the limit; try again")
        try:
            with self._one_at_a_time:
                return self._lately.get(key) or _over_limit(text) or self._compiled(text)
        finally:
            self._places.release()

    def _compiled(self, text: str) -> "Schema | str":
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_json_schema(text, overrides=_FIXED), log_level=0)
            made = Schema(text, Matcher(matcher, self.size))
            if not (why := matcher.get_error() or made.fails()):  # no text satisfies the schema
                return made
        except ValueError as error:
            why = str(error)
        return f"schema={text:.60} is refused by llguidance: {why.splitlines()[0]}"


def _over_limit(text: str) -> str:
    """Return why a schema is not compiled here: its size or time in another process; "" if it is within the limits.

    Raises RuntimeError if the process cannot be started.
    """
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(SECONDS), str(BYTES), *sys.path]
    try:
        done = subprocess.run(
            command, input=json.dumps([text, _FIXED]).encode(), capture_output=True, timeout=WALL_SECONDS, check=False
        )
        ready, code = b"ready" in done.stdout, done.returncode
    except subprocess.TimeoutExpired:
        ready, code = True, 1
    except (OSError, TypeError) as error:
        raise RuntimeError(f"the process that compiles schemas could not be started: {error}") from error
    if not ready:
        raise RuntimeError(
            f"the process that compiles schemas ended with {code}: {done.stderr.decode(errors='replace')[-200:]}"
        )
    if not code:
        return ""
    limit = f"{SECONDS:g} s of CPU time or {BYTES >> 20} MiB" if hasattr(signal, "setitimer") else f"{WALL_SECONDS:g} s"
    return f"schema={text:.60} takes more than {limit} to compile; use fewer or simpler patterns, and smaller multiples"


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
