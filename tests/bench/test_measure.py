"""A benchmark measures what it says: counts and bytes are exact, and every fault that is planted shows."""

import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from fakes import NATIVE_SIZES, Bytes, write_checkpoint
from jobs_here import CEILINGS
from native import needs_a_compiler
from test_caches import judged, on_little_text
from tiny import tiny_args, tiny_model

from llama import costs
from llama.bench.cell import Cell, read_engine
from llama.bench.run import engines, memory, worker
from llama.bench.run.engines import DeviceClock, LlamaEngine, Run
from llama.bench.run.measure import _largest_forwards, make_prompts, measure
from llama.bench.run.memory_ledger import predict, reserved_cache_bytes
from llama.bench.run.models import Opened, find_model, make_cell, random_model
from llama.bench.run.step_times import ENOUGH, LEAST, MOST, _more, _write_random, context_lengths, step_times
from llama.bench.schema import Row
from llama.fast import native_build
from llama.fast.graph_runner import GraphRunner
from llama.fast.native_runner import NativeRunner
from llama.kv_cache import StaticCache
from llama.quant.layers import quantized_weights
from llama.quant.packed import PackedWeight
from llama.speculation import Eager, Width
from llama.tokenizer import MissingTokenizer

CPU = torch.device("cpu")
CELL = Cell(batch_size=3, input_len=7, output_len=5)
SLOW = pytest.mark.slow
MODES = pytest.mark.parametrize("kv_caching", [True, False], ids=["on", "off"])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is no part of a claim here: a second of looking for the machine's ceilings."""
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: CEILINGS)


def engine_for(cell: Cell, **changes: Any) -> LlamaEngine:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[cell.dtype]
    model = tiny_model(tiny_args(kv_cache=cell.kv_cache, **changes), dtype=dtype)
    return LlamaEngine(model, Bytes(), logits=cell.logits, speculate=cell.speculate)


def measured(cell: Cell, **changes: Any) -> list[Row]:
    return run_once(cell, engine_for(cell, **changes))


def run_once(cell: Cell, engine: LlamaEngine, *, trace: bool = True) -> list[Row]:
    return measure(cell, Opened(engine, {"weights": "checkpoint"}), trace=trace)


def line(rows: Sequence[Row], name: str) -> tuple[int, int | None]:
    (found,) = [row for row in rows if row["figures"] == "memory" and row["name"] == name]
    return found["predicted_bytes"], found["measured_bytes"]


def violated(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("status") == "violated"]


def notes(rows: Sequence[Row]) -> str:
    """Return the notes of the ledger."""
    return "; ".join(row["note"] for row in rows if row["figures"] == "memory" and "note" in row)


@MODES
def test_a_cell_counts_its_tokens_steps_and_bytes_exactly(kv_caching: bool) -> None:
    rows = measured(CELL.but(kv_caching=kv_caching))
    assert [len(row) for row in rows[0]["ids"]] == [5, 5, 5]
    (seconds,), (first,), (steps,) = (rows[0][name] for name in ("seconds", "first_token_seconds", "step_seconds"))
    assert len(steps) == 4
    assert seconds == pytest.approx(first + sum(steps))
    assert rows[0]["token_forwards"] == 3 * (11 if kv_caching else 7 + 8 + 9 + 10 + 11)
    assert violated(rows) == []
    assert {row["status"] for row in rows if row["figures"] == "check"} == {"ok"}


@pytest.mark.parametrize("kv_cache", ["static", "concat"])
def test_a_cell_with_guesses_counts_them_and_its_later_tokens_share_the_time_of_its_calls(
    kv_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Width, "cut", Eager.cut)
    cell = CELL.but(output_len=40, kv_cache=kv_cache)
    plain, *_ = measured(cell, max_seq_len=64)
    row, *others = measured(cell.but(speculate="lookup:3"), max_seq_len=64)
    assert row["ids"] == plain["ids"]
    (seconds,), (first,), (later,) = (row[name] for name in ("seconds", "first_token_seconds", "step_seconds"))
    assert len(set(later)) == 1
    assert len(later) == 39
    assert seconds == pytest.approx(first + sum(later))
    (proposed,), (accepted,) = row["proposed"], row["accepted"]
    assert proposed > accepted > 0
    assert row["token_forwards"] == plain["token_forwards"] + proposed - accepted
    assert row["cache_bytes"] > 0
    assert "step_flops" not in row
    assert violated(others) == []
    details = {check["name"]: check["detail"] for check in others if check["figures"] == "check"}
    assert details["tokens"] == f"3 x 7 in, 3 x 40 out, {proposed} guessed tokens fed, {accepted} of them right"
    assert details["cache"].startswith("asked for on; 1 to 4 fed per row and step")


def test_a_cell_in_exact_mode_says_so(tmp_path: Path) -> None:
    cell = Cell(model=str(write_checkpoint(tmp_path / "tiny")), input_len=5, output_len=3, exact=True)
    engine = LlamaEngine(find_model(cell).build(), Bytes())
    rows = run_once(cell, engine)
    assert engine.model.exact
    assert rows[0]["path"] == "exact"
    assert violated(rows) == []
    assert "exact mode pads and copies" in notes(rows)


@needs_a_compiler
@pytest.mark.parametrize("quantize", [pytest.param(None, marks=SLOW), "int8"])
def test_a_cell_in_the_exact_mode_of_native_code_says_so(tmp_path: Path, quantize: str | None) -> None:
    cell = Cell(
        model=str(write_checkpoint(tmp_path / "tiny", **NATIVE_SIZES)),
        input_len=5,
        output_len=3,
        exact=True,
        fast=True,
        quantize=quantize,
    )
    rows = worker.run_cell(cell, trace=True)["rows"]
    assert rows[0]["path"] == ("native, exact" if quantize is None else "native, int8 weights, exact")
    assert violated(rows) == []


@pytest.fixture(scope="module")
def native_sized(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("native") / "tiny", **NATIVE_SIZES))


def built(cell: Cell) -> LlamaEngine:
    source = find_model(cell)
    return LlamaEngine(source.build(), source.tokenizer, logits=cell.logits, speculate=cell.speculate)


@needs_a_compiler
@MODES
@pytest.mark.parametrize("quantize", [pytest.param(None, marks=SLOW), "int8"])
def test_a_fast_cell_reports_that_native_code_ran(native_sized: str, kv_caching: bool, quantize: str | None) -> None:
    cell = CELL.but(model=native_sized, kv_caching=kv_caching, fast=True, quantize=quantize)
    rows = run_once(cell, built(cell))
    assert rows[0]["path"] == ("native, int8 weights" if quantize else "native")
    assert violated(rows) == []
    assert next(row["detail"] for row in rows if row.get("name") == "fast step").startswith(
        "asked for; 5 of 5 forwards"
    )
    assert "the fast step takes a workspace" in notes(rows)
    plain = run_once(cell.but(fast=False), built(cell.but(fast=False)))
    assert plain[0]["path"] == ("plain, int8 weights" if quantize else "plain")
    assert [line(rows, name) for name in ("weights", "KV cache")] == [
        line(plain, name) for name in ("weights", "KV cache")
    ]


@needs_a_compiler
def test_a_fast_cell_counts_the_guesses_of_native_code(native_sized: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Width, "cut", Eager.cut)
    cell = CELL.but(model=native_sized, fast=True, quantize="int8", text="abab" * 5, input_len=21, output_len=9)
    plain, guessed = (
        run_once(one, built(one), trace=False) for one in (cell, cell.but(speculate="lookup", batch_size=2))
    )
    assert [row["path"] for row in (plain[0], guessed[0])] == ["native, int8 weights"] * 2
    assert guessed[0]["ids"] == plain[0]["ids"][:2]
    assert guessed[0]["proposed"] > [0]
    assert violated(guessed) == []


@pytest.mark.slow
@needs_a_compiler
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
    rows = run_once(cell, engine)
    assert rows[0]["path"] == "native"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()} == compiled


def test_a_fast_cell_without_a_compiler_is_plain_and_says_that_fast_was_asked_for(
    native_sized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)  # compiles nothing, and is found without a PATH
    cell = CELL.but(model=native_sized, fast=True)
    rows = worker.run_cell(cell, trace=False)["rows"]
    assert rows[0]["path"] == "plain"
    (point,) = violated(rows)
    assert point["detail"] == "asked for; 0 of 5 forwards ran by it, the others by the plain path"
    assert any(note.startswith(f"fast: {sys.executable} failed") for note in rows[0]["notes"])


@needs_a_compiler
def test_a_cache_that_observes_its_prompt_has_native_steps(native_sized: str) -> None:
    cell = CELL.but(model=native_sized, fast=True, kv_cache="snapkv:0.5")
    rows = run_once(cell, built(cell))
    assert rows[0]["path"] == "native and plain"
    assert violated(rows) == []
    detail = next(row["detail"] for row in rows if row.get("name") == "fast step")
    assert detail == "asked for; 4 of 5 forwards ran by it, the prompt by the plain path"


@needs_a_compiler
def test_a_cache_without_native_code_runs_on_the_plain_path(native_sized: str) -> None:
    cell = CELL.but(model=native_sized, fast=True, kv_cache="concat", quantize="int8")
    rows = worker.run_cell(cell, trace=False)["rows"]
    assert rows[0]["path"] == "plain, int8 weights"
    assert [row["name"] for row in violated(rows)] == ["fast step"]
    assert any("kv_cache='concat' has no fast step" in note for note in rows[0]["notes"])


@needs_a_compiler
def test_the_path_is_named_on_which_a_kind_of_cache_was_judged(
    native_sized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_little_text(monkeypatch)
    cell = Cell(input_len=64, output_len=1, model=native_sized, threads=1, fast=True)
    for kind, path in (("static", "native"), ("concat", "plain")):
        own, row, *_ = judged(cell.but(kv_cache=kind))
        assert own["path"] == row["path"] == path
        assert row["mean_kl"] < 1e-6
        assert worker.JOBS["cache_costs"](cell.but(kv_cache=kind), contexts=[32])["rows"][0]["path"] == path


def test_steps_that_run_ahead_of_the_loop_are_seen_too() -> None:
    """As a GPU's do, which bypass the hooks on the model. They do not run for all logits, nor without a cache."""
    cell = CELL.but(fast=True)
    plain, engine = engine_for(cell), engine_for(cell)
    engine.model.runner = GraphRunner()
    prompts = make_prompts(cell, engine)
    expected, run = (one.run(prompts, 5, kv_caching=True) for one in (plain, engine))
    assert run.ids == expected.ids
    assert run.fed == expected.fed
    assert len(run.token_times) == 5
    assert sorted([run.started, *run.token_times]) == [run.started, *run.token_times]
    path = "CUDA graphs of plain kernels, plain prompts"
    assert (run.path, run.fast_forwards, run.fast_wanted) == (path, 4, 4)
    rows = run_once(cell, engine, trace=False)
    assert not violated(rows)
    assert "asked for; 4 of 5 forwards ran by it, the prompt by the plain path" in str(rows)
    off = engine.run(prompts, 5, kv_caching=False)
    assert (off.path, off.fast_forwards, off.fast_wanted) == ("plain", 0, 0)
    engine.logits = "all"
    assert engine.run(prompts, 5, kv_caching=True).fast_forwards == 0


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


@needs_a_compiler
def test_a_partly_native_run_names_both_paths(native_sized: str) -> None:
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
    rows = run_once(cell, engine, trace=False)  # two forwards warm up, and five are measured
    assert rows[0]["path"] == "native"
    engine.model.runner = Tiring(step._folder)
    engine.model.runner.forwards = 3
    rows = run_once(cell, engine, trace=False)
    assert rows[0]["path"] == "native and plain"
    (point,) = violated(rows)
    assert point["detail"] == "asked for; 2 of 5 forwards ran by it, the others by the plain path"


@pytest.mark.parametrize("tied_head", [True, False], ids=["tied", "untied"])
def test_the_ledger_of_int8_weights_is_that_of_the_tensors(tied_head: bool) -> None:
    sizes = {"dim": 64, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 96, "vocab_size": 50}
    args = tiny_args(**sizes, tied_head=tied_head)
    cell = CELL.but(quantize="int8", dtype="bf16")
    model = random_model(args, dtype=torch.bfloat16, device=CPU, quantize="int8")
    rows = run_once(cell, LlamaEngine(model, Bytes()))
    held = costs.weights_bytes(args, itemsize=2, quantize="int8")
    head = 0 if tied_head else 64 * 64 * 9 // 8  # 50 words in panels of 16
    assert line(rows, "weights") == (held - head, held - head)
    assert line(rows, "tied head" if tied_head else "head") == (head, head)
    assert rows[0]["weights_bytes"] == held
    assert rows[0]["step_read_bytes"] == costs.step_bytes(args, rows=3, context=9, itemsize=2, quantize="int8")
    assert any(note.startswith("int8 weights: rounded") for note in rows[0]["notes"])


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
def test_the_ledger_equals_the_manual_sum_and_the_tensors(kv_caching: bool, logits: str) -> None:
    """Two layers of 12,352 numbers, 4 query and 2 KV heads of 8, 40 tokens, a head of its own; 3 rows of 7 + 5."""
    rows = measured(CELL.but(kv_caching=kv_caching, logits=logits))
    assert line(rows, "weights") == (104_064, 104_064)  # (2 x 12,352 + 32 + 40 x 32) x 4
    assert line(rows, "head") == (5_120, 5_120)  # 40 x 32 x 4
    cache = 9_216 if kv_caching else 0  # 2 x 2 layers x 2 heads x 8 x 3 rows x 12 positions x 4
    assert line(rows, "KV cache") == (cache, cache)
    scored = {("last", True): 1, ("last", False): 1, ("all", True): 7, ("all", False): 11}[logits, kv_caching]
    assert line(rows, "logits") == (480 * scored, 480 * scored)  # 3 rows x 40 x 4
    assert rows[0]["cache_bytes"] == cache
    assert rows[0]["weights_bytes"] == 109_184


def test_resident_memory_is_a_line_beside_the_tensors() -> None:
    rows = measure(CELL, Opened(engine_for(CELL), {"weights": "checkpoint"}, resident_before=1_000_000))
    (resident,) = [row for row in rows if row.get("name") == "resident"]
    assert (resident["before_bytes"], resident["measured_bytes"]) == (1_000_000, rows[0]["resident_peak_bytes"][0])
    assert "counts" not in resident


@pytest.mark.parametrize(
    ("kv_caching", "logits", "dtype", "tied_head"),
    [
        (True, "last", "fp32", True),
        (True, "all", "bf16", False),
        (False, "all", "fp32", False),
        pytest.param(False, "last", "bf16", True, marks=SLOW),
        pytest.param(False, "all", "bf16", True, marks=SLOW),
    ],
)
def test_the_predicted_peak_is_that_of_pytorchs_allocator(
    kv_caching: bool, logits: str, dtype: str, tied_head: bool
) -> None:
    """To 2 %: masks and angles, which are not predicted, are small already at these sizes."""
    cell = Cell(batch_size=4, input_len=100, output_len=4, kv_caching=kv_caching, logits=logits, dtype=dtype)
    sizes = {"dim": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 256, "max_seq_len": 128}
    rows = measured(cell, tied_head=tied_head, **sizes)
    predicted, peak = line(rows, "peak")
    assert peak == pytest.approx(predicted, rel=0.02)
    assert rows[0]["tensor_peak_bytes"] == [peak]
    assert sum(row["predicted_bytes"] for row in rows if row.get("counts")) == predicted


def test_the_peak_of_a_gpu_has_the_memory_of_recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays use it, and PyTorch counts it as free."""
    pools = ((0, (0, 0), 10), (0, (0, 3), 30), (1, (0, 4), 50))
    names = "device", "segment_pool_id", "allocated_size"
    segments = [{"total_size": 100, **dict(zip(names, pool, strict=True))} for pool in pools]
    made = {"synchronize": None, "max_memory_allocated": 1000, "memory_snapshot": segments, "current_device": 1}
    for name, result in made.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    assert memory.peaks(torch.device("cuda:0"))["tensor_peak_bytes"] == 1070
    assert memory.peaks(torch.device("cuda"))["tensor_peak_bytes"] == 1050


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@MODES
@pytest.mark.parametrize("logits", ["last", "all"])
def test_the_predicted_peak_is_that_of_cuda(kv_caching: bool, logits: Literal["last", "all"]) -> None:
    """To 2 %, at a size beside which what is not predicted is small."""
    args = tiny_args(dim=2048, n_layers=4, n_heads=32, n_kv_heads=8, vocab_size=256, max_seq_len=512, tied_head=True)
    model = random_model(args, dtype=torch.bfloat16, device=torch.device("cuda"))
    sizes = {"batch_size": 16, "input_len": 256, "output_len": 4}
    cell = Cell(**sizes, kv_caching=kv_caching, logits=logits, dtype="bf16", device="cuda")
    rows = run_once(cell, LlamaEngine(model, Bytes(), logits=logits))
    predicted, peak = line(rows, "peak")
    assert peak == pytest.approx(predicted, rel=0.02)


@MODES
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_the_predicted_peak_is_that_of_the_allocator_where_the_head_makes_it(kv_caching: bool, dtype: str) -> None:
    """To 2 %, and by a model that is mostly head: its norm's output is still there when the scores stay as they are."""
    cell = Cell(batch_size=16, input_len=100, output_len=3, kv_caching=kv_caching, logits="all", dtype=dtype)
    sizes = {"dim": 64, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 16, "vocab_size": 160}
    args = tiny_args(**sizes, max_seq_len=128)
    assert predict(args, cell).at_head
    rows = measured(cell, **sizes, max_seq_len=128)
    predicted, peak = line(rows, "peak")
    assert peak == pytest.approx(predicted, rel=0.02)
    assert [row["moment"] for row in rows if "moment" in row] == [
        f"at the head of the {'prefill' if kv_caching else 'step'}"
    ]


def test_without_a_trace_a_cell_is_run_once_behind_its_warm_up_and_has_no_ledger() -> None:
    runs: list[int | None] = []

    def count(**options: Any) -> dict[str, Any]:
        runs.append(options["steps"])
        return options

    rows = run_once(CELL, Faulty(count), trace=False)
    assert runs == [2, None]
    assert "tensor_peak_bytes" not in rows[0]
    assert not any(row["figures"] == "memory" for row in rows)
    run_once(CELL, Faulty(count), trace=True)
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
    return {row["name"] for row in violated(run_once(cell, engine))}


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        (the_other_mode, {"cache", "tokens", "warm-up"}),
        (re_encoded, {"tokens", "warm-up"}),
        (shorter_output, {"tokens", "no early end", "no overflow"}),
        (warmed_with_another_shape, {"warm-up"}),
    ],
)
def test_an_engine_that_does_something_else_is_detected(change: Callable[..., Any], checks: set[str]) -> None:
    assert faults_of(Faulty(change)) == checks


def test_a_row_that_ends_at_an_end_of_text_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(CELL)
    whole = engine.model.generate_tokens
    first, _ = whole([[1] * 7] * 3, 5, temperature=0)

    def until_a_stop_id(prompts: Any, *args: Any, **options: Any) -> Any:
        ids, _ = whole(prompts, 5, temperature=0)
        return whole(prompts, *args, stop_ids=[ids[0][3]], **options)

    monkeypatch.setattr(engine.model, "generate_tokens", until_a_stop_id)
    assert first
    assert {"no early end", "tokens"} <= faults_of(engine)


def test_a_cache_that_overflows_silently_is_detected() -> None:
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


def test_a_peak_of_earlier_work_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    if memory.resident_bytes() is None:
        pytest.skip("this system does not tell its resident memory")
    with mmap.mmap(-1, 2**28) as pages:  # the kernel's own: the heap may hold as much that was freed before
        pages[:: mmap.PAGESIZE] = bytes(2**28 // mmap.PAGESIZE)
    monkeypatch.setattr(memory, "reset_peak_resident", lambda: True)  # says so, and does nothing
    assert faults_of(engine_for(CELL)) == {"statistics reset"}


def test_another_sampler_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.GREEDY, "temperature", 50.0)
    assert "same sampler" in faults_of(engine_for(CELL))


def test_a_cell_above_the_models_limit_or_the_memory_is_rejected(native_sized: str) -> None:
    cell = CELL.but(model=native_sized)
    with pytest.raises(ValueError, match="goes past max_seq_len="):
        worker.run_cell(cell.but(input_len=8190), trace=False)
    with pytest.raises(ValueError, match=r"does not fit: weights .*KV cache .* at the peak, and .* are free on cpu"):
        worker.run_cell(cell.but(batch_size=10**9), trace=False)


def test_an_invalid_cell_is_rejected() -> None:
    wrong: list[dict[str, Any]] = [
        *({"batch_size": 0}, {"input_len": -1}, {"output_len": 0}, {"threads": 0}, {"logits": "some"}),
        *({"dtype": "int8"}, {"text": "  "}, {"quantize": "int3"}),
        *({"fast": True, "engine": "llama.cpp"}, {"exact": True, "engine": "transformers"}),
        *({"logits": "all", "engine": "transformers"}, {"speculate": "lookup", "engine": "transformers"}),
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match=str(next(iter(changes)))):
            Cell(**changes)
    assert Cell(ranks=2).name == "batch 1, cache on, 2 ranks"
    with pytest.raises(ValueError, match="transformers is measured in one process; start it without torchrun"):
        Cell(ranks=2, engine="transformers")


def test_an_engine_is_named_with_its_modes() -> None:
    plain = {"engine": "transformers", "fast": False, "quantize": None, "activations": 16}
    assert read_engine("transformers") == plain
    assert read_engine("llama.cpp:int4") == {**plain, "engine": "llama.cpp", "quantize": "int4"}
    assert read_engine("llama:int8:fast") == read_engine("llama:fast:int8")
    assert Cell(**read_engine("llama:fast:int8")).name == "batch 1, cache on, fast, int8 weights"
    assert Cell(**read_engine("llama:int8:a8")).name == "batch 1, cache on, int8 weights, 8-bit activations"
    assert Cell(**read_engine("llama.cpp:stored")).name == "llama.cpp, batch 1, cache on, stored weights"
    assert read_engine("my/own.py:Mine:int8") == {**plain, "engine": "my/own.py:Mine", "quantize": "int8"}
    for words in ("llama:quick", "llama.cpp:", "llama.cpp:Q8_0"):
        with pytest.raises(ValueError, match=r"is no mode; known are fast, int8, int4, stored and a8, as in llama:f"):
            read_engine(words)
    with pytest.raises(ValueError, match="more modes than one cell can"):
        read_engine("llama.cpp:int8:int4")


def test_a_text_is_the_prompt_of_every_row_and_its_length_is_counted(native_sized: str) -> None:
    cell = make_cell(ckpt_dir=native_sized, device="cpu", batch_size=3, text="hello", output_len=5)
    engine = built(cell)
    rows = run_once(cell, engine)
    length = len(engine.encode("hello"))
    assert f"3 x {length} in" in next(row["detail"] for row in rows if row.get("name") == "tokens")
    assert rows[0]["ids"][0] == rows[0]["ids"][1] == rows[0]["ids"][2]
    assert violated(rows) == []


def test_random_weights_are_the_same_in_every_process_and_share_a_tied_head() -> None:
    args = tiny_args(tied_head=True)
    a, b = (random_model(args, dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert a.output.weight is a.tok_embeddings.weight
    assert not a.output.weight.is_meta
    assert LlamaEngine(a, Bytes()).weights_bytes == costs.parameters(args) * 2


@pytest.mark.parametrize(
    "kind",
    [
        "concat",
        "paged:9",
        "int8",
        "window:5+1",
        *(pytest.param(kind, marks=SLOW) for kind in ("paged", "int4", "window")),
    ],
)
def test_the_bytes_of_a_kind_of_cache_are_predicted_exactly(kind: str) -> None:
    cell = CELL.but(kv_cache=kind)
    rows = measured(cell)
    assert rows[0]["cache_bytes"] == reserved_cache_bytes(tiny_args(kv_cache=kind), cell, cell.total_len - 1)
    predicted, held = line(rows, "KV cache")
    assert predicted == reserved_cache_bytes(tiny_args(kv_cache=kind), cell, cell.input_len), (
        "the prefill makes the peak"
    )
    assert held == (rows[0]["cache_bytes"] if predicted == rows[0]["cache_bytes"] else None)
    assert [row["status"] for row in rows if row.get("name") == "no overflow"] == ["ok"]


def test_step_times_leave_the_model_as_it_was() -> None:
    model = tiny_model(dtype=torch.float32)
    for kv_caching in (True, False):
        times = step_times(model, 2, [1, 5, 24], kv_caching=kv_caching)
        assert [(t["batch_size"], t["context"], t["kv_caching"]) for t in times] == [
            (2, n, kv_caching) for n in (1, 5, 24)
        ]
        assert all(len(t["step_seconds"]) >= 3 for t in times)
    assert model.kv_caching
    assert model.cache is None


def test_a_step_is_repeated_until_it_has_run_long_or_often_enough() -> None:
    slow, quick = ENOUGH, ENOUGH / 1e6
    model = tiny_model()
    assert [_more([slow] * n, model) for n in range(LEAST + 2)] == [True] * LEAST + [False] * 2
    assert _more([quick] * (MOST - 1), model)
    assert not _more([quick] * MOST, model)


def test_hooks_that_time_a_run_leave_native_steps_as_they_are() -> None:
    engine, runner = engine_for(CELL), object.__new__(NativeRunner)
    engine.model.runner, runner.watch = runner, None
    with engine._watched(Run(), [], last=1, steps=None):
        assert runner.may_step(engine.model)


def test_the_largest_forwards_without_a_cache_are_the_last_two() -> None:
    seen: list[Any] = []
    engine: Any = SimpleNamespace(run=lambda *given, **how: seen.append((given, how)))
    _largest_forwards(Cell(input_len=2, output_len=4, kv_caching=False), engine, [[1, 2]], [[3, 4, 5, 6]])
    assert seen == [(([[1, 2, 3, 4]], 2), {"kv_caching": False})]


def test_random_keys_are_dropped_where_their_prompt_ends() -> None:
    model = tiny_model(max_seq_len=64)
    cache = model.new_cache("snapkv:8")
    _write_random(model, cache, 40)
    assert [set(layer.state()["counts"].flatten().tolist()) for layer in cache.layers] == [{8}] * model.args.n_layers


def test_the_grid_goes_up_to_its_end() -> None:
    assert context_lengths(1) == [1]
    assert context_lengths(5) == [2, 3, 4, 5]
    assert context_lengths(300) == [*sorted(factor << n for factor in (2, 3) for n in range(8))[:-1], 300]


def test_random_ids_are_measured_without_a_tokenizer() -> None:
    engine = LlamaEngine(tiny_model(), MissingTokenizer("it lacks one"))
    assert len(engine.run([[1, 2]], 3, kv_caching=True).ids[0]) == 3
    assert engine.decode([1]) == ""
    with pytest.raises(ValueError, match="it lacks one; text needs it"):
        engine.encode("a")
