import torch

from llama.kv_cache import KVCache
from llama.kv_cache.contract import query_positions
from llama.limits import check_room, row_starts


class EverySecond(KVCache, kind="every_second"):
    lossless = False  # it does not give back all that it was given

    def __init__(self, args):
        super().__init__(args)
        self.register_buffer("positions", None, persistent=False)  # (rows, slots); -1: the slot holds nothing

    def configure(self, params):  # every_second:N
        self.recent = int(params or 64) if params.isdecimal() or not params else 0
        if self.recent < 1:
            raise ValueError(f"kv_cache={self.args.kv_cache!r}: N counts positions, from 1 on, such as every_second:64")

    def predicted_bytes(self, *, rows, length, itemsize):
        old = max(length - self.recent, 0)
        return rows * (length - old // 2) * (self.position_bytes(itemsize) + 4)

    def update(self, start_pos, xk, xv):
        check_room(len(xk), max(self.check(start_pos, xk, xv)), self.args)
        starts, real = row_starts(start_pos, len(xk)), self.batch_rows.real(*xk.shape[:2])
        first, real = torch.tensor([starts, real], device=xk.device)[..., None].int()  # (bsz, 1) each
        steps = torch.arange(xk.shape[1], device=xk.device).int()
        new = torch.where(steps < real, first + steps, -1)  # (bsz, seqlen); what pads a row is nowhere
        if any(starts):  # else a text begins, and nothing is held
            old = self.positions[: len(xk)]
            new = torch.cat((old.masked_fill(old >= first, -1), new), dim=1)
            xk, xv = torch.cat((self.keys[: len(xk)], xk), dim=1), torch.cat((self.values[: len(xv)], xv), dim=1)
        self.seen = new  # (bsz, kv_len): where the keys stand that are returned
        kept = (new >= 0) & ((new % 2 == 0) | (new >= first + real - self.recent))
        slots = kept.int().argsort(dim=1, descending=True, stable=True)[:, : kept.sum(1).max()]
        rows = torch.arange(len(xk), device=xk.device)[:, None]
        self.keys, self.values, self.positions = xk[rows, slots], xv[rows, slots], new.where(kept, -1)[rows, slots]
        return xk, xv

    def key_positions(self):
        return self.seen

    def visible(self, start_pos, seqlen):
        keys, queries = self.seen[:, None], query_positions(start_pos, seqlen, self.seen.device)
        return (keys >= 0) & (keys <= queries) & ((keys % 2 == 0) | (keys > queries - self.recent))

    def rewind(self, position):
        return self.positions is None or int(self.positions.max()) < max(position + 1, self.recent)
