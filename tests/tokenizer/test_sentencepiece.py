"""SentencePiece's vocabularies: spaces at the ends of texts, and bytes that split characters."""

import json
from pathlib import Path

import pytest
from fakes import Scripted, limits
from forge import IDENTITY, PIECES, message, whole
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


def test_an_id_of_minus_1_is_none(tmp_path: Path) -> None:
    """Protobuf writes it with 64 bits, as in Llama 2's own file."""
    settings = message(2, whole(3, 2), *(whole(field, (1 << 64) - 1) for field in (41, 42, 43)))
    ours = file_of(tmp_path, PIECES + settings + IDENTITY)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (None, None, None)
