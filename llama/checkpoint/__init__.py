"""Open a checkpoint of any of three formats as sizes, a tokenizer, and weights in Meta's names and layout.

No other folder sees the names and layouts of the formats. Does not run a model and prints nothing.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

import torch

from llama.args import ModelArgs
from llama.checkpoint.assemble import Checkpoint, Weight, check_shapes, listing, needed_shapes
from llama.checkpoint.gguf import open_gguf
from llama.checkpoint.huggingface import open_huggingface
from llama.checkpoint.meta import open_meta
from llama.costs import file_bytes
from llama.model import Transformer
from llama.quant.layers import quantize_layers, weights_of
from llama.quant.packed import Format, PackedWeight
from llama.ranks import ALONE, Ranks, cut_for
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.words import some_of

__all__ = ["Checkpoint", "CheckpointError", "load_weights", "open_checkpoint"]

_KINDS = (
    "a checkpoint is a directory of Meta's (params.json, tokenizer.model, consolidated.00.pth), one of Hugging Face's "
    "(config.json, tokenizer.json, model.safetensors), or a .gguf file"
)

_STORED_BLOCK = 1 << 20  # stored weights per read: enough that the overhead of a call is not measurable
_SCORE_WEIGHTS = re.compile(r"\.attention\.(wq|wk|q_norm|k_norm)\.")  # weights from which attention scores are computed


def open_checkpoint(
    path: str | PathLike[str],
    *,
    tokenizer_path: str | PathLike[str] | None = None,
    max_seq_len: int | None = None,
) -> Checkpoint:
    """Return the checkpoint at `path`: its format is recognised, its headers are checked, its weights are mapped.

    `tokenizer_path` names a tokenizer.model or tokenizer.json that replaces the checkpoint's own. `max_seq_len` is the
    length of a model whose files do not decide one; it does not replace theirs. Raises only CheckpointError, whatever
    is wrong with the files.
    """
    path = Path(path)
    tokenizer_path = None if tokenizer_path is None else Path(tokenizer_path)
    with refusing(path, "cannot be opened"):
        if path.is_dir():
            return _open_directory(path, tokenizer_path, max_seq_len)
        if not os.path.lexists(path):
            raise CheckpointError(path, f"there is no such file or directory; {_KINDS}")
        if not path.is_file():
            raise CheckpointError(path, f"is not a regular file, or is a broken link; {_KINDS}")
        if path.suffix == ".gguf":
            return open_gguf(path, tokenizer_path=tokenizer_path)
        if path.suffix in (".pth", ".safetensors", ".json", ".model"):
            raise CheckpointError(path, f"is one file of a checkpoint; pass its directory: {path.parent}")
        raise CheckpointError(path, f"is not a checkpoint; {_KINDS}")


def _open_directory(path: Path, tokenizer_path: Path | None, max_seq_len: int | None) -> Checkpoint:
    names = sorted(entry.name for entry in path.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    present = {
        "Meta's .pth": any(name.startswith("consolidated") and name.endswith(".pth") for name in names),
        "Hugging Face's .safetensors": any(".safetensors" in name for name in names),
        ".gguf": bool(ggufs),
    }
    formats = [name for name, found in present.items() if found]
    if not formats:
        raise CheckpointError(path, f"contains no weights, found {listing(path)}; {_KINDS}")
    if len(formats) > 1 or len(ggufs) > 1:
        several = some_of(ggufs) if len(ggufs) > 1 else f"weights of {' and '.join(formats)}"
        raise CheckpointError(path, f"contains more than one checkpoint ({several}); pass one file or directory")
    if ggufs:
        return open_gguf(path / ggufs[0], tokenizer_path=tokenizer_path)
    if formats == ["Meta's .pth"]:
        return open_meta(path, tokenizer_path=tokenizer_path, max_seq_len=max_seq_len)
    return open_huggingface(path, tokenizer_path=tokenizer_path)


def load_weights(
    checkpoint: Checkpoint,
    args: ModelArgs,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: Ranks = ALONE,
    quantize: str | None = None,
    activations: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Return a Transformer(args) whose parameters are copies of the checkpoint's weights, in `dtype` on `device`.

    `args` are the checkpoint's, with the caller's limits and switches. Each of several `ranks` reads only its own
    slices. `quantize` "int8" or "int4" packs each matrix block by block while it is read; "stored" keeps the codes and
    scales of the file. `activations`: see `llama.quant.layers.PackedLinear`. `progress(done, total)` gets bytes after
    each parameter.

    Memory is allocated only after all names and shapes were checked; beyond the model, one small block at a time.
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
    model = _blank(checkpoint, args, dtype, quantize, ranks, activations)
    materialise(model, dtype=dtype, device=device)
    parts = weights_of(model)  # lists a tied head once, as the embedding
    total, done = sum(part.nbytes for part in parts.values()), 0
    for name, part in parts.items():
        own = checkpoint.tensors[name].part(tuple(part.shape), ranks.rank, ranks.size)
        if isinstance(part, PackedWeight):
            _fill(part, own)
        elif isinstance(part, torch.Tensor):
            own.copy_to(part.detach())
        _check_finite(checkpoint.path, name, part)
        own.drop()
        done += part.nbytes
        if progress is not None:
            progress(done, total)
    ranks.agree(lambda: {"weights": model.norm.weight.tolist()})  # every rank has all of it: are the files the same?
    return model if quantize is None else model.requires_grad_(False)


def _blank(
    checkpoint: Checkpoint,
    args: ModelArgs,
    dtype: torch.dtype,
    quantize: str | None,
    ranks: Ranks,
    activations: int = 16,
) -> Transformer:
    """Return the model on the meta device, with its final layers and no allocated memory."""
    with torch.device("meta"), cut_for(ranks):
        model = Transformer(args)
        if quantize == "stored":
            if not checkpoint.quantised:
                raise CheckpointError(
                    checkpoint.path,
                    "quantize='stored' needs a .gguf file with quantised matrices, and no matrix is quantised; "
                    "leave it out",
                )
            quantize_layers(model, dtype, quantize, partial(_stored_as, checkpoint), activations)
        elif quantize is not None:
            quantize_layers(model, dtype, quantize, activations=activations)
    return model


def stored_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each matrix with quantize="stored", by name; a tied head is counted once.

    Raises CheckpointError if the file has no quantised matrix.
    """
    model = _blank(checkpoint, checkpoint.args, dtype, "stored", ALONE)
    found = {name: part.nbytes for name, part in weights_of(model).items() if len(part.shape) == 2}
    # Matrices that stay floats have another dtype on the meta device.
    floats = {name: torch.Size(part.shape).numel() for name, part in model.named_parameters() if part.requires_grad}
    return found | {name: count * dtype.itemsize for name, count in floats.items() if name in found}


def file_bytes_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of each matrix in the file, by name; a tied head is counted once."""
    found = {}
    for name, weight in checkpoint.tensors.items():
        if len(weight.shape) == 2 and not (name == "output.weight" and checkpoint.args.tied_head):
            numbers = torch.Size(weight.shape).numel()
            stored = weight.stored
            floats = numbers * weight.rows(0, 1).itemsize
            found[name] = floats if stored is None else file_bytes(numbers, stored.kind)
    return found


def _stored_as(checkpoint: Checkpoint, name: str) -> Format | None:
    """Return the stored format of a matrix; None if the file has floats."""
    stored = checkpoint.tensors[name].stored
    return None if stored is None else stored.format


def _fill(weight: PackedWeight, own: Weight) -> None:
    """Pack a matrix of a file. Codes and scales that the file stores in this form are copied to the bit."""
    stored = own.stored if weight.stored_as == "stored" else None
    if stored is None:
        for start, stop in weight.blocks():
            weight.fill(start, own.rows(start, stop))
        return
    for start, stop in weight.blocks(_STORED_BLOCK // weight.shape[1]):
        weight.take(start, stored.parts(start, stop))


def _check_finite(path: Path, name: str, part: torch.Tensor | PackedWeight) -> None:
    """Reject scales that are not finite, and numbers that are not finite in the weights of queries and keys.

    In other weights such numbers reach the logits, and sampling reports them. Attention scores that are all NaN do
    not: PyTorch on a CPU treats the query as fully masked, and the text is silently another.
    """
    if isinstance(part, PackedWeight):
        scales = [scale for scale in part.parameters() if scale.is_floating_point()]
        if not all(map(_finite, scales)):
            cause = "the file is damaged" + ("" if part.stored_as == "stored" else ", or leave quantize out")
            raise CheckpointError(path, f"{name} has scales that are not finite in float16; {cause}")
    elif isinstance(part, torch.Tensor) and _SCORE_WEIGHTS.search(name) and not _finite(part):
        cause = "the file is damaged, or needs a wider dtype"
        raise CheckpointError(path, f"{name} has numbers that are not finite in {part.dtype}; {cause}")


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def materialise(model: Transformer, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate every parameter, uninitialised. A parameter that has two names, as a tied head has, stays one.

    All are allocated before the first read, so that temporary buffers leave no gaps between them.
    """
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, blank in list(model.named_parameters(remove_duplicate=False)):
        if blank not in made:
            kind = dtype if blank.requires_grad else blank.dtype  # packed weights keep their dtypes
            made[blank] = torch.nn.Parameter(
                torch.empty(blank.shape, dtype=kind, device=device), requires_grad=blank.requires_grad
            )
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[blank])
