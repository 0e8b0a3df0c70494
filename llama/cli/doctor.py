"""The command that describes a checkpoint and reports why it would not load: llama-kv doctor PATH."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from llama.api import why_plain
from llama.args import ModelArgs
from llama.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.checkpoint.doctor import facts, memory
from llama.costs import MB, table
from llama.host import console
from llama.host.machine import dtype_name
from llama.untrusted.files import read_text

_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>[^/\\\0]+)")
_MAX_MANIFEST = 1 << 20  # bytes
_POSITIONS = 2048  # length of the cache in the memory table; less if the model's limit is lower


def main(*paths: str, tokenizer_path: str | None = None, sha256: str | None = None) -> int:
    """Describe a checkpoint and report whether it would load, without loading it.

    The exit code is 1 if it would not load, or if a file differs from the manifest.

    Args:
        paths: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        tokenizer_path: The tokenizer, if it is not beside the weights.
        sha256: A manifest, lines of "SHA-256 NAME" as sha256sum writes them; its files are checked, too.
    """
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} paths are given; the command takes one: a directory, a .gguf file, or demo")
    path = demo_model_path() if paths[0] == "demo" else Path(paths[0])
    wrong = False
    if sha256 is not None:
        for line, fits in check_manifest(Path(sha256), path if path.is_dir() else path.parent):
            console.put(line)
            wrong |= not fits
    try:
        checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_path)
    except CheckpointError as error:
        console.put(f"does not load: {error}")
        return 1
    console.put("\n".join(lines(checkpoint)))
    return int(wrong)


def lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the description of a checkpoint that loads."""
    found = facts(checkpoint) | {"fast path": fast_path(checkpoint.args)}
    width = max(map(len, found))
    yield from (f"{name:{width}}  {fact}" for name, fact in found.items())
    longest = checkpoint.whole_texts().max_seq_len
    positions = min(_POSITIONS, longest)
    heads = ["dtype", "quantize", "weights", f"cache of {positions:,} positions"]
    rows = [
        [dtype_name(dtype), quantize or "-", f"{weights / MB:,.1f} MB", f"{cache / MB:,.1f} MB"]
        for dtype, quantize, weights, cache in memory(checkpoint, positions=positions)
    ]
    yield "\n" + table("Memory that it needs", heads, rows)
    if longest < checkpoint.args.max_seq_len:
        yield (
            f"note: its attention sees only the last {longest:,} positions (sliding_window); longer texts are not "
            f"supported: it loads with --max_seq_len {longest}"
        )
    yield "loads"


def fast_path(args: ModelArgs) -> str:
    """Return whether native code runs a model of these sizes on this machine's CPU, and if not, why."""
    try:
        why = why_plain(args)
    except RuntimeError as error:  # a user without a home
        why = str(error)
    return "yes, native code on this CPU" if why is None else f"no, because {why}"


def check_manifest(manifest: Path, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield a line for each file of the manifest, and whether the file has the manifest's digest.

    Raises ValueError for a malformed manifest, before any file is read.
    """
    text = read_text(manifest, limit=_MAX_MANIFEST)
    found = [_LINE.fullmatch(line) for line in text.splitlines() if line.strip()]
    if not found or not all(found):
        number = found.index(None) + 1 if None in found else 1
        raise ValueError(f"{manifest}, line {number}: expected a SHA-256 and the plain name of a file beside it")
    for match in filter(None, found):
        path = folder / match["name"]
        if not path.is_file():
            yield f"{match['name']}: is missing", False
        else:
            with path.open("rb") as file:
                fits = hashlib.file_digest(file, "sha256").hexdigest() == match["digest"].lower()
            yield f"{match['name']}: {'OK' if fits else 'differs from the manifest'}", fits
