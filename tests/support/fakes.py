"""Small stand-ins: a model that follows a script, tokenizers, and a tiny checkpoint.

The checkpoint is written by transformers and tokenizers.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.generation import Generation
from llama.rows import Rows

NAN = -1  # in a script: the model's logits are not numbers here


class Ids:
    """A tokenizer whose text spells ids."""

    bos_id, adds_bos, stop_tokens = None, False, ()

    def encode(self, s: str, *, bos: bool, eos: bool, begins: bool = True) -> list[int]:
        return [int(word) for word in s.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def stream(self) -> Any:
        return self

    def feed(self, id: int) -> str:
        return f"{id} "

    def flush(self) -> str:
        return ""


def limits(*, vocab_size: int = 512, max_seq_len: int = 64) -> ModelArgs:
    return ModelArgs(vocab_size=vocab_size, max_seq_len=max_seq_len)


@dataclass
class Call:
    """One forward: the ids of each row without padding, their positions, and `logits`."""

    fed: list[list[int]]
    start_pos: list[int]
    logits: str


@dataclass
class Rested:
    """The cache of a scripted model: the rows that are left in the batch."""

    reserved: tuple[int, int]
    rows: list[int]
    bound: None = None
    layers: tuple[()] = ()
    whole_prompt: bool = False

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def repeat_first_row(self, rows: int) -> None:
        assert rows == len(self.rows)


@dataclass
class Scripted(Generation):
    """A model whose row b chooses scripts[b][n] after n new tokens, with a logit of `peak` against zeros."""

    scripts: Sequence[Sequence[int]]
    args: ModelArgs = field(default_factory=limits)
    kv_caching: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    peak: float = 10.0
    calls: list[Call] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def __call__(self, tokens: Tensor, start_pos: Rows, *, cache: Any, logits: Literal["all", "last"]) -> Tensor:
        starts, lengths = list(start_pos.starts), start_pos.lengths
        fed = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        self.calls.append(Call(fed, starts, logits))
        self.prompts[:] = self.prompts or fed  # the first call is fed these
        rows = cache.rows if cache is not None else self._rows_of(fed)
        scores = torch.zeros(len(fed), tokens.shape[1] if logits == "all" else 1, self.args.vocab_size)
        for place, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            at = scores[place, length - 1 if logits == "all" else 0]
            script = self.scripts[row]
            says = script[min(start + length - len(self.prompts[row]), len(script) - 1)]
            at[says] = self.peak if says != NAN else torch.nan
        return scores

    def _rows_of(self, prefixes: list[list[int]]) -> list[int]:
        """Return the numbers of these rows by their prompts."""
        left = dict(enumerate(self.prompts))
        rows = [next(row for row, prompt in left.items() if prefix[: len(prompt)] == prompt) for prefix in prefixes]
        assert len(set(rows)) == len(rows), f"prompts that begin alike need a cache: {prefixes}"
        return rows

    def new_cache(self, kind: str | None = None, *, rows: int = 0, length: int = 0) -> Any:
        self.prompts[:] = []
        return Rested((rows, length), list(range(rows)))

    def with_kv_caching(self, value: bool) -> "Scripted":
        self.prompts[:] = []
        return replace(self, kv_caching=value)


class Bytes:
    """A tokenizer whose ids are the 256 bytes, and 256 to begin and 257 to end a text; 300 stands for "hello"."""

    bos_id: int | None = 256
    stop_tokens = (257,)

    def __init__(self, *, adds_bos: bool = True) -> None:
        self.adds_bos = adds_bos

    def encode(self, s: str, *, bos: bool, eos: bool, begins: bool = True) -> list[int]:
        return [256] * bos + list(s.encode()) + [257] * eos

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(piece, ids)).decode(errors="replace")

    def stream(self) -> "ByteStream":
        return ByteStream()


class ByteStream:
    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id: int) -> str:
        return self.decoder.decode(piece(id))

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


def piece(id: int) -> bytes:
    """Return the bytes that an id of `Bytes` stands for."""
    return {256: b"<bos>", 257: b"<eos>", 300: b"hello"}.get(id) or bytes([id])


SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


# Sizes that the native code computes: it takes 32 numbers at a time.
NATIVE_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


def write_checkpoint(folder: Path, *, max_seq_len: int = 128, **sizes: int) -> Path:
    """Write a random model of two layers, and a tokenizer of 256 bytes, a few merges and Llama 3's chat marks.

    `sizes` are fields of transformers' config.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello", "\u0120t", "\u0120the"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "t"), ("\u0120t", "he")]
    tokenizer = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    bos, eos, eot = (tokenizer.token_to_id(SPECIALS[i]) for i in (0, 1, 4))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], bos)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}))
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **{**small, **sizes},
        num_hidden_layers=2,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=max_seq_len,
        bos_token_id=bos,
        eos_token_id=[eos, eot],
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
