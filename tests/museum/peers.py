"""What other libraries do with the museum's exhibits: the table of docs/security.md.

Each reading is done by a child of its own with limits of time and memory, for a file that one reader hangs on must not
stop the others. It is their default use that is tried, by their public functions.
"""

import importlib.metadata
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from museum.exhibits import EXHIBITS
from museum.measure import MIB, gallery, peak_memory, restart_peak, shown

SECONDS = 15
MEMORY = 2048 * MIB


def _torch(path: Path) -> None:
    import torch

    for file in sorted(path.glob("*.pth")):
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _safetensors(path: Path) -> None:
    from safetensors.torch import load_file

    for file in sorted(path.glob("*.safetensors")):
        load_file(file)


def _gguf(path: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(_one_gguf(path))
    for part in reader.tensors:
        part.data.sum()


def _transformers(path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = None if (path / "config.json").exists() else _one_gguf(path).name
    folder = path if path.is_dir() else path.parent
    AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, local_files_only=True)
    AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)


def _one_gguf(path: Path) -> Path:
    return path / "model.gguf" if path.is_dir() else path


READERS: Mapping[str, tuple[Callable[[str], bool], Callable[[Path], None]]] = {
    "torch": (lambda name: ".pth" in name, _torch),
    "safetensors": (lambda name: "model.safetensors" in name or "model-0" in name, _safetensors),
    "gguf": (lambda name: "gguf" in name, _gguf),
    "transformers": (
        lambda name: not any(word in name for word in (".pth", "params.json", "tokenizer.model")),
        _transformers,
    ),
}


def outcome(read: Callable[[Path], None], path: Path) -> str:
    """Let a child read the path, and say in few words what came of it."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(read, path, sender)
    os.close(sender)
    ready, _, _ = select.select([receiver], [], [], SECONDS)
    said = os.read(receiver, 4096).decode(errors="replace") if ready else ""
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.close(receiver)
    _, status = os.waitpid(child, 0)
    if not ready:
        return f"no answer in {SECONDS} s"
    return said or f"crash ({signal.Signals(os.WTERMSIG(status)).name})"


def _be_the_child(read: Callable[[Path], None], path: Path, sender: int) -> None:
    """Read, say what came of it through the pipe, and end without a word on the parent's streams."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    before = restart_peak() or 0
    try:
        read(path)
        said = "accepts"
    except BaseException as error:
        said = "over 2 GiB" if "alloc" in str(error) or isinstance(error, MemoryError) else _name(error)
    grown = (peak_memory() - before) // MIB
    os.write(sender, (said + (f", {grown} MiB" if grown > 64 else "")).encode())
    os._exit(0)


def _name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__name__}" if kind.__name__ == "error" else kind.__name__  # struct.error


def print_table() -> None:
    """Print what every reader does with every exhibit that is meant for it, in Markdown."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert all((GGUFReader, load_file, AutoModelForCausalLM, AutoTokenizer))  # children need not import them again
    torch.set_num_threads(1)  # what a child has of the parent's threads does not run
    versions = [f"{name} {importlib.metadata.version(name)}" for name in READERS]
    print(f"| exhibit | source | {' | '.join(versions)} |\n|{'---|' * (2 + len(versions))}")
    with gallery() as folder:
        for original in ("huggingface-one", "model.gguf"):
            _transformers(folder / original)
        for name, exhibit in EXHIBITS.items():
            with shown(name, folder) as path:
                said = [outcome(read, path) if meant(name) else "" for meant, read in READERS.values()]
            print(f"| {name} | {exhibit.source} | {' | '.join(said)} |", flush=True)
            print(name, file=sys.stderr)
