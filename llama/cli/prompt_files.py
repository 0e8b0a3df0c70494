"""Files of prompts: a JSON object a line -> a file with the answer of each line, in order. A killed run is resumed.

Answers are appended to OUT.journal as they end, and OUT is made of it at the end. No text depends on the order in which
texts end, so a resumed run, and several parts together, have the bytes of one run.
"""

import hashlib
import json
import os
import time
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import date as a_date
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from llama.cli.prompt_lines import LONGEST, Question
from llama.host import console
from llama.host.files import check_writable, lock_file, naming, replacing
from llama.host.parts import own_part
from llama.host.progress import progress_bar
from llama.texts.many import Writer, steady
from llama.untrusted.files import open_regular

Arguments = Callable[[Question], dict[str, Any]]  # a line -> the arguments of `Writer.add`
Record = dict[str, Any]  # line: the number of one; answer; times: None if the line has failed


def plan(file: str, out: str | None, part: str | None) -> tuple["Source", Path]:
    """Return the lines of a part and the file of its answers. Raises ValueError and OSError."""
    if out is None:
        raise ValueError(f"{file} is a file of JSON lines; give --out FILE.jsonl for the answers")
    i, n = own_part(part)
    path = Path(out if n == 1 else f"{out}.{i:0{len(str(n))}}-of-{n}")
    check_writable(path)
    if path.exists() and path.samefile(file):
        raise ValueError(f"--out {path} is the file of the prompts; choose another one")
    if path.exists() and not journal_of(path).exists():
        raise ValueError(f"{path} exists without {journal_of(path).name}; delete it, or choose another --out")
    if n > 1:
        console.note(f"part {i} of {n} is {path}")
    try:
        return Source.of(Path(file), i, n), path
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def journal_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.journal")


@dataclass(frozen=True)
class Source:
    """The lines of a file from number `first`, at least 1, to `last`. digest: of the whole file."""

    path: Path
    first: int
    last: int
    digest: str

    @classmethod
    def of(cls, path: Path, i: int, n: int) -> "Source":
        """Return the i-th of n ranges of lines."""
        digest, lines, block = hashlib.blake2b(), 0, b"\n"
        with open_regular(path) as file:
            while more := file.read(1 << 20):
                digest.update(block := more)
                lines += block.count(b"\n")
        lines += not block.endswith(b"\n")
        return cls(path, lines * (i - 1) // n + 1, lines * i // n, digest.hexdigest())

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of each line that is not blank; of one that is too long, the beginning."""
        digest, number = hashlib.blake2b(), 0
        with open_regular(self.path) as file:
            while line := file.readline(LONGEST + 1):
                number, rest = number + 1, line
                digest.update(line)
                while not rest.endswith(b"\n") and (rest := file.readline(LONGEST)):
                    digest.update(rest)
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                if self.first <= number <= self.last and line.strip():
                    yield number, line
        if digest.hexdigest() != self.digest:
            raise ValueError(f"{self.path} was changed while it was read; delete the journal, and run again")


class Journal:
    """The answers so far, in a file: a line of what they depend on, then a Record a line.

    failed: the number of lines that have failed.
    """

    def __init__(self, path: Path, source: Source, made_by: Mapping[str, Any]) -> None:
        """Open or begin a journal. Raises ValueError if it depends on something else, and OSError if it is in use."""
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  (open as long as the journal)
        self._first, self.failed = source.first, 0
        self._places = array("q", [0]) * (source.last - source.first + 1)  # of records; 0: there is none
        try:
            lock_file(self._file)
            self._read(path, json.loads(_line(made_by)))  # as it is read again
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path, made_by: Record) -> None:
        """Read the records, and cut off what a process that was killed has written of the last one."""
        end = self._file.seek(0)
        for line in self._file:
            try:
                record = json.loads(line[:-1])  # a line without its end has no brace then
                if not isinstance(record, dict):
                    raise ValueError("a record is an object")
            except ValueError:
                record = None
                if end or _line(made_by).startswith(line):
                    break
            if end:
                self._note(record, end)
            else:
                _check_same(path, record or {}, made_by)
            end += len(line)
        self._file.truncate(end)
        if end == 0:
            self._write(made_by)

    def __contains__(self, number: int) -> bool:
        return self._places[number - self._first] != 0

    def __len__(self) -> int:
        return len(self._places) - self._places.count(0)

    def append(self, record: Record) -> None:
        """Write a record, so that it stays if this process is killed."""
        end = self._file.seek(0, os.SEEK_END)
        self._write(record)
        self._note(record, end)

    def answers(self) -> Iterator[bytes]:
        """Yield the lines of the answers, in order."""
        for place in filter(None, self._places):
            self._file.seek(place)
            yield _line(json.loads(self._file.readline())["answer"])

    def close(self) -> None:
        with naming(Path(self._file.name)):
            self._file.close()

    def _note(self, record: Record, place: int) -> None:
        self._places[record["line"] - self._first] = place
        self.failed += record["times"] is None

    def _write(self, content: Mapping[str, Any]) -> None:
        with naming(Path(self._file.name)):
            self._file.write(_line(content))
            self._file.flush()


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def day_begun(journal: Path) -> str | None:
    """Return the day that the chat template of a journal's run prints; None if it prints none, or without a journal."""
    with suppress(OSError, ValueError), open_regular(journal) as file:
        head = json.loads(file.readline())
        day = head.get("day") if isinstance(head, dict) else None
        return str(a_date.fromisoformat(day)) if isinstance(day, str) else None
    return None


def _check_same(path: Path, saved: Record, made_by: Record) -> None:
    """Raise ValueError if a journal depends on something else."""
    for name, value in made_by.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} was begun with {name}={saved.get(name)!r:.80}, not {value!r:.80}; take that again, choose "
                "another --out, or delete the file"
            )


def answers(writer: Writer, lines: Iterator[tuple[int, bytes]], arguments: Arguments) -> Iterator[Record]:
    """Yield the record of each line as soon as its text ends."""
    asked: dict[int, Question] = {}
    while True:
        while writer.texts.waiting == 0 and (line := next(lines, None)) is not None:
            question = Question(line[0], id=line[0])
            try:
                question.read(line[1])
                asked[writer.add(**arguments(question)).number] = question
            except ValueError as why:
                yield {"line": question.number, "times": None, "answer": question.refusal(why)}
        if writer.texts.idle:
            return
        for text, _ in writer.step(maybe_changed=False):
            if text.ended is not None:
                question = asked.pop(text.number)
                yield {"line": question.number, **question.ended(text)}


def answer_all(writer: Writer, source: Source, out: Path, arguments: Arguments, made_by: Mapping[str, Any]) -> int:
    """Answer all lines that have no answer yet, and return the exit code: 1 if a line has failed.

    made_by: what the answers depend on, besides the lines.
    """
    path, began, tokens, total = journal_of(out), time.perf_counter(), 0, source.last - source.first + 1
    made_by = {"file": source.digest, "lines": [source.first, source.last], **made_by}
    with closing(Journal(path, source, made_by)) as journal:
        todo = ((number, data) for number, data in source if number not in journal)
        try:
            with progress_bar("answers", total=total, initial=len(journal), unit="line") as bar:
                for record in answers(writer, todo, arguments):
                    journal.append(record)
                    tokens += record["times"]["new_tokens"] if record["times"] else 0
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.1f} tokens/s", refresh=False)
                    bar.update()
        except BaseException:
            console.note(f"{path} has {len(journal)} of {total} answers; the same command makes the others")
            raise
        with replacing(out) as new, open(new, "wb") as file:
            file.writelines(journal.answers())
        seconds = time.perf_counter() - began
        speed = f"{tokens} new tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        console.put(f"{out}: {len(journal)} answers, {journal.failed} of them errors; {speed}")
        return 1 if journal.failed else 0


def answer_file(
    source: Source,
    out: Path,
    model: Any,
    tokenizer: Any,
    settings: Mapping[str, Any],
    flags: Mapping[str, Any],
    *,
    rows: int,
    speculate: str | None,
    date: str | None = None,
) -> int:
    """Answer the lines by a model, and return the exit code.

    settings: the arguments of `Writer.add` that a line may override. flags: `cache_gb`, and others that decide answers.
    rows: how many texts run at a time. speculate: how tokens are guessed; no answer depends on it.
    date: the day that a chat template prints; None: that on which the journal was begun.
    """
    from llama.texts.origin import text_origin  # deferred, as all that imports torch
    from llama.tokenizer.chat import ChatFormat, day_of

    cache_bytes = None if flags["cache_gb"] is None else int(flags["cache_gb"] * 2**30)
    writer = Writer(model, tokenizer, rows=rows, cache_bytes=cache_bytes, speculate=speculate)
    today = day_of(tokenizer)
    day = today and (date or day_begun(journal_of(out)) or today)
    made_by = {**settings, **flags, **text_origin(steady(model), tokenizer, day)}
    chat_format = cache(lambda: ChatFormat(tokenizer, day=day))
    arguments = partial(
        Question.arguments, settings=settings, encode_dialog=lambda dialog: chat_format().encode_dialog_prompt(dialog)
    )
    return answer_all(writer, source, out, arguments, made_by)
