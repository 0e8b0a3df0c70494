from llama.kv_cache import ScoredCache


class AcrossHeads(ScoredCache, kind="across_heads"):
    def score(self, attended):
        return -attended.keys[0].norm(dim=-1).T  # (n_kv_heads, kv_len)

    def choose(self, scores, budget):
        every = scores.reshape(1, -1)  # the keys of all heads compete
        return super().choose(every, budget * len(scores)).view_as(scores)
