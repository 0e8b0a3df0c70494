"""Llama on one page: token ids in, logits out, in float64, one position and one head at a time.

Written from the papers, to be read beside them, and to be what faster programs must agree with. So it has none of what
makes them fast: no cache, no batch, no mask, no tables. It knows the names and layouts of Meta's checkpoints, and
nothing of the package that it checks. A vector is one position's; lists go over positions.

Sources: Llama https://arxiv.org/abs/2302.13971, and what it is made of: RMSNorm https://arxiv.org/abs/1910.07467,
SwiGLU https://arxiv.org/abs/2002.05202, rotary positions https://arxiv.org/abs/2104.09864, grouped queries
https://arxiv.org/abs/2305.13245; longer texts, Llama 3.1: https://arxiv.org/abs/2407.21783 and its model card.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Weights = Mapping[str, np.ndarray]
Scaling = Mapping[str, float] | Sequence[float]  # Llama 3.1's four numbers, or one divisor for each pair


def logits(
    weights: Weights,
    ids: Sequence[int],
    *,
    n_heads: int,
    n_kv_heads: int,
    norm_eps: float,
    rope_theta: float,
    rope_scaling: Scaling | None = None,
    rotations: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return the logits that follow each token, (len(ids), vocab).

    Without an "output.weight" the head is the embedding. `rotations`, one for each position as `rotation` makes them,
    take the place of the exact ones: those of a program that rounds its angles, where all else is to be compared.
    """
    weights = {name: np.asarray(weight, dtype=np.float64) for name, weight in weights.items()}
    embedding = weights["tok_embeddings.weight"]  # (vocab, dim)
    head = weights.get("output.weight", embedding)
    if rotations is None:
        head_dim = len(weights["layers.0.attention.wq.weight"]) // n_heads
        freqs = frequencies(head_dim, rope_theta, rope_scaling)
        rotations = [rotation(position, freqs) for position in range(len(ids))]

    xs = [embedding[token] for token in ids]  # of (dim,)
    n_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for layer in range(n_layers):
        start = f"layers.{layer}."
        w = {name.removeprefix(start): weight for name, weight in weights.items() if name.startswith(start)}
        normed = [rms_norm(x, w["attention_norm.weight"], norm_eps) for x in xs]
        gathered = attention(normed, rotations, w, n_heads, n_kv_heads)
        xs = [x + new for x, new in zip(xs, gathered, strict=True)]
        xs = [x + feed_forward(rms_norm(x, w["ffn_norm.weight"], norm_eps), w) for x in xs]
    return np.stack([head @ rms_norm(x, weights["norm.weight"], norm_eps) for x in xs])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale x to a root mean square of one, then each of its numbers by a learned weight."""
    return weight * x / math.sqrt(np.mean(x**2) + eps)


def feed_forward(x: np.ndarray, w: Weights) -> np.ndarray:
    """Apply the gated MLP, SwiGLU."""
    gate = w["feed_forward.w1.weight"] @ x  # (ffn_dim,)
    silu = gate / (1 + np.exp(-gate))
    return w["feed_forward.w2.weight"] @ (silu * (w["feed_forward.w3.weight"] @ x))


def attention(
    xs: list[np.ndarray], rotations: Sequence[np.ndarray], w: Weights, n_heads: int, n_kv_heads: int
) -> list[np.ndarray]:
    """Let each position take from itself and those before it, in each head by another measure."""
    queries, keys, values = [], [], []
    for x, turn in zip(xs, rotations, strict=True):
        queries.append(rotate((w["attention.wq.weight"] @ x).reshape(n_heads, -1), turn))  # (n_heads, head_dim)
        keys.append(rotate((w["attention.wk.weight"] @ x).reshape(n_kv_heads, -1), turn))  # (n_kv_heads, head_dim)
        values.append((w["attention.wv.weight"] @ x).reshape(n_kv_heads, -1))

    outputs = []
    for position, query in enumerate(queries):
        heads = []
        for head in range(n_heads):
            group = head // (n_heads // n_kv_heads)  # neighbouring query heads share keys and values
            seen = range(position + 1)
            scores = [query[head] @ keys[past][group] / math.sqrt(query[head].size) for past in seen]
            shares = [math.exp(score - max(scores)) for score in scores]  # all divided by the largest: no overflow
            heads.append(sum(shares[past] / sum(shares) * values[past][group] for past in seen))
        outputs.append(w["attention.wo.weight"] @ np.concatenate(heads))
    return outputs


def rotate(heads: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Turn each pair of neighbours in each head, (heads, head_dim), as a point x[2i] + j x[2i + 1] of the plane."""
    turned = (heads[:, 0::2] + 1j * heads[:, 1::2]) * turn  # (heads, head_dim / 2)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)


def rotation(position: int, freqs: Sequence[float]) -> np.ndarray:
    """Return the complex number of length one by which each pair is turned there, (head_dim / 2,)."""
    return np.array([complex(math.cos(position * freq), math.sin(position * freq)) for freq in freqs])


def frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> list[float]:
    """Return the angle in radians by which each pair turns from one position to the next."""
    freqs = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if scaling is None:
        return freqs
    if isinstance(scaling, Mapping):
        return [slowed(freq, **scaling) for freq in freqs]
    return [freq / divisor for freq, divisor in zip(freqs, scaling, strict=True)]


def slowed(
    freq: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_seq_len: float
) -> float:
    """Slow a pair down by `factor` if it turned seldom in the texts of the first training, not if it turned often."""
    turns = original_max_seq_len / (2 * math.pi / freq)  # that length over the pair's wavelength
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = min(max(kept, 0.0), 1.0)  # 1 from high_freq_factor turns on, 0 up to low_freq_factor, a line in between
    return kept * freq + (1 - kept) * freq / factor
