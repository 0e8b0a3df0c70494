"""Files of prompts: whatever ends a run, the answers of the next one are those of a run that nothing disturbed."""

import codecs
import errno
import json
import os
import random
import re
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import Command
from fakes import Ids, Remembering
from interrupts import interrupted, kill_at
from refusals import unrefused
from serving import Letters, Slow
from tables import table
from torch import Tensor

from llama import load
from llama.batch import NonFiniteLogits
from llama.cli import prompt_files
from llama.cli.inference import main, read_prompts
from llama.cli.prompt_files import Journal, Source, answer_all, answer_file, own_part
from llama.cli.prompt_lines import LONGEST, Question
from llama.texts.many import Writer
from llama.tokenizer.chat import check_dialog

TEXTS = 8
LINES = 10_000  # lines of code that a run executes; some
SETTINGS: dict[str, Any] = {"max_gen_len": 6, "temperature": 1.0, "top_p": 1.0, "seed": 5, "stop": []}
BODY: dict[str, Any] = {
    "model": "m",
    "prompt": [1, 2],
    "max_tokens": 3,
    "n": 1,
    "stream": False,
    "frequency_penalty": 0.0,
}
BATCH = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": BODY}
DIALOG = [  # in OpenAI's forms
    {"role": "user", "content": [{"type": "text", "text": "4"}], "name": "Ann"},
    {"role": "assistant", "content": None, "refusal": None},
    {"role": "assistant", "content": []},
    {"role": "assistant"},
]
CHAT = {**BATCH, "url": "/v1/chat/completions", "body": {"seed": 2, "messages": DIALOG, "some_new_field": None}}


class Stopping(Ids):
    stop_tokens = (2,)


class Spoiled(Remembering):
    """Its logits after 6 6 are no numbers."""

    def drawn(self, ids: Any) -> Tensor:
        return super().drawn(ids) * (torch.nan if ids[-2:] == [6, 6] else 1)


def some_lines(count: int = TEXTS) -> list[dict[str, Any]]:
    draw = random.Random(1)
    made: list[dict[str, Any]] = [
        {"prompt": [draw.randrange(6) for _ in range(draw.randint(1, 9))], "max_gen_len": draw.randint(1, 9)}
        for _ in range(count)
    ]
    made[1] |= {"id": "mine", "seed": 77, "logprobs": True, "ids": True}
    made[4] = {"prompt": [6, 6]}
    return [*made, BATCH, {"prompt": []}, CHAT]


class Job(NamedTuple):
    """The lines of x.jsonl that one part answers, and what the answers are said to depend on."""

    source: Source
    out: Path
    made_by: dict[str, Any]

    @property
    def journal(self) -> Path:
        return prompt_files.journal_of(self.out)

    def run(self, writer: Writer) -> int:
        arguments = partial(Question.arguments, settings=SETTINGS, encode_dialog=encode)
        return answer_all(writer, self.source, self.out, arguments, self.made_by)


def encode(dialog: Any) -> list[int]:
    check_dialog(dialog)
    return [1]


def a_job(folder: Path, content: bytes | list[Any], i: int = 1, n: int = 1, **made_by: Any) -> Job:
    file, out = folder / "x.jsonl", folder / f"y{i}.jsonl"
    if isinstance(content, list):
        content = b"".join(json.dumps(line).encode() + b"\n" for line in content)
    file.write_bytes(content)
    return Job(Source.of(file, i, n), out, made_by)


def answered(job: Job, *, rows: int = 3, model: Remembering | None = None) -> bytes:
    """Run a job on a new model, and return its answers."""
    job.run(Writer(model or Spoiled(), Stopping(), rows=rows))
    return job.out.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The answers of `some_lines` without a disturbance."""
    return answered(a_job(tmp_path_factory.mktemp("whole"), some_lines()))


def test_a_line_or_the_command_has_a_schema_and_a_line_s_own_counts(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 2}}}
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "schema": {"const": {"b": 1}}},
        {**BATCH, "body": {"prompt": "a", "response_format": form}},
        {**BATCH, "body": {"prompt": "a", "response_format": {"type": "json_object"}, "max_tokens": 1}},
        {"prompt": "a", "schema": {"type": "foo"}},
        {"prompt": "a", "schema": 3},
        {"prompt": "a", "schema": {"const": 1}, "response_format": form},
        {"prompt": "a", "response_format": {"type": "text"}},
    ]
    job = a_job(tmp_path, lines)
    settings = {**SETTINGS, "max_gen_len": 30, "schema": {"const": "of the command"}}
    writer = Writer(Slow(), Letters(), rows=3)
    answer_all(writer, job.source, job.out, partial(Question.arguments, settings=settings, encode_dialog=encode), {})
    made = [json.loads(line) for line in job.out.read_bytes().splitlines()]
    assert [json.loads(one["text"]) for one in made[:2]] == ["of the command", {"b": 1}]
    choices = [one["response"]["body"]["choices"][0] for one in made[2:4]]
    assert [(one["text"], one["finish_reason"]) for one in choices] == [("2", "stop"), ("{", "length")]
    assert not made.pop()["text"].startswith('"'), "a line's own response_format counts, also if it is text"
    assert [one["error"].partition(" ")[2] for one in made[4:]] == [
        '5: schema={"type": "foo"} is refused by llguidance: Invalid type: foo',
        "6: schema=3 must be a JSON Schema, an object in braces",
        "7: it has schema and response_format; leave out one of them",
    ]


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_each_line_has_the_text_of_its_prompt_alone_with_the_seed_of_its_number(whole: bytes) -> None:
    given, made = some_lines(), list(map(json.loads, whole.splitlines()))
    assert len(made) == len(given)
    ends = set()
    assert made[4]["error"].startswith("line 5: the logits of row 5 at step 0 are not finite; ")
    for number, (line, answer) in enumerate(zip(given[:TEXTS], made[:TEXTS], strict=True), 1):
        seed = line.get("seed", SETTINGS["seed"] + number - 1)
        sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "seed": seed, "stop_ids": (2,)}
        alone = partial(Spoiled().generate_tokens, [line["prompt"]], line.get("max_gen_len", 6), **sampling)
        if "error" in answer:
            with pytest.raises(NonFiniteLogits) as why:
                alone()
            assert answer == {"id": number, "error": f"line {number}: {NonFiniteLogits(why.value.step, number)}"}
            continue
        (ids,), scores = alone(logprobs=True)
        counts = len(line["prompt"]), len(ids), len(line["prompt"]) + len(ids)
        usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
        expected = {"id": line.get("id", number), "text": "".join(f"{id} " for id in ids), "usage": usage}
        if "logprobs" in line:
            assert scores is not None
            expected |= {"logprobs": scores[0], "ids": ids}
        finish = "stop" if len(ids) < line.get("max_gen_len", 6) else "length"
        assert answer == {**expected, "finish_reason": finish}
        ends.add((finish, ids == []))
    assert ends == {("stop", True), ("stop", False), ("length", False)}


def test_batch_lines_have_answers_in_openai_s_form(whole: bytes) -> None:
    text, _, chat = map(json.loads, whole.splitlines()[-3:])
    assert (text["custom_id"], text["error"], text["response"]["status_code"]) == ("b", None, 200)
    for answer, kind in ((text, "text_completion"), (chat, "chat.completion")):
        body = answer["response"]["body"]
        (choice,) = body["choices"]
        said = choice["text"] if answer is text else choice["message"]["content"]
        assert (body["object"], len(said.split())) == (kind, body["usage"]["completion_tokens"])
        assert said


BAD: list[tuple[Any, str]] = [
    (b"not JSON", "Expecting value"),
    (b'{"prompt": "1", "prompt": "2"}', "repeats the key 'prompt'"),
    (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
    (b'{"prompt": "' + b"1 " * (LONGEST // 2) + b'"}', "more than 16,000,000 bytes"),
    (b'{"prompt": "1', "Invalid control character"),
    ({"id": "q"}, "has no prompt"),
    ({"prompt": []}, "no tokens"),
    ({"prompt": 5}, "a prompt is a str or a list"),
    ({"prompt": [1, "2"]}, "whole numbers"),
    ({"prompt": [1] * 60}, "max_seq_len=64"),
    ({"prompt": [1], "max_gen_len": 0}, "max_gen_len=0"),
    ({"prompt": [1], "temperatur": 1}, "unknown field temperatur; did you mean temperature\\?"),
    ({"prompt": [1], "temperature": 10**400}, "temperature=1000*.* must be"),
    ({"prompt": [1], "stop": ""}, 'stop="" must be'),
    ({"prompt": [1], "echo": True, "n": 2}, "echo=true is not supported; leave it out, or send false"),
    ({"messages": []}, "a dialog"),
    ({"messages": [], "prompt": "1"}, "has prompt and messages; leave out all but messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of text are supported"),
    ({**BATCH, "body": {**BODY, "max_tokens": 100}}, "max_tokens=100"),
    ({**BATCH, "url": "/v1/embeddings"}, "a batch line has the method POST"),
    ({**BATCH, "url": []}, "a batch line has"),
    ({**BATCH, "body": [1]}, "a batch line has"),
    ({**BATCH, "more": 1}, "unknown field more"),
    ({**BATCH, "body": {**BODY, "logprobs": 0}}, "logprobs are not supported"),
    ({**CHAT, "body": BODY}, "has no messages"),
]


def test_a_bad_line_has_an_error_with_its_number_and_the_others_go_on(tmp_path: Path) -> None:
    good = b'{"prompt": [1]}\r'  # the first one begins with a byte order mark
    content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line, _ in BAD]
    job = a_job(tmp_path, codecs.BOM_UTF8 + b"\n".join([good, *content, b"  ", good]))
    assert job.run(Writer(Remembering(), Ids())) == 1
    first, *made, last = map(json.loads, job.out.read_bytes().splitlines())
    assert (first["id"], last["id"], len(made)) == (1, len(BAD) + 3, len(BAD))
    assert "text" in first
    found = [answer["error"]["message"] if "custom_id" in answer else answer["error"] for answer in made]

    def say(text: str) -> None:
        raise ValueError(text)

    rows = enumerate(zip(found, BAD, strict=True), 2)
    assert unrefused([(partial(say, text), f"^line {n}: .*{said}") for n, (text, (_, said)) in rows]) == []


# ---- a run that ends early -------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_run_killed_at_random_moments_is_resumed_without_a_difference(tmp_path: Path, whole: bytes) -> None:
    job, draw, ends = a_job(tmp_path, some_lines()), random.Random(3), []
    for _ in range(5):
        for most in (LINES, LINES // 3):
            child = os.fork()
            if child == 0:
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                kill_at(lambda: answered(job), draw.randrange(most))
                os._exit(0)
            draw.random()  # as the child did
            ends.append(os.waitpid(child, 0)[1])
        assert answered(job) == whole
        job.journal.unlink()
        job.out.unlink()
    assert ends.count(signal.SIGKILL) >= 7


def test_a_run_that_is_interrupted_or_fails_is_resumed_without_a_difference(tmp_path: Path, whole: bytes) -> None:
    job, draw = a_job(tmp_path, some_lines()), random.Random(4)
    for at in [draw.randrange(LINES // 2) for _ in range(6)]:
        interrupted(lambda: answered(job), at)
    model = Spoiled()
    model.broken = MemoryError("no line is to blame")
    with pytest.raises(MemoryError, match="no line"):
        answered(job, model=model)
    assert answered(job) == whole


def test_a_journal_cut_or_damaged_anywhere_loses_and_repeats_no_line(tmp_path: Path, whole: bytes) -> None:
    job, draw = a_job(tmp_path, some_lines()), random.Random(5)
    assert answered(job) == whole
    complete = job.journal.read_bytes()
    header = complete.index(b"\n") + 1
    ends = [at + 1 for at, byte in enumerate(complete) if byte == 10]
    for cut in [0, 5, *(draw.choice(ends) - draw.choice((0, 1, 9)) for _ in range(6))]:
        job.journal.write_bytes(complete[:cut] + (b"\0" * 20 if cut > header and cut % 2 else b""))
        assert answered(job) == whole
        numbers = [json.loads(line)["line"] for line in job.journal.read_bytes().splitlines()[1:]]
        assert sorted(numbers) == list(range(1, len(some_lines()) + 1))


def test_a_full_disk_ends_the_run_with_its_error_and_loses_nothing(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, left = a_job(tmp_path, some_lines()), 900

    def fill(journal: Journal, content: Any) -> None:
        nonlocal left
        data = prompt_files._line(content)
        journal._file.write(data[:left])
        journal._file.flush()
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Journal, "_write", fill)
        with pytest.raises(OSError, match="No space left"):
            answered(job)
    assert (job.out.exists(), job.journal.stat().st_size) == (False, 900)
    assert answered(job) == whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_an_error_of_a_full_disk_names_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "y.journal", a_job(tmp_path, some_lines()).source, {})
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, journal._file.fileno())
    os.close(full)
    for call in (lambda: journal.append({"line": 1, "times": None, "answer": {}}), journal.close):
        with pytest.raises(OSError, match=r"No space left on device: '.*y\.journal'"):
            call()


def test_an_output_of_other_lines_or_settings_or_in_use_is_refused(tmp_path: Path) -> None:
    given = some_lines(6)
    job = a_job(tmp_path, given, temperature=1.0)
    interrupted(lambda: answered(job), 3000)
    begun = job.journal.read_bytes()
    other, foreign = tmp_path / "other", tmp_path / "foreign"
    other.mkdir()
    foreign.mkdir()
    (foreign / "y1.jsonl.journal").write_text("[1]\nand mine\n")
    made = a_job(tmp_path, given, temperature=1.0)
    in_use = Journal(tmp_path / "used", made.source, {})
    in_use.append({"line": 1, "times": None, "answer": {}})
    assert (tmp_path / "used").read_bytes().endswith(b'"answer": {}}\n')  # the system has it, before it is closed
    changed = a_job(other, given)
    changed.source.path.write_bytes(b"{" + changed.source.path.read_bytes()[1:-1] + b" ")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: answered(a_job(tmp_path, given, temperature=0.5)), r"temperature=1.0, not 0.5; take that again"),
        (lambda: answered(a_job(tmp_path, [*given, {"prompt": [1]}], temperature=1.0)), "y1.jsonl.journal was begun"),
        (lambda: answered(a_job(tmp_path, given, 1, 2, temperature=1.0)), r"begun with lines=\[1, 9\], not \[1, 4\]"),
        (lambda: answered(a_job(foreign, given)), "y1.jsonl.journal was begun with"),
        (lambda: Journal(tmp_path / "used", made.source, {}), "another process writes it"),
        (lambda: answered(changed), "x.jsonl was changed while it was read; delete the journal"),
    ]
    assert unrefused(calls, (ValueError, BlockingIOError)) == []
    in_use.close()
    assert job.journal.read_bytes() == begun
    assert (foreign / "y1.jsonl.journal").read_text() == "[1]\nand mine\n"


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_the_parts_together_are_the_whole(tmp_path: Path, whole: bytes) -> None:
    for n in (3, 20):  # more than there are lines
        jobs = [a_job(tmp_path, some_lines(), i, n) for i in range(1, n + 1)]
        assert b"".join(answered(job, rows=2) for job in jobs) == whole
        for job in jobs:
            job.journal.unlink()


WRONG = ["0/12", "13/12", "3", "a/b", "²/3", "9 1 3 1", "4 1 3 2", "x 1 3 1", "4 1 3 0"]  # or ID MIN COUNT STEP
PARTS = {None: (1, 1), "3/12": (3, 12), "3 0 12 1": (4, 12), "3 1 12 1": (3, 12), "6 2 5 2": (3, 5)}


@table("part, expected", [*PARTS.items(), *((part, None) for part in WRONG)])
def test_a_part_is_the_flag_s_or_the_task_s_of_a_job_array(
    part: str | None, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = part.split() if part is not None and " " in part else []
    for name, value in zip(("ID", "MIN", "COUNT", "STEP"), task or [""] * 4, strict=True):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
        if not task:
            monkeypatch.delenv(f"SLURM_ARRAY_TASK_{name}")
    call = partial(own_part, None if task else part)
    if expected is None:
        assert unrefused([(call, "part .* must be i/n with i from 1 to n")]) == []
    else:
        assert call() == expected
        assert own_part("1/1") == (1, 1)  # the flag overrides the task


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_answers_lines_as_it_answers_prompts(checkpoint: Path, command: Command, tmp_path: Path) -> None:
    file, out = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    file.write_text('{"prompt": "hello the"}\n{"prompt": "x"}\n{}\n')
    words = ["--ckpt_dir", checkpoint, "--device=cpu", "--fast=False", "--max_gen_len=5"]
    from_lines = partial(command, main, *words, "--prompt_file", file, "--out", out)
    assert from_lines("--quiet")[0] == 1
    answers, printed = out.read_bytes(), command.printed(main, *words, "hello the", "x")
    texts = [json.loads(line).get("text") for line in answers.splitlines()]
    assert texts[:2] == re.findall(r"\n?> (.*?)\n\n===", printed, re.DOTALL)
    code, said, err = from_lines()
    assert (code, said.partition("new")[0], err) == (1, f"{out}: 3 answers, 1 of them errors; 0 ", "")
    assert out.read_bytes() == answers
    code, _, said = from_lines("--exact")
    assert (code, "with exact=False, not True; take that again" in said) == (2, True)
    prompt_files.journal_of(out).unlink()
    assert "y.jsonl exists without y.jsonl.journal; delete it" in from_lines()[2]
    file.write_text('{"prompt": "x"}\n')
    assert command(main, *words, "--prompt_file", file, "--out", tmp_path / "z.jsonl", "--part", "2/12")[0] == 0
    assert (tmp_path / "z.jsonl.02-of-12").read_bytes() == b""


def test_a_resumed_run_prints_the_date_on_which_it_began(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(checkpoint, device="cpu")
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}"
    file = tmp_path / "x.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')

    def answer(name: str, today: str, date: str | None = None) -> bytes:
        now = staticmethod(lambda: datetime.fromisoformat(today))
        monkeypatch.setattr("llama.tokenizer.chat.datetime", type("Clock", (datetime,), {"now": now}))
        answer_file(
            Source.of(file, 1, 1), out := tmp_path / name, model, tokenizer, SETTINGS, {"cache_gb": None},
            rows=1, speculate=None, date=date,
        )  # fmt: skip
        return out.read_bytes()

    whole, journal = answer("y", "2026-11-27"), tmp_path / "y.journal"
    journal.write_bytes(journal.read_bytes().partition(b"\n")[0] + b"\n")  # as if it was killed
    assert answer("y", "2026-12-06") == whole
    assert answer("part", "2026-12-06", date="2026-11-27") == whole
    assert answer("other", "2026-12-06") != whole
    with pytest.raises(ValueError, match="begun with day='2026-12-06', not '2026-11-27'"):
        answer("other", "2026-12-06", date="2026-11-27")


@table(
    "flags, said",
    [
        ("", "x.jsonl is a file of JSON lines; give --out FILE.jsonl"),
        ("--out y hello", "a prompt cannot be used with a file of JSON lines"),
        ("--out y --kv_caching=False", "--kv_caching=False cannot be used with"),
        ("--out y --rows 0", "--rows=0 must be above 0"),
        ("--out y --cache_gb nan", "--cache_gb=nan must be above 0"),
        ("--out y --date 27.11.2026", "--date='27.11.2026' is no date; write it as YYYY-MM-DD"),
        ("--out y --date 20261127", "--date='20261127' is no date"),
        ("--out y --part 0/3", "part 0/3 must be i/n"),
        ("--out .", "."),
        ("--out x.jsonl", "--out x.jsonl is the file of the prompts; choose another one"),
        ("--out link", "--out link is the file of the prompts; choose another one"),
        ("--out /dev/null", "it is a device, not a regular file; give another name"),
        ("--prompt_file folder.jsonl --out y", "folder.jsonl: it is a directory, not a regular file"),
        ("--prompts hello --part 1/2", "--part cannot be used without a file of JSON lines"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_a_model_is_loaded(
    flags: str, said: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("{}")
    Path("folder.jsonl").mkdir(exist_ok=True)
    Path("link").unlink(missing_ok=True)
    Path("link").symlink_to("x.jsonl")
    words = flags.split() if "--prompt" in flags else ["--prompt_file", "x.jsonl", *flags.split()]
    assert said in command.refused(main, "--ckpt_dir", "not/there", *words)


# ---- other files, and large ones -------------------------------------------------------------------------------------


def test_a_text_of_many_lines_is_one_prompt_with_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.txt"
    for count, said in ((10, f"{file} is one prompt of 10 lines; a .jsonl file has a prompt in each line\n"), (9, "")):
        file.write_text("why?\n" * count)
        assert read_prompts((), str(file)) == ["why?\n" * (count - 1) + "why?"]
        assert capsys.readouterr().err == said


def test_a_run_may_take_no_tick_of_a_coarse_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, `time.monotonic` has ticks of 16 ms, in which many refused lines are read."""
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    job = a_job(tmp_path, [{"prompt": []}])
    assert job.run(Writer(Spoiled(), Stopping())) == 1
    assert json.loads(job.out.read_bytes())["id"] == 1


@pytest.mark.slow
def test_a_line_takes_eight_bytes_of_memory(tmp_path: Path) -> None:
    peaks, sizes = [], (1_000, 10_000)
    for count in sizes:
        content = [b'{"prompt": [1], "max_gen_len": 1}' if n % 50 == 0 else b'{"prompt": []}' for n in range(count)]
        job = a_job(tmp_path, b"\n".join(content))
        tracemalloc.start()
        job.run(Writer(Spoiled(), Stopping()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        job.journal.unlink()
        assert job.out.read_bytes().count(b"\n") == count
    assert (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]) < 10
