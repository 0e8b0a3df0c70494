"""What a benchmark's report looks like: every figure with its count, nothing hidden, nothing from outside."""

import csv
import html
import io
import json
import re
import shutil
import struct
import subprocess
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from bench_reports import (
    SENTENCES,
    cell_record,
    comparison,
    crossover,
    dead_record,
    sweep_report,
    table_report,
)
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

from llama.bench.report.files import write_json, write_report
from llama.bench.report.findings import all_less, findings
from llama.bench.report.page import page
from llama.bench.report.plots import Look, as_png, as_svg, figures, heading
from llama.bench.report.plots.canvas import bars, new_figure
from llama.bench.report.stored import read_report
from llama.bench.report.tables import environment_table
from llama.bench.report.text import cell_text, report_csv, report_markdown, table_markdown
from llama.bench.schema import CellRecord, Report
from llama.cli import palette
from llama.host.files import check_writable

TABLE_PLOTS = ["time", "memory", "steps", "crossover"]
SWEEP_PLOTS = ["speedup", "cache", "context", "batch"]
VIOLATION = "8 x 263 in, 8 x 32 out, 2352 fed of 2296 worked out"
EVIL = "<script>alert(1)</script> | </pre><img src=http://example.org/x.png> \x1b[2J"


def with_violation() -> CellRecord:
    record = cell_record(batch_size=8)
    record["points"][1] = {"name": "tokens", "status": "violated", "detail": VIOLATION}
    return record


def with_nothing_told() -> CellRecord:
    """A cell of an engine that hides whatever an engine can hide."""
    record = cell_record(engine="llama.cpp", path="llama.cpp 0.3.36")
    record |= {"weights_bytes": None, "cache_bytes": None, "ledger": None, "work": None, "limits": None}
    assert record["summary"] is not None
    record["summary"] |= {
        "step_seconds": None,
        "decode_tokens_per_second": None,
        "peak_bytes": None,
        "resident_bytes": None,
    }
    for sample in record["samples"]:
        sample |= {"step_seconds": [], "peak_resident_bytes": None, "peak_allocated_bytes": None}
    record["points"] = [{"name": "cache", "status": "not observed", "detail": "the engine does not tell"}]
    return record


def rows_of(markdown: str, title: str) -> list[list[str]]:
    """Return the cells of the table under a title."""
    lines = markdown.partition(f"**{title}**")[2].strip().splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in [*table][2:]]


def csv_rows(report: Report, figures: str = "cell") -> list[dict[str, str]]:
    return [row for row in csv.DictReader(io.StringIO(report_csv(report))) if row["figures"] == figures]


def width_and_height(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_cell_begins_with_the_lines_that_its_users_know() -> None:
    record = cell_record(batch_size=8)
    assert record["summary"] is not None
    record["summary"] |= {"tokens_per_second": 126.733, "seconds": {"n": 3, "median": 2.02, "p10": 2.0, "p90": 2.1}}
    record["summary"]["peak_bytes"] = {"n": 3, "median": 2561.4 * 2**20, "p10": 0.0, "p90": 0.0}
    record |= {"weights_bytes": int(2357.13 * 2**20), "text": "Once upon a time"}
    assert cell_text(record).startswith(
        "Batch size: 8\n"
        "Input length: 256 tokens\n"
        "Output length: 32 tokens\n"
        "Inference time: 2.02 seconds\n"
        "Tokens per second: 126.73\n"
        "Model weights memory usage: 2357.13 MB\n"
        "Peak memory usage: 2561.40 MB\n"
        "\n"
        "=== Sample Output ===\n"
        "Once upon a time\n"
        "\n"
    )


def test_a_cell_tells_mode_spread_count_ledger_and_validity() -> None:
    text = cell_text(cell_record(batch_size=8))
    assert "KV cache: on (static), 101.25 MB" in text
    assert re.search(r"Time per output token: [\d.]+ ms \(p10 [\d.]+, p90 [\d.]+, n = 93\)", text)
    assert re.search(r"Prefill: [\d.]+ tokens/s \(batch size x input length / median time to first token\)", text)
    assert "Peak memory: the bytes in tensors" in text
    assert re.search(r"Peak resident memory of the process: [\d.]+ MB", text)
    assert re.search(r"^  weights +513\.13 +513\.13 +0\.00 +yes$", text, re.MULTILINE)
    assert "  ok            no overflow: 287 positions fed" in text
    assert "  not observed  statistics reset: " in text


def test_a_peak_on_cuda_is_named_beside_what_is_reserved_and_in_use() -> None:
    record = cell_record(device="cuda")
    for place, sample in enumerate(record["samples"]):
        sample |= {"peak_reserved_bytes": (600 + place) * 2**20, "device_bytes": None}
    text = cell_text(record)
    assert "Peak memory: the bytes in tensors" in text
    assert "Peak memory reserved by the allocator: 602.00 MB" in text
    assert "Taken of the device since before the model: not measured" in text


def test_a_violated_point_shows_everywhere() -> None:
    record = with_violation()
    report = table_report([record])
    assert f"  VIOLATED      tokens: {VIOLATION}" in cell_text(record)
    assert f"**VIOLATED** batch 8, cache on: tokens: {VIOLATION}" in report_markdown(report)
    shown = page(report)
    assert shown.index("VIOLATED") < shown.index(html.escape(SENTENCES[0]))
    assert csv_rows(report)[0]["violated_points"] == "1"


def test_what_was_not_measured_is_never_a_zero() -> None:
    record = with_nothing_told()
    text = cell_text(record)
    assert "Model weights memory usage: not measured" in text
    assert "Peak memory usage: not measured" in text
    assert "KV cache: on (its own), bytes not observed" in text
    assert "Time per output token: not measured" in text
    assert "Decode: not measured" in text
    assert "Memory ledger: not measured" in text
    assert not re.search(r"\b0\.00? (MB|ms)", text)
    (row,) = rows_of(table_markdown(table_report([record])), "Every cell")
    unknown = ["not measured", "not measured", "not measured", "not observed", "not measured"]
    assert row[5:] == ["not measured", row[6], *unknown, "3"]
    (fields,) = csv_rows(table_report([record]))
    assert fields["cache_bytes"] == fields["weights_bytes"] == fields["predicted_tensor_peak_bytes"] == ""


def test_the_table_has_a_row_for_each_cell_with_its_count() -> None:
    report = table_report()
    rows = rows_of(table_markdown(report), "Every cell")
    squares = [[str(batch), mode] for batch in (1, 8, 16) for mode in ("on", "off")]
    assert [row[:2] for row in rows] == squares
    assert {row[2] for row in rows} == {row["threads"] for row in csv_rows(report)} == {"2"}
    report["environment"]["threads"] = 1  # as the processes that measured say, whatever was asked for
    assert {row[2] for row in rows_of(table_markdown(report), "Every cell")} == {"1"}
    assert {row["threads"] for row in csv_rows(report)} == {"1"}
    assert ", 1 thread ·" in report_markdown(report).splitlines()[2]
    assert [row[-1] for row in rows] == ["3 (93 steps)", "2 (62 steps)"] * 3
    saved = rows_of(table_markdown(report), "What the cache saves")
    assert [row[0] for row in saved] == ["batch 1", "batch 8", "batch 16"]
    assert {row[1] for row in saved} == {"30.3x"}  # the sum of 256 to 287, over 287
    assert {row[-1] for row in saved} == {"3 on, 2 off"}


def test_a_single_repetition_shows_no_spread() -> None:
    report = table_report([cell_record(n=1)])
    (row,) = rows_of(table_markdown(report), "Every cell")
    assert "(" not in row[3]
    assert row[-1] == "1 (31 steps)"


def test_a_dead_cell_says_so_and_the_others_stand() -> None:
    dead = dead_record(batch_size=16, kv_caching=False)
    report = table_report([cell_record(batch_size=16), dead])
    alive, died = rows_of(table_markdown(report), "Every cell")
    assert alive[-1] == "3 (93 steps)"
    assert died[3:] == ["died", *["not measured"] * 8, "0"]
    for shown in (table_markdown(report), report_markdown(report), page(report)):
        assert "batch 16, cache off died: its process was killed (signal 9)" in shown
    assert "This cell: died: its process was killed" in cell_text(dead)
    assert list(figures(report)) == TABLE_PLOTS[:2] + TABLE_PLOTS[3:]  # steps need both modes
    assert csv_rows(report)[1]["error"] == dead["error"]


def test_a_cell_whose_turn_has_not_come_did_not_die() -> None:
    waiting = dead_record() | {"error": None}
    report = table_report(
        [waiting], crossovers=[], comparisons=[], reading=[], model=None, ceilings=None, environment={}
    )  # type: ignore[list-item]
    for shown in (table_markdown(report), report_markdown(report), page(report), cell_text(waiting)):  # type: ignore[arg-type]
        assert "not measured" in shown
        assert "died" not in shown
    assert figures(report) == {}


def test_faster_paths_stand_apart_by_name() -> None:
    shown = table_markdown(table_report([cell_record(), cell_record(path="fast"), cell_record(kv_caching=False)]))
    assert len(rows_of(shown, "Every cell")) == 2
    assert len(rows_of(shown, "On the fast path, apart from the plain one")) == 1
    assert [row[0] for row in rows_of(shown, "What the cache saves")] == ["batch 1"]


def test_other_engines_are_held_against_ours_and_above_one_means_ours_is_faster() -> None:
    ours, theirs = quick(cell_record(), 32), quick(cell_record(engine="transformers", path="transformers 5.23.0"), 12.8)
    shown = table_markdown(table_report([theirs, ours, with_nothing_told()]))
    rows = rows_of(shown, "How many times faster ours is, by path")
    assert rows[1] == ["transformers, batch 1, cache on", "2.50x"]
    assert "How many times faster" not in table_markdown(table_report([ours]))
    apart = table_markdown(table_report([theirs, cell_record(batch_size=8)]))
    (alone,) = rows_of(apart, "How many times faster ours is, by path")
    assert alone[1] == "not measured"


def quick(record: CellRecord, tokens_per_second: float) -> CellRecord:
    assert record["summary"] is not None
    record["summary"]["tokens_per_second"] = tokens_per_second
    return record


def test_each_way_of_ours_has_a_table_of_its_own_and_stands_against_every_peer() -> None:
    llama_cpp = "llama.cpp (llama-cpp-python 0.3.36)"
    report = table_report(
        [
            quick(cell_record(), 10),
            quick(cell_record(fast=True, path="native"), 30),
            quick(cell_record(fast=True, quantize="int8", path="native, int8 weights"), 60),
            quick(cell_record(engine="llama.cpp", path=llama_cpp), 20),
            quick(cell_record(engine="llama.cpp", quantize="int8", path=f"{llama_cpp}, Q8_0 weights"), 40),
        ]
    )
    shown = table_markdown(report)
    every = rows_of(shown, "Every cell")
    assert [(row[3], row[4]) for row in every] == [("llama", "none"), ("llama.cpp", "none"), ("llama.cpp", "int8")]
    assert len(rows_of(shown, "On the native path, apart from the plain one")) == 1
    assert len(rows_of(shown, "On the native path with int8 weights, apart from the plain one")) == 1
    assert rows_of(shown, "How many times faster ours is, by path") == [
        ["llama.cpp, batch 1, cache on", "0.50x", "1.50x", "3.00x"],
        ["llama.cpp, batch 1, cache on, int8 weights", "0.25x", "0.75x", "1.50x"],
    ]
    assert {(row["fast"], row["quantize"]) for row in csv_rows(report)} == {
        ("False", ""),
        ("True", ""),
        ("True", "int8"),
        ("False", "int8"),
    }
    assert list(figures(report)) == ["time", "memory", "peers", "crossover"]


def test_a_table_of_many_ways_is_drawn_at_its_width_and_higher() -> None:
    ways: list[dict[str, Any]] = [{"engine": "transformers"}, {"engine": "llama.cpp"}, {"fast": True, "path": "native"}]
    cells = [cell_record(batch_size=rows, **way) for rows in (1, 8, 16) for way in [{}, *ways]]
    sizes = [width_and_height(as_png(figures(table_report(shown))["time"])) for shown in (cells[:9], cells)]
    assert sizes[1] == (1350, sizes[0][1] + 225)  # half an inch for each of three rows


def test_modes_are_paired_on_one_path_and_each_path_has_its_sentences() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"fast": True, "path": "native"},
        {"fast": True, "quantize": "int8", "path": "native, int8 weights"},
    ]
    report = table_report([cell_record(kv_caching=on, **way) for on in (True, False) for way in ways])
    report["comparisons"] = [comparison(path=way.get("path", "plain")) for way in ways]
    report["comparisons"][1] |= {"equal": False}
    saved = rows_of(table_markdown(report), "What the cache saves")
    assert [row[0] for row in saved] == [
        "batch 1",
        "batch 1, fast, native path",
        "batch 1, fast, int8 weights, native path",
    ]
    sentences = "\n".join(findings(report))
    for words in (
        "At batch 1 the cache turns",
        "At batch 1, on the native path, the cache turns",
        "At batch 1, on the native path with int8 weights, the cache turns",
        "Both modes made the same tokens, all 32 of them.",
        "The two modes made different tokens on the native path at batch 1;",
        "Both modes made the same tokens on the native path with int8 weights, all 32 of them.",
    ):
        assert words in sentences
    assert "llama, batch 1, native path: cache on and off did not make the same 32 tokens" in report_markdown(report)


def test_the_lead_quotes_every_batch_with_its_times_and_its_memory() -> None:
    sentences = findings(table_report())
    for place, batch in enumerate((1, 8, 16)):
        assert sentences[2 * place].startswith(f"At batch {batch} the cache turns ")
        assert sentences[2 * place + 1].startswith("There the cache holds ")
    assert not any(sentence.startswith("At batch") for sentence in sentences[6:])


def test_a_share_is_the_cells_own_best_where_it_is_all_of_a_ceiling() -> None:
    record = cell_record()
    assert record["limits"] is not None
    for share, own in ((0.999, False), (1.0, True)):
        record["limits"]["prefill_flops_share"] = share
        assert ("the best that was seen is this cell's own" in cell_text(record)) == own
    shown = report_markdown(table_report())
    assert "26.0 GB/s (10^9 bytes), by sum, threads: 2" in shown
    assert "330.00 GFLOP/s in fp32, by linear, 1024 x 1024 x 1024" in shown


def test_curves_on_another_path_say_so() -> None:
    fast = table_report([cell_record(fast=True, path="native")])
    assert "**Where the cache begins to pay, on the native path**" in report_markdown(fast)
    assert "**Where the cache begins to pay**" in report_markdown(table_report())


def test_texts_that_differ_are_told_with_place_and_margin() -> None:
    parting = {"row": 3, "token": 17, "cached_id": 28, "uncached_id": 198, "margin": 2.1e-4}
    differ = comparison(batch_size=8, tokens=256, equal=False, divergence=parting)
    shown = report_markdown(table_report(comparisons=[differ]))
    words = "part at token 17 of row 3 (28 with it, 198 without), where the two largest logits are 0.00021 apart"
    assert f"llama, batch 8: cache on and off {words}" in shown


def test_the_csv_reads_back_as_the_very_figures() -> None:
    report = table_report()
    rows = csv_rows(report)
    assert len(rows) == 6
    for row, record in zip(rows, report["cells"], strict=True):
        summary = record["summary"]
        assert summary is not None
        assert summary["step_seconds"] is not None
        assert (int(row["batch_size"]), row["kv_caching"] == "on") == (
            record["cell"]["batch_size"],
            record["cell"]["kv_caching"],
        )
        assert float(row["time_median_s"]) == summary["seconds"]["median"]
        assert float(row["step_p90_s"]) == summary["step_seconds"]["p90"]
        assert int(row["step_n"]) == summary["step_seconds"]["n"]
        assert float(row["tokens_per_second"]) == summary["tokens_per_second"]
        assert row["cache_bytes"] == str(record["cache_bytes"])
    assert len(csv_rows(report, "crossover")) == 3 * 2 * 6


def test_a_sweep_is_told_in_full() -> None:
    report = sweep_report()
    shown = report_markdown(report)
    assert [row[0] for row in rows_of(shown, "Speed-up against generation length")] == ["10", "20", "50", "100", "200"]
    assert len(rows_of(shown, "Bytes of the KV cache against length")) == 7
    fitted = rows_of(shown, "How time grows with the context")
    assert [row[-1] for row in fitted] == ["0.02", "1.01", "1.06", "2.02"]
    assert fitted[0] == ["a token with the cache", "25.10", "620", "1,770", "0.35x", "0.997", "8", "0.02"]
    assert fitted[2][1:5] == ["10.20", "880,000", "", ""]
    assert {row["figures"] for row in csv.DictReader(io.StringIO(report_csv(report)))} == {
        *("cell", "generation length", "cache size", "context", "batch"),
        *(f"fit: a {what} {mode}" for what in ("token", "text") for mode in ("with the cache", "without the cache")),
    }


@pytest.mark.parametrize(("report", "names"), [(table_report(), TABLE_PLOTS), (sweep_report(), SWEEP_PLOTS)])
def test_the_page_is_complete_in_itself_and_has_every_picture_wide_and_narrow(report: Report, names: list[str]) -> None:
    shown, drawn = page(report), figures(report)
    assert list(drawn) == names
    assert not re.search(r"\b(?:src|srcset|action)=|\bhref=(?!\"#)|https?:|<script|<link|@import|url\((?!#)", shown)
    for sentence in [*report["reading"], report["command"]]:
        assert html.escape(sentence) in shown
    for kind in ("wide", "narrow"):
        labels = re.findall(rf'<svg class="{kind}" role="img" aria-label="([^"]*)"', shown)
        assert sorted(map(html.unescape, labels)) == sorted(heading(drawn[name]) for name in names)
    assert shown.count("<figcaption>") == len(names)
    assert not re.search(r"<summary>([^<]*)</summary>\s*<h3>\1<", shown)  # folded, a table is named once
    ids = re.findall(r'\bid="([^"]*)"', shown)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r"(?:href=\"|url\()#([^\")]*)", shown)} <= {*ids}


def test_every_colour_of_a_page_is_a_variable_that_has_a_dark_shade() -> None:
    style, body = page(table_report([with_violation()])).split("</style>", 1)
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6});", rules)) for rules in style.split("@media", 1))
    assert light.keys() == dark.keys() == palette.variables().keys()
    used = set(re.findall(r"var\(--(\w+)\)", style + body))
    assert {"cache", "anew", "ink", "paper"} <= used <= light.keys()
    assert not re.search(r"(?:fill|stroke|color): *#", body)


def test_no_file_but_the_palette_has_a_colour_of_its_own() -> None:
    package = Path(palette.__file__).parents[1]
    files = [file for kind in ("*.py", "*.css", "*.html") for file in package.rglob(kind) if file.name != "palette.py"]
    named = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b|color=[\"'](?!none)\w")
    assert len(files) > 100
    assert [file.name for file in files if named.search(file.read_text("utf-8"))] == []


def test_each_part_of_the_memory_and_each_mode_has_its_colour_on_every_picture() -> None:
    report = table_report([cell_record(kv_caching=on, logits="all") for on in (True, False)])
    (ax,) = figures(report)["memory"].axes
    colors = {bars.get_label(): matplotlib.colors.to_hex(bars.patches[0].get_facecolor()) for bars in ax.containers}
    assert colors["KV cache"] == palette.CACHE.light.lower()
    assert colors["weights"] == palette.WEIGHTS.light.lower()
    assert colors["activations"] == palette.ACTIVATIONS.light.lower()
    for report in (table_report(), sweep_report()):
        for figure in figures(report).values():
            for legend in figure.legends:
                for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
                    means = {"with the cache": palette.CACHE, "without": palette.ANEW}.get(text.get_text())
                    if means is not None and isinstance(handle, Patch):
                        assert matplotlib.colors.to_hex(handle.get_facecolor()) == means.light.lower()


def test_ratios_are_bars_from_zero_on_a_linear_axis_with_the_factor_at_each() -> None:
    cells = [quick(cell_record(engine="llama.cpp", path="llama.cpp 0.3.36"), 40), quick(cell_record(), 10)]
    cells.append(cell_record(kv_caching=False))
    drawn = figures(table_report(cells))
    panels = [drawn["time"].axes[1], drawn["peers"].axes[0], figures(sweep_report())["speedup"].axes[1]]
    for ax in panels:
        written = [text.get_text() for text in ax.texts if re.fullmatch(r"[\d.]+x", text.get_text())]
        digits = len(written[0].partition(".")[2]) - 1
        assert [f"{bar.get_width():.{digits}f}x" for bar in ax.patches] == written
        assert {bar.get_x() for bar in ax.patches} == {0}
        assert (ax.get_xscale(), ax.get_xlim()[0]) == ("linear", 0)
    assert [bar.get_width() for bar in panels[1].patches] == [0.25]
    assert len(panels[0].patches) == 1  # a peer without a run of the other mode has no ratio


def words_of(figure: Figure) -> list[Text]:
    """Return what is written in a picture, without what an axis keeps for values out of view."""
    kept = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        kept |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip() and one not in kept]


@pytest.mark.parametrize("look", [Look(), Look(narrow=True)], ids=["wide", "narrow"])
def test_no_words_of_a_picture_lie_on_others_or_leave_it_or_are_small(look: Look) -> None:
    ways: list[dict[str, Any]] = [{}, {"engine": "transformers"}, {"fast": True, "path": "native"}]
    crowd = table_report([cell_record(kv_caching=on, **way) for on in (True, False) for way in ways])
    for name, figure in (figures(crowd, look) | figures(sweep_report(), look)).items():
        words = words_of(figure)
        boxes = [one.get_window_extent() for one in words]
        assert min(one.get_fontsize() for one in words) >= look.small, name
        assert [one for one, box in zip(words, boxes, strict=True) if box.x0 < 0 or box.x1 > figure.bbox.x1 + 1] == []
        for (one, box), (other, against) in combinations(zip(words, boxes, strict=True), 2):
            assert not box.padded(-1).overlaps(against.padded(-1)), (name, one.get_text(), other.get_text())


def test_texts_of_others_stay_texts() -> None:
    report = table_report([cell_record() | {"text": EVIL, "notes": [EVIL]}, dead_record() | {"error": f"died: {EVIL}"}])  # type: ignore[list-item]
    report |= {"command": EVIL, "reading": [EVIL]}
    for shown in (page(report), report_markdown(report)):
        assert "<script" not in shown
        assert "<img src=http" not in shown
    died = [row for row in rows_of(report_markdown(report), "Every cell") if row[3] == "died"]
    assert len(died[0]) == 13
    assert "\x1b" not in cell_text(report["cells"][0]).partition("Notes")[0]


@pytest.mark.slow
@pytest.mark.parametrize("report", [table_report(), sweep_report()])
def test_pictures_are_drawn_at_their_size_and_alike_each_time(report: Report) -> None:
    again = figures(report)
    for name, figure in figures(report).items():
        png = as_png(figure)
        width, height = width_and_height(png)
        assert width == 1350
        assert 400 < height < 1400
        svg = as_svg(figure)
        assert svg.startswith("<svg viewBox=")
        assert (as_png(again[name]), as_svg(again[name])) == (png, svg)
    assert page(report) == page(report)


def test_pictures_do_without_figures_that_were_not_measured() -> None:
    report = table_report([cell_record(n=1, output_len=1), cell_record(n=1, output_len=1, kv_caching=False)])
    assert "steps" not in figures(report)
    drawn = figures(table_report([with_nothing_told(), cell_record(batch_size=8)], crossovers=[]))
    assert list(drawn) == ["time", "memory"]
    assert all(as_png(figure) for figure in drawn.values())


@pytest.mark.parametrize("report", [table_report(), sweep_report()])
def test_every_picture_says_which_colour_is_which(report: Report) -> None:
    for name, figure in figures(report).items():
        legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend() is not None)]
        words = [text.get_text() for legend in legends for text in legend.get_texts()]
        if name == "memory":
            assert {"weights", "KV cache"} <= set(words)
        elif name == "cache":
            assert any("predicted" in text for text in words)
        else:
            assert {"with the cache", "without"} <= set(words), name


def test_a_sweep_draws_the_curves_that_it_has() -> None:
    whole = sweep_report()
    assert whole["sweep"] is not None
    curves = dict(zip(SWEEP_PLOTS, ("growth", "cache", "contexts", "batches"), strict=True))
    for left_out in (SWEEP_PLOTS[::2], SWEEP_PLOTS[1::2]):
        without: Any = {**whole["sweep"], **{curves[name]: [] for name in left_out}}
        assert figures({**whole, "sweep": without}).keys() == set(SWEEP_PLOTS) - set(left_out)
    one_mode: Any = {**whole["sweep"], "contexts": [one for one in whole["sweep"]["contexts"] if one["kv_caching"]]}
    assert as_png(figures({**whole, "sweep": one_mode})["context"])


def test_a_cache_that_never_pays_is_said_over_its_picture_and_in_the_panel() -> None:
    never, both = (table_report(crossovers=[crossover(1, context=None), crossover(8, context=at)]) for at in (None, 4))
    drawn = [figures(report)["crossover"] for report in (never, both)]
    titles = [figure.texts[0].get_text().replace("\n", " ") for figure in drawn]
    assert titles == [
        "The cache does not pay at any context that was tried",
        "The cache pays from a context of 4 tokens on, not at batch 1",
    ]
    assert [ax.get_title(loc="left") for ax in drawn[1].axes] == ["batch 1", "batch 8"]
    shown = [[text.get_text() for text in ax.texts] for ax in drawn[1].axes]
    assert [any("no crossover" in text for text in panel) for panel in shown] == [True, False]
    assert [any("pays from" in text for text in panel) for panel in shown] == [False, True]
    assert "nowhere up to 1024 at batch 1, from a context of 4 at batch 8" in "\n".join(findings(both))


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ([4.0], "4.0x less"),
        ([8.1, 24.2], "8.1x to 24.2x less"),
        ([0.5, 0.8], "1.2x to 2.0x more"),
        ([0.5, 3.0], "from 2.0x more to 3.0x less"),
    ],
)
def test_headings_say_less_and_more_as_it_is(factors: list[float], said: str) -> None:
    assert all_less(factors) == said


def test_bars_reach_from_p10_to_p90_and_never_past_the_median() -> None:
    one, single = {"n": 5, "median": 4.0, "p10": 3.5, "p90": 6.0}, {"n": 1, "median": 2.0, "p10": 2.0, "p90": 2.0}
    odd = {"n": 2, "median": 1.0, "p10": 1.25, "p90": 0.75}  # of figures that were rounded apart
    assert bars([one, single, odd]) == [[0.5, 0.0, 0.0], [2.0, 0.0, 0.0]]  # type: ignore[list-item]


def test_panels_stand_three_in_a_row_or_narrow_one_under_another() -> None:
    for look, rises in ((Look(), [0, 0, 2, 2, 4]), (Look(narrow=True), [0, 4, 6, 10, 12])):
        made = [new_figure(look, "a heading", "small words", heights=[2.0] * count) for count in (1, 3, 4, 6, 7)]
        assert [len(axes) for _, axes in made] == [1, 3, 4, 6, 7]
        heights = [figure.get_size_inches()[1] for figure, _ in made]
        assert [round(height - heights[0], 2) for height in heights] == rises


def test_logits_of_all_positions_are_named_where_they_make_the_peak() -> None:
    for logits in ("last", "all"):
        report = table_report([cell_record(kv_caching=on, logits=logits) for on in (True, False)])
        said = "what makes the difference is not the cache but the logits of all positions, 0.2 MB" in " ".join(
            findings(report)
        )
        assert said == (logits == "all")


def test_what_cannot_be_set_off_against_another_is_not_measured() -> None:
    on, off = (cell_record(kv_caching=kv_caching, n=1, output_len=1) for kv_caching in (True, False))
    on["work"] = None
    (row,) = rows_of(table_markdown(table_report([on, off])), "What the cache saves")
    assert row[1] == row[3] == "not measured"
    assert row[2].endswith("x")


def test_a_name_with_dollar_signs_is_no_formula() -> None:
    report = table_report(model={"name": r"$\frac$_{", "weights": "random", "parameters": None, "sizes": None})
    assert as_svg(figures(report)["time"])


def test_a_report_is_written_as_files_and_read_back_equal(tmp_path: Path) -> None:
    report = table_report()
    paths = write_report(report, tmp_path / "results" / "today")
    names = ["results.json", "report.md", "table.csv", "page.html", *(f"plots/{name}.png" for name in TABLE_PLOTS)]
    assert [path.relative_to(tmp_path / "results" / "today").as_posix() for path in paths] == names
    assert json.loads(paths[0].read_text("utf-8")) == report
    assert paths[3].read_text("utf-8") == page(report)
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert sorted(files) == sorted(paths)  # nothing half-written is left over


def test_a_path_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "results.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    for bad in (tmp_path, tmp_path / "file" / "results.json"):
        with pytest.raises(OSError, match=re.escape(str(bad if bad.exists() else bad.parent))):
            check_writable(bad)


def test_a_figure_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_report(table_report(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    report = table_report(budget_minutes=float("nan"), reading=[])
    with pytest.raises(ValueError, match="nan"):
        write_report(report, tmp_path)
    with pytest.raises(ValueError, match="nan"):
        write_json(report, tmp_path / "results.json")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def rows_with_parts(**parts: float) -> list[CellRecord]:
    """Return a cell, on and off, whose peak is made of so many MB of each part."""
    records = [cell_record(kv_caching=on) for on in (True, False)]
    for record in records:
        ledger = record["ledger"]
        assert ledger is not None
        for line in ledger["lines"]:
            held = int(parts.get(line["name"].split()[-1], 0) * 2**20)
            line |= {"predicted": held, "measured": held, "counts": True}
        ledger |= {"measured_peak": int(sum(parts.values()) * 2**20)}
    return records


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"weights": 513, "cache": 12, "activations": 7}, "513 of 532 MB at the peak are weights."),
        ({"weights": 100, "cache": 12, "logits": 700}, "700 of 812 MB at the peak are logits."),
        ({"weights": 100, "cache": 400}, "400 of 500 MB at the peak are the KV cache."),
        ({"weights": 3.2, "activations": 6.3}, "6.3 of 9.5 MB at the peak are activations."),
        ({"weights": 100, "cache": 90, "logits": 80}, "100 of 270 MB at the peak are weights, its largest part."),
        ({"weights": 10, "elsewhere": 30}, "30 of 40 MB at the peak are beyond the ledger."),
    ],
)
def test_one_sentence_says_what_rules_the_peak_wherever_memory_is_shown(parts: dict[str, float], sentence: str) -> None:
    records = rows_with_parts(**parts)
    report = table_report(records, crossovers=[])
    assert f"  {sentence}" in cell_text(records[0]).splitlines()
    assert f"- {sentence}" in report_markdown(report).partition("## Time and memory")[2].splitlines()[:3]
    assert heading(figures(report)["memory"]) == sentence.rstrip(".")
    assert f"<figcaption>{sentence.rstrip('.')}<small>" in page(report)


def test_cells_that_different_parts_rule_are_told_apart_and_a_prediction_is_called_one() -> None:
    small, large = rows_with_parts(weights=500, logits=20), rows_with_parts(weights=500, logits=900)
    for record in large:
        record["cell"]["batch_size"] = 16
    words = "500 of 520 MB at the peak are weights (batch 1); 900 of 1,400 MB at the peak are logits (batch 16)."
    assert f"- {words}" in report_markdown(table_report([*small, *large]))
    assert small[0]["ledger"] is not None
    small[0]["ledger"]["measured_peak"] = None
    small[0]["ledger"]["predicted_peak"] = 520 * 2**20
    assert "500 of 520 MB at the predicted peak are weights." in cell_text(small[0])


@pytest.mark.parametrize("name", ["peers", "sweep", "table", "table-logits-all"])
def test_the_recorded_reports_are_read_back_and_say_what_their_files_say(name: str) -> None:
    folder = Path(__file__).parents[2] / "docs/results" / name
    stored = json.loads((folder / "results.json").read_text("utf-8"))
    report = read_report(folder / "results.json")
    assert report_markdown(report) == (folder / "report.md").read_text("utf-8")
    told = dict(environment_table(report).rows)
    assert {"llama kv", "gpu"}.isdisjoint(told), "a fact that was not recorded has no row"
    assert told["best read bandwidth that was seen"].endswith("GB/s (10^9 bytes)"), "nor what reached a ceiling"
    pages = [file.read_text("utf-8") for file in folder.glob("page.html")]
    assert all(f"<td>{html.escape(name)}</td>" in text for text in pages for name in told)
    assert not any("not installed" in text or "by not observed" in text for text in pages)
    for record, before in zip(report["cells"], stored["cells"], strict=True):
        assert record["cell"].items() >= before.pop("cell").items()
        assert record.items() >= before.items()


LOOK = """<iframe width="%s" height="900" srcdoc="%s"></iframe><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const shown = [...page.querySelectorAll("svg")].filter(one => one.getBoundingClientRect().width > 0);
  const sizes = shown.flatMap(one => [...one.querySelectorAll("text")].map(
    text => parseFloat(getComputedStyle(text).fontSize) * one.getScreenCTM().a));
  const seen = [shown.map(one => one.classList[0]), Math.min(...sizes), page.documentElement.scrollWidth];
  document.body.dataset.seen = JSON.stringify(seen);
});
</script>"""


def looked_at(folder: Path, report: Report, width: int) -> Any:
    """Return which pictures a browser of a width shows of the page, their smallest letters, and the page's width."""
    file = folder / "page.html"
    file.write_text(f"<!DOCTYPE html><body>{LOOK % (width, html.escape(page(report)))}", "utf-8")
    program = "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=5000"
    flags = ["--window-size=1700,1000", f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run([*program.split(), *flags], capture_output=True, text=True, timeout=120, check=True)
    (seen,) = re.findall(r'data-seen="([^"]*)"', done.stdout)
    return json.loads(html.unescape(seen))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("report", "width"),
    [(table_report([with_violation(), dead_record()]), 400), (table_report(), 800), (sweep_report(), 400)],
)
def test_a_browser_shows_every_picture_at_a_size_to_be_read_and_the_page_is_as_wide_as_it(
    tmp_path: Path, report: Report, width: int
) -> None:
    pictures, letters, page_width = looked_at(tmp_path, report, width)
    assert pictures == ["narrow" if width < 800 else "wide"] * len(figures(report))
    assert letters >= 11  # px
    assert page_width <= width
