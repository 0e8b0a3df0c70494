"""Find the calls of a model that the plain path runs faster than native code on this machine: timed once, and cached.

Native code runs a call unless the plain path was at least FASTER times as fast at calls of its kind (`CallKind`). The
choice decides bits. So it is made before a model's first call and never again, exact mode ignores it, and with
LLAMA_NATIVE_TRIAL=off in the environment nothing is timed and native code runs all calls. Quantised weights are not
timed: the plain path widens every weight at every call.
"""

import hashlib
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from copy import copy
from pathlib import Path

import torch
from torch import nn

from llama.fast.native_build import cpu_text
from llama.fast.native_runner import NativeRunner
from llama.host.files import replace_file
from llama.model import Transformer
from llama.quant.layers import quantized_weights
from llama.stepper import CallKind

logger = logging.getLogger(__name__)

FASTER = 1.1  # how many times as fast the plain path has to be
TRIES = 3  # of the two paths in turn; the fastest counts
CLEARLY = 1.5  # stop after fewer tries if native code is so many times as fast
LONG = 0.3  # a first call that takes more seconds counts as a try
ENOUGH = 1.0  # stop trying after so many seconds in total
CALLS = {  # rows, and tokens per row
    CallKind(prompt=True, many=False): (1, 64),
    CallKind(prompt=True, many=True): (16, 16),
    CallKind(prompt=False, many=False): (1, 1),
    CallKind(prompt=False, many=True): (16, 1),
}
# The first layers are timed, up to so many weights, and the head: all layers of a small model for steps, which read
# each weight once, and fewer for prompts, which use it for every token. So the demo model takes a second.
WEIGHTS_OF_PROMPTS, WEIGHTS_OF_STEPS = 12_000_000, 120_000_000

Seconds = dict[CallKind, tuple[float, float]]  # of the plain path, and of native code


def plain_calls(model: Transformer, runner: NativeRunner, folder: Path) -> frozenset[CallKind]:
    """Return the kinds of calls that the plain path runs at least FASTER times as fast as the runner.

    The times are read from a file in `folder`, or measured and written there. The file is that of the machine, the
    native code, the version of PyTorch, the number of threads, and the sizes and dtype of the model.
    """
    if not asked_for() or quantized_weights(model):
        return frozenset()
    file = folder / f"trial-{_key(model, runner)}.json"
    seconds = _read(file)
    if not _kinds_within(model) <= seconds.keys():
        logger.info("fast: timing native code and the plain path, once for models of these sizes")
        seconds = time_calls(model, runner)
        _write(file, seconds)
    return frozenset(kind for kind, (plain, native) in seconds.items() if native >= FASTER * plain)


def asked_for() -> bool:
    """Return False if LLAMA_NATIVE_TRIAL=off. Raises ValueError for other values than on and off."""
    text = os.environ.get("LLAMA_NATIVE_TRIAL") or "on"
    if text not in ("on", "off"):
        raise ValueError(f"LLAMA_NATIVE_TRIAL={text!r} in the environment must be on or off")
    return text == "on"


def time_calls(model: Transformer, runner: NativeRunner) -> Seconds:
    """Return the seconds of each kind of call that the model's limits allow."""
    seconds: Seconds = {}
    for kind in sorted(_kinds_within(model)):
        part = _first_layers(model, WEIGHTS_OF_PROMPTS if kind.prompt else WEIGHTS_OF_STEPS)
        seconds[kind] = _time(part, runner, *CALLS[kind])
    return seconds


def _kinds_within(model: Transformer) -> set[CallKind]:
    """Return the kinds of calls whose trial is within the model's limits."""
    most_rows, longest = model.args.max_batch_size or sys.maxsize, model.args.max_seq_len
    return {kind for kind, (rows, width) in CALLS.items() if rows <= most_rows and width <= longest}


def _time(model: Transformer, runner: NativeRunner, rows: int, width: int) -> tuple[float, float]:
    """Return the seconds of a call at position 0, by the plain path and by the runner."""
    tokens = torch.arange(rows * width, device="cpu").view(rows, width) % model.args.vocab_size
    fastest, spent = [math.inf, math.inf], 0.0
    with torch.inference_mode():
        caches = [model.new_cache("static", rows=rows, length=width) for _ in fastest]
        for attempt in range(1 + TRIES):
            took = []
            for model.runner, cache in zip((None, runner), caches, strict=True):
                began = time.perf_counter()
                model(tokens, 0, cache=cache, logits="last")
                took.append(time.perf_counter() - began)
            spent += sum(took)
            if attempt == 0 and spent < LONG:
                continue  # a short first call mostly allocates
            fastest = list(map(min, fastest, took))
            clear = fastest[0] >= CLEARLY * fastest[1] and (attempt > 1 or spent > LONG)
            if clear or spent > ENOUGH:
                break
    return fastest[0], fastest[1]


def _first_layers(model: Transformer, weights: int) -> Transformer:
    """Return a cached model of the same embedding, head and first layers, with at most so many weights in layers."""
    each = sum(weight.numel() for weight in model.layers[0].parameters())
    whole = model.with_kv_caching(True)
    part = copy(whole)
    part._modules = dict(whole._modules)
    part.layers = nn.ModuleList(list(whole.layers)[: max(1, weights // each)])
    return part


def _key(model: Transformer, runner: NativeRunner) -> str:
    args = model.args
    sizes = args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.head_dim, args.ffn_dim, args.vocab_size
    found = cpu_text(), platform.machine(), runner.code, torch.__version__, torch.get_num_threads(), sizes, model.dtype
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _read(file: Path) -> Seconds:
    """Return the times in a file; none if `_write` did not write it."""
    try:
        found = json.loads(file.read_text())
        return {kind: (float(found[str(kind)][0]), float(found[str(kind)][1])) for kind in CALLS if str(kind) in found}
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return {}


def _write(file: Path, seconds: Mapping[CallKind, tuple[float, float]]) -> None:
    try:
        replace_file(file, json.dumps({str(kind): both for kind, both in seconds.items()}, indent=1).encode())
    except OSError as why:
        logger.warning("fast: the times cannot be stored, so the next start measures again: %s", why)
