"""Run a submission in a process of its own, and record facts, without a verdict.

    python -P probe.py TREE FACTS LIMITS        (the signature of the facts is read from standard input)

Most facts come from a model whose attention shows the tokens that it attends to: token t has the value e_t, so a
weighted sum of values names the tokens and their weights. It is read at the input of `wo`, which every solution uses.
Run on our own sources it gives the right facts. Knows the interface of the task; does not know mistakes
(course/diagnose.py). It sets its own limits first. Torch and the submission are imported in functions, because the
diagnosis reads the sizes below in a process without them. A file of course/trials/ replaces the experiments for another
exercise; with "versions" behind it, versions of the answer with a mistake are tried, too.
"""

import gc
import json
import operator
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from llama.kv_cache import Cache
    from llama.model import Transformer
    from llama.request import Step

# The sizes of the spelling model: tokens of two rows of twelve, of a second text, and of a third one.
VOCAB, LAYERS, HEADS, KV_HEADS = 48, 2, 6, 2
KEY_AT = LAYERS * VOCAB  # the two numbers of a head for keys and queries, after those of the values
HEAD_DIM = KEY_AT + 2
MAX_SEQ_LEN, MAX_ROWS, LENGTH = 32, 4, 12
FIRST, OTHER, TURN = 0, 24, 40  # the first ids of the three texts
THETA, TILT, SCALE = 3.0, 0.7, 2.0  # of RoPE, of a key against a query, and of the scores

Facts = dict[str, Any]


def main(tree: str, facts: str, limits: str, trials: str = "", versions: str = "") -> None:
    """Run every experiment on the package in `tree`, and write the signed facts."""
    signature = sys.stdin.readline().strip()
    _limit(json.loads(limits))
    # The finder of an editable installation of our package would supply modules that the submission lacks.
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if finder is PathFinder or not finder.find_spec("llama", None)
    ]
    sys.path.insert(0, tree)
    import llama.model

    _forget_garbage()
    gc.freeze()  # permanent objects need not be searched each time
    home = str(Path(str(llama.__file__)).resolve().parent.parent)
    found: Facts = {"signature": signature, "home": home}
    if trials:
        found |= tried(_loaded(trials), tree, versions=bool(versions))
    else:
        found |= {experiment.__name__: _guarded(experiment, tree) for experiment in EXPERIMENTS}
    partial = Path(f"{facts}.partial")
    partial.write_text(json.dumps(found, default=plain), encoding="utf-8")  # positions may be any object
    partial.replace(facts)


def plain(value: Any) -> int | str:
    """Return an integer of any type, such as NumPy's or a tensor of one number, as an int; any other value as text."""
    try:
        return operator.index(value)
    except TypeError:
        return str(value)


def _limit(limits: dict[str, int]) -> None:
    """Set limits, {name: number}, of this process and its children; systems without `resource` have none."""
    try:
        import resource
    except ImportError:
        return
    for name, most in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            with suppress(ValueError, OSError):  # a system may not support the limit
                resource.setrlimit(kind, (most, most))


def _loaded(trials: str) -> ModuleType:
    spec = spec_from_file_location("trials", trials)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tried(module: ModuleType, tree: str, *, versions: bool = False) -> Facts:
    """Return the facts of the trials of a module of course/trials/, and those of versions of the answer.

    A version has the name of its mistake. Those in the module's other forms, without a mistake, have the name "".
    """

    def experiment(facts: Facts) -> None:
        for what, came in module.trials():
            facts[what] = came

    found: Facts = {"near": module.NEAR, "trials": _guarded(experiment, tree)}
    if versions:
        found["versions"] = []
        forms = getattr(module, "FORMS", ((),))
        every = [*((name,) for name in module.MISTAKES), *getattr(module, "ALSO", ())]
        for version, form in (*product([("",)], forms[1:]), *product(every, forms)):
            module.install(*version, *form)
            found["versions"].append([version[0], _guarded(experiment, tree)])
    return found


def _forget_garbage() -> None:
    """Fill uninitialised memory with zeros, so that reading it gives the same result each time."""
    import torch

    def zeroed(make: Callable[..., "Tensor"]) -> Callable[..., "Tensor"]:
        return lambda *given, **named: make(*given, **named).zero_()

    torch.empty, torch.empty_like = zeroed(torch.empty), zeroed(torch.empty_like)
    torch.Tensor.new_empty = zeroed(torch.Tensor.new_empty)  # type: ignore[method-assign]


def _guarded(experiment: Callable[[Facts], None], tree: str) -> Facts:
    """Return the facts of an experiment, and its error, if any."""
    found: Facts = {}
    random.seed(0)
    try:
        experiment(found)
    except Exception as error:
        found["error"] = _told(error, tree)
    return found


def _type(error: Exception) -> str:
    """Return the name of the error's first class that is Python's own."""
    return next(each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins")


def _told(error: Exception, tree: str) -> dict[str, str]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(tree)]
    where = f"{os.path.relpath(frames[-1].filename, tree)}:{frames[-1].lineno}" if frames else ""
    return {"type": _type(error), "words": str(error)[:300], "where": where}


# ---- the spelling model ----------------------------------------------------------------------------------------------


def spelling_model(*, turning: bool = False) -> "Transformer":
    """Return a model whose attention output names, for every head, the tokens and their shares.

    All keys have the same score; with `turning`, the score depends on the angle between key and query.
    """
    import torch

    from llama.model import ModelArgs, Transformer

    args = ModelArgs(
        dim=VOCAB, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, ffn_dim=8, vocab_size=VOCAB,
        max_seq_len=MAX_SEQ_LEN, max_batch_size=MAX_ROWS, norm_eps=1e-12, rope_theta=THETA,
    )  # fmt: skip
    model = Transformer(args).to(torch.float64).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.zero_() if weight.ndim > 1 else weight.fill_(VOCAB**-0.5)  # so that the norm returns its input
    model.tok_embeddings.weight.copy_(torch.eye(VOCAB))
    model.output.weight.copy_(torch.eye(VOCAB))
    strength = (SCALE * HEAD_DIM**0.5) ** 0.5
    sizes = torch.tensor([key_size(token) for token in range(VOCAB)])
    for index, layer in enumerate(model.blocks):
        wk, wv = (w.weight.view(KV_HEADS, HEAD_DIM, VOCAB) for w in (layer.attention.wk, layer.attention.wv))
        for head in range(KV_HEADS):
            wv[head, index * VOCAB : (index + 1) * VOCAB] = torch.eye(VOCAB) * (1 + head)
        tilt = torch.tensor([TILT])
        wk[:, KEY_AT], wk[:, KEY_AT + 1] = strength * tilt.cos() * sizes, strength * tilt.sin() * sizes
        layer.attention.wq.weight.view(HEADS, HEAD_DIM, VOCAB)[:, KEY_AT] = strength * turning
    return model


def key_size(token: int) -> float:
    """Return the size of a token's key; sizes differ, so that missing keys differ from keys that were not rotated."""
    return 1.0 + 0.5 * (token % 2)


def text(begin: int, rows: int = 2, length: int = LENGTH) -> "Tensor":
    """Return the ids of one of the texts, (rows, length), all different."""
    import torch

    return begin + torch.arange(rows * length).view(rows, length)


@contextmanager
def _spelled(model: "Transformer", calls: list[Any]) -> Iterator[None]:
    """Append to `calls`, for every call, [layer][row][query][head] -> [[token, weight], ...]."""
    seen: list[Any] = []

    def note(module: object, given: tuple["Tensor", ...]) -> None:
        looked = given[0].detach().reshape(*given[0].shape[:2], HEADS, HEAD_DIM).tolist()
        seen.append([[[_entries(head) for head in query] for query in row] for row in looked])

    def done(module: object, given: object, output: object) -> None:
        calls.append(list(seen))
        seen.clear()

    hooks = [layer.attention.wo.register_forward_pre_hook(note) for layer in model.blocks]
    hooks.append(model.register_forward_hook(done))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _entries(head: list[float]) -> list[list[float]]:
    return [[place, round(share, 9)] for place, share in enumerate(head) if not abs(share) < 1e-9]  # nan, too


def _feed(
    model: "Transformer",
    found: Facts,
    tokens: "Tensor",
    cuts: Sequence[int],
    begin: int = 0,
    cache: "Cache | None" = None,
) -> None:
    """Feed a text whose first column has position `begin`, in calls that begin at `cuts`.

    Without a `cache` the model uses its own, or none with the switch off.
    """
    import torch

    calls = found.setdefault("calls", [])
    ends = [*cuts[1:], begin + tokens.shape[1]]
    with torch.inference_mode(), _spelled(model, calls):
        for a, b in zip(cuts, ends, strict=True):
            model(tokens[:, a - begin : b - begin], a, cache=cache)


# ---- experiments: each records its facts in a dict -------------------------------------------------------------------


def uncached(found: Facts) -> None:
    """Feed a text in one call, with the cache off."""
    model = spelling_model()
    model.kv_caching = False
    found["switches"] = [bool(getattr(layer.attention, "kv_caching", False)) for layer in model.blocks]
    _feed(model, found, text(FIRST)[:, :6], [0])


def steps(found: Facts) -> None:
    """Feed a prompt, then token by token."""
    model = spelling_model()
    _feed(model, found, text(FIRST)[:, :8], [0, 5, 6, 7], cache=model.new_cache(rows=2, length=LENGTH))


def chunk(found: Facts) -> None:
    """Feed a prompt, a chunk of several tokens, and one token."""
    model = spelling_model()
    _feed(model, found, text(FIRST)[:, :9], [0, 4, 8], cache=model.new_cache(rows=2, length=LENGTH))


def turned(found: Facts) -> None:
    """Feed a prompt, a token and a chunk, with keys whose score depends on their angle."""
    model = spelling_model(turning=True)
    _feed(model, found, text(FIRST)[:, :9], [0, 5, 6], cache=model.new_cache(rows=2, length=LENGTH))


def ragged(found: Facts) -> None:
    """Feed rows of different lengths, padded on the right, then each at its own position."""
    import torch

    model, tokens = spelling_model(), text(FIRST)
    cache = model.new_cache(rows=2, length=LENGTH)
    calls = found.setdefault("calls", [])
    with torch.inference_mode(), _spelled(model, calls):
        model(tokens[:, :5], [0, 0], lengths=[3, 5], cache=cache)
        for step in range(2):
            columns = torch.tensor([[3 + step], [5 + step]])
            model(tokens.gather(1, columns), [3 + step, 5 + step], lengths=[1, 1], cache=cache)


def again(found: Facts) -> None:
    """Feed a second, shorter text into the same cache, from position 0 on, and one of a single row."""
    model = spelling_model()
    cache = model.new_cache(rows=2, length=LENGTH)
    _feed(model, found, text(FIRST)[:, :8], [0, 6, 7], cache=cache)
    _feed(model, found, text(OTHER, length=6)[:, :5], [0, 3, 4], cache=cache)
    _feed(model, found, text(TURN, rows=1, length=3), [0, 2], cache=cache)


def rewound(found: Facts) -> None:
    """Feed a text, then other tokens from position 4 on."""
    model = spelling_model()
    cache = model.new_cache(rows=2, length=LENGTH)
    _feed(model, found, text(FIRST)[:, :7], [0, 5, 6], cache=cache)
    _feed(model, found, text(TURN, length=2), [4, 5], begin=4, cache=cache)


def more_rows(found: Facts) -> None:
    """Feed one row, then two."""
    model = spelling_model()
    cache = model.new_cache(rows=1, length=LENGTH)
    _feed(model, found, text(FIRST)[:1, :3], [0], cache=cache)
    _feed(model, found, text(OTHER, length=6)[:, :4], [0, 3], cache=cache)


def longer(found: Facts) -> None:
    """Feed a text that becomes longer than the reserved length."""
    model = spelling_model()
    _feed(model, found, text(FIRST, rows=1, length=14), [0, *range(2, 14)], cache=model.new_cache(rows=1, length=4))


def unreserved(found: Facts) -> None:
    """Feed a text without a reserved length, into the model's own cache."""
    _feed(spelling_model(), found, text(FIRST)[:, :6], [0, 2, 3, 4, 5])


def memory(found: Facts) -> None:
    """Count the bytes of tensors while the cache is filled to the reserved length, and list their dtypes.

    In bfloat16, which no solution uses by accident.
    """
    import torch

    model, tokens = spelling_model().to(torch.bfloat16), text(FIRST)
    model.kv_caching = False
    with torch.inference_mode():
        model(text(FIRST, rows=1, length=24))  # so that RoPE's table exists
        before = _alive()
        model(tokens)
        found["off"] = _bytes(_alive()) - _bytes(before)
        model.kv_caching = True
        cache = model.new_cache(rows=2, length=LENGTH)
        found["filling"] = []
        for a, b in zip([0, *range(8, 12)], range(8, 13), strict=True):
            model(tokens[:, a:b], a, cache=cache)
            found["filling"].append(_bytes(_alive()) - _bytes(before))
        old = {tensor.untyped_storage().data_ptr() for tensor in before}
        new = {tensor.dtype for tensor in _alive() if tensor.untyped_storage().data_ptr() not in old}
        found["dtypes"] = sorted(str(dtype).removeprefix("torch.") for dtype in new)
        del cache
        model(tokens)  # fills the model's own cache
        model.kv_caching = False
        model(tokens)
        found["switched_off"] = _bytes(_alive()) - _bytes(before)
    found["right"] = LAYERS * 2 * 2 * LENGTH * KV_HEADS * HEAD_DIM


def gradients(found: Facts) -> None:
    """Make two cached calls outside inference mode; count graphs that stay. An error is right, too."""
    model = spelling_model().requires_grad_(True)
    try:
        for a, b in ((0, 3), (3, 4)):
            model(text(FIRST)[:, a:b], a)
    except ValueError:
        found["refused"] = True
    found["kept"] = sum(1 for tensor in _alive() if tensor.grad_fn is not None)


def limits(found: Facts) -> None:
    """Write one token past max_seq_len, and one row past max_batch_size, into a cache."""
    import torch

    from llama.rows import Rows

    with torch.inference_mode():
        model = spelling_model()
        cache = model.new_cache(rows=1, length=MAX_SEQ_LEN).layers[0]
        full = torch.ones(1, MAX_SEQ_LEN, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        cache.update(Rows.at([0], [MAX_SEQ_LEN]), full, full)
        past = Rows.at([MAX_SEQ_LEN], [1])
        found["length"] = _outcome(lambda: cache.update(past, 7 * full[:, :1], 7 * full[:, :1]))
        cache = model.new_cache().layers[0]
        more = torch.ones(MAX_ROWS + 1, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        rows = Rows.at([0] * len(more), [2] * len(more))
        found["rows"] = _outcome(lambda: cache.update(rows, more, more))


def _outcome(write: Callable[[], tuple["Tensor", "Tensor"]]) -> Facts:
    try:
        keys, _ = write()
    except Exception as error:
        return {"raised": _type(error), "words": str(error)[:200]}
    return {"raised": None, "shape": list(keys.shape), "first": float(keys[0, 0, 0, 0])}


PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8])


def loop(found: Facts) -> None:
    """Record the tokens that each step of a generation is fed, with the cache on and off, and the switch after it."""
    for mode in (True, False):
        found["on" if mode else "off"] = _fed(mode)


def _fed(mode: bool) -> Facts:
    model = random_model()
    found: Facts = {"fed": []}

    def note(step: "Step") -> None:
        found["fed"].append([list(step.prev_pos), [len(ids) for ids in step.ids]])

    try:
        model.generate_tokens(PROMPTS, 4, temperature=0.0, kv_caching=mode, on_step=note)
    except Exception as error:
        found["error"] = _told(error, sys.path[0])
    found["switch"] = model.kv_caching
    return found


def generations(found: Facts) -> None:
    """Generate batches one after the other; in the second one row ends before the other."""
    model = random_model()
    found["together"] = model.generate_tokens(PROMPTS, 8, temperature=0.0)[0]
    found["first"] = model.generate_tokens(PROMPTS, [3, 8], temperature=0.0)[0]
    found["second"] = model.generate_tokens([[9, 8], [7, 7]], 4, temperature=0.0)[0]


def left_behind(found: Facts) -> None:
    """Record the bytes of tensors and the switch after a generation, and after one that an error ended."""
    import torch

    for name, mode in (("whole", True), ("broken", True), ("broken_off", False)):
        model = random_model()
        with torch.inference_mode():
            model.with_kv_caching(False)(text(0, rows=1, length=16))
            before = _bytes(_alive())
        on_step = None if name == "whole" else _Fails()
        with suppress(_Stop):
            model.generate_tokens(PROMPTS, 4, temperature=0.0, kv_caching=mode, on_step=on_step)
        found[name] = {"bytes": _bytes(_alive()) - before, "switch": model.kv_caching}


class _Stop(Exception):
    pass


class _Fails:
    """Raises at the third step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, step: object) -> None:
        self.steps += 1
        if self.steps == 3:
            raise _Stop


def logits(found: Facts) -> None:
    """Record the logits of a random model: in one call without the cache, and in several with it."""
    import torch

    model = random_model()
    tokens = torch.randint(29, (2, 10), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        found["off"] = _rounded(model.with_kv_caching(False)(tokens))
        cache = model.new_cache(rows=2, length=10)
        parts = [model(tokens[:, a:b], a, cache=cache) for a, b in ((0, 4), (4, 5), (5, 8), (8, 9), (9, 10))]
        found["on"] = _rounded(torch.cat(parts, dim=1))


def random_model() -> "Transformer":
    """Return a small model whose weights are all large enough to change the logits."""
    import torch

    from llama.model import ModelArgs, Transformer

    args = ModelArgs(
        dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=20, vocab_size=29, max_seq_len=32,
        rope_theta=100.0,
    )  # fmt: skip
    model, stream = Transformer(args), torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5, generator=stream)
        else:
            weight.data.normal_(0, 1.5 / weight.shape[1] ** 0.5, generator=stream)
    return model.to(torch.float64).eval().requires_grad_(False)


def _rounded(logits: "Tensor") -> list[float]:
    return [round(value, 9) for value in logits.flatten().tolist()]


def _alive() -> list["Tensor"]:
    """Return all floating-point tensors that exist now."""
    import torch

    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and found.is_floating_point()]


def _bytes(tensors: list["Tensor"]) -> int:
    """Return the bytes of tensors; shared memory counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


EXPERIMENTS: tuple[Callable[[Facts], None], ...] = (
    uncached,
    steps,
    chunk,
    turned,
    ragged,
    again,
    rewound,
    more_rows,
    longer,
    unreserved,
    memory,
    gradients,
    limits,
    loop,
    generations,
    left_behind,
    logits,
)


if __name__ == "__main__":
    main(*sys.argv[1:])
