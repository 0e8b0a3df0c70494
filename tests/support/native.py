"""Models with native code, their plain twins, and the folder of the code, which is compiled once for all tests."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from tables import cases
from tiny import bits, fed_in_pieces, fp32_tolerance, some_tokens, tiny_args, tiny_model
from torch import Tensor

from llama.args import ModelArgs
from llama.fast import native_build
from llama.fast.choose import make_fast
from llama.fast.native_runner import NativeRunner
from llama.host.files import cache_dir
from llama.model import Transformer
from llama.quant.layers import quantize_layers
from llama.quant.packed import PackedWeight

needs_a_compiler = pytest.mark.skipif(
    native_build.find_compiler() is None, reason="there is no C++ compiler, so there is no native code"
)
FOLDER = cache_dir() / "native"  # that of the commands: one build serves both
VOCAB = 101  # not a multiple of any size in native code
ARGS = tiny_args(
    dim=96, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=32, multiple_of=32, vocab_size=VOCAB, max_seq_len=200
)
EVERYTHING = replace(ARGS, attention_bias=True, qk_norm=True)
KINDS = ("fp32", "bf16", "int8", "int8 in bf16", "int4", "int4 in bf16")


# Each kind of weights is a library of its own to compile: by default, those of fp32 and int8 alone.
each_kind = pytest.mark.parametrize("kind", cases(KINDS, "fp32", "int8"))


def cpu_flags() -> set[str]:
    """Return the CPU's flags from Linux's /proc/cpuinfo; none on other systems."""
    file = Path("/proc/cpuinfo")
    return set(file.read_text().split()) if platform.machine() == "x86_64" and file.exists() else set()


@contextmanager
def compiled_with(*flags: str) -> Iterator[None]:
    """Compile and load native code with these flags after the usual ones, which they override."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "FLAGS", (*native_build.FLAGS, *flags))
        yield


def model_of(kind: str, args: ModelArgs = ARGS) -> Transformer:
    model = tiny_model(args, dtype=torch.float32)
    if "int" in kind:
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        quantize_layers(model, torch.bfloat16 if "bf16" in kind else torch.float32, kind[:4])
        for name, module in model.named_modules():
            if isinstance(module, PackedWeight):
                module.fill(0, weights[f"{name}"])
    if "bf16" in kind:
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()
    return model.requires_grad_(False)


def twins(kind: str, args: ModelArgs = ARGS, *, folder: Path = FOLDER) -> tuple[Transformer, Transformer]:
    """Return a plain model and its copy with native code."""
    plain, fast = model_of(kind, args), model_of(kind, args)
    make_fast(fast, folder)
    assert isinstance(fast.runner, NativeRunner)
    return plain, fast


def served(model: Transformer) -> int:
    assert isinstance(model.runner, NativeRunner)
    return model.runner.forwards


def tolerance(kind: str, logits: Tensor) -> float:
    """Return how far native logits may be from the plain ones by rounding.

    In 16 bits the plain path also rounds between products, and native code does not; int8's activations are rounded to
    16 bits, 2^-16 of the largest of a row.
    """
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    allowed = fp32_tolerance(logits, ARGS, dtype)
    return allowed / 16 if "bf16" in kind else allowed * (16 if "int" in kind else 1)


def check_bits(kind: str, args: ModelArgs = ARGS) -> None:
    """Assert that logits have the same bits in any chunks, any batch, and with any number of threads."""
    _, fast = twins(kind, args)
    assert isinstance(fast.runner, NativeRunner)
    tokens = some_tokens(5, 130, vocab_size=VOCAB)
    fast.kv_caching = False
    whole = fast(tokens)
    fast.kv_caching = True
    for cuts in ([130], [1, 129], [64, 1, 1, 64], [70, *[1] * 60]):
        assert torch.equal(bits(fed_in_pieces(fast, tokens, list(accumulate(cuts[:-1])))), bits(whole))
    fast.free_cache()
    assert torch.equal(bits(fast(tokens[3:4])), bits(whole[3:4]))
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            fast.free_cache()
            assert torch.equal(bits(fast(tokens)), bits(whole))
            assert torch.equal(bits(fast(tokens[:, 5:6], 5)), bits(whole[:, 5:6]))
        finally:
            torch.set_num_threads(before)
