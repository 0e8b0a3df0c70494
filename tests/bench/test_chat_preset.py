"""The preset of conversations does the same work in every way, sees what was really fed, and shows what it took."""

import csv
import io
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fakes import write_checkpoint
from jobs_here import CEILINGS, Here, session_of
from llama.cli import benchmark_inference as script

from llama import Chat, Transformer, cli, load
from llama.bench import chat, presets
from llama.bench.cell import Cell
from llama.bench.chat import FED, FROM_DISK, chat_report, run_chat
from llama.bench.report.chat import chat_findings, chat_sections, chat_tables
from llama.bench.report.files import write_report
from llama.bench.report.plots import figures
from llama.bench.report.tables import NOISY, TITLES, disturbances, violations
from llama.bench.report.text import report_csv, report_markdown
from llama.bench.run import conversation, worker
from llama.bench.run.conversation import shared_prompts, turns_of
from llama.bench.run.engines import SessionConversation
from llama.bench.run.jobs import JobDied
from llama.bench.run.models import find_model
from llama.bench.schema import Report, Way
from llama.bench.texts import read_dialog
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
    "batch 16, cache on",
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
    jobs_done_here = Here(lambda kind, cell: f"{kind}: {cell.name}")
    monkeypatch.setattr(presets, "run_job", jobs_done_here)
    monkeypatch.setattr(worker, "ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr(chat, "read_dialog", lambda: DIALOG)
    monkeypatch.setattr(conversation, "read_dialog", lambda: DIALOG)
    monkeypatch.setattr(chat, "REPETITIONS", 1)
    monkeypatch.setattr(chat, "OWN", 5)
    monkeypatch.setattr(presets, "_STARTING", 0.0)
    monkeypatch.setattr(OtherLoad, "stop", lambda _: 0.0)
    return jobs_done_here


def planned(base: Cell, engines: list[str], minutes: float = 60) -> Report:
    source = find_model(base)
    limit = source.args.max_seq_len
    return chat_report(base, engines, source.tokenizer, limit, command="a command", budget=minutes)


def measured(
    base: Cell, out: Path, engines: list[str] | None = None, *, minutes: float = 60, resume: bool = False
) -> Report:
    session = session_of(planned(base, engines or [], minutes), out, minutes=minutes, resume=resume)
    run_chat(session)
    return session.report


def ways_of(report: Report, place: int) -> dict[str, Way]:
    assert report["chat"] is not None
    return {way["name"]: way for way in report["chat"]["records"][place]["ways"]}


@pytest.fixture(scope="module")
def whole(base: Cell, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, list[str], Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        here, out = done_here(monkeypatch), tmp_path_factory.mktemp("run")
        return measured(base, out, ENGINES), here.done, out


def test_every_engine_does_the_same_turns_in_every_way_it_has(whole: tuple[Report, list[str], Path]) -> None:
    report, jobs, _ = whole
    assert jobs[2:] == [*(f"conversation: {name}" for name in CELLS[:-1]), f"prompts: {CELLS[-1]}"]
    assert report["failures"] == []
    assert [record["error"] for record in report["cells"]] == [None] * len(CELLS)
    first = ways_of(report, 0)["kept"]["ids"]
    new = [turn["new"] for turn in planned_turns(report)]
    all_of_it = [turn["history"] + turn["new"] for turn in planned_turns(report)]
    for place, names in enumerate(
        [["kept", "anew"], ["off"], ["kept", "anew"], ["off"], ["kept", "anew"]][: len(CELLS) - 1]
    ):
        ways = ways_of(report, place)
        assert list(ways) == names
        for name, way in ways.items():
            assert way["fed"] == way["asked"] == ([all_of_it[0], *new[1:]] if name == "kept" else all_of_it)
            assert way["ids"] == first
            assert [len(times) for times in way["seconds"]] == [1] * len(new)
    assert ways_of(report, 1)["off"]["cache_bytes"] == [0, 0, 0]
    if HAS_LLAMA_CPP:
        assert ways_of(report, 4)["kept"]["cache_bytes"] == [None] * 3, "it does not tell"
    held = ways_of(report, 2)["kept"]["cache_bytes"]
    assert held == [length * 2 * 2 * 2 * 8 * 4 for length in all_of_it], (
        "keys, values; layers; heads; numbers of a head"
    )
    assert violations(report) == disturbances(report) == []


def planned_turns(report: Report) -> list[Any]:
    assert report["chat"] is not None
    return list(report["chat"]["plan"]["turns"])


def test_prompts_that_begin_alike_feed_their_beginning_once(whole: tuple[Report, list[str], Path]) -> None:
    report, _, _ = whole
    assert report["chat"] is not None
    plan, ways = report["chat"]["plan"], ways_of(report, len(CELLS) - 1)
    assert (plan["rows"], plan["shared"], plan["own"]) == (16, 154, 5)
    assert ways["shared"]["fed"] == ways["shared"]["asked"] == [154 + 16 * 5]
    assert ways["not shared"]["fed"] == ways["not shared"]["asked"] == [16 * 159]
    assert ways["shared"]["ids"] == ways["not shared"]["ids"]


def test_a_session_goes_through_a_file_and_on(whole: tuple[Report, list[str], Path]) -> None:
    report, _, _ = whole
    assert report["chat"] is not None
    disk = report["chat"]["records"][0]["disk"]
    assert disk is not None
    assert disk["alike"]
    assert disk["tokens"] > planned_turns(report)[-1]["history"]
    assert disk["file_bytes"] > disk["tokens"] * 2 * 2 * 2 * 8 * 4
    assert all(record["disk"] is None for record in report["chat"]["records"][1:])


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
    text = tokenizer.decode(last.whole)
    said = ["User: one", "Assistant: the hell", "User: two", "Assistant: hello the", "User: three", "Assistant: t"]
    assert text.endswith("\n\n".join(["A conversation.", *said]))


@pytest.mark.parametrize(
    ("name", "wrong", "point"),
    [
        ("kept", "feeds all again", FED),
        ("anew", "keeps its cache", FED),
        ("disk", "is another session", FROM_DISK),
    ],
)
def test_a_way_that_does_not_do_what_it_says_is_violated(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str, point: str
) -> None:
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
    elif name == "anew":
        monkeypatch.setattr(SessionConversation, "__init__", keep)
        monkeypatch.setattr(SessionConversation, "close", lambda self: None)
    else:
        monkeypatch.setattr("llama.session.Sessions.load_session", load_another)
    report = measured(base, tmp_path)
    assert [line for line in violations(report) if point in line and "batch 1, cache on" in line], wrong
    assert all(point in line for line in violations(report))


def test_a_way_that_chooses_other_tokens_is_noted(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = SessionConversation.feed

    def other(self: SessionConversation, ids: list[int]) -> int:
        return feed(self, ids) + (not self.session.model.kv_caching and len(ids) > 60)

    monkeypatch.setattr(SessionConversation, "feed", other)
    report = measured(base, tmp_path)
    on, off, prompts = (record["notes"] for record in report["cells"])
    assert on == prompts == []
    [note] = off
    assert note.startswith("off: other first tokens than the first way's in turn ")


def test_times_beside_other_work_disturb_a_cell(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.0, 9.0, 0.0])
    monkeypatch.setattr(OtherLoad, "stop", lambda _: next(loads))
    report = measured(base, tmp_path)
    assert [line.split(":")[0] for line in disturbances(report)] == ["batch 1, cache off"]
    assert report_markdown(report).startswith(f"# {TITLES['chat']}: {NOISY}")


def test_a_budget_leaves_out_the_longest_but_never_the_first(base: Cell, here: Here, tmp_path: Path) -> None:
    report = measured(base, tmp_path, minutes=1e-6)
    assert here.done[2:] == ["conversation: batch 1, cache on"]
    assert report["failures"] == [f"{name}: no room in the budget" for name in (CELLS[1], CELLS[-1])]
    assert any("first token after" in sentence for sentence in report["reading"])


def test_a_run_goes_on_with_what_it_lacks(base: Cell, here: Here, tmp_path: Path) -> None:
    measured(base, tmp_path, minutes=1e-6)
    here.done.clear()
    report = measured(base, tmp_path, resume=True)
    assert here.done[2:] == [f"conversation: {CELLS[1]}", f"prompts: {CELLS[-1]}"]
    assert report["failures"] == []


def test_repetitions_add_up(base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "REPETITIONS", 3)
    report = measured(base, tmp_path)
    for place in range(3):
        for way in ways_of(report, place).values():
            assert {len(times) for times in way["seconds"]} == {3}
    assert report["chat"] is not None
    disk = report["chat"]["records"][0]["disk"]
    assert disk is not None
    assert [len(disk[name]) for name in ("save_seconds", "load_seconds", "feed_seconds")] == [3, 3, 3]  # type: ignore[literal-required]
    assert report["chat"]["records"][1]["other_load_cores"] == [0.0, 0.0, 0.0]


def test_one_repetition_that_feeds_otherwise_is_enough_to_violate(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "REPETITIONS", 3)
    run, times = worker.JOBS["prompts"], iter(range(3))

    def second_is_wrong(cell: Cell, **job: Any) -> dict[str, Any]:
        done = run(cell, **job)
        if next(times) == 1:
            done["ways"][0]["fed"][0] += 1
        return done

    monkeypatch.setitem(worker.JOBS, "prompts", second_is_wrong)
    report = measured(base, tmp_path)
    [line] = violations(report)
    assert line.startswith(f"batch 16, cache on: {FED}: shared 235 tokens")
    assert line.endswith("; shared should have fed 234")


def test_a_cell_that_dies_leaves_the_others(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kind: str, cell: Cell) -> None:
        if kind == "conversation" and not cell.kv_caching:
            raise JobDied("its process was ended by SIGKILL")

    monkeypatch.setattr(here, "fail", fail)
    report = measured(base, tmp_path)
    assert report["cells"][1]["error"] == "died: its process was ended by SIGKILL"
    assert ways_of(report, 0)
    assert ways_of(report, 2)


def test_the_report_says_what_was_measured(whole: tuple[Report, list[str], Path], tmp_path: Path) -> None:
    report, _, _ = whole
    times, held, prompts, disk = chat_tables(report)
    names = [f"{who}, {way}" for who in ("plain", *ENGINES) for way in ("kept", "anew", "off")]
    names = [name for name in names if name != "llama.cpp, off"]
    assert times.heads == ["turn", "tokens before it", "new tokens", *names]
    assert held.heads[3:] == [name for name in names if not name.endswith("off")]
    assert [row[:3] for row in times.rows] == [
        [str(place), str(turn["history"]), str(turn["new"])] for place, turn in enumerate(planned_turns(report), 1)
    ]
    assert times.notes == ["medians, n = 1"]
    assert (held.rows[0][-1] == "not observed") == HAS_LLAMA_CPP
    assert prompts.title == "16 prompts of 5 tokens behind 154 that they share"
    assert [row[:2] for row in prompts.rows] == [["plain", "shared"], ["plain", "not shared"]]
    assert len(disk.rows) == 1
    assert chat_sections(report)[0].name == "A conversation, turn by turn"
    rows = list(csv.DictReader(io.StringIO(report_csv(report))))
    assert [row["figures"] for row in rows].count("turn") == 3 * len(names)
    assert [row["figures"] for row in rows].count("prompts") == 2
    assert [row["figures"] for row in rows].count("disk") == 1
    files = {path.name for path in write_report(report, tmp_path)}
    assert {"chat_time.png", "chat_bytes.png", "page.html", "results.json"} <= files
    assert json.loads((tmp_path / "results.json").read_text()) == report
    page = (tmp_path / "page.html").read_text()
    assert page.count('<svg class="wide"') == page.count('<svg class="narrow"') == 2
    assert "What was seen in each cell" in page


def test_the_sentences_give_the_ratios_of_the_last_turn(whole: tuple[Report, list[str], Path]) -> None:
    report = json.loads(json.dumps(whole[0]))
    seconds = {(0, "kept"): 0.1, (0, "anew"): 2.0, (1, "off"): 1.5, (2, "kept"): 0.05}
    for (place, name), value in seconds.items():
        ways_of(report, place)[name]["seconds"][-1] = [value]
    ways_of(report, len(CELLS) - 1)["shared"]["seconds"] = [[1.0]]
    ways_of(report, len(CELLS) - 1)["not shared"]["seconds"] = [[8.0]]
    disk = report["chat"]["records"][0]["disk"]
    disk |= {"load_seconds": [0.1], "feed_seconds": [1.2], "tokens": 99}
    turn, transformers, *_, prompts, loaded = chat_findings(report)
    assert "has its first token after 0.100 s, 20.0x sooner than where it is made anew (2.00 s), 15.0x sooner" in turn
    assert transformers.endswith("takes 0.050 s for the same turn: 0.50x the time of plain.")
    assert "8.0x sooner where what they share is fed once, for 10.9x fewer tokens fed" in prompts
    assert loaded.startswith(
        "On the path plain, a session of 99 tokens is loaded in 0.100 s, 12.0x sooner than its text"
    )


def test_what_was_not_measured_has_no_table_and_no_picture(base: Cell, here: Here) -> None:
    report = planned(base, [])
    assert chat_tables(report) == []
    assert figures(report) == {}
    assert chat_findings(report) == []
    assert "What the words mean" in report_markdown(report)


def test_a_model_too_short_has_as_many_turns_as_fit(base: Cell, here: Here) -> None:
    source = find_model(base)
    turns = turns_of(source.tokenizer, DIALOG)
    question = len(turns[0].prompt) - turns[0].history

    def turns_at(limit: int) -> int:
        report = chat_report(base, [], source.tokenizer, limit, command="", budget=1.0)
        return len(planned_turns(report))

    assert turns_at(len(turns[2].whole) + question + 1) == 3
    assert turns_at(len(turns[2].whole) + question) == 2
    with pytest.raises(ValueError, match=r"two turns of which have \d+ tokens, and the model's max_seq_len is 40"):
        turns_at(40)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input_len", "9"], "--input_len: --preset chat decides this itself"),
        (["--output_len=9"], "--output_len: --preset chat decides this itself"),
        (["--text", "a"], "--text: --preset chat decides this itself"),
        (["--logits=all"], "--logits: --preset chat decides this itself"),
        (["--batch_size=2"], "--batch_size: a preset decides this itself"),
        (["--kv_cache=int8", "--kv_cache=int4"], "a cell has one kind of cache"),
        (["--engine=llama"], "would stand in the table twice"),
        (["--engine=transformers", "--model=gpt2"], "is no Llama"),
    ],
)
def test_flags_that_it_would_not_heed_are_refused(
    base: Cell, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    model = [] if "--model=gpt2" in flags else ["--ckpt_dir", base.model]
    assert cli.run(script.main, ["--preset=chat", *model, *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "model", max_seq_len=2048)
    words = [f"--ckpt_dir={folder}", f"--out={tmp_path / 'out'}", "--budget=0.01", "--kv_cache=paged", "--threads=1"]
    assert cli.run(script.main, ["--preset=chat", *words]) == 0
    said = capsys.readouterr()
    assert "first token after" in said.out
    assert "batch 16, cache on, paged cache: no room in the budget" in said.out


def test_the_conversation_of_the_project_has_ten_turns() -> None:
    dialog = read_dialog()
    assert [message["role"] for message in dialog] == ["user", "assistant"] * 10
    assert all(message["content"].strip() == message["content"] != "" for message in dialog)


def test_shared_prompts_part_right_behind_what_they_share(base: Cell, here: Here) -> None:
    report = planned(base, [])
    assert report["chat"] is not None
    plan = report["chat"]["plan"]
    prompts = shared_prompts(find_model(base).tokenizer, plan)
    assert len(prompts) == plan["rows"]
    assert {len(prompt) for prompt in prompts} == {plan["shared"] + plan["own"]}
    assert len({tuple(prompt[: plan["shared"]]) for prompt in prompts}) == 1
    assert len({prompt[plan["shared"]] for prompt in prompts}) > 1
    assert len({tuple(prompt) for prompt in prompts}) == plan["rows"]


def test_cells_keep_their_modes(base: Cell, here: Here, tmp_path: Path) -> None:
    report = measured(replace(base, exact=True), tmp_path)
    assert {record["path"] for record in report["cells"]} == {"exact"}
