"""python -m llama.checkpoint PATH: see llama/cli/doctor.py."""

from importlib import import_module

if __name__ == "__main__":
    import_module("llama.__main__").start("doctor")
