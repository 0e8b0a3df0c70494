"""The collective operations of the processes that share one model.

`Ranks` is one process with the whole model; `llama.ranks.torchrun` makes the ranks of a torchrun. Which part
of a weight a rank reads is `Weight.part` in checkpoint/assemble.py. Knows tensors.
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
        """Return x, which is equal on all ranks; its gradient is the sum over all ranks."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x. x may be overwritten."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """Return all ranks' x, concatenated along the last dimension."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' x in the order of the ranks. Without gradients."""
        return [x]

    def decide(self, x: Tensor) -> Tensor:
        """Return rank 0's x."""
        return self.gather(x)[0]

    def one_at_a_time(self) -> AbstractContextManager[None]:
        """Return a context for one generation at a time: two would interleave their collective operations."""
        return nullcontext()

    def agree(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Raise ValueError on every rank, with the names, if facts differ between ranks.

        One process does not call `facts`, which may be slow: a tokenizer's fingerprint is.
        """


ALONE = Ranks()
_CURRENT: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current_ranks() -> Ranks:
    """Return the ranks among which a model that is built now is split."""
    return _CURRENT.get()


@contextmanager
def cut_for(ranks: Ranks) -> Iterator[None]:
    """Split models that are built inside the block among these ranks."""
    token = _CURRENT.set(ranks)
    try:
        yield
    finally:
        _CURRENT.reset(token)
