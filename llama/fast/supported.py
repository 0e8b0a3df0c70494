"""Check that a model is one that the fast steps compute: they use its weights, not its modules. Knows the modules."""

from logging import Logger
from typing import cast

from torch import nn

from llama.generation import Generation, LanguageModel
from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.model import Attention, FeedForward, RMSNorm, Transformer, TransformerBlock
from llama.ops import PLAIN
from llama.quant.layers import PackedEmbedding, PackedLinear
from llama.quant.packed import PackedWeight, Parts
from llama.ranks import ALONE
from llama.rope import RopeTable

_KNOWN = {
    *(Transformer, TransformerBlock, Attention, FeedForward, RMSNorm, nn.ModuleList),
    *(ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding),
    *(PackedLinear, PackedEmbedding, PackedWeight),
}
_WEIGHTS = {"weight", "bias", *Parts._fields}
INSTEAD = "the plain path runs instead"


class Unsupported(Exception):
    """A fast step cannot compute this model; the message says why, and `instead` what runs in its place."""

    def __init__(self, why: str, *, instead: str = INSTEAD) -> None:
        super().__init__(why)
        self.instead = instead


class WarnOnce:
    """Log each reason once."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._said = logger, set[str]()

    def __call__(self, why: Unsupported | str) -> None:
        said = str(why)  # a log record of the error itself would keep the model of its traceback alive
        if said not in self._said:
            instead = why.instead if isinstance(why, Unsupported) else INSTEAD
            self._logger.warning("fast: %s; %s", said, instead)
        self._said.add(said)


def check_modules(model: Transformer) -> None:
    """Raise Unsupported if a fast step would ignore a module, a hook, an assigned method or an operation."""
    if model.ranks.size > 1:
        raise Unsupported("several ranks share the model")
    if model.ops != PLAIN:
        raise Unsupported(f"the model's operations are {model.ops}")
    if model.args.rope_theta is None:
        raise Unsupported("rope_theta=None: models without RoPE have no fast step")
    if type(model.rope) is not RopeTable:
        raise Unsupported("the model's rope is not a RopeTable")
    check_attributes(model.rope)
    for name, module in model.named_modules():
        kind = type(module)
        ours = getattr(module, "ops", PLAIN) == PLAIN and getattr(module, "ranks", ALONE).size == 1
        is_no_norm = kind is nn.Identity and name.endswith(("attention.q_norm", "attention.k_norm"))
        if not ours or (kind not in _KNOWN and not is_no_norm):
            raise Unsupported(f"{kind.__name__} is not one of the modules that the fast step computes")
        if module is not model and (module._forward_hooks or module._forward_pre_hooks):
            raise Unsupported(f"a hook watches {kind.__name__}")
        check_attributes(module)
        _check_weights(module)
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise Unsupported("the embedding has a max_norm")
    blocks = model.blocks
    if len({id(part) for block in blocks for part in block.modules()}) < sum(
        len(list(block.modules())) for block in blocks
    ):
        raise Unsupported("some layers share modules")
    if not blocks:
        raise Unsupported("the model has no layers")


def check_attributes(instance: object) -> None:
    """Raise Unsupported if an attribute of the instance covers a method or a setting of its class.

    Those of `Generation` and of `LanguageModel` are exempt: they are called around forwards, or every model sets them.
    """
    kind = type(instance)
    for name, value in vars(instance).items():
        covered = getattr(kind, name, value)
        around = name in vars(LanguageModel) or covered is vars(Generation).get(name, value)
        if covered is not value and not around:
            raise Unsupported(f"{kind.__name__}.{name} was assigned on an instance")


def _check_weights(module: nn.Module) -> None:
    """Raise Unsupported for weights that are not parameters: their replacement would not be detected."""
    held = {**vars(module), **module._buffers}
    others = {name for name in _WEIGHTS & held.keys() if held[name] is not None}
    if others:
        raise Unsupported(f"{type(module).__name__}.{min(others)} is not a parameter")


def caching_of(model: Transformer) -> bool:
    """Return whether the cache is on. Raises Unsupported if it is on in some layers and off in others."""
    attentions = [block._modules["attention"] for block in model.layers._modules.values()]
    settings = {cast(Attention, attention).kv_caching for attention in attentions}
    if len(settings) > 1:
        raise Unsupported("the cache is on in some layers and off in others")
    return True in settings
