"""Small stand-ins: a model that follows a script, tokenizers, and a tiny checkpoint.

The checkpoint is written by transformers and tokenizers.
"""

import codecs
import json
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakSet

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
        rows = [next((row for row, start in left.items() if prefix[: len(start)] == start), -1) for prefix in prefixes]
        assert -1 not in rows, f"these begin with no prompt: {prefixes}"
        assert len(set(rows)) == len(rows), f"prompts that begin alike need a cache: {prefixes}"
        return rows

    def new_cache(self, kind: str | None = None, *, rows: int = 0, length: int = 0) -> Any:
        self.prompts[:] = []
        return Rested((rows, length), list(range(rows)))

    def with_kv_caching(self, value: bool) -> "Scripted":
        self.prompts[:] = []
        return replace(self, kv_caching=value)


class Memory:
    """The cache of a model whose logits are drawn from the whole text: it holds the ids that were fed, and counts them.

    most: the most positions that all caches have held at a time.
    """

    bound, kind, source = None, "static", None
    whole_prompt = False
    layers: tuple[()] = ()
    most: ClassVar[int] = 0
    all: ClassVar[WeakSet["Memory"]] = WeakSet()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        with Memory.lock:
            Memory.all.add(self)

    def check_joins(self) -> None: ...

    def sibling(self, length: int = 0) -> "Memory":
        return Memory()

    def join(self, other: "Memory", rows: int, length: int) -> None:
        assert len(self.rows) == rows
        assert len(other.rows[0]) == length
        self.rows.append(other.rows.pop())

    def row_copy(self, row: int, length: int) -> "Memory":
        made = Memory()
        assert len(self.rows[row]) >= length
        made.rows = [self.rows[row][:length]]
        return made

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def repeat_first_row(self, rows: int) -> None:
        assert rows == 1

    def position_bytes(self, itemsize: int) -> int:
        return 1

    def predicted_bytes(self, *, prompts: Sequence[int], ends: Sequence[int], **_: object) -> int:
        return sum(ends)

    def text_bytes(self, *, prompt: int, end: int, itemsize: int) -> int:
        return end

    def write(self, rows: Rows, tokens: list[list[int]]) -> None:
        if not self.rows:
            self.rows = [[] for _ in tokens]
        assert len(self.rows) == len(tokens)
        for held, start, length, ids in zip(self.rows, rows.starts, rows.lengths, tokens, strict=True):
            assert start <= len(held), "a gap"
            held[start:] = ids[:length]
        with Memory.lock:  # clients of a server compute texts in other threads
            Memory.most = max(Memory.most, sum(len(row) for cache in Memory.all for row in cache.rows))


class Remembering(Generation):
    """A model whose logits are drawn by a seed that is made of all ids of a row: one wrong id, and a text differs.

    broken: if set, raised by the next call. nan: if set, the next call gives its last row logits that are not numbers.
    repeats: only the last three ids count, so greedy texts repeat themselves.
    """

    kv_caching, kv_cache, source = True, "static", None
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, vocab_size: int = 7, max_seq_len: int = 64, *, repeats: bool = False) -> None:
        self.args, self.repeats = limits(vocab_size=vocab_size, max_seq_len=max_seq_len), repeats
        self.broken: Exception | None = None
        self.nan = False

    def new_cache(self, kind: str | None = None, *, rows: int = 0, length: int = 0) -> Any:
        return Memory()

    def with_kv_caching(self, value: bool) -> "Remembering":
        return self

    def __call__(self, tokens: Tensor, start_pos: Rows, *, cache: Any, logits: Literal["all", "last"]) -> Tensor:
        error, self.broken = self.broken, None
        if error is not None:
            raise error
        rows = [row[:length] for row, length in zip(tokens.tolist(), start_pos.lengths, strict=True)]
        if cache is not None:
            cache.write(start_pos, tokens.tolist())
            rows = cache.rows
        drawn = torch.zeros(len(rows), start_pos.width if logits == "all" else 1, self.args.vocab_size)
        for place, (row, length) in enumerate(zip(rows, start_pos.lengths, strict=True)):
            for back in range(length if logits == "all" else 1):
                at = length - 1 - back if logits == "all" else 0
                drawn[place, at] = self.drawn(row[: len(row) - back])
        if self.nan:
            drawn[-1], self.nan = torch.nan, False
        return drawn

    def drawn(self, ids: Sequence[int]) -> Tensor:
        seed = zlib.crc32(bytes(ids[-3:] if self.repeats else ids))
        return 3 * torch.randn(self.args.vocab_size, generator=torch.Generator().manual_seed(seed))


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
