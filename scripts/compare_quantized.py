"""Compare the next-token distributions of quantised weights with those of float32 on given texts.

    python scripts/compare_quantized.py [FILE ...] [--quantize int8] [--ckpt_dir DIR] [--tokens 512]

Both models read the same tokens (teacher forcing), in windows of `tokens`, without a cache. For every text: the mean KL
divergence from float32's distribution, how often both have the same most likely token, and both perplexities. Without a
file the texts are those that the float32 model generates, greedily and at temperature 1.
"""

import math
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    from llama.cli import console

    console.quiet_imports()

import torch
from torch import Tensor

from llama import Tokenizer, Transformer, cli, load
from llama.cli.progress import progress_bar
from llama.costs import table
from llama.streaming import encode_prompt
from llama.untrusted.files import TEXT_LIMIT, read_text

PROMPTS = (
    "The history of the Roman Empire",
    "In biology, a cell is",
    "She opened the letter and read",
    "def fibonacci(n):",
)


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
    *prompts: str, quantize: str = "int8", activations: int = 16, ckpt_dir: str = "demo", tokens: int = 512
) -> int:
    """Compare quantised weights with float32 on texts.

    Args:
        prompts: Files to read; by default generated texts.
        quantize: The format of the weights: int8, int4, or stored (a .gguf file, compared with its widened weights).
        activations: 16 or 8, the bits of the inputs of quantised products.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        tokens: Tokens of a window.
    """
    if tokens < 2:
        raise ValueError(f"tokens={tokens} must be at least 2: the first token of a window is not predicted")
    plain, tokenizer = load(ckpt_dir, device="cpu", dtype="fp32", fast=True)
    quantized, _ = load(ckpt_dir, device="cpu", dtype="fp32", fast=True, quantize=quantize, activations=activations)
    plain.kv_caching = quantized.kv_caching = False
    windows = read(prompts, tokenizer, tokens) if prompts else own_texts(plain, tokenizer, tokens)
    total, rows = Agreement(), []
    with torch.inference_mode(), progress_bar(total=sum(map(len, windows.values()))) as bar:
        for name, ids in windows.items():
            of_text = Agreement()
            for window in ids:
                ours, theirs = (model(window[None])[0].log_softmax(-1) for model in (quantized, plain))
                for sums in (of_text, total):
                    sums.add(ours, theirs, window)
                bar.update()
            rows.append([name, *of_text.row])
    heads = ["text", "positions", "KL", "same most likely", "perplexity fp32", quantize]
    print(table(f"{ckpt_dir}: {quantized.execution} against {plain.execution}", heads, [*rows, ["all", *total.row]]))
    return 0


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
