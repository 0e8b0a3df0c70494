"""What machine this is, what it can do at best, and how much memory it has left.

Knows nothing of models. Facts that a machine does not tell are None; nothing is guessed. Of peers only the installed
version is looked up: importing them to ask would change what is measured.
"""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from llama.host.cgroups import ROOT, folders_of, own_groups, text_of
from llama.host.version import __version__
from llama.ops import HAS_ONEDNN, linear, onednn_linear

# How this library calls the dtypes that it computes in, everywhere: in flags, in reports, in certificates.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PACKAGE = Path(__file__).parents[1]
_PEERS = ("transformers", "llama_cpp_python")

# Beyond every cache: the largest of a CPU socket hold 256 to 1152 MiB spread over 8 to 12 parts, of a GPU 126 MiB.
_READ_BYTES = {"cpu": 2**29, "cuda": 2**31, "mps": 2**29}
_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_FINALISTS = 3  # ways that are tried again, as long as there is time

# limit, use and, in memory.stat, the part of the use that the kernel gives back when asked (cached files)
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Ceilings(TypedDict):
    """What a machine can do at best: bytes read, and FLOPs of a matrix product in `dtype`, a second.

    `read_by` and `flops_by` name what reached them.
    """

    read_bytes_per_second: float
    read_by: str
    flops_per_second: float
    flops_by: str
    dtype: str


def dtype_name(dtype: torch.dtype) -> str:
    """Return how this library calls a dtype, or PyTorch's name of one that it does not compute in."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def environment(device: torch.device) -> dict[str, Any]:
    """Return the facts that a number needs beside it, ready for JSON.

    `llama_kv` is the version of this package, installed or not. `threads` is the count that PyTorch is set to now.
    `commit` is that of the checkout the package runs from, and `dirty` tells whether the package differs from it; both
    are None where it was installed without one.
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "llama_kv": __version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _physical_memory(),
        "gpu": _gpu(device) if device.type == "cuda" else None,
        **_checkout(_PACKAGE),
        "peers": {name: version for name in _PEERS if (version := _version(name)) is not None},
    }


def ceilings(device: torch.device, dtype: torch.dtype, *, seconds: float = 2.0) -> Ceilings:
    """Measure how fast this process reads memory and multiplies matrices of `dtype`, in about `seconds`.

    The best of all ways, sizes and samples counts, so that other work on the machine lowers a ceiling least. Whatever
    the kernels make of `dtype` is the ceiling: fp16 on a CPU without instructions for it is slow, and no model could be
    faster.
    """
    threads = torch.get_num_threads()
    try:
        with torch.inference_mode():
            read, read_by = _best_rate(_reads(device), device, seconds / 2)
            torch.set_num_threads(threads)
            flops, flops_by = _best_rate(_products(device, dtype), device, seconds / 2)
    finally:
        torch.set_num_threads(threads)
    return {
        "read_bytes_per_second": read,
        "read_by": read_by,
        "flops_per_second": flops,
        "flops_by": flops_by,
        "dtype": dtype_name(dtype),
    }


def available_memory(device: torch.device) -> int | None:
    """Return how many bytes this process can still take on the device, or None where nothing tells.

    On Linux, cgroups limit what the machine has; elsewhere it is all memory that there is, an upper bound.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    rooms = [_meminfo_available(), _cgroup_room(own_groups(), ROOT)]
    return min((room for room in rooms if room is not None), default=_physical_memory())


class _Way(NamedTuple):
    """A way to do `amount` bytes or FLOPs."""

    name: str
    amount: int
    work: Callable[[], object]


def _reads(device: torch.device) -> Iterator[_Way]:
    """Yield ways to read a tensor that no cache holds."""
    size = min(_READ_BYTES[device.type], (available_memory(device) or 2**62) // 4)
    # Ones, not zeros: pages of zeros that were never written to may all be one page, which a cache holds.
    matrix = torch.ones(max(2, size // 4 // 8192), 8192, device=device)
    flat, vector = matrix.view(-1), matrix[:1].clone()
    half = flat.numel() // 2
    # Which is fastest differs between machines: on an AMD CPU sum and dot are, max comes close, and a matrix-vector
    # product reaches 65 to 80 % of them. That product is among them all the same: the model reads its weights in this
    # very way, and must not seem to beat the ceiling. What a copy writes passes the same bus and counts.
    ways: dict[str, Callable[[], object]] = {
        "sum": flat.sum,
        "dot": partial(torch.dot, flat[:half], flat[half : 2 * half]),
        "matrix-vector product": partial(linear, vector, matrix),
        "max": flat.max,
        "copy": partial(flat[:half].copy_, flat[half : 2 * half]),
    }
    all_threads = torch.get_num_threads()
    # Half of the threads are enough to fill some buses, and then do not get into each other's way.
    for threads in dict.fromkeys((all_threads, max(1, all_threads // 2))) if device.type == "cpu" else (all_threads,):
        for name, work in ways.items():
            torch.set_num_threads(threads)
            yield _Way(f"{name}, threads: {threads}", flat.nbytes, partial(_with_threads, threads, work))


def _with_threads(threads: int, work: Callable[[], object]) -> object:
    torch.set_num_threads(threads)
    return work()


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[_Way]:
    """Yield products of matrices, square and tall, small ones first, in every way that this library or a peer has."""
    # Not zeros: a GPU draws less power for them and runs faster.
    noise = torch.randn(2**20, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"linear": linear, "PyTorch's linear": functional.linear}
    if device.type == "cpu" and dtype == torch.bfloat16 and HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        ways["oneDNN"] = onednn_linear
    for side in _SIDES:
        x = noise.repeat(-(-4 * side * side // noise.numel()))[: 4 * side * side].view(4 * side, side)
        for rows in (side, 4 * side):
            for name, way in ways.items():
                product = partial(way, x[:rows], x[:side].contiguous())
                yield _Way(f"{name}, {rows} x {side} x {side}", 2 * rows * side * side, product)


def _best_rate(ways: Iterable[_Way], device: torch.device, seconds: float) -> tuple[float, str]:
    """Return the best rate of all ways, and the name of the one that reached it.

    Each is tried once while half of the time lasts, and the best then share what is left: in a moment of quiet any of
    them may show what the machine can.
    """
    spent, tried = 0.0, list[tuple[float, _Way]]()
    for way in ways:
        way.work()
        took = _seconds_of(way.work, device)
        tried = sorted([*tried, (way.amount / took, way)], key=lambda one: one[0], reverse=True)[:_FINALISTS]
        spent += 2 * took
        if spent > seconds / 2:
            break
    rates = {way: rate for rate, way in tried}
    while spent < seconds:
        for way in rates:
            took = _seconds_of(way.work, device)
            rates[way] = max(rates[way], way.amount / took)
            spent += took
    best = max(rates, key=lambda way: rates[way])
    return rates[best], best.name


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    # A GPU gets several in a row, so that launching the first and waiting for the last weigh little.
    times = 1 if device.type == "cpu" else 10
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return (time.perf_counter() - began) / times


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _cpu_name() -> str:
    for line in (text_of(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(device)
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory,
        "driver": driver.splitlines()[0].strip() if driver else None,
        "cuda": torch.version.cuda,
    }


def _checkout(folder: Path) -> dict[str, str | bool | None]:
    """Return the commit that the folder is checked out from, and whether its files differ from that commit."""
    git = partial(_output_of, "git", "--no-optional-locks", "-C", str(folder))
    # An installed package may lie inside another project's checkout, in a virtual environment that git ignores.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (commit := git("rev-parse", "HEAD")) is None:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--", ".")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes)}


def _output_of(*command: str) -> str | None:
    """Return what the program prints, or None where it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _meminfo_available() -> int | None:
    for line in (text_of(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(groups: str, root: Path) -> int | None:
    """Return the bytes that the tightest of our memory cgroups leaves us, or None where none sets a limit.

    groups, root: see `llama.host.cgroups.folders_of`.
    """
    names = {1: _CGROUP_V1, 2: _CGROUP_V2}
    rooms = [_room_in(folder, *names[generation]) for generation, folder in folders_of("memory", groups, root)]
    return min((room for room in rooms if room is not None), default=None)


def _room_in(folder: Path, limit_file: str, use_file: str, reclaimable_key: str) -> int | None:
    limit, use = text_of(folder / limit_file), text_of(folder / use_file)
    if limit is None or use is None or limit.strip() == "max":
        return None
    stat = dict(line.split(maxsplit=1) for line in (text_of(folder / "memory.stat") or "").splitlines())
    return max(0, int(limit) - int(use) + int(stat.get(reclaimable_key, 0)))
