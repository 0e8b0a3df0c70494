"""The command that converts a checkpoint: llama-kv convert IN OUT.gguf --type q8_0."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llama.checkpoint.convert import convert
from llama.checkpoint.gguf_writer import FILE_TYPES, Part
from llama.host import console
from llama.host.progress import progress_bar
from llama.ranks.torchrun import world_size


def main(*paths: str, type: str | None = None, tokenizer_path: str | None = None, overwrite: bool = False) -> int:
    """Write a checkpoint as a .gguf file, which this library and llama.cpp load: IN OUT.gguf --type q8_0.

    Args:
        paths: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo"; and the file to write.
        type: Of the matrices: f32, f16, bf16, q8_0, q4_0 or q4_1. With 4 bits, the embedding and the head have 8.
        tokenizer_path: The tokenizer, if it is not beside the weights.
        overwrite: Replace an existing file.
    """
    if len(paths) != 2:
        raise ValueError(f"{len(paths)} paths are given; the command takes two: IN OUT.gguf --type q8_0")
    if type is None:
        raise ValueError(f"--type is missing; choose one of {', '.join(map(str.lower, FILE_TYPES))}")
    if world_size() > 1:
        raise ValueError("this command writes a file in one process; start it without torchrun")
    with progress_bar("converting", unit="B") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        source, out = paths
        parts = convert(source, out, type=type, tokenizer_path=tokenizer_path, overwrite=overwrite, progress=progress)
    console.put(summary(Path(out), parts))
    return 0


def summary(path: Path, parts: Sequence[Part]) -> str:
    """Return the size of a file and the types of its tensors, in a line."""
    kinds = Counter(part.kind for part in parts)
    counts = ", ".join(f"{count} tensors {kind}" for kind, count in sorted(kinds.items()))
    return f"{path}: {path.stat().st_size / 1e6:,.1f} MB, {counts}"
