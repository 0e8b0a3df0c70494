"""Perplexity equals transformers' on the same windows, a scored cache is really read, and lossy kinds are detected."""

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf, write_huggingface
from commands import Command
from fakes import NATIVE_SIZES, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from refusals import unrefused
from tiny import some_tokens, tiny_model, watched
from torch import Tensor

from llama import load
from llama.cli.perplexity import main
from llama.kv_cache import StaticCache
from llama.quality.perplexity import Score, cached_perplexity, compare, next_logits, perplexity, windows
from llama.rows import Rows

TEXT = "The quick brown fox jumps over the lazy dog, and the other dog looks on. " * 2


class HalfRounded(StaticCache, kind="half_rounded"):
    """Rounds values to multiples of a half."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        return super().update(rows, xk, (xv * 2).round() / 2)


def ids_of(length: int, *, vocab_size: int = 40, seed: int = 0) -> list[int]:
    return some_tokens(1, length, vocab_size=vocab_size, seed=seed)[0].tolist()


def score_of_transformers(model: Any, ids: list[int], context: int, stride: int) -> tuple[int, float]:
    """Return the tokens scored and their mean negative log-likelihood, by the code that transformers documents.

    https://huggingface.co/docs/transformers/perplexity: windows, targets of -100 and the model's own loss are its. The
    loss is the mean over a window's targets, and is weighted by their number: the page subtracts one more than the
    model leaves out where windows overlap.
    """
    tokens, total, scored, before = torch.tensor([ids]), 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = tokens[:, begin:end]
        targets = window.clone()
        targets[:, : -(end - before)] = -100
        counted = int((targets[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(window, labels=targets).loss) * counted if counted else 0.0
        scored, before = scored + counted, end
        if end == len(ids):
            break
    return scored, total / scored


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_every_token_is_scored_once_after_enough_others(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    scored = []
    for number, (begin, first, end) in enumerate(windows(length, context=context, stride=stride)):
        assert end - begin <= context
        assert number == 0 or first - begin >= max(context - stride, 1)
        scored += range(first, end)
    unscored = range(0, length, context) if stride == context else [0]  # nothing is before them
    assert scored == [place for place in range(length) if place not in unscored]


def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = random_model(config_of())
    model, _ = load(write_huggingface(tmp_path, theirs), device="cpu", dtype="fp32")
    ids = ids_of(170, vocab_size=model.args.vocab_size)
    for context, stride in ((80, 40), (80, 80), (30, 7), (500, 250)):
        score = perplexity(model, ids, context=context, stride=stride)
        tokens, mean_nll = score_of_transformers(theirs, ids, context, stride)
        assert (score.tokens, score.context, score.stride) == (tokens, context, stride)
        assert score.mean_nll == pytest.approx(mean_nll, rel=0, abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(mean_nll), rel=1e-4)


def test_perplexity_uses_no_cache_and_does_not_change_the_switch() -> None:
    model = tiny_model()
    with watched(model) as watch:
        perplexity(model, ids_of(40), context=20, stride=10)
    assert watch.widths == [20, 20, 20]
    assert set(watch.nbytes) == {0}
    assert model.kv_caching


def test_a_score_through_a_full_cache_is_that_of_one_pass() -> None:
    """With the same windows; the first tokens of the text, which only one pass scores, are subtracted."""
    model, ids = tiny_model(), ids_of(41)
    score = cached_perplexity(model, ids, context=20, prompt_len=6)
    whole = perplexity(model, ids, context=20, stride=14)
    first = perplexity(model, ids[:6], context=20, stride=14)
    assert (score.tokens, score.context, score.stride) == (41 - 6, 20, 14)
    assert whole.tokens == score.tokens + first.tokens
    nll = whole.mean_nll * whole.tokens - first.mean_nll * first.tokens
    assert score.mean_nll == pytest.approx(nll / score.tokens, abs=1e-9)


def test_a_cached_score_feeds_the_prompt_and_then_each_token_through_the_cache() -> None:
    model = tiny_model()
    with watched(model) as watch:
        cached_perplexity(model, ids_of(16), context=10, prompt_len=4)
    assert watch.widths == [4, 1, 1, 1, 1, 1] * 2
    assert watch.starts == [0, 4, 5, 6, 7, 8] * 2
    assert 0 not in watch.nbytes
    assert model.cache is None, "the model's own cache is not used"


def test_predictions_that_are_closed_early_free_the_cache_and_leave_the_switch() -> None:
    model = tiny_model(kv_caching=False)
    cache = model.new_cache(rows=1, length=19)
    held = weakref.ref(cache)
    steps = next_logits(model, ids_of(20), prompt_len=5, cache=cache)
    next(steps)
    assert cache.nbytes > 0
    del cache
    steps.close()
    assert held() is None
    assert (model.kv_caching, model.cache) == (False, None)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_fast_model_predicts_the_same_through_another_kind(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **NATIVE_SIZES)
    model, _ = load(path, device="cpu", dtype="fp32", fast=True, quantize="int8")
    found = compare(model, "concat", ids_of(30), prompt_len=8)
    assert found.top1_agreement == 1
    assert abs(found.mean_kl) < 1e-3  # native code rounds activations of int8 weights, and does not support concat


def test_a_rounding_cache_shows_in_divergence_agreement_and_perplexity() -> None:
    """Compared with the definitions, on the log-probabilities of two separate runs."""
    model, ids = tiny_model(), ids_of(24)
    found = compare(model, "half_rounded", ids, prompt_len=4)
    assert found.tokens == 20
    p, q = (
        torch.stack(list(next_logits(model, ids, prompt_len=4, cache=model.new_cache(kind)))).log_softmax(-1)
        for kind in ("static", "half_rounded")
    )
    assert found.mean_kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()))
    assert found.mean_kl > 0.01
    assert found.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert found.top1_agreement < 1
    positions, targets = torch.arange(20), torch.tensor(ids[4:])
    assert found.reference_nll == pytest.approx(float(-p[positions, targets].mean()))
    assert found.other_nll == pytest.approx(float(-q[positions, targets].mean()))
    assert found.kls == pytest.approx((p.exp() * (p - q)).sum(-1).tolist())
    assert found.other_nlls == pytest.approx((-q[positions, targets]).tolist())


def test_bad_windows_and_prompts_are_refused() -> None:
    model, ids = tiny_model(), ids_of(20)  # max_seq_len is 24

    def first_logits(length: int, prompt_len: int) -> Tensor:
        return next(next_logits(model, ids_of(length), prompt_len=prompt_len))

    table = [
        (lambda: perplexity(model, ids, context=25), "context=25 must be from 2 to the model's max_seq_len=24"),
        (lambda: perplexity(model, ids, context=10, stride=11), "stride=11 must be from 1 to context=10"),
        (lambda: perplexity(model, ids[:1], context=10), "the text has 1 tokens"),
        (lambda: compare(model, "concat", ids, prompt_len=0), "prompt_len=0 must be at least 1"),
        (lambda: first_logits(20, 20), "the text has 20 tokens, and only those after prompt_len=20 are scored"),
        (lambda: first_logits(26, 4), "a text of 25 positions goes past max_seq_len=24"),
        (lambda: cached_perplexity(model, ids, context=4, prompt_len=4), "context=4 must be above prompt_len=4"),
    ]
    assert unrefused(table) == []


def test_a_perplexity_that_overflows_is_infinite() -> None:
    assert Score(1, 800.0, 2, 1).perplexity == math.inf


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("perplexity") / "model", max_seq_len=64)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def words_of(checkpoint: Path, text: Path, *words: str) -> list[object]:
    return ["--ckpt_dir", checkpoint, "--device=cpu", "--text", text, *words]


def score_of(checkpoint: Path, kind: str | None, tokens: int | None = None) -> Score:
    model, tokenizer = load(checkpoint, device="cpu", kv_cache=kind or "static")
    ids = tokenizer.encode(TEXT, bos=True, eos=False)[:tokens]
    if kind is None:
        return perplexity(model, ids, context=64, stride=32)
    return cached_perplexity(model, ids, context=40, prompt_len=8)


def test_the_command_prints_what_was_scored_and_how(checkpoint: Path, text: Path, command: Command) -> None:
    lines = command.printed(main, *words_of(checkpoint, text)).splitlines()
    score = score_of(checkpoint, None)
    low, high = score.perplexity_interval or (0.0, 0.0)
    assert low < score.perplexity < high
    shown, _, nll = lines[0].partition(", mean negative log-likelihood ")
    assert shown == f"perplexity {score.perplexity:.4f} ({low:.4f} to {high:.4f})"
    assert nll.startswith(f"{score.mean_nll:.5f} nats")
    assert lines[1] == f"tokens     {score.tokens} scored of {score.tokens + 1}, BOS first"
    assert lines[2:4] == ["windows    context 64, stride 32", "KV cache   off, one pass a window"]
    assert lines[4:] == [f"text       {text}", f"model      {checkpoint}, fp32 on cpu, plain"]


def test_the_command_scores_through_a_kind_and_prints_json(checkpoint: Path, text: Path, command: Command) -> None:
    kind = ("--kv_cache=half_rounded", "--prompt_len=8", "--context=40", "--tokens=50")
    words = words_of(checkpoint, text, *kind)
    facts = json.loads(command.printed(main, *words, "--json"))
    score = score_of(checkpoint, "half_rounded", tokens=50)
    assert facts["perplexity"] == score.perplexity
    assert (facts["tokens"], facts["text_tokens"], facts["context"], facts["stride"]) == (42, 50, 40, 32)
    assert (facts["kv_cache"], facts["prompt_len"], facts["bos"], facts["dtype"]) == ("half_rounded", 8, True, "fp32")
    printed = command.printed(main, *words)
    assert "KV cache   half_rounded, 8 tokens of a window in one pass, the others one by one" in printed
    plain = score_of(checkpoint, "static", tokens=50)
    assert facts["perplexity"] != pytest.approx(plain.perplexity, rel=1e-3)


def test_the_command_scores_stored_weights_and_8_bit_activations(tmp_path: Path, text: Path, command: Command) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    file = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.Q4_0)
    scores = {}
    for words in ((), ("--activations=8",)):
        facts = json.loads(command.printed(main, *words_of(file, text, "--quantize=stored", "--json", *words)))
        scores[facts["execution"]] = facts["perplexity"]
    whole, rounded = scores.values()
    assert [*scores] == ["plain, stored weights", "plain, stored weights, 8-bit activations"]
    assert whole != rounded


BAD_FLAGS = {
    "": "there is no text to score; name a file by --text FILE",
    "--text=text.txt --prompt_len=8": "prompt_len=8 needs --kv_cache",
    "--text=text.txt --kv_cache=static --stride=8": "stride=8 cannot be set with kv_cache",
    "--text=text.txt --context=100": "context=100 must be from 2 to the model's max_seq_len=64",
    "--text=text.txt --tokens=1": "tokens=1 must be at least 2",
}


def test_bad_flags_are_one_line(
    checkpoint: Path, text: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text.parent)
    said = {
        words: command.refused(main, "--ckpt_dir", checkpoint, "--device=cpu", *words.split()) for words in BAD_FLAGS
    }
    assert {words: line for words, line in said.items() if BAD_FLAGS[words] not in line} == {}
