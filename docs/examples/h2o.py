import torch

from llama.kv_cache import KVCache
from llama.kv_cache.contract import last_call, query_positions


class HeavyHitters(KVCache, kind="h2o"):
    """`h2o:K` stores K positions of a row: the last K / 2, and of those before them the ones with the most attention.

    Source: Zhang et al., H2O, https://arxiv.org/abs/2306.14048. All heads of a layer store the same positions.
    """

    lossless = False

    def __init__(self, *of):
        super().__init__(*of)
        self.positions = None  # (rows, slots); -1: the slot is empty
        self.mass = None  # (rows, slots): the attention that each key has received

    def configure(self, params):
        self.budget = int(params or 256) if params.isdecimal() or not params else 0
        if self.budget < 2:
            raise ValueError(f"kv_cache={self.args.kv_cache!r}: K counts positions, from 2 on, such as h2o:256")

    def predicted_bytes(self, *, prompts, ends, reserved, itemsize):
        steps = max(end - prompt for prompt, end in zip(prompts, ends, strict=True))
        rows, slots = last_call(prompts, ends)[0], min(max(prompts) + steps, self.budget)
        return rows * slots * (self.position_bytes(itemsize) + 4 + 4)

    def update(self, rows, xk, xv):
        self.check(rows, xk, xv)
        self.args.check_room(len(xk), rows.end)
        first, real = torch.tensor([rows.starts, rows.lengths], device=xk.device)[..., None].int()  # (bsz, 1) each
        steps = torch.arange(xk.shape[1], device=xk.device).int()
        new = torch.where(steps < real, first + steps, -1)  # (bsz, seqlen); padding has no position
        received = torch.zeros(new.shape, device=xk.device)
        if any(rows.starts):  # else a text begins, and nothing is stored
            old = self.positions[: len(xk)]
            new = torch.cat((old.masked_fill(old >= first, -1), new), dim=1)
            received = torch.cat((self.mass[: len(xk)], received), dim=1)
            xk, xv = torch.cat((self.keys[: len(xk)], xk), dim=1), torch.cat((self.values[: len(xv)], xv), dim=1)
        self.keys, self.values, self.positions, self.mass = xk, xv, new, received  # all, until `observe`
        return xk, xv

    def observe(self, attended):
        """Add the attention that every key received, and drop the keys over the budget."""
        for row, count in enumerate(attended.rows.lengths):
            self.mass[row] += attended.row(row).attention(count).sum((0, 1))
        ends = self.positions.amax(1, keepdim=True) + 1
        recent = self.positions >= ends - self.budget // 2
        score = self.mass.masked_fill(recent, torch.inf).masked_fill(self.positions < 0, -torch.inf)
        kept = score.topk(min(self.budget, score.shape[1])).indices.sort().values  # (bsz, slots), in their old order
        rows = torch.arange(len(kept), device=kept.device)[:, None]
        for name, held in self.held().items():
            setattr(self, name, held[rows, kept])

    def key_positions(self):
        return self.positions

    def visible(self, rows, xq):
        keys, queries = self.positions[:, None], query_positions(rows, self.positions.device)
        return (keys >= 0) & (keys <= queries)

    def truncate(self, position):
        return False  # dropped keys are gone, and the tokens after `position` have changed the sums of the others
