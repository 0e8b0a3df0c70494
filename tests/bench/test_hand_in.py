"""The report that is handed in: the result first, every cell measured or predicted with a range, and the code."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_reports import hand_in_report, only_cell, predicted, table_report
from fakes import write_checkpoint
from jobs_here import Here, jobs_here, run_of

from llama import cli
from llama.bench import plan, presets
from llama.bench.cell import Cell
from llama.bench.report.contents import machine_line
from llama.bench.report.derived import ratio_range, saved, scatter, seconds_of
from llama.bench.report.hand_in import code_tables, published_table
from llama.bench.report.page import report_page
from llama.bench.report.plots.pictures import figures
from llama.bench.report.sentences import findings, headline
from llama.bench.report.text import report_csv, report_markdown
from llama.bench.run import worker
from llama.bench.run.engines import LlamaEngine
from llama.bench.run.jobs import JobDied
from llama.bench.schema import Report, cell_row, rows_of
from llama.cli import benchmark_inference as script

ROOT = Path(__file__).parents[2]


def noisy_report() -> Report:
    """Return the report with steps that took up to twice as long as others."""
    report = hand_in_report()
    row = cell_row(report, 0)
    row["step_seconds"] = [[one * (1 + n % 2) for n, one in enumerate(row["step_seconds"][0])]]
    return report


def test_numbers_come_first_then_the_table_the_machine_and_the_sentences() -> None:
    report = hand_in_report()
    report["reading"] = findings(report)
    places = ["7.4x faster", "Every cell", "4 of 6 cells are predicted", "Time: at batch 1", "Memory: with the cache"]
    places += ["When not to cache:", "Four texts", "The lines of code", "Beside the published", "Where and how"]
    for shown in (report_markdown(report), report_page(report, {})):
        found = [shown.index(words) for words in places]
        assert found == sorted(found)
    page = report_page(report, {})
    head, _, rest = page.partition('<p class="machine">')
    assert "<details" not in head
    assert "VIOLATED" not in head
    for name in ("Memory and work of each cell", "Validity", "Where and how"):
        assert f"<details>\n<summary><h2>{name}" in rest


def test_the_three_sentences_have_the_figures_of_this_machine() -> None:
    time, memory, when = findings(hand_in_report())
    assert time.startswith("Time: at batch 1 the job is 7.4 times faster with the cache, 1.02 s instead of 7.5")
    assert "287 instead of 8,688 tokens go through the model, 30 times less work, but each step must read" in time
    assert (
        "the peak is 13 MB higher at batch 1, 101 MB higher at batch 8 (predicted) and 202 MB higher at batch 16"
        in memory
    )
    assert ". The cache stores 46,080 bytes for each token of each row" in memory
    assert "The first token takes 0.21" in when
    bare = only_cell(only_cell(hand_in_report(), 0), 1)
    assert findings(bare)[0].startswith("Time: at batch 8 the job is predicted to be 21 times faster (12 to 38) with")
    assert headline(bare)[0][0] == "~12 to 38x faster"
    assert len(headline(bare)) == 2, "no tokens were compared"
    bare["rows"] += rows_of(hand_in_report(), "text")
    assert headline(bare)[2] == ("other tokens, of 3", "with the cache and without")
    assert headline(only_cell(only_cell(bare, 2), 4)) == []


def test_a_report_that_was_interrupted_or_lacks_figures_is_written_and_claims_no_more_than_it_has() -> None:
    report = hand_in_report()
    report["rows"] = [row for row in report["rows"] if row["figures"] != "peak" or row["cell"] == 0]
    assert [row[0] for row in published_table(report).rows] == ["1", "1"], "the peaks of batch 1, which comes first"
    for row in rows_of(report, "cell"):
        row["tensor_peak_bytes"] = None  # as on a device that counts none
    assert findings(report)[1].startswith("Memory: the cache stores 46,080 bytes")
    half = hand_in_report()
    half["rows"] = [row for row in half["rows"] if row["figures"] != "comparison"]
    predicted(half, 1)
    assert headline(half)[0][0].startswith("~")
    assert saved(half)[0]["n"] == "predicted"
    predicted(half, 0)
    for place in (1, 3):
        predicted(half, place)
    assert "exact" not in machine_line(half), "nothing was measured"
    assert machine_line(half).startswith("No cell was measured; 6 of 6 cells are predicted (~)")
    cell_row(half, 5)["seconds"] = None
    assert "0.00" not in " ".join(published_table(half).notes)


def test_a_predicted_time_has_a_range_in_table_csv_and_picture() -> None:
    report = hand_in_report()
    row = cell_row(report, 2)
    low, middle, high = (f"{row['seconds'][0] * by:.2f}" for by in (1 / 1.5, 1, 1.5))
    assert f"~{middle} ({low}-{high})" in report_markdown(report)
    assert ",1.5," in report_csv(report).splitlines()[3]
    assert list(figures(report)) == ["time", "memory"]


def test_the_scatter_is_that_of_repetitions_and_of_cached_steps() -> None:
    assert scatter(hand_in_report()) < 1.1
    assert 1.9 < scatter(noisy_report()) < 2.1
    report = table_report([{"n": 3}])
    cell_row(report, 0)["seconds"] = [1.0, 1.0, 3.0]
    assert 2.2 < scatter(report) < 3


def test_the_range_of_a_ratio_adds_independent_errors_and_is_left_out_if_it_is_small() -> None:
    def about(median: float, off_by: float) -> Any:
        return {"n": 1, "median": median, "p10": median / off_by, "p90": median * off_by, "p99": 0.0}

    assert ratio_range(about(8.0, 1.1), about(1.0, 1.1)) is None
    found = ratio_range(about(8.0, 2.0), about(1.0, 1.0))
    assert found == pytest.approx((4.0, 16.0))
    assert ratio_range(about(8.0, 2.0), about(1.0, 2.0)) == pytest.approx((8 / 2**2**0.5, 8 * 2**2**0.5))


def test_a_wide_ratio_says_so_in_the_number_the_sentence_the_table_and_the_picture() -> None:
    report = noisy_report()
    pair = saved(report)[0]
    low, high = pair["times_faster_range"]
    assert low < pair["times_faster"] < high
    views = pair["on_view"], pair["off_view"]
    assert [one["p90"] / one["p10"] for view in views if (one := seconds_of(view, 2.0))] == pytest.approx([2, 2])
    assert headline(report)[0][0] == f"{low:.2g} to {high:.2g}x faster"
    assert f"({low:.2g} to {high:.2g})" in findings(report)[0]
    assert f"x ({low:.1f}x-{high:.1f}x)" in report_markdown(report)
    written = [text.get_text() for text in figures(report)["time"].axes[1].texts]
    assert written[0].endswith(f"x ({low:.2g}-{high:.2g})")
    assert pair["times_faster_range"] != saved(hand_in_report())[0]["times_faster_range"]


def test_the_line_about_the_machine_is_one_sentence() -> None:
    report = noisy_report()
    report["rows"].append({"figures": "check", "cell": 0, "name": "other work", "status": "noisy", "detail": "busy"})
    words = "memory and tokens are exact; 4 of 6 cells are predicted (~)."
    report["rows"][0]["other_load_cores"] = [0.4, None, 1.8]
    busy = "Measured on a busy machine, beside other work on up to 1.80 of 2 cores"
    assert machine_line(report) == f"{busy}: the times are not those of an idle one; {words}"
    report["rows"][-1]["status"] = "ok"
    off_by = r"Measured on an idle machine: times may be off by 4\d%; "
    assert re.fullmatch(f"{off_by}{re.escape(words)}", machine_line(report))
    assert machine_line(table_report([{}])).startswith("The load of the machine was not observed; memory")
    assert machine_line({**hand_in_report(), "rows": [*hand_in_report()["rows"], report["rows"][-1]]}) == (
        f"Measured on an idle machine; {words}"
    )


def test_texts_stand_side_by_side_with_their_difference() -> None:
    shown = report_markdown(hand_in_report())
    assert "| A *list*: - one | two | two | identical, 1 tokens |" in shown
    assert "| Two | is less | is more | from character 5 on |" in shown


def test_the_lines_of_code_are_those_of_the_sources() -> None:
    shown = report_markdown(hand_in_report())
    for table, file in zip(code_tables(), ("model.py", "generation.py"), strict=True):
        lines = table.code.splitlines()
        source = (ROOT / "llama" / file).read_text("utf-8")
        indent = re.search(rf"^( *){re.escape(lines[0])}$", source, re.MULTILINE)
        assert indent is not None
        assert "\n".join(indent[1] + line for line in lines) in source
        assert f"```python\n{table.code}\n```" in shown
    assert [len(table.code.splitlines()) for table in code_tables()] == [9, 1]


def test_the_published_peaks_are_explained_by_logits_and_the_difference_is_shown_here() -> None:
    table = published_table(hand_in_report())
    assert [row[:2] for row in table.rows] == [[str(batch), mode] for batch in (1, 8, 16) for mode in ("on", "off")]
    for row in table.rows:
        published, computed = (float(text.replace(",", "")) for text in row[2:4])
        assert computed == pytest.approx(published, rel=0.005)
    assert [row[2] for row in table.rows] == ["3,071.57", "3,230", "4,495", "5,755", "6,133", "8,641"]
    assert [row[-1] for row in table.rows] == ["600.00", "650.00", "~600.00", "~650.00", "~600.00", "~650.00"]
    assert table.notes[1].endswith("here 1.02 to ~5.11 s with the cache and 7.57 to ~115.91 s without")
    assert table.notes[-1] == (
        "measured here at batch 1: with the logits of the last position the cache takes 13 MB more than no cache; with "
        "those of all positions 50 MB less"
    )


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Here, list[str]]:
    """Return the jobs, done in this process, and the words of a report on a tiny model."""
    monkeypatch.setattr(presets, "WATCHED_STEPS", 3)
    here = jobs_here(monkeypatch, lambda kind, cell: cell.name if kind == "cell" else kind)
    folder = write_checkpoint(tmp_path / "tiny", max_seq_len=512)
    words = ["--ckpt_dir", str(folder), "--input_len", "6", "--output_len", "4", "--device", "cpu"]
    return here, [*words, "--out", str(tmp_path / "out")]


@pytest.mark.slow
def test_the_command_writes_a_folder_with_all_six_rows_texts_peaks_and_the_page_beside_it(
    tiny: tuple[Here, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, words = tiny
    words = [word for word in words if word not in ("--input_len", "6", "--output_len", "4")]
    monkeypatch.setattr(plan, "REPORT_LENGTHS", (4,))
    assert cli.run(script.hand_in, [*words, "--minutes", "0"]) == 0
    assert here.done == ["calibrate", *FOUR[:2], "hand_in", *FOUR[2:]]
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.endswith("-tiny-report")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"report.html", "report.md", "watch.html", "table.csv", "results.json", *(
        f"plots/{name}.png" for name in ("time", "memory"))}  # fmt: skip
    shown = (folder / "report.md").read_text("utf-8")
    assert shown.count("| identical, ") == 4
    assert "Time: at batch 2" in shown
    assert "plots/time.png" in shown
    assert "3 steps after" in (folder / "watch.html").read_text("utf-8")
    assert str(folder / "report.html") in capsys.readouterr().out


FOUR = ["batch 1, cache on", "batch 1, cache off", "batch 2, cache on", "batch 2, cache off"]


def test_a_report_without_time_makes_the_texts_predicts_all_cells_and_tears_no_pair(
    tiny: tuple[Here, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, words = tiny
    assert cli.run(script.main, ["--preset", "report", *words, "--budget", "0.0001"]) == 0
    assert here.done == ["calibrate"]
    assert "--budget 0 measures everything once" in capsys.readouterr().err, "bench has no --minutes"
    (folder,) = (tmp_path / "out").iterdir()
    report = json.loads((folder / "results.json").read_text("utf-8"))
    assert [row["predicted"] for row in rows_of(report, "cell")] == [True] * 4
    assert all(row["within"] >= 1.25 for row in rows_of(report, "cell"))
    assert [row["measured_bytes"] for row in rows_of(report, "peak")] == [None] * 4
    shown = (folder / "report.md").read_text("utf-8")
    assert "4 of 4 cells are predicted (~)" in shown
    assert shown.count("| identical, ") == 4, "the texts come before all else"


def test_texts_whose_process_is_killed_have_a_sentence_in_their_section_and_resume_makes_them(
    tiny: tuple[Here, list[str]], tmp_path: Path
) -> None:
    here, (_, model, *_) = tiny
    deaths = [JobDied("its process was ended")]
    here.fail = lambda kind, cell: deaths.pop() if deaths else None
    base, asked = Cell(input_len=6, output_len=4, model=model, threads=1), {"prompts": ["One", "Two"], "budget": 1e-4}
    run = run_of(presets.plan_report("report", base, engines=[], kinds=[], **asked), tmp_path)
    run.run()
    _, _, section = report_markdown(run.report).partition("## Four texts, with the cache and without\n\n")
    assert section.startswith("- No text was made: its process was ended.\n")
    assert [row["predicted"] for row in rows_of(run.report, "cell")] == [True] * 4
    assert script.report_exit_code(run.report) == 0, "as of all failures beside the cells"
    again = run_of(run.report, tmp_path, resume=True)
    again.run()
    assert here.done == ["calibrate"] * 2
    assert report_markdown(again.report).count("| identical, ") == 2


@pytest.mark.parametrize(("seconds", "made"), [(-1.0, [8]), (9.0, [8]), (50.0, [8, 16]), (300.0, [8, 32])])
def test_texts_are_as_long_as_a_tenth_of_the_minutes_allows(
    seconds: float, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 8 tokens behind 4 takes 1 s, so that 16 take 3 s and 32 take 10 s."""
    clock, lengths = [100.0], list[int]()

    def both_modes(engine: Any, prompts: Any, length: int) -> Any:
        clock[0] += 1.0
        lengths.append(length)
        return [{"tokens": length}]

    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(worker, "_both_modes", both_modes)
    engine = object.__new__(LlamaEngine)
    engine.encode = lambda prompt: [0] * 4  # type: ignore[assignment]
    rows = worker.continued_texts(engine, prompts=["a"], lengths=[32, 16, 8], seconds=seconds, started=100.0)
    assert lengths == made
    assert [row["tokens"] for row in rows] == made[-1:]


def test_wrong_minutes_are_refused_by_the_name_of_their_flag() -> None:
    with pytest.raises(ValueError, match="--minutes=nan must be minutes, at least 0"):
        script.hand_in(minutes=float("nan"))


def test_an_interrupted_report_can_be_continued_by_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(script, "main", lambda **flags: seen.update(flags) or 0)
    assert cli.run(script.hand_in, ["--resume"]) == 0
    assert (seen["preset"], seen["resume"]) == ("report", True)
