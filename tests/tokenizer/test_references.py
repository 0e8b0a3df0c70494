"""The ids of 5,000 difficult texts equal those of transformers, llama.cpp and sentencepiece, and decode to the texts.

docs/tokenizers.md lists the differences between these libraries; the tests here define for which texts they may differ.
"""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vocabularies import (
    PRE,
    WHOLE_WORDS,
    byte_level,
    gguf_of_byte_level,
    gguf_of_pieces,
    huggingface_of_pieces,
    library_of,
    pieces,
    saved,
    texts,
    write_gguf_vocabulary,
)

from llama.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "vocabularies_llama_cpp.json").read_text())
STYLES = ("llama3", "qwen2", "tekken", "smollm", "gpt2")
USERS = ["<tool_call>", "|>", " hello"]
Encode = Callable[[str], list[int]]


def plain(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.encode(text, bos=False, eos=False)


def parsed(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.encode(text, bos=False, eos=False, allowed_special="all")


def assert_same(ours: Encode, theirs: Encode, among: list[str] | None = None) -> None:
    different = [text for text in among or texts() if ours(text) != theirs(text)]
    assert not different, (
        f"{len(different)} texts, first {different[0]!r}: {ours(different[0])}, {theirs(different[0])}"
    )


def transformers_of(folder: Path) -> Any:
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)


def assert_ids_equal_transformers(folder: Path, among: list[str] | None = None) -> Tokenizer:
    ours, theirs = Tokenizer.from_huggingface(folder), transformers_of(folder)
    assert_same(plain(ours), lambda t: theirs.encode(t, add_special_tokens=False, split_special_tokens=True), among)
    assert_same(parsed(ours), lambda t: theirs.encode(t, add_special_tokens=False), among)
    assert ours.adds_bos == (theirs.encode("a")[0] == theirs.bos_token_id)
    assert ours.n_words == len(theirs)
    return ours


@pytest.fixture(
    scope="module",
    params=[("llama3", 1500), *(pytest.param((style, 5000), marks=pytest.mark.slow) for style in STYLES)],
    ids=str,
)
def drawn(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """Return a style of byte-level vocabularies, and texts."""
    style, count = request.param
    return style, texts(count)


@pytest.fixture(scope="module")
def style(drawn: tuple[str, list[str]]) -> str:
    return drawn[0]


@pytest.fixture(scope="module")
def source(style: str) -> Any:
    """Return a byte-level vocabulary, of Hugging Face's library, with tokens that a user added."""
    tokenizer = byte_level(style, nfc=style == "qwen2", ignore_merges=style in WHOLE_WORDS)
    tokenizer.add_tokens(USERS)
    return tokenizer


# ---- byte-level ------------------------------------------------------------------------------------------------------


def test_byte_level_ids_of_a_folder_equal_transformers_and_decode_to_the_text(
    drawn: tuple[str, list[str]], source: Any, tmp_path: Path
) -> None:
    style, among = drawn
    ours = assert_ids_equal_transformers(saved(tmp_path, source), among)
    for text in among:
        assert ours.decode(plain(ours)(text)) == (unicodedata.normalize("NFC", text) if style == "qwen2" else text)


def is_cut_alike(style: str, text: str) -> bool:
    """Tell whether llama.cpp can cut the text as the pattern of the makers does: docs/tokenizers.md."""
    kinds = {unicodedata.category(char) for char in text if not char.isascii()}
    return style != "tekken" or kinds.isdisjoint({"Lu", "Ll", "Lt", "Mn", "Mc", "Me"})


def test_byte_level_ids_of_a_gguf_file_equal_llama_cpp(style: str, source: Any, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see the recorded ids")
    metadata = gguf_of_byte_level(source, PRE[style])
    path = write_gguf_vocabulary(tmp_path / "words.gguf", metadata)
    ours, theirs = Tokenizer.from_gguf(metadata), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    # llama.cpp takes 2 ms a text for the pattern of tekken.
    among = [text for text in texts(800 if style == "tekken" else 5000) if is_cut_alike(style, text)]
    assert len(among) > 400
    assert_same(plain(ours), lambda t: theirs.tokenize(t.encode(), add_bos=False, special=False), among)
    assert_same(parsed(ours), lambda t: theirs.tokenize(t.encode(), add_bos=False, special=True), among)


def test_a_tokenizer_json_gives_the_same_ids_out_of_a_gguf_file(
    style: str, source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Tokenizer.from_huggingface(saved(tmp_path, source, chat_template="{{ messages }}"))
    with caplog.at_level("WARNING", logger="llama"):
        again = Tokenizer.from_gguf(ours.to_gguf(ours.n_words))
    assert ("has no key for NFC normalisation" in caplog.text) == (style == "qwen2")
    assert again.fingerprint() == ours.fingerprint()
    among = [text for text in texts(1000) if style != "qwen2" or unicodedata.is_normalized("NFC", text)]
    assert_same(parsed(again), parsed(ours), among)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}])
@pytest.mark.parametrize("special", [False, True])
def test_flags_of_added_tokens_are_followed_as_in_transformers(flags: Any, special: bool, tmp_path: Path) -> None:
    from tokenizers import AddedToken

    tokenizer = byte_level("qwen2", nfc=True, many=False)
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    found = ("[INST]", "camelCase", "привет", "日本", "<|im_end|>", *(() if special else ("hello", "The", "é", "==")))
    add([AddedToken(text, **{"normalized": False, **flags}) for text in found])
    assert_ids_equal_transformers(saved(tmp_path, tokenizer), texts(2000))


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file_of_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(pieces())
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_dummy_prefix": False, "vocab_size": 700},
        {"user_defined_symbols": "camelCase,\u2581the,[INST],  ,>", "vocab_size": 1000},
    ],
)
def test_ids_of_a_sentencepiece_file_equal_the_library_s_and_come_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pieces(**changes))
    ours = Tokenizer(tmp_path / "tokenizer.model")
    assert_same(plain(ours), library_of(pieces(**changes)).encode)
    for text in texts(2000):
        assert ours.decode(plain(ours)(text)) == text.replace("▁", " ")  # its sign for a space


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_pieces_in_a_gguf_file_equal_llama_cpp(prefix: bool, file_of_pieces: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see the recorded ids")
    metadata = gguf_of_pieces(pieces(), add_space_prefix=prefix)
    kinds = metadata["tokenizer.ggml.token_type"]
    for text in ("the", "ing", "日本"):  # taken for a user's
        if text in metadata["tokenizer.ggml.tokens"]:
            kinds[metadata["tokenizer.ggml.tokens"].index(text)] = 4
    path = write_gguf_vocabulary(tmp_path / "pieces.gguf", metadata)
    ours, theirs = Tokenizer.from_gguf(metadata), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    assert 4 in kinds
    assert_same(plain(ours), lambda t: theirs.tokenize(t.encode(), add_bos=False, special=False))
    assert_same(parsed(ours), lambda t: theirs.tokenize(t.encode(), add_bos=False, special=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metaspace", "split"), [(None, False), ("always", True), ("first", False), ("first", True), ("never", True)]
)
def test_ids_of_pieces_in_a_tokenizer_json_equal_transformers(
    metaspace: str | None, split: bool, tmp_path: Path
) -> None:
    source = huggingface_of_pieces(pieces(), metaspace=metaspace, split=split)
    source.add_tokens(USERS)
    assert_ids_equal_transformers(saved(tmp_path, source, bos_token="<s>", eos_token="</s>"), texts(2000))


def test_all_four_forms_of_the_same_pieces_give_the_same_ids(file_of_pieces: Path, tmp_path: Path) -> None:
    meta = Tokenizer(file_of_pieces)
    folder = saved(tmp_path, huggingface_of_pieces(pieces()), bos_token="<s>", eos_token="</s>")
    others = [Tokenizer.from_huggingface(folder), Tokenizer.from_gguf(gguf_of_pieces(pieces()))]
    others += [Tokenizer.from_gguf(each.to_gguf(each.n_words)) for each in (meta, others[0])]
    for other in others:
        assert other.fingerprint() == meta.fingerprint()
        assert (other.n_words, other.bos_id, other.eos_id, other.adds_bos) == (2000, 1, 2, True)
        assert_same(plain(other), plain(meta), texts(1000))
        assert_same(parsed(other), parsed(meta), texts(1000))


# ---- without llama.cpp -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RECORDED["vocabularies"]))
def test_ids_equal_those_recorded_from_llama_cpp(name: str) -> None:
    vocabulary = RECORDED["vocabularies"][name]
    ours = Tokenizer.from_gguf(vocabulary["metadata"])
    assert len(vocabulary["cases"]) == 300
    for text, ids in vocabulary["cases"]:
        assert plain(ours)(text) == ids, text
