"""Stands in for exact mode, which the exercise does without."""

from typing import Any


def slowdown_words(model: Any) -> str:
    return "the exercise has no exact mode"
