"""transformers as an engine of the benchmark, with the weights of our model."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from llama.bench.cell import FULL, Cell
from llama.bench.run.engines import (
    Conversation,
    Engine,
    Prompts,
    Run,
    Source,
    cached_prefix,
    hooked,
    needed,
    stored_weight_bytes,
)
from llama.checkpoint.export import huggingface_config, huggingface_tensors
from llama.model import Transformer
from llama.request import make_request
from llama.streaming import TextCodec


class TransformersEngine(Engine):
    """transformers' `generate` with its defaults: eager, its default attention, and for `static` its default cache."""

    @staticmethod
    def package() -> Any:
        with needed("transformers", "transformers"):
            import transformers
        return transformers

    @classmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        return cls(source.build(), source.tokenizer)

    def __init__(self, model: Transformer, tokenizer: TextCodec) -> None:
        """Make an engine that shares the memory of the model's weights, except those of wq and wk."""
        transformers = self.package()
        # This limit allocates nothing; transformers warns of scaled RoPE if it is small.
        length = max(model.args.max_seq_len, 1 << 17)
        config = transformers.AutoConfig.for_model(
            **huggingface_config(model.args) | {"max_position_embeddings": length}
        )
        with torch.device("meta"):
            twin = transformers.AutoModelForCausalLM.from_config(config)
        twin.load_state_dict(huggingface_tensors(model), assign=True)
        # The frequencies of RoPE are no part of the weights, so they are still on the meta device.
        twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
        # The ends and the sampling of a checkpoint's file must not end a row early.
        twin.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.model: Any = twin.eval()
        self.kind = model.args.kv_cache
        attention = config._attn_implementation if self.kind == FULL else "KindCache"
        path = f"transformers {transformers.__version__} eager, {attention}"
        super().__init__(model.args, tokenizer, path=path, weights_bytes=stored_weight_bytes(twin))

    def run(self, prompts: Prompts, output_len: int, *, kv_caching: bool, steps: int | None = None) -> Run:
        """Continue every prompt; see `Engine`. transformers' cache grows with the text; kinds reserve all of it."""
        make_request(self.args, kv_caching, prompts, output_len, (), {})  # refuses what cannot be run
        count = min(steps or output_len, output_len)
        run = Run(cache_bytes=0, cache_length=0, logits_bytes=0)
        clock = _Clock()
        with self._watched(run, last=count), torch.inference_mode():
            run.started = time.perf_counter()
            ids, mask = _left_padded(prompts, self.model.device)
            asked = {"max_new_tokens": count, "do_sample": False, "use_cache": kv_caching}
            cache = self._new_cache(len(ids), ids.shape[1] + output_len) if kv_caching else None
            made = self.model.generate(ids, attention_mask=mask, past_key_values=cache, streamer=clock, **asked)
        run.token_times = clock.times[1:]  # the first is the prompt's
        run.ids = made[:, ids.shape[1] :].tolist()
        return run

    def conversation(self, length: int, *, kv_caching: bool) -> "TransformersConversation":
        """Return an empty text; see `Engine`."""
        return TransformersConversation(self.model, partial(self._new_cache, 1, length) if kv_caching else None)

    def _new_cache(self, rows: int, length: int) -> Any:
        """Return an empty cache of the engine's kind, for so many rows and positions."""
        if self.kind == FULL:
            return self.package().DynamicCache(config=self.model.config)
        from llama.kv_cache.transformers import KindCache  # imports transformers

        return KindCache(self.model, self.kind, rows=rows, length=length, max_seq_len=self.args.max_seq_len)

    @contextmanager
    def _watched(self, run: Run, last: int) -> Iterator[None]:
        """Record what the model is fed and returns, and the bytes of the cache at the last forward."""

        def before(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            rows, width = (given[0] if given else named["input_ids"]).shape
            run.fed.append((rows, width))

        def after(_: object, given: object, output: Any) -> None:
            run.logits_bytes = max(run.logits_bytes or 0, output.logits.untyped_storage().nbytes())
            cache = output.past_key_values
            if cache is not None and len(run.fed) == last:
                run.cache_bytes = _cached_bytes(cache)
                run.cache_length = cache.get_seq_length()

        with hooked(self.model, before, after):
            yield


class TransformersConversation(Conversation):
    """transformers' `generate` with its cache kept between calls; a text that does not continue is fed again."""

    def __init__(self, model: Any, new_cache: Callable[[], Any] | None) -> None:
        self._model, self._new_cache = model, new_cache
        self._cache: Any = None
        self._ids: list[int] = []

    @property
    def cache_bytes(self) -> int:
        return 0 if self._cache is None else _cached_bytes(self._cache)

    def feed(self, ids: list[int]) -> int:
        if self._new_cache and (self._cache is None or cached_prefix(self._ids, ids) < len(self._ids)):
            self._cache = self._new_cache()
        given = torch.tensor([ids], device=self._model.device)
        asked = {"max_new_tokens": 1, "do_sample": False, "use_cache": self._new_cache is not None}
        with hooked(self._model, self._count, lambda *_: None), torch.inference_mode():
            mask = torch.ones_like(given)
            made = self._model.generate(given, attention_mask=mask, past_key_values=self._cache, **asked)
        self._ids = ids
        return int(made[0, -1])

    def close(self) -> None:
        self._cache = None

    def _count(self, _: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.fed += (given[0] if given else named["input_ids"]).numel()


def _cached_bytes(cache: Any) -> int:
    own: int | None = getattr(cache, "nbytes", None)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) if own is None else own


class _Clock:
    """The times at which transformers has the prompt and then each token of all rows on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _left_padded(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, (rows, longest); transformers continues at the right end."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
