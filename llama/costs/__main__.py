"""python -m llama.costs: see llama/cli/costs.py."""

from importlib import import_module

if __name__ == "__main__":
    import_module("llama.__main__").start("costs")
