"""Exact mode: the bits of logits depend only on the tokens before them; set `model.exact = True`."""


def __getattr__(name: str) -> object:
    if name != "slices_of":
        raise AttributeError(f"module 'llama.exact' has no attribute {name!r}")
    from llama.exact.switch import slices_of  # deferred: a comparison of a model with itself needs no operations

    return slices_of
