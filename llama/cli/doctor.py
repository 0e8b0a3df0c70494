"""The command that describes a checkpoint and reports why it would not load: python -m llama.checkpoint PATH."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from llama.checkpoint.demo import demo_model_path
from llama.checkpoint.doctor import Findings, examine
from llama.cli import console
from llama.cli.progress import progress_bar
from llama.costs import MB, table
from llama.untrusted.files import read_text

_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>[^/\\\0]+)")
_MAX_MANIFEST = 1 << 20  # bytes
_PIECE = 1 << 22  # bytes per read


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
    findings = examine(path, tokenizer_path=None if tokenizer_path is None else Path(tokenizer_path))
    console.put("\n".join(lines(findings)))
    return int(wrong or bool(findings.obstacles))


def lines(findings: Findings) -> Iterator[str]:
    """Yield the findings as text."""
    width = max(map(len, findings.facts), default=0)
    yield from (f"{name:{width}}  {fact}" for name, fact in findings.facts.items())
    if findings.memory:
        heads = ["dtype", "quantize", "weights", f"cache of {findings.positions:,} positions"]
        rows = [
            [dtype, quantize or "-", f"{weights / MB:,.1f} MB", f"{cache / MB:,.1f} MB"]
            for dtype, quantize, weights, cache in findings.memory
        ]
        yield "\n" + table("Memory that it needs", heads, rows)
    yield from (f"note: {remark}" for remark in findings.remarks)
    yield from (f"does not load: {obstacle}" for obstacle in findings.obstacles)
    if not findings.obstacles:
        yield "loads"


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
            fits = file_sha256(path) == match["digest"].lower()
            yield f"{match['name']}: {'OK' if fits else 'differs from the manifest'}", fits


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress_bar("reading", total=path.stat().st_size, unit="B") as bar:
        while piece := file.read(_PIECE):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()
