"""Every kind of cache keeps the contract, and a kind that does not is found; names of kinds, and `observe`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossings import kinds
from fakes import Bytes
from tables import cases
from tiny import FP64_TOLERANCE, some_tokens, tiny_model
from torch import Tensor

from llama.kv_cache import Attended, ConcatCache, KVCache, ScoredCache, StaticCache, cache_kind
from llama.kv_cache.contract import query_positions
from llama.model import Transformer
from llama.ops import PLAIN, ScoreMod, attend, softmax_attention
from llama.rope import rotate
from llama.rows import Rows
from llama.testing import (
    CLAIMS,
    SIZES,
    Broken,
    a_row_is_its_text_alone,
    a_token_reads_what_was_given,
    check_cache_kind,
    empty,
    lossless,
)

KINDS = [*kinds(), "window", "paged:60", "rotated:k4v3+2", "h2o:20", "snapkv:30", "criticalkv:20", "cur:13"]
CHECKED = ("paged", "adakv")  # all claims of a kind take a second


@pytest.mark.parametrize("kind", cases(KINDS, *CHECKED))
def test_every_kind_of_ours_keeps_the_contract(kind: str) -> None:
    args = replace(SIZES, kv_cache=kind)
    cache = empty(args)
    lacking = 2 * (not lossless(args)) + cache.whole_prompt
    lacking += not any(isinstance(layer, ScoredCache) for layer in cache.layers)
    assert len(check_cache_kind(kind)) == len(CLAIMS) - lacking


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["static", "int8", "window:20+3", "quest:32"])  # with CHECKED, one of each base
def test_a_row_is_its_text_alone_and_reads_what_was_given(kind: str) -> None:
    assert a_row_is_its_text_alone(replace(SIZES, kv_cache=kind))
    assert a_token_reads_what_was_given(replace(SIZES, kv_cache=kind))


@torch.inference_mode()
def test_a_kind_says_whether_it_allocates_what_was_reserved() -> None:
    for kind in (kind for kind in KINDS if "@" not in kind):
        reserved, other = (KVCache.of(replace(SIZES, kv_cache=kind)) for _ in range(2))
        reserved.reserve(2, 100)
        for cache in (reserved, other):
            cache.update(Rows.at([0], [10]), *torch.zeros(2, 1, 10, SIZES.n_kv_heads, SIZES.head_dim or 0))
        assert (reserved.nbytes > other.nbytes) == other.preallocates, kind


# ---- names -----------------------------------------------------------------------------------------------------------

MINE = """
from llama.kv_cache import StaticCache

class Mine(StaticCache, kind="from a file"):
    def configure(self, params):
        self.params = params
"""


def test_a_file_may_define_kinds_with_parameters_by_layer(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    text = f"int4@1;{file}:from a file:5@0;{file}:from a file"
    assert cache_kind(text) == "int4@1;from a file:5@0;from a file"
    model = tiny_model(n_layers=3)
    model.kv_cache = f"{file}:from a file:7"
    seen: list[str | None] = []
    options: dict[str, Any] = {
        "on_step": lambda step: seen.extend(getattr(layer, "params", None) for layer in step.cache.layers)
    }
    for asked in ({}, {"kv_cache": text}, {}):
        model.generate_tokens([[1, 2]], 1, **asked, **options)
    assert seen == ["7", "7", "7", "5", None, "", "7", "7", "7"]


def test_a_file_that_was_edited_is_run_again(tmp_path: Path) -> None:
    file, model = tmp_path / "edited.py", tiny_model()
    for version in ("1", "2", "2", "1"):
        file.write_text(MINE.replace("from a file", "edited") + f"\n    version = {version}\n")
        model.kv_cache = f"{file}:edited"
        assert vars(type(model.new_cache().layers[0]))["version"] == int(version)


def test_a_file_that_cannot_be_run_is_refused_and_may_be_corrected(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for code in ("import nothing_of_the_sort", "1 / 0", "def", "x = '\0'", "raise KeyboardInterrupt", "exit()"):
        file.write_text(code)
        with pytest.raises(ValueError, match=r"mine\.py cannot be run"):
            cache_kind(f"{file}:mine")
    file.write_text("class Pressed(KeyboardInterrupt): ...\n\n\nraise Pressed")
    with pytest.raises(KeyboardInterrupt):  # a command's own error for a pressed key
        cache_kind(f"{file}:mine")
    file.write_text(MINE)
    assert cache_kind(f"{file}:from a file") == "from a file"
    with pytest.raises(ValueError, match="not a known kind of cache; known are"):
        tiny_model().kv_cache = f"{file}:of no file"


# ---- what is asked of a kind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "window:8+2", "static@0;int4"])
def test_exact_mode_and_a_lossy_kind_exclude_each_other(kind: str) -> None:
    model = tiny_model(kv_cache=kind, head_dim=32)
    with pytest.raises(ValueError, match="drops or rounds keys and values; choose static, concat or paged"):
        model.exact = True
    made_before = model.new_cache()
    model.kv_cache = "static"
    model.exact = True
    for ask in (
        lambda: setattr(model, "kv_cache", kind),
        lambda: model.generate_tokens([[1]], 2, kv_cache=kind),
        lambda: model(torch.tensor([[1]]), cache=made_before),
    ):
        with pytest.raises(ValueError, match="exact mode needs a lossless cache"):
            ask()
    model.kv_cache = "static@0;paged"
    assert model.exact


class Observing(StaticCache, kind="observing"):
    """Records what it observes, and the attention of all queries of each row."""

    def observe(self, attended: Attended) -> None:
        self.seen = attended
        each = [attended.row(row) for row in range(len(attended.rows.starts))]
        self.weights = [one.attention(one.rows.width) for one in each]
        self.before_rope = [one.queries_before_rope() for one in each]


def observed(model: Transformer, tokens: Tensor, *calls: Rows) -> list[Any]:
    """Feed `tokens` in these calls, and return the layers' caches."""
    cache = model.new_cache()
    for rows in calls:
        at = torch.tensor(rows.starts)[:, None] + torch.arange(rows.width)
        model(tokens[torch.arange(len(at))[:, None], at.clamp(max=tokens.shape[1] - 1)], rows, cache=cache)
    return cache.layers


def test_a_kind_observes_if_it_or_a_base_defines_observe() -> None:
    class Other(KVCache.kinds["observing"]):  # type: ignore[misc]
        pass

    assert Observing.observes
    assert Other.observes
    assert not any(KVCache.named(kind).observes for kind in ("static", "int8", "window", "quest"))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([0, 0, 0], [2, 5, 1]),
        ([0, 0, 0], [3, 3, 3]),
        ([6, 6, 6], [2, 5, 1]),
        ([6, 2, 4], [2, 5, 1]),
        ([6, 2, 4], [1] * 3),
    ],
    ids=str,
)
def test_a_kind_observes_each_row_as_if_it_were_alone(starts: list[int], lengths: list[int]) -> None:
    model, tokens = tiny_model(kv_cache="observing"), some_tokens(3, 11)
    prompt = [Rows.at([0] * 3, [6] * 3)] if any(starts) else []
    together = observed(model, tokens, *prompt, Rows.at(starts, lengths))
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        prompt = [Rows.at([0], [6])] if start else []
        alone = observed(model, tokens[row : row + 1], *prompt, Rows.at([start], [length]))
        for ours, theirs in zip(together, alone, strict=True):
            weights = ours.weights[row]
            assert weights.shape == (4, length, start + length)
            torch.testing.assert_close(weights, theirs.weights[0])
            torch.testing.assert_close(weights.sum(-1), torch.ones(4, length, dtype=torch.float64))
            torch.testing.assert_close(ours.before_rope[row], theirs.before_rope[0])
            torch.testing.assert_close(ours.seen.row(row).x, theirs.seen.x)


@torch.inference_mode()
@pytest.mark.parametrize("qk_norm", [False, True])
def test_queries_before_rope_are_those_that_rope_rotates(qk_norm: bool) -> None:
    model, tokens = tiny_model(kv_cache="observing", qk_norm=qk_norm), some_tokens(2, 11)
    for layer in observed(model, tokens, Rows.at([0, 0], [6, 6]), Rows.at([6, 4], [5, 3])):
        for row, (start, length) in enumerate(((6, 5), (4, 3))):
            turned = rotate(layer.before_rope[row], model.rope.at([start], length, torch.device("cpu")))
            torch.testing.assert_close(turned, layer.seen.xq[row : row + 1, :length])


@torch.inference_mode()
def test_attention_of_more_queries_than_a_prompt_has_is_that_of_all() -> None:
    model, tokens = tiny_model(kv_cache="observing"), some_tokens(1, 11)
    for layer in observed(model, tokens, Rows.at([0], [6]), Rows.at([6], [3])):
        for last in (3, 4, 64):
            torch.testing.assert_close(layer.seen.attention(last), layer.weights[0], rtol=0, atol=0)


@torch.inference_mode()
def test_attention_of_several_or_padded_rows_or_of_no_query_is_refused() -> None:
    model, tokens = tiny_model(kv_cache="observing"), some_tokens(2, 11)
    two, padded = observed(model, tokens, Rows.at([0, 0], [3, 3])), observed(model, tokens, Rows.at([0], [3], width=5))
    for layer, last in ((two[0], 1), (padded[0], 1), (two[0], 0)):
        with pytest.raises(ValueError, match=r"take attended.row\(i\) first"):
            layer.seen.attention(last)
    for last in (0, -1):
        with pytest.raises(ValueError, match="ask for 1 or more queries"):
            two[0].seen.row(0).attention(last)


def sharper(xq: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    """Attend with doubled scores, unlike `attention_weights`."""
    return attend(2 * xq, keys, *rest)


@torch.inference_mode()
def test_unknown_attention_cannot_be_observed_unless_it_is_marked() -> None:
    model, tokens, call = tiny_model(kv_cache="observing"), some_tokens(1, 6), Rows.at([0], [6])

    def weights() -> list[Tensor]:
        return [layer.weights[0] for layer in observed(model, tokens, call)]

    expected = weights()
    model.use(PLAIN._replace(name="mine", attend=sharper))
    words = (
        "attend=sharper of the operations 'mine' .* this kind of cache reads .* choose another kind of cache, or mark"
    )
    with pytest.raises(ValueError, match=words):
        weights()
    model.use(PLAIN._replace(name="mine", attend=softmax_attention(lambda *given: attend(*given))))
    assert all(map(torch.equal, weights(), expected))
    model.use(PLAIN)
    model.exact = True
    torch.testing.assert_close(weights(), expected)
    model.exact = False
    model.use(PLAIN._replace(name="mine", attend=sharper))
    model.kv_cache = "looks at queries alone"
    model(tokens, 0)


class Looks(StaticCache, kind="looks at queries alone"):
    """Observes, but does not use attention weights."""

    def observe(self, attended: Attended) -> None:
        self.most = attended.queries_before_rope().amax()


def capped_and_sloped(scores: Tensor, query_positions: Tensor, key_positions: Tensor, layer: int) -> Tensor:
    """Soft-cap and ALiBi, whose slope differs by layer."""
    slopes = 0.5 ** torch.arange(1, scores.shape[1] + 1)[:, None, None]
    return 2 * (scores / 2).tanh() - (1 + layer) * slopes * (query_positions - key_positions)


@torch.inference_mode()
@pytest.mark.parametrize("score_mod", [None, capped_and_sloped])
def test_the_attention_of_the_last_queries_is_that_by_which_they_read_the_values(score_mod: ScoreMod | None) -> None:
    model, tokens = tiny_model(kv_cache="observing"), some_tokens(1, 11)
    model.use(PLAIN._replace(score_mod=score_mod))
    for layer in observed(model, tokens, Rows.at([0], [6]), Rows.at([6], [5])):
        seen = layer.seen
        expected = attend(seen.xq, seen.keys, seen.values, seen.rows, seen.visible, seen.scoring)[0]
        values = seen.values[0].repeat_interleave(2, dim=1)  # (kv_len, n_heads, head_dim)
        for last in range(1, 6):
            read = torch.einsum("hqk,khd->qhd", seen.attention(last), values)
            torch.testing.assert_close(read, expected[-last:])


class WithPositions(Observing, kind="observing with positions"):
    """Reports the positions of its keys, so that all rows have one mask."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        self.positions = range(keys.shape[1])
        return keys, values

    def key_positions(self) -> Tensor:
        return torch.tensor(self.positions)


@torch.inference_mode()
def test_positions_and_masks_that_all_rows_share_are_observed_by_each_row() -> None:
    model, tokens, call = tiny_model(kv_cache="observing"), some_tokens(2, 5), Rows.at([0, 0], [3, 5])
    model.use(PLAIN._replace(score_mod=capped_and_sloped))
    plain = observed(model, tokens, call)
    model.kv_cache = "observing with positions"
    for ours, theirs in zip(observed(model, tokens, call), plain, strict=True):
        torch.testing.assert_close(ours.weights[0][..., :3], theirs.weights[0])
        torch.testing.assert_close(ours.weights[1], theirs.weights[1])


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["static", "concat", "paged:60", "int8", "int4", "kivi", "window:20+3", "observing"])
def test_every_kind_gives_under_a_score_mod_what_no_cache_gives(kind: str) -> None:
    """For a text that the cache stores as it comes, so not in fp8; in chunks, steps and ragged rows."""
    model, tokens = tiny_model(kv_cache=kind, max_seq_len=100), some_tokens(2, 20)
    plain = model.with_kv_caching(False)(tokens)
    model.use(PLAIN._replace(score_mod=capped_and_sloped))
    wanted = model.with_kv_caching(False)(tokens)
    assert not torch.allclose(wanted, plain)
    made = [model(tokens[:, :9], 0), model(tokens[:, 9:10], 9), model(tokens[:, 10:14], 10)]
    torch.testing.assert_close(torch.cat(made, dim=1), wanted[:, :14], rtol=0, atol=FP64_TOLERANCE)
    for starts, width in (([14, 11], 1), ([15, 12], 5)):
        columns = torch.tensor(starts)[:, None] + torch.arange(width)
        rows = torch.arange(2)[:, None]
        torch.testing.assert_close(
            model(tokens[rows, columns], starts), wanted[rows, columns], rtol=0, atol=FP64_TOLERANCE
        )


class ByHead(StaticCache, kind="by head"):
    """Its first KV head sees the last three keys, its second all of them."""

    def _allocate(self, *of: Any) -> Tensor:
        return super()._allocate(*of).zero_()

    def visible(self, rows: Rows, xq: Tensor) -> Tensor:
        keys, queries = torch.arange(rows.end), query_positions(rows, xq.device)
        past = keys <= queries
        seen = torch.stack((past & (keys > queries - 3), past), dim=-3)  # (2, seqlen, kv_len), or of each row
        return seen.expand(len(rows.starts), 2, rows.width, rows.end)


@torch.inference_mode()
def test_heads_of_a_kind_may_see_different_keys() -> None:
    model, tokens = tiny_model(kv_cache="by head"), some_tokens(2, 16)

    def near_in_half_the_heads(scores: Tensor, queries: Tensor, keys: Tensor, layer: int) -> Tensor:
        far = (queries - keys >= 3) & (torch.arange(4)[:, None, None] < 2)
        return scores.masked_fill(far, -torch.inf)

    plain = model.with_kv_caching(False)(tokens)
    model.use(PLAIN._replace(score_mod=near_in_half_the_heads))
    wanted = model.with_kv_caching(False)(tokens)
    assert not torch.allclose(wanted, plain)
    model.use(PLAIN)
    cache, rows = model.new_cache(), torch.arange(2)[:, None]
    made = [model(tokens[:, a:b], a, cache=cache) for a, b in ((0, 9), (9, 10), (10, 14))]
    torch.testing.assert_close(torch.cat(made, dim=1), wanted[:, :14], rtol=0, atol=FP64_TOLERANCE)
    for starts, width in (([14, 11], 1), ([15, 12], 1), ([13, 10], 3)):
        columns = torch.tensor(starts)[:, None] + torch.arange(width)
        ours = model(tokens[rows, columns], starts, cache=cache)
        torch.testing.assert_close(ours, wanted[rows, columns], rtol=0, atol=FP64_TOLERANCE)


def test_limits_of_a_kind_count_what_it_stores() -> None:
    args: dict[str, Any] = {"kv_cache": "window:10+2", "max_seq_len": 16, "max_batch_size": 2}
    model = tiny_model(**args)
    ids, _ = model.generate_tokens([[1, 2, 3]], 60, temperature=0.0)
    assert len(ids[0]) == 60
    with pytest.raises(ValueError, match="max_seq_len=16"):
        model.generate_tokens([[1, 2, 3]], 60, kv_caching=False)
    model.kv_caching = False
    with pytest.raises(ValueError, match="max_seq_len=16"):
        model(some_tokens(1, 17))
    model.kv_caching = True
    with pytest.raises(ValueError, match="3 rows are more than max_batch_size=2"):
        model.stream(Bytes(), [[1]] * 3, 2)  # before it is read


@torch.inference_mode()
def test_a_cache_for_fewer_positions_refuses_the_next_one_also_in_memory_that_it_has() -> None:
    """19 positions end in the middle of a block, a page and a group. A window is bounded by itself."""
    model, tokens = tiny_model(max_seq_len=64), some_tokens(1, 20)
    for kind in sorted({kind.partition(":")[0] for kind in KINDS} - {"window"}):
        cache = model.new_cache(kind, max_seq_len=19)
        model(tokens[:, :18], cache=cache)
        model(tokens[:, 18:19], 18, cache=cache)
        with pytest.raises(ValueError, match="a text of 20 positions goes past max_seq_len=19"):
            model(tokens[:, 19:], 19, cache=cache)


@pytest.mark.parametrize("kind", ["window:20+2@0;window:10+2", "window:10+2@0;static", "window:10+2"])
def test_echoed_log_probabilities_need_every_layer_to_store_the_prompt(kind: str) -> None:
    model = tiny_model(kv_cache="static")
    options: dict[str, Any] = {"kv_cache": kind, "echo": True, "logprobs": True}
    with pytest.raises(ValueError, match=r"the prompt has 13 tokens, .* this cache drops: it holds 12"):
        model.generate_tokens([list(range(13))], 2, **options)
    assert model.generate_tokens([list(range(12))], 2, **options)
    assert model.generate_tokens([list(range(13))], 2, **{**options, "kv_caching": False})
    assert model.generate_tokens([list(range(13))], 2, **{**options, "logprobs": False})


@pytest.mark.parametrize("gives", ["nothing", "another dtype", "an error"])
def test_check_cache_kind_names_the_claim_when_a_kind_raises(gives: str) -> None:
    name = f"odd_{gives.replace(' ', '_')}"

    class Odd(ConcatCache, kind=name):
        def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> Any:
            if gives == "an error":
                raise KeyError("mine")
            keys, values = super().update(rows, xk, xv)
            return None if gives == "nothing" else (keys.bfloat16(), values)

    with pytest.raises(Broken, match="Error during the check of: "):
        check_cache_kind(name)
