"""Text <-> ids: the three kinds of tokenizer file, and the formats of chats."""

from llama.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
