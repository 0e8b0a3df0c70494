"""The model `llama_kv` answers lm-eval's requests as lm-eval's `hf` does, and through each kind of cache."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import write_checkpoint

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e .[eval]")
from llama.quality.lm_eval import LlamaKV  # noqa: E402

pytestmark = pytest.mark.slow
LIMIT = 256
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CONTEXTS = ["he held the hell of the day", "he held the hell of the night", "the day", ""]
DATA = [{"text": f"{context} it", "context": context, "choices": [" the", " hello", " the the day"], "label": n % 3}
        for n, context in enumerate(CONTEXTS)]  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label"},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "doc_to_text": "",
                "metric_list": [{"metric": "word_perplexity"}]},
    "written": {"output_type": "generate_until", "doc_to_target": "{{text}}", "doc_to_text": "the {{context}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 9}, "metric_list": [{"metric": "exact_match"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, and tasks with their data."""
    made = tmp_path_factory.mktemp("lm_eval")
    write_checkpoint(made / "model", max_seq_len=LIMIT)
    config = made / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    (made / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DATA))
    for name, task in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "test_split": "test", "fewshot_split": "test",
                 "doc_to_text": "{{context}}", **task}  # fmt: skip
        whole["dataset_kwargs"] = {"data_files": {"test": str(made / "data.jsonl")}}
        (made / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return made


def evaluated(
    folder: Path, model: str, arguments: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, list[Any]]:
    """Return what a model answers to every request of every task."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    done = lm_eval.simple_evaluate(model, model_args=arguments, tasks=list(TASKS), task_manager=manager,
                                   device="cpu", bootstrap_iters=0, **options)  # fmt: skip
    return {name: [one["resps"] for one in done["samples"][name]] for name in TASKS}


CHAT = {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "be short"}


@pytest.mark.parametrize("options", [{}, {"num_fewshot": 2}, CHAT], ids=["plain", "few-shot", "chat"])
def test_the_full_cache_answers_as_transformers_does(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = evaluated(folder, "llama_kv", f"ckpt_dir={folder / 'model'},dtype=fp32", monkeypatch, **options)
    theirs = evaluated(folder, "hf", f"pretrained={folder / 'model'},dtype=float32", monkeypatch, **options)
    assert ours["written"] == theirs["written"]
    assert len({str(one) for one in ours["written"]}) > 1
    for name in ("choices", "rolling"):
        pairs = zip(_numbers(ours[name]), _numbers(theirs[name]), strict=True)
        for one, other in pairs:
            assert one == pytest.approx(other, abs=2e-4), name


def test_special_tokens_are_read_and_left_out_as_transformers_does(folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    ours, theirs = of(folder, "static"), HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu")
    opening = "<|start_header_id|>user<|end_header_id|>\n\nthe <|eot_id|>"
    contexts = [opening, f"<|begin_of_text|>{opening}", "<|eot_id|>", "<|begin_of_text|>", " ", "the  "]
    for text in [*contexts, ""]:
        for given in (None, False, True):
            assert ours.tok_encode(text, given) == theirs.tok_encode(text, given), (text, given)
    pairs = asked(*((context, after) for context in contexts for after in (" the", "<|eot_id|>", "\n<|eot_id|>the")))
    assert _numbers(ours.loglikelihood(pairs)) == pytest.approx(_numbers(theirs.loglikelihood(pairs)), abs=2e-4)
    texts = asked(*((context, {"until": ["\n", "q"], "max_gen_toks": 12}) for context in [*contexts, *"abcdef"]))
    assert ours.generate_until(texts) == theirs.generate_until(texts)
    written = [ours._fed(ours.tok_encode(context)).generate(12, temperature=0)["generation"] for context in "abcdef"]
    assert any("_id|>" in text for text in written), "no answer had a special token to leave out"


def test_a_continuation_that_merges_into_its_context_is_encoded_alone(folder: Path) -> None:
    """Its ids are not behind those of the context: " hel" + "lo" is one token, and " hel" alone has two."""
    model = of(folder, "static")
    for context in ("the hel", "hel"):
        alone = model.score(model.tok_encode(context), model.codec.encode("lo", bos=False, eos=False))
        assert model.loglikelihood(asked((context, "lo"))) == [alone]
        assert alone[0] < 0
    with pytest.raises(ValueError, match=r"the continuation of '<\|begin_of_text\|>the' has no tokens; leave this"):
        model.loglikelihood(asked(("the", "")))


def test_the_hf_model_generates_with_a_kind_of_cache_by_the_lines_of_the_page(folder: Path) -> None:
    """Contexts are padded on the left there, two at a time."""
    page = (Path(__file__).parents[2] / "docs" / "quality.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(from lm_eval.*?)\n\n\nprint", page, flags=re.DOTALL)[0], names := dict[str, Any]())
    theirs = names["WithKind"](str(folder / "model"), dtype="float32", device="cpu", batch_size=2)
    texts = asked(
        *((f"{one} {other} {one}", {"until": ["\n"], "max_gen_toks": 9}) for one in CONTEXTS for other in "ab")
    )
    snapkv, static = (of(folder, kind).generate_until(texts) for kind in ("snapkv:0.5", "static"))
    assert theirs.generate_until(texts) == snapkv != static


def _numbers(value: Any) -> list[float]:
    """Return all numbers and flags in nested lists, in order."""
    return [x for one in value for x in _numbers(one)] if isinstance(value, list | tuple) else [float(value)]


def of(folder: Path, kind: str, **options: Any) -> LlamaKV:
    return LlamaKV(str(folder / "model"), kv_cache=kind, device="cpu", dtype="fp32", **options)


def asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_what_contexts_share_is_fed_once_and_a_lossy_kind_depends_on_no_other_request(folder: Path) -> None:
    pairs = asked(*((context, choice) for context in CONTEXTS[:2] for choice in DATA[0]["choices"]))
    full = of(folder, "static")
    together = full.loglikelihood(pairs)
    alone = [one for pair in pairs for one in of_alone(folder, "static", pair)]
    assert _numbers(together) == pytest.approx(_numbers(alone), abs=1e-5)
    ids = [full.tok_encode(context) for context in CONTEXTS[:2]]
    same = next(n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert full._session.fed == len(ids[0]) + len(ids[1]) - same, "the longest beginning that they share, once"
    lossy = of(folder, "h2o:6")
    assert lossy.loglikelihood(pairs) == [one for pair in pairs for one in of_alone(folder, "h2o:6", pair)]
    assert lossy.loglikelihood(pairs) != together


def of_alone(folder: Path, kind: str, pair: Any) -> list[tuple[float, bool]]:
    found: list[tuple[float, bool]] = of(folder, kind).loglikelihood([pair])
    return found


def test_a_continuation_reads_what_a_lossy_kind_stores(folder: Path) -> None:
    """Fed in one pass, it would read keys and values that the kind has not rounded or dropped yet."""
    (text,) = asked((CONTEXTS[0],))
    exact, window = (of(folder, kind).loglikelihood_rolling([text])[0] for kind in ("static", "window:6+1"))
    assert window != pytest.approx(exact, abs=1e-3)


def test_requests_that_cannot_be_served_are_rejected(folder: Path) -> None:
    model = of(folder, "static")
    with pytest.raises(ValueError, match=r"batch_size=8: texts run one after another"):
        of(folder, "static", batch_size=8)
    with pytest.raises(ValueError, match=r"generation_kwargs num_beams is not known"):
        model.generate_until(asked(("the", {"num_beams": 2})))
    with pytest.raises(ValueError, match=r"max_gen_toks=256 must be below the model's max_seq_len=256"):
        model.generate_until(asked(("the", {"max_gen_toks": LIMIT})))
    with pytest.raises(ValueError, match="a continuation has 257 tokens"):
        model.score([1], [2] * (LIMIT + 1))
    with pytest.raises(ValueError, match="gen_prefix of the task cannot be used with --apply_chat_template"):
        model.apply_chat_template([{"role": "user", "content": "the"}], add_generation_prompt=False)
