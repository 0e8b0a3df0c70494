"""A real Slurm on the loopback: slurmctld and two slurmd, `one` and `two`, in a folder of a test.

The programs are Debian's slurm-wlm, and must run as root. No accounting, as on many small clusters; no munge, because
all users are the same.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# cred_expire: a task that is requeued after its node went down starts again after that many seconds, 6 at least.
AuthInfo=cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SchedulerType=sched/builtin
ReturnToService=2
SlurmdTimeout=5
KillWait=2
MpiDefault=none
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why no Slurm can be started here, or an empty text."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt install slurm-wlm"
    return "" if os.geteuid() == 0 else "slurmd must run as root"


class Slurm:
    """The daemons by name, and the environment in which commands find them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, dict[str, "subprocess.Popen[bytes]"]()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, name: str) -> None:
        """Start slurmctld, or the slurmd of a node."""
        words = ["slurmctld", "-D", "-i"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]
        with open(self.folder / f"{name}.said", "ab") as said:
            self.daemons[name] = subprocess.Popen(words, env=self.environment, stdout=said, stderr=said)

    def stop(self, name: str) -> None:
        """Kill a daemon."""
        process = self.daemons.pop(name)
        process.kill()
        process.wait()

    def asked(self, *words: str) -> str:
        """Return what a command of Slurm prints."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False).stdout


def wait_until(ready: Callable[[], object], seconds: float, facts: Callable[[], object]) -> None:
    """Wait until `ready()` is true; an AssertionError after so many seconds has the facts."""
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, facts()
        time.sleep(0.05)


@contextmanager
def slurm_here(folder: Path) -> Iterator[Slurm]:
    """Start all daemons, wait until both nodes are idle, and end all of them at the end."""
    (folder / "state").mkdir(parents=True)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    words = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(words)
    slurm = Slurm(folder)
    try:
        for name in ("slurmctld", "one", "two"):
            slurm.start(name)
        idle = lambda: slurm.asked("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"]  # noqa: E731
        wait_until(idle, 60, lambda: [(path.name, path.read_text()[-2000:]) for path in folder.glob("*.said")])
        yield slurm
    finally:
        for name in [*slurm.daemons]:
            slurm.stop(name)
        for process in _started_under(folder):  # tasks, which outlive their slurmd
            with suppress(ProcessLookupError):
                os.kill(process, SIGKILL)


def _started_under(folder: Path) -> Iterator[int]:
    """Yield the processes whose environment names the configuration in a folder."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"SLURM_CONF={folder / 'slurm.conf'}".encode() in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)
