"""Inference mode for generators: on while they compute, off while the caller uses what they yield."""

from collections.abc import Callable, Generator
from contextlib import closing
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")


def inferring(steps: Callable[Given, Generator[Made, None, None]]) -> Callable[Given, Generator[Made, None, None]]:
    """Run a generator in inference mode.

    Skip the switch if the caller is already in it: entering costs measurable time, and torch.inference_mode as a
    decorator enters the mode at each step.
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
