"""The parts of all ranks together equal the result of one process; here all ranks are in one process."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import some_tokens, tiny_args
from torch import Tensor, nn

from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.model import Transformer
from llama.ranks import Ranks, cut_for

WORDS, DIM, SIZE = 12, 8, 4
TOLERANCE = 1e-12  # float64 sums in another order


class One(Ranks):
    """One of several ranks, without communication."""

    def __init__(self, rank: int, size: int = SIZE) -> None:
        self.rank, self.size = rank, size


def whole_weight(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_new_layer_has_the_random_weights_of_pytorch_s() -> None:
    pairs: list[tuple[Any, Any]] = [
        (RowParallelLinear, partial(nn.Linear, bias=False)),
        (VocabParallelEmbedding, nn.Embedding),
    ]
    for pair in pairs:
        ours, theirs = (layer(WORDS, DIM) for layer in pair if torch.manual_seed(1))
        assert torch.equal(ours.weight, theirs.weight)


def test_every_word_is_found_on_one_rank_and_is_zero_on_the_others() -> None:
    weight, tokens = whole_weight(WORDS, DIM), some_tokens(3, 20, vocab_size=WORDS)
    parts = []
    for rank, rows in enumerate(weight.chunk(SIZE)):
        with cut_for(One(rank)):
            embedding = VocabParallelEmbedding(WORDS, DIM).double()
        assert embedding.weight.shape == rows.shape
        embedding.weight.data = rows
        parts.append(embedding(tokens))
        assert torch.equal((parts[-1] != 0).any(-1), tokens // 3 == rank)
    assert torch.equal(sum(parts), weight[tokens])


def test_a_token_outside_of_the_vocabulary_is_refused_on_each_rank() -> None:
    for rank in range(SIZE):
        with cut_for(One(rank)):
            embedding = VocabParallelEmbedding(WORDS, DIM)
        for token in (-1, WORDS, WORDS + 100):
            with pytest.raises(IndexError, match="a token id is outside of the vocabulary"):
                embedding(torch.tensor([[0, token]]))
        assert embedding(torch.tensor([[0, WORDS - 1]])).shape == (1, 2, DIM)


def test_outputs_are_shared_out_side_by_side_and_inputs_as_terms_of_a_sum() -> None:
    wide, narrow, x = whole_weight(24, DIM), whole_weight(DIM, 24), whole_weight(5, DIM)
    hidden, terms = [], []
    for rank in range(SIZE):
        with cut_for(One(rank)):
            up, down = ColumnParallelLinear(DIM, 24).double(), RowParallelLinear(24, DIM).double()
        up.weight.data, down.weight.data = wide.chunk(SIZE)[rank], narrow.chunk(SIZE, dim=1)[rank].contiguous()
        assert (up.weight.shape, down.weight.shape) == ((6, DIM), (DIM, 6))
        hidden.append(up(x))
        terms.append(down(hidden[-1]))
    torch.testing.assert_close(torch.cat(hidden, -1), x @ wide.T, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(sum(terms), x @ wide.T @ narrow.T, rtol=0, atol=100 * TOLERANCE)


def test_heads_that_several_ranks_hold_are_not_trained() -> None:
    """A rank's gradient would not be that of the whole head. Inference is allowed."""
    with cut_for(One(0)):
        shared, own = ColumnParallelLinear(DIM, 16, least=DIM), ColumnParallelLinear(DIM, 16)
    assert (shared.held_once, own.held_once) == (False, True)
    assert (shared.weight.shape, own.weight.shape) == ((DIM, DIM), (4, DIM))
    x = torch.ones(2, DIM)
    with pytest.raises(ValueError, match=r"several ranks hold the same KV heads.*: train on fewer ranks"):
        shared(x)
    assert own(x).requires_grad
    with torch.no_grad():
        assert shared(x).shape == (2, DIM)
    shared.requires_grad_(False)
    assert not shared(x).requires_grad


def test_a_model_of_one_rank_has_that_ranks_share_of_every_matrix() -> None:
    args = tiny_args(n_kv_heads=2)
    with cut_for(One(1)):
        model = Transformer(args)
    assert model.ranks.size == SIZE
    attention, feed_forward = model.blocks[0].attention, model.blocks[0].feed_forward
    assert [tuple(layer.weight.shape) for layer in (attention.wq, attention.wk, attention.wo)] == [
        (8, 32),
        (8, 32),
        (32, 8),
    ]
    assert feed_forward.w2.weight.shape == (32, args.ffn_dim // SIZE)
    assert (len(model.tok_embeddings.weight), len(model.output.weight)) == (10, 10)
