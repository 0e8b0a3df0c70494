"""A native call as the library is told of it, and the memory that it computes in: for one, or for step after step.

And how tokens are chosen from its logits. Does not know modules, nor how room is made in a cache.
"""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_bool, c_int64

import torch
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.native_caches import Call, Taken
from llama.fast.native_description import NativeModel
from llama.fast.native_library import Choice, NativeBatch, NativeForward
from llama.sampling import Sampler, Sampling


class Frame:
    """What computes a call, and the same call once more for other tokens at other starts.

    rows: those of the call that are computed. Of the others, which have ended, the cache holds nothing any more. cache:
    the room that was taken; None: the call touches no cache. The cache's buffers, and the weights, are not held.
    """

    def __init__(
        self, described: NativeModel, ids: Tensor, call: Call, cos_sin: tuple[Tensor, Tensor], cache: Taken | None
    ) -> None:
        self.described, self.cache = described, cache
        self.rows: Sequence[int] = range(call.rows) if cache is None else cache.live
        self._of = call.rows
        if len(self.rows) < call.rows:
            ids, call = ids[list(self.rows)], call.only(self.rows)
        shape = (call.rows, call.width if call.all else 1, described.sizes.output.columns)
        self._logits = torch.empty(shape, dtype=torch.float32, device="cpu")
        numbers = c_int64 * call.rows
        self._starts, self._fed = numbers(*call.starts), numbers.from_address(ids.data_ptr())  # a row's token
        self._held = ids, cos_sin, [numbers(*given) for given in (call.lengths, call.places, call.kept)]
        lengths, places, kept = map(addressof, self._held[2])
        self._batch = NativeBatch(
            rows=call.rows,
            width=call.width,
            tokens=ids.data_ptr(),
            starts=addressof(self._starts),
            lengths=lengths,
            all=call.all,
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            kind=0 if cache is None else cache.kind,
            slots=0 if cache is None else cache.slots,
            caches=None if cache is None else cache.layers,
            places=places,
            kept=kept,
            logits=self._logits.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._workspace, self._room = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    @property
    def closed(self) -> bool:
        """Whether the embedding knows every id that there are logits of."""
        return self._logits.shape[-1] <= self.described.vocab_size

    @property
    def positions(self) -> int:
        """How many positions it knows the angles of."""
        return len(self._held[1][0])

    def go_on(self, ids: Sequence[int], starts: Sequence[int]) -> None:
        """Let one token of every row of the call be fed next."""
        if len(self.rows) < self._of:
            ids, starts = [ids[row] for row in self.rows], [starts[row] for row in self.rows]
        self._fed[:] = [*ids]
        self._starts[:] = [*starts]

    def choose_by(self, choice: Choice) -> None:
        """Let every run choose from its logits, too; whoever made the choice keeps it."""
        batch = self._batch
        choice.logits, choice.rows, choice.vocab = batch.logits, batch.rows, self._logits.shape[-1]
        choice.places, batch.choice = batch.places, addressof(choice)

    def run(self, native: NativeForward) -> None:
        """Compute the logits, and choose."""
        while (size := native(self.described.sizes, self._batch, self._room)) > self._room:
            self._room = size + (size // 4 if self._room else 0)  # what was too small goes on to grow
            self._workspace = torch.empty(self._room, dtype=torch.uint8, device="cpu")
            self._batch.workspace = self._workspace.data_ptr()

    @property
    def logits(self) -> Tensor:
        """Those of the last run, (rows, width or 1, vocab), until the next; zeros for rows that are not computed."""
        if len(self.rows) == self._of:
            return self._logits
        logits = self._logits.new_zeros((self._of, *self._logits.shape[1:]))
        logits[list(self.rows)] = self._logits
        return logits


class Chooser:
    """Computes steps and chooses as the loop does: in the same call, wherever that is settled beyond rounding."""

    def __init__(self, run: Callable[[Frame], None], batch: Batch) -> None:
        rows = len(batch.cur_pos)
        self._run, self._batch = run, batch
        self._ids, self._no_logprobs = (c_int64 * rows)(), list[float | None]([None] * rows)
        self._ours = type(batch.sampler) is Sampler
        seen = batch.sampler.seen if self._ours else None
        self._choice, self._seen = choice_by(batch.request.sampling, self._ids, seen), marks_of(seen)
        self._able = False

    def begin(self, frame: Frame) -> None:
        """Let a frame's runs choose, too."""
        vocab = frame.described.sizes.output.columns
        self._able = self._ours and all(len(marks) == vocab for marks in self._seen)
        if self._able:
            frame.choose_by(self._choice)

    def __call__(self, frame: Frame) -> Chosen:
        """Compute the logits, and choose the next token of every row."""
        batch, draws = self._batch, None
        if self._able and (draws := batch.sampler.draw()) is not None:
            self._choice.draws = draws.data_ptr()
        self._run(frame)
        if self._able:
            ids = list(self._ids)
            if not any(ids[row] < 0 for row in batch.live):
                for row, marks in enumerate(self._seen):
                    marks[max(ids[row], 0)] = True  # as Sampler.note does, which takes 0.05 ms and more of a step
                if batch.request.logprobs:
                    return batch.outcome(torch.tensor(ids, device="cpu").clamp(min=0), frame.logits[:, 0])
                return Chosen(ids, self._no_logprobs, frame.logits[:, 0] if batch.lasting else None)
            batch.sampler.put_back([] if draws is None else [draws])
        last = frame.logits[:, 0]
        return batch.outcome(batch.sampler(last), last)


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
