"""python -m llama.kv_cache: see llama/cli/kinds.py."""

from llama.__main__ import start

if __name__ == "__main__":
    start("kinds")
