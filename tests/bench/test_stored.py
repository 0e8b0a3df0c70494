"""A cell of stored weights is predicted to the byte from its file's header, and a peer reads that very file."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, meta_params, meta_weights, random_model, write_gguf, write_meta
from gguf import GGMLQuantizationType as Kind
from jobs_here import CEILINGS

from llama import costs
from llama.bench.cell import Cell
from llama.bench.run import worker
from llama.bench.run.models import find_model, make_cell
from llama.bench.schema import Row
from llama.checkpoint import file_bytes_of, open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.untrusted.gguf_header import read_gguf_header

JOB: dict[str, Any] = {"input_len": 7, "output_len": 5, "quantize": "stored", "threads": 1}
SIZES = {"hidden_size": 64, "intermediate_size": 96}
FLOATS = ("tok_embeddings.weight", "layers.1.attention.wo.weight")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is no part of a claim here: a second of looking for the machine's ceilings."""
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: CEILINGS)


def file_of(folder: Path, kind: Kind = Kind.Q4_1, *, whole: tuple[str, ...] = (), tied: bool = False) -> str:
    config = config_of(**SIZES, tie_word_embeddings=tied)
    weights = meta_weights(random_model(config))
    return str(write_gguf(folder / "model.gguf", weights, config, kind=kind, whole=whole))


def line(rows: list[Row], name: str) -> tuple[int, int | None]:
    (found,) = [row for row in rows if row["figures"] == "memory" and row["name"] == name]
    return found["predicted_bytes"], found["measured_bytes"]


def violated(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("status") == "violated"]


@pytest.mark.parametrize(
    ("kind", "whole", "dtype", "tied"),
    [(Kind.Q4_0, (), "fp32", True), (Kind.Q8_0, (), "bf16", False), (Kind.Q4_1, FLOATS, "fp32", False)],
    ids=["Q4_0", "Q8_0", "some in floats"],
)
def test_the_weights_of_a_stored_cell_take_the_bytes_that_were_predicted(
    kind: Any, whole: tuple[str, ...], dtype: str, tied: bool, tmp_path: Path
) -> None:
    cell = Cell(**JOB, model=file_of(tmp_path, kind, whole=whole, tied=tied), dtype=dtype)
    rows = worker.run_cell(cell, trace=True)["rows"]
    predicted, held = line(rows, "weights")
    head = line(rows, "tied head" if tied else "head")
    assert predicted == held
    assert head[0] == head[1]
    assert rows[0]["weights_bytes"] == predicted + head[0]
    source = find_model(cell)
    assert source.stored is not None
    assert rows[0]["weights_bytes"] == costs.weights_bytes(source.args, itemsize=cell.itemsize, quantize=source.stored)
    assert rows[0]["path"] == "plain, stored weights"
    assert violated(rows) == []
    assert any(note.startswith("stored weights: as the file has them") for note in rows[0]["notes"])


def test_a_step_of_stored_weights_reads_them_once_and_of_an_untied_embedding_a_row(tmp_path: Path) -> None:
    source = find_model(Cell(**JOB, model=file_of(tmp_path)))
    assert source.stored is not None
    read = costs.step_bytes(source.args, rows=2, context=0, itemsize=4, quantize=source.stored)
    embedding = source.stored["tok_embeddings.weight"]
    norms = 5 * 64 * 4
    assert read == sum(source.stored.values()) - embedding + 2 * embedding // source.args.vocab_size + norms


def test_the_bytes_in_the_file_are_those_of_its_tensors() -> None:
    tensors = read_gguf_header(demo_model_path()).tensors.values()
    matrices = sum(info.nbytes for info in tensors if len(info.shape) == 2)
    assert sum(file_bytes_of(open_checkpoint(demo_model_path())).values()) == matrices


def test_llama_cpp_reads_the_very_file_and_needs_no_model_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    file = file_of(tmp_path, Kind.Q8_0)
    monkeypatch.setattr("llama.bench.run.models.load_weights", None)
    rows = worker.run_cell(Cell(**JOB, model=file, engine="llama.cpp"), trace=True)["rows"]
    assert rows[0]["path"].endswith(", stored weights, fp16 cache")
    assert rows[0]["weights_bytes"] == sum(info.nbytes for info in read_gguf_header(Path(file)).tensors.values())
    assert violated(rows) == []
    assert rows[0]["step_read_bytes"] < rows[0]["weights_bytes"] + 2 * 2 * 2 * 16 * 12 * 2


def test_a_model_without_a_gguf_file_is_rejected_before_anything_runs(tmp_path: Path) -> None:
    config = config_of(**SIZES)
    folder = write_meta(tmp_path / "meta", meta_weights(random_model(config)), meta_params(config))
    for engine, model in (("llama", {"ckpt_dir": str(folder)}), ("llama.cpp", {"model": "llama-3.2-1b"})):
        with pytest.raises(ValueError, match=r"takes the weights as a \.gguf file has them, and .* is none; name one"):
            make_cell(device="cpu", engine=engine, quantize="stored", **model)  # type: ignore[arg-type]


def test_a_gguf_file_of_floats_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs a \.gguf file with quantised matrices, and no matrix is quantised"):
        make_cell(device="cpu", ckpt_dir=file_of(tmp_path, Kind.F32), quantize="stored")


def test_a_peer_that_maps_its_file_needs_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, Kind.Q4_1)
    source = find_model(Cell(**JOB, model=file, engine="llama.cpp"))
    assert source.stored is not None
    free = 400_000
    assert sum(source.stored.values()) < free < costs.weights_bytes(source.args, itemsize=4)
    monkeypatch.setattr("llama.bench.run.memory_ledger.available_memory", lambda _: free)
    make_cell(device="cpu", ckpt_dir=file, engine="llama.cpp", quantize="stored", input_len=7, output_len=5)
    with pytest.raises(ValueError, match="does not fit"):
        make_cell(device="cpu", ckpt_dir=file, input_len=7, output_len=5)
