"""python -m llama.verify: see llama/cli/verify.py."""

from llama import cli
from llama.cli import console

if __name__ == "__main__":
    console.quiet_imports()
    from llama.cli.verify import main

    cli.main(main)
