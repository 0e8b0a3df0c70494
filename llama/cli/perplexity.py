"""The command that scores a text: llama-kv perplexity --text FILE."""

import json as json_format
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama.api import load, pick_cache, pick_device
from llama.host import console
from llama.host.cores import FreeCores
from llama.host.machine import dtype_name
from llama.quality.perplexity import CONTEXT, PROMPT_LEN, Score, cached_perplexity, perplexity
from llama.ranks.torchrun import world_size
from llama.streaming import encode_prompt
from llama.untrusted.files import TEXT_LIMIT, read_text


def main(
    *,
    text: str | None = None,
    ckpt_dir: str = "demo",
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    kv_cache: str | None = None,
    prompt_len: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    fast: bool = False,
    quantize: str = "auto",
    activations: int = 16,
    json: bool = False,
) -> int:
    """Print a model's perplexity on a text, without a cache in one pass a window, or with a kind of cache.

    Args:
        text: The file to score, UTF-8.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        context: The tokens of a window; by default 1024, or the model's max_seq_len if that is less.
        stride: The distance between the starts of windows; by default half a context. Each token is scored once.
        tokens: How many tokens of the text to score; by default all.
        kv_cache: A kind of cache, NAME, NAME:PARAMS or FILE.py:NAME, through which the text is fed token by token;
            llama-kv kinds lists them.
        prompt_len: With kv_cache, the tokens of a window that are fed in one pass before the others; by default 64.
        dtype: The dtype to compute in: auto, fp32, bf16, fp16 or fp64.
        device: The device to compute on: auto, cpu, cuda or mps.
        fast: Use the fastest implementation of the forward that this machine supports.
        quantize: The format of the weights in memory: int8, int4, stored (as in the .gguf file), or none (floats); auto
            is stored with fast and a quantised .gguf file, else none.
        activations: With packed weights, 8 rounds the inputs of products to 8 bits; the default is 16.
        json: Print JSON.
    """
    path = _check_flags(text, stride=stride, tokens=tokens, kv_cache=kv_cache, prompt_len=prompt_len)
    words = read_text(path, limit=TEXT_LIMIT)
    kind = "static" if kv_cache is None else pick_cache(kv_cache)
    packing: dict[str, Any] = {"quantize": quantize, "activations": activations}
    if pick_device(device).type == "cpu":
        FreeCores().choose_threads(console.note)
    model, tokenizer = load(ckpt_dir, dtype=dtype, device=device, kv_cache=kind, fast=fast, **packing)
    ids = encode_prompt(tokenizer, words)[:tokens]
    context = min(CONTEXT, model.args.max_seq_len) if context is None else context
    if kv_cache is None:
        score = perplexity(model, ids, context=context, stride=stride)
    else:
        prompt_len = PROMPT_LEN if prompt_len is None else prompt_len
        score = cached_perplexity(model, ids, context=context, prompt_len=prompt_len)
    facts: dict[str, object] = {"text": text, "text_tokens": len(ids), "bos": tokenizer.adds_bos, "model": ckpt_dir}
    facts |= {"dtype": dtype_name(model.norm.weight.dtype), "device": str(model.device)}
    facts |= {"execution": str(model.execution), "kv_cache": kv_cache, "prompt_len": prompt_len}
    scored = {"perplexity": score.perplexity, "perplexity_interval": score.perplexity_interval, **asdict(score)}
    console.put(json_format.dumps({**scored, **facts}, indent=2) if json else score_lines(score, facts))
    return 0


def score_lines(score: Score, facts: Mapping[str, object]) -> str:
    """Return a score, its text and its settings, as lines of text."""
    how = "off, one pass a window"
    if facts["kv_cache"] is not None:
        how = f"{facts['kv_cache']}, {facts['prompt_len']} tokens of a window in one pass, the others one by one"
    scored = f"{score.tokens:,} scored of {facts['text_tokens']:,}, {'BOS first' if facts['bos'] else 'no BOS'}"
    ends = "" if score.perplexity_interval is None else " ({:.4f} to {:.4f})".format(*score.perplexity_interval)
    return "\n".join(
        [
            f"perplexity {score.perplexity:.4f}{ends}, mean negative log-likelihood {score.mean_nll:.5f} nats a token",
            f"tokens     {scored}",
            f"windows    context {score.context:,}, stride {score.stride:,}",
            f"KV cache   {how}",
            f"text       {facts['text']}",
            f"model      {facts['model']}, {facts['dtype']} on {facts['device']}, {facts['execution']}",
        ]
    )


def _check_flags(
    text: str | None, *, stride: int | None, tokens: int | None, kv_cache: str | None, prompt_len: int | None
) -> Path:
    """Return the file to read; raise ValueError for flags that are wrong with any model."""
    if world_size() > 1:
        raise ValueError("this command scores in one process; start it without torchrun")
    if text is None:
        raise ValueError("there is no text to score; name a file by --text FILE")
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens={tokens} must be at least 2: the first has nothing before it")
    if kv_cache is None and prompt_len is not None:
        raise ValueError(f"prompt_len={prompt_len} needs --kv_cache; give both, or none")
    if kv_cache is not None and stride is not None:
        raise ValueError(f"stride={stride} cannot be set with kv_cache: it is context - prompt_len; leave stride out")
    return Path(text)
