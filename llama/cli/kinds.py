"""The command that lists the kinds of cache."""

import re
import sys
from dataclasses import replace
from inspect import getdoc

from llama.api import pick_cache
from llama.args import ModelArgs
from llama.host import console
from llama.kv_cache import Cache, KVCache
from llama.kv_cache.names import ALIASES

# The cache of a SmolLM2-135M, the demo model.
_SIZES = ModelArgs(dim=576, n_layers=30, n_heads=9, n_kv_heads=3, vocab_size=1, max_seq_len=8192)
_PROMPT = 2048
_HEAD = ["kind", "PARAMS", "default", "bytes", "lossless", "what it does", "paper"]


def main(*kinds: str) -> int:
    """Print the kinds of cache: parameters, bytes, what each one does, and its paper.

    Args:
        kinds: Names with parameters, such as snapkv:0.25 or mine.py:mine, whose bytes are wanted; by default all kinds.
    """
    rows = [_HEAD, *(_row(pick_cache(kind)) for kind in kinds or sorted(KVCache.kinds))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        console.put("  ".join(map(str.ljust, row, widths)).rstrip())
    also = ", ".join(f"{name} for {of}" for name, of in ALIASES.items())
    console.put(
        f"\nChoose one by --kv_cache NAME or NAME:PARAMS. Also accepted: {also}.\n"
        f"bytes: of a prompt of {_PROMPT} tokens in float32, as a part of those of static; the sizes of SmolLM2-135M.\n"
        "All of them work in models of Hugging Face's transformers, too: KindCache(model, NAME), docs/research.md.\n"
        "A kind of your own: docs/kv_cache_kinds.md."
    )
    return 0


def _row(kind: str) -> list[str]:
    cls = KVCache.named(kind)
    text = f"{getdoc(cls)}\n{sys.modules[cls.__module__].__doc__}"
    about, paper = re.split(r"\.\s|\n\n", text)[0].replace("\n", " "), re.search(r"https://[\w./-]*\w", text)
    share = _bytes(kind) / _bytes("static")
    return [
        kind, cls.form, cls.default, f"{share:.3f}", "yes" if cls.lossless else "no", about, paper[0] if paper else ""
    ]  # fmt: skip


def _bytes(kind: str) -> int:
    cache = Cache.of(replace(_SIZES, kv_cache=kind), kind)
    return cache.predicted_bytes(prompts=[_PROMPT], ends=[_PROMPT], reserved=(0, 0), itemsize=4)
