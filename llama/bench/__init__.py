"""Measures generation with and without the KV cache; `llama.bench.single.benchmark_inference` is the way in."""
