"""What texts have gained -> OpenAI's JSON: whole answers, and the chunks of a stream. Knows no HTTP and no model."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from llama.serve.engine import NOTHING, Job, Update, tokens_of
from llama.serve.requests import Asked


class Answer:
    """The JSON values of an answer. Its choices are those of the first prompt, then those of the second, ..."""

    def __init__(self, asked: Asked, jobs: Sequence[Job], tokenizer: Any, **head: Any) -> None:
        """Begin an answer; `head` are values that it and all chunks have."""
        self.asked, self.latest, self._jobs, self._tokenizer = asked, [NOTHING for _ in jobs], jobs, tokenizer
        self._begun: set[int] = set()  # choices that have a chunk
        self._kind = "chat.completion" if asked.chat else "text_completion"
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": name, "created": int(time.time()), **head}

    @property
    def ended(self) -> bool:
        return all(update.finish for update in self.latest)

    @property
    def summary(self) -> str:
        """The counts of the answer, for a log."""
        usage = self._usage()
        ends = ",".join(update.finish or "none" for update in self.latest)
        return f", {usage['prompt_tokens']} + {usage['completion_tokens']} tokens, finish {ends}"

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        choices = []
        for index, update in enumerate(self.latest):
            assert update.whole is not None
            text, tokens = update.whole["generation"], tokens_of(update.whole)
            message = {"role": "assistant", "content": text, "refusal": None}
            said = {"message": message} if self.asked.chat else {"text": text}
            choices.append({**self._choice(index, tokens), **said, "timings": self._timings(index)})
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, update: Update) -> dict[str, Any] | None:
        """Add an update to a choice, and return its chunk; None if it would say nothing."""
        asked, self.latest[index] = self.asked, update
        if not (update.piece or update.finish or (update.tokens and (asked.timings or asked.options["logprobs"]))):
            return None
        role = {} if index in self._begun else {"role": "assistant"}  # a first token may have no text yet
        self._begun.add(index)
        said = {"delta": {**role, "content": update.piece}} if asked.chat else {"text": update.piece}
        choice = {**self._choice(index, update.tokens), **said}
        if update.finish or asked.timings:
            choice["timings"] = self._timings(index)
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
        return {"index": index, "logprobs": logprobs, "finish_reason": self.latest[index].finish}

    def _timings(self, index: int) -> dict[str, Any]:
        """Return the tokens fed for a text, those of its prompt that were not, those made; ms, and bytes of caches."""
        job, update = self._jobs[index], self.latest[index]
        proposed, accepted = update.guesses
        first = job.added if update.first is None else update.first
        return {
            "kv_caching": job.kv_caching,
            "fed": update.fed,
            "reused": update.reused,
            "made": update.made,
            "first_token_ms": 1e3 * (first - job.added),
            "token_ms": 1e3 * (update.newest - first) / (update.made - 1) if update.made > 1 else None,
            "cache_bytes": update.nbytes,
            **({"proposed": proposed, "accepted": accepted} if proposed else {}),
        }

    def _usage(self) -> dict[str, Any]:
        n = self.asked.n  # a prompt counts once, however many choices it has
        prompt, made = sum(len(job.prompt) for job in self._jobs[::n]), sum(update.made for update in self.latest)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(update.reused for update in self.latest[::n])},
        }
