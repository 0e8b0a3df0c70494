"""Certifies that switching the KV cache changes nothing: `python -m llama.verify`."""
