"""Vocabularies in each format, trained here by independent code, and thousands of difficult texts.

The patterns are copied from their publishers, not from `llama.tokenizer`.
"""

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from forge import add_value

from llama.tokenizer import Tokenizer

# Meta: https://github.com/meta-llama/llama3/blob/main/llama/tokenizer/tokenizer.py; the others: their tokenizer.json
PATTERNS = {
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
PRE = {"llama3": "llama-bpe", "qwen2": "qwen2", "tekken": "tekken", "smollm": "smollm", "gpt2": "gpt-2"}
WHOLE_WORDS = ("llama3", "tekken")

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they've done, isn't it?  Yes!\n\n",
    "In 1969 and 2024, 384,400 km; x = 3.14 * (y + 42)\n    return x\n",
    "été où naïve Straße Привет мир 日本語 こんにちは 한국어 مرحبا 😀😀 ½ ٣",
    "def f(self, a_b):\n\treturn self.x[0]  # a comment <|im_start|>\n",
    "We think that in this case the other one would be there, and here is what it was like.",
] * 3

ATOMS = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x85", "\u00a0", "\u2003", "\u2028",
    "\u200b", "\u202f", "\u3000", "\ufeff", "\u2581", "\u2581\u2581", "\x00", "\x01", "\x1b[31m", "\x7f", "\u0080",
    "1", "42", "007", "٣", "१२", "½", "Ⅷ", "²", "a", "A", "The", "hello", " the", "ing", "XYZ", "camelCase",
    "é", "e\u0301", "ñ", "ß", "İ", "ǅ", "\u017f", "'\u017f", "Д", "привет", "日本", "語", "한", "\u1112\u1161",
    "مرحبا", "שלום", "नमस्ते", "ไทย", "\u0327", "\u0301\u0323", "\u202e", "\u200f", "😀", "👩\u200d🚀", "👍🏽", "🇫🇷",
    "\u200d", "\ufe0f", "\ufffd", "\uffff", "\U0010ffff", "\ue000", "\U00040000", "ª", "ʰ",
    "'", "'s", "'S", "'ll", "'LL", "''", "\"", "!", "?", ".", "...", "…", "-", "--", "_", "__init__", "(", ")", "[0]",
    "{", "}", "==", "//", "/", "\\", "#", "$", "€", "£", "+", "``", "<0x41>", "<0x0A>", "<s>", "</s>", "<unk>", "<pad>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|", "|>", "<|im_", "[INST]", "[/INST]", "<<SYS>>",
    "if (x==1) {\n\treturn x;\n}\n", "    def f(self):\n        pass\n", "https://example.org/?q=1&r=%20",
)  # fmt: skip
_PLANES = ((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x52F), (0x590, 0x6FF), (0x900, 0xE7F), (0x1100, 0x11FF))
_PLANES += ((0x2000, 0x206F), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x1D400, 0x1D7FF), (0x1F300, 0x1F64F), (1, 0xD7FF))


@cache
def texts(count: int = 5000) -> list[str]:
    """Return texts of every kind, the same on every run: atoms alone, atoms mixed, characters of all planes."""
    rng = random.Random(20)
    found = ["", *ATOMS, *(a + b for a in ATOMS[:24] for b in ATOMS[::9])]
    while len(found) < count:
        if rng.random() < 0.6:
            found.append("".join(rng.choices(ATOMS, k=rng.randint(2, 14))))
        else:
            found.append("".join(chr(rng.randint(*rng.choice(_PLANES))) for _ in range(rng.randint(1, 12))))
    return found[:count]


def plain(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
    return tokenizer.encode(text, bos=False, eos=False, **options)


# ---- byte-level ------------------------------------------------------------------------------------------------------


def byte_level(style: str, *, nfc: bool = False, many: bool = True, **model: Any) -> Any:
    """Train BPE of bytes with a style's way to cut, as a Tokenizer of Hugging Face's library.

    With `many` tokens, of the texts themselves, so that where a text is cut shows in the ids.
    """
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers, trainers

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style not in PATTERNS)
    steps: list[Any] = [to_bytes]
    if style in PATTERNS:
        steps = [pre_tokenizers.Split(tokenizers.Regex(PATTERNS[style]), behavior="isolated"), to_bytes]
    elif style == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), to_bytes]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else to_bytes
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [*CORPUS, *texts()] if many else CORPUS,
        trainers.BpeTrainer(
            vocab_size=2000 if many else 600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def saved(directory: Path, tokenizer: Any, **beside: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json."""
    directory.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | beside))
    return directory


def gguf_of_byte_level(tokenizer: Any, pre: str) -> dict[str, Any]:
    """Return the keys of a GGUF file, as llama.cpp's converter lays them out."""
    spec = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = spec["model"]["vocab"]
    added = {token["content"]: token for token in spec["added_tokens"]}
    ids = vocab | {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [(3 if added[text]["special"] else 4) if text in added else 1 for text in tokens]
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    facts = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    facts |= {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in facts.items()}


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


@cache
def pieces(**changes: Any) -> bytes:
    """Train BPE of SentencePiece as Llama 2's was, and return the file."""
    import sentencepiece

    out = io.BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 2000,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.98,
        "num_threads": 1,
        "minloglevel": 2,
    }
    usual = set("".join((*CORPUS, *ATOMS)))  # of others there are more than a small vocabulary has room for
    chosen = [*CORPUS * 3, *(text for text in texts() if set(text) <= usual)]
    lines = [line for text in chosen for line in text.replace("\0", "").split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **(settings | changes))
    return out.getvalue()


def library_of(data: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=data)


def kind_of(library: Any, token_id: int) -> int:
    if library.is_unknown(token_id):
        return 2
    if library.is_control(token_id):
        return 3
    return 6 if library.is_byte(token_id) else 5 if library.is_unused(token_id) else 1


def gguf_of_pieces(data: bytes, **changes: Any) -> dict[str, Any]:
    """Return the keys of a GGUF file, as llama.cpp's converter lays them out for Llama 2."""
    library = library_of(data)
    ids = range(library.get_piece_size())
    facts = {
        "model": "llama",
        "pre": "default",
        "tokens": [library.id_to_piece(i) for i in ids],
        "scores": [library.get_score(i) for i in ids],
        "token_type": [kind_of(library, i) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (facts | changes).items() if value is not None}


def huggingface_of_pieces(data: bytes, *, metaspace: str | None = None, split: bool = False) -> Any:
    """Return the same as a Tokenizer of Hugging Face's library: by normalisation, or with Metaspace's scheme."""
    import tokenizers
    from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import generate_merges

    library = library_of(data)
    ids = range(library.get_piece_size())
    vocab = {library.id_to_piece(i): i for i in ids}
    scores = {library.id_to_piece(i): library.get_score(i) for i in ids}
    merges = generate_merges(vocab, scores, ["<unk>", "<s>", "</s>"])
    bpe = tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    if metaspace is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=metaspace, split=split)
    strip = [] if metaspace == "never" else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def write_gguf_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file that has a vocabulary and no weights, by the gguf package."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, size in (("block_count", 1), ("context_length", 64), ("embedding_length", 32)):
        writer.add_uint32(f"llama.{key}", size)
    writer.add_uint32("llama.feed_forward_length", 32)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("llama.rope.dimension_count", 8)
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def record(out: Path) -> None:
    """Write vocabularies in GGUF's keys and the ids that llama.cpp gives with them, for machines without it."""
    import tempfile

    import llama_cpp

    found = {style: gguf_of_byte_level(byte_level(style, many=False), PRE[style]) for style in ("llama3", "qwen2")}
    found["sentencepiece"] = gguf_of_pieces(pieces(vocab_size=900))
    vocabularies = {}
    for name, metadata in found.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_gguf_vocabulary(Path(folder) / "words.gguf", metadata)
            model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            cases = [
                [text, model.tokenize(text.encode(), add_bos=False, special=False)] for text in texts()[::16][:300]
            ]
        vocabularies[name] = {"metadata": metadata, "cases": cases}
    facts = {"made_by": "python tests/support/vocabularies.py", "with": f"llama-cpp-python {llama_cpp.__version__}"}
    out.write_text(json.dumps({"facts": facts, "vocabularies": vocabularies}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record(Path(__file__).parents[1] / "tokenizer" / "fixtures" / "vocabularies_llama_cpp.json")
