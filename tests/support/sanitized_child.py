"""Run native code, compiled with sanitizers, on tensors of PyTorch with sizes around edges; see test_native_builds.

It prints "clean", and then makes a mistake that the sanitizer must find.

tests/fast/native/kernels.cpp, compiled with them too, has every kernel.
"""

import itertools
import random
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fakes import Ids
from native import ARGS, compiled_with, served, twins
from threads import in_threads

from llama.fast import native_call
from llama.fast.native_runner import NativeRunner
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.sampling import Sampler, Sampling

# Optimising takes a compiler longer than these libraries run.
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")
THREADS_SANITIZED = ("-O0", "-fsanitize=thread")
LENGTHS = (1, 15, 16, 17, 48, 49)  # beside the lengths of a page and of a block of tokens
SHAPES = (
    ARGS,
    replace(ARGS, dim=32, n_heads=1, n_kv_heads=1, head_dim=64, ffn_dim=32, vocab_size=1, tied_head=True),
    replace(ARGS, dim=64, n_heads=50, n_kv_heads=1, head_dim=32, ffn_dim=96, vocab_size=17),
    replace(ARGS, dim=160, n_heads=4, n_kv_heads=4, head_dim=96, ffn_dim=224, vocab_size=33, n_layers=1),
)


def feed(model: Transformer, lengths: list[int], threads: int, *, caching: bool) -> None:
    """Feed rows of these lengths as a prompt and then a step, into a cache of exactly that capacity."""
    torch.set_num_threads(threads)
    model.kv_caching = caching
    tokens = torch.randint(model.args.vocab_size, (len(lengths), max(lengths)))
    cache = model.new_cache(rows=len(lengths), length=max(lengths) + 1) if caching else None
    model(tokens, cache=cache, logits="last", lengths=lengths)
    model(tokens, cache=cache)
    if caching:
        cache = model.new_cache()
        model(tokens, cache=cache, logits="last", lengths=lengths)
        model(tokens[:, :1], lengths, cache=cache)


def choose(model: Transformer) -> None:
    """Choose from as many logits as the code processes at a time, and one more or less."""
    runner = model.runner
    assert isinstance(runner, NativeRunner)
    for vocab in (*LENGTHS, 63, 64, 65, 511, 512, 513, 5000):
        settings = (
            Sampling(temperature=0.0),
            Sampling(),
            Sampling(temperature=9.0),
            Sampling(top_k=7, min_p=0.1),
            Sampling(top_p=1.0, min_p=0.01),
            Sampling(repetition_penalty=1.5),
        )
        samplers = [Sampler(sampling, torch.Generator(), [0], vocab) for sampling in settings]
        runner.choose(3 * torch.randn(len(samplers), vocab), samplers, torch.rand(len(samplers), dtype=torch.float64))


def generate(model: Transformer) -> None:
    for temperature in (0.0, 1.0):
        model.generate_tokens([[0] * 30, [0]], [40, 5], temperature=temperature)


def shorten_the_logits() -> None:
    """Allocate one column less for the logits than the head has."""
    whole = native_call.NativeCall.__init__

    def begin(self: native_call.NativeCall, described: Any, *given: Any, **how: Any) -> None:
        columns = described.description.output.columns
        empty = torch.empty
        with pytest.MonkeyPatch.context() as patch:
            cut = lambda shape, **kind: empty((*shape[:-1], columns - 1) if isinstance(shape, tuple) else shape, **kind)  # noqa: E731
            patch.setattr(torch, "empty", cut)
            whole(self, described, *given, **how)

    native_call.NativeCall.__init__ = begin  # type: ignore[method-assign]


def texts_at_once() -> None:
    """Generate two texts on one model in two threads, and then forks that share the blocks of a pool."""
    _, model = twins("fp32", ARGS)
    in_threads(*(partial(model.generate_tokens, [[1] * 40, [2]], [20, 9], kv_cache=kind) for kind in ("paged", "int4")))
    session = model.session(Ids(), kv_cache="paged")
    session.feed([1] * 21)
    in_threads(*(partial(session.fork().generate, 40, seed=seed) for seed in range(2)))


def texts_in_one_cache() -> None:
    """Feed one cache, of which the lock is off, in two threads."""
    _, model = twins("fp32", ARGS)
    cache = model.new_cache(rows=1, length=200)
    Cache.feed = lambda self, source, starts, compute: compute()  # type: ignore[method-assign]
    in_threads(*(partial(model, torch.ones(1, 199, dtype=torch.int64), cache=cache) for _ in range(2)))


def main(*words: str) -> None:
    if "--threads" in words:
        torch.set_num_threads(1)  # the thread sanitizer does not see the barriers of OpenMP
        with compiled_with(*THREADS_SANITIZED):
            texts_at_once()
            print("clean", flush=True)
            texts_in_one_cache()
        return
    dice = random.Random(0)
    with compiled_with(*SANITIZED):
        for kind, args in itertools.product(("fp32", "int4 in bf16"), SHAPES):
            _, model = twins(kind, args)
            for length, caching in itertools.product(LENGTHS, (False, True)):
                lengths = [length, *(dice.choice(LENGTHS) for _ in range(dice.choice((0, 0, 1, 2))))]
                feed(model, lengths, dice.choice((1, 2)), caching=caching)
            assert served(model) == len(LENGTHS) * 6
            if args is not ARGS:  # choosing and caches read no other sizes of a model
                continue
            choose(model), generate(model)
            kinds = (("int8", 4), ("int4", 4), ("rotated:k3v5+1", 4), ("paged", 4), ("quest:32", 4), ("adakv:0.5", 1))
            for cache, native in kinds:  # of four calls
                model.kv_cache = cache
                before = served(model)
                for length in LENGTHS:
                    more = dice.choices(LENGTHS[1:], k=dice.choice((0, 2)) if length > 1 else 2)
                    feed(model, [length, *more], length % 2 + 1, caching=True)
                assert served(model) == before + len(LENGTHS) * native
                generate(model)
        print("clean", flush=True)
        shorten_the_logits()
        feed(model, [1], 1, caching=False)


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
