"""Samples are read from untrusted files with the line of each error, scored by known metrics, and answered."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fakes import Bytes, write_checkpoint
from tiny import tiny_model

from llama import load
from llama.bench.texts import read_corpus
from llama.kv_cache import StaticCache
from llama.quality import ruler, samples
from llama.quality.samples import METRICS, Sample, answer, read_samples

ROOT = Path(__file__).resolve().parents[2]
# (metric, text, answers, score); the scores of f1 are those of SQuAD's script, those of rouge-l of rouge-score 0.1.2.
SCORES: list[tuple[str, str, list[str], float]] = [
    ("contains_all", "It is ABC and 12.", ["abc", "12", "7", "8"], 0.5),
    ("contains_all", "", ["a"], 0.0),
    ("contains", "It is ABC.", ["x", "bc"], 1.0),
    ("contains", "It is ABC.", ["x", "y"], 0.0),
    ("exact", " The cat, sat.\n", ["a dog", "cat sat"], 1.0),
    ("exact", "the cat sat down", ["cat sat"], 0.0),
    ("f1", "the cat sat on a mat", ["cat mat", "dog"], 2 * (2 / 4) * 1 / (2 / 4 + 1)),
    ("f1", "no no no", ["no"], 0.5),
    ("f1", "cat", ["dog"], 0.0),
    ("f1", "the", ["a"], 1.0),
    ("rouge-l", "the cat sat on the mat", ["the mat sat on a cat"], 2 * (3 / 6) * (3 / 6)),
    ("rouge-l", "a b c d", ["x", "b d"], 2 * 0.5 * 1 / 1.5),
    ("rouge-l", "", ["x"], 0.0),
]


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_give_known_scores(metric: str) -> None:
    known = [one for one in SCORES if one[0] == metric]
    assert known
    for _, text, answers, score in known:
        assert METRICS[metric](text, answers) == pytest.approx(score), text


LINE: dict[str, Any] = {"context": "a b", "question": " ?", "answers": ["b"], "metric": "f1"}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "samples.jsonl"
    content = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_text(content, encoding="utf-8")
    return path


def test_a_file_of_samples_is_read_and_the_one_in_docs_shows_its_form(tmp_path: Path) -> None:
    read = read_samples(written(tmp_path, f"\ufeff{json.dumps(LINE)}", "", {**LINE, "max_gen_len": 3}))
    assert read == [Sample("a b", " ?", ("b",), "f1", 64), Sample("a b", " ?", ("b",), "f1", 3)]
    assert {one.metric for one in read_samples(ROOT / "docs/examples/questions.jsonl")} >= {"contains", "f1", "rouge-l"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: it must be an object"),
        ({**LINE, "metric": "bleu"}, "line 2: metric bleu is not known; choose contains_all, contains, exact, f1, rou"),
        ({**LINE, "answers": []}, "line 2: context must not be empty, and answers must be one or more texts"),
        ({**LINE, "answers": ["a", 1]}, "line 2: context must not be empty, and answers must be"),
        ({**LINE, "answers": "a"}, "line 2: answers is a, and must be of type list"),
        ({**LINE, "max_gen_len": True}, "line 2: max_gen_len is True, and must be of type int"),
        ({**LINE, "max_gen_len": 0}, "line 2: max_gen_len=0 must be at least 1"),
        ({**LINE, "id\x1b[2J": 1}, r"line 2: id\\x1b\[2J is not a known field"),
        ({"context": "a"}, "line 2: answers, metric, question is missing"),
        ('{"metric": "f1", "metric": "f1"}', "line 2: repeats the key 'metric'"),
        ("x" * 2000, "line 2: "),
    ],
)
def test_an_error_of_an_untrusted_file_names_the_line(
    tmp_path: Path, line: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "LONGEST", 1000)
    with pytest.raises(ValueError, match=message) as error:
        read_samples(written(tmp_path, LINE, line))
    assert str(error.value).isprintable()


def test_an_empty_file_and_a_directory_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no samples"):
        read_samples(written(tmp_path))
    with pytest.raises(ValueError, match=f"{tmp_path.name}: it is a directory"):
        read_samples(tmp_path)


class SeenPrompts(StaticCache, kind="seen_prompts"):
    """Notes the positions of each call, and whether a prompt ends with it."""

    calls: ClassVar[list[tuple[int, int, bool]]] = []

    def update(self, rows: Any, xk: Any, xv: Any) -> Any:
        if self.layer == 0:
            self.calls.append((rows.start, rows.width, bool(rows.prompt_ends)))
        return super().update(rows, xk, xv)


def test_the_prompt_ends_before_an_unseen_question_and_after_a_seen_one() -> None:
    model, tokenizer = tiny_model(vocab_size=258, max_seq_len=64).requires_grad_(False), Bytes()
    model.kv_cache = "seen_prompts"
    sample, calls = Sample("hello there", " and?", ("x",), max_gen_len=3), SeenPrompts.calls
    context, question = map(len, sample.ids(tokenizer))
    texts = []
    for seen in (True, False):
        calls.clear()
        texts.append(answer(model, tokenizer, sample, question_seen=seen)["ids"])
        prompts = [(0, context + question, True)] if seen else [(0, context, True), (context, question, False)]
        assert calls[: len(prompts)] == prompts
        assert all(width == 1 and not ends for _, width, ends in calls[len(prompts) :])
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="max_seq_len=64"):
        answer(model, tokenizer, Sample("a" * 64, "?", ("x",)), question_seen=True)


@pytest.mark.slow  # 11 prompts of some 1,500 tokens
def test_the_full_cache_answers_samples_of_ruler_as_transformers_does(tmp_path: Path) -> None:
    """Text for text, greedy, in float32."""
    from transformers import LlamaForCausalLM

    folder = write_checkpoint(tmp_path / "model", max_seq_len=2048)
    model, tokenizer = load(folder, device="cpu", dtype="fp32")
    theirs, source = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), ruler.Source.of(read_corpus())
    for name in ruler.RULER:
        sample = replace(ruler.ruler_sample(name, tokenizer, source, length=2048), max_gen_len=20)
        ids = [id for part in sample.ids(tokenizer) for id in part]
        mask = torch.ones(1, len(ids))
        text = theirs.generate(torch.tensor([ids]), attention_mask=mask, do_sample=False, pad_token_id=0,
                               max_new_tokens=sample.max_gen_len)  # fmt: skip
        wanted = [id for id in text[0, len(ids) :].tolist() if id not in tokenizer.stop_tokens]
        for seen in (True, False):
            assert answer(model, tokenizer, sample, question_seen=seen)["ids"] == wanted, name


def test_a_text_is_encoded_as_a_prompt_and_its_question_as_what_follows() -> None:
    context, question = Sample("ab", "cd", ("e",)).ids(Bytes())
    assert (context, question) == ([256, 97, 98], [99, 100])
    assert Sample("ab", "cd", ("e",), max_gen_len=5).total_len(Bytes()) == 10
