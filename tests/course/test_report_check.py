"""Impossible measurements in a report's table are found, and a real table passes."""

from pathlib import Path

import pytest

from course.make import KIT
from course.report_check import check_report

# (batch, cache, seconds, peak MB), as docs/results/table has them.
REAL = [(1, "on", 1.04, 532.0), (1, "off", 8.47, 520.3), (8, "on", 2.65, 663.9), (8, "off", 64.49, 570.1),
        (16, "on", 5.09, 814.7), (16, "off", 123.21, 627.2)]  # fmt: skip
Row = tuple[int, str, float, float]


def found(folder: Path, rows: list[Row], *, wanted: bool = True) -> list[str]:
    lines = [f"| {batch} | {mode} | {seconds} | {peak} | 1.0 | 2.0 |" for batch, mode, seconds, peak in rows]
    (folder / "report.md").write_text("\n".join(lines))
    return [finding.name for finding in check_report(folder / "report.md", wanted=wanted)]


def test_a_real_table_is_let_pass(tmp_path: Path) -> None:
    assert found(tmp_path, REAL) == []


def test_peaks_that_only_rise_and_repeat_were_not_reset(tmp_path: Path) -> None:
    rows = [(b, m, s, REAL[2 * (i // 2)][3]) for i, (b, m, s, _) in enumerate(REAL)]
    assert found(tmp_path, rows) == ["report-peaks-not-reset"]


def test_a_first_row_slower_than_larger_ones_was_not_warmed_up(tmp_path: Path) -> None:
    assert found(tmp_path, [(1, "on", 3.9, 532.0), *REAL[1:]]) == ["report-no-warm-up"]


def test_modes_that_were_swapped_are_found(tmp_path: Path) -> None:
    rows = [(b, "off" if m == "on" else "on", s, p) for b, m, s, p in REAL]
    assert found(tmp_path, rows) == ["report-on-is-off"]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_blank_report_counts_where_one_is_wanted(wanted: bool) -> None:
    names = [finding.name for finding in check_report(KIT / "report.md", wanted=wanted)]
    assert names == ["report-missing"] * wanted


def test_numbers_that_are_none_and_files_that_are_not_there_break_nothing(tmp_path: Path) -> None:
    assert check_report(tmp_path / "report.md", wanted=False) == []
    (tmp_path / "report.md").write_bytes(
        b"\xff\xfe" + b"| 1 | on | 1.2.3 | ,,, |\n" * 10 + b"| %b | on | 1 | 1 |\n" % (b"9" * 5000)
    )
    check_report(tmp_path / "report.md", wanted=True)
