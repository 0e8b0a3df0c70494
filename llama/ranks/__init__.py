"""The processes that share one model, seen from one of them: who it is, and what they do together.

`Ranks` is a process that has the model to itself; `llama.ranks.torchrun` makes those of a torchrun. Knows tensors.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from torch import Tensor


class Ranks:
    """One process with the whole model. All ranks call the same methods in the same order."""

    rank: int = 0
    size: int = 1

    def enter(self, x: Tensor) -> Tensor:
        """Return x, which is the same on every rank; its gradient is the sum of every rank's."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x. x itself may be overwritten."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """Return every rank's x side by side, along the last dimension."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, in their order. Without gradients."""
        return [x]

    def decide(self, x: Tensor) -> Tensor:
        """Return rank 0's x."""
        return self.gather(x)[0]

    def one_at_a_time(self) -> AbstractContextManager[None]:
        """Keep what stands under `with` to one generation of this process: several would mix what ranks say."""
        return nullcontext()

    def agree(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Raise ValueError, on every rank, where a fact, by its name, is not the same on all of them.

        One process does not ask for its facts: to find them may take a while, as a tokenizer's fingerprint does.
        """


ALONE = Ranks()
_CURRENT: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current_ranks() -> Ranks:
    """Return those that a model which is built now is cut for."""
    return _CURRENT.get()


@contextmanager
def cut_for(ranks: Ranks) -> Iterator[None]:
    """Let models that are built within be cut for these ranks."""
    token = _CURRENT.set(ranks)
    try:
        yield
    finally:
        _CURRENT.reset(token)
