"""A benchmark measures what it says: counts and bytes are exact, and every fault that is planted shows."""

import mmap
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from fakes import NATIVE_SIZES, Bytes, write_checkpoint
from oracles import tiny_args, tiny_model

from llama import costs
from llama.bench.cell import Cell, read_engine
from llama.bench.report.findings import findings, fit, fit_words, fits, growth
from llama.bench.report.tables import comparison_words, label, stands_apart, work_lines
from llama.bench.run import aggregate, engines, memory, worker
from llama.bench.run.aggregate import aggregated, compare_modes, first_divergence, raise_ceilings
from llama.bench.run.engines import DeviceClock, LlamaEngine, Run
from llama.bench.run.measure import make_prompts, measure
from llama.bench.run.memory_ledger import cache_bytes, make_ledger, predict
from llama.bench.run.models import find_model, make_cell, random_model
from llama.bench.run.step_times import ENOUGH, LEAST, MOST, _more, cache_sizes, context_lengths, crossover, step_times
from llama.bench.run.validity import notes, violated
from llama.bench.schema import (
    Ceilings,
    CellRecord,
    Comparison,
    Divergence,
    Fit,
    Sample,
    StepTimes,
    new_record,
    new_report,
)
from llama.bench.statistics import best_ceilings, bound_by, percentiles, roofline_shares, summarise
from llama.fast import native_build
from llama.fast.graph_runner import GraphRunner
from llama.fast.native_runner import NativeRunner
from llama.kv_cache import StaticCache
from llama.quant.layers import quantized_weights
from llama.quant.packed import PackedWeight

CPU = torch.device("cpu")
CELL = Cell(batch_size=3, input_len=7, output_len=5)
MODES = pytest.mark.parametrize("kv_caching", [True, False], ids=["on", "off"])
HAS_COMPILER = bool(os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++"))))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")


def engine_for(cell: Cell, **changes: Any) -> LlamaEngine:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[cell.dtype]
    model = tiny_model(tiny_args(kv_cache=cell.kv_cache, **changes), dtype=dtype)
    return LlamaEngine(model, Bytes(), logits=cell.logits)


def measured(cell: Cell, **changes: Any) -> CellRecord:
    return measure(cell, engine_for(cell, **changes), device=CPU)


def line(record: CellRecord, name: str) -> tuple[int, int | None]:
    assert record["ledger"] is not None
    found = next(line for line in record["ledger"]["lines"] if line["name"] == name)
    return found["predicted"], found["measured"]


@MODES
def test_a_cell_counts_its_tokens_steps_and_bytes_exactly(kv_caching: bool) -> None:
    record = measured(CELL.but(kv_caching=kv_caching))
    assert [len(row) for row in record["ids"]] == [5, 5, 5]
    (sample,) = record["samples"]
    assert len(sample["step_seconds"]) == 4
    assert sample["seconds"] == pytest.approx(sample["first_token_seconds"] + sum(sample["step_seconds"]))
    assert record["work"] is not None
    assert record["work"]["token_forwards"] == 3 * (11 if kv_caching else 7 + 8 + 9 + 10 + 11)
    assert violated(record["points"]) == []
    assert {point["status"] for point in record["points"]} == {"ok"}


def test_a_cell_in_exact_mode_says_so_and_stands_apart(tmp_path: Path) -> None:
    cell = Cell(model=str(write_checkpoint(tmp_path / "tiny")), input_len=5, output_len=3, exact=True)
    engine = LlamaEngine(find_model(cell).build(), Bytes())
    record = measure(cell, engine, device=CPU)
    assert engine.model.exact
    assert record["path"] == "exact"
    assert stands_apart(record)
    assert violated(record["points"]) == []
    assert record["ledger"] is not None
    assert any("exact mode pads and copies" in line["note"] for line in record["ledger"]["lines"])


@pytest.mark.slow
@pytest.mark.parametrize("trace", [True, False])
def test_what_exact_mode_costs_is_timed_in_a_traced_run_alone(tmp_path: Path, trace: bool) -> None:
    cell = Cell(model=str(write_checkpoint(tmp_path / "tiny")), input_len=5, output_len=3, exact=True)
    notes = worker.run_cell(cell, trace=trace)["record"]["notes"]
    assert any("times as long as without it" in note for note in notes) == trace


@needs_compiler
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_cell_in_the_exact_mode_of_native_code_says_so(tmp_path: Path, quantize: str | None) -> None:
    cell = Cell(
        model=str(write_checkpoint(tmp_path / "tiny", **NATIVE_SIZES)),
        input_len=5,
        output_len=3,
        exact=True,
        fast=True,
        quantize=quantize,
    )
    record = worker.run_cell(cell, trace=True)["record"]
    assert record["path"] == ("native, exact" if quantize is None else "native, int8 weights, exact")
    assert violated(record["points"]) == []
    assert any("exact mode by native code takes no longer" in note for note in record["notes"])


@pytest.fixture(scope="module")
def native_sized(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("native") / "tiny", **NATIVE_SIZES))


def built(cell: Cell) -> LlamaEngine:
    source = find_model(cell)
    return LlamaEngine(source.build(), source.tokenizer, logits=cell.logits)


@needs_compiler
@MODES
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_fast_cell_tells_that_native_code_ran_and_stands_apart(
    native_sized: str, kv_caching: bool, quantize: str | None
) -> None:
    cell = CELL.but(model=native_sized, kv_caching=kv_caching, fast=True, quantize=quantize)
    record = measure(cell, built(cell), device=CPU)
    assert record["path"] == ("native, int8 weights" if quantize else "native")
    assert stands_apart(record)
    assert violated(record["points"]) == []
    assert record["points"][-1]["detail"] == "asked for; 5 of 5 forwards ran by it"
    mode = f"batch 3, cache {'on' if kv_caching else 'off'}, fast"
    assert label({**record, "summary": summarise(cell, record["samples"])}) == (
        f"{mode}, int8 weights, native path" if quantize else f"{mode}, native path"
    )
    assert record["ledger"] is not None
    assert any("the fast step takes a workspace" in line["note"] for line in record["ledger"]["lines"])
    plain = measure(cell.but(fast=False), built(cell.but(fast=False)), device=CPU)
    assert plain["path"] == ("plain, int8 weights" if quantize else "plain")
    assert [line(record, name) for name in ("weights", "KV cache")] == [
        line(plain, name) for name in ("weights", "KV cache")
    ]


@pytest.mark.slow
@needs_compiler
def test_native_code_is_compiled_when_the_model_is_built_and_never_while_the_clock_runs(
    native_sized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-O0"))  # compiles in a moment
    cell = CELL.but(model=native_sized, fast=True)
    engine = built(cell)
    compiled = {path: path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()}
    assert any(path.suffix == ".so" for path in compiled)
    monkeypatch.setenv("CXX", "false")  # from here on nothing can be compiled
    record = measure(cell, engine, device=CPU)
    assert record["path"] == "native"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()} == compiled


def test_a_fast_cell_without_a_compiler_is_plain_and_says_that_fast_was_asked_for(
    native_sized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    cell = CELL.but(model=native_sized, fast=True)
    record = worker.run_cell(cell, trace=False)["record"]
    assert record["path"] == "plain"
    assert not stands_apart(record)
    (point,) = violated(record["points"])
    assert point["detail"] == "asked for; 0 of 5 forwards ran by it, the others by the plain path"
    assert any(note.startswith("fast: false failed") for note in record["notes"])
    assert label({**record, "summary": summarise(cell, record["samples"])}) == "batch 3, cache on, fast, plain path"


@needs_compiler
def test_a_cache_that_the_native_code_does_not_know_is_told_in_the_path(native_sized: str) -> None:
    cell = CELL.but(model=native_sized, fast=True, kv_cache="concat", quantize="int8")
    record = worker.run_cell(cell, trace=False)["record"]
    assert record["path"] == "plain, int8 weights"
    assert [point["name"] for point in violated(record["points"])] == ["fast step"]
    assert any("kv_cache='concat' has no fast step" in note for note in record["notes"])


@MODES
def test_steps_that_run_ahead_of_the_loop_are_seen_too(kv_caching: bool) -> None:
    """As a GPU's do, which pass the hooks on the model by; where all logits are wanted, the loop takes the steps."""
    cell = CELL.but(kv_caching=kv_caching, fast=True)
    plain, engine = engine_for(cell), engine_for(cell)
    engine.model.runner = GraphRunner()
    prompts = make_prompts(cell, engine)
    expected, run = (one.run(prompts, 5, kv_caching=kv_caching) for one in (plain, engine))
    assert run.ids == expected.ids
    assert run.fed == expected.fed
    assert len(run.token_times) == 5
    assert sorted([run.started, *run.token_times]) == [run.started, *run.token_times]
    path = f"CUDA graphs of plain {'kernels' if kv_caching else 'layers'}"
    assert (run.path, run.fast_forwards, run.fast_wanted) == (path, 4, 4)
    points = measure(cell, engine, device=CPU, trace=False)["points"]
    assert not violated(points)
    assert "asked for; 4 of 5 forwards ran by it, the prompt by the plain path" in str(points)
    engine.logits = "all"
    assert engine.run(prompts, 5, kv_caching=kv_caching).fast_forwards == 0


def test_a_devices_own_times_count_from_where_host_and_device_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        made = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.at = 100.0 + 7.0 * Event.made  # in milliseconds, of a clock of its own

        def record(self, stream: object) -> None: ...
        def elapsed_time(self, later: "Event") -> float:
            return later.at - self.at

    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = [1.0, 2.0]  # the host's, of a prompt
    clock = DeviceClock(torch.device("cuda"), times)
    for _ in range(3):
        clock.note()
    first = times[2]
    clock.settle()
    assert times == pytest.approx([1.0, 2.0, first, first + 0.007, first + 0.014])


@needs_compiler
def test_a_run_that_was_native_in_part_names_both_paths(native_sized: str) -> None:
    cell = CELL.but(model=native_sized, fast=True)
    engine = built(cell)
    step = engine.model.runner

    class Tiring(NativeRunner):
        def __call__(self, *args: Any, **options: Any) -> torch.Tensor | None:
            return super().__call__(*args, **options) if self.forwards < 7 else None

        def stepper(self, *_: Any) -> None:
            return None  # so that every step is a call

    assert isinstance(step, NativeRunner)
    engine.model.runner = Tiring(step._folder)
    record = measure(cell, engine, device=CPU, trace=False)  # two forwards warm up, and five are measured
    assert record["path"] == "native"
    engine.model.runner = Tiring(step._folder)
    engine.model.runner.forwards = 3
    record = measure(cell, engine, device=CPU, trace=False)
    assert record["path"] == "native and plain"
    (point,) = violated(record["points"])
    assert point["detail"] == "asked for; 2 of 5 forwards ran by it, the others by the plain path"


@pytest.mark.parametrize("tied_head", [True, False], ids=["tied", "untied"])
def test_the_ledger_of_int8_weights_is_that_of_the_tensors(tied_head: bool) -> None:
    sizes = {"dim": 64, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 96, "vocab_size": 50}
    args = tiny_args(**sizes, tied_head=tied_head)
    cell = CELL.but(quantize="int8", dtype="bf16")
    model = random_model(args, dtype=torch.bfloat16, device=CPU, quantize="int8")
    record = measure(cell, LlamaEngine(model, Bytes()), device=CPU)
    held = costs.weights_bytes(args, itemsize=2, quantize="int8")
    head = 0 if tied_head else 64 * 64 * 9 // 8  # 50 words in panels of 16
    assert line(record, "weights") == (held - head, held - head)
    assert line(record, "tied head" if tied_head else "head") == (head, head)
    assert record["weights_bytes"] == held
    assert record["work"] is not None
    assert record["work"]["step_bytes"] == costs.step_bytes(args, rows=3, context=9, itemsize=2, quantize="int8")
    assert any(note.startswith("int8 weights: rounded") for note in record["notes"])


def test_random_int8_weights_are_the_random_weights_rounded() -> None:
    args = tiny_args(dim=64, n_heads=2, n_kv_heads=1, ffn_dim=96, vocab_size=5000)  # more than are drawn at a time
    whole, rounded = (random_model(args, dtype=torch.float32, device=CPU, quantize=kind) for kind in (None, "int8"))
    matrices = quantized_weights(rounded)
    assert len(matrices) == 16
    for name, weight in matrices.items():
        expected = PackedWeight(*weight.shape)
        expected.fill(0, whole.get_parameter(name))
        assert torch.equal(weight.rows(0, weight.shape[0]), expected.rows(0, weight.shape[0])), name
    assert all(parameter.is_meta is False for parameter in rounded.parameters())


def test_random_int8_weights_never_stand_in_a_wider_dtype_as_a_whole() -> None:
    args = tiny_args(dim=64, n_layers=8, n_heads=2, n_kv_heads=1, ffn_dim=1024, vocab_size=64)
    held = costs.weights_bytes(args, itemsize=4, quantize="int8")
    matrix = 64 * 1024 * 4
    peak = memory.tensor_peak(lambda: random_model(args, dtype=torch.float32, device=CPU, quantize="int8"))
    assert peak < held + 8 * matrix < costs.weights_bytes(args, itemsize=4)


@MODES
@pytest.mark.parametrize("logits", ["last", "all"])
def test_the_ledger_is_that_worked_out_by_hand_and_that_of_the_tensors(kv_caching: bool, logits: str) -> None:
    """Two layers of 12,352 numbers, 4 query and 2 KV heads of 8, 40 tokens, a head of its own; 3 rows of 7 + 5."""
    record = measured(CELL.but(kv_caching=kv_caching, logits=logits))
    assert line(record, "weights") == (104_064, 104_064)  # (2 x 12,352 + 32 + 40 x 32) x 4
    assert line(record, "head") == (5_120, 5_120)  # 40 x 32 x 4
    cache = 9_216 if kv_caching else 0  # 2 x 2 layers x 2 heads x 8 x 3 rows x 12 positions x 4
    assert line(record, "KV cache") == (cache, cache)
    scored = {("last", True): 1, ("last", False): 1, ("all", True): 7, ("all", False): 11}[logits, kv_caching]
    assert line(record, "logits") == (480 * scored, 480 * scored)  # 3 rows x 40 x 4
    assert record["cache_bytes"] == cache
    assert record["weights_bytes"] == 109_184


@MODES
@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied_head", [True, False], ids=["tied", "untied"])
def test_the_predicted_peak_is_that_of_pytorchs_allocator(
    kv_caching: bool, logits: str, dtype: str, tied_head: bool
) -> None:
    """To 2 %: what is not predicted, masks and angles, is small already at these sizes."""
    cell = Cell(batch_size=4, input_len=100, output_len=4, kv_caching=kv_caching, logits=logits, dtype=dtype)
    sizes = {"dim": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 256, "max_seq_len": 128}
    ledger = measured(cell, tied_head=tied_head, **sizes)["ledger"]
    assert ledger is not None
    assert ledger["measured_peak"] is not None
    assert ledger["measured_peak"] == pytest.approx(ledger["predicted_peak"], rel=0.02)
    assert ledger["residual"] == ledger["measured_peak"] - ledger["predicted_peak"]
    assert sum(line["predicted"] for line in ledger["lines"] if line["counts"]) == ledger["predicted_peak"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@MODES
@pytest.mark.parametrize("logits", ["last", "all"])
def test_the_predicted_peak_is_that_of_cuda(kv_caching: bool, logits: Literal["last", "all"]) -> None:
    """To 2 %, at a size beside which what is not predicted is small."""
    args = tiny_args(dim=2048, n_layers=4, n_heads=32, n_kv_heads=8, vocab_size=256, max_seq_len=512, tied_head=True)
    model = random_model(args, dtype=torch.bfloat16, device=torch.device("cuda"))
    sizes = {"batch_size": 16, "input_len": 256, "output_len": 4}
    cell = Cell(**sizes, kv_caching=kv_caching, logits=logits, dtype="bf16", device="cuda")
    ledger = measure(cell, LlamaEngine(model, Bytes(), logits=logits), device=torch.device("cuda"))["ledger"]
    assert ledger is not None
    assert ledger["measured_peak"] == pytest.approx(ledger["predicted_peak"], rel=0.02)


@MODES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_predicted_peak_is_that_of_the_allocator_where_the_head_makes_it(kv_caching: bool, dtype: str) -> None:
    """To 2 %, and by a model that is mostly head: its norm's output is still there when the scores stay as they are."""
    cell = Cell(batch_size=16, input_len=100, output_len=3, kv_caching=kv_caching, logits="all", dtype=dtype)
    sizes = {"dim": 64, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 16, "vocab_size": 160}
    args = tiny_args(**sizes, max_seq_len=128)
    assert predict(args, cell).at_head
    ledger = measured(cell, **sizes, max_seq_len=128)["ledger"]
    assert ledger is not None
    assert ledger["measured_peak"] == pytest.approx(ledger["predicted_peak"], rel=0.02)
    assert ledger["moment"] == f"at the head of the {'prefill' if kv_caching else 'step'}"


def test_without_a_trace_a_cell_is_run_once_behind_its_warm_up_and_has_no_ledger() -> None:
    runs: list[int | None] = []

    def count(**options: Any) -> dict[str, Any]:
        runs.append(options["steps"])
        return options

    record = measure(CELL, Faulty(count), device=CPU, trace=False)
    assert runs == [2, None]
    assert record["samples"][0]["peak_allocated_bytes"] is None
    assert record["ledger"] is None
    measure(CELL, Faulty(count), device=CPU, trace=True)
    assert runs[2:] == [2, None, 2]


class Faulty(LlamaEngine):
    """An engine with something wrong: `change(self, prompts, options)` may alter what is run."""

    def __init__(self, change: Callable[..., Any]) -> None:
        sound = engine_for(CELL)
        super().__init__(sound.model, sound.tokenizer)
        self.change = change

    def run(
        self, prompts: Sequence[Sequence[int]], output_len: int, *, kv_caching: bool, steps: int | None = None
    ) -> Run:
        options = {"prompts": prompts, "output_len": output_len, "kv_caching": kv_caching, "steps": steps}
        return super().run(**self.change(**options))


def the_other_mode(**options: Any) -> dict[str, Any]:
    return {**options, "kv_caching": not options["kv_caching"]}


def re_encoded(**options: Any) -> dict[str, Any]:
    """A prompt that was decoded and encoded again comes back longer: the famous 263 tokens instead of 256."""
    return {**options, "prompts": [[*prompt, 1] for prompt in options["prompts"]]}


def shorter_output(**options: Any) -> dict[str, Any]:
    return {**options, "output_len": 3}


def warmed_with_another_shape(**options: Any) -> dict[str, Any]:
    return {**options, "prompts": [prompt[:2] for prompt in options["prompts"]]} if options["steps"] else options


def faults_of(engine: LlamaEngine, cell: Cell = CELL) -> set[str]:
    return {point["name"] for point in violated(measure(cell, engine, device=CPU)["points"])}


@pytest.mark.parametrize(
    ("change", "points"),
    [
        (the_other_mode, {"cache", "tokens", "warm-up"}),
        (re_encoded, {"tokens", "warm-up"}),
        (shorter_output, {"tokens", "no early end", "no overflow"}),
        (warmed_with_another_shape, {"warm-up"}),
    ],
)
def test_an_engine_that_does_something_else_is_found_out(change: Callable[..., Any], points: set[str]) -> None:
    assert faults_of(Faulty(change)) == points


def test_a_row_that_ends_at_an_end_of_text_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(CELL)
    whole = engine.model.generate_tokens
    first, _ = whole([[1] * 7] * 3, 5, temperature=0)

    def until_a_stop_id(prompts: Any, *args: Any, **options: Any) -> Any:
        ids, _ = whole(prompts, 5, temperature=0)
        return whole(prompts, *args, stop_ids=[ids[0][3]], **options)

    monkeypatch.setattr(engine.model, "generate_tokens", until_a_stop_id)
    assert first
    assert {"no early end", "tokens"} <= faults_of(engine)


def test_a_cache_that_overflows_in_silence_is_found_out() -> None:
    class Dropping(StaticCache, kind="dropping"):
        """Room for too few positions; what does not fit is written nowhere, as a broadcast into an empty slice does."""

        def reserve(self, rows: int, length: int) -> None:
            super().reserve(rows, length - 4)

        def update(self, rows: Any, xk: Any, xv: Any) -> Any:
            if self.keys is not None and rows.end > self.keys.shape[1]:
                return self.keys, self.values
            return super().update(rows, xk, xv)

    cell = CELL.but(kv_cache="dropping")
    assert faults_of(engine_for(cell), cell) == {"no overflow"}


def test_a_peak_of_earlier_work_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    if memory.resident_bytes() is None:
        pytest.skip("this system does not tell its resident memory")
    with mmap.mmap(-1, 2**28) as pages:  # the kernel's own: the heap may hold as much that was freed before
        pages[:: mmap.PAGESIZE] = bytes(2**28 // mmap.PAGESIZE)
    monkeypatch.setattr(memory, "reset_peak_resident", lambda: True)  # says so, and does nothing
    assert faults_of(engine_for(CELL)) == {"statistics reset"}


def test_another_sampler_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.GREEDY, "temperature", 50.0)
    assert "same sampler" in faults_of(engine_for(CELL))


def test_no_warm_up_at_all_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(CELL)
    whole = engine.run
    monkeypatch.setattr(
        engine, "run", lambda *args, **named: Run(fed=[]) if named.get("steps") else whole(*args, **named)
    )
    assert faults_of(engine) == {"warm-up"}


def test_a_cell_past_the_models_limit_or_the_memory_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="passes the model's max_seq_len=24"):
        measured(CELL.but(input_len=20))
    with pytest.raises(ValueError, match=r"does not fit: weights .*KV cache .* at the peak, and .* are free on cpu"):
        measured(CELL.but(batch_size=10**9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"input_len": -1},
        {"output_len": 0},
        {"threads": 0},
        {"logits": "some"},
        {"dtype": "int8"},
        {"text": "  "},
        {"quantize": "int3"},
        {"quantize": "int8", "engine": "transformers"},
        {"quantize": "int2", "engine": "llama.cpp"},
        {"fast": True, "engine": "llama.cpp"},
        {"exact": True, "engine": "transformers"},
        {"logits": "all", "engine": "transformers"},
    ],
    ids=str,
)
def test_a_cell_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        Cell(**wrong)


def test_another_engine_is_measured_in_one_process() -> None:
    assert Cell(ranks=2).name == "batch 1, cache on, 2 ranks"
    with pytest.raises(ValueError, match="transformers is measured in one process; start it without torchrun"):
        Cell(ranks=2, engine="transformers")


def test_ways_that_cannot_be_had_together_are_refused_before_anything_runs() -> None:
    for asked, words in [
        ({"quantize": "int8", "exact": True}, "exact mode computes with int8 weights by native code alone"),
        ({"quantize": "int8", "dtype": "fp16"}, "int8 weights go with activations in fp32 or bf16"),
    ]:
        with pytest.raises(ValueError, match=words):
            make_cell(device="cpu", **asked)  # type: ignore[arg-type]


def test_an_engine_is_named_with_its_modes() -> None:
    assert read_engine("transformers") == {"engine": "transformers", "fast": False, "quantize": None, "activations": 16}
    assert read_engine("llama.cpp:int4") == {
        "engine": "llama.cpp",
        "fast": False,
        "quantize": "int4",
        "activations": 16,
    }
    assert read_engine("llama:int8:fast") == read_engine("llama:fast:int8")
    assert Cell(**read_engine("llama:fast:int8")).name == "batch 1, cache on, fast, int8 weights"
    assert Cell(**read_engine("llama:int8:a8")).name == "batch 1, cache on, int8 weights, 8-bit activations"
    assert Cell(**read_engine("llama.cpp:int8")).name == "llama.cpp, batch 1, cache on, int8 weights"
    for words in ("llama:quick", "llama.cpp:", "llama.cpp:Q8_0"):
        with pytest.raises(
            ValueError, match=r"is no mode; known are fast, int8, int4, stored, mapped and a8, as in llama:fast:int8"
        ):
            read_engine(words)
    with pytest.raises(ValueError, match="more modes than one cell can"):
        read_engine("llama.cpp:int8:int4")


def test_a_text_stands_in_every_row_and_its_length_is_counted() -> None:
    cell = CELL.but(text="abc")
    engine = engine_for(cell, vocab_size=258)
    record = measure(cell, engine, device=CPU)
    assert record["cell"]["input_len"] == 4  # BOS and three bytes
    assert record["ids"][0] == record["ids"][1] == record["ids"][2]
    assert violated(record["points"]) == []


def test_random_weights_are_the_same_in_every_process_and_share_a_tied_head() -> None:
    args = tiny_args(tied_head=True)
    a, b = (random_model(args, dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert a.output.weight is a.tok_embeddings.weight
    assert not a.output.weight.is_meta
    assert LlamaEngine(a, Bytes()).weights_bytes == costs.parameters(args) * 2


def test_a_spread_interpolates_and_counts() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"n": 5, "median": 3.0, "p10": 1.4, "p90": 4.6}
    assert percentiles([2.0]) == {"n": 1, "median": 2.0, "p10": 2.0, "p90": 2.0}


def sample(first: float, steps: list[float]) -> Sample:
    return {
        "seconds": first + sum(steps),
        "first_token_seconds": first,
        "step_seconds": steps,
        "peak_resident_bytes": 2000,
        "peak_allocated_bytes": 1000,
        "peak_reserved_bytes": None,
        "device_bytes": None,
        "other_load_cores": 0.0,
    }


def test_rates_count_each_phase_by_its_own_tokens_and_time() -> None:
    summary = summarise(Cell(batch_size=8, input_len=100, output_len=3), [sample(2.0, [0.5, 0.5])])
    assert summary["tokens_per_second"] == 8 * 3 / 3.0
    assert summary["prefill_tokens_per_second"] == 8 * 100 / 2.0
    assert summary["decode_tokens_per_second"] == 8 * 2 / 1.0
    assert summary["peak_bytes"] is not None
    assert summary["peak_bytes"]["median"] == 1000
    assert summary["resident_bytes"] is not None
    assert summary["resident_bytes"]["median"] == 2000
    alone = summarise(Cell(output_len=1), [sample(2.0, [])])
    assert alone["step_seconds"] is None
    assert alone["decode_tokens_per_second"] is None


def test_what_bounds_a_step_is_the_ceiling_that_it_uses_half_of() -> None:
    assert bound_by(flops_share=0.2, bytes_share=0.8) == "memory bandwidth"
    assert bound_by(flops_share=0.9, bytes_share=0.8) == "arithmetic"
    assert bound_by(flops_share=0.3, bytes_share=0.4) == "neither ceiling"
    record = measured(CELL)
    assert record["work"] is not None
    limits = roofline_shares(CELL, record["work"], summarise(CELL, record["samples"]), rates(1e15, 1e15))
    middle = sorted(record["samples"][0]["step_seconds"])[1:3]
    assert limits["step_bandwidth_share"] == pytest.approx(record["work"]["step_bytes"] / 1e15 / (sum(middle) / 2))


@pytest.mark.parametrize(
    ("flops_share", "bytes_share", "expected"),
    [
        (0.5, 0.49, "arithmetic"),
        (0.49, 0.5, "memory bandwidth"),
        (0.49, 0.49, "neither ceiling"),
        (0.5, 0.5, "memory bandwidth"),
        (0.51, 0.5, "arithmetic"),
        (0.0, 1.0, "memory bandwidth"),
    ],
)
def test_a_ceiling_binds_from_half_of_it_on_and_the_nearer_one_where_both_do(
    flops_share: float, bytes_share: float, expected: str
) -> None:
    assert bound_by(flops_share=flops_share, bytes_share=bytes_share) == expected


def rates(read: float, flops: float, by: str = "measured") -> Ceilings:
    return {"read_bytes_per_second": read, "read_by": by, "flops_per_second": flops, "flops_by": by, "dtype": "fp32"}


def worked(prefill: float, step: float, **asked: Any) -> CellRecord:
    """Return a cell of 1000 FLOPs in the prefill, 60 in a step that reads 800 bytes, after so many seconds of each."""
    cell = Cell(output_len=3, **asked)
    work: Any = {"token_forwards": 258, "flops": 1120, "bytes": 2400, "prefill_flops": 1000}
    work |= {"step_flops": 60, "step_bytes": 800}
    samples = [sample(prefill, [step, step])]
    return {**new_record(cell), "samples": samples, "summary": summarise(cell, samples), "work": work}


def test_shares_are_of_the_measured_ceilings_and_a_single_token_is_its_own_step() -> None:
    record = worked(2.0, 0.5)
    assert record["work"] is not None
    assert record["summary"] is not None
    assert roofline_shares(CELL, record["work"], record["summary"], rates(3200, 1000)) == {
        "prefill_flops_share": 0.5,
        "step_flops_share": 0.12,
        "step_bandwidth_share": 0.5,
        "bound_by": "memory bandwidth",
    }
    alone = summarise(CELL.but(output_len=1), [sample(2.0, [])])
    shares = roofline_shares(CELL, record["work"], alone, rates(3200, 1000))
    assert (shares["step_flops_share"], shares["step_bandwidth_share"]) == (0.03, 0.125)


def test_the_best_of_two_ceilings_is_kept_of_each_kind_with_what_reached_it() -> None:
    assert best_ceilings(None, rates(1, 2, "b")) == rates(1, 2, "b")
    assert best_ceilings(rates(1, 2, "a"), rates(1, 2, "b")) == rates(1, 2, "a")
    assert best_ceilings(rates(1, 2, "a"), rates(3, 1, "b")) == {**rates(3, 2, "a"), "read_by": "b"}
    assert best_ceilings(rates(1, 2, "a"), rates(0, 3, "b")) == {**rates(1, 3, "a"), "flops_by": "b"}


def test_a_cell_that_beats_the_ceilings_raises_them_and_no_share_passes_1() -> None:
    report = new_report("table", [])
    report["ceilings"] = rates(1000, 100)
    report["cells"] = [worked(2.0, 0.5), worked(4.0, 0.5, kv_caching=False), worked(4.0, 4.0, batch_size=8)]
    raise_ceilings(report)
    assert report["ceilings"] == {
        **rates(1600, 500),
        "read_by": "the step of batch 1, cache on",
        "flops_by": "the prefill of batch 1, cache on",
    }
    assert [one["limits"] and one["limits"]["prefill_flops_share"] for one in report["cells"]] == [1.0, 0.5, 0.5]
    assert [one["limits"] and one["limits"]["step_bandwidth_share"] for one in report["cells"]] == [1.0, 1.0, 0.125]
    own = [any("this cell's own" in words for words in work_lines(one)) for one in report["cells"]]
    assert own == [True, True, False]
    quick_step = worked(40.0, 0.5)
    report["cells"], report["ceilings"] = [quick_step], rates(1000, 100)
    raise_ceilings(report)
    assert report["ceilings"]["flops_by"] == "the step of batch 1, cache on"
    assert report["ceilings"]["flops_per_second"] == 120


@pytest.mark.parametrize("asked", [{"quantize": "int8"}, {"ranks": 2}], ids=str)
def test_quantized_weights_and_several_ranks_raise_no_ceiling_of_the_others(asked: dict[str, Any]) -> None:
    report = new_report("table", [])
    report["ceilings"], report["cells"] = rates(1000, 100), [worked(2.0, 0.5, **asked)]
    raise_ceilings(report)
    assert report["ceilings"] == rates(1000, 100)
    shares = report["cells"][0]["limits"]
    assert (shares is None) == ("ranks" in asked)
    assert shares is None or shares["prefill_flops_share"] == 1.0


def test_repetitions_are_gathered_and_a_violation_in_one_of_them_stays() -> None:
    good, bad = measured(CELL), measured(CELL)
    bad["points"][0] = {**bad["points"][0], "status": "violated"}
    for first, second in [(good, bad), (bad, good)]:
        both = aggregated(aggregated(new_record(CELL), first), second)
        assert [point["name"] for point in violated(both["points"])] == ["cache"]
        assert len(both["samples"]) == 2
    other = {**good, "ids": [[0] * 5] * 3}
    words = "repetitions made different tokens"
    assert words in aggregated(good, other)["notes"]
    first = aggregated(new_record(CELL), good)
    assert words not in aggregated(first, good)["notes"]
    assert good["ledger"] is not None
    assert aggregated(first, {**good, "ledger": None})["ledger"] == good["ledger"]  # of the first alone it is traced


def test_the_first_divergence_is_the_earliest_token_of_any_row() -> None:
    assert first_divergence([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) is None
    found = first_divergence([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 8, 6]])
    assert found == {"row": 1, "token": 1, "cached_id": 5, "uncached_id": 8, "margin": None}
    found = first_divergence([[1, 2], [4, 5]], [[1, 3], [4, 6]])
    assert found is not None
    assert found["row"] == 0  # of several rows at the same token the first
    for ids, other, said in (([1, 0], [1], (0, -1)), ([1], [1, 0], (-1, 0))):  # a row that ends earlier has no token
        found = first_divergence([ids], [other])
        assert found is not None
        assert (found["token"], found["cached_id"], found["uncached_id"]) == (1, *said)


def test_a_comparison_is_told_with_the_place_where_the_modes_part() -> None:
    same: Comparison = {"engine": "llama", "path": "plain", "batch_size": 2, "tokens": 6, "equal": True}
    same["divergence"] = None
    assert comparison_words(same) == "cache on and off made the same 6 tokens"
    parting: Divergence = {"row": 1, "token": 2, "cached_id": 5, "uncached_id": 8, "margin": None}
    words = "cache on and off part at token 2 of row 1 (5 with it, 8 without)"
    assert comparison_words({**same, "equal": False, "divergence": parting}) == words
    parting["margin"] = 0.00125
    said = comparison_words({**same, "equal": False, "divergence": parting})
    assert said == f"{words}, where the two largest logits are 0.0013 apart"


def test_the_ids_of_another_engine_are_compared_without_its_logits() -> None:
    on = new_record(Cell(engine="transformers", batch_size=2, output_len=2))
    off = new_record(Cell(engine="transformers", batch_size=2, output_len=2, kv_caching=False))
    on["ids"], off["ids"] = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    found = compare_modes(on, off)
    assert (found["engine"], found["batch_size"], found["tokens"], found["equal"]) == ("transformers", 2, 4, False)
    assert found["divergence"] == {"row": 1, "token": 1, "cached_id": 4, "uncached_id": 5, "margin": None}
    assert compare_modes(on, on)["equal"]


def test_where_our_modes_part_the_logits_of_the_text_up_to_there_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def margin(kind: str, cell: Cell, **job: Any) -> dict[str, Any]:
        asked.append((kind, cell.kv_caching, job))
        return {"margin": 0.5}

    monkeypatch.setattr(aggregate, "run_job", margin)
    on, off = (new_record(Cell(batch_size=2, output_len=3, kv_caching=kv_caching)) for kv_caching in (True, False))
    on["ids"], off["ids"] = [[1, 2, 7], [3, 4, 7]], [[1, 2, 7], [3, 5, 8]]
    found = compare_modes(on, off)
    assert found["divergence"] == {"row": 1, "token": 1, "cached_id": 4, "uncached_id": 5, "margin": 0.5}
    assert asked == [("margin", False, {"row": 1, "ids": [3]})]
    assert compare_modes(on, on)["divergence"] is None
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ""),
        ({"kv_cache": "concat"}, "predicted for a cache that is read in place; concat may copy what it returns"),
        ({"kv_cache": "concat", "kv_caching": False}, ""),
    ],
    ids=str,
)
def test_a_ledger_says_where_a_cache_may_take_more_meanwhile_than_it_holds(changes: dict[str, Any], note: str) -> None:
    cell = CELL.but(**changes)
    ledger = make_ledger(tiny_args(), cell, predict(tiny_args(), cell))
    assert next(line["note"] for line in ledger["lines"] if line["name"].endswith("activations")) == note


@pytest.mark.parametrize("kind", ["static", "concat", "paged", "paged:9", "int8", "int4", "window", "window:5+1"])
def test_what_a_kind_of_cache_holds_is_predicted_to_the_byte(kind: str) -> None:
    cell = CELL.but(kv_cache=kind)
    record = measured(cell)
    assert record["cache_bytes"] == cache_bytes(tiny_args(kv_cache=kind), cell, cell.total_len - 1)
    predicted, held = line(record, "KV cache")
    assert predicted == cache_bytes(tiny_args(kv_cache=kind), cell, cell.input_len), "the prefill makes the peak"
    assert held == (record["cache_bytes"] if predicted == record["cache_bytes"] else None)
    assert [point["status"] for point in record["points"] if point["name"] == "no overflow"] == ["ok"]


def test_a_kind_of_cache_that_holds_its_numbers_in_fewer_bytes_has_them_predicted() -> None:
    class Halved(StaticCache, kind="halved"):
        def position_bytes(self, itemsize: int) -> int:
            return super().position_bytes(itemsize) // 2

    whole, halved = (predict(tiny_args(kv_cache=kind), CELL.but(kv_cache=kind)) for kind in ("static", "halved"))
    assert (whole.cache, halved.cache) == (9_216, 4_608)
    assert whole.total - halved.total == 4_608
    off = CELL.but(kv_cache="halved", kv_caching=False)
    assert predict(tiny_args(kv_cache="halved"), off).cache == 0
    record = measured(CELL.but(kv_cache="halved"))
    assert line(record, "KV cache") == (4_608, 9_216)  # it tells less than it holds, and the ledger shows that
    read = [costs.step_bytes(tiny_args(), rows=3, context=length, itemsize=4) for length in (0, 9)]
    assert record["work"] is not None
    assert record["work"]["step_bytes"] == (read[0] + read[1]) // 2


def test_notes_say_what_a_reader_should_know_and_no_more() -> None:
    plain = Cell(text="a text")
    assert notes(plain, weights="checkpoint") == []
    words = " ".join(notes(Cell(dtype="bf16", logits="all"), weights="random"))
    assert all(part in words for part in ("random weights", "random token ids", "low precision", "all positions"))


def step(context: int, kv_caching: bool, seconds: float) -> StepTimes:
    return {"batch_size": 1, "context": context, "kv_caching": kv_caching, "seconds": percentiles([seconds])}


def test_the_crossover_is_where_the_cache_pays_from_then_on() -> None:
    cached = [step(n, True, 2.0) for n in (1, 2, 4, 8, 16)]
    uncached = [step(n, False, t) for n, t in zip((1, 2, 4, 8, 16), (1.0, 3.0, 1.9, 4.0, 8.0), strict=True)]
    assert crossover(cached + uncached)["context"] == 8  # a lucky draw at 2 does not count
    assert crossover([step(4, True, 1.0), step(4, False, 0.5)])["context"] is None
    assert crossover([step(4, True, 1.0), step(4, False, 1.5)])["context"] == 4


def test_step_times_leave_the_model_as_it_was() -> None:
    model = tiny_model(dtype=torch.float32)
    for kv_caching in (True, False):
        times = step_times(model, 2, [1, 5, 24], kv_caching=kv_caching)
        assert [(t["batch_size"], t["context"], t["kv_caching"]) for t in times] == [
            (2, n, kv_caching) for n in (1, 5, 24)
        ]
        assert all(t["seconds"]["n"] >= 3 for t in times)
    assert model.kv_caching
    assert model.cache is None


def test_a_step_is_timed_a_few_times_at_least_and_a_quick_one_until_it_took_long_enough_or_often_enough() -> None:
    slow, quick = ENOUGH, ENOUGH / 1e6
    model = tiny_model()
    assert [_more([slow] * n, model) for n in range(LEAST + 2)] == [True] * LEAST + [False] * 2
    assert _more([quick] * (MOST - 1), model)
    assert not _more([quick] * MOST, model)


@pytest.mark.parametrize("kind", ["concat", "paged", "int8", "int4", "window:9+2"])
def test_every_kind_has_the_sizes_that_it_predicts(kind: str) -> None:
    sizes = cache_sizes(tiny_model(dtype=torch.float32, kv_cache=kind), [1, 8, 24])
    assert [entry["measured"] for entry in sizes] == [entry["predicted"] for entry in sizes]


def test_cache_sizes_are_as_predicted() -> None:
    sizes = cache_sizes(tiny_model(dtype=torch.float32), [1, 8, 24])
    assert [entry["measured"] for entry in sizes] == [entry["predicted"] for entry in sizes]
    assert sizes[1]["measured"] == 2 * 2 * 2 * 8 * 8 * 4  # two of two layers, two heads of 8, 8 positions, 4 bytes


def test_the_grid_goes_up_to_its_end() -> None:
    assert context_lengths(1) == [1]
    assert context_lengths(5) == [2, 3, 4, 5]
    assert context_lengths(300)[-2:] == [256, 300]


def test_fits_find_the_line_and_the_exponent_that_made_the_numbers() -> None:
    line = fit("token", True, [(n, 3.0 + 0.5 * n) for n in (16, 32, 64, 128)])
    assert (line["base"], line["slope"]) == (pytest.approx(3.0), pytest.approx(0.5))
    power = fit("text", False, [(n, 0.1 * n**2) for n in (16, 32, 64, 128)])
    assert power["exponent"] == pytest.approx(2.0)
    assert line["r_squared"] == pytest.approx(1.0)
    assert 0.8 < power["r_squared"] < 0.99
    assert line["lengths"] == 4


CONTEXTS = (16, 64, 256, 1024, 2048)


def lines(noise: float = 0.0) -> list[StepTimes]:
    """Return steps of 25 ms + 2 us a position with the cache, and of 10 ms + 900 us a token without."""
    dice = random.Random(1)
    cached = [step(n, True, (0.025 + 2e-6 * n) * (1 + dice.gauss(0, noise))) for n in CONTEXTS]
    return cached + [step(n, False, (0.010 + 9e-4 * n) * (1 + dice.gauss(0, noise))) for n in CONTEXTS]


def token_fits(steps: Sequence[StepTimes], **options: float) -> list[Fit]:
    return [found for found in fits(steps, **options) if found["of"] == "token"]


def test_a_tokens_time_is_fitted_beside_the_slope_that_the_bytes_of_the_cache_predict() -> None:
    cached, uncached = token_fits(lines(), predicted_slope=1.6e-6)
    assert (cached["base"], cached["slope"]) == (pytest.approx(0.025), pytest.approx(2e-6))
    assert (uncached["base"], uncached["slope"]) == (pytest.approx(0.010), pytest.approx(9e-4))
    assert (cached["predicted_slope"], uncached["predicted_slope"]) == (1.6e-6, None)
    assert fit_words(cached) == (
        "A token with the cache takes 25.00 ms + 2,000 us per 1000 tokens of context (R^2 1.000, 5 contexts); reading "
        "their keys and values at the measured bandwidth would take 1,600 us, so the slope is 1.25x what the bytes "
        "predict."
    )
    assert fit_words(uncached) == (
        "A token without the cache takes 10.00 ms + 900,000 us per 1000 tokens of context (R^2 1.000, 5 contexts)."
    )


def test_noise_takes_little_from_a_steep_line_and_shows_in_what_a_flat_one_explains() -> None:
    cached, uncached = token_fits(lines(noise=0.03))
    assert uncached["slope"] == pytest.approx(9e-4, rel=0.1)
    assert uncached["r_squared"] > 0.99
    assert cached["slope"] == pytest.approx(2e-6, rel=0.5)
    assert 0 <= cached["r_squared"] < 0.99


def test_times_that_do_not_grow_have_a_line_without_a_slope() -> None:
    cached = token_fits([step(n, True, 0.5) for n in CONTEXTS])[0]
    assert (cached["slope"], cached["base"], cached["r_squared"]) == (pytest.approx(0), pytest.approx(0.5), 1.0)


def test_fewer_than_three_lengths_are_not_fitted_and_the_reading_says_so() -> None:
    report = new_report("sweep", [])
    steps = [one for one in lines() if one["context"] < 100]
    report["sweep"] = {"growth": [], "cache": [], "contexts": steps, "batches": [], "fits": fits(steps)}
    assert report["sweep"]["fits"] == []
    assert findings(report) == ["How the time grows was not fitted: a line takes 3 contexts, and there are 2."]
    report["sweep"] |= {"contexts": lines(), "fits": fits(lines(), predicted_slope=1.6e-6)}
    assert [sentence[:24] for sentence in findings(report)] == [
        "A token with the cache t",
        "A token without the cach",
        "Over the longer half of ",
    ]


def test_the_growth_of_the_speed_up_is_read_out_of_the_longest_generation() -> None:
    on, off = new_record(Cell(output_len=20)), new_record(Cell(output_len=20, kv_caching=False))
    on["samples"], off["samples"] = [sample(1.0, [1.0] * 19)], [sample(1.0, [2.0] * 19)]
    entries = growth(on, off, (10, 20, 50))
    assert [entry["generated"] for entry in entries] == [10, 20]
    assert entries[0]["cached_seconds"]["median"] == 10.0
    assert entries[0]["uncached_seconds"]["median"] == 19.0
    assert entries[1]["speedup"] == pytest.approx(39 / 20)
