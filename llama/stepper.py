"""Who makes the next tokens of a batch: what is asked of a stepper. `llama.generation` has the plain one.

A stepper is made for one batch, has the batch's cache while it steps, and takes the rows that have ended out of both.
"""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from llama.batch import Chosen, Token
from llama.kv_cache import Cache


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
