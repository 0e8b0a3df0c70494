"""The page is one file: no text of a prompt or a model becomes markup, and nothing is loaded from outside."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from recordings import DEMO, SMALL, made_up

from llama.host import palette
from llama.untrusted.words import printable
from llama.watch.watch_page import (
    COUNTERS,
    MOST_ATTENTION,
    amount,
    bytes_words,
    formulas,
    kept_attention,
    page,
    sentence,
)

NASTY = "</script ></script><script>alert(1)</script><!--<b onload='x'>\"&amp;\u2028\u2029\x00\x1b\u202e\ud800\ufeff]]>"


class Outline(HTMLParser):
    """The elements of a page as a browser parses them, and the texts by tag."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside[-1] if self.inside else "", []).append(data)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.split('id="recording">')[1].split("</script>")[0])
    return found


TAGS = sorted(Outline(page(made_up())).tags)


@given(text=st.text(st.characters(), max_size=30))
@example(text=NASTY)
def test_no_text_of_a_prompt_a_model_or_a_name_becomes_markup(text: str) -> None:
    recording = made_up([text, " and"], steps=2)
    recording = replace(recording, layout=replace(recording.layout, kind=text))
    made = page(recording, model=text)
    assert sorted(Outline(made.encode().decode()).tags) == TAGS
    inside = made.split('<script type="application/json" id="recording">')[1].split("</script>\n<script>")[0]
    assert not set("<>&") & set(inside)  # browsers end a script at "</script " too, and count "<!--<script"
    assert data_of(made)["texts"][0] == [printable(one) for one in recording.texts]


def test_notes_are_text_too() -> None:
    outline = Outline(page(made_up(notes=[NASTY.replace("\ud800", "")])))
    assert sorted(outline.tags) == sorted([*TAGS, "li"])


def test_nothing_is_loaded_from_outside_and_only_the_pages_own_script_may_run() -> None:
    made = page(made_up())
    outline = Outline(made)
    assert not [name for _, attributes in outline.elements for name in attributes if name in ("src", "href", "style")]
    assert not re.search(r"https?:|//\w+\.|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", made)
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    policy = next(one["content"] for _, one in outline.elements if "http-equiv" in one)
    assert policy is not None
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        digest = hashlib.sha256(outline.texts[tag][-1].encode()).digest()
        assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


@pytest.mark.parametrize(
    ("prompt", "steps", "said"),
    [(4, 64, ""), (100, 64, "one layer in 2."), (2000, 80, "the first layer from step 16 on.")],
)
def test_a_page_takes_less_than_2_mb_and_says_which_attention_weights_it_has(
    prompt: int, steps: int, said: str
) -> None:
    recording = made_up(["a"] * prompt, steps=steps, args=DEMO)
    made = page(recording)
    _, first = kept_attention(recording)
    kept = [step["attention"] for step in data_of(made)["steps"]]
    assert [one is None for one in kept] == [True] * first + [False] * (steps - first)
    size = sum(len(base64.b64decode(one)) for one in kept if one is not None)
    assert MOST_ATTENTION / 2 < size <= MOST_ATTENTION
    assert len(made.encode()) < 2_000_000
    notes = [text.partition("it has those of ")[2] for text in Outline(made).texts["li"] if "too long" in text]
    assert notes == [said] * bool(said)


def test_formulas_give_the_figures_beside_them() -> None:
    recording = made_up(steps=6)
    for moment in recording.moments:
        for work, cached in ((moment.on, len(moment.seen[0])), (moment.off, 0)):
            wanted = [work.fed, work.flops, work.bytes_read, work.bytes_held]
            told = formulas(recording, work, cached)
            assert len(told) == len(COUNTERS)
            for formula, figure in zip(told, wanted, strict=False):
                assert figure_of(formula) == figure, formula


def figure_of(formula: str) -> int:
    """Return the number after the last = of a formula, after checking that the products before it give it."""
    terms, _, figure = formula.replace(",", "").rpartition(" = ")
    if "+" in terms or "\u00d7" in terms:
        products = [re.findall(r"(?:^|\u00d7 )(\d+)", term.strip()) for term in terms.split("+")]
        total = sum(eval("*".join(numbers)) for numbers in products)
        assert total == int(figure), formula
    return int(figure)


def test_formulas_separate_full_groups_of_a_quantised_cache_from_newer_positions() -> None:
    recording = made_up(["a"] * 40, steps=2)
    layout = replace(recording.layout, position_bytes=100, group=32)
    assert layout.parts(40) == [(32, 100), (8, 128)]
    assert replace(layout, window=10).parts(50) == [(32, 100), (18, 128)]
    work = replace(recording.moments[1].on, bytes_read=5000 + 2 * (32 * 100 + 8 * 128))
    told = formulas(replace(recording, layout=layout), work, cached=41)[2]
    assert "each once + 2 layers x 32 positions x 100 + 2 layers x 8 positions x 128 =" in told.replace("\u00d7", "x")
    assert figure_of(told) == work.bytes_read


def test_a_sentence_says_what_a_step_does() -> None:
    first, *_, last = made_up(["a"] * 4, steps=12).moments
    assert sentence(1, first).startswith("Step 1: 4 tokens fed, the whole prompt.")
    assert sentence(12, last) == (
        "Step 12: 1 token fed, 14 positions read from the cache. Without it: 15 tokens computed, 14 of them again."
    )
    assert "1 token fed, 1 position read from the cache" in sentence(2, made_up(["a"], steps=2).moments[1])
    on, off = replace(last.on, start=12, fed=4), replace(last.off, fed=29, steps=2)
    guessed = replace(last, on=on, off=off, guess=("a", "b", "c"), right=2)
    assert sentence(9, guessed) == (
        "Step 9: 1 token and a guess of 3 fed: 2 right, 1 rejected. One call makes 3 tokens, with 12 positions read "
        "from the cache. Without it: 29 tokens computed in 2 steps, 26 of them again."
    )


def test_a_step_with_a_guess_has_its_rejected_tokens_beside_the_text_and_counts_what_is_computed_again() -> None:
    first, second, *_ = made_up(["a"] * 4).moments
    guess = ("<b", "c", NASTY)
    guessed = replace(
        second,
        on=replace(second.on, fed=4),
        off=replace(second.off, fed=11, steps=2),
        seen=(tuple(range(6)),) * 2,
        guess=guess,
        right=1,
    )
    data = data_of(page(replace(made_up(["a"] * 4), moments=(first, guessed))))
    assert [step["fed"] for step in data["steps"]] == [[[0, 4], [0, 4]], [[4, 2], [0, 6]]]
    assert [step["rejected"] for step in data["steps"]] == [[], ["c", printable(NASTY)]]
    assert data["steps"][1]["wasted"] == 4 + 11 - 6
    assert data["steps"][1]["counters"][1][0][3] == "the sum of 2 steps = 11"
    assert data["rows"] == [[[0, row + 1]] for row in range(6)]
    assert "once with the cache, 2 times without it" in data["steps"][1]["bytes"]
    assert data["questions"] == []


def test_rows_of_the_triangle_have_the_keys_that_any_layer_reads_and_none_ahead() -> None:
    recording = made_up(["a"] * 3, steps=3)
    first, second, third = recording.moments
    moments = first, replace(second, seen=((0, 3), (2, 3))), replace(third, seen=((3, 4, 5), (4, 5)))
    lossy = replace(recording, moments=moments, prompt_seen=((0,), (1,), (0, 2)))
    assert data_of(page(lossy))["rows"] == [[[0, 1]], [[1, 2]], [[0, 1], [2, 3]], [[0, 1], [2, 4]], [[3, 5]]]
    assert data_of(page(recording))["rows"] == [[[0, row + 1]] for row in range(5)]


def test_the_sentence_beside_the_bytes_has_the_numbers_of_the_step() -> None:
    recording = made_up(["a"] * 4, steps=12)
    said = [bytes_words(recording, number, one) for number, one in enumerate(recording.moments, 1)]
    assert said[0].endswith("Nothing is read from the cache. After it, the cache occupies 4.0 kB of memory.")
    weights = recording.moments[8].on.bytes_read - 11 * 256  # 2 layers of 128 bytes a position
    assert said[8] == (
        f"Step 9 reads the weights, {amount(2, weights)}, in both modes. With the cache it also reads 2.8 kB, the keys "
        f"and values of 11 positions: {281600 / weights:.2g} % more bytes. For this, the cache occupies 4.0 kB "
        "of memory."
    )


def test_questions_are_answered_by_the_recording() -> None:
    recording = made_up(["a"] * 4, steps=12)
    on, token = recording.moments[8].on, SMALL.n_layers * 2 * SMALL.n_kv_heads * SMALL.head_dim * 4
    asked = data_of(page(recording))["questions"]
    answers = [one["choices"][one["answer"]] for one in asked]
    assert answers == [str(on.fed), "0", amount(2, token), amount(2, on.bytes_read), str(sum(range(1, 13)))]
    for one in [*asked, *data_of(page(made_up(["a"], steps=2)))["questions"]]:
        assert len({*one["choices"]}) == len(one["choices"]) > 1
    assert data_of(page(made_up(steps=1)))["questions"] == []


def test_figures_are_short() -> None:
    told = [amount(0, 1234), amount(1, 269_927_424), amount(2, 538_705_152), amount(3, 0), amount(4, 26.13)]
    assert told == ["1,234", "270 M", "514 MB", "0 B", "26.1 ms"]
    assert [amount(1, 3.04e9), amount(3, 1536), amount(4, 2400)] == ["3.0 G", "1.5 kB", "2.40 s"]


def test_colours_are_those_of_the_palette_alone() -> None:
    texts = Outline(page(made_up())).texts
    style, script = texts["style"][0], texts["script"][-1]
    used = set(re.findall(r"var\(--(\w+)\)", style))
    drawn = set(re.findall(r"colour\(\"(\w+)\"\)", script))
    assert {"cache", "written", "recomputed", "grid"} <= drawn
    assert {"cache", "recomputed", "written", "attention"} <= used
    assert used | drawn <= palette.variables().keys()
    assert palette.css() in style
