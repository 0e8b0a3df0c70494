"""SentencePiece's vocabularies: spaces at the ends of texts, bytes that split characters, and what is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from fakes import Scripted, limits
from tables import table
from vocabularies import gguf_of_pieces, huggingface_of_pieces, pieces, plain, saved, texts

from llama.tokenizer import Tokenizer

FORMS = ("file", "folder", "gguf")


@pytest.fixture(scope="module", params=["file", "folder"])  # one form for each of the two libraries
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return of_form(request.param, tmp_path_factory.mktemp(request.param), pieces())


def of_form(form: str, folder: Path, data: bytes) -> Tokenizer:
    if form == "file":
        return file_of(folder, data)
    if form == "gguf":
        return Tokenizer.from_gguf(gguf_of_pieces(data))
    return Tokenizer.from_huggingface(saved(folder, huggingface_of_pieces(data), bos_token="<s>", eos_token="</s>"))


def file_of(folder: Path, data: bytes) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(data)
    return Tokenizer(folder / "tokenizer.model")


# ---- spaces ----------------------------------------------------------------------------------------------------------


def test_a_text_is_decoded_alike_and_a_continuation_keeps_its_space(tokenizer: Tokenizer) -> None:
    ids = plain(tokenizer, "the other")
    assert tokenizer.decode(ids) == "the other"
    assert tokenizer.decode(ids, begins=False) == " the other"
    assert tokenizer.decode_bytes(ids) == b"the other"
    assert tokenizer.decode(plain(tokenizer, "  two")) == "  two"
    assert tokenizer.decode([]) == ""


def test_a_continuation_is_encoded_without_a_space_before_it(tokenizer: Tokenizer) -> None:
    for text in texts(1000):
        ids = plain(tokenizer, text, begins=False)
        assert tokenizer.decode(ids, begins=False) == text.replace("▁", " ")
    whole = [*plain(tokenizer, "the oth"), *plain(tokenizer, "er one", begins=False)]
    assert tokenizer.decode(whole) == "the other one"


def test_a_completion_and_what_is_appended_to_a_session_have_the_spaces_that_were_made(tokenizer: Tokenizer) -> None:
    answer = plain(tokenizer, "Paris is")
    model = Scripted([[*answer, 2]], limits(max_seq_len=80, vocab_size=2000))
    (result,) = model.generate(tokenizer, ["the capital"], 20, temperature=0)
    assert result["generation"] == " Paris is"
    pieces_of_text = [piece for _, piece in model.stream(tokenizer, ["the capital"], 20, temperature=0, echo=True)]
    assert "".join(pieces_of_text) == "the capital Paris is"


# ---- special tokens, and what cannot be represented ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_without_bytes_a_text_of_unknown_characters_is_refused_by_name(form: str, tmp_path: Path) -> None:
    ours = of_form(form, tmp_path, pieces(byte_fallback=False))
    assert ours.decode(plain(ours, "the other")) == "the other"
    for begins in (True, False):
        with pytest.raises(ValueError, match=r"cannot represent '\\x04', '\\U00050000': it has no tokens for them"):
            plain(ours, "the \x04 other \U00050000", begins=begins)


# ---- files that are refused ------------------------------------------------------------------------------------------


def message(number: int, *fields: bytes) -> bytes:
    content = b"".join(fields)
    return bytes([number << 3 | 2, len(content)]) + content


def piece(text: bytes = b"x", score: bytes = bytes(4), kind: int = 1) -> bytes:
    return message(1, message(1, text), b"\x15" + score, bytes([3 << 3, kind]))


GOOD = piece(b"<unk>", kind=2) + piece(b"a") + piece(b"b")
BPE = message(2, b"\x18\x02")
IDENTITY = message(3, b"\x20\x00")


@table(
    "data, words",
    [
        (GOOD + IDENTITY, "of type 'unigram' is not supported; supported: 'bpe'"),
        (GOOD + message(2, b"\x18\x03") + IDENTITY, "'word'"),
        (GOOD + BPE, "remove_extra_whitespaces=true"),
        (GOOD + BPE + message(3, message(2, b"abc")), "train with spm_train --normalization_rule_name=identity"),
        (GOOD + BPE + message(3, b"\x20\x00", b"\x28\x00"), "escape_whitespaces=false"),
        (GOOD + BPE + message(3, b"\x20\x05"), "the flag in field 4 is 5"),
        (GOOD + BPE + BPE + IDENTITY, "field 2 of the model is repeated"),
        (
            GOOD + message(2, b"\x18\x02", b"\x98\x02\x01") + IDENTITY,
            "0 tokens are bytes with byte_fallback=True; there must be 256",
        ),
        (GOOD + piece(b"<0x00>", kind=6) + BPE + IDENTITY, "1 tokens are bytes"),
        (GOOD + piece(b"byte", kind=6) + BPE + IDENTITY, "has the type of bytes"),
        (GOOD + piece(b"a") + BPE + IDENTITY, "token 3, 'a', is in the vocabulary twice"),
        (GOOD + piece(b"") + BPE + IDENTITY, "has 0 characters"),
        (GOOD + piece(b"\xff") + BPE + IDENTITY, "utf-8"),
        (GOOD + piece(b"c", kind=3) + BPE + IDENTITY, "special and one character"),
        (GOOD + piece(b"ab", kind=5) + BPE + IDENTITY, "token 'ab' is unused, and SentencePiece would split it"),
        (GOOD + piece(b"ab") + piece(b"ba") + BPE + IDENTITY, "tokens 'ab' and 'ba' have one score"),
        (GOOD + piece(b"c", kind=7) + BPE + IDENTITY, "has type 7"),
        (GOOD + piece(b"c", struct.pack("<f", float("nan"))) + BPE + IDENTITY, "the score nan, which is not finite"),
        (GOOD + piece(b"c", struct.pack("<f", float("inf"))) + BPE + IDENTITY, "not finite"),
        (
            GOOD + message(1, message(1, b"c"), b"\x10\x05") + BPE + IDENTITY,
            "the score of a piece must be a 32-bit float",
        ),
        (GOOD + b"\x0a\x7f", "127 bytes are needed at byte"),
        (GOOD + b"\x0a", "in the middle of a number"),
        (GOOD + b"\x0a" + b"\xff" * 11, "more than 10 bytes"),
        (GOOD + b"\x0b", "of kind 3"),
        (GOOD + b"\x08\x01" + BPE + IDENTITY, "number 1 must be a text or message"),
        (GOOD + message(2, message(3, b"ab")) + IDENTITY, "b'ab' must be a number"),
        (b"\n\x00" + BPE + IDENTITY, "has 0 characters"),
        (b"\n", "in the middle of a number"),
    ],
)
def test_damaged_files_and_other_kinds_are_refused_by_name(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        file_of(tmp_path, data)


@pytest.mark.slow
def test_more_pieces_than_the_limit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 1048576 tokens"):
        file_of(tmp_path, b"\n\x00" * ((1 << 20) + 1))


@table("key", ["tokens", "token_type", "scores"])
def test_arrays_of_pieces_that_do_not_fit_are_refused_by_name(key: str) -> None:
    facts = gguf_of_pieces(pieces())
    for value in (None, [], facts[f"tokenizer.ggml.{key}"][:-1], ["x"] * 2000, [float("nan")] * 2000, 5):
        with pytest.raises(ValueError, match=r"token|scores"):
            Tokenizer.from_gguf(facts | {f"tokenizer.ggml.{key}": value})


@table(
    "changes, words",
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces=true is not supported"),
        ({"add_space_prefix": "false"}, "add_space_prefix='false' must be true or false"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is not supported"),
        ({"tokens": [], "token_type": [], "scores": []}, "0 tokens; there must be 1 to 1048576"),
        ({"tokens": ["x" * 1025], "token_type": [1], "scores": [0.0]}, "has 1025 characters; it must have 1 to 1024"),
        ({"bos_token_id": 2000}, "id 2000 is not in the vocabulary of 2000 tokens"),
    ],
)
def test_invalid_gguf_metadata_of_pieces_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf(gguf_of_pieces(pieces(), **changes))


def test_flags_of_gguf_are_followed_and_have_llama_cpps_defaults() -> None:
    missing = Tokenizer.from_gguf(gguf_of_pieces(pieces(), bos_token_id=None, eos_token_id=None, add_bos_token=None))
    assert (missing.bos_id, missing.eos_id, missing.adds_bos) == (1, 2, True)
    ours = Tokenizer.from_gguf(gguf_of_pieces(pieces(), add_bos_token=False, add_space_prefix=False))
    assert not ours.adds_bos
    assert ours.decode(plain(ours, "the other")) == "the other"
    assert ours.decode(plain(ours, " the other")) == " the other"
    assert plain(ours, "the") == plain(missing, "the", begins=False)


def test_pieces_without_one_for_what_is_unknown_are_written_and_read_again() -> None:
    facts = gguf_of_pieces(pieces())
    facts["tokenizer.ggml.tokens"] = ["<nothing>", *facts["tokenizer.ggml.tokens"][1:]]
    ours = Tokenizer.from_gguf(facts)
    again = Tokenizer.from_gguf(ours.to_gguf(ours.n_words))
    assert again.fingerprint() == ours.fingerprint()
    assert plain(again, "the <unk>") == plain(ours, "the <unk>")


@table(
    "steps, words",
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer .*Lowercase.* is not supported; supported are"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, "is not supported before a pre_tokenizer"),
        (
            {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}},
            "pre_tokenizer .*Whitespace.* is not supported",
        ),
        (
            {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "some"}},
            "prepend_scheme must be one of always, first, never",
        ),
    ],
)
def test_steps_that_change_a_text_are_refused_by_name(steps: dict[str, Any], words: str, tmp_path: Path) -> None:
    spec = json.loads(huggingface_of_pieces(pieces()).to_str()) | steps
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_huggingface(tmp_path)


def test_merges_that_scores_cannot_say_are_not_written_into_a_gguf_file(tmp_path: Path) -> None:
    spec = json.loads(huggingface_of_pieces(pieces()).to_str())
    merges = spec["model"]["merges"]
    pair = next(i for i in range(len(merges) - 1) if "".join(merges[i]) == "".join(merges[i + 1]))
    for wrong in (
        [*merges[:5], *merges[6:]],
        [*merges[:pair], *merges[pair + 1 :], merges[pair]],
    ):  # lacking, scattered
        spec["model"]["merges"] = wrong
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        ours = Tokenizer.from_huggingface(tmp_path)
        with pytest.raises(ValueError, match=r"a \.gguf file cannot have these merges"):
            ours.to_gguf(2000)
