"""How byte-level vocabularies cut a text into the words inside which tokens are merged: the ways that are known here.

Each stands as the makers of the vocabulary publish it: Llama 3 (https://github.com/meta-llama/llama3,
llama/tokenizer.py), GPT-2 (https://github.com/openai/gpt-2, src/encoder.py), the others in their tokenizer.json.
A pattern of a file is never run: it is looked up here. Knows no library.
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
class Cutting:
    """One way to cut: by a pattern, or by GPT-2's (None), before which digits may be taken out one by one.

    whole_words: a word of the vocabulary is taken whole, merged or not. adds_bos: whether llama.cpp adds a BOS where
    the file does not say.
    """

    pattern: str | None
    digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False


# tokenizer.ggml.pre -> what llama.cpp does for it (src/llama-vocab.cpp). Its "default", which it takes for files that
# do not say, is no model's own and is refused.
CUTTINGS = {
    "llama-bpe": Cutting(LLAMA3_PATTERN, whole_words=True, adds_bos=True),
    "qwen2": Cutting(QWEN2_PATTERN),
    "tekken": Cutting(TEKKEN_PATTERN, whole_words=True, adds_bos=True),
    "smollm": Cutting(None, digits=True),
    "gpt-2": Cutting(None),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def steps(cutting: Cutting) -> list[dict[str, Any]]:
    """Return the pre_tokenizer steps of a tokenizer.json that cuts so; settings of offsets alone are left out."""
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": cutting.pattern is None}
    if cutting.pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": cutting.pattern}, "behavior": "Isolated", "invert": False}
        return [split, to_bytes]
    return [{"type": "Digits", "individual_digits": True}, to_bytes] if cutting.digits else [to_bytes]
