"""Compile native code with the machine's C++ compiler on first use, store it in a folder, load it. Knows no model."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llama.host.files import lock_file

logger = logging.getLogger(__name__)

# With -march=native, ARM's compilers do not all use every instruction of the CPU, or reject it.
_THIS_CPU = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# -ffp-contract=off: bits must not depend on which products and sums a compiler fuses; vectors.h fuses its own.
FLAGS = (
    "-O3",
    _THIS_CPU,
    "-std=c++17",
    "-fopenmp",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)

# Left out if the compiler rejects them: that of macOS has no OpenMP, and some do not know the CPU.
_OPTIONAL = (_THIS_CPU, "-fopenmp")
_USES_OPENMP = """
#if defined(_OPENMP)
#include <omp.h>
int threads() { return omp_get_max_threads(); }
#endif
"""

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # modes that let other users write


class NoNativeCode(RuntimeError):
    """The code could not be compiled or loaded; the message says why."""


def load_library(source: Path, folder: Path, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """Return the library compiled from `source` and the files beside it, and stored in `folder`.

    defines: flags of this library alone, such as -DNAME=VALUE. It is compiled again if the source, the flags, the
    compiler or the kind of CPU differ, or if the file belongs to another user or cannot be loaded. Raises NoNativeCode.
    """
    library = folder / f"{source.stem}-{_key(source, defines)}.so"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _is_ours(folder.stat()):
            raise NoNativeCode(
                f"other users may write into {folder}, and so put their code there: run `chmod go-w` on it if it is "
                "yours, or set LLAMA_CACHE_DIR to a folder of your own"
            )
        loaded = _load(library)
        if loaded is None:
            with open(library.with_suffix(".lock"), "ab") as file:  # never deleted: others may wait for it
                with suppress(OSError):  # a file system without locks: then several processes may compile it
                    lock_file(file, wait=True)
                loaded = _load(library)  # another process may have compiled it
                if loaded is None:
                    _compile(source, library, defines)
                    loaded = _load(library)
    except OSError as error:
        remedy = "set LLAMA_CACHE_DIR to a folder that can be written"
        raise NoNativeCode(f"{library}: {error.strerror or error}; {remedy}") from error
    if loaded is None:
        raise NoNativeCode(f"{library}, compiled by {find_compiler()}, cannot be loaded")
    return loaded


def _load(library: Path) -> ctypes.CDLL | None:
    """Return the library, or None if it is not ours or cannot be loaded here."""
    try:
        found = library.lstat()
        return ctypes.CDLL(str(library)) if stat.S_ISREG(found.st_mode) and _is_ours(found) else None
    except OSError:  # for example of another architecture
        return None


def _key(source: Path, defines: Sequence[str]) -> str:
    """Return a digest of all that the machine code depends on: several machines may share a home directory."""
    files = sorted(source.parent.iterdir())
    parts = [
        *(file.read_bytes() for file in files if file.is_file()),
        " ".join((*FLAGS, *defines)).encode(),
        _own_compiler().encode(errors="surrogateescape"),
        platform.machine().encode(),
        cpu_text(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def cpu_text() -> bytes:
    """Return a text that differs between CPUs of different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.processor()} {platform.version()}".encode()  # of macOS: the version names the chip
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _is_ours(found: os.stat_result) -> bool:
    """Return True if only this user and root may write the file or folder, or if the system has no modes."""
    if os.name != "posix":
        return True
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _BY_OTHERS


def find_compiler() -> str | None:
    """Return the compiler to call, with its flags: the user's, or the first one found; None if there is none."""
    return _own_compiler() or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def _own_compiler() -> str:
    """Return the compiler that the user names, or "": the key must not change with PATH."""
    return os.environ.get("CXX", "").strip()


def _compile(source: Path, library: Path, defines: Sequence[str]) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise NoNativeCode("there is no C++ compiler (c++, g++ or clang++; Debian's package is g++)")
    logger.info("compiling %s with %s, once: up to half a minute", source.name, compiler)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.", suffix=".scratch") as scratch:
        made, flags = Path(scratch) / library.name, [*FLAGS, *defines]
        done = _run(compiler, flags, source, made)
        if done.returncode != 0 and (rejected := _rejected(compiler, Path(scratch))):
            logger.info("%s rejects %s", compiler, " and ".join(rejected))
            done = _run(compiler, [flag for flag in flags if flag not in rejected], source, made)
        if done.returncode != 0 or not made.is_file():
            lines = done.stderr.strip().splitlines() or ["no message"]
            reason = next((line.partition("error: ")[2] for line in lines if "error: " in line), lines[0])
            raise NoNativeCode(f"{compiler} failed: {reason}")
        made.chmod(stat.S_IMODE(made.stat().st_mode) & ~_BY_OTHERS)  # whatever the umask is
        os.replace(made, library)  # so that it is there as a whole or not at all


def _run(compiler: str, flags: Sequence[str], source: Path, made: Path) -> subprocess.CompletedProcess[str]:
    command = [*compiler.split(), *flags, str(source), "-o", str(made)]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NoNativeCode(f"{compiler} cannot be run: {error.strerror or error}; set CXX to a C++ compiler") from error


def _rejected(compiler: str, scratch: Path) -> list[str]:
    """Return the optional flags with which the compiler cannot compile and link a small library."""
    small = scratch / "small.cpp"
    small.write_text(_USES_OPENMP)
    made = scratch / "small"
    return [flag for flag in _OPTIONAL if _run(compiler, [flag, "-shared", "-fPIC"], small, made).returncode != 0]
