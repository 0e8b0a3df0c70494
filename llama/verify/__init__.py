"""Certifies that switching the KV cache changes nothing: `llama-kv verify`."""
