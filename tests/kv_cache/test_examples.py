"""The kinds of cache in docs/kv_cache_kinds.md keep the contract, and do what the page says."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import some_tokens, tiny_args, tiny_model
from writes import write

from llama.kv_cache import KVCache, cache_kind
from llama.rows import Rows
from llama.testing import CLAIMS, check_cache_kind

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


def test_the_other_python_of_the_page_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    files = [file.read_text(encoding="utf-8") for file in FILES]
    others = [code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if code not in files]
    assert len(others) == 1
    exec(compile(others[0], "kv_cache_kinds.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == len(CLAIMS) - 2  # those of lossless kinds


@pytest.mark.parametrize("params", ["0", "-3", "some", "1.5", "", "1"])
@pytest.mark.parametrize(("name", "least"), [("every_second", 1), ("h2o", 2)])
def test_what_is_no_number_of_positions_is_refused_with_what_is_one(name: str, least: int, params: str) -> None:
    kind = example(f"{name}:{params}")
    if params == "" or (params.isdecimal() and int(params) >= least):
        assert KVCache.of(tiny_args(kv_cache=kind))
        return
    with pytest.raises(ValueError, match=f"^kv_cache='{kind}': .* from {least} on, such as {name}:\\d+$"):
        KVCache.of(tiny_args(kv_cache=kind))


def test_heavy_hitters_keep_the_contract() -> None:
    assert len(check_cache_kind(example("h2o:2"))) == len(CLAIMS) - 2


@pytest.mark.parametrize("name", ["every_second:8", "h2o:8"])
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


def made_up(*, rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, 2, 8, generator=torch.Generator().manual_seed(0))


def looked_at(cache: KVCache, mass: torch.Tensor) -> None:
    """Call `observe` with this attention, (bsz, n_heads, kv_len), of one query per row."""
    row: Callable[[int], Any] = lambda row: SimpleNamespace(attention=lambda last: mass[row][:, None])  # noqa: E731
    cache.observe(SimpleNamespace(rows=SimpleNamespace(lengths=(1,) * len(mass)), row=row))  # type: ignore[arg-type]


def test_heavy_hitters_stay_and_the_others_go() -> None:
    cache = KVCache.of(tiny_model(kv_cache=example("h2o:6")).args)
    keys = made_up(rows=2, length=12)
    write(cache, 0, keys, keys)
    mass = torch.full((2, 2, 12), 0.1)
    mass[0, :, 1], mass[0, 1, 4], mass[0, 0, 7] = 5.0, 3.0, 2.0  # row 0 looks at 1, 4 and 7, one head or both
    mass[1, :, [0, 2, 3]] = 1.0
    looked_at(cache, mass)
    assert cache.state()["positions"].tolist() == [[1, 4, 7, 9, 10, 11], [0, 2, 3, 9, 10, 11]]
    assert torch.equal(cache.state()["keys"][0], keys[0, [1, 4, 7, 9, 10, 11]])
    # Attention adds up: heavy keys stay heavy without new attention, and new heavy keys replace the lightest.
    new = made_up(rows=2, length=1)
    returned, _ = write(cache, 12, new, new)
    assert returned.shape[1] == 7, "a query sees all that is held, and itself"
    drawn = torch.zeros(2, 2, 7)
    drawn[0, :, 3] = 9.0  # row 0 looks at position 9
    looked_at(cache, drawn)
    assert cache.state()["positions"].tolist() == [[1, 4, 9, 10, 11, 12], [0, 2, 3, 10, 11, 12]]
