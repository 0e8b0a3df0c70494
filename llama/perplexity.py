"""python -m llama.perplexity --text FILE: see llama/cli/perplexity.py."""

from llama.__main__ import start

if __name__ == "__main__":
    start("perplexity")
