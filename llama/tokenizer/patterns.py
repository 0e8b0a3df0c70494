"""The supported pre-tokenizers of byte-level vocabularies: they split a text into words, in which tokens are merged.

Sources: Llama 3 (https://github.com/meta-llama/llama3, llama/tokenizer.py), GPT-2 (https://github.com/openai/gpt-2,
src/encoder.py), and the tokenizer.json of the other models. A pattern from a file is never run, only looked up here.
"""

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Split by a pattern, or by GPT-2's (None).

    digits: every digit is a word. whole_words: a word that is a token is not built by merges. adds_bos: whether
    llama.cpp adds a BOS if the file does not say.
    """

    pattern: str | None
    digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False


# tokenizer.ggml.pre -> what llama.cpp does for it (src/llama-vocab.cpp). Its "default", for files without the key, is
# not the pre-tokenizer of any model and is rejected.
PRE_TOKENIZERS = {
    "llama-bpe": PreTokenizer(LLAMA3_PATTERN, whole_words=True, adds_bos=True),
    "qwen2": PreTokenizer(QWEN2_PATTERN),
    "tekken": PreTokenizer(TEKKEN_PATTERN, whole_words=True, adds_bos=True),
    "smollm": PreTokenizer(None, digits=True),
    "gpt-2": PreTokenizer(None),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def steps(pre: PreTokenizer) -> list[dict[str, Any]]:
    """Return the pre_tokenizer steps of a tokenizer.json, without settings that only concern offsets."""
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": pre.pattern is None}
    if pre.pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
        return [split, to_bytes]
    return [{"type": "Digits", "individual_digits": True}, to_bytes] if pre.digits else [to_bytes]
