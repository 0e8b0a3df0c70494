"""The rows of one generation as they grow: their tokens, where each stands, which still grow, and what was asked for.

Knows ids and positions. Does not know a model, text, or why a row is given up: whoever reads the tokens may stop one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama.request import Request
from llama.sampling import Sampler


class NonFiniteLogits(ValueError):
    """The model's logits held a nan or an infinity."""

    def __init__(self, step: int, row: int) -> None:
        super().__init__(
            f"the logits of row {row} at step {step} are not finite; "
            "a wider dtype (bf16 or fp32 instead of fp16) or an undamaged checkpoint may help"
        )
        self.step, self.row = step, row


class Chosen(NamedTuple):
    """What a step chose, on the host: each row's id, -1 where its logits were not finite, and its log-probability.

    `logprobs` hold None for every row where they were not asked for. `logits`: what it was chosen from, (bsz, vocab),
    until the next step is asked for; None but where the batch is `lasting`.
    """

    ids: list[int]
    logprobs: list[float | None]
    logits: Tensor | None = None


class Token(NamedTuple):
    """One token of a row. `echoed` tokens come from the prompt."""

    row: int
    id: int
    logprob: float | None
    echoed: bool = False


class Batch:
    """The rows of one generation.

    tokens: (bsz, longest) int64, the texts, padded on the right. cur_pos: where each row ends, and its next token goes.
    live: the rows that still grow. stopped: those that ended by a stop token or a stop string. disturbed: whether code
    of the caller may have run since the last forward. fed: how many tokens the model was fed. lasting: whether the
    text outlives the generation, so that the logits of each step are asked for, too. caches: those of all layers that
    hold the first `held` tokens of every row already, in row 0; empty where a generation begins with none.
    """

    tokens: Tensor
    sampler: Sampler

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cur_pos = [len(prompt) for prompt in request.prompts]
        self.live = {row for row, tokens in enumerate(request.room) if tokens > 0}
        self.stopped: set[int] = set()
        self.disturbed = True
        self.fed = 0
        self.lasting = False
        self.caches: list[Any] = []
        self.held = 0
        self._steps = 0

    def begin(self, vocab_size: int, device: torch.device) -> None:
        """Put the prompts where the model is, and make each row's random stream."""
        request = self.request
        self.tokens = padded(request.prompts, width=request.longest, device=device)
        self.sampler = Sampler(request.sampling, request.seed, request.prompts, vocab_size, device)

    def window(self, prev_pos: list[int], width: int) -> Tensor:
        """Return `width` columns of every row from its own position on, (bsz, width)."""
        first = prev_pos[0]
        if all(pos == first for pos in prev_pos):
            return self.tokens[:, first : first + width]
        columns = torch.tensor(prev_pos, device="cpu")[:, None] + torch.arange(width, device="cpu")
        columns = columns.clamp(max=self.tokens.shape[1] - 1)
        return self.tokens.gather(1, columns.to(self.tokens.device, non_blocking=True))

    def append(self, ids: Tensor) -> None:
        """Write the next token of every row, (bsz,), and step on.

        Rows that have ended go along, so that rows in step stay in step; a full row's last token is overwritten.
        """
        columns = torch.tensor(self.cur_pos, device="cpu").clamp(max=self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, columns.to(self.tokens.device, non_blocking=True)[:, None], ids[:, None])
        self.cur_pos = [min(pos + 1, self.request.longest) for pos in self.cur_pos]

    def outcome(self, ids: Tensor, logits: Tensor) -> Chosen:
        """Return what was chosen, (bsz,), from these logits, (bsz, vocab), for the host to look at."""
        finite = logits.sum(-1).isfinite()  # one pass: a nan or an infinity anywhere shows in the sum
        on_host = ids.where(finite, -1).tolist()  # host sync: the only one per step, where stopping is checked
        kept = logits if self.lasting else None
        if not self.request.logprobs:
            return Chosen(on_host, [None] * len(on_host), kept)
        return Chosen(on_host, logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].tolist(), kept)

    def record(self, chosen: Chosen) -> Iterator[Token]:
        """Yield the chosen token of every live row, and end the rows that met a stop id or have grown enough."""
        for row in sorted(self.live):
            id = chosen.ids[row]
            if id < 0:
                raise NonFiniteLogits(self._steps, row)
            if id in self.request.stop_ids:
                self.stop(row)
                continue
            if self._steps + 1 == self.request.room[row]:
                self.live.discard(row)
            yield Token(row, id, chosen.logprobs[row])
        self._steps += 1

    @property
    def left(self) -> int:
        """How many steps remain until every row has grown as far as was asked for."""
        return max(self.request.room) - self._steps

    def stop(self, row: int) -> None:
        """End a row here."""
        self.live.discard(row)
        self.stopped.add(row)


def padded(prompts: Sequence[Sequence[int]], *, width: int, device: torch.device) -> Tensor:
    """Return the prompts as one matrix, (bsz, width), filled up with zeros on the right."""
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device="cpu")
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device="cpu")
    return tokens.to(device)
