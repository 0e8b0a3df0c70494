"""The layers with a matrix. If several ranks share the model, each rank has a part of every matrix.

The heads, the width of the MLP and the vocabulary are divided in order. `self.ops` has the products, and `self.ranks`
the collective operations.
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
        if not self.weight.is_meta:  # a meta tensor has no numbers, and drawing them costs most of a second of imports
            super().reset_parameters()


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are divided among the ranks, at least `least` each.

    If there are too few outputs, several ranks have the same ones. With `gather_output` every rank returns all of them.
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
    """A linear layer whose inputs are divided among the ranks; the ranks' products are added."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features // current_ranks().size, out_features)

    def forward(self, input: Tensor) -> Tensor:
        return self.ops.sum_linear(input, self.weight, self.ranks)


class VocabParallelEmbedding(nn.Embedding):
    """A vector for each token; the tokens are divided among the ranks."""

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
            raise IndexError("a token id is outside of the vocabulary")  # as with one rank; here it would give zeros
        own = input - self.ranks.rank * self.num_embeddings
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        return self.ranks.sum(super().forward(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0))
