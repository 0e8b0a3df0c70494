"""python -m llama.verify: see llama/cli/verify.py."""

from llama.__main__ import start

if __name__ == "__main__":
    start("verify")
