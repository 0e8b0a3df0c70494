"""What only some systems have is asked for where it is used, and a process without it does the rest."""

import subprocess
import sys

import pytest

# Like Windows, as far as another system can be; the libraries come first, for they know it themselves.
WITHOUT = """
import os, pkgutil, signal, sys
import fire, matplotlib.pyplot, safetensors.torch, tokenizers, torch, tqdm
for name in ("readline", "resource", "fcntl", "termios", "tty", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "sysconf", "geteuid", "getuid", "killpg", "setsid", "fork", "mkfifo", "O_NONBLOCK"):
    delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGPIPE", "SIGHUP", "setitimer"):
    delattr(signal, name)

import importlib
import llama
OPTIONAL = ("triton_kernels", "lm_eval", "kv_cache.transformers", "template_child")  # own packages; a process
for module in pkgutil.walk_packages(llama.__path__, "llama."):
    if not module.name.endswith(OPTIONAL):
        importlib.import_module(module.name)
"""


def printed(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT}\n{code}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_is_imported_and_the_rest_works_without_what_only_posix_has() -> None:
    code = """
from pathlib import Path
from llama import cli
from llama.host import cores
from llama.host import machine
from llama.cli import terminal
from llama.bench.run import memory
from llama.untrusted import template_child

assert cores.usable_cores() >= 1
assert machine.available_memory(torch.device("cpu"))
assert memory._peak_of_usage() is None
template_child.limit()
template_child.set_clock(1)
assert list(terminal.terminal_lines(print)) == []
print("done", cli.run(lambda *, first=0: 0, ["--threads", "1"]))
"""
    assert printed(code).split() == [">", "done", "0"]
