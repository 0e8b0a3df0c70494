"""A benchmark measures what it says: counts and bytes are exact, and every fault that is planted shows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from fakes import Bytes, write_checkpoint
from oracles import tiny_args, tiny_model

from llama import costs
from llama.bench import engines, memory
from llama.bench.cell import Cell
from llama.bench.engines import LlamaEngine, Run
from llama.bench.gather import first_divergence, gathered
from llama.bench.grids import stands_apart
from llama.bench.measure import measure
from llama.bench.models import find_model, random_model
from llama.bench.probe import cache_sizes, crossover, grid, step_times
from llama.bench.reading import fit, growth
from llama.bench.record import Ceilings, CellRecord, Sample, StepTimes, new_record
from llama.bench.spread import bound_by, limits_of, spread, summarise
from llama.bench.validity import notes, violated
from llama.kv_cache import StaticCache

CPU = torch.device("cpu")
CELL = Cell(batch_size=3, input_len=7, output_len=5)
MODES = pytest.mark.parametrize("kv_caching", [True, False], ids=["on", "off"])


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

        def update(self, start_pos: Any, xk: Any, xv: Any) -> Any:
            if self.keys is not None and start_pos + xk.shape[1] > self.keys.shape[1]:
                return self.keys, self.values
            return super().update(start_pos, xk, xv)

    cell = CELL.but(kv_cache="dropping")
    assert faults_of(engine_for(cell), cell) == {"no overflow"}


def test_a_peak_of_earlier_work_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    if memory.resident_bytes() is None:
        pytest.skip("this system does not tell its resident memory")
    torch.ones(2**26)  # 256 MB, touched and given back
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
    ],
    ids=str,
)
def test_a_cell_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        Cell(**wrong)


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
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"n": 5, "median": 3.0, "p10": 1.4, "p90": 4.6}
    assert spread([2.0]) == {"n": 1, "median": 2.0, "p10": 2.0, "p90": 2.0}


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
    ceilings: Ceilings = {"read_bytes_per_second": 1e9, "flops_per_second": 1e9, "dtype": "fp32"}
    limits = limits_of(record["work"], summarise(CELL, record["samples"]), ceilings)
    middle = sorted(record["samples"][0]["step_seconds"])[1:3]
    assert limits["step_bandwidth_share"] == pytest.approx(record["work"]["step_bytes"] / 1e9 / (sum(middle) / 2))


def test_repetitions_are_gathered_and_a_violation_in_one_of_them_stays() -> None:
    good, bad = measured(CELL), measured(CELL)
    bad["points"][0] = {**bad["points"][0], "status": "violated"}
    for first, second in [(good, bad), (bad, good)]:
        both = gathered(gathered(new_record(CELL), first), second)
        assert [point["name"] for point in violated(both["points"])] == ["cache"]
        assert len(both["samples"]) == 2
    other = {**good, "ids": [[0] * 5] * 3}
    assert "repetitions made different tokens" in gathered(good, other)["notes"]


def test_the_first_divergence_is_the_earliest_token_of_any_row() -> None:
    assert first_divergence([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) is None
    found = first_divergence([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 8, 6]])
    assert found == {"row": 1, "token": 1, "cached_id": 5, "uncached_id": 8, "margin": None}


def test_notes_say_what_a_reader_should_know_and_no_more() -> None:
    plain = Cell(text="a text")
    assert notes(plain, other_load=0.1, weights="checkpoint") == []
    words = " ".join(notes(Cell(dtype="bf16", logits="all"), other_load=1.5, weights="random"))
    assert all(
        part in words for part in ("random weights", "random token ids", "low precision", "all positions", "1.5")
    )


def step(context: int, kv_caching: bool, seconds: float) -> StepTimes:
    return {"batch_size": 1, "context": context, "kv_caching": kv_caching, "seconds": spread([seconds])}


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
    assert model.caches[0].nbytes == 0


def test_cache_sizes_are_as_predicted() -> None:
    sizes = cache_sizes(tiny_model(dtype=torch.float32), [1, 8, 24])
    assert [entry["measured"] for entry in sizes] == [entry["predicted"] for entry in sizes]
    assert sizes[1]["measured"] == 2 * 2 * 2 * 8 * 8 * 4  # two of two layers, two heads of 8, 8 positions, 4 bytes


def test_the_grid_goes_up_to_its_end() -> None:
    assert grid(1) == [1]
    assert grid(5) == [2, 3, 4, 5]
    assert grid(300)[-2:] == [256, 300]


def test_fits_find_the_line_and_the_exponent_that_made_the_numbers() -> None:
    line = fit("token", True, [(n, 3.0 + 0.5 * n) for n in (16, 32, 64, 128)])
    assert (line["base"], line["slope"]) == (pytest.approx(3.0), pytest.approx(0.5))
    power = fit("text", False, [(n, 0.1 * n**2) for n in (16, 32, 64, 128)])
    assert power["exponent"] == pytest.approx(2.0)


def test_the_growth_of_the_speed_up_is_read_out_of_the_longest_generation() -> None:
    on, off = new_record(Cell(output_len=20)), new_record(Cell(output_len=20, kv_caching=False))
    on["samples"], off["samples"] = [sample(1.0, [1.0] * 19)], [sample(1.0, [2.0] * 19)]
    entries = growth(on, off, (10, 20, 50))
    assert [entry["generated"] for entry in entries] == [10, 20]
    assert entries[0]["cached_seconds"]["median"] == 10.0
    assert entries[0]["uncached_seconds"]["median"] == 19.0
    assert entries[1]["speedup"] == pytest.approx(39 / 20)
