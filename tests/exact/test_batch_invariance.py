"""The comparison of a model with itself: it passes what depends on nothing but the tokens, and finds what does not."""

from copy import copy
from typing import Any

import torch
from tiny import tiny_args, tiny_model
from torch import Tensor

from llama.args import ModelArgs
from llama.exact.batch_invariance import FEW, first_difference, tokens_fed
from llama.rows import Rows


class SumOfTokens:
    """A model whose logits are the sum of the tokens so far, and of `fault` if the call is of that kind."""

    def __init__(self, fault: str = "none", *, args: ModelArgs | None = None) -> None:
        self.fault, self.args = fault, args or tiny_args(max_seq_len=160, vocab_size=100)
        self.device = torch.device("cpu")
        self.caching, self.fed = False, [0]

    def with_kv_caching(self, value: bool) -> "SumOfTokens":
        twin = copy(self)
        twin.caching = value
        return twin

    def new_cache(self) -> Any:
        return torch.zeros(2, 160, dtype=torch.int64)

    def __call__(self, tokens: Tensor, start_pos: Rows, *, cache: Any, logits: str) -> Tensor:
        bsz, seqlen = tokens.shape
        assert (cache is not None) == self.caching
        kept = cache if self.caching else self.new_cache()
        self.fed[0] += tokens.numel()
        starts = list(start_pos.starts)
        sums = torch.zeros(bsz, seqlen, 1)
        for row, start in enumerate(starts):
            kept[row, start : start + seqlen] = tokens[row]
            sums[row, :, 0] = kept[row].cumsum(0)[start : start + seqlen]
        wrong = {
            "none": False,
            "a row alone": bsz == 1 and not self.caching,
            "one token alone": seqlen == 1 and not self.caching,
            "a row behind others": False,
            "a step of one row": self.caching and bsz == 1 and seqlen == 1 and starts[0] > 64,
            "a step of rows": self.caching and bsz == 2 and seqlen == 1 and starts == [5, 5],
            "rows at different positions": len(set(starts)) > 1,
        }[self.fault]
        sums[-1:] += wrong
        if self.fault == "a row behind others":
            sums[1:] += 1
        return sums


def test_logits_of_the_tokens_alone_pass() -> None:
    assert first_difference(SumOfTokens()) is None


def test_differences_are_found_and_named() -> None:
    alone = f"the first {FEW} tokens, in row 1, are not what they are alone among 85"
    faults = {
        "a row alone": alone,
        "a row behind others": alone,
        "one token alone": f"the first token alone is not what it is among {FEW}",
        "a step of one row": "tokens 66 to 66, fed through the cache, are not what they are without it",
        "a step of rows": "tokens 5 to 5 of 2 rows, through the cache, are not what they are without it",
        "rows at different positions": "rows at positions [0, 10] are not what they are at one",
    }
    assert {fault: first_difference(SumOfTokens(fault)) for fault in faults} == faults


def test_the_limits_of_a_model_hold_and_the_tokens_fed_are_known() -> None:
    for limit, rows in ((160, None), (160, 1), (10, None), (1, 3)):
        model = SumOfTokens(args=tiny_args(max_seq_len=limit, max_batch_size=rows, vocab_size=100))
        assert first_difference(model) is None
        assert model.fed == [tokens_fed(model)]


def test_it_feeds_few_tokens_since_a_slow_machine_has_to_wait_for_them() -> None:
    """258 of a model's tokens, at 10 GFLOP/s, are 7 seconds for the demo; more than 64 keys are two chunks of them."""
    assert tokens_fed(SumOfTokens()) == 258


def test_it_leaves_the_switch_and_the_models_own_text_as_they_were() -> None:
    model = tiny_model(tiny_args(max_seq_len=160), dtype=torch.float32).requires_grad_(False)
    model(torch.tensor([[1, 2, 3]]))
    own = model.cache
    first_difference(model)
    assert own is not None
    assert (model.kv_caching, model.cache is own) == (True, True)
