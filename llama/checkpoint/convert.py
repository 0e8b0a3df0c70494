"""Write any checkpoint that `load` reads as one .gguf file. The command is `llama.cli.convert`."""

import logging
import shutil
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from llama.checkpoint import open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.checkpoint.gguf_writer import FILE_TYPES, Part, planned_of, write_gguf
from llama.host.files import replacing

logger = logging.getLogger(__name__)


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
    (CheckpointError for the checkpoint's files), OSError, or `llama.checkpoint.demo.DemoUnavailable`.
    """
    source, target = demo_model_path() if path == "demo" else Path(path), Path(out)
    kind = _kind_of(type)
    _check_target(source, target, overwrite=overwrite)
    checkpoint = open_checkpoint(source, tokenizer_path=tokenizer_path)
    parts, metadata = planned_of(checkpoint, kind)
    whole = [part.name for part in parts if part.kind == "F16" != kind]
    if whole:
        logger.info("%s have rows that are not a multiple of 32 and stay in F16", ", ".join(whole))
    if tokenizer_path is not None or "tokenizer.ggml.model" not in metadata:
        own = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
        metadata = own | checkpoint.tokenizer.to_gguf(checkpoint.args.vocab_size)
    with replacing(target) as new:
        _check_free_space(target, parts)
        write_gguf(new, checkpoint.whole_texts(), parts, metadata, progress=progress)
    return parts


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
    if target.is_dir():
        raise ValueError(f"{target} is a directory; name a file")
    if not overwrite:
        raise ValueError(f"{target} exists; give another name, or --overwrite to replace it")


def _check_free_space(target: Path, parts: Sequence[Part]) -> None:
    needed, free = sum(part.nbytes for part in parts), shutil.disk_usage(target.parent).free
    if needed > free:
        raise ValueError(
            f"{target} takes {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free there; free more, or choose a "
            "smaller type"
        )
