"""Presets measure the cells and the curves that they promise, and the command refuses what cannot be measured."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import NATIVE_SIZES, write_checkpoint
from jobs_here import Here, jobs_here

from llama import cli
from llama.bench import plan, presets
from llama.bench.cell import Cell
from llama.bench.presets import cell_jobs, paired, table_cells
from llama.bench.report import files
from llama.bench.report.text import cell_text, report_markdown
from llama.bench.run import jobs, worker
from llama.bench.run.jobs import JobDied, run_job
from llama.bench.schema import cell_row, rows_of
from llama.bench.single import benchmark_inference
from llama.cli import benchmark_inference as script
from llama.host.cores import OtherLoad


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_seq_len=256, **NATIVE_SIZES)
    return Cell(input_len=6, output_len=4, model=str(folder), threads=1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setitem(presets.RECORDING, "steps", 3)
    return jobs_here(monkeypatch, lambda kind, cell: cell.name if kind == "cell" else kind)


def run(*words: str) -> int:
    return cli.run(script.main, list(words))


def test_presets_measure_at_the_sizes_that_the_documentation_names() -> None:
    assert (plan.REPETITIONS, presets.BATCHES) == (5, (1, 8, 16))
    assert (presets.AGREED_ON, presets.KIND_CONTEXTS) == (1024, (1024, 8192))
    assert (presets.LENGTH, presets.SCORED, presets.GREEDY) == (2048, 256, 64)
    assert tuple(presets.PRESETS) == script.PRESETS


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_puts_peers_beside_every_cell_that_they_can_run() -> None:
    names = [cell.name for cell in table_cells(Cell(), ["transformers", "llama.cpp"])]
    assert len(names) == 15  # three batches of ours and transformers' in two modes, llama.cpp's in one
    assert "llama.cpp, batch 8, cache on" in names
    assert "llama.cpp, batch 8, cache off" not in names
    assert "transformers, batch 8, cache off" in names


def test_the_table_puts_guesses_beside_every_cell_of_ours_with_the_cache_and_measures_both_in_turn() -> None:
    cells = table_cells(Cell(speculate="lookup:3"), ["transformers", "llama:fast"])[:8]
    names = ["batch 1, cache on", "batch 1, cache on, guesses by lookup:3", "batch 1, cache off"]
    fast = [name.replace("on", "on, fast", 1).replace("off", "off, fast") for name in names]
    assert [cell.name for cell in cells] == [
        *names, "transformers, batch 1, cache on", "transformers, batch 1, cache off", *fast,
    ]  # fmt: skip
    assert [job.name for job in paired(cell_jobs(cells))[0].jobs] == names


# ---- a single cell ---------------------------------------------------------------------------------------------------


def compared(base: Cell, *, kv_caching: bool) -> None:
    report = benchmark_inference(2, 6, 4, kv_caching, compare=True, ckpt_dir=base.model, threads=1, device="cpu")
    checks = rows_of(report, "check", 0)
    assert all(row["status"] == "ok" for row in checks if row["name"] != "other work"), checks
    assert "n = 1, too few to judge by" in checks[-1]["detail"]
    assert cell_row(report, 0)["notes"][-1] == "cache on and off: the same 8 tokens"
    assert [cell["kv_caching"] for cell in report["cells"]] == [kv_caching, not kv_caching]
    assert "bound_by" in cell_row(report, 0)


@pytest.mark.slow
def test_the_function_measures_in_a_process_of_its_own_and_compares(base: Cell) -> None:
    compared(base, kv_caching=True)


def test_the_function_compares_with_the_cached_run_where_it_measures_the_other(base: Cell, here: Here) -> None:
    compared(base, kv_caching=False)
    assert here.done == ["machine", "batch 2, cache off", "batch 2, cache on"]


def test_unless_more_is_asked_for_one_mode_is_measured_once(base: Cell, here: Here) -> None:
    report = benchmark_inference(2, 6, 4, ckpt_dir=base.model, threads=1, device="cpu")
    assert here.done == ["machine", "batch 2, cache on"]
    assert len(cell_row(report, 0)["seconds"]) == 1
    assert cell_row(report, 0)["notes"][-1] == "cache on and off: not compared"
    assert rows_of(report, "comparison") == []
    again = cell_row(benchmark_inference(2, 6, 4, ckpt_dir=base.model, threads=1, device="cpu", repeats=3), 0)
    assert (len(again["seconds"]), len(again["tensor_peak_bytes"])) == (3, 1), "the first alone is traced"
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        benchmark_inference(2, 6, 4, ckpt_dir=base.model, device="cpu", repeats=0)


def test_a_single_cell_shows_its_figures_and_that_the_other_mode_died(base: Cell, here: Here) -> None:
    here.fail = lambda kind, cell: JobDied("gone") if kind == "cell" and not cell.kv_caching else None
    report = benchmark_inference(1, 6, 4, compare=True, ckpt_dir=base.model, threads=1, device="cpu")
    for words in ("Inference time: ", "died: batch 1, cache off: gone"):
        assert words in cell_text(report, 0)
    assert script.report_exit_code(report) == script.DIED


def test_a_violation_ends_with_exit_code_3_in_the_mode_that_is_compared_with_too(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
        done = here(kind, cell, **job)
        for row in done.get("rows", []):
            if row.get("name") == "cache" and not cell.kv_caching and row["figures"] == "check":
                row |= {"status": "violated", "detail": "it was on"}
        return done

    file = tmp_path / "cell.json"
    words = ["--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1", "--json", str(file)]
    assert run(*words, "--compare") == 0
    assert "VIOLATED" not in capsys.readouterr().out
    monkeypatch.setattr(plan, "run_job", broken)
    assert run(*words, "--compare") == script.VIOLATED
    assert "VIOLATED" in capsys.readouterr().out
    (violated,) = [row for row in rows_of(json.loads(file.read_text()), "check", 0) if row["status"] == "violated"]
    assert violated["detail"] == "it was on"


def test_a_cell_under_other_load_ends_with_exit_code_4_if_strict(
    base: Cell, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherLoad, "stop", lambda _: float(1 << 20))
    monkeypatch.setattr("llama.bench.noise.LEAST_SECONDS", 0)
    words = ["--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    assert [run(*words), run(*words, "--strict")] == [0, script.NOISY]


def test_the_script_prints_the_familiar_lines_first(base: Cell, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ckpt_dir", base.model, "--batch_size", "2", "--output_len", "4", "--kv_caching"]
    assert run(*words, "--input_len", "6") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["Batch size: 2", "Input length: 6 tokens", "Output length: 4 tokens"]
    heads = ["Inference time", "Tokens per second", "Model weights memory usage", "Peak memory usage"]
    assert [line.split(":")[0] for line in lines[3:7]] == heads
    assert "=== Sample Output ===" not in lines, "a text behind random ids shows nothing"
    assert run(*words, "--text", "abc") == 0
    assert "=== Sample Output ===" in capsys.readouterr().out.splitlines()


# ---- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_refuses_says_why_and_one_that_dies_how(base: Cell) -> None:
    with pytest.raises(ValueError, match="goes past max_seq_len=256"):
        run_job("cell", base.but(input_len=300), trace=False)
    with pytest.raises(JobDied, match="exit code 1: KeyError: 'nothing'"):
        run_job("nothing", base)
    assert "SIGKILL, as a machine does that runs out of memory" in jobs._how_it_died(-9, "")


def test_what_is_compiled_outlasts_a_job_whose_other_files_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "kept"))
    environment = jobs._environment(tmp_path / "job", "0")
    assert environment["TMPDIR"] == str(tmp_path / "job")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert jobs._environment(tmp_path, "0")["TORCHINDUCTOR_CACHE_DIR"] == "mine"


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_waits_for_it(base: Cell, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"kind": "cell", "cell": base.as_json(), "trace": False}))
    words = [sys.executable, "-m", "llama.bench.run.worker", str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=jobs._environment(tmp_path, "0"))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert not (tmp_path / "result.json").exists()


def test_the_margin_is_that_of_the_two_largest_logits(base: Cell) -> None:
    assert worker.margin(base.but(kv_caching=False), row=0, ids=[1, 2])["margin"] >= 0


# ---- the command -----------------------------------------------------------------------------------------------------


# Flags, and a part of the error. Refused by the flags alone, or by a cell, before a model is looked for:
REFUSED = {
    "--preset tables": "--preset=tables is not known; choose table, caches, chat or report",
    "--batch_size 0": "--batch_size=0 must be at least 1",
    "--text a --input_len 3": "leave out --input_len",
    "--kv_cache int8 --kv_cache int4": "--kv_cache: a cell has one kind of cache",
    "--timeout nan": "--timeout=nan must be a number of seconds above 0",
    "--budget -1 --preset table": "--budget=-1.0",
    "--budget inf --preset table": "--budget=inf",
    "--wait_until_quiet nan": "--wait_until_quiet=nan",
    "--preset table --batch_size 4": "with --preset table; leave it out, or use it with a single cell",
    "--preset report --engine transformers": "--engine cannot be combined with --preset report",
    "--preset caches --engine transformers": "--engine cannot be combined with --preset caches",
    "--preset chat --input_len 9": "--input_len cannot be combined with --preset chat",
    "--preset chat --text a": "--text cannot be combined with --preset chat",
    "--preset table --prompt_len 9": "--prompt_len cannot be combined with --preset table; leave it out, or",
    "--preset table --contexts 40": "--contexts cannot be combined with --preset table",
    "--preset caches --contexts many": "--contexts many must be numbers of tokens",
    "--preset chat --logits=all": "--logits cannot be combined with --preset chat",
    "--resume": "use it with --preset table or --preset caches or --preset chat or --preset report",
    "--page_watch": "--page_watch cannot be combined with a single cell",
    "--json /proc/nothing/x.json": "/proc/nothing",
    "--model llama-9": "known are demo, llama-3-8b",
    "--model demo --ckpt_dir x": "give one of them",
    "--input_len -1": "input_len=-1",
    "--engine exllama": "engine='exllama' is not known",
    "--engine llama.cpp:int2": "'int2' is no mode; known are fast, int8, int4, stored and a8",
    "--engine llama:int8 --quantize int4": "names its modes",
    "--engine transformers:int8": "transformers is measured with the weights as they are",
    "--engine transformers --fast": "the fast step is ours alone",
    "--logits all --engine transformers": "logits=all is ours alone",
    "--exact --engine transformers": "exact mode is ours alone",
    "--speculate lookup --engine transformers": "speculate is ours alone",
    "--speculate lookup --kv_caching=False": "speculate needs the KV cache, which is off",
    "--speculate lookup --logits all": "logits=all and speculate exclude each other",
    "--speculate lookup:99": "at most N guessed tokens",
    **{f"--speculate lookup --preset {name}": "--speculate cannot be combined" for name in ("caches", "chat")},
    "--quantize int3": "quantize='int3' must be int8, int4, stored or left out",
    "--quantize int8 --exact": "computes with int8 weights by native code alone; ask for fast, too",
    "--quantize int8 --dtype fp16": "not in torch.float16",
    "--kv_cache lru": "is not a known kind of cache",
    f"--seed {2**64}": f"seed={2**64} must be a whole number from -2**63 to 2**64 - 1",
}
# Refused by the sizes of a model; TINY stands for --ckpt_dir and a tiny one's.
REFUSED_BY_SIZES = {
    "TINY --input_len 250": "goes past max_seq_len=256",
    "TINY --preset table --input_len 100 --output_len 200": "goes past max_seq_len=256",
    "TINY --input_len 6 --batch_size 1000000000": "does not fit: weights",
    "TINY --input_len 6 --repeats 0": "repeats=0",
    "TINY --input_len 6 --quantize stored": "quantize=stored takes the weights as a .gguf file has them",
    "TINY --preset caches --kv_cache int8 --kv_cache window:4+9": "smaller than its 9 sinks",
    "TINY --input_len 6 --speculate lookup --kv_cache window:9": "speculation needs a lossless cache",
    "TINY --preset caches --kv_cache nowhere.py:mine": "No such file",
    "TINY --preset caches --kv_cache int8 --kv_cache int8": "would be in the table twice",
    "TINY --preset caches --prompt_len 225": "--prompt_len=225 must be from 1 to 224",
    "TINY --preset caches --text no/file.txt": "no/file.txt: No such file",
    "TINY --input_len 6 --preset table --engine llama:fast --engine llama:fast": "would be in the table twice",
    "TINY --input_len 6 --preset table --engine llama": "would be in the table twice",
    "TINY --input_len 6 --preset table --out /proc/nothing": "/proc/nothing",
}


def test_what_cannot_be_measured_is_refused_in_one_line(
    base: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(refused: dict[str, str]) -> dict[str, str]:
        """Return what was printed instead of one line with the error."""
        found = {}
        for words, error in refused.items():
            code = run(*words.replace("TINY", f"--ckpt_dir {base.model}").split(), "--device", "cpu")
            printed = capsys.readouterr()
            if (code, printed.out, printed.err.count("\n"), error in printed.err) != (2, "", 1, True):
                found[words] = f"{code}: {printed.out}{printed.err}"
        return found

    assert wrong(REFUSED_BY_SIZES) == {}
    monkeypatch.setattr("llama.bench.run.models.find_model", None)
    assert wrong(REFUSED) == {}


@pytest.mark.slow
def test_the_script_writes_a_preset_into_a_folder_with_a_generation_if_asked_for(
    base: Cell, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    words += ["--out", str(tmp_path), "--budget", "0", "--kv_cache", "int8"]
    assert run(*words) == 0
    printed = capsys.readouterr()
    assert "6 jobs, each in a process of its own" in printed.err
    (folder,) = tmp_path.iterdir()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"results.json", "report.md", "table.csv", "report.html", "plots/time.png", "plots/memory.png"} <= names
    assert str(folder / "report.html") in printed.out
    assert "<iframe" not in (folder / "report.html").read_text("utf-8")
    assert run(*words, "--resume", "--page_watch") == 0
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    page = (folder / "report.html").read_text("utf-8")
    frames = re.findall(r'<iframe [^>]*sandbox="allow-scripts" srcdoc="([^"]*)"', page)
    assert [html.unescape(frame) for frame in frames] == [(folder / "watch.html").read_text("utf-8")]
    assert "Cache: int8. 3 steps after" in html.unescape(frames[0])


def test_an_interruption_ends_with_exit_code_130_and_a_report(base: Cell, here: Here, tmp_path: Path) -> None:
    here.fail = lambda kind, cell: None if cell.kv_caching else KeyboardInterrupt()
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--threads", "1"]
    assert run(*words, "--out", str(tmp_path), "--budget", "0") == 130
    (page,) = tmp_path.glob("*/report.md")
    assert report_markdown(json.loads((page.parent / "results.json").read_text())) == page.read_text()


def test_all_cells_of_a_run_compute_with_the_threads_that_were_free_when_it_began(
    base: Cell, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr("llama.host.cores.usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(presets, "BATCHES", (1,))
    monkeypatch.setattr(files, "write_report", lambda report, folder: [])
    before = torch.get_num_threads()
    words = ["--preset", "table", "--ckpt_dir", base.model, "--input_len", "6", "--output_len", "4", "--budget", "0"]
    try:
        for others, flags in ((1.5, []), (0.0, ["--resume"])):
            torch.set_num_threads(2)
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                monkeypatch.delenv(name, raising=False)
            monkeypatch.setattr("llama.host.cores.OtherLoad.stop", lambda _, others=others: others)
            assert run(*words, "--device", "cpu", "--out", str(tmp_path), *flags) == 0
            (results,) = tmp_path.glob("*/results.json")
            assert json.loads(results.read_text())["environment"]["threads"] == 1
            said = "other work occupies 1.5 of 2 cores: computing with 1 thread instead of 2"
            assert (said in capsys.readouterr().err) == (not flags)
    finally:
        torch.set_num_threads(before)
