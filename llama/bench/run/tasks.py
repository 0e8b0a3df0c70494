"""The tasks that kinds of cache are judged by: which are measured, their samples, and the scores of a kind.

A task has a name of `llama.quality.ruler.TASKS`, or is a file of samples.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from llama.bench.cell import Cell
from llama.bench.run.engines import Source
from llama.bench.run.memory_ledger import check_memory
from llama.bench.run.models import find_model
from llama.bench.run.step_times import filled_cache, inputs_digest, size_of
from llama.bench.schema import Row
from llama.bench.texts import read_corpus
from llama.model import Transformer
from llama.quality import ruler
from llama.quality.samples import Sample, answer, read_samples
from llama.streaming import encode_prompt

SAMPLES = 10  # of a task at one length, unless asked otherwise
IN_FILE = ".jsonl"
UNSEEN = ("scores", "score", "answer_lens")  # columns, with the question after the prompt and in it
SEEN = ("scores_question_seen", "score_question_seen", "answer_lens_question_seen")


def plan_tasks(
    source: Source, asked: Sequence[str], contexts: Sequence[int], samples: int | None, seed: int
) -> list[dict[str, Any]]:
    """Return what `--task` asks for: a name, a length (None for a file), a number of samples, and their tokens.

    asked: ruler, ruler:NAME,NAME or FILE.jsonl. tokens, steps: of all samples, those of the texts and the most of the
    answers. Raises ValueError for an unknown task and for a sample that does not fit into a length or the model.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--samples={samples} must be at least 1")
    found = []
    for name, context in [one for words in asked for one in _named(words, contexts)]:
        entry: dict[str, Any] = {"task": name, "context": context, "samples": samples or SAMPLES, "seed": seed}
        if context is None:
            entry["samples"] = min(samples or 2**63, len(read_samples(Path(name))))
        else:
            text = ruler.Source.of(read_corpus())
            for number in range(entry["samples"]):
                ruler.check_length(name, source.tokenizer, text, length=context, seed=seed, number=number)
        # Of a made task, one sample shows how long all are.
        seen = samples_of(source, {**entry, "samples": 1} if context is not None else entry)
        lengths = [sample.total_len(source.tokenizer) for sample in seen]
        if max(lengths) > source.args.max_seq_len:
            raise ValueError(
                f"--task {name}: a sample has {max(lengths)} tokens with its longest answer, and the model's "
                f"max_seq_len is {source.args.max_seq_len}; shorten it, or measure another model"
            )
        times = entry["samples"] // len(seen)
        entry["steps"] = times * sum(sample.max_gen_len for sample in seen)
        entry["tokens"] = times * sum(lengths) - entry["steps"]
        if entry in found:
            raise ValueError(f"--task {name} is named twice; name every task once")
        found.append(entry)
    return found


def _named(words: str, contexts: Sequence[int]) -> Iterator[tuple[str, int | None]]:
    """Yield the name and the length of each task that a text asks for."""
    if words.endswith(IN_FILE):
        yield words, None
        return
    family, _, names = words.partition(":")
    if family != "ruler":
        raise ValueError(f"--task {words} is not known; give ruler, ruler:NAME,NAME or a file FILE{IN_FILE}")
    yield from ((name, context) for context in contexts for name in (names.split(",") if names else ruler.RULER))


def samples_of(source: Source, plan: dict[str, Any]) -> list[Sample]:
    """Return the samples of an entry of `plan_tasks`."""
    if plan["context"] is None:
        return read_samples(Path(plan["task"]))[: plan["samples"]]
    text = ruler.Source.of(read_corpus())
    numbers, options = range(plan["samples"]), {"length": plan["context"], "seed": plan["seed"]}
    return [ruler.ruler_sample(plan["task"], source.tokenizer, text, number=number, **options) for number in numbers]


def cache_task(cell: Cell, *, plan: dict[str, Any]) -> dict[str, Any]:
    """Answer the samples of one task through a kind of cache, with the question seen and not."""
    source = find_model(cell)
    samples = samples_of(source, plan)
    longest = max(sample.total_len(source.tokenizer) for sample in samples)
    check_memory(cell.but(input_len=longest - 1, output_len=1), source.args, source.device, stored=source.stored)
    return {"rows": [task_row(source.build(), source, plan, samples)]}


def task_row(model: Transformer, source: Source, plan: dict[str, Any], samples: Sequence[Sample]) -> Row:
    """Return the row of a task: for each sample the score and the length of the answer, both ways.

    Its bytes, and whether the kind has dropped or compressed something, are those of a prompt as long as the shortest
    context.
    """
    row: Row = {"figures": "task", "task": plan["task"], "context": plan["context"]}
    for (scores, score, lens), seen in ((UNSEEN, False), (SEEN, True)):
        answers = [answer(model, source.tokenizer, sample, question_seen=seen) for sample in samples]
        row[scores] = [sample.score(one["generation"]) for sample, one in zip(samples, answers, strict=True)]
        row[score], row[lens] = fmean(row[scores]), [len(one["ids"]) for one in answers]
    fed = [sample.ids(source.tokenizer) for sample in samples]
    row["digest"], prompt = inputs_digest(model, [fed, samples]), min(len(context) for context, _ in fed)
    cache = filled_cache(model, prompt, encode_prompt(source.tokenizer, read_corpus()), reserved=prompt)
    return {**row, **size_of(model, cache, prompt, prompt)}
