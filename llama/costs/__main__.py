"""python -m llama.costs: see llama/cli/costs.py."""

from llama import cli
from llama.cli import console

if __name__ == "__main__":
    console.quiet_imports()
    from llama.cli.costs import main

    cli.main(main)
