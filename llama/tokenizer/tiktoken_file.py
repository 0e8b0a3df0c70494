"""Meta's tokenizer.model for Llama 3: lines of tokens and ranks for tiktoken, and the special tokens of Meta's code."""

import base64
import io
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from llama.tokenizer.byte_letters import byte_letters
from llama.tokenizer.patterns import LLAMA3_PATTERN
from llama.tokenizer.vocabulary import GgufTokens, Vocabulary, library_errors, parts
from llama.untrusted.model_proto import MAX_TOKEN_LENGTH, MAX_WORDS

_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
_N_SPECIALS = 256

# Above these limits tiktoken panics or its regex fails; Meta's values (https://github.com/openai/tiktoken/issues/195).
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_MAX_LINE = 2 * MAX_TOKEN_LENGTH  # bytes: base64 has four letters for three
_RUNS = re.compile(r"\s+|\S+")


def read_tiktoken(path: Path, data: bytes) -> Vocabulary:
    """Return the vocabulary in the content of a file. Raises ValueError with the line."""
    ranks = _ranks(path, data)
    n_reserved = _N_SPECIALS - len(_SPECIALS)
    texts = [*_SPECIALS, *(f"<|reserved_special_token_{2 + i}|>" for i in range(n_reserved))]
    special_tokens = {text: len(ranks) + i for i, text in enumerate(texts)}
    return Vocabulary(
        codec=TiktokenCodec(ranks, special_tokens),
        size=len(ranks) + len(special_tokens),
        pieces=dict(enumerate([*ranks, *(text.encode() for text in texts)])),
        special_tokens=special_tokens,
        user_tokens={},
        bos_id=special_tokens["<|begin_of_text|>"],
        eos_ids=[special_tokens["<|end_of_text|>"]],
        pad_id=special_tokens["<|finetune_right_pad_id|>"],
        adds_bos=True,
        chat_template=None,
    )


def _ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Return the ranks from lines "<base64 of the token> <rank>" with the ranks 0, 1, 2, ...

    A skipped line would shift every special id by one, so anything unexpected raises ValueError.
    """
    if (lines := data.count(b"\n")) > MAX_WORDS - _N_SPECIALS:
        raise ValueError(f"{path}: {lines} lines are more than the limit of {MAX_WORDS - _N_SPECIALS} tokens")
    ranks: dict[bytes, int] = {}
    for rank, line in enumerate(iter(partial(io.BytesIO(data).readline, _MAX_LINE), b"")):
        try:
            token = _token(line, rank)
            if ranks.setdefault(token, rank) != rank:
                raise ValueError(f"token {token!r:.80} is also on line {ranks[token] + 1}")
        except ValueError as error:
            raise ValueError(f"{path}, line {rank + 1}: {error}") from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}: {len(missing)} of the 256 single bytes are missing, first {missing[0]:#04x}")
    return ranks


def _token(line: bytes, rank: int) -> bytes:
    try:
        spelled, stated = line.rstrip(b"\r\n").split(b" ")
        token = base64.b64decode(spelled, validate=True)
    except ValueError:
        raise ValueError(
            "expected a token in base64 and its rank; is this a tokenizer.model of Llama 3 (such lines) or Llama 2 "
            "(made by SentencePiece)?"
        ) from None
    if stated != b"%d" % rank:
        raise ValueError(f"the rank is {stated[:20]!r} but must be {rank}")
    if not 0 < len(token) <= MAX_TOKEN_LENGTH:
        raise ValueError(f"a token of {len(token)} bytes; it must have 1 to {MAX_TOKEN_LENGTH}")
    return token


class TiktokenCodec:
    """Encodes by tiktoken, which gets no special tokens and so cannot find any in a text."""

    sentencepiece = shortens = False

    def __init__(self, ranks: dict[bytes, int], special_tokens: Mapping[str, int]) -> None:
        import tiktoken  # only this kind of file needs it

        self._ranks, self._special_tokens = ranks, special_tokens
        self._bpe = tiktoken.Encoding("llama", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str, special: frozenset[str], *, begins: bool) -> list[int]:
        """Return the ids; runs of 25,000 (non-)spaces and texts of 400,000 characters are split as Meta does."""
        ids: list[int] = []
        for part in parts(text, {token: self._special_tokens[token] for token in special}):
            if isinstance(part, int):
                ids.append(part)
                continue
            with library_errors("tiktoken", f"encode the text that begins {part[:40]!r}"):
                for piece in _slices(part):
                    ids.extend(self._bpe.encode_ordinary(piece))
        return ids

    def to_gguf(self) -> GgufTokens:
        letters = dict(enumerate(byte_letters()))
        tokens = {rank: token.decode("latin-1").translate(letters) for token, rank in self._ranks.items()}
        merges = [" ".join(tokens[self._ranks[part]] for part in pair) for pair in self._merges()]
        return GgufTokens({"model": "gpt2", "pre": "llama-bpe", "merges": merges}, tokens, {})

    def _merges(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every pair that gives a token, in the order of Llama 3's tokenizer.json."""
        ranks = self._ranks
        for token in ranks:
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
            yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _slices(text: str) -> Iterator[str]:
    """Yield the parts of a text, split as Meta's tokenizer does, so that tiktoken takes linear time."""
    for begin in range(0, len(text), _MAX_CHARS):
        part = text[begin : begin + _MAX_CHARS]
        done = 0
        for run in _RUNS.finditer(part) if len(part) > _MAX_RUN else ():
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield part[done:cut]
                done = cut
        yield part[done:]
