"""After any change of a model, at any moment, native code computes the changed model, or the plain path runs.

Each change is made to a plain model and to its fast twin, in the middle of a text, and both continue.
"""

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from changes import CHANGES, check_alike, outcome
from fakes import Ids
from generations import GREEDY
from native import ARGS, EVERYTHING, FOLDER, VOCAB, model_of, needs_a_compiler, served, twins
from tables import cases
from tiny import some_tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama.fast.choose import make_fast
from llama.fast.fingerprint import Snapshot, check_moment
from llama.fast.native_build import NoNativeCode
from llama.fast.native_model import check_tensor
from llama.fast.native_runner import NativeRunner
from llama.fast.supported import Unsupported
from llama.layers import RowParallelLinear
from llama.model import Transformer

pytestmark = needs_a_compiler
TOKENS = some_tokens(2, 50, vocab_size=VOCAB)


def go_on(plain: Transformer, fast: Transformer, tokens: Tensor, start: int, *, coarse: bool = False) -> bool:
    """Feed both, compare the results, and return True if native code ran."""
    before = served(fast)
    theirs, ours = (outcome(lambda model=model: model(tokens, start)) for model in (plain, fast))  # type: ignore[misc]
    check_alike(theirs, ours, coarse=coarse or plain.norm.weight.itemsize == 2)
    return served(fast) > before


# Changes after which native code continues the text, and changes after which it runs the next text.
CONTINUED = {
    *("edit_in_place", "point_data_elsewhere", "assign_a_parameter", "load_by_copy", "change_every_eps"),
    *("add_to_a_bias", "take_a_bias", "swap_a_head_norm"),
}
FAST_AGAIN = {*CONTINUED, "take_a_layer", "enlarge_the_head", "shrink_the_head", "prune_all_mlps", "to_float"}


# Changes that a snapshot need not see: of numbers, which a step reads at every call, of the switch, and of a cache.
UNSEEN = {
    *("edit_in_place", "load_by_copy", "add_to_a_bias", "to_float", "unlike_the_others_uncached"),
    *("replace_a_method_of_a_cache", "keep_keys_unrotated", "halve_what_is_kept", "put_a_cache_of_ones"),
}
FEW = ("add_to_a_bias", "take_a_bias", "load_by_assignment", "use_a_layer_twice", "put_a_cache_of_ones", "halve")


def test_a_snapshot_sees_every_change_of_what_a_step_relies_on() -> None:
    unseen = set()
    for name, change in CHANGES.items():
        model = model_of("fp32", EVERYTHING)
        model(TOKENS[:, :3])
        before = Snapshot(model)
        with suppress(RuntimeError, ValueError):  # the cache rejects some changes
            change(model)
        if before.matches(model):
            unseen.add(name)
    assert unseen == UNSEEN


@pytest.mark.parametrize("change", cases(CHANGES, *FEW))
def test_a_change_in_the_middle_of_a_text(change: str) -> None:
    plain, fast = twins("fp32", EVERYTHING)
    assert go_on(plain, fast, TOKENS[:, :30], 0)
    for model in (plain, fast):
        with suppress(RuntimeError, ValueError):
            CHANGES[change](model)
    for start, end in ((30, 31), (31, 40)):
        assert go_on(plain, fast, TOKENS[:, start:end], start) or change not in CONTINUED
    for model in (plain, fast):
        model.free_cache()
    for start, end in ((0, 9), (9, 10)):
        assert go_on(plain, fast, TOKENS[:, start:end], start) or change not in FAST_AGAIN
    if all(outcome(lambda model=model: setattr(model, "kv_caching", False)) is None for model in (plain, fast)):  # type: ignore[misc]
        go_on(plain, fast, TOKENS[:, :9], 0)


def test_changes_that_no_result_depends_on_leave_the_model_fast() -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        model.register_buffer("steer", torch.zeros(3))
        model.blocks[0].register_buffer("steer", torch.zeros(3))
        model.blocks[0]._compiled_call_impl = None  # PyTorch's own value
        model.generate = model.generate  # type: ignore[method-assign]
    assert go_on(plain, fast, TOKENS, 0)


def test_a_change_that_was_undone_is_fast_again() -> None:
    plain, fast = twins("fp32")
    hooks = [model.blocks[0].feed_forward.register_forward_hook(lambda *_: None) for model in (plain, fast)]
    assert not go_on(plain, fast, TOKENS[:, :5], 0)
    for hook in hooks:
        hook.remove()
    assert go_on(plain, fast, TOKENS[:, 5:6], 5)


@pytest.mark.parametrize(("kind", "tied"), [("fp32", True), ("int8", False)])
def test_an_unchanged_model_is_described_once(kind: str, tied: bool) -> None:
    _, fast = twins(kind, replace(ARGS, tied_head=tied))
    assert isinstance(fast.runner, NativeRunner)
    with torch.inference_mode():
        described = fast.runner.describe(fast)
        fast.generate_tokens([[1, 2], [3]], 5)
        fast(TOKENS)
        fast.kv_caching = False
        fast(TOKENS)
        assert fast.runner.describe(fast) is described


@pytest.mark.parametrize("whose", ["the twin's", "the original's"])
@pytest.mark.parametrize("change", ["edit_in_place", "assign_a_parameter", "hook_that_changes", "take_a_layer"])
def test_a_change_of_one_of_two_that_differ_in_the_switch(change: str, whose: str) -> None:
    """Some changes reach the other model too; the fast step computes each of them."""
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
def test_a_weight_that_is_not_a_parameter_may_be_replaced(keep: Callable[[Any, Tensor], None]) -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        keep(model.norm, model.norm.weight.detach() * 2)
    go_on(plain, fast, TOKENS[:, :9], 0)
    for model in (plain, fast):
        model.norm.weight = model.norm.weight.flip(0) * 2  # type: ignore[assignment]
    go_on(plain, fast, TOKENS[:, 9:20], 9)


def test_a_head_that_is_no_longer_tied_is_detected() -> None:
    plain, fast = twins("fp32", replace(ARGS, tied_head=True))
    assert go_on(plain, fast, TOKENS[:, :30], 0)
    for model in (plain, fast):
        model.output.weight = nn.Parameter(model.output.weight.detach().flip(0), requires_grad=False)
    assert go_on(plain, fast, TOKENS[:, 30:31], 30)


# ---- the moment ------------------------------------------------------------------------------------------------------


class Louder(TorchFunctionMode):
    """Doubles the output of attention from outside of the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.scaled_dot_product_attention else out


class Counter(TorchDispatchMode):
    """Intercepts every operation."""

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
    "default device meta": lambda: torch.device("meta"),
    "default device cpu": lambda: torch.device("cpu"),
    "function mode": Louder,
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


@pytest.mark.parametrize("moment", cases(MOMENTS, "autocast", "default device meta", "hook for all modules"))
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


@pytest.mark.parametrize("moment", cases(MOMENTS, "function mode", "gradients wanted"))
def test_a_generation_in_a_moment(moment: str) -> None:
    """Native code runs neither its prompt nor its steps, or both; also after texts whose memory is freed."""
    plain, fast = twins("fp32")
    prompts = [[1, 2, 3], [7] * 40]
    for _ in range(2):
        assert fast.generate_tokens(prompts, 6, **GREEDY) == plain.generate_tokens(prompts, 6, **GREEDY)
        before = served(fast)
        with MOMENTS[moment]():
            made = []
            for model in (plain, fast):
                session = model.session(Ids())  # type: ignore[arg-type]
                session.feed([3, 1, 4])
                made.append((model.generate_tokens(prompts, 6, **GREEDY), session.generate(5, **GREEDY)["ids"]))
            assert made[0] == made[1]
            assert (served(fast) > before) == (moment in SERVED)


TRANSFORMS: dict[str, Callable[[Transformer], Any]] = {
    "torch.func": lambda model: torch.func.grad(lambda scale: (scale * model(TOKENS)).sum())(torch.ones(())),
    "torch.compile": lambda model: torch.compile(model, backend="eager")(TOKENS),
    "a compiled module": lambda model: (model.blocks[0].feed_forward.compile(backend="eager"), model(TOKENS))[1],
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("transform", cases(TRANSFORMS, "torch.func"))
def test_transformations_use_the_modules(transform: str) -> None:
    plain, fast = twins("fp32", replace(ARGS, n_layers=1))
    assert torch.equal(TRANSFORMS[transform](fast), TRANSFORMS[transform](plain))
    assert served(fast) == 0
    torch.compiler.reset()


@pytest.mark.slow
def test_the_steps_of_a_compiled_model_are_not_native() -> None:
    plain, fast = twins("fp32", replace(ARGS, n_layers=1))
    fast.compile(backend="eager")
    assert fast.generate_tokens([[1, 2, 3]], 3, **GREEDY) == plain.generate_tokens([[1, 2, 3]], 3, **GREEDY)
    assert served(fast) == 0
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is:DeprecationWarning")
def test_tracing_is_detected() -> None:
    def traced(x: Tensor) -> Tensor:
        with pytest.raises(Unsupported, match="being traced"):
            check_moment()
        return x

    torch.jit.trace(traced, torch.ones(1), check_trace=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_a_fast_model_may_be_made_under_any_default_device_and_dtype(default: str) -> None:
    plain, fast = model_of("fp32"), model_of("fp32")
    with torch.device(default), default_dtype(torch.float64):
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


def test_tokens_of_any_kind_give_the_plain_result() -> None:
    plain, fast = twins("fp32")
    for kind in TOKEN_KINDS.values():
        go_on(plain, fast, kind(TOKENS), 0)


# ---- copies, memory, log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_in_the_middle_of_a_stream_has_no_text(copied: Callable[[Transformer], Transformer]) -> None:
    plain, fast = twins("fp32")
    expected = plain.generate_tokens([[1, 2, 3]], 8, **GREEDY)
    with fast.stream(Ids(), [[1, 2, 3]], 8, **GREEDY) as stream:  # type: ignore[arg-type]
        next(stream)
        other = copied(fast)
        assert other.cache is None
        assert other.generate_tokens([[1, 2, 3]], 8, **GREEDY) == expected
    assert fast.generate_tokens([[1, 2, 3]], 8, **GREEDY) == expected
    fast.norm.weight.zero_()  # the copy has its own weights
    assert other.generate_tokens([[1, 2, 3]], 8, **GREEDY) == expected
    assert served(other) > 0


@pytest.mark.parametrize("exact", [False, True])
def test_a_pickled_model_is_plain_without_a_compiler_unless_it_is_exact(
    exact: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins("fp32")
    fast.exact = exact
    assert fast.runner is not None
    fast.runner._folder = tmp_path  # type: ignore[attr-defined]  # without compiled code
    pickled = pickle.dumps(fast)
    monkeypatch.setenv("CXX", "no-such-compiler")
    if exact:
        with pytest.raises(NoNativeCode):
            pickle.loads(pickled)
        return
    assert torch.equal(pickle.loads(pickled)(TOKENS), plain(TOKENS))
    assert "the plain path runs instead" in caplog.text


def test_replaced_weights_and_dropped_models_are_freed_at_once() -> None:
    _, fast = twins("fp32")
    fast(TOKENS)
    old = weakref.ref(fast.norm.weight.untyped_storage()), weakref.ref(fast.blocks[0].attention.wq.weight)
    fast.load_state_dict({name: weight.clone() for name, weight in fast.state_dict().items()}, assign=True)
    assert [ref() for ref in old] == [None, None]
    fast(TOKENS)
    weights, model = weakref.ref(fast.norm.weight), weakref.ref(fast)
    del fast
    assert (weights(), model()) == (None, None)


def test_within_a_generation_a_model_is_compared_only_after_other_code_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = twins("fp32")
    compared: list[int] = []
    matches = Snapshot.matches
    monkeypatch.setattr(Snapshot, "matches", lambda *given: compared.append(1) or matches(*given))  # type: ignore[func-returns-value]

    def comparisons(act: Callable[[], Any]) -> int:
        compared.clear()
        act()
        return len(compared)

    prompts = [[1, 2, 3], [4, 5]]
    fast.generate_tokens(prompts, 10, **GREEDY)
    assert comparisons(lambda: fast.generate_tokens(prompts, 10, **GREEDY)) == 2  # the prompt, and the first step
    assert comparisons(lambda: fast.generate(Ids(), prompts, 10, **GREEDY)) == 2  # type: ignore[arg-type]
    assert comparisons(lambda: list(fast.stream(Ids(), prompts, 10, **GREEDY))) == 10  # type: ignore[arg-type]
    assert comparisons(lambda: fast.generate_tokens(prompts, 10, on_step=lambda step: None, **GREEDY)) == 10
    hook = fast.register_forward_hook(lambda *_: None)
    assert comparisons(lambda: fast.generate_tokens(prompts, 10, **GREEDY)) == 10
    hook.remove()
    assert comparisons(lambda: [fast(TOKENS[:, pos : pos + 1], pos) for pos in range(5)]) >= 5


class Labelled(Tensor):
    """A subclass, whose operations may differ."""


def test_native_code_reads_only_tensors_of_the_expected_layout() -> None:
    assert check_tensor(torch.ones(4, 8), (4, 8), torch.float32)
    for tensor in (
        torch.ones(4, 8, device="meta"),
        torch.ones(4, 8).to_sparse(),
        torch.ones(4, 8).as_subclass(Labelled),
        torch.ones(4, 8, dtype=torch.float64),
        torch.ones(8, 4),
        torch.ones(8, 4).t(),
        misaligned(torch.ones(4, 8)),
    ):
        with pytest.raises(Unsupported):
            check_tensor(tensor, (4, 8), torch.float32)
