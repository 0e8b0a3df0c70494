"""A line of a file of prompts -> the arguments of a Writer; what it has written -> the line of the answer.

Reads two forms: {"prompt": ...}, and the lines of OpenAI's batches. Does not know files or models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama.batch import NonFiniteLogits, SchemaFailed
from llama.serve.requests import (
    ANY,
    COUNT,
    FLAG,
    OF_TEXTS,
    Rule,
    check_fields,
    in_openai_s_words,
    one_of,
    plain_dialog,
    schema_in,
)
from llama.texts.scheduler import Text
from llama.untrusted.json_object import parse_object
from llama.untrusted.words import printable

OURS = "max_gen_len stop temperature top_p top_k min_p repetition_penalty seed logprobs schema"
SETTINGS = {name: name for name in OURS.split()} | dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_gen_len")
RULES = {
    **OF_TEXTS,
    **{"max_gen_len": COUNT, "max_completion_tokens": COUNT, "n": one_of(1), "stream": one_of(False)},
    "ids": FLAG,
    "schema": Rule(lambda value: isinstance(value, dict), "must be a JSON Schema, an object in braces"),
    **dict.fromkeys(("prompt", "messages", "logprobs"), ANY),  # the Writer and the chat format check them
    "store": ANY,
}
PROMPTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
LONGEST = 16_000_000  # bytes of a line; the longest context, of 128 Ki tokens, has far fewer


@dataclass
class Question:
    """A line.

    number: from 1. id: the line's own, or its number. url: of a batch line; else "". fields: of the line, or of a batch
    line's body.
    """

    number: int
    id: Any
    url: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def read(self, data: bytes) -> None:
        """Read the bytes of the line. Raises ValueError if they are no JSON, or no request for a text."""
        if len(data) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} bytes, the limit of a line; shorten it")
        line = parse_object(data)
        if "custom_id" not in line and "body" not in line:
            self.id, self.fields = line.pop("id", self.number), line
            return
        self.id, self.fields = line.pop("custom_id", self.number), line.pop("body", {})
        self.url = str(line.pop("url", "?"))
        if self.url not in PROMPTS or line.pop("method", "POST") != "POST" or not isinstance(self.fields, dict):
            raise ValueError(f"a batch line has the method POST, a body in braces, and the url {' or '.join(PROMPTS)}")
        check_fields(line, {})

    def arguments(self, settings: Mapping[str, Any], encode_dialog: Callable[[Any], list[int]]) -> dict[str, Any]:
        """Return the arguments of `Writer.add`. A line without a seed has that of its number, wherever it is answered.

        settings: for lines that do not have them. encode_dialog: makes ids of messages. Raises ValueError for unknown
        fields, and if there is no prompt.
        """
        given = check_fields(self.fields, RULES)
        name = PROMPTS[self.url] if self.url else "messages" if "messages" in given else "prompt"
        if name not in given:
            raise ValueError(f"it has no {name}")
        prompt = given.pop(name)
        if given.keys() & set(PROMPTS.values()):
            raise ValueError(f"it has prompt and messages; leave out all but {name}")
        own = {SETTINGS[name]: value for name, value in given.items() if name in SETTINGS}
        if "response_format" in given:
            if "schema" in own:
                raise ValueError("it has schema and response_format; leave out one of them")
            own["schema"] = schema_in(given["response_format"])
        if self.url and own.pop("logprobs", False) is not False:
            raise ValueError('logprobs are not supported in batch lines; {"prompt": ..., "logprobs": true} has them')
        own |= {"prompt": encode_dialog(plain_dialog(prompt)) if name == "messages" else prompt}
        return {**settings, "seed": settings["seed"] + self.number - 1, **own}

    def ended(self, text: Text) -> dict[str, Any]:
        """Return the times and the answer of a text that has ended. Raises an error that no line is to blame for."""
        if isinstance(text.error, NonFiniteLogits):
            why = NonFiniteLogits(text.error.step, self.number)  # not the number of the text, which may be any
            return {"times": None, "answer": self.refusal(why)}
        if isinstance(text.error, SchemaFailed):
            return {"times": None, "answer": self.refusal(text.error)}
        if text.error is not None:
            raise text.error
        times = {"first_token_seconds": text.began, "seconds": text.ended}  # no token: it ended at once
        seconds = {name: None if at is None else round(at - text.added, 6) for name, at in times.items()}
        counts = {"new_tokens": len(text.read.completion["ids"]), "cached_tokens": text.reused}
        return {"times": {**counts, **seconds}, "answer": self.answer(text)}

    def answer(self, text: Text) -> dict[str, Any]:
        """Return the answer, in the form of the line."""
        made, counts = text.read.completion, [text.prompt_len, len(text.read.completion["ids"])]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = dict(zip(names, [*counts, sum(counts)], strict=True))
        said, finish = made["generation"], made["finish_reason"]
        if not self.url:
            answer: dict[str, Any] = {"id": self.id, "text": said, "finish_reason": finish, "usage": usage}
            answer |= {"ids": made["ids"]} if self.fields.get("ids") else {}
            return answer | ({"logprobs": made["logprobs"]} if "logprobs" in made else {})
        kind, choice = "text_completion", dict[str, Any](text=said)
        if PROMPTS[self.url] == "messages":
            kind, choice = "chat.completion", {"message": {"role": "assistant", "content": said, "refusal": None}}
        choices = [{"index": 0, **choice, "finish_reason": finish, "logprobs": None}]
        body = {"id": f"line-{self.number}", "object": kind, "created": 0, "model": self.fields.get("model")}
        body |= {"choices": choices, "usage": usage}
        return self._of_batch({"status_code": 200, "request_id": f"line-{self.number}", "body": body}, None)

    def refusal(self, why: ValueError) -> dict[str, Any]:
        """Return the answer of a line that has failed, in the form of the line."""
        said = f"line {self.number}: {printable(in_openai_s_words(why) if self.url else str(why))}"
        return self._of_batch(None, {"code": "failed", "message": said}) if self.url else {"id": self.id, "error": said}

    def _of_batch(self, response: object, error: object) -> dict[str, Any]:
        return {"id": f"line-{self.number}", "custom_id": self.id, "response": response, "error": error}
