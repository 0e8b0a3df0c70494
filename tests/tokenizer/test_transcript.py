"""A transcript stores messages and the ends of answers, after new messages and undo."""

from typing import Any

import pytest

from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat
from llama.tokenizer.transcript import Transcript


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of the letters, one by one."""
    return [id for letter in text for id in tokenizer.encode(letter, bos=False, eos=False)]


@pytest.fixture(scope="module")
def talk(demo: Tokenizer) -> tuple[Transcript, list[int]]:
    """Two exchanges, the answers of which are spelled."""
    format, talk, ids = ChatFormat(demo), Transcript(), list[int]()
    for question, answer in (("Hi", "Hello"), ("Ho", "Yes")):
        talk, prompt = talk.ask(format, ids, question)
        ids = [*prompt, *spelled(demo, answer)]
    return talk, ids


def test_answers_stay_as_they_were_generated(demo: Tokenizer, talk: tuple[Transcript, list[int]]) -> None:
    transcript, ids = talk
    grown, prompt = transcript.ask(ChatFormat(demo), ids, "Hu")
    assert prompt[: len(ids)] == ids
    assert [demo.decode(prompt[end.ids - 3 : end.ids]) for end in grown.answers] == ["llo", "Yes"]
    assert [grown.text[end.text - 3 : end.text] for end in grown.answers] == ["llo", "Yes"]
    assert demo.decode(prompt) == grown.text
    assert grown.kept == (0, *transcript.kept[1:], len(ids))
    assert [message["content"] for message in grown.messages] == ["Hi", "Hello", "Ho", "Yes", "Hu"]


def test_what_is_taken_back_leaves_the_ids_that_stood_before(
    demo: Tokenizer, talk: tuple[Transcript, list[int]]
) -> None:
    transcript, ids = talk
    back, left = transcript.undo(demo, ids)
    assert demo.decode(ids[:left]).endswith("assistant\nHello")
    assert [message["content"] for message in back.dialog(demo, ids[:left])] == ["Hi", "Hello"]
    _, prompt = back.ask(ChatFormat(demo), ids[:left], "Ho")
    assert prompt == ids[: transcript.begin]
    back, left = back.undo(demo, ids[:left])
    assert (back.dialog(demo, []), left, back.kept) == ([], 0, ())
    with pytest.raises(ValueError, match="there is nothing to undo"):
        back.undo(demo, [])


def test_a_rendering_that_changed_keeps_the_answers_before_the_change(
    demo: Tokenizer, talk: tuple[Transcript, list[int]]
) -> None:
    transcript, ids = talk
    transcript, ids = transcript.undo(demo, [*ids, *spelled(demo, "!")])[0], ids  # the ids were not rewound
    grown, prompt = transcript.ask(ChatFormat(demo), ids, "Another one")
    (end,) = grown.answers
    assert prompt[: end.ids] == ids[: end.ids]
    assert demo.decode(prompt) == grown.text


def test_a_space_that_a_vocabulary_drops_where_a_text_begins_is_told() -> None:
    class Words:
        """Every word is an id; in a text a space stands before each but the first."""

        special_tokens, bos_id, eos_id, pad_id = {"<s>": 0, "</s>": 1}, 0, 1, None
        chat_template = "{{ bos_token }}{% for m in messages %}{{ ' ' + m.content + eos_token }}{% endfor %}"
        words = ("<s>", "</s>", "Hi", "He", "llo", "Ho")

        def encode(self, s: str, **_: Any) -> list[int]:
            return [self.words.index(word) for word in s.replace("<s>", "<s> ").replace("</s>", "</s> ").split()]

        def decode(self, ids: list[int]) -> str:
            text = "".join(word if word[0] == "<" else f" {word}" for word in (self.words[id] for id in ids))
            return text.removeprefix(" ").replace(" llo", "llo")

    tokenizer: Any = Words()
    transcript, prompt = Transcript().ask(ChatFormat(tokenizer), [], "Hi")
    assert prompt == [0, 2, 1]
    _, grown = transcript.ask(ChatFormat(tokenizer), [*prompt, 3, 4], "Ho")
    assert grown == [0, 2, 1, 3, 4, 1, 5, 1]  # "Hello" would be no word at all
