"""What machine this is, what it can do at best, how much memory it has left, and who else is busy on it.

Knows nothing of models. Facts that a machine does not tell are None; nothing is guessed. Of peers only the installed
version is looked up: importing them to ask would change what is measured.
"""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from llama.costs import Ceilings
from llama.ops import linear

# How this library calls the dtypes that it computes in, everywhere: in flags, in reports, in certificates.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PACKAGE = Path(__file__).parent
_PEERS = ("transformers", "llama_cpp_python")

# Beyond every cache: the largest of a CPU socket hold 256 to 1152 MiB spread over 8 to 12 parts, of a GPU 126 MiB.
_READ_BYTES = {"cpu": 2**29, "cuda": 2**31, "mps": 2**29}
_SIDES = (256, 512, 1024, 2048, 4096, 8192)

_ALL_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal in proc(5); guests are counted in user already

# limit, use and, in memory.stat, the part of the use that the kernel gives back when asked (cached files)
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def dtype_name(dtype: torch.dtype) -> str:
    """Return how this library calls a dtype, or PyTorch's name of one that it does not compute in."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def environment(device: torch.device) -> dict[str, Any]:
    """Return the facts that a number needs beside it, ready for JSON.

    `threads` is the count that PyTorch is set to now. `commit` is that of the checkout the package runs from, and
    `dirty` tells whether the package differs from it; both are None where it was installed without one.
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "llama_kv": _version("llama-kv") or "not installed",
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


def ceilings(device: torch.device, dtype: torch.dtype, *, seconds: float = 1.0) -> Ceilings:
    """Measure how fast this process reads memory and multiplies matrices of `dtype`, in about `seconds`.

    The best of all samples counts, so that other work on the machine lowers a ceiling least. Whatever the kernels make
    of `dtype` is the ceiling: fp16 on a CPU without instructions for it is slow, and no model could be faster.
    """
    with torch.inference_mode():
        return {
            "read_bytes_per_second": _read_rate(device, seconds / 2),
            "flops_per_second": _matrix_rate(device, dtype, seconds / 2),
            "dtype": dtype_name(dtype),
        }


def available_memory(device: torch.device) -> int | None:
    """Return how many bytes this process can still take on the device, or None where nothing tells.

    On Linux, cgroups limit what the machine has; elsewhere it is all memory that there is, an upper bound.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    groups = _text_of(Path("/proc/self/cgroup")) or ""
    rooms = [_meminfo_available(), _cgroup_room(groups, Path("/sys/fs/cgroup"))]
    return min((room for room in rooms if room is not None), default=_physical_memory())


class OtherLoad:
    """How many cores were busy with the work of others: `start()` before a stretch of work, `stop()` after it.

    The kernel counts in hundredths of a second, so a stretch of much less than a second tells little. In a container
    the others may be all of the host's. Our own children are others, and so is what a hypervisor ran instead of us.
    """

    def __init__(self) -> None:
        self._started: tuple[float, float, float | None] | None = None

    def start(self) -> None:
        self._started = self._clocks()

    def stop(self) -> float | None:
        """Return the mean count of busy cores since `start()`, or None where the kernel does not tell."""
        assert self._started is not None, "stop() without start()"
        began, own_before, all_before = self._started
        now, own, everyone = self._clocks()
        if everyone is None or all_before is None:
            return None
        return max(0.0, (everyone - all_before - (own - own_before)) / (now - began))

    def _clocks(self) -> tuple[float, float, float | None]:
        """Return the seconds on the wall, those that our threads were busy, and those that all cores were."""
        own = os.times()
        return time.perf_counter(), own.user + own.system, _busy_seconds()


def _busy_seconds() -> float | None:
    text = _text_of(Path("/proc/stat"))
    if text is None:
        return None
    ticks = [int(field) for field in text.partition("\n")[0].split()[1:]]
    return sum(ticks[i] for i in _ALL_BUSY) / os.sysconf("SC_CLK_TCK")


def _read_rate(device: torch.device, seconds: float) -> float:
    """Return the bytes a second of the fastest way to read a tensor that no cache holds."""
    size = min(_READ_BYTES[device.type], (available_memory(device) or 2**62) // 4)
    # Ones, not zeros: pages of zeros that were never written to may all be one page, which a cache holds.
    matrix = torch.ones(max(1, size // 4 // 8192), 8192, device=device)
    flat, vector = matrix.view(-1), matrix[:1].clone()
    # Which is fastest differs between machines: on an AMD CPU sum and dot are, max comes close, and a matrix-vector
    # product reaches 65 to 80 % of them. That product is among them all the same: the model reads its weights in this
    # very way, and must not seem to beat the ceiling. Copies are not: what they write would have to count.
    ways: list[Callable[[], object]] = [
        flat.sum,
        flat.max,
        partial(torch.dot, *flat.chunk(2)),
        partial(linear, vector, matrix),
    ]
    return flat.nbytes / min(_quickest(way, device, seconds / len(ways)) for way in ways)


def _matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOPs a second of the fastest product of two square matrices."""
    # Not zeros: a GPU draws less power for them and runs faster.
    dice = torch.Generator(device).manual_seed(0)
    best = 0.0
    for side in _SIDES:
        left, right = (torch.randn(side, side, generator=dice, device=device).to(dtype) for _ in range(2))
        took = _quickest(partial(linear, left, right), device, seconds / len(_SIDES))
        best = max(best, 2 * side**3 / took)
        if 8 * took > seconds / 2:  # one product of the next size would take up what time is left
            break
    return best


def _quickest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the least seconds that `work` took, after one time that does not count, and once at least."""
    work()
    deadline = time.perf_counter() + seconds
    best = _seconds_of(work, device)
    while time.perf_counter() < deadline:
        best = min(best, _seconds_of(work, device))
    return best


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
    for line in (_text_of(Path("/proc/cpuinfo")) or "").splitlines():
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
    for line in (_text_of(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(groups: str, root: Path) -> int | None:
    """Return the bytes that the tightest of our memory cgroups leaves us, or None where none sets a limit.

    groups: the text of /proc/self/cgroup. root: where cgroups are mounted. Every ancestor's limit holds as well.
    https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    rooms: list[int] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", _CGROUP_V1) if controllers else (root, _CGROUP_V2)
        inmost = top / path.lstrip("/")
        folders = [folder for folder in (inmost, *inmost.parents) if folder.is_relative_to(top)]
        rooms += [room for folder in folders if (room := _room_in(folder, *names)) is not None]
    return min(rooms, default=None)


def _room_in(folder: Path, limit_file: str, use_file: str, reclaimable_key: str) -> int | None:
    limit, use = _text_of(folder / limit_file), _text_of(folder / use_file)
    if limit is None or use is None or limit.strip() == "max":
        return None
    stat = dict(line.split(maxsplit=1) for line in (_text_of(folder / "memory.stat") or "").splitlines())
    return max(0, int(limit) - int(use) + int(stat.get(reclaimable_key, 0)))


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
