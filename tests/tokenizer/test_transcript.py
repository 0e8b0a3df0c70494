"""A transcript stores messages and the ends of answers: after new messages, undo, and a round trip through JSON."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat
from llama.tokenizer.transcript import End, Transcript


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


def test_a_transcript_goes_through_json(demo: Tokenizer, talk: tuple[Transcript, list[int]]) -> None:
    transcript, ids = talk
    for one in (transcript, transcript.undo(demo, ids)[0]):
        assert Transcript.from_json(one.to_json(), ids) == one
    fields = json.loads(transcript.to_json())
    for lacking in fields:
        text = json.dumps({key: value for key, value in fields.items() if key != lacking})
        with pytest.raises(ValueError, match="transcript of the conversation is invalid"):
            Transcript.from_json(text, ids)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": None},
        {"text": None},
        {"text": ""},
        {"begin": 10**6},
        {"begin": 0},
        {"begin": True},
        {"begin": "1"},
        {"answers": [[1]]},
        {"answers": [[-1, 1]]},
        {"answers": [[9, 9], [8, 9]]},
        {"answers": [[10**6, 9]]},
        {"answers": 1},
        {"kept": []},
        {"kept": [0, 1.0]},
        {"kept": [0, -1]},
        {"more": 1},
    ],
)
def test_what_is_no_transcript_of_the_ids_is_refused(
    change: dict[str, Any], talk: tuple[Transcript, list[int]]
) -> None:
    transcript, ids = talk
    with pytest.raises(ValueError, match="transcript of the conversation is invalid"):
        Transcript.from_json(json.dumps({**asdict(transcript), **change}), ids)


@pytest.mark.parametrize("text", ["", "[]", "1", "{}", '"messages"', "[" * 99999])
def test_what_is_no_transcript_at_all_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="transcript of the conversation is invalid"):
        Transcript.from_json(text, [])


def test_ends_are_pairs() -> None:
    assert End(*json.loads(json.dumps(End(3, 4)))) == End(ids=3, text=4)
