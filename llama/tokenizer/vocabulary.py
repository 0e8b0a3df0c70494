"""What the three kinds of tokenizer file hold in common: Meta's tokenizer.model, tokenizer.json, GGUF metadata.

Knows files, merges and how tiktoken merges. Does not know texts, models, or how a GGUF file is read.
"""

import base64
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

# How text is cut into the pieces inside which tokens are merged.
# Meta publishes Llama 3's with the tokenizer (https://github.com/meta-llama/llama3, llama/tokenizer.py), OpenAI GPT-2's
# (https://github.com/openai/gpt-2, src/encoder.py).
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2 first cuts every digit out and then applies GPT-2's pattern to what lies between. A digit therefore ends a run
# of spaces just as the end of the text does, and one pattern says both steps exactly.
SMOLLM_PATTERN = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

_SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
_TO_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
# The steps of a pre_tokenizer in tokenizer.json -> the pattern that does the same.
_HUGGINGFACE_PATTERNS = (
    ([_SPLIT, _TO_BYTES], LLAMA3_PATTERN),
    ([_DIGITS, _GPT2], SMOLLM_PATTERN),
    ([_GPT2], GPT2_PATTERN),
)
# tokenizer.ggml.pre -> pattern, and whether a word of the vocabulary is taken whole and a BOS added unless the file
# says otherwise: as in llama.cpp. Its "default", for files that do not say, is no model's own and is refused.
_GGUF_PATTERNS = {
    "llama3": (LLAMA3_PATTERN, True),
    "llama-v3": (LLAMA3_PATTERN, True),
    "llama-bpe": (LLAMA3_PATTERN, True),
    "smollm": (SMOLLM_PATTERN, False),
    "gpt-2": (GPT2_PATTERN, False),
}
# The name under which a pattern is written.
_GGUF_PRE = {LLAMA3_PATTERN: "llama-bpe", SMOLLM_PATTERN: "smollm", GPT2_PATTERN: "gpt-2"}
_END_OF_MESSAGE = "<|eom_id|>"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # tokenizer.ggml.token_type

_META_SPECIALS = (
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
_N_META_SPECIALS = 256

_MAX_FILE_BYTES = 64 << 20
_MAX_TOKEN_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What the three kinds of file have in common once they are read."""

    pattern: str
    ranks: dict[bytes, int]  # what tiktoken merges, numbered in the order of merging
    ids: Sequence[int]  # rank -> id
    pieces: dict[int, bytes]  # id -> bytes, of ordinary tokens
    special_tokens: dict[str, int]
    user_tokens: dict[str, int]  # added as plain text: taken whole wherever a text contains them
    bos_id: int | None
    eos_ids: list[int]
    pad_id: int | None
    adds_bos: bool
    chat_template: str | None

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("the vocabulary has no tokens that text could become")
        used = dict.fromkeys(self.pieces, "an ordinary token")
        for text, token_id in (self.special_tokens | self.user_tokens).items():
            if not text or token_id in used:
                raise ValueError(f"added token {text!r}: empty, or its id {token_id} is {used.get(token_id)}'s too")
            used[token_id] = repr(text)
        for named in (self.bos_id, self.pad_id, *self.eos_ids):
            if named is not None and named not in used:
                raise ValueError(f"bos, eos or pad id {named!r} is not in the vocabulary")
        if self.adds_bos and self.bos_id is None:
            raise ValueError("the file asks for a BOS token before each text but names none")


# ---- Meta's tokenizer.model ------------------------------------------------------------------------------------------


def meta_vocabulary(path: Path) -> Vocabulary:
    ranks = _meta_ranks(path)
    n_reserved = _N_META_SPECIALS - len(_META_SPECIALS)
    texts = [*_META_SPECIALS, *(f"<|reserved_special_token_{2 + i}|>" for i in range(n_reserved))]
    special_tokens = {text: len(ranks) + i for i, text in enumerate(texts)}
    return Vocabulary(
        pattern=LLAMA3_PATTERN,
        ranks=ranks,
        ids=range(len(ranks)),
        pieces={rank: token for token, rank in ranks.items()},
        special_tokens=special_tokens,
        user_tokens={},
        bos_id=special_tokens["<|begin_of_text|>"],
        eos_ids=[special_tokens["<|end_of_text|>"]],
        pad_id=special_tokens["<|finetune_right_pad_id|>"],
        adds_bos=True,
        chat_template=None,
    )


def _meta_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of "<base64 of the token> <rank>", where the ranks are 0, 1, 2, ...

    A skipped line would shift every special id by one, so anything unexpected is refused.
    """
    ranks: dict[bytes, int] = {}
    for rank, line in enumerate(_read(path).splitlines()):
        where = f"{path}, line {rank + 1}"
        try:
            spelled, stated = line.split(b" ")
            token = base64.b64decode(spelled, validate=True)
        except ValueError:
            raise ValueError(
                f"{where}: expected a token in base64 and its rank; is this a Llama 3 tokenizer.model? "
                "(Llama 2's, made by SentencePiece, is not supported)"
            ) from None
        if stated != str(rank).encode():
            raise ValueError(f"{where}: the rank is {stated[:20]!r} but must be {rank}")
        if not 0 < len(token) <= _MAX_TOKEN_BYTES:
            raise ValueError(f"{where}: a token of {len(token)} bytes; it must have 1 to {_MAX_TOKEN_BYTES}")
        if token in ranks:
            raise ValueError(f"{where}: token {token!r} stands on line {ranks[token] + 1} already")
        ranks[token] = rank
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}: {len(missing)} of the 256 single bytes are missing, first {missing[0]:#04x}")
    return ranks


# ---- Hugging Face's tokenizer.json -----------------------------------------------------------------------------------


def huggingface_vocabulary(path: Path) -> Vocabulary:
    spec = _read_json(path)
    settings = _read_json(path.parent / "tokenizer_config.json", optional=True)
    # transformers takes the ends of a text from generation_config.json, and from config.json only without it.
    defaults = _read_json(path.parent / "generation_config.json", optional=True)
    defaults = defaults or _read_json(path.parent / "config.json", optional=True)
    _refuse_unsupported(spec)
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    special_tokens = {token["content"]: token["id"] for token in spec["added_tokens"] if token["special"]}
    model = spec["model"]
    ranks, ids, pieces = _byte_level_merges(
        {text: token_id for text, token_id in model["vocab"].items() if text not in added},
        [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]],
        whole_words=bool(model.get("ignore_merges")),
    )
    opening = _template_opening(spec.get("post_processor"))
    bos_ids = _named_ids("bos", settings, defaults, added) or [added[text] for text in opening]
    if opening and added[opening[0]] != bos_ids[0]:
        raise ValueError(f"post_processor puts {opening[0]!r} before each text, which is not the BOS token")
    return Vocabulary(
        pattern=_huggingface_pattern(spec["pre_tokenizer"]),
        ranks=ranks,
        ids=ids,
        pieces=pieces,
        special_tokens=special_tokens,
        user_tokens={text: token_id for text, token_id in added.items() if text not in special_tokens},
        bos_id=next(iter(bos_ids), None),
        eos_ids=_named_ids("eos", settings, defaults, added),
        pad_id=next(iter(_named_ids("pad", settings, defaults, added)), None),
        adds_bos=bool(opening),  # as in transformers, which lets add_bos_token of tokenizer_config.json go unheard
        chat_template=_huggingface_chat_template(path.parent, settings),
    )


def _refuse_unsupported(spec: dict[str, Any]) -> None:
    model = spec["model"]
    if model["type"] != "BPE":
        raise ValueError(f"model type {model['type']!r} is not supported, only byte-level BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{key}={model[key]!r} of the BPE model is not supported")
    if spec.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []}):
        raise ValueError(f"normalizer {spec['normalizer']['type']} is not supported: it changes the text")
    if spec.get("decoder") and spec["decoder"]["type"] != "ByteLevel":
        raise ValueError(f"decoder {spec['decoder']['type']} is not supported, only ByteLevel")
    for token in spec["added_tokens"]:
        for key in ("single_word", "lstrip", "rstrip"):
            if token.get(key):
                raise ValueError(f"added token {token['content']!r}: {key}=true is not supported")


def _huggingface_pattern(spec: dict[str, Any] | None) -> str:
    steps = [] if spec is None else spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    for step in steps:
        if step["type"] == "ByteLevel":
            step.setdefault("use_regex", True)  # absent from older files
    for known, pattern in _HUGGINGFACE_PATTERNS:
        if steps == known:
            return pattern
    raise ValueError(f"pre_tokenizer {json.dumps(spec)[:300]} is not supported, only Llama 3's, SmolLM2's and GPT-2's")


def _template_opening(processor: dict[str, Any] | None) -> list[str]:
    """Return the token, if any, that a post_processor puts before a text; refuse one that does more."""
    if processor is None or processor["type"] == "ByteLevel":  # that one only counts offsets
        return []
    if processor["type"] == "Sequence":
        return [text for step in processor["processors"] for text in _template_opening(step)]
    if processor["type"] != "TemplateProcessing":
        raise ValueError(f"post_processor {processor['type']} is not supported")
    *opening, body = processor["single"]
    if "Sequence" not in body or len(opening) > 1:
        raise ValueError("post_processor adds tokens other than one before the text, which is not supported")
    return [part["SpecialToken"]["id"] for part in opening]


def _named_ids(name: str, settings: dict[str, Any], defaults: dict[str, Any], added: dict[str, int]) -> list[int]:
    """Return the ids that the files beside tokenizer.json give to "bos", "eos" or "pad": tokenizer_config's first."""
    text = settings.get(f"{name}_token")
    text = text["content"] if isinstance(text, dict) else text
    if text is not None and text not in added:
        raise ValueError(f"tokenizer_config.json: {name}_token {text!r} is not an added token of tokenizer.json")
    stated = defaults.get(f"{name}_token_id")
    stated = stated if isinstance(stated, list) else [stated]
    ids = [*([] if text is None else [added[text]]), *(i for i in stated if i not in (None, -1))]
    return list(dict.fromkeys(ids))


def _huggingface_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return _read(beside).decode()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    prefix = "tokenizer.ggml."
    facts = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if facts.get("model") != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={facts.get('model')!r} is not supported, only byte-level BPE ('gpt2')")
    if facts.get("pre") not in _GGUF_PATTERNS:
        raise ValueError(f"tokenizer.ggml.pre={facts.get('pre')!r} is not supported, only {', '.join(_GGUF_PATTERNS)}")
    for key in ("add_eos_token", "add_space_prefix"):
        if facts.get(key):
            raise ValueError(f"tokenizer.ggml.{key}=true is not supported")
    pattern, whole_words = _GGUF_PATTERNS[facts["pre"]]
    vocab, special_tokens, user_tokens = _by_type(facts["tokens"], facts["token_type"])
    ranks, ids, pieces = _byte_level_merges(
        vocab, [merge.split(" ") for merge in facts["merges"]], whole_words=whole_words
    )
    ends = [facts.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    return Vocabulary(
        pattern=pattern,
        ranks=ranks,
        ids=ids,
        pieces=pieces,
        special_tokens=special_tokens,
        user_tokens=user_tokens,
        bos_id=facts.get("bos_token_id"),
        eos_ids=[end for end in ends if end is not None],
        pad_id=facts.get("padding_token_id"),
        adds_bos=facts.get("add_bos_token", whole_words),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _by_type(tokens: list[str], types: list[int]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Sort tokens into ordinary, special and user's: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    if len(tokens) != len(types):
        raise ValueError(f"{len(tokens)} tokens but {len(types)} token types")
    vocab: dict[str, int] = {}
    special_tokens: dict[str, int] = {}
    user_tokens: dict[str, int] = {}
    # Unknown and unused tokens are like control tokens: they have a text and no text becomes them.
    special = dict.fromkeys((_UNKNOWN, _CONTROL, _UNUSED), special_tokens)
    tables = {_NORMAL: vocab, _USER_DEFINED: user_tokens, **special}
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in tables:
            raise ValueError(f"token {token_id}, {text!r}, has type {kind!r}, which is not supported")
        if any(text in table for table in (vocab, special_tokens, user_tokens)):
            raise ValueError(f"token {token_id}, {text!r}, stands in the vocabulary twice")
        tables[kind][text] = token_id
    return vocab, special_tokens, user_tokens


def gguf_metadata(vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """Return the keys that `gguf_vocabulary` reads as this vocabulary, filled up to `size` tokens with unused ones.

    Raises ValueError where there are none.
    """
    pre = _GGUF_PRE[vocabulary.pattern]
    letters = {byte: letter for letter, byte in _byte_alphabet().items()}
    tokens, types = [f"[PAD{token_id}]" for token_id in range(size)], [_UNUSED] * size
    for token_id, piece in vocabulary.pieces.items():
        tokens[token_id], types[token_id] = "".join(letters[byte] for byte in piece), _NORMAL
    for kind, table in ((_CONTROL, vocabulary.special_tokens), (_USER_DEFINED, vocabulary.user_tokens)):
        for text, token_id in table.items():
            tokens[token_id], types[token_id] = text, kind
    merges = _merges_of(vocabulary.ranks, every_way=_GGUF_PATTERNS[pre][1])
    facts: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types}
    facts["merges"] = [" ".join("".join(letters[byte] for byte in part) for part in merge) for merge in merges]
    ids = {"bos": vocabulary.bos_id, "padding": vocabulary.pad_id, **_named_ends(vocabulary)}
    facts |= {f"{name}_token_id": token_id for name, token_id in ids.items() if token_id is not None}
    facts["add_bos_token"] = vocabulary.adds_bos
    metadata = {f"tokenizer.ggml.{key}": value for key, value in facts.items()}
    if vocabulary.chat_template is not None:
        metadata["tokenizer.chat_template"] = vocabulary.chat_template
    _check_read_back(vocabulary, gguf_vocabulary(metadata))
    return metadata


def _merges_of(ranks: dict[bytes, int], *, every_way: bool) -> Iterator[tuple[bytes, ...]]:
    """Yield the merges that make the tokens in the order of their ranks: one for each, or every pair that spells it.

    Files in which words are taken whole list every pair, as transformers' converter from tiktoken does.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        if not every_way:
            yield _last_parts(token, ranks)
            continue
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        yield from sorted(
            (split for split in splits if ranks.keys() >= set(split)), key=lambda split: [ranks[part] for part in split]
        )


def _named_ends(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ends of a text under the three names that a file has for them; others have to go."""
    named = dict(zip(("eos",), vocabulary.eos_ids, strict=False))
    for token_id in vocabulary.eos_ids[1:]:
        is_eom = vocabulary.special_tokens.get(_END_OF_MESSAGE) == token_id
        named.setdefault("eom" if is_eom else "eot", token_id)
    return named


def _check_read_back(written: Vocabulary, read: Vocabulary) -> None:
    """Refuse, by name, what a reader would take for something else; tokens that fill up are no difference."""
    special = {text: token_id for text, token_id in read.special_tokens.items() if text in written.special_tokens}
    ours, theirs = _facts(written), _facts(replace(read, special_tokens=special))
    lost = [name for name in ours if ours[name] != theirs[name]]
    if lost:
        raise ValueError(f"a .gguf file cannot say this tokenizer's {', '.join(lost)}: it would be read as another")


def _facts(vocabulary: Vocabulary) -> dict[str, object]:
    """Return what text and ids hang on, by name; how single bytes are ranked is nothing of it."""
    in_order = sorted(vocabulary.ranks, key=vocabulary.ranks.__getitem__)
    return {
        "pattern": vocabulary.pattern,
        "merges": [token for token in in_order if len(token) > 1],
        "ordinary tokens": vocabulary.pieces,
        "added tokens": vocabulary.user_tokens,
        "special tokens": vocabulary.special_tokens,
        "BOS": (vocabulary.bos_id, vocabulary.adds_bos),
        "ends of a text": set(vocabulary.eos_ids),
        "padding": vocabulary.pad_id,
    }


# ---- merges -> ranks -------------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable ones as themselves, the others as U+0100 and onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_merges(
    vocab: Mapping[str, int], merges: Iterable[Sequence[str]], *, whole_words: bool
) -> tuple[dict[bytes, int], list[int], dict[int, bytes]]:
    """Turn a vocabulary in GPT-2's spelling, and its merges, into tiktoken's ranks, rank -> id and id -> bytes."""
    alphabet = _byte_alphabet()
    spelled: dict[str, bytes] = {}
    for text, token_id in vocab.items():
        is_spelled = 0 < len(text) <= _MAX_TOKEN_BYTES and alphabet.keys() >= set(text)
        if type(token_id) is not int or token_id < 0 or not is_spelled:
            raise ValueError(f"token {text!r:.80} with id {token_id!r}: not a byte-level token, or not an id")
        spelled[text] = bytes(map(alphabet.__getitem__, text))
    pieces = {token_id: spelled[text] for text, token_id in vocab.items()}
    if len(pieces) != len(vocab):
        raise ValueError(f"{len(vocab)} tokens share {len(pieces)} ids")
    ranks = {token: rank for rank, token in enumerate(sorted(t for t in spelled.values() if len(t) == 1))}
    ways: dict[bytes, set[tuple[bytes, ...]]] = {}
    latest = b""
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= spelled.keys():
            raise ValueError(f"merge {merge!r}: not two ordinary tokens of the vocabulary that make a third")
        parts = tuple(spelled[text] for text in merge)
        token = b"".join(parts)
        if token != latest and token in ranks:  # in Llama 3's file the ways to make a token follow each other
            raise ValueError(f"merge {merge!r}: an earlier one, not just before, makes the same token")
        latest = token
        ranks.setdefault(token, len(ranks))
        ways.setdefault(token, set()).add(parts)
    _check_ranks(ranks, ways, spelled.values() if whole_words else None)
    id_of = {token: token_id for token_id, token in pieces.items()}
    return ranks, [id_of[token] for token in ranks], pieces


def _check_ranks(
    ranks: dict[bytes, int], ways: dict[bytes, set[tuple[bytes, ...]]], words: Collection[bytes] | None
) -> None:
    """Refuse merges that tiktoken would not follow exactly; `words` are those that are taken whole, merged or not.

    tiktoken joins neighbours that spell a token; a merge list joins the pairs that it names. They agree if merging by
    rank makes each token from its own bytes, in the end through a listed pair: as long as no merge has crossed the
    borders of two neighbours, merging went inside them as it goes in their joint text alone, so the two neighbours are
    that pair. Where words are taken whole and all ways to make a token are listed, as in Llama 3's file, the list was
    made from ranks, and tiktoken is what it imitates.
    """
    for token, listed in ways.items():
        if _last_parts(token, ranks) in listed:
            continue
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        if words is None or listed != {split for split in splits if ranks.keys() >= set(split)}:
            raise ValueError(f"the merges do not make token {token!r} from its own bytes, so ranks cannot replace them")
    if words is not None and (left := set(words) - ranks.keys()):
        raise ValueError(f"ignore_merges: token {min(left)!r} has no merge, which ranks cannot express")


def _last_parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """Merge the bytes of a token by rank, and stop one step short of the whole."""
    parts = [token[i : i + 1] for i in range(len(token))]
    never = len(ranks)
    while len(parts) > 2:
        steps = [ranks.get(left + right, never) for left, right in pairwise(parts)]
        lowest = min(steps)
        if lowest == never:
            break
        at = steps.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


# ---- files -----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise ValueError(f"{path} is a directory, not a tokenizer's file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a tokenizer's file has at most {_MAX_FILE_BYTES}")
    return path.read_bytes()


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, not a {type(value).__name__}")
    return value
