"""Checkpoints of three formats, opened as one thing: sizes, a tokenizer, and weights in Meta's names and layout.

Foreign names and layouts end here. Knows nothing of running a model, and prints nothing.
"""

import os
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import torch

from llama.args import ModelArgs
from llama.checkpoint.base import Checkpoint, Stored, Weight, check_shapes, listing, needed_shapes
from llama.checkpoint.gguf import open_gguf
from llama.checkpoint.huggingface import open_huggingface
from llama.checkpoint.meta import open_meta
from llama.costs import file_bytes
from llama.model import Transformer
from llama.quant.layers import quantize_layers, weights_of
from llama.quant.packed import Format, MappedWeight, PackedWeight, QuantizedWeight
from llama.ranks import ALONE, Ranks, cut_for
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.words import some_of

__all__ = ["Checkpoint", "CheckpointError", "load_weights", "open_checkpoint"]

_KINDS = (
    "a checkpoint is a directory of Meta's (params.json, tokenizer.model, consolidated.00.pth), one of Hugging Face's "
    "(config.json, tokenizer.json, model.safetensors), or a .gguf file"
)

_AT_ONCE = 1 << 20  # stored weights that are read at a time: so many that a call's own time does not show
_OF_SCORES = re.compile(r"\.attention\.(wq|wk|q_norm|k_norm)\.")  # weights that attention's scores are made of


def open_checkpoint(path: str | PathLike[str], *, tokenizer_path: str | PathLike[str] | None = None) -> Checkpoint:
    """Recognise the format, check everything that can be checked without reading weights, and map the files.

    `tokenizer_path` names a tokenizer.model or tokenizer.json to take instead of the checkpoint's own. Raises
    CheckpointError, and nothing else, for whatever is wrong with the files.
    """
    path = Path(path)
    tokenizer_path = None if tokenizer_path is None else Path(tokenizer_path)
    with refusing(path, "cannot be opened"):
        if path.is_dir():
            return _open_directory(path, tokenizer_path)
        if path.is_file():
            return _open_file(path, tokenizer_path)
        if os.path.lexists(path):
            raise CheckpointError(path, f"is no regular file, or a link that leads to none; {_KINDS}")
        raise CheckpointError(path, f"there is no such file or directory; {_KINDS}")


def _open_file(path: Path, tokenizer_path: Path | None) -> Checkpoint:
    if path.suffix == ".gguf":
        return open_gguf(path, tokenizer_path=tokenizer_path)
    if path.suffix in (".pth", ".safetensors", ".json", ".model"):
        raise CheckpointError(path, f"is one file of a checkpoint; pass the directory that holds it: {path.parent}")
    raise CheckpointError(path, f"is no checkpoint; {_KINDS}")


def _open_directory(path: Path, tokenizer_path: Path | None) -> Checkpoint:
    names = sorted(entry.name for entry in path.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    holds = {
        "Meta's .pth": any(name.startswith("consolidated") and name.endswith(".pth") for name in names),
        "Hugging Face's .safetensors": any(".safetensors" in name for name in names),
        ".gguf": bool(ggufs),
    }
    formats = [name for name, held in holds.items() if held]
    if not formats:
        raise CheckpointError(path, f"holds no weights, found {listing(path)}; {_KINDS}")
    if len(formats) > 1 or len(ggufs) > 1:
        found = some_of(ggufs) if len(ggufs) > 1 else f"weights of {' and '.join(formats)}"
        raise CheckpointError(path, f"holds more than one checkpoint ({found}); pass a file or directory of one")
    if ggufs:
        return open_gguf(path / ggufs[0], tokenizer_path=tokenizer_path)
    open_format = open_meta if formats == ["Meta's .pth"] else open_huggingface
    return open_format(path, tokenizer_path=tokenizer_path)


def load_weights(
    checkpoint: Checkpoint,
    args: ModelArgs,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: Ranks = ALONE,
    quantize: str | None = None,
    activations: int = 16,
    repack: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Return a Transformer(args) whose parameters are copies of the checkpoint's weights, in `dtype` on `device`.

    Of several `ranks` each reads its own slices only. With `quantize` "int8" or "int4" the matrices are brought into
    that one by one as they are read, so that none is ever there in a wider dtype as a whole but the one being read;
    with "stored" they keep the codes and scales of the file, and without `repack` they stay in it, mapped: nothing of
    them is read, nor checked. `activations`: see `llama.quant.layers.PackedLinear`.

    `args` are the checkpoint's own, with limits and switches as the caller wants them. Nothing is allocated before
    all names and shapes are known to fit, and beyond the model only one small block at a time is.
    `progress(done, total)` is told the bytes of the model after each parameter.
    """
    ranks.agree(
        lambda: {
            "configuration": args,
            "tokenizer": checkpoint.tokenizer.fingerprint(),
            "dtype": dtype,
            "device": torch.device(device).type,
            "versions": torch.__version__,
        }
    )
    checkpoint.check_length(args.max_seq_len)
    found = {name: weight.shape for name, weight in checkpoint.tensors.items()}
    check_shapes(checkpoint.path, needed=needed_shapes(args), found=found)
    model = _blank(checkpoint, args, dtype, quantize, ranks, activations, repack)
    materialise(model, dtype=dtype, device=device)
    parts = weights_of(model)  # a tied head is here as the embedding
    total, done = sum(part.nbytes for part in parts.values()), 0
    for name, part in parts.items():
        own = checkpoint.tensors[name].part(tuple(part.shape), ranks.rank, ranks.size)
        if isinstance(part, PackedWeight):
            _fill(part, own)
        elif isinstance(part, torch.Tensor):
            own.copy_to(part.detach())
        _check_finite(checkpoint.path, name, part)
        if not isinstance(part, MappedWeight):
            own.drop()
        done += part.nbytes
        if progress is not None:
            progress(done, total)
    # What all ranks hold whole tells whether their files are the same.
    ranks.agree(lambda: {"weights": model.norm.weight.tolist()})
    return model if quantize is None else model.requires_grad_(False)


def _blank(
    checkpoint: Checkpoint,
    args: ModelArgs,
    dtype: torch.dtype,
    quantize: str | None,
    ranks: Ranks,
    activations: int = 16,
    repack: bool = True,
) -> Transformer:
    """Return the model with its layers as they will be, and no memory taken yet."""
    with torch.device("meta"), cut_for(ranks):
        model = Transformer(args)
        if quantize == "stored":
            kept = stored_formats(checkpoint) if repack else mapped_weights(checkpoint)
            quantize_layers(model, dtype, quantize, kept.get, activations)
        elif quantize is not None:
            quantize_layers(model, dtype, quantize, activations=activations)
    return model


def stored_bytes(checkpoint: Checkpoint, dtype: torch.dtype, *, repack: bool = True) -> dict[str, int]:
    """Return the bytes that each matrix takes with quantize="stored", by its name; a tied head's once.

    Raises CheckpointError where `stored_formats` does.
    """
    model = _blank(checkpoint, checkpoint.args, dtype, "stored", ALONE, repack=repack)
    held = {name: part.nbytes for name, part in weights_of(model).items() if len(part.shape) == 2}
    itemsize = dtype.itemsize  # of matrices that stay floats, which are blank in another dtype
    floats = {name: torch.Size(part.shape).numel() for name, part in model.named_parameters() if part.requires_grad}
    return held | {name: count * itemsize for name, count in floats.items() if name in held}


def file_bytes_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes that each matrix takes in the file, by its name; a tied head's once."""
    found = {}
    for name, weight in checkpoint.tensors.items():
        if len(weight.shape) == 2 and not (name == "output.weight" and checkpoint.args.tied_head):
            numbers = torch.Size(weight.shape).numel()
            stored = weight.stored
            floats = numbers * weight.rows(0, 1).itemsize
            found[name] = floats if stored is None else file_bytes(numbers, stored.kind)
    return found


def stored_formats(checkpoint: Checkpoint) -> dict[str, Format | None]:
    """Return the format in which the file has each matrix, None where that is floats.

    Raises CheckpointError where no matrix is quantised.
    """
    return {name: None if kept is None else kept.format for name, kept in _stored(checkpoint).items()}


def mapped_weights(checkpoint: Checkpoint) -> dict[str, MappedWeight | None]:
    """Return each matrix as it lies in the file, else as `stored_formats`."""
    shapes = {name: weight.shape for name, weight in checkpoint.tensors.items()}
    return {name: None if kept is None else kept.mapped(shapes[name][1]) for name, kept in _stored(checkpoint).items()}


def _stored(checkpoint: Checkpoint) -> dict[str, Stored | None]:
    stored = {name: weight.stored for name, weight in checkpoint.tensors.items() if len(weight.shape) == 2}
    if not any(stored.values()):
        raise CheckpointError(
            checkpoint.path,
            "quantize='stored' keeps what a .gguf file has quantised, and here no matrix is; leave it out",
        )
    return stored


def _fill(weight: PackedWeight, own: Weight) -> None:
    """Bring a matrix of a file into its packed form; what the file has in that form is kept to the bit."""
    stored = own.stored if weight.stored_as == "stored" else None
    if stored is None:
        for start, stop in weight.blocks():
            weight.fill(start, own.rows(start, stop))
        return
    for start, stop in weight.blocks(_AT_ONCE // weight.shape[1]):
        weight.take(start, stored.parts(start, stop))


def _check_finite(path: Path, name: str, part: torch.Tensor | QuantizedWeight) -> None:
    """Refuse scales that are no finite float16; and where queries and keys come from, any number that is not finite.

    Elsewhere such numbers reach the logits, and are reported. But scores that are all nan PyTorch's attention on a CPU
    takes for a query that sees nothing: another text, without a word. What lies in a file, mapped, is not looked at.
    """
    if isinstance(part, PackedWeight):
        scales = [scale for scale in part.parameters() if scale.is_floating_point()]
        if not all(map(_finite, scales)):
            cause = "the file is damaged" + ("" if part.stored_as == "stored" else ", or leave quantize out")
            raise CheckpointError(path, f"{name} has scales that are no finite float16; {cause}")
    elif isinstance(part, torch.Tensor) and _OF_SCORES.search(name) and not _finite(part):
        cause = "the file is damaged, or needs a wider dtype"
        raise CheckpointError(path, f"{name} has numbers that are not finite in {part.dtype}; {cause}")


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def materialise(model: Transformer, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every parameter memory, still unwritten. Those that are one stay one: the two ends of a tied head.

    All at once and before the first read, so that what reading needs for a moment leaves no holes between them.
    """
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, blank in list(model.named_parameters(remove_duplicate=False)):
        if not blank.is_meta:
            continue  # it lies in a file
        if blank not in made:
            kind = dtype if blank.requires_grad else blank.dtype  # int8 weights are of the dtypes that they are of
            made[blank] = torch.nn.Parameter(
                torch.empty(blank.shape, dtype=kind, device=device), requires_grad=blank.requires_grad
            )
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[blank])
