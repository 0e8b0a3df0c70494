"""Compiled code is stored, and loaded again only if it is the user's own and made for this machine.

A source of one line replaces the native code, because it compiles fast.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native import needs_a_compiler

from llama.fast import native_build

ROOT = Path(__file__).parents[2]
pytestmark = [needs_a_compiler, pytest.mark.skipif(sys.platform == "win32", reason="modes and owners are POSIX's")]


CHILD = """
import logging, sys
from pathlib import Path
from llama.fast.native_build import NoNativeCode, load_library

logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
try:
    print(load_library(Path(sys.argv[1]), Path(sys.argv[2])).answer())
except NoNativeCode as why:
    print("refused:", why)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source" / "tiny.cpp"
    file.parent.mkdir()
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


def answer(source: Path, folder: Path) -> tuple[str, list[str]]:
    """Return what the library in `folder` answers in a new process, and what is logged; it is compiled if needed.

    A new process, because a loaded library stays loaded after its file has changed.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.rstrip(), done.stderr.splitlines()


def file_of(folder: Path) -> Path:
    (library,) = folder.glob("*.so")
    return library


def of_another_machine(library: Path) -> bytes:
    content = bytearray(library.read_bytes())
    content[18:20] = b"\xf3\x00" if content[18] != 0xF3 else b"\x3e\x00"  # e_machine of ELF: RISC-V, or x86-64
    return bytes(content)


def test_a_second_call_compiles_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, (log,) = answer(source, tmp_path / "kept")
    assert (said, log.startswith("INFO compiling tiny.cpp with ")) == ("42", True)
    monkeypatch.setenv("PATH", "")
    assert answer(source, tmp_path / "kept") == ("42", [])


@pytest.mark.parametrize("ends", ["compiled", "killed"])
def test_of_processes_that_need_a_library_at_once_one_compiles_it(
    ends: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves no lock, even if its compiler goes on."""
    slow, calls = tmp_path / "slow", tmp_path / "calls"
    killed = f"[ $(wc -l < {calls}) = 1 ] && kill -9 $PPID && exec sleep 600 >&- 2>&-\n" if ends == "killed" else ""
    slow.write_text(f'#!/bin/sh\necho $$ >> {calls}\n{killed}sleep 0.2\nexec {native_build.find_compiler()} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    folder = tmp_path / "kept"
    command = [sys.executable, "-c", CHILD, str(source), str(folder)]
    children = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = sorted(child.communicate(timeout=120)[0] for child in children)
        assert said == ["" if ends == "killed" else "42\n", "42\n"]
        assert len(calls.read_text().split()) == (2 if ends == "killed" else 1)
    finally:
        for child in children:
            child.kill()
        for compiler in calls.read_text().split()[: ends == "killed"] if calls.exists() else []:
            os.kill(int(compiler), 9)  # it sleeps


@pytest.mark.skipif(sys.platform != "linux", reason="the bytes are those of ELF")
@pytest.mark.parametrize("damage", ["machine", "link", "writable", "pipe"])
def test_a_library_that_is_not_ours_or_of_another_machine_is_compiled_again(
    damage: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    answer(source, folder)
    library = file_of(folder)
    if damage == "machine":
        content = of_another_machine(library)
        library.unlink()
        library.write_bytes(content)
    elif damage == "link":
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    elif damage == "writable":
        library.chmod(0o722)
    else:
        library.unlink()
        os.mkfifo(library)
    said, log = answer(source, folder)
    assert (said, len(log)) == ("42", 1)


def test_a_folder_that_others_may_write_is_not_trusted(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    answer(source, folder)
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        said, _ = answer(source, folder)
        assert said.startswith(f"refused: other users may write into {folder}, ")
        assert said.endswith("set LLAMA_CACHE_DIR to a folder of your own")
    folder.chmod(0o700)
    assert answer(source, folder) == ("42", [])


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root may give files away")
def test_a_library_of_another_user_is_not_loaded(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    answer(source, folder)
    library = file_of(folder)
    os.chown(library, 12345, 12345)
    said, log = answer(source, folder)
    assert (said, len(log)) == ("42", 1)
    os.chown(folder, 12345, 12345)
    assert answer(source, folder)[0].startswith("refused: other users may write into")


def test_with_any_umask_only_the_user_may_write_the_files(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        answer(source, tmp_path / "kept")
    finally:
        os.umask(before)
    kept = [tmp_path / "kept", file_of(tmp_path / "kept")]
    assert [file.stat().st_mode & 0o022 for file in kept] == [0, 0]


def test_each_compiler_has_its_own_library(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    named = f"{native_build.find_compiler()} -O1"
    for compiler, libraries in ((named, 1), (" ", 2), ("", 2)):  # a blank CXX counts as unset
        monkeypatch.setenv("CXX", compiler)
        assert answer(source, folder)[0] == "42"
        assert len(list(folder.glob("*.so"))) == libraries


@pytest.mark.parametrize("compiler", ["true", "false", "no/such/compiler"])
def test_a_compiler_that_fails_is_named_in_the_error(
    compiler: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    said, _ = answer(source, tmp_path / "kept")
    assert said.startswith("refused: ")
    assert compiler in said
    assert [file for file in (tmp_path / "kept").iterdir() if file.suffix != ".lock"] == []


def test_a_compiler_that_writes_no_library_is_named_in_the_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nfor last; do :; done\necho nothing > "$last"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    assert answer(source, tmp_path / "kept")[0].endswith("compiler, cannot be loaded")


def test_flags_that_a_compiler_rejects_are_left_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = tmp_path / "picky"
    picky.write_text(
        '#!/bin/sh\nfor word; do case "$word" in -fopenmp|*=native) echo "error: no $word" >&2; exit 1;; esac; done\n'
        f'exec {native_build.find_compiler()} "$@"\n'
    )
    picky.chmod(0o755)
    source.write_text('#if !defined(_OPENMP)\nextern "C" int answer() { return 43; }\n#endif\n')
    monkeypatch.setenv("CXX", str(picky))
    said, logged = answer(source, tmp_path / "code")
    assert said == "43"
    assert f"INFO {picky} rejects {native_build.FLAGS[1]} and -fopenmp" in logged
