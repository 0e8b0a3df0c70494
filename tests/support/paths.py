"""The paths of a stepper: pairs of models of the same weights, one of them with the steps that define a text.

A program runs on both. It takes a model and the options of its generations, and yields what it made, and sessions, of
which it names the facts to compare.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from native import ARGS, FOLDER, VOCAB, twins
from taped import Taped
from tiny import tiny_model

from llama.batch import Row
from llama.fast import native_build
from llama.fast.choose import make_fast
from llama.fast.graph_ops import MASKED, PYTORCH
from llama.fast.graph_runner import GraphRunner
from llama.fast.native_runner import NativeRunner
from llama.kv_cache import StaticCache
from llama.model import Transformer
from llama.quant.layers import PackedLinear
from llama.request import Options
from llama.speculation import EveryGuess
from llama.texts.session import Session

Program = Callable[[Transformer, Options], Iterator[object]]
SIZES: dict[str, Any] = {"max_seq_len": 160, "tied_head": False}
# A GPU's functions that compute prompts attend in a time that depends on the texts, not on the buffers.
WITH_PROMPTS = PYTORCH._replace(prompts=True, attention=MASKED._replace(by_text=True))


class Forgetful(StaticCache, kind="forgetful"):
    """A kind that cannot be truncated."""

    def truncate(self, position: int) -> bool:
        return False


class Looping(NativeRunner):
    """Leaves every step to the plain stepper, each of whose calls native code computes."""

    def stepper(self, model: Transformer, batch: Any, cache: Any) -> None:
        return None


class Noisy:
    """Proposes what follows in the first text that begins alike, with another token, or `wrong`, at some places."""

    def __init__(
        self, texts: Sequence[Sequence[int]], seed: int = 0, *, share: float = 0.8, wrong: int | None = None
    ) -> None:
        self.texts, self.dice, self.share, self.wrong = texts, random.Random(seed), share, wrong

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        text = next((text for text in self.texts if list(text[: len(ids)]) == list(ids)), ())
        right = text[len(ids) : len(ids) + count]
        others = [(id + 1) % VOCAB if self.wrong is None else self.wrong for id in right]
        return [id if self.dice.random() < self.share else other for id, other in zip(right, others, strict=True)]


@dataclass
class Path:
    """Two models: `plain` makes the texts, and `fast` has to make the same.

    atol: how far numbers may be apart by rounding; 0: every bit is the same.
    facts: the facts of a session that are the same after each step: see `state_of`.
    guesses: whether `fast` guesses: right tokens of the texts of `plain`, and wrong ones.
    """

    plain: Transformer
    fast: Transformer
    atol: float = 0.0
    facts: tuple[str, ...] = ("tokens",)
    guesses: bool = False

    def same(self, program: Program, *before: Program, how: Options | None = None, share: float = 0.8) -> list[object]:
        """Assert that both models make the same, and return it. The texts of `before` are guessed first."""
        how = Options() if how is None else how
        with recorded() as texts:
            for other in before:
                list(other(copy.deepcopy(self.plain), how))
            theirs = [seen(made, self.facts) for made in program(self.plain, how)]
        seeds = iter(range(10**6))
        guessed: Options = {"speculate": EveryGuess(lambda: Noisy(texts, next(seeds), share=share))}
        ours = [seen(made, self.facts) for made in program(self.fast, {**how, **(guessed if self.guesses else {})})]
        assert len(ours) == len(theirs)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert alike(one, other, self.atol), f"number {number}: {one} instead of {other}"
        return theirs


@contextmanager
def recorded() -> Iterator[list[list[int]]]:
    """Yield a list of the texts that are generated: the lists of their ids, which grow."""
    rows: dict[Row, list[int]] = {}
    texts: list[list[int]] = []
    append = Row.append

    def noting(row: Row, id: int) -> None:
        if row not in rows:
            texts.append(rows.setdefault(row, row.ids))
        append(row, id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "append", noting)
        yield texts


def seen(made: object, facts: Sequence[str]) -> object:
    """Return what a program made as it is now: the facts of a session, anything else as it is."""
    return [state_of(made)[name] for name in facts] if isinstance(made, Session) else made


def state_of(session: Session) -> dict[str, Any]:
    """Return all that a session continues from."""
    layers = session.cache.state(1, session._cached_len) if session._cached_len else []
    stored = [{name: part.tolist() for name, part in layer.items()} for layer in layers]
    logits = None if session.logits is None else session.logits.tolist()
    facts = {"tokens": list(session.tokens), "cached": session._cached_len, "stored": stored, "logits": logits}
    return {**facts, "fed": session.fed, "written": session._written}


def alike(one: Any, other: Any, atol: float) -> bool:
    """Return True if two results are equal, their numbers up to `atol`."""
    if atol and isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= atol
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name], atol) for name in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(alike(*pair, atol) for pair in zip(one, other, strict=True))
    return bool(one == other)


def forwards_of(model: Transformer) -> int:
    """Return how many forwards the model's runner has run."""
    return 0 if model.runner is None else model.runner.forwards


# ---- the paths -------------------------------------------------------------------------------------------------------

ALL_FACTS = ("tokens", "cached", "stored", "logits", "fed", "written")


def cached(kv_cache: str, *, exact: bool = False) -> Path:
    """Return a model with a cache, and the same model with the switch off."""
    args = replace(ARGS, kv_cache=kv_cache, **SIZES)
    plain, fast = (
        tiny_model(args, dtype=torch.float32 if exact else torch.float64).requires_grad_(False) for _ in range(2)
    )
    if exact:
        plain.exact = fast.exact = True
    plain.kv_caching = False
    return Path(plain, fast, 0.0 if exact else 1e-9)


def fast_of(kind: str, kv_cache: str) -> Transformer:
    """Return a model with native code; skip the test if there is no compiler."""
    if native_build.find_compiler() is None:
        pytest.skip("there is no C++ compiler, so there is no native code")
    return twins(kind, replace(ARGS, kv_cache=kv_cache, **SIZES))[1]


def native(kv_cache: str) -> Path:
    """Return a model whose plain steps native code computes, and one whose steps are native."""
    fast = fast_of("fp32", kv_cache)
    plain = copy.deepcopy(fast)
    plain.runner = Looping(FOLDER)
    return Path(plain, fast, facts=ALL_FACTS)


def guessed(kind: str, kv_cache: str = "static") -> Path:
    """Return two models of exact mode or of native code, of which one guesses."""
    if kind == "exact":
        plain, fast = (cached(kv_cache, exact=True).fast for _ in range(2))
    else:
        plain, fast = (fast_of(kind.replace("8-bit activations", "int8"), kv_cache) for _ in range(2))
    for model in (plain, fast) if kind == "8-bit activations" else ():
        for layer in model.modules():
            if isinstance(layer, PackedLinear):
                layer.activations = 8
        make_fast(model, FOLDER)
    return Path(plain, fast, facts=("tokens", "cached", "stored", "logits"), guesses=True)


def graphs(*, kv_caching: bool = True) -> Path:
    """Return a plain model in float64, and one with recorded calls, which run unrecorded without a GPU."""
    device, args = "cuda" if torch.cuda.is_available() else "cpu", replace(ARGS, **SIZES, kv_caching=kv_caching)
    both = [tiny_model(args, dtype=torch.float64).to(device).requires_grad_(False) for _ in "ab"]
    both[1].runner = GraphRunner(WITH_PROMPTS, Taped)
    return Path(*both, atol=1e-9, facts=("tokens", "cached", "stored") if kv_caching else ("tokens",))


PATHS: dict[str, Callable[[], Path]] = {
    **{f"cached {kind}": partial(cached, kind) for kind in ("static", "concat", "paged", "forgetful")},
    "exact": partial(cached, "static", exact=True),
    **{
        f"native {kind}": partial(native, kind)
        for kind in ("static", "int8", "int4", "rotated:k4v3+1", "paged", "adakv:0.25")
    },
    **{
        f"guessed {kind}": partial(guessed, kind)
        for kind in ("exact", "fp32", "int8", "int4 in bf16", "8-bit activations")
    },
    **{f"guessed exact, {kind}": partial(guessed, "exact", kind) for kind in ("paged", "concat")},
    "guessed int8, paged": partial(guessed, "int8", "paged"),
    "graphs": graphs,
    "graphs, uncached": partial(graphs, kv_caching=False),
}
