"""Checks that this Python has what the library needs: the scripts of a clone are also run by other Pythons.

Runs on Python 3.9, too: it is imported before modules that need a newer one.
"""

import os
import sys
from importlib.util import find_spec

OLDEST = (3, 11)
# What `dependencies` in pyproject.toml installs, by the names of their modules.
NEEDED = (
    *("torch", "tiktoken", "tokenizers", "jinja2", "fairscale"),
    *("fire", "numpy", "safetensors", "gguf", "tqdm", "matplotlib"),
)


def check_packages(needed: tuple[str, ...] = NEEDED) -> None:
    """Exit with 2 and a message if this Python is older than 3.11 or lacks one of the needed packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    missing = [name for name in needed if find_spec(name) is None]
    if sys.version_info < OLDEST:
        fault = "is older than Python 3.11, which the library needs"
    elif missing:
        fault = "lacks " + ", ".join(missing)
    else:
        return
    python = os.path.join(".venv", "Scripts" if os.name == "nt" else "bin", "python")
    sys.stderr.write(
        f"error: {sys.executable} (Python {version}) {fault}; install the library as README.md or an exercise's "
        f"TASK.md says, and run its Python, such as {python}\n"
    )
    sys.exit(2)
