"""Compare the next-token distributions of quantised weights, or of a kind of cache, with those of float32 on texts.

    python scripts/compare_quantized.py [FILE ...] [--quantize int8] [--ckpt_dir DIR] [--tokens 512]
    python scripts/compare_quantized.py [FILE ...] --kv_cache rotated:k5v4 --tokens 2560

Both models read the same tokens (teacher forcing), in windows of `tokens`. Float32 reads a window in one pass without a
cache. A kind of cache reads the first PROMPT tokens of a window in one pass, which are not compared, and then STEP
tokens at a time. For every text: the mean KL divergence from float32's distribution, how often both have the same most
likely token, and both perplexities. Without a file the texts are those that the float32 model generates, greedily and
at temperature 1.
"""

import math
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    from llama.host import console

    console.quiet_imports()

import torch
from torch import Tensor

from llama import Tokenizer, Transformer, cli, load
from llama.costs import table
from llama.host.progress import progress_bar
from llama.rows import Rows
from llama.streaming import encode_prompt
from llama.untrusted.files import TEXT_LIMIT, read_text

PROMPTS = (
    "The history of the Roman Empire",
    "In biology, a cell is",
    "She opened the letter and read",
    "def fibonacci(n):",
)
PROMPT, STEP = 512, 64


@dataclass
class Agreement:
    """Sums over the positions of windows."""

    positions: int = 0
    kl: float = 0.0
    same: int = 0
    scored: int = 0
    nll: float = 0.0
    quantized_nll: float = 0.0

    def add(self, ours: Tensor, theirs: Tensor, ids: Tensor) -> None:
        """Add one window: `ours` are log-probabilities of quantised weights, `theirs` of float32, (n, vocab)."""
        self.positions += len(ids)
        self.kl += float((theirs.exp() * (theirs - ours)).sum())
        self.same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        self.scored += len(ids) - 1
        self.nll -= float(theirs[:-1].gather(-1, ids[1:, None]).sum())
        self.quantized_nll -= float(ours[:-1].gather(-1, ids[1:, None]).sum())

    @property
    def row(self) -> list[str]:
        return [
            f"{self.positions:,}",
            f"{self.kl / self.positions:.5f}",
            f"{100 * self.same / self.positions:.2f} %",
            f"{math.exp(self.nll / self.scored):.3f}",
            f"{math.exp(self.quantized_nll / self.scored):.3f}",
        ]


def main(
    *prompts: str,
    quantize: str | None = None,
    activations: int = 16,
    kv_cache: str | None = None,
    ckpt_dir: str = "demo",
    tokens: int | None = None,
) -> int:
    """Compare quantised weights, or a kind of cache, with float32 on texts.

    Args:
        prompts: Files to read; by default generated texts.
        quantize: The format of the weights: int8, int4, or stored (a .gguf file, compared with its widened weights). By
            default int8, and float32 with kv_cache.
        activations: 16 or 8, the bits of the inputs of quantised products.
        kv_cache: A kind of cache such as int4 or rotated:k5v4; by default none, each window is one pass.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        tokens: Tokens of a window, by default 512, and 2,560 with kv_cache.
    """
    skipped = PROMPT if kv_cache else 0
    tokens = tokens or (2560 if kv_cache else 512)
    if tokens < skipped + 2:
        raise ValueError(f"tokens={tokens} must be at least {skipped + 2}: the first {skipped + 1} are not compared")
    quantize = quantize or (None if kv_cache else "int8")
    plain, tokenizer = load(ckpt_dir, device="cpu", dtype="fp32", fast=True, quantize="none")
    other = plain
    if quantize:
        other, _ = load(ckpt_dir, device="cpu", dtype="fp32", fast=True, quantize=quantize, activations=activations)
    windows = read(prompts, tokenizer, tokens) if prompts else own_texts(plain, tokenizer, tokens)
    total, rows = Agreement(), []
    with torch.inference_mode(), progress_bar(total=sum(map(len, windows.values()))) as bar:
        for name, ids in windows.items():
            of_text = Agreement()
            for window in ids:
                theirs = predictions(plain, None, window)[skipped:]
                ours = predictions(other, kv_cache, window)
                for sums in (of_text, total):
                    sums.add(ours, theirs, window[skipped:])
                bar.update()
            rows.append([name, *of_text.row])
    cache = f" with kv_cache={kv_cache}" if kv_cache else ""
    title = f"{ckpt_dir}: {other.execution}{cache} against {plain.execution} without a cache"
    heads = ["text", "positions", "KL", "same most likely", "perplexity fp32", kv_cache or quantize or ""]
    print(table(title, heads, [*rows, ["all", *total.row]]))
    return 0


def predictions(model: Transformer, kind: str | None, window: Tensor) -> Tensor:
    """Return the log-probabilities behind each token, (n, vocab); with a kind of cache those from PROMPT on."""
    if kind is None:
        whole: Tensor = model.with_kv_caching(False)(window[None])[0]
        return whole.log_softmax(-1)
    cache = model.new_cache(kind, rows=1, length=len(window))
    model(window[None, :PROMPT], Rows.at([0], [PROMPT], prompt_ends=True), cache=cache, logits="last")
    steps = ((start, window[None, start : start + STEP]) for start in range(PROMPT, len(window), STEP))
    logits = [model(step, Rows.at([start], [step.shape[1]]), cache=cache)[0] for start, step in steps]
    return torch.cat(logits).log_softmax(-1)


def read(files: tuple[str, ...], tokenizer: Tokenizer, tokens: int) -> dict[str, list[Tensor]]:
    return {file: cut(encode_prompt(tokenizer, read_text(Path(file), limit=TEXT_LIMIT)), tokens) for file in files}


def own_texts(model: Transformer, tokenizer: Tokenizer, tokens: int) -> dict[str, list[Tensor]]:
    """Return windows of ids of generated texts, greedy and at temperature 1."""
    texts = {}
    for name, temperature in (("its own, greedy", 0.0), ("its own, temperature 1", 1.0)):
        made = model.generate(
            tokenizer, PROMPTS, tokens - 64, temperature=temperature, top_p=1.0, seed=1, kv_caching=True
        )
        ids = [encode_prompt(tokenizer, prompt) + result["ids"] for prompt, result in zip(PROMPTS, made, strict=True)]
        texts[name] = [torch.tensor(row[:tokens]) for row in ids]
    return texts


def cut(ids: list[int], tokens: int) -> list[Tensor]:
    """Return the ids in windows of `tokens`; a shorter last window is dropped, unless it is the only one."""
    whole = len(ids) // tokens or 1
    return [torch.tensor(ids[i * tokens : (i + 1) * tokens]) for i in range(whole)]


if __name__ == "__main__":
    cli.main(main)
