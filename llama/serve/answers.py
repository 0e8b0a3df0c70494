"""What texts have gained -> OpenAI's JSON: whole answers, and the chunks of a stream. Knows no HTTP and no model."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from llama.serve.engine import Job, Update
from llama.serve.requests import Asked


class Text:
    """One choice of an answer: its job, and all that it has gained."""

    def __init__(self, job: Job) -> None:
        self.job, self.content, self.latest = job, "", Update()
        self.tokens: list[tuple[int, float | None]] = []
        self.times: list[float] = []  # of the first token and the latest one
        self.has_chunk = False

    def take(self, update: Update) -> None:
        self.content += update.piece
        self.tokens += update.tokens
        self.latest = update
        if update.tokens:
            self.times[1:] = [update.at]

    @property
    def timings(self) -> dict[str, Any]:
        """The tokens fed for the text, those of its prompt that were not, those made; ms, and bytes of all caches."""
        first, last = (self.times[0], self.times[-1]) if self.times else (self.job.added,) * 2
        each = 1e3 * (last - first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None
        proposed, accepted = self.latest.guesses
        return {
            "kv_caching": self.job.kv_caching,
            "fed": self.latest.fed,
            "reused": self.latest.reused,
            "made": len(self.tokens),
            "first_token_ms": 1e3 * (first - self.job.added),
            "token_ms": each,
            "cache_bytes": self.latest.nbytes,
            **({"proposed": proposed, "accepted": accepted} if proposed else {}),
        }


class Answer:
    """The JSON values of an answer. Its choices are those of the first prompt, then those of the second, ..."""

    def __init__(self, asked: Asked, jobs: Sequence[Job], tokenizer: Any, **head: Any) -> None:
        """Begin an answer; `head` are values that it and all chunks have."""
        self.asked, self.texts, self._tokenizer = asked, [Text(job) for job in jobs], tokenizer
        self._kind = "chat.completion" if asked.chat else "text_completion"
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": name, "created": int(time.time()), **head}

    @property
    def ended(self) -> bool:
        return all(text.latest.finish for text in self.texts)

    @property
    def summary(self) -> str:
        """The counts of the answer, for a log."""
        usage = self._usage()
        ends = ",".join(text.latest.finish or "none" for text in self.texts)
        return f", {usage['prompt_tokens']} + {usage['completion_tokens']} tokens, finish {ends}"

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        choices = []
        for index, text in enumerate(self.texts):
            message = {"role": "assistant", "content": text.content, "refusal": None}
            said = {"message": message} if self.asked.chat else {"text": text.content}
            choices.append({**self._choice(index, text.tokens), **said, "timings": text.timings})
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, update: Update) -> dict[str, Any] | None:
        """Add an update to a choice, and return its chunk; None if it would say nothing."""
        text, asked = self.texts[index], self.asked
        text.take(update)
        if not (update.piece or update.finish or (update.tokens and (asked.timings or asked.options["logprobs"]))):
            return None
        role = {} if text.has_chunk else {"role": "assistant"}  # a first token may have no text yet
        text.has_chunk = True
        said = {"delta": {**role, "content": update.piece}} if asked.chat else {"text": update.piece}
        choice = {**self._choice(index, update.tokens), **said}
        if update.finish or asked.timings:
            choice["timings"] = text.timings
        last = self.ended and not asked.include_usage  # clients may add the usage of all chunks
        return self._chunk([choice], self._usage() if last else None)

    def closing(self) -> dict[str, Any]:
        """Return the chunk that `stream_options` may ask for."""
        return self._chunk([], self._usage())

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.chat else self._kind
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def _choice(self, index: int, tokens: Sequence[tuple[int, float | None]]) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self.asked.options["logprobs"]:
            pieces = [self._tokenizer.decode_bytes([id], begins=False) for id, _ in tokens]
            texts, scores = [piece.decode(errors="replace") for piece in pieces], [score for _, score in tokens]
            if self.asked.chat:
                each = [
                    {"token": text, "logprob": score, "bytes": list(piece), "top_logprobs": []}
                    for text, piece, score in zip(texts, pieces, scores, strict=True)
                ]
                logprobs = {"content": each, "refusal": None}
            else:
                logprobs = {"tokens": texts, "token_logprobs": scores, "top_logprobs": None, "text_offset": None}
        return {"index": index, "logprobs": logprobs, "finish_reason": self.texts[index].latest.finish}

    def _usage(self) -> dict[str, Any]:
        firsts = self.texts[:: self.asked.n]  # a prompt counts once, however many choices it has
        prompt, made = sum(len(text.job.prompt) for text in firsts), sum(len(text.tokens) for text in self.texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(text.latest.reused for text in firsts)},
        }
