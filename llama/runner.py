"""What runs a model's forwards: the plain modules, or a faster runner in the one slot that a model has for it.

Knows what is asked of a runner; does not know how one works.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from llama.batch import Batch
from llama.kv_cache import Cache
from llama.rows import Rows
from llama.stepper import Stepper

Model = TypeVar("Model", contravariant=True)  # the class of models that a runner serves


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
