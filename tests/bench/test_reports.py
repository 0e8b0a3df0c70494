"""What a benchmark's report looks like: every figure with its count, nothing hidden, nothing from outside.

The files in golden/ are whole reports, to be read as a diff. `python tests/bench/test_reports.py` writes them.
"""

import csv
import html
import io
import json
import math
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from bench_reports import (
    READING,
    bare_cell,
    caches_report,
    chat_report,
    check,
    comparison,
    dead,
    long_report,
    only_cell,
    step_rows,
    table_report,
)
from matplotlib.figure import Figure
from matplotlib.text import Text

from llama.bench.report import files
from llama.bench.report.columns import two_digits
from llama.bench.report.contents import NOISY
from llama.bench.report.derived import by_bytes, crossovers, growth
from llama.bench.report.files import write_report
from llama.bench.report.pictures import (
    METADATA,
    SMALL,
    STYLE,
    WIDTH,
    as_file,
    as_image,
    draw_memory,
    draw_quality,
    draw_speedup,
    draw_steps,
    draw_time,
    error_bars,
    figures,
    heading,
)
from llama.bench.report.report_page import report_page
from llama.bench.report.sentences import findings, headline, range_faster
from llama.bench.report.tables import figure_tables
from llama.bench.report.text import cell_text, report_csv, report_latex, report_markdown, table_markdown, warnings_text
from llama.bench.schema import Report, cell_row
from llama.bench.statistics import median_of
from llama.host import palette

GOLDEN = Path(__file__).with_name("golden")
LEFT_OUT = ["batch 8, cache on: no room in the budget", "steps at batch 1: died: gone"]
PICTURES = {
    "table": ["time", "memory", "speedup", "steps"],
    "caches": ["quality-1", "quality-2"],
    "chat": [],
}
REPORTS = {"table": long_report, "caches": caches_report, "chat": chat_report}
PAIR = [{"kv_caching": on} for on in (True, False)]
RULES = [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
VIOLATION = "8 x 263 in, 8 x 32 out, 2352 fed of 2296 computed"
EVIL = "<script>alert(1)</script> | </pre><img src=http://example.org/x.png> \x1b[2J"


@pytest.fixture(params=["caches", *(pytest.param(name, marks=pytest.mark.slow) for name in ("table", "chat"))])
def report(request: pytest.FixtureRequest) -> Report:
    """A report of each preset."""
    return REPORTS[request.param]()


def golden() -> dict[str, str]:
    """Return the text of each golden file: reports, figures as CSV, and a cell for the terminal."""
    table = table_report([{"kv_caching": True, "n": 3}, {"kv_caching": False, "n": 2}])
    table["rows"] = [row for row in table["rows"] if row.get("context", 1) <= 4]
    caches = caches_report(["static", "int4", "window:1024+4", "paged"])
    left = {"figures", "cell", "context", "predicted_cache_bytes", "batch_size", "kv_caching", "error", "notes"}
    caches["rows"] = [
        row if row["cell"] != 3 else {name: row[name] for name in row.keys() & left}
        for row in caches["rows"]
        if row["cell"] != 3 or row["figures"] in ("cell", "quality", "step")
    ]
    caches["failures"] = ["paged: quality: no room in the budget"]
    shown = {"table": table, "caches": caches, "chat": chat_report()}
    made = {f"{name}.md": report_markdown({**one, "reading": findings(one)}) for name, one in shown.items()}
    return made | {"table.csv": report_csv(table), "cell.txt": cell_text(table, 0)}


def test_reports_are_the_golden_ones() -> None:
    made = golden()
    assert {file.name: file.read_text("utf-8") for file in GOLDEN.iterdir()} == made


def drawn_by(draw: Callable[[Report], Figure | None], report: Report) -> Figure:
    """Return one picture, without the layout, which takes most of the time."""
    with matplotlib.rc_context(STYLE):
        figure = draw(report)
    assert figure is not None
    return figure


def rows_of(markdown: str, title: str) -> list[list[str]]:
    """Return the cells of the table under a title."""
    lines = markdown.partition(f"**{title}**")[2].strip().splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in [*table][2:]]


def csv_rows(report: Report, figures: str = "cell") -> list[dict[str, str]]:
    return [row for row in csv.DictReader(io.StringIO(report_csv(report))) if row["figures"] == figures]


def noisy(report: Report) -> Report:
    report["rows"].append(check(0, "other work", "occupied 1.02 of 2 cores", "noisy"))
    return report


def hiding() -> Report:
    """Return the report of an engine that hides everything that an engine can hide."""
    report = table_report([{"engine": "llama.cpp", "path": "llama.cpp 0.3.36"}])
    kept = {
        key: cell_row(report, 0)[key]
        for key in ("path", "seconds", "first_token_seconds", "tokens_per_second", "prefill_tokens_per_second")
    }  # type: ignore[literal-required]
    return only_cell(report, 0, **kept)


# One cell


def changed(report: Report, figures: str, *cells: int, **found: Any) -> Report:
    """Change all rows of some figures and some cells."""
    for row in report["rows"]:
        if row["figures"] == figures and row["cell"] in cells:
            row |= found
    return report


OWN, ALL = "is this cell's own", "(without it 0.19 MB are logits of all positions)"
PLACE = {"equal": False, "divergence_row": 3, "divergence_token": 17, "cached_id": 28, "uncached_id": 198}
SAID = [
    (True, "26.0 GB/s (10^9 bytes), by sum, threads: 2", table_report([{}])),
    (True, "330.00 GFLOP/s in fp32, by linear, 1024 x 1024 x 1024", table_report([{}])),
    (False, OWN, changed(table_report([{}]), "cell", 0, prefill_flops_share=0.999)),
    (True, OWN, changed(table_report([{}]), "cell", 0, prefill_flops_share=1.0)),
    (False, ALL, table_report(PAIR)),
    (True, ALL, table_report([{**cell, "logits": "all"} for cell in PAIR])),
    (True, "more memory, the same 32 tokens (", table_report(PAIR)),
    (True, "17 of row 3 on (28 with it, 198 without) (", changed(table_report(PAIR), "comparison", 0, **PLACE)),
    (True, "largest logits differ by 0.00021", changed(table_report(PAIR), "comparison", 0, **PLACE, margin=2.1e-4)),
    (True, "quantised cache is widened as a whole at every step (int8, int4)", caches_report()),
    (False, "widened", caches_report(["static", "paged", "window:1024+4"])),
    (False, "widened", changed(caches_report(), "cell", 1, 2, path="native")),
    (True, "Times on different paths compare the paths", changed(caches_report(), "cell", 1, path="native")),
    (False, "Times on different paths compare the paths", caches_report()),
]


def test_a_report_says_what_is_true_of_it_alone() -> None:
    shown = [report_markdown({**report, "reading": findings(report)}) for _, _, report in SAID]
    assert [said[1] for said, text in zip(SAID, shown, strict=True) if (said[1] in text) != said[0]] == []


# Tables


def test_threads_are_those_that_the_processes_report() -> None:
    report = table_report([{}])
    report["environment"]["threads"] = 1  # whatever was asked for
    assert [row["threads"] for row in csv_rows(report)] == ["1"]
    assert ", 1 thread ·" in report_markdown(report).splitlines()[2]


def test_a_violated_check_shows_everywhere() -> None:
    report = table_report([{"batch_size": 8}])
    report["rows"].append(check(0, "same tokens", VIOLATION, "violated"))
    assert f"- VIOLATED: same tokens: {VIOLATION}" in cell_text(report, 0)
    assert f"**VIOLATED** batch 8, cache on: same tokens: {VIOLATION}" in report_markdown(report)
    shown = report_page(report, {})
    assert shown.index("VIOLATED") < shown.index(html.escape(READING[0]))
    assert csv_rows(report)[0]["violated_checks"] == "1"


def test_what_was_not_measured_is_never_a_zero() -> None:
    report = hiding()
    text = cell_text(report, 0)
    assert "Model weights memory usage: not measured" in text
    assert "Peak memory usage: not measured" in text
    assert "KV cache: on (its own)" in text
    assert "KV cache, MB: not observed" in text
    assert "time per output token, ms: not measured" in text
    assert "Memory ledger: not measured" in text
    assert not re.search(r"\b0\.00? (MB|ms)", text)
    (row,) = rows_of(table_markdown(report), "Every cell")
    assert "0.00" not in row
    assert len(row) == 5, "a column without any value is left out"
    (fields,) = csv_rows(report)
    assert not {"cache_bytes", "weights_bytes"} & fields.keys()
    assert list(figures(report)) == ["time"]


def test_a_dead_cell_says_so_and_the_others_stand() -> None:
    report = dead(table_report([{"batch_size": 16, "kv_caching": on} for on in (True, False)]), 1)
    alive, died = rows_of(table_markdown(report), "Every cell")
    assert alive[-1] == "3 (93 steps)"
    assert died[1:] == ["died", *["not measured"] * 6, "not observed", "not measured", "0"]
    for shown in (table_markdown(report), report_markdown(report)):
        assert "batch 16, cache off died: its process was killed (signal 9)" in shown
        assert "no room" not in shown
    peak = {"figures": "memory", "cell": 1, "name": "peak", "predicted_bytes": 2**20, "measured_bytes": None}
    report["rows"].append(peak | {"moment": "prefill"})
    assert "~1.00" in table_markdown(report)
    assert "no room" not in table_markdown(report)
    report["rows"].pop()
    assert "- died: its process was killed" in cell_text(report, 1)
    assert "times faster" not in table_markdown(report)
    assert [row["error"] for row in csv_rows(report)] == [cell_row(report, 1)["error"], ""]


def test_each_path_of_ours_is_named_and_stands_against_every_peer() -> None:
    path = "llama.cpp (llama-cpp-python 0.3.36)"
    peer = {"engine": "llama.cpp", "path": path}
    report = table_report([{}, {"fast": True, "path": "native"}, peer, {**peer, "quantize": "int8", "batch_size": 8}])
    for index, rate in enumerate((10, 30, 20, 40)):
        cell_row(report, index)["tokens_per_second"] = rate
    shown = table_markdown(report)
    every = rows_of(shown, "Every cell")
    assert sorted(row[:5] for row in every) == [
        ["1", "llama", "no", "none", "plain"], ["1", "llama", "yes", "none", "native"],
        ["1", "llama.cpp", "no", "none", path], ["8", "llama.cpp", "no", "int8", path],
    ]  # fmt: skip
    assert rows_of(shown, "How many times faster ours is, by path") == [
        ["llama.cpp, batch 1, cache on", "0.50x", "1.50x"],
        ["llama.cpp, batch 8, cache on, int8 weights", "not measured", "not measured"],
    ]
    assert "How many times faster" not in table_markdown(table_report([{}]))


def test_modes_are_paired_on_one_path_and_each_path_has_its_sentence() -> None:
    ways: list[dict[str, Any]] = [{}, {"fast": True, "path": "native"}]
    report = table_report([{**way, "kv_caching": on} for way in ways for on in (True, False)])
    report["rows"] = [row for row in report["rows"] if row["figures"] != "comparison"]
    report["rows"] += [comparison(0, 1), comparison(2, 3, margin=None)]
    saved = rows_of(table_markdown(report), "What the cache saves")
    assert [row[0] for row in saved] == ["batch 1", "batch 1, native"]
    plain, native = findings(report)[:2]
    assert re.match(r"Batch 1 with the KV cache: [\d.]+ times faster, 13 MB more memory, the same 32 tokens \(", plain)
    assert re.match(r"Batch 1 .* cache \(native\): [\d.]+ times faster, 13 MB more memory, other tokens \(", native)
    cell_row(report, 1)["path"] = "native"  # it ran on another path than its partner
    assert len(rows_of(table_markdown(report), "What the cache saves")) == 1
    for step in (row for row in report["rows"] if row["figures"] == "step"):
        step["path"] = "native"
    assert "**Where the cache begins to pay, native**" in report_markdown(report)


def test_agreement_of_rounded_weights_stands_beside_their_times() -> None:
    engines: list[dict[str, Any]] = [{"quantize": "stored"}, {"engine": "llama.cpp", "quantize": "int8"}]
    report = table_report([{}, *engines])
    row = {"figures": "agreement", "cell": 1, "path": "plain", "tokens": 1024, "top1_agreement": 0.96}
    report["rows"].append(row)
    shown = table_markdown(report)
    assert rows_of(shown, "Rounded weights beside float32") == [["static", "96.00", "1,024", "1"]]
    assert [row["top1_agreement"] for row in csv_rows(report, "agreement")] == ["0.96"]


def test_the_csv_reads_back_as_the_very_figures() -> None:
    report = table_report()
    rows = csv_rows(report)
    assert len(rows) == 6
    for index, row in enumerate(rows):
        cell, own = report["cells"][index], cell_row(report, index)
        assert (int(row["batch_size"]), row["kv_caching"] == "on") == (cell["batch_size"], cell["kv_caching"])
        assert float(row["seconds_median"]) == median_of(own, "seconds")
        assert int(row["step_seconds_n"]) == 93
        assert float(row["tokens_per_second"]) == own["tokens_per_second"]
        assert row["cache_bytes"] == str(own["cache_bytes"])
    assert len(csv_rows(report, "step")) == 3 * 2 * 6
    for other, known in (
        (table_report(), {"cell", "step", "comparison"}),
        (caches_report(), {"cell", "step", "task", "quality"}),
    ):
        assert {row["figures"] for row in csv.DictReader(io.StringIO(report_csv(other)))} == known


def test_figures_without_a_partner_are_not_measured() -> None:
    report = table_report([{"n": 1, "output_len": 1, **cell} for cell in PAIR])
    del cell_row(report, 0)["token_forwards"]
    (row,) = rows_of(table_markdown(report), "What the cache saves")
    assert row[1] == row[3] == "not measured"
    assert row[2].endswith("x")


# What follows from the figures


def test_each_batch_has_a_sentence_in_order_and_the_largest_one_the_large_numbers() -> None:
    sentences = findings(table_report())
    assert sentences[2] == (
        "Batch 16 with the KV cache: 23 times faster, 202 MB more memory, the same 512 tokens (5.09 s "
        "instead of 116 s)."
    )
    assert [sentence.partition(" with")[0] for sentence in sentences[:3]] == ["Batch 1", "Batch 8", "Batch 16"]
    rule = "(p90 with it below p10 without)"
    assert sentences[3:] == [f"A step is faster with the cache from a context of 1 to 4 tokens on {rule}."]
    assert headline(table_report()) == [
        ("23x faster", "batch 16 with the cache: 5.09 s instead of 116 s"),
        ("+202 MB", "memory at the peak, with the cache"),
        ("same 512 tokens", "with the cache and without"),
    ]


def test_headings_say_faster_and_slower_as_it_is() -> None:
    assert range_faster([4.0]) == "4 times faster"
    assert range_faster([8.1, 24.2]) == "8.1 to 24 times faster"
    assert range_faster([0.5, 0.8]) == "1.2 to 2 times slower"
    assert range_faster([0.5, 3.0]) == "2 times slower to 3 times faster"


def test_a_crossover_needs_the_whole_spread_at_every_longer_context() -> None:
    report = table_report(PAIR)
    assert [one["context"] for one in crossovers(report)] == [4]
    slow = next(
        row for row in report["rows"] if row["figures"] == "step" and row["context"] == 64 and row["kv_caching"]
    )
    slow["step_seconds"] = [*slow["step_seconds"][:-1], 1.0, 1.0]  # its median is the faster one still, its p90 is not
    assert [one["context"] for one in crossovers(report)] == [256]


def test_a_cache_that_never_pays_is_said_in_table_sentence_and_picture() -> None:
    report = table_report([*PAIR, *({"batch_size": 8, **cell} for cell in PAIR)])
    steps = [row for row in report["rows"] if row["figures"] != "step" or row["batch_size"] == 8]
    report["rows"] = [*steps, *step_rows(1, (1, 4), first=0.01)]
    assert rows_of(report_markdown(report), "Where the cache begins to pay") == [
        ["1", "not up to 4 tokens"],
        ["8", "1 tokens"],
    ]
    rule = "(p90 with it below p10 without)"
    words = f"A step is faster with the cache from a context of 1 tokens on {rule}, not at batch 1"
    drawn = drawn_by(draw_steps, report)
    assert heading(drawn) == words
    assert f"{words}." in findings(report)
    assert [ax.get_title() for ax in drawn.axes] == ["batch 1, no crossover", "batch 8"]
    report["rows"] = [row for row in report["rows"] if row["figures"] != "step" or row["batch_size"] == 1]
    assert heading(drawn_by(draw_steps, report)) == "A step is not faster with the cache at any context that was tried"


def test_the_growth_of_the_speed_up_is_read_out_of_a_long_generation() -> None:
    report = long_report()
    rows = growth(report)
    assert growth(table_report()) == [], "of 32 tokens"
    assert [(row["batch_size"], row["generated"]) for row in rows] == [(1, 10), (1, 20), (1, 50), (1, 100), (1, 200)]
    on, off = (cell_row(report, index) for index in (0, 1))
    assert rows[-1]["times_faster"] == pytest.approx(median_of(off, "seconds") / median_of(on, "seconds"))
    firsts = [
        first + sum(later[:9]) for first, later in zip(on["first_token_seconds"], on["step_seconds"], strict=True)
    ]
    assert rows[0]["on_s"]["median"] == pytest.approx(sorted(firsts)[1])
    shown = rows_of(report_markdown(report), "Speed-up against generation length")
    assert [row[1] for row in shown] == ["10", "20", "50", "100", "200"]


# Noise


def test_a_noisy_report_says_so_in_the_line_behind_its_table() -> None:
    report, calm = noisy(caches_report(["static", "int8"])), table_report(PAIR)
    line = "NOISY batch 1, cache on: other work: occupied 1.02 of 2 cores"
    assert (warnings_text(report), warnings_text(calm)) == ([line], [])
    said = "Measured on a busy machine: the times are not those of an idle one"
    for shown in (report_markdown(report), report_page(report, {})):
        numbers, table, machine, details = map(shown.index, ("0.30 of the bytes", "perplexity", said, "NOISY batch 1"))
        assert numbers < table < machine < shown.index(html.escape(READING[1])) < details
    assert table_markdown(report).splitlines()[-1].startswith(said)
    assert "busy" not in report_markdown(calm)
    assert cell_text(report, 0).startswith(f"{NOISY}\nBatch size: 1\n")
    assert cell_text(report, 1).startswith("Batch size: 1\n")
    assert {row["noisy"] for row in csv_rows(report)} == {"yes"}
    assert {row["noisy"] for row in csv_rows(calm)} == {""}


def test_the_mark_of_noise_stands_on_panels_of_times_alone(report: Report) -> None:
    drawn = figures(noisy(report))
    assert sorted(drawn) == sorted(PICTURES[report["preset"]])
    marked = {
        name: ["NOISY" in "".join(text.get_text() for text in ax.texts) for ax in figure.axes]
        for name, figure in drawn.items()
    }
    expected = {
        "time": [True, True],
        "memory": [False],
        "speedup": [True, True],
        "steps": [True] * 3,
        "quality-1": [False, False, True],
        "quality-2": [False, False],
    }
    assert marked == {name: expected[name] for name in drawn}


# Kinds of cache, and conversations


def test_each_of_a_few_lossy_kinds_has_a_sentence() -> None:
    assert [words.split()[0] for words in findings(caches_report())] == ["int8", "int4", "window:1024+4"]
    assert findings(caches_report(["static", *(f"int8 {number}" for number in range(5))])) == []


def test_a_share_has_a_note_and_few_positions_are_counted_and_have_no_interval() -> None:
    report = caches_report(["static", "int4"])
    table = figure_tables(report)[0]
    cells = dict(zip(table.heads, table.rows[1], strict=True))
    assert re.fullmatch(r"39\.346 \([\d.]+ to [\d.]+\)", cells["perplexity"])
    assert re.fullmatch(r"0\.0014 \([\d.]+ to [\d.]+\)", cells["mean KL, nats"])
    assert not any("A share" in note or "Too few" in note for note in table.notes)
    report["cells"][1]["kv_cache"] = "snapkv:0.25"
    for row in (row for row in report["rows"] if row["figures"] == "quality"):
        row |= {"tokens": 32, "kls": row["kls"][:2], "nlls": row["nlls"][:2]}
        row["top1_agreement"] = 29 / 32 if row["cell"] else 1.0
    table = figure_tables(report)[0]
    cells = dict(zip(table.heads, table.rows[1], strict=True))
    assert (cells["mean KL, nats"], cells["perplexity"]) == ("0.0014", "39.346")
    assert any("Too few for an interval" in note for note in table.notes)
    assert any(note.startswith("A share, as in snapkv:0.25, is one of the keys of the prompt") for note in table.notes)
    assert "the same most likely token at 29 of 32 positions" in findings(report)[0]
    next(row for row in report["rows"] if row["figures"] == "quality")["context"] = 64
    assert not any("Quality: the last" in note for note in figure_tables(report)[0].notes), "the texts differ"


def test_kinds_are_not_compared_with_a_full_cache_that_was_not_measured() -> None:
    report = caches_report()
    report["rows"] = [
        {**row, "of_full": None} for row in report["rows"] if (row["figures"], row["cell"]) != ("quality", 0)
    ]
    assert findings(report) == []


def test_what_other_work_did_to_many_cells_is_one_sentence_and_a_kind_has_one_name() -> None:
    kinds = ["static", "FILE.py:mine:0.5", "int8"]
    report = caches_report(kinds)
    for place in (0, 1):
        report["rows"].append(check(place, "busy", f"occupied {place + 1}.02 of 2 cores", "noisy"))
    cell_row(report, 1)["path"] = "native"
    cell_row(report, 2)["error"] = "died: gone"
    report["failures"] = ["FILE.py:mine:0.5: bytes and times: no room in the budget"]
    assert warnings_text(report) == [
        "batch 1, cache on, int8 cache died: gone",
        "NOISY other work changed the times of 2 of 3 cells (batch 1, cache on, batch 1, cache on, FILE.py:mine:0.5 "
        "cache, native); bytes and tokens are not affected",
        "no room in the budget for FILE.py:mine:0.5: bytes and times; the same command with --resume and --budget 0 "
        "measures it",
    ]
    report["rows"].append(check(2, "busy", "occupied 1 of 2 cores", "noisy"))
    assert warnings_text(report)[1].startswith("NOISY other work changed the times of all cells;")


def test_a_kind_from_a_file_in_a_deep_folder_fits_the_picture() -> None:
    """matplotlib warns, which fails here, if names leave no room for the panels."""
    deep = f"/{'folder/' * 12}mine.py:mine:0.5"
    drawn = figures(caches_report(["static", "int8", deep, "paged"]))
    as_file(drawn["quality-1"])
    assert {"mine.py:mine"} < {text.get_text() for text in drawn["quality-1"].findobj(Text)}
    assert deep in report_markdown(caches_report(["static", deep]))


@pytest.mark.parametrize("preset", PICTURES)
def test_an_unfinished_preset_has_no_empty_tables_or_pictures_and_nothing_died(preset: str) -> None:
    report = REPORTS[preset](model=None, ceilings=None, environment={})
    bare: Report = {**report, "rows": [bare_cell(index) for index in range(len(report["cells"]))]}
    assert (figures(bare), findings(bare)) == ({}, [])
    shown = report_markdown(bare)
    assert set(re.findall(r"^## (.*)$", shown, re.MULTILINE)) <= {
        "The table", "Kinds of cache", "Memory and work of each cell", "Where and how", "What the words mean"
    }  # fmt: skip
    assert "died" not in shown + cell_text(bare, 0)


# Pages and pictures


def test_the_page_is_complete_in_itself_and_has_every_picture(report: Report) -> None:
    shown, found = re.subn(r'<img alt="[^"]+" src="data:[^"]*">', "", report_page(report, figures(report)))
    assert found == len(PICTURES[report["preset"]])
    assert not re.search(r"\b(?:src|srcset|action)=|\bhref=(?!\"#)|https?:|<script|<link|@import|url\((?!#)", shown)
    for sentence in [*report["reading"], report["command"]]:
        assert html.escape(sentence) in shown
    assert not re.search(r"<summary>([^<]*)</summary>\s*<h3>\1<", shown)  # a folded table is named once
    ids = re.findall(r'\bid="([^"]*)"', shown)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r"(?:href=\"|url\()#([^\")]*)", shown)} <= {*ids}
    style, body = shown.split("</style>", 1)
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6});", rules)) for rules in style.split("@media", 1))
    assert light.keys() == dark.keys() == palette.variables().keys()
    assert {"ink", "paper"} <= set(re.findall(r"var\(--(\w+)\)", style + body)) <= light.keys()
    assert not re.search(r"(?:fill|stroke|color): *#", body)


def test_no_file_but_the_palette_has_a_colour_of_its_own() -> None:
    package = Path(palette.__file__).parents[1]
    files = [file for kind in ("*.py", "*.css", "*.html") for file in package.rglob(kind) if file.name != "palette.py"]
    named = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b|color=[\"'](?!none)\w")
    assert len(files) > 100
    assert [file.name for file in files if named.search(file.read_text("utf-8"))] == []


def test_ratios_are_bars_from_zero_on_a_linear_axis_with_the_factor_at_each() -> None:
    cells = [{}, {"engine": "llama.cpp", "path": "llama.cpp 0.3.36"}, {"kv_caching": False}]
    for figure in (drawn_by(draw_time, table_report(cells)), drawn_by(draw_speedup, long_report())):
        ax = figure.axes[1]
        written = [text.get_text() for text in ax.texts if re.fullmatch(r"[\d.]+x", text.get_text())]
        assert [f"{two_digits(bar.get_width())}x" for bar in ax.patches] == written  # a peer without a pair has none
        assert {bar.get_x() for bar in ax.patches} == {0}
        assert (ax.get_xscale(), ax.get_xlim()[0]) == ("linear", 0)


def words_of(figure: Figure) -> list[Text]:
    """Return the visible words of a picture, without those that an axis keeps for values out of view."""
    kept = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        kept |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip() and one not in kept]


CROWD: list[dict[str, Any]] = [{}, {"engine": "transformers"}, {"fast": True, "path": "native"}]


@pytest.mark.parametrize(
    "preset", ["caches", *(pytest.param(name, marks=pytest.mark.slow) for name in ("crowd", "table"))]
)
def test_no_words_of_a_picture_lie_on_others_or_leave_it_or_are_small(preset: str) -> None:
    crowd = table_report([{**way, "kv_caching": on} for way in CROWD for on in (True, False)])
    for name, figure in figures(crowd if preset == "crowd" else REPORTS[preset]()).items():
        figure.draw_without_rendering()  # which lays it out
        words = words_of(figure)
        boxes = [Text.get_window_extent(one) for one in words]  # without lines to points
        assert min(one.get_fontsize() for one in words) >= SMALL, name
        assert [one for one, box in zip(words, boxes, strict=True) if box.x0 < 0 or box.x1 > figure.bbox.x1 + 1] == []
        for (one, box), (other, against) in combinations(zip(words, boxes, strict=True), 2):
            assert not box.padded(-1).overlaps(against.padded(-1)), (name, one.get_text(), other.get_text())


def test_the_memory_of_a_cell_that_the_budget_left_out_is_drawn_as_predicted() -> None:
    report = table_report([{**cell, "batch_size": batch} for batch in (1, 8) for cell in PAIR])
    for row in (row for row in report["rows"] if row["cell"] > 1):
        row.pop("seconds", None)
        row |= {"measured_bytes": None} if row["figures"] == "memory" else {}
    (ax,) = drawn_by(draw_memory, report).axes
    assert [text.get_text().endswith(" predicted") for text in ax.texts] == [False, False, True, True]


def test_a_wide_range_of_a_ratio_is_written_without_an_exponent_and_inside_its_panel() -> None:
    report = table_report([{"kv_caching": on, "batch_size": 16, "n": 2} for on in (True, False)])
    for row in (row for row in report["rows"] if row.get("seconds")):
        row["seconds"] = [row["seconds"][0] / 6, row["seconds"][1] * 6]
    with matplotlib.rc_context(STYLE):
        figure = drawn_by(draw_time, report)
        figure.draw_without_rendering()  # which lays it out
        (words,) = (text for text in figure.axes[1].texts if "(" in text.get_text())
        assert words.get_window_extent().x1 <= figure.axes[1].bbox.x1
    ends = re.fullmatch(r"[\d.]+x \(([\d.]+)-([\d,]+)\)", words.get_text())
    assert ends is not None
    assert float(ends[1]) < 5
    assert float(ends[2]) > 100
    assert f"({ends[1]} to {ends[2]})" in " ".join(findings(report))


def test_bars_reach_from_p10_to_p90_and_never_past_the_median() -> None:
    one, single = {"n": 5, "median": 4.0, "p10": 3.5, "p90": 6.0}, {"n": 1, "median": 2.0, "p10": 2.0, "p90": 2.0}
    odd = {"n": 2, "median": 1.0, "p10": 1.25, "p90": 0.75}  # of figures that were rounded apart
    assert error_bars([one, single, odd]) == [[0.5, 0.0, 0.0], [2.0, 0.0, 0.0]]  # type: ignore[list-item]


@pytest.mark.slow
def test_pictures_are_drawn_at_their_size_and_alike_each_time() -> None:
    report = table_report(PAIR)
    drawn, again = figures(report), figures(report)
    for name, figure in drawn.items():
        png, *others = files = [as_file(figure, form) for form in METADATA]
        assert [other[:5] for other in others] == [b"<?xml", b"%PDF-"]
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        assert width == 1350
        assert 300 < height < 1400
        assert [as_file(again[name], form) for form in METADATA] == files


def test_a_name_with_dollar_signs_is_no_formula() -> None:
    report = table_report([{}], model={"name": r"$\frac$_{", "weights": "random", "parameters": None, "sizes": None})
    assert as_image(drawn_by(draw_time, report))


def test_markup_in_foreign_texts_is_escaped() -> None:
    report = dead(table_report([{**cell, "text": "a prompt"} for cell in PAIR], command=EVIL, reading=[EVIL]), 1)
    cell_row(report, 0).update(text=EVIL, notes=[EVIL])
    cell_row(report, 1).update(error=f"died: {EVIL}")
    report["rows"] = [row for row in report["rows"] if row["figures"] != "step"]
    for shown in (report_page(report, {}), report_markdown(report)):
        assert "<script" not in shown
        assert "<img src=http" not in shown
    died = [row for row in rows_of(report_markdown(report), "Every cell") if row[1] == "died"]
    assert len(died[0]) == 11
    assert "\x1b" not in cell_text(report, 0).partition("**Notes**")[0]


def rows_with_parts(**parts: float) -> Report:
    """Return a report of both modes whose peak consists of so many MB of each part."""
    report = table_report(PAIR)
    report["rows"] = [row for row in report["rows"] if row["figures"] != "step"]
    for line in (row for row in report["rows"] if row["figures"] == "memory"):
        part = sum(parts.values()) if line["name"] == "peak" else parts.get(line["name"].split()[-1], 0)
        line["measured_bytes"] = line["predicted_bytes"] = int(part * 2**20)
        line["counts"] = line["name"] not in ("peak", "resident")
    return report


PEAKS: list[tuple[dict[str, float], str]] = [
    ({"weights": 513, "cache": 12, "activations": 7}, "513 of 532 MB at the peak are weights"),
    ({"weights": 100, "cache": 12, "logits": 700}, "700 of 812 MB at the peak are logits"),
    ({"weights": 100, "cache": 400}, "400 of 500 MB at the peak are the KV cache"),
    ({"weights": 3.2, "activations": 6.3}, "6.3 of 9.5 MB at the peak are activations"),
    ({"weights": 10, "elsewhere": 30}, "30 of 40 MB at the peak are beyond the ledger"),
]


def test_the_largest_part_of_the_peak_is_named() -> None:
    for parts, words in PEAKS:
        report = rows_with_parts(**parts)
        assert f"- {words}." in cell_text(report, 0).splitlines()
        assert f"- Highest peak, batch 1, cache on: {words}" in table_markdown(report).splitlines()


def of_ratios(kinds: Sequence[str]) -> Report:
    """Return a report of kinds, each with two ratios, of which the smaller one is worse."""
    report = caches_report(["static", *(f"{kind}:{ratio}" for kind in kinds for ratio in (0.5, 0.25))])
    for row in (row for row in report["rows"] if row["figures"] == "quality" and row["cell"]):
        share = 0.5 if row["cell"] % 2 else 0.25
        row |= {"of_full": share, "kls": [one * (1.1 - share) for one in (0.1, 0.2, 0.3, 0.1, 0.2)]}
        row["nlls_minus_full"] = [one / 2 for one in row["kls"]]
    return report


def test_quality_against_bytes_has_a_line_for_each_kind_over_its_ratios_and_the_full_cache() -> None:
    kinds = [f"kind-{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    figure = drawn_by(partial(draw_quality, rows=by_bytes(of_ratios(kinds))[0]), of_ratios(kinds))
    (names,) = (legend.get_texts() for legend in figure.legends)
    assert [ax.get_xlabel() for ax in figure.axes] == ["bytes / full cache's"] * 2 + ["time / full cache's"]
    assert [text.get_text() for text in names] == ["full cache", *kinds]
    looks = []
    for ax in figure.axes[:2]:
        full, *lines = ax.lines[:1] + [one.lines[0] for one in ax.containers]
        assert [*full.get_ydata()] == [0, 0]
        assert [[*line.get_xdata()] for line in lines] == [[0.25, 0.5]] * 26
        looks.append({(line.get_color(), line.get_marker()) for line in lines})
        bars = [bar.get_segments() for one in ax.containers for bar in one.lines[2]]
        assert all(low < high for segments in bars for (_, low), (_, high) in segments), "intervals"
    assert [len(look) for look in looks] == [26, 26], "every line has a look of its own"
    assert lines[0].get_ydata()[1] == pytest.approx(0.18 * 0.6)
    first = figure.axes[0].containers[0].lines[0].get_ydata()
    assert first[1] == pytest.approx(100 * math.expm1(0.09 * 0.6)), "of the perplexity"
    report = of_ratios(kinds[:1])
    report["rows"] = [row for row in report["rows"] if row["cell"]]
    assert by_bytes(report) == [], "nothing is compared without the full cache"


def test_kinds_of_several_texts_have_a_picture_each_also_in_a_merged_report() -> None:
    report = {**of_ratios(["a"]), "preset": "merged"}
    longer = [{**row, "context": 4096} for row in report["rows"] if row["figures"] == "quality"]
    report["rows"] += [*longer, *({**row, "judged": False, "context": 9} for row in longer)]
    report["rows"] += [{**row, "context": 8, "digest": str(row["cell"] > 0)} for row in longer]  # of other weights
    assert list(figures(report)) == ["quality-1", "quality-2", "quality-3"]


def test_the_tables_for_a_paper_have_the_figures_with_their_intervals_and_escaped_names() -> None:
    report = caches_report(["static", "int4", "window:9+4", r"my_50%{#&~^$<|>.py:own:0.5"], command="llama-kv\nbench")
    for row in (row for row in report["rows"] if row["figures"] == "task"):
        row["task"] = "own\\needles.jsonl"
    lines = report_latex(report).splitlines()
    assert lines[1] == "% llama-kv bench", "a comment is one line"
    begins = [rf"\begin{{tabular}}{{{'l' * columns}}}" for columns in (8, 8)]
    assert [line for line in lines if line.startswith("\\")] == [begins[0], *RULES, begins[1], *RULES]
    (own,) = (line for line in lines if "own:0.5" in line and line.startswith("2,048"))
    signs = r"\{\#\&\textasciitilde{}\textasciicircum{}\$\textless{}\textbar{}\textgreater{}"
    assert rf" my\_50\%{signs}.py:own:0.5 &" in own
    assert sum(line.startswith(r"own\textbackslash{}needles.jsonl &") for line in lines) == 4
    assert own.endswith(r" \\")
    shown = [line.removesuffix(r" \\").split(" & ") for line in lines if "int4" in line]
    assert shown[0][2:6] == ["15.48", "0.17", "96.39", "0.0014 (0.0013 to 0.0016)"]
    assert shown[0][6:] == ["39.346 (36.847 to 42.810)", "+0.00"]
    assert shown[1][5:] == ["40.0 (20.0 to 60.0)", "$-$60.0 ($-$80.0 to $-$40.0)", "20"]
    assert report_latex(table_report(PAIR)) == ""


# Files


def test_a_report_is_written_as_files_and_read_back_equal(tmp_path: Path) -> None:
    report, folder = caches_report(["static", "int8", "int4"]), tmp_path / "results" / "today"
    paths = write_report(report, folder)
    names = ["results.json", "report.md", "table.csv", "report.html", "table.tex"]
    names += [f"plots/{name}.{form}" for name in PICTURES["caches"] for form in METADATA]
    assert [path.relative_to(folder).as_posix() for path in paths] == names
    assert json.loads(paths[0].read_text("utf-8")) == report
    assert paths[1].read_text("utf-8") == report_markdown(report, PICTURES["caches"])
    assert "![quality-1](plots/quality-1.png)" in report_markdown(report, PICTURES["caches"])
    assert paths[3].read_text("utf-8").count("<img") == 2
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(before) == sorted(paths)  # no half-written file is left
    report["budget_minutes"] = float("nan")
    with pytest.raises(ValueError, match="nan"):
        write_report(report, folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_edited_file_stays_and_the_new_one_has_a_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = caches_report(["static"])  # which has no picture
    md = tmp_path / "report.md"
    write_report(report, tmp_path)
    write_report(report, tmp_path)
    assert (caplog.text, list(tmp_path.glob("*-2.*"))) == ("", []), "files that nobody edited are replaced"
    for name, words in (("report.md", "In my own words: it remembers."), ("table.csv", "a;b"), ("report.html", "")):
        (tmp_path / name).write_text(words, "utf-8")
        report["command"] += " --resume"
        paths = write_report(json.loads(json.dumps({**report, "files": {}})), tmp_path)  # as a new merge has none
        assert (tmp_path / name).read_text("utf-8") == words
        new = tmp_path / re.sub(r"(\.\w+)$", r"-2\1", name)
        assert new in paths
        assert f"{tmp_path / name} may be edited, so it stays as it is; the new file is {new}" in caplog.text
    assert md.with_stem("report-2").read_text("utf-8") == report_markdown(report, []), "the newest"
    md.with_stem("report-2").write_text("also mine")
    (tmp_path / "results.json").write_text("{")  # torn: nothing shows who wrote the files
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()  # cannot be read
    write_report(report, tmp_path)
    assert md.with_stem("report-2").read_text() == "also mine"
    assert md.with_stem("report-3").read_text("utf-8") == report_markdown(report, [])


def test_files_that_an_interruption_left_are_not_taken_for_edited_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report, real = caches_report(["static", "int8"]), files.replace_file
    write_report(report, tmp_path)

    def until(name: str, path: Path, content: bytes) -> Path:
        if path.name == name:
            raise OSError(28, "No space left on device")
        return real(path, content)

    for name in ("report.md", "report.html", "quality-1.png", ""):
        report["command"] += " --resume"
        monkeypatch.setattr(files, "replace_file", partial(until, name))
        with suppress(OSError):
            write_report(report, tmp_path)
    assert (caplog.text, list(tmp_path.glob("*-2.*"))) == ("", [])
    assert (tmp_path / "report.md").read_text("utf-8") == report_markdown(report, PICTURES["caches"])


LOOK = """<iframe width="%s" height="900" srcdoc="%s"></iframe><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const widths = [...page.querySelectorAll("img")].map(one => one.getBoundingClientRect().width).filter(one => one > 0);
  const seen = [widths.length, Math.min(...widths), page.documentElement.scrollWidth];
  document.body.dataset.seen = JSON.stringify(seen);
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_every_picture_at_a_readable_size_and_the_page_at_its_width(tmp_path: Path) -> None:
    width, file, report = 400, tmp_path / "report.html", table_report(PAIR)
    drawn = figures(report)
    file.write_text(f"<!DOCTYPE html><body>{LOOK % (width, html.escape(report_page(report, drawn)))}", "utf-8")
    program = "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=5000"
    flags = ["--window-size=1700,1000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run([*program.split(), *flags], capture_output=True, text=True, timeout=120, check=True)
    (seen,) = re.findall(r'data-seen="([^"]*)"', done.stdout)
    pictures, least_width, page_width = json.loads(html.unescape(seen))
    assert pictures == len(drawn)
    assert least_width * SMALL / 72 / WIDTH >= 11  # px of the words
    assert page_width <= width


if __name__ == "__main__":
    for name, text in golden().items():
        (GOLDEN / name).write_text(text, "utf-8")
