"""One command for all: llama-kv COMMAND ..., or python -m llama COMMAND ...

The functions, and so the flags, are those of the scripts and of `python -m llama.x`.
"""

import difflib
import sys
from importlib import import_module
from typing import NoReturn

from llama.host.packages import check_packages

if __name__ == "__main__":
    check_packages(())  # the version alone: the list of commands needs no package

from llama import cli
from llama.host import console
from llama.host.version import __version__

HELP = """\
llama-kv COMMAND [...]: Llama inference whose KV cache can be switched off.

  run         Text from prompts: llama-kv run "Once upon a time"; a conversation
              that keeps its cache: --chat; a page of every step: --watch FILE.
  serve       OpenAI's HTTP interface on this machine, and a page that shows it.
  bench       Time and memory, with the cache and without: --preset table
  report      What the cache saves and costs here, to hand in: --minutes 5
  compare     Two results of bench, and whether a difference is shown: A B
  sweep       The cells of a plan, here or by Slurm; merge: many results in one.
  claim       Published claims about caches, and whether they hold here: NAME
  verify      Certify that the cache changes nothing.
  kinds       Kinds of cache: name, bytes, what each one does, and its paper.
  costs       Bytes of the cache of any model, and what fits: --ckpt_dir demo
  convert     Any checkpoint as a .gguf file: IN OUT.gguf --type q8_0
  perplexity  How well a text is predicted, by any kind of cache: --text FILE
  doctor      What a checkpoint is, and whether it loads: llama-kv doctor PATH

Without --ckpt_dir they take the demo model, which is downloaded once.
On every command; llama-kv --version prints the version of this package:
  --help      Its flags.
  --quiet     Only results, warnings and errors; --debug: tracebacks of errors.
  --threads N Threads of the CPU that compute.
"""

# command -> the module of llama.cli, and its function
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("inference", "main"),
    "serve": ("serve", "main"),
    "bench": ("benchmark_inference", "main"),
    "report": ("benchmark_inference", "hand_in"),
    "compare": ("compare", "main"),
    "sweep": ("sweep", "main"),
    "merge": ("sweep", "merge"),
    "claim": ("claim", "main"),
    "verify": ("verify", "main"),
    "kinds": ("kinds", "main"),
    "costs": ("costs", "main"),
    "convert": ("convert", "main"),
    "perplexity": ("perplexity", "main"),
    "doctor": ("doctor", "main"),
}


def main() -> None:
    """Run the command that the first argument names on the other arguments, and exit with its code."""
    name, *words = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        console.quiet_imports()
        cli.end_with(lambda: overview(name))
    start(name, words, f"llama-kv {name}")


def start(name: str, words: list[str] | None = None, shown_as: str | None = None) -> NoReturn:
    """Import a command, run it, and exit with its code; see `cli.main`."""
    console.quiet_imports()
    check_packages()
    module, function = COMMANDS[name]
    variables = "LLAMA_KV_" if name == "serve" else None  # a container is configured by its environment
    cli.main(getattr(import_module(f"llama.cli.{module}"), function), words, name=shown_as, variables=variables)


def overview(name: str) -> int:
    """Print the list of commands, the version, or an error for an unknown command; return the exit code."""
    if name in ("--help", "-h", "help"):
        console.put(HELP, end="")
        return 0
    if name in ("--version", "version"):
        console.put(f"llama-kv {__version__}")
        return 0
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else "llama-kv --help lists them"
    console.say(f"error: unknown command {name!r}; {hint}")
    return 2


if __name__ == "__main__":
    main()
