"""A conversation replayed by its ids, with the cache kept, made anew and off; prompts that share their beginning.

Each function but `turns_of` is a job of `llama.bench.run.worker`. Every turn is fed up to where its answer begins, and
the time to the first token is taken; the answer that stands in the text is then fed without a clock, so that all ways
and engines do the same work.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama.bench.cell import Cell
from llama.bench.run.engines import (
    GREEDY,
    Conversation,
    Engine,
    LlamaEngine,
    SessionConversation,
    forwards_by_runner,
    path_of,
)
from llama.bench.run.models import find_model
from llama.bench.run.opening import open_engine
from llama.bench.schema import ChatPlan, OnDisk, Way, WayName
from llama.bench.texts import read_dialog, read_text
from llama.host.cores import OtherLoad
from llama.request import Options
from llama.streaming import TextCodec, encode_prompt
from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat
from llama.tokenizer.transcript import Transcript


class Turn(NamedTuple):
    """A turn of a conversation: `history` tokens, then what is new, up to the answer; and the text with the answer."""

    history: int
    prompt: list[int]
    whole: list[int]


def turns_of(tokenizer: Tokenizer, dialog: Sequence[Mapping[str, str]]) -> list[Turn]:
    """Return the turns of a dialog in the tokenizer's chat format, or as plain text where it has none."""
    ask = _asking(tokenizer)
    turns, whole = list[Turn](), list[int]()
    for question, answer in zip(dialog[::2], dialog[1::2], strict=True):
        history, prompt = ask(whole, question["content"])
        turns.append(Turn(history, prompt, [*prompt, *tokenizer.encode(answer["content"], bos=False, eos=False)]))
        whole = turns[-1].whole
    return turns


def _asking(tokenizer: Tokenizer) -> Callable[[list[int], str], tuple[int, list[int]]]:
    """Return what adds a question to a text: how much of the text stays, and the ids up to where the answer begins."""
    try:
        format, talk = ChatFormat(tokenizer), Transcript()
    except ValueError:  # then a conversation is a text like any other
        opening = encode_prompt(tokenizer, "A conversation.")
        encode = partial(tokenizer.encode, bos=False, eos=False)
        return lambda whole, text: (len(whole), [*(whole or opening), *encode(f"\n\nUser: {text}\n\nAssistant: ")])

    def ask(whole: list[int], text: str) -> tuple[int, list[int]]:
        nonlocal talk
        talk, prompt = talk.ask(format, whole, text)
        return talk.kept[-1], prompt

    return ask


def measure_conversation(cell: Cell, *, plan: ChatPlan) -> dict[str, Any]:
    """Replay the conversation, with the cache kept and made anew each turn; or, as the cell says, without it."""
    turns = turns_of(find_model(cell).tokenizer, read_dialog())[: len(plan["turns"])]
    engine = open_engine(cell).engine
    watch = _Watch(engine)
    _replay(engine, turns[:2], "kept" if cell.kv_caching else "off")  # warms up; with the first turn's shapes, too
    watch.begin()
    ways, disk = list[Way](), None
    for name in ("anew", "kept") if cell.kv_caching else ("off",):  # the kept one last: its text goes on to disk
        way, conversation = _replay(engine, turns, name)
        ways.append(way)
        if name == "kept" and isinstance(conversation, SessionConversation):
            disk = _on_disk(conversation, turns[0])
        conversation.close()
    return {"ways": ways[::-1], "disk": disk, **watch.end()}


def _replay(engine: Engine, turns: list[Turn], name: WayName) -> tuple[Way, Conversation]:
    """Go through the turns in one way; return what was seen, and the text at its end."""
    way: Way = {"name": name, "seconds": [], "fed": [], "asked": [], "cache_bytes": [], "ids": []}
    begin = partial(engine.conversation, len(turns[-1].whole), kv_caching=name != "off")
    conversation = begin()
    for place, turn in enumerate(turns):
        if name != "kept" and place > 0:
            conversation.close()
            conversation = begin()
        fed, started = conversation.fed, time.perf_counter()
        first = conversation.feed(turn.prompt)
        way["seconds"].append([time.perf_counter() - started])
        way["fed"].append(conversation.fed - fed)
        way["asked"].append(len(turn.prompt) - (turn.history if name == "kept" and place > 0 else 0))
        way["cache_bytes"].append(conversation.cache_bytes)
        way["ids"].append([first])
        if name == "kept":
            conversation.feed(turn.whole)
    return way, conversation


def _on_disk(conversation: SessionConversation, more: Turn) -> OnDisk:
    """Save the session, load it, feed its text anew, and see whether what was loaded goes on alike, with more text."""
    session = conversation.session
    model, tokenizer, ids = session.model, session.tokenizer, list(session.tokens)
    with TemporaryDirectory(prefix="llama-kv-") as folder:
        path = Path(folder) / "session.safetensors"
        saving, _ = _timed(partial(session.save, path))
        loading, loaded = _timed(partial(model.load_session, path, tokenizer))
        size = path.stat().st_size
    anew = model.session(tokenizer)
    feeding, _ = _timed(partial(anew.feed, ids))
    anew.drop()
    for one in (session, loaded):
        one.append(more.prompt[more.history :])
    assert session.logits is not None
    assert loaded.logits is not None
    alike = torch.equal(session.logits, loaded.logits)
    loaded.drop()
    return {
        "tokens": len(ids),
        "file_bytes": size,
        "save_seconds": [saving],
        "load_seconds": [loading],
        "feed_seconds": [feeding],
        "alike": alike,
    }


def measure_prompts(cell: Cell, *, plan: ChatPlan) -> dict[str, Any]:
    """Feed many prompts that begin alike, their beginning once for all of them and in every row."""
    engine = open_engine(cell).engine
    assert isinstance(engine, LlamaEngine)
    prompts = shared_prompts(engine.tokenizer, plan)
    watch = _Watch(engine)
    for share in (True, False):
        _first_tokens(engine, [prompt[-plan["own"] - 1 :] for prompt in prompts[:2]], share=share)  # warms up
    watch.begin()
    ways = [_first_tokens(engine, prompts, share=share) for share in (True, False)]
    length = plan["shared"] + plan["own"]
    for way, asked in zip(ways, (plan["shared"] + plan["rows"] * plan["own"], plan["rows"] * length), strict=True):
        way["asked"] = [asked]
    return {"ways": ways, "disk": None, **watch.end()}


def shared_prompts(tokenizer: TextCodec, plan: ChatPlan) -> list[list[int]]:
    """Return rows of ids that begin with the same text and go on with passages of their own."""
    ids = encode_prompt(tokenizer, read_text())
    begins = (plan["shared"] + row * plan["own"] for row in range(plan["rows"]))
    return [[*ids[: plan["shared"]], *ids[begin : begin + plan["own"]]] for begin in begins]


def _first_tokens(engine: LlamaEngine, prompts: list[list[int]], *, share: bool) -> Way:
    model, fed, held = engine.model, list[int](), list[int]()

    def look(_: object, given: tuple[Any, ...], named: dict[str, Any], __: Tensor) -> None:
        fed.append(given[0].numel())
        held.append(named["cache"].nbytes)

    look.only_looks = True  # type: ignore[attr-defined]
    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        options: Options = {**GREEDY, "share_prefix": share}
        seconds, (ids, _) = _timed(partial(model.generate_tokens, prompts, 1, **options))
    finally:
        hook.remove()
    name: WayName = "shared" if share else "not shared"
    return {"name": name, "seconds": [[seconds]], "fed": [sum(fed)], "asked": [], "cache_bytes": [max(held)],
            "ids": [[row[0] for row in ids]]}  # fmt: skip


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    made = act()
    return time.perf_counter() - started, made


class _Watch:
    """What executed the forwards of an engine, and how busy others were meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._others, self._all = engine, OtherLoad(), 0
        if isinstance(engine, LlamaEngine):
            engine.model.register_forward_hook(self._count)

    def begin(self) -> None:
        self._all, self._fast = 0, self._by_runner()
        self._others.start()

    def end(self) -> dict[str, Any]:
        load, path = self._others.stop(), self._engine.path
        if isinstance(self._engine, LlamaEngine):
            path = path_of(self._engine.model, fast=self._by_runner() - self._fast, all=self._all)
        return {"other_load_cores": [load], "path": path}

    def _by_runner(self) -> int:
        return forwards_by_runner(self._engine.model) if isinstance(self._engine, LlamaEngine) else 0

    def _count(self, *_: object) -> None:
        self._all += 1

    _count.only_looks = True  # type: ignore[attr-defined]
