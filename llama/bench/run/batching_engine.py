"""Engines that batch requests by themselves: every step computes all rows, and the cache cannot be switched off."""

import time
from abc import abstractmethod
from collections.abc import Iterator

from llama.bench.run.engines import Conversation, Engine, Prompts, Run, check_cached
from llama.request import make_request


class BatchingEngine(Engine):
    """An engine that takes requests and computes them in steps, measured without its prefix cache.

    Its cache grows with the texts, or is a pool; its bytes and those of logits are not shown unless a subclass does.
    """

    name: str  # as a user reads it
    always_cached = True

    @abstractmethod
    def steps(self, prompts: Prompts, output_len: int) -> Iterator[list[list[int]]]:
        """Yield the tokens that each step made, a list for each row: greedy ones, past any end-of-text."""

    def prepare(self, prompts: Prompts) -> None:
        """Build what depends on the sizes of a batch, before the clock starts."""

    def cache_bytes(self) -> int | None:
        """Return the bytes of the cache now, or None if the engine does not show them."""
        return None

    def run(self, prompts: Prompts, output_len: int, *, kv_caching: bool, steps: int | None = None) -> Run:
        """Continue every prompt; see `Engine`. `steps` reserve nothing. Raises ValueError without the cache."""
        check_cached(self.name, kv_caching)
        prompts = make_request(self.args, kv_caching, prompts, output_len, (), {}).prompts
        self.prepare(prompts)
        run = Run(ids=[[] for _ in prompts])
        run.started = time.perf_counter()
        for new in self.steps(prompts, min(steps or output_len, output_len)):
            run.token_times.append(time.perf_counter())
            run.fed.append((sum(map(len, new)), 1 if run.fed else max(map(len, prompts))))
            run.ids = [row + ids for row, ids in zip(run.ids, new, strict=True)]
        run.cache_bytes = self.cache_bytes()
        return run

    def conversation(self, length: int, *, kv_caching: bool) -> Conversation:
        """Raise ValueError: such an engine does not show how many tokens of a text its prefix cache had."""
        raise ValueError(
            f"{self.name} does not show how many tokens of a text it computes; leave it out of --preset chat"
        )
