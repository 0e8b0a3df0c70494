"""Native code: compiled by the machine's own C++ compiler on first use, kept in a folder, loaded. Knows no model."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

# -ffp-contract=off: bits must not hang on which products and sums a compiler likes to fuse; vectors.h says which are.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)


class NoNativeCode(RuntimeError):
    """The code could not be compiled or loaded; the message says why."""


def load_library(source: Path, folder: Path) -> ctypes.CDLL:
    """Return the library made of `source` and the files beside it, which lies in `folder` from the first time on.

    It is made anew where the source, the flags or the kind of CPU are others, or where the file is not what was
    written. Raises NoNativeCode.
    """
    library = folder / f"{source.stem}-{_key(source)}.so"
    digest = library.with_suffix(".sha256")
    try:
        if not _is_whole(library, digest):
            if library.exists():
                logger.warning("%s is damaged; it is compiled again", library)
            _compile(source, library, digest)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoNativeCode(f"{library}: {error}") from error


def _key(source: Path) -> str:
    """Return what the machine code depends on, in 16 letters; a home directory may be shared by several machines."""
    files = sorted(source.parent.iterdir())
    parts = [
        *(file.read_bytes() for file in files if file.is_file()),
        " ".join(FLAGS).encode(),
        platform.machine().encode(),
        _cpu(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    """Return what tells the CPU's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _is_whole(library: Path, digest: Path) -> bool:
    # A library that was cut short may load and then crash the process.
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()
    except FileNotFoundError:
        return False


def _compile(source: Path, library: Path, digest: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise NoNativeCode("there is no C++ compiler (c++, g++ or clang++; Debian's package is g++)")
    library.parent.mkdir(parents=True, exist_ok=True)
    logger.info("compiling %s with %s, once: some seconds", source.name, compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [*compiler.split(), *FLAGS, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["without a word"]
            reason = next((line.partition("error: ")[2] for line in lines if "error: " in line), lines[0])
            raise NoNativeCode(f"{compiler} failed: {reason}")
        written = Path(scratch) / digest.name
        written.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        os.replace(written, digest)  # first, so that two who compile at once never leave a library without its own
        os.replace(made, library)
