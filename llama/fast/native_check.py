"""Test the native code that was compiled on this machine with a tiny model, before it runs a real one.

Only here is it known what this machine's compiler made of the code.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import torch

from llama.args import ModelArgs
from llama.exact.batch_invariance import first_difference
from llama.fast.native_caches import KINDS
from llama.fast.native_runner import NativeRunner
from llama.fast.native_structs import Choice
from llama.fast.supported import Unsupported
from llama.kv_cache import KVCache, QuestCache, ScoredCache
from llama.model import Transformer
from llama.quant.layers import quantize_layers, weights_of
from llama.quant.packed import Format, PackedWeight
from llama.sampling import Sampler, Sampling, choose_rows

# Sizes that reach every loop: heads of a whole and of half a block of vectors, a head that ends with part of a panel;
# and the parts of all families.
_ARGS = ModelArgs(
    dim=96,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=96,
    ffn_dim=160,
    vocab_size=101,
    max_seq_len=192,
    attention_bias=True,
    qk_norm=True,
)
# The same for formats with super-blocks of 256 weights.
_IN_UNITS = replace(_ARGS, dim=256, n_heads=8, ffn_dim=512)
# How far native logits may be from the modules', as a share of the largest: sums have another order, in bfloat16 the
# modules round between products, and some activations of 8 bits are rounded to the neighbouring number.
_TOLERANCE = {
    (torch.float32, 16): 1e-3,
    (torch.float32, 8): 4e-2,
    (torch.bfloat16, 16): 8e-2,
    (torch.bfloat16, 8): 15e-2,
}

# The kinds whose steps of one token read other positions than longer calls, each with the name that is tried.
_BY_STEPS: dict[type[KVCache], str] = {ScoredCache: "adakv:0.5", QuestCache: "quest:64"}


@cache
def check_library(folder: Path, dtype: torch.dtype, *, formats: frozenset[Format | None], activations: int) -> None:
    """Raise Unsupported if the code in `folder` does not give the plain path's logits, or not the same bits each time.

    Compares for weights packed in these formats, None for plain ones; once in a process.
    """
    runner = NativeRunner(folder)
    check_choices(runner)
    model = trial_model(dtype, sorted(formats, key=repr), activations)
    tokens = torch.arange(96, device="cpu").view(3, 32) % _ARGS.vocab_size
    tolerance = _TOLERANCE[dtype, activations or 16]
    with torch.inference_mode():
        plain = model(tokens)
        model.runner = runner
        native = model(tokens)
    assert runner.forwards == 1
    kind = f"{'packed weights in ' if formats else ''}{str(dtype).removeprefix('torch.')}"
    off = float((native - plain).abs().max() / plain.abs().max())
    if not off <= tolerance:
        raise Unsupported(f"the native code compiled here is wrong for {kind}: off by {off:.2g} of the largest logit")
    difference = first_difference(model, rows=3, length=150)  # more than two chunks of keys
    if difference is not None:
        raise Unsupported(f"the native code compiled here rounds {kind} differently from call to call: {difference}")
    for held in list(KINDS)[1:]:  # except the static one, which was compared above
        name = _BY_STEPS.get(held, held.user_name())
        off = _off_from_cache(model, runner, held, name)
        if not off <= tolerance:
            raise Unsupported(
                f"the native code compiled here is wrong for {kind} with kv_cache={name!r}: off by {off:.2g} of the "
                "largest logit"
            )


def check_choices(runner: NativeRunner) -> None:
    """Raise Unsupported if the code chooses another token than the sampler."""
    stream = torch.Generator("cpu").manual_seed(0)
    logits = 4 * torch.randn((320, 2999), generator=stream, dtype=torch.float32, device="cpu")
    draws = torch.rand(len(logits), generator=stream, dtype=torch.float64, device="cpu")
    seen = torch.rand(logits.shape, generator=stream, device="cpu") < 0.01
    settings = (
        *(Sampling(temperature=0.0), Sampling(0.7, top_p=0.8), Sampling(1.0, top_k=9, min_p=0.02)),
        *(Sampling(temperature=0.0, repetition_penalty=1.3), Sampling(0.7, repetition_penalty=0.8)),
    )
    samplers = [
        Sampler(sampling, stream, marks.nonzero()[:, 0].tolist(), logits.shape[1])
        for sampling, marks in zip(cycle(settings), seen, strict=False)
    ]
    ours = runner.choose(logits, samplers, draws)
    theirs = choose_rows(logits, samplers, draws).tolist()
    if any(one not in (other, Choice.TOO_NEAR) for one, other in zip(ours, theirs, strict=True)):
        raise Unsupported("the native code compiled here chooses other tokens than the sampler, from float32 logits")


def _off_from_cache(model: Transformer, runner: NativeRunner, kind: type[KVCache], name: str) -> float:
    """Return how far native logits are from the modules' after a prompt in a cache of this kind."""
    steps_alone, widths = kind is ScoredCache, [1] * 5 if kind in _BY_STEPS else [5]
    tokens = torch.arange(340, device="cpu").view(2, 170) % _ARGS.vocab_size  # the default windows leave a group
    prompt, *steps = torch.split(tokens, [165, *widths], dim=1)
    with torch.inference_mode():
        held = model.new_cache(name)
        model.runner = None if steps_alone else runner
        model(prompt, cache=held)
        made = []
        for model.runner, cache in ((runner, held.copy()), (None, held)):
            made.append(torch.cat([model(step, 165 + place, cache=cache) for place, step in enumerate(steps)], dim=1))
        model.runner = runner
    native, plain = made
    return float((native - plain).abs().max() / plain.abs().max())


def trial_model(dtype: torch.dtype, formats: Sequence[Format | None], activations: int) -> Transformer:
    """Return a model of random weights whose matrices have the formats in turn."""
    stream = torch.Generator("cpu").manual_seed(0)
    args = _IN_UNITS if any(format is not None and format.nested for format in formats) else _ARGS
    with torch.device("meta"):  # draws nothing from the user's stream of random numbers
        model = Transformer(args)
        if formats:
            turns = cycle(formats)
            quantize_layers(model, dtype, "stored", lambda _: next(turns), activations)
    # Instead of `to_empty`, which imports sympy for tensors on meta: half a second at every start.
    model.requires_grad_(False)._apply(lambda part: torch.empty(part.shape, dtype=part.dtype, device="cpu"))
    for weight in weights_of(model).values():
        if isinstance(weight, PackedWeight):
            _draw(weight, stream)
        else:
            drawn = torch.randn(weight.shape, generator=stream, dtype=torch.float32, device="cpu")
            weight.data = (1 + drawn / 10 if weight.ndim == 1 else drawn / 10).to(dtype)
    return model.eval()


def _draw(weight: PackedWeight, stream: torch.Generator) -> None:
    """Write random codes and scales, so that the weights are around 0, most of them within 0.1."""
    step = 0.1 / (1 << weight.format.bits - 1)
    sizes = {"scales": step, "zeros": -0.1, "scale_units": step / 16, "zero_units": -0.1 / 16}
    for name, part in weight.named_parameters():
        if part.dtype == torch.float16:
            part.copy_(sizes[name] * (0.75 + torch.rand(part.shape, generator=stream, device="cpu") / 2))
        else:
            low, high = (0, 256) if name == "codes" else (12, 21)
            part.copy_(torch.randint(low, high, part.shape, generator=stream, device="cpu"))
