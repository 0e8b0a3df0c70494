"""python -m llama.perplexity --text FILE: see llama/cli/perplexity.py."""

from llama import cli
from llama.cli import console

if __name__ == "__main__":
    console.quiet_imports()
    from llama.cli.perplexity import main

    cli.main(main)
