"""Measure generation with and without the KV cache; see llama/cli/benchmark_inference.py.

python benchmark_inference.py --batch_size 8 --kv_caching        one cell
python benchmark_inference.py --preset table                     batch 1, 8, 16 x cache on, off, as a page to send on
python benchmark_inference.py --preset caches                    kinds of cache: bytes, time and quality
python benchmark_inference.py --preset chat                      a cache that is kept: ten turns, shared prompts, disk
"""

from llama.host.packages import check_packages

if __name__ == "__main__":
    check_packages()

from llama import cli
from llama.host import console

if __name__ == "__main__":
    console.quiet_imports()

from llama.bench.single import benchmark_inference
from llama.cli.benchmark_inference import main

__all__ = ["benchmark_inference", "main"]

if __name__ == "__main__":
    cli.main(main)
