"""A board takes what each rank writes to all others, however fast or slow they are."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from llama.board import Board

pytestmark = pytest.mark.skipif(not Board.serves(), reason="this machine's ranks use gloo")

ROOT = Path(__file__).parents[1]
ROUNDS, SIZE = 5000, 4


def take_part(path: Path, rank: int) -> None:
    """Exchange numbers that tell rank and round, of a new size each time, with pauses that differ."""
    board, dice = Board(path, rank, SIZE), random.Random(rank)
    for count in range(ROUNDS):
        own = torch.full((1 + count % 7,), float(1000 * rank + count), dtype=torch.float64)
        every = [own if other == rank else torch.empty_like(own) for other in range(SIZE)]
        if dice.random() < 0.02:
            time.sleep(0.0005)
        board.exchange(every, own)
        for other, theirs in enumerate(every):
            assert bool((theirs == 1000 * other + count).all()), (count, rank, other, theirs)


def test_every_rank_reads_what_the_others_wrote_round_by_round() -> None:
    path = Board.make(SIZE)
    assert path is not None
    own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        ranks = [subprocess.Popen([sys.executable, __file__, str(path), str(rank)], env=own) for rank in range(SIZE)]
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * SIZE
    finally:
        path.unlink()


def test_ranks_that_are_not_in_step_are_told() -> None:
    path = Board.make(2)
    assert path is not None
    one, other = Board(path, 0, 2), Board(path, 1, 2)
    path.unlink()
    other._written[0] = 1  # so that the other one need not wait
    other._nbytes[1][0] = 8
    other.exchange([torch.zeros(1, dtype=torch.float64), torch.zeros(1)], torch.zeros(1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="rank 1 is not in step: it has 8 bytes, this one 16"):
        one.exchange([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], torch.zeros(2, dtype=torch.float64))


if __name__ == "__main__":
    take_part(Path(sys.argv[1]), int(sys.argv[2]))
