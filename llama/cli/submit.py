"""Starts the parts of a sweep as tasks of a cluster, by submitit, and starts again those that died.

Knows no plan. Each task is the command of its own part, which skips what is done and waits for what another task has.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama.host import console

CLUSTERS = ("slurm", "local")
DEFAULTS: dict[str, Any] = {"timeout_min": 24 * 60}  # submitit's own is 5
TRIES = 3  # rounds of tasks, in succession, that end without a cell that is done
LOOK_EVERY = 10.0  # seconds
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class TasksDied(RuntimeError):
    """Rounds of tasks have ended, and no cell was done."""


def run_parts(
    words: list[str],
    folder: Path,
    undone: Callable[[], dict[int, int]],
    *,
    cluster: str,
    tasks: int,
    options: list[str],
) -> None:
    """Run `llama-kv sweep WORDS --part=i/TASKS` for every part that is not done, until all are.

    undone: how many cells of each part are not done, by the part's number. Raises ValueError for wrong arguments, and
    TasksDied after TRIES rounds in which no cell was done.
    """
    if cluster not in CLUSTERS or tasks < 1:
        raise ValueError(f"--submit={cluster} --tasks={tasks}: submit to {' or '.join(CLUSTERS)}, at least 1 task")
    executor, name = _executor(folder / "tasks", cluster, options), _name_of(folder)
    if cluster == "slurm" and is_queued(name):
        console.note("tasks of this sweep are in Slurm's queue already; waiting for them")
        _wait(lambda: is_queued(name))
    left, tries = undone(), 0
    while left:
        console.note(f"{sum(left.values())} cells of {len(left)} parts are not done; submitting {len(left)} tasks")
        jobs = executor.map_array(_command(words), [f"--part={part}/{tasks}" for part in left])
        if cluster == "slurm":
            _wait(lambda: is_queued(name))
        else:
            _wait(lambda jobs=jobs: not all(job.done() for job in jobs))  # type: ignore[misc]
        before, left = left, undone()
        tries = tries + 1 if left == before else 0
        if tries == TRIES:
            raise TasksDied(
                f"{sum(left.values())} cells are not done, and {TRIES} rounds of tasks have ended without one more; "
                f"{folder / 'tasks'} has what the tasks printed"
            )


def _executor(folder: Path, cluster: str, options: list[str]) -> Any:
    """Return submitit's executor with these parameters. Raises ValueError if there is none."""
    try:
        import submitit
    except ImportError as error:
        raise ValueError("--submit needs submitit: pip install 'llama-kv[slurm]'") from error
    given = dict(DEFAULTS)
    for option in options:
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise ValueError(f"--option={option} must be NAME=VALUE, such as --option slurm_partition=short")
        given[key] = int(value) if value.isdecimal() else value
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster)
        executor.update_parameters(name=_name_of(folder.parent), **given)
    except (RuntimeError, NameError, TypeError) as error:  # of unknown names, wrong values and no Slurm
        raise ValueError(f"submitit refuses --submit={cluster} --option {' '.join(options)}: {error}") from error
    return executor


def _command(words: list[str]) -> Any:
    from submitit.helpers import CommandFunction

    paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
    path = f"PYTHONPATH={os.pathsep.join(filter(None, paths))}"
    return CommandFunction(["env", path, sys.executable, "-P", "-m", "llama", "sweep", *words])


def _name_of(folder: Path) -> str:
    """Return the name of the tasks of a sweep, by which a later command finds them in Slurm's queue."""
    return f"llama-kv-{hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()}"


def is_queued(name: str) -> bool:
    """Return whether Slurm has tasks of this name; a controller that does not answer has ended none of them.

    This needs no accounting, which submitit's own look (sacct) does.
    """
    words = ["squeue", "--noheader", "--me", f"--name={name}", "--format=%i"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode != 0 or bool(done.stdout.strip())


def _wait(go_on: Callable[[], bool]) -> None:
    while go_on():
        time.sleep(LOOK_EVERY)
