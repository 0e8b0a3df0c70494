"""A random sequence of changes and calls gives the same results on a plain model and on its fast twin."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from changes import CHANGES, REFUSALS, check_alike, outcome
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from native import KINDS, needs_a_compiler, served, twins
from test_changed_models import MOMENTS, TOKEN_KINDS
from tiny import some_tokens, tiny_args
from torch import Tensor, nn

from llama.model import Transformer

pytestmark = needs_a_compiler
VOCAB = 37
LONGEST = 60
# Changes after which a later call has no defined result: the plain path reads memory that was never written, and a copy
# of a model by PyTorch ends the process if a weight has no memory.
UNDEFINED = {"put_a_cache_of_ones", "take_the_memory_of_a_matrix"}
COUNTS = Counter[str]()  # forwards by their outcome


class ChangingModel(RuleBasedStateMachine):
    """Two models with the same calls and changes: `plain` runs its modules, `fast` native code where it can."""

    kinds: tuple[str, ...] = ("fp32", "int8")  # of weights; each is a library to compile

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[tuple[Any, Any]] = []

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        heads = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
        args = tiny_args(
            dim=32 * data.draw(st.integers(1, 2)),
            n_layers=data.draw(st.integers(1, 3)),
            n_heads=heads[0],
            n_kv_heads=heads[1],
            head_dim=data.draw(st.sampled_from([32, 64])),
            multiple_of=32,
            vocab_size=VOCAB,
            tied_head=data.draw(st.booleans()),
            max_seq_len=LONGEST,
            kv_caching=data.draw(st.booleans()),
            kv_cache=data.draw(st.sampled_from(["static", "paged"])),  # after one step, quantised codes may differ
        )
        self.plain, self.fast = twins(kind, args)
        self.coarse = "bf16" in kind
        self.rows, self.length = 1, 0

    def both(self, act: Callable[[Transformer], object]) -> None:
        """Do the same to both models: both succeed, or both raise the same class of error."""

        def outcome_of(model: Transformer) -> object:
            try:
                act(model)
            except REFUSALS as error:
                return type(error)
            return None

        assert outcome_of(self.plain) is outcome_of(self.fast)

    def feed(self, tokens: Tensor, start: int | list[int], **how: Any) -> bool:
        """Feed both and compare; return True if they computed."""
        self.coarse |= any(weight.dtype in (torch.float16, torch.bfloat16) for weight in (self.plain.norm.weight,))
        before = served(self.fast)
        theirs, ours = (outcome(lambda model=model: model(tokens, start, **how)) for model in (self.plain, self.fast))  # type: ignore[misc]
        if isinstance(theirs, Tensor) and not theirs.isfinite().all():
            assert isinstance(ours, Tensor)  # past the range of float16, or rounded differently in bfloat16
            self.start_again()
            return False
        check_alike(theirs, ours, coarse=self.coarse)
        COUNTS[("served" if served(self.fast) > before else "declined") if isinstance(ours, Tensor) else "refused"] += 1
        return isinstance(theirs, Tensor)

    def start_again(self) -> None:
        self.length = 0
        self.both(lambda model: model.free_cache())

    # ---- texts -------------------------------------------------------------------------------------------------------

    @rule(rows=st.integers(1, 3), width=st.integers(1, 20), seed=st.integers(0, 9), last=st.booleans())
    def begin_a_text(self, rows: int, width: int, seed: int, last: bool) -> None:
        self.rows = rows
        fed = self.feed(some_tokens(rows, width, vocab_size=VOCAB, seed=seed), 0, logits="last" if last else "all")
        self.length = width if fed else 0

    @rule(width=st.integers(1, 9), seed=st.integers(0, 9), threads=st.integers(1, 3))
    def go_on(self, width: int, seed: int, threads: int) -> None:
        if not 0 < self.length <= LONGEST - width:
            return
        torch.set_num_threads(threads)
        try:
            fed = self.feed(some_tokens(self.rows, width, vocab_size=VOCAB, seed=seed), self.length)
        finally:
            torch.set_num_threads(1)
        if fed:
            self.length += width
        else:
            self.start_again()

    @rule(seed=st.integers(0, 9), back=st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def step_at_places_of_their_own(self, seed: int, back: list[int]) -> None:
        if not 0 < self.length < LONGEST:
            return
        starts = [max(0, self.length - less) for less in back[: self.rows]]
        self.feed(some_tokens(self.rows, 1, vocab_size=VOCAB, seed=seed), starts)
        self.start_again()

    @rule(moment=st.sampled_from(sorted(MOMENTS)), width=st.integers(1, 5))
    def a_moment(self, moment: str, width: int) -> None:
        if self.length > LONGEST - width:
            return
        with ExitStack() as stack:
            stack.enter_context(MOMENTS[moment]())
            self.coarse |= moment == "autocast"
            fed = self.feed(some_tokens(self.rows, width, vocab_size=VOCAB), self.length)
        self.length += width
        if not fed:
            self.start_again()

    @rule(kind=st.sampled_from(sorted(TOKEN_KINDS)))
    def tokens_of_a_kind(self, kind: str) -> None:
        self.rows = 2
        self.feed(TOKEN_KINDS[kind](some_tokens(2, 5, vocab_size=VOCAB)), 0)
        self.start_again()

    @rule(prompt=st.integers(1, 6), caching=st.sampled_from([None, True, False]))
    def generate(self, prompt: int, caching: bool | None) -> None:
        texts = [some_tokens(1, prompt, vocab_size=VOCAB)[0].tolist(), [3, 1]]
        self.both(lambda model: model.generate_tokens(texts, 3, temperature=0.0, kv_caching=caching))

    # ---- changes -----------------------------------------------------------------------------------------------------

    @rule(change=st.sampled_from(sorted(CHANGES.keys() - UNDEFINED)))
    def change(self, change: str) -> None:
        self.both(CHANGES[change])

    @rule(place=st.integers(0, 200), pre=st.booleans())
    def hook(self, place: int, pre: bool) -> None:
        def louder(module: nn.Module, given: Any, out: Any = None) -> Any:
            return None if pre or not isinstance(out, Tensor) else 1.5 * out

        handles = []
        for model in (self.plain, self.fast):
            module = list(model.modules())[place % len(list(model.modules()))]
            handles.append(module.register_forward_pre_hook(louder) if pre else module.register_forward_hook(louder))
        self.hooks.append((handles[0], handles[1]))

    @rule()
    def unhook(self) -> None:
        while self.hooks:
            for handle in self.hooks.pop():
                handle.remove()

    @rule(place=st.integers(0, 200), factor=st.sampled_from([0.5, 1.5]), how=st.sampled_from(["mul", "data", "assign"]))
    def edit_a_weight(self, place: int, factor: float, how: str) -> None:
        def edit(model: Transformer) -> None:
            names = [name for name, weight in model.named_parameters() if weight.is_floating_point()]
            owner, _, attribute = names[place % len(names)].rpartition(".")
            module = model.get_submodule(owner)
            weight = getattr(module, attribute)
            with torch.no_grad():
                if how == "mul":
                    weight.mul_(factor)
                elif how == "data":
                    weight.data = weight.data * factor
                else:
                    setattr(module, attribute, nn.Parameter(weight.detach() * factor, requires_grad=False))

        self.both(edit)

    @rule(place=st.integers(0, 200), grad=st.booleans())
    def freeze(self, place: int, grad: bool) -> None:
        def set_grad(model: Transformer) -> None:
            weights = [weight for weight in model.parameters() if weight.is_floating_point()]
            weights[place % len(weights)].requires_grad_(grad)

        self.both(set_grad)

    @rule(value=st.booleans())
    def switch(self, value: bool) -> None:
        self.both(lambda model: setattr(model, "kv_caching", value))
        self.start_again()

    @rule(rows=st.integers(1, 3), length=st.integers(1, LONGEST))
    def reserve(self, rows: int, length: int) -> None:
        self.both(lambda model: None if model.cache is None else model.cache.reserve(rows, length))
        self.length = 0

    @rule(pickled=st.booleans())
    def copy(self, pickled: bool) -> None:
        try:
            twins = [pickle.loads(pickle.dumps(m)) if pickled else copy.deepcopy(m) for m in (self.plain, self.fast)]
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
            return  # local functions as hooks and methods, and weights that record a gradient
        self.plain, self.fast = twins
        self.hooks.clear()
        self.length = 0  # a copy has no text


class ChangingModelOfEveryKind(ChangingModel):
    kinds = KINDS


@pytest.mark.parametrize(
    ("machine", "examples"), [(ChangingModel, 8), pytest.param(ChangingModelOfEveryKind, 30, marks=pytest.mark.slow)]
)
def test_a_fast_model_goes_through_anything_that_a_plain_one_does(
    machine: type[ChangingModel], examples: int, request: pytest.FixtureRequest
) -> None:
    long = request.config.getoption("--long")
    COUNTS.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=5000 if long else examples,
            stateful_step_count=20,
            deadline=None,
            derandomize=not long,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(COUNTS))
    assert COUNTS["served"] > COUNTS.total() / 5  # else little was compared
    assert COUNTS["declined"] > COUNTS.total() / 20
