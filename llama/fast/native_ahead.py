"""Steps that native code takes ahead of the loop: between two of them stands little more than the next call.

A step is taken when it is asked for, so whoever reads the tokens may have changed the model since the one before: then
everything is looked at, as it is for any other call. Where nobody did, what was found, and the room in the caches, hold
for a stretch of steps. Knows the loop's batch; of the runner, what `StepRunner` names.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import must_look
from llama.fast.native_caches import Call, ends_noted, steps_left
from llama.fast.native_call import Chooser, Frame
from llama.model import Transformer
from llama.rows import Rows


class StepRunner(Protocol):
    """The part of a runner that finds what computes a step; see NativeRunner."""

    watch: Callable[[int, int], None] | None

    def may_run_ahead(self, model: Transformer) -> bool: ...
    def frame(self, model: Transformer, tokens: Tensor, call: Call) -> Frame | None: ...


class Ahead:
    """A generation whose steps are taken ahead of the loop."""

    def __init__(self, runner: StepRunner, model: Transformer, batch: Batch, choose: Chooser) -> None:
        self._runner, self._model, self._batch, self._choose = runner, model, batch, choose
        self._starts = [end - 1 for end in batch.cur_pos]
        self._newest: list[int] = batch.window(self._starts, 1)[:, 0].tolist()
        # Of the stretch:
        self._frame: Frame | None = None
        self._left = 0  # steps
        self._live = 0  # rows that grow
        self._kept: Sequence[int] = ()  # how many tokens of each row the caches keep
        self._ends: list[list[int]] = []  # where the caches note how far each row was written

    def steps(self) -> Iterator[Chosen]:
        """Yield what each step chooses, until the loop has to go on by itself."""
        batch, last = self._batch, self._batch.request.longest - 1
        while (frame := self._next()) is not None:
            if self._runner.watch is not None:
                self._runner.watch(len(self._starts), 1)
            batch.fed += len(self._starts)
            chosen = self._choose(frame)
            self._newest = chosen.ids
            if min(chosen.ids) < 0:  # what is none is of a row that has ended, and goes along
                self._newest = [max(id, 0) for id in chosen.ids]
            yield chosen
            self._starts = [min(start + 1, last) for start in self._starts]

    def _next(self) -> Frame | None:
        """Return what computes the next step; None where the loop has to take it."""
        batch, frame = self._batch, self._frame
        if frame is not None and self._left and not batch.disturbed and len(batch.live) == self._live:
            self._left -= 1
            frame.go_on(self._newest, self._starts)
            if self._ends:
                now = [start + kept for start, kept in zip(self._starts, self._kept, strict=True)]
                for ends in self._ends:
                    ends[: len(now)] = now
            return frame
        ownership = self._model.ownership
        with ownership.acting(undisturbed=not batch.disturbed), ownership.call(shared=_never, begins=False):
            self._frame = self._begin_stretch()
        batch.disturbed = self._frame is None  # then the loop looks for itself
        return self._frame

    def _begin_stretch(self) -> Frame | None:
        """Look at the model where other code may have run, take room for a step, and return what computes it."""
        model, starts, bsz = self._model, self._starts, len(self._starts)
        tokens = torch.tensor(self._newest, dtype=torch.int64, device="cpu")[:, None]
        rows = Rows.at(starts, [1] * bsz, active=[row in self._batch.live for row in range(bsz)])
        look = must_look(model)
        if look:
            if not self._runner.may_run_ahead(model):
                return None
            model.check_rows(rows, "last")
        self._live, self._kept = len(self._batch.live), rows.kept
        call = Call(starts, rows.lengths, rows.kept, range(bsz), width=1, all=False, look=look)
        frame = self._runner.frame(model, tokens, call)
        if frame is None or frame.cache is None or not frame.closed:
            return None
        self._left = min(steps_left(frame.described.caches, call, frame.cache), frame.positions - 1 - max(starts))
        self._ends = ends_noted(frame.described.caches)
        self._choose.begin(frame)
        return frame


def _never() -> bool:
    return False
