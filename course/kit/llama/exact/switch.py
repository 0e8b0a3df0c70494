"""Stands in for the switch of exact mode, which can only be left off here."""

from typing import Any


def set_exact(model: Any, value: bool) -> None:
    if value:
        raise ValueError("the exercise has no exact mode; leave out --exact")
