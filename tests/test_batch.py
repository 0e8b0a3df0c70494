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


def test_a_window_of_rows_at_one_position_is_cut_from_the_texts() -> None:
    batch = batch_of([[1, 2, 3, 4], [5, 6, 7, 8]], [1, 1])
    assert batch.window([1, 1], 2).tolist() == [[2, 3], [6, 7]]


def test_a_window_of_rows_at_positions_of_their_own_begins_at_each_of_them() -> None:
    batch = batch_of([[1, 2, 3, 4], [5, 6, 7]], [2, 2])
    assert batch.window([2, 0], 2).tolist() == [[3, 4], [5, 6]]
    assert batch.window([5, 1], 2)[1].tolist() == [6, 7]  # past a row's end only its padding is undefined


def test_each_row_grows_behind_its_own_end_and_a_full_one_stays_in_its_place() -> None:
    batch = batch_of([[1, 2], [3]], [1, 3])
    batch.append(torch.tensor([10, 20]))
    assert (batch.tokens.tolist(), batch.cur_pos) == ([[1, 2, 10, 0], [3, 20, 0, 0]], [3, 2])
    for _ in range(3):
        batch.append(torch.tensor([11, 21]))
    assert batch.cur_pos == [4, 4]
    assert batch.tokens[:, :3].tolist() == [[1, 2, 10], [3, 20, 21]]


def test_rows_end_at_their_stop_id_or_their_room_and_what_is_left_is_known() -> None:
    batch = batch_of([[1], [2], [3]], [1, 3, 3], frozenset({9}))
    made = [token.id for token in batch.record(Chosen([4, 5, 9], [None] * 3))]
    assert (made, batch.live, batch.stopped, batch.left) == ([4, 5], {1}, {2}, 2)
