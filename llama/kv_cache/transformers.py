"""The kinds of cache inside the models of Hugging Face's transformers (docs/research.md).

    model.generate(**inputs, past_key_values=KindCache(model, "snapkv:0.25"))

A layer's `update` only marks the new keys: a kind needs their rows and queries, too, which transformers passes to its
attention functions. One of these, registered by name, stores marked keys and attends as `llama.model.Attention` does.
Other keys go to transformers' own function. Does not know this library's model.
"""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from llama.args import ModelArgs
from llama.kv_cache.attended import Attended
from llama.kv_cache.cache import Cache
from llama.kv_cache.contract import KVCache
from llama.kv_cache.names import cache_kind
from llama.ops import PLAIN, Scoring
from llama.rope import RopeTable, rotate
from llama.rows import Rows

# The families, by `config.model_type`, that the tests compare with transformers' own cache.
FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2",
)  # fmt: skip
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the angles of a position do not depend on the text's length
_NAME = "llama-kv-"  # before the name of the attention function that the model had


class KindCache(transformers.Cache):  # type: ignore[misc]  # as all of transformers, it has no types here
    """A cache of one text or batch: `kind` in layers with full attention, transformers' own in those with a window.

    The first call of a text is its prompt. Later calls, such as a turn of a chat, are stored behind it, as in a session
    of this library. Kinds that preallocate reserve `rows` x `length`. `max_seq_len` limits a text, by default as the
    config does. The model keeps the attention function that is set here, which computes as before with other caches.
    Raises ValueError for a model or a kind that cannot be served.
    """

    def __init__(
        self, model: Any, kind: str = "static", *, rows: int = 0, length: int = 0, max_seq_len: int | None = None
    ) -> None:
        config, rope = model.config, _checked_rope(model)
        args = ModelArgs(
            dim=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            max_seq_len=max_seq_len or config.max_position_embeddings,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )
        kinds = Cache.of(args, cache_kind(kind), rope)
        if kinds.whole_prompt and model.generation_config.prefill_chunk_size is not None:
            raise ValueError(f"kv_cache={kind!r} needs a prompt in one call; set prefill_chunk_size to None")
        layers = DynamicCache(config=config).layers
        for place, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[place] = KindLayer(self, kinds.layers[place])
        if not any(isinstance(layer, KindLayer) for layer in layers):
            raise ValueError(
                f"kv_cache={kind!r}: all layers have a window; set sliding_window=None if texts are shorter"
            )
        super().__init__(layers=layers)
        self.kinds, self._reserved = kinds, (rows, length)
        self.reset()
        before = config._attn_implementation.removeprefix(_NAME)
        AttentionInterface.register(_NAME + before, _attend)
        AttentionMaskInterface.register(_NAME + before, AttentionMaskInterface()[before])
        model.set_attn_implementation(_NAME + before)

    @property
    def nbytes(self) -> int:
        """The bytes that are stored now, those of layers with a sliding window included."""
        own: list[Tensor] = [held for layer in self.layers for held in (layer.keys, layer.values) if held is not None]
        return self.kinds.nbytes + sum(held.nbytes for held in own)

    def reset(self) -> None:
        """Drop what is stored. The next call begins another text."""
        super().reset()
        self.kinds.reserve(*self._reserved)
        self._call: Call | None = None
        self.unread: int | None = None  # the layer whose keys are marked and not stored yet

    def call_at(self, begin: int, query: Tensor, mask: Tensor | None, position_ids: Tensor) -> "Call":
        """Return the call that a layer with `begin` columns is in; layers share it. Raises ValueError."""
        call = self._call
        if call is None or call.mask is not mask or call.position_ids is not position_ids or call.begin != begin:
            before = query.new_empty((len(query), 0), dtype=torch.bool) if call is None else call.real
            if before.shape != (len(query), begin):
                raise ValueError("the last call did not end, or had other rows; call reset() and feed the text again")
            self._call = call = Call.of(before, query.shape[2], mask, position_ids)
        return call

    def _refuse(self, *_: object) -> NoReturn:
        words = "generate without beams, an assistant and prompt lookup"
        raise ValueError(f"a KindCache cannot repeat, reorder or take back what is stored; {words}")

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse


class KindLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `KindCache`. `cumulative_length`: the tokens of a row so far, with padding."""

    is_croppable = False

    def __init__(self, cache: KindCache, kind: KVCache) -> None:
        super().__init__()
        self.cache, self.kind, self.cumulative_length = cache, kind, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Mark the new keys, (bsz, n_kv_heads, width, head_dim), for `_attend`."""
        if self.cache.unread is not None:
            raise ValueError(
                f"layer {self.cache.unread} did not store its keys in this KindCache; make one for this model"
            )
        self.cache.unread = self.kind.layer
        key_states.kind_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Tensor:
        """Store keys and values, (bsz, heads, width, head_dim), and return attention, (bsz, width, heads, head_dim)."""
        self.cache.unread = None
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError(
                "gradients cannot flow through a KindCache: run the model under torch.no_grad(), or train without "
                "past_key_values"
            )
        call, kind = self.cache.call_at(self.cumulative_length, query, mask, given["position_ids"]), self.kind
        rows, rope = call.rows, kind.rope
        xq, xk, xv = (_moved(each.transpose(1, 2), call.new, call.places) for each in (query, key, value))
        xq, xk = _paired(xq) * (given["scaling"] * xq.shape[-1] ** 0.5), _paired(xk)
        if (turned := kind.rope_starts(rows)) != rows.starts:
            xq = rotate(_before_rope(xq, rows, rope), rope.at(turned, rows.width, xq.device))
        keys, values = kind.update(rows, _before_rope(xk, rows, rope) if kind.unrotated else xk, xv)
        visible, cap = kind.visible(rows, xq), given.get("softcap")
        scoring = Scoring(kind.layer, kind.key_positions(), cap and (lambda scores, *_: cap * (scores / cap).tanh()))
        if kind.observes:
            own, x = SimpleNamespace(ops=PLAIN, wo=module.o_proj, rope=rope), xq.new_empty((*xq.shape[:2], 0))
            kind.observe(_Attended(own, rows, x, xq, keys, values, visible, scoring))
        self.cumulative_length += query.shape[2]
        return _moved(PLAIN.attend(xq, keys, values, rows, visible, scoring), call.places, call.new)


class Call(NamedTuple):
    """One forward of the model.

    real: the columns with tokens, not padding, (bsz, begin + width). new: those of this call, (bsz, width). places: the
    same tokens with padding on the right, as in `rows`, (bsz, rows.width); `new` itself if there is no padding.
    """

    mask: Tensor | None
    position_ids: Tensor
    begin: int
    real: Tensor
    new: Tensor
    rows: Rows
    places: Tensor

    @staticmethod
    def of(before: Tensor, width: int, mask: Tensor | None, position_ids: Tensor) -> "Call":
        """Return a call behind the columns `before`. Raises ValueError if a kind cannot see what transformers sees."""
        bsz, begin = before.shape
        real = before.new_ones((bsz, begin + width))
        if mask is not None:  # (bsz or 1, 1, width, begin + width), of bool or, in eager attention, 0 and -inf
            seen = mask if mask.dtype == torch.bool else mask == 0
            real &= seen[:, 0, -1]
            if not bool((seen == (torch.ones_like(seen[0, 0]).tril(begin) & real[:, None, None])).all()):
                raise ValueError("the attention mask hides more than the future and padding; KindCache serves no other")
        new, positions = real[:, begin:], real.cumsum(1)[:, begin:] - 1
        if not torch.equal(real[:, :begin], before):
            raise ValueError("the attention mask hides tokens that are stored, or shows padding of an earlier call")
        if not bool(((position_ids == positions) | ~new).all()):
            raise ValueError(
                "position_ids must count the tokens of each row without padding, from those that are stored on; with "
                "use_cache=False generate feeds these again: leave that out"
            )
        rows = Rows.at(before.sum(1).tolist(), new.sum(1).tolist(), prompt_ends=begin == 0)
        places = torch.arange(rows.width, device=real.device) < torch.tensor(rows.lengths, device=real.device)[:, None]
        return Call(mask, position_ids, begin, real, new, rows, new if set(rows.lengths) == {width} else places)


class _Attended(Attended):
    """`Attended` without the layer's input `x`, which transformers does not pass to its attention functions."""

    def queries_before_rope(self) -> Tensor:
        return _before_rope(self.xq, self.rows, self.module.rope)

    def output_norms(self) -> Tensor:
        if type(self.module.wo) is not nn.Linear:  # quantised, or with an adapter
            raise ValueError(f"this kind of cache reads the weight of o_proj, a {type(self.module.wo).__name__}")
        return super().output_norms()


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
    """Attend, as an attention function of transformers, and return (output, None)."""
    layer: KindLayer | None = getattr(key, "kind_layer", None)
    if layer is not None:
        return layer.attend(module, query, key, value, attention_mask, **given), None
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    before = AttentionInterface().get_interface(module.config._attn_implementation.removeprefix(_NAME), eager)
    return before(module, query, key, value, attention_mask, **given)


def _checked_rope(model: Any) -> RopeTable:
    """Return the angles of a model's layers with full attention. Raises ValueError if it cannot be served."""
    config, name = model.config, f"model_type={model.config.model_type!r}"
    if config.model_type not in FAMILIES:
        raise ValueError(f"{name}: KindCache serves {', '.join(FAMILIES)}, which are compared with transformers' cache")
    if (before := config._attn_implementation.removeprefix(_NAME)) not in ("sdpa", "eager"):
        raise ValueError(f"attn_implementation={before!r}: KindCache replaces sdpa or eager; load the model with one")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ValueError(f"{name} with attention to later tokens: KindCache serves causal attention only")
    own = "full_attention_" if "full_attention" in config.rope_parameters else ""  # by type of layer, as in Gemma 3
    rope = config.rope_parameters["full_attention"] if own else config.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"rope_parameters={rope}: KindCache serves whole heads and the types {', '.join(ROPE_TYPES)}")
    freqs, factor = (getattr(model.base_model.rotary_emb, own + name) for name in ("inv_freq", "attention_scaling"))
    return RopeTable(freqs.float().cpu(), factor)


def _paired(x: Tensor) -> Tensor:
    """Return heads whose RoPE pairs are neighbours, as here, from transformers' halves."""
    return torch.unflatten(x, -1, (2, -1)).mT.flatten(-2)


def _before_rope(x: Tensor, rows: Rows, rope: RopeTable) -> Tensor:
    """Return x, (bsz, width, heads, head_dim), before it was rotated by the positions of `rows`."""
    cos, sin = (part / rope.attention_factor**2 for part in rope.at(rows.starts, rows.width, x.device))
    return rotate(x, (cos, -sin))


def _moved(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return x, (bsz, ...), with the tokens of each row at `source` moved to `target`, and zeros elsewhere."""
    if source is target:
        return x
    made = x.new_zeros((*target.shape, *x.shape[2:]))
    made[target] = x[source]
    return made
