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
from llama.quant.packed import PANEL
from llama.stepper import LONG, PROMPTS, STEPS, CallKind

logger = logging.getLogger(__name__)

FASTER = 1.1  # how many times as fast the plain path has to be
TRIES = 3  # of the two paths in turn; the fastest counts
CLEARLY = 1.5  # stop after fewer tries if native code is so many times as fast
SLOW = 0.3  # a first call that takes more seconds counts as a try
ENOUGH = 1.0  # seconds that the tries of a kind may take: more are not begun, and long prompts may have none
# The first layers are timed, up to so many weights: all layers of a small model for steps, which read each weight once,
# and the head; fewer for prompts, which use a weight for every token, and without the head, which they use for one.
WEIGHTS_OF_PROMPTS, WEIGHTS_OF_STEPS = 12_000_000, 120_000_000

Seconds = dict[CallKind, tuple[float, float]]  # of the plain path, and of native code


def plain_calls(model: Transformer, runner: NativeRunner, folder: Path) -> frozenset[CallKind]:
    """Return the kinds of calls that the plain path runs at least FASTER times as fast as the runner.

    The times are read from a file in `folder`, or measured and written there. The file is that of the machine, the
    native code, the version of PyTorch, the calls, and the sizes and dtype of the model.
    """
    if not asked_for() or quantized_weights(model):
        return frozenset()
    file = folder / f"trial-{_key(model, runner)}.json"
    seconds = _read(file)
    if not _calls_within(model).keys() <= seconds.keys():
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


def calls_of(threads: int) -> dict[CallKind, tuple[int, int]]:
    """Return the call that is timed for each kind with so many threads: rows, and tokens per row."""
    return {
        CallKind(prompt=True, many=False): (1, 64),
        CallKind(prompt=True, many=True): (16, min(16, 4 * threads)),  # at most half of what is long
        CallKind(prompt=True, many=False, long=True): (1, 256 * threads),
        CallKind(prompt=True, many=True, long=True): (8, max(256, 16 * threads)),
        CallKind(prompt=False, many=False): (1, 1),
        CallKind(prompt=False, many=True): (16, 1),
    }


def time_calls(model: Transformer, runner: NativeRunner) -> Seconds:
    """Return the seconds of each kind of call that the model's limits allow.

    If long prompts would take more than ENOUGH, they are not timed: then their times are those of the kind before, in
    proportion to the tokens.
    """
    seconds: Seconds = {}
    per_token = (0.0, 0.0)  # of the kind before
    for kind, (rows, width) in _calls_within(model).items():
        if kind.long and sum(per_token) * rows * width > ENOUGH:
            seconds[kind] = per_token[0] * rows * width, per_token[1] * rows * width
            continue
        seconds[kind] = plain, native = _time(_part_for(kind, model), runner, rows, width)
        per_token = plain / (rows * width), native / (rows * width)
    return seconds


def _calls_within(model: Transformer) -> dict[CallKind, tuple[int, int]]:
    """Return the calls to time that are within the model's limits; long prompts are cut to them."""
    most_rows, longest = model.args.max_batch_size or sys.maxsize, model.args.max_seq_len
    threads, within = torch.get_num_threads(), dict[CallKind, tuple[int, int]]()
    for kind, (rows, most) in calls_of(threads).items():
        width = min(most, longest) if kind.long else most
        if rows <= most_rows and width <= longest and rows * width >= (LONG * threads if kind.long else 1):
            within[kind] = rows, width
    return within


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
            if attempt == 0 and spent < SLOW:
                continue  # a short first call mostly allocates
            fastest = list(map(min, fastest, took))
            clear = fastest[0] >= CLEARLY * fastest[1] and (attempt > 1 or spent > SLOW)
            if clear or spent + sum(took) > ENOUGH:
                break
    return fastest[0], fastest[1]


def _part_for(kind: CallKind, model: Transformer) -> Transformer:
    """Return a cached model of the first layers, for steps with the head, for prompts with PANEL columns of it."""
    most = WEIGHTS_OF_PROMPTS if kind.prompt else WEIGHTS_OF_STEPS
    each = sum(weight.numel() for weight in model.layers[0].parameters())
    whole = model.with_kv_caching(True)
    part = copy(whole)
    part._modules = dict(whole._modules)
    part.layers = nn.ModuleList(list(whole.layers)[: max(1, most // each)])
    if kind.prompt:
        part.output = copy(whole.output)
        part.output._parameters = dict(whole.output._parameters)
        part.output.weight = nn.Parameter(whole.output.weight.detach()[:PANEL], requires_grad=False)
    return part


def _key(model: Transformer, runner: NativeRunner) -> str:
    args, calls = model.args, calls_of(torch.get_num_threads())
    sizes = args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.head_dim, args.ffn_dim, args.vocab_size
    found = cpu_text(), platform.machine(), runner.code, torch.__version__, calls, sizes, model.dtype
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _read(file: Path) -> Seconds:
    """Return the times in a file; none if `_write` did not write it."""
    try:
        found = json.loads(file.read_text())
        kinds = [kind for kind in PROMPTS | STEPS if str(kind) in found]
        return {kind: (float(found[str(kind)][0]), float(found[str(kind)][1])) for kind in kinds}
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return {}


def _write(file: Path, seconds: Mapping[CallKind, tuple[float, float]]) -> None:
    try:
        replace_file(file, json.dumps({str(kind): both for kind, both in seconds.items()}, indent=1).encode())
    except OSError as why:
        logger.warning("fast: the times cannot be stored, so the next start measures again: %s", why)
