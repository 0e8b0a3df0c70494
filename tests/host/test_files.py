"""Files are read up to a limit and written as a whole, through links, and measurements are not lost."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_reports import table_report

from llama import cli
from llama.bench.cell import Cell
from llama.bench.report.files import keep_json
from llama.cli import benchmark_inference
from llama.host.files import check_writable, keep_file, replace_file, replace_private
from llama.untrusted.files import read_text

posix = pytest.mark.skipif(sys.platform == "win32", reason="devices and named pipes are POSIX's")
LIMIT = 1000

# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_text_is_read_whole_up_to_the_limit_with_newlines_as_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("é\r\nb\rc\n".encode())
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
        replace_private(link, [content]) if content == b"private" else replace_file(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "link", "target"]


@posix
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(os.devnull)
    for name in ("pipe", "link", "loop", os.devnull, "."):
        for write in (check_writable, lambda path: replace_file(path, b"x")):
            with pytest.raises(OSError, match=r"regular file|directory|symbolic links"):
                write(tmp_path / name)
    for name in ("pipe", "loop", "."):  # not a device: root would lose it if this claim failed
        with pytest.raises(OSError, match=r"regular file|directory|symbolic links"):
            replace_private(tmp_path / name, [b"x"])
    assert (tmp_path / "pipe").is_fifo()
    assert Path(os.devnull).is_char_device()


def blocked(tmp_path: Path) -> Path:
    """Return a path at which no file can be made, to root neither."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "results.json"


def test_what_cannot_be_written_is_kept_elsewhere_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match=r"results\.json cannot be written: .*; its content is in ") as caught:
        keep_file(blocked(tmp_path), b"figures")
    kept = Path(str(caught.value).rpartition(" ")[2])
    assert (kept.parent, kept.suffix, kept.read_bytes()) == (tmp_path, ".json", b"figures")


def test_where_nothing_can_be_written_it_goes_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(blocked(tmp_path)))
    with pytest.raises(OSError, match="its content is on standard output"):
        keep_file(blocked(tmp_path), b"figures")
    assert capsys.readouterr().out == "figures\n"


# ---- the benchmark's --json ------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("name", ["pipe", "folder", os.devnull])
def test_json_into_no_regular_file_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(benchmark_inference, "measure_cell", lambda *_, **__: pytest.fail("measured"))
    assert cli.run(benchmark_inference.main, ["--json", str(tmp_path / name), "--ckpt_dir", "not/there"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), name in err, "not/there" in err) == ("", 1, True, False)


CELL, FLAGS = Cell(**table_report()["cells"][0]), SimpleNamespace(repeats=1, compare=False, strict=False)


def test_a_measurement_whose_folder_is_gone_is_kept_and_the_page_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "results.json"
    path.parent.mkdir()
    (tmp_path / "tmp").mkdir()

    def measured(*_: object, **__: object) -> object:
        path.parent.rmdir()
        path.parent.write_text("")
        return table_report()

    def run() -> int:
        return benchmark_inference.print_cell(CELL, FLAGS, path)

    monkeypatch.setattr(benchmark_inference, "measure_cell", measured)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert cli.run(run, []) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "results.json cannot be written: Not a directory; its content is in" in err
    (kept,) = (tmp_path / "tmp").glob("results-*.json")
    assert str(kept) in err
    assert json.loads(kept.read_text())["schema"]
    assert "tokens/s" in out


MEASURED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from bench_reports import table_report
from llama import cli
from llama.bench.cell import Cell
from llama.cli import benchmark_inference

def main(*, path: str) -> int:
    report = table_report()
    benchmark_inference.measure_cell = lambda *_, **__: report
    flags = SimpleNamespace(repeats=1, compare=False, strict=False)
    return benchmark_inference.print_cell(Cell(**report["cells"][0]), flags, Path(path))

cli.main(main)
"""


@pytest.mark.slow
@posix
@pytest.mark.parametrize("stream", ["> /dev/full", ">&-", "| true", "2>&-"])
def test_a_measurement_is_in_its_file_whatever_becomes_of_the_page(stream: str, tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(MEASURED)
    results = tmp_path / "results.json"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {tmp_path / 'command.py'} --path {results} {stream}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests" / "support")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert results.exists(), done.stderr
    assert json.loads(results.read_text())["schema"]
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_report_is_kept_as_json(tmp_path: Path) -> None:
    assert json.loads(keep_json(table_report(), tmp_path / "new" / "x.json").read_text())["schema"]
