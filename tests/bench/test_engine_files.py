"""An engine of a user's own is measured from its file, like a kind of cache."""

from pathlib import Path

import pytest
from fakes import write_checkpoint
from jobs_here import CEILINGS

from llama import cli
from llama.bench.cell import Cell
from llama.bench.presets import variants
from llama.bench.run import worker
from llama.bench.run.jobs import run_job
from llama.bench.run.models import check_cell, engine_class, has_rounded_weights
from llama.cli import benchmark_inference as script

OWN = '''
from llama.bench.run.batching_engine import BatchingEngine


class Counting(BatchingEngine):
    """Continues every prompt by 1, 2, 3, ..."""

    name = "Counting"
    quantized = ("int8",)
    whole_in = ("fp32",)

    @classmethod
    def load(cls, source, cell):
        return cls(source.args, source.tokenizer, path=f"counting in {cell.quantize}", weights_bytes=7)

    def steps(self, prompts, output_len):
        for n in range(1, output_len + 1):
            yield [[n] for _ in prompts]
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "own_engine.py"
    file.write_text(OWN)
    return f"{file}:Counting"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


def test_an_engine_of_a_file_is_measured_and_judged_by_what_it_did(
    own: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: CEILINGS)
    cell = Cell(model=model, engine=own, quantize="int8", batch_size=2, input_len=5, output_len=3, threads=1)
    check_cell(cell)
    assert cell.name == f"{own}, batch 2, cache on, int8 weights"
    row, *checks = worker.run_cell(cell, trace=True)["rows"]
    assert (row["path"], row["weights_bytes"], row["ids"]) == ("counting in int8", 7, [[1, 2, 3]] * 2)
    assert {check["status"] for check in checks} == {"ok", "not observed"}


def test_the_class_says_what_the_engine_can_do(own: str) -> None:
    whole, half = Cell(engine=own), Cell(engine=own, dtype="bf16")
    assert [has_rounded_weights(cell) for cell in (whole, half, whole.but(quantize="int8"))] == [False, True, True]
    assert [cell.kv_caching for cell in variants(Cell(), [own])] == [True, False, True], "it is always cached"
    with pytest.raises(ValueError, match=r"quantize='int4': the engine .*:Counting has weights in int8; leave it out"):
        check_cell(Cell(engine=own, quantize="int4"))
    with pytest.raises(ValueError, match=r"the fast step is ours alone; leave it out for .*:Counting"):
        Cell(engine=own, fast=True)


def test_an_unknown_engine_is_rejected_with_what_exists(own: str, tmp_path: Path) -> None:
    file = own.removesuffix(":Counting")
    (tmp_path / "empty.py").touch()
    (tmp_path / "broken.py").write_text("1 / 0")
    known = r"is not known; known are llama, transformers, llama\.cpp and FILE\.py:CLASS, such as scripts/engines/open"
    for name, words in {
        "exllama": known,
        "openvino": known,
        f"{file}:BatchingEngine": r"is not known; .*own_engine\.py has Counting$",
        f"{tmp_path}/empty.py:Own": r"empty\.py has no subclass of llama\.bench\.run\.engines\.Engine$",
        f"{tmp_path}/broken.py:Own": r"^engine='.*broken\.py:Own': .*broken\.py cannot be run: ZeroDivisionError",
        f"{tmp_path}/none.py:Own": r"none\.py cannot be run: FileNotFoundError",
    }.items():
        with pytest.raises(ValueError, match=words):
            engine_class(name)


@pytest.mark.slow
def test_an_engine_of_a_file_is_measured_in_a_process_of_its_own(own: str, model: str) -> None:
    cell = Cell(model=model, engine=own, quantize="int8", input_len=5, output_len=3, threads=1)
    assert run_job("cell", cell, trace=False)["rows"][0]["path"] == "counting in int8"


def test_the_command_gives_the_engine_of_a_file_its_modes(
    own: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Cell] = []
    monkeypatch.setattr(script, "print_cell", lambda cell, *_: found.append(cell) or 0)
    words = ["--ckpt_dir", model, "--engine", f"{own}:int8", "--input_len", "5", "--output_len", "3", "--device", "cpu"]
    assert cli.run(script.main, words) == 0
    assert [(cell.engine, cell.quantize, cell.fast) for cell in found] == [(own, "int8", False)]
