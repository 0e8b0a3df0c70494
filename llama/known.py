"""Whether a model is what the fast steps compute: they work from its weights, past its modules. Knows the modules."""

from logging import Logger

from torch import nn

from llama.kv_cache import StaticCache
from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.model import Attention, FeedForward, RMSNorm, Transformer, TransformerBlock
from llama.ops import PLAIN
from llama.quantize import Int8Embedding, Int8Linear, Int8Weight

_KNOWN = {
    *(Transformer, TransformerBlock, Attention, FeedForward, RMSNorm, StaticCache, nn.ModuleList),
    *(ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, Int8Linear, Int8Embedding, Int8Weight),
}


class NotServed(Exception):
    """A fast step does not compute this model; the message says why."""


class Warnings:
    """Says each thing once."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._said = logger, set[str]()

    def __call__(self, words: object) -> None:
        if str(words) not in self._said:
            self._logger.warning("fast: %s; the plain path runs instead", words)
        self._said.add(str(words))


def check_modules(model: Transformer) -> None:
    """Raise NotServed where somebody's own module, hook or operation would be passed by."""
    if model.ranks.size > 1:
        raise NotServed("several ranks share the model")
    if model.ops != PLAIN:
        raise NotServed(f"the model's operations are {model.ops.name}")
    for module in model.modules():
        if type(module) not in _KNOWN or getattr(module, "ops", PLAIN) != PLAIN:
            raise NotServed(f"{type(module).__name__} is not one of the modules that the fast step computes")
        if module is not model and (module._forward_hooks or module._forward_pre_hooks):
            raise NotServed(f"somebody watches {type(module).__name__} with a hook")
