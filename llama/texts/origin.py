"""The origin of a session or a text as values to compare: the model's sizes, mode, machine and weights, the tokenizer.

Does not know sessions or files.
"""

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from llama.args import SETTINGS
from llama.host.version import __version__, code_digest, content_digest
from llama.kv_cache import KVCache
from llama.kv_cache.names import SOURCE, kinds_named
from llama.ops import linear
from llama.schemas import llguidance_version
from llama.streaming import TextCodec
from llama.switches import Switches
from llama.texts.digest import Digest, digest_of, digest_of_text
from llama.untrusted.words import printable

_LIMITS = SETTINGS | {"max_seq_len"}  # fields of ModelArgs that change no number
_REMEDIES = {
    "dtype": "load the model in that dtype",
    "exact": "set model.exact to that value",
    "place": "the bits may differ here; feed the text again",
}


def origin(model: Switches) -> dict[str, Any]:
    """Return what decides the numbers that a model computes, except its weights, as JSON values.

    place: the software and hardware that decide the bits of exact mode; None without it.
    """
    sizes = {name: value for name, value in asdict(model.args).items() if name not in _LIMITS}
    return {
        "sizes": json.loads(json.dumps(sizes)),
        "dtype": str(model.dtype),
        "activations": model.execution.activations,
        "exact": model.exact,
        "place": _place(model) if model.exact else None,
    }


def text_origin(model: Switches, tokenizer: TextCodec, day: str | None, kv_cache: str | None = None) -> dict[str, Any]:
    """Return what decides the texts of a model, except requests, as JSON values.

    day: the date that the chat template prints; None if it prints none. kv_cache: by default the model's kind.
    """
    kind = kv_cache or model.kv_cache
    return {
        **origin(model),
        "kv_cache": kind,
        "own_code": own_code(*kind_classes(kind)),
        "execution": str(model.execution_with(kind)),
        "code": model.runner and model.runner.code,
        "weights": weights_digest(model),
        "tokenizer": fingerprint(tokenizer, model.args.vocab_size),
        "day": day,
        "llama_kv": f"{__version__} code {code_digest()}",
        "torch": torch.__version__,
        "llguidance": llguidance_version(),
    }


def check_origin(model: Switches, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved `origin` differs from the model's."""
    here = origin(model)
    sizes, now = saved["sizes"], here.pop("sizes")
    pairs = [(name, sizes.get(name), now.get(name)) for name in sorted(sizes.keys() | now.keys())]
    pairs += [(name, saved[name], value) for name, value in here.items()]
    for name, then, value in pairs:
        if then != value:
            raise ValueError(
                f"it was saved with another model or mode: {printable(name, 40)} was {then!r:.120}, and is "
                f"{value!r:.120} here; {_REMEDIES.get(name, 'load the model that it was saved with')}"
            )


def kind_classes(kv_cache: str) -> list[type]:
    """Return the class of each KIND of a cache's name, whose files have run."""
    return [KVCache.named(kind) for kind, _ in kinds_named(kv_cache)]


def own_code(*classes: type) -> str | None:
    """Return a digest of the user's files that define the classes and their bases, as they ran; None without one.

    Modules that Python itself imported, such as a program's own, are read as they are now. Other modules that such a
    file imports do not count.
    """
    modules = dict.fromkeys(base.__module__ for one in classes for base in one.__mro__)
    own = [name for name in modules if name.partition(".")[0] not in {"llama", "torch", *sys.stdlib_module_names}]
    parts: list[str] = []
    for module in map(sys.modules.get, own):
        if (ran := getattr(module, SOURCE, None)) is not None:
            parts.append(ran)
        elif (file := getattr(module, "__file__", None)) is not None:
            parts.append(content_digest(file))
    return digest_of_text(" ".join(parts)) if parts else None


def weights_digest(model: Switches) -> str:
    """Return a digest of all weights: names, shapes, dtypes and bits; a weight with two names counts once."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        first.setdefault(id(weight), (name, weight))
    return digest_of(first.values())


def fingerprint(tokenizer: TextCodec, vocab_size: int) -> str:
    """Return a text that is equal for tokenizers with equal ids: the tokenizer's own, or a digest of all ids' texts."""
    own = getattr(tokenizer, "fingerprint", None)
    if callable(own):
        return str(own())
    facts = [tokenizer.bos_id, tokenizer.adds_bos, list(tokenizer.stop_tokens)]
    return digest_of_text(repr([*facts, *(_text_of(tokenizer, id) for id in range(vocab_size))]))


def _text_of(tokenizer: TextCodec, id: int) -> str | None:
    try:
        return tokenizer.decode([id])
    except Exception:  # a tokenizer may raise anything for an id that it does not have
        return None


def _place(model: Switches) -> str:
    """Return what may decide the bits of a sum: names of software and hardware, and a digest of rounded products."""
    device = model.device
    if model.runner is not None:
        return f"{model.runner.name} code {model.runner.code}"
    if device.type == "cuda":
        return f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    rounding = rounding_digest(model.state_dict(keep_vars=True).values())
    return f"torch {torch.__version__} on {device.type}, {cpu}, rounding {rounding}"


def rounding_digest(weights: Iterable[Tensor]) -> str:
    """Return a digest of the rounding of products with matrices like these: equal digests mean equal kernels.

    A library chooses its kernels for each shape and dtype by the CPU's instruction set, its version and the environment
    (for example ONEDNN_MAX_CPU_ISA), and does not report its choice. The bits of a product show it.
    """
    from llama.exact.products import sensitive  # deferred: only exact mode needs it

    digest = Digest()
    for shape, weight in sorted({weight.shape: weight for weight in weights if weight.ndim == 2}.items()):
        x, like = sensitive(64, weight[:1024])  # more outputs use the same kernels
        wide = torch.promote_types(x.dtype, torch.float32)  # the dtype of attention
        digest.take(str(tuple(shape)), linear(x, like))
        digest.take("batched", torch.bmm(x[None].to(wide), like.mT[None].to(wide)))
    return digest.hex()[:16]
