"""A conversation replayed by its ids, with the cache kept, rebuilt and off; and prompts that begin alike.

Each public function except `turns_of` and `shared_prompts` is a job of `llama.bench.run.worker`. Every turn is fed up
to its answer, and the time to the first token is measured. The answer of the text is then fed without a clock, so that
all ways and engines do the same work.
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
from llama.bench.run.models import find_model, open_engine
from llama.bench.run.validity import check
from llama.bench.schema import Row
from llama.bench.texts import read_corpus, read_dialog
from llama.host.cores import OtherLoad
from llama.request import Options
from llama.streaming import TextCodec, encode_prompt
from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat
from llama.tokenizer.transcript import Transcript

# Names of checks.
FED, FROM_DISK = "the tokens fed are those expected", "a session from disk goes on alike"


class Turn(NamedTuple):
    """A turn of a conversation: `history` tokens, the prompt up to the answer, and the text with the answer."""

    history: int
    prompt: list[int]
    whole: list[int]


def turns_of(tokenizer: Tokenizer, dialog: Sequence[Mapping[str, str]]) -> list[Turn]:
    """Return the turns of a dialog in the tokenizer's chat format, or as plain text if it has none."""
    ask = _asking(tokenizer)
    turns, whole = list[Turn](), list[int]()
    for question, answer in zip(dialog[::2], dialog[1::2], strict=True):
        history, prompt = ask(whole, question["content"])
        turns.append(Turn(history, prompt, [*prompt, *tokenizer.encode(answer["content"], bos=False, eos=False)]))
        whole = turns[-1].whole
    return turns


def _asking(tokenizer: Tokenizer) -> Callable[[list[int], str], tuple[int, list[int]]]:
    """Return a function that adds a question to a text and returns how much of it stays, and the ids of the prompt."""
    try:
        format, talk = ChatFormat(tokenizer), Transcript()
    except ValueError:  # then the conversation is plain text
        opening = encode_prompt(tokenizer, "A conversation.")
        encode = partial(tokenizer.encode, bos=False, eos=False)
        return lambda whole, text: (len(whole), [*(whole or opening), *encode(f"\n\nUser: {text}\n\nAssistant: ")])

    def ask(whole: list[int], text: str) -> tuple[int, list[int]]:
        nonlocal talk
        talk, prompt = talk.ask(format, whole, text)
        return talk.kept[-1], prompt

    return ask


def measure_conversation(cell: Cell, *, plan: dict[str, Any]) -> dict[str, Any]:
    """Replay the conversation with the cache kept, and rebuilt in each turn; or without it, if the cell says so."""
    turns = turns_of(find_model(cell).tokenizer, read_dialog())[: len(plan["turns"])]
    engine = open_engine(cell).engine
    _replay(engine, turns[:2], "kept" if cell.kv_caching else "off")  # warms up; with the first turn's shapes, too
    watch = _Watch(engine)
    rows, disk = list[Row](), list[Row]()
    for way in ("rebuilt", "kept") if cell.kv_caching else ("off",):  # the kept one last: its text goes on to disk
        seen, conversation = _replay(engine, turns, way)
        rows = seen + rows
        if way == "kept" and isinstance(conversation, SessionConversation):
            disk = _on_disk(conversation, turns[0])
        conversation.close()
    return {"rows": [*watch.end(), *rows, _fed_check(rows), *disk]}


def _replay(engine: Engine, turns: list[Turn], way: str) -> tuple[list[Row], Conversation]:
    """Go through the turns in one way; return a row for each, and the text at its end."""
    rows: list[Row] = []
    begin = partial(engine.conversation, len(turns[-1].whole), kv_caching=way != "off")
    conversation = begin()
    for place, turn in enumerate(turns):
        if way != "kept" and place > 0:
            conversation.close()
            conversation = begin()
        fed, started = conversation.fed, time.perf_counter()
        first = conversation.feed(turn.prompt)
        row: Row = {"figures": "turn", "way": way, "turn": place, "ids": [[first]]}
        row["first_token_seconds"] = [time.perf_counter() - started]
        row |= {"history": turn.history, "new": len(turn.prompt) - turn.history, "tokens_fed": conversation.fed - fed}
        row["tokens_expected"] = row["new"] if way == "kept" and place > 0 else len(turn.prompt)
        rows.append({**row, "cache_bytes": conversation.cache_bytes})
        if way == "kept":
            conversation.feed(turn.whole)
    return rows, conversation


def _fed_check(rows: list[Row]) -> Row:
    """Return the check that every way fed the tokens that it should feed."""
    ways = dict.fromkeys(row["way"] for row in rows)
    fed, expected = (
        {way: sum(row[column] for row in rows if row["way"] == way) for way in ways}
        for column in ("tokens_fed", "tokens_expected")
    )
    wrong = [row["way"] for row in rows if row["tokens_fed"] != row["tokens_expected"]]
    words = ", ".join(f"{way} {tokens:,} tokens" for way, tokens in fed.items())
    words += "".join(f"; {way} should have fed {expected[way]:,}" for way in dict.fromkeys(wrong))
    return check(FED, not wrong, words)


def _on_disk(conversation: SessionConversation, more: Turn) -> list[Row]:
    """Save the session, load it, and feed its text again; check that the loaded one continues like the saved one."""
    session = conversation.session
    model, tokenizer, ids = session.model, session.tokenizer, list(session.tokens)
    with TemporaryDirectory(prefix="llama-kv-") as folder:
        path = Path(folder) / "session.safetensors"
        saving, _ = _timed(partial(session.save, path))
        loading, loaded = _timed(partial(model.load_session, path, tokenizer))
        size = path.stat().st_size
    again = model.session(tokenizer)
    feeding, _ = _timed(partial(again.feed, ids))
    again.drop()
    for one in (session, loaded):
        one.append(more.prompt[more.history :])
    assert session.logits is not None
    assert loaded.logits is not None
    same = torch.equal(session.logits, loaded.logits)
    loaded.drop()
    row: Row = {"figures": "disk", "tokens": len(ids), "file_bytes": size, "same_logits": same}
    row |= {"save_seconds": [saving], "load_seconds": [loading], "feed_seconds": [feeding]}
    return [row, check(FROM_DISK, same, "the next logits, bit by bit")]


def measure_prompts(cell: Cell, *, plan: dict[str, Any]) -> dict[str, Any]:
    """Feed many prompts that begin alike, with their common beginning fed once, and fed in every row."""
    engine = open_engine(cell).engine
    assert isinstance(engine, LlamaEngine)
    prompts = shared_prompts(engine.tokenizer, plan)
    for share in (True, False):
        _first_tokens(engine, [prompt[-plan["own"] - 1 :] for prompt in prompts[:2]], share=share)  # warms up
    watch = _Watch(engine)
    rows = [_first_tokens(engine, prompts, share=share) for share in (True, False)]
    shared, each = plan["shared"], plan["rows"] * plan["own"]
    for row, expected in zip(rows, (shared + each, plan["rows"] * shared + each), strict=True):
        row["tokens_expected"] = expected
    return {"rows": [*watch.end(), *rows, _fed_check(rows)]}


def shared_prompts(tokenizer: TextCodec, plan: dict[str, Any]) -> list[list[int]]:
    """Return rows of ids that begin with the same text and continue with different passages."""
    ids = encode_prompt(tokenizer, read_corpus())
    begins = (plan["shared"] + row * plan["own"] for row in range(plan["rows"]))
    return [[*ids[: plan["shared"]], *ids[begin : begin + plan["own"]]] for begin in begins]


def _first_tokens(engine: LlamaEngine, prompts: list[list[int]], *, share: bool) -> Row:
    model, fed, cached = engine.model, list[int](), list[int]()

    def look(_: object, given: tuple[Any, ...], named: dict[str, Any], __: Tensor) -> None:
        fed.append(given[0].numel())
        cached.append(named["cache"].nbytes)

    look.only_looks = True  # type: ignore[attr-defined]
    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        options: Options = {**GREEDY, "share_prefix": share}
        seconds, (ids, _) = _timed(partial(model.generate_tokens, prompts, 1, **options))
    finally:
        hook.remove()
    row: Row = {"figures": "prompts", "way": "shared" if share else "not shared", "ids": [[row[0] for row in ids]]}
    return {**row, "first_token_seconds": [seconds], "tokens_fed": sum(fed), "cache_bytes": max(cached)}


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    made = act()
    return time.perf_counter() - started, made


class _Watch:
    """Observes, from now on, what executes the forwards of an engine, and how busy others are."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._others, self._all = engine, OtherLoad(), 0
        if isinstance(engine, LlamaEngine):
            engine.model.register_forward_hook(self._count)
            self._before = forwards_by_runner(engine.model)
        self._others.start()

    def end(self) -> list[Row]:
        """Return the row of the cell."""
        load, path = self._others.stop(), self._engine.path
        if isinstance(self._engine, LlamaEngine):
            fast = forwards_by_runner(self._engine.model) - self._before
            path = path_of(self._engine.model, fast=fast, all=self._all)
        return [{"figures": "cell", "error": None, "notes": [], "path": path, "other_load_cores": [load]}]

    def _count(self, *_: object) -> None:
        self._all += 1

    _count.only_looks = True  # type: ignore[attr-defined]
