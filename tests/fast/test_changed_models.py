"""Whatever changes what the plain path computes, at any moment, the fast step computes too, or leaves it to the plain.

Each case is done to a plain model and to its fast twin, in the middle of a text, and both go on.
"""

import copy
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from changes import CHANGES, check_alike, outcome
from fakes import Ids
from generations import GREEDY
from native import ARGS, EVERYTHING, FOLDER, KINDS, VOCAB, model_of, needs_a_compiler, served, twins
from oracles import some_tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama.args import ModelArgs
from llama.fast.choose import make_fast
from llama.fast.fingerprint import Snapshot, check_moment
from llama.fast.native_build import NoNativeCode
from llama.fast.native_description import check_tensor
from llama.fast.native_runner import NativeRunner
from llama.fast.supported import Unsupported
from llama.layers import RowParallelLinear
from llama.model import Transformer

pytestmark = needs_a_compiler
TOKENS = some_tokens(2, 50, vocab_size=VOCAB)


def go_on(plain: Transformer, fast: Transformer, tokens: Tensor, start: int, *, coarse: bool = False) -> bool:
    """Feed both, compare what comes of it, and tell whether the fast step served."""
    before = served(fast)
    theirs, ours = (outcome(lambda model=model: model(tokens, start)) for model in (plain, fast))  # type: ignore[misc]
    check_alike(theirs, ours, coarse=coarse or plain.norm.weight.itemsize == 2)
    return served(fast) > before


@pytest.mark.parametrize(
    "kind", ["fp32", "int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int4", "bf16"))]
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("args", [ARGS, EVERYTHING], ids=["llama", "biases and norms"])
def test_a_change_in_the_middle_of_a_text(args: ModelArgs, change: str, kind: str) -> None:
    plain, fast = twins(kind, args)
    coarse = kind == "bf16"
    assert go_on(plain, fast, TOKENS[:, :30], 0, coarse=coarse)
    assert go_on(plain, fast, TOKENS[:, 30:31], 30)
    for model in (plain, fast):
        with suppress(RuntimeError, ValueError):  # the cache refuses some, as in the plain path
            CHANGES[change](model)
    for start, end in ((31, 32), (32, 33), (33, 40)):
        go_on(plain, fast, TOKENS[:, start:end], start, coarse=coarse)
    for model in (plain, fast):
        model.free_cache()
    go_on(plain, fast, TOKENS[:, :9], 0, coarse=coarse)
    go_on(plain, fast, TOKENS[:, 9:10], 9, coarse=coarse)
    if all(outcome(lambda model=model: setattr(model, "kv_caching", False)) is None for model in (plain, fast)):  # type: ignore[misc]
        go_on(plain, fast, TOKENS[:, :9], 0, coarse=coarse)


@pytest.mark.parametrize(
    "change",
    [
        *("edit_in_place", "point_data_elsewhere", "assign_a_parameter", "load_by_copy", "change_every_eps"),
        *("add_to_a_bias", "take_a_bias", "swap_a_head_norm"),
    ],
)
@pytest.mark.parametrize("args", [ARGS, EVERYTHING], ids=["llama", "biases and norms"])
def test_what_native_code_can_compute_stays_fast(args: ModelArgs, change: str) -> None:
    plain, fast = twins("fp32", args)
    assert go_on(plain, fast, TOKENS[:, :30], 0)
    for model in (plain, fast):
        CHANGES[change](model)
    assert go_on(plain, fast, TOKENS[:, 30:31], 30)


@pytest.mark.parametrize(
    "change", ["take_a_layer", "enlarge_the_head", "shrink_the_head", "prune_all_mlps", "to_float"]
)
def test_another_shape_of_model_is_fast_again_with_its_next_text(change: str) -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        CHANGES[change](model)
    assert go_on(plain, fast, TOKENS[:, :30], 0)
    assert go_on(plain, fast, TOKENS[:, 30:31], 30)


def test_what_changes_no_number_stays_fast() -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        model.register_buffer("steer", torch.zeros(3))
        model.blocks[0].register_buffer("steer", torch.zeros(3))
        model.blocks[0]._compiled_call_impl = None  # as PyTorch has it
        model.generate = model.generate  # type: ignore[method-assign]
    assert go_on(plain, fast, TOKENS, 0)


def test_what_was_undone_is_fast_again() -> None:
    plain, fast = twins("fp32")
    hooks = [model.blocks[0].feed_forward.register_forward_hook(lambda *_: None) for model in (plain, fast)]
    assert not go_on(plain, fast, TOKENS[:, :5], 0)
    for hook in hooks:
        hook.remove()
    assert go_on(plain, fast, TOKENS[:, 5:6], 5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_nobody_changed_is_described_once(kind: str, tied: bool) -> None:
    _, fast = twins(kind, replace(ARGS, tied_head=tied))
    assert isinstance(fast.runner, NativeRunner)
    with torch.inference_mode():
        described = fast.runner.describe(fast)
        fast.generate_tokens([[1, 2], [3]], 5)
        fast.generate_tokens([[1, 2], [3]], 5, kv_caching=False)
        assert fast.runner.describe(fast.with_kv_caching(False)) is described
        fast(TOKENS)
        fast.kv_caching = False
        fast(TOKENS)
        assert fast.runner.describe(fast) is described


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("whose", ["the twin's", "the original's"])
def test_a_change_of_one_of_two_that_differ_in_the_switch(change: str, whose: str) -> None:
    """Some reach the other, and some do not; the fast step computes what each one is."""
    pairs = [(model, model.with_kv_caching(False)) for model in twins("fp32")]
    both = list(zip(*pairs, strict=True))  # the originals, and the twins
    assert all(go_on(plain, fast, TOKENS[:, :9], 0) for plain, fast in both)
    for original, twin in pairs:
        with suppress(RuntimeError, ValueError):
            CHANGES[change](twin if whose == "the twin's" else original)
    for plain, fast in both:
        go_on(plain, fast, TOKENS[:, :9], 0)


def as_a_buffer(norm: Any, weight: Tensor) -> None:
    del norm.weight
    norm.register_buffer("weight", weight)


def as_an_attribute(norm: Any, weight: Tensor) -> None:
    del norm.weight
    norm.weight = weight


@pytest.mark.parametrize("keep", [as_a_buffer, as_an_attribute])
def test_a_weight_that_is_no_parameter_may_be_replaced_too(keep: Callable[[Any, Tensor], None]) -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        keep(model.norm, model.norm.weight.detach() * 2)
    go_on(plain, fast, TOKENS[:, :9], 0)
    for model in (plain, fast):
        model.norm.weight = model.norm.weight.flip(0) * 2  # type: ignore[assignment]
    go_on(plain, fast, TOKENS[:, 9:20], 9)


def test_a_head_that_was_tied_and_is_not_any_more_is_seen() -> None:
    plain, fast = twins("fp32", replace(ARGS, tied_head=True))
    assert go_on(plain, fast, TOKENS[:, :30], 0)
    for model in (plain, fast):
        model.output.weight = nn.Parameter(model.output.weight.detach().flip(0), requires_grad=False)
    assert go_on(plain, fast, TOKENS[:, 30:31], 30)


# ---- the moment ------------------------------------------------------------------------------------------------------


class Watcher(TorchFunctionMode):
    """Makes every linear product twice as large, from outside of the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func in (F.scaled_dot_product_attention,) else out


class Counter(TorchDispatchMode):
    """Sees every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def hook_for_all(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def louder(module: nn.Module, given: Any, out: Any) -> Any:
    return 2 * out if isinstance(module, RowParallelLinear) else None


MOMENTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "function mode": Watcher,
    "dispatch mode": Counter,
    "hook for all modules": lambda: hook_for_all(nn.modules.module.register_module_forward_hook, louder),
    "pre-hook for all modules": lambda: hook_for_all(
        nn.modules.module.register_module_forward_pre_hook, lambda module, given: None
    ),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "forward-mode derivatives": torch.autograd.forward_ad.dual_level,
    "gradients wanted": torch.enable_grad,
}
SERVED = {
    *("default dtype bfloat16", "default dtype float64", "default device meta", "default device cpu"),
    *("inference mode", "no gradients", "gradients wanted"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_moment_in_the_middle_of_a_text(moment: str) -> None:
    plain, fast = twins("fp32")
    coarse = moment == "autocast"
    assert go_on(plain, fast, TOKENS[:, :30], 0)
    with MOMENTS[moment]():
        assert go_on(plain, fast, TOKENS[:, 30:31], 30, coarse=coarse) == (moment in SERVED)
        assert go_on(plain, fast, TOKENS[:, 31:40], 31, coarse=coarse) == (moment in SERVED)
    assert go_on(plain, fast, TOKENS[:, 40:41], 40, coarse=coarse)
    for model in (plain, fast):
        model.kv_caching = False
    with MOMENTS[moment]():
        assert go_on(plain, fast, TOKENS[:, :9], 0, coarse=coarse) == (moment in SERVED)
    assert go_on(plain, fast, TOKENS[:, :9], 0)


@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_generation_in_a_moment(moment: str, kv_caching: bool) -> None:
    """What declines its prompt declines its steps; texts of before have left addresses that hold no more."""
    plain, fast = twins("fp32")
    prompts, how = [[1, 2, 3], [7] * 40], {"temperature": 0.0, "kv_caching": kv_caching}
    for _ in range(2):
        assert fast.generate_tokens(prompts, 12, **how) == plain.generate_tokens(prompts, 12, **how)
        before = served(fast)
        with MOMENTS[moment]():
            made = []
            for model in (plain, fast):
                session = model.session(Ids())  # type: ignore[arg-type]
                session.feed([3, 1, 4])
                texts = model.generate_tokens(prompts, 12, **how), session.generate(9, temperature=0.0)["ids"]
                made.append(texts)
            assert made[0] == made[1]
            assert (served(fast) > before) == (moment in SERVED)


TRANSFORMS: dict[str, Callable[[Transformer], Any]] = {
    "torch.func": lambda model: torch.func.grad(lambda scale: (scale * model(TOKENS)).sum())(torch.ones(())),
    "torch.compile": lambda model: torch.compile(model, backend="eager")(TOKENS),
    "a compiled module": lambda model: (model.blocks[0].feed_forward.compile(backend="eager"), model(TOKENS))[1],
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_transforms_a_computation_gets_that_of_the_modules(transform: str) -> None:
    plain, fast = twins("fp32")
    assert torch.equal(TRANSFORMS[transform](fast), TRANSFORMS[transform](plain))
    assert served(fast) == 0
    torch.compiler.reset()


def test_the_steps_of_a_compiled_model_are_not_taken_ahead() -> None:
    plain, fast = twins("fp32")
    fast.compile(backend="eager")
    assert fast.generate_tokens([[1, 2, 3]], 5, **GREEDY) == plain.generate_tokens([[1, 2, 3]], 5, **GREEDY)
    assert served(fast) == 0
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is:DeprecationWarning")
def test_tracing_is_seen() -> None:
    def traced(x: Tensor) -> Tensor:
        with pytest.raises(Unsupported, match="being traced"):
            check_moment()
        return x

    torch.jit.trace(traced, torch.ones(1), check_trace=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_a_fast_model_may_be_made_under_any_default_device_and_dtype(default: str) -> None:
    plain, fast = model_of("fp32"), model_of("fp32")
    with default_device(default), default_dtype(torch.float64):
        make_fast(fast, FOLDER)
    assert go_on(plain, fast, TOKENS, 0)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def misaligned(tokens: Tensor) -> Tensor:
    room = torch.zeros(tokens.nbytes + 1, dtype=torch.uint8)
    moved = torch.frombuffer(room.numpy(), dtype=tokens.dtype, count=tokens.numel(), offset=1).view(tokens.shape)
    return moved.copy_(tokens)


TOKEN_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "int32": Tensor.int,
    "int16": Tensor.short,
    "uint8": Tensor.byte,
    "float32": Tensor.float,
    "bool": Tensor.bool,
    "strided": lambda tokens: tokens.t().contiguous().t(),
    "expanded": lambda tokens: tokens[:1].expand(2, -1),
    "reversed by strides": lambda tokens: torch.stack([tokens, tokens], -1)[..., 0],
    "misaligned": misaligned,
    "negative view": lambda tokens: torch._neg_view(-tokens),
    "parameter": lambda tokens: nn.Parameter(tokens, requires_grad=False),
    "meta": lambda tokens: tokens.to("meta"),
}


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_tokens_of_any_kind_give_what_they_give_without_the_fast_step(kind: str) -> None:
    plain, fast = twins("fp32")
    tokens = TOKEN_KINDS[kind](TOKENS)
    go_on(plain, fast, tokens, 0)
    plain.kv_caching = fast.kv_caching = False
    go_on(plain, fast, tokens, 0)


# ---- copies, memory, words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_in_the_middle_of_a_stream_serves_its_owner(twin: Callable[[Transformer], Transformer]) -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        with model.stream(Ids(), [[1, 2, 3]], 8, temperature=0.0) as stream:  # type: ignore[arg-type]
            next(stream)
            other = twin(model)
            assert other.cache is None
            assert other.generate_tokens([[1, 2, 3]], 8, temperature=0.0)[0] == [expected(model)]
        assert model.generate_tokens([[1, 2, 3]], 8, temperature=0.0)[0] == [expected(model)]


@pytest.mark.parametrize("exact", [False, True])
def test_a_pickled_model_is_plain_where_no_compiler_is_unless_its_bits_are_promised(
    exact: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins("fp32")
    fast.exact = exact
    assert fast.runner is not None
    fast.runner._folder = tmp_path  # type: ignore[attr-defined]  # where nothing is compiled yet
    pickled = pickle.dumps(fast)
    monkeypatch.setenv("CXX", "no-such-compiler")
    if exact:
        with pytest.raises(NoNativeCode):
            pickle.loads(pickled)
        return
    assert torch.equal(pickle.loads(pickled)(TOKENS), plain(TOKENS))
    assert "the plain path runs instead" in caplog.text


def expected(model: Transformer) -> list[int]:
    return twin_of(model).generate_tokens([[1, 2, 3]], 8, temperature=0.0)[0][0]


def twin_of(model: Transformer) -> Transformer:
    other = copy.deepcopy(model)
    other.runner = None
    return other


def test_replaced_weights_are_not_held() -> None:
    _, fast = twins("fp32")
    fast(TOKENS)
    old = weakref.ref(fast.norm.weight.untyped_storage()), weakref.ref(fast.blocks[0].attention.wq.weight)
    fast.load_state_dict({name: weight.clone() for name, weight in fast.state_dict().items()}, assign=True)
    assert [ref() for ref in old] == [None, None]


def test_a_model_that_is_dropped_is_gone_at_once() -> None:
    _, fast = twins("fp32")
    fast(TOKENS)
    weights, model = weakref.ref(fast.norm.weight), weakref.ref(fast)
    del fast
    assert (weights(), model()) == (None, None)


def test_what_is_declined_is_said_in_one_line_and_once(caplog: pytest.LogCaptureFixture) -> None:
    _, fast = twins("fp32")
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fast(TOKENS)
            fast(TOKENS)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["fast: autocast is on; the plain path runs instead"]


def test_every_step_of_a_generation_looks_again() -> None:
    """What a caller does to the model between two tokens counts from the next token on."""
    plain, fast = twins("fp32")
    texts = []
    for model in (plain, fast):
        with model.stream(Ids(), [[1, 2, 3]], 20, temperature=0.0) as stream, ExitStack() as stack:  # type: ignore[arg-type]
            for made, _ in enumerate(stream):
                if made == 5:
                    model.norm.weight.data = model.norm.weight.data.flip(0)
                if made == 9:
                    hook = model.blocks[1].attention.register_forward_hook(lambda _, __, out: -out)
                    stack.callback(hook.remove)
        texts.append(stream.results[0]["ids"])
    assert texts[0] == texts[1]
    assert 9 <= served(fast) < 20


def test_within_a_generation_a_model_is_looked_at_only_where_other_code_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = twins("fp32")
    looks: list[int] = []
    holds = Snapshot.matches
    monkeypatch.setattr(Snapshot, "matches", lambda *given: looks.append(1) or holds(*given))  # type: ignore[func-returns-value]

    def looks_of(act: Callable[[], Any]) -> int:
        looks.clear()
        act()
        return len(looks)

    prompts, how = [[1, 2, 3], [4, 5]], {"temperature": 0.0}
    fast.generate_tokens(prompts, 10, **how)  # type: ignore[arg-type]
    assert looks_of(lambda: fast.generate_tokens(prompts, 10, **how)) == 2  # type: ignore[arg-type]
    assert looks_of(lambda: fast.generate(Ids(), prompts, 10, **how)) == 2  # the prompt, and the first step  # type: ignore[arg-type]
    assert looks_of(lambda: list(fast.stream(Ids(), prompts, 10, **how))) == 10  # type: ignore[arg-type]
    assert looks_of(lambda: fast.generate_tokens(prompts, 10, on_step=lambda step: None, **how)) == 10  # type: ignore[arg-type]
    hook = fast.register_forward_hook(lambda *_: None)
    assert looks_of(lambda: fast.generate_tokens(prompts, 10, **how)) == 10  # type: ignore[arg-type]
    hook.remove()
    assert looks_of(lambda: [fast(TOKENS[:, pos : pos + 1], pos) for pos in range(5)]) >= 5


@pytest.mark.parametrize("way", ["on_step", "hook", "stream"])
def test_code_that_runs_within_a_generation_may_change_the_model(way: str) -> None:
    texts = []
    plain, fast = twins("fp32")
    for model in (plain, fast):
        steps: list[int] = []

        def change(*_: object, model: Transformer = model, steps: list[int] = steps) -> None:
            steps.append(1)
            if len(steps) == 4:
                model.blocks[0].attention.wo.weight.data = -model.blocks[0].attention.wo.weight.data
            if len(steps) == 7:
                model.blocks[0].ffn_norm.eps = 10.0

        if way == "on_step":
            texts.append(model.generate_tokens([[1, 2, 3]], 12, temperature=0.0, on_step=change)[0])
        elif way == "hook":
            with hook_for_all(model.register_forward_pre_hook, change):
                texts.append(model.generate_tokens([[1, 2, 3]], 12, temperature=0.0)[0])
        else:
            stream = model.stream(Ids(), [[1, 2, 3]], 12, temperature=0.0)  # type: ignore[arg-type]
            for _ in stream:
                change()
            texts.append([stream.results[0]["ids"]])
        assert len(steps) == 12
    assert texts[0] == texts[1]
    assert 0 < served(fast) < 12


class Labelled(Tensor):
    """A subclass, whose operations may be anything."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 8, device="meta"),
        torch.ones(4, 8).to_sparse(),
        torch.ones(4, 8).as_subclass(Labelled),
        torch.ones(4, 8, dtype=torch.float64),
        torch.ones(8, 4),
        torch.ones(8, 4).t(),
    ],
    ids=["on no device", "sparse", "a subclass", "another dtype", "another shape", "strided"],
)
def test_what_native_code_would_read_for_something_else_is_refused(tensor: Tensor) -> None:
    assert check_tensor(torch.ones(4, 8), (4, 8), torch.float32)
    with pytest.raises(Unsupported):
        check_tensor(tensor, (4, 8), torch.float32)
