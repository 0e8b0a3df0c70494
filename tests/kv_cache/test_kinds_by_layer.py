"""Kinds of cache by layer: one grammar for all names, and each layer has its own kind."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Ids
from tiny import some_tokens, tiny_args, tiny_model

from llama.kv_cache import Cache, KVCache
from llama.kv_cache.names import kinds_by_layer
from llama.texts.session_file import _check_kind

BY_LAYER: dict[str, list[str]] = {
    "int4": ["int4"] * 4,
    "static@:2,-1;int4": ["static", "static", "int4", "static"],
    "static@:2,-2:;int4": ["static"] * 4,
    "int8@3;paged:9@1:-1;window:5+2@0": ["window:5+2", "paged:9", "paged:9", "int8"],
    "static@1;int8@:2;int4": ["int8", "static", "int4", "int4"],
    "static@-4,::2;int4": ["static", "int4", "static", "int4"],
    "static@:4": ["static"] * 4,
    "static@::9;int4": ["static", "int4", "int4", "int4"],
}


def test_each_layer_has_the_kind_of_the_first_part_that_names_it() -> None:
    for text, kinds in BY_LAYER.items():
        assert kinds_by_layer(text, 4) == kinds
        cache = Cache.of(tiny_args(n_layers=4, kv_cache="static"), text)
        assert [layer.args.kv_cache for layer in cache.layers] == kinds
        assert [type(layer) for layer in cache.layers] == [KVCache.named(kind) for kind in kinds]
        assert [layer.layer for layer in cache.layers] == [0, 1, 2, 3]
        assert cache.kind == text


BAD_BY_LAYER: dict[str, str] = {
    "static@:2": "names no kind for layers 2, 3 of 4; end it with ;KIND",
    "static@4;int4": "4 is outside of the model's 4 layers",
    "static@-5;int4": "-5 is outside of the model's 4 layers",
    "static@:5;int4": ":5 is outside of the model's 4 layers",
    "static@2:2;int4": "2:2 names none of the model's 4 layers",
    "static@1.5;int4": "'1.5' names no layers",
    "static@::0;int4": "'::0' names no layers",
    "static@1,;int4": "'' names no layers",
    "static@;int4": "the part 'static@' must be KIND or KIND@LAYERS",
    "static@0;;int4": "the part '' must be KIND or KIND@LAYERS",
    "static@0;int4;": "the part '' must be KIND or KIND@LAYERS",
    "": "the part '' must be KIND or KIND@LAYERS",
    "@0;int4": "the part '@0' must be KIND or KIND@LAYERS",
    "static;int4@0": "'static' has all layers, so none is left for 'int4@0'",
    "static@0;lru": "'lru' is not a known kind of cache",
    "static@0;window:0": "empty",
    "lru": "known are: ",
    "static:7": "takes no parameters",
    "window:3+4": "smaller than its 4 sinks",
    "window:big": "W+S",
    "window:24+4": "max_seq_len=24",
    "paged:-1": "most blocks",
    "nowhere.py:mine": "nowhere.py cannot be run: FileNotFoundError",
    f"{'x' * 3000}.py:mine": "cannot be run: OSError: [Errno",
    "x" * 3000: "is not a known kind of cache",
    f"duo-attention:{'x' * 3000}.json": "must have a list of KV heads for each of 4 layers",
}


def test_a_bad_name_is_refused_in_a_line_and_the_model_stays_as_it_was() -> None:
    model, tokenizer = tiny_model(n_layers=4).requires_grad_(False), Ids()
    model(some_tokens(1, 3))
    before = model.cache
    asks: list[Callable[[str], Any]] = [
        lambda text: tiny_model(n_layers=4, kv_cache=text),
        lambda text: setattr(model, "kv_cache", text),
        model.new_cache,
        lambda text: model.generate_tokens([[1]], 2, kv_cache=text),
        lambda text: model.session(tokenizer, kv_cache=text),  # type: ignore[arg-type]
    ]
    wrong = []
    for (text, says), ask in product(BAD_BY_LAYER.items(), asks):
        try:
            ask(text)
            wrong.append((text, "accepted"))
        except ValueError as refusal:
            if says not in str(refusal) or "\n" in str(refusal):
                wrong.append((text, str(refusal)))
    assert not wrong
    assert (model.kv_cache, model.cache) == ("static", before)


def test_a_file_of_code_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(ValueError, match=r"loop\.py cannot be run: OSError"):
        tiny_model(kv_cache=f"{tmp_path / 'loop.py'}:mine")


MIXED = "static@:1,-1;int4"


@torch.inference_mode()
@pytest.mark.parametrize("text", [MIXED, "concat@0;paged", "window:14+2@1;static", "int8@2;window:14+2@:2;paged"])
def test_kinds_that_differ_by_layer_each_do_their_own(text: str) -> None:
    """In the same call, even if only some kinds renumber positions for RoPE."""
    args = tiny_args(n_layers=4, head_dim=32, max_seq_len=100)
    model, tokens, given = tiny_model(args), some_tokens(1, 60), []
    model.kv_cache = text
    cache = model.new_cache()
    hooks = [
        layer.attention.register_forward_pre_hook(lambda _, given_: given.append(given_)) for layer in model.blocks
    ]
    for a, b in ((0, 40), (40, 45), *((at, at + 1) for at in range(45, 60))):
        given.clear()
        whole = model(tokens[:, a:b], a, cache=cache)
        assert whole.isfinite().all()
        for (_, rows, angles, layer), kind in zip(given, kinds_by_layer(text, 4), strict=True):
            assert layer.args.kv_cache == kind
            for ours, wanted in zip(angles, model.rope.at(layer.rope_starts(rows), b - a, model.device), strict=True):
                assert torch.equal(ours, wanted)
    for hook in hooks:
        hook.remove()


def test_a_bound_holds_only_if_all_layers_have_one() -> None:
    model = tiny_model(max_seq_len=64)
    assert model.new_cache("window:20+4@0;window:30+2").bound == 32
    assert model.new_cache("window:20+4@0;static").bound is None


def test_a_session_with_a_layer_of_another_kind_is_not_saved(tmp_path: Path) -> None:
    tokenizer: Any = Ids()
    session = tiny_model(n_layers=3, head_dim=32).session(tokenizer, kv_cache="int4@1;static")
    session.feed([1, 2, 3])
    session.cache.layers[1] = KVCache.of(tiny_args(head_dim=32, kv_cache="int8"), 1)
    with pytest.raises(ValueError, match="layer 1 has another kind, int8;"):
        session.save(tmp_path / "session")


@pytest.mark.parametrize("kind", ["static@0;evil.py:mine", "evil.py:mine@0;static", "static@0;of nobody"])
def test_a_session_file_that_names_code_or_an_unknown_kind_in_any_part_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(ValueError, match=r"a session may not, and none is run|a kind that is not known here"):
        _check_kind(kind.replace("evil.py", str(tmp_path / "evil.py")))
