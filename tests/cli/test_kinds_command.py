"""The list of the kinds of cache says of each what it takes, what it stores, and where it comes from."""

from pathlib import Path

import pytest

from llama.cli.kinds import main
from llama.kv_cache import KVCache

FILE = '''
from llama.kv_cache import StaticCache

class Mine(StaticCache, kind="listed"):
    """Keep all.

    More about it.
    """
'''

# Bytes of a prompt of 2048 tokens, 3 KV heads and heads of 64: keys, values and what belongs to them.
STATIC = 2048 * 3 * 2 * 64 * 4
KEPT = 2 * 64 * 4 + 4


def listed(capsys: pytest.CaptureFixture[str], *kinds: str) -> list[dict[str, str]]:
    """Return the rows of the table by column."""
    assert main(*kinds) == 0
    head, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    starts = [head.index(word) for word in ("kind", "PARAMS", "default", "bytes", "lossless", "what", "paper")]
    edges = list(zip(starts, [*starts[1:], None], strict=True))
    names = [head[begin:end].strip() for begin, end in edges]
    return [dict(zip(names, [row[begin:end].strip() for begin, end in edges], strict=True)) for row in rows]


def test_each_kind_is_listed_with_its_bytes_its_purpose_and_its_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    names = ["knorm:0.25", "duo-attention", "int8", f"{tmp_path / 'mine.py'}:listed"]
    knorm, duo, int8, mine = listed(capsys, *names)
    assert knorm == {
        "kind": "knorm:0.25",
        "PARAMS": "SHARE or COUNT",
        "default": "0.5",
        "bytes": f"{512 * 3 * KEPT / STATIC:.3f}",
        "lossless": "no",
        "what it does": "Keep the keys with the smallest L2 norm",
        "paper": "https://arxiv.org/abs/2406.11430",
    }
    assert duo["bytes"] == f"{(2048 + 2 * 260) * KEPT / STATIC:.3f}"
    codes, in_full = 2048 * 3 * 2 * 64, 32 * 3 * 2 * 64 * 4
    scales = 2048 // 32 * 3 * (64 + 32 * 2) * 2 * 2
    assert int8["bytes"] == f"{(codes + in_full + scales) / STATIC:.3f}"
    assert int8["paper"] == "https://arxiv.org/abs/2402.02750", "of its module"
    assert [mine[name] for name in ("kind", "default", "bytes", "lossless", "what it does", "paper")] == [
        *("listed", "", "1.000", "yes", "Keep all", "")
    ]


def test_without_names_all_kinds_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {name: kind for name, kind in KVCache.kinds.items() if kind.__module__.startswith("llama.")}
    monkeypatch.setattr(KVCache, "kinds", ours)  # without those of other tests
    main()
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    assert [row.split("  ")[0] for row in table.splitlines()[1:]] == sorted(ours)
    assert "Also accepted: streaming-llm for window." in notes
    assert "of a prompt of 2048 tokens in float32" in notes
    assert "All of them work in models of Hugging Face's transformers" in notes  # tests/kv_cache/test_transformers.py
