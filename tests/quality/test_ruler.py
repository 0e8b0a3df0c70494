"""RULER's tasks: each sample has the structure of the original, its answers, and the length that was asked for."""

import math
import re
from collections import Counter
from functools import cache, partial
from random import Random

import pytest
from fakes import Bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.bench.texts import read_corpus
from llama.quality import ruler
from llama.quality.ruler import RULER, TASKS, Needles, ruler_sample
from llama.quality.samples import Sample

NEEDLE = re.compile(r"One magic (\w+) of (\S+) is (\S+)\.(?:\s|$)")
# Keys, values and queries of each needle test, and the forms of a key and a value. Source: RULER's synthetic.yaml.
WORDS, NUMBER, UUID = r"[a-z]+-[a-z]+", r"[1-9]\d{6}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-\w{12}"
NIAH = {
    "needle": (1, 1, 1, "[A-Z][a-z]+", r"[1-9]\d{3}"),
    "needle_at_start": (1, 1, 1, "[A-Z][a-z]+", r"[1-9]\d{3}"),
    "niah_single_1": (1, 1, 1, WORDS, NUMBER),
    "niah_single_2": (1, 1, 1, WORDS, NUMBER),
    "niah_single_3": (1, 1, 1, WORDS, UUID),
    "niah_multikey_1": (4, 1, 1, WORDS, NUMBER),
    "niah_multikey_2": (None, 1, 1, WORDS, NUMBER),
    "niah_multikey_3": (None, 1, 1, UUID, UUID),
    "niah_multivalue": (1, 4, 1, WORDS, NUMBER),
    "niah_multiquery": (4, 1, 4, WORDS, NUMBER),
}
LENGTHS = {"needle": 1500, "needle_at_start": 1500, "cwe": 8500, "fwe": 3000}


@cache
def source() -> ruler.Source:
    return ruler.Source.of(read_corpus()[:30_000])


def made(name: str, *, length: int | None = None, number: int = 0) -> Sample:
    return ruler_sample(name, Bytes(), source(), length=length or LENGTHS.get(name, 2500), number=number)


def faults(name: str, sample: Sample, length: int) -> list[str]:
    """Return what a sample of a task lacks; its text is parsed, so that no code of the generator is used."""
    found = {
        "vt": _faults_of_variables,
        "cwe": partial(_faults_of_common, length=length),
        "fwe": partial(_faults_of_frequent, length=length),
    }.get(name, partial(_faults_of_needles, name))(sample)
    most = {"vt": 30, "cwe": 120, "fwe": 50, "needle": 8, "needle_at_start": 8}.get(name, 128)
    unit = {"cwe": 60, "fwe": 120}.get(name, 140)  # bytes that a larger size could add
    found |= {"the longest answer": sample.max_gen_len == most, "the metric": sample.metric == "contains_all"}
    found |= {"the length": length - unit < sample.total_len(Bytes()) <= length}
    return [what for what, right in found.items() if not right]


def _faults_of_needles(name: str, sample: Sample) -> dict[str, bool]:
    keys, values, queries, key, value = NIAH[name]
    needles = NEEDLE.findall(sample.context)
    of_key: dict[str, list[str]] = {}
    for _, one, each in needles:
        of_key.setdefault(one, []).append(each)
    asked = re.findall(f"(?:{key})", sample.question.partition(" of ")[2].partition(" in the text?")[0])
    rest = NEEDLE.sub("", sample.context.partition("\n")[2])
    noise = set(rest.split("\n")) - {""}
    return {
        "keys": len(of_key) == keys if keys else len(of_key) > 5,
        "values": {len(each) for each in of_key.values()} == {values},
        "queries": len(set(asked)) == queries,
        "answers": sorted(sample.answers) == sorted(each for one in asked for each in of_key.get(one, ["none"])),
        "forms": all(re.fullmatch(key, one) and re.fullmatch(value, each) for _, one, each in needles),
        "at the start": name != "needle_at_start" or sample.context.partition("\n")[2].startswith("One magic"),
        "hay": noise == {ruler.NOISE} if name == "niah_single_1" else keys is not None or not noise,
        "no digits in prose": not re.search(r"\d", rest),
        "question asked again as the answer begins": sample.question.count(" of ") >= 2,
    }


def _faults_of_variables(sample: Sample) -> dict[str, bool]:
    example, _, text = sample.context.rpartition("Follow the assignments")
    chain = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.$", text, flags=re.MULTILINE)
    known: dict[str, str] = {}
    for name, of in chain:
        known[name] = known.get(of, of)
    asked = re.findall(r"value (\d{5})\b", sample.question)
    return {
        "the chain": [of for _, of in chain[1:]] == [name for name, _ in chain[:-1]],
        "answers": list(sample.answers) == [name for name, value in known.items() if value == asked[0]],
        "hops": len(chain) == 5 == len(set(sample.answers)),
        "solved example": len(re.findall(r"^VAR [A-Z]{3} =", example, flags=re.MULTILINE)) == 5,
        "the noise": text.count(ruler.NOISE) > 5,
    }


def _faults_of_common(sample: Sample, *, length: int) -> dict[str, bool]:
    example, text = sample.context.split("The list below repeats")[1:]
    counts, solved = (Counter(re.findall(r"\d+\. (\S+)", part.partition("Question")[0])) for part in (text, example))
    often, seldom = (6, 1) if length < 4096 else (30, 3)
    few, more = (3, 1) if length < 4096 else (10, 3)
    shown = re.findall(r"\d+\. (\S+)", example.partition("Answer")[2])
    return {
        "answers": set(sample.answers) == {word for word, count in counts.items() if count == often},
        "ten": len(set(sample.answers)) == 10,
        "the others": set(counts.values()) <= {often, seldom} and len(counts) > 11,
        "solved example": set(solved.values()) == {few, more} and {solved[word] for word in shown} == {few},
    }


def _faults_of_frequent(sample: Sample, *, length: int) -> dict[str, bool]:
    counts = Counter(sample.context.partition("\n")[2].split())
    ranks = [count for _, count in counts.most_common()]
    scale = counts["..."] * math.pi**2 / 6
    return {
        "dots first": counts.most_common(1)[0][0] == "...",
        "answers": set(sample.answers) == {word for word, _ in counts.most_common(4)[1:]} and ranks[3] > ranks[4],
        "zeta": all(abs(count - scale / rank**2 / (math.pi**2 / 6)) < 1.5 for rank, count in enumerate(ranks, 1)),
        "words": all(re.fullmatch(r"[a-z]{6}", word) for word in counts if word != "..."),
        "vocabulary": len(counts) <= (length - 50) // 50,
    }


@settings(max_examples=8)
@given(st.data())
def test_every_sample_has_the_structure_of_its_task_and_the_length_asked_for(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TASKS)))
    length = data.draw(st.integers(*((8000, 12000) if name == "cwe" else (1800, 4000))))
    assert faults(name, made(name, length=length, number=data.draw(st.integers(0, 99))), length) == []


def test_a_sample_depends_on_its_task_length_seed_and_number_alone() -> None:
    options = [{"number": 0}, {"number": 1}, {"number": 0, "seed": 2}]
    first, *others = [ruler_sample("vt", Bytes(), source(), length=2000, **one) for one in options]
    assert first == made("vt", length=2000)
    assert len({first.context, *(one.context for one in others)}) == 3


def test_needles_stand_at_the_depths_of_the_original() -> None:
    """40 depths from the first to the last sentence, each as likely as the others."""
    depths = []
    for number in range(200):
        text = Needles("prose")(source(), 300, 0, Random(number)).context.partition("\n")[2]
        before, _, after = NEEDLE.sub("|", text).partition("|")
        depths.append(len(before) / len(before + after))
    assert min(depths) == 0
    assert max(depths) == 1
    assert sum(depths) / len(depths) == pytest.approx(0.5, abs=0.08)


def test_what_does_not_fit_and_unknown_tasks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^length=100 is too short for vt, which needs at least \d+ tokens$"):
        made("vt", length=100)
    with pytest.raises(ValueError, match=r"^task 'qa_1' is not known; choose ruler, or some of needle, "):
        made("qa_1")
    with pytest.raises(ValueError, match="too short for niah_multikey_3"):
        made("niah_multikey_3", length=300)


@pytest.mark.parametrize("name", ["niah_multikey_2", "vt", "cwe", "fwe"])
def test_answers_drawn_at_random_from_the_text_get_chance(name: str) -> None:
    """The expected share of k answers among k draws from n words is k / n; a guess of one needle finds 1 in n."""
    shares, expected = [], []
    for number in range(12):
        sample, dice = made(name, number=number), Random(number)
        text = sample.context
        found = {
            "niah_multikey_2": lambda text=text: {value for *_, value in NEEDLE.findall(text)},
            "vt": lambda text=text: set(re.findall(r"\b[A-Z]{5}\b", text)) | {f"NO{n:03}" for n in range(20)},
            "cwe": lambda text=text: set(re.findall(r"\d+\. (\S+)", text.rpartition("The list below")[2])),
            "fwe": lambda text=text: set(text.partition("\n")[2].split()) - {"..."},
        }[name]()
        guesses = dice.sample(sorted(found), len(sample.answers))
        shares.append(sample.score(" ".join(guesses)))
        expected.append(len(sample.answers) / len(found))
    mean = sum(expected) / 12
    assert sum(shares) / 12 == pytest.approx(mean, abs=3.5 * math.sqrt(mean / 12))
    assert mean < 0.4


def test_the_tasks_are_those_of_the_original_that_need_no_data_set() -> None:
    assert list(RULER) == [*list(NIAH)[2:], "vt", "cwe", "fwe"]
