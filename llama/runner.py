"""What runs a model's forwards: the plain modules, or a faster runner in the one slot that a model has for it.

Knows what is asked of a runner; does not know how one works.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from llama.batch import Batch, Chosen
    from llama.model import Transformer


@dataclass(frozen=True)
class Execution:
    """How forwards are executed, as a value: by which operations or runner, and from which kind of weights.

    runner: "plain", "exact", the name of operations of your own, "native", or what a GPU's graphs are made of.
    weights: "int8", "int4" or "stored"; None where the weights are floats. activations: 8 where products with these
    round what they multiply to 8 bits; else 16.
    """

    runner: str
    weights: str | None = None
    activations: int = 16

    def __str__(self) -> str:
        words = self.runner if self.weights is None else f"{self.runner}, {self.weights} weights"
        return words if self.activations == 16 else f"{words}, {self.activations}-bit activations"


class Runner(Protocol):
    """A faster way to run forwards; `llama.fast.choose` picks one.

    forwards: how many it has run. takes_prompts: whether prompts are among them. watch: called right before each
    forward of `run_ahead`, which passes the model's hooks by, with the rows and how many tokens each is fed.
    """

    name: str
    takes_prompts: bool
    forwards: int
    watch: Callable[[int, int], None] | None

    def __call__(
        self,
        model: "Transformer",
        tokens: Tensor,
        start_pos: int | Sequence[int],
        *,
        logits: Literal["all", "last"],
        lengths: Sequence[int] | None,
    ) -> Tensor | None:
        """Return what the model's forward returns, or None where the plain path has to serve."""
        ...

    def run_ahead(self, model: "Transformer", batch: "Batch") -> "Iterator[Chosen]":
        """See `llama.generation.Generation.run_ahead`."""
        ...

    def free_cache(self) -> None:
        """Hold no memory for a cache, as the model does not."""
        ...
