"""Published methods that drop keys, each as its score.

A class is what its paper says, and no more: what all of them share is in `scored.py`.
"""

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.kv_cache.attended import Attended
from llama.kv_cache.scored import SINKS, ScoredCache
from llama.ops import widest
from llama.rope import rotate
from llama.untrusted.files import read_regular
from llama.untrusted.json_object import parse_json


class RandomCache(ScoredCache, kind="random"):
    """Keep random keys: the control that a method has to beat."""

    def score(self, attended: Attended) -> Tensor:
        stream, size = torch.Generator("cpu").manual_seed(self.layer), (attended.keys.shape[2], attended.keys.shape[1])
        return torch.rand(size, generator=stream, dtype=torch.float32, device="cpu").to(attended.keys.device)


class KnormCache(ScoredCache, kind="knorm"):
    """Keep the keys with the smallest L2 norm.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression,
    https://arxiv.org/abs/2406.11430.
    """

    def score(self, attended: Attended) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(attended.keys[0], dim=-1)  # (kv_len, n_kv_heads)
        return -norms.T


class KeyDiffCache(ScoredCache, kind="keydiff"):
    """Keep the keys that differ most from the mean direction of all keys.

    Source: Park et al., KeyDiff, https://arxiv.org/abs/2504.15364.
    """

    def score(self, attended: Attended) -> Tensor:
        keys = attended.keys[0].transpose(0, 1)  # (n_kv_heads, kv_len, head_dim)
        return -F.cosine_similarity(keys, F.normalize(keys, dim=-1).mean(1, keepdim=True), dim=-1)


class LagKVCache(ScoredCache, kind="lagkv"):
    """Keep, of each 128 tokens, those whose keys and values vary most relative to the range of the next 128.

    The first 4 tokens and the last 128 to 255 stay. A prompt without two such groups keeps its last tokens. If the
    budget is smaller, the newest token stays, then the first ones, then the last ones: the authors' code
    (https://github.com/AI-Lab-China-Merchants-Bank/LagKV) drops none of these, and no token of a short prompt.
    Source: Liang et al., LagKV, https://arxiv.org/abs/2504.04704.
    """

    lag: ClassVar[int] = 128

    def score(self, attended: Attended) -> Tensor:
        _, kv_len, heads, _ = attended.keys.shape
        groups = (kv_len - SINKS) // self.lag
        scores = torch.ones(heads, kv_len, dtype=attended.keys.dtype, device=attended.keys.device)
        if groups >= 2:
            scores[:, SINKS : SINKS + (groups - 1) * self.lag] = self._ranks(attended, groups)
        scores[:, :SINKS] = torch.arange(SINKS + 1, 1, -1, device=scores.device)[:kv_len]
        scores[:, -1] = torch.inf
        return scores

    def _ranks(self, attended: Attended, groups: int) -> Tensor:
        """Return the rank of each key of all groups except the last, from 0 to below 1, (n_kv_heads, keys)."""
        varying = torch.zeros((), dtype=attended.keys.dtype, device=attended.keys.device)
        for held in (attended.keys, attended.values):
            grouped = held[0, SINKS : SINKS + groups * self.lag].transpose(0, 1)  # (n_kv_heads, groups x lag, head_dim)
            grouped = torch.unflatten(grouped, 1, (groups, self.lag))
            low, high = grouped.amin(2, keepdim=True)[:, 1:], grouped.amax(2, keepdim=True)[:, 1:]
            varying = varying + ((grouped[:, :-1] - low) / (high - low)).std(-1).softmax(-1)
        ranks = varying.argsort(dim=-1, stable=True).argsort(dim=-1)  # (n_kv_heads, groups - 1, lag)
        return ranks.flatten(1).to(varying.dtype) / self.lag


class SnapKVCache(ScoredCache, kind="snapkv"):
    """Keep the keys with the most attention of the prompt's last 64 queries, smoothed over 5 positions.

    The last 64 tokens stay. A mean budget below 74 has a shorter window, of queries and of tokens that stay, which
    leaves 10 keys or half of the budget to the scores. The window is a parameter of the authors' code, which requires
    a larger budget (https://github.com/FasterDecoding/SnapKV). Source: Li et al., https://arxiv.org/abs/2404.14469.
    """

    window: ClassVar[int] = 64
    kernel: ClassVar[int] = 5

    def score(self, attended: Attended) -> Tensor:
        window, mean = self.observed(attended, self.window), ScoredCache.budget(self, attended.rows.end)
        received = attended.attention(window).mean(1)[:, :-window]  # (n_heads, kv_len - window)
        if mean - window >= self.kernel:  # with fewer places, neighbours of the best key would be kept instead of it
            received = F.avg_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2)
        scores = by_kv_head(received, attended)
        return F.pad(scores, (0, window), value=torch.inf)

    def observed(self, attended: Attended, most: int) -> int:
        """Return the number of queries whose attention is read, up to `most`, and whose tokens stay."""
        mean = ScoredCache.budget(self, attended.rows.end)  # of all layers
        return min(most, max(mean // 2, mean - 2 * self.kernel, 1), attended.rows.width)


class PyramidKVCache(SnapKVCache, kind="pyramidkv"):
    """Keep by SnapKV's scores, more in the first layers and less in the last ones.

    The budget falls linearly with the layer, to a twentieth of the mean in the last one. If that is less than the
    window of 64, all layers have the mean, as in kvpress: `pyramidkv:0.25` is `snapkv:0.25` up to some 5,100 tokens.
    Source: Cai et al., PyramidKV, https://arxiv.org/abs/2406.02069.
    """

    beta: ClassVar[int] = 20

    def budget(self, positions: int) -> int:
        mean = super().budget(positions)
        least = mean // self.beta
        most = 2 * mean - least
        if most >= positions - self.window:
            most, least = positions - self.window, 2 * mean - (positions - self.window)
        if not self.window <= least <= most:
            return mean
        return round(most - self.layer * (most - least) / max(self.args.n_layers - 1, 1))


class AdaKVCache(SnapKVCache, kind="adakv"):
    """Keep by SnapKV's scores, compared across the heads of a layer: heads differ in how many keys they keep.

    Each head keeps its own window of the newest tokens, and at least a fifth of the budget.
    Source: Feng et al., Ada-KV, https://arxiv.org/abs/2407.11550.
    """

    own: ClassVar[float] = 0.2

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        heads, kv_len = scores.shape
        scores = scores.masked_fill(super().choose(scores, int(budget * self.own)), torch.inf)
        every = scores.T.reshape(1, -1)  # of equal scores the newer one is kept, in whichever head
        return super().choose(every, budget * heads).view(kv_len, heads).T


class ChunkKVCache(SnapKVCache, kind="chunkkv"):
    """Keep whole chunks of 20 tokens by the mean of SnapKV's scores, the same chunks in all heads.

    Of the chunk that fits only in part, each head keeps its best keys. A budget below 104 has shorter chunks: two fit
    beside the window. Source: Liu et al., ChunkKV, https://arxiv.org/abs/2502.00299.
    """

    chunk: ClassVar[int] = 20

    def score(self, attended: Attended) -> Tensor:
        scores, kv_len = super().score(attended), attended.keys.shape[1]
        stay = scores.isinf()
        above = 1 + scores.masked_fill(stay, 0).max()
        scores = scores.masked_fill(stay, above)
        beside = self.budget(attended.rows.end) - int(stay[0].sum())
        size = max(1, min(self.chunk, beside // 2))
        sums = torch.unflatten(F.pad(scores.mean(0), (0, -kv_len % size)), 0, (-1, size)).sum(1)
        sums[-1] *= size / (size - -kv_len % size)  # the last chunk may have fewer tokens
        ranks = sums.argsort(stable=True).argsort()
        # Beside the rank of a chunk, float32 would lose scores of long prompts.
        return ranks.repeat_interleave(size)[:kv_len] + widest(scores) / (2 * above)


class CriticalKVCache(SnapKVCache, kind="criticalkv"):
    """Keep half by SnapKV's scores, and half by these times the L1 norm of what a value may add to the layer's output.

    The window belongs to the first half, unless the budget shortens it: halves are then those of the other keys.
    Source: Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
    https://arxiv.org/abs/2502.03805.
    """

    least: ClassVar[float] = 1e-4  # attention: keys without any are ordered by their values

    def score(self, attended: Attended) -> Tensor:
        scores = super().score(attended)
        budget, window = self.budget(attended.rows.end), int(scores[0].isinf().sum())
        half = (budget if window == self.window else budget + window) // 2
        first = self.choose(scores, half) | scores.isinf()
        return ((scores + self.least) * by_kv_head(attended.output_norms(), attended)).masked_fill(first, torch.inf)


class FinchCache(SnapKVCache, kind="finch"):
    """Keep the keys with the most attention of the question: the last call of a prompt that is fed in several calls.

    A prompt in one call has a question of 64 tokens. A query's attention is multiplied by the number of keys before
    it. The question stays, or as much of it as in `snapkv`. Keys are not renumbered.
    Source: Corallo and Papotti, FINCH, https://arxiv.org/abs/2408.00167.
    """

    def score(self, attended: Attended) -> Tensor:
        rows, kv_len = attended.rows, attended.keys.shape[1]
        window = self.observed(attended, rows.width if rows.starts[0] else self.window)
        before = torch.arange(kv_len - window, kv_len, device=attended.keys.device)
        received = (attended.attention(window) * before[:, None]).mean(1)[:, :-window]
        return F.pad(by_kv_head(received, attended), (0, window), value=torch.inf)


class CurCache(ScoredCache, kind="cur"):
    """Keep the keys that, with their values, have the largest squared norms among 16 neighbours: approximate leverage.

    The first 4 tokens stay, or fewer: half of a budget below 8.
    Source: Sengupta et al., CurDKV, https://arxiv.org/abs/2509.15038.
    """

    near: ClassVar[int] = 16

    def score(self, attended: Attended) -> Tensor:
        wide, kv_len = torch.promote_types(attended.keys.dtype, torch.float32), attended.keys.shape[1]
        shares = []
        for held in (attended.keys, attended.values):
            squares = held[0].to(wide).square().sum(-1).T  # (n_kv_heads, kv_len)
            squares = torch.unflatten(F.pad(squares, (0, -kv_len % self.near)), 1, (-1, self.near))
            shares.append((squares / squares.sum(-1, keepdim=True)).flatten(1)[:, :kv_len])
        scores = shares[0] * shares[1]
        scores[:, : min(SINKS, self.budget(attended.rows.end) // 2)] = torch.inf
        return scores


class CompactorCache(ScoredCache, kind="compactor"):
    """Keep keys that are outliers before RoPE (their leverage), and those with the most attention without causal order.

    Both are z-scores, and leverage is multiplied by the share that is dropped. Leverage is exact, where the authors
    draw a random sketch. Attention is that of the last call's queries, in blocks of 256. The first 8 tokens and the
    last 4 stay, or half of a budget below 24. Source: Chari and Van Durme, Compactor, https://arxiv.org/abs/2507.08143.
    """

    block: ClassVar[int] = 256

    def score(self, attended: Attended) -> Tensor:
        end, keys = attended.rows.end, attended.keys[0]
        budget = self.budget(end)
        first, last = min(8, -(-budget // 3)), len(keys) - min(4, -(-budget // 6))
        scores = widest(torch.full((keys.shape[1], len(keys)), torch.inf, device=keys.device))
        if first < last:
            asked = self.attention_both_ways(attended, max(first, attended.rows.starts[0]), last)
            scores[:, first:last] = F.pad(asked, (last - first - asked.shape[1], 0))  # keys of earlier calls: the mean
            scores[:, first:last] += (1 - budget / end) * z_scores(self.leverage(keys[first:last], first))
        return scores

    def leverage(self, keys: Tensor, first: int) -> Tensor:
        """Return the leverage before RoPE of keys, (kv_len, n_kv_heads, head_dim), from position `first` on."""
        cos, sin = (table[first : first + len(keys)] for table in self.rope.up_to(first + len(keys), keys.device))
        return leverage_scores(rotate(widest(keys), (cos, -sin)).transpose(0, 1))

    def attention_both_ways(self, attended: Attended, first: int, last: int) -> Tensor:
        """Return the z-scores of the attention between positions first .. last - 1, (n_kv_heads, keys)."""
        start, wide = attended.rows.starts[0], torch.promote_types(attended.keys.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(attended.values[0, first:last].to(wide), dim=-1).T
        if not norms.numel():
            return norms
        queries, keys = attended.xq[0, first - start : last - start].to(wide), attended.keys[0, first:last].to(wide)
        queries = torch.unflatten(queries, 1, (len(norms), -1))
        parts = zip(torch.split(queries, self.block), torch.split(keys, self.block), strict=True)
        # as in the authors' code, products are not divided by the square root of head_dim
        received = [torch.einsum("qhsd,khd->hsqk", *part).softmax(-1).sum(2).mean(1) for part in parts]
        return z_scores(F.avg_pool1d(torch.cat(received, dim=1) * norms, 3, stride=1, padding=1))


class ExpectedAttentionCache(ScoredCache, kind="expected-attention"):
    """Keep the keys that the next 512 queries are expected to attend to, weighted by the norm of their values.

    Queries before RoPE are taken as normally distributed, with the mean and the covariance of the prompt's. The first
    4 tokens stay, or fewer: half of a budget below 8. Source: Devoto et al., Expected Attention, https://arxiv.org/abs/2510.00636.
    """

    future: ClassVar[int] = 512

    def score(self, attended: Attended) -> Tensor:
        wide = torch.promote_types(attended.keys.dtype, torch.float32)
        sinks, start = min(SINKS, self.budget(attended.rows.end) // 2), attended.rows.starts[0]
        keys, values = (held[0, sinks:].transpose(0, 1).to(wide) for held in (attended.keys, attended.values))
        heads, _, width = keys.shape
        queries = attended.queries_before_rope()[0, max(sinks - start, 0) :].transpose(0, 1).to(wide)
        queries = torch.unflatten(queries, 0, (heads, -1))
        mean = queries.mean(2, keepdim=True)  # (n_kv_heads, shared, 1, head_dim)
        apart = queries - mean
        covariance = apart.mT @ apart / apart.shape[2]
        turn = self._mean_rotation(attended.rows.end, keys)
        mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
        each = keys[:, None]  # (n_kv_heads, 1, kv_len, head_dim)
        scores = (each @ mean.mT)[..., 0] / width**0.5 + ((each @ covariance) * each).sum(-1) / width / 2
        return F.pad(scores.softmax(-1).mean(1) * torch.linalg.vector_norm(values, dim=-1), (sinks, 0), value=torch.inf)

    def _mean_rotation(self, start: int, like: Tensor) -> Tensor:
        """Return the mean of RoPE's rotations at the `future` positions from `start`, (head_dim, head_dim)."""
        cos, sin = (
            table[start : start + self.future, 0].mean(0) for table in self.rope.up_to(start + self.future, like.device)
        )
        turn = torch.zeros(len(cos), len(cos), dtype=cos.dtype, device=like.device)
        even = torch.arange(0, len(cos), 2, device=like.device)
        turn[even, even] = turn[even + 1, even + 1] = cos[::2]
        turn[even + 1, even] = sin[1::2]
        turn[even, even + 1] = -sin[1::2]
        return turn.to(like.dtype)


class TovaCache(ScoredCache, kind="tova"):
    """Keep, after each token, the keys with the most attention of the newest query, averaged over all heads.

    Source: Oren et al., Transformers are Multi-State RNNs, https://arxiv.org/abs/2401.06104.
    """

    every_step = True

    def score(self, attended: Attended) -> Tensor:
        scores = attended.attention(1)[:, 0].mean(0).repeat(attended.keys.shape[2], 1)
        scores[:, -1] = torch.inf
        return scores


class H2OCache(ScoredCache, kind="h2o"):
    """Keep, after each token, the newest half of the budget, and the keys with the most attention since they came.

    Source: Zhang et al., H2O, https://arxiv.org/abs/2306.14048.
    """

    every_step = True
    adds_up = True

    def score(self, attended: Attended) -> Tensor:
        return by_kv_head(attended.received(), attended)

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        scores = scores.clone()
        scores[:, -(budget - budget // 2) :] = torch.inf
        return super().choose(scores, budget)


class DuoAttentionCache(ScoredCache, kind="duo-attention"):
    """`duo-attention:SHARE` keeps all keys in this share of the heads, and the first 4 and last 256 in the others.

    As the prompt ends, each layer takes the heads whose last 64 queries attend most to what lies in between. A .json
    file may list each layer's heads, as the paper trains them. Source: Xiao et al., https://arxiv.org/abs/2410.10819.
    """

    form = "SHARE or FILE.json"
    recent: ClassVar[int] = 256
    most_bytes: ClassVar[int] = 1 << 16  # of a file: it is read once for each layer

    def configure(self, params: str) -> None:
        self.heads: list[int] | None = None
        super().configure("" if params.endswith(".json") else params)
        if params.endswith(".json"):
            try:
                every = parse_json(read_regular(Path(params), limit=self.most_bytes))
                if len(every) != self.args.n_layers:
                    raise ValueError(f"it has {len(every)}")
                self.heads = sorted({range(self.args.n_kv_heads).index(head) for head in every[self.layer]})
            except (OSError, ValueError, TypeError, LookupError) as error:
                what = f"{params} must have a list of KV heads for each of {self.args.n_layers} layers ({error})"
                raise ValueError(self._bad(what)) from error

    def score(self, attended: Attended) -> Tensor:
        return by_kv_head(attended.attention(SnapKVCache.window).mean(1), attended)

    def choose(self, scores: Tensor, budget: int) -> Tensor:
        kept = torch.ones_like(scores, dtype=torch.bool)
        kept[:, SINKS : -self.recent] = False
        best = scores[:, SINKS : -self.recent].sum(1).topk(self._full()).indices.tolist()
        kept[best if self.heads is None else self.heads] = True
        return kept

    def kept_of(self, prompt: int, end: int) -> int:
        full, short = self._full(), min(prompt, SINKS + self.recent)
        return full * prompt + (self.args.n_kv_heads - full) * short

    def _full(self) -> int:
        return self.part_of(self.args.n_kv_heads, least=1) if self.heads is None else len(self.heads)


def by_kv_head(scores: Tensor, attended: Attended) -> Tensor:
    """Return the mean of scores, (n_heads, ...), over the query heads that share a KV head, (n_kv_heads, ...)."""
    return torch.unflatten(scores, 0, (attended.keys.shape[2], -1)).mean(1)


def leverage_scores(x: Tensor, ridge: float = 0.01) -> Tensor:
    """Return the statistical leverage of vectors less their mean, (groups, n, width), in their group: (groups, n).

    It is between 0 and 1, and rounded to 9 decimals: two vectors have equal leverage, up to the rounding of `solve`.
    """
    x = x - x.mean(1, keepdim=True)
    gram = x.mT @ x + ridge * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    solved: Tensor = torch.linalg.solve(gram, x.mT)
    return (x * solved.mT).sum(-1).round(decimals=9)


def z_scores(x: Tensor) -> Tensor:
    """Return x less its mean, divided by its standard deviation, or by 1e-6 if that is larger."""
    apart = x - x.mean()
    return apart / apart.square().mean().sqrt().clamp(min=1e-6)
