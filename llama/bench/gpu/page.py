"""A GPU report as Markdown and as a plot. Knows nothing of how the figures were measured."""

import io
from collections.abc import Sequence

from llama.bench.gpu.rows import NotHere, Report, StepRow
from llama.bench.report.tables import NOT_MEASURED, on_or_off
from llama.bench.schema import Spread
from llama.costs import table

# sections that measure engines, and how their rows are called
ENGINES = {
    "jobs": "llama",
    "transformers": "transformers, eager",
    "static": "transformers, static cache",
    "gpt_fast": "gpt-fast",
}


def plot(rows: Sequence[StepRow]) -> bytes:
    """Draw what a decode step takes by batch, beside its floor."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NotHere("matplotlib is not installed") from None
    if not rows:
        raise NotHere("no step was measured")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    ax = figure.subplots()
    for way in dict.fromkeys(row.way for row in rows):
        mine = [row for row in rows if row.way == way]
        ax.plot([row.rows for row in mine], [row.milliseconds["median"] for row in mine], "o-", label=f"{way} kernels")
    floors = {row.rows: row.floor for row in rows if row.floor is not None}
    ax.plot(list(floors), list(floors.values()), "k--", label="floor: bytes / copy bandwidth")
    ax.set(xlabel="rows in a batch", ylabel="ms a decode step", ylim=(0, None), title="A cached decode step, replayed")
    ax.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    return drawn.getvalue()


def as_markdown(report: Report) -> str:
    parts = [*fact_lines(report), *check_lines(report), *speed_lines(report), *memory_lines(report)]
    parts += [*profile_lines(report), *start_lines(report)]
    left_out = [[section, why(report, section)] for section in report.missing] or [["none", ""]]
    return "\n".join([*parts, table("## Not run, or not to the end", ["section", "why"], left_out)])


def fact_lines(report: Report) -> list[str]:
    facts = report.facts
    gpu = facts["gpu"] or {}
    told = {"GPU": gpu.get("name"), "driver": gpu.get("driver"), "CUDA": gpu.get("cuda")}
    told |= {"commit": facts["commit"] or "unknown"}
    told |= {f"peer {name}": version for name, version in facts["peers"].items()}
    told |= {name: value for name, value in facts.items() if name not in ("kind", "gpu", "commit", "peers")}
    lines = [f"- {name}: {'not known' if value is None else value}" for name, value in told.items()]
    return ["# GPU report", "", f"**{facts['kind']}**", "", f"    {report.command}", "", *lines, ""]


def check_lines(report: Report) -> list[str]:
    outcomes = {True: "passed", False: "**FAILED**", None: "not run"}
    rows = [[in_cell(check.name), outcomes[check.passed], in_cell(check.detail)] for check in report.checks]
    return [table("## Checks", ["check", "outcome", "detail"], rows or [["all", "not run", why(report, "checks")]])]


def why(report: Report, section: str) -> str:
    return in_cell(report.missing.get(section, NOT_MEASURED))


def in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def speed_lines(report: Report) -> list[str]:
    rates = f"copy {number(report.copied, 1e9)} GB/s (read and written), sum {number(report.read, 1e9)} GB/s (read)"
    return [
        f"## Speed\n\nLimits: {rates}. Figures are medians with p10 to p90.\n",
        step_table(report),
        job_table(report),
    ]


def step_table(report: Report) -> str:
    rows = []
    for row in report.steps:
        share = None if row.floor is None else 100 * row.floor / row.milliseconds["median"]
        figures = [words(row.milliseconds), number(row.floor, digits=3), number(share), f"{row.record_seconds:.1f}"]
        rows.append([f"{row.way} kernels", str(row.rows), *figures])
    clock, length = "CUDA events" if report.facts["gpu"] else "the host's clock", report.facts["input_len"]
    return table(
        f"### The cached step alone, ms: replays one after another by {clock}, from {length} keys on",
        ["step", "batch", "time", f"floor at {length}", "% of floor", "record, s"],
        rows or [[why(report, "steps"), *[""] * 5]],
    )


def job_table(report: Report) -> str:
    rows = []
    for row in report.jobs:
        figures = [words(row.milliseconds), words(row.step), number(row.first, digits=0)]
        rows.append([row.way, str(row.rows), on_or_off(row.kv_caching), *figures, row.note])
    rows += [[engine, *[""] * 5, why(report, name)] for name, engine in ENGINES.items() if name in report.missing]
    lengths = f"{report.facts['input_len']} in and {report.facts['output_len']} out"
    return table(
        f"### Whole jobs, {lengths}, ms by the host's clock; a step is (job - job of one token) / steps",
        ["engine", "batch", "cache", "job", "step", "first job", "note"],
        rows or [[NOT_MEASURED, *[""] * 6]],
    )


def memory_lines(report: Report) -> list[str]:
    """Show the allocator's figures. The floor is of weights, cache, logits and activations, without workspaces."""
    rows = []
    for row in report.jobs:
        over = None if row.peak is None or row.peak_floor is None else 100 * (row.peak / row.peak_floor - 1)
        sizes = [number(each, 1e6) for each in (row.reserved, row.graph_pool, row.workspace)]
        peaks = [number(row.peak, 1e6), number(row.peak_floor, 1e6), number(over)]
        rows.append([row.way, str(row.rows), on_or_off(row.kv_caching), *peaks, *sizes])
    heads = ["engine", "batch", "cache", "peak", "floor", "over, %", "reserved", "graph pool", "cuBLAS"]
    lines = [
        [job, line["name"], number(line["predicted"], 1e6), number(line["measured"], 1e6), line["note"]]
        for job, ledger in report.ledgers.items()
        for line in ledger
    ]
    return [
        table("## Memory, MB of 10^6 bytes", heads, rows or [[why(report, "jobs"), *[""] * 8]]),
        table(
            "### Ledger, MB of 10^6 bytes",
            ["job", "line", "predicted", "measured", "note"],
            lines or [[why(report, "jobs"), *[""] * 4]],
        ),
    ]


def profile_lines(report: Report) -> list[str]:
    limit = report.copied
    rows = []
    for row in report.kernels:
        rate = row.bytes / row.microseconds * 1e6 if row.bytes and row.microseconds else None
        share = 100 * rate / limit if rate and limit else None
        sizes = [number(row.bytes, 1e6), number(rate, 1e9, 0), number(share, digits=0)]
        rows.append([f"`{in_cell(row.name[:80])}`", str(row.count), f"{row.microseconds:.1f}", *sizes])
    heads = ["kernel", "calls", "us", "must move, MB", "GB/s", "% of copy"]
    gaps = "Gaps between kernels: " + (
        NOT_MEASURED
        if report.gap_sum is None
        else f"{number(report.gap_sum)} us in all, each {words(report.gaps, ' us')}"
    )
    overlap = "A kernel that begins before the last one has ended counts the time that it waits."
    return [
        table("## One step, profiled", heads, rows or [[why(report, "profile"), *[""] * 5]]),
        f"{gaps}. {overlap}\n",
    ]


def start_lines(report: Report) -> list[str]:
    rows = [[str(at), *(f"{value:.1f}" for value in found.values())] for at, found in enumerate(report.starts, 1)]
    heads = ["process", "first token", "first generation"]
    return [table("## Start of another process, s from its beginning", heads, rows or [[why(report, "start"), "", ""]])]


def number(value: float | None, unit: float = 1.0, digits: int = 1) -> str:
    return NOT_MEASURED if value is None else f"{value / unit:,.{digits}f}"


def words(figure: Spread | None, unit: str = "") -> str:
    if figure is None:
        return NOT_MEASURED
    middle, low, high = (significant(value) for value in (figure["median"], figure["p10"], figure["p90"]))
    return f"{middle}{unit} ({low} to {high}, n={figure['n']})"


def significant(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
