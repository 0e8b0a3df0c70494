"""Every fast path of a CUDA device gives what the plain path gives there.

    pytest -m gpu tests/gpu --log-cli-level=INFO    # also logs the times of steps and prompts by each set of kernels

`--slow` adds the contract of every kind of cache. Without a device these tests are skipped.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from skips import needs_cuda

from llama import testing
from llama.args import ModelArgs
from llama.costs import RELEASED
from llama.fast.choose import candidates
from llama.fast.graph_buffers import GraphKey
from llama.fast.graph_calls import prompt_logits
from llama.fast.graph_ops import FLASH, MASKED, GraphOps
from llama.fast.graph_runner import GraphRunner
from llama.fast.graph_trial import TOLERANCE, try_nucleus, try_prompts, try_steps
from llama.kv_cache import KVCache
from llama.model import Transformer
from llama.rows import Rows
from llama.sampling import Sampling

pytestmark = [pytest.mark.gpu, needs_cuda]
logger = logging.getLogger(__name__)

# No size is a multiple of a kernel's tile, and three queries share a key.
ODD = ModelArgs(
    dim=132, n_heads=6, n_kv_heads=2, head_dim=24, ffn_dim=200, vocab_size=1003, n_layers=2, max_seq_len=2048,
    tied_head=True,
)  # fmt: skip
LARGE = replace(RELEASED["llama-3.2-1b"], max_seq_len=2048)
QWEN = replace(LARGE, attention_bias=True, qk_norm=True)
KERNELS = ("Triton", "plain flash", "plain")
ROWS = (1, 3, 17)  # one row, several, and many
KINDS = sorted(name for name, kind in KVCache.kinds.items() if kind.__module__.startswith("llama."))
MODELS = {"float32": (LARGE, torch.float32), "bfloat16": (LARGE, torch.bfloat16), "Qwen": (QWEN, torch.bfloat16)}
PROMPTS = [(1, 64, 0), (1, 256, 0), (8, 256, 0), (1, 2048, 0), (2, 192, 300)]  # rows, tokens, those before them


def random_model(args: ModelArgs, dtype: torch.dtype) -> Transformer:
    """Return a model on the device whose norms are not all ones, so that a kernel without its norm is detected."""
    with torch.device("cuda"):
        model = Transformer(args).to(dtype).requires_grad_(False)
        stream = torch.Generator("cuda").manual_seed(0)
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=stream)
            else:
                weight.uniform_(-(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5, generator=stream)
    return model


class Tried(NamedTuple):
    """A model, and the sets of kernels that may serve it on this device, by name."""

    model: Transformer
    sets: dict[str, GraphOps]

    def kernels(self, name: str) -> GraphOps:
        """Return the set with this name; skip the test if there is none."""
        return self.sets.get(name) or pytest.skip(f"no {name} kernels for {self.model.dtype} on this device")


def tried(args: ModelArgs, dtype: torch.dtype) -> Tried:
    model = random_model(args, dtype)
    return Tried(model, {ops.name: ops for ops in candidates(model)})


@pytest.fixture(scope="module")
def odd() -> Tried:
    return tried(ODD, torch.float32)


@pytest.fixture(scope="module", params=MODELS.values(), ids=list(MODELS))
def large(request: pytest.FixtureRequest) -> Tried:
    return tried(*request.param)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the time of a call, from the mean of ten after two."""
    for count in (2, 10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 100


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("path", ["plain path", "plain"])
def test_greedy_tokens_with_the_cache_are_those_of_the_plain_path_without_it(odd: Tried, path: str, rows: int) -> None:
    """In float32, for prompts of different lengths."""
    stream = torch.Generator().manual_seed(0)
    lengths = [5 + 7 * row % 40 for row in range(rows)]
    prompts = [torch.randint(ODD.vocab_size, (length,), generator=stream).tolist() for length in lengths]
    model = odd.model
    expected = model.generate_tokens(prompts, 20, temperature=0.0, kv_caching=False)
    runner = None if path == "plain path" else GraphRunner(odd.kernels(path))
    model.runner = runner
    try:
        assert model.generate_tokens(prompts, 20, temperature=0.0) == expected
    finally:
        model.runner = None
    assert runner is None or runner.forwards == 19  # the first token follows from the prompts


@pytest.mark.parametrize("name", KERNELS)
def test_steps_and_prompts_are_those_of_the_modules_at_the_sizes_of_llama_1b(large: Tried, name: str) -> None:
    """Recorded and replayed, layer by layer, as the trial at loading requires it."""
    ops, model = large.kernels(name), large.model
    try_steps(model, GraphRunner(ops))
    if ops.prompts:
        try_prompts(model, ops)
    if ops.nucleus is not None:
        try_nucleus(model, ops)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [1, 16])
def test_steps_are_timed(large: Tried, name: str, rows: int) -> None:
    """Greedy steps, and steps of the default settings, whose logits are as flat here as a nucleus may be."""
    ops, model = large.kernels(name), large.model
    runner, times = GraphRunner(ops), []
    with torch.inference_mode():
        buffers = runner.buffers_for(model, rows, 280, model.new_cache())
        for sampling in (Sampling(temperature=0), Sampling()):
            settings = sampling.settings
            buffers.positions.fill_(255)
            buffers.numbers.copy_(torch.tensor([number or 0.0 for number in settings], dtype=torch.float64))
            key = GraphKey(1, tuple(number is not None for number in settings))
            times.append(f"{milliseconds(runner.recorded(model, buffers, key)):.3f}")
    logger.info("%s kernels, %s, %d rows: a step takes %s ms, greedy and sampled", name, model.dtype, rows, times)


@pytest.mark.parametrize("name", KERNELS[:2])
@pytest.mark.parametrize("kv_caching", [True, False])
@pytest.mark.parametrize(("rows", "width", "start"), PROMPTS)
def test_recorded_prompts_are_those_of_the_modules(
    large: Tried, name: str, kv_caching: bool, rows: int, width: int, start: int
) -> None:
    if start and not kv_caching:
        pytest.skip("without the cache every prompt begins at 0")
    ops, model = large.kernels(name), large.model.with_kv_caching(kv_caching)
    runner, fed = GraphRunner(ops), Rows.at([start] * rows, [width] * rows, prompt_ends=True)
    with torch.inference_mode():
        ids = torch.randint(LARGE.vocab_size, (rows, start + width), device="cuda")
        cache = model.new_cache() if kv_caching else None
        buffers, weights = runner.buffers_for(model, rows, start + width, cache), runner.describe(model)
        if start:
            model(ids[:, :start], 0, cache=cache, logits="last")
        ids = ids[:, start:]
        run = {
            "plain": lambda: model(ids, fed, cache=cache, logits="last")[:, 0],
            "recorded": lambda: runner.prompt(model, buffers, ids, fed, cache, width),
        }
        if not start:
            run["unrecorded"] = lambda: prompt_logits(model, weights, ops, ids, fed, cache, logits="last")[:, 0]
        wanted = run["plain"]()
        for call in run.values():
            assert (call() - wanted).abs().max() <= TOLERANCE[model.dtype] * wanted.abs().max()
        times = ", ".join(f"{how} {milliseconds(call):.2f} ms" for how, call in run.items())
    logger.info("%d x %d tokens, %s kernels, kv_caching=%s: %s", rows, width, name, kv_caching, times)


@pytest.mark.parametrize("name", KERNELS[:2])
def test_steps_without_the_cache_are_recorded_too(large: Tried, name: str) -> None:
    """In 16 bits tokens may differ from the plain path's, so their log-probabilities by the modules are compared."""
    model, runner = large.model, GraphRunner(large.kernels(name))
    model.runner = runner
    prompts = [[5, 9, 2, 44], [7] * 60]
    try:
        texts, logprobs = model.generate_tokens(prompts, 9, temperature=0.0, kv_caching=False, logprobs=True)
    finally:
        model.runner = None
    assert runner.forwards == 9
    assert logprobs is not None
    for prompt, text, own in zip(prompts, texts, logprobs, strict=True):
        with torch.inference_mode():
            logits = model.with_kv_caching(False)(torch.tensor([prompt + text], device="cuda"))
        theirs = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(text, device="cuda")[:, None])
        torch.testing.assert_close(torch.tensor(own), theirs[:, 0].cpu(), rtol=0, atol=0.1, check_dtype=False)


def test_exact_mode_gives_the_same_bits_in_any_batch_at_the_sizes_of_llama_1b(large: Tried) -> None:
    large.model.exact = True  # compares the model with itself, and raises ValueError for a difference
    large.model.exact = False


@pytest.mark.parametrize("heads", [2, 6])
def test_flash_attention_reads_each_rows_written_keys_alone(heads: int) -> None:
    q, keys, values = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16)
        for size in ((3, heads, 40), (3, 96, 2, 40), (3, 96, 2, 40))
    )
    positions = torch.tensor([0, 95, 41], device="cuda")
    for row, position in enumerate(positions):
        keys[row, position + 1 :], values[row, position + 1 :] = torch.nan, torch.nan
    flash, masked = (each.attend(q, keys, values, each.prepare(positions, 96)) for each in (FLASH, MASKED))
    torch.testing.assert_close(flash, masked, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_keeps_the_contract(kind: str) -> None:
    assert testing.check_cache_kind(kind, device="cuda")
