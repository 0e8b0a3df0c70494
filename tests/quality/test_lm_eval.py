"""The model `llama_kv` answers lm-eval's requests as lm-eval's `hf` does, and through each kind of cache."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import write_checkpoint

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e .[eval]")
from llama.quality.lm_eval import LlamaKV  # noqa: E402

pytestmark = pytest.mark.slow
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
    write_checkpoint(made / "model", max_seq_len=48)
    (made / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DATA))
    for name, task in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{context}}", **task}
        whole["dataset_kwargs"] = {"data_files": {"test": str(made / "data.jsonl")}}
        (made / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return made


def evaluated(folder: Path, model: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return what a model answers to every request of every task."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    done = lm_eval.simple_evaluate(model, model_args=arguments, tasks=list(TASKS), task_manager=manager,
                                   device="cpu", bootstrap_iters=0)  # fmt: skip
    return {name: [one["resps"] for one in done["samples"][name]] for name in TASKS}


def test_the_full_cache_answers_as_transformers_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = evaluated(folder, "llama_kv", f"ckpt_dir={folder / 'model'},dtype=fp32", monkeypatch)
    theirs = evaluated(folder, "hf", f"pretrained={folder / 'model'},dtype=float32", monkeypatch)
    assert ours["written"] == theirs["written"]
    assert len({str(one) for one in ours["written"]}) > 1
    for name in ("choices", "rolling"):
        pairs = zip(_numbers(ours[name]), _numbers(theirs[name]), strict=True)
        for one, other in pairs:
            assert one == pytest.approx(other, abs=2e-4), name


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
    with pytest.raises(ValueError, match=r"max_gen_toks=48 must be below the model's max_seq_len=48"):
        model.generate_until(asked(("the", {"max_gen_toks": 48})))
    with pytest.raises(ValueError, match="a continuation has 49 tokens"):
        model.score([1], [2] * 49)
