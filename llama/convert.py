"""python -m llama.convert IN OUT.gguf --type q8_0: see llama/cli/convert.py."""

from importlib import import_module

if __name__ == "__main__":
    import_module("llama.__main__").start("convert")
