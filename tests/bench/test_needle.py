"""A needle stands where it should in a text of exactly the length asked for, and is found where a cache holds it."""

import hashlib
import re
from copy import copy

import pytest
import torch
from fakes import Bytes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama import Tokenizer, Transformer, load
from llama.bench.run.needle import DEPTHS, Haystack, finds
from llama.bench.texts import CORPUS, read_corpus
from llama.kv_cache import StaticCache
from llama.rows import Rows

PROSE = read_corpus()[:20_000].rpartition("\n\n")[0]
HAY = Haystack(Bytes(), PROSE)
NEEDLE = re.compile(r" The magic number of (\w+) is (\d{4})\.")


class NewestAlone(StaticCache, kind="newest_alone"):
    """Forgets what the newest 64 positions do not hold: its values are zeros."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        kept = values.clone()
        kept[:, : max(0, values.shape[1] - 64)] = 0
        return keys, kept


@pytest.fixture(scope="module")
def fast_demo() -> tuple[Transformer, Tokenizer]:
    return load("demo", device="cpu", dtype="fp32", fast=True, quantize="none")


@given(st.integers(250, 3000), st.sampled_from(DEPTHS), st.integers(0, 99))
def test_a_text_has_the_length_asked_for_and_one_needle_at_its_depth(length: int, depth: float, seed: int) -> None:
    hidden = HAY.hide(length=length, depth=depth, seed=seed)
    assert len(hidden.haystack) + len(hidden.question) == length
    text = Bytes().decode(hidden.haystack).removeprefix("<bos>")
    (found,) = NEEDLE.finditer(text)
    city, secret = found.groups()
    asked = f"\n\nQuestion: What is the magic number of {city}?\nAnswer: The magic number of {city} is"
    assert Bytes().decode(hidden.question) == asked
    assert Bytes().decode(hidden.secret) == f" {secret}"
    before, after = text[: found.start()], text[found.end() :]
    assert not re.search(r"\d", before + after)
    assert before == "" or before.rstrip('"')[-1] in ".!?", "it stands between two sentences"
    sentences = [len(re.findall(r"[.!?]+(?=\s|$)", part)) for part in (before, after)]
    assert depth not in (0, 1) or sentences[depth == 0] >= sum(sentences) - 1
    assert depth != 0 or before == ""
    assert depth != 1 or after == ""


def test_the_same_seed_hides_the_same_and_others_other_secrets() -> None:
    hidden = [HAY.hide(length=400, depth=0.5, seed=seed) for seed in (0, 0, *range(1, 8))]
    assert hidden[0] == hidden[1]
    assert len({tuple(each.secret) for each in hidden}) == len(hidden) - 1
    assert len({tuple(each.haystack[:40]) for each in hidden}) == len(hidden) - 1


def test_needles_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="tokens are left for the text around a needle"):
        HAY.hide(length=100, depth=0, seed=0)
    with pytest.raises(ValueError, match="from 1 to the"):
        HAY.hide(length=30_000, depth=0, seed=0)


@pytest.mark.slow
def test_the_demo_finds_a_needle_in_a_full_cache_and_not_in_one_that_forgets(
    fast_demo: tuple[Transformer, Tokenizer],
) -> None:
    """And it writes what it was found to write."""
    model, tokenizer = fast_demo
    haystack = Haystack(tokenizer, read_corpus())
    forgetful = copy(model)  # of the same weights
    forgetful.kv_cache = "newest_alone"
    hidden = haystack.hide(length=256, depth=0.25, seed=1)
    assert finds(model, hidden)
    ids, _ = model.generate_tokens([hidden.haystack + hidden.question], len(hidden.secret), temperature=0)
    assert ids == [hidden.secret]
    assert not finds(forgetful, hidden)


def test_ids_of_sentences_are_those_of_the_whole_text(demo: Tokenizer) -> None:
    hidden = Haystack(demo, read_corpus()).hide(length=512, depth=0.5, seed=0)
    whole = demo.decode([*hidden.haystack, *hidden.question, *hidden.secret])
    ids = demo.encode(whole, bos=False, eos=False)
    assert ids[-100:] == [*hidden.haystack, *hidden.question, *hidden.secret][-100:]


def test_the_text_is_the_one_that_its_source_tells_of_and_the_demo_can_read_it(demo: Tokenizer) -> None:
    text = read_corpus()
    digest = hashlib.sha256(CORPUS.read_bytes()).hexdigest()
    source = CORPUS.with_name("SOURCE.md").read_text(encoding="utf-8")
    assert digest in source
    assert f"{len(text.encode()):,} bytes" in source
    ids = demo.encode(text, bos=False, eos=False)
    assert demo.decode(ids) == text
    assert max(ids) < demo.n_words
    assert torch.tensor(ids).unique().numel() > 5000, "prose, and no few words again and again"
