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
MIXED_BATCHES = (*(((n,), (n,)) for n in (1, 16, 31, 64, 100)), ((5, 33), (20, 34)), ((40,), (41,)), ((1,), (70,)))

LIVES, ACTS = 6, 8  # random lives of a batch, and what happens in each


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
        near(stepped(model, tokens, cuts), wanted, f"in chunks that begin at {cuts}", empty(args))
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


def a_row_is_its_text_alone(args: ModelArgs) -> bool:
    """A row gives what its text gives alone, beside rows that join, move and leave, after copies, files and cuts."""
    for seed in range(LIVES):
        life = Life(args, random.Random(seed))
        for act in [life.begin, *life.dice.choices(life.acts, k=ACTS)]:
            act()
            life.step()
    return True


class Text:
    """A text, and a cache of its own, which was fed in the same calls: (the end, whether a prompt ends there)."""

    def __init__(self, model: Transformer, tokens: list[int]) -> None:
        self.model, self.tokens, self.cache, self.end = model, tokens, model.new_cache(), 0
        self.calls = list[tuple[int, bool]]()

    def feed(self, end: int, prompt_ends: bool = False) -> Tensor:
        """Return the logits of the tokens up to `end`, which were not fed before, (1, tokens, vocab_size)."""
        rows = Rows.at([self.end], [end - self.end], prompt_ends=prompt_ends)
        logits: Tensor = self.model(torch.tensor([self.tokens[self.end : end]]), rows, cache=self.cache)
        self.calls.append((end, prompt_ends))
        self.end = end
        return logits

    def again(self, end: int, tokens: list[int]) -> "Text":
        """Return a text that goes on with other tokens from `end` on, in a cache that has seen nothing else."""
        made = Text(self.model, [*self.tokens[:end], *tokens[end:]])
        for stop, prompt_ends in self.calls:
            if made.end < end:
                made.feed(min(stop, end), prompt_ends)
        return made


class Life:
    """A batch, and things that happen to it. `step` compares each row with its text alone."""

    def __init__(self, args: ModelArgs, dice: random.Random) -> None:
        self.model, self.dice, self.texts, self.done = tiny_model(args), dice, list[Text](), list[str]()
        self.cache = self.model.new_cache()
        self.acts = [self.begin, self.arrive, self.move, self.repeat, self.copy, self.save, self.cut]

    def tokens(self) -> list[int]:
        return self.dice.choices(range(self.model.args.vocab_size), k=self.model.args.max_seq_len)

    def begin(self) -> None:
        """Feed prompts of different lengths at once, where other texts were."""
        self.done = ["begin"]
        self.texts = [Text(self.model, self.tokens()) for _ in range(self.dice.randint(1, 4))]
        self.feed([self.dice.choice((1, 7, self.dice.randint(2, 45))) for _ in self.texts], prompt_ends=True)

    def step(self) -> None:
        """Feed a token a row, or a few, and then a token a row."""
        for most in (1, self.dice.choice((1, 1, 5)), 1):
            if max(text.end for text in self.texts) + 9 > self.model.args.max_seq_len:  # also for what happens next
                self.begin()
            self.feed([self.dice.randint(1, most) for _ in self.texts])

    def feed(self, lengths: Sequence[int], *, prompt_ends: bool = False) -> None:
        starts = [text.end for text in self.texts]
        fed = [text.tokens[start : start + max(lengths)] for text, start in zip(self.texts, starts, strict=True)]
        padded = torch.tensor([[*ids, *[0] * (max(lengths) - len(ids))] for ids in fed])
        made = self.model(padded, Rows.at(starts, lengths, prompt_ends=prompt_ends), cache=self.cache)
        for row, (text, length) in enumerate(zip(self.texts, lengths, strict=True)):
            where = f"of row {row} of {len(lengths)}, after {', '.join(self.done)}"
            near(made[row : row + 1, :length], text.feed(text.end + length, prompt_ends), where, self.cache)

    def arrive(self) -> None:
        """Let a text join behind the last row, unless the kind refuses that."""
        try:
            self.cache.check_joins()
        except ValueError:
            return
        self.done.append("a text joined")
        text, cache = Text(self.model, self.tokens()), self.cache.sibling()
        text.feed(self.dice.randint(1, 40), True)
        self.model(torch.tensor([text.tokens[: text.end]]), Rows.at([0], [text.end], prompt_ends=True), cache=cache)
        self.cache.join(cache, len(self.texts), text.end)
        self.texts.append(text)

    def move(self, *, most: int = 4) -> None:
        """Keep some rows, in any order."""
        self.done.append("rows moved or left")
        rows = self.dice.sample(range(len(self.texts)), min(self.dice.randint(1, most), len(self.texts)))
        self.cache.select_rows(rows)
        self.texts = [self.texts[row] for row in rows]

    def repeat(self) -> None:
        """Copy the first row to others, which go on with other tokens."""
        self.done.append("the first row was repeated")
        self.texts = [self.texts[0].again(self.texts[0].end, self.tokens()) for _ in range(self.dice.randint(2, 4))]
        self.cache.repeat_first_row(len(self.texts))

    def copy(self) -> None:
        """Go on in the cache or in a copy of it, and then feed other tokens to the other one."""
        self.done.append("a copy was made")
        other, starts = self.cache.copy(), [text.end for text in self.texts]
        used, self.cache = (other, self.cache) if self.dice.random() < 0.5 else (self.cache, other)
        self.feed([1] * len(starts))
        self.model(torch.tensor([[self.dice.randrange(self.model.args.vocab_size)]] * len(starts)), starts, cache=used)

    def save(self) -> None:
        """Go on in a cache that was restored from the state of one row."""
        self.move(most=1)
        self.done.append("the state was restored")
        end, restored = self.texts[0].end, self.model.new_cache()
        states = [cloned(state) for state in self.cache.state(1, end)]
        restored.restore([cloned(state) for state in states], 1, end, self.model.source)
        for found, state, other in zip(restored.state(1, end), states, self.model.new_cache().layers, strict=True):
            if not same_tensors(found, state):
                raise Broken(f"the restored cache has another state: {sorted(found)}, not {sorted(state)}")
            refused(partial(other.restore, {**state, "of no kind": torch.zeros(1)}, 1, end))
        self.cache = restored

    def cut(self) -> None:
        """Go on with other tokens from an earlier position, if the cache can."""
        self.move(most=1)
        (text,) = self.texts
        end = self.dice.choice((text.end - 1, text.end - 7, text.end // 2, 1))
        if 0 < end < text.end and self.cache.truncate(end):
            self.done.append(f"the text was cut at {end}")
            self.texts = [text.again(end, self.tokens())]


def memory_may_have_any_contents(args: ModelArgs) -> bool:
    """A text gives the same bits where other texts were, even if their memory is NaN."""
    model, tokens = tiny_model(args), some_tokens(args, rows=2)
    cuts = [0, *range(60, tokens.shape[1])]
    wanted, cache = stepped(model, tokens, cuts), model.new_cache()
    stepped(model, tokens.flip(0)[:, :50], [0, 40], cache)
    for stored in (stored for layer in cache.layers for stored in layer.held().values()):
        if stored.is_floating_point():
            stored.fill_(torch.nan)
    if not torch.equal(stepped(model, tokens, cuts, cache), wanted):
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
    a_row_is_its_text_alone,
    memory_may_have_any_contents,
    bytes_are_as_predicted,
    a_prompt_in_chunks_stores_the_same,
    what_is_kept_follows_from_scores_and_budget,
    a_token_reads_what_was_given,
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


def near(ours: Tensor, wanted: Tensor, where: str, cache: Cache) -> None:
    tolerance = TOLERANCE_OF_PLACES if any(layer.unrotated for layer in cache.layers) else TOLERANCE
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
