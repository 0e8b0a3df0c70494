import torch

from llama.kv_cache import KVCache
from llama.kv_cache.contract import query_positions


class HeavyHitters(KVCache, kind="h2o"):
    """`h2o:K` keeps K positions of a row: the last K / 2, and of those before the ones that drew the most attention.

    Source: Zhang et al., H2O, https://arxiv.org/abs/2306.14048. All heads of a layer keep the same positions.
    """

    lossless = False
    weighs = True  # so `weigh` is called after each update

    def __init__(self, args):
        super().__init__(args)
        self.register_buffer("positions", None, persistent=False)  # (rows, slots); -1: the slot holds nothing
        self.register_buffer("mass", None, persistent=False)  # (rows, slots): the attention that each key drew so far

    def configure(self, params):
        self.budget = int(params or 256) if params.isdecimal() or not params else 0
        if self.budget < 2:
            raise ValueError(f"kv_cache={self.args.kv_cache!r}: K counts positions, from 2 on, such as h2o:256")

    def predicted_bytes(self, *, rows, length, itemsize):
        return rows * min(length, self.budget) * (self.position_bytes(itemsize) + 4 + 4)

    def update(self, rows, xk, xv):
        self.check(rows, xk, xv)
        self.args.check_room(len(xk), rows.end)
        first, real = torch.tensor([rows.starts, rows.kept], device=xk.device)[..., None].int()  # (bsz, 1) each
        steps = torch.arange(xk.shape[1], device=xk.device).int()
        new = torch.where(steps < real, first + steps, -1)  # (bsz, seqlen); what pads a row is nowhere
        drawn = torch.zeros(new.shape, device=xk.device)
        if any(rows.starts):  # else a text begins, and nothing is held
            old = self.positions[: len(xk)]
            new = torch.cat((old.masked_fill(old >= first, -1), new), dim=1)
            drawn = torch.cat((self.mass[: len(xk)], drawn), dim=1)
            xk, xv = torch.cat((self.keys[: len(xk)], xk), dim=1), torch.cat((self.values[: len(xv)], xv), dim=1)
        self.keys, self.values, self.positions, self.mass = xk, xv, new, drawn  # all, until they are weighed
        return xk, xv

    def weigh(self, mass):
        """Add what every key drew, (bsz, n_kv_heads, kv_len), and drop what passes the budget."""
        self.mass = self.mass + mass.sum(1).float()
        ends = self.positions.amax(1, keepdim=True) + 1
        recent = self.positions >= ends - self.budget // 2
        score = self.mass.masked_fill(recent, torch.inf).masked_fill(self.positions < 0, -torch.inf)
        kept = score.topk(min(self.budget, score.shape[1])).indices.sort().values  # (bsz, slots), as they stood
        rows = torch.arange(len(kept), device=kept.device)[:, None]
        for name, held in list(self._buffers.items()):
            self._buffers[name] = held[rows, kept]

    def key_positions(self):
        return self.positions

    def visible(self, rows, xq):
        keys, queries = self.positions[:, None], query_positions(rows, self.positions.device)
        return (keys >= 0) & (keys <= queries)

    def rewind(self, position):
        return False  # what was dropped is gone, and the tokens behind `position` have weighed the others
