"""Families that are built like Llama give the logits of transformers, from folders and from .gguf files."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import N_WORDS, finish, gguf_writer, write_huggingface, write_huggingface_tokenizer
from families import FAMILIES, SCALINGS, config_of, random_model
from gguf import GGMLQuantizationType as Kind
from references import in_float64
from tables import table
from tiny import fed_in_pieces
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, YarnScaling
from llama.checkpoint import CheckpointError, huggingface, load_weights, open_checkpoint
from llama.checkpoint.assemble import Weight
from llama.checkpoint.export import save_gguf, save_huggingface
from llama.checkpoint.gguf_writer import planned, write_gguf
from llama.model import Transformer
from llama.quant.layers import quantized_weights

TOKENS = torch.arange(74).reshape(2, 37) * 29 % N_WORDS
# In float64 two programs that do the same sums in another order; logits are of the order of 10.
TOLERANCE = 1e-10


def write_qwen_gguf(path: Path, model: Any, *, kind: Kind = Kind.F32, metadata: Any = None) -> Path:
    """Write a .gguf file by the gguf package's own table of names, with the rows as Hugging Face has them."""
    config = model.config
    arch = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf_writer(path, config)
    if metadata is not None:
        metadata(writer)
    for name, weight in model.state_dict().items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        used = kind if weight.ndim > 1 and weight.shape[-1] % 32 == 0 else Kind.F32
        writer.add_tensor(theirs, gguf.quants.quantize(weight.float().numpy(), used), raw_dtype=used)
    finish(writer)
    return path


def load(path: Path, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    checkpoint = open_checkpoint(path)
    return load_weights(checkpoint, checkpoint.args, dtype=dtype, device="cpu", **changes)


@torch.inference_mode()
def assert_same_logits(ours: Transformer, theirs: Any, tokens: Tensor = TOKENS, tolerance: float = TOLERANCE) -> None:
    """Compare cached and uncached, in one pass and in four chunks."""
    expected, third = theirs(tokens).logits, tokens.shape[1] // 3
    for caching in (False, True):
        ours.kv_caching = caching
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=tolerance)
    chunks = fed_in_pieces(ours, tokens, [third, third + 1, tokens.shape[1] - 2])
    torch.testing.assert_close(chunks, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("family", "scaling"), [(FAMILIES[i % 4], each) for i, each in enumerate(SCALINGS)])
def test_a_family_gives_the_logits_of_transformers(family: str, scaling: str, tmp_path: Path) -> None:
    theirs = random_model(config_of(family, scaling))
    assert_same_logits(load(write_huggingface(tmp_path, theirs)), theirs)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_gguf_file_of_qwen_gives_the_logits_of_its_folder(family: str, tmp_path: Path) -> None:
    theirs = random_model(config_of(family)).float().double()  # numbers that the file holds exactly
    assert_same_logits(load(write_qwen_gguf(tmp_path / "model.gguf", theirs)), theirs)


@pytest.mark.parametrize(
    ("family", "scaling", "tied"),
    [
        *(("llama", "default", False), ("qwen3", "yarn", True)),
        pytest.param("llama", "llama3", True, marks=pytest.mark.slow),
        pytest.param("mistral", "linear", False, marks=pytest.mark.slow),
        pytest.param("qwen2", "default", False, marks=pytest.mark.slow),
    ],
)
def test_an_exported_model_gives_the_same_logits(family: str, scaling: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = random_model(config_of(family, scaling, tie_word_embeddings=tied)).float()
    model = load(write_huggingface(tmp_path / "folder", theirs), torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_huggingface(model, tmp_path / "again")
    write_huggingface_tokenizer(tmp_path / "again")
    save_gguf(model, tmp_path / "again.gguf")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())  # as it was
    again = in_float64(AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64))
    assert_same_logits(load(tmp_path / "folder"), again)
    checkpoint_args = load(tmp_path / "again").args
    assert checkpoint_args == model.args
    if scaling == "default" and family != "qwen3":  # of that it does not read how wide a head is
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="again.gguf", dtype=torch.float64)
        assert_same_logits(load(tmp_path / "folder"), in_float64(read))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_stored_rows_of_qwen_are_reordered(family: str, tmp_path: Path) -> None:
    theirs = random_model(config_of(family))
    path = write_qwen_gguf(tmp_path / "model.gguf", theirs, kind=Kind.Q8_0)
    plain, stored = load(path, torch.float32), load(path, torch.float32, quantize="stored")
    with torch.inference_mode():
        torch.testing.assert_close(stored(TOKENS), plain(TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "quantize"), [("qwen2", "int8"), ("qwen3", "int4")])
def test_quantised_families_compute_with_their_biases_and_norms(family: str, quantize: str, tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path, random_model(config_of(family)))
    plain, packed = load(folder, torch.float32), load(folder, torch.float32, quantize=quantize)
    rounded = {
        name: weight.rows(0, weight.shape[0], torch.float32) for name, weight in quantized_weights(packed).items()
    }
    plain.load_state_dict(rounded, strict=False)
    with torch.inference_mode():
        torch.testing.assert_close(packed(TOKENS), plain(TOKENS), rtol=0, atol=1e-3)


# ---- sliding windows -------------------------------------------------------------------------------------------------


def test_a_sliding_window_limits_the_length_and_is_named(tmp_path: Path) -> None:
    theirs = random_model(config_of("mistral", sliding_window=48))
    checkpoint = open_checkpoint(write_huggingface(tmp_path, theirs))
    with pytest.raises(CheckpointError, match=r"only the last 48 positions.*use --max_seq_len 48"):
        load_weights(checkpoint, checkpoint.args, dtype=torch.float64, device="cpu")
    ours = load_weights(checkpoint, checkpoint.whole_texts(), dtype=torch.float64, device="cpu")
    assert ours.args.max_seq_len == 48
    assert_same_logits(ours, theirs)


@table(
    "changes, window",
    [
        ({"use_sliding_window": False, "sliding_window": 16}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, 4096),
    ],
)
def test_qwen_has_a_window_only_if_a_layer_has_it(changes: dict[str, Any], window: int | None) -> None:
    by_kinds = config_of("qwen2", **changes).to_dict()
    by_number = {key: value for key, value in by_kinds.items() if key != "layer_types"} | changes
    assert [huggingface._window(Path("config.json"), config) for config in (by_kinds, by_number)] == [window] * 2


def test_a_window_of_a_gguf_file_limits_the_length(tmp_path: Path) -> None:
    theirs = random_model(config_of("qwen2"))
    path = write_qwen_gguf(tmp_path / "model.gguf", theirs, metadata=lambda writer: writer.add_sliding_window(32))
    assert open_checkpoint(path).window == 32


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


@table(
    "add, rule",
    [
        (lambda w: w.add_rope_scaling_factor(4.0), LinearScaling(4.0)),
        (lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.NONE), w.add_rope_scaling_factor(4.0)), None),
        (lambda w: w.add_rope_scaling_attn_factors(1.5), LinearScaling(1.0, 1.5)),
        (lambda w: (add_yarn(w), w.add_rope_scaling_orig_ctx_len(32)), YarnScaling(4.0, 32)),
        (
            lambda w: (add_yarn(w), w.add_rope_scaling_attn_factors(0.5)),
            YarnScaling(4.0, 128, attention_factor=0.5 * YarnScaling.sharpened(4.0)),
        ),
    ],
)
def test_scaling_in_a_gguf_file_is_read_as_llama_cpp_reads_it(add: Any, rule: Any, tmp_path: Path) -> None:
    path = write_qwen_gguf(tmp_path / "model.gguf", random_model(config_of("qwen2")), metadata=add)
    assert open_checkpoint(path).args.rope_scaling == rule


def test_bounds_of_yarn_that_llama_cpp_does_not_read_are_not_written(tmp_path: Path) -> None:
    model = load(write_huggingface(tmp_path / "folder", random_model(config_of("llama", "yarn with all its words"))))
    with pytest.raises(ValueError, match="beta_fast=32, beta_slow=1 and truncate=True, not"):
        save_gguf(model.float(), tmp_path / "again.gguf")


def test_llama_cpp_gives_the_same_logits_of_a_file_of_qwen(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    wide = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    for family in ("qwen2", "qwen3"):
        for scaling in ("default", "linear", "yarn"):
            model = load(write_huggingface(tmp_path / "folder", random_model(config_of(family, scaling, **wide))))
            model.float()
            parts = planned(model.args, {name: Weight.of(w) for name, w in model.state_dict().items()}, "F32")
            tokenizer = open_checkpoint(tmp_path / "folder").tokenizer
            write_gguf(tmp_path / "model.gguf", model.args, parts, tokenizer.to_gguf(N_WORDS))
            words = {"n_ctx": 128, "logits_all": True, "verbose": False, "type_k": 0, "type_v": 0}
            with closing(llama_cpp.Llama(str(tmp_path / "model.gguf"), **words)) as peer:
                peer.eval(TOKENS[0].tolist())
                theirs = torch.from_numpy(peer.scores[: TOKENS.shape[1]].copy())
            with torch.inference_mode():
                torch.testing.assert_close(model(TOKENS)[0], theirs, rtol=0, atol=1e-3)


def test_a_model_of_two_families_has_no_name_elsewhere(tmp_path: Path) -> None:
    args = ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=20, attention_bias=True, qk_norm=True)
    with pytest.raises(ValueError, match="both attention_bias and qk_norm"):
        save_gguf(Transformer(args), tmp_path / "model.gguf")
