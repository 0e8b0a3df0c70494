"""The exercise `eviction`: which positions the kind `h2o` keeps."""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 0.0
MISTAKES = {
    "newest-not-protected": (
        30,
        "The newest half of the budget does not stay by itself",
        "How much attention can a key have received that came in this call?",
    ),
    "newest-only": (
        30,
        "Only the newest tokens are kept: the scores decide nothing",
        "Print which positions stay. Does any of them depend on the scores?",
    ),
    "oldest-protected": (
        30,
        "The first tokens stay by themselves instead of the newest",
        "Scores are in the order of the text. At which end are the newest keys?",
    ),
    "half-rounded-down": (
        10,
        "Of an odd budget the newest have the smaller half",
        "How many of a budget of 7 are the newest? TASK.md says which half is the larger one.",
    ),
    "lowest-kept": (
        40,
        "The keys with the least attention are kept",
        "Print the scores of the keys that stay, and of those that do not.",
    ),
    "last-query-only": (
        30,
        "Only the newest query's attention counts, not that of all queries of the call",
        "A prompt of 20 tokens has 20 queries. How many of them are in your sum?",
    ),
    "averaged-over-queries": (
        20,
        "Attention is divided by the number of queries, so a prompt counts as much as a step",
        "The cache adds the scores of all calls. Compare one call of 20 queries with 20 calls of one.",
    ),
    "groups-mixed": (
        30,
        "Query heads are taken to share another KV head than they do",
        "With 6 query heads and 2 KV heads, which query heads share KV head 0? Print each shape.",
    ),
    "heads-alike": (
        20,
        "All KV heads keep the same keys: each has query heads of its own",
        "Print the positions that each KV head keeps. On which axis are the heads in your scores?",
    ),
    "first-query-head": (
        20,
        "Of the query heads that share a KV head only the first one counts",
        "How many query heads share a KV head, and how many of them change its scores?",
    ),
    "largest-query-head": (
        20,
        "Of the query heads that share a KV head the largest attention counts, not the mean",
        "Which one number does TASK.md make of the query heads that share a KV head?",
    ),
    "protected-for-ever": (
        30,
        "A token that was once among the newest stays for ever: the scores of all calls add up",
        "The cache adds the scores of all calls. What is the sum for a key that is no longer new?",
    ),
    "budget-exceeded": (
        30,
        "More keys than the budget are kept: the newest are part of it",
        "Count the keys of a head that stay, and compare with the budget.",
    ),
    "budget-unused": (
        20,
        "Fewer keys than the budget are kept",
        "Count the keys of a head that stay, and compare with the budget. Is a key chosen twice?",
    ),
}
TEXTS = (("h2o:8", [20], 6), ("h2o:7", [20], 2), ("h2o:0.5", [22, 13], 2), ("h2o:8", [6], 4))


@cache
def _model() -> Any:
    import torch

    from llama.model import ModelArgs, Transformer

    model = Transformer(ModelArgs(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=29, max_seq_len=64))
    stream = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        weight.data.normal_(0, 3 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 1, generator=stream)
    return model.to(torch.float64).eval().requires_grad_(False)


def trials() -> Iterator[tuple[str, Any]]:
    """Feed prompts and then steps, and yield the positions that each head keeps after every call."""
    import torch

    from llama.rows import Rows

    for kind, prompts, steps in TEXTS:
        stream, store = torch.Generator().manual_seed(3), _model().new_cache(kind)
        tokens = torch.randint(29, (len(prompts), max(prompts) + steps), generator=stream)
        for step in range(steps + 1):
            lengths = [1] * len(prompts) if step else prompts
            rows = Rows.at([prompt + step - 1 for prompt in prompts] if step else [0] * len(prompts), lengths)
            fed = torch.stack([tokens[row, start : start + rows.width] for row, start in enumerate(rows.starts)])
            with torch.inference_mode():
                _model()(fed, Rows.at(rows.starts, lengths, prompt_ends=not step), cache=store)
            for index, layer in enumerate(store.layers):
                counts = [count for row in layer._counts for count in row]
                kept = [own.tolist() for own in layer.kept_positions.split(counts)]
                after = f"prompts of {prompts} tokens and {step} steps"
                yield f"{kind}: the positions in each row and head of layer {index} after {after}", kept


def install(*wrong: str) -> None:
    import torch

    from llama.kv_cache import ScoredCache
    from llama.kv_cache.published import H2OCache

    def score(self: Any, attended: Any) -> "Tensor":
        received: Tensor = attended.attention(1)[:, 0] if "last-query-only" in wrong else attended.received()
        received = received / attended.rows.width if "averaged-over-queries" in wrong else received
        heads = self.args.n_kv_heads
        shape = (-1, heads) if "groups-mixed" in wrong else (heads, -1)
        scores = torch.unflatten(received, 0, shape)
        scores = scores.transpose(0, 1) if "groups-mixed" in wrong else scores
        scores = received.expand(heads, -1, -1) if "heads-alike" in wrong else scores
        first, largest = scores[:, 0], scores.amax(1)
        scores = first if "first-query-head" in wrong else largest if "largest-query-head" in wrong else scores.mean(1)
        if "protected-for-ever" in wrong:
            budget = self.budget(attended.rows.end)
            scores[:, -(budget - budget // 2) :] = torch.inf
        return -scores if "lowest-kept" in wrong else scores

    def choose(self: Any, scores: "Tensor", budget: int) -> "Tensor":
        scores, half = scores.clone(), budget - budget // 2
        newest = budget if "newest-only" in wrong else budget // 2 if "half-rounded-down" in wrong else half
        kept = scores[:, :half] if "oldest-protected" in wrong else scores[:, -newest:]
        if "newest-not-protected" not in wrong:
            kept.fill_(torch.inf)
        more = half if "budget-exceeded" in wrong else half - budget if "budget-unused" in wrong else 0
        return ScoredCache.choose(self, scores, budget + more)

    H2OCache.score, H2OCache.choose = score, choose  # type: ignore[method-assign]
