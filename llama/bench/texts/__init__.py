"""Texts to score and to hide needles in, and a conversation, as package data; SOURCE.md says where each comes from.

Knows files; does not know tokens or models.
"""

import json
from pathlib import Path


def text_path(name: str = "persuasion") -> Path:
    """Return the path of a text, UTF-8; raise ValueError where there is none of this name."""
    folder = Path(__file__).parent
    path = folder / f"{name}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.txt")))
        raise ValueError(f"text {name!r} is not known; known are: {known}")
    return path


def read_corpus(name: str = "persuasion") -> str:
    """Return a text: paragraphs of one line each, with an empty line between them."""
    return text_path(name).read_text(encoding="utf-8")


def read_dialog() -> list[dict[str, str]]:
    """Return a conversation of ten turns, a question and an answer each, as messages with `role` and `content`."""
    dialog: list[dict[str, str]] = json.loads((Path(__file__).parent / "conversation.json").read_text(encoding="utf-8"))
    return dialog
