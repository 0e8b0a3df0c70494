"""Llama inference whose KV cache can be switched off, swapped, measured and proved.

The public names are resolved on first use, so that importing the package costs no more than a look.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama.api import Llama, load
    from llama.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling
    from llama.host.version import __version__ as __version__
    from llama.model import Transformer
    from llama.tokenizer import Tokenizer
    from llama.tokenizer.chat import Dialog
    from llama.tokenizer.conversation import Chat

__all__ = [
    "Chat",
    "Dialog",
    "LinearScaling",
    "Llama",
    "ModelArgs",
    "RopeScaling",
    "Tokenizer",
    "Transformer",
    "YarnScaling",
    "load",
]

_HOMES = {
    "Chat": "tokenizer.conversation",
    "Dialog": "tokenizer.chat",
    "Llama": "api",
    "__version__": "host.version",
    "ModelArgs": "args",
    "LinearScaling": "args",
    "RopeScaling": "args",
    "YarnScaling": "args",
    "Tokenizer": "tokenizer",
    "Transformer": "model",
    "load": "api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'llama' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"llama.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
