"""A report as tables and sentences, ready for any page: which figure stands where, and in which words.

Knows nothing of Markdown, HTML or how anything was measured. MB is 2^20 bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama.bench.cell import Cell, Rounding, rounding_of
from llama.bench.report.peak import peak_sentence, peak_words
from llama.bench.schema import CellRecord, Comparison, Fit, Point, Report, Spread, Status, StepTimes, Summary, Sweep
from llama.costs import MB, size

NOT_MEASURED, NOT_OBSERVED = "not measured", "not observed"
NOISY = "NOISY, do not rely on these times"

TITLES = {
    "table": "With and without KV cache",
    "sweep": "What the KV cache saves as batch and length grow",
    "caches": "Kinds of KV cache: bytes, time and quality",
    "chat": "A KV cache that is kept: a conversation, shared prompts, and disk",
}

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
    (
        "bound by",
        "what holds the middle step back, by its share of the best rates that were seen on this machine",
    ),
    ("predicted", "worked out from the model's sizes alone; the residual is measured less predicted"),
    ("R^2", "the share of the variance of the times that a fitted line explains"),
    ("top-1 as fp32", "of rounded weights: the share of a text's positions whose most likely token is that of float32"),
    ("crossover", "the context from which on a step with the cache is faster than one without"),
    ("MB", "2^20 bytes"),
)

# What two cells must share before one is held against the other.
_SAME = (
    "batch_size",
    "input_len",
    "output_len",
    "model",
    "quantize",
    "activations",
    "logits",
    "device",
    "dtype",
    "threads",
    "text",
)


@dataclass(frozen=True)
class Section:
    """A part of a report: tables, and lists of lines, in reading order; `pictures` are the names of its plots.

    One with a `parent` is a part of that section, which holds many alike.
    """

    name: str
    parts: Sequence["Table | Sequence[str]"]
    pictures: Sequence[str] = ()
    parent: str = ""


@dataclass(frozen=True)
class Table:
    """A table of words: the first column names the row. `notes` stand under it. One without rows is left out."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)


def sections(report: Report) -> list[Section]:
    """Return the whole report behind its head, in reading order; what was not measured has no parts."""
    sweep, cells = report["sweep"], "Memory, work and text of each cell"
    found = [
        Section("The sweep", sweep_tables(sweep) if sweep else [], ("speedup", "cache", "context", "batch")),
        Section("The table", result_tables(report)),
        Section("Time and memory", [peak_lines(report)], ("time", "memory", "steps", "peers")),
        Section("Where the cache begins to pay", crossover_tables(report), ("crossover",)),
        *(Section(label(record), cell_parts(record), parent=cells) for record in report["cells"]),
        Section("Validity", [validity_table(report)]),
        Section(
            "Are the texts the same?", [[comparison_line(one, our_paths(report)) for one in report["comparisons"]]]
        ),
        Section("Where and how", [environment_table(report)]),
        Section("What the words mean", [[f"{name}: {meaning}" for name, meaning in DEFINITIONS]]),
    ]
    return [replace(one, parts=[part for part in one.parts if part]) for one in found]


def peak_lines(report: Report) -> list[str]:
    """Return the sentence that says what rules the memory of the measured cells, where their ledgers tell."""
    grouped = groups(report)
    sentence = peak_sentence([record for group in grouped for record in group], lambda one: group_name(one, grouped))
    return [sentence] if sentence else []


def group_name(record: CellRecord, grouped: Sequence[Sequence[CellRecord]]) -> str:
    """Return what tells a group of cells from the others; the engine only where there is more than one."""
    cell = record["cell"]
    engines = {group[0]["cell"]["engine"] for group in grouped}
    told = [cell["engine"]] if len(engines) > 1 else []
    told += [runner(record)] if stands_apart(record) else []
    told += [f"{cell['quantize']}"] if cell["quantize"] else []
    told += [f"{cell['activations']}-bit act."] if cell["activations"] != 16 else []
    told += ["all logits"] if cell["logits"] == "all" else []
    return ", ".join([f"batch {cell['batch_size']}", *told])


def cell_parts(record: CellRecord) -> list[Table | Sequence[str]]:
    """Return what is known of one cell alone: its memory, its work, its validity and its text."""
    if record["summary"] is None:
        return [[fate(record)]]
    points = [f"{point_mark(point)}: {point_words(point)}" for point in record["points"]]
    text = [f"text of the first row: {record['text']!a}"]
    ledger = ledger_table(record) or [f"Memory ledger: {NOT_MEASURED}"]
    return [ledger, work_lines(record), points, record["notes"] + text]


def megabytes(nbytes: int | float | None, missing: str = NOT_MEASURED, unit: str = " MB") -> str:
    return missing if nbytes is None else f"{nbytes / MB:.2f}{unit}"


def in_words(figure: Spread | None, *, scale: float = 1.0, digits: int = 2) -> str:
    """Return the median, and in brackets p10 and p90 where there is more than one value."""
    if figure is None:
        return NOT_MEASURED
    middle, low, high = (f"{value * scale:.{digits}f}" for value in (figure["median"], figure["p10"], figure["p90"]))
    return middle if figure["n"] == 1 else f"{middle} ({low}-{high})"


def median(figure: Spread | None) -> float | None:
    return None if figure is None else figure["median"]


def summary_of(record: CellRecord) -> Summary:
    """Return the figures of a cell that was measured."""
    assert record["summary"] is not None
    return record["summary"]


def rate(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


def title(report: Report) -> str:
    """Return the first line of the report, which says whether its times are to be believed."""
    about = TITLES.get(report["preset"], "A KV cache benchmark")
    return f"{about}: {NOISY}" if disturbances(report) else about


def byline(report: Report) -> list[str]:
    """Return what the title leaves open: the model, the machine and the date, as far as they are known."""
    model = report["model"]
    names = [] if model is None else [f"{model['name']} ({model['weights']})"]
    gpu, cpu = (report["environment"].get(key) for key in ("gpu", "cpu"))
    machine = [_words(one["name"] if isinstance(one, dict) else one) for one in (gpu, cpu) if one is not None]
    threads = report["environment"].get("threads")
    if machine and gpu is None and threads:
        machine[-1] += f", {threads} thread{'s' * (threads > 1)}"
    return [*names, *machine, report["started"][:16].replace("T", " ")]


def label(record: CellRecord) -> str:
    """Return what tells a cell from the others of its report."""
    cell = Cell(**record["cell"])
    shown = stands_apart(record) or (cell.fast and record["summary"] is not None)  # also where it fell back
    path = f", {runner(record)} path" if shown else ""
    return cell.name + path + (", logits of all positions" if record["cell"]["logits"] == "all" else "")


def stands_apart(record: CellRecord) -> bool:
    """Tell whether the cell ran on one of our own faster paths, which no plain cell may be held against."""
    return record["cell"]["engine"] == "llama" and record["path"] not in ("plain", "")


def runner(record: CellRecord) -> str:
    """Return what executed the forwards of a cell of ours: its path less the kind of weights, which the cell names."""
    name, _, rest = record["path"].partition(f", {record['cell']['quantize']} weights")
    return f"{name}, exact" if rest.endswith(", exact") else name


def path_words(record: CellRecord) -> str:
    """Return how the path of a cell of ours is called: native path, plain path with int8 weights."""
    kind, bits = record["cell"]["quantize"], record["cell"]["activations"]
    rounded = f" and {bits}-bit activations" if bits != 16 else ""
    return f"{runner(record)} path" + (f" with {kind} weights{rounded}" if kind else "")


def our_paths(report: Report) -> dict[str, str]:
    """Return how each path on which a cell of ours ran is called."""
    return {one["path"]: path_words(one) for one in report["cells"] if one["cell"]["engine"] == "llama"}


def on_or_off(kv_caching: bool) -> str:
    return "on" if kv_caching else "off"


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
    both = [(on, off) for group in groups(report) for on in group for off in group]
    return [(on, off) for on, off in both if on["cell"]["kv_caching"] > off["cell"]["kv_caching"]]


def _in_order(records: Sequence[CellRecord]) -> list[CellRecord]:
    def place(record: CellRecord) -> tuple[Any, ...]:
        cell = record["cell"]
        modes = cell["engine"], cell["fast"], cell["quantize"] or "", cell["activations"]
        return cell["batch_size"], cell["engine"] != "llama", *modes, not cell["kv_caching"]

    return sorted(records, key=place)


def result_tables(report: Report) -> list[Table]:
    """Return the with/without table and one for each faster path of our own, a row per cell; then what compares them.

    That is what the cache saves, and the others against each of our paths.
    """
    records = _in_order(report["cells"])
    plain = [record for record in records if not stands_apart(record)]
    agreed = agreements(report)
    threads = report["environment"].get("threads")  # one count for all: processes that differ refuse to share a report
    tables = [_cell_table("Every cell", plain, agreed, threads)]
    for path in sorted({record["path"] for record in records if stands_apart(record)}):
        apart = [record for record in records if stands_apart(record) and record["path"] == path]
        tables.append(_cell_table(f"On the {path_words(apart[0])}, apart from the plain one", apart, agreed, threads))
    return [grid for grid in (*tables, speedup_table(report), engines_table(report)) if grid]


def agreements(report: Report) -> Mapping[Rounding, float]:
    """Return the share of positions at which each way with rounded weights agrees with float32, where it is known."""
    return {rounding_of(one): one["top1_agreement"] for one in report.get("agreements", [])}


def _agreement_words(agreed: Mapping[Rounding, float], record: CellRecord) -> str:
    if record["cell"]["quantize"] is None:
        return "not rounded"
    share = agreed.get(rounding_of(record["cell"]))
    return NOT_MEASURED if share is None else f"{share:.2%}"


def _cell_table(
    name: str, records: Sequence[CellRecord], agreed: Mapping[Rounding, float], threads: int | None
) -> Table:
    shown = ("batch_size", "kv_caching", "threads")
    cells = [record["cell"] for record in records]
    varying = [key for key in Cell.__dataclass_fields__ if key not in shown and len({cell[key] for cell in cells}) > 1]
    heads = [key.replace("_", " ") for key in varying]
    notes = [f"{label(record)} {fate(record)}" for record in records if record["error"] is not None]
    rows = []
    for record in records:
        cell = record["cell"]
        row = [
            str(cell["batch_size"]),
            on_or_off(cell["kv_caching"]),
            _words(threads),
            *(_words(cell[key], "none") for key in varying),
        ]
        rows.append([*row, *([_agreement_words(agreed, record)] if agreed else []), *_figures(record)])
    heads += ["top-1 as fp32"] if agreed else []
    return Table(name, ["batch size", "KV cache", "threads", *heads, *(head for head, _ in _FIGURES)], rows, notes)


def _figures(record: CellRecord) -> list[str]:
    if record["summary"] is None:
        return [fate(record).partition(":")[0], *(NOT_MEASURED for _ in _FIGURES[1:-1]), "0"]
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
    ("KV cache, MB", lambda record, _: megabytes(record["cache_bytes"], NOT_OBSERVED, unit="")),
    ("work, token-forwards", lambda record, _: _words(_token_forwards(record), NOT_MEASURED)),
    ("n", lambda _, summary: _count(summary)),
)


def _token_forwards(record: CellRecord) -> int | None:
    return None if record["work"] is None else record["work"]["token_forwards"]


def _count(summary: Summary) -> str:
    steps = summary["step_seconds"]
    return f"{summary['seconds']['n']}" + ("" if steps is None else f" ({steps['n']} steps)")


def _ratio(more: float | None, less: float | None, digits: int = 1) -> str:
    return NOT_MEASURED if more is None or less is None else f"{more / less:.{digits}f}x"


def _less(on: Spread | None, off: Spread | None, digits: int = 1) -> str:
    return _ratio(median(off), median(on), digits)


def _counts(on: Spread | None, off: Spread | None) -> str:
    return ", ".join(f"{one['n']} {mode}" for one, mode in ((on, "on"), (off, "off")) if one is not None)


def _both_modes(on: Spread | None, off: Spread | None, *, scale: float = 1.0, digits: int = 2) -> list[str]:
    """Return both times, how many times less the one with the cache is, and the counts."""
    times = [in_words(one, scale=scale, digits=digits) for one in (on, off)]
    return [*times, _less(on, off, 2), _counts(on, off)]


def peers(report: Report) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Return our paths, and of each of the others how many times faster each of them is, None where none is known."""

    def key(one: CellRecord) -> tuple[Any, ...]:
        return one["cell"]["kv_caching"], *(
            one["cell"][name] for name in _SAME if name not in ("quantize", "activations")
        )

    records = [one for one in _in_order(report["cells"]) if one["summary"] is not None]
    ours = [one for one in records if one["cell"]["engine"] == "llama"]
    theirs = [one for one in records if one["cell"]["engine"] != "llama"]
    paths = {one["path"]: path_words(one) for one in ours}
    rates = {(key(one), one["path"]): summary_of(one)["tokens_per_second"] for one in reversed(ours)}
    rows = []
    for one in theirs if ours else []:
        rate, own = summary_of(one)["tokens_per_second"], [rates.get((key(one), path)) for path in paths]
        rows.append((label(one), [None if faster is None else faster / rate for faster in own]))
    return [*paths.values()], rows


def engines_table(report: Report) -> Table:
    """Return how many times faster each of our paths is than each of the others."""
    paths, found = peers(report)
    rows = [[name, *(_ratio(factor, 1.0, 2) for factor in factors)] for name, factors in found]
    notes = ["their time over ours, same batch size and mode: above 1 ours is the faster one; weights are as named"]
    notes += _agreement_notes(report)
    return Table("How many times faster ours is, by path", ["than", *paths], rows, notes)


def _agreement_notes(report: Report) -> list[str]:
    """Say of every way with rounded weights how often it agrees with float32, where times stand side by side."""
    known = report.get("agreements", [])
    shares = [f"{'our ' * (one['engine'] == 'llama')}{one['path']} {one['top1_agreement']:.2%}" for one in known]
    return [f"top-1 as fp32, over {known[0]['tokens']:,} positions: {'; '.join(shares)}"] if known else []


def speedup_table(report: Report) -> Table:
    """Return how much work and time the cache saves in each pair of cells."""
    rows = []
    for cached, uncached in pairs(report):
        on, off = summary_of(cached), summary_of(uncached)
        limits = [one["limits"]["bound_by"] if one["limits"] else NOT_OBSERVED for one in (cached, uncached)]
        saved = [_ratio(_token_forwards(uncached), _token_forwards(cached)), _less(on["seconds"], off["seconds"])]
        saved.append(_less(on["step_seconds"], off["step_seconds"]))
        counts = _counts(on["seconds"], off["seconds"])
        rows.append([label(cached).replace(", cache on", ""), *saved, *limits, counts])
    heads = ["cell", "less work", "less time", "less time per output token"]
    return Table("What the cache saves", [*heads, "bound by, cache on", "bound by, cache off", "n"], rows)


def ledger_table(record: CellRecord) -> Table | None:
    """Return predicted against measured memory, line by line; None where the engine shows nothing to predict from."""
    ledger = record["ledger"]
    if ledger is None:
        return None
    figures = [(one["name"], one["predicted"], one["measured"], _words(one["counts"])) for one in ledger["lines"]]
    figures.append(("peak", ledger["predicted_peak"], ledger["measured_peak"], ""))
    rows = []
    for name, predicted, measured, counts in figures:
        residual = None if measured is None else measured - predicted
        rows.append([name, *(megabytes(value, unit="") for value in (predicted, measured, residual)), counts])
    notes = [peak_words(ledger), *(f"{line['name']}: {line['note']}" for line in ledger["lines"] if line["note"])]
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
    return Table(f"Memory ledger, peak at: {ledger['moment']}", heads, rows, notes)


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
    shares = [limits[key] for key in ("prefill_flops_share", "step_flops_share", "step_bandwidth_share")]
    own = "; the best that was seen is this cell's own" if 1.0 in shares else ""
    prefill, step, read = (f"{share:.1%}" for share in shares)
    return [
        *lines,
        f"The prefill reaches {prefill} of the best matrix rate that was seen",
        f"The middle step reaches {step} of that rate and {read} of the best read bandwidth{own}",
        f"The middle step is bound by: {limits['bound_by']}",
    ]


def _flops(count: float) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 1e6:,.2f} MFLOP"


def violations(report: Report, status: Status = "violated") -> list[str]:
    """Return every violated point, or those of another status, with its cell and what was seen."""
    found = [(one, point) for one in report["cells"] for point in one["points"] if point["status"] == status]
    return [f"{label(one)}: {point['name']}: {point['detail']}" for one, point in found]


def disturbances(report: Report) -> list[str]:
    """Return the cells whose times are those of other work too, and what was seen of it."""
    return violations(report, "disturbed")


def alarms(report: Report) -> list[tuple[str, str]]:
    """Return what a reader must not miss of the points, each as a mark and a sentence."""
    marked = (("VIOLATED", violations(report)), ("NOISY", disturbances(report)))
    return [(mark, line) for mark, lines in marked for line in lines]


def deaths(report: Report) -> list[str]:
    """Return the cells that have no figures because they died or were refused, and what else was not measured."""
    cells = [f"{label(one)} {fate(one)}" for one in report["cells"] if one["error"] is not None]
    return cells + [f"not measured: {failure}" for failure in report["failures"]]


def fate(record: CellRecord) -> str:
    """Return why a cell has no figures: it died, was refused, or its turn has not come."""
    return NOT_MEASURED if record["error"] is None else record["error"]


def point_mark(point: Point) -> str:
    return {"violated": "VIOLATED", "disturbed": "NOISY"}.get(point["status"], point["status"])


def point_words(point: Point) -> str:
    return point["name"] + (f": {point['detail']}" if point["detail"] else "")


def validity_table(report: Report) -> Table:
    """Return a row per point of the validity block and a column per cell."""
    records = [record for record in _in_order(report["cells"]) if record["points"]]
    names = list(dict.fromkeys(point["name"] for record in records for point in record["points"]))
    seen = [{point["name"]: point_mark(point) for point in record["points"]} for record in records]
    rows = [[name, *(points.get(name, NOT_OBSERVED) for points in seen)] for name in names]
    return Table("What was seen in each cell", ["point", *map(label, records)], rows)


def crossover_tables(report: Report) -> list[Table]:
    """Return from where on the cache pays, and the step times which say so."""
    crossovers = [one for one in report["crossovers"] if one["steps"]]
    if not crossovers:
        return []
    rows = []
    for one in crossovers:
        contexts = ", ".join(map(str, sorted({step["context"] for step in one["steps"]})))
        pays = f"{one['context']} tokens" if one["context"] else f"not up to {contexts.rpartition(' ')[2]} tokens"
        counts = least_to_most(step["seconds"]["n"] for step in one["steps"])
        rows.append([str(one["batch_size"]), pays, contexts, counts])
    heads = ["batch size", "a cached step is faster from", "contexts tried, tokens", "n a point"]
    steps = [step for one in crossovers for step in one["steps"]]
    # The steps are timed on the path of the first cell of ours.
    ours = [record for record in report["cells"] if record["cell"]["engine"] == "llama"][:1]
    path = "".join(f", on the {path_words(record)}" for record in ours if stands_apart(record))
    return [Table(f"Where the cache begins to pay{path}", heads, rows), step_table("Time of a step, ms", steps)]


def least_to_most(values: Iterable[float], form: str = "", unit: str = "") -> str:
    """Return from where to where values reach, or the one that all of them show as."""
    found = sorted(values)
    low, high = (f"{value:{form}}{unit}" for value in (found[0], found[-1]))
    return low if low == high else f"{low} to {high}"


def step_table(name: str, steps: Sequence[StepTimes]) -> Table:
    """Return a row per batch size and context: the time of a step with the cache and without."""
    times = {(step["batch_size"], step["context"], step["kv_caching"]): step["seconds"] for step in steps}
    rows = []
    for batch, context in dict.fromkeys((batch, context) for batch, context, _ in times):
        on, off = (times.get((batch, context, kv_caching)) for kv_caching in (True, False))
        rows.append([str(batch), str(context), *_both_modes(on, off, scale=1e3, digits=1)])
    return Table(name, ["batch size", "context, tokens", "cache on", "cache off", "less time", "n"], rows)


def sweep_tables(sweep: Sweep) -> list[Table]:
    """Return the tables of a sweep, as far as it has come."""
    return [
        _growth_table(sweep),
        _size_table(sweep),
        step_table("Time per token against context, ms", sweep["contexts"]),
        _fit_table(sweep),
        step_table("Time per step against batch size, ms", sweep["batches"]),
    ]


def _growth_table(sweep: Sweep) -> Table:
    growth = sweep["growth"]
    rows = [[str(one["generated"]), *_both_modes(one["cached_seconds"], one["uncached_seconds"])] for one in growth]
    heads = ["generated tokens", "cache on, s", "cache off, s", "less time", "n"]
    return Table("Speed-up against generation length", heads, rows)


def _size_table(sweep: Sweep) -> Table:
    rows = [
        [str(one["length"]), f"{one['predicted']:,}", f"{one['measured']:,}", f"{one['measured'] - one['predicted']:,}"]
        for one in sweep["cache"]
    ]
    heads = ["length, tokens", "predicted, bytes", "measured, bytes", "residual, bytes"]
    return Table("Bytes of the KV cache against length", heads, rows, ["A size is exact: it is counted once."])


def fit_name(fit: Fit) -> str:
    return f"a {fit['of']} {'with' if fit['kv_caching'] else 'without'} the cache"


def slope_words(slope: float) -> str:
    """Return seconds a token of context as microseconds per 1000 of them."""
    return f"{slope * 1e9:,.0f}"


def _fit_table(sweep: Sweep) -> Table:
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
    return Table("How time grows with the context", heads, rows, notes)


def comparison_line(comparison: Comparison, paths: Mapping[str, str]) -> str:
    """Return what a comparison found, and of which cells; `paths` are `our_paths`."""
    where = f"{comparison['engine']}, batch {comparison['batch_size']}"
    if comparison["engine"] == "llama" and comparison["path"] != "plain":
        where += f", {paths[comparison['path']]}"
    return f"{where}: {comparison_words(comparison)}"


def comparison_words(comparison: Comparison) -> str:
    """Return whether the tokens with the cache are those without, or where they part, in a sentence."""
    where = comparison["divergence"]
    if where is None:
        made = "made" if comparison["equal"] else "did not make"
        return f"cache on and off {made} the same {comparison['tokens']} tokens"
    words = (
        f"cache on and off part at token {where['token']} of row {where['row']} "
        f"({where['cached_id']} with it, {where['uncached_id']} without)"
    )
    if where["margin"] is None:
        return words
    return f"{words}, where the two largest logits are {where['margin']:.2g} apart"


def environment_table(report: Report) -> Table:
    """Return where the figures come from: command, machine, versions, model and measured ceilings, one row each."""
    rows = [["command", report["command"]], ["started", report["started"]]]
    if report["budget_minutes"] is not None:
        rows.append(["budget", f"{report['budget_minutes']:g} minutes"])
    if report["model"] is not None:
        rows += [[f"model {name}".removesuffix(" name"), value] for name, value in _named({**report["model"]})]
    rows += _named(report["environment"])
    ceilings = report["ceilings"]
    if ceilings is not None:
        by = {name: f", by {ceilings[name]}" if ceilings[name] else "" for name in ("read_by", "flops_by")}
        read = f"{ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s (10^9 bytes){by['read_by']}"
        flops = f"{_flops(ceilings['flops_per_second'])}/s in {ceilings['dtype']}{by['flops_by']}"
        rows += [["best read bandwidth that was seen", read], ["best matrix rate that was seen", flops]]
    return Table("Machine, versions and model", ["what", "value"], rows)


def _named(values: dict[str, Any]) -> list[list[str]]:
    """Return (name, value) of each that is not None as text: no underscores, and sizes in MB."""
    rows = []
    for key, value in values.items():
        if value is None:
            continue
        name = str(key).replace("_", " ")
        if name.endswith(" bytes") and isinstance(value, int):
            rows.append([name.removesuffix(" bytes"), size(value)])
        else:
            rows.append([name, _words(value)])
    return rows


def _words(value: Any, missing: str = NOT_OBSERVED) -> str:
    if value is None:
        return missing
    if isinstance(value, dict):
        return ", ".join(" ".join(pair) for pair in _named(value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value)
