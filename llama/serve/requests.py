"""Bodies of requests -> checked values: OpenAI's fields, and ours beside them. Does not know the model."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from llama.request import Options
from llama.sampling import Sampling, check_seed
from llama.schemas import ANY_OBJECT
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
    chunk of a stream has them. options: the sampling, `logprobs`, the schema, and the seed if there
    is one.
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


class WrongField(ValueError):
    """A field that is not known, or has a wrong value; `code` is OpenAI's."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = printable(param, 80), code


class Rule(NamedTuple):
    """What a field may be: a function that returns whether a value is right, or raises ValueError; and its words."""

    is_right: Callable[[Any], object]
    words: str = ""


def _are(kind: type, least: int = 1) -> Callable[[Any], bool]:
    """Return a function that tests for lists of at least `least` values of a type; texts must not be empty."""
    return lambda some: isinstance(some, list) and len(some) >= least and all(type(x) is kind and x != "" for x in some)


def _are_stops(value: Any) -> bool:
    return _are(str, 0)(value) and len(value) <= MOST_STOPS and max(map(len, value), default=0) <= LONGEST_STOP


def _are_flags(values: Iterable[Any]) -> bool:
    return all(isinstance(value, bool | None) for value in values)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _are(int)(value)


def one_of(*values: Any) -> Rule:
    """Return the rule of a field that is not built: values that ask for nothing."""

    def is_right(value: Any) -> bool:
        return value in values and isinstance(value, bool) == isinstance(values[0], bool)  # 0 == False in Python

    sent = " or ".join(json.dumps(value) for value in values if value not in ([], {}, ""))
    return Rule(is_right, "is not supported; leave it out" + (f", or send {sent}" if sent else ""))


def _sampling(name: str, *, limited: bool) -> Rule:
    def is_right(value: Any) -> bool:
        return bool(Sampling(**{name: value})) and (not limited or value == 0 or 0.01 <= value <= 100)

    return Rule(is_right, "must be from 0.01 to 100")


def schema_in(response_format: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of OpenAI's `response_format`; None for plain text. Raises ValueError."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind in ("text", "json_object"):
        return None if kind == "text" else ANY_OBJECT
    inside = response_format.get("json_schema") if kind == "json_schema" else None
    schema = inside.get("schema") if isinstance(inside, dict) else None
    if not isinstance(schema, dict):
        raise ValueError(
            "response_format must be an object with the type text, json_object, or json_schema; the last one has "
            '"json_schema": {"name": ..., "schema": a JSON Schema}'
        )
    return schema


IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # no settings of a text
NEUTRAL: Mapping[str, Rule] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), one_of(0)),
    **dict.fromkeys(("echo", "store"), one_of(False)),
    **{"logit_bias": one_of({}), "tools": one_of([]), "tool_choice": one_of("none", "auto")},
    **{"parallel_tool_calls": one_of(True, False), "best_of": one_of(1), "suffix": one_of("")},
    **{"response_format": Rule(lambda value: schema_in(value) or True), "modalities": one_of(["text"])},
    "service_tier": one_of("auto", "default"),
}
FLAG = Rule(lambda value: isinstance(value, bool), "must be true or false")
COUNT = Rule(lambda value: type(value) is int and value > 0, "must be a whole number of at least 1")
ANY = Rule(lambda value: True)
_NAMES = [field.name for field in fields(Sampling)]
# Of a request to the server and of a line of a file of prompts; the second may have other rules for the same fields.
OF_TEXTS: Mapping[str, Rule] = {
    **{name: _sampling(name, limited=False) for name in _NAMES},
    "max_tokens": COUNT,
    "seed": Rule(lambda value: check_seed(value) is not None),
    "stop": Rule(
        lambda value: isinstance(value, str | list) and _are(str, 0)(_listed(value)),
        "must be a text, or a list of texts, none of them empty",
    ),
    **dict.fromkeys(("model", *IGNORED), ANY),
    **NEUTRAL,
}
_OF_REQUESTS: Mapping[str, Rule] = {
    **OF_TEXTS,
    **{name: _sampling(name, limited=True) for name in _FINITE},
    "n": COUNT,
    **dict.fromkeys(("stream", "kv_caching", "timings_per_token"), FLAG),
    "stop": Rule(
        lambda value: isinstance(value, str | list) and _are_stops(_listed(value)),
        f"must be a text, or a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} characters",
    ),
    "stream_options": Rule(
        lambda value: isinstance(value, dict) and set(value) <= {"include_usage"} and _are_flags(value.values()),
        "must be an object with include_usage, true or false",
    ),
}
_OF_COMPLETIONS: Mapping[str, Rule] = {
    "prompt": Rule(
        lambda value: _is_prompt(value) or (isinstance(value, list) and value and all(map(_is_prompt, value))),
        "must be a text, a list of token ids, or a list of texts or of such lists",
    ),
    "logprobs": one_of(0),
}
_OF_CHATS: Mapping[str, Rule] = {
    "messages": Rule(_are(dict), "must be a list of at least one object with role and content"),
    "max_completion_tokens": COUNT,
    "logprobs": FLAG,
}


def read(data: bytes, *, chat: bool, names: Sequence[str]) -> Asked:
    """Return the checked request in a body of JSON, for a model that is served by these names. Raises Refused."""
    try:
        given = parse_object(data, most_of=_MOST_OF)
    except ValueError as error:
        raise Refused(f"the body is not one object of JSON: {error}") from None
    own, text = (_OF_CHATS, "messages") if chat else (_OF_COMPLETIONS, "prompt")
    try:
        body = check_fields(given, {**_OF_REQUESTS, **own})
        check_model(body.get("model", names[0]), names)
        if text not in body:
            raise WrongField(f"{text} is missing: it {own[text].words}", text)
        prompts, n, stop = body[text], body.get("n", 1), _listed(body.get("stop", []))
        prompts = [plain_dialog(prompts)] if chat else [prompts] if _is_prompt(prompts) else prompts
        if len(prompts) * n > MOST_TEXTS:
            raise WrongField(f"{len(prompts)} prompts x n={n} are more than {MOST_TEXTS} texts", "n")
        check_fields({"seed": body.get("seed", 0) + len(prompts) * n - 1}, OF_TEXTS)  # of the last choice
    except WrongField as error:
        raise Refused(str(error), param=error.param, code=error.code) from None
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0} | {
        name: body[name] for name in (*_NAMES, "seed") if name in body
    }
    sampling["schema"] = schema_in(body.get("response_format", {"type": "text"}))
    return Asked(
        chat=chat,
        prompts=prompts,
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        n=n,
        stop=stop,
        stream=body.get("stream", False),
        include_usage=bool(body.get("stream_options", {}).get("include_usage")),
        timings=body.get("timings_per_token", False),
        kv_caching=body.get("kv_caching", True),
        options={**sampling, "logprobs": body.get("logprobs", False) is not False},  # type: ignore[typeddict-item]
    )


def check_model(name: Any, names: Sequence[str]) -> None:
    """Raise Refused for another model than the one that is served."""
    if name not in names:
        message = f"the model {name!r:.80} is not served; there is {' or '.join(map(repr, names))}"
        raise Refused(message, 404, param="model", code="model_not_found")


def check_fields(given: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Return the fields that are not null. Raises WrongField."""
    body = {name: value for name, value in given.items() if value is not None}
    for name, value in body.items():
        if name not in rules:
            close = difflib.get_close_matches(name[:80], rules, 1)
            remedy = f"did you mean {close[0]}?" if close else "leave it out"
            raise WrongField(f"unknown field {name:.80}; {remedy}", name, "unknown_parameter")
        try:
            fine = rules[name].is_right(value)
        except (ValueError, TypeError) as error:
            raise WrongField(str(error), name) from None
        if not fine:
            raise WrongField(f"{name}={_shown(value)} {rules[name].words}", name)
    return body


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]


def in_openai_s_words(error: Exception) -> str:
    """Return the message of an error of a Writer with OpenAI's name of a field."""
    return str(error).replace("max_gen_len", "max_tokens")


def plain_dialog(messages: Any) -> Any:
    """Return OpenAI's messages as a dialog of this library. Raises WrongField for a content that is no text.

    A list of parts of text becomes a text, the role `developer` becomes `system`, and an assistant's content may be
    null, missing or an empty list. `name` and fields that are null are left out: clients send an answer's message back
    as it came, with `"refusal": null`. A value that is no list of objects stays as it is.
    """
    if not isinstance(messages, list):
        return messages
    return [_plain(one) if isinstance(one, dict) else one for one in messages]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    if not isinstance(message.pop("name", ""), str):
        raise WrongField("name of a message must be a text", "messages")
    if message.get("role") == "developer":  # OpenAI's newer name
        message["role"] = "system"
    if message.get("role") == "assistant" and message.get("content", []) == []:
        message["content"] = ""
    content = message.get("content", "")
    if isinstance(content, list) and content:
        message["content"] = content = "".join(map(_text_of, content))
    if not isinstance(content, str):
        raise WrongField(
            f"content={_shown(content)} of a message must be a text, or a list of parts of text", "messages"
        )
    return message


def _text_of(part: Any) -> str:
    """Return the text of a part of a content. Raises WrongField for any other part."""
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind != "text" or not isinstance(text, str):
        said = f"a part of the type {kind!r:.40}" if kind != "text" else "a part without a text"
        raise WrongField(f"the content of a message has {said}; only parts of text are supported", "messages")
    return text
