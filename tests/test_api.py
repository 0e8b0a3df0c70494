"""`load` returns a model and its tokenizer, and `Llama` has the interface of Meta's llama3."""

import logging
import runpy
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import SPECIALS, write_checkpoint
from refusals import unrefused

from llama import Dialog, Llama, load
from llama.api import pick_device, pick_dtype
from llama.checkpoint import CheckpointError

MAX_SEQ_LEN = 128
CPU = torch.device("cpu")
TEXTS = ["hello the world", "x", "one two three four"]
# float32 sums over 32 to 48 numbers of size 1, taken in another order by transformers.
FLOAT32 = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_seq_len=MAX_SEQ_LEN)


@pytest.fixture
def llama(checkpoint: Path) -> Llama:
    return Llama.build(str(checkpoint), seed=1, device="cpu")


# ---- devices and dtypes ----------------------------------------------------------------------------------------------


def test_devices_are_found_by_name_and_others_are_refused_with_the_choices() -> None:
    assert {pick_device(device).type for device in ("cpu", "cpu:0", CPU)} == {"cpu"}
    unknown: list[Any] = ["gpu", "", "CPU", "tpu:0", "cuda:x", "meta", "xpu", torch.device("meta")]
    assert unrefused((partial(pick_device, device), "choose auto, cpu, cuda or mps") for device in unknown) == []
    count = torch.cuda.device_count()
    absent: list[tuple[Any, str]] = [(f"cuda:{count}", f"device='cuda:{count}'.* sees {count} CUDA GPUs; choose cpu")]
    if count == 0:
        absent += [(device, "sees 0 CUDA GPUs") for device in ("cuda", "cuda:0", torch.device("cuda"))]
    if not torch.backends.mps.is_available():
        absent += [("mps", "device='mps': .* no Metal GPU; choose cpu")]
        assert count or pick_device("auto") == CPU
    assert unrefused((partial(pick_device, device), why) for device, why in absent) == []


def test_dtypes_have_short_and_long_names_and_others_are_refused_with_the_choices() -> None:
    names = ("auto", "fp32", "float32", "bf16", "bfloat16", "fp16", "fp64", torch.bfloat16, torch.float64)
    expected = (
        [torch.float32] * 3 + [torch.bfloat16] * 2 + [torch.float16, torch.float64, torch.bfloat16, torch.float64]
    )
    assert [pick_dtype(name, CPU) for name in names] == expected
    unknown: list[Any] = ["int8", "fp8", "", "FP32", torch.int8, torch.float8_e4m3fn, None]
    why = "choose auto, fp32, bf16, fp16 or fp64"
    assert unrefused((partial(pick_dtype, dtype, CPU), why) for dtype in unknown) == []


def test_a_metal_gpu_gets_a_supported_dtype() -> None:
    mps = torch.device("mps")
    assert pick_dtype("auto", mps) == torch.float16
    with pytest.raises(ValueError, match="no bf16 arithmetic; choose fp16"):
        pick_dtype("bf16", mps)
    with pytest.raises(ValueError, match="no fp64; choose fp32"):
        pick_dtype("fp64", mps)


# ---- load ------------------------------------------------------------------------------------------------------------


def test_a_loaded_model_continues_texts_as_transformers_does(checkpoint: Path) -> None:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    model, tokenizer = load(checkpoint, device="cpu")
    theirs = LlamaForCausalLM.from_pretrained(checkpoint)
    their_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    results = model.generate(tokenizer, TEXTS, 20, temperature=0, logprobs=True)
    for text, result in zip(TEXTS, results, strict=True):
        prompt = their_tokenizer(text)["input_ids"]
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + result["ids"]])).logits[0, len(prompt) - 1 :]
        chosen = logits.argmax(-1).tolist()
        assert chosen[:-1] == result["ids"]
        assert len(result["ids"]) == 20 or chosen[-1] in tokenizer.stop_tokens
        expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(result["ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result["logprobs"]), expected, **FLOAT32)
        assert result["generation"] == their_tokenizer.decode(result["ids"])


@pytest.mark.parametrize(
    ("dtype", "kv_cache"), [("fp32", "static"), ("bf16", "concat"), ("fp16", "static"), ("fp64", "concat")]
)
def test_the_model_is_loaded_as_asked(checkpoint: Path, dtype: str, kv_cache: str) -> None:
    model, tokenizer = load(
        str(checkpoint), device="cpu", dtype=dtype, max_seq_len=50, max_batch_size=3, kv_cache=kv_cache
    )
    assert {parameter.dtype for parameter in model.parameters()} == {pick_dtype(dtype, CPU)}
    assert (model.args.max_seq_len, model.args.max_batch_size, model.args.kv_cache) == (50, 3, kv_cache)
    assert (model.device, model.training, model.kv_caching) == (CPU, False, True)
    results = model.generate(tokenizer, TEXTS, 5, temperature=0)
    assert results == model.generate(tokenizer, TEXTS, 5, temperature=0, kv_caching=False)
    with pytest.raises(ValueError, match="max_seq_len=50"):
        model.generate(tokenizer, "x", 49)
    with pytest.raises(ValueError, match="max_batch_size=3"):
        model.generate(tokenizer, ["x"] * 4, 1)


def test_a_length_past_the_checkpoints_own_logs_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="llama.api"):
        model, _ = load(checkpoint, max_seq_len=200)
    assert "max_seq_len=200 is past the 128" in caplog.text
    assert model.args.max_seq_len == 200


def test_options_and_paths_that_cannot_be_loaded_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    table: list[tuple[dict[str, Any], str]] = [
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"max_batch_size": -1}, "max_batch_size=-1"),
        ({"exact": "yes"}, "exact='yes' must be True or False"),
    ]
    assert unrefused((partial(load, checkpoint, **options), words) for options, words in table) == []
    assert unrefused([(partial(load, tmp_path / "nothing"), "no such file")], CheckpointError) == []


def test_loading_prints_nothing_and_changes_no_defaults(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    state, grad, dtype = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype()
    load(checkpoint, dtype="bf16")
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, dtype)
    assert capfd.readouterr() == ("", "")


# ---- Meta's Llama ----------------------------------------------------------------------------------------------------


def test_text_completion_returns_what_meta_s_does(llama: Llama) -> None:
    for result in llama.text_completion(TEXTS, max_gen_len=6):
        assert result.keys() == {"generation"}
        assert isinstance(result["generation"], str)
    for result in llama.text_completion(TEXTS, temperature=0, max_gen_len=6, logprobs=True):
        assert result.keys() == {"generation", "tokens", "logprobs"}
        assert len(result["tokens"]) == len(result["logprobs"])
        assert all(isinstance(token, str) for token in result["tokens"])
        assert all(isinstance(score, float) and score <= 0 for score in result["logprobs"])


def test_calls_that_metas_interface_would_misread_are_refused(llama: Llama) -> None:
    with pytest.raises(ValueError, match=r"must be a list of texts; for one, write \[text\]"):
        llama.text_completion("hi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_gen_len=0 must be at least 1"):
        llama.text_completion(["hi"], max_gen_len=0)


def test_an_answer_may_follow_an_answer_as_in_meta_s_code(llama: Llama) -> None:
    dialog: Dialog = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert llama.chat_completion([dialog], max_gen_len=2)[0]["generation"]["role"] == "assistant"


def test_a_seed_that_is_no_whole_number_is_refused_before_anything_is_loaded(llama: Llama) -> None:
    for seed in (True, 1.5, None):
        with pytest.raises(ValueError, match=f"seed={seed} must be a whole number"):
            Llama.build("not/there", seed=seed)  # type: ignore[arg-type]
    assert Llama(llama.model, llama.tokenizer, seed=torch.tensor(3))  # type: ignore[arg-type]


def test_echo_returns_the_prompt_with_bos_at_logprob_0(llama: Llama) -> None:
    (result,) = llama.text_completion(["hello"], temperature=0, max_gen_len=3, logprobs=True, echo=True)
    assert result["tokens"][:2] == [SPECIALS[0], "hello"]
    assert result["logprobs"][0] == 0.0
    assert result["generation"].startswith(SPECIALS[0] + "hello")  # as Meta's: it decodes all the ids


def test_generate_takes_and_returns_ids(llama: Llama) -> None:
    prompts = [[1, 2, 3], [4]]
    ids, logprobs = llama.generate(prompts, max_gen_len=5, temperature=0)
    assert logprobs is None
    assert ids == llama.model.generate_tokens(prompts, 5, stop_ids=llama.tokenizer.stop_tokens, temperature=0)[0]
    echoed, logprobs = llama.generate(prompts, 5, 0.0, 1.0, True, True)
    assert echoed == [prompt + new for prompt, new in zip(prompts, ids, strict=True)]
    assert [len(row) for row in logprobs] == [len(row) for row in echoed]
    assert [row[0] for row in logprobs] == [0.0, 0.0]


def test_chat_completion_answers_as_the_assistant(llama: Llama) -> None:
    dialogs: Any = [
        [{"role": "user", "content": "hello"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "the"},
        ],
    ]
    results = llama.chat_completion(dialogs, temperature=0, max_gen_len=6)
    for result in results:
        assert result.keys() == {"generation"}
        assert result["generation"].keys() == {"role", "content"}
        assert result["generation"]["role"] == "assistant"
    prompts = [llama.formatter.encode_dialog_prompt(dialog) for dialog in dialogs]
    assert [prompt.count(llama.tokenizer.bos_id) for prompt in prompts] == [1, 1]
    ids, _ = llama.generate(prompts, 6, temperature=0)
    assert [result["generation"]["content"] for result in results] == [llama.tokenizer.decode(row) for row in ids]
    (asked, _) = llama.chat_completion(dialogs, temperature=0, max_gen_len=6, logprobs=True)
    assert asked.keys() == {"generation", "tokens", "logprobs"}
    assert len(asked["tokens"]) == len(asked["logprobs"])


@pytest.mark.parametrize("adds_bos", [True, False])
def test_an_empty_text_is_completed_from_bos(llama: Llama, adds_bos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.tokenizer, "adds_bos", adds_bos)
    (own,) = llama.model.generate(llama.tokenizer, "", 5, temperature=0)
    assert llama.text_completion([""], temperature=0, max_gen_len=5) == [{"generation": own["generation"]}]


def test_max_gen_len_is_cut_where_max_seq_len_is_reached(checkpoint: Path) -> None:
    llama, limit = Llama.build(checkpoint, max_seq_len=30, device="cpu"), 30
    llama.tokenizer.stop_tokens = []
    prompts = [[1] * 20, [2], [3] * limit]
    for asked, longest in ((None, limit - 1), (limit, limit - 1), (10**6, limit - 1), (10, 10)):
        ids, _ = llama.generate(prompts, asked)  # None means Meta's max_seq_len - 1
        assert [len(row) for row in ids] == [limit - 20, longest, 0]


def test_limits_of_build_hold(checkpoint: Path) -> None:
    llama = Llama.build(str(checkpoint), None, 40, 2, device="cpu")
    assert len(llama.text_completion(["x", "y"], max_gen_len=1000)) == 2
    with pytest.raises(ValueError, match="3 rows are more than max_batch_size=2"):
        llama.text_completion(["x", "y", "z"])
    with pytest.raises(ValueError, match="goes past max_seq_len=40"):
        llama.text_completion(["x" * 41])


def test_more_than_one_rank_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="model_parallel_size=2"):
        Llama.build(checkpoint, model_parallel_size=2)
    assert Llama.build(checkpoint, model_parallel_size=1).text_completion(["x"], max_gen_len=1)


def test_the_seed_of_build_decides_all_calls_and_successive_ones_differ(checkpoint: Path) -> None:
    def three_calls(seed: int) -> list[Any]:
        llama = Llama.build(checkpoint, seed=seed, device="cpu")
        return [llama.text_completion(["hello", "hello"], temperature=1.0, max_gen_len=12) for _ in range(3)]

    first = three_calls(1)
    assert first == three_calls(1)
    texts = [result["generation"] for call in [*first, *three_calls(2)] for result in call]
    assert len(set(texts)) == len(texts) == 12


# ---- programs written for Meta's llama3 ------------------------------------------------------------------------------

PROGRAM = """
    from typing import List, Optional
    import fire
    from llama import Dialog, Llama

    def main(ckpt_dir: str, tokenizer_path: str, temperature: float = 0.6, top_p: float = 0.9,
             max_seq_len: int = 64, max_batch_size: int = 4, max_gen_len: Optional[int] = 8):
        generator = Llama.build(
            ckpt_dir=ckpt_dir, tokenizer_path=tokenizer_path,
            max_seq_len=max_seq_len, max_batch_size=max_batch_size,
        )
        prompts: List[str] = ["The sun is", "hello, the"]
        results = generator.text_completion(
            prompts, max_gen_len=max_gen_len, temperature=temperature, top_p=top_p,
        )
        for prompt, result in zip(prompts, results):
            print(f"{prompt}> {result['generation']}")
            print("==========")
        dialogs: List[Dialog] = [
            [{"role": "user", "content": "hello?"}],
            [{"role": "system", "content": "In rhyme."}, {"role": "user", "content": "the time"}],
        ]
        results = generator.chat_completion(dialogs, max_gen_len=None, temperature=temperature, top_p=top_p)
        for dialog, result in zip(dialogs, results):
            print(f"> {result['generation']['role'].capitalize()}: {result['generation']['content']}")
            print("==========")

    if __name__ == "__main__":
        fire.Fire(main)
"""


def test_a_program_for_meta_s_llama3_runs_unchanged_and_without_a_process_group(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "example.py"
    file.write_text(textwrap.dedent(PROGRAM))
    words = ["--ckpt_dir", str(checkpoint), "--tokenizer_path", str(checkpoint / "tokenizer.json")]
    monkeypatch.setattr(sys, "argv", [str(file), *words])
    outputs = []
    for _ in range(2):
        runpy.run_path(str(file), run_name="__main__")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]  # the seed is 1 unless told otherwise
    assert (outputs[0].count("\n> Assistant: "), outputs[0].count("==========")) == (2, 4)
    assert not torch.distributed.is_initialized()


def test_a_driver_older_than_the_build_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
            "downloading and installing a new version.\nAlternatively, install another PyTorch."
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=r"system is too old \(found version 11040\)\); choose cpu") as refusal:
            pick_device(device)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="sees 2 CUDA GPUs"):
        pick_device("cuda:2")
