"""Text <-> ids: the demo's and Meta's files, what holds for every vocabulary, and which files are refused.

The ids of many more texts are compared in test_references.py.
"""

import base64
import json
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from forge import put, small_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table
from vocabularies import PATTERNS, byte_level, pieces, plain, saved

from llama.checkpoint.demo import demo_model_path, meta_tokenizer_path
from llama.tokenizer import Tokenizer
from llama.tokenizer.bpe import BpeCodec, ByteLevel
from llama.tokenizer.vocabulary import MAX_MERGES, MAX_WORDS, check_tokens, library_errors
from llama.untrusted.gguf_header import read_gguf_header

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "tokenizer_llama_cpp.json").read_text())
PIECES = (
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "1", "42", "٣", "½", "a", "The", "hello", "é", "日", "한", "Д",
    "😀", "'", "'s", "'LL", "!", "...", "_", "<|im_end|>", "<|eot_id|>", "<|", "|>", "==", "e\u0301", "\u200d", "ǅ",
    "'\u017f",
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
many = settings(max_examples=60, deadline=None, derandomize=True)

META_PATTERN = PATTERNS["llama3"]


def is_representable(tokenizer: Tokenizer, text: str) -> bool:
    try:
        plain(tokenizer, text)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Meta's tokenizer of the first 10,000 tokens of its file."""
    path = tmp_path_factory.mktemp("first") / "tokenizer.model"
    path.write_bytes(b"\n".join(meta_lines(10_000)))
    return Tokenizer(path)


# ---- llama.cpp, with the demo model's vocabulary ---------------------------------------------------------------------


def test_demo_ids_equal_those_recorded_from_llama_cpp(demo: Tokenizer) -> None:
    assert len(RECORDED["cases"]) > 400
    for text, ids in RECORDED["cases"]:
        if demo.decode(ids) == text:
            assert plain(demo, text) == ids, text
        else:  # llama.cpp drops what the vocabulary cannot represent
            with pytest.raises(ValueError, match="cannot represent"):
                plain(demo, text)


def test_demo_knows_its_ends_and_asks_for_no_bos(demo: Tokenizer) -> None:
    assert demo.n_words == 49152
    assert (demo.bos_id, demo.eos_id, demo.pad_id, demo.adds_bos) == (1, 2, 2, False)
    assert demo.stop_tokens == [demo.special_tokens["<|im_end|>"], demo.special_tokens["<|endoftext|>"]]
    assert len(demo.special_tokens) == 17
    assert demo.chat_template is not None


def test_text_that_the_vocabulary_cannot_represent_is_refused_by_name(demo: Tokenizer) -> None:
    lacking = [byte for byte in range(128) if not is_representable(demo, chr(byte))]
    assert lacking == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
    with pytest.raises(ValueError, match=r"cannot represent '\\x04', '\\U00040000'"):
        plain(demo, "fine \x04 and \U00040000")
    with pytest.raises(ValueError, match="and others"):
        plain(demo, "".join(chr(0x40000 + i) for i in range(20)))


# ---- transformers, with tokenizer.json files -------------------------------------------------------------------------


def trained(style: str, **model: Any) -> Any:
    return byte_level(style, many=False, **model)


@table("opens, stated", [(True, {"add_bos_token": False}), (False, {"add_bos_token": True})])
def test_bos_is_added_where_tokenizer_json_says_so(opens: bool, stated: dict[str, bool], tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = trained("llama3")
    if opens:
        tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
        )
    ours = Tokenizer.from_huggingface(saved(tmp_path, tokenizer, **stated))
    assert (ours.adds_bos, ours.bos_id) == (opens, 0)
    assert (PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("a")[0] == 0) == opens


def test_all_ends_named_beside_tokenizer_json_are_stop_tokens(tmp_path: Path) -> None:
    saved(tmp_path, trained("gpt2"), chat_template="a template")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 99}))
    assert Tokenizer.from_huggingface(tmp_path).stop_tokens == [2, 99, 0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1], "pad_token_id": 5}))
    ours = Tokenizer.from_huggingface(tmp_path / "tokenizer.json")
    assert ours.stop_tokens == [2, 7, 1, 0]  # the file's, then those with the name of an end; config.json is overruled
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.chat_template) == (0, 2, 5, "a template")
    (tmp_path / "chat_template.jinja").write_text("a newer one")
    assert Tokenizer.from_huggingface(tmp_path).chat_template == "a newer one"


def test_a_template_in_a_sequence_of_processors_says_how_a_text_opens(tmp_path: Path) -> None:
    """As in Llama 3's own tokenizer.json, where a step that counts offsets stands before it."""
    from tokenizers import processors

    tokenizer = trained("llama3")
    opening = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), opening])
    assert Tokenizer.from_huggingface(saved(tmp_path, tokenizer)).adds_bos


def test_of_several_chat_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "with tools"}, {"name": "default", "template": "plain"}]
    assert (
        Tokenizer.from_huggingface(saved(tmp_path, trained("gpt2"), chat_template=templates)).chat_template == "plain"
    )
    saved(tmp_path, trained("gpt2"), chat_template=templates[:1])
    assert Tokenizer.from_huggingface(tmp_path).chat_template is None


# ---- tiktoken, with Meta's file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first", pytest.param("meta", marks=pytest.mark.slow)])
def test_metas_ids_equal_tiktokens_on_the_published_pattern(name: str, request: pytest.FixtureRequest) -> None:
    meta: Tokenizer = request.getfixturevalue(name)
    lines = meta_lines(10_000 if name == "first" else None)
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    oracle = tiktoken.Encoding("meta", pat_str=META_PATTERN, mergeable_ranks=ranks, special_tokens={})

    @many
    @given(TEXTS)
    def ids_are_equal(text: str) -> None:
        ids = plain(meta, text)
        assert ids == oracle.encode_ordinary(text)
        assert meta.decode(ids) == text

    ids_are_equal()


def test_metas_special_tokens_stand_where_the_models_expect_them(meta: Tokenizer) -> None:
    assert meta.n_words == 128_256
    assert sorted(meta.special_tokens.values()) == list(range(128_000, 128_256))
    expected = {
        "<|begin_of_text|>": 128_000,
        "<|end_of_text|>": 128_001,
        "<|reserved_special_token_0|>": 128_002,
        "<|finetune_right_pad_id|>": 128_004,
        "<|start_header_id|>": 128_006,
        "<|end_header_id|>": 128_007,
        "<|eom_id|>": 128_008,
        "<|eot_id|>": 128_009,
        "<|python_tag|>": 128_010,
        "<|reserved_special_token_2|>": 128_012,
        "<|reserved_special_token_245|>": 128_255,
    }
    assert expected.items() <= meta.special_tokens.items()
    assert (meta.bos_id, meta.eos_id, meta.pad_id, meta.adds_bos) == (128_000, 128_001, 128_004, True)
    assert sorted(meta.stop_tokens) == [128_001, 128_008, 128_009]


# ---- what holds for every vocabulary ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(pieces())
    return Tokenizer(path)


@pytest.fixture(scope="module", params=["meta", "demo", "of_pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_no_special_token_can_be_written_in_plain_text(tokenizer: Tokenizer) -> None:
    specials = set(tokenizer.special_tokens.values())
    for text in tokenizer.special_tokens:
        for around in (text, f"a{text}b", f" {text}\n", text * 3, text[:-1] + text):
            assert specials.isdisjoint(plain(tokenizer, around))
            assert tokenizer.decode(plain(tokenizer, around)) == around


@pytest.mark.parametrize("limit", [25_000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_no_special_token_arises_or_breaks_where_long_texts_are_cut(meta: Tokenizer, limit: int) -> None:
    specials = set(meta.special_tokens.values())
    text = list(meta.special_tokens)[2]
    filler = "x" * limit if limit == 25_000 else "ab " * (limit // 3)
    for inside in (0, 1, len(text) - 1, len(text)):
        long = filler[: limit - inside] + text
        assert specials.isdisjoint(plain(meta, long))
        parsed = meta.encode(long, bos=False, eos=False, allowed_special={text})
        assert parsed[-1] == meta.special_tokens[text]


def test_bos_and_eos_are_added_once_whatever_the_text_says(tokenizer: Tokenizer) -> None:
    bos, eos = tokenizer.decode([tokenizer.bos_id or 0]), tokenizer.decode([tokenizer.eos_id or 0])
    ids = tokenizer.encode(f"{bos}hello{eos}", bos=True, eos=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert ids.count(tokenizer.bos_id or 0) == ids.count(tokenizer.eos_id or 0) == 1


def test_special_tokens_are_parsed_or_forbidden_only_where_asked(meta: Tokenizer) -> None:
    text = "a<|eot_id|>b<|eom_id|>"
    parsed = meta.encode(text, bos=False, eos=False, allowed_special={"<|eot_id|>"})
    assert parsed == [*plain(meta, "a"), 128_009, *plain(meta, "b<|eom_id|>")]
    everything = meta.encode(text, bos=False, eos=False, allowed_special="all", disallowed_special="all")
    assert everything == [*plain(meta, "a"), 128_009, *plain(meta, "b"), 128_008]
    with pytest.raises(ValueError, match="eom_id"):
        meta.encode(text, bos=False, eos=False, allowed_special={"<|eot_id|>"}, disallowed_special="all")
    with pytest.raises(ValueError, match="does not know"):
        meta.encode(text, bos=False, eos=False, allowed_special={"<|nonsense|>"})


@many
@given(data=st.data())
def test_streamed_text_equals_decoded_text_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_words - 1) | st.sampled_from(byte_ids(tokenizer)), max_size=24))
    for begins in (False, True):
        stream = tokenizer.stream(begins=begins)
        for _ in range(2):
            text = "".join(stream.feed(token_id) for token_id in ids)
            assert text + stream.flush() == tokenizer.decode(ids, begins=begins)


@cache
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the bytes that are tokens, in the order of the bytes."""
    found = {tokenizer.decode_bytes([i], begins=False): i for i in range(400)}
    return [found[bytes([byte])] for byte in range(256) if bytes([byte]) in found]


@table("text", ["😀", "日本語", "👩\u200d🚀", "é"])
def test_a_stream_returns_only_whole_characters(meta: Tokenizer, text: str) -> None:
    stream = meta.stream()
    parts = [stream.feed(byte_ids(meta)[byte]) for byte in text.encode()]
    assert [part for part in parts if part] == list(text)
    assert stream.flush() == ""


def test_broken_utf8_becomes_the_replacement_character_in_both_ways(meta: Tokenizer) -> None:
    ids = [byte_ids(meta)[byte] for byte in b"a\xf0\x9f\x98\xff\xe6\x97b\xed\xa0\x80\xf0\x9f"]
    stream = meta.stream()
    text = "".join(map(stream.feed, ids)) + stream.flush()
    assert text == meta.decode(ids)
    assert (text[:2], text[-1]) == ("a\ufffd", "\ufffd")


@pytest.mark.parametrize(
    "unit",
    [" ", "a", *(pytest.param(unit, marks=pytest.mark.slow) for unit in ("\n", "^", "😀", "a ", "' "))],
    ids=ascii,
)
def test_a_long_run_of_one_kind_comes_back_and_takes_time_as_its_length(tokenizer: Tokenizer, unit: str) -> None:
    def seconds(count: int) -> float:
        begin = time.process_time()
        ids = plain(tokenizer, unit * count)
        end = time.process_time()
        assert tokenizer.decode(ids) == unit * count
        return end - begin

    short, long = (min(seconds(count) for _ in range(2)) for count in (40_000, 160_000))
    assert long < 10 * short + 0.1  # quadratic time would be 16 times


def test_a_long_text_stops_no_other_thread_while_it_is_encoded(tokenizer: Tokenizer) -> None:
    """Python's lock is free in the middle of the call, so that the thread of a server's model can go on."""
    seen: list[float] = []
    ended = threading.Event()

    def other() -> None:
        while not ended.wait(0.0005):
            seen.append(time.perf_counter())

    thread = threading.Thread(target=other)
    thread.start()
    begin = time.perf_counter()
    plain(tokenizer, "1" * 250_000)
    end = time.perf_counter()
    ended.set()
    thread.join()
    quarter = (end - begin) / 4
    assert any(begin + quarter < at < end - quarter for at in seen)


@given(text=TEXTS)
@many
def test_the_length_of_a_text_bounds_its_ids_from_below(tokenizer: Tokenizer, text: str) -> None:
    if is_representable(tokenizer, text):
        assert tokenizer.fewest(text) <= len(plain(tokenizer, text))


def test_a_text_that_nfc_makes_shorter_has_no_bound(tmp_path: Path) -> None:
    bounds = []
    for nfc in (False, True):
        folder = saved(tmp_path / str(nfc), byte_level("smollm", nfc=nfc, many=False))
        bounds.append(Tokenizer.from_huggingface(folder).fewest("ab" * 10_000))
    assert bounds[0] >= 20_000 // 40
    assert bounds[1] == 0


def test_half_a_surrogate_pair_and_an_unknown_id_are_refused(tokenizer: Tokenizer) -> None:
    for text in ("\ud800", "a\udfffb", "\ud83d\ude00"):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            plain(tokenizer, text)
    for token_id in (-1, 10**9):
        with pytest.raises(ValueError, match="not in this vocabulary"):
            tokenizer.decode([token_id])


def test_a_panic_of_a_library_reaches_the_user_as_a_value_error() -> None:
    with pytest.raises(KeyboardInterrupt), library_errors("tiktoken", "encode a text"):
        raise KeyboardInterrupt
    lacking = tiktoken.Encoding("a alone", pat_str=META_PATTERN, mergeable_ranks={b"a": 0}, special_tokens={})
    with pytest.raises(ValueError, match="tiktoken cannot encode a text"), library_errors("tiktoken", "encode a text"):
        lacking.encode_ordinary("b")


# ---- files that are refused ------------------------------------------------------------------------------------------


def meta_lines(n: int | None = 300) -> list[bytes]:
    return meta_tokenizer_path().read_bytes().splitlines()[:n]


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer file .*tokenizer\.model"):
        Tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match="is a directory"):
        Tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_huggingface(tmp_path)


def test_supported_steps_and_flags_are_accepted(tmp_path: Path) -> None:
    source = trained("gpt2").to_str()
    only_text = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}
    for path, value in (
        ("normalizer", {"type": "NFC"}),
        ("normalizer", {"type": "Sequence", "normalizers": []}),
        ("post_processor", only_text),
        ("added_tokens", None),
        ("model/ignore_merges", True),
    ):
        put(spec := json.loads(source), {path: value})
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        assert Tokenizer.from_huggingface(tmp_path).n_words == len(spec["model"]["vocab"])


def test_more_tokens_and_merges_than_the_limits_are_refused_before_any_is_looked_at() -> None:
    with pytest.raises(ValueError, match="1048577 tokens are more than the limit"):
        check_tokens(dict.fromkeys(range(MAX_WORDS + 1)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2097153 merges are more than the limit"):
        BpeCodec({"a": 0}, [("no", "merge")] * (MAX_MERGES + 1), [], ByteLevel("gpt-2"))


def test_a_small_gguf_vocabulary_is_read_as_it_says() -> None:
    ours = Tokenizer.from_gguf(small_gguf())
    assert plain(ours, "aababcc") == [6, 5, 3]
    assert plain(ours, "ahello therea") == [1, 8, 1]
    assert ours.decode([6, 5, 3, 8, 7, 9]) == "aababcchello there<|im_end|>"  # the last is unused
    assert (ours.n_words, ours.bos_id, ours.stop_tokens, ours.adds_bos) == (10, 0, [7], False)
    with pytest.raises(ValueError, match="cannot represent"):
        plain(ours, "<|im_end|>")


def test_bos_and_eos_need_a_token_in_the_file() -> None:
    ours = Tokenizer.from_gguf(small_gguf(bos_token_id=None, eos_token_id=None))
    assert (ours.bos_id, ours.eos_id, ours.stop_tokens) == (None, None, [7])
    for asked, name in (({"bos": True, "eos": False}, "BOS"), ({"bos": False, "eos": True}, "EOS")):
        with pytest.raises(ValueError, match=f"this tokenizer has no {name} token"):
            ours.encode("a", **asked)


def test_only_the_same_tokens_ends_and_template_have_the_same_fingerprint() -> None:
    facts = small_gguf()
    tokens, types = (list(facts[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))
    others = [
        facts,
        small_gguf(tokens=[*tokens, "d"], token_type=[*types, 1]),
        small_gguf(tokens=[*tokens[:-1], "[END]"], token_type=[*types[:-1], 3]),
        small_gguf(token_type=[*types[:-1], 4]),
        small_gguf(eos_token_id=0),
        small_gguf(add_bos_token=True),
        facts | {"tokenizer.chat_template": "a template"},
    ]
    prints = [Tokenizer.from_gguf(other).fingerprint() for other in others]
    assert len(set(prints)) == len(others)
    assert Tokenizer.from_gguf(small_gguf()).fingerprint() == prints[0]


def test_an_end_that_a_gguf_file_calls_a_users_token_still_cannot_be_written() -> None:
    ours = Tokenizer.from_gguf(small_gguf(eos_token_id=8))
    assert "hello there" in ours.special_tokens
    with pytest.raises(ValueError, match="cannot represent"):
        plain(ours, "hello there")


@pytest.mark.parametrize("kind", [3, 4], ids=["special", "user's"])
@pytest.mark.parametrize("texts", [("<x>", "<x><y>"), ("<x><y>", "<x>")], ids=["shorter first", "longer first"])
def test_of_two_added_tokens_that_begin_alike_the_longer_is_taken(texts: tuple[str, str], kind: int) -> None:
    ours = Tokenizer.from_gguf(
        small_gguf(tokens=["a", *texts], token_type=[1, kind, kind], merges=[], eos_token_id=0, bos_token_id=None)
    )
    ids = {text: 1 + i for i, text in enumerate(texts)}
    encoded = ours.encode("a<x>a<x><y>a<x><x><y>", bos=False, eos=False, allowed_special="all")
    assert encoded == [0, ids["<x>"], 0, ids["<x><y>"], 0, ids["<x>"], ids["<x><y>"]]


# ---- written into a GGUF file ----------------------------------------------------------------------------------------


def written(tokenizer: Tokenizer, size: int | None = None) -> Tokenizer:
    return Tokenizer.from_gguf(tokenizer.to_gguf(tokenizer.n_words if size is None else size))


def test_metas_file_gives_the_same_ids_out_of_a_gguf_file(first: Tokenizer) -> None:
    metadata = first.to_gguf(first.n_words)
    assert (metadata["tokenizer.ggml.pre"], metadata["tokenizer.ggml.add_bos_token"]) == ("llama-bpe", True)
    again = Tokenizer.from_gguf(metadata)
    assert again.fingerprint() == first.fingerprint()

    @many
    @given(TEXTS)
    def ids_are_equal(text: str) -> None:
        assert plain(again, text) == plain(first, text)

    ids_are_equal()
    for rank in range(300, 10_000, 37):  # whole words of the vocabulary
        if (word := first.decode([rank])).encode() == first.decode_bytes([rank]):
            assert plain(again, word) == plain(first, word)


@pytest.mark.slow
def test_metas_file_has_as_many_merges_as_llama_3s_own_tokenizer_json(meta: Tokenizer) -> None:
    assert len(meta.to_gguf(meta.n_words)["tokenizer.ggml.merges"]) == 280_147


def test_the_demos_vocabulary_is_written_as_llama_cpp_wrote_it(demo: Tokenizer) -> None:
    theirs = read_gguf_header(demo_model_path()).metadata
    ours = demo.to_gguf(demo.n_words)
    for key in ("pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "padding_token_id"):
        assert ours[f"tokenizer.ggml.{key}"] == theirs[f"tokenizer.ggml.{key}"], key
    assert ours["tokenizer.chat_template"] == theirs["tokenizer.chat_template"]


def test_ids_without_a_token_are_filled_up_with_ones_that_no_text_becomes() -> None:
    ours = Tokenizer.from_gguf(small_gguf())
    again = written(ours, 12)
    assert again.n_words == 12
    assert again.special_tokens == ours.special_tokens
    assert again.decode([1, 10, 11, 2]) == "ab"
    assert plain(again, "aababcc") == plain(ours, "aababcc")
    assert again.stop_tokens == ours.stop_tokens


def test_the_ends_of_a_text_are_written_under_the_names_that_a_file_has_for_them(tmp_path: Path) -> None:
    source = trained("gpt2")
    source.add_special_tokens(["<|eom_id|>", "<|eot_id|>"])
    ends = [source.token_to_id(text) for text in ("<|im_end|>", "<|eom_id|>", "<|eot_id|>")]
    saved(tmp_path, source)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    ours = Tokenizer.from_huggingface(tmp_path)
    metadata = ours.to_gguf(ours.n_words)
    assert [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eom", "eot")] == ends
    assert set(Tokenizer.from_gguf(metadata).stop_tokens) == set(ours.stop_tokens)


def test_words_taken_whole_are_not_written_into_a_gguf_file_whose_kind_does_not_take_them(tmp_path: Path) -> None:
    ours = Tokenizer.from_huggingface(saved(tmp_path, trained("gpt2", ignore_merges=True)))
    with pytest.raises(ValueError, match=r"with tokenizer\.ggml\.pre=gpt-2 cannot have ignore_merges=True"):
        ours.to_gguf(700)


def test_more_ends_than_a_gguf_file_has_names_for_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, trained("gpt2"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 2]}))
    with pytest.raises(ValueError, match=r"a \.gguf file cannot express this tokenizer's eos_ids"):
        Tokenizer.from_huggingface(tmp_path).to_gguf(700)


def test_merges_are_followed_in_their_order_where_ranks_of_tokens_would_go_another_way() -> None:
    # "b c" comes before "a b": the bytes a b c become a, bc, and the listed way through ab is never taken.
    facts = {"tokens": ["a", "b", "c", "ab", "bc", "abc"], "token_type": [1] * 6, "bos_token_id": 0, "eos_token_id": 0}
    assert plain(Tokenizer.from_gguf(small_gguf(**facts, merges=["b c", "a b", "ab c"])), "abc") == [0, 4]
    assert plain(Tokenizer.from_gguf(small_gguf(**facts, merges=["b c", "a b", "a bc"])), "abc") == [5]


def test_a_word_of_the_vocabulary_is_taken_whole_only_where_the_file_s_kind_says_so() -> None:
    merges = ["a b", "ab c"]
    assert plain(Tokenizer.from_gguf(small_gguf(pre="llama-bpe", merges=merges, add_bos_token=False)), "aab") == [6]
    assert plain(Tokenizer.from_gguf(small_gguf(merges=merges)), "aab") == [1, 4]


def test_a_chain_of_a_thousand_merges_is_read_and_followed_in_time_as_its_length() -> None:
    letters = "".join(chr(ord("A") + i * i % 57) for i in range(1024))
    tokens = [chr(code) for code in range(33, 127)] + [letters[:end] for end in range(2, 1025)]
    merges = [f"{letters[: end - 1]} {letters[end - 1]}" for end in range(2, 1025)]
    facts = {"tokens": tokens, "token_type": [1] * len(tokens), "merges": merges}
    begin = time.process_time()
    ours = Tokenizer.from_gguf(small_gguf(**facts, bos_token_id=None, eos_token_id=0))
    ids = plain(ours, letters * 100)
    assert time.process_time() - begin < 3  # 0.1; what grew with the third power of the length took minutes
    assert ours.decode(ids) == letters * 100


def test_a_token_that_tokenizer_config_names_and_the_vocabulary_has_is_special(tmp_path: Path) -> None:
    ours = Tokenizer.from_huggingface(saved(tmp_path, trained("gpt2"), pad_token="~"))
    assert ours.decode([ours.pad_id or 0]) == "~"
    assert ours.special_tokens["~"] == ours.pad_id
    with pytest.raises(ValueError, match="cannot represent '~'"):
        plain(ours, "a~")


def test_ids_of_a_model_s_padding_decode_to_nothing(demo: Tokenizer) -> None:
    ours = Tokenizer.from_gguf(small_gguf())
    with pytest.raises(ValueError, match="id 10 is not in this vocabulary of 10 tokens"):
        ours.decode([10])
    before = ours.fingerprint()
    ours.widen(16)
    assert ours.decode([1, 10, 15, 2]) == "ab"
    assert (ours.n_words, ours.fingerprint()) == (10, before)
    with pytest.raises(ValueError, match="id 16 is not in this vocabulary of 16 tokens"):
        ours.decode([16])
