"""Predictions from sizes equal constants computed by hand, and real tensors."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import Command
from fakes import write_checkpoint
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_args

from llama import costs
from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.memory_ledger import predict
from llama.checkpoint import open_checkpoint
from llama.cli.costs import main
from llama.costs import MB, RELEASED
from llama.model import Transformer
from llama.quant.layers import quantize_layers
from llama.request import Step
from llama.untrusted.gguf_sizes import FILE_BLOCKS

TINY = ModelArgs(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=50, ffn_dim=40, max_seq_len=64)


def test_cache_and_logits_of_llama_3_2_1b_are_those_computed_by_hand() -> None:
    """256 tokens in and 32 out at batch 1, 8, 16, as in published tables."""
    assert costs.kv_bytes(96, 96, 128, positions=32768, itemsize=2) == 147456 * MB  # GPT-3
    args = RELEASED["llama-3.2-1b"]
    for rows, cache, logits in [(1, 9, 125.25), (8, 72, 1002), (16, 144, 2004)]:
        assert costs.cache_bytes(args, rows=rows, length=288, itemsize=2) == cache * MB
        assert costs.logits_bytes(args, rows=rows, positions=256) == logits * MB


def test_released_models_have_their_published_number_of_parameters() -> None:
    published = {  # from the model cards
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.1-405b": 405_853_388_800,
    }
    assert {name: costs.parameters(RELEASED[name]) for name in published} == published


@pytest.mark.parametrize("tied_head", [True, False])
def test_parameters_cache_and_logits_equal_the_tensors_of_a_model(tied_head: bool) -> None:
    args = replace(TINY, tied_head=tied_head)
    model = Transformer(args).requires_grad_(False)
    assert costs.parameters(args) == sum(parameter.numel() for parameter in model.parameters())
    cache = model.new_cache(rows=3, length=20)
    logits = model(torch.zeros(3, 7, dtype=torch.int64), cache=cache)
    assert costs.cache_bytes(args, rows=3, length=20, itemsize=4) == cache.nbytes
    assert costs.logits_bytes(args, rows=3, positions=7) == logits.nbytes


def test_token_forwards_are_the_tokens_that_a_generation_feeds() -> None:
    model = Transformer(TINY)
    for kv_caching in (True, False):
        fed = 0

        def count(step: Step) -> None:
            nonlocal fed
            fed += len(step.ids[0])

        model.generate_tokens([[1] * 9], 5, kv_caching=kv_caching, on_step=count)
        assert fed == costs.token_forwards(input_len=9, output_len=5, kv_caching=kv_caching)
    assert costs.token_forwards(input_len=263, output_len=32, kv_caching=False) == 8912
    assert costs.token_forwards(input_len=263, output_len=32, kv_caching=True) == 294


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3))
def test_flops_are_two_for_each_product_of_a_naive_loop(seqlen: int, start_pos: int, scored: int) -> None:
    products = TINY.dim * TINY.vocab_size * scored
    for query in range(seqlen):
        for _ in range(TINY.n_layers):
            products += TINY.dim * (4 + 2 + 2) * 8 + 4 * 8 * TINY.dim  # wq, wk, wv and wo, 4 and 2 heads of 8
            products += 3 * TINY.dim * TINY.ffn_dim
            products += 4 * 8 * 2 * (start_pos + query + 1)  # a score and a weighted value for each key
    assert costs.forward_flops(TINY, seqlen=seqlen, start_pos=start_pos, scored=scored) == 2 * products


def test_a_step_reads_every_weight_once_and_of_an_untied_embedding_only_its_rows() -> None:
    tied, untied = replace(TINY, tied_head=True), replace(TINY, tied_head=False)
    cache = costs.cache_bytes(TINY, rows=3, length=10, itemsize=2)
    assert costs.step_bytes(tied, rows=3, context=10, itemsize=2) == 2 * costs.parameters(tied) + cache
    assert (
        costs.step_bytes(untied, rows=3, context=10, itemsize=2) == 2 * (costs.parameters(tied) + 3 * TINY.dim) + cache
    )


@pytest.mark.parametrize(
    ("vocab_size", "tied_head", "kind"),
    [(48, True, "int8"), (50, False, "int4"), (50, True, "int8"), (48, False, "int8")],
)
def test_the_bytes_of_packed_weights_are_those_of_the_tensors(vocab_size: int, tied_head: bool, kind: str) -> None:
    args = tiny_args(dim=64, n_heads=2, n_kv_heads=1, ffn_dim=96, vocab_size=vocab_size, tied_head=tied_head)
    with torch.device("meta"):
        model = Transformer(args)
        quantize_layers(model, torch.bfloat16, kind)
    held = sum(p.numel() * (2 if p.is_floating_point() and p.ndim == 1 else p.itemsize) for p in model.parameters())
    assert costs.weights_bytes(args, itemsize=2, quantize=kind) == held
    assert costs.head_bytes(args, itemsize=2, quantize=kind) == model.output.weight.nbytes
    assert costs.weights_bytes(args, itemsize=2) == 2 * costs.parameters(args)


def test_the_bytes_of_a_files_types_are_those_of_the_gguf_package() -> None:
    assert {kind: GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in FILE_BLOCKS} == FILE_BLOCKS
    assert costs.file_bytes(1024, "Q4_K") == 1024 * 144 // 256
    assert costs.file_bytes(1024, "BF16") == 2048


def test_a_step_reads_int8_weights_once_and_the_cache_in_the_dtype_of_the_activations() -> None:
    """Of 64 x 96, 50 x 64, ... in one layer: worked out by hand for dim 64, 2 heads of 32 with 1 of KV, 96 hidden."""
    args = tiny_args(dim=64, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=96, vocab_size=48, tied_head=True)
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 48 * 64
    cache, job = 2 * 32 * 3 * 10 * 4, {"rows": 3, "context": 10, "itemsize": 4}
    assert costs.step_bytes(args, **job, quantize="int8") == matrices * 9 // 8 + 3 * 64 * 4 + cache
    untied = replace(args, tied_head=False)
    more = costs.step_bytes(untied, **job, quantize="int8") - matrices * 9 // 8 - 3 * 64 * 4 - cache
    assert more == 3 * 64 * 9 // 8  # of the embedding the vectors of three tokens


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 9))
def test_the_largest_sizes_fit_and_one_more_does_not(memory: int, length: int, rows: int) -> None:
    def need(rows: int, length: int) -> int:
        cache = costs.cache_bytes(TINY, rows=rows, length=length, itemsize=2)
        return 2 * costs.parameters(TINY) + cache + costs.logits_bytes(TINY, rows=rows, positions=1)

    most = costs.largest_batch(TINY, memory=memory, length=length, itemsize=2)
    assert most == 0 or need(most, length) <= memory
    assert need(most + 1, length) > memory
    longest = costs.largest_length(TINY, memory=memory, rows=rows, itemsize=2)
    assert longest == 0 or need(rows, longest) <= memory
    assert longest == TINY.max_seq_len or need(rows, longest + 1) > memory


def test_wrong_flags_are_one_line(command: Command) -> None:
    for word, says in {
        "--memory_gb=nan": "memory_gb=nan must be above 0",
        "--memory_gb=1e300": "memory_gb=1e+300 must be above 0, and at most",
        "--itemsize=0": "itemsize=0 must be above 0",
        "--ckpt_dir=not/there": "not/there",
    }.items():
        assert says in command.refused(main, word), word


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_seq_len=2048)


def cells(printed: str, title: str) -> list[list[str]]:
    """Return the cells of the table under a printed title, heads first."""
    lines = printed.partition(title)[2].split("\n\n")[1].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("itemsize", [4, 2])
def test_sizes_of_a_checkpoint_are_those_of_the_benchmark(itemsize: int, checkpoint: Path, command: Command) -> None:
    args = open_checkpoint(checkpoint).args
    dtype = {4: "fp32", 2: "bf16"}[itemsize]
    printed = command.printed(main, "--ckpt_dir", checkpoint, "--itemsize", itemsize, "--memory_gb", 2)
    numbers = f"2 x {args.n_layers} x {args.n_kv_heads} x {args.head_dim} x positions x rows x {itemsize}"
    assert f"= {numbers}\n" in printed

    def predicted(rows: int, length: int) -> costs.PeakMemory:
        cell = Cell(model=str(checkpoint), batch_size=rows, input_len=length - 1, output_len=1, dtype=dtype)
        return predict(args, cell)

    heads, *lines = cells(printed, f"KV cache in {8 * itemsize}-bit numbers")
    assert [line[0] for line in lines] == ["256", "1,024", "2,048"]
    for length, *sizes in lines:
        for head, shown in zip(heads[1:], sizes, strict=True):
            assert shown == costs.size(predicted(int(head.split()[0]), int(length.replace(",", ""))).cache)
    of_two = predicted(1, 2)
    assert f"= {of_two.cache // 2:,} bytes x positions x rows" in printed
    ways = {tuple(line[:2]): line[2:] for line in cells(printed, "Sizes that fit into the 2.0 GB")[1:]}
    weights, rows, *lengths = ways[dtype, "-"]
    assert weights == costs.size(of_two.weights)
    row = predicted(1, 2048).cache + costs.logits_bytes(args, rows=1, positions=1)
    assert int(rows.replace(",", "")) == (2 * 1024 * MB - of_two.weights) // row
    assert lengths == ["2,048", "2,048"]


def test_the_default_memory_is_the_free_memory(checkpoint: Path, command: Command) -> None:
    title = r"Sizes that fit into the [\d.,]+ [GM]B that (this machine|cuda|mps) has left, without activations"
    assert re.search(title, command.printed(main, "--ckpt_dir", checkpoint))
