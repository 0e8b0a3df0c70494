"""The preset of conversations does the same work in every way, sees what was really fed, and shows what it took."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint
from jobs_here import Here, jobs_here, run_of

from llama import Chat, Transformer, load
from llama.bench import presets
from llama.bench.cell import Cell
from llama.bench.presets import Group, chat_cells, plan_report
from llama.bench.run import conversation, worker
from llama.bench.run.conversation import FED, FROM_DISK, shared_prompts, turns_of
from llama.bench.run.engines import SessionConversation
from llama.bench.run.models import find_model
from llama.bench.schema import Report, Row, cell_row, rows_of
from llama.bench.texts import read_corpus, read_dialog
from llama.host.cores import OtherLoad
from llama.tokenizer.chat import ChatFormat

DIALOG = [
    {"role": "user", "content": "one"}, {"role": "assistant", "content": "the hell"},
    {"role": "user", "content": "two"}, {"role": "assistant", "content": "hello the"},
    {"role": "user", "content": "three"}, {"role": "assistant", "content": "t"},
]  # fmt: skip
HAS_LLAMA_CPP = find_spec("llama_cpp") is not None  # which the suite can do without
ENGINES = ["transformers", *(["llama.cpp"] if HAS_LLAMA_CPP else [])]
CELLS = [
    *("batch 1, cache on", "batch 1, cache off"),
    *("transformers, batch 1, cache on", "transformers, batch 1, cache off"),
    *(["llama.cpp, batch 1, cache on"] if HAS_LLAMA_CPP else []),
    "batch 4, cache on",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=160)
    return Cell(input_len=64, output_len=1, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return done_here(monkeypatch)


def done_here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Let jobs be done in this process, with a short conversation, once each, on a quiet machine."""
    monkeypatch.setattr(presets, "read_dialog", lambda: DIALOG)
    monkeypatch.setattr(conversation, "read_dialog", lambda: DIALOG)
    monkeypatch.setattr(conversation, "read_corpus", lambda: read_corpus()[:3000])
    monkeypatch.setattr(presets, "OWN", 5)
    monkeypatch.setattr(presets, "SHARED_ROWS", 4)
    monkeypatch.setattr(OtherLoad, "stop", lambda _: 0.0)
    return jobs_here(monkeypatch, lambda kind, cell: f"{kind}: {cell.name}")


def planned(base: Cell, engines: list[str], minutes: float = 60) -> tuple[Report, list[Group]]:
    return plan_report("chat", base, engines=engines, budget=minutes)


def measured(base: Cell, out: Path, engines: list[str] = [], **asked: Any) -> Report:  # noqa: B006  (read only)
    repeats = {"repetitions": asked.get("n", 1), "resume": asked.get("resume", False)}
    run = run_of(planned(base, engines, asked.get("minutes", 60)), out, **repeats)
    run.run()
    return run.report


def ways_of(report: Report, cell: int, figures: str = "turn") -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows_of(report, figures, cell):
        found.setdefault(row["way"], []).append(row)
    return found


def violations(report: Report, status: str = "violated") -> list[tuple[int, str]]:
    return [(row["cell"], row["name"]) for row in rows_of(report, "check") if row["status"] == status]


@pytest.fixture(scope="module")
def whole(base: Cell, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, list[str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        here = done_here(monkeypatch)
        return measured(base, tmp_path_factory.mktemp("run"), ENGINES), here.done


def test_every_engine_does_the_same_turns_in_every_way_it_has(whole: tuple[Report, list[str]]) -> None:
    report, jobs = whole
    assert sorted(jobs[1:]) == sorted([*(f"conversation: {name}" for name in CELLS[:-1]), f"prompts: {CELLS[-1]}"])
    assert jobs[1:3] == [f"conversation: {name}" for name in CELLS[:2]], "ours first, the pair together"
    assert report["failures"] == []
    assert [row["error"] for row in rows_of(report, "cell")] == [None] * len(CELLS)
    first = ways_of(report, 0)["kept"]
    new = [turn["new"] for turn in report["plan"]["turns"]]
    all_of_it = [turn["history"] + turn["new"] for turn in report["plan"]["turns"]]
    for cell, names in enumerate(
        [["kept", "rebuilt"], ["off"], ["kept", "rebuilt"], ["off"], ["kept", "rebuilt"]][: len(CELLS) - 1]
    ):
        ways = ways_of(report, cell)
        assert list(ways) == names
        for name, rows in ways.items():
            expected = [all_of_it[0], *new[1:]] if name == "kept" else all_of_it
            assert [row["tokens_fed"] for row in rows] == [row["tokens_expected"] for row in rows] == expected
            assert [row["ids"] for row in rows] == [row["ids"] for row in first]
            assert [(row["turn"], len(row["first_token_seconds"])) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    assert [row["cache_bytes"] for row in ways_of(report, 1)["off"]] == [0, 0, 0]
    if HAS_LLAMA_CPP:
        assert [row["cache_bytes"] for row in ways_of(report, 4)["kept"]] == [None] * 3, "it does not tell"
    held = [row["cache_bytes"] for row in ways_of(report, 2)["kept"]]
    # keys, values; layers; heads; numbers of a head
    assert held == [length * 2 * 2 * 2 * 8 * 4 for length in all_of_it]
    assert violations(report) == violations(report, "noisy") == []
    assert any("first token" in sentence for sentence in report["reading"])


def test_prompts_that_begin_alike_feed_their_beginning_once(whole: tuple[Report, list[str]]) -> None:
    report, plan = whole[0], whole[0]["plan"]
    assert (plan["rows"], plan["shared"], plan["own"]) == (4, 154, 5)
    ways = ways_of(report, len(CELLS) - 1, "prompts")
    assert {way: (row["tokens_fed"], row["tokens_expected"]) for way, (row,) in ways.items()} == {
        "shared": (154 + 4 * 5, 154 + 4 * 5),
        "not shared": (4 * 159, 4 * 159),
    }
    assert ways["shared"][0]["ids"] == ways["not shared"][0]["ids"]


def test_a_session_goes_through_a_file_and_on(whole: tuple[Report, list[str]]) -> None:
    (disk,) = rows_of(whole[0], "disk")
    assert (disk["cell"], disk["same_logits"]) == (0, True)
    assert disk["tokens"] > whole[0]["plan"]["turns"][-1]["history"]
    assert disk["file_bytes"] > disk["tokens"] * 2 * 2 * 2 * 8 * 4


def test_the_turns_are_what_a_chat_feeds(base: Cell) -> None:
    model, tokenizer = load(base.model, device="cpu", dtype="fp32")
    talk, fed = Chat(model, tokenizer), list[int]()
    for place, turn in enumerate(turns_of(tokenizer, DIALOG)):
        assert turn.prompt[: turn.history] == fed, "the whole text of the turn before"
        list(talk.say(DIALOG[2 * place]["content"], 1, temperature=0))
        assert talk.session.tokens[: len(turn.prompt)] == turn.prompt
        answer = tokenizer.encode(DIALOG[2 * place + 1]["content"], bos=False, eos=False)
        assert turn.whole == [*turn.prompt, *answer]
        talk.session.feed(turn.whole)  # as if this had been its answer
        fed = turn.whole


def test_without_a_chat_format_the_conversation_is_plain_text(base: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = find_model(base).tokenizer
    marks = {name: id for name, id in tokenizer.special_tokens.items() if "header" not in name}
    monkeypatch.setattr(tokenizer, "special_tokens", marks)
    with pytest.raises(ValueError, match="no known chat format"):
        ChatFormat(tokenizer)
    *_, last = turns_of(tokenizer, DIALOG)
    said = ["User: one", "Assistant: the hell", "User: two", "Assistant: hello the", "User: three", "Assistant: t"]
    assert tokenizer.decode(last.whole).endswith("\n\n".join(["A conversation.", *said]))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "check"), [("kept", FED), ("rebuilt", FED), ("disk", FROM_DISK)])
def test_a_way_that_does_not_do_what_it_says_is_violated(
    base: Cell, monkeypatch: pytest.MonkeyPatch, name: str, check: str
) -> None:
    """The kept one feeds all again, the rebuilt one keeps its cache, and from disk comes another session."""
    begin, feed, load_session = SessionConversation.__init__, SessionConversation.feed, Transformer.load_session

    def feed_all(self: SessionConversation, ids: list[int]) -> int:
        self.session._forget()
        return feed(self, ids)

    def load_another(model: Any, path: Path, tokenizer: Any) -> Any:
        session = load_session(model, path, tokenizer)
        session.cache.layers[0].keys[:, 3] += 1
        return session

    def keep(self: SessionConversation, model: Any, tokenizer: Any, *, kv_caching: bool) -> None:
        begin(self, model, tokenizer, kv_caching=kv_caching)
        if kv_caching:  # one session, whichever conversation it is
            self.session = model.__dict__.setdefault("only", self.session)

    if name == "kept":
        monkeypatch.setattr(SessionConversation, "feed", feed_all)
    elif name == "rebuilt":
        monkeypatch.setattr(SessionConversation, "__init__", keep)
        monkeypatch.setattr(SessionConversation, "close", lambda self: None)
    else:
        monkeypatch.setattr("llama.generation.Generation.load_session", load_another)
    rows = worker.JOBS["conversation"](base, plan=planned(base, [])[0]["plan"])["rows"]
    assert [row["name"] for row in rows if row.get("status") == "violated"] == [check]


@pytest.mark.usefixtures("here")
def test_a_way_that_chooses_other_tokens_is_noted_and_times_beside_other_work_are_marked(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, loads = SessionConversation.feed, iter([0.0, 9.0, 0.0])

    def other(self: SessionConversation, ids: list[int]) -> int:
        return feed(self, ids) + (not self.session.model.kv_caching and len(ids) > 60)

    monkeypatch.setattr(SessionConversation, "feed", other)
    monkeypatch.setattr(OtherLoad, "stop", lambda _: next(loads))
    report = measured(base, tmp_path)
    on, off, prompts = (row["notes"] for row in rows_of(report, "cell"))
    assert on == prompts == []
    assert off == ["off: its first token differs from that of `kept` in turn 3"]
    assert violations(report, "noisy") == [(1, "other work")]


def test_a_budget_leaves_out_whole_pairs_but_never_the_first_and_a_run_goes_on_with_what_it_lacks(
    base: Cell, here: Here, tmp_path: Path
) -> None:
    report = measured(base, tmp_path, ["transformers"], minutes=1e-6)
    names = [CELLS[0], CELLS[1], *CELLS[2:4], CELLS[-1]]
    assert here.done[1:] == [f"conversation: {name}" for name in names[:2]]
    assert report["failures"] == [f"{name}: no room in the budget" for name in names[2:]]
    here.done.clear()
    report = measured(base, tmp_path, ["transformers"], resume=True)
    assert here.done[1:] == [*(f"conversation: {name}" for name in names[2:4]), f"prompts: {names[4]}"]
    assert report["failures"] == []


@pytest.mark.usefixtures("here")
def test_repetitions_add_up_and_one_that_feeds_otherwise_is_enough_to_violate(
    base: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, times = conversation._first_tokens, iter(range(99))

    def second_is_wrong(*given: Any, **named: Any) -> Row:
        row = feed(*given, **named)
        return {**row, "tokens_fed": row["tokens_fed"] + (next(times) == 6)}  # of four calls a job, two warm up

    monkeypatch.setattr(conversation, "_first_tokens", second_is_wrong)
    report = measured(base, tmp_path, n=2)
    assert {len(row["first_token_seconds"]) for row in rows_of(report, "turn") + rows_of(report, "prompts")} == {2}
    (disk,) = rows_of(report, "disk")
    assert [len(disk["save_seconds"]), len(disk["load_seconds"]), len(disk["feed_seconds"])] == [2, 2, 2]
    assert cell_row(report, 1)["other_load_cores"] == [0.0, 0.0]
    assert violations(report) == [(2, FED)]
    (detail,) = [row["detail"] for row in rows_of(report, "check", 2) if row["status"] == "violated"]
    assert detail.startswith("shared 175 tokens")
    assert detail.endswith("; shared should have fed 174")


def test_a_model_too_short_has_as_many_turns_as_fit(base: Cell, here: Here) -> None:
    tokenizer = find_model(base).tokenizer
    turns = turns_of(tokenizer, DIALOG)
    question = len(turns[0].prompt) - turns[0].history

    def turns_at(limit: int) -> int:
        return len(chat_cells(base, [], tokenizer, limit)[1]["turns"])

    assert turns_at(len(turns[2].whole) + question + 1) == 3
    assert turns_at(len(turns[2].whole) + question) == 2
    with pytest.raises(ValueError, match=r"two turns of which have \d+ tokens, and the model's max_seq_len is 40"):
        turns_at(40)


def test_the_conversation_of_the_project_has_ten_turns() -> None:
    dialog = read_dialog()
    assert [message["role"] for message in dialog] == ["user", "assistant"] * 10
    assert all(message["content"].strip() == message["content"] != "" for message in dialog)


def test_shared_prompts_part_right_behind_what_they_share(base: Cell, here: Here) -> None:
    plan = planned(base, [])[0]["plan"]
    prompts = shared_prompts(find_model(base).tokenizer, plan)
    assert len(prompts) == plan["rows"]
    assert {len(prompt) for prompt in prompts} == {plan["shared"] + plan["own"]}
    assert len({tuple(prompt[: plan["shared"]]) for prompt in prompts}) == 1
    assert len({prompt[plan["shared"]] for prompt in prompts}) > 1
    assert len({tuple(prompt) for prompt in prompts}) == plan["rows"]


def test_cells_keep_their_modes(base: Cell, here: Here) -> None:
    done = worker.JOBS["conversation"](replace(base, exact=True), plan=planned(base, [])[0]["plan"])
    assert done["rows"][0]["path"] == "exact"
