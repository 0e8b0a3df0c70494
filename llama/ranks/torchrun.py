"""The ranks of a torchrun: how processes join one job, and their collective operations.

Uses torch.distributed (NCCL on GPUs, gloo on CPUs), which reports a lost rank after a timeout, and the regions of
fairscale, but not its groups, which always wait 30 minutes. Knows processes, not models.
"""

import atexit
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from llama.locked import locked
from llama.ranks import ALONE, Ranks

LONGEST_TIMEOUT = 1e9  # seconds; a clock cannot add many more
_JOINED: list["TorchRanks"] = []  # at most one: the job that this process belongs to


class RankLost(RuntimeError):
    """A rank died, ended or stopped answering."""


def world_size() -> int:
    """Return the number of processes of this torchrun; 1 without torchrun."""
    return _number("WORLD_SIZE", 1, least=1)


def world_rank() -> int:
    """Return the rank of this process."""
    return _number("RANK", 0, below=world_size())


def local_size() -> int:
    """Return the number of ranks on this host, which share its memory."""
    return _number("LOCAL_WORLD_SIZE", 1, least=1)


def default_timeout() -> float:
    """Return the seconds after which a rank that does not answer is lost: LLAMA_TIMEOUT in the environment, or 60."""
    text = os.environ.get("LLAMA_TIMEOUT") or "60"
    try:
        return check_timeout(float(text))
    except ValueError:
        raise ValueError(f"LLAMA_TIMEOUT={text!r} in the environment must be a number of seconds above 0") from None


def check_timeout(seconds: float) -> float:
    """Return `seconds`; raise ValueError if it is not a possible timeout."""
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise ValueError(f"--timeout={seconds} must be a number of seconds above 0, at most {LONGEST_TIMEOUT:g}")
    return seconds


def _number(name: str, default: int, *, least: int = 0, below: int = 1 << 31) -> int:
    """Return a whole number from the environment, which torchrun sets; `default` if it is unset or empty."""
    text = os.environ.get(name) or str(default)
    if not (re.fullmatch("[0-9]{1,10}", text) and least <= int(text) < below):
        limits = f"a whole number from {least}" + (f" to {below - 1}" if below < 1 << 31 else "")
        raise ValueError(
            f"{name}={text!r} in the environment must be {limits}; torchrun sets it: unset it to run one process"
        )
    return int(text)


def job_store(timeout: float) -> Any:
    """Return the key-value store of this job; reads wait for `timeout` seconds.

    A torchrun may run several jobs: restarts, and the processes of a benchmark one after the other. Each has its own.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    _number("MASTER_PORT", 0, below=1 << 16)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    job = [os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "LLAMA_JOB")]
    return PrefixStore("/".join(job), store)


def own_device(device: torch.device) -> torch.device:
    """Return the GPU of this rank; any other device unchanged."""
    if world_size() == 1 or device.type != "cuda":
        return device
    gpu = _number("LOCAL_RANK", 0)
    if gpu >= torch.cuda.device_count():
        raise ValueError(f"this host has {torch.cuda.device_count()} GPUs, and {local_size()} ranks need one each")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def join(device: torch.device, *, timeout: float | None = None) -> Ranks:
    """Return the ranks of the torchrun that started this process, or ALONE; later calls return the same ranks.

    `timeout` is in seconds, by default `default_timeout()`. Raises RankLost if not all ranks join in time.
    """
    if world_size() == 1:
        return ALONE
    if device.type == "mps":
        raise ValueError("ranks share a model on CPUs or CUDA GPUs, not on a Metal GPU; give --device cpu")
    if not _JOINED:
        seconds = default_timeout() if timeout is None else timeout
        _JOINED.append(TorchRanks(device, check_timeout(seconds)))
    return _JOINED[0]


class TorchRanks(Ranks):
    """The processes of one torchrun. Collective operations raise RankLost `timeout` seconds after a rank was lost."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        from fairscale.nn.model_parallel import initialize, mappings

        self.rank, self.size, self._regions = world_rank(), world_size(), mappings
        self._collectives = self._agreements = 0  # counts of calls
        self._generating = Lock()
        backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
        with _saying(f"the ranks cannot reach each other ({backend.upper()}_SOCKET_IFNAME names the network to take)"):
            self._store = job_store(timeout)
            self.agree(dict)  # waits for all ranks: the error of init_process_group would be less clear
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=limit)
        initialize._MODEL_PARALLEL_GROUP = dist.group.WORLD
        atexit.register(dist.destroy_process_group)
        atexit.register(initialize.destroy_model_parallel)  # runs first: gloo's threads end with the last reference

    def enter(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._regions.copy_to_model_parallel_region(x))

    def sum(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._together(self._regions.reduce_from_model_parallel_region, x))

    def join(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._together(self._regions.gather_from_model_parallel_region, x))

    def gather(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous()
        every = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        self._together(dist.all_gather, every, own)
        return every

    def one_at_a_time(self) -> AbstractContextManager[None]:
        return locked(
            self._generating,
            "another generation is under way on these ranks, which would mix with this one; finish or close its stream "
            "first",
        )

    def agree(self, facts: Callable[[], Mapping[str, object]]) -> None:
        # Through the store, not as tensors: the ranks may differ in the number of collectives to come.
        self._agreements += 1
        own = {**facts(), "number of collectives before": self._collectives}
        digests = {name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in own.items()}
        key = f"facts/{self._agreements}/rank"  # if a rank is missing, the store's error names its key
        with _saying("a rank has not come so far, or the master is gone"):
            self._store.set(f"{key} {self.rank}", json.dumps(digests))
            everyones = [json.loads(self._store.get(f"{key} {rank}")) for rank in range(self.size)]
        for rank, theirs in enumerate(everyones):
            names = ", ".join(name for name, digest in theirs.items() if digests.get(name) != digest)
            if names:
                raise ValueError(f"rank {rank} and rank {self.rank} were not given the same {names}; start all alike")

    def _together(self, collective: Callable[..., Any], *operands: object) -> Any:
        self._collectives += 1
        with _saying("another rank has ended or does not answer; if it was only slow, give a longer --timeout"):
            return collective(*operands)

    def __deepcopy__(self, _: object) -> "TorchRanks":
        return self  # a copy of a model belongs to the same job

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("a rank's slice of a model is no model; save the checkpoint that it was loaded from")


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Raise RankLost for an error of the engine: `what` it means here, and the engine's message."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():  # gloo's are plain RuntimeErrors
            raise
        raise RankLost(f"{what}: {error}") from error
