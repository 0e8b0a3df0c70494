"""Text <-> ids: the three kinds of tokenizer file, and the formats of chats."""

from llama.tokenizer.tokenizer import MissingTokenizer, TextStream, Tokenizer

__all__ = ["MissingTokenizer", "TextStream", "Tokenizer"]
