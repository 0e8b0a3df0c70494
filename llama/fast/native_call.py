"""A call of the native forward: what it reads, and the memory that it computes in, for one step or many.

Also chooses tokens from its logits. Knows no modules, and not how memory is reserved in a cache.
"""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_bool, c_int64

import torch
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import Described
from llama.fast.native_caches import CacheRoom
from llama.fast.native_library import Choice, Groups, NativeBatch, NativeForward, NativeModel
from llama.rows import Rows
from llama.sampling import Sampler, Sampling


class NativeCall:
    """One call of the native forward, which may run again for other tokens at other starts.

    whole: whether it computes the logits of all tokens. cache: the memory reserved for it; None: it uses no cache.
    logits: (rows, width or 1, vocab), of the last run, until the next. can_repeat: whether the embedding has every id
    that may be chosen from them. positions: the number of those whose angles it has. All memory that native code reads
    stays allocated as long as this object, whatever another thread does to the model or the cache.
    """

    def __init__(
        self,
        described: Described[NativeModel],
        ids: Tensor,
        rows: Rows,
        cos_sin: tuple[Tensor, Tensor],
        cache: CacheRoom | None,
        *,
        whole: bool,
    ) -> None:
        self.described, self.cache = described, cache
        self._model = described.description
        bsz, width = len(rows.starts), rows.width
        shape = (bsz, width if whole else 1, self._model.output.columns)
        self.logits = torch.empty(shape, dtype=torch.float32, device="cpu")
        self.can_repeat, self.positions = shape[-1] <= self._model.vocab_size, len(cos_sin[0])
        numbers = c_int64 * bsz
        self._starts, self._fed = numbers(*rows.starts), numbers.from_address(ids.data_ptr())  # one token of each row
        kept = numbers(*rows.lengths)
        lengths = numbers(*[width] * bsz) if whole else kept
        self._memory = cos_sin, ids, lengths, kept
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
            groups=Groups() if cache is None else cache.groups,
            bases=None if cache is None or cache.bases is None else cache.bases.data_ptr(),
            pages=0 if cache is None else cache.pages,
            kept=addressof(kept),
            logits=self.logits.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._workspace, self._room = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def feed(self, ids: Sequence[int], starts: Sequence[int]) -> None:
        """Set the tokens, one of each row, and their positions for the next run."""
        self._fed[:] = [*ids]
        self._starts[:] = [*starts]

    def choose_by(self, choice: Choice) -> None:
        """Make every run choose tokens too. The caller keeps `choice` in memory."""
        choice.logits, choice.rows, choice.vocab = self._batch.logits, self._batch.rows, self.logits.shape[-1]
        self._batch.choice = addressof(choice)

    def run(self, native: NativeForward) -> None:
        """Compute the logits, and choose."""
        while (size := native(self._model, self._batch, self._room)) > self._room:
            self._room = size + (size // 4 if self._room else 0)  # with a reserve: later steps need more
            self._workspace = torch.empty(self._room, dtype=torch.uint8, device="cpu")
            self._batch.workspace = self._workspace.data_ptr()


class NativeSampler:
    """Run a call's steps and choose tokens as `Sampler` does: in native code, unless rounding may decide a token.

    logits: those of the last step, (rows, vocab), until the next.
    """

    def __init__(self, run: Callable[[NativeCall], None], call: NativeCall, batch: Batch) -> None:
        rows, vocab = len(batch.rows), call.logits.shape[-1]
        self._run, self._call, self._batch = run, call, batch
        self.logits = call.logits[:, 0]
        self._ids, self._no_logprobs = (c_int64 * rows)(), list[float | None]([None] * rows)
        plain = type(batch.sampler) is Sampler
        seen = batch.sampler.seen if plain else None
        self._choice = choice_by(batch.request.sampling, self._ids, seen)
        self._seen: list[Array[c_bool]] = []  # the rows of `seen`
        if seen is not None:
            self._seen = [(c_bool * len(row)).from_address(row.data_ptr()) for row in seen]
        self._serves = plain and all(len(marks) == vocab for marks in self._seen)
        if self._serves:
            call.choose_by(self._choice)

    def __call__(self) -> Chosen:
        """Compute the logits, and return the next token of every row."""
        batch, draws = self._batch, None
        if self._serves and (draws := batch.sampler.draw()) is not None:
            self._choice.draws = draws.data_ptr()
        self._run(self._call)
        if self._serves:
            ids = list(self._ids)
            if min(ids) >= 0:
                for id, marks in zip(ids, self._seen, strict=False):  # none without a penalty
                    marks[id] = True  # Sampler's way takes 0.05 ms and more of a step
                if batch.request.logprobs:
                    return batch.outcome(torch.tensor(ids, device="cpu"), self.logits)
                return Chosen(ids, self._no_logprobs)
            batch.sampler.put_back([] if draws is None else [draws])
        return batch.outcome(batch.sampler(self.logits), self.logits)


def choice_by(sampling: Sampling, ids: Array[c_int64], seen: Tensor | None) -> Choice:
    """Return a choice by these settings that writes to `ids`. The caller keeps `ids` and `seen` in memory."""
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
