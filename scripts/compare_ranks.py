"""Compare the decode speed of 2 ranks with 1 thread each and of 1 process with 2 threads.

    python scripts/compare_ranks.py [--turns 3]

A model of the demo's size with random weights, 8 heads and 4 KV heads, in float32; 128 tokens in, 32 out, batch 1.
"""

import os
import statistics
import subprocess
import sys
import time

if __name__ == "__main__":
    from llama.host import console

    console.quiet_imports()

import torch

from llama import cli
from llama.args import ModelArgs
from llama.bench.run.models import random_model
from llama.ranks.torchrun import join

ARGS = ModelArgs(
    dim=576, n_layers=30, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=1536, vocab_size=49152, tied_head=True
)
INPUT_LEN, OUTPUT_LEN = 128, 32
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=2"
WAYS = {
    "1 process, 2 threads": ["2", sys.executable],
    "2 ranks, 1 thread each": ["1", sys.executable, *TORCHRUN.split()],
}


def decode_rate() -> None:
    """Print this job's tokens/s after the first token, on rank 0."""
    device = torch.device("cpu")
    ranks = join(device)
    model = random_model(ARGS, dtype=torch.float32, device=device)
    times: list[float] = []
    for _ in range(2):  # a warm-up, and the run that counts
        times.clear()
        model.generate_tokens(
            [list(range(INPUT_LEN))], OUTPUT_LEN, temperature=0, on_step=lambda _: times.append(time.perf_counter())
        )
    if ranks.rank == 0:
        print((len(times) - 2) / (times[-1] - times[1]))


def main(*, turns: int = 3, rate: bool = False) -> int:
    """Print the speed of 2 ranks and of 1 process.

    Args:
        turns: How often each is measured.
        rate: Print only the tokens/s of this job.
    """
    if turns < 1:
        raise ValueError(f"turns={turns} must be at least 1")
    if rate:
        decode_rate()
        return 0
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(turns):
        for name, (threads, *command) in WAYS.items():
            own = os.environ | {"OMP_NUM_THREADS": threads}
            done = subprocess.run(
                [*command, __file__, "--rate"], env=own, stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"{name}: ended with exit code {done.returncode}")
            rates[name].append(float(done.stdout))
    for name, several in rates.items():
        print(f"{name}: {', '.join(f'{rate:.1f}' for rate in several)} tokens/s")
    whole, shared = (statistics.median(several) for several in rates.values())
    print(f"2 ranks decode at {shared / whole:.2f} of the speed of one process (medians of {turns})")
    return 0


if __name__ == "__main__":
    cli.main(main)
