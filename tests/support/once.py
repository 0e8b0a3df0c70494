"""What all workers of a run need and one of them makes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llama.host.files import lock_file


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> str:
    """Return the text that `make` returns for a new folder, in the first worker that asks; the others wait for it."""
    shared = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    text = shared / f"{name}.txt"
    with open(shared / f"{name}.lock", "ab") as lock:
        lock_file(lock, wait=True)
        if not text.exists():
            text.write_text(make(folders.mktemp(name)), encoding="utf-8")
    return text.read_text("utf-8")
