"""Files are read up to a limit and written as a whole, through links, and measurements are not lost."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_reports import table_report
from commands import Command

from llama.bench.cell import Cell
from llama.cli import benchmark_inference
from llama.host import console
from llama.host.files import check_writable, replace_file, replacing_private
from llama.untrusted.files import read_text

posix = pytest.mark.skipif(sys.platform == "win32", reason="devices and named pipes are POSIX's")
LIMIT = 1000

# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_text_is_read_whole_up_to_the_limit_with_newlines_as_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "text"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_bytes("é\r\nb\rc\n".encode(encoding))
        assert read_text(file, limit=LIMIT) == "é\nb\nc\n"
    file.write_bytes(b"x" * LIMIT)
    assert read_text(file, limit=LIMIT) == "x" * LIMIT
    for length in (LIMIT + 1, 1 << 40):  # the second is a hole: nothing of it is read
        os.truncate(file, length)
        with pytest.raises(ValueError, match="text is longer than 0 MB, the limit for a text; cut it"):
            read_text(file, limit=LIMIT)
    file.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="text is not UTF-8 at byte 3; convert it first"):
        read_text(file, limit=LIMIT)


@posix
def test_devices_and_folders_are_no_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/dev/zero is longer than"):
        read_text(Path("/dev/zero"), limit=LIMIT)
    assert read_text(Path(os.devnull), limit=LIMIT) == ""
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path, limit=LIMIT)


@posix
def test_a_pipe_is_read_however_long_its_writer_takes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("wb") as file:
            time.sleep(0.1)
            file.write(b"hello\n" * 100)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(pipe, limit=LIMIT) == "hello\n" * 100
    writer.join()


# ---- writing ---------------------------------------------------------------------------------------------------------


@posix
def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"new", b"newer", b"private"):  # at first the link leads to nothing
        check_writable(link)
        if content == b"private":
            with replacing_private(link) as new:
                new.write_bytes(content)
            assert sys.platform == "win32" or target.stat().st_mode & 0o777 == 0o600
        else:
            replace_file(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "link", "target"]


@posix
def test_paths_that_are_no_regular_files_are_refused_and_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(os.devnull)
    for name in ("pipe", "link", "loop", os.devnull, "."):
        for write in (check_writable, lambda path: replace_file(path, b"x")):
            with pytest.raises(OSError, match=r"regular file|directory|symbolic links"):
                write(tmp_path / name)
    for name in ("pipe", "loop", "."):  # not a device: root would lose it if this claim failed
        with pytest.raises(OSError, match=r"regular file|directory|symbolic links"), replacing_private(tmp_path / name):
            pass
    assert (tmp_path / "pipe").is_fifo()
    assert Path(os.devnull).is_char_device()


# ---- the benchmark's --json ------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("name", ["pipe", "folder", os.devnull])
def test_json_into_no_regular_file_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(benchmark_inference, "measure_cell", lambda *_, **__: pytest.fail("measured"))
    err = command.refused(benchmark_inference.main, "--json", tmp_path / name, "--ckpt_dir", "not/there")
    assert (name in err, "not/there" in err) == (True, False)


def test_a_measurement_is_written_if_its_reader_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(benchmark_inference, "measure_cell", lambda *_, **__: table_report())
    monkeypatch.setattr(console, "put", gone)
    flags = SimpleNamespace(repeats=1, compare=False, strict=False)
    with pytest.raises(BrokenPipeError):
        benchmark_inference.print_cell(Cell(**table_report()["cells"][0]), flags, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["schema"]
