"""A text to score and to hide needles in, and a conversation, as package data; SOURCE.md says where both come from.

Knows files; does not know tokens or models.
"""

import json
from pathlib import Path

CORPUS = Path(__file__).with_name("persuasion.txt")


def read_corpus() -> str:
    """Return the text: paragraphs of one line each, with an empty line between them."""
    return CORPUS.read_text(encoding="utf-8")


def read_dialog() -> list[dict[str, str]]:
    """Return a conversation of ten turns, a question and an answer each, as messages with `role` and `content`."""
    dialog: list[dict[str, str]] = json.loads(Path(__file__).with_name("conversation.json").read_text(encoding="utf-8"))
    return dialog
