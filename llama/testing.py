"""Check that a kind of cache keeps the contract.

    from llama.testing import check_cache_kind
    check_cache_kind("mine")        # or "mine:PARAMS", or "mine.py:mine"

Each claim runs the kind in tiny models with random weights. Knows the contract; knows no kind by its name.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache import Cache, KVCache, ScoredCache, cache_kind
from llama.kv_cache.contract import read_by_last
from llama.model import Transformer
from llama.rows import Rows

SIZES = ModelArgs(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=32, ffn_dim=40, vocab_size=61, max_seq_len=128,
    rope_theta=10000.0,
)  # fmt: skip
# Logits of about 3 in float64 differ by 1e-14 between two orders of summation. RoPE's table is float32, and an
# unrotated kind uses other entries of it than the model does.
TOLERANCE, TOLERANCE_OF_PLACES = 1e-10, 1e-4

# Batches: the tokens of each row's prompt, and of each row when it leaves the batch.
RESERVED_BATCHES = (((40, 3, 17), (45, 20, 17)), ((31, 31), (35, 35)))
MIXED_BATCHES = (*(((n,), (n,)) for n in (1, 16, 31, 64, 100)), ((5, 33), (20, 34)), ((1,), (70,)))


class Broken(AssertionError):
    """A kind of cache breaks a claim; the message says which, and where."""


def check_cache_kind(name: str, *, args: ModelArgs = SIZES, device: str = "cpu") -> list[str]:
    """Check a kind against every claim, and return the claims that apply, a line each.

    `args` are the sizes of the models, which run on `device`. Raises Broken at the first claim that fails, and
    ValueError for a kind that does not exist or does not support these sizes.
    """
    args = replace(args, kv_cache=cache_kind(name))
    empty(args)
    # A default device costs a fourth of the time, because PyTorch then passes each call through Python.
    is_default = torch.get_default_device() == torch.device(device)
    passed = []
    for claim in CLAIMS:
        torch.manual_seed(0)
        random.seed(0)
        assert claim.__doc__ is not None
        words = claim.__doc__.splitlines()[0]
        try:
            with nullcontext() if is_default else torch.device(device), torch.inference_mode():
                applies = claim(args)
        except Broken:
            raise
        except Exception as error:  # a user's kind, or its results, may raise anything
            raise Broken(f"{type(error).__name__} during the check of: {words} {error}") from error
        passed += [words] if applies else []
    return passed


# ---- claims: each returns False if it does not apply to the kind -----------------------------------------------------


def lossless_in_any_chunks(args: ModelArgs) -> bool:
    """A lossless kind gives the logits of the model without a cache, however the text is cut."""
    if not lossless(args):
        return False
    model, tokens = tiny_model(args), some_tokens(args, rows=3)
    wanted = uncached(model, tokens)
    for cuts in chunkings(tokens.shape[1]):
        near(stepped(model, tokens, cuts), wanted, f"in chunks that begin at {cuts}", model)
    return True


def lossless_to_the_bit_in_exact_mode(args: ModelArgs) -> bool:
    """In exact mode a lossless kind with keys at 0, 1, 2, ... gives the same bits as no cache."""
    if not lossless(args):
        return False
    model, tokens, cache = tiny_model(args, dtype=torch.float32), some_tokens(args, rows=2, length=36), empty(args)
    stepped(model, tokens[:1, :2], [0], cache)
    queries = torch.zeros(1, 2, args.n_heads, args.head_dim)
    if any(layer.visible(Rows.at([0], [2]), queries) is not None for layer in cache.layers):
        return False
    model.exact = True
    wanted = uncached(model, tokens)
    for cuts in list(chunkings(tokens.shape[1]))[:3]:
        if not torch.equal(stepped(model, tokens, cuts), wanted):
            raise Broken(f"in exact mode the bits differ from those without a cache in chunks that begin at {cuts}")
    return True


def rows_do_not_touch_each_other(args: ModelArgs) -> bool:
    """A row gives the same tokens alone as with longer rows, shorter rows and rows that have ended."""
    model = tiny_model(args)
    prompts = [some_tokens(args, rows=1, length=n, seed=n)[0].tolist() for n in (1, 40, 7, 33)]
    lengths = [24, 3, 30, 12]
    together, _ = model.generate_tokens(prompts, lengths, temperature=0.0)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        alone, _ = model.generate_tokens([prompt], length, temperature=0.0)
        if alone[0] != together[row]:
            raise Broken(
                f"row {row}, of {len(prompt)} tokens, continues with {together[row]}, but alone with {alone[0]}"
            )
    return True


def texts_leave_nothing_behind(args: ModelArgs) -> bool:
    """After text A and text B, A has the same bits again, even if the memory that B used is NaN."""
    model, first, second = tiny_model(args), some_tokens(args, rows=2), some_tokens(args, rows=2, length=50, seed=1)
    cuts = [0, *range(60, first.shape[1])]
    wanted, cache = stepped(model, first, cuts), model.new_cache()
    stepped(model, second, [0, 40], cache)
    if not torch.equal(stepped(model, first, cuts, cache), wanted):
        raise Broken("a text has other logits after another text in the same cache")
    for layer in cache.layers:
        for stored in layer.held().values():
            if stored.is_floating_point():
                stored.fill_(torch.nan)
    if not torch.equal(stepped(model, first, cuts, cache), wanted):
        raise Broken("a text has other logits if its cache was full of NaN: it reads memory that it did not write")
    return True


def bytes_are_as_predicted(args: ModelArgs) -> bool:
    """A cache stores exactly `predicted_bytes` after feeding, all of it counted, and nothing before and after that."""
    models = itertools.cycle(tiny_model(args, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    batches = [*MIXED_BATCHES, *RESERVED_BATCHES]
    runs = [(*batch, (0, 0)) for batch in batches]
    runs += [(prompts, ends, (len(prompts) + 1, max(ends) + 9)) for prompts, ends in RESERVED_BATCHES]
    for (prompts, ends, reserved), model in zip(runs, models, strict=False):
        cache, dtype = model.new_cache(rows=reserved[0], length=reserved[1]), model.dtype
        what = f"prompts of {prompts} tokens in {dtype}, fed up to {ends}, with {reserved} reserved"
        nothing_stored(cache, f"before the first use, of {what}")
        feed(model, cache, prompts, ends)
        wanted = cache.predicted_bytes(prompts=prompts, ends=ends, reserved=reserved, itemsize=dtype.itemsize)
        if cache.nbytes != wanted:
            raise Broken(f"{what}: {cache.nbytes} bytes are stored, {wanted} predicted")
        found = sum(map(reachable_bytes, cache.layers))
        if found != wanted:
            raise Broken(f"{what}: {found} bytes are in its attributes, but {wanted} are counted; see `held`")
        cache.free()
        nothing_stored(cache, f"after free(), of {what}")
    return True


def rows_may_leave(args: ModelArgs) -> bool:
    """When other rows leave, the rows that stay give what they would have given, in any order."""
    model, tokens, lengths = tiny_model(args), some_tokens(args, rows=4), [40, 7, 33, 18]
    fed = model.new_cache()
    model(tokens[:, :40], Rows.at([0] * 4, lengths, prompt_ends=True), cache=fed)

    def steps(rows: Sequence[int]) -> Tensor:
        """Return the logits of 16 steps of these rows, (steps, rows, vocab_size)."""
        cache, made = fed.copy(), list[Tensor]()
        cache.select_rows(rows)
        for step in range(16):
            starts = [lengths[row] + step for row in rows]
            made.append(model(tokens[rows, starts][:, None], starts, cache=cache)[:, 0])
        return torch.stack(made)

    together = steps(range(4))
    for stay in ([1, 2, 0], [0, 3, 2], [3, 1], [1]):
        near(steps(stay).transpose(0, 1), together[:, stay].transpose(0, 1), f"where rows {stay} stay", model)
    return True


def texts_may_join(args: ModelArgs) -> bool:
    """A text that joins a batch, or was joined by others, gives what it gives alone, unless the kind refuses to."""
    model, tokens, ends = tiny_model(args), some_tokens(args, rows=3), [40, 7, 31]
    batch, alone, made, rows = model.new_cache(), list[Cache](), [list[Tensor]() for _ in ends], list[int]()
    for row, leaves in ((0, []), (1, []), (2, [0])):
        batch.select_rows(rows := [one for one in rows if one not in leaves])
        text = batch.sibling()
        model(tokens[row : row + 1, : ends[row]], Rows.at([0], [ends[row]], prompt_ends=True), cache=text)
        alone.append(text.copy())
        try:
            batch.join(text, len(rows), ends[row])
        except ValueError:
            if row or batch.nbytes:
                raise
            return False
        rows.append(row)
        for _ in range(4):
            starts = [ends[row] for row in rows]
            for one, logits in zip(rows, model(tokens[rows, starts][:, None], starts, cache=batch), strict=True):
                made[one].append(logits)
                ends[one] += 1
    for row, logits in enumerate(made):
        wanted = stepped(
            model, tokens[row : row + 1, : ends[row]], range(ends[row] - len(logits), ends[row]), alone[row]
        )
        near(torch.cat(logits)[None], wanted, f"of text {row}, which joined or was joined", model)
    return True


def the_first_row_may_be_repeated(args: ModelArgs) -> bool:
    """Rows that repeat the first row give what copies of it give, even if they replace other rows."""
    model, tokens = tiny_model(args), some_tokens(args, rows=3, length=50)
    alone, begun = model.new_cache(), 43
    model(tokens[:1, :begun], Rows.at([0], [begun], prompt_ends=True), cache=alone)
    cuts = range(begun, tokens.shape[1])
    each = torch.cat([stepped(model, row, cuts, alone.copy()) for row in torch.split(tokens, 1)])
    for rows in (1, 4):
        cache = model.new_cache()
        lengths = [begun, *[5] * (rows - 1)]
        model(tokens[:1, :begun].repeat(rows, 1), Rows.at([0] * rows, lengths, prompt_ends=True), cache=cache)
        cache.repeat_first_row(3)
        near(stepped(model, tokens, cuts, cache), each, f"where 3 rows repeat the first of {rows}", model)
    return True


def a_row_stores_the_same_in_a_batch(args: ModelArgs) -> bool:
    """A row of a batch stores the keys and values that it stores alone, in every layer and head."""
    model, lengths = tiny_model(args), [40, 75, 7]
    tokens = some_tokens(args, rows=3)
    together = model.new_cache()
    model(tokens, Rows.at([0] * 3, lengths, prompt_ends=True), cache=together)
    for row, length in enumerate(lengths):
        alone = model.new_cache()
        model(tokens[row : row + 1, :length], Rows.at([0], [length], prompt_ends=True), cache=alone)
        for layer, (many, one) in enumerate(zip(together.layers, alone.layers, strict=True)):
            same_reads(many, one, lengths, row, f"layer {layer}: row {row} of a batch of {lengths} tokens, and alone")
    return True


def a_prompt_in_chunks_stores_the_same(args: ModelArgs) -> bool:
    """A prompt in chunks stores what it stores in one call, and never more than predicted, without `whole_prompt`."""
    if empty(args).whole_prompt:
        return False
    model, tokens = tiny_model(args), some_tokens(args, rows=1)
    length, whole = tokens.shape[1], model.new_cache()
    most = whole.text_bytes(prompt=length, end=length, itemsize=8)
    model(tokens, Rows.at([0], [length], prompt_ends=True), cache=whole)
    for cuts in ((0, 30, 50), (0, 64), *((0, length - last) for last in (1, 3, 10))):
        cut, where = model.new_cache(rows=1, length=length), f"a prompt in one call, and in calls from {cuts}"
        for start, end in itertools.pairwise([*cuts, length]):
            model(tokens[:, start:end], Rows.at([start], [end - start], prompt_ends=end == length), cache=cut)
            if cut.nbytes > most:
                raise Broken(f"{where}: {cut.nbytes} bytes are stored at position {end}, at most {most} predicted")
        # Deeper layers have read what the kind rounded.
        same_reads(whole.layers[0], cut.layers[0], [length], 0, f"layer 0: {where}")
    return True


def what_is_kept_follows_from_scores_and_budget(args: ModelArgs) -> bool:
    """A kind with scores keeps its budget whatever the scores are: `choose` reads nothing that `score` has stored."""
    model, prompts = tiny_model(args), [75, 40]
    cache, stream = model.new_cache(), random_stream(0)
    scored = [layer for layer in cache.layers if isinstance(layer, ScoredCache)]
    for layer in scored:
        layer.score = lambda attended: torch.rand(attended.keys.shape[2:0:-1], generator=stream)  # type: ignore[method-assign]
    feed(model, cache, prompts, prompts)
    if not all(layer.keeps_its_budget(prompts) for layer in scored):
        raise Broken(f"prompts of {prompts} tokens with random scores keep another number of keys than `kept_of` says")
    return bool(scored)


def a_token_reads_what_was_given(args: ModelArgs) -> bool:
    """A token reads its own key, and each value that it reads is the one that was given at the reported position."""
    model, lengths = tiny_model(args), [75, 40]
    tokens, full, cache = some_tokens(args, rows=2), model.new_cache("static"), model.new_cache()
    for one in (full, cache):
        model(tokens, Rows.at([0, 0], lengths, prompt_ends=True), cache=one)
    width = args.head_dim
    for row, length in enumerate(lengths):
        given = reads(full.layers[0], lengths, row)  # by head, (length + 1, 2 x head_dim), in the order of positions
        for head, read in enumerate(reads(cache.layers[0], lengths, row, positions=True)):
            apart = (read[:, None, width:-1] - given[head][:, width:]).norm(dim=-1)  # (keys, positions)
            claimed, (least, nearest) = read[:, -1].long(), apart.min(1)  # equal tokens have equal values
            wrong = (apart.gather(1, claimed[:, None])[:, 0] > least + TOLERANCE).nonzero().flatten().tolist()
            where = f"layer 0, row {row}, head {head}: "
            if wrong:
                at, near_to = int(claimed[wrong[0]]), int(nearest[wrong[0]])
                raise Broken(f"{where}what is read as position {at} has the value of position {near_to}")
            if length not in claimed.tolist():
                raise Broken(f"{where}the token at position {length} does not read its own key")
            if len(set(claimed.tolist())) < len(claimed):
                raise Broken(f"{where}a position is read twice")
    return True


def a_copy_goes_on_by_itself(args: ModelArgs) -> bool:
    """A copy of a cache has the same contents, and is independent of the original."""
    model, tokens = tiny_model(args), some_tokens(args, rows=2, length=70)
    half, length = 58, tokens.shape[1]
    wanted = stepped(model, tokens, [0, *range(half, length)])[:, half:]
    cache = model.new_cache()
    stepped(model, tokens[:, :half], [0], cache)
    kept, other, later = cache.copy(), tokens.flip(0), half + 3
    made = [stepped(model, tokens[:, :later], range(half, later), kept)]
    stepped(model, other[:, :later], range(half, later), cache)  # the original goes on with other tokens,
    stepped(model, other, [0], cache)  # and begins another text
    made.append(stepped(model, tokens, range(later, length), kept))
    if not torch.equal(torch.cat(made, dim=1), wanted):
        raise Broken("a copy of the cache does not continue as the original would have")
    return True


def a_state_is_all_that_a_cache_needs(args: ModelArgs) -> bool:
    """A cache that is restored from the state of another continues as the other would have."""
    model, whole = tiny_model(args), some_tokens(args, rows=1)
    for half in (1, 37, whole.shape[1] - 2):
        tokens = whole[:, : half + 12]
        cuts = range(half, tokens.shape[1])
        wanted = stepped(model, tokens, [0, *cuts])[:, half:]
        cache, restored = model.new_cache(), model.new_cache()
        stepped(model, tokens[:, :half], [0], cache)
        states = [cloned(state) for state in cache.state(1, half)]
        restored.restore([cloned(state) for state in states], 1, half, model.source)
        for found, state, other in zip(restored.state(1, half), states, model.new_cache().layers, strict=True):
            if not same_tensors(found, state):
                raise Broken(f"the restored cache has another state: {sorted(found)}, not {sorted(state)}")
            refused(partial(other.restore, {**state, "of no kind": torch.zeros(1)}, 1, half))
        near(stepped(model, tokens, cuts, restored), wanted, f"after {half} positions were restored", model)
    return True


def a_text_may_be_truncated(args: ModelArgs) -> bool:
    """If `truncate` returns True, the text continues from there as it did before."""
    model, tokens = tiny_model(args), some_tokens(args, rows=2, length=50)
    length = tokens.shape[1]
    fed = model.new_cache()
    wanted = stepped(model, tokens, range(length), fed)
    for position in (length - 1, length - 7, length // 2, 1):
        cache, end = fed.copy(), min(position + 8, length)
        if cache.truncate(position):
            again = stepped(model, tokens[:, :end], range(position, end), cache)
            near(again, wanted[:, position:end], f"after truncation to position {position} of {length}", model)
    return True


def bad_writes_are_refused(args: ModelArgs) -> bool:
    """A bad write raises ValueError, and leaves the cache as it was."""
    args = replace(args, max_batch_size=2)
    for cache in empty(args).layers:
        _refuses_bad_writes(cache, args)
    return True


def _refuses_bad_writes(cache: KVCache, args: ModelArgs) -> None:
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
        raise Broken("a rejected write has changed the cache")


CLAIMS: tuple[Callable[[ModelArgs], bool], ...] = (
    lossless_in_any_chunks,
    lossless_to_the_bit_in_exact_mode,
    rows_do_not_touch_each_other,
    texts_leave_nothing_behind,
    bytes_are_as_predicted,
    rows_may_leave,
    texts_may_join,
    the_first_row_may_be_repeated,
    a_row_stores_the_same_in_a_batch,
    a_prompt_in_chunks_stores_the_same,
    what_is_kept_follows_from_scores_and_budget,
    a_token_reads_what_was_given,
    a_copy_goes_on_by_itself,
    a_state_is_all_that_a_cache_needs,
    a_text_may_be_truncated,
    bad_writes_are_refused,
)


# ---- parts of the claims ---------------------------------------------------------------------------------------------


def empty(args: ModelArgs) -> Cache:
    """Return an empty cache of the kind."""
    return Cache.of(args, args.kv_cache)


def lossless(args: ModelArgs) -> bool:
    return all(layer.lossless for layer in empty(args).layers)


def tiny_model(args: ModelArgs, dtype: torch.dtype = torch.float64, *, seed: int = 1) -> Transformer:
    """Return a model whose weights are large enough for every one of them to show in the logits."""
    model = Transformer(args)
    stream = random_stream(seed)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5, generator=stream)
        else:
            weight.data.normal_(0, 1.5 / weight.shape[1] ** 0.5, generator=stream)
    return model.to(dtype).eval().requires_grad_(False)


def feed(model: Transformer, cache: Cache, prompts: Sequence[int], ends: Sequence[int]) -> None:
    """Feed all prompts in one call, then one token per row and step; a row leaves the batch at its end."""
    rows, tokens = list(range(len(prompts))), some_tokens(model.args, rows=len(prompts), length=max(ends))
    model(tokens[:, : max(prompts)], Rows.at([0] * len(rows), prompts, prompt_ends=True), cache=cache)
    for step in range(max(end - prompt for prompt, end in zip(prompts, ends, strict=True))):
        stay = [place for place, row in enumerate(rows) if prompts[row] + step < ends[row]]
        if len(stay) < len(rows):
            cache.select_rows(stay)
            rows = [rows[place] for place in stay]
        starts = [prompts[row] + step for row in rows]
        model(tokens[rows, starts][:, None], starts, cache=cache)


def nothing_stored(cache: Cache, when: str) -> None:
    if cache.nbytes or any(map(reachable_bytes, cache.layers)):
        raise Broken(f"memory is allocated {when}: {cache.nbytes} bytes are counted, {list(cache.layers[0].held())}")


def reachable_bytes(cache: KVCache) -> int:
    """Return the bytes of all tensors that are reachable from a cache's attributes without a leading underscore."""
    held = [value for name, value in vars(cache).items() if name[0] != "_" and name not in ("args", "rope")]
    seen: dict[int, object] = {}
    storages: dict[int, int] = {}
    while held:
        one: Any = held.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # keeps the object, so that its id stays unique
        if isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, Mapping):
            held += one.values()
        elif isinstance(one, list | tuple | set | frozenset | deque):
            held += one
        elif is_dataclass(one):
            held += [getattr(one, field.name) for field in fields(one)]
        elif not isinstance(one, type):
            held += getattr(one, "__dict__", {}).values()
    return sum(storages.values())


def some_tokens(args: ModelArgs, *, rows: int, length: int = 75, seed: int = 0) -> Tensor:
    """Return random ids, (rows, length)."""
    return torch.randint(args.vocab_size, (rows, length), generator=random_stream(seed))


def random_stream(seed: int) -> torch.Generator:
    """Return a generator of the device that a check runs on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def chunkings(length: int) -> Iterator[Sequence[int]]:
    """Yield the starts of chunks: one chunk, single tokens, and random chunks."""
    yield [0]
    yield range(length)
    for count in (1, 2, 5, 20):
        yield [0, *sorted(random.sample(range(1, length), count))]


def uncached(model: Transformer, tokens: Tensor) -> Tensor:
    logits: Tensor = model.with_kv_caching(False)(tokens)
    return logits


def stepped(model: Transformer, tokens: Tensor, cuts: Sequence[int], cache: Cache | None = None) -> Tensor:
    """Return the logits of a text that is fed in chunks with the starts `cuts`, by default to a new cache."""
    cache = model.new_cache() if cache is None else cache
    logits = [model(tokens[:, a:b], a, cache=cache) for a, b in itertools.pairwise([*cuts, tokens.shape[1]])]
    return torch.cat(logits, dim=1)


def near(ours: Tensor, wanted: Tensor, where: str, model: Transformer) -> None:
    tolerance = TOLERANCE_OF_PLACES if any(layer.unrotated for layer in model.new_cache().layers) else TOLERANCE
    apart = (ours - wanted).abs().amax(-1)  # (rows, positions)
    if not float(apart.max()) <= tolerance:
        row, column = (~(apart <= tolerance)).nonzero()[0].tolist()
        raise Broken(
            f"logits differ by {float(apart.max()):.1e} {where}; {tolerance:.0e} is allowed; the first divergence is "
            f"in row {row} at token {column} of {apart.shape[1]}"
        )


def same_reads(one: KVCache, other: KVCache, lengths: Sequence[int], row: int, where: str) -> None:
    """Raise Broken unless a new token of `row` reads the same keys and values in both; `other` has this row alone."""
    found = reads(one, lengths, row)
    wanted = reads(other, lengths[row : row + 1], 0)
    for head, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if len(ours) != len(theirs):
            raise Broken(f"{where}: head {head} reads {len(ours)} keys, and {len(theirs)}; one of them dropped others")
        apart = (ours - theirs).abs().amax(-1)
        if not float(apart.max()) <= TOLERANCE_OF_PLACES:
            place = int((~(apart <= TOLERANCE_OF_PLACES)).nonzero()[0])
            raise Broken(f"{where}: head {head} reads another key or value as number {place} of {len(ours)}")


def reads(cache: KVCache, lengths: Sequence[int], row: int, *, positions: bool = False) -> list[Tensor]:
    """Return what a new token of a row reads in each KV head, (keys, 2 x head_dim), after prompts of these lengths.

    With `positions`, a last column has the position of each key.
    """
    cache, args, bsz = cache.copy(), cache.args, len(lengths)
    stream = random_stream(0)
    new = torch.randn(2, 1, 1, args.n_kv_heads, args.head_dim, generator=stream, dtype=torch.float64)
    queries = torch.randn(1, args.n_heads, args.head_dim, generator=stream, dtype=torch.float64).expand(bsz, -1, -1, -1)
    rows = Rows.at(lengths, [1] * bsz)
    keys, values = cache.update(rows, *new.expand(2, bsz, -1, -1, -1))
    seen, places = read_by_last(cache, rows, queries, keys.shape[1], row)
    both = torch.cat((keys, values), dim=-1)[row].transpose(0, 1)  # (n_kv_heads, kv_len, 2 x head_dim)
    both = torch.cat((both, places[..., None].to(both.dtype)), dim=-1) if positions else both
    return [held[own] for held, own in zip(both, seen, strict=True)]


def refused(write: Callable[[], object]) -> None:
    try:
        write()
    except ValueError:
        return
    raise Broken("a bad write was not rejected")


def cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(equal_bits(a[name], b[name]) for name in a)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
