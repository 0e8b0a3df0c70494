"""Records the ids that llama.cpp gives to nasty texts, for tests/tokenizer/test_tokenizer.py.

    pip install llama-cpp-python && python scripts/record_llama_cpp_ids.py

Special tokens are not parsed and no BOS is added. Knows llama.cpp; does not know our tokenizer, so that the two are
independent.
"""

import json
import random
from pathlib import Path

if __name__ == "__main__":
    from llama.cli import console

    console.quiet_imports()

import llama_cpp

from llama import cli
from llama.checkpoint.demo import demo_model_path

OUT = Path(__file__).parents[1] / "tests" / "tokenizer" / "fixtures" / "tokenizer_llama_cpp.json"

BY_HAND = [
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "a", " a", "a ", "  a", "   a  b   ", "Hello, world!",
    "hello\nworld", "1", " 1", "  1", "   1", "12", "1 2", "1  2", "a1b2", "3.14159", "2024-01-31", "1,000,000",
    "  42  ", "\n1", "\n\n 1", "x\t1", "½", "Ⅷ", "٣٤", "१२३", "x²", "1st 2nd", "don't", "DON'T",
    "we'll they've I'm you're he'd it's", "'s", "' s", "'S 'T", "'1", "5's", "<|im_start|>system\n", "<|im_end|>",
    "<|endoftext|>", "a<|im_end|>b", "<repo_name>", "<|im_", "<|im_start|><|im_start|>", "<|begin_of_text|>", "é",
    "e\u0301", "naïve café", "Ünïcödé", "ﬁ", "ß", "İ", "\u017f", "'\u017f", "日本語", "こんにちは 世界",
    "안녕하세요", "Привет, мир", "مرحبا", "שלום", "नमस्ते", "ไทย", "\U0001d4b3\U0001d4ce", "😀", "😀😀 😀",
    "👨‍👩‍👧‍👦", "🇫🇷🇩🇪", "👍🏽", "\u00a0", "a\u00a0b", "\u3000", "a\u3000\u3000b", "\u2028", "\u2029x", "\u200b",
    "a\u200bb", "\ufeff", "a\u0085b", "\x00", "a\x00b", "\x01", "\x07", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f",
    "\x04", "a\x06b", "\x1d", "\U00040000", " \U00080000\n", "\u0080", "\u07ff", "\uffff", "\U0010ffff", "\ue000",
    "\ufffd", "!!!", "?!?", " !", "  !", "!\n", "!\n\n", " !\n 1", "...", "…", "--", "——", "_", "__init__",
    "a_b", "if (x==1) {\n\treturn x;\n}\n", "    def f(self):\n        pass\n", "https://example.org/?q=1&r=%20",
    "C:\\dir\\file", "$100", "€5", "£ 5", "100%", "a+b=c", "a@b.c", "#tag", "``` \n```", "\"quoted\"", "(((",
    ")))", "[1, 2]", "{\"a\": 1}", "The quick brown fox jumps over the lazy dog.", "ALLCAPS", "camelCase",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "=" * 80, " " * 100, "\n" * 50, " \t" * 20, "ab" * 60, "1" * 40, "Ġ", "ĠĠ",
    "Ċ", "Ġthe", "▁", "▁the", "č", "ł",
]  # fmt: skip

ATOMS = [
    " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "1", "42", "٣", "½", "a", "The", "hello", "é", "ñ",
    "日", "本語", "한", "Д", "ع", "😀", "👩‍🚀", "'", "'s", "'ll", "'T", "!", "?", ".", ",", "...", "-", "_", "(",
    ")", "<|im_end|>", "<|", "|>", "#", "/", "\\", "\"", "=", "==", "+", "$", "€", "e\u0301", "\u200d", "\u2028",
    "zz", "ing", "tion", "XYZ", "ß", "ǅ", "ʰ", "ª", "\u3007",
]  # fmt: skip


def texts() -> list[str]:
    """Return the texts by hand and 300 random ones, the same on every run."""
    rng = random.Random(1)
    mixed = ["".join(rng.choices(ATOMS, k=rng.randint(2, 16))) for _ in range(220)]
    planes = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x600, 0x6FF), (0x3040, 0x30FF), (0x1F300, 0x1F64F)]
    wild = ["".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 12))) for _ in range(80)]
    return [*BY_HAND, *mixed, *wild]


def main() -> int:
    """Write the file of texts and ids."""
    path = demo_model_path()
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    cases = [[text, model.tokenize(text.encode(), add_bos=False, special=False)] for text in texts()]
    facts = {
        "made_by": "python scripts/record_llama_cpp_ids.py",
        "with": f"llama-cpp-python {llama_cpp.__version__}",
        "model": path.name,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    OUT.write_text(f'{{"facts": {json.dumps(facts)}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} texts -> {OUT}")
    return 0


if __name__ == "__main__":
    cli.main(main)
