"""python -m llama.costs: see llama/cli/costs.py."""

from llama.__main__ import start

if __name__ == "__main__":
    start("costs")
