"""The rows of one generation: their tokens and positions, and which of them still generate.

Knows ids and positions. Does not know models or text; the reader of the tokens may stop a row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama.request import Request
from llama.sampling import Sampler


class NonFiniteLogits(ValueError):
    """The model's logits contain NaN or infinity."""

    def __init__(self, step: int, row: int) -> None:
        super().__init__(
            f"the logits of row {row} at step {step} are not finite; "
            "a wider dtype (bf16 or fp32 instead of fp16) or an undamaged checkpoint may help"
        )
        self.step, self.row = step, row


class Chosen(NamedTuple):
    """The choice of one step, on the host.

    ids: an id for each row in the batch; -1 if its logits are not finite.
    logprobs: the log-probabilities of the ids; None if they were not requested.
    """

    ids: list[int]
    logprobs: list[float | None]


class Token(NamedTuple):
    """One token of a row.

    echoed: True if the token comes from the prompt.
    """

    row: int
    id: int
    logprob: float | None
    echoed: bool = False


class Batch:
    """The rows of one generation.

    texts: the ids of every row.
    rows: the rows in the batch.
    cur_pos: the length of each of `rows`, which is the position of its next token.
    active: the rows that still generate. The others leave the batch before the next step.
    stopped: the rows that ended by a stop token or a stop string.
    prefix_len: how many tokens of every row are cached before the first call.
    maybe_changed: True if code of the caller may have run since the last step.
    fed: the number of tokens that the model was fed.
    """

    sampler: Sampler

    def __init__(self, request: Request, *, prefix_len: int = 0) -> None:
        self.request, self.prefix_len = request, prefix_len
        self.texts = [list(prompt) for prompt in request.prompts]
        self.rows, self.cur_pos = list(range(len(self.texts))), list(map(len, self.texts))
        self.active = {row for row, tokens in enumerate(request.max_new) if tokens > 0}
        self.stopped: set[int] = set()
        self.maybe_changed = True
        self.fed = 0
        self._steps = 0

    def begin(self, vocab_size: int, device: torch.device) -> None:
        """Make the random stream of each row, and put tokens on this device."""
        request, self.device = self.request, device
        self.sampler = Sampler(request.sampling, request.seed, request.prompts, vocab_size, device)

    def tokens(self, prev_pos: Sequence[int]) -> Tensor:
        """Return tokens[:, prev_pos:cur_pos] of the rows in the batch, padded on the right."""
        return padded([self.texts[row][prev:] for row, prev in zip(self.rows, prev_pos, strict=True)], self.device)

    def drop_ended(self) -> list[int]:
        """Remove the rows that have ended from the batch; return the former places of the others."""
        places = [place for place, row in enumerate(self.rows) if row in self.active]
        self.rows = [self.rows[place] for place in places]
        self.cur_pos = [self.cur_pos[place] for place in places]
        self.sampler.select_rows(places)
        return places

    def append(self, ids: Sequence[int]) -> None:
        """Add the next token of every row in the batch."""
        for place, (row, id) in enumerate(zip(self.rows, ids, strict=True)):
            self.texts[row].append(id)
            self.cur_pos[place] += 1

    def outcome(self, ids: Tensor, logits: Tensor) -> Chosen:
        """Return the ids, (rows,), that were chosen from these logits, (rows, vocab), on the host."""
        finite = logits.sum(-1).isfinite()  # one pass: NaN or infinity anywhere makes the sum not finite
        on_host = ids.where(finite, -1).tolist()  # host sync: the only one per step, where stopping is checked
        if not self.request.logprobs:
            return Chosen(on_host, [None] * len(on_host))
        return Chosen(on_host, logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].tolist())

    def record(self, chosen: Chosen) -> Iterator[Token]:
        """Yield the chosen token of every active row; end rows at a stop id or at their maximum length."""
        for row, id, logprob in zip(list(self.rows), chosen.ids, chosen.logprobs, strict=True):
            if row not in self.active:
                continue
            if id < 0:
                raise NonFiniteLogits(self._steps, row)
            if id in self.request.stop_ids:
                self.stop(row)
                continue
            if self._steps + 1 == self.request.max_new[row]:
                self.active.discard(row)
            yield Token(row, id, logprob)
        self._steps += 1

    @property
    def left(self) -> int:
        """The number of steps until every row has its maximum length."""
        return max(self.request.max_new) - self._steps

    def stop(self, row: int) -> None:
        """End a row."""
        self.active.discard(row)
        self.stopped.add(row)


def padded(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the texts as one tensor, (rows, longest), padded with zeros on the right."""
    width = max(map(len, texts))
    if width > min(map(len, texts)):
        texts = [[*text, *[0] * (width - len(text))] for text in texts]
    return torch.tensor(texts, dtype=torch.int64, device="cpu").to(device)
