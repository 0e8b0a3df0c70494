"""Inference mode for generators: entered for what they compute, and left for who reads them."""

from collections.abc import Callable, Generator
from contextlib import closing
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")


def inferring(steps: Callable[Given, Generator[Made, None, None]]) -> Callable[Given, Generator[Made, None, None]]:
    """Let a generator compute in inference mode, whoever asks for what it yields; who is in it already enters no other.

    As torch.inference_mode does, which enters one each time: at a step of a small model that is a time to be seen.
    """

    @wraps(steps)
    def inferring(*given: Given.args, **named: Given.kwargs) -> Generator[Made, None, None]:
        with closing(steps(*given, **named)) as made:
            while True:
                if torch.is_inference_mode_enabled():
                    one = next(made, None)
                else:
                    with torch.inference_mode():
                        one = next(made, None)
                if one is None:
                    return
                yield one

    return inferring
