"""The program of each rank for tests/ranks/test_ranks.py: run cases, then write their outcomes into a file.

    torchrun --nproc_per_node N tests/support/ranks_child.py FOLDER "" 30 CASE ...    the cases
    torchrun --nproc_per_node N tests/support/ranks_child.py FOLDER killed 5          rank 1 is lost; 5 s of timeout

FOLDER has tiny checkpoints. The same process also loads the whole model, which every case compares with.
"""

import atexit
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama.bench.run.step_times import bytes_of, filled_cache, step_times
from llama.checkpoint import load_weights, open_checkpoint
from llama.checkpoint.assemble import Weight
from llama.checkpoint.export import save_huggingface
from llama.costs import cache_bytes, parameters
from llama.model import Transformer
from llama.ranks import ALONE, Ranks
from llama.ranks.torchrun import join, world_rank

FORMATS = ("meta-1", "meta-2", "huggingface", "qwen2", "qwen3", "weights.gguf", "weights-q8.gguf")
PROMPTS = [[1, 2, 3], [4] * 11, [5, 6] * 4]
FP64_TOLERANCE = 1e-12  # sums in another order: logits of about 1 that were rounded at 1e-16 a few hundred times

CASES: dict[str, Callable[["Job"], None]] = {}
FEW = ("logits_are_those_of_one_process_in_float64", "texts_are_those_of_one_process")  # of any number of ranks
# What can depend on the number of ranks.
BY_SIZE = (
    *(*FEW, "exact_mode_has_the_bits_of_one_process", "every_format_is_read_in_slices_that_make_the_whole"),
    *("an_unseeded_draw_is_the_same_on_every_rank", "each_rank_holds_its_share", "gradients_are_those_of_one_process"),
)


def case(check: Callable[["Job"], None]) -> Callable[["Job"], None]:
    CASES[check.__name__] = check
    return check


class Job:
    """The ranks, and models from the folder: cut for them, or whole."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks

    def model(self, name: str, dtype: torch.dtype, ranks: Ranks | None = None, **changes: Any) -> Transformer:
        checkpoint = open_checkpoint(self.folder / name)
        loaded = load_weights(checkpoint, checkpoint.args, dtype=dtype, device="cpu", ranks=ranks or self.ranks)
        for key, value in changes.items():
            setattr(loaded, key, value)
        return loaded.requires_grad_(False).eval()

    def both(self, dtype: torch.dtype, **changes: Any) -> tuple[Transformer, Transformer]:
        return self.model("meta-1", dtype, **changes), self.model("meta-1", dtype, ALONE, **changes)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(500, (rows, length), generator=torch.Generator().manual_seed(length))


def fed(model: Transformer, ids: Tensor, cuts: list[int]) -> Tensor:
    model.free_cache()
    ends = [*cuts, ids.shape[1]]
    return torch.cat([model(ids[:, a:b], a) for a, b in zip([0, *cuts], ends, strict=True)], dim=1)


@case
def logits_are_those_of_one_process_in_float64(job: Job) -> None:
    cut, whole = job.both(torch.float64)
    ids = tokens(3, 20)
    for made in (cut(ids), fed(cut, ids, [7, 8, 9, 15])):
        torch.testing.assert_close(made, whole(ids), rtol=0, atol=FP64_TOLERANCE)


@case
def families_have_the_logits_and_in_exact_mode_the_bits_of_one_process(job: Job) -> None:
    ids = tokens(3, 20)
    for name in ("qwen2", "qwen3"):
        cut, whole = job.model(name, torch.float64), job.model(name, torch.float64, ALONE)
        for made in (cut(ids), fed(cut, ids, [7, 8, 9, 15])):
            torch.testing.assert_close(made, whole(ids), rtol=0, atol=10 * FP64_TOLERANCE)  # their logits are larger
        cut, whole = (job.model(name, torch.bfloat16, ranks, exact=True) for ranks in (None, ALONE))
        expected = whole(ids)
        for made in (cut(ids), fed(cut, ids, [7, 8, 9, 15])):
            assert torch.equal(made, expected), name


@case
def exact_mode_has_the_bits_of_one_process(job: Job) -> None:
    ids = tokens(3, 40)
    for dtype in (torch.float32, torch.bfloat16):
        cut, whole = job.both(dtype, exact=True)
        expected = whole(ids)
        for name, made in {"one pass": cut(ids), "cached": fed(cut, ids, [7, 8, 9, 15])}.items():
            assert torch.equal(made, expected), (dtype, name, float((made - expected).abs().max()))


@case
def without_exact_mode_some_bits_differ(job: Job) -> None:
    """So the comparison above has power."""
    cut, whole = job.both(torch.float32)
    assert not torch.equal(cut(tokens(3, 40)), whole(tokens(3, 40)))


@case
def texts_are_those_of_one_process(job: Job) -> None:
    cut, whole = job.both(torch.float64)
    for kv_caching, options in (
        (True, {"temperature": 0.0}),
        (False, {"temperature": 0.9, "seed": 3}),
        (True, {"repetition_penalty": 1.3, "seed": 1}),
    ):
        made = [m.generate_tokens(PROMPTS, 8, kv_caching=kv_caching, **options)[0] for m in (cut, whole)]
        assert made[0] == made[1], (kv_caching, options)


@case
def a_second_generation_meanwhile_is_refused_and_the_first_goes_on(job: Job) -> None:
    """Two would mix what the ranks say to each other, and hang."""
    tokenizer = open_checkpoint(job.folder / "meta-1").tokenizer
    cut, whole = job.both(torch.float64)
    stream = cut.stream(tokenizer, ["the hat", "an inn in"], 8, temperature=0.0)
    pieces = [next(stream)]
    for act in (lambda: cut.generate_tokens([[4, 5]], 2), lambda: cut.session(tokenizer).feed([4, 5])):
        with pytest.raises(RuntimeError, match="another generation is under way on these ranks"):
            act()
    assert [*pieces, *stream] == list(whole.stream(tokenizer, ["the hat", "an inn in"], 8, temperature=0.0))
    cut.generate_tokens([[4, 5]], 2)


@case
def an_unseeded_draw_is_the_same_on_every_rank(job: Job) -> None:
    cut = job.model("meta-1", torch.float32)
    ids, _ = cut.generate_tokens(PROMPTS, 12, temperature=2.0)
    everyones = job.ranks.gather(torch.tensor(ids))
    assert all(torch.equal(theirs, everyones[0]) for theirs in everyones)


@case
def every_format_is_read_in_slices_that_make_the_whole(job: Job) -> None:
    for name in FORMATS:
        cut, whole = job.model(name, torch.float32), job.model(name, torch.float32, ALONE)
        for (label, own), all_of_it in zip(cut.named_parameters(), whole.parameters(), strict=True):
            slices = job.ranks.gather(own.detach())
            if own.shape != all_of_it.shape:
                dim = 0 if own.shape[1:] == all_of_it.shape[1:] else 1
                copies = len(slices) * own.shape[dim] // all_of_it.shape[dim]
                slices = [torch.cat(slices[::copies], dim=dim)]
            assert all(torch.equal(together, all_of_it) for together in slices), (name, label)


@case
def each_rank_holds_its_share(job: Job) -> None:
    cut = job.model("meta-1", torch.float32)
    assert sum(p.numel() for p in cut.parameters()) == parameters(cut.args.share(job.ranks.size))
    cache = cut.new_cache(rows=3, length=20)
    cut(tokens(3, 10), cache=cache)
    assert cache.nbytes == cache_bytes(cut.args.share(job.ranks.size), rows=3, length=20, itemsize=4)


@case
def other_prompts_another_dtype_and_another_model_on_one_rank_are_refused(job: Job) -> None:
    cut, one = job.model("meta-1", torch.float32), job.ranks.rank
    acts: list[tuple[str, Callable[[], object]]] = [
        ("prompts", lambda: cut.generate_tokens([[1, 2, 3]] if one else [[1, 2, 4]], 4)),
        ("dtype", lambda: job.model("meta-1", torch.float32 if one else torch.float64)),
        ("weights", lambda: job.model("other" if one else "meta-1", torch.float64)),
    ]
    for what, act in acts:
        with pytest.raises(ValueError, match=rf"rank . and rank . were not given the same {what}"):
            act()


@case
def gradients_are_those_of_one_process(job: Job) -> None:
    cut, whole = job.both(torch.float64, kv_caching=False)
    ids = tokens(2, 9)
    cut.requires_grad_(True)
    if job.ranks.size > whole.args.n_kv_heads:
        with pytest.raises(ValueError, match="several ranks hold the same KV heads"):
            cut(ids)
        return
    whole.requires_grad_(True)
    for model in (cut, whole):
        model(ids).log_softmax(-1)[..., 0].mean().backward()
    for (label, own), all_of_it in zip(cut.named_parameters(), whole.parameters(), strict=True):
        assert own.grad is not None
        expected = Weight.of(all_of_it.grad).part(tuple(own.shape), job.ranks.rank, job.ranks.size)
        torch.testing.assert_close(own.grad, expected.rows(0, len(own)), msg=label)


@case
def a_slice_is_not_written_as_a_model(job: Job) -> None:
    cut = job.model("meta-1", torch.float32)
    with pytest.raises(ValueError, match="slices of the model"):
        save_huggingface(cut, job.folder / "written")
    with pytest.raises(ValueError, match="no model"):
        pickle.dumps(cut)


@case
def steps_and_caches_are_measured_on_all_ranks(job: Job) -> None:
    cut = job.model("meta-1", torch.float32)
    for length in (4, 16):
        size = bytes_of(cut, filled_cache(cut, length, [1, 2], reserved=length), length, length)
        assert size["cache_bytes"] == size["predicted_cache_bytes"]
    assert [step["context"] for step in step_times(cut, 2, [3, 9], kv_caching=True)] == [3, 9]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising() -> None:
    raise RuntimeError("rank 1 met something unforeseen")


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def absent() -> None:
    time.sleep(1000)


def ending() -> None:
    sys.exit(0)


FAULTS = {fault.__name__: fault for fault in (killed, raising, stopped, absent, ending)}


def lose_rank_1(folder: Path, fault: str, timeout: float) -> None:
    """Write a text without end; rank 1 meets its fault some steps into it, or before it joins."""
    if fault == "absent" and world_rank() == 1:
        absent()
    job, steps = Job(folder, join(torch.device("cpu"), timeout=timeout)), 0

    def on_step(_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 4 and job.ranks.rank == 1:
            FAULTS[fault]()

    job.model("meta-1", torch.float32).generate_tokens([[1, 2, 3]], 100, on_step=on_step, temperature=0)
    raise AssertionError("the text came to its end")


def run_cases(job: Job, names: Sequence[str]) -> None:
    outcomes = {}
    for name in names:
        try:
            CASES[name](job)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    (job.folder / f"outcomes.{job.ranks.rank}.json").write_text(json.dumps(outcomes), encoding="utf-8")


def take_place(rank: int, port: str) -> None:
    """Make a fork of a process that has no ranks one of two."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "localhost", **{name: str(value) for name, value in place.items()}})


def lose_fork(folder: Path, rank: int, port: str, fault: str, timeout: float) -> None:
    """Be one of two ranks that lose rank 1; write the error into a file."""
    take_place(rank, port)
    try:
        lose_rank_1(folder, fault, timeout)
    except Exception:
        (folder / f"{fault}.{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)


def run_fork(folder: Path, rank: int, port: str) -> None:
    """Run FEW as one of two ranks."""
    take_place(rank, port)
    job = Job(folder, join(torch.device("cpu"), timeout=60.0))
    run_cases(job, FEW)
    job.ranks.gather(torch.zeros(1))  # rank 0 serves the store, so it ends with the last one


def main() -> None:
    folder, fault, timeout, *names = Path(sys.argv[1]), *sys.argv[2:]
    if fault:
        lose_rank_1(folder, fault, float(timeout))
    else:
        run_cases(Job(folder, join(torch.device("cpu"), timeout=float(timeout))), names)


def as_in_a_process_of_its_own() -> None:
    """Do all that, and what a rank that torchrun forked would not: die of signals, print its error, clean up."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    as_in_a_process_of_its_own()
