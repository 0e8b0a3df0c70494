"""python -m llama.perplexity --text FILE: see llama/cli/perplexity.py."""

from importlib import import_module

if __name__ == "__main__":
    import_module("llama.__main__").start("perplexity")
