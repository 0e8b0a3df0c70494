"""Every fast path of a CUDA device gives what the plain path gives there.

    pytest -m gpu tests/gpu --log-cli-level=INFO    # also logs the time of a step by each set of kernels

`--slow` adds the contract of every kind of cache. Without a device these tests are skipped.
"""

import logging
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from skips import needs_cuda

from llama import testing
from llama.args import ModelArgs
from llama.costs import RELEASED
from llama.fast.choose import candidates
from llama.fast.graph_ops import FLASH, MASKED, GraphOps
from llama.fast.graph_runner import GraphRunner
from llama.fast.graph_trial import try_prompts, try_steps
from llama.kv_cache import KVCache
from llama.model import Transformer

pytestmark = [pytest.mark.gpu, needs_cuda]
logger = logging.getLogger(__name__)

# No size is a multiple of a kernel's tile, and three queries share a key.
ODD = ModelArgs(
    dim=132, n_heads=6, n_kv_heads=2, head_dim=24, ffn_dim=200, vocab_size=1003, n_layers=2, max_seq_len=2048,
    tied_head=True,
)  # fmt: skip
LARGE = replace(RELEASED["llama-3.2-1b"], max_seq_len=2048)
KERNELS = ("Triton", "plain flash", "plain")
ROWS = (1, 3, 17)  # one row, several, and many
KINDS = sorted(name for name, kind in KVCache.kinds.items() if kind.__module__.startswith("llama."))
DTYPES = (torch.float32, torch.bfloat16)


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
    return Tried(model, {ops.name: ops for ops in chain.from_iterable(candidates(model))})


@pytest.fixture(scope="module")
def odd() -> Tried:
    return tried(ODD, torch.float32)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def large(request: pytest.FixtureRequest) -> Tried:
    return tried(LARGE, request.param)


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
    for rows, seconds in try_steps(model, GraphRunner(ops)).items():
        logger.info("a step of %s kernels in %s takes %.3f ms with %d rows", name, model.dtype, 1e3 * seconds, rows)
    if ops.prompts:
        try_prompts(model, ops)


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
