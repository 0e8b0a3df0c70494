"""Exact mode: the bits of logits depend only on the tokens before them; set `model.exact = True`."""
