"""What `generate_many` takes as prompts is what `generate` takes."""

from fakes import Bytes
from tiny import tiny_model


def test_a_text_is_one_prompt_as_in_generate() -> None:
    model = tiny_model(vocab_size=257)
    expected = model.generate(Bytes(), "abc", 3, temperature=0)
    assert [made for _, made in model.generate_many(Bytes(), "abc", 3, temperature=0)] == expected
