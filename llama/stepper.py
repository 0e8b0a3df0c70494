"""The interfaces of a stepper, which makes the next tokens of a batch, and of a runner, which runs a model's forwards.

A stepper belongs to one batch and its cache, and removes ended rows from both. `llama.generation` has the plain one. A
runner is a faster way to run forwards; a model has at most one. Does not know how either works.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from typing import Literal, NamedTuple, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor

from llama.batch import Batch, Chosen, Token
from llama.kv_cache import Cache
from llama.rows import Rows
from llama.speculation import Width

Given = ParamSpec("Given")
Made = TypeVar("Made")
Model = TypeVar("Model", contravariant=True)  # the class of models that a runner serves


class Stepper(Protocol):
    """Makes the tokens of one batch.

    cache: the cache that it feeds; None with the switch off. logits: those after each row in the batch, (rows, vocab),
    from which the next tokens are chosen; None while they are not known. pending: how many further choices of the last
    call are still to be yielded; only at 0 does the cache end where the rows do, so that others may join. width: how
    much of the rows' guesses is fed; None: nothing is guessed.
    """

    cache: Cache | None
    logits: Tensor | None
    pending: int
    width: Width | None

    def prefill(self) -> Iterator[Token]:
        """Feed the prompts; yield their tokens if `echo` is set."""
        ...

    def __iter__(self) -> Iterator[Chosen]:
        """Yield the choice of each step, without end; it has been appended to the batch's texts."""
        ...


FEW_ROWS = 8  # the trial times calls of up to 8 rows with 1 row, larger ones with 8 or 16
LONG = 128  # tokens per thread from which a prompt is long


class CallKind(NamedTuple):
    """A kind of call whose path is chosen by itself.

    prompt: it has several tokens per row, and does not verify guesses, which takes the place of steps. many: it has
    more than FEW_ROWS rows. long: it is a prompt of at least LONG tokens per thread.
    """

    prompt: bool
    many: bool
    long: bool = False

    @staticmethod
    def of(rows: int, width: int) -> "CallKind":
        prompt = width > 1
        return CallKind(prompt, rows > FEW_ROWS, long=prompt and rows * width >= LONG * torch.get_num_threads())

    def __str__(self) -> str:
        name = f"{'long' if self.long else 'short'} prompts" if self.prompt else "steps"
        return f"{name} of {'more than' if self.many else 'up to'} {FEW_ROWS} rows"


SHORT_PROMPTS = frozenset(CallKind(prompt=True, many=many) for many in (False, True))
LONG_PROMPTS = frozenset(kind._replace(long=True) for kind in SHORT_PROMPTS)
PROMPTS = SHORT_PROMPTS | LONG_PROMPTS
STEPS = frozenset(CallKind(prompt=False, many=many) for many in (False, True))
CALLS = PROMPTS | STEPS
_GROUPS = {"prompts": PROMPTS, "short prompts": SHORT_PROMPTS, "long prompts": LONG_PROMPTS, "steps": STEPS}


@dataclass(frozen=True)
class Execution:
    """How forwards are executed: by which operations or runner, and from which kind of weights.

    runner: "plain", "exact", the name of your own operations, "native", or the kernels of a GPU's graphs. weights:
    "int8", "int4", "stored" or "mapped"; None for floats. activations: 8 if the inputs of products are rounded to 8
    bits, else 16. exact: whether exact mode is on. plain: the kinds of calls that the runner leaves to the plain path,
    which is faster at them. tiles: what the tiles of a CPU with AMX multiply, with other bits than elsewhere.
    """

    runner: str
    weights: str | None = None
    activations: int = 16
    exact: bool = False
    plain: tuple[CallKind, ...] = ()
    tiles: str | None = None

    def __str__(self) -> str:
        parts = [self.runner]
        parts += [f"plain {kinds}" for kinds in _in_words(self.plain)]
        parts += [self.tiles] if self.tiles is not None else []
        parts += [f"{self.weights} weights"] if self.weights is not None else []
        parts += [f"{self.activations}-bit activations"] if self.activations != 16 else []
        parts += ["exact"] if self.exact and self.runner != "exact" else []
        return ", ".join(parts)


def _in_words(kinds: Collection[CallKind]) -> Iterator[str]:
    """Yield the names of kinds of calls; a group whose kinds are all among them has one name."""
    left = set(kinds)
    for name, group in _GROUPS.items():
        if group <= left:
            yield name
            left -= group
    yield from map(str, sorted(left, key=lambda kind: (not kind.prompt, kind.long, kind.many)))


class Runner(Protocol[Model]):
    """A faster way to run forwards; `llama.fast.choose` picks one.

    forwards: the number of forwards that it has run. watch: called before each forward of its steppers, which do not
    call the model's hooks, with the number of tokens of each row. exact: whether exact mode is on, so that it
    raises ValueError instead of leaving a forward to the plain path; None if it does not support exact mode. code: a
    name of what decides its bits. plain: the kinds of calls that it leaves to the plain path, which is faster at them
    or the only one that computes them; not in exact mode.
    """

    name: str
    code: str
    exact: bool | None
    plain: frozenset[CallKind]
    forwards: int
    watch: Callable[[Sequence[int]], None] | None

    def __call__(
        self,
        model: Model,
        tokens: Tensor,
        rows: Rows,
        cache: Cache | None,
        *,
        logits: Literal["all", "last"],
    ) -> Tensor | None:
        """Return what the model's forward returns, or None to leave the call to the plain path."""
        ...

    def steady(self) -> Self | None:
        """Return a runner whose forwards compute a row in the same way whatever the number of rows, for the same model.

        None if rows cannot join a batch of its steppers.
        """
        ...

    def left(self, model: Model, cache: Cache | None) -> frozenset[CallKind]:
        """Return the kinds of calls with such a cache, or without one, that the plain path runs: CALLS for all."""
        ...

    def tiles(self, model: Model) -> str | None:
        """Return what the tiles of a CPU with AMX multiply for the model, or None."""
        ...

    def stepper(self, model: Model, batch: Batch, cache: Cache | None) -> Stepper | None:
        """Return a stepper for a batch, or None to leave the batch to the plain path.

        Row 0 of `cache` has the first `batch.prefix_len` tokens of every row. If `cache` is None, the stepper makes
        one, unless the batch has the switch off.
        """
        ...


def inferring(steps: Callable[Given, Generator[Made, None, None]]) -> Callable[Given, Generator[Made, None, None]]:
    """Run a generator in inference mode.

    Skip the switch if the caller is already in it: entering costs measurable time, and torch.inference_mode as a
    decorator enters the mode at each step.
    """

    @wraps(steps)
    def inferring(*given: Given.args, **named: Given.kwargs) -> Generator[Made, None, None]:
        with closing(steps(*given, **named)) as made:
            while True:
                if torch.is_inference_mode_enabled():
                    one = next(made, None)
                else:
                    with torch.inference_mode():
                        one = next(made, None)
                if one is None:
                    return
                yield one

    return inferring
