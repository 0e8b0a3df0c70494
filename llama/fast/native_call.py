"""The native forward, and a call of it: what it reads, and the memory that it computes in, for one step or many.

Also chooses tokens from its logits. Knows no modules, and not how memory is reserved in a cache.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, addressof, byref, c_char_p, c_int64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import Described
from llama.fast.native_build import load_library
from llama.fast.native_caches import CacheRoom
from llama.fast.native_structs import Choice, ChoiceSettings, Groups, NativeBatch, NativeModel
from llama.rows import Rows
from llama.sampling import Sampler, choose_rows

SOURCE = Path(__file__).with_name("native") / "forward.cpp"


class NativeForward:
    """The functions of native code, of which `Transformer.forward` defines the results.

    The forward of each kind of numbers and of products is a library of its own, compiled when a model first needs it.

    instructions: the CPU instructions that the code was compiled for.
    code: a name that differs whenever the sources, the flags or the CPU differ, see native_build.py.
    """

    def __init__(self, folder: Path) -> None:
        library = load_library(SOURCE.with_name("common.cpp"), folder)
        self._choose = library.choose_tokens
        self._choose.restype, self._choose.argtypes = None, (c_void_p,)
        library.instructions.restype = c_char_p
        self.instructions: str = library.instructions().decode()
        self.code = f"{SOURCE.stem}-{Path(library._name).stem.rpartition('-')[2]}"
        self._folder = folder
        self._forwards: dict[tuple[int, int], CDLL] = {}

    def load(self, model: NativeModel) -> CDLL:
        """Return the library of models of this kind; compile it if necessary. Raises NoNativeCode."""
        kind = model.bfloat16, model.activations
        if kind not in self._forwards:
            number = "bfloat" if model.bfloat16 else "float"
            product = f"Packed<{model.activations}, {number}>" if model.activations else f"Plain<{number}>"
            library = load_library(SOURCE, self._folder, (f"-DNUMBER={number}", f"-DPRODUCT={product}"))
            library.forward.restype, library.forward.argtypes = c_int64, (c_void_p, c_void_p, c_int64)
            self._forwards[kind] = library
        return self._forwards[kind]

    def __call__(self, model: NativeModel, batch: NativeBatch, room: int) -> int:
        """Return the bytes that `batch.workspace` needs; compute nothing if its `room` is less."""
        size: int = self.load(model).forward(byref(model), byref(batch), room)
        return size

    def choose(self, choice: Choice) -> None:
        """Write the token of each row to `choice.ids`: -1 if a logit of the row is not finite."""
        self._choose(byref(choice))


class NativeCall:
    """One call of the native forward, which may run again for other tokens at other starts.

    All memory that native code reads stays allocated as long as this object, whatever another thread does to the model
    or the cache.

    whole: the call computes the logits of all tokens.
    cache: the memory reserved for the call; None: it uses no cache.
    logits: those of every row's last token, (rows, vocab), or of all tokens, one row after the other and without
    padding, (tokens, vocab); of the last run, until the next.
    cos_sin: the angles of `positions`.
    can_repeat: every id that the head can choose has an embedding.
    positions: how many positions the RoPE table covers.
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
        self._rows, self._whole, bsz = rows, whole, len(rows.starts)
        shape = (sum(rows.lengths) if whole else bsz, self._model.output.columns)
        self.logits = torch.empty(shape, dtype=torch.float32, device="cpu")
        self.can_repeat, self.positions = shape[-1] <= self._model.vocab_size, len(cos_sin[0])
        numbers = c_int64 * bsz
        self._starts, self._fed = numbers(*rows.starts), (c_int64 * ids.numel()).from_address(ids.data_ptr())
        lengths = numbers(*rows.lengths)
        self.cos_sin, self._memory = cos_sin, (ids, lengths)
        self._batch = NativeBatch(
            rows=bsz,
            width=rows.width,
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
            logits=self.logits.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._workspace, self._room = torch.empty(0, dtype=torch.uint8, device="cpu"), 0

    def feed(self, ids: Sequence[int], starts: Sequence[int]) -> None:
        """Set the tokens, (rows, width) as one list, and the starts of the rows for the next run."""
        self._fed[:] = [*ids]
        self._starts[:] = [*starts]

    @property
    def padded(self) -> Tensor:
        """The logits as the model returns them, (rows, width or 1, vocab); those of padding are 0."""
        rows, vocab = self._rows, self.logits.shape[-1]
        if not self._whole or set(rows.lengths) == {rows.width}:
            return self.logits.view(len(rows.starts), -1, vocab)
        return pad_sequence(list(torch.split(self.logits, list(rows.lengths))), batch_first=True)

    def choose_by(self, choice: Choice) -> None:
        """Make every run choose tokens too. The caller keeps `choice` in memory."""
        self._batch.choice = addressof(choice)

    def take_memory(self, other: "NativeCall") -> None:
        """Compute in the memory of another call, which does not run any more."""
        self._workspace, self._room, other._room = other._workspace, other._room, 0
        self._batch.workspace = self._workspace.data_ptr()

    def run(self, native: NativeForward) -> None:
        """Compute the logits, and choose."""
        while (size := native(self._model, self._batch, self._room)) > self._room:
            self._room = size + (size // 4 if self._room else 0)  # with a reserve: later steps need more
            self._workspace = torch.empty(self._room, dtype=torch.uint8, device="cpu")
            self._batch.workspace = self._workspace.data_ptr()


class NativeChoice:
    """A choice of the next token of rows from their logits, and the memory that it reads and writes."""

    def __init__(self, logits: Tensor, samplers: Sequence[Sampler]) -> None:
        rows, vocab = logits.shape
        self._ids = (c_int64 * rows)()
        settings = (ChoiceSettings * rows)(*map(_settings, samplers))
        self._memory = logits, settings, [sampler.seen for sampler in samplers]
        self.choice = Choice(
            logits=logits.data_ptr(),
            rows=rows,
            vocab=vocab,
            settings=addressof(settings),
            ids=addressof(self._ids),
            threads=torch.get_num_threads(),
        )

    def made(self, by: Callable[[], None], draws: Tensor | None) -> list[int]:
        """Return the ids that `by` chooses with these draws, or what `Choice` says in their place."""
        if draws is not None:
            self.choice.draws = draws.data_ptr()
        by()
        return list(self._ids)


class NativeSampler:
    """Run a call's steps and choose tokens as `choose_rows` does: in native code, unless rounding may decide a token.

    logits: those of the last step, (rows, vocab), until the next.
    """

    def __init__(self, run: Callable[[NativeCall], None], call: NativeCall, batch: Batch) -> None:
        self._run, self._call, self._batch = run, call, batch
        self.logits = call.logits
        rows, vocab = self.logits.shape
        self._no_logprobs = list[float | None]([None] * rows)
        self._choice = None
        sizes_fit = all(sampler.seen is None or len(sampler.seen) == vocab for sampler in batch.samplers)
        if sizes_fit and all(sampler.matcher is None for sampler in batch.samplers):
            self._choice = NativeChoice(self.logits, batch.samplers)
            call.choose_by(self._choice.choice)

    def __call__(self) -> Chosen:
        """Compute the logits, and return the next token of every row."""
        batch, draws = self._batch, self._batch.draw()
        if self._choice is None:
            self._run(self._call)
        else:
            ids = self._choice.made(partial(self._run, self._call), draws)
            if min(ids) >= 0:
                if any(row.logprobs for row in batch.rows):
                    return batch.outcome(torch.tensor(ids, device="cpu"), self.logits)
                return Chosen(ids, self._no_logprobs)
        return batch.outcome(choose_rows(self.logits, batch.samplers, draws), self.logits)


def _settings(sampler: Sampler) -> ChoiceSettings:
    sampling, seen = sampler.sampling, sampler.seen
    return ChoiceSettings(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k or 0,
        penalty=sampling.repetition_penalty,
        seen=None if seen is None else seen.data_ptr(),
    )
