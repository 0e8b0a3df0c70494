"""What makes the next tokens of a batch, and what runs a model's forwards: what is asked of a stepper and of a runner.

A stepper is made for one batch, has the batch's cache while it steps, and takes the rows that have ended out of both.
`llama.generation` has the plain one. A runner is a faster way to run forwards, in the one slot that a model has for it.
Does not know how either works.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from llama.batch import Batch, Chosen, Token
from llama.kv_cache import Cache
from llama.rows import Rows

Given = ParamSpec("Given")
Made = TypeVar("Made")
Model = TypeVar("Model", contravariant=True)  # the class of models that a runner serves


class Stepper(Protocol):
    """Makes the tokens of one batch.

    cache: what it feeds; None with the switch off. logits: those behind each row that is in the batch, (rows, vocab),
    from which the next tokens are chosen; None while they are not known.
    """

    cache: Cache | None
    logits: Tensor | None

    def prefill(self) -> Iterator[Token]:
        """Feed the prompts; yield what is echoed of them."""
        ...

    def __iter__(self) -> Iterator[Chosen]:
        """Yield what each step chooses, for as long as the caller asks; the batch's texts have it by then."""
        ...


@dataclass(frozen=True)
class Execution:
    """How forwards are executed, as a value: by which operations or runner, and from which kind of weights.

    runner: "plain", "exact", the name of operations of your own, "native", or what a GPU's graphs are made of.
    weights: "int8", "int4", "stored" or "mapped"; None where they are floats. activations: 8 where products with these
    round what they multiply to 8 bits; else 16. exact: whether the bits are held to what `Transformer.exact` says.
    """

    runner: str
    weights: str | None = None
    activations: int = 16
    exact: bool = False

    def __str__(self) -> str:
        parts = [self.runner]
        parts += [f"{self.weights} weights"] if self.weights is not None else []
        parts += [f"{self.activations}-bit activations"] if self.activations != 16 else []
        parts += ["exact"] if self.exact and self.runner != "exact" else []
        return ", ".join(parts)


class Runner(Protocol[Model]):
    """A faster way to run forwards; `llama.fast.choose` picks one.

    forwards: how many it has run. takes_prompts: whether prompts are among them. watch: called right before each
    forward of its steppers, which pass the model's hooks by, with the rows and how many tokens each is fed. exact:
    whether it is held to the same bits, see `Transformer.exact`, and so raises ValueError where it would leave a
    forward to the plain path; None: it cannot be. code: what decides its bits, as far as it tells.
    """

    name: str
    code: str
    exact: bool | None
    takes_prompts: bool
    forwards: int
    watch: Callable[[int, int], None] | None

    def __call__(
        self,
        model: Model,
        tokens: Tensor,
        rows: Rows,
        cache: Cache | None,
        *,
        logits: Literal["all", "last"],
    ) -> Tensor | None:
        """Return what the model's forward returns, or None where the plain path has to serve."""
        ...

    def stepper(self, model: Model, batch: Batch, cache: Cache | None) -> Stepper | None:
        """Return what makes the tokens of a batch, or None where the plain path has to.

        `cache` holds the first `batch.held` tokens of every row in its row 0; None: the stepper makes one if the batch
        asks for it.
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
