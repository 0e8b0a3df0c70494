"""Find out whether the plain path computes a model's prompts faster than native code on this machine.

One long prompt is timed once, and the times are cached. A step takes the time of reading the weights, so native code
always runs it. The choice decides bits. So it is made before a model's first call and never again, exact mode ignores
it, and with LLAMA_NATIVE_TRIAL=off in the environment nothing is timed and native code runs all calls. Quantised
weights are not timed: the plain path widens every weight at every call.
"""

import hashlib
import json
import logging
import math
import os
import platform
import time
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

logger = logging.getLogger(__name__)

FASTER = 1.1  # how many times as fast the plain path has to be
TRIES = 3  # of the two paths in turn, after one that mostly allocates; the fastest counts
# The tokens of the timed prompt per thread, the weights of the first layers that compute it, and the most
# multiplications of a thread: a prompt through one layer of more weights is shorter.
TOKENS, WEIGHTS, MULTIPLICATIONS = 256, 12_000_000, 10**10

Seconds = tuple[float, float]  # of the plain path, and of native code


def plain_prompts(model: Transformer, runner: NativeRunner, folder: Path) -> bool:
    """Return True if the plain path computes a long prompt at least FASTER times as fast as the runner.

    The times are read from a file in `folder`, or measured and written there. The file is that of the machine, the
    native code, the version of PyTorch, the prompt, and the sizes and dtype of the model.
    """
    if not asked_for() or quantized_weights(model):
        return False
    part = _first_layers(model)
    threads, weights = torch.get_num_threads(), sum(weight.numel() for weight in part.layers.parameters())
    width = min(model.args.max_seq_len, threads * min(TOKENS, max(1, MULTIPLICATIONS // weights)))
    file = folder / f"trial-{_key(model, runner, width)}.json"
    seconds = _read(file)
    if seconds is None:
        logger.info("fast: timing native code and the plain path, once for models of these sizes")
        seconds = time_prompt(part, runner, width)
        _write(file, seconds)
    return seconds[1] >= FASTER * seconds[0]


def asked_for() -> bool:
    """Return False if LLAMA_NATIVE_TRIAL=off. Raises ValueError for other values than on and off."""
    text = os.environ.get("LLAMA_NATIVE_TRIAL") or "on"
    if text not in ("on", "off"):
        raise ValueError(f"LLAMA_NATIVE_TRIAL={text!r} in the environment must be on or off")
    return text == "on"


@torch.inference_mode()
def time_prompt(model: Transformer, runner: NativeRunner, width: int) -> Seconds:
    """Return the seconds of a prompt of `width` tokens, by the plain path and by the runner."""
    tokens = torch.arange(width, device="cpu")[None] % model.args.vocab_size
    fastest = [math.inf, math.inf]
    caches = [model.new_cache("static", rows=1, length=width) for _ in fastest]
    for attempt in range(1 + TRIES):
        for path, (model.runner, cache) in enumerate(zip((None, runner), caches, strict=True)):
            began = time.perf_counter()
            model(tokens, 0, cache=cache, logits="last")
            if attempt:
                fastest[path] = min(fastest[path], time.perf_counter() - began)
    return fastest[0], fastest[1]


def _first_layers(model: Transformer) -> Transformer:
    """Return a cached model of the first layers, with PANEL columns of the head: a prompt needs it for one token."""
    each = sum(weight.numel() for weight in model.layers[0].parameters())
    whole = model.with_kv_caching(True)
    part = copy(whole)
    part._modules = dict(whole._modules)
    part.layers = nn.ModuleList(list(whole.layers)[: max(1, WEIGHTS // each)])
    part.output = copy(whole.output)
    part.output._parameters = dict(whole.output._parameters)
    part.output.weight = nn.Parameter(whole.output.weight.detach()[:PANEL], requires_grad=False)
    return part


def _key(model: Transformer, runner: NativeRunner, width: int) -> str:
    args, prompt = model.args, (width, torch.get_num_threads())
    sizes = args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.head_dim, args.ffn_dim, args.vocab_size
    found = cpu_text(), platform.machine(), runner.code, torch.__version__, prompt, sizes, model.dtype
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _read(file: Path) -> Seconds | None:
    """Return the times in a file; None if `_write` did not write it."""
    try:
        plain, native = map(float, json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return plain, native


def _write(file: Path, seconds: Seconds) -> None:
    try:
        replace_file(file, json.dumps(seconds).encode())
    except OSError as why:
        logger.warning("fast: the times cannot be stored, so the next start measures again: %s", why)
