"""A model with a vocabulary of SentencePiece, as Llama 2 and TinyLlama have it, writes the same from all formats."""

from pathlib import Path

import pytest
import torch
from checkpoints import config_of, finish, gguf_name, gguf_writer, meta_params, meta_weights, random_model, write_meta
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType
from vocabularies import gguf_of_pieces, huggingface_of_pieces, pieces, saved

from llama import load
from llama.checkpoint.convert import convert
from llama.tokenizer import Tokenizer

PROMPTS = ["the other one", " and", "größer 😀"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights and vocabulary in every layout that is in use; the embedding has rows beyond the vocabulary."""
    folder, data = tmp_path_factory.mktemp("llama-2"), pieces()
    (folder / "source.model").write_bytes(data)
    words = Tokenizer(folder / "source.model").n_words
    theirs = random_model(config_of(vocab_size=words + 7, bos_token_id=1, eos_token_id=2))
    meta = write_meta(folder / "meta", meta_weights(theirs), meta_params(theirs.config), tokenizer=False)
    (meta / "tokenizer.model").write_bytes(data)
    for name in ("new", "old"):
        theirs.save_pretrained(folder / name)
    saved(folder / "new", huggingface_of_pieces(data), bos_token="<s>", eos_token="</s>")
    (folder / "old" / "tokenizer.model").write_bytes(data)
    writer = gguf_writer(folder / "model.gguf", theirs.config, tokenizer=False)
    for key, value in gguf_of_pieces(data).items():
        is_list = isinstance(value, list)
        kind = GGUFValueType.ARRAY if is_list else GGUFValueType.get_type(value)
        sub_type = GGUFValueType.get_type(value[0]) if is_list else None
        writer.add_key_value(key, value, kind, sub_type)
    for name, weight in meta_weights(theirs).items():
        writer.add_tensor(gguf_name(name), weight.numpy(), raw_dtype=Kind.F32)
    finish(writer)
    return {name: folder / name for name in ("meta", "new", "old", "model.gguf")}


def written(path: Path) -> list[str]:
    model, tokenizer = load(path, device="cpu", dtype="fp64")
    results = model.generate(tokenizer, PROMPTS, max_gen_len=12, temperature=0)
    streamed = [""] * len(PROMPTS)
    for row, piece in model.stream(tokenizer, PROMPTS, max_gen_len=12, temperature=0):
        streamed[row] += piece
    assert streamed == [result["generation"] for result in results]
    return streamed


def test_every_format_writes_the_same_text(folders: dict[str, Path]) -> None:
    texts = {name: written(path) for name, path in folders.items()}
    assert all(text == texts["meta"] for text in texts.values()), texts
    assert any(any(text) for text in texts["meta"])


def test_what_is_converted_writes_the_same_text(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("meta", "new", "old"):
        convert(folders[name], tmp_path / f"{name}.gguf", type="f32")
        assert written(tmp_path / f"{name}.gguf") == written(folders[name])


def test_rows_of_the_embedding_beyond_the_vocabulary_are_no_text(folders: dict[str, Path]) -> None:
    model, tokenizer = load(folders["meta"], device="cpu", dtype="fp32")
    beyond = range(tokenizer.n_words, model.args.vocab_size)
    assert len(beyond) == 7
    with torch.inference_mode():
        model.output.weight[list(beyond)] *= 50  # so that one of them is always the likeliest or the least likely
    ids, _ = model.generate_tokens([tokenizer.encode("the", bos=True, eos=False)], max_gen_len=20, temperature=0)
    assert any(id in beyond for id in ids[0])
    assert tokenizer.decode([id for id in ids[0] if id in beyond]) == ""
    assert model.generate(tokenizer, ["the"], max_gen_len=20, temperature=0)[0]["generation"] == tokenizer.decode(
        ids[0], begins=False
    )
