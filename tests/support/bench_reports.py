"""Synthetic reports of every preset: rows as a run on the demo model would return them, with seeded noise."""

import math
import random
from collections.abc import Sequence
from typing import Any

from llama.bench.cell import Cell
from llama.bench.merged import with_ratios
from llama.bench.schema import Report, Row, Status, new_report
from llama.bench.statistics import rates
from llama.costs import MB, token_forwards

WEIGHTS = 538_060_032  # SmolLM2-135M in float32, the head tied
CACHE_PER_TOKEN = 46_080  # 2 x 30 layers x 3 KV heads x 64 x 4 bytes
PREFILL = {1: 0.21, 8: 1.62, 16: 3.21}  # seconds of the first token
CACHED_STEP = {1: 0.0255, 8: 0.0348, 16: 0.0578}
READING = ["24 times faster, 188 MB more memory, the same 800 tokens.", "A step is faster from a context of 2 on."]
SQUARES = [{"batch_size": rows, "kv_caching": on} for rows in (1, 8, 16) for on in (True, False)]
CONTEXTS = (1, 4, 16, 64, 256, 1024)


def noisy(value: float, n: int, seed: str) -> list[float]:
    """Return `n` values a little above one."""
    noise = random.Random(seed)
    return [value * (1 + abs(noise.gauss(0, 0.02))) for _ in range(n)]


def cell_rows(index: int, cell: Cell, *, n: int = 3, path: str = "plain") -> list[Row]:
    """Return the rows of a measured cell: its figures, checks and memory ledger."""
    rows, on = cell.batch_size, cell.kv_caching
    prefill, step = PREFILL.get(rows, 0.21 * rows) * cell.input_len / 256, CACHED_STEP.get(rows, 0.0255 + 0.002 * rows)
    ideal = [step * (1 + 5e-4 * i) if on else prefill * (1.05 + 0.004 * i) for i in range(1, cell.output_len)]
    first = noisy(prefill, n, f"{cell.name} {path}")
    later = [[noisy(one, 1, f"{cell.name} {path} {r} {i}")[0] for i, one in enumerate(ideal)] for r in range(n)]
    seconds = [math.fsum([one, *steps]) for one, steps in zip(first, later, strict=True)]
    cache = rows * cell.total_len * CACHE_PER_TOKEN if on else 0
    fed = token_forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=on) * rows
    memory = ledger(index, cell, cache)
    figures: Row = {
        "figures": "cell",
        "cell": index,
        "error": None,
        "notes": ["random token ids as prompts, of exactly the length asked for"],
        "path": path,
        "seconds": seconds,
        "first_token_seconds": first,
        "step_seconds": later,
        "tensor_peak_bytes": [memory[-2]["measured_bytes"] or 0],
        "resident_peak_bytes": [int(one) for one in noisy(231 * MB + WEIGHTS + cache, n, cell.name)],
        "other_load_cores": [0.1] * n,
        "weights_bytes": WEIGHTS,
        "cache_bytes": cache,
        "ids": [[28, 198, 57]] * rows,
        "text": " the sea, and the old man said:\n\n\u201cIt is late.\u201d",
        "token_forwards": fed,
        "flops": fed * 270_000_000,
        "read_bytes": cell.output_len * WEIGHTS + cache,
        "prefill_flops": rows * cell.input_len * 270_000_000,
        "step_flops": rows * (1 if on else cell.input_len + 16) * 270_000_000,
        "step_read_bytes": WEIGHTS + cache,
        "prefill_flops_share": 0.71,
        "step_flops_share": 0.02 * rows if on else 0.7,
        "step_bandwidth_share": 0.83 if on else 0.11,
        "bound_by": "memory bandwidth" if on else "arithmetic",
    }
    return [{**figures, **rates(cell, figures)}, *checks(index, cell), *memory]


def check(index: int, name: str, detail: str, status: Status = "ok") -> Row:
    return {"figures": "check", "cell": index, "name": name, "status": status, "detail": detail}


def checks(index: int, cell: Cell) -> list[Row]:
    return [
        check(index, "cache", f"asked for {'on' if cell.kv_caching else 'off'}"),
        check(index, "tokens", f"{cell.batch_size} x {cell.input_len} in, all fed as computed"),
        check(index, "no overflow", f"{cell.total_len - 1} positions fed, the limit is 8192"),
        check(index, "statistics reset", "this system's peak cannot be reset", "not observed"),
    ]


def ledger(index: int, cell: Cell, cache: int) -> list[Row]:
    logits, activations = cell.batch_size * 49152 * 4, cell.batch_size * cell.input_len * 7 * 2048
    moment = "prefill" if cell.kv_caching else "last step"

    def line(name: str, predicted: int, measured: int | None, **more: Any) -> Row:
        known: Any = {"predicted_bytes": predicted, "measured_bytes": measured, "counts": True, "note": "", **more}
        return {"figures": "memory", "cell": index, "name": name, **known}

    peak = WEIGHTS + cache + activations
    whole: Any = {"measured_bytes": peak + 40_000, "moment": f"in a layer of the {moment}", "note": "a trace"}
    return [
        line("weights", WEIGHTS, WEIGHTS),
        line("tied head", 0, 0, note="is the embedding; on its own it would take 108.0 MB"),
        line("KV cache", cache, cache),
        line("logits", logits, logits, counts=False),
        line(f"{moment} activations", activations, activations + 40_000),
        {"figures": "memory", "cell": index, "name": "peak", "predicted_bytes": peak, **whole},
        {"figures": "memory", "cell": index, "name": "resident", "measured_bytes": peak + 300 * MB,
         "before_bytes": 231 * MB},
    ]  # fmt: skip


def step_rows(rows: int, contexts: Sequence[int], *, n: int = 5, first: float = 0.0235) -> list[Row]:
    """Return steps in both modes: a line with the cache, a slight curve without, which takes `first` for no context."""
    found: list[Row] = []
    for on in (True, False):
        for context in contexts:
            cached = 0.0245 + 0.0004 * rows + rows * context * 6e-7
            seconds = cached if on else first + rows * context * 7.6e-4 + rows * context**2 * 6e-8
            found.append({"figures": "step", "cell": 0, "batch_size": rows, "context": context, "kv_caching": on,
                          "step_seconds": noisy(seconds, n, f"{rows} {context} {on}"), "path": "plain"})  # fmt: skip
    return found


def comparison(on: int, off: int, tokens: int = 32, **found: Any) -> Row:
    """Return the comparison of both modes; `found` says where the tokens diverge."""
    return {"figures": "comparison", "cell": on, "other_cell": off, "tokens": tokens, "equal": not found, **found}  # type: ignore[typeddict-item]


def report_of(preset: str, cells: Sequence[Cell], rows: Sequence[Row], **changed: Any) -> Report:
    """Return a report with the rows behind its head; `changed` are fields of the head."""
    report = new_report(preset, cells, command=f"python benchmark_inference.py --preset {preset}", budget_minutes=15.0)
    head: dict[str, Any] = {
        "started": "2025-11-21T14:46:03+01:00",
        "model": {"name": "demo", "weights": "checkpoint", "parameters": 134_515_008, "sizes": {"dim": 576}},
        "environment": {"torch": "2.13.0+cpu", "cpu": "AMD EPYC 7R13", "cores": 2, "threads": 2, "gpu": None,
                        "memory_bytes": 16 * 1024 * MB, "dirty": False, "peers": {"transformers": "5.23.0"}},
        "ceilings": {"read_bytes_per_second": 2.6e10, "read_by": "sum, threads: 2", "flops_per_second": 3.3e11,
                     "flops_by": "linear, 1024 x 1024 x 1024", "dtype": "fp32"},
        "reading": list(READING),
    }  # fmt: skip
    return {**report, **head, "rows": list(rows), **changed}  # type: ignore[typeddict-item]


def table_report(cells: Sequence[dict[str, Any]] = SQUARES, **changed: Any) -> Report:
    """Return the report of `--preset table`; a cell is given by fields of Cell, `n` and `path`."""
    asked = [({"threads": 2} | cell, cell.get("n", 3), cell.get("path", "plain")) for cell in cells]
    made = [Cell(**{key: value for key, value in cell.items() if key not in ("n", "path")}) for cell, _, _ in asked]
    rows = [row for i, cell in enumerate(made) for row in cell_rows(i, cell, n=asked[i][1], path=asked[i][2])]
    both = [(i, made.index(cell.but(kv_caching=False))) for i, cell in enumerate(made)
            if cell.kv_caching and cell.but(kv_caching=False) in made]  # fmt: skip
    rows += [comparison(on, off, 32 * made[on].batch_size) for on, off in both]
    batches = dict.fromkeys(cell.batch_size for cell in made) if both else ()
    return report_of("table", made, [*rows, *(row for size in batches for row in step_rows(size, CONTEXTS))], **changed)


def hand_in_report(**changed: Any) -> Report:
    """Return the report of `--preset report`: batch 1 and 8 measured, 16 left out, texts, and peaks."""
    whole = table_report([{"n": 1, **cell} for cell in SQUARES])
    whole["rows"] = [row for row in whole["rows"] if row["figures"] != "step"]
    for index in (4, 5):
        only_cell(whole, index)
    made: list[Row] = [{"figures": "text", "cell": 0, "prompt": "A *list*:\n- one", "cached_text": " two", "tokens": 1,
                        "uncached_text": " two", "equal": True},
                       {"figures": "text", "cell": 0, "prompt": "Two", "cached_text": " is less", "tokens": 2,
                        "uncached_text": " is more", "equal": False}]  # fmt: skip
    for batch, on in ((batch, on) for batch in (1, 8, 16) for on in (True, False)):
        nbytes = (600 if on else 650) * MB
        peak: Row = {"figures": "peak", "cell": 0, "batch_size": batch, "kv_caching": on, "predicted_bytes": nbytes}
        made.append(peak | {"measured_bytes": nbytes if batch == 1 else None})
    plan = {"prompts": [row["prompt"] for row in made[:2]]}
    cells = [Cell(**cell) for cell in whole["cells"]]
    left = [f"{cell.name}: no room in the budget" for cell in cells[4:]]
    return report_of("report", cells, [*whole["rows"], *made], plan=plan, failures=left, **changed)


def long_report(**changed: Any) -> Report:
    """Return the report of `--preset table --output_len 200`."""
    return table_report([{"output_len": 200, **cell} for cell in SQUARES], **changed)


def caches_report(
    kinds: Sequence[str] = ("static", "int8", "int4", "paged", "window:1024+4"), **changed: Any
) -> Report:
    """Return the report of `--preset caches`; a kind with "window" has dropped nothing, and is not judged."""
    shares = {"int8": 0.297, "int4": 0.172}
    rows: list[Row] = []
    for i, kind in enumerate(kinds):
        share = shares.get(kind, 1.0)
        facts = {"saves": share < 1, "lossless": kind in ("static", "paged"), "quantized": kind in shares}
        rows.append(bare_cell(i, path="plain", **facts))
        rows.append(check(i, "other work", "occupied 0.10 of 2 cores"))
        for context in (1024, 2048, 4096):
            stored = int(context * CACHE_PER_TOKEN * share)
            known: Any = {"cache_bytes": stored, "predicted_cache_bytes": stored, "path": "plain"}
            seconds = noisy(0.05 + context * 1e-5 / share**0.5, 3, f"{kind} {context}")
            rows.append({"figures": "step", "cell": i, "batch_size": 1, "context": context, "kv_caching": True,
                         "step_seconds": seconds, **known})  # fmt: skip
            if context == 1024:
                task: Any = {"figures": "task", "cell": i, "task": "needle", "context": context, **known}
                rows.append({**task, "judged": "window" not in kind, **_scores(kind)})
            if context == 2048:
                rows.append({**rows[-1], "figures": "quality", **_quality(kind)})
    plan = {"text": "persuasion.txt", "contexts": [1024, 2048, 4096], "length": 2048, "tokens": 1024,
            "greedy_tokens": 256, "needle_lengths": [1024], "needles": 20, "tasks": []}  # fmt: skip
    report = report_of("caches", [Cell(kv_cache=kind) for kind in kinds], rows, plan=plan, **changed)
    with_ratios(report)
    return report


def _scores(kind: str) -> Any:
    lost = 12 * (kind == "int4")
    scores = [0.0] * lost + [1.0] * (20 - lost)
    return {
        **{"scores": scores, "score": sum(scores) / 20, "answer_lens": [8] * 20},
        **{"scores_question_seen": [1.0] * 20, "score_question_seen": 1.0, "answer_lens_question_seen": [8] * 20},
    }


def _quality(kind: str) -> Any:
    agreed = {"int8": 0.9985, "int4": 0.9639}.get(kind, 1.0)
    token, blocks = 35 if kind == "int4" else None, [1 + 0.3 * (-1) ** (i // 3) for i in range(64)]
    return {
        **{"context": 2048, "tokens": 1024, "mean_kl": 0.04 * (1 - agreed), "top1_agreement": agreed, "nll": 3.6724},
        **{"greedy_tokens": 256, "divergence_token": token, "uncached_id": 11},
        **{"cached_id": 12, "margin": 0.15, "judged": "window" not in kind},
        **{"kls": [0.04 * (1 - agreed) * one for one in blocks], "nlls": [3.6724 + one - 1 for one in blocks]},
    }


def chat_report(**changed: Any) -> Report:
    """Return the report of `--preset chat`: ours and transformers, ten turns, prompts, and a session on disk."""
    cells = [Cell(kv_caching=on, engine=engine) for engine in ("llama", "transformers") for on in (True, False)]
    cells.append(Cell(batch_size=16, input_len=1030, output_len=1))
    rows: list[Row] = []
    for i, cell in enumerate(cells):
        peer = cell.engine != "llama"
        rows.append(bare_cell(i, path="transformers 5.23.0" if peer else "plain"))
        rows.append(check(i, "what was fed is what the way asks for", "kept 1,683 tokens"))
        for way in (("kept", "rebuilt") if cell.kv_caching else ("off",)) if cell.batch_size == 1 else ():
            for turn in range(10):
                fed = 30 if way == "kept" else 30 + 165 * turn
                seconds = noisy((0.05 + fed * 1.8e-3) * (1.5 if peer else 1), 2, f"{i} {way} {turn}")
                known: Any = {"history": 165 * turn, "new": 30, "tokens_fed": fed, "tokens_expected": fed}
                stored = None if way == "off" else (30 + 165 * turn) * CACHE_PER_TOKEN
                rows.append({"figures": "turn", "cell": i, "way": way, "turn": turn, "first_token_seconds": seconds,
                             "cache_bytes": stored, "ids": [[7]], **known})  # fmt: skip
    for way, seconds, fed in (("shared", 2.87, 1480), ("not shared", 33.2, 16480)):
        rows.append({"figures": "prompts", "cell": 4, "way": way, "first_token_seconds": noisy(seconds, 2, way),
                     "tokens_fed": fed, "tokens_expected": fed, "cache_bytes": 1031 * CACHE_PER_TOKEN})  # fmt: skip
    rows.append({"figures": "disk", "cell": 0, "tokens": 1683, "file_bytes": 74 * MB, "save_seconds": [0.11, 0.12],
                 "load_seconds": [0.13, 0.15], "feed_seconds": [3.1, 3.2], "same_logits": True})  # fmt: skip
    plan = {"text": "conversation.json", "turns": [{"history": 165 * turn, "new": 30} for turn in range(10)],
            "rows": 16, "shared": 1000, "own": 30}  # fmt: skip
    return report_of("chat", cells, rows, plan=plan, **changed)


def bare_cell(index: int, **figures: Any) -> Row:
    """Return the row of a cell with nothing but these figures."""
    return {"figures": "cell", "cell": index, "error": None, "notes": [], **figures}  # type: ignore[typeddict-item]


def only_cell(report: Report, index: int, **figures: Any) -> Report:
    """Leave a cell its first row alone, with these figures."""
    rest = [row for row in report["rows"] if row["cell"] != index or row["figures"] == "step"]
    report["rows"] = [bare_cell(index, **figures), *(row for row in rest if row.get("other_cell") != index)]
    return report


def dead(report: Report, index: int) -> Report:
    """Make a cell one whose process died."""
    return only_cell(report, index, error="died: its process was killed (signal 9), most likely for want of memory")
