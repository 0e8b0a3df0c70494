"""python -m llama.kv_cache: see llama/cli/kinds.py."""

from importlib import import_module

if __name__ == "__main__":
    import_module("llama.__main__").start("kinds")
