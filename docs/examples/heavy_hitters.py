import torch

from llama.kv_cache import ScoredCache


class HeavyHitters(ScoredCache, kind="heavy_hitters"):
    every_step = adds_up = True

    def score(self, attended):  # (n_kv_heads, kv_len)
        return attended.received().unflatten(0, (self.args.n_kv_heads, -1)).mean(1)

    def choose(self, scores, budget):
        newest = torch.zeros_like(scores)
        newest[:, -(budget - budget // 2) :] = torch.inf
        return super().choose(scores + newest, budget)
