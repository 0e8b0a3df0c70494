"""A report as tables and sentences, ready for any page: which figure stands where, and in which words.

Knows nothing of Markdown, HTML or how anything was measured. MB is 2^20 bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama.bench.cell import Cell
from llama.bench.schema import (
    CellRecord,
    Comparison,
    Crossover,
    Fit,
    Line,
    Point,
    Report,
    Spread,
    StepTimes,
    Summary,
    Sweep,
)
from llama.costs import MB, size

NOT_MEASURED, NOT_OBSERVED = "not measured", "not observed"

TITLES = {"table": "With and without KV cache", "sweep": "What the KV cache saves as batch and length grow"}

DEFINITIONS = (
    ("time", "the whole job: from the call with the prompts until the last token of all rows is on the host"),
    ("time to first token", "from the same call until the first token of all rows is on the host"),
    ("time per output token", "a later step, which makes one token for every row; over the steps of all repetitions"),
    ("tokens per second", "batch size x output length / median time: the prefill is included"),
    ("prefill tokens/s", "batch size x input length / median time to first token"),
    ("decode tokens/s", "batch size x (output length - 1) / median time from the first token to the last"),
    ("spread", "in brackets: the values under which 10 % and 90 % lie; a single value has none"),
    ("n", "how many repetitions, and how many steps in all of them, a row's figures come from"),
    (
        "peak of tensors",
        "the most bytes in tensors: CUDA's own count, on a CPU a trace of PyTorch's allocator in a run of its own",
    ),
    ("peak resident", "the most memory of the process that was in RAM: tensors, code, and what libraries keep"),
    ("cache off", "every step is longer than all before it, so all but two are the first of their shape, and not warm"),
    ("path", "what executed the forwards: plain, exact, native or CUDA graphs, as was seen, or a peer and its version"),
    ("KV cache", "the bytes that the tensors of the cache held at the last step"),
    ("token-forwards", "tokens fed through the model, over all rows and steps: the work"),
    ("less work, less time", "token-forwards, and median times, without the cache over those with it"),
    ("bound by", "what holds the middle step back, by its share of the rates measured on this machine at the start"),
    ("predicted", "worked out from the model's sizes alone; the residual is measured less predicted"),
    ("R^2", "the share of the variance of the times that a fitted line explains"),
    ("crossover", "the context from which on a step with the cache is faster than one without"),
    ("MB", "2^20 bytes"),
)

# What two cells must share before one is held against the other.
_SAME = ("batch_size", "input_len", "output_len", "model", "quantize", "logits", "device", "dtype", "threads", "text")
_MAY_VARY = (
    "engine",
    "fast",
    "quantize",
    "kv_cache",
    "logits",
    "dtype",
    "device",
    "threads",
    "input_len",
    "output_len",
    "model",
)


@dataclass(frozen=True)
class Grid:
    """A table of words: the first column names the row. `notes` stand under it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def megabytes(nbytes: int | float | None, missing: str = NOT_MEASURED) -> str:
    return missing if nbytes is None else f"{nbytes / MB:.2f} MB"


def in_words(figure: Spread | None, *, scale: float = 1.0, digits: int = 2) -> str:
    """Return the median, and in brackets p10 and p90 where there is more than one value."""
    if figure is None:
        return NOT_MEASURED
    median, low, high = (f"{value * scale:.{digits}f}" for value in (figure["median"], figure["p10"], figure["p90"]))
    return median if figure["n"] == 1 else f"{median} ({low}-{high})"


def rate(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


def title(report: Report) -> str:
    return TITLES.get(report["preset"], "A KV cache benchmark")


def byline(report: Report) -> list[str]:
    """Return what the title leaves open: the model, the machine and the date, as far as they are known."""
    model = report["model"]
    names = [] if model is None else [f"{model['name']} ({model['weights']})"]
    gpu, cpu = (report["environment"].get(key) for key in ("gpu", "cpu"))
    machine = [_words(one["name"] if isinstance(one, dict) else one) for one in (gpu, cpu) if one is not None]
    return [*names, *machine, report["started"][:16].replace("T", " ")]


def label(record: CellRecord) -> str:
    """Return what tells a cell from the others of its report."""
    cell = Cell(**record["cell"])
    name = cell.name
    shown = stands_apart(record) or (cell.fast and record["summary"] is not None)  # also where it fell back
    path = f", {record['path'].partition(', ')[0]} path" if shown else ""
    return name + path + (", logits of all positions" if record["cell"]["logits"] == "all" else "")


def stands_apart(record: CellRecord) -> bool:
    """Tell whether the cell ran on one of our own faster paths, which no plain cell may be held against."""
    return record["cell"]["engine"] == "llama" and record["path"] not in ("plain", "")


def path_words(path: str) -> str:
    """Return one of our paths in words: native path, plain path with int8 weights."""
    way, _, weights = path.partition(", ")
    return f"{way} path" + (f" with {weights}" if weights else "")


def on_or_off(kv_caching: bool) -> str:
    return "on" if kv_caching else "off"


def on_cuda(record: CellRecord) -> bool:
    return str(record["cell"]["device"]).startswith("cuda")


def groups(report: Report) -> list[list[CellRecord]]:
    """Return the measured cells, in the order of the table, in groups that differ in the cache alone, on first."""
    found: dict[tuple[Any, ...], list[CellRecord]] = {}
    for record in _in_order(report["cells"]):
        if record["summary"] is not None:
            cell = record["cell"]
            alike = (cell["engine"], record["path"], cell["fast"], *(cell[key] for key in _SAME))
            found.setdefault(alike, []).append(record)
    return list(found.values())


def pairs(report: Report) -> list[tuple[CellRecord, CellRecord]]:
    """Return each measured cell with the cache beside the same one without, in the order of the table."""
    return [(on, off) for group in groups(report) for on in group for off in group if _switched(on, off)]


def _switched(on: CellRecord, off: CellRecord) -> bool:
    return on["cell"]["kv_caching"] and not off["cell"]["kv_caching"]


def _in_order(records: Sequence[CellRecord]) -> list[CellRecord]:
    def place(record: CellRecord) -> tuple[Any, ...]:
        cell = record["cell"]
        modes = cell["engine"], cell["fast"], cell["quantize"] or ""
        return cell["batch_size"], cell["engine"] != "llama", *modes, not cell["kv_caching"]

    return sorted(records, key=place)


def cell_grids(report: Report) -> list[Grid]:
    """Return the with/without table, then one for each faster path of our own: a row per cell."""
    records = _in_order(report["cells"])
    plain = [record for record in records if not stands_apart(record)]
    grids = [_cell_grid("Every cell", plain)] if plain else []
    for path in sorted({record["path"] for record in records if stands_apart(record)}):
        apart = [record for record in records if stands_apart(record) and record["path"] == path]
        grids.append(_cell_grid(f"On the {path_words(path)}, apart from the plain one", apart))
    return grids


def table_grids(report: Report) -> list[Grid]:
    """Return the tables of the cells, then what the cache saves, then the others against each of our paths."""
    more = [speedup_grid(report), against_grid(report)]
    return [*cell_grids(report), *(grid for grid in more if grid is not None)]


def _cell_grid(name: str, records: Sequence[CellRecord]) -> Grid:
    varying = [key for key in _MAY_VARY if len({record["cell"][key] for record in records}) > 1]
    peers = "engine" in varying
    heads = ["batch size", "KV cache", *(key.replace("_", " ") for key in varying)]
    ratio = ["ours, times faster"] if peers else []
    notes = [f"{label(record)} {fate(record)}" for record in records if record["error"] is not None]
    notes += ["ours, times faster: their time over ours, same batch size, mode and weights"] if peers else []
    rows = []
    for record in records:
        cell = record["cell"]
        row = [str(cell["batch_size"]), on_or_off(cell["kv_caching"]), *(_asked(cell[key]) for key in varying)]
        row += _figures(record) + ([_ratio(record, records)] if peers else []) + [_count(record["summary"])]
        rows.append(row)
    return Grid(name, [*heads, *(head for head, _ in _FIGURES), *ratio, "n"], rows, notes)


def _asked(value: object) -> str:
    """Return a field of a cell in words."""
    return {"True": "yes", "False": "no", "None": "none"}.get(str(value), str(value))


def _figures(record: CellRecord) -> list[str]:
    if record["summary"] is None:
        return [fate(record).partition(":")[0], *(NOT_MEASURED for _ in _FIGURES[1:])]
    return [words(record, record["summary"]) for _, words in _FIGURES]


# The columns of the table, and where their words come from.
_FIGURES: tuple[tuple[str, Callable[[CellRecord, Summary], str]], ...] = (
    ("time, s", lambda _, summary: in_words(summary["seconds"])),
    ("time to first token, s", lambda _, summary: in_words(summary["first_token_seconds"], digits=3)),
    ("time per output token, ms", lambda _, summary: in_words(summary["step_seconds"], scale=1e3, digits=1)),
    ("prefill tokens/s", lambda _, summary: rate(summary["prefill_tokens_per_second"])),
    ("decode tokens/s", lambda _, summary: rate(summary["decode_tokens_per_second"])),
    ("peak of tensors, MB", lambda _, summary: in_words(summary["peak_bytes"], scale=1 / MB)),
    ("peak resident, MB", lambda _, summary: in_words(summary["resident_bytes"], scale=1 / MB)),
    ("KV cache, MB", lambda record, _: megabytes(record["cache_bytes"], NOT_OBSERVED).removesuffix(" MB")),
    ("work, token-forwards", lambda record, _: _forwards(record)),
)


def _forwards(record: CellRecord) -> str:
    return NOT_MEASURED if record["work"] is None else f"{record['work']['token_forwards']:,}"


def _count(summary: Summary | None) -> str:
    if summary is None:
        return "0"
    steps = summary["step_seconds"]
    return f"{summary['seconds']['n']}" + ("" if steps is None else f" ({steps['n']} steps)")


def _ratio(record: CellRecord, records: Sequence[CellRecord]) -> str:
    def key(one: CellRecord) -> tuple[Any, ...]:
        return (one["cell"]["kv_caching"], *(one["cell"][name] for name in _SAME))

    if record["cell"]["engine"] == "llama":
        return "ours"
    ours = [one["summary"] for one in records if one["cell"]["engine"] == "llama" and key(one) == key(record)]
    if not ours and record["cell"]["quantize"] is not None:
        return "not the same weights"
    return _times_faster(ours[0] if ours else None, record["summary"])


def _times_faster(ours: Summary | None, theirs: Summary | None) -> str:
    if ours is None or theirs is None:
        return NOT_MEASURED
    return f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}x"


def against_grid(report: Report) -> Grid | None:
    """Return how many times faster each of our paths is than each of the others; None where we have one path alone."""

    def key(one: CellRecord) -> tuple[Any, ...]:
        return one["cell"]["kv_caching"], *(one["cell"][name] for name in _SAME if name != "quantize")

    records = [one for one in _in_order(report["cells"]) if one["summary"] is not None]
    ours = [one for one in records if one["cell"]["engine"] == "llama"]
    theirs = [one for one in records if one["cell"]["engine"] != "llama"]
    paths = list(dict.fromkeys(one["path"] for one in ours))
    if not theirs or len(paths) < 2:
        return None
    times = {(key(one), one["path"]): one["summary"] for one in reversed(ours)}
    rows = [
        [label(one), *(_times_faster(times.get((key(one), path)), one["summary"]) for path in paths)] for one in theirs
    ]
    notes = ["their time over ours, same batch size and mode: above 1 ours is the faster one; weights are as named"]
    return Grid("How many times faster ours is, by path", ["than", *map(path_words, paths)], rows, notes)


def speedup_grid(report: Report) -> Grid | None:
    """Return how much work and time the cache saves in each pair of cells; None where no pair is complete."""
    rows = []
    for cached, uncached in pairs(report):
        on, off = cached["summary"], uncached["summary"]
        assert on is not None
        assert off is not None
        limits = [one["limits"]["bound_by"] if one["limits"] else NOT_OBSERVED for one in (cached, uncached)]
        counts = f"{on['seconds']['n']} on, {off['seconds']['n']} off"
        name = label(cached).replace(", cache on", "")
        rows.append([name, less_work(cached, uncached), f"{off['seconds']['median'] / on['seconds']['median']:.1f}x"])
        rows[-1] += [_less_step_time(on, off), *limits, counts]
    heads = [
        "cell",
        "less work",
        "less time",
        "less time per output token",
        "bound by, cache on",
        "bound by, cache off",
    ]
    return Grid("What the cache saves", [*heads, "n"], rows) if rows else None


def less_work(cached: CellRecord, uncached: CellRecord) -> str:
    if cached["work"] is None or uncached["work"] is None:
        return NOT_MEASURED
    return f"{uncached['work']['token_forwards'] / cached['work']['token_forwards']:.1f}x"


def _less_step_time(on: Summary, off: Summary) -> str:
    if on["step_seconds"] is None or off["step_seconds"] is None:
        return NOT_MEASURED
    return f"{off['step_seconds']['median'] / on['step_seconds']['median']:.1f}x"


def ledger_grid(record: CellRecord) -> Grid | None:
    """Return predicted against measured memory, line by line; None where the engine shows nothing to predict from."""
    ledger = record["ledger"]
    if ledger is None:
        return None
    rows = [[line["name"], *_ledger_figures(line), "yes" if line["counts"] else "no"] for line in ledger["lines"]]
    total = (ledger["predicted_peak"], ledger["measured_peak"], ledger["residual"])
    rows.append(["peak", *(megabytes(value).removesuffix(" MB") for value in total), ""])
    notes = [f"{line['name']}: {line['note']}" for line in ledger["lines"] if line["note"]]
    notes.append(f"Measured peak: {ledger['measured_by']}")
    for words, key in (("Reserved by the allocator", "peak_reserved_bytes"), ("Taken of the device", "device_bytes")):
        notes += [f"{words}: {megabytes(one[key])}" for one in record["samples"][:1] if one[key] is not None]  # type: ignore[literal-required]
    if ledger["resident_peak"] is not None:
        notes.append(
            f"Resident memory of the process: {megabytes(ledger['resident_peak'])} at most, "
            f"{megabytes(ledger['resident_before_model'])} before the model was there; "
            f"beyond that and the prediction: {megabytes(ledger['resident_residual'])}"
        )
    heads = ["memory", "predicted, MB", "measured, MB", "residual, MB", "at the peak"]
    return Grid(f"Memory ledger, peak at: {ledger['moment']}", heads, rows, notes)


def _ledger_figures(line: Line) -> list[str]:
    residual = None if line["measured"] is None else line["measured"] - line["predicted"]
    return [megabytes(value).removesuffix(" MB") for value in (line["predicted"], line["measured"], residual)]


def work_lines(record: CellRecord) -> list[str]:
    """Return what the job asks of any machine, and how near this one came to its limits."""
    work, limits = record["work"], record["limits"]
    lines = [f"Work: {NOT_MEASURED}"]
    if work is not None:
        lines = [
            f"Work: {work['token_forwards']:,} token-forwards, {_flops(work['flops'])}, {size(work['bytes'])} to read",
            f"Work of the prefill: {_flops(work['prefill_flops'])}",
            f"Work of the middle step: {_flops(work['step_flops'])}, {size(work['step_bytes'])} to read",
        ]
    if limits is None:
        return [*lines, f"Limits: {NOT_MEASURED}"]
    return [
        *lines,
        f"The prefill reaches {limits['prefill_flops_share']:.1%} of the measured matrix rate",
        f"The middle step reaches {limits['step_flops_share']:.1%} of the measured matrix rate "
        f"and {limits['step_bandwidth_share']:.1%} of the measured read bandwidth",
        f"The middle step is bound by: {limits['bound_by']}",
    ]


def _flops(count: float) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 1e6:,.2f} MFLOP"


def violations(report: Report) -> list[str]:
    """Return every violated point, with its cell and what was seen."""
    broken = [(one, point) for one in report["cells"] for point in one["points"] if point["status"] == "violated"]
    return [f"{label(one)}: {point['name']}: {point['detail']}" for one, point in broken]


def deaths(report: Report) -> list[str]:
    """Return the cells that have no figures because they died or were refused, and what else was not measured."""
    cells = [f"{label(one)} {fate(one)}" for one in report["cells"] if one["error"] is not None]
    return cells + [f"not measured: {failure}" for failure in report["failures"]]


def fate(record: CellRecord) -> str:
    """Return why a cell has no figures: it died, was refused, or its turn has not come."""
    return NOT_MEASURED if record["error"] is None else record["error"]


def point_mark(point: Point) -> str:
    return "VIOLATED" if point["status"] == "violated" else point["status"]


def point_words(point: Point) -> str:
    return point["name"] + (f": {point['detail']}" if point["detail"] else "")


def remarks(report: Report) -> list[str]:
    """Return in words what the table of validity can only mark, and the notes; what holds for every cell once."""
    cells: dict[str, list[str]] = {}
    for record in report["cells"]:
        odd = [f"{point_mark(p)}: {point_words(p)}" for p in record["points"] if p["status"] != "ok"]
        for line in [*odd, *record["notes"]]:
            cells.setdefault(line, []).append(label(record))
    everywhere = [line for line, names in cells.items() if len(names) == len(report["cells"])]
    return [
        *(f"every cell: {line}" for line in everywhere),
        *(f"{'; '.join(names)}: {line}" for line, names in cells.items() if line not in everywhere),
    ]


def validity_grid(report: Report) -> Grid | None:
    """Return a row per point of the validity block and a column per cell."""
    records = [record for record in _in_order(report["cells"]) if record["points"]]
    names = list(dict.fromkeys(point["name"] for record in records for point in record["points"]))
    seen = [{point["name"]: point_mark(point) for point in record["points"]} for record in records]
    rows = [[name, *(points.get(name, NOT_OBSERVED) for points in seen)] for name in names]
    return Grid("What was seen in each cell", ["point", *map(label, records)], rows) if rows else None


def crossover_grids(report: Report) -> list[Grid]:
    """Return from where on the cache pays, and the step times which say so."""
    crossovers = [one for one in report["crossovers"] if one["steps"]]
    if not crossovers:
        return []
    rows = [[str(one["batch_size"]), crossover_words(one), _contexts(one), _counts(one["steps"])] for one in crossovers]
    heads = ["batch size", "a cached step is faster from", "contexts tried, tokens", "n a point"]
    steps = [step for one in crossovers for step in one["steps"]]
    title = f"Where the cache begins to pay{_path_of_curves(report)}"
    return [Grid(title, heads, rows), step_grid("Time of a step, ms", steps)]


def _path_of_curves(report: Report) -> str:
    """Return on which path the steps beside the cells were timed, the first of ours, where it is not the plain one."""
    ours = [record for record in report["cells"] if record["cell"]["engine"] == "llama"][:1]
    return "".join(f", on the {path_words(record['path'])}" for record in ours if stands_apart(record))


def crossover_words(crossover: Crossover) -> str:
    longest = max(step["context"] for step in crossover["steps"])
    return f"not up to {longest} tokens" if crossover["context"] is None else f"{crossover['context']} tokens"


def _contexts(crossover: Crossover) -> str:
    return ", ".join(map(str, sorted({step["context"] for step in crossover["steps"]})))


def _counts(steps: Sequence[StepTimes]) -> str:
    counts = sorted({step["seconds"]["n"] for step in steps})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def step_grid(name: str, steps: Sequence[StepTimes]) -> Grid:
    """Return a row per batch size and context: the time of a step with the cache and without."""
    times = {(step["batch_size"], step["context"], step["kv_caching"]): step["seconds"] for step in steps}
    rows = []
    for batch, context in dict.fromkeys((batch, context) for batch, context, _ in times):
        on, off = (times.get((batch, context, kv_caching)) for kv_caching in (True, False))
        counts = ", ".join(f"{one['n']} {mode}" for one, mode in ((on, "on"), (off, "off")) if one is not None)
        saved = f"{off['median'] / on['median']:.2f}x" if on is not None and off is not None else NOT_MEASURED
        figures = [in_words(one, scale=1e3, digits=1) for one in (on, off)]
        rows.append([str(batch), str(context), *figures, saved, counts])
    return Grid(name, ["batch size", "context, tokens", "cache on", "cache off", "less time", "n"], rows)


def sweep_grids(sweep: Sweep) -> list[Grid]:
    """Return the tables of a sweep, as far as it has come."""
    grids = [
        _growth_grid(sweep),
        _size_grid(sweep),
        step_grid("Time per token against context, ms", sweep["contexts"]),
        _fit_grid(sweep),
        step_grid("Time per step against batch size, ms", sweep["batches"]),
    ]
    return [grid for grid in grids if grid.rows]


def _growth_grid(sweep: Sweep) -> Grid:
    rows = []
    for one in sweep["growth"]:
        on, off = one["cached_seconds"], one["uncached_seconds"]
        rows.append([str(one["generated"]), in_words(on), in_words(off), f"{one['speedup']:.2f}x"])
        rows[-1].append(f"{on['n']} on, {off['n']} off")
    heads = ["generated tokens", "cache on, s", "cache off, s", "less time", "n"]
    return Grid("Speed-up against generation length", heads, rows)


def _size_grid(sweep: Sweep) -> Grid:
    rows = [
        [str(one["length"]), f"{one['predicted']:,}", f"{one['measured']:,}", f"{one['measured'] - one['predicted']:,}"]
        for one in sweep["cache"]
    ]
    heads = ["length, tokens", "predicted, bytes", "measured, bytes", "residual, bytes"]
    return Grid("Bytes of the KV cache against length", heads, rows, ["A size is exact: it is counted once."])


def fit_name(fit: Fit) -> str:
    return f"a {fit['of']} {'with' if fit['kv_caching'] else 'without'} the cache"


def slope_words(slope: float) -> str:
    """Return seconds a token of context as microseconds per 1000 of them."""
    return f"{slope * 1e9:,.0f}"


def _fit_grid(sweep: Sweep) -> Grid:
    rows = []
    for fit in sweep["fits"]:
        predicted = fit["predicted_slope"]
        beside = ["", ""] if predicted is None else [slope_words(predicted), f"{fit['slope'] / predicted:.2f}x"]
        row = [fit_name(fit), f"{fit['base'] * 1e3:.2f}", slope_words(fit["slope"]), *beside]
        rows.append([*row, f"{fit['r_squared']:.3f}", str(fit["lengths"]), f"{fit['exponent']:.2f}"])
    heads = ["fitted to the medians", "base, ms", "slope, us per 1000 tokens of context", "predicted slope", "ratio"]
    heads += ["R^2", "lengths", "exponent p of context^p"]
    notes = [
        "Time = base + slope x context, by least squares; the exponent is that of the longer half alone.",
        "Predicted slope: the bytes of 1000 positions of a static cache over the measured read bandwidth.",
    ]
    return Grid("How time grows with the context", heads, rows, notes)


def comparison_line(comparison: Comparison) -> str:
    """Return whether the ids with the cache are those without, or where they part."""
    where = f"{comparison['engine']}, batch {comparison['batch_size']}"
    if comparison["engine"] == "llama" and comparison["path"] != "plain":
        where += f", {path_words(comparison['path'])}"
    parting = comparison["divergence"]
    if comparison["equal"] or parting is None:
        return f"{where}: ids {'equal' if comparison['equal'] else 'differ'} over {comparison['tokens']} tokens"
    margin = NOT_MEASURED if parting["margin"] is None else f"{parting['margin']:.3g}"
    return (
        f"{where}: ids differ first in row {parting['row']} at token {parting['token']} of {comparison['tokens']}: "
        f"{parting['cached_id']} with the cache, {parting['uncached_id']} without; "
        f"gap between the two largest logits there: {margin}"
    )


def environment_grid(report: Report) -> Grid:
    """Return where the figures come from: machine, versions, model and measured ceilings, one row each."""
    rows = [["started", report["started"]]]
    if report["budget_minutes"] is not None:
        rows.append(["budget", f"{report['budget_minutes']:g} minutes"])
    if report["model"] is not None:
        rows += [[f"model {name}".removesuffix(" name"), value] for name, value in _named({**report["model"]})]
    rows += _named(report["environment"])
    ceilings = report["ceilings"]
    if ceilings is not None:
        rows.append(["measured read bandwidth", f"{ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s (10^9 bytes)"])
        flops = f"{_flops(ceilings['flops_per_second'])}/s in {ceilings['dtype']}"
        rows.append(["measured matrix rate", flops])
    return Grid("Machine, versions and model", ["what", "value"], rows)


def _named(values: dict[str, Any]) -> list[list[str]]:
    """Return (name, value) of each in words: no underscores, and sizes in MB."""
    rows = []
    for key, value in values.items():
        name = str(key).replace("_", " ")
        if name.endswith(" bytes") and isinstance(value, int):
            rows.append([name.removesuffix(" bytes"), size(value)])
        else:
            rows.append([name, _words(value)])
    return rows


def _words(value: Any) -> str:
    if value is None:
        return NOT_OBSERVED
    if isinstance(value, dict):
        told = {key: part for key, part in value.items() if part is not None}
        return ", ".join(" ".join(pair) for pair in _named(told)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value)
