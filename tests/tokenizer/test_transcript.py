"""A transcript stores where answers end. The conversations of cli/test_terminal.py test the rest of it."""

from typing import Any

from llama.tokenizer.chat import ChatFormat
from llama.tokenizer.transcript import Transcript


def test_a_space_that_a_vocabulary_drops_at_the_beginning_of_a_text_stays() -> None:
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
