"""The rows of a generation are cut, grown and ended each by itself."""

import torch

from llama.batch import Batch, Chosen
from llama.request import Request
from llama.sampling import Sampling

CPU = torch.device("cpu")


def batch_of(prompts: list[list[int]], room: list[int], stop_ids: frozenset[int] = frozenset()) -> Batch:
    batch = Batch(Request(prompts, room, stop_ids, Sampling(temperature=0), kv_caching=True))
    batch.begin(100, CPU)
    return batch


def test_the_tokens_of_a_step_are_those_of_each_row_from_its_own_position_on() -> None:
    batch = batch_of([[1, 2, 3, 4], [5, 6, 7]], [2, 2])
    assert batch.tokens([2, 2]).tolist() == [[3, 4], [7, 0]]
    assert batch.tokens([0, 0]).tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert batch.tokens([3, 2]).tolist() == [[4], [7]]


def test_each_row_grows_behind_its_own_end_until_it_leaves() -> None:
    batch = batch_of([[1, 2], [3], [4]], [3, 1, 3])
    batch.append([10, 20, 30])
    assert (batch.texts, batch.cur_pos) == ([[1, 2, 10], [3, 20], [4, 30]], [3, 2, 2])
    assert batch.drop_ended() == [0, 1, 2]
    batch.live.discard(1)
    assert (batch.drop_ended(), batch.rows, batch.cur_pos) == ([0, 2], [0, 2], [3, 2])
    batch.append([11, 31])
    assert batch.texts == [[1, 2, 10, 11], [3, 20], [4, 30, 31]]


def test_a_row_that_leaves_takes_its_random_stream_and_the_tokens_that_it_had_along() -> None:
    sampling = Sampling(temperature=1, repetition_penalty=2)
    whole, fewer = (Batch(Request([[1], [2], [3]], [9] * 3, frozenset(), sampling, True, seed=5)) for _ in range(2))
    for batch in (whole, fewer):
        batch.begin(100, CPU)
    fewer.live.discard(1)
    fewer.drop_ended()
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        assert whole.sampler(logits)[[0, 2]].tolist() == fewer.sampler(logits[[0, 2]]).tolist()


def test_rows_end_at_their_stop_id_or_their_room_and_what_is_left_is_known() -> None:
    batch = batch_of([[1], [2], [3]], [1, 3, 3], frozenset({9}))
    made = [token.id for token in batch.record(Chosen([4, 5, 9], [None] * 3))]
    assert (made, batch.live, batch.stopped, batch.left) == ([4, 5], {1}, {2}, 2)
