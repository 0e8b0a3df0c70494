"""Mistakes put into the answer of the exercise, each as lines of text replaced in a tree that course.make made.

A plant is (what the grader must call it, file, old text, new text, ...). They are written as a student would write them,
not as the grader looks for them.
"""

from pathlib import Path
from typing import NamedTuple

MODEL, LOOP = "llama/model.py", "llama/generation.py"
STATIC, CONTRACT, OPS = "llama/kv_cache/static.py", "llama/kv_cache/contract.py", "llama/ops.py"
RUNS = "        output = self.ops.attend(xq, keys, values, start_pos, visible)\n"
ASKS = "            keys, values = self.cache.update(start_pos, xk if self.cache.unrotated else rotated, xv)\n"
FEEDS = "    prev_pos = [pos - 1 for pos in batch.cur_pos] if model.kv_caching else [0] * len(batch.cur_pos)\n"
WRITES = "        self._write(start_pos, xk, xv)\n        return self.keys[:bsz, :end], self.values[:bsz, :end]\n"
KEYS = "            self.keys[:bsz, start_pos : start_pos + seqlen] = xk\n"
VALUES = "            self.values[:bsz, start_pos : start_pos + seqlen] = xv\n"
ROOM = """        if not self.fits(bsz, end):
            check_room(bsz, end, self.args)
            self._grow(bsz, end, like=xk)
"""
FREES = """        for name in self._buffers:
            self._buffers[name] = None
"""
BODY = f"""        ends = self.check(start_pos, xk, xv)
        bsz, end = len(ends), max(ends)
{ROOM}        assert self.keys is not None
        assert self.values is not None
{WRITES}"""


class Plant(NamedTuple):
    """A mistake, or another way to be right: its name, what must be found, and (file, old, new) for each change."""

    name: str
    found: tuple[str, ...]
    changes: tuple[tuple[str, str, str], ...]

    def put_into(self, tree: Path) -> None:
        for file, old, new in self.changes:
            text = (tree / file).read_text("utf-8")
            assert text.count(old) == 1, f"{self.name}: {file} has the lines {text.count(old)} times"
            (tree / file).write_text(text.replace(old, new), encoding="utf-8")


def written(keys: str, values: str) -> tuple[tuple[str, str, str], ...]:
    """Other lines that write, where all rows stand at one position."""
    return (CONTRACT, KEYS, f"            {keys}\n"), (CONTRACT, VALUES, f"            {values}\n")


def one(found: str, *changes: tuple[str, str, str], name: str = "") -> Plant:
    return Plant(name or found, (found,), changes)


# A cache that grows by torch.cat, under names of its own.
OWN_NAMES = (
    (STATIC, "from torch import Tensor\n", "import torch\nfrom torch import Tensor\n"),
    (
        STATIC,
        "    preallocates = True\n",
        """    past = None

    @property
    def nbytes(self) -> int:
        return 0 if self.past is None else sum(tensor.nbytes for tensor in self.past)

    def free(self) -> None:
        super().free()
        self.past = None
""",
    ),
)
BY_CAT = """        self.check(start_pos, xk, xv)
        starts = [start_pos] * len(xk) if isinstance(start_pos, int) else list(start_pos)
        length = max(starts) + xk.shape[1]
        check_room(len(xk), length, self.args)
        if max(starts) == 0 or self.past is None:
            self.past = xk, xv
        elif len(set(starts)) == 1:
            old_k, old_v = self.past
            self.past = torch.cat((old_k[:, : starts[0]], xk), dim=1), torch.cat((old_v[:, : starts[0]], xv), dim=1)
        else:
            grown = []
            for old, new in zip(self.past, (xk, xv)):
                missing = new.new_zeros(len(new), max(length - old.shape[1], 0), *new.shape[2:])
                more = torch.cat((old, missing), dim=1)
                for row, start in enumerate(starts):
                    more[row, start : start + new.shape[1]] = new[row]
                grown.append(more)
            self.past = tuple(grown)
        return self.past
"""


def by_cat(*changes: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    """The cache that grows by torch.cat, with something of it changed."""
    body = BY_CAT
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    return *OWN_NAMES, (STATIC, BODY, body)


MISTAKES = (
    one("index-late", *written(
        "self.keys[:bsz, start_pos + 1 : start_pos + 1 + seqlen] = xk[:, : self.keys.shape[1] - start_pos - 1]",
        "self.values[:bsz, start_pos + 1 : start_pos + 1 + seqlen] = xv[:, : self.keys.shape[1] - start_pos - 1]",
    )),
    one("index-late", *written(
        "self.keys[:bsz, start_pos + (start_pos > 0) : start_pos + (start_pos > 0) + seqlen] = xk",
        "self.values[:bsz, start_pos + (start_pos > 0) : start_pos + (start_pos > 0) + seqlen] = xv",
    ), name="index-late, in steps alone"),
    one("index-early", *written(
        "self.keys[:bsz, max(start_pos - 1, 0) : max(start_pos - 1, 0) + seqlen] = xk",
        "self.values[:bsz, max(start_pos - 1, 0) : max(start_pos - 1, 0) + seqlen] = xv",
    )),
    one("index-zero", *written("self.keys[:bsz, :seqlen] = xk", "self.values[:bsz, :seqlen] = xv")),
    one("wrong-axis", *written(
        "self.keys[:, bsz, start_pos : start_pos + seqlen] = xk", "self.values[:, bsz, start_pos : start_pos + seqlen] = xv"
    )),
    one("wrong-axis", *by_cat(("dim=1), torch", "dim=2), torch")), name="wrong-axis, by cat"),
    one("rows-mixed", *written(
        "self.keys[:bsz, start_pos : start_pos + seqlen] = xk.flip(0)",
        "self.values[:bsz, start_pos : start_pos + seqlen] = xv.flip(0)",
    )),
    one("first-row-only", *written(
        "self.keys[0, start_pos : start_pos + seqlen] = xk[0]", "self.values[0, start_pos : start_pos + seqlen] = xv[0]"
    )),
    one("first-row-only", (STATIC, "return self.keys[:bsz, :end], self.values[:bsz, :end]",
        "return self.keys[:1, :end].expand(bsz, -1, -1, -1), self.values[:1, :end].expand(bsz, -1, -1, -1)"),
        name="first-row-only, read"),
    one("shared-by-layers", (MODEL, "        self.caches = self.caches  # which are told of the same rows\n",
        "        self.caches = [self.caches[0]] * args.n_layers\n")),
    one("swapped", (MODEL, ASKS, ASKS.replace("keys, values =", "values, keys ="))),
    one("swapped", (STATIC, "self._write(start_pos, xk, xv)", "self._write(start_pos, xv, xk)"), name="swapped, written"),
    one("values-forgotten", (CONTRACT, VALUES, "")),
    one("values-forgotten", (CONTRACT, VALUES, "            self.values[:] = 0\n" + VALUES), name="values-forgotten, old ones"),
    one("keys-forgotten", (CONTRACT, KEYS, "")),
    one("past-ignored", (MODEL, RUNS, "        keys, values = rotated, xv\n" + RUNS.replace("start_pos", "0"))),
    one("newest-hidden", (STATIC, WRITES, WRITES.replace(":end]", ": end - 1 or 1]"))),
    one("newest-hidden", (STATIC, WRITES,
        "        old = self.keys[:bsz, : end - 1 or 1].clone(), self.values[:bsz, : end - 1 or 1].clone()\n"
        + WRITES.partition("        return")[0] + "        return old if end > xk.shape[1] else (xk, xv)\n"),
        name="newest-hidden, read first"),
    one("unwritten-read", (STATIC, WRITES, WRITES.replace("[:bsz, :end]", "[:bsz]")),
        (MODEL, RUNS, "        visible = None if start_pos == 0 else torch.ones(xq.shape[1], keys.shape[1], dtype=torch.bool)\n"
         + RUNS)),
    one("heads-order", (MODEL, RUNS,
        "        if self.kv_caching:\n            shared = xq.shape[2] // keys.shape[2]\n"
        "            keys, values = keys.repeat(1, 1, shared, 1), values.repeat(1, 1, shared, 1)\n" + RUNS)),
    one("mask-forgotten", (OPS, "if seqlen > 1 and start_pos > 0:", "if False:"),
        (OPS, "        elif seqlen > 1:", "        elif seqlen > 1 and start_pos == 0:")),
    one("mask-at-first-key", (OPS, "if seqlen > 1 and start_pos > 0:", "if False:")),
    one("rope-start-ignored", ("llama/rope.py", "cos[None, start_pos : start_pos + seqlen], sin[None, start_pos : start_pos + seqlen]",
        "cos[None, :seqlen], sin[None, :seqlen]")),
    one("rope-twice", (MODEL, ASKS, ASKS.replace("xk if self.cache.unrotated else rotated", "apply_rotary_emb(xq, rotated, freqs_cis)[1]"))),
    one("rope-twice", (MODEL, RUNS,
        "        if self.kv_caching and xq.shape[1] == 1 and isinstance(start_pos, int):\n"
        "            keys = apply_rotary_emb(xq, keys, freqs_cis)[1]\n" + RUNS), name="rope-twice, at read",),
    one("rope-missing", (MODEL, ASKS, ASKS.replace("xk if self.cache.unrotated else rotated", "xk"))),
    one("rope-wrong", (MODEL, ASKS, "            rotated = apply_rotary_emb(xq, rotated, freqs_cis)[1] if xq.shape[1] == 1 else rotated\n" + ASKS)),
    one("rows-at-one-position", (STATIC, WRITES, WRITES.replace("start_pos,", "start_pos if isinstance(start_pos, int) else start_pos[0],"))),
    one("rows-at-one-position", (CONTRACT, "        if isinstance(start_pos, int):\n            self.keys", "        if True:\n            self.keys"),
        name="rows-at-one-position, an int alone"),
    one("stale-text", *by_cat(("max(starts) == 0 or ", ""), ("[:, : starts[0]]", ""))),
    one("own-counter", (STATIC, "        ends = self.check(start_pos, xk, xv)\n",
        "        self.count = getattr(self, 'count', 0) if start_pos else 0\n"
        "        if isinstance(start_pos, int):\n            start_pos = self.count\n"
        "            self.count += xk.shape[1]\n        ends = self.check(start_pos, xk, xv)\n")),
    one("rows-do-not-grow", (STATIC, ROOM, ROOM.replace("self.fits(bsz, end)", "self.fits(0, end)")),),
    one("length-does-not-grow", (STATIC, ROOM, ROOM.replace("self.fits(bsz, end)", "self.fits(bsz, 0)"))),
    one("overflow-silent", (STATIC, ROOM, ROOM.replace("not self.fits(bsz, end)", "not self.fits(bsz, min(end, self.args.max_seq_len))"))),
    one("overflow-silent", (STATIC, ROOM, "        if end > self.args.max_seq_len:\n            start_pos, end = 0, self.args.max_seq_len\n" + ROOM),
        name="overflow-silent, wrapped"),
    Plant("limits-ignored", ("limits-ignored", "overflow-silent"), ((STATIC, "            check_room(bsz, end, self.args)\n", ""),)),
    one("cached-fed-prefix", (LOOP, FEEDS, "    prev_pos = [0] * len(batch.cur_pos)\n")),
    one("cached-fed-wrong", (LOOP, FEEDS, FEEDS.replace("pos - 1", "pos - 2"))),
    one("uncached-fed-newest", (LOOP, FEEDS, "    prev_pos = [pos - 1 for pos in batch.cur_pos]\n")),
    one("uncached-changed", (MODEL, "            keys, values, visible = rotated, xv, None\n", "            keys, values, visible = rotated, xk, None\n")),
    Plant("switch-first-layer", ("switch-first-layer", "written-while-off"), (
        (MODEL, "            for layer in self.blocks:\n                layer.attention.kv_caching = value\n", "            self.first_attention.kv_caching = value\n"),)),
    one("switch-not-put-back", (LOOP, "        model.kv_caching = caching\n        if caches", "        if caches")),
    one("switch-not-put-back", (LOOP, "                back()\n\n\ndef _switch", "                model.free_cache()\n        with model.ownership.acting():\n            back()\n\n\ndef _switch"),
        name="switch-not-put-back, after an error"),
    one("written-while-off", (MODEL, "            keys, values, visible = rotated, xv, None\n",
        "            self.cache.update(start_pos, rotated, xv)\n            keys, values, visible = rotated, xv, None\n")),
    one("kept-after-generation", (LOOP, "        model.free_cache()\n        model.kv_caching = caching\n", "        model.kv_caching = caching\n")),
    one("kept-after-error", (LOOP, "        model.free_cache()\n        model.kv_caching = caching\n", "        model.kv_caching = caching\n"),
        (LOOP, "            yield\n        finally:\n            model.batch_rows", "            yield\n            with model.ownership.acting():\n                model.free_cache()\n        finally:\n            model.batch_rows")),
    one("wrong-dtype", (CONTRACT, "torch.empty(tuple(shape), dtype=dtype", "torch.empty(tuple(shape), dtype=torch.float16"),
        (CONTRACT, "            if new.dtype != held.dtype or", "            if"),
        (STATIC, WRITES, WRITES.replace("xk, xv", "xk.half(), xv.half()").replace(":end]", ":end].type_as(xk)"))),
    one("wrong-dtype", (CONTRACT, "torch.empty(tuple(shape), dtype=dtype", "torch.empty(tuple(shape)"),
        (CONTRACT, "            if new.dtype != held.dtype or", "            if"),
        (STATIC, WRITES, WRITES.replace(":end]", ":end].type_as(xk)")), name="wrong-dtype, that of torch.zeros"),
    one("heads-expanded", (MODEL, ASKS, ASKS.replace("xk if self.cache.unrotated else rotated, xv",
        "*(x.repeat_interleave(xq.shape[2] // xk.shape[2], 2) for x in (rotated, xv))")),
        (MODEL, "self.cache = KVCache.of(args.share", "self.cache = KVCache.of(replace(args, n_kv_heads=args.n_heads).share"),
        (MODEL, "from collections.abc", "from dataclasses import replace\nfrom collections.abc")),
    one("limits-sized", (STATIC, "            self._grow(bsz, end, like=xk)\n",
        "            self._grow(max(bsz, self.args.max_batch_size or 0), self.args.max_seq_len, like=xk)\n")),
    one("gradients-kept", *by_cat(("        self.check(start_pos, xk, xv)\n", ""))),
    one("todo-left", (STATIC, BODY, '        raise NotImplementedError("TODO 3")\n')),
    one("loop-todo-left", (LOOP, FEEDS, '    if model.kv_caching:\n        raise NotImplementedError("TODO 2")\n    prev_pos = [0] * len(batch.cur_pos)\n')),
    one("unknown", (MODEL, ASKS, ASKS + "            values = values * 1.01\n")),
)  # fmt: skip

# Attention by einsum, with a mask of its own; the positions of queries as a tensor.
EINSUM = """        starts = torch.tensor([start_pos] * len(xq) if isinstance(start_pos, int) else start_pos)
        at = (starts[:, None] + torch.arange(xq.shape[1]))[:, :, None]  # (bsz, seqlen, 1)
        k, v = (x.repeat_interleave(xq.shape[2] // x.shape[2], dim=2) for x in (keys, values))
        scores = torch.einsum("bqhd,bkhd->bhqk", xq, k) / self.head_dim**0.5
        scores = scores.masked_fill((torch.arange(k.shape[1]) > at)[:, None], -torch.inf)
        output = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
"""

# Solutions of another shape, which are right, and what is remarked.
RIGHT = (
    Plant("the answer", (), ()),
    Plant("torch.cat, under other names", ("grows-by-copying", "holds-what-it-was-given"), by_cat()),
    Plant("einsum", (), ((MODEL, RUNS, EINSUM),)),
    Plant("einsum and torch.cat", ("grows-by-copying",), (
        (MODEL, RUNS, EINSUM), *by_cat(("self.past = xk, xv", "self.past = xk.clone(), xv.clone()")))),
    Plant("a loop over rows", (), ((STATIC, WRITES, """        starts = [start_pos] * bsz if isinstance(start_pos, int) else start_pos
        for row, start in enumerate(starts):
            self.keys[row, start : start + xk.shape[1]] = xk[row]
            self.values[row].narrow(0, start, xk.shape[1]).copy_(xv[row])
        return self.keys[:bsz, :end], self.values[:bsz, :end]
"""),)),
    Plant("the loop by arithmetic", (), ((LOOP, FEEDS,
        "    prev_pos = [(end - 1) * int(model.kv_caching) for end in batch.cur_pos]\n"),)),
    Plant("heads repeated after reading", (), ((MODEL, RUNS,
        "        keys, values = (x.repeat_interleave(xq.shape[2] // x.shape[2], dim=2) for x in (keys, values))\n" + RUNS),)),
)  # fmt: skip
