"""python -m llama.convert IN OUT.gguf --type q8_0: see llama/cli/convert.py."""

from llama import cli
from llama.cli import console

if __name__ == "__main__":
    console.quiet_imports()
    from llama.cli.convert import main

    cli.main(main)
