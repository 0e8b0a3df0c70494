"""Text from a Llama model: python inference.py ["a prompt" "another"] [--flags]; see llama/cli/inference.py."""

from llama.host.packages import check_packages

if __name__ == "__main__":
    check_packages()

from llama import cli
from llama.cli.inference import main

if __name__ == "__main__":
    cli.main(main)
