"""Which part of some work this process does: that of a flag, or that of a task of Slurm's job array."""

import os


def own_part(part: str | None) -> tuple[int, int]:
    """Return (i, n) of "i/n"; by default of this process as a task of Slurm's job array, else (1, 1)."""
    given = part or "1/1"
    if part is None and (task := os.environ.get("SLURM_ARRAY_TASK_ID")) is not None:
        first, step, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}", "1") for name in ("MIN", "STEP", "COUNT"))
        given = f"of task {task} from {first} by {step} of {count}, by SLURM_ARRAY_TASK_ID,"
        if (task + first + step + count).isdecimal() and int(step) and (int(task) - int(first)) % int(step) == 0:
            given = f"{(int(task) - int(first)) // int(step) + 1}/{count}"
    i, _, n = given.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"part {given} must be i/n with i from 1 to n, such as --part 3/12")
    return int(i), int(n)
