"""The sizes and limits of a model, under the names of Meta's params.json.

Plain values: this file knows neither tensors nor files.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

# A default that __post_init__ derives from the other fields. Typed Any so that type checkers use the field's own type.
_DERIVED: Any = None

# Fields of ModelArgs that say how a model is used, not what it is. A checkpoint may not state them.
SETTINGS = frozenset({"max_batch_size", "kv_caching", "kv_cache"})

# Meta writes a bare "use_scaled_rope" for two different rules. These (dim, n_layers), Llama 3.2 1B and 3B, divide by
# 32; every other model by 8 (https://github.com/meta-llama/llama-models/issues/166).
_FACTOR_32 = {(2048, 16), (3072, 28)}


class Refused(ValueError):
    """More rows or positions than a limit allows. A cache raises it before anything is written."""


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies in Llama 3.1 and later, for texts longer than those of the training.

    Wavelengths above `original_max_seq_len / low_freq_factor` are multiplied by `factor`, those below
    `original_max_seq_len / high_freq_factor` stay, and those between are blended.
    Source: `apply_scaling` in https://github.com/meta-llama/llama-models, and "rope_type": "llama3" in Hugging Face's.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"):
            _check_positive(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling: high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class LinearScaling:
    """Division of all rotary frequencies by `factor`: position n acts as n / factor ("rope_type": "linear").

    `attention_factor` multiplies queries and keys when they are rotated: above 1 it sharpens attention.
    """

    factor: float
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("factor", self.factor)
        _check_positive("attention_factor", self.attention_factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies are divided by `factor`, high ones stay, and those between are blended.

    A frequency is high if it turns more than `beta_fast` times in `original_max_seq_len` positions, and low if it turns
    less than `beta_slow` times. `truncate` rounds the bounds to whole frequencies. `attention_factor`, by default
    0.1 ln(factor) + 1, multiplies queries and keys when they are rotated.
    Source: Peng et al., https://arxiv.org/abs/2309.00071.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = _DERIVED
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_seq_len", "beta_fast", "beta_slow"):
            _check_positive(name, getattr(self, name))
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", self.sharpened(self.factor))
        _check_positive("attention_factor", self.attention_factor)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"rope scaling: beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}")
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate={self.truncate!r} must be True or False")

    @staticmethod
    def sharpened(factor: float, scale: float = 1.0) -> float:
        """Return the default attention factor for `factor`."""
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


Scaling = RopeScaling | LinearScaling | YarnScaling


@dataclass(frozen=True)
class ModelArgs:
    """The sizes of a Llama model and the limits of its use.

    The names are those of Meta's params.json, so `ModelArgs(**params)` works, and an unknown key raises TypeError.
    `n_kv_heads`, `head_dim` and `ffn_dim` have defaults that are derived from the other fields as in Meta's code.
    `rope_theta=None` switches RoPE off (NoPE, https://arxiv.org/abs/2305.19466). Checkpoint formats cannot store that:
    readers and exports raise an error.
    """

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = _DERIVED  # n_heads, that is: no grouped-query attention
    vocab_size: int = -1  # -1, as in Meta's files: the tokenizer's
    multiple_of: int = 256  # the FFN width is rounded up to a multiple of this
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float | None = 500000.0  # None: no RoPE, queries and keys are not rotated
    use_scaled_rope: bool = False  # Meta's switch; sets rope_scaling if that is not given
    max_batch_size: int | None = None  # a limit, not a size; None: no limit
    max_seq_len: int = 2048  # a limit, not a size

    kv_caching: bool = True
    kv_cache: str = "static"  # the kind of cache, see llama/kv_cache/

    head_dim: int = _DERIVED  # dim // n_heads
    ffn_dim: int = _DERIVED  # two thirds of 4 * dim, times ffn_dim_multiplier, rounded up to multiple_of
    tied_head: bool = False  # the output layer is the embedding
    rope_scaling: Scaling | tuple[float, ...] | None = None  # a tuple has a divisor per frequency
    attention_bias: bool = False  # wq, wk and wv add a bias, as in Qwen 2
    qk_norm: bool = False  # queries and keys are normed per head before RoPE, as in Qwen 3

    def __post_init__(self) -> None:
        self._check_types()
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(f"dim={self.dim} must be a multiple of n_heads={self.n_heads}, or set head_dim")
        self._derive("n_kv_heads", self.n_heads)
        self._derive("head_dim", self.dim // self.n_heads)
        self._derive("ffn_dim", self._meta_ffn_dim())
        if self.use_scaled_rope:
            self._derive("rope_scaling", RopeScaling(factor=32 if (self.dim, self.n_layers) in _FACTOR_32 else 8))
        self._check_values()

    def check_room(self, rows: int, length: int, *, because: str = "") -> None:
        """Raise Refused if `rows` rows, or texts of `length` positions, exceed the limits.

        A bounded kind of cache limits what it stores, not the length of a text: callers then pass a `length` of 0.
        because: the beginning of the message about the length.
        """
        if self.max_batch_size is not None and rows > self.max_batch_size:
            raise Refused(
                f"{rows} rows are more than max_batch_size={self.max_batch_size}; "
                "give fewer at a time, or build or load the model with a larger max_batch_size"
            )
        if length > self.max_seq_len:
            raise Refused(
                f"{because}a text of {length} positions goes past max_seq_len={self.max_seq_len}; "
                "shorten it, or build or load the model with a larger max_seq_len"
            )

    def share(self, ranks: int) -> "ModelArgs":
        """Return the sizes of one rank's part. If there are fewer KV heads than ranks, several ranks have the same one.

        Raises ValueError if the model cannot be divided evenly.
        """
        if not self._shares_evenly(ranks):
            fits = [str(n) for n in range(1, self.n_heads + 1) if self._shares_evenly(n)]
            raise ValueError(
                f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, ffn_dim={self.ffn_dim} and vocab_size="
                f"{self.vocab_size} cannot be shared out to {ranks} ranks; {' or '.join(fits)} can share them"
            )
        sizes = {name: getattr(self, name) // ranks for name in ("n_heads", "ffn_dim", "vocab_size")}
        return replace(self, **sizes, n_kv_heads=max(1, self.n_kv_heads // ranks))

    def _shares_evenly(self, ranks: int) -> bool:
        whole = not any(size % ranks for size in (self.n_heads, self.ffn_dim, self.vocab_size))
        return whole and (self.n_kv_heads % ranks == 0 or ranks % self.n_kv_heads == 0)

    def _derive(self, name: str, value: object) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)  # a frozen dataclass can be completed only here

    def _meta_ffn_dim(self) -> int:
        hidden_dim = 2 * (4 * self.dim) // 3
        if self.ffn_dim_multiplier is not None:
            hidden_dim = int(self.ffn_dim_multiplier * hidden_dim)
        return self.multiple_of * ((hidden_dim + self.multiple_of - 1) // self.multiple_of)

    def _check_types(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "multiple_of", "max_seq_len"):
            _check_count(name, getattr(self, name))
        for name in ("n_kv_heads", "head_dim", "ffn_dim", "max_batch_size"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.vocab_size != -1:
            _check_count("vocab_size", self.vocab_size)
        _check_positive("norm_eps", self.norm_eps)
        for name in ("rope_theta", "ffn_dim_multiplier"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("use_scaled_rope", "kv_caching", "tied_head", "attention_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    def _check_values(self) -> None:
        _check_count("ffn_dim", self.ffn_dim)  # a tiny ffn_dim_multiplier rounds it to nothing
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if self.rope_theta is None:
            if self.rope_scaling is not None:
                raise ValueError(
                    f"rope_scaling={self.rope_scaling!r} scales angles of RoPE, which rope_theta=None switches off; "
                    "leave out rope_scaling and use_scaled_rope, or set rope_theta"
                )
        elif isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1 for YaRN, which takes its logarithm")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of numbers")
        if isinstance(self.rope_scaling, tuple):
            if len(self.rope_scaling) != self.head_dim // 2:
                raise ValueError(
                    f"rope_scaling has {len(self.rope_scaling)} divisors but head_dim={self.head_dim} "
                    f"has {self.head_dim // 2} frequencies"
                )
            for divisor in self.rope_scaling:
                _check_positive("a divisor of rope_scaling", divisor)
        elif not isinstance(self.rope_scaling, Scaling | None):
            raise ValueError(
                f"rope_scaling={self.rope_scaling!r} must be a RopeScaling, LinearScaling, YarnScaling, a tuple of "
                "divisors or None"
            )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number above 0")
    if isinstance(value, int) and value >= 1 << 63:
        raise ValueError(f"{name}={value!r:.40} is above the limit of 2^63 - 1; PyTorch has no larger whole numbers")
