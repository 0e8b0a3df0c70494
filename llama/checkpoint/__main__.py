"""python -m llama.checkpoint PATH: see llama/cli/doctor.py."""

from llama.__main__ import start

if __name__ == "__main__":
    start("doctor")
