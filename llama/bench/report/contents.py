"""What a report consists of, whatever its preset is."""

from llama.bench.report import tables
from llama.bench.report.caches import cache_sections, cache_tables
from llama.bench.report.chat import chat_sections, chat_tables
from llama.bench.report.tables import Section, Table
from llama.bench.schema import Report


def report_sections(report: Report) -> list[Section]:
    """Return the whole report behind its head, in reading order."""
    if report.get("caches") is not None:  # a report of before does not have the field
        return cache_sections(report)
    return tables.sections(report) if report.get("chat") is None else chat_sections(report)


def result_tables(report: Report) -> list[Table]:
    """Return the tables that a terminal shows."""
    if report.get("caches") is not None:
        return cache_tables(report)
    return tables.result_tables(report) if report.get("chat") is None else chat_tables(report)
