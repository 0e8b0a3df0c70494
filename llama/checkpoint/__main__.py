"""python -m llama.checkpoint PATH: see llama/cli/doctor.py."""

from llama import cli
from llama.cli import console

if __name__ == "__main__":
    console.quiet_imports()
    from llama.cli.doctor import main

    cli.main(main)
