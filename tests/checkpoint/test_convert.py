"""A converted file has the gguf package's rounding of the weights; tensors that have the wanted type stay unchanged."""

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    config_of,
    gguf_name,
    meta_params,
    meta_weights,
    random_model,
    write_gguf,
    write_huggingface,
    write_meta,
)
from commands import Command
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from gguf.quants import dequantize, quantize
from tables import table
from torch import Tensor

from llama import load
from llama.args import ModelArgs
from llama.bench.run.engines import LlamaEngine
from llama.bench.run.llama_cpp_engine import LlamaCppEngine
from llama.checkpoint import open_checkpoint
from llama.checkpoint.assemble import BLOCK_NUMBERS, Weight, needed_shapes
from llama.checkpoint.convert import convert
from llama.checkpoint.gguf_writer import planned
from llama.cli.convert import main
from llama.untrusted.gguf_header import GgufHeader, read_gguf_header

ENDS = ("tok_embeddings.weight", "output.weight")
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def checkpoint_of(form: str, folder: Path, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """Write a tiny model in a format; return its path, and its weights in Meta's names."""
    config = config_of(**{**SIZES, **changes})
    theirs = random_model(config)
    weights = meta_weights(theirs)
    if form == "meta":
        return write_meta(folder / "meta", weights, meta_params(config), shards=2), weights
    if form == "huggingface":
        return write_huggingface(folder / "huggingface", theirs), weights
    return write_gguf(folder / "source.gguf", weights, config), weights


def rounded(name: str, weight: Tensor, kind: Kind) -> Tensor:
    """Return what the package makes of a weight and reads again."""
    if weight.ndim == 1 or kind is Kind.F32:
        return weight
    used = Kind.Q8_0 if kind in (Kind.Q4_0, Kind.Q4_1) and name in ENDS else kind
    return torch.from_numpy(np.array(dequantize(quantize(weight.numpy(), used), used)))


def bytes_of(path: Path, header: GgufHeader, name: str) -> bytes:
    info = header.tensors[name]
    return path.read_bytes()[info.start : info.start + info.nbytes]


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *(("gguf", kind) for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0)),
        *(("meta", Kind.Q8_0), ("huggingface", Kind.Q4_1)),
    ],
)
def test_a_converted_checkpoint_is_the_packages_rounding_of_the_source(form: str, kind: Any, tmp_path: Path) -> None:
    source, weights = checkpoint_of(form, tmp_path)
    convert(source, tmp_path / "out.gguf", type=kind.name.lower())
    (model, tokenizer), before = load(tmp_path / "out.gguf", device="cpu", dtype="fp32"), open_checkpoint(source)
    assert model.args == replace(before.args, multiple_of=256, ffn_dim_multiplier=None)  # Meta's way to say ffn_dim
    assert tokenizer.fingerprint() == before.tokenizer.fingerprint()
    assert tokenizer.encode("the cat in a hat", bos=True, eos=True) == before.tokenizer.encode(
        "the cat in a hat", bos=True, eos=True
    )
    for name, weight in weights.items():
        assert torch.equal(model.get_parameter(name), rounded(name, weight, kind)), name
    facts = read_gguf_header(tmp_path / "out.gguf").metadata
    assert LlamaFileType(facts["general.file_type"]).name.partition("_")[2] == kind.name  # OpenVINO needs the key
    assert facts.get("general.quantization_version") == (2 if kind.name.startswith("Q") else None)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scaled_positions_and_a_tied_head_arrive(tied: bool, tmp_path: Path) -> None:
    source, _ = checkpoint_of("huggingface", tmp_path, scaled=True, tie_word_embeddings=tied)
    convert(source, tmp_path / "out.gguf", type="q8_0")
    header = read_gguf_header(tmp_path / "out.gguf")
    assert ("output.weight" in header.tensors) is not tied
    assert "rope_freqs.weight" in header.tensors
    assert open_checkpoint(tmp_path / "out.gguf").args == open_checkpoint(source).args


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_tensors_of_the_wanted_type_are_copied_to_the_bit(kind: Any, tmp_path: Path) -> None:
    config = config_of(**SIZES)
    weights = meta_weights(random_model(config))
    source = write_gguf(tmp_path / "source.gguf", weights, config, kind=kind, whole=["layers.1.attention.wq.weight"])
    convert(source, tmp_path / "out.gguf", type=kind.name.lower())
    before, after = read_gguf_header(source), read_gguf_header(tmp_path / "out.gguf")
    same = {
        name
        for name in weights
        if bytes_of(source, before, gguf_name(name)) == bytes_of(tmp_path / "out.gguf", after, gguf_name(name))
    }
    ends = set() if kind is Kind.Q8_0 else set(ENDS)  # which were of 4 bits, too
    assert weights.keys() - same == {"layers.1.attention.wq.weight"} | ends
    assert after.tensors["blk.1.attn_q.weight"].kind == kind.name
    words, copies = (
        {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
        for header in (before, after)
    )
    assert words == copies


def test_a_matrix_whose_rows_are_not_whole_blocks_is_f16_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, weights = checkpoint_of("huggingface", tmp_path, intermediate_size=72)
    with caplog.at_level("INFO", logger="llama"):
        convert(source, tmp_path / "out.gguf", type="q4_0")
    kinds = {name: info.kind for name, info in read_gguf_header(tmp_path / "out.gguf").tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "F16"} == {"blk.0.ffn_down.weight", "blk.1.ffn_down.weight"}
    assert "ffn_down.weight have rows that are not a multiple of 32 and stay in F16" in caplog.text
    model, _ = load(tmp_path / "out.gguf", device="cpu", dtype="fp32")
    name = "layers.1.feed_forward.w2.weight"
    assert torch.equal(model.get_parameter(name), weights[name].half().float())


def test_no_tensor_is_in_memory_as_a_whole() -> None:
    args = ModelArgs(dim=1024, n_layers=1, n_heads=8, ffn_dim=2048, vocab_size=2048)  # the smallest of 4 MB in float32
    shapes = needed_shapes(args)
    blank: Mapping[str, Weight] = {name: Weight.of(torch.zeros(shape)) for name, shape in shapes.items()}
    for kind in ("F32", "Q8_0"):
        parts = planned(args, blank, kind)
        sizes = [[piece.nbytes for piece in part.pieces()] for part in parts]
        assert [sum(each) for each in sizes] == [part.nbytes for part in parts]
        assert max(map(max, sizes)) <= 4 * BLOCK_NUMBERS < max(map(sum, sizes))


def test_an_interruption_leaves_the_old_file_alone(tmp_path: Path) -> None:
    source, _ = checkpoint_of("gguf", tmp_path)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "model.gguf"
    out.write_text("the one before")

    def interrupted(done: int, total: int) -> None:
        assert [*out.parent.iterdir()] != [out]  # the new one stands beside it
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, type="q8_0", overwrite=True, progress=interrupted)
    assert (out.read_text(), [*out.parent.iterdir()]) == ("the one before", [out])
    convert(source, out, type="q8_0", overwrite=True)
    load(out, device="cpu")


@table("number, type", [(float("nan"), "q8_0"), (float("-inf"), "f16"), (70000.0, "q8_0")])
def test_numbers_outside_a_type_are_refused_with_their_tensor(number: float, type: str, tmp_path: Path) -> None:
    config = config_of(**SIZES)
    weights = meta_weights(random_model(config))
    weights["layers.1.feed_forward.w3.weight"][40, 3] = number
    folder = tmp_path / str(number)
    folder.mkdir()
    source = write_gguf(folder / "source.gguf", weights, config)
    with pytest.raises(ValueError, match=rf"^blk.1.ffn_up.weight contains (nan|inf|70000), and {type.upper()}"):
        convert(source, folder / "out.gguf", type=type)
    assert sorted(folder.iterdir()) == [source]
    convert(source, folder / "out.gguf", type="bf16")


@table(
    "words, said",
    [
        ([], "0 paths are given; the command takes two: IN OUT.gguf"),
        (["{in}", "{out}"], "--type is missing; choose one of f32, f16, q4_0, q4_1, q8_0, bf16"),
        (["{in}", "{out}", "--type", "q4_k"], "type='q4_k' is not known; choose one of f32"),
        (["{in}", "out.bin", "--type", "f32"], "out.bin: the name must end in .gguf"),
        (["{in}", "{there}", "--type", "f32"], "exists; give another name, or --overwrite"),
        (["{in}", "{in}", "--type", "f32", "--overwrite"], "is the file to convert"),
        (["nowhere", "{out}", "--type", "f32"], "nowhere: there is no such file or directory"),
    ],
)
def test_wrong_arguments_of_convert_are_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path, command: Command
) -> None:
    source, _ = checkpoint_of("gguf", tmp_path)
    there = tmp_path / "there.gguf"
    there.write_text("")
    names = {"in": source, "out": tmp_path / "out.gguf", "there": there}
    assert said in command.refused(main, *(word.format(**names) for word in words))
    assert sorted(tmp_path.iterdir()) == sorted([source, there])


def test_the_command_prints_the_types_of_the_new_file(tmp_path: Path, command: Command) -> None:
    source, _ = checkpoint_of("gguf", tmp_path)
    printed = command.printed(main, source, tmp_path / "out.gguf", "--type", "q4_0")
    assert "0.1 MB, 5 tensors F32, 14 tensors Q4_0, 2 tensors Q8_0" in printed


def test_llama_cpp_encodes_and_continues_a_text_as_the_plain_path_does(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    source, _ = checkpoint_of("meta", tmp_path)
    out = tmp_path / "out.gguf"
    convert(source, out, type="f32")  # of other types it rounds the inputs, too
    model, tokenizer = load(out, device="cpu", dtype="fp32")
    text = "the cat in a hat, 1234 times"
    prompt = tokenizer.encode(text, bos=True, eos=False)
    theirs = llama_cpp.Llama(str(out), vocab_only=True, verbose=False).tokenize(text.encode(), add_bos=True)
    assert theirs == prompt
    peer = LlamaCppEngine(out, model.args, tokenizer, weights="stored")
    ours = LlamaEngine(model, tokenizer)
    assert peer.run([prompt], 8, kv_caching=True).ids == ours.run([prompt], 8, kv_caching=True).ids


def without_merges(form: str, folder: Path) -> Path:
    """Write a tiny checkpoint whose BPE tokenizer has single bytes only."""
    theirs = random_model(config_of(**SIZES))
    weights, params = meta_weights(theirs), meta_params(theirs.config)
    if form == "meta":
        path = write_meta(folder, weights, params)
        lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
        (path / "tokenizer.model").write_text("".join(lines))
        return path
    if form == "gguf":  # the package writes no empty array, so an entry is renamed and an empty array is added
        folder.mkdir()
        return emptied(write_gguf(folder / "source.gguf", weights, theirs.config), b"tokenizer.ggml.merges")
    path = write_huggingface(folder, theirs)
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["model"] |= {
        "merges": [],
        "vocab": {text: id for text, id in spec["model"]["vocab"].items() if len(text) == 1},
    }
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


def emptied(path: Path, key: bytes) -> Path:
    """Add an empty array of texts to a .gguf file, under a key of it, whose old entry gets another name."""
    data = path.read_bytes()
    renamed = data.replace(key, key[:-1] + b"_")
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    first = 24
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 0)
    entry += struct.pack("<Q", 3) + b"pad" + struct.pack("<I", 8)
    room = -(len(entry) + 8) % 32
    entry += struct.pack("<Q", room) + b" " * room  # the tensors begin at a multiple of 32 again
    path.write_bytes(data[:16] + struct.pack("<Q", pairs + 2) + entry + renamed[first:])
    assert tensors
    return path


@pytest.mark.parametrize("form", ["meta", "huggingface", "gguf"])
def test_no_file_is_left_that_would_not_load(form: str, tmp_path: Path) -> None:
    source = without_merges(form, tmp_path / "source")
    load(source, device="cpu")
    with pytest.raises(ValueError, match=r"^the new file would not load.*tokenizer\.ggml\.merges must be an array"):
        convert(source, tmp_path / "out.gguf", type="f32")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tokenizer_given_by_path_is_written_into_the_file(tmp_path: Path) -> None:
    config = config_of(**SIZES)
    weights = meta_weights(random_model(config))
    elsewhere = write_meta(tmp_path / "meta", weights, meta_params(config)) / "tokenizer.model"
    bare = write_gguf(tmp_path / "bare.gguf", weights, config, tokenizer=False)
    convert(bare, tmp_path / "out.gguf", type="f32", tokenizer_path=elsewhere)
    assert open_checkpoint(tmp_path / "out.gguf").tokenizer.n_words == config.vocab_size
