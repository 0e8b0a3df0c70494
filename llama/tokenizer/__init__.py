"""Text <-> ids: the three kinds of tokenizer file, and the formats of chats."""

from llama.tokenizer.tokenizer import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer"]
