"""Malicious bytes as headers and JSON: what a parser accepts must be valid, and it may only raise its own errors.

Strategies draw JSON that is nearly valid; binary headers are mutated from malformed and valid files.
"""

import json
import struct
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from llama.checkpoint import huggingface
from llama.checkpoint.assemble import needed_shapes
from llama.untrusted.errors import CheckpointError
from llama.untrusted.gguf_header import parse_header as parse_gguf
from llama.untrusted.json_object import parse_object


def run_gguf(data: bytes) -> None:
    for arrays in (None, ("k",)):
        try:
            found = parse_gguf(data, arrays=arrays)
        except (ValueError, struct.error):
            continue
        spans = sorted((info.start, info.start + info.nbytes) for info in found.tensors.values())
        assert all(0 < begin < end <= len(data) for begin, end in spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(type(key) is str for key in found.metadata)


def run_json(data: bytes) -> None:
    try:
        content = parse_object(data)
    except ValueError:
        return
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)  # no NaN, and no half of a character
    assert parse_object(text.encode("utf-8")) == content


def run_index(data: bytes) -> None:
    try:
        places = huggingface.shards_of(Path("index.json"), parse_object(data))
    except CheckpointError as error:
        _check_message(str(error))
    except ValueError:
        pass
    else:
        assert all(Path("folder", file).parent == Path("folder") for file in places)
        assert all(file.endswith(".safetensors") and "\0" not in file for file in places)


def run_config(data: bytes) -> None:
    path = Path("config.json")
    try:
        config = parse_object(data)
        args, *_ = huggingface._args(path, config, huggingface._family(path, config))
    except CheckpointError as error:
        _check_message(str(error))
    except ValueError:
        pass
    else:
        assert needed_shapes(args)  # what is accepted can be built


def _check_message(message: str) -> None:
    assert message.isprintable()
    assert len(message) < 1000


PARSERS: dict[str, Callable[[bytes], None]] = {
    "gguf": run_gguf,
    "json": run_json,
    "index": run_index,
    "config": run_config,
}


# ---- grammars --------------------------------------------------------------------------------------------------------

_counts = st.one_of(st.integers(0, 9), st.sampled_from([16, 32, 64, 1 << 20, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]))
_names = st.one_of(st.text(max_size=8), st.sampled_from(["\x1b[2J", "\u202e", "\0", "k", "general.alignment"]))


_numbers = st.one_of(_counts, st.integers(-9, 9), st.just(10**80))
_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_names, inner, max_size=4)),
    max_leaves=12,
)


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


_VALID_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 520,
}
_KEYS = [
    *_VALID_CONFIG,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("rope_parameters", "tie_word_embeddings", "attention_bias", "hidden_act", "sliding_window"),
]
_ropes = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta", "beta_fast"]),
    st.one_of(st.sampled_from(["llama3", "linear", "yarn", "default"]), _numbers, _values),
)
_configs = st.dictionaries(st.sampled_from(_KEYS), st.one_of(_numbers, _values, _ropes), max_size=4).map(
    lambda change: _as_json(_VALID_CONFIG | change)
)
_places = st.one_of(
    st.just("a.safetensors"), st.sampled_from(["../a.safetensors", "b.safetensors", "a", "", 7]), _values
)

MUTATORS: dict[str, Any] = {}
STRATEGIES: dict[str, st.SearchStrategy[bytes]] = {
    "json": _values.map(_as_json),
    "index": st.dictionaries(_names, _places, max_size=4).map(lambda places: _as_json({"weight_map": places})),
    "config": _configs,
}


def seeds(name: str) -> list[bytes]:
    """Return files to begin with: the malformed ones of this kind, and a valid one."""
    from untrusted.malformed.cases import (
        BROKEN_JSON,
        GGUF_FILES,
        header,
        number,
        tensor,
    )

    def short(files: Mapping[str, tuple[str, Any]]) -> list[bytes]:
        return [content for _, content in files.values() if isinstance(content, bytes) and len(content) < 1 << 14]

    if name == "gguf":
        right = header(number(b"k", 7), tensors=(tensor(),)) + bytes(256)
        return [right, *short(GGUF_FILES)]
    right = _as_json(_VALID_CONFIG if name == "config" else {"weight_map": {"a": "a.safetensors"}})
    return [right, *short(BROKEN_JSON)]
