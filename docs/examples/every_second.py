import torch

from llama.kv_cache import KVCache
from llama.kv_cache.contract import last_call, query_positions


class EverySecond(KVCache, kind="every_second"):
    lossless = False  # it drops keys and values

    def __init__(self, *of):
        super().__init__(*of)
        self.positions = None  # (rows, slots); -1: the slot is empty

    def configure(self, params):  # every_second:N
        self.recent = int(params or 64) if params.isdecimal() or not params else 0
        if self.recent < 1:
            raise ValueError(f"kv_cache={self.args.kv_cache!r}: N counts positions, from 1 on, such as every_second:64")

    def predicted_bytes(self, *, prompts, ends, reserved, itemsize):
        rows, end = last_call(prompts, ends)
        return rows * (end - max(end - self.recent, 0) // 2) * (self.position_bytes(itemsize) + 4)

    def update(self, rows, xk, xv):
        self.check(rows, xk, xv)
        self.args.check_room(len(xk), rows.end)
        first, real = torch.tensor([rows.starts, rows.lengths], device=xk.device)[..., None].int()  # (bsz, 1) each
        steps = torch.arange(xk.shape[1], device=xk.device).int()
        new = torch.where(steps < real, first + steps, -1)  # (bsz, seqlen); padding has no position
        if any(rows.starts):  # else a text begins, and nothing is stored
            old = self.positions[: len(xk)]
            new = torch.cat((old.masked_fill(old >= first, -1), new), dim=1)
            xk, xv = torch.cat((self.keys[: len(xk)], xk), dim=1), torch.cat((self.values[: len(xv)], xv), dim=1)
        self._seen = new  # (bsz, kv_len): the positions of the returned keys
        kept = (new >= 0) & ((new % 2 == 0) | (new >= first + real - self.recent))
        slots = kept.int().argsort(dim=1, descending=True, stable=True)[:, : kept.sum(1).max()]
        each = torch.arange(len(xk), device=xk.device)[:, None]
        self.keys, self.values, self.positions = xk[each, slots], xv[each, slots], new.where(kept, -1)[each, slots]
        return xk, xv

    def key_positions(self):
        return self._seen

    def visible(self, rows, xq):
        keys, queries = self._seen[:, None], query_positions(rows, self._seen.device)
        return (keys >= 0) & (keys <= queries) & ((keys % 2 == 0) | (keys > queries - self.recent))

    def truncate(self, position):
        return self.positions is None or int(self.positions.max()) < max(position + 1, self.recent)
