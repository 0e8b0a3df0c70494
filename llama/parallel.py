"""The ranks of a torchrun: how processes become one job, what they say to each other, and how the job ends.

The engine is torch.distributed (NCCL on GPUs, gloo on CPUs) with fairscale's regions, which reduce and gather and know
their own gradients, as in Meta's llama. Its layers are not used: they draw every matrix whole before they cut it, and
multiply in one way only; `llama.layers` cuts the same way. Its groups are not either: they wait 30 minutes for a lost
rank, whatever they are told. Knows processes; does not know what a model is made of.
"""

import atexit
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llama.board import SLOT_BYTES, Board
from llama.ranks import ALONE, Ranks

_JOB = ("TORCHELASTIC_RESTART_COUNT", "LLAMA_JOB")  # what tells the jobs of one torchrun apart
_BEATS = 10  # in a timeout
_JOINED: list["TorchRanks"] = []  # at most one: the job that this process belongs to

# A stopped process cannot end itself, and no rank of another host can: its torchrun would wait for it for ever. It is
# killed first, for nobody may be reading what is said.
_GUARD = """
import os, select, sys
rank, pid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
while select.select([0], [], [], seconds)[0]:
    if not os.read(0, 4096):
        sys.exit()
if os.getppid() == pid:
    os.kill(pid, 9)
    print(f"error: rank {rank}: process {pid} did not go on for {seconds:g} s and was killed", file=sys.stderr)
"""


class RankLost(RuntimeError):
    """A rank died, ended or stopped answering."""


def world_size() -> int:
    """Return how many processes torchrun started together with this one; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def world_rank() -> int:
    """Return which of them this process is."""
    return int(os.environ.get("RANK", "0"))


def default_timeout() -> float:
    """Return after how many seconds a rank that does not answer is lost: the environment's LLAMA_TIMEOUT, or 60."""
    return float(os.environ.get("LLAMA_TIMEOUT", "60"))


def job_store(timeout: float) -> Any:
    """Return the store of this torchrun, in which its processes leave each other words.

    One torchrun may see several jobs: its restarts, and a benchmark's processes, one after the other; each has its own.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return PrefixStore("/".join(os.environ.get(name, "0") for name in _JOB), store)


def local_size() -> int:
    """Return how many of them are on this host, and share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_device(device: torch.device) -> torch.device:
    """Return the GPU of this rank, where several share a host; any other device as it is."""
    if world_size() == 1 or device.type != "cuda":
        return device
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    if gpu >= torch.cuda.device_count():
        raise ValueError(f"this host has {torch.cuda.device_count()} GPUs, and {local_size()} ranks need one each")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def join(device: torch.device, *, timeout: float | None = None) -> Ranks:
    """Return the ranks of the torchrun that started this process, or ALONE; the second call returns the first's.

    `timeout` is in seconds, by default `default_timeout()`. Raises RankLost where not all come.
    """
    if world_size() == 1:
        return ALONE
    if device.type == "mps":
        raise ValueError("ranks share a model on CPUs or CUDA GPUs, not on a Metal GPU; give --device cpu")
    if not _JOINED:
        if dist.is_initialized():
            raise ValueError("this program has made a process group of its own; leave that to load, or to Llama.build")
        seconds = default_timeout() if timeout is None else timeout
        if not seconds > 0:
            raise ValueError(f"timeout={seconds} must be a number of seconds above 0")
        _JOINED.append(TorchRanks(device, seconds))
        atexit.register(_JOINED[0].leave)
    return _JOINED[0]


class TorchRanks(Ranks):
    """The processes of one torchrun."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        from fairscale.nn.model_parallel import initialize, mappings

        self.rank, self.size = world_rank(), world_size()
        self._store = job_store(timeout)
        self._watch = Watch(self._store, self.rank, self.size, timeout)
        self._agreements = 0
        backend = "nccl" if device.type == "cuda" else "gloo"
        # The watch speaks first, and names the rank; the backend's own timeout is what remains if it cannot.
        limit = timedelta(seconds=2 * timeout)
        try:
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=limit)
        except RuntimeError as error:
            raise RankLost(
                f"the ranks have met, but cannot reach each other: {error}; on several hosts, set "
                f"{backend.upper()}_SOCKET_IFNAME on each to the name of the network that they share (see `ip addr`)"
            ) from error
        initialize._MODEL_PARALLEL_GROUP = dist.group.WORLD
        self._regions = mappings
        self._board = self._open_board() if device.type == "cpu" else None

    def enter(self, x: Tensor) -> Tensor:
        entered: Tensor = self._regions.copy_to_model_parallel_region(x)
        return entered

    def sum(self, x: Tensor) -> Tensor:
        if self._board_for(x) is not None:
            first, *others = self.gather(x)
            for other in others:
                first = first + other
            return first
        summed: Tensor = self._together(self._regions.reduce_from_model_parallel_region, x)
        return summed

    def join(self, x: Tensor) -> Tensor:
        if self._board_for(x) is not None:
            return torch.cat(self.gather(x), dim=-1)
        joined: Tensor = self._together(self._regions.gather_from_model_parallel_region, x)
        return joined

    def gather(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous()
        every = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        board = self._board_for(x)
        self._together(dist.all_gather if board is None else board.exchange, every, own)
        return every

    def _board_for(self, x: Tensor) -> Board | None:
        """Return the board, where there is one and x may go over it: it fits, and no gradient has to come back."""
        recorded = torch.is_grad_enabled() and x.requires_grad
        return self._board if x.device.type == "cpu" and not recorded and x.nbytes <= SLOT_BYTES else None

    def _open_board(self) -> Board | None:
        """Return memory that all ranks see, where all of them are on this host and on CPUs that allow it."""
        if local_size() != self.size or not Board.serves():
            return None
        made = Board.make(self.size) if self.rank == 0 else None
        try:
            if self.rank == 0:
                self._store.set("board", "" if made is None else str(made))
            path = self._store.get("board").decode()
            board = Board(Path(path), self.rank, self.size) if path else None
            self._store.set(f"opened/{self.rank}", "")
            self._watch.wait_for("opened")
        finally:
            if made is not None:
                made.unlink()
        return board

    def decide(self, x: Tensor) -> Tensor:
        return self.gather(x)[0]

    def agree(self, facts: Callable[[], Mapping[str, object]]) -> None:
        # Through the store, not as tensors: what differs may be the very number of collectives that are to come.
        self._agreements += 1
        own = {**facts(), "number of collectives before": self._watch.entered}
        digests = {name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in own.items()}
        key = f"facts/{self._agreements}"
        self._store.set(f"{key}/{self.rank}", json.dumps(digests))
        for rank, theirs in enumerate(self._watch.wait_for(key)):
            different = [name for name, digest in json.loads(theirs).items() if digests.get(name) != digest]
            if different:
                raise ValueError(
                    f"rank {rank} and rank {self.rank} were not given the same {', '.join(different)}; "
                    "start all ranks with the same command, files and versions"
                )

    def leave(self) -> None:
        """End this process's part; the others go on until they need it again."""
        self._watch.end()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _together(self, collective: Callable[..., Any], *operands: Any) -> Any:
        with self._watch.waiting():
            return collective(*operands)

    def __deepcopy__(self, _: object) -> "TorchRanks":
        return self  # a copy of a model belongs to the same job

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("a rank's slice of a model is no model; save the checkpoint that it was loaded from")


class Watch(threading.Thread):
    """Tells the other ranks that this one lives, and ends this process, in words, where another has been lost.

    Every rank writes a line into the job's store some times in a timeout: how many collectives it has entered, and
    whether it has ended. One whose line does not change any more is lost; one that stays behind while others wait, too.
    The main thread may then be waiting inside of a collective, where no exception reaches it, so the process exits.
    A process of its own, the guard, kills this one where it is stopped.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        super().__init__(daemon=True, name="llama-watch")
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._period = min(1.0, timeout / _BEATS)
        self.entered = 0  # collectives
        self._since: float | None = None  # when this rank began to wait
        self._over = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}  # each other rank's line, and since when it has been there
        self._heard = time.monotonic()  # when the store answered last
        here = [os.environ.get("GROUP_RANK", "0"), socket.gethostname(), os.getpid()]
        store.set(f"here/{rank}", json.dumps(here))
        self._places = [json.loads(place) for place in self.wait_for("here")]
        store.set(f"beat/{rank}", "0 0")
        self.wait_for("beat")
        # A store whose host is gone does not answer and does not fail, so another thread than this one waits for it.
        self._beats = threading.Thread(target=self._beat, args=(store.clone(),), daemon=True, name="llama-beats")
        self._beats.start()
        self.guard = self._start_guard()
        self.start()

    def wait_for(self, key: str) -> list[bytes]:
        """Return what every rank has written under a key; raise RankLost where one does not within the timeout."""
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        until = time.monotonic() + self._timeout
        while not self._store.check(keys):
            late = [rank for rank in range(self._size) if not self._store.check([keys[rank]])]
            ended = [rank for rank in late if self._has_ended(rank)]
            if ended:
                raise RankLost(f"{_named(ended)} {_have(ended)} ended, and the others need {_it(ended)}")
            if time.monotonic() > until:
                raise RankLost(f"{_named(late)} did not come within {self._timeout:g} s")
            time.sleep(0.01)
        found: list[bytes] = self._store.multi_get(keys)
        return found

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Go into a collective, and say who is missing where it breaks."""
        self.entered += 1
        self._since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not re.search("connect|gloo|nccl|timed out|socket", str(error), re.IGNORECASE):
                raise
            broke = time.monotonic()
            time.sleep(3 * self._period)  # those who live write lines; the watch, if it knows more, goes first
            raise RankLost(f"the connection to {self._quiet_since(broke)} broke: {error}") from error
        finally:
            self._since = None

    def _quiet_since(self, broke: float) -> str:
        """Return, in words, who has not been heard any more since a connection broke."""
        if self._heard - broke < self._period:
            return "the host of the job's store, with rank 0,"
        quiet = [
            rank
            for rank, (_, since) in self._seen.items()
            if not self._has_ended(rank) and since - broke < self._period
        ]
        return _named(quiet, self._places) if quiet else "another rank"

    def end(self) -> None:
        """Tell the others that this rank has ended, and do not wait for them any more."""
        self._over.set()
        for thread in (self._beats, self):  # the guard's pipe is this thread's until it ends
            thread.join(timeout=2 * self._period)
        if self.guard is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self.guard.communicate(timeout=2 * self._period)  # closes its pipe, at which it ends

    def _start_guard(self) -> subprocess.Popen[bytes] | None:
        """Start what kills this process where it is stopped; None where that does not start, as the job can do without.

        In a session of its own: what stops or interrupts this process's group does not reach it. It ends with the pipe.
        """
        # The ranks of the same host see this rank's silence up to 3 periods after the timeout, and say so first.
        words = [str(self._rank), str(os.getpid()), f"{self._timeout + 4 * self._period:g}"]
        with suppress(OSError):
            guard = subprocess.Popen(
                [sys.executable, "-IS", "-c", _GUARD, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            assert guard.stdin is not None
            os.set_blocking(guard.stdin.fileno(), False)
            return guard
        return None

    def _feed_guard(self) -> None:
        if self.guard is not None and self.guard.stdin is not None:
            with suppress(OSError):  # it is dead; the others still see whether this rank lives
                self.guard.stdin.write(b".")

    def _beat(self, store: Any) -> None:
        """Write this rank's line and read those of the others, until this one ends."""
        beats, others = 0, [rank for rank in range(self._size) if rank != self._rank]
        over = False
        while not over:
            over = self._over.wait(self._period)
            beats += 1
            try:
                store.set(f"beat/{self._rank}", f"{self.entered} {'ended' if over else beats}")
                lines = store.multi_get([f"beat/{rank}" for rank in others])
            except RuntimeError:
                return  # its host is gone; the watch sees that nothing is heard
            self._heard = now = time.monotonic()
            seen = zip(others, lines, strict=True)
            self._seen = {rank: _last(self._seen.get(rank), line.decode(), now) for rank, line in seen}

    def run(self) -> None:
        """Judge, some times in a timeout, whether the others still answer."""
        while not self._over.wait(self._period):
            self._feed_guard()
            self._judge(time.monotonic())

    def _judge(self, now: float) -> None:
        silent = [
            rank
            for rank, (_, since) in self._seen.items()
            if not self._has_ended(rank) and min(now, self._heard) - since > self._timeout
        ]
        if silent:
            self._exit(silent, f"{_named(silent, self._places)} {_have(silent)} not answered for {self._timeout:g} s")
        if now - self._heard > self._timeout:
            self._exit([], f"the host of the job's store, with rank 0, has not answered for {self._timeout:g} s")
        since = self._since
        if since is None:
            return
        ended = [rank for rank in self._seen if self._has_ended(rank)]
        if ended and now - since > 2 * self._period:
            words = f"{_named(ended, self._places)} {_have(ended)} ended, and the others need {_it(ended)}"
            self._exit([], words)
        if now - since > self._timeout + 2 * self._period:  # one that is silent, too, has been named before
            behind = [rank for rank, (line, _) in self._seen.items() if int(line.split()[0]) < self.entered]
            late = behind or list(self._seen)
            self._exit(behind, f"{_named(late, self._places)} kept the others waiting for {self._timeout:g} s")

    def _has_ended(self, rank: int) -> bool:
        return rank in self._seen and self._seen[rank][0].endswith("ended")

    def _exit(self, lost: list[int], words: str) -> None:
        try:
            print(f"error: rank {self._rank}: {words}", file=sys.stderr, flush=True)
            for rank in lost:
                node, host, pid = self._places[rank]
                if [node, host] == self._places[self._rank][:2]:  # torchrun would wait 30 s for one that is stopped
                    os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it has died meanwhile, or nobody reads what is said
        finally:
            os._exit(1)


def _last(before: tuple[str, float] | None, line: str, now: float) -> tuple[str, float]:
    """Return the line and since when it has been there."""
    return before if before is not None and before[0] == line else (line, now)


def _named(ranks: list[int], places: list[Any] | None = None) -> str:
    """Return ranks in words; with `places`, also which process each is, and on which host."""
    where = {} if places is None else {rank: f" (process {places[rank][2]} on {places[rank][1]})" for rank in ranks}
    return " and ".join(f"rank {rank}{where.get(rank, '')}" for rank in ranks)


def _have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _it(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
