"""Samples: a text, a question about it and the expected answers. Reads them from a file, answers and scores them.

Knows models and text; does not know where a text comes from.
"""

import re
import string
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama.streaming import Completion, TextCodec, encode_prompt
from llama.texts.session import Session
from llama.untrusted.files import open_regular
from llama.untrusted.json_object import parse_object
from llama.untrusted.words import printable, some_of

LONGEST = 16_000_000  # bytes of a line


@dataclass(frozen=True)
class Sample:
    """A question about a text.

    context: the text, before which a tokenizer adds BOS. question: what follows it, up to where the answer begins.
    answers: the expected texts. metric: a name of METRICS. max_gen_len: the most tokens of the answer.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    metric: str = "contains_all"
    max_gen_len: int = 64

    def ids(self, tokenizer: TextCodec) -> tuple[list[int], list[int]]:
        """Return the ids of the context and those of the question."""
        return encode_prompt(tokenizer, self.context), encode_prompt(tokenizer, self.question, bos=False)

    def total_len(self, tokenizer: TextCodec) -> int:
        """Return the number of tokens with the longest answer."""
        return sum(map(len, self.ids(tokenizer))) + self.max_gen_len

    def score(self, text: str) -> float:
        """Return the score of an answer, 0 to 1."""
        return METRICS[self.metric](text, self.answers)


def answer(model: Any, tokenizer: TextCodec, sample: Sample, *, question_seen: bool) -> Completion:
    """Return the model's greedy answer, through its own kind of cache.

    question_seen: the prompt is the context with the question, so a kind that compresses a prompt sees the question.
    Otherwise the prompt is the context, and the question is fed after it. The ids are the same. Raises ValueError if
    the sample is longer than the model's limit.
    """
    context, question = sample.ids(tokenizer)
    session: Session = model.session(tokenizer)
    if question_seen:
        session.feed([*context, *question])
    else:
        session.feed(context)
        session.append(question)
    return session.generate(sample.max_gen_len, temperature=0.0)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def contains_all(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that occur in the text, in any case. RULER scores 11 of 13 tasks so."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def contains_any(text: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer occurs in the text, in any case."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def exact(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the words of the text are those of an answer."""
    return float(any(words_of(text) == words_of(answer) for answer in answers))


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the highest F1 of the words that the text and an answer share.

    Source: SQuAD, Rajpurkar et al., https://arxiv.org/abs/1606.05250; LongBench scores answers to questions like this.
    """

    def shared(one: list[str], other: list[str]) -> int:
        return (Counter(one) & Counter(other)).total()

    return max(_f1(words_of(text), words_of(answer), shared) for answer in answers)


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """Return the highest F1 of the longest common subsequence of words.

    Source: Lin, ROUGE, 2004, https://aclanthology.org/W04-1013; with equal weights of precision and recall. Words are
    separated by whitespace.
    """
    return max(_f1(text.split(), answer.split(), _common_subsequence) for answer in answers)


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "contains_all": contains_all,
    "contains": contains_any,
    "exact": exact,
    "f1": f1,
    "rouge-l": rouge_l,
}


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and English articles. Source: SQuAD."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _f1(one: list[str], other: list[str], common: Callable[[list[str], list[str]], int]) -> float:
    """Return 2 x common / (words of both), which is the harmonic mean of precision and recall."""
    return 2 * common(one, other) / (len(one) + len(other)) if one and other else float(one == other)


def _common_subsequence(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)  # of what was read of `one` with each prefix of `other`
    for word in one:
        diagonal = 0
        for place, there in enumerate(other, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == there else max(above, lengths[place - 1])
            diagonal = above
    return lengths[-1]


# ---- files -----------------------------------------------------------------------------------------------------------


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file of JSON lines, as LongBench has them; blank lines are skipped.

    A line has `context`, `question`, `answers` (a list of texts), `metric` (a name of METRICS), and optionally
    `max_gen_len`. Raises ValueError with the number of the line, and OSError.
    """
    try:
        opened = open_regular(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    samples = []
    with opened as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            try:
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                if len(line) > LONGEST:
                    raise ValueError(f"it has more than {LONGEST:,} bytes, the limit of a line; shorten it")
                samples += [_sample(parse_object(line))] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {printable(str(error))}") from error
    if not samples:
        raise ValueError(f"{path} has no samples; give a file with a JSON object a line")
    return samples


def _sample(line: dict[str, Any]) -> Sample:
    """Return the sample of a line. Raises ValueError for a missing, unknown or wrong field."""
    known = {"context": str, "question": str, "answers": list, "metric": str, "max_gen_len": int}
    missing = known.keys() - line.keys() - {"max_gen_len"}
    if missing or (unknown := line.keys() - known.keys()):
        raise ValueError(f"{some_of(missing)} is missing" if missing else f"{some_of(unknown)} is not a known field")
    for name, value in line.items():
        if type(value) is not known[name]:
            raise ValueError(f"{name} is {value!s:.80}, and must be of type {known[name].__name__}")
    answers = line["answers"]
    if not (line["context"] and answers and all(isinstance(one, str) and one for one in answers)):
        raise ValueError("context must not be empty, and answers must be one or more texts that are not empty")
    if line["metric"] not in METRICS:
        raise ValueError(f"metric {line['metric']:.80} is not known; choose {', '.join(METRICS)}")
    if line.get("max_gen_len", 1) < 1:
        raise ValueError(f"max_gen_len={line['max_gen_len']} must be at least 1")
    return Sample(**{**line, "answers": tuple(answers)})
