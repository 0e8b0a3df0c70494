"""The functions that forwards on a GPU are made of: a step of one token a row, and whole prompts.

A CUDA graph repeats what was recorded, so nothing in a step may depend on a number that the host reads: positions are a
tensor, and keys past a row's own position are masked, not cut off. `PYTORCH` runs on any device, in any dtype;
`compiled` makes fewer kernels of the same functions. The modules of model.py define the results.
Knows tensors, not modules, graphs or sampling.
Shapes: h is (rows, dim), or (rows * width, dim) for prompts of `width` tokens; positions (rows,) int64; keys and values
(at least rows, slots, n_kv_heads, head_dim); cos and sin of each token (h's length, 1, head_dim).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from llama.ops import linear, rms_norm
from llama.rope import rotate

PART = 512  # logits of a part in `argmax`; vocabularies of 128,256 tokens have parts of 256


class Attention(NamedTuple):
    """Attention of one token a row.

    prepare: returns what all layers of a step share.
    attend: attends in one layer, given the result of `prepare`.
    by_text: the time of `attend` depends on the texts' positions, not on the number of slots.
    """

    prepare: Callable[..., tuple[Tensor, ...]]
    attend: Callable[..., Tensor]
    by_text: bool = False


class Prompts(NamedTuple):
    """The operations of `prompt_layer` besides products: `rms_norm`, RoPE, attention and the gate of the MLP."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]


class LayerWeights(NamedTuple):
    """The parameters of a TransformerBlock, and the eps of its norms, by name."""

    tensors: Mapping[str, Tensor]
    eps: Mapping[str, float]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return x after the norm of this name, or x itself if the block has no such norm."""
        weight = self.tensors.get(f"{name}.weight")
        return x if weight is None else rms_norm(x, weight, self.eps[name])


class GraphOps(NamedTuple):
    """One implementation of the functions that make logits of tokens, and tokens of logits.

    begin, layer, head, advance: replace `begin`, `decode_layer`, `head` and `advance` below.
    product: the matrix product of `layer`.
    prompts: the parts of `prompt_layer`; None if prompts run on the plain path.
    """

    name: str
    attention: Attention
    product: Callable[[Tensor, Tensor], Tensor]
    begin: Callable[..., tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...]]]
    layer: Callable[..., Tensor]
    head: Callable[..., Tensor]
    advance: Callable[..., None]
    prompts: Prompts | None = None


def begin(
    prepare: Callable[..., tuple[Tensor, ...]], tokens: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return what all layers of a step share: each row's newest id, (rows,), its (cos, sin), and attention's part.

    tokens: (rows, slots). cos, sin: (slots, 1, head_dim), as RopeTable has them.
    """
    ids = tokens.gather(1, positions[:, None])[:, 0]
    return ids, (cos[positions], sin[positions]), prepare(positions, tokens.shape[1])


def decode_layer(
    attend: Callable[..., Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
    h: Tensor,
    weights: LayerWeights,
    cos_sin: tuple[Tensor, Tensor],
    prepared: tuple[Tensor, ...],
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Return the output of a layer, (rows, dim), and write its keys and values at `positions`."""
    normed = written(weights.norm(h, "attention_norm"))
    made = []
    for name in ("wq", "wk", "wv"):
        out = product(normed, weights.tensors[f"attention.{name}.weight"])
        bias = weights.tensors.get(f"attention.{name}.bias")
        made.append((out if bias is None else out + bias).view(len(h), -1, keys.shape[-1]))
    xq, xk, xv = weights.norm(made[0], "attention.q_norm"), weights.norm(made[1], "attention.k_norm"), made[2]
    rows = torch.arange(len(h), device=h.device)
    keys[rows, positions], values[rows, positions] = rotate(xk, cos_sin), xv
    output = attend(rotate(xq, cos_sin), keys[: len(h)], values[: len(h)], prepared)
    h = h + written(product(output.flatten(1), weights.tensors["attention.wo.weight"]))
    normed = written(weights.norm(h, "ffn_norm"))
    gate, up = (product(normed, weights.tensors[f"feed_forward.{name}.weight"]) for name in ("w1", "w3"))
    return h + written(product(written(F.silu(gate) * up), weights.tensors["feed_forward.w2.weight"]))


def prompt_layer(
    prompts: Prompts,
    head_dim: int,
    h: Tensor,
    weights: LayerWeights,
    cos_sin: tuple[Tensor, Tensor],
    ends: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's output for whole prompts, and their keys and values, (rows * width, n_kv_heads, head_dim).

    For layers without biases and norms of heads. ends: (rows + 1,) int32, where each row begins, and the end of the
    last.
    """
    tensors, eps = weights.tensors, weights.eps
    normed = prompts.norm(h, tensors["attention_norm.weight"], eps["attention_norm"])
    products = (linear(normed, tensors[f"attention.{name}.weight"]) for name in ("wq", "wk", "wv"))
    xq, xk, xv = (product.view(len(h), -1, head_dim) for product in products)
    xq, xk = prompts.rotate(xq, cos_sin), prompts.rotate(xk, cos_sin)
    output = prompts.attend(xq, xk, xv, ends, width)
    h = h + linear(output.flatten(1), tensors["attention.wo.weight"])
    normed = prompts.norm(h, tensors["ffn_norm.weight"], eps["ffn_norm"])
    gate, up = (linear(normed, tensors[f"feed_forward.{name}.weight"]) for name in ("w1", "w3"))
    return h + linear(prompts.gate(gate, up), tensors["feed_forward.w2.weight"]), xk, xv


def written(x: Tensor) -> Tensor:
    """Return x, which compiled code then writes to memory once.

    Inductor cannot look through `as_strided`. Otherwise it computes a norm or SiLU again for every weight that the
    result is multiplied by, and makes `addmm`, which copies, of a product that is added.
    """
    return torch.as_strided(x, x.shape, x.stride())


def one_row_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T. For one row, compiled code reads the weight in a kernel of its own, without a library.

    Such a kernel keeps memory busier (https://github.com/meta-pytorch/gpt-fast).
    """
    return (x * weight).sum(-1)[None] if len(x) == 1 else linear(x, weight)


def prepare_mask(positions: Tensor, slots: int) -> tuple[Tensor, ...]:
    """Return which slots each row sees, (rows, slots) of bool."""
    return (torch.arange(slots, device=positions.device) <= positions[:, None],)


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    """Attend from q, (rows, n_heads, head_dim), to each row's keys up to its position; return the shape of q."""
    (seen,) = prepared
    # 0 * nan would be nan, so what no query may see is zero.
    keys, values = (kept.masked_fill(~seen[..., None, None], 0).transpose(1, 2) for kept in (keys, values))
    gqa = q.shape[1] != keys.shape[1]
    q, mask = q[:, :, None], seen[:, None, None]  # one query a row: (rows, n_heads, 1, head_dim), (rows, 1, 1, slots)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=gqa)[:, :, 0]


def prepare_flash(positions: Tensor, slots: int) -> tuple[Tensor, ...]:
    """Return where the queries and the keys of each row begin, (rows + 1,), and the keys it sees, (rows,), int32."""
    first = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    return first, first * slots, (positions + 1).to(torch.int32)


def attend_flash(q: Tensor, keys: Tensor, values: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    """Return what `attend_masked` returns, in 16 bits on a GPU; keys past a row's position are not read."""
    first, offsets, used = prepared
    # The operator that torch.nn.attention.varlen calls, whose function has no `seqused_k` in PyTorch 2.10.
    packed = (q, keys.flatten(0, 1), values.flatten(0, 1), first, offsets, 1, keys.shape[1])
    output: Tensor = torch.ops.aten._flash_attention_forward(*packed, 0.0, False, False, seqused_k=used)[0]
    return output


def attend_flash_prompts(q: Tensor, keys: Tensor, values: Tensor, ends: Tensor, width: int) -> Tensor:
    """Attend from each token of whole prompts to those up to it in its row, in 16 bits on a GPU.

    The three are (rows * width, heads, head_dim), all rows one behind the other; see `prompt_layer`.
    """
    packed = (q, keys, values, ends, ends, width, width)
    output: Tensor = torch.ops.aten._flash_attention_forward(*packed, 0.0, True, False)[0]
    return output


def head(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits, (rows, vocab), in float32 or wider."""
    logits = linear(rms_norm(h, norm_weight, eps), weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def advance(logits: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Choose every row's most likely token, the first of equals, and step on as `step_on` does."""
    step_on(if_finite(logits, argmax(logits)), tokens, positions, chosen)


def argmax(logits: Tensor) -> Tensor:
    """Return what `logits.argmax(-1)` returns, (rows,): the largest logit of the part that has the largest one."""
    parts = _in_parts(logits)
    largest, places = parts.max(-1)  # the first of equals
    part = largest.argmax(-1, keepdim=True)
    return places.gather(-1, part).add(part, alpha=parts.shape[-1])[:, 0]


def if_finite(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the chosen ids, (rows,), with -1 for each row that has a logit which is not finite."""
    return ids.where(_in_parts(logits).sum(-1).sum(-1).isfinite(), -1)


def _in_parts(logits: Tensor) -> Tensor:
    """Return a view, (rows, parts, PART or less): a GPU reduces each part in a block, and a whole row in one only."""
    return logits.view(len(logits), -1, math.gcd(PART, logits.shape[-1]))


def step_on(ids: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Store the ids in `chosen`, move each position by one, and write the ids into the texts there, all in place.

    tokens: the texts, (rows, slots). A row at the end of its text stays there.
    """
    chosen.copy_(ids)
    positions.add_(1).clamp_(max=tokens.shape[1] - 1)
    tokens.scatter_(1, positions[:, None], ids.clamp(min=0)[:, None])


MASKED = Attention(prepare_mask, attend_masked)
FLASH = Attention(prepare_flash, attend_flash, by_text=True)
PYTORCH = GraphOps("plain", MASKED, linear, begin, decode_layer, head, advance)


def plain_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[GraphOps]:
    """Return the functions that may run there without a compiler, the faster ones first."""
    q = torch.empty((1, 1, 1, head_dim), dtype=dtype, device=device)
    flash = head_dim % 8 == 0 and q.is_cuda and can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, False, True))
    return [PYTORCH._replace(name="plain flash", attention=FLASH), PYTORCH] if flash else [PYTORCH]


_COUNT = count()


class Compiled:
    """A function compiled by torch.compile: once for one row, and once for several, for all sizes that vary.

    varying: the indices of the arguments whose sizes vary, and the axes of these sizes. A tuple of tensors is one
    argument. A size of 1 does not vary.
    options: those of Inductor; other backends have none.
    """

    def __init__(
        self,
        function: Any,
        backend: str | Callable[..., Any],
        varying: Mapping[int, Sequence[int]],
        options: Mapping[str, Any],
    ) -> None:
        self._given = function, backend, varying, options

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, self._given

    @cached_property
    def _call(self) -> Callable[..., Any]:  # compiled by the first call, which raises if this Python cannot compile
        function, backend, _, options = self._given
        # PyTorch records by a code's name and file which sizes vary; a new name keeps models apart.
        name = f"{function.__name__}_{next(_COUNT)}"
        own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
        used = dict(options) if backend == "inductor" else None
        compiled: Callable[..., Any] = torch.compile(own, backend=backend, fullgraph=True, options=used)
        return compiled

    def __call__(self, *given: Any) -> Any:
        for index, axes in self._given[2].items():
            for tensor in given[index] if isinstance(given[index], tuple) else (given[index],):
                for axis in axes:
                    if axis < tensor.ndim and tensor.shape[axis] > 1:
                        torch._dynamo.mark_dynamic(tensor, axis)
        return self._call(*given)


def compiled(backend: str | Callable[..., Any], ops: GraphOps = PYTORCH, **options: Any) -> GraphOps:
    """Return the functions of `ops`, each compiled by torch.compile with further options of Inductor."""
    options["combo_kernels"] = True  # kernels that can run side by side become one

    def made(function: Any, varying: Mapping[int, Sequence[int]]) -> Compiled:
        return Compiled(function, backend, varying, options)

    return GraphOps(
        name=ops.name.replace("plain", "compiled"),
        attention=ops.attention,
        product=one_row_product,
        begin=made(ops.begin, {1: (0, 1), 2: (0,), 3: (0,), 4: (0,)}),
        layer=made(ops.layer, {2: (0,), 4: (0,), 5: (0, 1), 6: (0,), 7: (0, 1), 8: (0, 1)}),
        head=made(ops.head, {0: (0,)}),
        advance=made(ops.advance, {0: (0,), 1: (0, 1), 2: (0,), 3: (0,)}),
        prompts=ops.prompts,
    )
