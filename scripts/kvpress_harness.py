"""Compare kinds of cache with kvpress (NVIDIA): the positions kept of a prompt, the next logits, and the bytes.

    python -m venv kvpress-env
    kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5 "transformers<5.3" gguf
    PYTHONPATH=. kvpress-env/bin/python scripts/kvpress_harness.py [--write tests/kv_cache/kvpress.json]

kvpress needs older versions of transformers and fire, so it has an environment of its own. Both libraries get the same
weights and the same prompt, and neither is changed. The models are tiny ones with random weights in float64, where two
scores rarely differ by rounding alone, and the demo model in float32.

The number of a kind is the share of a prompt that it keeps; `compression_ratio` of kvpress is the share that it drops.
A half and a quarter are exact in binary, so kvpress keeps int(n * (1 - ratio)) = int(n * share) keys of n.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    from llama.host import console

    console.quiet_imports()

import kvpress
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from llama import Transformer, cli, load
from llama.args import ModelArgs
from llama.checkpoint.export import huggingface_config, huggingface_tensors
from llama.costs import table
from llama.host.files import check_writable, replace_file
from llama.streaming import encode_prompt
from llama.testing import tiny_model
from llama.untrusted.files import TEXT_LIMIT, read_text


class Unsketched(kvpress.CompactorPress):
    """Compactor with an identity in place of the random sketch: `leverage` is then what the sketch approximates."""

    def score(self, *args: Any) -> Tensor:
        def identity(*shape: int, **options: Any) -> Tensor:
            return torch.eye(*shape[-2:], **options) * shape[-1] ** 0.5

        with mock.patch("torch.randn", identity):
            return super().score(*args)


def finch(ratio: float) -> Any:
    """Return a FINCH that takes the last 64 tokens for the question, without a delimiter, and renumbers no key."""
    press = kvpress.FinchPress(ratio, rerotate_keys=False)
    press.delimiter_token_id, press.window_size = -1, 64
    return press


PRESSES: dict[str, Callable[[float], Any]] = {
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "lagkv": kvpress.LagKVPress,
    "snapkv": kvpress.SnapKVPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "adakv": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "expected-attention": kvpress.ExpectedAttentionPress,
    "tova": kvpress.TOVAPress,
    "chunkkv": lambda ratio: kvpress.ChunkKVPress(kvpress.SnapKVPress(ratio)),
    "criticalkv": lambda ratio: kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio)),
    "finch": finch,
    "cur": kvpress.CURPress,
    "compactor": lambda ratio: Unsketched(ratio, sketch_dimension=128),
}
SHARES = (0.5, 0.25)
NOT_COMPARED = """\
Not compared: `random`, because each library draws its own numbers; `h2o`, because ObservedAttentionPress divides a
key's attention by the number of its queries and keeps no recent keys; `duo-attention`, because DuoAttentionPress does
not choose the heads by the prompt; `streaming-llm`, because it renumbers the keys and StreamingLLMPress does not.
The steps of `tova` are compared with DecodingPress by logits alone. `finch` is compared without the
delimiter and the renumbering of FinchPress, and `compactor` without the random sketch of LeverageScorePress. Equal
tokens tie in the first layer of `knorm`: of a text that repeats tokens, each library may keep another one."""

COMMON = {"vocab_size": 1600, "multiple_of": 16, "max_seq_len": 2048, "rope_theta": 10000.0}
SIZES: list[dict[str, Any]] = [
    {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, **COMMON},
    {"dim": 48, "n_layers": 4, "n_heads": 6, "n_kv_heads": 2, "head_dim": 16, **COMMON},
]
SEEDS = (1, 2)
LENGTH = 300
# LagKV ranks the keys of each part of 128: ranks tie, unless each part keeps the same number, of 1,540 tokens 58 or 21.
# AdaKV's minimum for a head exceeds the 64 newest keys there. ChunkKVPress keeps only whole chunks of 20, as half and
# a quarter of 1,520 are. The half of CriticalKVPress' budget that the scores fill exceeds the 64 newest keys from 512
# tokens on. In NonCausalAttnPress the padding of the last block of 256 receives attention: between the first 8 and the
# last 4 of 524 tokens there is none. The first seed suffices for these kinds: the file stays small.
LONG = 1540
LENGTHS = {"lagkv": LONG, "adakv": LONG, "chunkkv": 1520, "criticalkv": 600, "compactor": 8 + 2 * 256 + 4}
BUDGET, STEPS = 75, 40  # of `tova` and of DecodingPress, which compresses at every step here
LOGITS_STORED = 16
FORMAT = (
    "length: the tokens of the prompt. positions: a line for each layer, with a hexadecimal number for each KV head; "
    f"bit p is 1 if position p is kept. logits: the first {LOGITS_STORED} of the token behind the prompt. steps: of "
    "tova, those of the last of so many steps behind a prompt of as many tokens as the budget."
)


@dataclass
class Kept:
    """The positions that a library keeps of a prompt, by layer and KV head, the next logits, and the bytes before."""

    positions: list[list[list[int]]]
    logits: Tensor
    nbytes: int


@dataclass
class Agreement:
    """How two libraries agree on one kind, over all models that were added."""

    kept: int = 0
    equal: int = 0
    apart: float = 0.0
    from_full: float = 0.0
    their_bytes: int = 0
    our_bytes: int = 0

    def add(self, theirs: Kept, ours: Kept, full_logits: Tensor) -> None:
        for their_layer, our_layer in zip(theirs.positions, ours.positions, strict=True):
            for their_head, our_head in zip(their_layer, our_layer, strict=True):
                self.kept += max(len(their_head), len(our_head))
                self.equal += len(set(their_head) & set(our_head))
        self.apart = max(self.apart, float((theirs.logits - ours.logits).abs().max()))
        self.from_full = max(self.from_full, float((theirs.logits - full_logits).abs().max()))
        self.their_bytes += theirs.nbytes
        self.our_bytes += ours.nbytes

    @property
    def row(self) -> list[str]:
        equal = f"{self.equal:,} of {self.kept:,}"
        return [equal, f"{self.apart:.0e}", f"{self.from_full:.1f}", f"{self.their_bytes:,}", f"{self.our_bytes:,}"]


def main(*, write: str | None = None, demo: int = LONG) -> int:
    """Compare kinds of cache with kvpress; return 1 if positions or logits differ in a tiny model.

    Args:
        write: A file for what kvpress keeps in the tiny models; the tests read it.
        demo: Tokens of the prompt of the demo model, at most; 0 leaves it out.
    """
    if write is not None:
        check_writable(Path(write))
    found: dict[str, Agreement] = {}
    models = [compare_tiny(sizes, seed, found) for sizes in SIZES for seed in SEEDS]
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    if write is not None:
        made_by = "python scripts/kvpress_harness.py --write tests/kv_cache/kvpress.json"
        content = {"made by": made_by, "versions": versions, "format": FORMAT, "models": models}
        replace_file(Path(write), (json.dumps(content, indent=1) + "\n").encode())
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    longer = ", ".join(f"{name} {length:,}" for name, length in LENGTHS.items())
    report(f"Tiny models in float64, prompts of {LENGTH} tokens; {longer}", found)
    if demo:
        report(f"The demo model in float32, a prompt of {demo} tokens or what the kinds above need", compare_demo(demo))
    print(NOT_COMPARED)
    return int(any(agreement.equal < agreement.kept or agreement.apart > 1e-4 for agreement in found.values()))


def report(title: str, found: dict[str, Agreement]) -> None:
    heads = ["kind", "equal positions", "logits apart", "full cache apart", "bytes of kvpress", "bytes here"]
    print(table(title, heads, [[kind, *agreement.row] for kind, agreement in found.items()]))


def compare_demo(length: int) -> dict[str, Agreement]:
    model, tokenizer = load("demo", device="cpu", dtype="fp32")
    text = read_text(Path(__file__).parents[1] / "llama/bench/texts/persuasion.txt", limit=TEXT_LIMIT)
    tokens = torch.tensor([encode_prompt(tokenizer, text)[: length + 1]])
    found: dict[str, Agreement] = {}
    list(compare(model, {name: tokens[:, : LENGTHS.get(name, length) + 1] for name in PRESSES}, found))
    return found


def compare_tiny(sizes: dict[str, Any], seed: int, found: dict[str, Agreement]) -> dict[str, Any]:
    """Compare in one tiny model, and return what kvpress keeps, in the format of the file.

    The prompt repeats no token, because equal tokens have keys of equal norm in the first layer.
    """
    args = ModelArgs(**sizes)
    tokens = torch.randperm(args.vocab_size, generator=torch.Generator().manual_seed(seed))[None]
    lengths = {name: LENGTHS.get(name, LENGTH) for name in PRESSES}
    prompts = {
        name: tokens[:, : length + 1] for name, length in lengths.items() if name not in LENGTHS or seed == SEEDS[0]
    }
    model = tiny_model(args, seed=seed)
    runs = {
        kind: {
            "length": lengths[kind.partition(":")[0]],
            "positions": [" ".join(f"{sum(1 << at for at in head):x}" for head in layer) for layer in kept.positions],
            "logits": " ".join(f"{logit:.5f}" for logit in kept.logits[:LOGITS_STORED]),
        }
        for kind, kept in compare(model, prompts, found)
    }
    logits = " ".join(f"{logit:.5f}" for logit in compare_steps(model, tokens, found)[:LOGITS_STORED])
    return {"sizes": sizes, "seed": seed, "runs": runs, "steps": {"budget": BUDGET, "count": STEPS, "logits": logits}}


@torch.inference_mode()
def compare(model: Transformer, prompts: dict[str, Tensor], found: dict[str, Agreement]) -> Iterator[tuple[str, Kept]]:
    """Add each kind's agreement to `found`; yield the kind and what kvpress keeps.

    prompts: for the name of each kind, a prompt and the token behind it, (1, n + 1).
    """
    hf = of_transformers(model)
    for name, tokens in prompts.items():
        full = prefilled(hf, tokens)
        full_keys = [layer.keys for layer in full.layers]
        full_logits = next_logits(hf, tokens, full)
        for share in SHARES:
            kind, theirs = f"{name}:{share}", of_kvpress(hf, tokens, PRESSES[name](1 - share), full_keys)
            found.setdefault(kind, Agreement()).add(theirs, of_ours(model, tokens, kind), full_logits)
            yield kind, theirs


@torch.inference_mode()
def compare_steps(model: Transformer, tokens: Tensor, found: dict[str, Agreement]) -> Tensor:
    """Add how far the logits of `tova` and of DecodingPress differ at each step; return kvpress' of the last one."""
    hf, cache = of_transformers(model), model.new_cache(f"tova:{BUDGET}")
    press = kvpress.DecodingPress(kvpress.TOVAPress(), compression_interval=1, target_size=BUDGET)
    full, theirs = (prefilled(hf, tokens[:, : BUDGET + 1]) for _ in range(2))
    model(tokens[:, :BUDGET], cache=cache)
    agreement = found.setdefault(f"tova:{BUDGET}, {STEPS} steps", Agreement())
    for end in range(BUDGET + 1, BUDGET + STEPS + 1):
        full_logits = next_logits(hf, tokens[:, :end], full)
        with press(hf):
            logits = next_logits(hf, tokens[:, :end], theirs)
        own = model(tokens[:, end - 1 : end], end - 1, cache=cache)[0, -1]
        agreement.apart = max(agreement.apart, float((logits - own).abs().max()))
        agreement.from_full = max(agreement.from_full, float((logits - full_logits).abs().max()))
    return logits


def of_transformers(model: Transformer) -> Any:
    """Return transformers' model with the same weights."""
    hf = LlamaForCausalLM(LlamaConfig(**huggingface_config(model.args))).to(model.dtype).eval()
    hf.load_state_dict(huggingface_tensors(model))
    return hf


def prefilled(hf: Any, tokens: Tensor, press: Any = None) -> DynamicCache:
    """Return transformers' cache after all tokens except the last, compressed by a press."""
    cache = DynamicCache()
    with nullcontext() if press is None else press(hf):
        hf.model(tokens[:, :-1], past_key_values=cache)
    return cache


def next_logits(hf: Any, tokens: Tensor, cache: DynamicCache) -> Tensor:
    """Return the logits of the last token."""
    place = torch.tensor([tokens.shape[1] - 1])  # by default it would be the number of keys
    logits = hf(tokens[:, -1:], past_key_values=cache, position_ids=place[None], cache_position=place).logits
    return logits[0, -1]


def of_kvpress(hf: Any, tokens: Tensor, press: Any, full_keys: list[Tensor]) -> Kept:
    """Return what a press keeps. full_keys: all keys of each layer, (1, n_kv_heads, n, head_dim)."""
    cache = prefilled(hf, tokens, press)
    nbytes = stored(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    positions = [
        positions_of(layer.keys, keys, getattr(block.self_attn, "masked_key_indices", None))
        for layer, keys, block in zip(cache.layers, full_keys, hf.model.layers, strict=True)
    ]
    return Kept(positions, next_logits(hf, tokens, cache), nbytes)


def positions_of(kept: Tensor, full: Tensor, masked: tuple[Tensor, Tensor, Tensor] | None) -> list[list[int]]:
    """Return the positions of the kept keys in each KV head: a key is found by its bytes, unless it is masked.

    masked: rows, KV heads and positions of keys that are stored and not read.
    """
    unread = set() if masked is None else set(zip(masked[1].tolist(), masked[2].tolist(), strict=True))
    heads = []
    for head, (kept_keys, all_keys) in enumerate(zip(kept[0].numpy(), full[0].numpy(), strict=True)):
        position = {key.tobytes(): at for at, key in enumerate(all_keys)}
        found = [position[key.tobytes()] for key in kept_keys]
        heads.append(sorted(at for at in found if (head, at) not in unread))
    return heads


def of_ours(model: Transformer, tokens: Tensor, kind: str) -> Kept:
    """Return what a kind of cache of this library keeps."""
    cache = model.new_cache(kind)
    model(tokens[:, :-1], cache=cache, logits="last")
    nbytes = stored(tensor for layer in cache.layers for tensor in layer.held().values())
    layers = [(state["kept_positions"], state["counts"][0].tolist()) for state in cache.state()]
    positions = [[head.tolist() for head in kept.split(counts)] for kept, counts in layers]
    logits = model(tokens[:, -1:], tokens.shape[1] - 1, cache=cache)
    return Kept(positions, logits[0, -1], nbytes)


def stored(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory of tensors, which may be views of larger ones."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    cli.main(main)
