"""A page on which one watches a KV cache at work: a real generation, recorded step by step, as one file of HTML."""
