"""The validity block: was the measurement what it claims to be? Checks judge what was observed."""

from llama.bench.cell import Cell
from llama.bench.run.engines import Run
from llama.bench.schema import Row, Status
from llama.costs import forwards, size
from llama.speculation import MOST


def judge(cell: Cell, run: Run, warm_up: Run, *, max_seq_len: int, reset_seen: tuple[int, int] | None) -> list[Row]:
    """Return all checks of a run. `reset_seen`: the peak and current bytes right after the reset."""
    return [
        _cache(cell, run),
        _tokens(cell, run),
        _capacity(cell, run, max_seq_len),
        _length(cell, run),
        _warm_up(cell, warm_up),
        _statistics(reset_seen),
        _sampler(warm_up),
        *([_fast_step(run)] if cell.fast else []),
    ]


def notes(cell: Cell, *, weights: str) -> list[str]:
    """Return what a reader should know of a cell besides its checks."""
    rounded = "as the file has them, so that what is fp32 here is the file's numbers widened"
    if not cell.from_file:
        rounded = "rounded, so that another text may come out than of the weights as they are"
    eight_bits = "activations rounded to 8 bits: the table says how often the most likely token stays that of fp32"
    found = {
        "random weights: times and sizes are the model's, the text is noise": weights == "random",
        "random token ids as prompts, of exactly the length asked for": cell.text is None,
        f"low precision ({cell.dtype}): near ties may fall differently with the cache on and off": cell.itemsize == 2,
        f"{cell.quantize} weights: {rounded}": cell.quantize is not None,
        eight_bits: cell.activations == 8,
        "logits of all positions, on purpose: generation needs the last one's only": cell.logits == "all",
    }
    return [note for note, holds in found.items() if holds]


def check(name: str, fine: bool | None, detail: str) -> Row:
    """Return the row of a check; None: the engine or the machine does not show it."""
    status: Status = "not observed" if fine is None else "ok" if fine else "violated"
    return {"figures": "check", "name": name, "status": status, "detail": detail}


def _cache(cell: Cell, run: Run) -> Row:
    """Was the cache on or off as asked, by the tokens fed after the prefill and by the cached bytes?"""
    widths = sorted({width for _, width in run.fed[1:]})
    as_fed = None if not widths else (widths[-1] <= (1 + MOST if cell.speculate else 1)) == cell.kv_caching
    as_cached = None if run.cache_bytes is None else (run.cache_bytes > 0) == cell.kv_caching
    seen = [fine for fine in (as_fed, as_cached) if fine is not None]
    fed = "" if not widths else f"{' to '.join(map(str, sorted({widths[0], widths[-1]})))} fed per row and step"
    cached = "" if run.cache_bytes is None else f"{size(run.cache_bytes)} cached"
    asked = "on" if cell.kv_caching else "off"
    words = ", ".join(part for part in (fed, cached) if part) or "the engine does not show it"
    return check("cache", all(seen) if seen else None, f"asked for {asked}; {words}")


def _tokens(cell: Cell, run: Run) -> Row:
    """Are the counts of tokens that went through the model and that came out exactly those asked for?"""
    expected = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
    wanted = [(cell.batch_size, seqlen) for _, seqlen in expected]
    made = sorted({len(row) for row in run.ids})
    came_out = len(run.ids) == cell.batch_size and made == [cell.output_len]
    total, right = (sum(rows * width for rows, width in fed) for fed in (run.fed, wanted))
    first = run.fed[0] if run.fed else (0, 0)
    out = f"{len(run.ids)} x {'/'.join(map(str, made))} out"
    if cell.speculate and run.fed:
        accepted = run.accepted(cell.output_len)
        words = f"{first[0]} x {first[1]} in, {out}, {run.proposed} guessed tokens fed, {accepted} of them right"
        return check("tokens", came_out and first == wanted[0] and 0 <= accepted <= run.proposed, words)
    words = f"{first[0]} x {first[1]} in, {out}, {total} fed of {right} worked out"
    return check("tokens", came_out and run.fed == wanted, words)


def _capacity(cell: Cell, run: Run, max_seq_len: int) -> Row:
    """Did every position fit into the model's limit and into the cache?"""
    last = cell.total_len - 1  # the newest token is never fed
    capacity = run.cache_length if cell.kv_caching else None
    fine = cell.total_len <= max_seq_len and (capacity is None or capacity >= last)
    words = "" if capacity is None else f", the cache's capacity is {capacity}"
    return check("no overflow", fine, f"{last} positions fed{words}, the model's limit is {max_seq_len}")


def _length(cell: Cell, run: Run) -> Row:
    short = sum(len(row) < cell.output_len for row in run.ids)
    return check("no early end", not short, f"{short} rows ended before {cell.output_len} tokens")


def _warm_up(cell: Cell, warm_up: Run) -> Row:
    """Did a prefill and a step of the same shapes run before the clock started?"""
    expected = forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=cell.kv_caching)
    shapes = [(cell.batch_size, seqlen) for _, seqlen in expected]
    words = f"{', '.join(f'{rows} x {width}' for rows, width in dict.fromkeys(warm_up.fed)) or 'nothing'} fed before"
    words += " the clock was started"
    if new := len({*shapes[2:]} - {*shapes[:2], *warm_up.fed}):
        words += f"; the {new} longer steps are each the first of their shape"
    return check("warm-up", warm_up.fed[: len(shapes[:2])] == shapes[:2], words)


def _statistics(reset_seen: tuple[int, int] | None) -> Row:
    """Did the peak start from the current bytes, not from the peak of earlier work?"""
    if reset_seen is None:
        return check("statistics reset", None, "this system's peak cannot be reset; the process is a fresh one")
    peak, present = reset_seen
    fine = peak <= present * 1.02 + 4 * 2**20  # reading the two figures allocates some
    return check("statistics reset", fine, f"the peak was {size(peak)} at the start, with {size(present)} in use")


def _fast_step(run: Run) -> Row:
    """Did the fast step execute every forward that it was asked for?"""
    fine = run.fast_forwards == run.fast_wanted if run.fast_wanted else None
    words = f"asked for; {run.fast_forwards} of {len(run.fed)} forwards ran by it"
    if run.fast_forwards != len(run.fed):
        words += f", {'the prompt' if fine else 'the others'} by the plain path"
    return check("fast step", fine, words)


def _sampler(warm_up: Run) -> Row:
    if warm_up.greedy is None:
        return check("same sampler", None, "greedy was asked for; the engine does not show its logits")
    likely = "the most likely one" if warm_up.greedy else "not always the most likely one"
    return check("same sampler", warm_up.greedy, f"greedy was asked for; what the warm-up fed back was {likely}")
