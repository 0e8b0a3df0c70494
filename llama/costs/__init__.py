"""Compute the bytes and FLOPs of a Llama from its sizes: plain arithmetic, no torch.

`llama-kv costs` prints the bytes of a checkpoint's KV cache.
Units: bytes, and FLOPs, of which a multiplication and an addition are two. "rows" are texts in a batch, "length" is the
positions of a row, `itemsize` the bytes of a number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llama.args import ModelArgs
from llama.untrusted.gguf_sizes import FILE_BLOCKS

MB = 2**20

# Meta's params.json of the released models (https://github.com/meta-llama/llama-models), with a tied head if the
# released weights have no head.
_LLAMA3 = {"vocab_size": 128256, "n_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 500000.0}
_1B = {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "tied_head": True}
_3B = {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256, "tied_head": True}
_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}
_70B = {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim_multiplier": 1.3, "multiple_of": 4096}
_405B = {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096}


def _released(sizes: dict[str, float], *, scaled: bool) -> ModelArgs:
    return ModelArgs(**_LLAMA3, **sizes, use_scaled_rope=scaled, max_seq_len=131072 if scaled else 8192)  # type: ignore[arg-type]


RELEASED: dict[str, ModelArgs] = {
    "llama-3-8b": _released(_8B, scaled=False),
    "llama-3-70b": _released(_70B, scaled=False),
    "llama-3.1-8b": _released(_8B, scaled=True),
    "llama-3.1-70b": _released(_70B, scaled=True),
    "llama-3.1-405b": _released(_405B, scaled=True),
    "llama-3.2-1b": _released(_1B, scaled=True),
    "llama-3.2-3b": _released(_3B, scaled=True),
    "llama-3.3-70b": _released(_70B, scaled=True),
}

GROUP, PANEL = 32, 16  # weights that share a scale and a zero, and outputs of a tile: as in llama/quant/packed.py

# The format of matrices: None for `itemsize` bytes a number, "int8", "int4", or the bytes of each matrix by its name.
Layout = str | Mapping[str, int] | None


def parameters(args: ModelArgs) -> int:
    """Return the number of parameters; a tied head counts once."""
    return weights_bytes(args, itemsize=1)


def weights_bytes(args: ModelArgs, *, itemsize: int, quantize: Layout = None) -> int:
    """Return the bytes of a model's weights; a tied head counts once.

    With `quantize` only norms and biases have numbers of `itemsize`; int4 models have an int8 embedding and head.
    """
    biases = (args.n_heads + 2 * args.n_kv_heads) * args.head_dim if args.attention_bias else 0
    head_norms = 2 * args.head_dim if args.qk_norm else 0
    vectors = (args.n_layers * (2 * args.dim + biases + head_norms) + args.dim) * itemsize
    if isinstance(quantize, Mapping):
        return sum(quantize.values()) + vectors
    queries, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    layer = [(queries, args.dim), (keys, args.dim), (keys, args.dim), (args.dim, queries)]  # wq, wk, wv, wo
    layer += [(args.ffn_dim, args.dim), (args.dim, args.ffn_dim), (args.ffn_dim, args.dim)]  # w1, w2, w3
    matrices = sum(matrix_bytes(*shape, itemsize=itemsize, quantize=quantize) for shape in layer)
    ends = head_bytes(args, itemsize=itemsize, quantize=quantize) * (1 if args.tied_head else 2)
    return args.n_layers * matrices + ends + vectors


def head_bytes(args: ModelArgs, *, itemsize: int, quantize: Layout = None) -> int:
    """Return the bytes of the head, or of the embedding if it is tied."""
    if isinstance(quantize, Mapping):
        return quantize.get("output.weight", quantize["tok_embeddings.weight"])
    return matrix_bytes(args.vocab_size, args.dim, itemsize=itemsize, quantize="int8" if quantize else None)


def matrix_bytes(outputs: int, inputs: int, *, itemsize: int, quantize: str | None = None) -> int:
    """Return the bytes of a matrix; int8 has 1 byte a weight, int4 a half, and both have 4 bytes a group."""
    if quantize is None:
        return outputs * inputs * itemsize
    filled_up = -(-outputs // PANEL) * PANEL
    return filled_up * (inputs * {"int8": 8, "int4": 4}[quantize] // 8 + inputs // GROUP * 4)


def file_bytes(numbers: int, kind: str) -> int:
    """Return the bytes of `numbers` numbers, a multiple of the block size, in this type of a .gguf file."""
    block, nbytes = FILE_BLOCKS[kind]
    return numbers // block * nbytes


def kv_bytes(n_layers: int, n_kv_heads: int, head_dim: int, *, positions: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of `positions` positions, counted over all rows."""
    return 2 * n_layers * n_kv_heads * head_dim * positions * itemsize


def cache_bytes(args: ModelArgs, *, rows: int, length: int, itemsize: int) -> int:
    """Return the bytes of a static cache of `rows` x `length`."""
    return kv_bytes(args.n_layers, args.n_kv_heads, args.head_dim, positions=rows * length, itemsize=itemsize)


def logits_bytes(args: ModelArgs, *, rows: int, positions: int, itemsize: int = 4) -> int:
    """Return the bytes of the logits of `positions` positions a row: 1 for decoding, the prompt's for all logits."""
    return rows * positions * args.vocab_size * itemsize


def forwards(*, input_len: int, output_len: int, kv_caching: bool) -> list[tuple[int, int]]:
    """Return (start_pos, seqlen) of every forward for `output_len` new tokens; the last of these is never fed."""
    if kv_caching:
        return [(0, input_len), *((pos, 1) for pos in range(input_len, input_len + output_len - 1))]
    return [(0, length) for length in range(input_len, input_len + output_len)]


def token_forwards(*, input_len: int, output_len: int, kv_caching: bool) -> int:
    """Return the number of tokens that a row feeds for `output_len` new ones."""
    return sum(seqlen for _, seqlen in forwards(input_len=input_len, output_len=output_len, kv_caching=kv_caching))


def forward_flops(args: ModelArgs, *, seqlen: int, start_pos: int = 0, scored: int = 1) -> int:
    """Return the FLOPs of feeding one row `seqlen` tokens from `start_pos` on, with the logits of `scored` of them.

    Counts the matrix products, and attention of query i to start_pos + i + 1 keys, without masked pairs.
    """
    heads = (2 * args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    weights = args.n_layers * args.dim * (heads + 3 * args.ffn_dim)
    pairs = seqlen * start_pos + seqlen * (seqlen + 1) // 2
    attention = 4 * args.n_layers * args.n_heads * args.head_dim * pairs  # scores, and the weighted sum of values
    return 2 * weights * seqlen + attention + 2 * args.dim * args.vocab_size * scored


def step_bytes(args: ModelArgs, *, rows: int, context: int, itemsize: int, quantize: Layout = None) -> int:
    """Return the bytes that a cached decode step reads: every weight once, and the cached keys and values.

    An untied embedding counts with one vector a row.
    """
    alike = head_bytes(args, itemsize=itemsize, quantize=quantize)
    embedding = quantize["tok_embeddings.weight"] if isinstance(quantize, Mapping) else alike
    unread = 0 if args.tied_head else embedding - rows * embedding // args.vocab_size
    read = weights_bytes(args, itemsize=itemsize, quantize=quantize) - unread
    return read + cache_bytes(args, rows=rows, length=context, itemsize=itemsize)


def activation_bytes(args: ModelArgs, *, tokens: int, itemsize: int, ranks: int = 1) -> int:
    """Return the peak bytes of a layer's activations for `tokens` tokens, counted over all rows.

    Valid for the plain modules without gradients and an attention kernel without stored scores. `args` are those of one
    rank.
    """
    wide = max(4, itemsize)  # norms and RoPE compute in float32 or wider
    queries, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    norm = args.dim * (3 * itemsize + wide + (wide + itemsize if itemsize < wide else 0))
    rope = (2 * args.dim + 2 * keys) * itemsize + queries * (2 * itemsize + 3 * wide)
    mlp = (3 * args.dim + 3 * args.ffn_dim) * itemsize  # x, h, its norm; silu(w1), w3 and their product
    if ranks == 1:
        return tokens * max(norm, rope, mlp)
    # x, its norm, and the output of wo or w2, which the sum over the ranks replaces; and the input of wo or w2.
    added = (3 * args.dim + max(3 * queries + 2 * keys, args.ffn_dim)) * itemsize
    return tokens * max(norm, rope, mlp, added)


@dataclass(frozen=True)
class PeakMemory:
    """The bytes of tensors at the peak of a generation, part by part; it is in forward number `forward`.

    A layer's activations and the logits are not in memory at the same time; `at_head`: the logits make the peak.
    """

    forward: int
    weights: int
    head: int  # of the weights; a tied head is the embedding
    cache: int
    logits: int  # as returned, in float32 or wider
    narrow_logits: int  # the same before they are widened, if the model computes in 16 bits
    previous_logits: int  # of the forward before, which the loop still references
    activations: int
    head_activations: int
    workspace: int

    @property
    def at_head(self) -> bool:
        return self._head > self.activations

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.previous_logits + self.workspace + max(self.activations, self._head)

    @property
    def _head(self) -> int:
        return self.logits + self.narrow_logits + self.head_activations


def peak_memory(
    args: ModelArgs,
    *,
    rows: int,
    input_len: int,
    output_len: int,
    kv_caching: bool,
    itemsize: int,
    all_logits: bool = False,
    workspace: int = 0,
    ranks: int = 1,
    quantize: Layout = None,
    held: Callable[[int], int] | None = None,
) -> PeakMemory:
    """Predict the peak memory of a greedy generation by the plain path, on each rank.

    all_logits: every forward computes the logits of all positions, as much published code does.
    workspace: the bytes of the device's libraries.
    quantize: the format of the matrices. Buffers that widen them are not counted.
    held: returns the bytes of the cache on one rank by the number of positions of each row; None is a static cache.
    """
    fed = [seqlen for _, seqlen in forwards(input_len=input_len, output_len=output_len, kv_caching=kv_caching)]
    wide, own = max(4, itemsize), args.share(ranks)
    static = cache_bytes(own, rows=rows, length=input_len + output_len, itemsize=itemsize)
    cache_after = held or (lambda _: static)

    def at(forward: int) -> PeakMemory:
        tokens, before = fed[forward], fed[forward - 1] if forward else 0
        scored, scored_before = (tokens, before) if all_logits else (1, min(before, 1))
        logits = logits_bytes(args, rows=rows, positions=scored, itemsize=wide)
        narrow = logits_bytes(args, rows=rows, positions=scored, itemsize=itemsize) if itemsize < wide else 0
        norm = 0 if narrow else scored  # the norm's output is freed before logits are widened
        # The logits of a rank's share of the vocabulary, and those of all ranks, while they are joined.
        gathered = logits_bytes(args, rows=rows, positions=scored, itemsize=itemsize) * (ranks + 1) // ranks
        joining = gathered if ranks > 1 and not narrow else 0
        return PeakMemory(
            forward=forward,
            weights=weights_bytes(own, itemsize=itemsize, quantize=quantize),
            head=head_bytes(own, itemsize=itemsize, quantize=quantize),
            cache=cache_after(input_len + forward) if kv_caching else 0,
            logits=logits,
            narrow_logits=narrow,
            previous_logits=logits_bytes(args, rows=rows, positions=scored_before, itemsize=wide),
            activations=activation_bytes(own, tokens=rows * tokens, itemsize=itemsize, ranks=ranks),
            head_activations=rows * (tokens + norm) * args.dim * itemsize + joining,
            workspace=workspace,
        )

    # From the second forward to the last only the context grows.
    return max((at(forward) for forward in {0, min(1, len(fed) - 1), len(fed) - 1}), key=lambda peak: peak.total)


def largest_batch(args: ModelArgs, *, memory: int, length: int, itemsize: int, quantize: Layout = None) -> int:
    """Return the number of rows of `length` whose cache and last logits fit into `memory` bytes beside the weights."""
    row = cache_bytes(args, rows=1, length=length, itemsize=itemsize) + logits_bytes(args, rows=1, positions=1)
    return max(0, (memory - weights_bytes(args, itemsize=itemsize, quantize=quantize)) // row)


def largest_length(args: ModelArgs, *, memory: int, rows: int, itemsize: int, quantize: Layout = None) -> int:
    """Return the longest length of `rows` rows that fit into `memory` bytes beside the weights, up to max_seq_len."""
    weights = weights_bytes(args, itemsize=itemsize, quantize=quantize)
    free = memory - weights - logits_bytes(args, rows=rows, positions=1)
    return max(0, min(args.max_seq_len, free // cache_bytes(args, rows=rows, length=1, itemsize=itemsize)))


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column aligned left and the others right."""
    lines = [list(heads), ["---", *["---:"] * (len(heads) - 1)], *map(list, rows)]
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines), ""])


def size(nbytes: int) -> str:
    """Return bytes as text: 9.0 MB, 36.0 GB (MB is 2^20 bytes, GB 2^30)."""
    gigabytes = nbytes >= 1024 * MB
    return f"{nbytes / (1024 * MB if gigabytes else MB):,.1f} {'GB' if gigabytes else 'MB'}"
