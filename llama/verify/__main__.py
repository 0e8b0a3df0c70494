"""python -m llama.verify: see llama/cli/verify.py."""

from importlib import import_module

if __name__ == "__main__":
    import_module("llama.__main__").start("verify")
