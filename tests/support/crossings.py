"""The table of crossings: what a text gives by every door, in every kind of cache, against the same text alone.

    PYTHONPATH=.:tests/support python tests/support/crossings.py

prints the whole table. A kind that is registered and a door that is defined here are in it by themselves. A text is
`NEW` tokens behind a prompt. Compared are its ids and log-probabilities, the positions that are stored before its last
step, by layer and KV head, and bytes, which must be those predicted. Alone means: one prompt, in one call, of one row.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from fakes import Ids
from native import ARGS, FOLDER, VOCAB
from tiny import tiny_model

from llama.cli.prompt_files import answers
from llama.cli.prompt_lines import Question
from llama.fast.choose import make_fast
from llama.kv_cache import KVCache, ScoredCache
from llama.model import Transformer
from llama.request import Options, Step
from llama.serve.engine import Engine, Job, Update
from llama.testing import reads
from llama.texts.many import Writer, steady
from llama.texts.scheduler import Texts

PIECE = 256  # prompt tokens that the scheduler feeds between two steps
NEW = 4  # tokens of a text
LENGTHS = (1, 5, 255, 256, 257, 300, 600)  # below, at and behind a piece, a window of 64, and two lags of 128
MODES = ("plain", "native", "exact")
PARAMS = {"window": "window:20+3", "quest": "quest:32", "rotated": "rotated:k4v4+8", "kivi": "kivi:k2v2+32"}
BY_LAYER = ("paged@0;static", "knorm:0.2@0;static", "static@0;kivi:2+16", "window:20+3@0;static")
GREEDY = Options(temperature=0.0, logprobs=True)


class OwnScore(ScoredCache, kind="own-score"):
    """A kind of a user's own, which scores each position by itself."""

    default = "0.3"

    def score(self, attended: Any) -> torch.Tensor:
        return attended.values[0].abs().amax(-1).T


class OwnWindow(ScoredCache, kind="own-window"):
    """A kind of a user's own, which scores by the attention of the prompt's last 16 tokens."""

    default = "0.3"

    def score(self, attended: Any) -> torch.Tensor:
        received = attended.attention(16).mean(1)
        return received.unflatten(0, (attended.keys.shape[2], -1)).mean(1)


def kinds() -> list[str]:
    """Return every kind of the library, by a name that drops or rounds something of 300 tokens, and others."""
    ours = [name for name, kind in KVCache.kinds.items() if kind.__module__.startswith("llama.")]
    return [*(PARAMS.get(name, name) for name in ours), "own-score", "own-window", *BY_LAYER]


@cache
def model_of(mode: str) -> Transformer:
    """Return a model: plain in float64; native or exact in float32."""
    args = replace(ARGS, max_seq_len=700)
    model = tiny_model(args, dtype=torch.float64 if mode == "plain" else torch.float32).requires_grad_(False)
    if mode == "native":
        make_fast(model, FOLDER)
        return steady(model)
    if mode == "exact":
        model.exact = True
    return model


@cache
def text_of(length: int, seed: int = 0) -> list[int]:
    """Return random ids. Texts of a seed begin alike."""
    return Random(seed).choices(range(VOCAB), k=700)[:length]


@dataclass
class Made:
    """What a text has given. stored: the positions before the last step; unequal: bytes that were not predicted."""

    ids: list[int]
    logprobs: list[float | None] | None = None
    stored: list[list[int]] | None = None
    unequal: str = ""


class Seen:
    """Looks at the caches of a text's steps: `on_step`. Other rows have prompts of `beside` tokens."""

    def __init__(self, length: int, row: int, beside: dict[int, int] | None = None) -> None:
        self.length, self.row = length, row
        self.prompts = {row: length} | (beside or {})
        self.stored: list[list[int]] | None = None
        self.unequal = ""

    def __call__(self, step: Step) -> None:
        if self.row not in step.rows or step.cur_pos[step.rows.index(self.row)] != self.length + NEW - 1:
            return
        held, place = step.cache, step.rows.index(self.row)
        assert held is not None
        if self.prompts.keys() >= set(step.rows):
            prompts = [self.prompts[row] for row in step.rows]
            sizes = {"reserved": (len(prompts), max(prompts) + NEW), "itemsize": 8}
            predicted = held.predicted_bytes(prompts=prompts, ends=step.prev_pos, **sizes)  # type: ignore[arg-type]
            self.unequal = f"{held.nbytes} bytes instead of {predicted}" if held.nbytes != predicted else ""
        self.stored = [
            own[:, -1].long().tolist()
            for layer in held.layers
            for own in reads(layer, step.prev_pos, place, positions=True)
        ]

    def made(self, ids: list[int], logprobs: Any) -> Made:
        return Made(ids, logprobs, self.stored, self.unequal)


class Crossing(NamedTuple):
    """A text that goes through a door. Native code declines to be looked at, so that `seen` is for the plain mode."""

    mode: str
    kind: str
    length: int

    @property
    def model(self) -> Transformer:
        return model_of(self.mode)

    @property
    def prompt(self) -> list[int]:
        return text_of(self.length)

    @property
    def options(self) -> Options:
        return {**GREEDY, "kv_cache": self.kind}

    @property
    def layers(self) -> list[KVCache]:
        return model_of("plain").new_cache(self.kind).layers

    @property
    def lossless(self) -> bool:
        return all(layer.lossless for layer in self.layers)

    def looking(self, row: int, beside: dict[int, int] | None = None) -> tuple[Seen, Options]:
        seen = Seen(self.length, row, beside)
        return seen, Options(on_step=seen) if self.mode == "plain" else Options()


Door = Callable[[Crossing], Made | None]
DOORS: dict[str, Door] = {}
OFFERS: set[str] = set()  # the methods of a model and the options that the doors use


def door(name: str, *uses: str, lossless: bool = False) -> Callable[[Door], Door]:
    """Add a door to the table, which uses these methods of a model and these options.

    It returns None for a kind that it refuses by name: a lossy one, if it is for `lossless` ones.
    """

    def add(through: Door) -> Door:
        def checked(crossing: Crossing) -> Made | None:
            if not lossless or crossing.lossless:
                return through(crossing)
            with pytest.raises(ValueError, match="drops or rounds"):
                through(crossing)
            return None

        DOORS[name] = checked
        OFFERS.update(uses)
        return checked

    return add


def alone(crossing: Crossing) -> Made:
    seen, look = crossing.looking(0)
    ids, logprobs = crossing.model.generate_tokens([crossing.prompt], NEW, **{**crossing.options, **look})
    assert logprobs is not None
    return seen.made(ids[0], logprobs[0])


@door("batch", "generate_tokens", "kv_cache")
def beside_other_rows(crossing: Crossing) -> Made:
    beside = [text_of(crossing.length + 41, seed=1), text_of(3, seed=2)]
    seen, look = crossing.looking(1, {0: len(beside[0]), 2: len(beside[1])})
    prompts = [beside[0], crossing.prompt, beside[1]]
    ids, logprobs = crossing.model.generate_tokens(prompts, NEW, **{**crossing.options, **look})
    assert logprobs is not None
    return seen.made(ids[1], logprobs[1])


@door("stream", "stream")
def streamed(crossing: Crossing) -> Made:
    seen, look = crossing.looking(0)
    stream = crossing.model.stream(Ids(), [crossing.prompt], NEW, **{**crossing.options, **look})
    for _ in stream:
        pass
    return seen.made(stream.results[0]["ids"], stream.results[0]["logprobs"])


@door("session", "session")
def session(crossing: Crossing) -> Made:
    seen, look = crossing.looking(0, {1: 0})
    own = crossing.model.session(Ids(), kv_cache=crossing.kind)
    own.feed(crossing.prompt)
    completion = own.generate(NEW, **{**GREEDY, **look})
    return replace(seen.made(completion["ids"], completion["logprobs"]), unequal="")


@door("fork")
def forked(crossing: Crossing) -> Made:
    """The original goes on with other tokens before the fork does."""
    own = crossing.model.session(Ids(), kv_cache=crossing.kind)
    own.feed(crossing.prompt)
    fork = own.fork()
    own.append(text_of(9, seed=3))
    completion = fork.generate(NEW, **GREEDY)
    return Made(completion["ids"], completion["logprobs"])


@door("file of a session", "load_session")
def saved_and_loaded(crossing: Crossing) -> Made:
    own = crossing.model.session(Ids(), kv_cache=crossing.kind)
    own.feed(crossing.prompt)
    with TemporaryDirectory() as folder:
        own.save(Path(folder, "text"))
        completion = crossing.model.load_session(Path(folder, "text"), Ids()).generate(NEW, **GREEDY)
    return Made(completion["ids"], completion["logprobs"])


@door("prefix", "prefix")
def behind_a_prefix(crossing: Crossing) -> Made:
    """The first new token is the prompt of a row behind a session; the row beside it has another one.

    The session goes on afterwards.
    """
    own = crossing.model.session(Ids(), kv_cache=crossing.kind)
    own.feed(crossing.prompt)
    (first,) = own.fork().generate(1, **GREEDY)["ids"]
    prompts = [[first], [(first + 1) % VOCAB, 5]]
    ids, logprobs = crossing.model.generate_tokens(prompts, NEW - 1, prefix=own, **GREEDY)
    assert logprobs is not None
    after = own.generate(NEW, **GREEDY)["ids"]
    return Made([first, *ids[0]], [None, *logprobs[0]], unequal="" if after[0] == first else "the session has changed")


@door("share_prefix", "share_prefix")
def with_a_shared_beginning(crossing: Crossing) -> Made:
    other = [*crossing.prompt[: max(crossing.length - 3, crossing.length // 2)], *text_of(17, seed=4)]
    seen, look = crossing.looking(0, {} if crossing.layers[0].shares_memory else {1: len(other)})
    options: Options = {**crossing.options, **look, "share_prefix": True}
    ids, logprobs = crossing.model.generate_tokens([crossing.prompt, other], NEW, **options)
    assert logprobs is not None
    return seen.made(ids[0], logprobs[0])


@door("many")
def among_many(crossing: Crossing) -> Made:
    """A text joins one that runs, is joined by another, begins as both do, and moves when the first one leaves."""
    texts = Texts(crossing.model, rows=3, piece=PIECE, kv_cache=crossing.kind)
    made, text, predicted, unequal = Made([], []), None, 0, ""
    others = [text_of(crossing.length // 2 + 1), text_of(crossing.length + 70)]
    first = texts.add(others[0], 100, **GREEDY)
    for turn in range(400):
        if turn == 2:
            text = texts.add(crossing.prompt, NEW, **GREEDY)
        if turn == 3:
            texts.add(others[1], NEW, **GREEDY)
        if len(made.ids) == NEW - 2:
            texts.cancel(first)
        for event in texts.step():
            assert event.error is None, event.error
            if event.text is text and event.token is not None:
                assert made.logprobs is not None
                assert event.token.logprob is not None
                made.ids.append(event.token.id)
                made.logprobs.append(event.token.logprob)
        predicted = max(predicted, texts.predicted_bytes)  # a pool grows by an eighth, and stays
        if texts.nbytes > predicted * 9 / 8:
            unequal = f"{texts.nbytes} bytes, more than {predicted}"
        if texts.idle and turn > 3:
            break
    return replace(made, unequal=unequal)


@door("generate_many", "generate_many")
def generated_with_many(crossing: Crossing) -> Made:
    prompts = [text_of(crossing.length + 9, seed=5), crossing.prompt, text_of(2, seed=6)]
    made = crossing.model.generate_many(Ids(), prompts, NEW, rows=2, cache_bytes=10**8, **crossing.options)
    completion = dict(made)[1]
    return Made(completion["ids"], completion["logprobs"])


@door("files of prompts")
def in_a_file_of_prompts(crossing: Crossing) -> Made:
    prompts = [text_of(7, seed=7), crossing.prompt]
    lines = [json.dumps({"prompt": " ".join(map(str, ids)), "ids": True, "logprobs": True}) for ids in prompts]
    writer = Writer(crossing.model, Ids(), rows=2, kv_cache=crossing.kind)
    settings = {"max_gen_len": NEW, "temperature": 0.0, "seed": 1}
    arguments = partial(Question.arguments, settings=settings, encode_dialog=lambda _: [])
    found = {one["line"]: one["answer"] for one in answers(writer, enumerate(map(str.encode, lines)), arguments)}
    return Made(found[1]["ids"], found[1]["logprobs"])


@door("server")
def on_a_server(crossing: Crossing) -> Made:
    updates: SimpleQueue[Update] = SimpleQueue()
    engine = Engine(lambda: (crossing.model, Ids()), kv_cache=crossing.kind, rows=2)
    try:
        engine.ready.result()
        beside = Job(text_of(crossing.length + 5, seed=8), NEW, (), Options(temperature=0.0))
        engine.add([beside, Job(crossing.prompt, NEW, (), Options(**GREEDY), deliver=updates.put)])
        made: list[tuple[int, float | None]] = []
        while True:
            update = updates.get(timeout=60)
            assert update.error is None, update.error
            made += update.tokens
            if update.finish:
                ids, logprobs = zip(*made, strict=True)
                return Made(list(ids), list(logprobs))
    finally:
        engine.end()


class Characters(Ids):
    """Printable ASCII and a line end."""

    def encode(self, s: str, **_: Any) -> list[int]:
        return [(ord(letter) - 32) % 96 for letter in s]

    def decode_bytes(self, ids: Any, *, begins: bool = True) -> bytes:
        return bytes(10 if id == 95 else id + 32 for id in ids if id < 96)


@door("schema", "schema")
def with_a_schema(crossing: Crossing) -> Made:
    """The text with a schema beside others is that with it alone; then the one without it is returned."""
    options: Options = {**crossing.options, "schema": {"type": "array"}}
    one = crossing.model.generate(Characters(), [crossing.prompt], NEW, **options)[0]
    beside = [crossing.prompt, text_of(9, seed=9), text_of(crossing.length + 3, seed=9)]
    many = dict(crossing.model.generate_many(Characters(), beside, NEW, rows=2, **options))[0]
    return reference(crossing) if one["ids"] == many["ids"] else Made(many["ids"])


@door("speculate", "speculate", lossless=True)
def with_guesses(crossing: Crossing) -> Made:
    options: Options = {**crossing.options, "speculate": "lookup"}
    ids, logprobs = crossing.model.generate_tokens([crossing.prompt, text_of(9)], NEW, **options)
    assert logprobs is not None
    return Made(ids[0], logprobs[0])


@door("cache off", "kv_caching")
def without_a_cache(crossing: Crossing) -> Made | None:
    if not crossing.lossless:
        return None  # another text
    ids, logprobs = crossing.model.generate_tokens([crossing.prompt], NEW, **{**crossing.options, "kv_caching": False})
    assert logprobs is not None
    return Made(ids[0], logprobs[0])


# ---- the table -------------------------------------------------------------------------------------------------------


@cache
def reference(crossing: Crossing) -> Made:
    return alone(crossing)


def differences(crossing: Crossing, name: str) -> str | None:
    """Return how a text differs by a door from the text alone, "" if it does not; None if the door refuses the kind."""
    try:
        wanted = reference(crossing)
    except ValueError as why:
        if crossing.mode == "exact" and not crossing.lossless and "drops or rounds" in str(why):
            return None
        raise
    found = DOORS[name](crossing)
    if found is None:
        return None
    said = [found.unequal or wanted.unequal]
    if found.ids != wanted.ids:
        said.append(f"the ids {found.ids} instead of {wanted.ids}")
    if found.logprobs is not None and wanted.logprobs is not None:
        pairs = zip(found.logprobs, wanted.logprobs, strict=True)
        apart = max(abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None)
        if not apart <= tolerance(crossing, name):
            said.append(f"log-probabilities apart by {apart:.1e}")
    if found.stored is not None and wanted.stored is not None and found.stored != wanted.stored:
        said.append("other positions are stored")
    return "; ".join(filter(None, said))


def tolerance(crossing: Crossing, name: str) -> float:
    """Return the largest difference of log-probabilities by rounding; 0 where bits are promised."""
    if crossing.mode == "exact":
        return 0
    if crossing.mode == "plain":  # RoPE's table is float32, and a kind that renumbers keys uses other entries of it
        return 1e-4 if any(layer.unrotated for layer in crossing.layers) else 1e-9
    execution = crossing.model.execution_with(crossing.kind)
    beside = name in ("batch", "prefix", "share_prefix")  # others
    return 1e-4 if execution.runner == "plain" or (execution.plain_prompts and beside) else 0


def main() -> None:
    """Print how many crossings of each kind and door give the text alone, and which do not."""
    torch.set_num_threads(1)
    count = 0
    for mode in MODES:
        print(f"\n{mode:20}" + "".join(f"{name:>17}" for name in DOORS))
        for kind in kinds():
            same, wrong = [], []
            for name in DOORS:
                found = [differences(Crossing(mode, kind, length), name) for length in LENGTHS]
                count += len(found)
                same.append("refused" if None in found else f"{found.count('')} of {len(found)}")
                wrong += [f"  {name}, {n} tokens: {said}" for n, said in zip(LENGTHS, found, strict=True) if said]
            print("\n".join([f"{kind:20}" + "".join(f"{one:>17}" for one in same), *wrong]), flush=True)
    print(f"\n{count:,} crossings")


if __name__ == "__main__":
    main()
