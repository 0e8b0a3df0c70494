"""python -m llama.convert IN OUT.gguf --type q8_0: see llama/cli/convert.py."""

from llama.__main__ import start

if __name__ == "__main__":
    start("convert")
