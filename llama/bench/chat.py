"""The preset `chat`: what a cache saves that outlives a call, in a conversation, behind a shared prompt, and on disk.

Every engine replays the same conversation by its ids, a process for each repetition; our own ways also feed prompts
that begin alike. Everything is measured once, and then again as far as the budget goes.
"""

from collections.abc import Sequence
from typing import Any, cast

from llama.bench.cell import Cell
from llama.bench.presets import (
    PEER_IS_SLOWER,
    REPETITIONS,
    Session,
    duration,
    expected_of_tokens,
    fate_of,
    measure_machine,
    note,
    variants,
)
from llama.bench.quiet import beside_others
from llama.bench.report.chat import chat_findings, chats_of
from llama.bench.run.conversation import turns_of
from llama.bench.run.jobs import JobDied
from llama.bench.schema import ChatPlan, ChatRecord, Point, Report, Status, new_report
from llama.bench.texts import read_dialog
from llama.tokenizer import Tokenizer

TEXT = "llama/bench/texts/conversation.json"
ROWS, SHARED, OWN = 16, 1000, 30  # the prompts behind a shared one, and their tokens
FED, FROM_DISK = "what was fed is what the way asks for", "a session from disk goes on alike"  # names of points

_CALIBRATION_LEN = 256


def chat_report(
    base: Cell, engines: Sequence[str], tokenizer: Tokenizer, max_seq_len: int, *, command: str, budget: float
) -> Report:
    """Return the report of the preset, in which nothing is measured.

    A model that is too short for the whole conversation has as many of its turns as fit. Raises ValueError where these
    are fewer than two, and for an engine that is named twice.
    """
    if base.ranks > 1:
        raise ValueError("--preset=chat measures one process; start it without torchrun")
    ways, turns = variants(base, engines), turns_of(tokenizer, read_dialog())
    question = len(turns[0].prompt) - turns[0].history  # behind the last turn, for what is loaded from disk
    fit = [turn for turn in turns if len(turn.whole) + question < max_seq_len]
    if len(fit) < 2:
        raise ValueError(
            f"--preset=chat replays a conversation, two turns of which have {len(turns[1].whole)} tokens, and the "
            f"model's max_seq_len is {max_seq_len}; measure another model"
        )
    own = min(OWN, max_seq_len // 4)
    plan: ChatPlan = {
        "text": TEXT,
        "turns": [{"history": turn.history, "new": len(turn.prompt) - turn.history} for turn in fit],
        "rows": ROWS,
        "shared": min(SHARED, max_seq_len - own - 1),
        "own": own,
    }
    cells = chat_cells(ways, plan)
    report = new_report("chat", cells, command=command, budget_minutes=budget)
    report["chat"] = {"plan": plan, "records": [blank() for _ in cells]}
    return report


def chat_cells(ways: Sequence[Cell], plan: ChatPlan) -> list[Cell]:
    """Return a cell for each engine's conversation with the cache and without, and one for the prompts of ours."""
    length, prompt = context_of(plan), plan["shared"] + plan["own"]
    conversations = [
        way.but(batch_size=1, input_len=length, output_len=1, kv_caching=kv_caching)
        for way in ways
        for kv_caching in (True, False)
        if kv_caching or way.engine != "llama.cpp"  # it has no way to run without its cache
    ]
    ours = [way for way in ways if way.engine == "llama"]
    return conversations + [way.but(batch_size=plan["rows"], input_len=prompt, output_len=1) for way in ours]


def context_of(plan: ChatPlan) -> int:
    """Return how many tokens stand before the last turn's answer."""
    return plan["turns"][-1]["history"] + plan["turns"][-1]["new"]


def blank() -> ChatRecord:
    return {"path": "", "other_load_cores": [], "ways": [], "disk": None}


def run_chat(session: Session) -> None:
    """Measure every cell once, as far as the budget has room, and all again while it lasts."""
    try:
        begin(session)
        for repetition in range(REPETITIONS):
            for place in order(session):
                if is_due(session, place, repetition):
                    measure(session, place)
    finally:
        compare_tokens(session)
        session.report["reading"] = chat_findings(session.report)
        session.directory.save()


def begin(session: Session) -> None:
    """Measure what all begins with, and say how long all will take."""
    measure_machine(session, session.cells[0].but(input_len=min(_CALIBRATION_LEN, session.cells[0].input_len)))
    cells, known, plan = session.cells, session.calibration, chats_of(session.report)["plan"]
    session.expected |= {cell.name: expected_seconds(cell, plan, known) for cell in cells}
    once = sum(session.expected[cell.name] for cell in cells)
    session.progress.total = min(REPETITIONS * once, max(once, session.room))
    session.progress.write(
        f"{len(plan['turns'])} turns up to {context_of(plan):,} tokens, and {plan['rows']} prompts behind "
        f"{plan['shared']:,}: everything once takes about {duration(once)}, of the budget are left "
        f"{duration(session.room)}; all is repeated up to {REPETITIONS} times as far as it goes.",
    )


def expected_seconds(cell: Cell, plan: ChatPlan, calibration: dict[str, Any]) -> float:
    """Predict how long a repetition of a cell takes."""
    contexts = [turn["history"] + turn["new"] for turn in plan["turns"]]
    if cell.batch_size > 1:
        tokens = plan["rows"] * (plan["shared"] + 2 * plan["own"]) + plan["shared"]
    else:
        tokens = sum(contexts) + (3 * contexts[-1] if cell.kv_caching else 0)
    slower = 1.0 if cell.engine == "llama" else PEER_IS_SLOWER
    return expected_of_tokens(round(slower * tokens), calibration)


def order(session: Session) -> list[int]:
    """Return the cells' places; behind the first, the quickest come first where not all fit into the budget once."""
    expected = [session.expected[cell.name] for cell in session.cells]
    rest = list(range(1, len(expected)))
    if session.keeps_to_budget and sum(expected) > session.room:
        rest.sort(key=expected.__getitem__)
    return [0, *rest]


def is_due(session: Session, place: int, repetition: int) -> bool:
    """Tell whether a cell is measured now; the first of all always is, and what is left out is noted."""
    records, name = chats_of(session.report)["records"], session.cells[place].name
    done = len(records[place]["other_load_cores"])
    if done > repetition or session.report["cells"][place]["error"] is not None:
        return False
    if repetition > 0:
        return done > 0 and session.expected[name] <= session.room
    return not any(record["ways"] for record in records) or session.has_room(name, must=True)


def measure(session: Session, place: int) -> None:
    """Do a cell once more, or keep why it cannot be done."""
    cell, report, chats = session.cells[place], session.report, chats_of(session.report)
    job = "prompts" if cell.batch_size > 1 else "conversation"
    try:
        done = cast(ChatRecord, session.do(cell.name, job, cell, plan=chats["plan"]))
    except (ValueError, JobDied) as error:
        if chats["records"][place]["ways"]:
            note(report["cells"][place], f"a repetition failed: {error}")
        else:
            report["cells"][place]["error"] = fate_of(error)
    else:
        record = chats["records"][place] = merged(chats["records"][place], done)
        report["cells"][place]["path"] = record["path"]
        report["cells"][place]["points"] = points(record, report["environment"].get("cores"))
    session.directory.save()


def merged(record: ChatRecord, done: ChatRecord) -> ChatRecord:
    """Return a record with one more repetition."""
    if not record["ways"]:
        return done
    for way, new in zip(record["ways"], done["ways"], strict=True):
        way["seconds"] = [old + more for old, more in zip(way["seconds"], new["seconds"], strict=True)]
        if new["fed"] != new["asked"]:
            way["fed"] = new["fed"]
    disk, again = record["disk"], done["disk"]
    if disk is not None and again is not None:
        disk["save_seconds"] += again["save_seconds"]
        disk["load_seconds"] += again["load_seconds"]
        disk["feed_seconds"] += again["feed_seconds"]
        disk["alike"] = disk["alike"] and again["alike"]
    return {**record, "other_load_cores": record["other_load_cores"] + done["other_load_cores"]}


def points(record: ChatRecord, cores: int | None) -> list[Point]:
    """Return what was seen of a cell: whether its ways fed what they should, and whether its times can be believed."""
    wrong = [way for way in record["ways"] if way["fed"] != way["asked"]]
    fed = ", ".join(f"{way['name']} {sum(way['fed']):,} tokens" for way in record["ways"])
    asked = "".join(f"; {way['name']} should have fed {sum(way['asked']):,}" for way in wrong)
    found: list[Point] = [{"name": FED, "status": "violated" if wrong else "ok", "detail": fed + asked}]
    if record["disk"] is not None:
        alike: Status = "ok" if record["disk"]["alike"] else "violated"
        found.append({"name": FROM_DISK, "status": alike, "detail": "the next logits, bit by bit"})
    loads = record["other_load_cores"]
    known = [load for load in loads if load is not None]
    return [*found, beside_others(max(known) if len(known) == len(loads) else None, cores)]


def compare_tokens(session: Session) -> None:
    """Note for each cell whether its ways chose the first tokens that the first way on the same weights chose."""
    firsts: dict[tuple[bool, str | None, int], list[list[int]]] = {}
    for cell, record, done in zip(
        session.cells, session.report["cells"], chats_of(session.report)["records"], strict=True
    ):
        for way in done["ways"]:
            first = firsts.setdefault((cell.batch_size > 1, cell.quantize, cell.activations), way["ids"])
            apart = [turn for turn, (one, other) in enumerate(zip(first, way["ids"], strict=True), 1) if one != other]
            if apart:
                note(
                    record,
                    f"{way['name']}: other first tokens than the first way's in turn {', '.join(map(str, apart))}",
                )
