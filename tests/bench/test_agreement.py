"""Beside times of rounded weights stands how often they choose as float32 does, counted once for each way."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_reports import cell_record
from fakes import NATIVE_SIZES, Bytes, write_checkpoint
from jobs_here import CEILINGS, Here, session_of
from oracles import tiny_args, tiny_model

from llama.bench import presets
from llama.bench.cell import Cell
from llama.bench.presets import agreement, agreement_cells, run_session, table_cells
from llama.bench.report.text import report_csv, table_markdown
from llama.bench.run import aggregate, worker
from llama.bench.run.engines import SCORED, LlamaEngine
from llama.bench.run.llama_cpp_engine import LlamaCppEngine
from llama.bench.schema import Agreement, Report, new_report

TEXT = torch.arange(SCORED + 9).remainder(40).tolist()  # more than are scored at a time


def one_pass(engine: LlamaEngine) -> list[int]:
    with torch.inference_mode():
        likely: list[int] = engine.model.with_kv_caching(False)(torch.tensor([TEXT]))[0].argmax(-1).tolist()
    return likely


def test_the_most_likely_tokens_are_those_of_one_pass() -> None:
    engine = LlamaEngine(tiny_model(tiny_args(max_seq_len=96), dtype=torch.float32), Bytes())
    assert engine.most_likely(TEXT) == (one_pass(engine), "plain")
    assert engine.model.cache is None


def test_llama_cpp_finds_the_same_most_likely_with_the_same_weights() -> None:
    pytest.importorskip("llama_cpp")
    model = tiny_model(tiny_args(ffn_dim=48, max_seq_len=96), dtype=torch.float32)
    peer = LlamaCppEngine.of(model, Bytes())
    found, path = peer.most_likely(TEXT)
    assert found == one_pass(LlamaEngine(model, Bytes()))
    assert path == peer.path
    assert peer.run([[1, 2]], 2, kv_caching=True).ids  # which wants the logits of its last position alone
    peer.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256, **NATIVE_SIZES)
    return Cell(input_len=6, output_len=4, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    jobs_done_here = Here(lambda kind, cell: f"{kind}: {cell.name}")
    for module in (presets, aggregate):
        monkeypatch.setattr(module, "run_job", jobs_done_here)
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: CEILINGS)
    monkeypatch.setattr(presets, "BATCHES", (1, 2))
    monkeypatch.setattr(presets, "REPETITIONS", 1)
    return jobs_done_here


def table(base: Cell, out: Path, engines: list[str], *, resume: bool = False) -> Report:
    session = session_of(new_report("table", table_cells(base, engines)), out, minutes=60, resume=resume)
    run_session(session)
    return session.report


def scored(here: Here) -> list[str]:
    return [job.removeprefix("most_likely: ") for job in here.done if job.startswith("most_likely")]


def test_a_table_counts_once_for_each_way_with_rounded_weights(base: Cell, here: Here, tmp_path: Path) -> None:
    report = table(base, tmp_path, ["llama:int8", "llama:int4"])
    assert scored(here) == ["batch 1, cache on", "batch 1, cache on, int8 weights", "batch 1, cache on, int4 weights"]
    eight, four = report["agreements"]
    assert (eight["quantize"], four["path"], four["text"]) == ("int8", "plain, int4 weights", "persuasion.txt")
    assert eight["tokens"] == four["tokens"] == 255  # what the model can read, and one more
    assert 0.1 < four["top1_agreement"] < eight["top1_agreement"] <= 1  # of 300 words, by random weights
    table(base, tmp_path, ["llama:int8", "llama:int4"], resume=True)
    assert len(scored(here)) == 3
    assert "not measured" not in "".join(report["failures"])


def test_rounded_weights_are_compared_with_plain_float32_over_one_row_of_the_text(base: Cell, tmp_path: Path) -> None:
    cells = [base.but(fast=True, quantize="int8", activations=8, dtype="bf16", batch_size=8)]
    reference, rounded = agreement_cells(session_of(new_report("table", cells), tmp_path, minutes=1)).values()
    assert (reference.fast, reference.quantize, reference.activations, reference.dtype) == (False, None, 16, "fp32")
    assert (rounded.fast, rounded.quantize, rounded.activations, rounded.dtype) == (True, "int8", 8, "bf16")
    for cell in (reference, rounded):
        assert (cell.batch_size, cell.input_len, cell.output_len) == (1, 1024, 1)


def test_a_table_without_rounded_weights_counts_nothing(base: Cell, here: Here, tmp_path: Path) -> None:
    report = table(base, tmp_path, [])
    assert (scored(here), report["agreements"]) == ([], [])


def test_random_weights_agree_on_nothing_that_means_anything(tmp_path: Path) -> None:
    cells = table_cells(Cell(model="llama-3.2-1b"), ["llama:int8"])
    assert agreement_cells(session_of(new_report("table", cells), tmp_path, minutes=1)) == {}


def test_without_float32_no_way_is_compared(base: Cell, here: Here, tmp_path: Path) -> None:
    def fail(kind: str, cell: Cell) -> None:
        if kind == "most_likely":
            raise ValueError("float32 does not fit")

    here.fail = fail  # type: ignore[method-assign]
    report = table(base, tmp_path, ["llama:int8"])
    assert report["agreements"] == []
    assert report["failures"] == ["top-1 of batch 1, cache on: float32 does not fit"]


def test_a_share_is_of_the_positions_at_which_both_choose_alike() -> None:
    found = agreement(Cell(quantize="int4"), {"ids": [1, 2, 3, 4], "path": "plain, int4 weights"}, [1, 2, 9, 4])
    assert (found["tokens"], found["top1_agreement"]) == (4, 0.75)


def test_agreement_stands_in_every_table_of_times(base: Cell) -> None:
    theirs: dict[str, Any] = {"engine": "llama.cpp", "quantize": "stored"}
    report = new_report("table", [])
    report["environment"] = {}
    report["cells"] = [
        cell_record(),
        cell_record(quantize="stored", path="plain, stored weights"),
        cell_record(**theirs, path="llama.cpp 1, stored weights, fp16 cache"),
        cell_record(engine="llama.cpp", quantize="int8", path="llama.cpp 1, Q8_0 weights, fp16 cache"),
    ]
    known: dict[str, Any] = {"fast": False, "activations": 16, "text": "persuasion.txt", "tokens": 1024}
    ours: Agreement = {
        "engine": "llama", "quantize": "stored", "path": "plain, stored weights", "top1_agreement": 0.9995, **known
    }  # type: ignore[typeddict-item]  # fmt: skip
    peers: Agreement = {**ours, "engine": "llama.cpp", "path": "llama.cpp 1, stored weights", "top1_agreement": 0.96}
    report["agreements"] = [ours, peers]
    shown = table_markdown(report)
    heads = [line for line in shown.splitlines() if line.startswith("| batch size")]
    assert all("| top-1 as fp32 |" in line for line in heads)
    assert len(heads) == 2
    assert "| not rounded |" in shown
    assert "| 96.00% |" in shown
    assert "| not measured |" in shown  # llama.cpp's Q8_0
    assert (
        "top-1 as fp32, over 1,024 positions: our plain, stored weights 99.95%; llama.cpp 1, stored weights 96.00%"
    ) in shown
    rows = list(csv.DictReader(io.StringIO(report_csv(report))))
    assert [row["top1_agreement"] for row in rows] == ["", "0.9995", "0.96", ""]
