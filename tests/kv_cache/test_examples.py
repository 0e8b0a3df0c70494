"""The kinds of cache in docs/kv_cache_kinds.md keep the contract, and do what the page says."""

import re
from pathlib import Path

import pytest
import torch
from tiny import some_tokens, tiny_args, tiny_model

from llama.kv_cache import KVCache, cache_kind
from llama.rows import Rows
from llama.testing import CLAIMS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "kv_cache_kinds.md").read_text(encoding="utf-8")
FILES = sorted((DOCS / "examples").glob("*.py"))


def example(name: str) -> str:
    return cache_kind(f"{DOCS / 'examples' / name.partition(':')[0]}.py:{name}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_shows_the_file_word_for_word(file: Path) -> None:
    assert f"```python\n{file.read_text(encoding='utf-8')}```" in PAGE


def test_the_first_example_has_less_than_40_lines_of_code() -> None:
    lines = (DOCS / "examples" / "every_second.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) < 40


@pytest.mark.slow
def test_the_other_python_of_the_page_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks the second example against the contract."""
    monkeypatch.chdir(DOCS.parent)
    files = [file.read_text(encoding="utf-8") for file in FILES]
    others = [code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if code not in files]
    assert len(others) == 1
    exec(compile(others[0], "kv_cache_kinds.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == len(CLAIMS) - 3  # those of lossless kinds, and of scores


def test_invalid_parameters_of_the_last_example_are_refused_with_an_example() -> None:
    for params in ("", "1"):
        assert KVCache.of(tiny_args(kv_cache=example(f"every_second:{params}")))
    for params in ("0", "-3", "some", "1.5"):
        kind = example(f"every_second:{params}")
        with pytest.raises(ValueError, match=f"^kv_cache='{kind}': .* from 1 on, such as every_second:\\d+$"):
            KVCache.of(tiny_args(kv_cache=kind))


@torch.inference_mode()
def test_the_first_example_keeps_what_the_kind_h2o_keeps() -> None:
    """Rows, copies and files are those of `ScoredCache`, which checks of the contract try with its other kinds."""
    model, tokens = tiny_model(max_seq_len=64), some_tokens(1, 30)
    mine, ours = model.new_cache(example("heavy_hitters:12")), model.new_cache("h2o:12")
    for start, end in ((0, 20), *((at, at + 1) for at in range(20, 30))):
        assert torch.equal(*(model(tokens[:, start:end], start, cache=cache) for cache in (mine, ours)))


@torch.inference_mode()
def test_the_second_example_lets_the_keys_of_all_heads_compete() -> None:
    model = tiny_model(max_seq_len=64)
    cache = model.new_cache(example("across_heads:0.4"))
    model(some_tokens(1, 20), 0, cache=cache)
    for layer in cache.layers:
        counts = layer.state()["counts"][0].tolist()
        assert sum(counts) == 2 * 8
        assert counts[0] != counts[1]


@pytest.mark.parametrize("name", ["every_second:8", "heavy_hitters:8"])
def test_a_kind_that_has_dropped_nothing_writes_what_the_full_cache_writes(name: str) -> None:
    short, long = [[1, 2, 3]], [[*range(1, 20)]]
    full, kind = (tiny_model(kv_cache=cache, max_seq_len=64) for cache in ("static", example(name)))
    for prompts, tokens, same in ((short, 5, True), (long, 20, False)):
        wanted, made = (model.generate_tokens(prompts, tokens, temperature=0.0)[0] for model in (full, kind))
        assert len(made[0]) == tokens
        assert (made == wanted) or not same


@torch.inference_mode()
def test_beyond_the_last_n_only_even_positions_stay_and_every_query_sees_what_it_should() -> None:
    model = tiny_model(kv_cache=example("every_second:6"), max_seq_len=64)
    tokens = some_tokens(2, 21)
    held = model.new_cache()
    model(tokens[:, :20], 0, cache=held)
    cache = held.layers[0]
    seen = cache.visible(Rows.at([0, 0], [20, 20]), torch.zeros(2, 20, 1, 1))
    assert seen is not None
    positions = [torch.arange(20)[row].tolist() for row in seen[0]]
    assert positions[3] == [0, 1, 2, 3]
    assert positions[11] == [0, 2, 4, 6, 7, 8, 9, 10, 11], "in the middle of a prompt, too"
    assert sorted(cache.state()["positions"][0].tolist()) == [0, 2, 4, 6, 8, 10, 12, 14, 15, 16, 17, 18, 19]
    model(tokens[:, 20:], 20, cache=held)
    assert 15 in cache.state()["positions"][0].tolist(), "position 20 is the sixth of the last six"
    assert 13 not in cache.state()["positions"][0].tolist()
