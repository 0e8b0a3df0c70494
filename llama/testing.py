"""Does a kind of cache keep what the contract promises? Claims that every kind passes by its registration alone.

    from llama.testing import check_cache_kind
    check_cache_kind("mine")        # or "mine:PARAMS", or "mine.py:mine"

Each claim runs the kind in tiny models with random weights. Knows the contract; knows no kind by its name.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache import KVCache, cache_kind
from llama.model import Transformer
from llama.rows import Rows

SIZES = ModelArgs(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=32, ffn_dim=40, vocab_size=61, max_seq_len=128,
    rope_theta=10000.0,
)  # fmt: skip
# Logits of about 3, in float64, are off by 1e-14 where two ways of summing differ; RoPE's table is float32, and a kind
# that rotates keys by places takes other entries of it than the model does by positions.
TOLERANCE, TOLERANCE_OF_PLACES = 1e-10, 1e-4


class Broken(AssertionError):
    """A kind of cache does not keep a promise of the contract; the message says which, and where."""


def check_cache_kind(name: str, *, args: ModelArgs = SIZES) -> list[str]:
    """Hold a kind against every claim, and return what was claimed, a line each. Raises Broken at the first that fails.

    `args` are the sizes of the models it is tried in. ValueError: the kind does not exist, or cannot be of these sizes.
    """
    args = replace(args, kv_cache=cache_kind(name))
    KVCache.of(args)
    passed = []
    for claim in CLAIMS:
        torch.manual_seed(0)
        random.seed(0)
        assert claim.__doc__ is not None
        words = claim.__doc__.splitlines()[0]
        try:
            with torch.inference_mode():
                applies = claim(args)
        except Broken:
            raise
        except Exception as error:  # whatever a kind of one's own, or what it gave back, makes somebody raise
            raise Broken(f"{type(error).__name__} where this was tried: {words} {error}") from error
        passed += [words] if applies else []
    return passed


# ---- claims: each returns False where it does not apply to the kind --------------------------------------------------


def lossless_in_any_chunks(args: ModelArgs) -> bool:
    """A lossless kind gives the logits that the model gives without a cache, however the text is cut."""
    if not KVCache.of(args).lossless:
        return False
    model, tokens = tiny_model(args), some_tokens(args, rows=3)
    wanted = uncached(model, tokens)
    for cuts in chunkings(tokens.shape[1]):
        near(stepped(model, tokens, cuts), wanted, f"in chunks that begin at {cuts}", model)
    return True


def lossless_to_the_bit_in_exact_mode(args: ModelArgs) -> bool:
    """A lossless kind whose keys stand at 0, 1, 2, ... is equal to no cache to the bit in exact mode."""
    cache = KVCache.of(args)
    if not cache.lossless:
        return False
    model, tokens = tiny_model(args, dtype=torch.float32), some_tokens(args, rows=2)
    stepped(model, tokens[:, :2], [0])
    if model.caches[0].visible(Rows.at([0], [2]), torch.zeros(1, 2, args.n_heads, args.head_dim)) is not None:
        return False
    model.exact = True  # which compares the model with itself, cached and not
    wanted = uncached(model, tokens)
    for cuts in list(chunkings(tokens.shape[1]))[:3]:
        if not torch.equal(stepped(model, tokens, cuts), wanted):
            raise Broken(f"in exact mode the bits differ from those without a cache in chunks that begin at {cuts}")
    return True


def rows_do_not_touch_each_other(args: ModelArgs) -> bool:
    """A row beside longer and shorter ones, and beside rows that have ended, gives what it gives alone."""
    model = tiny_model(args)
    prompts = [some_tokens(args, rows=1, length=n, seed=n)[0].tolist() for n in (1, 40, 7, 33)]
    lengths = [50, 3, 41, 20]
    together, _ = model.generate_tokens(prompts, lengths, temperature=0.0)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        alone, _ = model.generate_tokens([prompt], length, temperature=0.0)
        if alone[0] != together[row]:
            raise Broken(f"row {row}, of {len(prompt)} tokens, goes on with {together[row]}, and alone with {alone[0]}")
    return True


def texts_leave_nothing_behind(args: ModelArgs) -> bool:
    """Text A, then B, then A again: A has the same bits, also where what B left is not a number."""
    model, first, second = tiny_model(args), some_tokens(args, rows=2), some_tokens(args, rows=2, length=50, seed=1)
    cuts = range(first.shape[1])
    wanted = stepped(model, first, cuts)
    stepped(model, second, [0, 40], keep=True)
    if not torch.equal(stepped(model, first, cuts, keep=True), wanted):
        raise Broken("a text has other logits after another text, in the same cache")
    for cache in model.caches:
        for buffer in cache.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
    if not torch.equal(stepped(model, first, cuts, keep=True), wanted):
        raise Broken("a text has other logits where its cache was full of nan: slots are read that it did not write")
    return True


def bytes_are_as_predicted(args: ModelArgs) -> bool:
    """A cache that was fed rows x length holds exactly `predicted_bytes`, and nothing before and after."""
    for dtype, rows, length in itertools.product((torch.float32, torch.bfloat16), (1, 3), (1, 16, 31, 64, 100)):
        model = tiny_model(args, dtype=dtype)
        held = [cache.nbytes for cache in model.caches]
        model.reserve_cache(rows, length)
        model(some_tokens(args, rows=rows, length=length), 0)
        wanted = KVCache.of(args).predicted_bytes(rows=rows, length=length, itemsize=dtype.itemsize)
        for cache in model.caches:
            if cache.nbytes != wanted:
                raise Broken(f"{rows} x {length} in {dtype}: {cache.nbytes} bytes are held, {wanted} predicted")
        model.free_cache()
        held += [cache.nbytes for cache in model.caches]
        if any(held):
            raise Broken(f"memory is held before the first use or after free(): {held}")
    return True


def memory_is_given_back(args: ModelArgs) -> bool:
    """After a generation, whole or broken off, nothing is held."""
    model, prompts = tiny_model(args), [[1, 2, 3], [4, 5]]
    model.generate_tokens(prompts, 5)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        model.generate_tokens(prompts, 5, on_step=stop)
    if any(cache.nbytes for cache in model.caches):
        raise Broken("memory is held after a generation")
    return True


def a_prefix_may_be_shared(args: ModelArgs) -> bool:
    """Rows that share a prefix that was fed once go on as rows that were fed all of it."""
    model = tiny_model(args)
    prefix = some_tokens(args, rows=1, length=37)[0].tolist()
    prompts = [[*prefix, *rest] for rest in ([1, 2, 3], [4], [5, 6, 7, 8, 9])]
    shared, _ = model.generate_tokens(prompts, 20, temperature=0.0, share_prefix=True)
    alone = [continued(model, prompt, len(prefix), 20) for prompt in prompts]
    if shared != alone:
        raise Broken(f"with a shared prefix rows go on with {shared}, and each by itself with {alone}")
    return True


def a_copy_goes_on_by_itself(args: ModelArgs) -> bool:
    """A copy of a cache holds the same, and what is fed to it does not show in the original."""
    model, tokens = tiny_model(args), some_tokens(args, rows=2)
    half, length = tokens.shape[1] // 2, tokens.shape[1]
    begun = [0, *range(half, length)]
    wanted = stepped(model, tokens, begun)[:, half:]
    stepped(model, tokens[:, :half], [0], keep=True)
    kept = [cache.copy() for cache in model.caches]
    stepped(model, tokens.flip(0), [0], keep=True)  # the original begins another text
    model.caches = kept
    if not torch.equal(stepped(model, tokens, range(half, length)), wanted):
        raise Broken("a copy of the cache does not go on as the original would have")
    return True


def a_state_is_all_that_a_cache_needs(args: ModelArgs) -> bool:
    """A cache that is restored from the state of another goes on as the other would have."""
    model, tokens = tiny_model(args), some_tokens(args, rows=1)
    length = tokens.shape[1]
    for half in (1, length // 2, length - 2):
        wanted = stepped(model, tokens, [0, *range(half, length)])[:, half:]
        stepped(model, tokens[:, :half], [0], keep=True)
        states = [cloned(cache.state(1, half)) for cache in model.caches]
        restored = [KVCache.of(args) for _ in states]
        for cache, state in zip(restored, states, strict=True):
            cache.restore(cloned(state), 1, half)
            again = cache.state(1, half)
            if not same_tensors(again, state):
                raise Broken(f"what was restored has another state: {sorted(again)}, not {sorted(state)}")
            refused(partial(KVCache.of(args).restore, {**state, "of no kind": torch.zeros(1)}, 1, half))
        model.caches = restored
        near(stepped(model, tokens, range(half, length)), wanted, f"after {half} positions were restored", model)
    return True


def a_text_may_be_rewound(args: ModelArgs) -> bool:
    """Where `rewind` says yes, the text goes on from there as it did; where it says no, it goes on from 0."""
    model, tokens = tiny_model(args), some_tokens(args, rows=2)
    length = tokens.shape[1]
    wanted = stepped(model, tokens, range(length))
    for position in (length - 1, length - 7, length // 2, 1):
        stepped(model, tokens, range(length), keep=True)
        if all(cache.rewind(position) for cache in model.caches):
            again = stepped(model, tokens, range(position, length), keep=True)
            near(again, wanted[:, position:], f"after going back to position {position} of {length}", model)
        model.free_cache()
    return True


def bad_writes_are_refused(args: ModelArgs) -> bool:
    """What must not be written is refused with ValueError, and leaves the cache as it was."""
    args = replace(args, max_batch_size=2)
    cache = KVCache.of(args)
    heads, width = args.n_kv_heads, args.head_dim
    refused(partial(cache.update, Rows.at([0] * 3, [1] * 3), *torch.randn(2, 3, 1, heads, width)))  # a row too many
    cache.update(Rows.at([0, 0], [3, 3]), torch.randn(2, 3, heads, width), torch.randn(2, 3, heads, width))
    before, step = cloned(cache.state()), Rows.at([3, 3], [1, 1])
    for shape in ((2, 1, heads + 1, width), (1, 1, heads, width), (2, 2, heads, width), (2, 0, heads, width)):
        refused(partial(cache.update, step, torch.randn(shape), torch.randn(shape)))
    new = torch.randn(2, 1, heads, width)
    refused(lambda: cache.update(step, new.double(), new.double()))
    if cache.bound is None:
        past = torch.randn(2, args.max_seq_len - 2, heads, width)
        refused(lambda: cache.update(Rows.at([3, 3], [past.shape[1]] * 2), past, past))
    if not same_tensors(before, cache.state()):
        raise Broken("a write that was refused has changed the cache")
    return True


CLAIMS: tuple[Callable[[ModelArgs], bool], ...] = (
    lossless_in_any_chunks,
    lossless_to_the_bit_in_exact_mode,
    rows_do_not_touch_each_other,
    texts_leave_nothing_behind,
    bytes_are_as_predicted,
    memory_is_given_back,
    a_prefix_may_be_shared,
    a_copy_goes_on_by_itself,
    a_state_is_all_that_a_cache_needs,
    a_text_may_be_rewound,
    bad_writes_are_refused,
)


# ---- what the claims are made of -------------------------------------------------------------------------------------


def tiny_model(args: ModelArgs, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return a model whose weights are large enough for every one of them to show in the logits."""
    model = Transformer(args)
    stream = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5, generator=stream)
        else:
            weight.data.normal_(0, 1.5 / weight.shape[1] ** 0.5, generator=stream)
    return model.to(dtype).eval().requires_grad_(False)


def some_tokens(args: ModelArgs, *, rows: int, length: int = 75, seed: int = 0) -> Tensor:
    """Return random ids, (rows, length)."""
    return torch.randint(args.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def chunkings(length: int) -> Iterator[Sequence[int]]:
    """Yield where the chunks of a text begin: at once, one by one, and by chance."""
    yield [0]
    yield range(length)
    for count in (1, 2, 5, 20):
        yield [0, *sorted(random.sample(range(1, length), count))]


def uncached(model: Transformer, tokens: Tensor) -> Tensor:
    with model.switched(kv_caching=False):
        logits: Tensor = model(tokens)
        return logits


def stepped(model: Transformer, tokens: Tensor, cuts: Sequence[int], *, keep: bool = False) -> Tensor:
    """Return the logits of a text that is fed in chunks that begin at `cuts`; with `keep` the cache is not emptied."""
    logits = [model(tokens[:, a:b], a) for a, b in itertools.pairwise([*cuts, tokens.shape[1]])]
    if not keep:
        model.free_cache()
    return torch.cat(logits, dim=1)


def continued(model: Transformer, prompt: Sequence[int], cut: int, count: int) -> list[int]:
    """Return the most likely ids that follow a prompt that is fed in two parts."""
    logits, ids = stepped(model, torch.tensor([prompt]), [0, cut], keep=True), list(prompt)
    for _ in range(count):
        ids.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([ids[-1:]]), len(ids) - 1)
    model.free_cache()
    return ids[len(prompt) :]


def near(ours: Tensor, wanted: Tensor, where: str, model: Transformer) -> None:
    tolerance = TOLERANCE_OF_PLACES if model.caches[0].unrotated else TOLERANCE
    apart = float((ours - wanted).abs().max())
    if not apart <= tolerance:
        raise Broken(f"logits are {apart:.1e} away from what they should be {where}; {tolerance:.0e} is allowed")


def refused(write: Callable[[], object]) -> None:
    try:
        write()
    except ValueError:
        return
    raise Broken("a write that cannot be right was not refused")


def cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
