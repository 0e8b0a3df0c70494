"""Times what runs elsewhere: a fresh process of ours, transformers, and gpt-fast."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from llama.bench.gpu.rows import JobRow, NotHere
from llama.bench.gpu.run import (
    LEAST,
    MODELS,
    Options,
    Run,
    dtype_of,
    fast_step,
    milliseconds,
    prompts_of,
    random_model,
)
from llama.bench.gpu.times import continued, measured
from llama.fast.graph_runner import find_ops

COMPILING = 45.0  # seconds without which no compilation is begun
LATE = "out of time"
ROOT = Path(__file__).resolve().parents[3]
START = """
import json, sys
from llama.bench.gpu.others import start
from llama.bench.gpu.run import Options
task = json.loads(sys.argv[1])
start(task.pop("began"), Options(**task))
"""


def starts(run: Run) -> None:
    """Time two more processes, from their beginning to a first token, and to the end of a first generation."""
    for _ in range(2):
        printed, error = child(START, {**vars(run.options), "began": time.time()}, cwd=ROOT, seconds=run.left)
        if error:
            raise RuntimeError(f"the process ended early: {error}")
        run.report.starts.append(json.loads(printed.splitlines()[-1]))


def start(began: float, options: Options) -> None:
    """Be such a process, which began at that time. Weights are drawn; a user's would be read from a file."""
    device, args = torch.device(options.device), MODELS[options.model]
    model = random_model(args, dtype_of(device), device)
    step = fast_step(find_ops(model), device)
    step.check(model)
    model.runner = step
    prompts, found = prompts_of(args, [options.input_len]), {}
    for name, count in (("first token", 1), ("first generation", options.output_len)):
        continued(model, prompts, count, True)
        found[name] = time.time() - began
    print(json.dumps(found))


def child(code: str, task: dict[str, Any], *, cwd: Path, seconds: float) -> tuple[str, str]:
    """Run Python code with a task as its argument; return what it prints, and why it did not come to its end."""
    command = [sys.executable, "-c", code, json.dumps(task)]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=max(1.0, seconds), check=False)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return printed.decode() if isinstance(printed, bytes) else printed, LATE
    return done.stdout, f"exit status {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""


def twin_of(run: Run) -> Any:
    """Return transformers' Llama on the same weights."""
    try:
        from llama.bench.run.peers import TransformersEngine, check_engine
    except ModuleNotFoundError as absent:
        raise NotHere(f"not installed: {absent.name}") from None
    try:
        check_engine("transformers")
    except ValueError as absent_too:
        raise NotHere(f"not installed: {absent_too}") from None
    return TransformersEngine.of(run.model, None).model  # type: ignore[arg-type]  # no text is read


def eager(run: Run) -> None:
    """Time transformers' `generate` as it comes."""
    twin = twin_of(run)

    def job(prompts: list[list[int]], count: int, kv_caching: bool) -> object:
        return hf_generate(twin, prompts, count, use_cache=kv_caching)

    for rows in run.options.batch_sizes:
        for kv_caching in (True, False):
            row = measured(run, "transformers, eager", rows, kv_caching, job, "its wq and wk are copies")
            run.report.jobs.append(row)


def static(run: Run) -> None:
    """Time transformers' `generate` with a static cache, for which it compiles its step on a GPU."""
    twin = twin_of(run)
    from transformers import StaticCache

    for rows in run.options.batch_sizes:
        cache = StaticCache(config=twin.config, max_cache_len=run.options.input_len + run.options.output_len)

        def job(prompts: list[list[int]], count: int, kv_caching: bool, cache: Any = cache) -> object:
            cache.reset()
            return hf_generate(twin, prompts, count, past_key_values=cache)

        kind = "compiled" if run.device.type == "cuda" else "not compiled on a CPU"
        note = f"{kind}; its wq and wk are copies"
        run.report.jobs.append(measured(run, "transformers, static cache", rows, True, job, note, needs=COMPILING))


def hf_generate(twin: Any, prompts: list[list[int]], count: int, **options: Any) -> object:
    ids = torch.tensor(prompts, device=twin.device)
    mask = torch.ones_like(ids)
    return twin.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)


# Runs in gpt-fast's folder, in a process of its own, because it sets up the whole process. Its text packages are not
# needed. Ids are its samples of temperature 0 without top-k, and its head is untied, as it comes. It cannot make less
# than two tokens.
GPT_FAST = """
import json, sys, time, types
import torch
text = sys.modules["tokenizer"] = types.ModuleType("tokenizer")
text.get_tokenizer = None
import generate, model
task = json.loads(sys.argv[1])
cuda = task["device"] == "cuda"
with torch.device("meta"):
    net = model.Transformer(model.ModelArgs(**task["sizes"])).to(getattr(torch, task["dtype"]))
net = net.to_empty(device=task["device"]).requires_grad_(False).eval()
for weight in net.parameters():
    weight.fill_(1.0) if weight.ndim == 1 else weight.uniform_(-(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
if cuda:
    generate.decode_one_token = torch.compile(generate.decode_one_token, mode="reduce-overhead", fullgraph=True)
sync = torch.cuda.synchronize if cuda else lambda: None
for rows in task["batch_sizes"]:
    prompt = torch.randint(task["sizes"]["vocab_size"], (task["input_len"],), device=task["device"])
    def job(count):
        sync()
        began = time.perf_counter()
        generate.generate(net, prompt, count, batch_size=rows, interactive=False, draft_model=None, temperature=0.0)
        sync()
        return time.perf_counter() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = job(task["output_len"])
    job(task["output_len"]), job(2)
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (None, None)
    long, short = ([job(count) for _ in range(task["repeats"])] for count in (task["output_len"], 2))
    print(json.dumps([rows, first, long, short, peak, reserved]), flush=True)
"""


def gpt_fast(run: Run) -> None:
    """Time gpt-fast from a checkout of it, on the same shapes."""
    folder = run.options.gpt_fast
    if folder is None or not (Path(folder) / "generate.py").is_file():
        raise NotHere("not installed: --gpt_fast takes the folder of a checkout")
    args, options = run.args, run.options
    sizes = {
        "block_size": max(2048, options.input_len + options.output_len), "vocab_size": args.vocab_size,
        "n_layer": args.n_layers, "n_head": args.n_heads, "n_local_heads": args.n_kv_heads, "dim": args.dim,
        "intermediate_size": args.ffn_dim, "rope_base": args.rope_theta, "norm_eps": args.norm_eps,
    }  # fmt: skip
    task = {**vars(options), "sizes": sizes, "repeats": LEAST, "dtype": str(run.dtype).removeprefix("torch.")}
    printed, error = child(GPT_FAST, task, cwd=Path(folder), seconds=run.left)
    for rows, first, long, short, peak, reserved in map(json.loads, printed.splitlines()):
        each = [(seconds - statistics.median(short)) / max(1, options.output_len - 2) for seconds in long]
        row = JobRow("gpt-fast", rows, True, milliseconds(long), milliseconds(each), 1000 * first, peak=peak,
                     reserved=reserved, note="untied head; a process of its own")  # fmt: skip
        run.report.jobs.append(row)
    if error:
        raise NotHere(error) if error == LATE else RuntimeError(error)
