"""Time the fast path on a GPU: a start, variants of a step, jobs, kernels, products and a peer.

    python scripts/gpu_lab.py                             # on a GPU: eight minutes at most
    python scripts/gpu_lab.py --device cpu --shape tiny   # a rehearsal without a GPU; its figures say nothing

Each part runs in a process of its own with a time limit, in the order of its value, so a part that crashes or hangs
does not stop the others. Each result is a line of JSON in OUT/lab.jsonl as soon as it is known.
Triton's kernels serve a kind of GPU if they are 1.15 times as fast as the compiled step at 16 rows, and one row if they
are 1.05 times as fast there (docs/log.md). A variant counts only if its trial passes.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, whether or not it is installed

import torch
from torch import Tensor

from llama import testing
from llama.args import ModelArgs
from llama.bench.run.models import random_model
from llama.costs import RELEASED
from llama.fast import choose
from llama.fast.graph_ops import GraphOps, compiled, plain_ops
from llama.fast.graph_runner import GraphRunner
from llama.fast.graph_trial import GREEDY_KEY, try_steps
from llama.host.machine import wait_for
from llama.kv_cache import KVCache
from llama.model import Transformer
from llama.ops import linear

IMPORTED = time.time()

TINY = ModelArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=512, max_seq_len=1024)
ROWS = (1, 4, 16, 24)
PROMPT, NEW = 256, 32  # tokens of each row of a job
MANY_POSITIONS = 8000

Note = Callable[..., None]


class Bench:
    """A model with random weights on the device, and how long things take there."""

    def __init__(self, device: str, shape: str) -> None:
        self.device = torch.device(device)
        self.gpu = self.device.type == "cuda"
        self.args = TINY if shape == "tiny" else replace(RELEASED[shape], max_seq_len=8192)
        self.dtype = torch.bfloat16 if self.gpu else torch.float32

    def model(self) -> Transformer:
        return random_model(self.args, dtype=self.dtype, device=self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 5) -> float:
        """Return the wall time of the fastest of some runs, after one that is not counted."""
        times = []
        for _ in range(repeats + 1):
            wait_for(self.device)
            began = time.perf_counter()
            run()
            wait_for(self.device)
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def ms_each(self, run: Callable[[], object], times: int = 300) -> float:
        """Return the ms of one of many runs in a row."""
        times = times if self.gpu else 3

        def many() -> None:
            for _ in range(times):
                run()

        return 1e3 * self.seconds(many, 3) / times

    def job(self, model: Transformer, rows: int, **options: Any) -> float:
        """Return the ms of a generation of NEW tokens after PROMPT tokens."""
        prompts = torch.randint(3, self.args.vocab_size, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
        made = partial(model.generate_tokens, prompts.tolist(), NEW, **{"temperature": 0.0, **options})
        return 1e3 * self.seconds(made, 3 if self.gpu else 1)


# ---- parts -----------------------------------------------------------------------------------------------------------


def machine(bench: Bench, note: Note) -> None:
    """Note the card, its software, and how fast it reads."""
    import numpy

    note("versions", torch=torch.__version__, cuda=torch.version.cuda, numpy=numpy.__version__, python=sys.version[:7])
    if bench.gpu:
        import triton

        facts = torch.cuda.get_device_properties(bench.device)
        note("card", name=facts.name, processors=facts.multi_processor_count, triton=triton.__version__)
    block = torch.ones(2**31 if bench.gpu else 2**22, dtype=torch.bfloat16, device=bench.device)
    note("reads", gb_per_s=2e-6 * len(block) / bench.ms_each(block.sum, 20))


def start(bench: Bench, note: Note) -> None:
    """Note how long a start takes, from the process to the chosen runner, and what was chosen."""
    process = float(os.environ.get("LAB_BEGAN", IMPORTED))
    note("imports", s=IMPORTED - process)
    began = time.time()
    model = bench.model()
    wait_for(bench.device)
    note("model", s=time.time() - began)
    began = time.time()
    _use_fast(model)
    note("trial", s=time.time() - began, execution=str(model.execution), all_s=time.time() - process)
    assert model.runner is not None, "the fast path declined; the log says why"


def jobs(bench: Bench, note: Note) -> None:
    """Note whole jobs with and without the cache, plain and fast, a chat, and sampled steps."""
    model = bench.model()
    _use_fast(model)
    fast = model.runner
    for rows in (1, 8, 16):
        for caching in (True, False):
            options = {"kv_caching": caching}
            model.runner = None
            plain = bench.job(model, rows, **options)
            model.runner = fast
            note("job", rows=rows, kv_caching=caching, plain_ms=plain, fast_ms=bench.job(model, rows, **options))
    for options in ({"temperature": 0.6, "top_p": 0.9, "seed": 1}, {"temperature": 0.8, "top_k": 50, "seed": 1}):
        note("sampled job", **options, ms=[bench.job(model, rows, **options) for rows in (1, 16)])
    if bench.gpu:
        note("peak", gb=torch.cuda.max_memory_allocated() / 1e9)
    for name, runner in (("plain", None), ("fast", fast)):
        model.runner = runner
        session = model.session(_Ids())
        session.feed(list(range(3, 3 + PROMPT)))
        options = {"temperature": 0.6, "top_p": 0.9, "seed": 1}
        session.generate(20, **options)
        began = time.perf_counter()
        for _ in range(3):
            session.append([5] * 20)
            session.generate(100, **options)
        note("chat", path=name, ms_per_token=1e3 * (time.perf_counter() - began) / 300)


def steps(bench: Bench, note: Note) -> None:
    """Note the time of a recorded step by each variant, 280 and many positions, and whether its trial passes."""
    model = bench.model()
    for name, make in _variants(bench, model):
        began = time.perf_counter()
        try:
            ops = make()._replace(name=name)
            runner = GraphRunner(ops)
            trial: Any = {rows: 1e3 * taken for rows, taken in try_steps(model, runner).items()}
        except Exception as why:
            note("steps", variant=name, failed=f"{type(why).__name__}: {why}"[:300])
            continue
        compiling = time.perf_counter() - began
        for length in (280, MANY_POSITIONS if bench.gpu else 600):
            note("steps", variant=name, positions=length, ms=dict(_recorded(bench, model, runner, length)), trial=trial,
                 compile_s=compiling)  # fmt: skip


def profile(bench: Bench, note: Note) -> None:
    """Note the kernels of a step: how often each runs, and its time."""
    model = bench.model()
    _use_fast(model)
    assert isinstance(model.runner, GraphRunner)
    for rows in (1, 16):
        with torch.inference_mode():
            buffers = model.runner.buffers_for(model, rows, 280, model.new_cache("static"))
            buffers.positions.fill_(280)
            replay = model.runner.recorded(model, buffers, GREEDY_KEY)
            with torch.profiler.profile() as profiler:
                for _ in range(20):
                    buffers.positions.fill_(280)
                    replay()
                wait_for(bench.device)
        events = [event for event in profiler.key_averages() if getattr(event, "self_device_time_total", 0) > 0]
        kernels = [
            [event.key[:70], round(event.count / 20, 2), round(event.self_device_time_total / event.count, 2)]
            for event in sorted(events, key=lambda event: -event.self_device_time_total)
        ]
        note("kernels", rows=rows, launches=sum(kernel[1] for kernel in kernels), us_by_kernel=kernels[:24])


def products(bench: Bench, note: Note) -> None:
    """Note the time of matrix products alone, by PyTorch and by several tiles of `product`, over different weights."""
    from llama.fast.graph_kernels import TILES, Tile, product

    dim, ffn = bench.args.dim, bench.args.ffn_dim
    shapes = {"wo": (dim, dim), "w2": (dim, ffn), "w1w3": (ffn, dim), "head": (bench.args.vocab_size, dim)}
    others = (Tile(16, 128, 4, 5, 4), Tile(32, 128, 2, 4, 4), Tile(64, 128, 1, 4, 4), Tile(128, 64, 1, 4, 8))
    for name, (out, inner) in shapes.items():
        count, like = 2 if name == "w1w3" else 1, {"device": bench.device, "dtype": bench.dtype}
        repeats = 2 if name == "head" else 16
        sets = [[0.02 * torch.randn(out, inner, **like) for _ in range(count)] for _ in range(repeats)]
        for rows in (1, 16):
            x = torch.randn(rows, inner, **like)
            runs: dict[str, Callable[..., Any]] = {"PyTorch": lambda x, *weights: [linear(x, each) for each in weights]}
            for tile in (TILES[name], *others):
                runs[str(list(tile))] = partial(product, tile=tile, gated=count == 2)
            for by, run in runs.items():

                def all_sets(run: Any = run, x: Tensor = x, sets: Any = sets) -> None:
                    for weights in sets:
                        run(x, *weights)

                try:
                    taken = 1e3 * bench.ms_each(_graph(bench, all_sets)) / repeats
                    note("product", weight=name, rows=rows, by=by, us=taken)
                except Exception as why:
                    note("product", weight=name, rows=rows, by=by, failed=str(why)[:200])


def peers(bench: Bench, note: Note) -> None:
    """Note the job by transformers with a static cache and its compiled forward, on the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    args = bench.args
    config = LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        vocab_size=args.vocab_size,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
    )
    with bench.device:
        model = LlamaForCausalLM(config).to(bench.dtype).eval()
    for rows in (1, 8, 16):
        ids = torch.randint(3, args.vocab_size, (rows, PROMPT), device=bench.device)
        options = {
            "max_new_tokens": NEW,
            "min_new_tokens": NEW,
            "attention_mask": torch.ones_like(ids),
        }
        began = time.perf_counter()
        made = partial(model.generate, ids, do_sample=False, cache_implementation="static", **options)
        made()
        first = time.perf_counter() - began
        note("transformers, static cache, compiled", rows=rows, ms=1e3 * bench.seconds(made, 3), first_s=first)


def kinds(bench: Bench, note: Note) -> None:
    """Check the contract of every kind of cache on the device."""
    for name in sorted(KVCache.kinds):
        try:
            note("kind", name=name, claims=len(testing.check_cache_kind(name, device=str(bench.device))))
        except Exception as why:
            note("kind", name=name, failed=f"{type(why).__name__}: {why}"[:300])


# Seconds that each part may take, in the order of value; `again` is a second start with the compiled code of the first.
PARTS: dict[str, tuple[Callable[[Bench, Note], None], float]] = {
    "machine": (machine, 40),
    "start": (start, 60),
    "steps": (steps, 110),
    "jobs": (jobs, 60),
    "again": (start, 30),
    "kinds": (kinds, 60),
    "profile": (profile, 30),
    "products": (products, 45),
    "peers": (peers, 90),
}
LIMIT_S = 480.0


# ---- helpers of parts ------------------------------------------------------------------------------------------------


def _use_fast(model: Transformer) -> None:
    """Set the runner as `--fast` does on a GPU; on a CPU the same, uncompiled."""
    if model.device.type == "cuda":
        choose.make_fast(model, Path())
    else:
        model.runner = GraphRunner()


def _variants(bench: Bench, model: Transformer) -> Iterator[tuple[str, Callable[[], GraphOps]]]:
    """Yield the variants of a step by name, each as a function that makes its operations."""
    plain = plain_ops(model.device, model.dtype, model.args.head_dim)[0]
    backend = choose.COMPILER if bench.gpu else "eager"
    made = compiled(backend, plain)
    yield "compiled", lambda: made
    if not bench.gpu:
        return
    from llama.fast.graph_kernels import TRITON

    yield "Triton", lambda: TRITON
    yield "Triton, compiled ends", lambda: TRITON._replace(begin=made.begin, advance=made.advance)


def _recorded(bench: Bench, model: Transformer, runner: GraphRunner, length: int) -> Iterator[tuple[int, float]]:
    """Yield the rows and the ms of a recorded step at `length` positions."""
    for rows in ROWS if length < 1000 else (1, 16):
        with torch.inference_mode():
            buffers = runner.buffers_for(model, rows, length, model.new_cache("static"))
            for keys, values in buffers.keys_values:
                keys.normal_(), values.normal_()
            replay = runner.recorded(model, buffers, GREEDY_KEY)

            def step(buffers: Any = buffers, replay: Any = replay) -> None:
                buffers.positions.fill_(length - 1)
                replay()

            yield rows, round(bench.ms_each(step), 4)
        runner.drop()


def _graph(bench: Bench, run: Callable[[], None]) -> Callable[[], object]:
    """Return the run as a graph's replay, or the run itself on a CPU."""
    run()
    if not bench.gpu:
        return run
    graph = torch.cuda.CUDAGraph()
    wait_for(bench.device)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class _Ids:
    """A tokenizer whose text spells ids."""

    bos_id, adds_bos, stop_tokens = None, False, ()

    def encode(self, s: str, **_: object) -> list[int]:
        return [int(word) for word in s.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def stream(self) -> Any:
        return self

    def feed(self, id: int) -> str:
        return f"{id} "

    def flush(self) -> str:
        return ""


# ---- the script ------------------------------------------------------------------------------------------------------


def run_part(name: str, device: str, shape: str) -> None:
    """Run one part in this process; print each result as a line of JSON."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s", stream=sys.stderr)

    def note(what: str, **facts: Any) -> None:
        print(json.dumps({"part": name, "what": what, **_rounded(facts)}), flush=True)

    PARTS[name][0](Bench(device, shape), note)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def main(device: str = "cuda", shape: str = "llama-3.2-1b", out: str = "results/gpu-lab", only: str = "") -> int:
    """Run all parts, or those that `only` lists; return how many failed. OUT gets lab.jsonl and a log for each."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; --device cpu --shape tiny rehearses the lab without one")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "PYTHONUNBUFFERED": "1"}
    failed, began = 0, time.monotonic()
    for name in only.split(",") if only else PARTS:
        left = LIMIT_S - (time.monotonic() - began)
        limit = min(PARTS[name][1], left)
        environment = {**os.environ, **own, "LAB_BEGAN": str(time.time())}
        command = [sys.executable, __file__, "--part", name, "--device", device, "--shape", shape]
        with open(folder / f"{name}.log", "w") as log, open(folder / "lab.jsonl", "a+") as lines:
            place = lines.seek(0, os.SEEK_END)
            try:
                status = subprocess.run(
                    command, stdout=lines, stderr=log, timeout=max(limit, 1), env=environment, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
            lines.seek(place)
            print(lines.read(), end="")
        if status != 0:
            failed += 1
            print(json.dumps({"part": name, "failed": status, "limit_s": limit}))
            print("\n".join((folder / f"{name}.log").read_text().splitlines()[-12:]))
        print(f"--- {name}: {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    options = {name.removeprefix("--"): value for name, value in given.items()}
    part = options.pop("part", None)
    if part is not None:
        run_part(part, **options)
    else:
        sys.exit(main(**options))
