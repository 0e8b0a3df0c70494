"""A native call as the library is told of it, and the memory that it computes in: for one, or for step after step.

And how tokens are chosen from its logits. Does not know modules, nor how room is made in a cache.
"""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_bool, c_int64
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from llama.batch import Batch, Chosen
from llama.fast.native_caches import Taken
from llama.fast.native_description import NativeModel
from llama.fast.native_library import Choice, NativeBatch, NativeForward
from llama.rows import Rows
from llama.sampling import Sampler, Sampling


class Look(NamedTuple):
    """What was found when a model was looked at: its description, and its weights, which stay where that says."""

    described: NativeModel
    weights: list[UntypedStorage]


class Frame:
    """What computes a call, and the same call once more for other tokens at other starts.

    whole: whether the logits of all tokens are asked for. cache: the room that was taken; None: the call touches no
    cache. All that native code reads lives as long as the frame, whatever another thread does to model or cache.
    """

    def __init__(
        self,
        look: Look,
        ids: Tensor,
        rows: Rows,
        cos_sin: tuple[Tensor, Tensor],
        cache: Taken | None,
        *,
        whole: bool,
    ) -> None:
        self.look, self.cache = look, cache
        bsz, width = len(rows.starts), rows.width
        shape = (bsz, width if whole else 1, look.described.sizes.output.columns)
        self.logits = torch.empty(shape, dtype=torch.float32, device="cpu")  # of the last run, until the next
        numbers = c_int64 * bsz
        self._starts, self._fed = numbers(*rows.starts), numbers.from_address(ids.data_ptr())  # a row's token
        kept = numbers(*rows.lengths)
        lengths = numbers(*[width] * bsz) if whole else kept
        self._held = cos_sin, ids, lengths, kept
        self._batch = NativeBatch(
            rows=bsz,
            width=width,
            tokens=ids.data_ptr(),
            starts=addressof(self._starts),
            lengths=addressof(lengths),
            all=whole,
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            kind=0 if cache is None else cache.kind,
            slots=0 if cache is None else cache.slots,
            caches=None if cache is None else cache.layers,
            kept=addressof(kept),
            logits=self.logits.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._workspace, self._room = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    @property
    def closed(self) -> bool:
        """Whether the embedding knows every id that there are logits of."""
        return self.logits.shape[-1] <= self.look.described.vocab_size

    @property
    def positions(self) -> int:
        """How many positions it knows the angles of."""
        return len(self._held[0][0])

    def go_on(self, ids: Sequence[int], starts: Sequence[int]) -> None:
        """Let one token of every row be fed next."""
        self._fed[:] = [*ids]
        self._starts[:] = [*starts]

    def choose_by(self, choice: Choice) -> None:
        """Let every run choose from its logits, too; whoever made the choice keeps it."""
        choice.logits, choice.rows, choice.vocab = self._batch.logits, self._batch.rows, self.logits.shape[-1]
        self._batch.choice = addressof(choice)

    def run(self, native: NativeForward) -> None:
        """Compute the logits, and choose."""
        while (size := native(self.look.described.sizes, self._batch, self._room)) > self._room:
            self._room = size + (size // 4 if self._room else 0)  # what was too small goes on to grow
            self._workspace = torch.empty(self._room, dtype=torch.uint8, device="cpu")
            self._batch.workspace = self._workspace.data_ptr()


class Chooser:
    """Computes a frame's steps and chooses as the loop does: in the same call, where that is settled beyond rounding.

    logits: those of the last step, (rows, vocab), until the next.
    """

    def __init__(self, run: Callable[[Frame], None], frame: Frame, batch: Batch) -> None:
        rows, vocab = len(batch.rows), frame.logits.shape[-1]
        self._run, self._frame, self._batch = run, frame, batch
        self.logits = frame.logits[:, 0]
        self._ids, self._no_logprobs = (c_int64 * rows)(), list[float | None]([None] * rows)
        ours = type(batch.sampler) is Sampler
        seen = batch.sampler.seen if ours else None
        self._choice, self._seen = choice_by(batch.request.sampling, self._ids, seen), marks_of(seen)
        self._able = ours and all(len(marks) == vocab for marks in self._seen)
        if self._able:
            frame.choose_by(self._choice)

    def __call__(self) -> Chosen:
        """Compute the logits, and choose the next token of every row."""
        batch, draws = self._batch, None
        if self._able and (draws := batch.sampler.draw()) is not None:
            self._choice.draws = draws.data_ptr()
        self._run(self._frame)
        if self._able:
            ids = list(self._ids)
            if min(ids) >= 0:
                for id, marks in zip(ids, self._seen, strict=False):  # of which there may be none
                    marks[id] = True  # as Sampler does, which takes 0.05 ms and more of a step
                if batch.request.logprobs:
                    return batch.outcome(torch.tensor(ids, device="cpu"), self.logits)
                return Chosen(ids, self._no_logprobs)
            batch.sampler.put_back([] if draws is None else [draws])
        return batch.outcome(batch.sampler(self.logits), self.logits)


def marks_of(seen: Tensor | None) -> list[Array[c_bool]]:
    """Return the rows of (rows, vocab) marks, to write into; none where there are none."""
    return [] if seen is None else [(c_bool * len(row)).from_address(row.data_ptr()) for row in seen]


def choice_by(sampling: Sampling, ids: Array[c_int64], seen: Tensor | None) -> Choice:
    """Return a choice by these rules whose ids stand there; whoever makes it keeps them, and what was seen."""
    return Choice(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k or 0,
        penalty=sampling.repetition_penalty,
        seen=None if seen is None else seen.data_ptr(),
        ids=addressof(ids),
        threads=torch.get_num_threads(),
    )
