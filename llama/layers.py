"""The layers that hold a matrix, each cut for the ranks that share the model; for one rank they are whole.

The heads, the width of the MLP and the vocabulary are shared out in order. A forward asks
`self.ops` how to multiply, and `self.ranks` what the ranks do together.
Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053; the names are those of fairscale and Meta's code.
"""

import torch
from torch import Tensor, nn

from llama.ops import PLAIN, Ops
from llama.ranks import current_ranks


class Linear(nn.Linear):
    """A linear layer, by default without bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.ops: Ops = PLAIN
        self.ranks = current_ranks()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # no numbers to draw there, and trying to costs most of a second of imports
            super().reset_parameters()


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are shared out, `least` together; several ranks have the same where they are fewer.

    With `gather_output` every rank returns all of them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        least: int = 1,
        gather_output: bool = False,
        bias: bool = False,
    ) -> None:
        size = current_ranks().size
        super().__init__(in_features, max(out_features // size, least), bias=bias)
        self.gather_output = gather_output
        self.held_once = self.out_features * size == out_features

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad and not self.held_once:
            raise ValueError("several ranks hold the same KV heads, whose gradients would differ: train on fewer ranks")
        alone = self.ranks.size == 1
        out = self.ops.linear(input if alone else self.ranks.enter(input), self.weight)
        if self.bias is not None:
            out = out + self.bias
        return self.ranks.join(out) if self.gather_output and not alone else out


class RowParallelLinear(Linear):
    """A linear layer whose inputs are shared out, and so the terms of every sum."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features // current_ranks().size, out_features)

    def forward(self, input: Tensor) -> Tensor:
        return self.ops.sum_linear(input, self.weight, self.ranks)


class VocabParallelEmbedding(nn.Embedding):
    """A vector for each token; the tokens are shared out."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        self.ranks = current_ranks()
        super().__init__(num_embeddings // self.ranks.size, embedding_dim)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # as in Linear
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return super().forward(input)
        if (
            input.device.type == "cpu"
            and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings * self.ranks.size
        ):
            raise IndexError("a token id is outside of the vocabulary")  # as one process says; here it would be a zero
        own = input - self.ranks.rank * self.num_embeddings
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        return self.ranks.sum(super().forward(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0))
