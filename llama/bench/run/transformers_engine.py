"""transformers behind the benchmark's protocol, with the weights of our model or those of a GPT-2."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.bench.run.engines import Run, held_of, hooked, weights_bytes
from llama.bench.run.peers import GPT2, check_engine
from llama.checkpoint.export import huggingface_config, huggingface_tensors
from llama.model import Transformer
from llama.request import make_request
from llama.streaming import TextCodec, encode_prompt

_GPT2_OWNERS = ("", "openai-community/", "distilbert/")  # the hub moved them, and caches hold old names and new ones

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


class TransformersEngine:
    """transformers' `generate` as it comes: eager, with its default attention and its default cache.

    `weights` are "given", or those of a GPT-2: "pretrained" or "random".
    """

    max_batch_size = None  # no limit on rows, for the common check of what is asked

    def __init__(self, model: Any, encode: Encode, decode: Decode, args: ModelArgs | None, weights: str) -> None:
        transformers = check_engine("transformers")
        # What a hub's file says of ends and sampling must not end a row early.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.model, self.args, self.weights = model.eval(), args, weights
        self.path = f"transformers {transformers.__version__} eager, {model.config._attn_implementation}"
        self.vocab_size: int = model.config.vocab_size
        self.max_seq_len: int = model.config.max_position_embeddings if args is None else args.max_seq_len
        self.weights_bytes: int | None = weights_bytes(model)
        self.encode, self.decode = encode, decode

    @classmethod
    def of(cls, model: Transformer, tokenizer: TextCodec) -> "TransformersEngine":
        """Return an engine that shares the memory of the model's weights, all but those of wq and wk."""
        transformers = check_engine("transformers")
        # A limit by which nothing is allocated; transformers warns of scaled RoPE where it is a short one.
        length = max(model.args.max_seq_len, 1 << 17)
        config = transformers.AutoConfig.for_model(
            **huggingface_config(model.args) | {"max_position_embeddings": length}
        )
        with torch.device("meta"):
            twin = transformers.AutoModelForCausalLM.from_config(config)
        twin.load_state_dict(huggingface_tensors(model), assign=True)
        # Its frequencies are no part of the weights, so they are still on the meta device.
        twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
        return cls(twin, partial(encode_prompt, tokenizer), tokenizer.decode, model.args, "given")

    @classmethod
    def gpt2(
        cls,
        name: str,
        *,
        seed: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache_dir: Path | None = None,
    ) -> "TransformersEngine":
        """Return the GPT-2 of that name from Hugging Face's local cache, or with random weights where it is not there.

        Nothing is downloaded. `cache_dir` is that cache, where it is not the usual one. Random weights come without a
        vocabulary: `encode` raises ValueError, and `decode` shows the ids.
        """
        if name not in GPT2:
            raise ValueError(f"model={name!r} is not a GPT-2 that is known; there are {', '.join(GPT2)}")
        transformers = check_engine("transformers")
        found = _pretrained_gpt2(transformers, name, cache_dir, dtype)
        if found is not None:
            model, tokenizer = found
            return cls(model.to(device), tokenizer.encode, tokenizer.decode, None, "pretrained")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2[name]))
        return cls(model.to(device, dtype), *_no_text(name), None, "random")

    def run(
        self, prompts: Sequence[Sequence[int]], output_len: int, *, kv_caching: bool, steps: int | None = None
    ) -> Run:
        """Continue every prompt; see `Engine`. Its cache grows as it goes, so `steps` need no room for the rest."""
        make_request(self, kv_caching, prompts, output_len, (), {})  # refuses what cannot be run
        count = min(steps or output_len, output_len)
        run = Run(fed=[], cache_bytes=0, cache_length=0, logits_bytes=0)
        clock = _Clock()
        with self._watched(run, last=count), torch.inference_mode():
            run.started = time.perf_counter()
            ids, mask = _left_padded(prompts, self.model.device)
            asked = {"max_new_tokens": count, "do_sample": False, "use_cache": kv_caching}
            made = self.model.generate(ids, attention_mask=mask, streamer=clock, **asked)
        run.token_times = clock.times[1:]  # the first is the prompt's
        run.ids = made[:, ids.shape[1] :].tolist()
        return run

    def conversation(self, length: int, *, kv_caching: bool) -> "TransformersConversation":
        return TransformersConversation(self.model, kv_caching=kv_caching)

    @contextmanager
    def _watched(self, run: Run, last: int) -> Iterator[None]:
        """Note what the model is really fed and returns; ask the cache once, at the last forward."""

        def before(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            rows, width = (given[0] if given else named["input_ids"]).shape
            assert run.fed is not None
            run.fed.append((rows, width))

        def after(_: object, given: object, output: Any) -> None:
            run.logits_bytes = max(run.logits_bytes or 0, output.logits.untyped_storage().nbytes())
            cache = output.past_key_values
            if cache is not None and len(run.fed or ()) == last:
                run.cache_bytes = _held_bytes(cache)
                run.cache_length = cache.get_seq_length()

        with hooked(self.model, before, after):
            yield


class TransformersConversation:
    """transformers' `generate` with its cache kept from call to call; a text that does not go on is fed anew."""

    def __init__(self, model: Any, *, kv_caching: bool) -> None:
        self._model, self._kv_caching = model, kv_caching
        self._cache: Any = None
        self._held: list[int] = []
        self.fed = 0

    @property
    def cache_bytes(self) -> int:
        return 0 if self._cache is None else _held_bytes(self._cache)

    def feed(self, ids: list[int]) -> int:
        if self._kv_caching and (self._cache is None or held_of(self._held, ids) < len(self._held)):
            self._cache = check_engine("transformers").DynamicCache(config=self._model.config)
        given = torch.tensor([ids], device=self._model.device)
        asked = {"max_new_tokens": 1, "do_sample": False, "use_cache": self._kv_caching}
        with hooked(self._model, self._count, lambda *_: None), torch.inference_mode():
            made = self._model.generate(
                given, attention_mask=torch.ones_like(given), past_key_values=self._cache, **asked
            )
        self._held = ids
        return int(made[0, -1])

    def close(self) -> None:
        self._cache = None

    def _count(self, _: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.fed += (given[0] if given else named["input_ids"]).numel()


def _held_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class _Clock:
    """Notes when transformers hands over the prompt and then each token of all rows, on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _no_text(name: str) -> tuple[Encode, Decode]:
    """Return what stands where there is no vocabulary."""

    def encode(text: str) -> list[int]:
        raise ValueError(
            f"{name} has random weights and no vocabulary, because its files are not in Hugging Face's cache; "
            "leave the text out for random ids"
        )

    return encode, lambda ids: " ".join(["ids", *map(str, ids)])


def _pretrained_gpt2(
    transformers: ModuleType, name: str, cache_dir: Path | None, dtype: torch.dtype
) -> tuple[Any, Any] | None:
    """Return the model and its tokenizer, or None where either is not in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    for owner in _GPT2_OWNERS:
        config = try_to_load_from_cache(owner + name, "config.json", cache_dir=cache_dir)
        if not isinstance(config, str):
            continue
        # By the path of the folder and not by the name, under which transformers may ask the hub for a better file.
        folder = str(Path(config).parent)
        try:
            model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
            return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except OSError:
            continue  # a part of the files: a download that stopped, or was of one file only
    return None


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, (rows, longest). transformers continues at the right end, so the pad is left."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
