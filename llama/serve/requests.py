"""Bodies of requests -> checked values: OpenAI's fields, and ours beside them. Does not know the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from llama.request import Options
from llama.sampling import Sampling, check_seed
from llama.untrusted.json_object import parse_object
from llama.untrusted.words import printable

MOST_BYTES = 1_000_000  # of a body
MOST_TEXTS = 16  # of one request
MOST_STOPS, LONGEST_STOP = 64, 256  # strings, and characters of each: all are searched at each token, while others wait
_MOST_OF = {"{": 1 << 12, "[": 1 << 12, ",": 1 << 19}  # in a body
_FINITE = ("temperature", "repetition_penalty")  # beyond 0.01 to 100 they can make float32 logits infinite
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # OpenAI's, by status


class Refused(Exception):
    """A request that is not served. `body` is OpenAI's JSON: a sentence, the `param` that is wrong, OpenAI's `code`."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.status, self.headers = status, headers
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": str(self), "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A checked request.

    prompts: texts or lists of ids; of a chat, one dialog. max_tokens: None if it was left out. timings: whether every
    chunk of a stream has them. options: the sampling, `logprobs`, and the seed if there is one.
    """

    chat: bool
    prompts: list[Any]
    max_tokens: int | None
    n: int
    stop: list[str]
    stream: bool
    include_usage: bool
    timings: bool
    kv_caching: bool
    options: Options

    @property
    def prompt_field(self) -> str:
        return "messages" if self.chat else "prompt"


class _Rule(NamedTuple):
    """What a field may be: a function that returns whether a value is right, or raises ValueError; and its words."""

    is_right: Callable[[Any], object]
    words: str = ""


def _are(kind: type, least: int = 1) -> Callable[[Any], bool]:
    """Return a function that tests for lists of at least `least` values of a type; texts must not be empty."""
    return lambda some: isinstance(some, list) and len(some) >= least and all(type(x) is kind and x != "" for x in some)


def _are_stops(value: Any) -> bool:
    return _are(str, 0)(value) and len(value) <= MOST_STOPS and max(map(len, value), default=0) <= LONGEST_STOP


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _are(int)(value)


def one_of(*values: Any) -> _Rule:
    """Return the rule of a field that is not built: values that ask for nothing."""

    def is_right(value: Any) -> bool:
        return value in values and isinstance(value, bool) == isinstance(values[0], bool)  # 0 == False in Python

    return _Rule(is_right, f"{' or '.join(map(repr, values))}: other values are not supported")


def _sampling(name: str) -> _Rule:
    def is_right(value: Any) -> bool:
        return bool(Sampling(**{name: value})) and (name not in _FINITE or value == 0 or 0.01 <= value <= 100)

    return _Rule(is_right, "from 0.01 to 100")


IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # no settings of a text
NEUTRAL: Mapping[str, _Rule] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), one_of(0)),
    **dict.fromkeys(("echo", "store"), one_of(False)),
    **{"logit_bias": one_of({}), "tools": one_of([]), "tool_choice": one_of("none", "auto")},
    **{"parallel_tool_calls": one_of(True, False), "best_of": one_of(1), "suffix": one_of("")},
    **{"response_format": one_of({"type": "text"}), "modalities": one_of(["text"])},
    "service_tier": one_of("auto", "default"),
}
_FLAG = _Rule(lambda value: isinstance(value, bool), "true or false")
_COUNT = _Rule(lambda value: type(value) is int and value > 0, "a whole number of at least 1")
_SAMPLING = {field.name: _sampling(field.name) for field in fields(Sampling)}
_SHARED: Mapping[str, _Rule] = {
    **_SAMPLING,
    **dict.fromkeys(("max_tokens", "n"), _COUNT),
    **dict.fromkeys(("stream", "kv_caching", "timings_per_token"), _FLAG),
    "seed": _Rule(lambda value: check_seed(value) is not None),
    "stop": _Rule(
        lambda value: _are_stops([value] if isinstance(value, str) else value),
        f"a text, or a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} characters",
    ),
    "stream_options": _Rule(
        lambda value: (
            isinstance(value, dict) and list(value) in ([], ["include_usage"]) and _are(bool, 0)([*value.values()])
        ),
        "an object with include_usage, true or false",
    ),
    **dict.fromkeys(("model", *IGNORED), _Rule(lambda value: True)),
    **NEUTRAL,
}
_OF_COMPLETIONS: Mapping[str, _Rule] = {
    "prompt": _Rule(
        lambda value: _is_prompt(value) or (isinstance(value, list) and value and all(map(_is_prompt, value))),
        "a text, a list of token ids, or a list of texts or of such lists",
    ),
    "logprobs": one_of(0),
}
_OF_CHATS: Mapping[str, _Rule] = {
    "messages": _Rule(_are(dict), "a list of at least one object with role and content"),
    "max_completion_tokens": _COUNT,
    "logprobs": _FLAG,
}


def read(data: bytes, *, chat: bool, names: Sequence[str]) -> Asked:
    """Return the checked request in a body of JSON, for a model that is served by these names. Raises Refused."""
    try:
        given = parse_object(data, most_of=_MOST_OF)
    except ValueError as error:
        raise Refused(f"the body is not one object of JSON: {error}") from None
    own, text = (_OF_CHATS, "messages") if chat else (_OF_COMPLETIONS, "prompt")
    for name, value in given.items():
        _check(name, value, {**_SHARED, **own})
    if given.get(text) is None:
        raise Refused(f"{text} is missing: it is {own[text].words}", param=text)
    body = {name: value for name, value in given.items() if value is not None}
    check_model(body.get("model", names[0]), names)
    prompts, n, stop = body[text], body.get("n", 1), body.get("stop", [])
    prompts = [plain_dialog(prompts)] if chat else [prompts] if _is_prompt(prompts) else prompts
    if len(prompts) * n > MOST_TEXTS:
        raise Refused(f"{len(prompts)} prompts x n={n} are more than {MOST_TEXTS} texts", param="n")
    sampling = {"temperature": 1.0, "top_p": 1.0} | {name: body[name] for name in (*_SAMPLING, "seed") if name in body}
    return Asked(
        chat=chat,
        prompts=prompts,
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        n=n,
        stop=[stop] if isinstance(stop, str) else stop,
        stream=body.get("stream", False),
        include_usage=body.get("stream_options", {}).get("include_usage", False),
        timings=body.get("timings_per_token", False),
        kv_caching=body.get("kv_caching", True),
        options={**sampling, "logprobs": body.get("logprobs", False) is not False},  # type: ignore[typeddict-item]
    )


def check_model(name: Any, names: Sequence[str]) -> None:
    """Raise Refused for another model than the one that is served."""
    if name not in names:
        message = f"the model {name!r:.80} is not served; there is {' or '.join(map(repr, names))}"
        raise Refused(message, 404, param="model", code="model_not_found")


def _check(name: str, value: Any, rules: Mapping[str, _Rule]) -> None:
    """Raise Refused for a field that is not known, and for a value that is not right; null is left out."""
    if name not in rules:
        raise Refused(f"unknown field {name:.80}; leave it out", param=printable(name, 80), code="unknown_parameter")
    try:
        fine = value is None or rules[name].is_right(value)
    except (ValueError, TypeError) as error:
        raise Refused(str(error), param=name) from None
    if not fine:
        raise Refused(f"{name}={value!r:.60} must be {rules[name].words}", param=name)


def plain_dialog(messages: Any) -> Any:
    """Return a dialog with a text for a content that is a list of parts of text, and `system` for the role `developer`.

    Fields that are null are left out: clients send an answer's message back as it came, with `"refusal": null`. A value
    that is no dialog stays as it is.
    """
    if not isinstance(messages, list):
        return messages
    return [_plain(one) if isinstance(one, dict) else one for one in messages]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and type(part.get("text")) is str


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
    if message.get("role") == "developer":  # OpenAI's newer name
        message["role"] = "system"
    parts = message.get("content")
    if isinstance(parts, list) and parts and all(map(_is_text, parts)):
        message["content"] = "".join(part["text"] for part in parts)
    return message
