"""One command for all: llama-kv COMMAND ..., or python -m llama COMMAND ...

Knows which function is which command, and imports it when it is asked for. The functions, and so the flags, are those
of the scripts and of `python -m llama.x`.
"""

import difflib
import sys
from collections.abc import Callable

from llama import cli
from llama.cli import console

HELP = """\
llama-kv COMMAND [...]: Llama inference whose KV cache can be switched off,
swapped, measured and proved.

  run         Text from prompts: llama-kv run "Once upon a time"
  chat        A conversation that keeps its cache.
  bench       Time and memory, with the cache and without: --preset table
  verify      Certify that the cache changes nothing.
  watch       A page that shows a run step by step: what is cached, what is fed.
  costs       Bytes of the cache of any model, and what fits: --ckpt_dir demo
  convert     Any checkpoint as a .gguf file: IN OUT.gguf --type q8_0
  perplexity  How well a text is predicted, by any kind of cache: --text FILE
  doctor      What a checkpoint is, and whether it loads: llama-kv doctor PATH

Without --ckpt_dir they take the demo model, which is downloaded once.
On every command:
  --help      Its flags.
  --threads N Threads of the CPU that compute.
  --debug     The traceback of an error.
"""


def _inference() -> Callable[..., int]:
    from llama.cli.inference import main

    return main


def _bench() -> Callable[..., int]:
    from llama.cli.benchmark_inference import main

    return main


def _verify() -> Callable[..., int]:
    from llama.cli.verify import main

    return main


def _costs() -> Callable[..., int]:
    from llama.cli.costs import main

    return main


def _convert() -> Callable[..., int]:
    from llama.cli.convert import main

    return main


def _perplexity() -> Callable[..., int]:
    from llama.cli.perplexity import main

    return main


def _doctor() -> Callable[..., int]:
    from llama.cli.doctor import main

    return main


COMMANDS: dict[str, Callable[[], Callable[..., int]]] = {
    "run": _inference,
    "chat": _inference,
    "bench": _bench,
    "verify": _verify,
    "watch": _inference,
    "costs": _costs,
    "convert": _convert,
    "perplexity": _perplexity,
    "doctor": _doctor,
}

# The flag by which a command is another one.
GIVEN = {"chat": "--chat", "watch": "--watch=page.html"}


def main() -> None:
    """Run the command that the first argument names on all others, and exit with its code."""
    console.quiet_imports()
    name, *words = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        cli.end_with(lambda: overview(name))
    cli.main(COMMANDS[name](), with_flag(GIVEN.get(name), words), name=f"llama-kv {name}")


def overview(name: str) -> int:
    """Print what there is, or which command was meant; return the exit code."""
    if name in ("--help", "-h", "help"):
        console.put(HELP, end="")
        return 0
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else "llama-kv --help lists them"
    console.say(f"error: unknown command {name!r}; {hint}")
    return 2


def with_flag(flag: str | None, words: list[str]) -> list[str]:
    """Return the words with the flag before them, unless it is among them."""
    if flag is None or any(word.partition("=")[0] == flag.partition("=")[0] for word in words):
        return words
    return [flag, *words]


if __name__ == "__main__":
    main()
