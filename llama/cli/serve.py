"""The command that serves a model on this machine: flags -> an engine, an application, a server."""

import os
from typing import TYPE_CHECKING, Any

from llama.api import load, pick_cache, pick_device
from llama.host import console
from llama.host.cores import threads
from llama.host.machine import available_memory
from llama.speculation import check_speculate
from llama.untrusted.words import printable

if TYPE_CHECKING:
    from llama.model import Transformer
    from llama.tokenizer import Tokenizer

SHARE = 0.25  # of the free memory, for all caches


def main(
    *,
    ckpt_dir: str = "demo",
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    rows: int = 16,
    kv_cache: str = "paged",
    cache_gb: float | None = None,
    max_seq_len: int | None = None,
    dtype: str = "auto",
    quantize: str = "auto",
    speculate: str | None = None,
    queue: int = 64,
    grace: float = 30.0,
    time_limit: float = 600.0,
    check: float = 0.0,
    max_pause_ms: float = 100.0,
    require_fast: bool = False,
    name: str | None = None,
    log_requests: bool = False,
) -> int:
    """Serve a model with OpenAI's HTTP interface, and a page at / that shows what the cache does.

    Every flag can be set by an environment variable, such as LLAMA_KV_ROWS for --rows; the command line counts more.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        host: The address to listen on. Any other than this machine's own, 127.0.0.1, needs a key.
        port: The port to listen on; 0 takes a free one.
        key: What clients must send as Authorization: Bearer KEY; by default none is needed. Better set it by
            LLAMA_KV_KEY, because the list of processes shows flags.
        rows: The most texts that generate at a time.
        kv_cache: The kind of cache, NAME or NAME:PARAMS, which llama-kv kinds describes.
        cache_gb: The most memory of all caches, in units of 2^30 bytes; by default a quarter of the free memory. A text
            waits until its whole length fits.
        max_seq_len: The longest text, prompt and answer together; by default that of the checkpoint.
        dtype: The dtype to compute in: auto, fp32, bf16, fp16 or fp64; auto is fp32 on a CPU.
        quantize: The format of the weights in memory: int8, int4, stored, or none; auto is stored for a quantised .gguf
            file, such as the demo's, else none.
        speculate: How tokens are guessed: lookup takes those that followed the same tokens before, lookup:N at most N.
            Several are verified at once if that is faster; no text changes.
        queue: The most texts that wait for a row; further requests get 429.
        grace: Seconds that running texts have to end after SIGTERM or Ctrl-C.
        time_limit: The most seconds of a request.
        check: The share of ended texts that are generated again, alone, when nothing else is to do, and compared.
        max_pause_ms: The milliseconds that prompts of other texts may delay a text's next token, as well as pieces of
            64 tokens can keep that. Native code with a lossless kind of cache keeps it; else pieces have 256 tokens.
        name: The model's name in answers; by default the last part of ckpt_dir, which requests may also have.
        log_requests: Print a line for each request that has ended on standard error, without its texts.
        require_fast: End with exit code 2, and serve nothing, if native code cannot run the model on this machine.
    """
    check_speculate(speculate)
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError("the key must be printable ASCII without spaces around it: clients send it in a header")
    try:
        from llama.serve.server import Server, bind, is_loopback
    except ImportError as error:
        raise ValueError(f"the server needs {error.name}: pip install 'llama-kv[serve]'") from None
    ranges: dict[str, tuple[float, float, float]]
    ranges = {"port": (port, 0, 65535), "rows": (rows, 1, 1024), "queue": (queue, 0, 1e6), "check": (check, 0, 1)}
    ranges |= {
        "cache_gb": (1 if cache_gb is None else cache_gb, 0.001, 1e6),
        "grace": (grace, 0, 1e6),
        "time_limit": (time_limit, 0.001, 1e6),
        "max_pause_ms": (max_pause_ms, 1, 1e6),
    }
    for flag, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise ValueError(f"--{flag} {value} must be from {least:g} to {most:g}")
    if name is not None and not (name and name == printable(name, 80)):
        raise ValueError(f"--name {name!r:.90} must be 1 to 80 printable characters")
    if key is None and not is_loopback(host):
        raise ValueError(f"--host {host} can be reached by other machines: give --key, or listen on 127.0.0.1")
    from llama.serve.app import App
    from llama.serve.engine import Engine

    kind, cpu = pick_cache(kv_cache), pick_device("auto").type == "cpu"
    if require_fast and not cpu:
        raise ValueError("--require_fast is for a CPU, and here is a GPU, on which the plain path runs; leave it out")
    listening = bind(host, port)
    # All cores within the user's count and the quota: the load of this moment says nothing about the next weeks.
    count = threads() if cpu else None

    def loaded() -> "tuple[Transformer, Tokenizer]":
        limits: dict[str, Any] = {"max_seq_len": max_seq_len, "kv_cache": kind, "threads": count}
        model, tokenizer = load(ckpt_dir, dtype=dtype, quantize=quantize, fast=cpu, **limits)
        if require_fast and (model.runner is None or model.execution_with(kind).runner != model.runner.name):
            why = "the plain path would run it, for the reason above, which llama-kv doctor shows, too"
            if model.runner is not None:
                why = f"native code has no step for --kv_cache {kind}; choose another kind"
            raise ValueError(f"--require_fast: {ckpt_dir} has no fast path here: {why}")
        return model, tokenizer

    def cache_bytes(model: "Transformer") -> int | None:
        free = available_memory(model.device)
        given = None if cache_gb is None else int(cache_gb * 2**30)
        return given if given is not None or free is None else int(SHARE * free)

    options: dict[str, Any] = {"rows": rows, "kv_cache": kind, "cache_bytes": cache_bytes, "speculate": speculate}
    options["max_pause"] = max_pause_ms / 1000
    engine = Engine(loaded, check=check, **options)
    names = [name] if name is not None else []
    names.append(printable(os.path.basename(os.path.normpath(ckpt_dir)), 80))
    hosts = [*dict.fromkeys([f"[{host}]" if ":" in host else host, "localhost", "127.0.0.1", "[::1]"])]
    log = console.say if log_requests else None
    app = App(engine, names=names, key=key, hosts=hosts, places=rows + queue, time_limit=time_limit, log=log)
    server = Server(app, grace=grace)
    with server.capture_signals():  # also before it runs: console.stop would raise an error in the start of asyncio
        console.put(f"http://{hosts[0]}:{listening.getsockname()[1]}  {names[0]}, {kind} cache; Ctrl-C ends it")
        server.run(sockets=[listening])
    if engine.ready.done():
        engine.ready.result()  # raises what loading raised
        engine.end()
    return 0
