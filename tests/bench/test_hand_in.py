"""The report that is handed in: the result first, every cell measured or named as left out, and the code."""

import re
from pathlib import Path
from typing import Any

import pytest
from bench_reports import hand_in_report, only_cell, table_report
from fakes import write_checkpoint
from jobs_here import Here, jobs_here

from llama import cli
from llama.bench import presets
from llama.bench.report.contents import machine_line
from llama.bench.report.derived import ratio_range, saved, scatter, seconds_of
from llama.bench.report.hand_in import code_tables, published_table
from llama.bench.report.pictures import METADATA, figures
from llama.bench.report.report_page import report_page
from llama.bench.report.sentences import findings, headline
from llama.bench.report.text import report_markdown
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
    places = [
        "21x faster",
        "Every cell",
        "some figures were not measured",
        "Time: at batch 8",
        "Memory: with the cache",
    ]
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
    assert time.startswith("Time: at batch 8 the job is 21 times faster with the cache, 2.7")
    assert "2,296 instead of 69,504 tokens go through the model, 30 times less work, but each step must read" in time
    assert "the peak is 13 MB higher at batch 1 and 101 MB higher at batch 8" in memory
    assert ". The cache stores 46,080 bytes for each token of each row" in memory
    assert "The first token takes 1.6" in when
    bare = only_cell(only_cell(hand_in_report(), 0), 2)
    assert (findings(bare), headline(bare)) == ([], [])


def test_a_report_that_was_interrupted_or_lacks_figures_is_written_and_claims_no_more_than_it_has() -> None:
    report = hand_in_report()
    report["rows"] = [row for row in report["rows"] if row["figures"] != "peak" or row["batch_size"] == 1]
    assert [row[0] for row in published_table(report).rows] == ["1", "1"]
    for row in rows_of(report, "cell"):
        row["tensor_peak_bytes"] = None  # as on a device that counts none
    assert findings(report)[1].startswith("Memory: the cache stores 46,080 bytes")
    shown = report_markdown(only_cell(hand_in_report(), 2))
    assert "| 8 | on | 4,495 | 4,484 | 1,544 | not measured | ~600.00 |" in shown


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
    last = saved(report)[-1]["times_faster_range"]  # of the largest batch
    assert headline(report)[0][0] == "{:.2g} to {:.2g}x faster".format(*last)
    assert "({:.2g} to {:.2g})".format(*last) in findings(report)[0]
    assert f"x ({low:.1f}x-{high:.1f}x)" in report_markdown(report)
    written = [text.get_text() for text in figures(report)["time"].axes[1].texts]
    assert written[0].endswith(f"x ({low:.2g}-{high:.2g})")
    assert pair["times_faster_range"] != saved(hand_in_report())[0]["times_faster_range"]


def test_the_line_about_the_machine_is_one_sentence() -> None:
    report = noisy_report()
    report["rows"].append({"figures": "check", "cell": 0, "name": "other work", "status": "noisy", "detail": "busy"})
    words = "memory and tokens are exact; some figures were not measured."
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
    assert table.notes[-1] == (
        "measured here at batch 1: with the logits of the last position the cache takes 13 MB more than no cache; with "
        "those of all positions 50 MB less"
    )


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Here, list[str]]:
    """Return the jobs, done in this process, and the words of a report on a tiny model."""
    monkeypatch.setitem(presets.RECORDING, "steps", 3)
    here = jobs_here(monkeypatch, lambda kind, cell: cell.name if kind == "cell" else kind)
    folder = write_checkpoint(tmp_path / "tiny", max_seq_len=512)
    words = ["--ckpt_dir", str(folder), "--input_len", "6", "--output_len", "4", "--device", "cpu"]
    return here, [*words, "--out", str(tmp_path / "out")]


@pytest.mark.slow
def test_the_command_writes_a_folder_with_all_six_rows_texts_peaks_and_the_page_beside_it(
    tiny: tuple[Here, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, words = tiny
    words = [word for word in words if word not in ("--input_len", "6", "--output_len", "4")]
    assert cli.run(script.hand_in, [*words, "--minutes", "0"]) == 0
    assert here.done == ["texts", *FOUR[:2], "page", *FOUR[2:]]
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.endswith("-tiny-report")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"report.html", "report.md", "watch.html", "table.csv", "results.json", *(
        f"plots/{name}.{form}" for name in ("time", "memory") for form in METADATA)}  # fmt: skip
    shown = (folder / "report.md").read_text("utf-8")
    assert shown.count("| identical, ") == 4
    assert len(re.findall(r"^\| [12] \| (?:on|off) \| [\d.,]*(?:not measured)? \| [\d,]+ \|", shown, re.MULTILINE)) == 4
    assert len(re.findall(r"\| ~[\d.,]+ \|$", shown, re.MULTILINE)) == 2, "those of the larger batch are computed"
    assert "Time: at batch 2" in shown
    assert "plots/time.png" in shown
    assert "3 steps after" in (folder / "watch.html").read_text("utf-8")
    assert str(folder / "report.html") in capsys.readouterr().out


FOUR = ["batch 1, cache on", "batch 1, cache off", "batch 2, cache on", "batch 2, cache off"]


def test_a_report_without_time_has_six_rows_and_says_what_it_lacks(
    tiny: tuple[Here, list[str]], tmp_path: Path
) -> None:
    here, words = tiny
    assert cli.run(script.main, ["--preset", "report", *words, "--budget", "0.0001"]) == 0
    assert here.done == []
    (folder,) = (tmp_path / "out").iterdir()
    shown = (folder / "report.md").read_text("utf-8")
    assert "No text was made: no room in the budget." in shown
    left = ["the four texts", *FOUR[:2], "peaks and a page", *FOUR[2:]]
    how = "the same command with --resume and --budget 0 measures it"
    assert f"no room in the budget for {'; '.join(left)}; {how}" in shown
    assert len(re.findall(r"\| (?:1|2) \| (?:on|off) \| not measured \| ~\d", shown)) == 4, "memory is predicted"
    assert f"- not measured: no room in the budget; {how}" in shown


def test_wrong_minutes_are_refused_by_the_name_of_their_flag() -> None:
    with pytest.raises(ValueError, match="--minutes=nan must be minutes, at least 0"):
        script.hand_in(minutes=float("nan"))


def test_an_interrupted_report_can_be_continued_by_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(script, "main", lambda **flags: seen.update(flags) or 0)
    assert cli.run(script.hand_in, ["--resume"]) == 0
    assert (seen["preset"], seen["resume"]) == ("report", True)
