"""The interfaces of a stepper, which makes the next tokens of a batch, and of a runner, which runs a model's forwards.

A stepper belongs to one batch and its cache, and removes ended rows from both. `llama.generation` has the plain one. A
runner is a faster way to run forwards; a model has at most one. Does not know how either works.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor

from llama.batch import Batch, Chosen, Token
from llama.kv_cache import Cache
from llama.rows import Rows
from llama.speculation import Width

Given = ParamSpec("Given")
Made = TypeVar("Made")
Model = TypeVar("Model", contravariant=True)  # the class of models that a runner serves
Left = Literal["none", "prompts", "all"]  # calls that a runner leaves to the plain path


class Stepper(Protocol):
    """Makes the tokens of one batch.

    cache: the cache that it feeds; None with the switch off. logits: those after each row in the batch, (rows, vocab),
    from which the next tokens are chosen; None while they are not known. pending: how many further choices of the last
    call are still to be yielded; only at 0 does the cache end where the rows do, so that others may join. width: how
    much of the rows' guesses is fed; None: nothing is guessed.
    """

    cache: Cache | None
    logits: Tensor | None
    pending: int
    width: Width | None

    def prefill(self) -> Iterator[Token]:
        """Feed the prompts; yield their tokens if `echo` is set."""
        ...

    def __iter__(self) -> Iterator[Chosen]:
        """Yield the choice of each step, without end; it has been appended to the batch's texts."""
        ...


@dataclass(frozen=True)
class Execution:
    """How forwards are executed: by which operations or runner, and from which kind of weights.

    runner: "plain", "exact", the name of your own operations, "native", or the kernels of a GPU's graphs. weights:
    "int8", "int4" or "stored"; None for floats. activations: 8 if the inputs of products are rounded to 8
    bits, else 16. exact: whether exact mode is on. plain_prompts: whether the runner leaves prompts to the plain path.
    """

    runner: str
    weights: str | None = None
    activations: int = 16
    exact: bool = False
    plain_prompts: bool = False

    def __str__(self) -> str:
        parts = [self.runner]
        parts += ["plain prompts"] if self.plain_prompts else []
        parts += [f"{self.weights} weights"] if self.weights is not None else []
        parts += [f"{self.activations}-bit activations"] if self.activations != 16 else []
        parts += ["exact"] if self.exact and self.runner != "exact" else []
        return ", ".join(parts)


class Runner(Protocol[Model]):
    """A faster way to run forwards; `llama.fast.choose` picks one.

    forwards: the number of forwards that it has run. watch: called before each forward of its steppers, which do not
    call the model's hooks, with the number of tokens of each row. exact: whether exact mode is on, so that it
    raises ValueError instead of leaving a forward to the plain path; None if it does not support exact mode. code: a
    name of what decides its bits. plain_prompts: whether it leaves calls of several tokens per row to the plain path,
    which is faster at them or the only one that computes them; not in exact mode, nor calls that verify guesses.
    """

    name: str
    code: str
    exact: bool | None
    plain_prompts: bool
    forwards: int
    watch: Callable[[Sequence[int]], None] | None

    def __call__(
        self,
        model: Model,
        tokens: Tensor,
        rows: Rows,
        cache: Cache | None,
        *,
        logits: Literal["all", "last"],
    ) -> Tensor | None:
        """Return what the model's forward returns, or None to leave the call to the plain path."""
        ...

    def steady(self) -> Self | None:
        """Return a runner whose forwards compute a row in the same way whatever the number of rows, for the same model.

        None if rows cannot join a batch of its steppers.
        """
        ...

    def left(self, model: Model, cache: Cache | None) -> Left:
        """Return the calls with such a cache, or without one, that the plain path runs."""
        ...

    def stepper(self, model: Model, batch: Batch, cache: Cache | None) -> Stepper | None:
        """Return a stepper for a batch, or None to leave the batch to the plain path.

        Row 0 of `cache` has the first `batch.prefix_len` tokens of every row. If `cache` is None, the stepper makes
        one, unless the batch has the switch off.
        """
        ...


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
