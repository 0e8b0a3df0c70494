"""Write any checkpoint that `load` reads as one .gguf file. The command is `llama.cli.convert`."""

import logging
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from llama.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.checkpoint.gguf_writer import FILE_TYPES, Part, planned, write_gguf
from llama.host.files import replacing
from llama.tokenizer import Tokenizer
from llama.untrusted.gguf_header import read_gguf_header

logger = logging.getLogger(__name__)

# Keys of a source file that do not describe the new one.
_NOT_COPIED = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")


def convert(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    type: str,
    tokenizer_path: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Part]:
    """Write a checkpoint (Meta's, Hugging Face's, a .gguf file, or "demo") as a .gguf file, and return its tensors.

    `type` of the matrices: f32, f16, bf16, q8_0, q4_0 or q4_1. In a file of 4 bits the embedding and the head have 8
    (Q8_0); matrices whose rows are not a multiple of 32 are F16; norms are F32. Tensors that already have the type are
    copied to the bit. The file appears as a whole, at the end. `progress(done, total)` gets bytes. Raises ValueError
    (CheckpointError for the checkpoint's files), also for a file that `load` would reject, OSError, or
    `llama.checkpoint.demo.DemoUnavailable`.
    """
    source, target = demo_model_path() if path == "demo" else Path(path), Path(out)
    kind = _kind_of(type)
    _check_target(source, target, overwrite=overwrite)
    checkpoint = open_checkpoint(source, tokenizer_path=tokenizer_path)
    parts = planned(checkpoint.args, checkpoint.tensors, kind)
    whole = [part.name for part in parts if part.kind == "F16" != kind]
    if whole:
        logger.info("%s have rows that are not a multiple of 32 and stay in F16", ", ".join(whole))
    metadata = _metadata(checkpoint, own_tokenizer=tokenizer_path is None)
    with replacing(target) as new:
        write_gguf(new, checkpoint.whole_texts(), parts, metadata, progress=progress)
        _check_written(new)
    return parts


def _check_written(path: Path) -> None:
    """Raise ValueError if the reader would reject the file: the gguf package skips empty arrays, for example."""
    try:
        Tokenizer.from_gguf(read_gguf_header(path).metadata)
    except ValueError as error:
        why = error.reason if isinstance(error, CheckpointError) else error
        raise ValueError(f"the new file would not load, so it was deleted: {why}") from error


def _metadata(checkpoint: Checkpoint, *, own_tokenizer: bool) -> dict[str, Any]:
    """Return the description and the tokenizer: those of a .gguf file unchanged, unless another tokenizer is given."""
    path = checkpoint.path
    found = read_gguf_header(path).metadata if path.is_file() else {"general.name": path.resolve().name}
    metadata = {
        key: value
        for key, value in found.items()
        if key.startswith("general.") and key not in _NOT_COPIED and isinstance(value, str)
    }
    if own_tokenizer and "tokenizer.ggml.model" in found:
        return metadata | {key: value for key, value in found.items() if key.startswith("tokenizer.")}
    return metadata | checkpoint.tokenizer.to_gguf(checkpoint.args.vocab_size)


def _kind_of(type: str) -> str:
    if not isinstance(type, str) or type.upper() not in FILE_TYPES:
        raise ValueError(f"type={type!r} is not known; choose one of {', '.join(map(str.lower, FILE_TYPES))}")
    return type.upper()


def _check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise ValueError, before anything is read, for a name that is not recognised or a file that would be lost."""
    if target.suffix != ".gguf":
        raise ValueError(f"{target}: the name must end in .gguf, so that `load` recognises it; use {target}.gguf")
    if not target.exists():
        return
    if source.exists() and target.samefile(source):
        raise ValueError(f"{target} is the file to convert; give the new one another name")
    if not overwrite:
        raise ValueError(f"{target} exists; give another name, or --overwrite to replace it")
