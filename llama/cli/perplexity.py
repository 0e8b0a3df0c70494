"""The command that scores a text: python -m llama.perplexity --text FILE."""

import json as json_format
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama.api import load
from llama.cli import console
from llama.host.machine import dtype_name
from llama.kv_cache import cache_kind
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
    quantize: str | None = None,
    activations: int = 16,
    repack: bool = True,
    json: bool = False,
) -> int:
    """Print a model's perplexity on a text, without a cache in one pass a window, or through a kind of cache.

    Args:
        text: The file to score, UTF-8.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        context: The tokens of a window; 1024 by default, or what the model can read where that is less.
        stride: How far behind each other windows begin; half a context by default. Each token is scored once.
        tokens: Score the first so many tokens of the text; all by default.
        kv_cache: A kind of cache, static, concat or file.py:kind: feed the text token by token, so that it is read.
        prompt_len: With kv_cache, the tokens of a window that are fed in one pass before; 64 by default.
        dtype: Numbers that it computes in: auto, fp32, bf16, fp16 or fp64.
        device: Where it computes: auto, cpu, cuda or mps.
        fast: Use the fastest way to run a forward that this machine has.
        quantize: How weights are held: int8, int4, stored (as a .gguf file has them), or none.
        activations: 8 rounds what is multiplied by such weights to 8 bits; else 16.
        repack: With stored weights: --repack=False leaves them in their file, mapped.
        json: Print JSON.
    """
    path = _check_flags(text, stride=stride, tokens=tokens, kv_cache=kv_cache, prompt_len=prompt_len)
    words = read_text(path, limit=TEXT_LIMIT)
    kind = "static" if kv_cache is None else cache_kind(kv_cache)
    packing: dict[str, Any] = {"quantize": quantize, "activations": activations, "repack": repack}
    model, tokenizer = load(ckpt_dir, dtype=dtype, device=device, kv_cache=kind, fast=fast, **packing)
    ids = encode_prompt(tokenizer, words)[:tokens]
    context = min(CONTEXT, model.args.max_seq_len) if context is None else context
    if kv_cache is None:
        score = perplexity(model, ids, context=context, stride=stride)
    else:
        prompt_len = PROMPT_LEN if prompt_len is None else prompt_len
        score = cached_perplexity(model, ids, context=context, prompt_len=prompt_len)
    facts = {"text": text, "text_tokens": len(ids), "bos": tokenizer.adds_bos, "model": ckpt_dir}
    facts |= {"dtype": dtype_name(model.norm.weight.dtype), "device": str(model.device)}
    facts |= {"execution": str(model.execution), "kv_cache": kv_cache, "prompt_len": prompt_len}
    scored = {"perplexity": score.perplexity, **asdict(score)}
    console.put(json_format.dumps({**scored, **facts}, indent=2) if json else report(score, facts))
    return 0


def report(score: Score, facts: Mapping[str, object]) -> str:
    """Return a score, and what was scored and how, in a few lines."""
    how = "off, one pass a window"
    if facts["kv_cache"] is not None:
        how = f"{facts['kv_cache']}, read: token by token behind {facts['prompt_len']} in one pass"
    scored = f"{score.tokens:,} scored of {facts['text_tokens']:,}, {'BOS first' if facts['bos'] else 'no BOS'}"
    return "\n".join(
        [
            f"perplexity {score.perplexity:.4f}, mean negative log-likelihood {score.mean_nll:.5f} nats a token",
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
    """Return the file to read; refuse, before a model is loaded, what no model could do."""
    if world_size() > 1:
        raise ValueError("this command scores in one process; start it without torchrun")
    if text is None:
        raise ValueError("there is no text to score; name a file by --text FILE")
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens={tokens} must be at least 2: the first has nothing before it")
    if kv_cache is None and prompt_len is not None:
        raise ValueError(f"prompt_len={prompt_len} goes with kv_cache, whose kind is to be read; leave one of them out")
    if kv_cache is not None and stride is not None:
        raise ValueError(f"stride={stride} follows from context - prompt_len with kv_cache; leave stride out")
    return Path(text)
