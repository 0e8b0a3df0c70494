"""How well a model predicts, with and without a kind of cache."""
