"""Beside times of rounded weights stands how often they choose as float32 does, counted once for each way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import NATIVE_SIZES, Bytes, write_checkpoint
from tiny import tiny_args, tiny_model

from llama.bench.cell import Cell
from llama.bench.presets import Job, agreement_jobs, table_cells
from llama.bench.run import worker
from llama.bench.run.engines import SCORED, LlamaEngine
from llama.bench.run.models import engine_class, has_rounded_weights
from llama.bench.texts import read_corpus

OPENVINO = str(Path(__file__).parents[2] / "scripts" / "engines" / "openvino.py:OpenVino")
TEXT = torch.arange(SCORED + 9).remainder(40).tolist()  # more than are scored at a time


def one_pass(engine: LlamaEngine) -> list[int]:
    with torch.inference_mode():
        likely: list[int] = engine.model.with_kv_caching(False)(torch.tensor([TEXT]))[0].argmax(-1).tolist()
    return likely


def test_the_most_likely_tokens_are_those_of_one_pass() -> None:
    engine = LlamaEngine(tiny_model(tiny_args(max_seq_len=96), dtype=torch.float32), Bytes())
    assert engine.most_likely(TEXT) == (one_pass(engine), "plain")
    assert engine.model.cache is None


@pytest.mark.parametrize(("name", "module"), [("llama.cpp", "llama_cpp"), (OPENVINO, "openvino_genai")])
def test_peers_find_the_same_most_likely_with_the_same_weights(name: str, module: str) -> None:
    pytest.importorskip(module)
    engine: Any = engine_class(name)
    model = tiny_model(tiny_args(ffn_dim=48, max_seq_len=96), dtype=torch.float32).half().float()  # F16 has them
    peer = engine.of(model, Bytes())
    found, path = peer.most_likely(TEXT)
    assert found == one_pass(LlamaEngine(model, Bytes()))
    assert path == peer.path
    assert peer.run([[1, 2]], 2, kv_caching=True).ids  # which wants the logits of its last position alone


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode no more of the text than is read."""
    monkeypatch.setattr(worker, "read_corpus", lambda: read_corpus()[:3000])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256, **NATIVE_SIZES)
    return Cell(input_len=6, output_len=4, model=str(folder), threads=1)


def agreements(cells: list[Cell]) -> list[Job]:
    """Return the jobs of a table that count how often rounded weights agree with float32."""
    return list(agreement_jobs(cells, 255))


def test_a_table_counts_once_for_each_way_with_rounded_weights(base: Cell) -> None:
    jobs = agreements(table_cells(base, ["llama:int8", "llama:int4"]))
    assert [job.cell.name for job in jobs] == ["batch 1, cache on, int8 weights", "batch 1, cache on, int4 weights"]
    ((eight,), (four,)) = (worker.JOBS[job.kind](job.cell, **job.options)["rows"] for job in jobs)
    assert (four["path"], four["text"]) == ("plain, int4 weights", "persuasion.txt")
    assert eight["tokens"] == four["tokens"] == 255  # what the model can read, and one more
    assert 0.1 < four["top1_agreement"] < eight["top1_agreement"] <= 1  # of 300 words, by random weights


def test_rounded_weights_are_compared_with_plain_float32_over_one_row_of_the_text(
    base: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share is of the positions at which both choose alike."""
    opened: list[Cell] = []

    def most_likely(self: LlamaEngine, ids: list[int]) -> tuple[list[int], str]:
        assert len(ids) == 8
        return ([1, 2, 3, 4] * 2, "plain") if len(opened) == 1 else ([1, 2, 9, 4] * 2, "plain, int8 weights")

    whole = worker.open_engine
    monkeypatch.setattr(worker, "open_engine", lambda cell: (opened.append(cell), whole(cell))[1])
    monkeypatch.setattr(LlamaEngine, "most_likely", most_likely)
    cell = base.but(quantize="int8", activations=8, dtype="bf16", input_len=8, output_len=1, kv_cache="int8")
    (row,) = worker.agreement(cell)["rows"]
    assert (row["tokens"], row["top1_agreement"], row["path"]) == (8, 0.75, "plain, int8 weights")
    assert opened == [base.but(input_len=8, output_len=1), cell], "float32 of the plain path, with a full cache"


def test_openvino_has_rounded_weights_without_a_mode(base: Cell) -> None:
    """Its reader of files has no F32 and no BF16, so that its tokens are counted and not compared one by one."""
    (job,) = agreements(table_cells(base, [OPENVINO]))
    assert (job.cell.engine, job.cell.quantize) == (OPENVINO, None)
    assert not has_rounded_weights(base.but(engine=OPENVINO, dtype="fp16"))


def test_a_table_of_random_weights_or_without_rounded_ones_counts_nothing(base: Cell) -> None:
    for cells in (table_cells(base, []), table_cells(Cell(model="llama-3.2-1b"), ["llama:int8"])):
        assert agreements(cells) == []
